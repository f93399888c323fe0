//! The settings of a chat, which `/set` changes.

use crate::config::{self, GenerateConfig, GenerationDefaults};
use std::{
    fmt::{self, Display},
    str::FromStr,
};

/// The names of the settings.
pub const NAMES: [&str; 9] =
    ["temp", "top-p", "top-k", "min-p", "repeat-penalty", "seed", "max-tokens", "thinking", "system"];

/// Options of answers. `None` means the model's default.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AnswerOptions {
    pub sampling: GenerationDefaults,
    pub seed: Option<u64>,
    pub max_tokens: Option<usize>,
    pub thinking: Option<bool>,
}

impl AnswerOptions {
    /// Takes the values of the command-line flags.
    pub fn new(config: &GenerateConfig) -> Self {
        let GenerateConfig { generation, seed, max_tokens, thinking, .. } = config;
        Self { sampling: generation.clone(), seed: *seed, max_tokens: *max_tokens, thinking: *thinking }
    }
}

/// The settings that `/set` changes.
#[derive(Debug, Default)]
pub struct ChatSettings {
    pub answer_options: AnswerOptions,
    pub system: Option<String>,
}

impl ChatSettings {
    /// Changes the named setting, or resets it if no value is given. Returns all settings as text. Without a name,
    /// changes nothing.
    ///
    /// # Errors
    /// The setting is unknown or the value is wrong. In this case nothing changes.
    pub fn set(&mut self, command: &str) -> Result<String, String> {
        let (name, value) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let value = value.trim();
        let options = &mut self.answer_options;
        match name {
            "" => {}
            "temp" => options.sampling.temperature = number(name, value, 0.0, 2.0)?,
            "top-p" => options.sampling.top_p = number(name, value, 0.0, 1.0)?,
            "min-p" => options.sampling.min_p = number(name, value, 0.0, 1.0)?,
            "repeat-penalty" => options.sampling.repetition_penalty = number(name, value, 0.01, 100.0)?,
            "top-k" => options.sampling.top_k = integer(name, value)?,
            "seed" => options.seed = integer(name, value)?,
            "max-tokens" => options.max_tokens = integer(name, value)?,
            "thinking" => {
                options.thinking = match value {
                    "" => None,
                    "on" | "off" => Some(value == "on"),
                    _ => return Err("thinking must be on or off".into()),
                }
            }
            "system" => self.system = (!value.is_empty()).then(|| value.to_owned()),
            _ => {
                let hint = config::suggestion(config::nearest(name, NAMES.into_iter()), "");
                return Err(format!("unknown setting {name}{hint}; /help lists the settings"));
            }
        }
        Ok(self.to_string())
    }
}

impl Display for ChatSettings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn text<T: Display>(value: Option<T>, default: &str) -> String {
            value.map_or(default.into(), |value| value.to_string())
        }
        const MODEL: &str = "the model's default";
        let options = &self.answer_options;
        let values = [
            text(options.sampling.temperature, MODEL),
            text(options.sampling.top_p, MODEL),
            text(options.sampling.top_k, MODEL),
            text(options.sampling.min_p, MODEL),
            text(options.sampling.repetition_penalty, MODEL),
            text(options.seed, "random"),
            text(options.max_tokens, "to the end of the context"),
            text(options.thinking.map(|on| if on { "on" } else { "off" }), MODEL),
            text(self.system.as_deref(), "none"),
        ];
        let lines: Vec<String> = NAMES.iter().zip(values).map(|(name, value)| format!("{name:<15} {value}")).collect();
        write!(out, "{}", lines.join("\n"))
    }
}

fn number(name: &str, value: &str, min: f32, max: f32) -> Result<Option<f32>, String> {
    if value.is_empty() {
        return Ok(None);
    }
    let number = value.parse().ok().filter(|number| (min..=max).contains(number));
    number.map(Some).ok_or_else(|| format!("{name} must be a number from {min} to {max}"))
}

fn integer<T: FromStr>(name: &str, value: &str) -> Result<Option<T>, String> {
    match value {
        "" => Ok(None),
        _ => value.parse().map(Some).map_err(|_| format!("{name} must be a whole number, at least 0")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_changed_and_shown() {
        let mut settings = ChatSettings::default();
        settings.set("temp 0.5").unwrap();
        settings.set("thinking off").unwrap();
        settings.set("system Be brief, please.").unwrap();
        settings.set("seed 7").unwrap();
        let shown = settings.set("max-tokens 9").unwrap();
        for (name, value) in [("temp", "0.5"), ("thinking", "off"), ("system", "Be brief, please."), ("seed", "7")] {
            assert!(shown.contains(&format!("{name:<15} {value}")), "{shown}");
        }
        assert!(settings.set("tepm 1").unwrap_err().contains("did you mean temp?"));
        assert_eq!(settings.set("foo 1").unwrap_err(), "unknown setting foo; /help lists the settings");
        assert!(settings.set("seed").unwrap().contains("random"));
        assert!(settings.set("system").unwrap().contains("none"));
        for wrong in ["temp hot", "top-p 2", "thinking maybe", "max-tokens -1", "frobnicate 1"] {
            assert!(settings.set(wrong).is_err(), "{wrong}");
        }
        assert_eq!(settings.answer_options.sampling.temperature, Some(0.5), "refused values change nothing");
    }
}
