//! OpenAI's APIs: chat completions, completions, responses, and the list of models.

pub mod chat;
pub mod chunks;
pub mod completions;
pub mod models;
pub mod responses;
pub mod types;
