//! `moestro list` and `rm`: the models on this machine.

use super::{
    local_models::{self, CatalogEntry, Origin},
    show,
};
use crate::{
    cli,
    config::{self, config_file::Settings},
    error::CommandError,
};
use serde::Serialize;
use std::{
    fmt, fs,
    io::{self, BufRead, IsTerminal, Write},
    path::{Path, PathBuf},
};

#[derive(Serialize)]
struct ModelRow {
    id: String,
    bytes: u64,
    #[serde(rename = "path")]
    dir: Option<PathBuf>,
}

#[derive(Serialize)]
struct ModelTable {
    models: Vec<ModelRow>,
}

impl fmt::Display for ModelTable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.models.iter().map(|row| row.id.chars().count()).max().unwrap_or(0);
        for ModelRow { id, bytes, dir } in &self.models {
            let place = dir.as_deref().unwrap_or(Path::new("in the program")).display();
            writeln!(out, "{id:width$}  {:>7.1} GB  {place}", *bytes as f64 / 1e9)?;
        }
        Ok(())
    }
}

/// Prints what can be served, one model a line.
pub fn list(typed: &cli::ListArgs, settings: &Settings) -> Result<(), CommandError> {
    let row = |entry: CatalogEntry| ModelRow { bytes: entry.bytes(), id: entry.id, dir: entry.dir };
    let all = local_models::all(settings, typed.home.models_dir.as_deref());
    show(&ModelTable { models: all.into_iter().map(row).collect() }, typed.json);
    Ok(())
}

/// Deletes what was downloaded of a model, or its directory if it lies among one's own.
pub fn remove(typed: &cli::RmArgs, settings: &Settings) -> Result<(), CommandError> {
    let usage = |why: String| Err(CommandError::Usage(why));
    let all = local_models::all(settings, typed.home.models_dir.as_deref());
    let Some(entry) = all.iter().find(|entry| entry.id == typed.name) else {
        let near = config::nearest(&typed.name, all.iter().map(|entry| entry.id.as_str()));
        let hint = near.map_or(String::new(), |(_, near)| format!(" (did you mean {near}?)"));
        return usage(format!("no model {} is on this machine{hint}", typed.name));
    };
    let dir = match (entry.origin, &entry.dir) {
        (Origin::Own | Origin::Hub, Some(dir)) => dir,
        (Origin::Configuration, Some(dir)) => {
            return usage(format!("{} is a name for {}: delete that", entry.id, dir.display()));
        }
        _ => return usage(format!("{} is part of the program", entry.id)),
    };
    if !typed.yes && !agreed(&format!("Delete {} ({:.1} GB)?", dir.display(), entry.bytes() as f64 / 1e9))? {
        return Ok(());
    }
    let removed =
        if entry.origin == Origin::Hub { local_models::hub::remove(&entry.id) } else { fs::remove_dir_all(dir) };
    removed.map_err(|source| CommandError::Io { what: dir.display().to_string(), source })
}

/// Asks on the terminal.
fn agreed(question: &str) -> Result<bool, CommandError> {
    if !io::stdin().is_terminal() {
        return Err(CommandError::Usage(format!("{question} Say --yes: there is no terminal to ask on")));
    }
    eprint!("{question} [y/N] ");
    let _ = io::stderr().flush();
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|source| CommandError::Io { what: "reading the answer".into(), source })?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
