//! A model that speaks on the terminal: its engine, what is said to it, and the page that its words go to.

use super::{CheckpointMeta, device_choice::DeviceChoice, load_model};
use crate::{
    chat::{
        Conversation, Decoder, Speaker, Template, message_ends,
        parser::{Delta, Parser},
    },
    config::GenerateConfig,
    engine::{self, Boundary, BoundaryKind, Event, Finish, Handle, Options, Request, Sampling, Timings, Worker},
    error::{CommandError, EngineError},
    metrics::Metrics,
    model::Model,
};
use serde_json::{Map, Value, json};
use std::{
    future::Future,
    io::{self, IsTerminal, Write},
};

/// The options of answers, which a chat may change.
#[derive(Debug, Clone)]
pub struct AnswerOptions {
    pub sampling: Sampling,
    pub max_tokens: Option<usize>,
    pub thinking: Option<bool>,
}

/// An answer.
#[derive(Debug, Default)]
pub struct TerminalAnswer {
    pub content: String,
    pub reasoning: String,
    /// `None` if it was broken off.
    pub end: Option<(Finish, Timings)>,
}

/// A model in memory.
pub struct LocalModel {
    pub checkpoint: CheckpointMeta,
    engine: Handle,
    worker: Worker,
}

impl LocalModel {
    pub fn load(config: &GenerateConfig) -> Result<Self, CommandError> {
        let chosen = DeviceChoice::new(&config.load)?;
        let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), chosen.name());
        let checkpoint = CheckpointMeta::open(&config.model, config.generation.clone())?;
        let loaded = load_model(&checkpoint, &config.load, chosen, &metrics)?;
        let options = Options {
            eos: checkpoint.generation.eos.clone(),
            usable_vocab: checkpoint.tokenizer.vocab_size().min(loaded.model.info().vocab),
            prompt_cache: loaded.model.plan().prompt_cache,
            ..Options::default()
        };
        let options = super::speculation(config.load.drafts.as_ref(), options);
        let (engine, worker) = engine::spawn_with(loaded.model, loaded.draft, options, metrics)
            .map_err(|source| CommandError::Io { what: "starting the engine's thread".into(), source })?;
        Ok(Self { checkpoint, engine, worker })
    }

    pub fn answer_options(&self, config: &GenerateConfig) -> AnswerOptions {
        let sampling = Sampling { seed: config.seed, ..self.checkpoint.sampling() };
        AnswerOptions { sampling, max_tokens: config.max_tokens, thinking: config.thinking }
    }

    /// The prompt as the model wants it; a base model gets the last message's words as they are.
    fn prompt(&self, messages: &[Value], thinking: Option<bool>) -> Result<String, CommandError> {
        let Some(template) = &self.checkpoint.template else {
            let last = messages.last().and_then(|message| message["content"].as_str());
            return Ok(last.unwrap_or_default().to_owned());
        };
        let mut kwargs = Map::new();
        if let Some(thinking) = thinking {
            kwargs.insert("enable_thinking".into(), thinking.into());
        }
        let conversation = Conversation { messages, tools: None, kwargs: &kwargs, add_generation_prompt: true };
        Ok(template.render(&conversation)?)
    }

    /// Says an answer to `messages` until it ends or `stop` does.
    pub async fn answer(
        &self,
        messages: &[Value],
        answer_options: &AnswerOptions,
        stop: impl Future<Output = ()>,
    ) -> Result<TerminalAnswer, CommandError> {
        let prompt = self.prompt(messages, answer_options.thinking)?;
        let ids = self.checkpoint.tokenizer.encode(&prompt)?;
        let ends = message_ends(&self.checkpoint.tokenizer, &ids).into_iter();
        let boundary = |(at, voice)| {
            let kind = match voice {
                Speaker::System => BoundaryKind::System,
                Speaker::User => BoundaryKind::Query,
                Speaker::Other => BoundaryKind::Message,
            };
            Boundary { at, kind }
        };
        let mut events = self.engine.submit(Request {
            boundaries: ends.map(boundary).collect(),
            ..Request::new(ids, answer_options.max_tokens.unwrap_or(usize::MAX), answer_options.sampling.clone())
        })?;
        let mut decoder = Decoder::new(self.checkpoint.tokenizer.clone());
        let mut page = AnswerPrinter::new(Parser::new(Template::opens_in_reasoning(&prompt), &[]));
        let mut stop = std::pin::pin!(stop);
        let end = loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = &mut stop => break None,
            };
            match event {
                Some(Event::Token { id, .. }) => page.write(&decoder.push(id))?,
                Some(Event::Done { finish, timings }) => break Some((finish, timings)),
                Some(Event::Failed(error)) => return Err(error.into()),
                Some(Event::Started { .. } | Event::Prefilled { .. } | Event::Prompt(_)) => {}
                None => return Err(EngineError::Stopped.into()),
            }
        };
        page.write(&decoder.finish())?;
        page.end()?;
        Ok(TerminalAnswer { content: page.content, reasoning: page.thoughts, end })
    }

    /// Lets the model go.
    pub fn end(self) -> Result<(), CommandError> {
        drop(self.engine);
        Ok(self.worker.join()?)
    }
}

/// A message of a conversation.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// Prints an answer: its words to stdout as the tokens come, its reasoning to stderr, dimmed if that is a terminal. If only
/// stdout is a terminal, reasoning is not told.
struct AnswerPrinter {
    parser: Parser,
    dims: bool,
    tells_reasoning: bool,
    in_reasoning: bool,
    content: String,
    thoughts: String,
}

impl AnswerPrinter {
    fn new(parser: Parser) -> Self {
        let dims = io::stderr().is_terminal();
        let tells_reasoning = dims || !io::stdout().is_terminal();
        Self { parser, dims, tells_reasoning, in_reasoning: false, content: String::new(), thoughts: String::new() }
    }

    fn write(&mut self, text: &str) -> Result<(), CommandError> {
        let deltas = self.parser.push(text);
        self.put(deltas)
    }

    fn end(&mut self) -> Result<(), CommandError> {
        let deltas = self.parser.finish(false);
        self.put(deltas)?;
        self.leave_reasoning();
        if self.content.is_empty() { Ok(()) } else { say("\n") }
    }

    fn put(&mut self, deltas: Vec<Delta>) -> Result<(), CommandError> {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => {
                    self.thoughts.push_str(&text);
                    if self.tells_reasoning {
                        let begins = !std::mem::replace(&mut self.in_reasoning, true) && self.dims;
                        eprint!("{}{text}", if begins { "\x1b[2m" } else { "" });
                    }
                }
                Delta::Content(text) => {
                    self.leave_reasoning();
                    self.content.push_str(&text);
                    say(&text)?;
                }
                // Without tools in the prompt no call is looked for.
                Delta::ToolCall { .. } | Delta::Arguments { .. } => {}
            }
        }
        Ok(())
    }

    fn leave_reasoning(&mut self) {
        if std::mem::take(&mut self.in_reasoning) {
            eprintln!("{}", if self.dims { "\x1b[0m\n" } else { "" });
        }
    }
}

fn say(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|source| CommandError::Io { what: "writing the answer".into(), source })
}

/// `21 prompt tokens in 0.05 s (400.0 a second), 110 tokens in 1.20 s (91.7 a second)`
pub fn figures(timings: &Timings) -> String {
    let rate = |tokens: usize, seconds: f64| {
        let rate = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        format!("in {seconds:.2} s ({rate:.1} a second)")
    };
    let Timings { prompt_tokens, cached_tokens, generated_tokens, prompt_seconds, decode_seconds, .. } = *timings;
    let drafted = match timings.drafted_tokens {
        0 => String::new(),
        drafted => format!(", {} of {drafted} drafted ones accepted", timings.accepted_tokens),
    };
    let known = if cached_tokens == 0 { String::new() } else { format!(" ({cached_tokens} of them known)") };
    format!(
        "{prompt_tokens} prompt tokens{known} {}, {generated_tokens} tokens {}{drafted}",
        rate(prompt_tokens - cached_tokens, prompt_seconds),
        rate(generated_tokens, decode_seconds)
    )
}
