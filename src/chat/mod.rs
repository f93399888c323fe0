//! Text to tokens and back, pure: no model, no network, no clock but the one a template asks for.
//!
//! In: a [`Conversation`] becomes a prompt ([`Template`]) and the prompt ids ([`Tokenizer`]).
//! Out: ids become text ([`Decoder`]), the text is cut at stop strings ([`Stop`]) and sorted into reasoning, content and
//! tool calls ([`parse::Parser`]). The three of them are state machines that take whatever pieces the stream happens to
//! be cut into and give the same text for every cut. An answer that must have a form is led to it, token by token, by a
//! [`grammar::Guide`].

mod bounds;
mod decoder;
pub mod grammar;
mod history;
mod methods;
pub mod numbers;
mod operands;
pub mod parse;
mod pieces;
mod python;
mod stop;
mod template;
mod tokenizer;
pub mod turns;

pub use decoder::Decoder;
pub use stop::{Held, Stop};
pub use template::{Conversation, Template};
pub use tokenizer::Tokenizer;
