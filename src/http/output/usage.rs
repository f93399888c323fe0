//! Token usage, timings, prompt progress and finish reasons, as OpenAI's API writes them.

use serde::Serialize;

/// Reason for the end of an answer.
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
    /// Name of the reason in JSON.
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
    /// Written next to `usage` in a response, not inside `usage`.
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
    /// Adds the usage of one more choice. `same_prompt` is true if the choice has the same prompt as the choice before
    /// it. The tokens of that prompt are already counted.
    pub fn add(&mut self, choice: Self, same_prompt: bool) {
        if !same_prompt {
            self.prompt_tokens += choice.prompt_tokens;
            self.prompt_tokens_details.cached_tokens += choice.prompt_tokens_details.cached_tokens;
        }
        self.completion_tokens += choice.completion_tokens;
        self.completion_tokens_details.reasoning_tokens += choice.completion_tokens_details.reasoning_tokens;
        self.timings.add(choice.timings);
        self.total_tokens = self.prompt_tokens + self.completion_tokens;
    }
}

/// Times of one response. The names that end with `_n`, `_ms` and `_per_second` are llama-server's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct AnswerTimings {
    /// Number of prompt tokens from the prompt cache.
    pub cache_n: usize,
    /// Number of prompt tokens that were evaluated.
    pub prompt_n: usize,
    pub prompt_ms: f64,
    pub prompt_per_token_ms: f64,
    pub prompt_per_second: f64,
    /// Number of generated tokens.
    pub predicted_n: usize,
    pub predicted_ms: f64,
    pub predicted_per_token_ms: f64,
    pub predicted_per_second: f64,
    pub drafted_tokens: usize,
    pub accepted_tokens: usize,
    /// Time that speculation saved. Negative if speculation cost time.
    pub saved_seconds: f64,
    pub decode_passes: usize,
    /// Number of sequences in a decoding pass, summed over the passes. Equals `decode_passes` if no other sequence
    /// decoded at the same time.
    pub decoding_sequences: usize,
}

impl AnswerTimings {
    fn add(&mut self, choice: Self) {
        let per_second = |count: usize, ms: f64| if ms > 0.0 { count as f64 * 1e3 / ms } else { 0.0 };
        let per_token_ms = |count: usize, ms: f64| if count > 0 { ms / count as f64 } else { 0.0 };
        self.cache_n += choice.cache_n;
        self.prompt_n += choice.prompt_n;
        self.prompt_ms += choice.prompt_ms;
        self.prompt_per_token_ms = per_token_ms(self.prompt_n, self.prompt_ms);
        self.prompt_per_second = per_second(self.prompt_n, self.prompt_ms);
        self.predicted_n += choice.predicted_n;
        self.predicted_ms += choice.predicted_ms;
        self.predicted_per_token_ms = per_token_ms(self.predicted_n, self.predicted_ms);
        self.predicted_per_second = per_second(self.predicted_n, self.predicted_ms);
        self.drafted_tokens += choice.drafted_tokens;
        self.accepted_tokens += choice.accepted_tokens;
        self.saved_seconds += choice.saved_seconds;
        self.decode_passes += choice.decode_passes;
        self.decoding_sequences += choice.decoding_sequences;
    }
}

/// Evaluated part of the prompt, in llama-server's format.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct PromptProgress {
    pub total: usize,
    /// Number of tokens of `processed` that came from the prompt cache.
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
            cache_n: 1,
            prompt_n: 9,
            prompt_ms: 3.0,
            predicted_n: 5,
            predicted_ms: 10.0,
            drafted_tokens: 7,
            accepted_tokens: 3,
            saved_seconds,
            decode_passes: 4,
            decoding_sequences: 6,
            ..AnswerTimings::default()
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
            cache_n: 3,
            prompt_n: 27,
            prompt_ms: 9.0,
            prompt_per_token_ms: 9.0 / 27.0,
            prompt_per_second: 3000.0,
            predicted_n: 15,
            predicted_ms: 30.0,
            predicted_per_token_ms: 2.0,
            predicted_per_second: 500.0,
            drafted_tokens: 21,
            accepted_tokens: 9,
            saved_seconds: 1.25,
            decode_passes: 12,
            decoding_sequences: 18,
        };
        assert_eq!(sum.timings, total);
    }
}
