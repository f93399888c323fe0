//! `moestro pack`: writes or verifies a pack. A pack has one page-aligned record per expert.

use super::{checkpoint_meta::resolve, progress, text::print_line};
use crate::{cli, config::ModelSource, error::CommandError};
use moestro_base::error::StoreError;
use moestro_model::{
    checkpoint::pack,
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
    let rows: u64 = found.tables.iter().map(|table| pack::row_blocks(table).file_bytes()).sum();
    let bar = progress::bytes(2 * (map.bytes() + rows), "packing, written and compared");
    let begin = Instant::now();
    let progress = |bytes| bar.inc(bytes);
    let written = pack::write_with_rows(map, &found.tables, files, &out, &progress);
    bar.finish_and_clear();
    let (summary, rows) = written?;
    if args.out.is_some() {
        pack::link(files, &out)?;
    }
    let seconds = begin.elapsed().as_secs_f64();
    if rows > 0 {
        let count: u64 = found.tables.iter().map(|table| table.rows).sum();
        let out = out.display();
        let size = Size(rows);
        print_line(format_args!("{out}: {count} rows of the n-gram table, {size}, written and verified"));
    } else if !summary.written {
        print_line(format_args!("{}: the pack is up to date", out.display()));
    }
    if summary.written {
        let out = out.display();
        let size = Size(summary.bytes);
        print_line(format_args!("{out}: {} experts, {size}, written and verified in {seconds:.1} s", summary.experts));
    }
    Ok(())
}

/// Compares a pack with the checkpoint: the pack in `--out`, or else every pack that may belong to this checkpoint.
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
        let compared = compared.and_then(|experts| Ok((experts, pack::verify_rows(&pack, &found.tables, &|_| ())?)));
        let (experts, rows) = compared?;
        let seconds = begin.elapsed().as_secs_f64();
        if rows > 0 {
            print_line(format_args!(
                "{}: {rows} rows of the n-gram table are identical to the checkpoint",
                pack.display()
            ));
        }
        print_line(format_args!(
            "{}: {experts} experts are identical to the checkpoint, compared in {seconds:.1} s",
            pack.display()
        ));
    }
    Ok(())
}
