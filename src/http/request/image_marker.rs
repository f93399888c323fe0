//! Distinguishes the images of a rendered prompt from text that contains the image placeholder.
//!
//! Any string or key of messages, tools and template variables may be in the prompt, so texts are changed only after they
//! are rendered. The template of a prompt with images has a random marker where its source has the placeholder. All
//! placeholders of the rendered prompt are therefore text. A template that builds the placeholder from other texts is not
//! changed: then texts with the placeholder are refused.

use crate::http::layers::unique_id;
use moestro_chat::{Template, error::ChatError};

/// Marker of the images of a prompt.
pub struct ImageMarker {
    text: String,
    /// The token that stands for an image in the prompt.
    placeholder: String,
}

impl ImageMarker {
    pub fn new(placeholder: String) -> Self {
        Self { text: format!("image-{}", unique_id()), placeholder }
    }

    /// The template that writes the marker for each image.
    pub fn template(&self, template: &Template) -> Result<Template, ChatError> {
        template.replace(&self.placeholder, &self.text)
    }

    /// Inserts a space into each placeholder of a prompt, then writes a placeholder for each marker.
    pub fn write_placeholders(&self, prompt: &str) -> String {
        let Self { text, placeholder } = self;
        let middle = placeholder.char_indices().nth(placeholder.chars().count() / 2).map_or(0, |(at, _)| at);
        let (start, end) = placeholder.split_at(middle);
        prompt.replace(placeholder, &format!("{start} {end}")).replace(text, placeholder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_markers_become_placeholders() {
        for (placeholder, broken) in [("<|image_pad|>", "<|imag e_pad|>"), ("<｜｜>", "<｜ ｜>")] {
            let marker = ImageMarker::new(placeholder.to_owned());
            let prompt = format!("{placeholder} <{} {placeholder}{}", marker.text, marker.text);
            let expected = format!("{broken} <{placeholder} {broken}{placeholder}");
            assert_eq!(marker.write_placeholders(&prompt), expected);
        }
    }
}
