//! `moestro rm`: deletes a model from this machine.

use super::{
    cache,
    confirm::confirmed,
    local_models::{self, Origin},
    text::{print_note, printable},
};
use crate::{
    cli,
    config::{self, config_file::Settings},
    error::CommandError,
};
use moestro_model::{
    checkpoint::{hub::Hub, pack},
    plan::Size,
};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

/// Deletes a model of the Hugging Face cache, or a model in the user's model directory.
pub fn remove(args: &cli::RmArgs, settings: &Settings) -> Result<(), CommandError> {
    let usage = |reason: String| Err(CommandError::Usage(reason));
    let all = local_models::all(settings, args.home.models_dir.as_deref());
    let Some(entry) = all.iter().find(|entry| entry.id == args.name) else {
        let near = config::nearest(&args.name, all.iter().map(|entry| entry.id.as_str()));
        let hint = config::suggestion(near, "; `moestro list` shows the models");
        return usage(format!("this machine has no model {}{hint}", args.name));
    };
    let dir = match (entry.origin, &entry.dir) {
        (Origin::Own | Origin::Hub, Some(dir)) => dir,
        (Origin::Configuration, Some(dir)) => {
            return usage(format!(
                "{} is a name in the configuration for {}: delete that directory",
                entry.id,
                dir.display()
            ));
        }
        _ => return usage(format!("{} is part of the program", entry.id)),
    };
    if entry.origin == Origin::Own && !is_inside(dir, local_models::models_dir(args.home.models_dir.as_deref())) {
        return usage(format!("{}: a symbolic link leads outside of the model directory", dir.display()));
    }
    // Not the pack of another copy of the model, nor one that is beside the directory to which a link leads.
    let others = all.iter().filter(|other| other.dir != entry.dir && other.origin != Origin::Demo);
    let kept: Vec<PathBuf> = others.flat_map(cache::packs_of).collect();
    let mut packs = cache::packs_of(entry);
    let is_beside_target = |pack: &Path| dir.is_symlink() && pack.with_extension("") == real_path(dir);
    packs.retain(|pack| !kept.contains(pack) && !is_beside_target(pack));
    let pack_bytes = Size(packs.iter().map(|pack| cache::disk_bytes(pack)).sum());
    let with_packs =
        if args.all && !packs.is_empty() { format!(" and its pack ({pack_bytes})") } else { String::new() };
    let question = format!("Delete {} ({}){with_packs}?", dir.display(), Size(entry.bytes()));
    if !args.yes && !confirmed(&printable(&question))? {
        return Ok(());
    }
    let removed = match entry.origin {
        Origin::Hub => Hub::from_env().map_err(io::Error::other).and_then(|hub| hub.remove(&entry.id)),
        _ => fs::remove_dir_all(dir),
    };
    removed.map_err(CommandError::io(dir.display().to_string()))?;
    if args.all {
        for pack in &packs {
            pack::remove(pack).map_err(CommandError::io(pack.display().to_string()))?;
        }
    } else if !packs.is_empty() {
        print_note(format_args!(
            "deleted {}; its pack ({pack_bytes}) stays: `moestro cache --remove packs` removes all packs, and `moestro rm --all` \
             deletes a model with its pack",
            entry.id
        ));
        return Ok(());
    }
    print_note(format_args!("deleted {}{with_packs}", entry.id));
    Ok(())
}

/// The path without links.
fn real_path(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_default()
}

/// True if `dir` is in `home` after the links in the parent directories of `dir` are resolved.
fn is_inside(dir: &Path, home: Option<PathBuf>) -> bool {
    let real = |path: &Path| path.canonicalize().ok();
    let parent = dir.parent().and_then(real);
    let home = home.as_deref().and_then(real);
    parent.zip(home).is_some_and(|(parent, home)| parent.starts_with(home))
}
