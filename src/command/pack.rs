//! `moestro pack`: one page-aligned record per expert.

use super::{progress, resolve};
use crate::{
    checkpoint::pack,
    cli,
    config::Source,
    error::{CommandError, StoreError},
    model::{Options, qwen::Surveyed},
    plan::Size,
};
use std::time::Instant;

pub fn run(typed: &cli::Pack) -> Result<(), CommandError> {
    let dir = resolve(&Source::new(typed.model.model.as_deref()))?;
    let found = Surveyed::unpacked(&dir, &Options::default())?;
    let (map, files) = (found.experts, found.files);
    let identity = pack::identity(&files)?;
    let homeless = || StoreError::Other("no place for the pack: neither HOME nor XDG_CACHE_HOME is set; --out".into());
    let out = typed.out.clone().or_else(|| pack::default_dir(&identity)).ok_or_else(homeless)?;
    let bar = progress::bytes(2 * map.bytes(), "packing and verifying");
    let begin = Instant::now();
    let summary = pack::write(&map, &files, &identity, &out, &|bytes| bar.inc(bytes));
    bar.finish_and_clear();
    let summary = summary?;
    if typed.out.is_some() {
        pack::link(&identity, &out)?;
    }
    if !summary.written {
        println!("{}: these experts are packed already", out.display());
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
