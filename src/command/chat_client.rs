//! The model of a chat, which a server answers with: a running server, or a server inside this process.

use super::{
    answer_printer::{AnswerEnd, AnswerPrinter, TerminalAnswer},
    api_client::ApiClient,
    chat_settings::AnswerOptions,
    checkpoint_meta::CheckpointMeta,
    device_choice::DeviceChoice,
    load::{describe_plan, host_model, load_model},
    local_models,
    text::print_note,
};
use crate::{
    cli::model_args::{DraftArgs, LoadArgs, PromptCacheArgs, RemoteArgs},
    config::{GenerateConfig, config_file::Settings},
    error::CommandError,
    http::ServerState,
};
use base64::{Engine, prelude::BASE64_STANDARD};
use clap::{Arg, Args};
use moestro_base::{metrics::Metrics, platform::read_small_file};
use moestro_engine::{ImageProcessor, Options, Timings};
use serde_json::{Value, json};
use std::{future::Future, path::Path, sync::Arc};

/// Flags for loading a model. If one of these flags is on the command line, the chat loads a model in this process and
/// does not ask a running server.
fn loading_flags() -> Vec<String> {
    let flags = LoadArgs::augment_args(clap::Command::new("run"));
    let flags = DraftArgs::augment_args(PromptCacheArgs::augment_args(flags));
    flags.get_arguments().filter_map(Arg::get_long).map(str::to_owned).collect()
}

pub struct ChatClient {
    server: ApiClient,
    /// Id of the model in the server's list.
    pub id: String,
    /// False for a base model, which continues a text instead of answering.
    has_template: bool,
}

impl ChatClient {
    /// Uses the server at `remote` if that server has the model, so that the model is not loaded twice. Otherwise loads
    /// the model in this process.
    pub fn open(config: &GenerateConfig, remote: &RemoteArgs, settings: &Settings) -> Result<Self, CommandError> {
        let loading = loading_flags();
        if !settings.rows.iter().any(|row| row.from == "command line" && loading.contains(&row.flag)) {
            let server = ApiClient::remote(remote)?;
            let id = local_models::id(&config.model, settings);
            match server.has_model(&id) {
                Ok(true) => return Self::new(server, id),
                Ok(false) => {}
                Err(error) => {
                    let address = server.address().unwrap_or_default();
                    print_note(format_args!(
                        "moestro: cannot use the server at {address}: {error}; loading the model here"
                    ));
                }
            }
        }
        Self::load(config, settings)
    }

    /// Loads the model in this process.
    pub fn load(config: &GenerateConfig, settings: &Settings) -> Result<Self, CommandError> {
        let id = local_models::id(&config.model, settings);
        let chosen = DeviceChoice::new(&config.load)?;
        let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), chosen.name());
        let mut checkpoint = CheckpointMeta::open(&config.model, config.generation.clone())?;
        checkpoint.name.clone_from(&id);
        let loaded = load_model(&checkpoint, &config.load, chosen, &metrics)?;
        let drafts = config.load.drafts.as_ref();
        let hosted = host_model(&id, checkpoint, loaded, drafts, Options::default(), &metrics)?;
        let mut state = ServerState::new(metrics, None, None);
        // The only client is the user of this process.
        state.body_limit = usize::MAX;
        state.memory.set_plan(u64::MAX);
        state.models.install(hosted);
        Self::new(ApiClient::in_process(Arc::new(state))?, id)
    }

    fn new(server: ApiClient, id: String) -> Result<Self, CommandError> {
        // Only the entry of a loaded model says whether the model has a template.
        let has_template = server.model(&id)?.is_none_or(|model| model["capabilities"]["chat"] != false);
        Ok(Self { server, id, has_template })
    }

    /// Describes the model: `coder at http://127.0.0.1:5413 on metal, 37 % of the experts in memory, context 32768`.
    /// Without the address if this process loaded the model.
    pub fn describe(&self) -> String {
        let plan = self.server.health().map_or(Value::Null, |health| health["plan"].clone());
        let address = self.server.address().map_or(String::new(), |address| format!(" at {address}"));
        format!("{}{address} {}", self.id, describe_plan(&plan))
    }

    /// Reads an image. Returns the part of a message that shows the image, and the number of its tokens.
    ///
    /// # Errors
    /// Returns a sentence for the user.
    pub fn read_image(&self, path: &Path) -> Result<(Value, usize), String> {
        let failed = |why: String| format!("{}: {why}", path.display());
        let bytes = read_small_file(path, ImageProcessor::MAX_ENCODED_BYTES as u64);
        let bytes = bytes.map_err(|error| failed(error.to_string()))?;
        let url = format!("data:image;base64,{}", BASE64_STANDARD.encode(bytes));
        let image = json!({"type": "image_url", "image_url": {"url": url}});
        let body = json!({"model": self.id, "messages": [{"role": "user", "content": [image]}]});
        let counted = self.server.ask_model("/tokenize", &body).map_err(|error| {
            // The server's sentence begins with the place of the image in the request.
            let text = error.to_string();
            failed(text.find("the image ").map_or(&*text, |at| &text[at..]).to_owned())
        })?;
        // The placeholder of an image is repeated once for each of its tokens.
        let ids = counted["tokens"].as_array().map_or(&[][..], Vec::as_slice);
        let tokens = ids.chunk_by(PartialEq::eq).map(<[Value]>::len).max().unwrap_or(0);
        Ok((image, tokens))
    }

    /// Prints an answer to `messages` until the answer ends or `stop` completes, which stops the server's work on it.
    pub fn answer(
        &self,
        messages: &[Value],
        options: &AnswerOptions,
        stop: impl Future<Output = ()>,
    ) -> Result<TerminalAnswer, CommandError> {
        let mut printer = AnswerPrinter::new();
        let end = self.server.block_on(async {
            tokio::select! {
                end = self.print(messages, options, &mut printer) => Some(end),
                () = stop => None,
            }
        });
        let answer = printer.finish()?;
        Ok(TerminalAnswer { end: end.transpose()?, ..answer })
    }

    async fn print(
        &self,
        messages: &[Value],
        options: &AnswerOptions,
        printer: &mut AnswerPrinter,
    ) -> Result<AnswerEnd, CommandError> {
        let mut end = AnswerEnd::default();
        let (path, body) = self.request(messages, options);
        let mut events = self.server.stream(path, &body).await?;
        while let Some(event) = events.next_event().await? {
            let progress = &event["prompt_progress"];
            if progress.is_object() {
                printer.progress(count(&progress["processed"]), count(&progress["total"]));
            }
            let choice = &event["choices"][0];
            let delta = &choice["delta"];
            if let Some(text) = text(&delta["reasoning_content"]) {
                printer.reasoning(text);
            }
            if let Some(text) = text(&delta["content"]).or(text(&choice["text"])) {
                printer.content(text)?;
            }
            end.is_cut |= choice["finish_reason"] == "length";
            if event["usage"].is_object() {
                end.timings = timings(&event["usage"], &event["timings"]);
            }
        }
        Ok(end)
    }

    /// The request for an answer: its path and its body.
    fn request(&self, messages: &[Value], options: &AnswerOptions) -> (&'static str, Value) {
        let AnswerOptions { sampling, seed, max_tokens, thinking } = options;
        // The server ignores a field that is null.
        let mut body = json!({
            "model": self.id,
            "stream": true,
            "stream_options": {"include_usage": true},
            "return_progress": true,
            "temperature": exact(sampling.temperature),
            "top_p": exact(sampling.top_p),
            "top_k": sampling.top_k,
            "min_p": exact(sampling.min_p),
            "repetition_penalty": exact(sampling.repetition_penalty),
            "seed": seed.map(|seed| seed as i64),
        });
        if self.has_template {
            body["messages"] = messages.into();
            body["max_tokens"] = json!(max_tokens);
            body["enable_thinking"] = json!(thinking);
            return ("/v1/chat/completions", body);
        }
        // Completions are short by default, and -1 removes their limit.
        body["prompt"] = messages.last().map_or(Value::Null, |message| message["content"].clone());
        body["max_tokens"] = max_tokens.map_or(json!(-1), |max| json!(max));
        ("/v1/completions", body)
    }

    /// Unloads a model that this process loaded. A running server keeps its model.
    pub fn close(self) {
        self.server.close();
    }
}

/// A message in OpenAI's format.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The number with the digits that the user typed, such as 0.1. A plain conversion of the `f32` has further digits.
fn exact(number: Option<f32>) -> Option<f64> {
    number?.to_string().parse().ok()
}

fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

fn count(value: &Value) -> usize {
    value.as_u64().unwrap_or(0) as usize
}

/// The figures of an answer, from the last event of its stream.
fn timings(usage: &Value, timings: &Value) -> Timings {
    let seconds = |name: &str| timings[name].as_f64().unwrap_or(0.0) / 1e3;
    Timings {
        prompt_tokens: count(&usage["prompt_tokens"]),
        cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"]),
        generated_tokens: count(&usage["completion_tokens"]),
        drafted_tokens: count(&timings["drafted_tokens"]),
        accepted_tokens: count(&timings["accepted_tokens"]),
        prompt_seconds: seconds("prompt_ms"),
        decode_seconds: seconds("predicted_ms"),
        ..Timings::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::help;

    /// Flags of `moestro run` for the answer and the server. All other settings are for loading the model.
    const OTHER: &str = "temp top-p top-k min-p repeat-penalty max-tokens thinking seed system host port api-key";

    #[test]
    fn every_flag_of_run_is_classified() {
        let command = help::command();
        let run = command.find_subcommand("run").unwrap();
        let settings = run.get_arguments().filter(|arg| arg.get_env().is_some()).filter_map(Arg::get_long);
        let mut loading = loading_flags();
        let mut expected = settings.collect::<Vec<_>>();
        expected.retain(|flag| OTHER.split(' ').all(|other| other != *flag));
        loading.sort_unstable();
        expected.sort_unstable();
        assert_eq!(loading, expected);
    }

    #[test]
    fn numbers_are_sent_as_typed() {
        assert_eq!([Some(0.1), Some(0.01), Some(2.0), None].map(exact), [Some(0.1), Some(0.01), Some(2.0), None]);
    }
}
