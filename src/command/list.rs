//! `moestro list`: the models on this machine.

use super::{
    checkpoint_meta::quantization,
    local_models::{self, CatalogEntry, Origin},
    text::{short_path, show, table},
};
use crate::{
    cli,
    config::{config_file::Settings, generation_config},
    demo,
    error::CommandError,
};
use moestro_model::plan::Size;
use serde::Serialize;
use serde_json::Value;
use std::{fmt, path::PathBuf};

#[derive(Serialize)]
struct ModelRow {
    id: String,
    bytes: u64,
    quantization: Option<String>,
    #[serde(rename = "path")]
    dir: Option<PathBuf>,
    #[serde(skip)]
    place: String,
}

#[derive(Serialize)]
struct ModelTable {
    models: Vec<ModelRow>,
}

impl ModelRow {
    fn new(entry: CatalogEntry) -> Self {
        let config = match &entry.dir {
            Some(dir) => generation_config::json(&dir.join("config.json")).ok().flatten(),
            None => demo::file("config.json").and_then(|text| serde_json::from_slice::<Value>(text).ok()),
        };
        let place = match (entry.origin, &entry.dir) {
            (Origin::Hub, _) => "Hugging Face cache".into(),
            (_, Some(dir)) => short_path(dir),
            (_, None) => "in the program".into(),
        };
        let quantization = config.as_ref().and_then(quantization);
        Self { bytes: entry.bytes(), id: entry.id, quantization, dir: entry.dir, place }
    }
}

impl fmt::Display for ModelTable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = self.models.iter().map(|row| {
            // The group size is left out.
            let format = row.quantization.as_deref().unwrap_or("?").split(',').next().unwrap_or_default();
            [row.id.clone(), Size(row.bytes).to_string(), format.to_owned(), row.place.clone()]
        });
        write!(out, "{}", table(["NAME", "SIZE", "FORMAT", "PLACE"], &rows.collect::<Vec<_>>()))
    }
}

/// Prints the models that can be served, one per line.
pub fn list(args: &cli::ListArgs, settings: &Settings) -> Result<(), CommandError> {
    let all = local_models::all(settings, args.home.models_dir.as_deref());
    show(&ModelTable { models: all.into_iter().map(ModelRow::new).collect() }, args.json);
    Ok(())
}
