//! From engine events to answers: [`generation`] turns events into deltas, [`choices`] queues one generation per
//! choice, and [`renderer`] passes the output to the API's answer format.

pub mod chat_logprobs;
pub mod choice_task;
pub mod choices;
pub mod completion_logprobs;
pub mod generation;
pub mod renderer;
pub mod usage;
