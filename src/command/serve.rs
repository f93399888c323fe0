//! `moestro serve`: opens the port, loads the model behind it, says so, and serves until it is told to stop.

use super::{
    Checkpoint, Loaded,
    device::{CPU, Chosen},
    load_model,
};
use crate::{
    chat::grammar::Grammars,
    checkpoint::{identity::identity, index::Index},
    config::{PromptDir, Serve},
    engine::{self, Options, Storage, Worker},
    error::CommandError,
    http::{self, App, Door, Guard, ModelCard},
    metrics::Metrics,
    model::Model,
    platform::{os, service},
};
use serde_json::json;
use std::{
    io::{self, Write},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    task::spawn_blocking,
};

/// Serves until Ctrl-C or SIGTERM. A second one does not wait for what is running.
pub fn run(config: Serve) -> Result<(), CommandError> {
    // The memory of one large request is free for the next, or for another program.
    os::return_freed_memory();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build();
    let runtime = runtime.map_err(|source| CommandError::Io { what: "starting threads".into(), source })?;
    let outcome = runtime.block_on(serve(config));
    // A load, or a forward pass that a second signal cut short, may still be going on.
    runtime.shutdown_background();
    outcome
}

async fn serve(config: Serve) -> Result<(), CommandError> {
    // Until the model is loaded. Looking for a GPU may mean compiling its kernels: that, too, is done behind the open port.
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), CPU);
    // A header value, as `cli::values::origin` has checked.
    let cors = config.cors.as_deref().and_then(|origin| origin.parse().ok());
    let mut stop = Stop::new().map_err(|source| CommandError::Io { what: "watching for signals".into(), source })?;

    let listener = match inherited()? {
        Some(listener) => listener,
        None => bind(&config.host, config.port).await?,
    };
    let address = listener.local_addr().map_err(|source| CommandError::Io { what: config.host.clone(), source })?;
    let mut door = Door::new(metrics.clone(), config.api_key.clone(), cors.clone());
    door.keep_billing_header = config.keep_billing_header;
    door.guard = Guard::new(address.ip(), &config.allowed_host, cors);
    let door = Arc::new(door);
    let (closing, closed) = oneshot::channel::<()>();
    let shutdown = async { drop(closed.await) };
    let mut server = tokio::spawn(http::serve(listener, door.clone(), shutdown));
    service::ready("loading the model");
    if let Some(every) = service::watched() {
        tokio::spawn(keep_alive(every));
    }

    let begin = std::time::Instant::now();
    let opening = {
        let (config, metrics, door) = (config.clone(), metrics.clone(), door.clone());
        spawn_blocking(move || open(&config, &metrics, &door))
    };
    let opened = tokio::select! {
        opened = opening => opened.map_err(|panic| failed("loading the model", io::Error::other(panic)))??,
        // Nobody has been answered yet, so there is nobody to wait for.
        () = stop.signal() => return Ok(()),
    };
    let ready = json!({
        "event": "ready",
        "port": address.port(),
        "model": opened.name,
        "device": opened.device,
        "plan": opened.plan,
    });
    // A closed stdout is no error.
    let _ = writeln!(io::stdout(), "{ready}").and_then(|()| io::stdout().flush());
    service::ready(&format!("serving {}", opened.name));
    tracing::info!("{} is served at http://{address}/v1 after {:.1?}", opened.name, begin.elapsed());

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
    // The model writes down what it wants to remember when it goes.
    tokio::select! {
        _ = spawn_blocking(move || opened.worker.join()) => Ok(()),
        () = stop.signal() => Err(CommandError::Interrupted),
    }
}

struct Opened {
    name: String,
    device: &'static str,
    plan: serde_json::Value,
    worker: Worker,
}

/// Loads the model, starts its engine, and opens the door. Takes its time.
fn open(config: &Serve, metrics: &Arc<Metrics>, door: &Door) -> Result<Opened, CommandError> {
    let chosen = Chosen::new(&config.load)?;
    let checkpoint = Checkpoint::open(&config.model, config.generation.clone())?;
    let loaded = load_model(&checkpoint, &config.load, chosen, metrics)?;
    let options = Options {
        max_queue: config.max_queue,
        eos: checkpoint.generation.eos.clone(),
        usable_vocab: checkpoint.tokenizer.vocab_size().min(loaded.model.vocab()),
        request_timeout: config.request_timeout,
        prompt_cache: loaded.model.plan().prompt_cache,
        storage: storage(config, &checkpoint, &loaded),
        ..Options::default()
    };
    let options = super::speculation(config.load.drafts.as_ref(), options);
    let (engine, worker) = engine::spawn_with(loaded.model, loaded.draft, options, metrics.clone())
        .map_err(|source| failed("starting the engine's thread", source))?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    door.budget.plan(loaded.requests);
    door.open(App {
        engine,
        defaults: checkpoint.sampling(),
        card: ModelCard {
            id: checkpoint.name.clone(),
            created,
            experts_per_token: loaded.experts_per_token,
            quantisation: checkpoint.quantisation(),
        },
        grammars: Arc::new(Grammars::new(checkpoint.tokenizer.clone(), &checkpoint.generation.eos)),
        tokenizer: checkpoint.tokenizer,
        template: checkpoint.template,
        thinking: config.thinking,
        plan: loaded.plan.clone(),
    });
    Ok(Opened { name: checkpoint.name, device: loaded.device, plan: loaded.plan, worker })
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

/// The disk's store of prompts' checkpoints, under a key that names what their bytes depend on beside the tokens. This
/// very program is part of it: another build may round otherwise.
fn storage(config: &Serve, checkpoint: &Checkpoint, loaded: &Loaded) -> Option<Storage> {
    let dir = match &config.prompt_cache_dir {
        PromptDir::Off => return None,
        PromptDir::Cache => os::cache_dir()?.join("prompts"),
        PromptDir::In(dir) => dir.clone(),
    };
    let identity = Index::open(&checkpoint.dir).and_then(|index| identity(&index.files));
    let program = std::env::current_exe().and_then(std::fs::metadata).map(|meta| (meta.len(), meta.modified().ok()));
    let (Ok(identity), Ok(program)) = (identity, program) else {
        tracing::warn!("no checkpoints of prompts are kept on the disk: what they would belong to cannot be told");
        return None;
    };
    let (version, device, model) = (env!("CARGO_PKG_VERSION"), loaded.device, loaded.model.config());
    let key = format!("{version} {program:?} {device} {model:?} {:?} {identity}", config.load.kv_bits);
    Some(Storage { dir, limit: config.prompt_cache_disk, key })
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
struct Stop {
    interrupt: Signal,
    terminate: Signal,
}

impl Stop {
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
