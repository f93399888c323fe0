//! From a body to an engine request.

pub mod body;
pub mod continue_final;
pub mod conversation;
pub mod fields;
pub mod messages;
pub mod response_format;
pub mod sampling;
pub mod thinking;
