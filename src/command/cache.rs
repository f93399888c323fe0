//! `moestro cache`: shows what Moestro keeps on this disk, and removes it by kind.

use super::{
    confirm::confirmed,
    local_models::{self, CatalogEntry, Origin},
    log_files::is_log_in_use,
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
    checkpoint::{
        hub::{Hub, UnusedFiles},
        index::Index,
        pack,
    },
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
    /// A remark, such as that the path is a link.
    note: Option<String>,
    /// Bytes that their removal frees.
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
            let note = row.note.as_ref().map_or(String::new(), |note| format!(" ({note})"));
            [row.kind.to_string(), row.owner.clone() + &note, Size(row.bytes).to_string(), short_path(&row.path)]
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
    let all = Size(rows.iter().map(|row| row.bytes).sum());
    let what: Vec<String> = rows.iter().map(|row| format!("{} of {}", row.kind, row.owner)).collect();
    if !args.yes && !confirmed(&printable(&format!("Remove {} ({all})?", what.join(", "))))? {
        return Ok(());
    }
    let mut freed = 0;
    for row in &rows {
        freed += remove(row).map_err(CommandError::io(row.path.display().to_string()))?;
    }
    print_note(format_args!("freed {}", Size(freed)));
    Ok(())
}

fn rows(models: &[CatalogEntry]) -> Vec<CacheRow> {
    let mut rows = Vec::new();
    let unused = Hub::from_env().map(|hub| hub.unused()).unwrap_or_default();
    for model in models.iter().filter(|model| matches!(model.origin, Origin::Own | Origin::Hub)) {
        let dir = model.dir.clone().unwrap_or_default();
        let mut row = CacheRow::new(CacheKind::Models, &model.id, dir);
        if model.origin == Origin::Hub {
            // The directory of a revision has only links.
            let of_others = unused.iter().filter(|unused| unused.id == model.id).flat_map(|unused| &unused.files);
            let others: u64 = of_others.map(|file| disk_bytes(file)).sum();
            let root = row.path.parent().and_then(Path::parent).unwrap_or(&row.path);
            row.bytes = disk_bytes(root).saturating_sub(others);
        } else if row.note.is_none() && row.bytes < model.bytes() / 2 {
            row.note = Some("links to files elsewhere".into());
        }
        rows.push(row);
    }
    rows.extend(unused.into_iter().map(|UnusedFiles { id, dir, files }| {
        let bytes = files.iter().map(|file| disk_bytes(file)).sum();
        let note = Some("not complete, or an older revision".into());
        CacheRow { kind: CacheKind::Downloads, owner: id, note, bytes, path: dir }
    }));
    let own = |kind, owner: &str, path: PathBuf| CacheRow::following(kind, owner, path);
    if let Some(cache) = os::cache_dir() {
        for path in pack::all() {
            let owner = models.iter().find(|model| packs_of(model).contains(&path));
            let mut row =
                CacheRow::new(CacheKind::Packs, owner.map_or("no model on this machine", |model| &model.id), path);
            if row.note.is_none() && !pack::is_complete(&row.path) {
                row.owner = "an interrupted `moestro pack`".into();
                row.note = Some("not complete".into());
            }
            rows.push(row);
        }
        rows.push(own(CacheKind::Snapshots, "all models", cache.join("prompts")));
        rows.push(own(CacheKind::Kernels, "the GPU", cache.join("cuda")));
        rows.push(own(CacheKind::Other, "lists of hot experts", cache.join("hot")));
        rows.push(own(CacheKind::Other, "the demo", cache.join("demo")));
        rows.push(own(CacheKind::Other, "comparisons of packs", cache.join("packs/compared")));
        rows.push(own(CacheKind::Other, "an interrupted `moestro doctor`", cache.join("doctor-report")));
    }
    if let Some(state) = os::state_dir() {
        rows.push(own(CacheKind::Logs, "moestro launch", state.join("launch.log")));
    }
    if let Some(logs) = service::log_dir() {
        rows.push(own(CacheKind::Logs, "moestro service", logs));
    }
    rows.retain(|row| row.bytes > 0 || row.note.is_some());
    rows
}

impl CacheRow {
    /// A file or a directory. If it is a link, only the link is removed.
    fn new(kind: CacheKind, owner: &str, path: PathBuf) -> Self {
        let note = fs::read_link(&path).ok().map(|target| format!("a link to {}", short_path(&target)));
        Self { kind, owner: owner.into(), note, bytes: disk_bytes(&path), path }
    }

    /// A file or a directory that only Moestro uses. If it is a link, the files that it leads to are removed.
    fn following(kind: CacheKind, owner: &str, path: PathBuf) -> Self {
        let row = Self::new(kind, owner, path);
        let bytes = fs::canonicalize(&row.path).map_or(row.bytes, |target| disk_bytes(&target));
        Self { bytes, ..row }
    }
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

/// Removes the files of a row. Returns the number of bytes that this has freed.
fn remove(row: &CacheRow) -> io::Result<u64> {
    match row.kind {
        CacheKind::Models => return Err(io::Error::other("`moestro rm NAME` deletes a model")),
        CacheKind::Downloads => Hub::from_env().map_err(io::Error::other)?.remove_unused(&row.owner)?,
        CacheKind::Packs => pack::remove(&row.path)?,
        // A server that is running may use them, and this keeps what it is writing.
        CacheKind::Snapshots => {
            engine::clear_prompt_dir(&row.path)?;
            return Ok(row.bytes.saturating_sub(CacheRow::following(row.kind, &row.owner, row.path.clone()).bytes));
        }
        CacheKind::Logs if is_log_in_use(&row.path) => {
            let log = row.path.display();
            print_note(format_args!("kept {log}: a running server writes to it; stop the server first"));
            return Ok(0);
        }
        CacheKind::Kernels | CacheKind::Logs | CacheKind::Other => remove_contents(&row.path)?,
    }
    Ok(row.bytes)
}

/// Removes a file, or what is in a directory. The directory itself may be a link to another disk, and stays.
fn remove_contents(path: &Path) -> io::Result<()> {
    if !path.is_dir() {
        return fs::remove_file(path);
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() { fs::remove_dir_all(entry.path())? } else { fs::remove_file(entry.path())? }
    }
    Ok(())
}
