//! `moestro serve`: opens the port, loads the model, prints the ready line, serves until a signal. Prints the reason for
//! the end, also if it ends earlier.

use super::{
    device_choice::CPU,
    load::{describe_plan, log_for_files},
    local_models,
    model_catalog::ModelCatalog,
    pull,
    text::wrapped,
};
use crate::{
    config::{ModelSource, ServeConfig, config_file::Settings},
    demo,
    error::CommandError,
    http::{self, ApiSet, ImageUrls, ModelHost, OriginPolicy, ServerState},
};
use moestro_base::{
    error::StoreError,
    metrics::Metrics,
    platform::{activation, os},
};
use moestro_model::error::ModelError;
use serde_json::{Value, json};
use std::{
    future::pending,
    io::{self, IsTerminal, Write},
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    net::TcpListener,
    signal::unix::{Signal, SignalKind, signal},
    sync::oneshot,
    task::{JoinHandle, spawn_blocking},
};

/// Serves until Ctrl-C or SIGTERM, then waits for running answers. A second signal ends the server immediately.
pub fn run(config: ServeConfig, settings: &Settings) -> Result<(), CommandError> {
    // Returns freed memory to the system after a large request, so that other programs can use the memory.
    os::return_freed_memory();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build();
    let outcome = runtime.map_err(CommandError::io("starting threads")).and_then(|runtime| {
        let outcome = runtime.block_on(serve(config, settings.clone()));
        // Does not wait for a model that is being loaded, or for a forward pass that the second signal interrupted.
        runtime.shutdown_background();
        pull::interrupt();
        outcome
    });
    if !io::stdout().is_terminal() {
        // A closed stdout is not an error.
        let line = exiting_line(&outcome, settings);
        let _ = writeln!(io::stdout(), "{line}").and_then(|()| io::stdout().flush());
    }
    outcome.map(drop)
}

/// The line with the reason why the server ended, before or after the ready line. The reasons of errors and `detail`
/// are those that SwiftLM prints.
fn exiting_line(outcome: &Result<&'static str, CommandError>, settings: &Settings) -> Value {
    let error = match outcome {
        Ok(signal) => return json!({"event": "exiting", "reason": signal}),
        Err(CommandError::Interrupted) => return json!({"event": "exiting", "reason": "second signal"}),
        Err(error) => error,
    };
    let detail = format!("{error}{}", local_models::hint(error, settings));
    json!({"event": "exiting", "reason": failure_reason(error), "detail": detail, "error": error.to_string()})
}

/// The name of an error for programs that start the server.
fn failure_reason(error: &CommandError) -> &'static str {
    match error {
        CommandError::PortInUse { .. } => "port_conflict",
        CommandError::Store(StoreError::Memory(_))
        | CommandError::Model(ModelError::Memory(_) | ModelError::Store(StoreError::Memory(_))) => "out_of_memory",
        CommandError::NoSuchDirectory(_) | CommandError::Chat(_) | CommandError::Store(_) | CommandError::Model(_) => {
            "model_load_failed"
        }
        _ => "error",
    }
}

/// Serves until a signal and returns the name of the signal.
async fn serve(config: ServeConfig, settings: Settings) -> Result<&'static str, CommandError> {
    // The device is `cpu` until the model is loaded. The GPU is opened after the port, because its kernels may have to
    // be compiled.
    let metrics = Metrics::new(env!("CARGO_PKG_VERSION"), CPU);
    let watch = |kind| signal(kind).map_err(CommandError::io("watching for signals"));
    let hangup = watch(SignalKind::hangup())?;
    // On SIGHUP, a server on a terminal ends, because the terminal was closed. A service reloads its configuration.
    let has_terminal = io::stdout().is_terminal() || io::stderr().is_terminal();
    let (hangup_stops, hangup_reloads) = if has_terminal { (Some(hangup), None) } else { (None, Some(hangup)) };
    let mut stop = StopSignals {
        interrupt: watch(SignalKind::interrupt())?,
        terminate: watch(SignalKind::terminate())?,
        hangup: hangup_stops,
    };

    let mut listeners = inherited_listeners()?;
    let on_demand = !listeners.is_empty();
    if !on_demand {
        listeners.push(bind(&config.host, config.port, "--port").await?);
    }
    let address = listeners[0].local_addr().map_err(CommandError::io(&config.host))?;
    let mut server = new_server(&config, metrics.clone(), address.ip());
    let first = local_models::id(&config.model, &settings);
    let is_demo = config.model == ModelSource::Demo;
    if config.models_dir.is_some()
        && let Some(dir) = local_models::models_dir(config.models_dir.as_deref())
        && let Err(error) = dir.read_dir()
    {
        tracing::warn!(dir = %dir.display(), %error, "cannot read --models-dir; its models are not listed");
    }
    let catalog = Arc::new(ModelCatalog::new(config.clone(), settings, metrics.clone(), server.memory.clone()));
    server.models = ModelHost::new(catalog.clone(), catalog.timeouts(), config.max_queue);
    if on_demand {
        // The service manager opened the port. The first request loads the model.
        server.models.set_default(&first);
    }
    let server = Arc::new(server);
    if let Some(hangup) = hangup_reloads {
        tokio::spawn(reload_at_hangup(hangup, server.clone(), catalog.clone(), address.ip()));
    }
    let (closing, closed) = oneshot::channel::<()>();
    let shutdown = async { drop(closed.await) };
    let mut listeners: Vec<_> = listeners.into_iter().map(|listener| (listener, ApiSet::Standard)).collect();
    if let Some(port) = config.ollama_port {
        let listener = bind(&config.host, port, "--ollama-port").await?;
        tracing::info!("Ollama's API is at http://{}", listener.local_addr().map_err(CommandError::io(&config.host))?);
        listeners.push((listener, ApiSet::WithOllama));
    }
    let mut running = tokio::spawn(http::serve(listeners, server.clone(), shutdown));
    activation::notify_ready("loading the model");
    if let Some(interval) = activation::watchdog_interval() {
        tokio::spawn(feed_watchdog(interval));
    }

    let start = Instant::now();
    let plan = if on_demand {
        Value::Null
    } else {
        let id = first.clone();
        let loading = spawn_blocking(move || catalog.open(&id, &config));
        let loaded = tokio::select! {
            loaded = loading => loaded.map_err(|panic| CommandError::io("loading the model")(io::Error::other(panic)))??,
            // No request is running yet, so there is nothing to drain.
            signal = stop.recv() => return Ok(signal),
        };
        let plan = loaded.model.plan.clone();
        server.models.install(loaded);
        plan
    };
    // A closed stdout is not an error.
    let _ = writeln!(io::stdout(), "{}", ready_line(&first, address, &plan)).and_then(|()| io::stdout().flush());
    activation::notify_ready(&format!("serving {first}"));
    log_for_files(&format!("serving {first} at http://{address}/v1 after {:.1?}", start.elapsed()));
    if is_demo {
        tracing::info!("{}", demo::ABOUT);
    }

    let signal = tokio::select! {
        ended = &mut running => {
            result_of(ended)?;
            return Err(CommandError::io("serving")(io::Error::other("the port was closed")));
        }
        signal = stop.recv() => signal,
    };
    tracing::info!("{signal}: draining; a second signal stops at once");
    let _ = closing.send(());
    drain(running, &server, &mut stop).await.map(|()| signal)
}

/// The server without a model. Logs a warning if other machines can use the server.
fn new_server(config: &ServeConfig, metrics: Arc<Metrics>, address: IpAddr) -> ServerState {
    // `cli::values::origin` has checked that the origin is a valid header value.
    let cors = config.cors.as_deref().and_then(|origin| origin.parse().ok());
    let mut server = ServerState::new(metrics, config.api_key.clone(), cors.clone());
    server.keep_billing_header = config.keep_billing_header;
    if config.reuse_tools {
        server.reuse_tools();
    }
    server.image_urls = Arc::new(ImageUrls::new(&config.image_urls));
    server.origins = OriginPolicy::new(address, &config.allowed_host, cors, config.api_key.is_some());
    if !address.is_loopback() && config.api_key.is_none() && config.allowed_host.is_empty() {
        tracing::warn!(
            "other machines can use this server without a key; set --api-key-file, or name the server with --allowed-host"
        );
    }
    server
}

/// Reloads the configuration at every SIGHUP.
async fn reload_at_hangup(mut hangup: Signal, server: Arc<ServerState>, catalog: Arc<ModelCatalog>, address: IpAddr) {
    while hangup.recv().await.is_some() {
        match catalog.reload(&server, address) {
            Ok(()) => tracing::info!("reloaded the configuration"),
            Err(error) => tracing::error!(error, "cannot reload the configuration; keeping the running settings"),
        }
    }
}

/// Waits for running answers, then unloads the model. A second signal ends the wait.
async fn drain(
    running: JoinHandle<io::Result<()>>,
    server: &ServerState,
    stop: &mut StopSignals,
) -> Result<(), CommandError> {
    tokio::select! {
        ended = running => result_of(ended)?,
        _ = stop.recv() => return Err(CommandError::Interrupted),
    }
    tokio::select! {
        () = server.models.unload_now() => Ok(()),
        _ = stop.recv() => Err(CommandError::Interrupted),
    }
}

/// The line that announces the open port. The line is JSON for programs, and a sentence on a terminal.
fn ready_line(model: &str, address: SocketAddr, plan: &Value) -> String {
    if !io::stdout().is_terminal() {
        let port = address.port();
        let device = &plan["device"];
        return json!({"event": "ready", "port": port, "model": model, "device": device, "plan": plan}).to_string();
    }
    let plan = describe_plan(plan);
    let line =
        format!("{model} answers {plan}: http://{address}/v1, with a page at http://{address}/ (Ctrl-C ends it)");
    wrapped(&line, &io::stdout())
}

/// The listening sockets that the service manager passed on. There can be several sockets, because a host name can have
/// several addresses.
fn inherited_listeners() -> Result<Vec<TcpListener>, CommandError> {
    let inherited = activation::inherited_listeners().and_then(|listeners| {
        let listen = |listener: std::net::TcpListener| {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        };
        listeners.into_iter().map(listen).collect()
    });
    inherited.map_err(CommandError::io("the service manager's sockets"))
}

/// Notifies systemd's watchdog as long as the runtime makes progress.
async fn feed_watchdog(interval: Duration) {
    loop {
        activation::notify_watchdog();
        tokio::time::sleep(interval).await;
    }
}

/// Opens a port. `flag` sets the port.
async fn bind(host: &str, port: u16, flag: &'static str) -> Result<TcpListener, CommandError> {
    // An IPv6 address may have brackets, as in a URL.
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    TcpListener::bind((bare, port)).await.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => CommandError::PortInUse { host: host.into(), port, flag },
        _ => CommandError::io(format!("listening on port {port} of {host}"))(source),
    })
}

fn result_of(ended: Result<io::Result<()>, tokio::task::JoinError>) -> Result<(), CommandError> {
    ended.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(CommandError::io("serving"))
}

/// The signals that stop the server: Ctrl-C, SIGTERM, and the hangup of the server's terminal.
struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Option<Signal>,
}

impl StopSignals {
    /// Waits for the next signal and returns its name.
    async fn recv(&mut self) -> &'static str {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => "SIGINT",
            _ = self.terminate.recv() => "SIGTERM",
            _ = hangup => "SIGHUP",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moestro_compute::device::DeviceError;

    #[test]
    fn failed_allocation_means_out_of_memory() {
        let why = || "cannot allocate 1 bytes".to_owned();
        for (error, reason) in
            [(DeviceError::Memory(why()), "out_of_memory"), (DeviceError::Failed(why()), "model_load_failed")]
        {
            assert_eq!(failure_reason(&CommandError::Model(ModelError::from(error))), reason);
        }
    }
}
