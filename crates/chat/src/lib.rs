//! Text to tokens and back, without model, network or clock (except the clock that a template asks for).
//!
//! Input: a [`Template`] renders a [`Conversation`] to a prompt, and a [`Tokenizer`] encodes the prompt.
//! Output: a [`Decoder`] turns ids into text, [`StopStrings`] cuts the text, and a [`parser::Parser`] splits it into
//! reasoning, content and tool calls. All three are state machines whose result does not depend on how the stream is
//! cut. A [`grammar::TokenConstraint`] says which tokens may come next in an answer that must have a given format.

mod decoder;
pub mod error;
pub mod grammar;
pub mod json_numbers;
mod message_ends;
pub mod parser;
mod stop;
mod template;
mod tokenizer;

pub use decoder::Decoder;
pub use message_ends::{Speaker, message_ends};
pub use stop::{ReleasedText, StopStrings};
pub use template::{Conversation, Template};
pub use tokenizer::Tokenizer;
