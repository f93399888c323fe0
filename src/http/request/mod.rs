//! Translates the request of any API into one [`GenerationRequest`], and that into the engine's request.
//!
//! Messages and Responses requests are translated into a chat request first, so every API is checked by the same code.
//! A [`GenerationRequest`] does not need a model, so a wrong request is refused before a model is loaded.

pub mod body;
pub mod content_parts;
pub mod continue_final;
pub mod fields;
mod generation_request;
pub mod image_urls;
mod images;
pub mod messages;
mod prepare;
mod prompt;
pub mod response_format;
pub mod sampling_params;
pub mod thinking;
pub mod tools;

pub use content_parts::{ContentBuilder, ImagePart, ImageSource, PartFormat};
pub use continue_final::EndMarker;
pub use fields::FieldTable;
pub use generation_request::{ChatPrompt, FieldNames, GenerationRequest, PromptInput};
pub use image_urls::ImageUrls;
pub use prompt::boundaries;
use response_format::RequestedFormat;
pub use thinking::Thinking;
