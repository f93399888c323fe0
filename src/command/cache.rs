//! `moestro cache`: shows what Moestro keeps on this disk, and removes it by kind.

use super::{
    confirm::confirmed,
    local_models::{self, CatalogEntry, Origin},
    text::{print_note, printable, short_path, show, table},
};
use crate::{
    cli::{self, values::CacheKind},
    config::config_file::Settings,
    error::CommandError,
    service,
};
use moestro_base::platform::os;
use moestro_engine as engine;
use moestro_model::{
    checkpoint::{hub::Hub, index::Index, pack},
    plan::Size,
};
use serde::Serialize;
use std::{
    fmt, fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// Files of one kind and one owner.
#[derive(Serialize)]
struct CacheRow {
    kind: CacheKind,
    /// The model that the files belong to, or what they are.
    owner: String,
    bytes: u64,
    path: PathBuf,
}

#[derive(Serialize)]
struct CacheTable {
    files: Vec<CacheRow>,
}

impl fmt::Display for CacheTable {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cells = |row: &CacheRow| {
            [row.kind.to_string(), row.owner.clone(), Size(row.bytes).to_string(), short_path(&row.path)]
        };
        let rows: Vec<_> = self.files.iter().map(cells).collect();
        write!(out, "{}", table(["KIND", "OWNER", "SIZE", "PLACE"], &rows))?;
        let total = self.files.iter().map(|row| row.bytes).sum();
        writeln!(out, "{} in total; --remove KIND frees all of a kind, `moestro rm NAME` one model", Size(total))
    }
}

/// Shows or removes files.
pub fn run(args: &cli::CacheArgs, settings: &Settings) -> Result<(), CommandError> {
    let mut rows = rows(&local_models::all(settings, args.home.models_dir.as_deref()));
    if args.remove.is_empty() {
        show(&CacheTable { files: rows }, args.json);
        return Ok(());
    }
    rows.retain(|row| args.remove.contains(&row.kind));
    if rows.is_empty() {
        print_note("there is nothing of this kind");
        return Ok(());
    }
    let freed = Size(rows.iter().map(|row| row.bytes).sum());
    let what: Vec<String> = rows.iter().map(|row| format!("{} of {}", row.kind, row.owner)).collect();
    if !args.yes && !confirmed(&printable(&format!("Remove {} ({freed})?", what.join(", "))))? {
        return Ok(());
    }
    for row in &rows {
        remove(row).map_err(CommandError::io(row.path.display().to_string()))?;
    }
    print_note(format_args!("freed {freed}"));
    Ok(())
}

fn rows(models: &[CatalogEntry]) -> Vec<CacheRow> {
    let row = |kind, owner: &str, path: PathBuf| CacheRow { kind, owner: owner.into(), bytes: disk_bytes(&path), path };
    let mut rows = Vec::new();
    for model in models.iter().filter(|model| matches!(model.origin, Origin::Own | Origin::Hub)) {
        let path = model.dir.clone().unwrap_or_default();
        rows.push(CacheRow { kind: CacheKind::Models, owner: model.id.clone(), bytes: model.bytes(), path });
    }
    let unfinished = Hub::from_env().map(|hub| hub.unfinished()).unwrap_or_default();
    rows.extend(unfinished.into_iter().map(|(id, part)| row(CacheKind::Downloads, &id, part)));
    if let Some(cache) = os::cache_dir() {
        for path in pack::all() {
            let owner = models.iter().find(|model| packs_of(model).contains(&path));
            let owner = owner.map_or("no model on this machine", |model| &model.id);
            rows.push(row(CacheKind::Packs, owner, path));
        }
        rows.push(row(CacheKind::Snapshots, "all models", cache.join("prompts")));
        rows.push(row(CacheKind::Kernels, "the GPU", cache.join("cuda")));
        rows.push(row(CacheKind::Other, "lists of hot experts", cache.join("hot")));
        rows.push(row(CacheKind::Other, "the demo", cache.join("demo")));
    }
    if let Some(state) = os::state_dir() {
        rows.push(row(CacheKind::Logs, "moestro launch", state.join("launch.log")));
    }
    if let Some(logs) = service::log_dir() {
        rows.push(row(CacheKind::Logs, "moestro service", logs));
    }
    rows.retain(|row| row.bytes > 0);
    rows
}

/// The packs that were made from a model.
pub fn packs_of(model: &CatalogEntry) -> Vec<PathBuf> {
    let find = |dir: &PathBuf| pack::candidates(dir, &Index::open(dir).ok()?.files).ok();
    model.dir.as_ref().and_then(find).unwrap_or_default()
}

/// Bytes that a file, or a directory with all its files, takes on the disk. Does not follow links.
pub fn disk_bytes(path: &Path) -> u64 {
    let Ok(meta) = fs::symlink_metadata(path) else { return 0 };
    if !meta.is_dir() {
        return 512 * meta.blocks();
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| disk_bytes(&entry.path())).sum()
}

fn remove(row: &CacheRow) -> io::Result<()> {
    match row.kind {
        // A server that is running may use them.
        CacheKind::Snapshots => engine::clear_prompt_dir(&row.path),
        CacheKind::Models => Err(io::Error::other("`moestro rm NAME` deletes a model")),
        CacheKind::Downloads => Hub::remove_unfinished(&row.path),
        CacheKind::Packs | CacheKind::Kernels | CacheKind::Logs | CacheKind::Other => remove_path(&row.path),
    }
}

/// Removes a file, a link, or a directory. A missing one is not an error.
pub fn remove_path(path: &PathBuf) -> io::Result<()> {
    let is_dir = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let removed = if is_dir { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}
