//! `moestro generate`: one answer on the terminal. The answer goes to stdout as its tokens come; reasoning, dimmed, and a
//! line of figures go to stderr, the reasoning only if that is a terminal.

use super::{Checkpoint, device::Chosen, load_model};
use crate::{
    chat::{
        Conversation, Decoder, Template,
        parse::{Delta, Parser},
    },
    config::Generate,
    engine::{self, Event, Options, Request, Sampling, Timings},
    error::{CommandError, EngineError},
    metrics::Metrics,
    model::Model,
};
use serde_json::{Map, json};
use std::io::{self, IsTerminal, Write};

/// Answers one prompt.
pub fn run(config: Generate) -> Result<(), CommandError> {
    let chosen = Chosen::new(&config.load)?;
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), chosen.name());
    let checkpoint = Checkpoint::open(&config.model, config.generation.clone())?;
    let prompt = prompt(&checkpoint, &config)?;
    let ids = checkpoint.tokenizer.encode(&prompt)?;
    let loaded = load_model(&checkpoint, &config.load, chosen, &metrics)?;
    let options = Options {
        eos: checkpoint.generation.eos.clone(),
        usable_vocab: checkpoint.tokenizer.vocab_size().min(loaded.model.vocab()),
        ..Options::default()
    };
    let options = super::speculation(config.load.drafts.as_ref(), options);
    let (engine, worker) = engine::spawn_with(loaded.model, loaded.draft, options, metrics)
        .map_err(|source| CommandError::Io { what: "starting the engine's thread".into(), source })?;
    let mut events = engine.submit(Request {
        ids,
        max_tokens: config.max_tokens.unwrap_or(usize::MAX),
        sampling: Sampling { seed: config.seed, ..checkpoint.sampling() },
        logprobs: None,
        prompt_logprobs: None,
        ignore_eos: false,
        constraint: None,
        boundaries: Vec::new(),
        cache_prompt: false,
    })?;

    let mut decoder = Decoder::new(checkpoint.tokenizer.clone());
    let mut page = Page::new(Parser::new(Template::opens_in_reasoning(&prompt), &[]));
    let timings = loop {
        match events.blocking_recv() {
            Some(Event::Token { id, .. }) => page.write(&decoder.push(id))?,
            Some(Event::Done { timings, .. }) => break timings,
            Some(Event::Failed(error)) => return Err(error.into()),
            Some(Event::Started { .. } | Event::Prompt(_)) => {}
            None => return Err(EngineError::Stopped.into()),
        }
    };
    page.write(&decoder.finish())?;
    page.end()?;
    eprintln!("{}", figures(&timings));
    drop((events, engine));
    Ok(worker.join()?)
}

/// The prompt as the model wants it; a base model gets the words as they are.
fn prompt(checkpoint: &Checkpoint, config: &Generate) -> Result<String, CommandError> {
    let Some(template) = &checkpoint.template else { return Ok(config.prompt.clone()) };
    let mut kwargs = Map::new();
    if let Some(thinking) = config.thinking {
        kwargs.insert("enable_thinking".into(), thinking.into());
    }
    let messages = [json!({ "role": "user", "content": config.prompt })];
    let conversation = Conversation { messages: &messages, tools: None, kwargs: &kwargs, add_generation_prompt: true };
    Ok(template.render(&conversation)?)
}

/// Prints the answer's words.
struct Page {
    parser: Parser,
    /// Reasoning is shown.
    shows_reasoning: bool,
    reasoning: bool,
    answered: bool,
}

impl Page {
    fn new(parser: Parser) -> Self {
        Self { parser, shows_reasoning: io::stderr().is_terminal(), reasoning: false, answered: false }
    }

    fn write(&mut self, text: &str) -> Result<(), CommandError> {
        let deltas = self.parser.push(text);
        self.put(deltas)
    }

    fn end(&mut self) -> Result<(), CommandError> {
        let deltas = self.parser.finish(false);
        self.put(deltas)?;
        self.undim();
        if self.answered { say("\n") } else { Ok(()) }
    }

    fn put(&mut self, deltas: Vec<Delta>) -> Result<(), CommandError> {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) if self.shows_reasoning => {
                    let dim = if self.reasoning { "" } else { "\x1b[2m" };
                    self.reasoning = true;
                    eprint!("{dim}{text}");
                }
                Delta::Content(text) => {
                    self.undim();
                    self.answered = true;
                    say(&text)?;
                }
                // Without tools in the prompt no call is looked for.
                Delta::Reasoning(_) | Delta::ToolCall { .. } | Delta::Arguments { .. } => {}
            }
        }
        Ok(())
    }

    fn undim(&mut self) {
        if std::mem::take(&mut self.reasoning) {
            eprintln!("\x1b[0m");
        }
    }
}

fn say(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|source| CommandError::Io { what: "writing the answer".into(), source })
}

/// `21 prompt tokens in 0.05 s (400.0 a second), 110 tokens in 1.20 s (91.7 a second)`
fn figures(timings: &Timings) -> String {
    let rate = |tokens: usize, seconds: f64| {
        let rate = if seconds > 0.0 { tokens as f64 / seconds } else { 0.0 };
        format!("in {seconds:.2} s ({rate:.1} a second)")
    };
    let Timings { prompt_tokens, cached_tokens, generated_tokens, prompt_seconds, decode_seconds, .. } = *timings;
    let drafted = match timings.drafted_tokens {
        0 => String::new(),
        drafted => format!(", {} of {drafted} drafted ones accepted", timings.accepted_tokens),
    };
    format!(
        "{prompt_tokens} prompt tokens {}, {generated_tokens} tokens {}{drafted}",
        rate(prompt_tokens - cached_tokens, prompt_seconds),
        rate(generated_tokens, decode_seconds)
    )
}
