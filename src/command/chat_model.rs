//! The model of a chat: either a model of a running server, or a model that this process loads.

use super::{
    answer_printer::TerminalAnswer, chat_settings::AnswerOptions, local_model::LocalModel, local_models,
    remote_model::RemoteModel, remote_server::RemoteServer,
};
use crate::{
    cli::model_args::{DraftArgs, LoadArgs, PromptCacheArgs, RemoteArgs},
    config::{GenerateConfig, config_file::Settings},
    error::CommandError,
};
use clap::{Arg, Args};
use moestro_engine::Image;
use serde_json::Value;
use std::{future::Future, path::Path, sync::Arc};

/// Flags for loading a model. If one of these flags is on the command line, the chat loads a model in this process and
/// does not ask a running server.
fn loading_flags() -> Vec<String> {
    let flags = LoadArgs::augment_args(clap::Command::new("run"));
    let flags = DraftArgs::augment_args(PromptCacheArgs::augment_args(flags));
    flags.get_arguments().filter_map(Arg::get_long).map(str::to_owned).collect()
}

pub enum ChatModel {
    Local(Box<LocalModel>),
    Remote(RemoteModel),
}

impl ChatModel {
    /// Uses the server at `remote` if that server has the model, so that the model is not loaded twice. Otherwise loads
    /// the model in this process.
    pub fn open(config: &GenerateConfig, remote: &RemoteArgs, settings: &Settings) -> Result<Self, CommandError> {
        let loading = loading_flags();
        if !settings.rows.iter().any(|row| row.from == "command line" && loading.contains(&row.flag)) {
            let server = RemoteServer::new(remote);
            let id = local_models::id(&config.model, settings);
            match server.has_model(&id) {
                Ok(true) => return Ok(Self::Remote(RemoteModel::new(server, id))),
                Ok(false) => {}
                Err(error) => {
                    eprintln!(
                        "moestro: cannot use the server at {}: {error}; loading the model here",
                        server.base_url()
                    );
                }
            }
        }
        Ok(Self::Local(Box::new(LocalModel::load(config)?)))
    }

    pub fn name(&self) -> &str {
        match self {
            Self::Local(local) => &local.checkpoint.name,
            Self::Remote(remote) => &remote.id,
        }
    }

    /// Describes the model: name, device, experts in memory and context.
    pub fn describe(&self) -> String {
        match self {
            Self::Local(local) => local.describe(),
            Self::Remote(remote) => remote.describe(),
        }
    }

    /// Reads an image for a later message.
    ///
    /// # Errors
    /// Returns a sentence for the user.
    pub fn read_image(&self, path: &Path) -> Result<Arc<Image>, String> {
        match self {
            Self::Local(local) => local.read_image(path),
            Self::Remote(_) => {
                Err("images need a model that this chat loads; start it with --device auto to load a copy".into())
            }
        }
    }

    /// Prints an answer to `messages`, which refer to `images` in order, until the answer ends or `stop` completes.
    pub async fn answer(
        &self,
        messages: &[Value],
        images: &[Arc<Image>],
        options: &AnswerOptions,
        stop: impl Future<Output = ()>,
    ) -> Result<TerminalAnswer, CommandError> {
        match self {
            Self::Local(local) => local.answer(messages, images, options, stop).await,
            Self::Remote(remote) => remote.answer(messages, options, stop).await,
        }
    }

    /// Unloads a local model. A server keeps its model loaded.
    pub fn close(self) -> Result<(), CommandError> {
        match self {
            Self::Local(local) => local.unload(),
            Self::Remote(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::help;

    /// Flags of `moestro run` for the answer and the server. All other settings are for loading the model.
    const OTHER: [&str; 12] = [
        "temp",
        "top-p",
        "top-k",
        "min-p",
        "repeat-penalty",
        "max-tokens",
        "thinking",
        "seed",
        "system",
        "host",
        "port",
        "api-key",
    ];

    #[test]
    fn every_flag_of_run_is_classified() {
        let command = help::command();
        let run = command.find_subcommand("run").unwrap();
        let settings = run.get_arguments().filter(|arg| arg.get_env().is_some()).filter_map(Arg::get_long);
        let mut loading = loading_flags();
        let mut expected = settings.collect::<Vec<_>>();
        expected.retain(|flag| !OTHER.contains(flag));
        loading.sort_unstable();
        expected.sort_unstable();
        assert_eq!(loading, expected);
    }
}
