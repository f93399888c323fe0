//! Reasoning: whether it is enabled, and its token budget. Both are read from all the fields that clients use for
//! reasoning.
//!
//! | field | meaning |
//! |---|---|
//! | `chat_template_kwargs: {"enable_thinking"}` | on or off; overrides all other fields |
//! | `enable_thinking` | on or off; overrides the fields below |
//! | `thinking: {"type", "budget_tokens"}` | Anthropic's field |
//! | `reasoning: {"effort", "max_tokens", "enabled"}` | OpenRouter's field, which OpenAI's Responses also has |
//! | `reasoning_effort` | `none` is off; the other values are on, some with a budget, see [`effort`] |
//! | `thinking_budget`, `max_thinking_tokens`, `thinking_token_budget` | maximum number of tokens of reasoning |
//!
//! A budget in tokens overrides an effort.

use crate::http::{ApiError, openai::ChatRequest, request::sampling_params as params};

/// The reasoning settings of a request.
#[derive(Debug, Default, PartialEq)]
pub struct Thinking {
    /// Value of `enable_thinking`. If the request does not set it, the value that the other fields imply.
    pub enabled: Option<bool>,
    /// Maximum number of tokens of reasoning.
    pub budget: Option<usize>,
}

impl Thinking {
    /// The settings of a chat request.
    pub fn of(request: &ChatRequest) -> Result<Self, ApiError> {
        let mut enabled = request.enable_thinking;
        let mut budget = None;
        for (param, value) in [
            ("thinking_budget", request.thinking_budget),
            ("max_thinking_tokens", request.max_thinking_tokens),
            ("thinking_token_budget", request.thinking_token_budget),
        ] {
            budget = budget.or(params::token_count(param, value, 0)?);
        }
        if let Some(thinking) = &request.thinking {
            let kind = thinking.kind.as_deref().unwrap_or("enabled");
            if !["enabled", "adaptive", "disabled"].contains(&kind) {
                return Err(ApiError::not_allowed("thinking.type", kind, "`enabled`, `adaptive` or `disabled`"));
            }
            enabled = enabled.or(Some(kind != "disabled"));
            budget = budget.or(params::token_count("thinking.budget_tokens", thinking.budget_tokens, 0)?);
        }
        let mut efforts = vec![("reasoning_effort", request.reasoning_effort.as_deref())];
        if let Some(reasoning) = &request.reasoning {
            enabled = enabled.or(reasoning.enabled);
            budget = budget.or(params::token_count("reasoning.max_tokens", reasoning.max_tokens, 0)?);
            efforts.push(("reasoning.effort", reasoning.effort.as_deref()));
        }
        for (param, word) in efforts {
            if let Some(word) = word {
                let effort = effort(param, word)?;
                enabled = enabled.or(effort.enabled);
                budget = budget.or(effort.budget);
            }
        }
        Ok(Self { enabled, budget })
    }
}

/// The settings of an effort in the field `param`.
pub fn effort(param: &str, word: &str) -> Result<Thinking, ApiError> {
    let (enabled, budget) = match word {
        "none" => (false, None),
        "minimal" => (true, Some(256)),
        "low" => (true, Some(1024)),
        "medium" => (true, Some(4096)),
        "high" | "xhigh" | "max" => (true, None),
        other => {
            let words = "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`";
            return Err(ApiError::not_allowed(param, other, words));
        }
    };
    Ok(Thinking { enabled: Some(enabled), budget })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn thinking(mut fields: Value) -> Result<Thinking, Value> {
        fields["messages"] = json!([]);
        let request: ChatRequest = serde_json::from_value(fields).unwrap();
        Thinking::of(&request).map_err(|error| error.body())
    }

    #[test]
    fn all_reasoning_fields_are_read() {
        for (fields, enabled, budget) in [
            (json!({}), None, None),
            (json!({"reasoning_effort": "none"}), Some(false), None),
            (json!({"reasoning_effort": "minimal"}), Some(true), Some(256)),
            (json!({"reasoning_effort": "low"}), Some(true), Some(1024)),
            (json!({"reasoning_effort": "xhigh"}), Some(true), None),
            (json!({"reasoning_effort": "max"}), Some(true), None),
            (json!({"reasoning": {"effort": "medium"}}), Some(true), Some(4096)),
            (json!({"reasoning": {"max_tokens": 9, "effort": null}}), None, Some(9)),
            (json!({"thinking": {"type": "enabled", "budget_tokens": 7}}), Some(true), Some(7)),
            (json!({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}), Some(false), Some(1024)),
            (json!({"thinking_budget": 5, "reasoning_effort": "low"}), Some(true), Some(5)),
            (json!({"max_thinking_tokens": 0}), None, Some(0)),
            (json!({"enable_thinking": false, "reasoning_effort": "high"}), Some(false), None),
        ] {
            assert_eq!(thinking(fields.clone()), Ok(Thinking { enabled, budget }), "{fields}");
        }
    }
}
