//! Token usage, timings, prompt progress and finish reasons, as OpenAI's API writes them.

use serde::Serialize;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    Length,
    ToolCalls,
    /// Replaces `tool_calls` if the request used the deprecated `functions`.
    FunctionCall,
}

impl FinishReason {
    /// The JSON string.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::FunctionCall => "function_call",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub total_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
    /// Written next to `usage`, not inside it.
    #[serde(skip)]
    pub timings: AnswerTimings,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CompletionTokensDetails {
    pub reasoning_tokens: usize,
}

impl Usage {
    /// Adds the usage of one more choice. `same_prompt`: the choice has the prompt of the choice before it, whose tokens
    /// are already counted.
    pub fn add(&mut self, choice: Self, same_prompt: bool) {
        if !same_prompt {
            self.prompt_tokens += choice.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += choice.prompt_tokens_details.cached_tokens;
        }
        self.completion_tokens += choice.completion_tokens;
        self.completion_tokens_details.reasoning_tokens += choice.completion_tokens_details.reasoning_tokens;
        self.timings.drafted_tokens += choice.timings.drafted_tokens;
        self.timings.accepted_tokens += choice.timings.accepted_tokens;
        self.timings.saved_seconds += choice.timings.saved_seconds;
        self.timings.decode_passes += choice.timings.decode_passes;
        self.timings.decoding_sequences += choice.timings.decoding_sequences;
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// Speculation in one response, and the sequences that decoded at the same time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct AnswerTimings {
    pub drafted_tokens: usize,
    pub accepted_tokens: usize,
    /// Negative if speculation cost time.
    pub saved_seconds: f64,
    pub decode_passes: usize,
    /// Sum over the passes. More than `decode_passes` if other sequences decoded at the same time.
    pub decoding_sequences: usize,
}

impl AnswerTimings {
    /// True if drafts were used or other sequences decoded at the same time.
    pub fn are_worth_reporting(&self) -> bool {
        self.drafted_tokens > 0 || self.decoding_sequences > self.decode_passes
    }
}

/// Evaluated part of the prompt, in llama-server's format.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PromptProgress {
    pub total: usize,
    /// Tokens of `processed` that came from the prompt cache.
    pub cache: usize,
    pub processed: usize,
    /// Milliseconds since the evaluation started.
    pub time_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_of_choices_adds_up() {
        let timings = |saved_seconds| AnswerTimings {
            drafted_tokens: 7,
            accepted_tokens: 3,
            saved_seconds,
            decode_passes: 4,
            decoding_sequences: 6,
        };
        let choice = |saved_seconds| Usage {
            prompt_tokens: 10,
            completion_tokens: 5,
            timings: timings(saved_seconds),
            ..Usage::default()
        };
        let mut sum = Usage::default();
        for (saved_seconds, same_prompt) in [(0.5, false), (-0.25, true), (1.0, false)] {
            sum.add(choice(saved_seconds), same_prompt);
        }
        assert_eq!((sum.prompt_tokens, sum.completion_tokens, sum.total_tokens), (20, 15, 35));
        let total = AnswerTimings {
            drafted_tokens: 21,
            accepted_tokens: 9,
            saved_seconds: 1.25,
            decode_passes: 12,
            decoding_sequences: 18,
        };
        assert_eq!(sum.timings, total);
    }
}
