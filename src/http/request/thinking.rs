//! Reasoning on or off, and its budget, under the names that clients have for them.
//!
//! | field | |
//! |---|---|
//! | `chat_template_kwargs: {"enable_thinking"}`, `enable_thinking` | on or off; the first one wins over all others |
//! | `thinking: {"type", "budget_tokens"}` | Anthropic's |
//! | `reasoning: {"effort", "max_tokens", "enabled"}` | OpenRouter's, and OpenAI's in Responses |
//! | `reasoning_effort` | `none` is off, the others a budget: see [`effort`] |
//! | `thinking_budget`, `max_thinking_tokens`, `thinking_token_budget` | tokens |
//!
//! A budget in tokens wins over an effort.

use crate::http::{errors::ApiError, openai::types::ChatRequest, request::sampling};

/// Says in `request.enable_thinking` what the other fields mean, and gives the most tokens that reasoning may take.
pub fn thinking(request: &mut ChatRequest) -> Result<Option<usize>, ApiError> {
    let (mut enabled, mut budget) = (None, None);
    for (param, value) in [
        ("thinking_budget", request.thinking_budget),
        ("max_thinking_tokens", request.max_thinking_tokens),
        ("thinking_token_budget", request.thinking_token_budget),
    ] {
        budget = budget.or(sampling::tokens(param, value, 0)?);
    }
    if let Some(thinking) = &request.thinking {
        let kind = thinking.kind.as_deref().unwrap_or("enabled");
        if !["enabled", "adaptive", "disabled"].contains(&kind) {
            let text = format!("thinking.type is `{kind}`; it must be `enabled`, `adaptive` or `disabled`.");
            return Err(ApiError::invalid("thinking.type", text));
        }
        enabled = Some(kind != "disabled");
        budget = budget.or(sampling::tokens("thinking.budget_tokens", thinking.budget_tokens, 0)?);
    }
    let mut efforts = vec![("reasoning_effort", request.reasoning_effort.clone())];
    if let Some(reasoning) = &request.reasoning {
        enabled = enabled.or(reasoning.enabled);
        budget = budget.or(sampling::tokens("reasoning.max_tokens", reasoning.max_tokens, 0)?);
        efforts.push(("reasoning.effort", reasoning.effort.clone()));
    }
    for (param, word) in efforts {
        if let Some(word) = word {
            let (on, most) = effort(param, &word)?;
            enabled = enabled.or(Some(on));
            budget = budget.or(most);
        }
    }
    request.enable_thinking = request.enable_thinking.or(enabled);
    Ok(budget)
}

/// Reasoning on or off, and its tokens at most.
fn effort(param: &str, word: &str) -> Result<(bool, Option<usize>), ApiError> {
    Ok(match word {
        "none" => (false, None),
        "minimal" => (true, Some(256)),
        "low" => (true, Some(1024)),
        "medium" => (true, Some(4096)),
        "high" | "xhigh" | "max" => (true, None),
        other => {
            let words = "`none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`";
            return Err(ApiError::invalid(param, format!("{param} is `{other}`; it must be {words}.")));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(mut fields: Value) -> Result<(Option<bool>, Option<usize>), Value> {
        fields["messages"] = json!([]);
        let mut request: ChatRequest = serde_json::from_value(fields).unwrap();
        let budget = thinking(&mut request).map_err(|error| serde_json::to_value(error.body()).unwrap())?;
        Ok((request.enable_thinking, budget))
    }

    #[test]
    fn every_name_for_it_is_understood() {
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
            assert_eq!(read(fields.clone()), Ok((enabled, budget)), "{fields}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (fields, param) in [
            (json!({"reasoning_effort": "zzz"}), "reasoning_effort"),
            (json!({"reasoning": {"effort": "much"}}), "reasoning.effort"),
            (json!({"thinking": {"type": "perhaps"}}), "thinking.type"),
            (json!({"thinking_budget": -1}), "thinking_budget"),
        ] {
            assert_eq!(read(fields).unwrap_err()["error"]["param"], param);
        }
    }
}
