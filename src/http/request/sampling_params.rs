//! Checks the sampling parameters, stop strings and token counts of a request, and converts them for the engine. An
//! error names the first field with a wrong value.

use crate::http::{
    ApiError,
    layers::RequestLog,
    openai::{CommonFields, OneOrMany},
    quote,
};
use moestro_engine::{ClientId, Sampling};
use serde_json::Value;
use std::ops::RangeInclusive;

/// Maximum number of stop strings. OpenAI allows 4, but clients of llama-server send more.
const MAX_STOPS: usize = 16;

const MAX_LOGPROBS: i64 = 20;

/// Maximum number of choices per prompt, as in OpenAI's API.
const MAX_CHOICES: usize = 128;

impl CommonFields {
    pub fn check(&self) -> Result<(), ApiError> {
        if self.stream_options.is_some() && !self.streams() {
            return Err(ApiError::wrong_value("stream_options", "is only allowed if stream is true."));
        }
        if self.cache_salt.as_deref() == Some("") {
            return Err(ApiError::wrong_value("cache_salt", "is empty; it must have at least one character."));
        }
        Ok(())
    }

    /// Identifies the client of the request with this log, and its user.
    pub fn client(&self, log: &RequestLog) -> ClientId {
        log.client(self.user.as_ref().map(Value::to_string))
    }

    /// Memory in bytes that is in use until the answer ends: copies of the stop strings, the tables that search for
    /// them (one `usize` per byte of a stop string), and the token biases.
    pub fn bytes(&self) -> usize {
        const BIAS: usize = 160;
        let stops = match &self.stop {
            None => 0,
            Some(OneOrMany::One(stop)) => stop.len(),
            Some(OneOrMany::Many(stops)) => stops.iter().map(String::len).sum(),
        };
        stops.saturating_mul(4 + size_of::<usize>()) + self.logit_bias.as_ref().map_or(0, |bias| bias.len() * BIAS)
    }

    pub fn streams(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    /// True if a stream ends with a chunk for the usage.
    pub fn includes_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// The sampling parameters of the request. `defaults` has the values of parameters that the request does not set.
    /// `vocab` limits the token ids in `logit_bias`.
    pub fn sampling(&self, defaults: &Sampling, vocab: usize) -> Result<Sampling, ApiError> {
        let number = |name, value, range, default| in_range([self.parent, name], value, range, default);
        let repetition = match self.repetition_penalty {
            None => ("repeat_penalty", self.repeat_penalty),
            penalty => ("repetition_penalty", penalty),
        };
        let presence = self.presence_penalty;
        let frequency = self.frequency_penalty;
        let mut sampling = Sampling {
            temperature: number("temperature", self.temperature, 0.0..=2.0, defaults.temperature)?,
            top_p: number("top_p", self.top_p, 0.0..=1.0, defaults.top_p)?,
            top_k: defaults.top_k,
            min_p: number("min_p", self.min_p, 0.0..=1.0, defaults.min_p)?,
            repetition_penalty: number(repetition.0, repetition.1, 0.01..=100.0, defaults.repetition_penalty)?,
            presence_penalty: number("presence_penalty", presence, -2.0..=2.0, defaults.presence_penalty)?,
            frequency_penalty: number("frequency_penalty", frequency, -2.0..=2.0, defaults.frequency_penalty)?,
            logit_bias: defaults.logit_bias.clone(),
            // Any integer is a valid seed. A negative seed keeps its bits.
            seed: self.seed.map(|seed| seed as u64).or(defaults.seed),
        };
        if let Some(top_k) = self.top_k {
            sampling.top_k = match top_k {
                -1 => 0,
                k => usize::try_from(k).map_err(|_| {
                    ApiError::wrong_value(
                        [self.parent, "top_k"].concat(),
                        format!("is {k}; it must be at least 0, or -1 for no limit."),
                    )
                })?,
            };
        }
        if let Some(bias) = &self.logit_bias {
            sampling.logit_bias = bias
                .iter()
                .map(|(id, &bias)| {
                    let param = format!("logit_bias.{id}");
                    let id = id.parse().ok().filter(|&id: &u32| (id as usize) < vocab).ok_or_else(|| {
                        ApiError::invalid(
                            &param,
                            format!(
                                "logit_bias: {} is not a token id; it must be an integer below {vocab}.",
                                quote(id)
                            ),
                        )
                    })?;
                    Ok((id, in_range(["", &param], Some(bias), -100.0..=100.0, 0.0)?))
                })
                .collect::<Result<_, ApiError>>()?;
        }
        Ok(sampling)
    }

    /// The stop strings, from the field `param`. An empty string is ignored, because it would end every answer at its
    /// start.
    pub fn stops(&self, param: &str) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => return Ok(Vec::new()),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        if stops.len() > MAX_STOPS {
            return Err(ApiError::wrong_value(
                param,
                format!("has {} strings; at most {MAX_STOPS} are allowed.", stops.len()),
            ));
        }
        Ok(stops.into_iter().filter(|stop| !stop.is_empty()).collect())
    }
}

/// The number of choices per prompt, checked.
pub fn choice_count(n: Option<i64>) -> Result<usize, ApiError> {
    let n = n.unwrap_or(1);
    usize::try_from(n)
        .ok()
        .filter(|n| (1..=MAX_CHOICES).contains(n))
        .ok_or_else(|| ApiError::wrong_value("n", format!("is {n}; it must be between 1 and {MAX_CHOICES}.")))
}

/// A number of tokens, which must be at least `min`.
pub fn token_count(param: &str, value: Option<i64>, min: i64) -> Result<Option<usize>, ApiError> {
    match value {
        Some(value) if value < min => {
            Err(ApiError::wrong_value(param, format!("is {value}; it must be at least {min}.")))
        }
        Some(value) => Ok(Some(usize::try_from(value).unwrap_or(usize::MAX))),
        None => Ok(None),
    }
}

/// Maximum number of tokens of an answer, which must be at least `min`. LM Studio and llama.cpp's clients send -1 for
/// no limit, which overrides the server's default.
pub fn token_limit(param: &str, value: Option<i64>, min: i64) -> Result<Option<usize>, ApiError> {
    if value == Some(-1) { Ok(Some(usize::MAX)) } else { token_count(param, value, min) }
}

/// The number of alternatives to list with each token, checked.
pub fn alternatives(param: &str, value: i64) -> Result<usize, ApiError> {
    usize::try_from(value)
        .ok()
        .filter(|_| value <= MAX_LOGPROBS)
        .ok_or_else(|| ApiError::wrong_value(param, format!("is {value}; it must be between 0 and {MAX_LOGPROBS}.")))
}

/// Token ids of a client, checked against the vocabulary.
pub fn token_ids(param: &str, ids: &[i64], vocab: usize) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|&id| {
            u32::try_from(id).ok().filter(|&id| (id as usize) < vocab).ok_or_else(|| {
                ApiError::invalid(param, format!("{param}: {id} is not a token id of this model (0 to {}).", vocab - 1))
            })
        })
        .collect()
}

/// Refuses a prompt that leaves no room for an answer. `param` names the prompt in errors. Lengths are in tokens.
pub fn check_context(param: &str, prompt: usize, max_tokens: Option<usize>, context: usize) -> Result<(), ApiError> {
    if prompt > context || (prompt == context && max_tokens != Some(0)) {
        return Err(ApiError::over_context(prompt, context, param));
    }
    Ok(())
}

fn in_range(path: [&str; 2], value: Option<f64>, range: RangeInclusive<f64>, default: f32) -> Result<f32, ApiError> {
    match value {
        None => Ok(default),
        Some(value) if range.contains(&value) => Ok(value as f32),
        Some(value) => {
            let from = range.start();
            let to = range.end();
            Err(ApiError::wrong_value(
                path.concat(),
                format!("is {}; it must be between {from} and {to}.", quote(&value.to_string())),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn common(value: Value) -> CommonFields {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn missing_values_come_from_the_defaults() {
        let defaults = Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, ..Sampling::default() };
        assert_eq!(common(json!({})).sampling(&defaults, 8).unwrap(), defaults);
        let request = common(json!({"temperature": 0, "top_k": -1, "repeat_penalty": 1.1, "seed": -1}));
        let sampling = request.sampling(&defaults, 8).unwrap();
        let expected = Sampling {
            temperature: 0.0,
            top_k: 0,
            repetition_penalty: 1.1,
            seed: Some(u64::MAX),
            top_p: 0.95,
            ..Sampling::default()
        };
        assert_eq!(sampling, expected);
    }

    #[test]
    fn minus_one_is_no_token_limit() {
        assert_eq!(token_limit("max_tokens", Some(-1), 1), Ok(Some(usize::MAX)));
        assert_eq!(token_limit("max_tokens", Some(5), 1), Ok(Some(5)));
        assert!(token_limit("max_tokens", Some(-2), 1).is_err());
    }

    #[test]
    fn prompt_without_room_for_answer_is_refused() {
        for (prompt, max_tokens, fits) in [
            (10, None, true),
            (10, Some(4), true),
            (10, Some(400), true),
            (16, Some(0), true),
            (16, None, false),
            (17, Some(0), false),
        ] {
            assert_eq!(check_context("messages", prompt, max_tokens, 16).is_ok(), fits, "{prompt} {max_tokens:?}");
        }
    }

    #[test]
    fn stop_is_a_string_or_a_list() {
        assert_eq!(common(json!({"stop": "a"})).stops("stop").unwrap(), ["a"]);
        assert_eq!(common(json!({"stop": ["a", "", "b"]})).stops("stop").unwrap(), ["a", "b"]);
        assert!(common(json!({"stop": vec!["a"; 17]})).stops("stop").is_err());
    }
}
