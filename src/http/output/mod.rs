//! From engine events to answers: [`generation`] turns events into deltas, [`choices`] queues one generation per
//! choice, and [`renderer`] passes the output to the API's answer format.

mod chat_logprobs;
mod choice_task;
mod choices;
pub mod completion_logprobs;
mod generation;
pub mod renderer;
mod usage;

pub use choices::{ChatParams, Choices};
pub use completion_logprobs::{LogprobsBuilder, token_text};
pub use generation::{AnswerCall, AnswerText, Finished, Generation, Output};
pub use renderer::{Renderer, json};
pub use usage::{AnswerTimings, FinishReason, PromptProgress, PromptTokensDetails, Usage};
