//! From engine events to parts of an answer.

pub mod chat_logprobs;
pub mod completion_logprobs;
pub mod generation;
pub mod parts;
