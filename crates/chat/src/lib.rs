//! Text to tokens and back, without model, network or clock (except the clock that a template asks for).
//!
//! Input: a [`Template`] renders a [`Conversation`] of [`Message`]s to a prompt, and a [`Tokenizer`] encodes the prompt.
//! Output: a [`Decoder`] turns ids into text, [`StopStrings`] cuts the text, and a [`parser::Parser`] splits it into
//! reasoning, content and tool calls. All three are state machines whose result does not depend on how the stream is
//! cut. A [`grammar::TokenConstraint`] says which tokens may come next in an answer that must have a given format.
//!
//! | file or folder | what it holds |
//! |---|---|
//! | `message` | a message of a conversation, from any API |
//! | `template` | chat templates, with Python's text functions and limits |
//! | `tokenizer`, `decoder`, `stop` | encoding, and where a long text may be cut; ids to text; stop strings |
//! | `message_ends`, `json_numbers` | ends of messages, for snapshots; JSON numbers of any size |
//! | `json_repair` | huge numbers and half surrogate pairs in JSON, which `serde_json` refuses |
//! | `schema` | references of JSON schemas, the values and parameters that they allow |
//! | `parser` | text to reasoning, content and tool calls |
//! | `grammar` | JSON schemas, regular expressions and Lark grammars to token masks, with limits |
//! | `error` | errors of templates and tokenizers |

mod decoder;
pub mod error;
pub mod grammar;
mod json_numbers;
pub mod json_repair;
mod message;
mod message_ends;
pub mod parser;
mod schema;
mod stop;
mod template;
mod tokenizer;

pub use decoder::Decoder;
pub use message::{Content, Message, Part, Role, ToolCall};
pub use message_ends::{Speaker, message_ends};
pub use stop::{ReleasedText, StopStrings};
pub use template::{Conversation, Template};
pub use tokenizer::Tokenizer;
