//! `moestro pack`: writes or verifies a pack, which has one page-aligned record per expert.

use super::{progress, resolve};
use crate::{
    checkpoint::pack,
    cli,
    config::ModelSource,
    error::{CommandError, StoreError},
    model::{CheckpointInfo, LoadOptions},
    plan::Size,
};
use std::{path::Path, time::Instant};

pub fn run(args: &cli::tool_args::PackArgs) -> Result<(), CommandError> {
    let dir = resolve(&ModelSource::new(args.model.model.as_deref()))?;
    let found = CheckpointInfo::unpacked(&dir, &LoadOptions::default())?;
    if args.verify { verify(args, &dir, &found) } else { write(args, &dir, &found) }
}

fn write(args: &cli::tool_args::PackArgs, dir: &Path, found: &CheckpointInfo) -> Result<(), CommandError> {
    let CheckpointInfo { experts: map, files, .. } = found;
    let no_directory = || {
        StoreError::Other(
            "cannot choose a directory for the pack: neither HOME nor XDG_CACHE_HOME is set; use --out DIR".into(),
        )
    };
    let out = match &args.out {
        Some(out) => out.clone(),
        None => match pack::find(dir, map, files) {
            Some(pack) => pack.dir,
            None => pack::default_dir(files)?.ok_or_else(no_directory)?,
        },
    };
    let bar = progress::bytes(2 * map.bytes(), "packing, written and compared");
    let begin = Instant::now();
    let summary = pack::write(map, files, &out, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let summary = summary?;
    if args.out.is_some() {
        pack::link(files, &out)?;
    }
    if !summary.written {
        println!("{}: the pack is up to date", out.display());
        return Ok(());
    }
    println!(
        "{}: {} experts, {}, written and verified in {:.1} s",
        out.display(),
        summary.experts,
        Size(summary.bytes),
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Compares the pack in `--out`, or every pack that may belong to this checkpoint, with the checkpoint.
fn verify(args: &cli::tool_args::PackArgs, dir: &Path, found: &CheckpointInfo) -> Result<(), CommandError> {
    let CheckpointInfo { experts: map, files, .. } = found;
    let packs = match &args.out {
        Some(out) => vec![out.clone()],
        None => pack::candidates(dir, files)?,
    };
    if packs.is_empty() {
        return Err(StoreError::Other(format!("{}: this checkpoint has no pack", dir.display())).into());
    }
    for pack in packs {
        let bar = progress::bytes(map.bytes(), "comparing");
        let begin = Instant::now();
        let compared = pack::verify(&pack, map, files, &|bytes| bar.inc(bytes));
        bar.finish_and_clear();
        let (experts, seconds) = (compared?, begin.elapsed().as_secs_f64());
        println!("{}: {experts} experts are identical to the checkpoint, compared in {seconds:.1} s", pack.display());
    }
    Ok(())
}
