//! `moestro serve`: opens the port, loads the model behind it, says so, and serves until it is told to stop.

use super::{
    CheckpointMeta,
    device_choice::{CPU, DeviceChoice},
    load_model,
    local_models::{self, CatalogEntry, Origin},
};
use crate::{
    chat::grammar::GrammarCompiler,
    checkpoint::{identity::file_identity, index::Index},
    cli::Command,
    config::{
        DraftModel, DraftOptions, LoadSettings, ModelSource, PromptCacheDir, ServeConfig,
        config_file::{self, Settings},
    },
    engine::{self, DiskCacheOptions, Options},
    error::CommandError,
    http::{
        self, HostTimeouts, HostedModel, LoadedModel, ModelCard, ModelEntry, ModelHost, ModelLoader, OriginPolicy,
        RequestMemory, ServerState,
    },
    metrics::Metrics,
    model::Model,
    platform::{os, service},
};
use parking_lot::RwLock;
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    io::{self, IsTerminal, Write},
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    task::spawn_blocking,
};

/// Serves until Ctrl-C or SIGTERM. A second one does not wait for what is running.
pub fn run(config: ServeConfig, settings: &Settings) -> Result<(), CommandError> {
    // The memory of one large request is free for the next, or for another program.
    os::return_freed_memory();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build();
    let runtime = runtime.map_err(|source| CommandError::Io { what: "starting threads".into(), source })?;
    let outcome = runtime.block_on(serve(config, settings.clone()));
    // A load, or a forward pass that a second signal cut short, may still be going on.
    runtime.shutdown_background();
    outcome
}

async fn serve(config: ServeConfig, settings: Settings) -> Result<(), CommandError> {
    // Until the model is loaded. Looking for a GPU may mean compiling its kernels: that, too, is done behind the open port.
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), CPU);
    // A header value, as `cli::values::origin` has checked.
    let cors = config.cors.as_deref().and_then(|origin| origin.parse().ok());
    let mut stop =
        StopSignals::new().map_err(|source| CommandError::Io { what: "watching for signals".into(), source })?;

    let inherited = inherited()?;
    let on_demand = inherited.is_some();
    let listener = match inherited {
        Some(listener) => listener,
        None => bind(&config.host, config.port).await?,
    };
    let address = listener.local_addr().map_err(|source| CommandError::Io { what: config.host.clone(), source })?;
    let mut door = ServerState::new(metrics.clone(), config.api_key.clone(), cors.clone());
    door.keep_billing_header = config.keep_billing_header;
    door.origins = OriginPolicy::new(address.ip(), &config.allowed_host, cors);
    let first = local_models::id(&config.model, &settings);
    let (metrics, budget) = (metrics.clone(), door.memory.clone());
    let shelf = Arc::new(ModelCatalog { config: RwLock::new(config.clone()), settings, metrics, budget });
    door.models = ModelHost::new(shelf.clone(), times(&config), config.max_queue);
    if on_demand {
        // The port was open before: who asks waits for the model, and nothing is loaded for nobody.
        door.models.set_default(&first);
    }
    let door = Arc::new(door);
    let mut hangup = signal(SignalKind::hangup()).map_err(|source| failed("watching for signals", source))?;
    let (reloading, shelf_again) = (door.clone(), shelf.clone());
    tokio::spawn(async move {
        while hangup.recv().await.is_some() {
            match shelf_again.reload(&reloading, address.ip()) {
                Ok(()) => tracing::info!("the configuration was read again"),
                Err(why) => tracing::error!(why, "the configuration was read again and is not used"),
            }
        }
    });
    let (closing, closed) = oneshot::channel::<()>();
    let shutdown = async { drop(closed.await) };
    let mut server = tokio::spawn(http::serve(listener, door.clone(), shutdown));
    service::ready("loading the model");
    if let Some(every) = service::watched() {
        tokio::spawn(keep_alive(every));
    }

    let begin = Instant::now();
    let plan = if on_demand {
        Value::Null
    } else {
        let id = first.clone();
        let opening = spawn_blocking(move || shelf.open(&id, &config));
        let opened = tokio::select! {
            opened = opening => opened.map_err(|panic| failed("loading the model", io::Error::other(panic)))??,
            // Nobody has been answered yet, so there is nobody to wait for.
            () = stop.signal() => return Ok(()),
        };
        let plan = opened.model.plan.clone();
        door.models.install(opened);
        plan
    };
    // A closed stdout is no error.
    let _ = writeln!(io::stdout(), "{}", ready(&first, address, &plan)).and_then(|()| io::stdout().flush());
    service::ready(&format!("serving {first}"));
    tracing::info!("{first} is served at http://{address}/v1 after {:.1?}", begin.elapsed());

    tokio::select! {
        ended = &mut server => return over(ended),
        () = stop.signal() => {}
    }
    tracing::info!("draining; a second signal stops at once");
    let _ = closing.send(());
    tokio::select! {
        ended = server => over(ended)?,
        () = stop.signal() => return Err(CommandError::Interrupted),
    }
    tokio::select! {
        () = door.models.unload_now() => Ok(()),
        () = stop.signal() => Err(CommandError::Interrupted),
    }
}

/// Loads models for a server: the one it was started for, and whatever else is on this machine.
struct ModelCatalog {
    config: RwLock<ServeConfig>,
    settings: Settings,
    metrics: Arc<Metrics>,
    budget: Arc<RequestMemory>,
}

impl ModelLoader for ModelCatalog {
    fn list(&self) -> Vec<ModelEntry> {
        let listed = |entry: &CatalogEntry| ModelEntry { id: entry.id.clone(), created: entry.created() };
        self.entries().iter().map(listed).collect()
    }

    fn load(&self, id: &str) -> Result<HostedModel, String> {
        let begin = Instant::now();
        let config = self.config_of(id)?;
        let loaded = self.open(id, &config).map_err(|error| error.to_string())?;
        tracing::info!("{id} is loaded after {:.1?}", begin.elapsed());
        Ok(loaded)
    }

    fn clear_prompt_caches(&self) -> Result<(), String> {
        let others = self.entries().into_iter().filter_map(|entry| self.config_of(&entry.id).ok());
        let dirs: BTreeSet<PathBuf> = others.chain([self.config()]).filter_map(|config| prompts(&config)).collect();
        for dir in dirs {
            engine::clear_prompt_dir(&dir).map_err(|error| {
                tracing::warn!(dir = %dir.display(), %error, "prompts could not be removed");
                format!("prompts on the disk could not be removed: {error}")
            })?;
        }
        Ok(())
    }
}

impl ModelCatalog {
    fn config(&self) -> ServeConfig {
        self.config.read().clone()
    }

    /// Reads the configuration again. The key, the names of the server and the times of requests and models hold at once, everything else
    /// about a model when it is loaded next; the address, the queue's length and the log need a restart.
    fn reload(&self, door: &ServerState, address: IpAddr) -> Result<(), String> {
        let (typed, _) = config_file::parse(self.settings.args.clone()).map_err(|error| error.to_string())?;
        let Command::Serve(typed) = typed.command else { return Err("this is not `moestro serve`".into()) };
        let model = self.config().model;
        let config = ServeConfig { model, ..ServeConfig::new(typed)? };
        let cors = config.cors.as_deref().and_then(|origin| origin.parse().ok());
        door.set_api_key(config.api_key.clone());
        door.origins.replace(&OriginPolicy::new(address, &config.allowed_host, cors));
        door.models.set_timeouts(times(&config));
        *self.config.write() = config;
        Ok(())
    }

    /// The models on this machine, the one that was typed among them wherever it lies.
    fn entries(&self) -> Vec<CatalogEntry> {
        let config = self.config();
        let mut all = local_models::all(&self.settings, config.models_dir.as_deref());
        let id = local_models::id(&config.model, &self.settings);
        if let ModelSource::Directory(dir) = &config.model
            && !all.iter().any(|entry| entry.id == id)
        {
            let (source, dir) = (config.model.clone(), Some(dir.clone()));
            all.insert(0, CatalogEntry { id, source, origin: Origin::Configuration, dir });
        }
        all
    }

    /// The command line for another model, with the settings that the configuration has for it.
    fn config_of(&self, id: &str) -> Result<ServeConfig, String> {
        let first = self.config();
        if id == local_models::id(&first.model, &self.settings) {
            return Ok(first);
        }
        let entry = self.entries().into_iter().find(|entry| entry.id == id);
        let entry = entry.ok_or_else(|| "it is not on this machine any more".to_owned())?;
        let (typed, _) =
            config_file::parse_for(self.settings.args.clone(), Some(id)).map_err(|error| error.to_string())?;
        let Command::Serve(typed) = typed.command else { return Err("this is not `moestro serve`".into()) };
        Ok(ServeConfig { model: entry.source, ..ServeConfig::new(typed)? })
    }

    /// True if a draft of its own was named for the first model, and this is not that.
    fn has_borrowed_draft(&self, id: &str, config: &ServeConfig) -> bool {
        let named = |load: &LoadSettings| {
            load.drafts.as_ref().is_some_and(|drafts| matches!(drafts.draft, DraftModel::Model(_)))
        };
        id != local_models::id(&self.config().model, &self.settings) && named(&config.load)
    }

    /// Loads the model and starts its engine. Takes its time.
    fn open(&self, id: &str, config: &ServeConfig) -> Result<HostedModel, CommandError> {
        let metrics = &self.metrics;
        let chosen = DeviceChoice::new(&config.load)?;
        let checkpoint = CheckpointMeta::open(&config.model, config.generation.clone())?;
        let model = match load_model(&checkpoint, &config.load, chosen, metrics) {
            // The draft was typed for the first model: for another it may not fit.
            Err(error) if self.has_borrowed_draft(id, config) => {
                tracing::warn!(%error, "{id} is loaded without the draft that was named for another model");
                let drafts =
                    config.load.drafts.clone().map(|drafts| DraftOptions { draft: DraftModel::Auto, ..drafts });
                let load = LoadSettings { drafts, ..config.load.clone() };
                load_model(&checkpoint, &load, DeviceChoice::new(&load)?, metrics)?
            }
            loaded => loaded?,
        };
        let options = Options {
            max_queue: config.max_queue,
            eos: checkpoint.generation.eos.clone(),
            usable_vocab: checkpoint.tokenizer.vocab_size().min(model.model.info().vocab),
            prompt_cache: model.model.plan().prompt_cache,
            disk_cache: storage(config, &checkpoint, &model),
            ..Options::default()
        };
        let options = super::speculation(config.load.drafts.as_ref(), options);
        let (engine, worker) = engine::spawn_with(model.model, model.draft, options, metrics.clone())
            .map_err(|source| failed("starting the engine's thread", source))?;
        let grammars = Arc::new(GrammarCompiler::new(checkpoint.tokenizer.clone(), &checkpoint.generation.eos));
        let warm = grammars.clone();
        let sorting = std::thread::Builder::new()
            .name("grammars".into())
            .spawn(move || warm.warm_up())
            .map_err(|source| failed("starting a thread", source))?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        self.budget.set_plan(model.requests);
        metrics.set_model(id);
        let app = LoadedModel {
            engine,
            defaults: checkpoint.sampling(),
            card: ModelCard {
                id: id.into(),
                created,
                experts_per_token: model.experts_per_token,
                quantisation: checkpoint.quantisation(),
            },
            grammars,
            tokenizer: checkpoint.tokenizer,
            template: checkpoint.template,
            thinking: config.thinking,
            plan: model.plan,
        };
        let metrics = metrics.clone();
        let unload = move || {
            // The model writes down what it wants to remember when it goes.
            let _ = worker.join();
            // Sorting a large vocabulary takes a hundred megabytes, which are free only when its thread has ended.
            let _ = sorting.join();
            metrics.clear_model();
            os::trim_memory();
        };
        Ok(HostedModel { id: id.into(), model: app, unload: Box::new(unload) })
    }
}

/// The line that says that the port answers: JSON for programs, words for who sits at a terminal.
fn ready(model: &str, address: SocketAddr, plan: &Value) -> String {
    if !io::stdout().is_terminal() {
        let (port, device) = (address.port(), &plan["device"]);
        return json!({"event": "ready", "port": port, "model": model, "device": device, "plan": plan}).to_string();
    }
    let device = plan["device"].as_str().unwrap_or_default();
    let experts = match plan["residency"].as_f64() {
        Some(share) if share < 1.0 => format!("{:.0} % of the experts in memory", share * 100.0),
        _ => "all experts in memory".into(),
    };
    let context = &plan["context"];
    format!(
        "{model} answers on {device}, {experts}, context {context}: http://{address}/v1, with a page at http://{address}/ \
         (Ctrl-C ends it)"
    )
}

fn times(config: &ServeConfig) -> HostTimeouts {
    HostTimeouts { keep_alive: config.keep_alive, request: config.request_timeout, ..HostTimeouts::default() }
}

/// The port that the service manager has opened, if it has.
fn inherited() -> Result<Option<TcpListener>, CommandError> {
    let listener = service::inherited().and_then(|listener| {
        let Some(listener) = listener else { return Ok(None) };
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener).map(Some)
    });
    listener.map_err(|source| failed("the service manager's socket", source))
}

/// As long as connections can be served, this says so.
async fn keep_alive(every: Duration) {
    loop {
        service::alive();
        tokio::time::sleep(every).await;
    }
}

/// The directory of prompts' checkpoints.
fn prompts(config: &ServeConfig) -> Option<PathBuf> {
    match &config.prompt_cache_dir {
        PromptCacheDir::Off => None,
        PromptCacheDir::Cache => Some(os::cache_dir()?.join("prompts")),
        PromptCacheDir::In(dir) => Some(dir.clone()),
    }
}

/// The disk's store of prompts' checkpoints, under a key that names what their bytes depend on beside the tokens. This
/// very program is part of it: another build may round otherwise.
fn storage(config: &ServeConfig, checkpoint: &CheckpointMeta, loaded: &super::ReadyModel) -> Option<DiskCacheOptions> {
    let dir = prompts(config)?;
    let identity = Index::open(&checkpoint.dir).and_then(|index| file_identity(&index.files));
    let program = std::env::current_exe().and_then(std::fs::metadata).map(|meta| (meta.len(), meta.modified().ok()));
    let (Ok(identity), Ok(program)) = (identity, program) else {
        tracing::warn!("no checkpoints of prompts are kept on the disk: what they would belong to cannot be told");
        return None;
    };
    let (version, device, model) = (env!("CARGO_PKG_VERSION"), loaded.device, loaded.model.config());
    let key = format!("{version} {program:?} {device} {model:?} {:?} {identity}", config.load.kv_bits);
    Some(DiskCacheOptions { dir, limit: config.prompt_cache_disk, key })
}

async fn bind(host: &str, port: u16) -> Result<TcpListener, CommandError> {
    // An address of version 6 may be written as in a URL.
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    TcpListener::bind((bare, port)).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => CommandError::PortInUse { host: host.into(), port },
        _ => failed(&format!("listening on port {port} of {host}"), source),
    })
}

fn failed(what: &str, source: io::Error) -> CommandError {
    CommandError::Io { what: what.into(), source }
}

fn over(ended: Result<io::Result<()>, tokio::task::JoinError>) -> Result<(), CommandError> {
    ended.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(|source| failed("serving", source))
}

/// Ctrl-C and SIGTERM.
struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    fn new() -> io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    /// The next one of either.
    async fn signal(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
