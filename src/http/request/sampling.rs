//! Checks the numbers that a client sends, and turns them into the engine's. The first value that is wrong is named.

use crate::engine::Sampling;
use crate::http::{
    ModelCard,
    errors::ApiError,
    openai::types::{Common, OneOrMany},
};
use std::ops::RangeInclusive;

/// OpenAI takes 4; clients of llama-server send more.
const MAX_STOPS: usize = 16;

pub const MAX_LOGPROBS: i64 = 20;

/// As many as OpenAI takes.
const MAX_CHOICES: usize = 128;

impl Common {
    /// Refuses what it can without a look at the prompt.
    pub fn check(&self, card: &ModelCard) -> Result<(), ApiError> {
        model(self.model.as_deref(), card)?;
        if self.stream_options.is_some() && !self.streams() {
            return Err(ApiError::invalid("stream_options", "stream_options is only allowed when stream is true."));
        }
        Ok(())
    }

    /// Memory that lasts as long as the answer: the stop strings, with a number for each byte, and the biases of tokens.
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

    /// True if a stream ends with its usage.
    pub fn usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|options| options.include_usage).unwrap_or(false)
    }

    /// The sampling asked for; what is not said comes from `defaults`. `vocab` bounds the ids of `logit_bias`.
    pub fn sampling(&self, defaults: &Sampling, vocab: usize) -> Result<Sampling, ApiError> {
        let repetition = self.repetition_penalty.or(self.repeat_penalty);
        let (presence, frequency) = (self.presence_penalty, self.frequency_penalty);
        let mut sampling = Sampling {
            temperature: number("temperature", self.temperature, 0.0..=2.0, defaults.temperature)?,
            top_p: number("top_p", self.top_p, 0.0..=1.0, defaults.top_p)?,
            top_k: defaults.top_k,
            min_p: number("min_p", self.min_p, 0.0..=1.0, defaults.min_p)?,
            repetition_penalty: number("repetition_penalty", repetition, 0.01..=100.0, defaults.repetition_penalty)?,
            presence_penalty: number("presence_penalty", presence, -2.0..=2.0, defaults.presence_penalty)?,
            frequency_penalty: number("frequency_penalty", frequency, -2.0..=2.0, defaults.frequency_penalty)?,
            logit_bias: defaults.logit_bias.clone(),
            // Any integer is a seed; a negative one keeps its bits.
            seed: self.seed.map(|seed| seed as u64).or(defaults.seed),
        };
        if let Some(top_k) = self.top_k {
            sampling.top_k = match top_k {
                -1 => 0,
                k => usize::try_from(k).map_err(|_| {
                    ApiError::invalid("top_k", format!("top_k is {k}; it must be at least 0, or -1 for no limit."))
                })?,
            };
        }
        if let Some(bias) = &self.logit_bias {
            sampling.logit_bias = bias
                .iter()
                .map(|(id, &bias)| {
                    let param = format!("logit_bias.{id}");
                    let id = id.parse().ok().filter(|&id: &u32| (id as usize) < vocab).ok_or_else(|| {
                        ApiError::invalid(&param, format!("logit_bias: {id} is not a token id below {vocab}."))
                    })?;
                    Ok((id, number(&param, Some(bias), -100.0..=100.0, 0.0)?))
                })
                .collect::<Result<_, ApiError>>()?;
        }
        Ok(sampling)
    }

    /// The stop strings. An empty one is ignored: it would end every answer before it began.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => return Ok(Vec::new()),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        if stops.len() > MAX_STOPS {
            let message = format!("stop has {} strings; {MAX_STOPS} are the most.", stops.len());
            return Err(ApiError::invalid("stop", message));
        }
        Ok(stops.into_iter().filter(|stop| !stop.is_empty()).collect())
    }
}

/// `model` may be absent or any bare word, as llama-server has it: one model is served, and clients are configured with
/// names such as `default`. A name with a slash is a hub id: it must end in this model's name.
pub fn model(asked: Option<&str>, card: &ModelCard) -> Result<(), ApiError> {
    let last = |id: &str| id.rsplit('/').next().unwrap_or(id).to_lowercase();
    match asked {
        Some(asked) if asked.contains('/') && last(asked) != last(&card.id) => {
            Err(ApiError::no_such_model(asked, &card.id))
        }
        _ => Ok(()),
    }
}

/// The number of answers to one prompt.
pub fn choices(n: Option<i64>) -> Result<usize, ApiError> {
    let n = n.unwrap_or(1);
    usize::try_from(n)
        .ok()
        .filter(|n| (1..=MAX_CHOICES).contains(n))
        .ok_or_else(|| ApiError::invalid("n", format!("n is {n}; it must be between 1 and {MAX_CHOICES}.")))
}

/// A count of tokens: at least `least`.
pub fn tokens(param: &'static str, value: Option<i64>, least: i64) -> Result<Option<usize>, ApiError> {
    match value {
        Some(value) if value < least => {
            Err(ApiError::invalid(param, format!("{param} is {value}; it must be at least {least}.")))
        }
        Some(value) => Ok(Some(usize::try_from(value).unwrap_or(usize::MAX))),
        None => Ok(None),
    }
}

/// A number of alternatives.
pub fn alternatives(param: &'static str, value: i64) -> Result<usize, ApiError> {
    usize::try_from(value).ok().filter(|_| value <= MAX_LOGPROBS).ok_or_else(|| {
        ApiError::invalid(param, format!("{param} is {value}; it must be between 0 and {MAX_LOGPROBS}."))
    })
}

/// Ids from outside, checked against the vocabulary.
pub fn ids(param: &str, ids: &[i64], vocab: usize) -> Result<Vec<u32>, ApiError> {
    ids.iter()
        .map(|&id| {
            u32::try_from(id).ok().filter(|&id| (id as usize) < vocab).ok_or_else(|| {
                ApiError::invalid(param, format!("{param}: {id} is not a token id of this model (0 to {}).", vocab - 1))
            })
        })
        .collect()
}

/// The most tokens of an answer: those asked for, or the rest of the context, and never more than that. A prompt
/// that leaves no room is refused.
pub fn room(param: &str, prompt: usize, asked: Option<usize>, context: usize) -> Result<usize, ApiError> {
    let rest = context.saturating_sub(prompt);
    if prompt > context || (rest == 0 && asked != Some(0)) {
        return Err(ApiError::context(prompt, context, param));
    }
    Ok(asked.unwrap_or(rest).min(rest))
}

fn number(param: &str, value: Option<f64>, range: RangeInclusive<f64>, default: f32) -> Result<f32, ApiError> {
    match value {
        None => Ok(default),
        Some(value) if range.contains(&value) => Ok(value as f32),
        Some(value) => {
            let (from, to) = (range.start(), range.end());
            Err(ApiError::invalid(param, format!("{param} is {value}; it must be between {from} and {to}.")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn common(value: Value) -> Common {
        serde_json::from_value(value).unwrap()
    }

    fn card(id: &str) -> ModelCard {
        ModelCard { id: id.into(), created: 0, experts_per_token: None, quantisation: None }
    }

    #[test]
    fn what_is_not_said_comes_from_the_defaults() {
        let defaults = Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, ..Sampling::default() };
        assert_eq!(common(json!({})).sampling(&defaults, 8).unwrap(), defaults);
        let asked = common(json!({"temperature": 0, "top_k": -1, "repeat_penalty": 1.1, "seed": -1}));
        let sampling = asked.sampling(&defaults, 8).unwrap();
        let wanted = Sampling {
            temperature: 0.0,
            top_k: 0,
            repetition_penalty: 1.1,
            seed: Some(u64::MAX),
            top_p: 0.95,
            ..Sampling::default()
        };
        assert_eq!(sampling, wanted);
    }

    #[test]
    fn a_number_out_of_range_is_named() {
        for (body, param) in [
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"temperature": 2.1}), "temperature"),
            (json!({"top_p": 1.5}), "top_p"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"min_p": -1}), "min_p"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
            (json!({"presence_penalty": 3}), "presence_penalty"),
            (json!({"frequency_penalty": -3}), "frequency_penalty"),
            (json!({"logit_bias": {"8": 1}}), "logit_bias.8"),
            (json!({"logit_bias": {"x": 1}}), "logit_bias.x"),
            (json!({"logit_bias": {"7": 101}}), "logit_bias.7"),
        ] {
            let error = common(body).sampling(&Sampling::default(), 8).unwrap_err();
            assert_eq!(error.status, 400);
            assert_eq!(serde_json::to_value(error.body()).unwrap()["error"]["param"], param);
        }
    }

    #[test]
    fn a_bare_word_names_this_model_and_a_hub_id_must() {
        let card = card("Qwen3.5-35B-A3B-4bit");
        for name in [None, Some(""), Some("default"), Some("gpt-4o"), Some("mlx-community/qwen3.5-35B-A3B-4bit")] {
            assert!(model(name, &card).is_ok(), "{name:?}");
        }
        assert_eq!(model(Some("mlx-community/Qwen3.5-122B-A10B-4bit"), &card).unwrap_err().status, 404);
    }

    #[test]
    fn an_answer_gets_what_the_prompt_leaves() {
        assert_eq!(room("messages", 10, None, 16).unwrap(), 6);
        assert_eq!(room("messages", 10, Some(4), 16).unwrap(), 4);
        assert_eq!(room("messages", 10, Some(400), 16).unwrap(), 6);
        assert_eq!(room("messages", 16, Some(0), 16).unwrap(), 0);
        assert!(room("messages", 16, None, 16).is_err());
        assert!(room("messages", 17, Some(0), 16).is_err());
    }

    #[test]
    fn stop_is_one_or_many_but_not_too_many() {
        assert_eq!(common(json!({"stop": "a"})).stops().unwrap(), ["a"]);
        assert_eq!(common(json!({"stop": ["a", "", "b"]})).stops().unwrap(), ["a", "b"]);
        assert!(common(json!({"stop": vec!["a"; 17]})).stops().is_err());
    }
}
