//! `moestro pull org/name`: downloads a model. `serve org/name` does the same for a model that is not on this machine.

use super::{
    download_speed::DownloadSpeed,
    progress,
    text::{print_line, print_note, printable},
};
use crate::{
    cli,
    config::{MAIN_BRANCH, hub_address, is_hub_id},
    error::CommandError,
};
use indicatif::ProgressBar;
use moestro_base::{error::StoreError, platform::DeferredSignals};
use moestro_model::checkpoint::{
    hub::{DownloadProgress, Hub},
    licence::licence,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    io::{self, IsTerminal, Write},
    path::PathBuf,
    sync::{
        Arc, Weak,
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Interval at which a download looks for a signal that ends the program.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between two progress events of `--json`.
const EVENT_INTERVAL: Duration = Duration::from_secs(1);
const INTERRUPTED: &str = "the download is interrupted; the same command resumes it";

/// The hub whose download is running.
static RUNNING: Mutex<Weak<Hub>> = Mutex::new(Weak::new());

/// Downloads missing files and prints the directory of the model.
pub fn run(args: &cli::PullArgs) -> Result<(), CommandError> {
    let (id, of_page) = hub_address(&args.id);
    let revision = args.revision.clone().or(of_page).unwrap_or(MAIN_BRANCH.into());
    if args.json {
        let events = ProgressEvents::default();
        let dir = download(id, &revision, &ProgressBar::hidden(), |progress| events.report(progress))?;
        print_event(
            &json!({"event": "complete", "model": id, "revision": revision, "path": dir, "licence": licence(&dir)}),
        );
        return Ok(());
    }
    let dir = download_with_bar(id, &revision)?;
    print_line(printable(&dir.to_string_lossy()));
    if io::stdout().is_terminal() && !progress::is_quiet() {
        let name = if revision == MAIN_BRANCH { id.into() } else { dir.to_string_lossy() };
        print_note(format_args!("next: moestro run {name}"));
    }
    Ok(())
}

/// Returns the directory of a model, after downloading it if needed.
pub fn find_or_download(id: &str) -> Result<PathBuf, CommandError> {
    match Hub::from_env()?.local(id) {
        Some(dir) => Ok(dir),
        None => download_with_bar(id, MAIN_BRANCH),
    }
}

/// Ends a running download and saves its progress. Returns false if no download is running, or if it was interrupted
/// before. For programs that handle the signals that end them.
pub fn interrupt() -> bool {
    // Saving takes time, so the lock must be free before it begins.
    let hub = RUNNING.lock().upgrade();
    let is_new = hub.is_some_and(|hub| hub.interrupt());
    if is_new {
        tracing::info!("{INTERRUPTED}");
    }
    is_new
}

/// Downloads a model. Shows a progress bar and the model's licence.
fn download_with_bar(id: &str, revision: &str) -> Result<PathBuf, CommandError> {
    let speed = Arc::new(DownloadSpeed::default());
    let bar = progress::download(id, speed.clone());
    let dir = download(id, revision, &bar, |progress| {
        speed.record(progress.received);
        bar.set_length(progress.total);
        bar.set_position(progress.on_disk);
    })?;
    if let Some(licence) = licence(&dir).filter(|_| !progress::is_quiet()) {
        print_note(format_args!("licence of {id}: {licence}"));
    }
    Ok(dir)
}

/// Downloads a model. A signal that ends the program ends it after the progress is saved. `bar` is removed at the end.
fn download(
    id: &str,
    revision: &str,
    bar: &ProgressBar,
    on_progress: impl Fn(DownloadProgress) + Sync,
) -> Result<PathBuf, CommandError> {
    if !cfg!(feature = "hub") {
        let why = "cannot download: this program was built without the feature `hub`; use a directory instead";
        return Err(CommandError::Usage(format!("{id}: {why}")));
    }
    if !is_hub_id(id) {
        let why = "not a hub id; a hub id has the form org/name, such as mlx-community/Qwen3.5-35B-A3B-4bit, and \
                   `moestro pull --revision REV` selects a revision";
        return Err(CommandError::Usage(format!("{id}: {why}")));
    }
    let hub = Arc::new(Hub::from_env()?);
    *RUNNING.lock() = Arc::downgrade(&hub);
    let signals = DeferredSignals::begin();
    bar.enable_steady_tick(Duration::from_millis(200));
    let outcome = thread::scope(|scope| {
        let (running, ended) = channel();
        let hub = &*hub;
        scope.spawn(move || end_at_signal(hub, bar, &ended));
        let outcome = hub.pull(id, revision, &on_progress);
        drop(running);
        outcome
    });
    bar.finish_and_clear();
    drop(signals);
    newest_or_local(outcome, &hub, id, revision)
}

/// Waits until the download has `ended`. If a signal arrives before, saves the progress and ends the program.
fn end_at_signal(hub: &Hub, bar: &ProgressBar, ended: &Receiver<()>) {
    while ended.recv_timeout(SIGNAL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
        if DeferredSignals::has_arrived() {
            hub.interrupt();
            bar.finish_and_clear();
            if !progress::is_quiet() {
                print_note(INTERRUPTED);
            }
            DeferredSignals::deliver();
        }
    }
}

/// The result of a download. If the hub cannot be reached, the complete copy on this machine.
///
/// # Errors
/// The download has failed. Another copy on this machine may be of an older revision.
fn newest_or_local(
    outcome: Result<PathBuf, StoreError>,
    hub: &Hub,
    id: &str,
    revision: &str,
) -> Result<PathBuf, CommandError> {
    let error = match outcome {
        Ok(dir) => return Ok(dir),
        Err(error) => error,
    };
    let Some(dir) = hub.local(id).filter(|_| revision == MAIN_BRANCH) else { return Err(error.into()) };
    if !matches!(error, StoreError::Unreachable(_)) {
        let kept = "the complete copy on this machine was kept, and may not be the newest revision";
        return Err(CommandError::Service(format!("{error}; {kept}")));
    }
    tracing::warn!(%error, "cannot reach the hub; using the complete copy on this machine, which may not be the newest revision");
    Ok(dir)
}

/// Prints progress as lines of JSON.
#[derive(Default)]
struct ProgressEvents {
    speed: DownloadSpeed,
    last: Mutex<Option<Instant>>,
}

impl ProgressEvents {
    fn report(&self, DownloadProgress { on_disk, received, total }: DownloadProgress) {
        self.speed.record(received);
        let mut last = self.last.lock();
        if on_disk == total || last.is_none_or(|last| last.elapsed() >= EVENT_INTERVAL) {
            *last = Some(Instant::now());
            let bytes_per_second = self.speed.per_second() as u64;
            print_event(
                &json!({"event": "progress", "on_disk": on_disk, "total": total, "received": received, "bytes_per_second": bytes_per_second}),
            );
        }
    }
}

/// Prints a line. A closed stdout is not an error.
fn print_event(event: &Value) {
    let mut stdout = io::stdout().lock();
    let _ = writeln!(stdout, "{event}").and_then(|()| stdout.flush());
}
