//! Makes a pack, and reads back every record of it.

use super::{FORMAT, LINE, Layer, MANIFEST, Manifest, PAGE, VERSION, identity::hex, open};
use crate::{
    device::Slab,
    error::StoreError,
    experts::{ExpertMap, PIECES, Piece, source::Files, source::Source},
    platform::partial::Partial,
    platform::{Access, File as Disk, os},
};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

/// Experts read, hashed and written at the same time.
const THREADS: usize = 4;

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    pub bytes: u64,
    pub experts: usize,
    /// False if the same pack was there already.
    pub written: bool,
}

/// Packs the experts `map` of the checkpoint files `files`, whose identity is given, into the directory `out`. It gets
/// its name only when every record has been read back from the disk and compared; a failure leaves nothing. `progress`
/// gets the bytes written, then verified, since its last call: twice the pack's size in all.
///
/// # Errors
/// What the file system says, with the file; `out` holds something else; a record that does not read back.
pub fn write(
    map: &ExpertMap,
    files: &[PathBuf],
    identity: &str,
    out: &Path,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Summary, StoreError> {
    let experts = map.experts();
    let plans = map.layers.iter().enumerate().map(|(i, layer)| plan(i, layer)).collect::<Result<Vec<_>, _>>()?;
    let bytes = plans.iter().zip(&map.layers).map(|(plan, layer)| plan.stride * layer.len() as u64).sum();
    if experts == 0 {
        return Err(StoreError::Other("this model has no routed experts: there is nothing to pack".into()));
    }
    if out.join(MANIFEST).exists() {
        return open(out, identity, map).map(|_| Summary { bytes, experts, written: false });
    }
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| StoreError::Io { path, source }
    };
    if fs::read_dir(out).map_or(out.exists(), |mut entries| entries.next().is_some()) {
        return Err(StoreError::Other(format!("{} is neither empty nor a pack", out.display())));
    }
    if let Some(free) = os::free_space(out).filter(|&free| free < bytes + (64 << 20)) {
        let why = format!("{bytes} bytes are needed and {free} are free; --out takes another place");
        return Err(failed(out)(io::Error::new(io::ErrorKind::StorageFull, why)));
    }
    let source = Files::open(files, Access::Buffered)?;
    let partial = Partial::create(out).map_err(failed(out))?;
    let mut manifest =
        Manifest { format: FORMAT.into(), version: VERSION, source: identity.into(), layers: Vec::new() };
    for (mut layer, experts) in plans.into_iter().zip(&map.layers) {
        let path = partial.path().join(&layer.file);
        layer.sha256 = write_layer(&source, experts, &layer, &path, progress)?;
        verify_layer(&layer, &path, progress)?;
        manifest.layers.push(layer);
    }
    let path = partial.path().join(MANIFEST);
    let text = serde_json::to_vec(&manifest).map_err(|error| StoreError::Other(error.to_string()))?;
    let write = || {
        let mut file = File::create_new(&path)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().map_err(failed(&path))?;
    partial.finish(out).map_err(failed(out))?;
    Ok(Summary { bytes, experts, written: true })
}

/// Where the pieces go in the records of a layer.
fn plan(index: usize, experts: &[[Piece; PIECES]]) -> Result<Layer, StoreError> {
    let lens = experts.first().map_or([0; PIECES], |pieces| pieces.map(|piece| piece.len));
    if experts.iter().any(|pieces| pieces.map(|piece| piece.len) != lens) {
        return Err(StoreError::Other(format!("layer {index}: its experts differ in size and cannot be packed")));
    }
    let mut end = 0u64;
    let pieces = lens.map(|len| {
        let at = end.next_multiple_of(LINE);
        end = at + len as u64;
        (at, len)
    });
    let stride = end.next_multiple_of(PAGE);
    Ok(Layer { file: format!("layer-{index:03}.experts"), stride, pieces, sha256: Vec::new() })
}

/// Runs `work(expert, buffer)` for every expert of a layer on a few threads, each with a buffer of one record; the first
/// error stops all.
fn each<T, W>(experts: usize, record: usize, work: W) -> Result<Vec<T>, StoreError>
where
    T: Send,
    W: Fn(usize, &mut [u8]) -> Result<T, StoreError> + Sync,
{
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Ok(Vec::with_capacity(experts)));
    let mut room = Slab::new(record * THREADS).map_err(|error| StoreError::Other(format!("no memory: {error}")))?;
    let run = |buffer: &mut [u8]| {
        loop {
            let expert = next.fetch_add(1, Ordering::Relaxed);
            if expert >= experts {
                break;
            }
            let result = work(expert, buffer);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            match (results.as_mut(), result) {
                (Ok(done), Ok(result)) => done.push((expert, result)),
                (Ok(_), Err(error)) => {
                    *results = Err(error);
                    next.store(experts, Ordering::Relaxed);
                }
                (Err(_), _) => {}
            }
        }
    };
    std::thread::scope(|scope| {
        for buffer in room.all_mut().chunks_exact_mut(record.max(1)) {
            let run = &run;
            scope.spawn(move || run(buffer));
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner)?;
    results.sort_by_key(|(expert, _)| *expert);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// Writes a layer's file and returns the hash of each record.
fn write_layer(
    source: &Files,
    experts: &[[Piece; PIECES]],
    layer: &Layer,
    path: &Path,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Vec<String>, StoreError> {
    let failed = |error| StoreError::Io { path: path.to_owned(), source: error };
    let file = File::create_new(path).map_err(failed)?;
    let hashes = each(experts.len(), layer.stride as usize, |expert, buffer| {
        buffer.fill(0);
        let pieces = experts.get(expert).into_iter().flatten();
        for (piece, &(at, len)) in pieces.zip(&layer.pieces) {
            if let Some(into) = buffer.get_mut(at as usize..at as usize + len) {
                read(source, piece, into)?;
                source.drop_cached(piece.file, piece.offset, piece.len);
            }
        }
        file.write_all_at(buffer, expert as u64 * layer.stride).map_err(failed)?;
        progress(layer.stride);
        Ok(hash(buffer))
    })?;
    file.sync_all().map_err(failed)?;
    Ok(hashes)
}

/// Reads a layer's file back from the disk, not from the page cache where that can be avoided.
fn verify_layer(layer: &Layer, path: &Path, progress: &(dyn Fn(u64) + Sync)) -> Result<(), StoreError> {
    let failed = |error| StoreError::Io { path: path.to_owned(), source: error };
    let disk = match Disk::open(path, Access::Direct) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => Disk::open(path, Access::Buffered),
        other => other,
    };
    let disk = disk.map_err(failed)?;
    disk.drop_cached(0, disk.len() as usize);
    each(layer.sha256.len(), layer.stride as usize, |expert, buffer| {
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match disk.read_at(rest, expert as u64 * layer.stride + done as u64).map_err(failed)? {
                0 => return Err(failed(io::ErrorKind::UnexpectedEof.into())),
                got => done += got,
            }
        }
        if layer.sha256.get(expert) != Some(&hash(buffer)) {
            let why = format!("expert {expert} does not read back as it was written: the disk or the memory is faulty");
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, why)));
        }
        progress(layer.stride);
        Ok(())
    })?;
    Ok(())
}

fn read(source: &Files, piece: &Piece, into: &mut [u8]) -> Result<(), StoreError> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        let got = match source.read(piece.file, piece.offset + done as u64, rest) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends inside an expert")),
            other => other,
        };
        done += got.map_err(|error| StoreError::Io { path: source.path(piece.file), source: error })?;
    }
    Ok(())
}

/// The first 16 hexadecimal digits of a record's SHA-256.
fn hash(record: &[u8]) -> String {
    hex(&Sha256::digest(record)[..8])
}
