//! Translates the request of any API into one [`GenerationRequest`], and that into the engine's request.
//!
//! Each API translates its own request and names its own fields in errors. The checks that several APIs need are here.
//! A [`GenerationRequest`] does not need a model, so a wrong request is refused before a model is loaded.

pub mod body;
pub mod content_parts;
pub mod continue_final;
pub mod field_check;
pub mod fields;
mod generation_request;
mod image_marker;
pub mod image_urls;
mod images;
pub mod messages;
mod path_id;
mod prepare;
mod prompt;
mod remembered_tools;
pub mod response_format;
pub mod sampling_params;
pub mod thinking;
pub mod tools;

pub use body::ParsedValues;
pub use content_parts::{ImagePart, ImageSource, PartFormat};
pub use continue_final::EndMarker;
pub use fields::FieldTable;
pub use generation_request::{ChatPrompt, GenerationRequest, PromptInput};
pub use image_urls::ImageUrls;
pub use path_id::PathId;
pub use prompt::{EncodedChat, boundaries};
pub use remembered_tools::RememberedTools;
pub use response_format::RequestedFormat;
pub use thinking::Thinking;
