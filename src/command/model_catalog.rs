//! The models that a server can load: lists the models, reads the settings of each model, and loads a model with its
//! engine.

use super::{
    auto_pack::pack_or_suggest,
    checkpoint_meta::CheckpointMeta,
    device_choice::DeviceChoice,
    load::{ReadyModel, check_model, host_model, load_model},
    local_models::{self, CatalogEntry, Origin},
};
use crate::{
    cli::{Command, model_args::DraftArgs},
    config::{
        Device, DraftModel, LoadSettings, ModelSource, PromptCacheDir, ServeConfig,
        config_file::{self, ConfigFile, Settings},
    },
    error::CommandError,
    http::{
        HostTimeouts, HostedModel, LoadFailure, ModelEntry, ModelLoader, OriginPolicy, RequestLimits, RequestMemory,
        ServerState,
    },
};
use moestro_base::{metrics::Metrics, platform::os};
use moestro_engine::{self as engine, DiskCacheOptions, Options};
use moestro_model::checkpoint::{identity::file_identity, index::Index};
use parking_lot::{Mutex, RwLock};
use std::{collections::BTreeSet, net::IpAddr, path::PathBuf, sync::Arc, time::Instant};

/// Lists and loads the models of a server: the model that the server was started with, and all other models on this
/// machine.
pub struct ModelCatalog {
    config: RwLock<ServeConfig>,
    /// The configuration file that the last successful reload has read.
    file: RwLock<Arc<ConfigFile>>,
    settings: Settings,
    metrics: Arc<Metrics>,
    memory: Arc<RequestMemory>,
    /// The GPU's working set when it was last measured. `None` on the CPU.
    working_set: Mutex<Option<u64>>,
}

impl ModelLoader for ModelCatalog {
    fn list(&self) -> Vec<ModelEntry> {
        let listed =
            |entry: &CatalogEntry| ModelEntry { id: entry.id.clone(), created: entry.created(), size: entry.bytes() };
        self.entries().iter().map(listed).collect()
    }

    fn check(&self, id: &str) -> Result<(), LoadFailure> {
        let config = self.config_of(id)?;
        let checked = self.check_checkpoint(id, &config).map_err(LoadFailure::from);
        os::trim_memory();
        checked
    }

    fn load(&self, id: &str) -> Result<HostedModel, LoadFailure> {
        let start = Instant::now();
        let config = self.config_of(id)?;
        let loaded = self.open(id, &config)?;
        tracing::info!("loaded {id} in {:.1?}", start.elapsed());
        Ok(loaded)
    }

    fn clear_prompt_caches(&self) -> Result<(), String> {
        let others = self.entries().into_iter().filter_map(|entry| self.config_of(&entry.id).ok());
        let dirs: BTreeSet<PathBuf> =
            others.chain([self.config()]).filter_map(|config| prompt_cache_dir(&config)).collect();
        for dir in dirs {
            engine::clear_prompt_dir(&dir).map_err(|error| {
                tracing::warn!(dir = %dir.display(), %error, "cannot clear the prompt cache");
                format!("cannot clear the prompt cache on disk: {error}")
            })?;
        }
        Ok(())
    }
}

impl ModelCatalog {
    pub fn new(config: ServeConfig, settings: Settings, metrics: Arc<Metrics>, memory: Arc<RequestMemory>) -> Self {
        let file = RwLock::new(settings.content.clone());
        Self { config: RwLock::new(config), file, settings, metrics, memory, working_set: Mutex::default() }
    }

    fn config(&self) -> ServeConfig {
        self.config.read().clone()
    }

    pub fn timeouts(&self) -> HostTimeouts {
        timeouts(&self.config())
    }

    /// Reloads the configuration. The API key, the allowed hosts and origin, and the timeouts change immediately. The
    /// settings of a model change when the model is loaded the next time. A new address, queue length or log needs a
    /// restart.
    ///
    /// # Errors
    /// The configuration is invalid, its file is missing or empty, or it no longer has a setting that protects the server
    /// or names its models. A half-written file must not remove these.
    pub fn reload(&self, server: &ServerState, address: IpAddr) -> Result<(), String> {
        let (args, settings) = config_file::parse(self.settings.args.clone()).map_err(|e| config_file::sentence(&e))?;
        let Command::Serve(args) = args.command else { return Err("this is not `moestro serve`".into()) };
        let model = self.config().model;
        let config = ServeConfig { model, ..ServeConfig::new(args)? };
        if let (Some(file), None) = (&self.settings.file, &settings.file) {
            return Err(format!("{}: the file is missing", file.display()));
        }
        if let (Some(file), true, false) =
            (&self.settings.file, settings.content.is_empty(), self.file.read().is_empty())
        {
            return Err(format!("{}: the file is empty; write it again, then reload", file.display()));
        }
        let running = self.config();
        let lost = [
            ("api-key", running.api_key.is_some() && config.api_key.is_none()),
            ("models-dir", running.models_dir.is_some() && config.models_dir.is_none()),
            ("allowed-host", !running.allowed_host.is_empty() && config.allowed_host.is_empty()),
        ];
        if let Some((name, _)) = lost.into_iter().find(|(_, is_lost)| *is_lost) {
            return Err(format!("it no longer has {name}; add {name}, or restart the server to serve without"));
        }
        let cors = config.cors.as_deref().and_then(|origin| origin.parse().ok());
        server.set_api_key(config.api_key.clone());
        server.origins.replace(&OriginPolicy::new(address, &config.allowed_host, cors, config.api_key.is_some()));
        server.models.set_timeouts(timeouts(&config));
        *self.file.write() = settings.content;
        *self.config.write() = config;
        Ok(())
    }

    /// The models on this machine. The model of the command line is included even if it is outside of the model
    /// directories.
    fn entries(&self) -> Vec<CatalogEntry> {
        let config = self.config();
        let mut all = local_models::all(&self.settings, config.models_dir.as_deref());
        let id = local_models::id(&config.model, &self.settings);
        if let ModelSource::Directory(dir) = &config.model
            && !all.iter().any(|entry| entry.id == id)
        {
            let source = config.model.clone();
            let dir = Some(dir.clone());
            all.insert(0, CatalogEntry { id, source, origin: Origin::Configuration, dir });
        }
        all
    }

    /// The configuration for one model, with the settings of the model's table in the configuration file.
    fn config_of(&self, id: &str) -> Result<ServeConfig, LoadFailure> {
        let first = self.config();
        if id == local_models::id(&first.model, &self.settings) {
            return Ok(first);
        }
        let entry = self.entries().into_iter().find(|entry| entry.id == id);
        let entry = entry.ok_or("it is no longer on this machine")?;
        let file = self.file.read().clone();
        let parsed = config_file::parse_for(self.settings.args.clone(), file, id);
        let (args, _) = parsed.map_err(|error| wrong_settings(config_file::sentence(&error)))?;
        let Command::Serve(args) = args.command else { return Err("this is not `moestro serve`".into()) };
        Ok(ServeConfig { model: entry.source, ..ServeConfig::new(args).map_err(wrong_settings)? })
    }

    /// True if the draft model on the command line was chosen for another model.
    fn has_draft_of_another_model(&self, id: &str, config: &ServeConfig) -> bool {
        let named = |load: &LoadSettings| {
            load.drafts.as_ref().is_some_and(|drafts| matches!(drafts.draft_model, DraftModel::Model(_)))
        };
        id != local_models::id(&self.config().model, &self.settings) && named(&config.load)
    }

    /// Opens a model's files, and checks its tensors and its memory plan. Another model is loaded, so the plan is
    /// checked with the GPU's working set from before that load.
    fn check_checkpoint(&self, id: &str, config: &ServeConfig) -> Result<(), CommandError> {
        let checkpoint = CheckpointMeta::open(&config.model, config.generation.clone())?;
        let gpu = if config.load.flags.device == Device::Cpu { None } else { *self.working_set.lock() };
        match check_model(&checkpoint, &config.load, gpu) {
            Err(_) if self.has_draft_of_another_model(id, config) => {
                check_model(&checkpoint, &without_named_draft(&config.load), gpu)
            }
            checked => checked,
        }
    }

    /// Loads a model and starts its engine. Blocks until the model is loaded.
    pub fn open(&self, id: &str, config: &ServeConfig) -> Result<HostedModel, CommandError> {
        let metrics = &self.metrics;
        let chosen = DeviceChoice::new(&config.load)?;
        *self.working_set.lock() = chosen.working_set();
        let mut checkpoint = CheckpointMeta::open(&config.model, config.generation.clone())?;
        checkpoint.name = id.into();
        let model = match load_model(&checkpoint, &config.load, chosen, metrics) {
            // The draft that was chosen for the first model may not fit this model.
            Err(error) if self.has_draft_of_another_model(id, config) => {
                tracing::warn!(%error, "cannot load {id} with the draft of another model; loading it without");
                let load = without_named_draft(&config.load);
                load_model(&checkpoint, &load, DeviceChoice::new(&load)?, metrics)?
            }
            loaded => loaded?,
        };
        pack_or_suggest(config.pack, &model.model, &checkpoint.dir);
        self.memory.set_plan(model.requests);
        let options = Options {
            parallel: model.model.plan().parallel,
            max_queue: config.max_queue,
            max_queue_bytes: self.memory.waiting_limit(),
            disk_cache: storage(config, &checkpoint, &model),
            ..Options::default()
        };
        let mut hosted = host_model(id, checkpoint, model, config.load.drafts.as_ref(), options, metrics)?;
        hosted.model.thinking = config.thinking;
        hosted.model.limits = RequestLimits {
            max_tokens: config.max_tokens,
            thinking_budget: config.thinking_budget,
            max_prompt_tokens: config.max_prompt_tokens,
        };
        let grammars = hosted.model.grammars.clone();
        let sorting = std::thread::Builder::new()
            .name("grammars".into())
            .spawn(move || grammars.warm_up())
            .map_err(CommandError::io("starting a thread"))?;
        metrics.set_model(id);
        let metrics = metrics.clone();
        let stop_engine = hosted.unload;
        hosted.unload = Box::new(move || {
            stop_engine();
            // Sorting a large vocabulary takes a hundred megabytes, which are freed when the sorting thread ends.
            let _ = sorting.join();
            metrics.clear_model();
            os::trim_memory();
        });
        Ok(hosted)
    }
}

/// The same settings with the draft of the model itself, if it has one.
fn without_named_draft(load: &LoadSettings) -> LoadSettings {
    let drafts = load.drafts.clone().map(|drafts| DraftArgs { draft_model: DraftModel::Auto, ..drafts });
    LoadSettings { drafts, ..load.clone() }
}

fn timeouts(config: &ServeConfig) -> HostTimeouts {
    HostTimeouts { keep_alive: config.keep_alive, request: config.request_timeout, ..HostTimeouts::default() }
}

/// The directory of the prompt cache on disk.
fn prompt_cache_dir(config: &ServeConfig) -> Option<PathBuf> {
    match &config.prompt_cache_dir {
        PromptCacheDir::Off => None,
        PromptCacheDir::Cache => Some(os::cache_dir()?.join("prompts")),
        PromptCacheDir::In(dir) => Some(dir.clone()),
    }
}

/// Options of the prompt cache on disk. The bytes of a snapshot depend on the tokens and on everything in the key. The
/// key includes this executable, because another build may round differently.
fn storage(config: &ServeConfig, checkpoint: &CheckpointMeta, loaded: &ReadyModel) -> Option<DiskCacheOptions> {
    let Some(dir) = prompt_cache_dir(config) else {
        if config.prompt_cache_dir == PromptCacheDir::Cache {
            tracing::warn!("HOME is not set; running without the prompt cache on disk, see --prompt-cache-dir");
        }
        return None;
    };
    let identity = Index::open(&checkpoint.dir).and_then(|index| file_identity(&index.files));
    let program = std::env::current_exe().and_then(std::fs::metadata).map(|meta| (meta.len(), meta.modified().ok()));
    let (Ok(identity), Ok(program)) = (identity, program) else {
        tracing::warn!("cannot identify the model's files or this program; running without the prompt cache on disk");
        return None;
    };
    let version = env!("CARGO_PKG_VERSION");
    let device = loaded.device;
    let model = loaded.model.config();
    let key = format!("{version} {program:?} {device} {model:?} {:?} {identity}", config.load.flags.kv_bits);
    Some(DiskCacheOptions { dir, limit: config.prompt_cache_disk, key })
}

/// A failure because of the settings, which clients do not see.
fn wrong_settings(detail: String) -> LoadFailure {
    LoadFailure { detail, message: "its settings are invalid; the server's log says why".into() }
}
