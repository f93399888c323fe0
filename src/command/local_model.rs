//! A model that answers on the terminal: its engine, its prompts, and the printing of its answers.

use super::{CheckpointMeta, device_choice::DeviceChoice, load_model, printable};
use crate::{
    chat::{
        Conversation, Decoder, Speaker, Template, message_ends,
        parser::{Delta, Parser},
    },
    config::GenerateConfig,
    engine::{
        self, Boundary, BoundaryKind, Event, Finish, Handle, Image, ImageProcessor, Options, Request, Sampling,
        Timings, Worker,
    },
    error::{CommandError, EngineError},
    metrics::Metrics,
    model::Model,
    platform::read_small_file,
};
use serde_json::{Map, Value, json};
use std::{
    future::Future,
    io::{self, IsTerminal, Write},
    path::Path,
    sync::Arc,
};

/// Options of answers, which a chat can change.
#[derive(Debug, Clone)]
pub struct AnswerOptions {
    pub sampling: Sampling,
    pub max_tokens: Option<usize>,
    pub thinking: Option<bool>,
}

/// A complete or interrupted answer.
#[derive(Debug, Default)]
pub struct TerminalAnswer {
    pub content: String,
    pub reasoning: String,
    /// `None` if the user interrupted it.
    pub end: Option<(Finish, Timings)>,
}

/// A loaded model with its engine.
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
            .map_err(|source| CommandError::Io { what: "starting the engine thread".into(), source })?;
        Ok(Self { checkpoint, engine, worker })
    }

    pub fn answer_options(&self, config: &GenerateConfig) -> AnswerOptions {
        let sampling = Sampling { seed: config.seed, ..self.checkpoint.sampling() };
        AnswerOptions { sampling, max_tokens: config.max_tokens, thinking: config.thinking }
    }

    /// Reads an image for a later message.
    ///
    /// # Errors
    /// A sentence for the user.
    pub fn read_image(&self, path: &Path) -> Result<Arc<Image>, String> {
        let Some(processor) = self.engine.images() else {
            return Err("this model cannot see images".into());
        };
        let failed = |why: String| format!("{}: {why}", path.display());
        let encoded = read_small_file(path, ImageProcessor::MAX_ENCODED_BYTES as u64);
        let encoded = encoded.map_err(|error| failed(error.to_string()))?;
        processor.prepare(&encoded, None).map_err(|error| failed(format!("the image {error}")))
    }

    /// Renders the prompt. A base model gets the text of the last message.
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

    /// Prints an answer to `messages`, which refer to `images` in order, until it ends or `stop` completes.
    pub async fn answer(
        &self,
        messages: &[Value],
        images: &[Arc<Image>],
        answer_options: &AnswerOptions,
        stop: impl Future<Output = ()>,
    ) -> Result<TerminalAnswer, CommandError> {
        let prompt = self.prompt(messages, answer_options.thinking)?;
        let ids = self.checkpoint.tokenizer.encode(&prompt)?;
        let (ids, images) = match self.engine.images().filter(|_| !images.is_empty()) {
            Some(processor) => engine::place_images(ids, images, processor.image_token)
                .ok_or_else(|| CommandError::Usage("the text contains the placeholder of an image".into()))?,
            None => (ids, Vec::new()),
        };
        let ends = message_ends(&self.checkpoint.tokenizer, &ids).into_iter();
        let boundary = |(at, speaker)| {
            let kind = match speaker {
                Speaker::System => BoundaryKind::System,
                Speaker::User => BoundaryKind::Query,
                Speaker::Other => BoundaryKind::Message,
            };
            Boundary { at, kind }
        };
        let mut events = self.engine.submit(Request {
            boundaries: ends.map(boundary).collect(),
            images,
            ..Request::new(ids, answer_options.max_tokens.unwrap_or(usize::MAX), answer_options.sampling.clone())
        })?;
        let mut decoder = Decoder::new(self.checkpoint.tokenizer.clone());
        let mut printer = AnswerPrinter::new(Parser::new(Template::opens_in_reasoning(&prompt), &[]));
        let mut stop = std::pin::pin!(stop);
        let end = loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = &mut stop => break None,
            };
            match event {
                Some(Event::Token { id, .. }) => printer.write(&decoder.push(id))?,
                Some(Event::Done { finish, timings }) => break Some((finish, timings)),
                Some(Event::Failed(error)) => return Err(error.into()),
                Some(Event::Started { .. } | Event::Prefilled { .. } | Event::Prompt(_)) => {}
                None => return Err(EngineError::Stopped.into()),
            }
        };
        printer.write(&decoder.finish())?;
        printer.end()?;
        Ok(TerminalAnswer { content: printer.content, reasoning: printer.reasoning, end })
    }

    /// Unloads the model.
    pub fn unload(self) -> Result<(), CommandError> {
        drop(self.engine);
        Ok(self.worker.join()?)
    }
}

/// A message in OpenAI's format.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// Prints an answer while it streams: content to stdout, reasoning to stderr, dimmed on a terminal. Reasoning is omitted if
/// only stdout is a terminal. Control characters are replaced on a terminal, since they could change its state.
struct AnswerPrinter {
    parser: Parser,
    /// stderr is a terminal.
    dims: bool,
    shows_reasoning: bool,
    in_reasoning: bool,
    content: String,
    reasoning: String,
}

impl AnswerPrinter {
    fn new(parser: Parser) -> Self {
        let dims = io::stderr().is_terminal();
        let shows_reasoning = dims || !io::stdout().is_terminal();
        Self { parser, dims, shows_reasoning, in_reasoning: false, content: String::new(), reasoning: String::new() }
    }

    fn write(&mut self, text: &str) -> Result<(), CommandError> {
        let deltas = self.parser.push(text);
        self.print(deltas)
    }

    fn end(&mut self) -> Result<(), CommandError> {
        let deltas = self.parser.finish(false);
        self.print(deltas)?;
        self.end_reasoning();
        if self.content.is_empty() { Ok(()) } else { print_content("\n") }
    }

    fn print(&mut self, deltas: Vec<Delta>) -> Result<(), CommandError> {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => {
                    self.reasoning.push_str(&text);
                    if self.shows_reasoning {
                        let begins = !std::mem::replace(&mut self.in_reasoning, true) && self.dims;
                        eprint!("{}{}", if begins { "\x1b[2m" } else { "" }, printable(&text));
                    }
                }
                Delta::Content(text) => {
                    self.end_reasoning();
                    self.content.push_str(&text);
                    print_content(&text)?;
                }
                // The prompt has no tools, so the parser reports no calls.
                Delta::ToolCall { .. } | Delta::Arguments { .. } => {}
            }
        }
        Ok(())
    }

    fn end_reasoning(&mut self) {
        if std::mem::take(&mut self.in_reasoning) {
            eprintln!("{}", if self.dims { "\x1b[0m\n" } else { "" });
        }
    }
}

fn print_content(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    let text = if out.is_terminal() { printable(text) } else { text.into() };
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|source| CommandError::Io { what: "writing the answer".into(), source })
}

/// `21 prompt tokens in 0.05 s (400.0 tokens/s), 110 tokens in 1.20 s (91.7 tokens/s)`
pub fn timings_line(timings: &Timings) -> String {
    let rate = |tokens: usize, seconds: f64| {
        let rate = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        format!("in {seconds:.2} s ({rate:.1} tokens/s)")
    };
    let Timings { prompt_tokens, cached_tokens, generated_tokens, prompt_seconds, decode_seconds, .. } = *timings;
    let drafted = match timings.drafted_tokens {
        0 => String::new(),
        drafted => format!(", {} of {drafted} drafted tokens accepted", timings.accepted_tokens),
    };
    let cached = if cached_tokens == 0 { String::new() } else { format!(" ({cached_tokens} cached)") };
    format!(
        "{prompt_tokens} prompt tokens{cached} {}, {generated_tokens} tokens {}{drafted}",
        rate(prompt_tokens - cached_tokens, prompt_seconds),
        rate(generated_tokens, decode_seconds)
    )
}
