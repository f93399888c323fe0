//! Pieces of a parsed answer.

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    /// A tool call starts. `index` is the number of earlier calls.
    ToolCall {
        index: usize,
        id: String,
        name: String,
    },
    /// A fragment of a call's arguments. Together, the fragments of one call are a valid JSON object, unless the token
    /// limit cut the call.
    Arguments {
        index: usize,
        json: String,
    },
}

impl Delta {
    /// The delta's text: reasoning, content, a fragment of arguments, or the name of a function.
    pub fn text(&self) -> &str {
        match self {
            Self::Reasoning(text) | Self::Content(text) | Self::Arguments { json: text, .. } => text,
            Self::ToolCall { name, .. } => name,
        }
    }

    /// Appends the delta to `deltas`. If the last delta is of the same kind, the text is appended to that delta.
    pub fn push_to(self, deltas: &mut Vec<Self>) {
        match (deltas.last_mut(), &self) {
            (_, Self::Reasoning(text) | Self::Content(text) | Self::Arguments { json: text, .. })
                if text.is_empty() => {}
            (Some(Self::Reasoning(before)), Self::Reasoning(text))
            | (Some(Self::Content(before)), Self::Content(text)) => before.push_str(text),
            (Some(Self::Arguments { index, json }), Self::Arguments { index: same, json: more }) if index == same => {
                json.push_str(more);
            }
            _ => deltas.push(self),
        }
    }
}
