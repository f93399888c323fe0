//! `moestro run`: a chat on the terminal. Ctrl-C interrupts an answer, Ctrl-D ends the chat.

use super::{
    chat_input::{LineEditor, LineEvent},
    generate,
    local_model::{AnswerOptions, LocalModel, TerminalAnswer, message, timings_line},
};
use crate::{
    config::{self, GenerateConfig},
    engine::Image,
    error::CommandError,
};
use serde_json::{Value, json};
use std::{
    io::{self, IsTerminal},
    sync::Arc,
};

const HELP: &str = "\
/set                   show the settings; /set NAME VALUE changes temp, top-p, top-k, min-p, repeat-penalty, seed,
                       max-tokens, thinking (on, off) or system; /set NAME resets seed, max-tokens, thinking or system
/image PATH            show the model a picture together with the next text
/clear                 delete the conversation
/help, /bye            show this help, end the chat
\"\"\"                    starts and ends a text of several lines; a line that ends in \\ continues on the next line
Up, Down, Ctrl-R       earlier texts, also of earlier chats; a line that starts with a space is not saved
Ctrl-C                 interrupts an answer, or discards the line
Ctrl-D                 ends the chat; so does pressing Ctrl-C twice";

/// Completions of the Tab key.
const WORDS: [&str; 14] = [
    "/set ",
    "/set temp ",
    "/set top-p ",
    "/set top-k ",
    "/set min-p ",
    "/set repeat-penalty ",
    "/set seed ",
    "/set max-tokens ",
    "/set thinking ",
    "/set system ",
    "/image ",
    "/clear",
    "/help",
    "/bye",
];

/// Answers the prompt once if there is one, else starts a chat.
pub fn run(config: &GenerateConfig) -> Result<(), CommandError> {
    let local = LocalModel::load(config)?;
    match config.prompt {
        Some(_) => generate::answer_once(&local, config)?,
        None => {
            let mut chat = ChatSession::new(&local, config)?;
            chat.run()?;
        }
    }
    local.unload()
}

struct ChatSession<'a> {
    local: &'a LocalModel,
    settings: ChatSettings,
    messages: Vec<Value>,
    /// The images of the messages, and those of the next message.
    images: Vec<Arc<Image>>,
    next_images: Vec<Arc<Image>>,
    runtime: tokio::runtime::Runtime,
}

impl<'a> ChatSession<'a> {
    fn new(local: &'a LocalModel, config: &GenerateConfig) -> Result<Self, CommandError> {
        let settings = ChatSettings { answer_options: local.answer_options(config), system: config.system.clone() };
        let (messages, images, next_images) = Default::default();
        Ok(Self { local, settings, messages, images, next_images, runtime: generate::runtime()? })
    }

    fn run(&mut self) -> Result<(), CommandError> {
        println!("{}: /help shows the commands", self.local.checkpoint.name);
        let (mut input, mut twice) = (LineEditor::new(&WORDS)?, false);
        loop {
            let text = match input.read()? {
                LineEvent::Text(text) => text,
                LineEvent::Interrupted if !twice => {
                    twice = true;
                    print_dimmed("Ctrl-D ends the chat; so does Ctrl-C again");
                    continue;
                }
                LineEvent::Interrupted | LineEvent::End => return Ok(()),
            };
            twice = false;
            match command(&text) {
                _ if text.trim().is_empty() => {}
                Some(("bye" | "exit" | "quit", _)) => return Ok(()),
                Some(("clear", _)) => {
                    self.messages.clear();
                    self.images.clear();
                    self.next_images.clear();
                }
                Some(("image", path)) => println!("{}", self.add_image(path).unwrap_or_else(|why| why)),
                Some(("set", rest)) => println!("{}", self.settings.set(rest).unwrap_or_else(|why| why)),
                Some(_) => println!("{HELP}"),
                None => self.send(&text)?,
            }
        }
    }

    /// Reads an image for the next message. Returns a line for the user.
    fn add_image(&mut self, path: &str) -> Result<String, String> {
        if path.is_empty() {
            return Err("/image needs the path of a PNG, JPEG, WebP or GIF file".into());
        }
        let image = self.local.read_image(&config::expand(path))?;
        let tokens = image.tokens();
        self.next_images.push(image);
        Ok(format!("{path}: {tokens} tokens; the next text goes with it"))
    }

    /// Sends a message to the model. A failed answer does not end the chat.
    fn send(&mut self, text: &str) -> Result<(), CommandError> {
        let before = self.images.len();
        let mut question = message("user", text);
        if !self.next_images.is_empty() {
            let images = self.next_images.iter().map(|_| json!({"type": "image"}));
            let parts: Vec<Value> = images.chain([json!({"type": "text", "text": text})]).collect();
            question["content"] = parts.into();
            self.images.append(&mut self.next_images);
        }
        self.messages.push(question);
        let system = self.settings.system.iter().map(|text| message("system", text));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        let answer = self.local.answer(&messages, &self.images, &self.settings.answer_options, interrupted());
        let answer = self.runtime.block_on(answer);
        let TerminalAnswer { content, reasoning, end } = match answer {
            Err(CommandError::Engine(error)) => {
                self.messages.pop();
                self.images.truncate(before);
                eprintln!("moestro: {error}");
                return Ok(());
            }
            other => other?,
        };
        match end {
            Some((_, timings)) => print_dimmed(&timings_line(&timings)),
            None => print_dimmed("interrupted"),
        }
        let mut reply = message("assistant", &content);
        reply["reasoning_content"] = reasoning.into();
        self.messages.push(reply);
        Ok(())
    }
}

/// Parses `/name rest`. A path that starts with a slash is not a command.
fn command(text: &str) -> Option<(&str, &str)> {
    let line = text.trim().strip_prefix('/')?;
    let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
    let known = ["bye", "exit", "quit", "clear", "set", "image", "help", "?"].contains(&name);
    (known || name.chars().all(char::is_alphabetic) && rest.is_empty()).then_some((name, rest.trim()))
}

/// The settings of `/set`.
struct ChatSettings {
    answer_options: AnswerOptions,
    system: Option<String>,
}

impl ChatSettings {
    /// Changes one setting, if one is named, and returns all settings as text.
    fn set(&mut self, command: &str) -> Result<String, String> {
        let (name, value) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let (value, sampling) = (value.trim(), &mut self.answer_options.sampling);
        match name {
            "" => {}
            "temp" => sampling.temperature = number(name, value, 0.0, 2.0)?,
            "top-p" => sampling.top_p = number(name, value, 0.0, 1.0)?,
            "min-p" => sampling.min_p = number(name, value, 0.0, 1.0)?,
            "repeat-penalty" => sampling.repetition_penalty = number(name, value, 0.01, 100.0)?,
            "top-k" => sampling.top_k = integer(name, value)?.unwrap_or(0),
            "seed" => sampling.seed = integer(name, value)?,
            "max-tokens" => self.answer_options.max_tokens = integer(name, value)?,
            "thinking" => {
                self.answer_options.thinking = match value {
                    "on" => Some(true),
                    "off" => Some(false),
                    "" => None,
                    _ => return Err("thinking must be on or off".into()),
                }
            }
            "system" => self.system = (!value.is_empty()).then(|| value.to_owned()),
            _ => {
                return Err(format!(
                    "unknown setting {name} (did you mean {}?); /help lists the settings",
                    nearest(name)
                ));
            }
        }
        Ok(self.to_string())
    }
}

impl std::fmt::Display for ChatSettings {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let AnswerOptions { sampling, max_tokens, thinking } = &self.answer_options;
        let or = |value: Option<String>| value.unwrap_or_else(|| "the model's default".into());
        write!(out, "temp {}, top-p {}, top-k {}, ", sampling.temperature, sampling.top_p, sampling.top_k)?;
        write!(out, "min-p {}, repeat-penalty {}, ", sampling.min_p, sampling.repetition_penalty)?;
        let seed = sampling.seed.map_or("random".into(), |seed| seed.to_string());
        let max = max_tokens.map_or("unlimited".into(), |max| max.to_string());
        let thinking = or(thinking.map(|on| if on { "on" } else { "off" }.into()));
        write!(out, "seed {seed}, max-tokens {max}, thinking {thinking}, ")?;
        write!(out, "system {}", self.system.as_deref().unwrap_or("none"))
    }
}

/// The setting with the most similar name.
fn nearest(name: &str) -> &'static str {
    let names =
        WORDS.iter().filter_map(|word| word.strip_prefix("/set ")).map(str::trim).filter(|known| !known.is_empty());
    config::nearest(name, names).map_or("", |(_, near)| near)
}

fn number(name: &str, value: &str, min: f32, max: f32) -> Result<f32, String> {
    let number = value.parse().ok().filter(|number| (min..=max).contains(number));
    number.ok_or_else(|| format!("{name} must be a number from {min} to {max}"))
}

fn integer<T: std::str::FromStr>(name: &str, value: &str) -> Result<Option<T>, String> {
    match value {
        "" => Ok(None),
        _ => value.parse().map(Some).map_err(|_| format!("{name} must be a whole number, at least 0")),
    }
}

/// Waits for Ctrl-C.
async fn interrupted() {
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending().await
    }
}

fn print_dimmed(text: &str) {
    if io::stderr().is_terminal() { eprintln!("\x1b[2m{text}\x1b[0m") } else { eprintln!("{text}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Sampling;

    #[test]
    fn path_is_not_a_command() {
        assert_eq!(command("/set temp 0"), Some(("set", "temp 0")));
        assert_eq!(command(" /bye "), Some(("bye", "")));
        assert_eq!(command("/hlep"), Some(("hlep", "")));
        assert_eq!(command("/etc/passwd"), None);
        assert_eq!(command("/usr is large"), None);
        assert_eq!(command("/image ~/a b.png"), Some(("image", "~/a b.png")));
        assert_eq!(command("hello /bye"), None);
    }

    #[test]
    fn settings_are_changed_and_shown() {
        let answer_options = AnswerOptions { sampling: Sampling::default(), max_tokens: None, thinking: None };
        let mut settings = ChatSettings { answer_options, system: None };
        settings.set("temp 0.5").unwrap();
        settings.set("thinking off").unwrap();
        settings.set("system Be brief, please.").unwrap();
        settings.set("seed 7").unwrap();
        let shown = settings.set("max-tokens 9").unwrap();
        for part in ["temp 0.5", "thinking off", "system Be brief, please.", "seed 7", "max-tokens 9"] {
            assert!(shown.contains(part), "{shown}");
        }
        assert!(settings.set("tepm 1").unwrap_err().contains("did you mean temp?"));
        assert!(settings.set("seed").unwrap().contains("seed random"));
        assert!(settings.set("system").unwrap().contains("system none"));
        for wrong in ["temp hot", "temp", "top-p 2", "thinking maybe", "max-tokens -1", "frobnicate 1"] {
            assert!(settings.set(wrong).is_err(), "{wrong}");
        }
        assert_eq!(settings.answer_options.sampling.temperature, 0.5, "refused values change nothing");
    }
}
