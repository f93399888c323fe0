//! Anthropic's API.

pub mod answer;
pub mod messages;
pub mod request;
