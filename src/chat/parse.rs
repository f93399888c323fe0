//! A model's raw text, sorted into reasoning, content and tool calls as it streams.

use serde_json::Value;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    /// A tool call begins; `index` counts from 0.
    ToolCall {
        index: usize,
        id: String,
        name: String,
    },
    /// A fragment of a call's arguments. The fragments of one call concatenate to one valid JSON object.
    Arguments {
        index: usize,
        json: String,
    },
}

/// Sorts streamed text.
pub struct Parser {}

impl Parser {
    /// `tools` are the request's OpenAI tool definitions; without any, no tool call is looked for.
    pub fn new(_in_reasoning: bool, _tools: &[Value]) -> Self {
        todo!()
    }

    pub fn push(&mut self, _text: &str) -> Vec<Delta> {
        todo!()
    }

    pub fn finish(&mut self) -> Vec<Delta> {
        todo!()
    }
}
