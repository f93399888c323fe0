//! A model that this process loads and whose answers are printed on the terminal.

use super::{
    answer_printer::{AnswerEnd, AnswerPrinter, TerminalAnswer},
    chat_settings::AnswerOptions,
    checkpoint_meta::CheckpointMeta,
    device_choice::DeviceChoice,
    load::{self, load_model},
};
use crate::{config::GenerateConfig, error::CommandError, http::boundaries};
use moestro_base::{metrics::Metrics, platform::read_small_file};
use moestro_chat::{
    Conversation, Decoder, Template,
    parser::{Delta, Parser},
};
use moestro_engine::{
    self as engine, Event, Finish, Handle, Image, ImageProcessor, Options, Request, Sampling, Worker,
    error::EngineError,
};
use moestro_model::model::Model;
use serde_json::{Map, Value, json};
use std::{future::Future, path::Path, sync::Arc};

/// A loaded model with its engine.
pub struct LocalModel {
    pub checkpoint: CheckpointMeta,
    /// The memory plan, with the name of the device.
    plan: Value,
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
        let options = load::speculation(config.load.drafts.as_ref(), options);
        let (engine, worker) = load::start_engine(loaded.model, loaded.draft, options, metrics)?;
        Ok(Self { checkpoint, plan: loaded.plan, engine, worker })
    }

    /// Describes the model: `moestro-demo on cpu, all experts in memory, context 32768`.
    pub fn describe(&self) -> String {
        format!("{} {}", self.checkpoint.name, load::describe_plan(&self.plan))
    }

    /// The sampling parameters of an answer: the user's settings, or else the checkpoint's defaults.
    fn sampling(&self, options: &AnswerOptions) -> Sampling {
        let chosen = options.sampling.clone().or(self.checkpoint.generation.clone());
        Sampling { seed: options.seed, ..chosen.sampling() }
    }

    /// Reads an image for a later message.
    ///
    /// # Errors
    /// Returns a sentence for the user.
    pub fn read_image(&self, path: &Path) -> Result<Arc<Image>, String> {
        let Some(processor) = self.engine.images() else {
            return Err("this model cannot see images".into());
        };
        let failed = |why: String| format!("{}: {why}", path.display());
        let encoded = read_small_file(path, ImageProcessor::MAX_ENCODED_BYTES as u64);
        let encoded = encoded.map_err(|error| failed(error.to_string()))?;
        processor.prepare(&encoded, None).map_err(|error| failed(format!("the image {error}")))
    }

    /// Renders the prompt. A base model has no template, so its prompt is the text of the last message.
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

    /// Prints an answer to `messages`, which refer to `images` in order, until the answer ends or `stop` completes.
    pub async fn answer(
        &self,
        messages: &[Value],
        images: &[Arc<Image>],
        options: &AnswerOptions,
        stop: impl Future<Output = ()>,
    ) -> Result<TerminalAnswer, CommandError> {
        let prompt = self.prompt(messages, options.thinking)?;
        let ids = self.checkpoint.tokenizer.encode(&prompt)?;
        let (ids, images) = match self.engine.images().filter(|_| !images.is_empty()) {
            Some(processor) => engine::place_images(ids, images, processor.image_token)
                .ok_or_else(|| CommandError::Usage("the text contains the placeholder of an image".into()))?,
            None => (ids, Vec::new()),
        };
        let total = ids.len();
        let mut events = self.engine.submit(Request {
            boundaries: boundaries(&self.checkpoint.tokenizer, &ids),
            images,
            ..Request::new(ids, options.max_tokens.unwrap_or(usize::MAX), self.sampling(options))
        })?;
        let mut decoder = Decoder::new(self.checkpoint.tokenizer.clone());
        let mut parser = Parser::new(Template::opens_in_reasoning(&prompt), &[]);
        let mut printer = AnswerPrinter::new();
        let mut stop = std::pin::pin!(stop);
        let end = loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = &mut stop => break None,
            };
            match event {
                Some(Event::Token { id, .. }) => print(&mut printer, parser.push(&decoder.push(id)))?,
                Some(Event::Done { finish, timings }) => {
                    break Some(AnswerEnd { is_cut: finish == Finish::Length, timings });
                }
                Some(Event::Failed(error)) => return Err(error.into()),
                Some(Event::Started { cached_tokens: tokens, .. } | Event::Prefilled { tokens, .. }) => {
                    printer.progress(tokens, total);
                }
                Some(Event::Prompt(_)) => {}
                None => return Err(EngineError::Stopped.into()),
            }
        };
        print(&mut printer, parser.push(&decoder.finish()))?;
        print(&mut printer, parser.finish(false))?;
        printer.finish(end)
    }

    /// Unloads the model.
    pub fn unload(self) -> Result<(), CommandError> {
        drop(self.engine);
        Ok(self.worker.join()?)
    }
}

fn print(printer: &mut AnswerPrinter, deltas: Vec<Delta>) -> Result<(), CommandError> {
    for delta in deltas {
        match delta {
            Delta::Reasoning(text) => printer.reasoning(&text),
            Delta::Content(text) => printer.content(&text)?,
            // The prompt has no tools, so the parser reports no calls.
            Delta::ToolCall { .. } | Delta::Arguments { .. } => {}
        }
    }
    Ok(())
}

/// A message in OpenAI's format.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}
