//! `moestro list`: the models on this machine.

use super::{
    local_models::{self, CatalogEntry},
    printable, show,
};
use crate::{cli, config::config_file::Settings, error::CommandError};
use serde::Serialize;
use std::{
    fmt,
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
            let line = format!("{id:width$}  {:>7.1} GB  {place}", *bytes as f64 / 1e9);
            writeln!(out, "{}", printable(&line))?;
        }
        Ok(())
    }
}

/// Prints the models that can be served, one per line.
pub fn list(typed: &cli::ListArgs, settings: &Settings) -> Result<(), CommandError> {
    let row = |entry: CatalogEntry| ModelRow { bytes: entry.bytes(), id: entry.id, dir: entry.dir };
    let all = local_models::all(settings, typed.home.models_dir.as_deref());
    show(&ModelTable { models: all.into_iter().map(row).collect() }, typed.json);
    Ok(())
}
