//! Images of a conversation: decoded for a model that sees them, or replaced by a sentence.
//!
//! An image that the model cannot see is an error in a new user message. In tool results and earlier messages, such an
//! image is replaced by a sentence, because an error would repeat with every later turn.

use crate::http::{
    ApiError,
    layers::{MemoryPermit, RequestLog},
    models::LoadedModel,
    request::{ChatPrompt, ContentBuilder, ImagePart, ImageSource, ImageUrls, image_urls::ImageDownloads},
};
use base64::{Engine, engine::general_purpose};
use moestro_engine::{Image, ImageProcessor, PlacedImage, place_images};
use moestro_model::error::ImageError;
use serde_json::Value;
use std::sync::Arc;

/// Maximum number of images that a request shows to the model. Older images are replaced by a sentence.
const MAX_IMAGES: usize = 16;
/// Maximum number of tokens of an image with `detail: low`.
const LOW_DETAIL_TOKENS: usize = 256;

const BASE64: general_purpose::GeneralPurpose = general_purpose::GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    general_purpose::GeneralPurposeConfig::new()
        .with_decode_padding_mode(base64::engine::DecodePaddingMode::Indifferent)
        .with_decode_allow_trailing_bits(true),
);

/// Outcome for an image part: the image, or the separator and the sentence that replaces the image. `None` before the
/// part is handled.
type ImageOutcome = Option<Result<Arc<Image>, (&'static str, String)>>;

/// Reason why an image is not shown to a model that reads text only. Completes "the image ...".
const BLIND: &str =
    "cannot be shown, because this model cannot see images; send text, or use a model with a vision tower";

/// Reason why an image is not shown that needs more memory than all requests have. Completes "the image ...".
const TOO_MUCH_MEMORY: &str = "needs more memory than the server has for requests; send a smaller one";

/// Reason why an image is not shown. Completes "the image ...".
pub type NotShown = String;

impl LoadedModel {
    /// Decodes the images of a conversation, in the order of the messages. Images that are not shown are replaced by
    /// sentences. `permit` grows by the bytes of the pixels.
    pub async fn decode_images(
        self: &Arc<Self>,
        permit: &mut MemoryPermit,
        chat: &mut ChatPrompt,
        urls: &Arc<ImageUrls>,
        log: Option<&RequestLog>,
    ) -> Result<Vec<Arc<Image>>, ApiError> {
        let parts = std::mem::take(&mut chat.images);
        if parts.is_empty() {
            return Ok(Vec::new());
        }
        let order = image_indices(&chat.messages);
        let too_many = order.len().saturating_sub(MAX_IMAGES);
        let mut sources: Vec<Option<ImagePart>> = parts.into_iter().map(Some).collect();
        let mut outcomes: Vec<ImageOutcome> = vec![None; sources.len()];
        let mut downloads = ImageDownloads::new(urls.clone());
        for (position, index) in order.iter().enumerate() {
            let Some(part) = sources.get_mut(*index).and_then(Option::take) else { continue };
            let (at, is_new, separator) = (part.at.clone(), part.is_new, part.separator);
            let shown = match self.engine.images() {
                None => Err(BLIND.to_owned()),
                Some(_) if position < too_many => Err(format!("is one of more than {MAX_IMAGES}")),
                Some(processor) => decode(processor.clone(), permit, part, &mut downloads).await?,
            };
            outcomes[*index] = Some(match shown {
                Ok(image) => Ok(image),
                Err(why) if is_new => {
                    return Err(ApiError::invalid(at.clone(), format!("{at}: the image {why}.")));
                }
                Err(why) => {
                    log.inspect(|log| log.add_image_not_shown());
                    tracing::warn!(at, why, "image replaced by a sentence");
                    let sentence = match self.engine.images() {
                        None => "[image not shown: this model cannot see images]".to_owned(),
                        Some(_) => format!("[image not shown: it {why}]"),
                    };
                    Err((separator, sentence))
                }
            });
        }
        chat.messages.iter_mut().for_each(|message| replace_images(message, &outcomes));
        let images: Vec<Arc<Image>> = order.into_iter().filter_map(|index| outcomes[index].clone()?.ok()).collect();
        if let Some(processor) = self.engine.images().filter(|_| !images.is_empty()) {
            let placeholder = self.tokenizer.token(processor.image_token).unwrap_or_default();
            chat.messages.iter_mut().for_each(|message| break_placeholders(message, &placeholder));
        }
        Ok(images)
    }

    /// Replaces the placeholder of each image by as many placeholders as the image has tokens.
    pub fn place_images(
        &self,
        ids: Vec<u32>,
        images: Vec<Arc<Image>>,
    ) -> Result<(Vec<u32>, Vec<PlacedImage>), ApiError> {
        let Some(processor) = self.engine.images().filter(|_| !images.is_empty()) else { return Ok((ids, Vec::new())) };
        let count = images.len();
        place_images(ids, &images, processor.image_token).ok_or_else(|| {
            let text = format!(
                "The prompt does not have one image placeholder for each of its {count} images: a tool or a template \
                 variable contains the placeholder as text, or the chat template leaves images out."
            );
            ApiError::invalid("messages", text)
        })
    }
}

/// Reads and decodes one image. The inner error is the reason why the image is not shown. The outer error ends the
/// request.
async fn decode(
    processor: Arc<ImageProcessor>,
    permit: &mut MemoryPermit,
    part: ImagePart,
    downloads: &mut ImageDownloads,
) -> Result<Result<Arc<Image>, NotShown>, ApiError> {
    let encoded = match part.source {
        ImageSource::Invalid(why) => return Ok(Err(why.to_owned())),
        ImageSource::Base64(text) => {
            let working = text.len();
            permit.run_with(working, move || decode_base64(&text), kept_bytes).await?
        }
        ImageSource::Url(url) => downloads.fetch(url, permit).await?,
    };
    let encoded = match encoded {
        Ok(encoded) => encoded,
        Err(why) => return Ok(Err(why)),
    };
    let encoded_bytes = encoded.capacity();
    // The header is read in a step, because the metadata of a large file takes long.
    let (header_bytes, reader) = (ImageProcessor::header_bytes(&encoded), processor.clone());
    let header = move || (reader.working_bytes(&encoded), encoded);
    let (working, encoded) = match permit.run_with(header_bytes, header, |_| 0).await {
        Err(error) if error.status != 413 => return Err(error),
        Err(_) => return Ok(Err(TOO_MUCH_MEMORY.into())),
        Ok((Ok(working), encoded)) => (working, encoded),
        Ok((Err(error), _)) => return Ok(Err(error.to_string())),
    };
    let max_tokens = part.low_detail.then_some(LOW_DETAIL_TOKENS);
    let step = move || processor.prepare(&encoded, max_tokens);
    let kept = |image: &Result<Arc<Image>, ImageError>| image.as_ref().map_or(0, |image| image.pixels.data.len());
    let image = match permit.run_with(working, step, kept).await {
        // Other requests hold the memory, so the answer is 503. The client may retry.
        Err(error) if error.status != 413 => return Err(error),
        Err(_) => Err(TOO_MUCH_MEMORY.to_owned()),
        Ok(image) => image.map_err(|error| error.to_string()),
    };
    permit.resize(permit.bytes().saturating_sub(encoded_bytes))?;
    Ok(image)
}

fn kept_bytes(encoded: &Result<Vec<u8>, NotShown>) -> usize {
    encoded.as_ref().map_or(0, Vec::capacity)
}

/// Decodes base64, with or without line breaks and padding.
fn decode_base64(text: &str) -> Result<Vec<u8>, NotShown> {
    let bytes = text.len() / 4 * 3;
    if bytes > ImageProcessor::MAX_ENCODED_BYTES {
        return Err(ImageError::Bytes { bytes, max: ImageProcessor::MAX_ENCODED_BYTES }.to_string());
    }
    let decoded = match text.contains(|c: char| c.is_ascii_whitespace()) {
        true => BASE64.decode(text.split_ascii_whitespace().collect::<String>()),
        false => BASE64.decode(text),
    };
    decoded.map_err(|_| "is not valid base64".into())
}

/// The indices of images, in the order in which the template renders them.
fn image_indices(messages: &[Value]) -> Vec<usize> {
    let parts = messages.iter().filter_map(|message| message["content"].as_array()).flatten();
    parts.filter_map(image_index).collect()
}

fn image_index(part: &Value) -> Option<usize> {
    part["image"].as_u64().filter(|_| part["type"] == "image").map(|index| index as usize)
}

/// Replaces images that are not shown by sentences. The template sees the other images as `{"type": "image"}`.
fn replace_images(message: &mut Value, outcomes: &[ImageOutcome]) {
    let Some(parts) = message["content"].as_array() else { return };
    let outcome = |part: &Value| outcomes.get(image_index(part)?)?.as_ref();
    let separator = parts.iter().find_map(|part| Some(outcome(part)?.as_ref().err()?.0)).unwrap_or_default();
    let mut contents = ContentBuilder::new(separator);
    for part in parts {
        match (outcome(part), image_index(part)) {
            (Some(Err((_, sentence))), _) => contents.push_text(sentence),
            (_, Some(index)) => contents.push_image(index),
            _ => contents.push_text(part["text"].as_str().unwrap_or_default()),
        }
    }
    message["content"] = contents.finish();
}

/// Inserts a space into each image placeholder in the text, so that only images become placeholder tokens.
fn break_placeholders(value: &mut Value, placeholder: &str) {
    match value {
        Value::String(text) if !placeholder.is_empty() && text.contains(placeholder) => {
            let (start, end) = placeholder.split_at(placeholder.len() / 2);
            *text = text.replace(placeholder, &format!("{start} {end}"));
        }
        Value::Array(values) => values.iter_mut().for_each(|value| break_placeholders(value, placeholder)),
        Value::Object(fields) => fields.values_mut().for_each(|value| break_placeholders(value, placeholder)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn hidden_images_become_sentences() {
        let message = |parts: Value| json!({"role": "user", "content": parts});
        let (text, image) =
            (|t: &str| json!({"type": "text", "text": t}), |i: usize| json!({"type": "image", "image": i}));
        let shown = Some(Ok(Arc::new(Image::default())));
        let hidden = Some(Err(("+", "[no]".to_owned())));
        let mut all = message(json!([text("a"), image(0), text("b")]));
        replace_images(&mut all, std::slice::from_ref(&hidden));
        assert_eq!(all["content"], "a+[no]+b");
        let mut some = message(json!([image(0), text("b"), image(1)]));
        replace_images(&mut some, &[shown, hidden]);
        assert_eq!(some["content"], json!([image(0), text("b+[no]")]));
    }

    #[test]
    fn base64_may_have_breaks_and_no_padding() {
        for text in ["aGk=", "aGk", "aG\nk=", " aGk=\r\n"] {
            assert_eq!(decode_base64(text).unwrap(), b"hi", "{text:?}");
        }
        assert!(decode_base64("a*b").is_err());
        assert!(decode_base64(&"A".repeat(40 << 20)).unwrap_err().contains("bytes"));
    }

    #[test]
    fn placeholder_in_text_is_broken() {
        let mut message = json!({"content": [{"type": "text", "text": "x<|image_pad|>y"}], "name": "<|image_pad|>"});
        break_placeholders(&mut message, "<|image_pad|>");
        assert!(!message.to_string().contains("<|image_pad|>"), "{message}");
        assert!(message["content"][0]["text"].as_str().unwrap().starts_with('x'));
    }
}
