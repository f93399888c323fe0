//! `moestro pull org/name`: downloads a model. `serve org/name` does the same for a model that is not on this machine.

use super::text::printable;
use crate::{
    cli,
    config::{hub_id, is_hub_id},
    error::CommandError,
};
use moestro_model::checkpoint::{hub::Hub, licence::licence};
use std::{
    io::{self, IsTerminal},
    path::PathBuf,
};

/// The default revision.
const MAIN: &str = "main";

/// Downloads missing files and prints the directory of the model.
pub fn run(args: &cli::PullArgs) -> Result<(), CommandError> {
    let id = hub_id(&args.id);
    let dir = interruptible(|| download(id, &args.revision))?;
    println!("{}", printable(&dir.to_string_lossy()));
    if io::stdout().is_terminal() {
        let name = if args.revision == MAIN { id.into() } else { dir.to_string_lossy() };
        eprintln!("next: moestro run {}", printable(&name));
    }
    Ok(())
}

/// Runs a download. On a terminal, Ctrl-C ends the program and prints how to resume the download.
fn interruptible<T>(work: impl FnOnce() -> Result<T, CommandError>) -> Result<T, CommandError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(1).build();
    let runtime = runtime.map_err(CommandError::io("starting a thread"))?;
    if io::stderr().is_terminal() {
        runtime.spawn(async {
            if tokio::signal::ctrl_c().await.is_ok() {
                eprintln!("\nthe download is interrupted; the same command resumes it");
                std::process::exit(130);
            }
        });
    }
    let outcome = work();
    runtime.shutdown_background();
    outcome
}

/// Returns the directory of a model, after downloading it if needed.
pub fn find_or_download(id: &str) -> Result<PathBuf, CommandError> {
    match Hub::from_env()?.local(id) {
        Some(dir) => Ok(dir),
        None => download(id, MAIN),
    }
}

fn download(id: &str, revision: &str) -> Result<PathBuf, CommandError> {
    if !cfg!(feature = "hub") {
        let why = "cannot download: this program was built without the feature `hub`; use a directory instead";
        return Err(CommandError::Usage(format!("{id}: {why}")));
    }
    if !is_hub_id(id) {
        let why = "not a hub id; a hub id has the form org/name, such as mlx-community/Qwen3.5-35B-A3B-4bit";
        return Err(CommandError::Usage(format!("{id}: {why}")));
    }
    let hub = Hub::from_env()?;
    let bar = super::progress::bytes(0, id);
    bar.enable_steady_tick(std::time::Duration::from_millis(200));
    let outcome = hub.pull(id, revision, &progress_of(&bar));
    bar.finish_and_clear();
    match (outcome, hub.local(id).filter(|_| revision == MAIN)) {
        (Ok(dir), _) => {
            if let Some(licence) = licence(&dir) {
                eprintln!("licence of {id}: {licence}");
            }
            Ok(dir)
        }
        (Err(error), Some(dir)) => {
            tracing::warn!(%error, "cannot reach the hub; using the complete copy on this machine, which may not be the newest revision");
            Ok(dir)
        }
        (Err(error), None) => Err(error.into()),
    }
}

/// Returns a callback that updates `bar`. Bytes that are on disk at the start of a resumed download do not count toward
/// the speed.
fn progress_of(bar: &indicatif::ProgressBar) -> impl Fn(u64, u64) + Sync {
    let is_started = std::sync::Once::new();
    move |on_disk, total| {
        bar.set_length(total);
        bar.set_position(on_disk);
        is_started.call_once(|| bar.reset_eta());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread, time::Duration};

    #[test]
    fn resumed_download_shows_current_speed() {
        let bar = indicatif::ProgressBar::hidden();
        let progress = progress_of(&bar);
        // On a machine of any speed, 5 MiB in at least 100 ms are below the limit, and 10 TiB are above it.
        let on_disk = 10 << 40;
        progress(on_disk, 2 * on_disk);
        for step in 1..=5 {
            thread::sleep(Duration::from_millis(20));
            progress(on_disk + (step << 20), 2 * on_disk);
        }
        assert!(bar.per_sec() < 1e9, "{} bytes per second", bar.per_sec());
    }
}
