//! Anthropic's Messages API, translated to and from a generation request.
//!
//! Decisions of this server: without `thinking`, the model does not reason, as in Anthropic's documentation, unless the
//! server was started with `--thinking on`. The signature of a thinking block is not checked. `is_error` of a tool
//! result is ignored, because the text of the result says what failed.

mod client_tools;
mod message_blocks;
pub mod messages;
mod renderer;
mod request;
