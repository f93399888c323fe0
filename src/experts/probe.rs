//! Chooses direct or buffered reads by measuring both on the model's own files.

use super::{
    layout::{ExpertMap, Layout},
    source::{Files, Source},
};
use crate::{
    device::Slab,
    error::StoreError,
    platform::{Access, each},
};
use std::{
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

/// `--expert-io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// Past the page cache, unless the file system cannot or is clearly faster through it.
    #[default]
    Auto,
    Direct,
    Buffered,
}

/// Reading through the page cache has to be this much faster to be chosen: it keeps every byte twice.
const CLEARLY: f64 = 1.5;

/// The time for which each way is measured.
const BUDGET: Duration = Duration::from_millis(120);

/// Opens the shards the way `io` says, or the way that measures better.
pub fn open(paths: &[PathBuf], map: &ExpertMap, io: Io, threads: usize) -> Result<(Files, Access), StoreError> {
    if io == Io::Buffered {
        return Ok((Files::open(paths, Access::Buffered)?, Access::Buffered));
    }
    let direct = match Files::open(paths, Access::Direct) {
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::Unsupported && io == Io::Auto => None,
        Err(StoreError::Io { path, source }) if source.kind() == io::ErrorKind::Unsupported => {
            let why = "this file system cannot be read past the page cache; use --expert-io buffered or auto";
            return Err(StoreError::Io { path, source: io::Error::new(source.kind(), why) });
        }
        other => Some(other?),
    };
    let Some(direct) = direct else {
        tracing::info!("experts are read through the page cache: this file system knows no direct reads");
        return Ok((Files::open(paths, Access::Buffered)?, Access::Buffered));
    };
    if io == Io::Direct {
        return Ok((direct, Access::Direct));
    }
    let buffered = Files::open(paths, Access::Buffered)?;
    let speed = |files: &Files, cold: bool| bandwidth(files, map, threads, BUDGET, cold.then_some(files));
    match (speed(&direct, false), speed(&buffered, true)) {
        (Ok(past), Ok(through)) if is_clearly_faster(through, past) => {
            tracing::info!(
                direct = past as u64,
                buffered = through as u64,
                "experts are read through the page cache, bytes a second"
            );
            Ok((buffered, Access::Buffered))
        }
        (Err(error), Ok(_)) => {
            tracing::warn!(%error, "direct reads fail; experts are read through the page cache");
            Ok((buffered, Access::Buffered))
        }
        (past, through) => {
            let (past, through) = (past.unwrap_or(0.0), through.unwrap_or(0.0));
            tracing::info!(
                direct = past as u64,
                buffered = through as u64,
                "experts are read past the page cache, bytes a second"
            );
            Ok((direct, Access::Direct))
        }
    }
}

/// In bytes a second.
fn is_clearly_faster(through: f64, past: f64) -> bool {
    through > CLEARLY * past
}

/// Bytes a second of random reads of whole experts with `threads` threads, for about `budget`. With `cold`, the cached
/// pages of each expert are dropped first.
pub fn bandwidth(
    source: &dyn Source,
    map: &ExpertMap,
    threads: usize,
    budget: Duration,
    cold: Option<&Files>,
) -> io::Result<f64> {
    let experts: Vec<_> = map.layers.iter().flatten().collect();
    let room = map.slot_bytes(source.block());
    if room == 0 {
        return Ok(0.0);
    }
    // A stride that has no factor in common with the number of experts visits each of them once before any again.
    let mut stride = (experts.len() * 618 / 1000) | 1;
    while common(stride, experts.len()) > 1 {
        stride += 2;
    }
    let begin = Instant::now();
    let jobs = (0..experts.len()).map(|turn| experts[turn.wrapping_mul(stride) % experts.len()]).collect();
    let read = each(
        "probe",
        threads.clamp(1, 64),
        jobs,
        || Slab::new(room),
        |pieces, slab| {
            let mut bytes = 0;
            if begin.elapsed() >= budget {
                return Ok(bytes);
            }
            for read in Layout::new(pieces, source.block()).reads() {
                if let Some(files) = cold {
                    files.drop_cached(read.file, read.offset, read.len);
                }
                let Some(part) = slab.as_mut_slice().get_mut(read.at..read.at + read.len) else { continue };
                bytes += source.read(read.file, read.offset, part)? as u64;
            }
            Ok(bytes)
        },
    )?;
    Ok(read.iter().sum::<u64>() as f64 / begin.elapsed().as_secs_f64())
}

/// Greatest common divisor.
fn common(mut a: usize, mut b: usize) -> usize {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_cache_has_to_be_clearly_faster() {
        for (through, past, chosen) in
            [(151.0, 100.0, true), (150.0, 100.0, false), (90.0, 100.0, false), (0.0, 0.0, false)]
        {
            assert_eq!(is_clearly_faster(through, past), chosen, "{through} {past}");
        }
    }
}
