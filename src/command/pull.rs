//! `moestro pull org/name`, and `serve org/name` when it is not here yet.

use crate::{cli, error::CommandError};
use std::path::PathBuf;

/// Downloads what is missing, or says where everything lies.
pub fn run(typed: &cli::PullArgs) -> Result<(), CommandError> {
    println!("{}", download(&typed.id)?.display());
    Ok(())
}

/// The directory of a model that is here, or a moment later is.
pub fn find_or_download(id: &str) -> Result<PathBuf, CommandError> {
    match find(id)? {
        Some(dir) => Ok(dir),
        None => download(id),
    }
}

#[cfg(feature = "hub")]
fn find(id: &str) -> Result<Option<PathBuf>, CommandError> {
    Ok(crate::checkpoint::hub::Hub::from_env()?.local(id))
}

#[cfg(feature = "hub")]
fn download(id: &str) -> Result<PathBuf, CommandError> {
    if !crate::config::is_hub_id(id) {
        return Err(CommandError::Usage(format!("{id}: a model on the hub is called org/name")));
    }
    let hub = crate::checkpoint::hub::Hub::from_env()?;
    let bar = super::progress::bytes(0, id);
    let outcome = hub.pull(id, &|here, total| {
        bar.set_length(total);
        bar.set_position(here);
    });
    bar.finish_and_clear();
    match (outcome, hub.local(id)) {
        (Ok(dir), _) => Ok(dir),
        (Err(error), Some(dir)) => {
            tracing::warn!(%error, "the hub could not be asked; the model is here completely, perhaps not its newest revision");
            Ok(dir)
        }
        (Err(error), None) => Err(error.into()),
    }
}

#[cfg(not(feature = "hub"))]
fn find(_id: &str) -> Result<Option<PathBuf>, CommandError> {
    Ok(None)
}

#[cfg(not(feature = "hub"))]
fn download(id: &str) -> Result<PathBuf, CommandError> {
    let why = "this program was built without the feature `hub` and cannot download; give a directory instead";
    Err(CommandError::Usage(format!("{id}: {why}")))
}
