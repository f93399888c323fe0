//! A model's files on the disk: what has come of them, what is missing, and the end of it.
//!
//! `HASH.part` holds the bytes that have come, each in its place; `HASH.map` says which are still missing, as it was some
//! seconds ago at most, so a run that is killed is gone on with. Without a map the bytes have come from the start.

use super::{
    Hub,
    client::{Client, Failure},
    listing::Listed,
};
use crate::{
    error::StoreError,
    platform::{atomic_file, read_small_file, sha256_file},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io,
    path::{Path, PathBuf},
};

/// Bytes of a map at most.
const MOST_MAP: u64 = 1 << 20;

/// A model's files, and where they go.
pub struct Download<'a> {
    pub hub: &'a Hub,
    pub client: Client,
    pub id: &'a str,
    pub commit: String,
    /// The snapshot.
    pub dir: PathBuf,
    pub blobs: PathBuf,
}

/// The notes on a file that is not whole, for the next run.
#[derive(Serialize, Deserialize)]
pub struct Map {
    pub size: u64,
    /// The ETag that its bytes came with, where there is no checksum to find a mixture out.
    pub tag: Option<String>,
    /// From where to where, ascending, with something between that has come.
    pub missing: Vec<(u64, u64)>,
}

/// A file as it was found.
pub enum Opened {
    /// It is here, under its name.
    Whole,
    /// Another run is at it.
    Busy,
    /// Ours to go on with, for as long as `lock` is open.
    Part { part: File, lock: File, map: Map },
}

impl Download<'_> {
    pub fn has(&self, file: &Listed, size: u64) -> bool {
        fs::metadata(self.dir.join(&file.name)).is_ok_and(|meta| meta.len() == size)
    }

    /// A file's bytes. A mirror that lists no sizes is asked for the first byte.
    pub fn size(&self, file: &Listed) -> Result<u64, StoreError> {
        if let Some(size) = file.size {
            return Ok(size);
        }
        let part = self.client.part(&self.url(file), 0, Some(0));
        let unknown = || Failure::Nonsense("no size of it".into());
        part.and_then(|part| part.size.ok_or_else(unknown)).map_err(|error| self.hub.failed(self.id, &file.name, error))
    }

    /// Makes the directories.
    pub fn prepare(&self) -> Result<(), StoreError> {
        let make =
            |dir: &PathBuf| fs::create_dir_all(dir).map_err(|source| StoreError::Io { path: dir.clone(), source });
        make(&self.blobs).and_then(|()| make(&self.dir))
    }

    pub fn url(&self, file: &Listed) -> String {
        format!("{}/resolve/{}/{}", self.id, self.commit, file.name)
    }

    /// A file's name among the blobs: the hub's hash, else one of its revision and name.
    pub fn blob(&self, file: &Listed) -> PathBuf {
        let made_up = || hex::encode(Sha256::digest(format!("{}/{}", self.commit, file.name)));
        self.blobs.join(file.hash().map_or_else(made_up, str::to_owned))
    }

    /// Opens a file of `size` bytes for what is missing of it.
    pub fn open(&self, file: &Listed, size: u64) -> io::Result<Opened> {
        let blob = self.blob(file);
        let is_whole = || fs::metadata(&blob).is_ok_and(|meta| meta.len() == size);
        // A blob that another revision has downloaded already is used.
        if is_whole() {
            return self.link(file, &blob).map(|()| Opened::Whole);
        }
        let lock = File::create(blob.with_extension("lock"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(Opened::Busy),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Another run may have brought it meanwhile.
        if is_whole() {
            return self.link(file, &blob).map(|()| Opened::Whole);
        }
        let part = OpenOptions::new().create(true).truncate(false).write(true).open(blob.with_extension("part"))?;
        let (len, noted) = (part.metadata()?.len(), blob.with_extension("map"));
        let map = read_small_file(&noted, MOST_MAP).ok().and_then(|text| serde_json::from_slice::<Map>(&text).ok());
        let map = match map.filter(|map| map.is_sound(size, len)) {
            Some(map) => map,
            None if len <= size && !noted.exists() => Map { size, tag: None, missing: vec![(len, size)] },
            None => Map { size, tag: None, missing: vec![(0, size)] },
        };
        if map.missing == [(0, size)] {
            part.set_len(0)?;
        }
        if size > self.hub.piece || noted.exists() {
            // It has a map from its first byte on: what is written first need not be its start.
            self.save(file, None, &map);
        }
        Ok(Opened::Part { part, lock, map })
    }

    fn link(&self, file: &Listed, blob: &Path) -> io::Result<()> {
        let link = self.dir.join(&file.name);
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link)?;
        }
        std::os::unix::fs::symlink(Path::new("../../blobs").join(blob.file_name().unwrap_or_default()), &link)
    }

    /// Writes what is missing, once what is not has reached the disk. Without it the next run asks for more than it must.
    pub fn save(&self, file: &Listed, part: Option<&File>, map: &Map) {
        let path = self.blob(file).with_extension("map");
        let synced = part.map_or(Ok(()), |part| part.sync_data());
        let saved = synced.and_then(|()| atomic_file::replace_file(&path, &serde_json::to_vec(map)?));
        if let Err(error) = saved {
            tracing::warn!(file = file.name, %error, "what has come of it could not be noted");
        }
    }

    pub fn failed(&self, file: &Listed, failure: Failure) -> StoreError {
        match failure {
            Failure::Disk(source) => StoreError::Io { path: self.blob(file).with_extension("part"), source },
            other => self.hub.failed(self.id, &file.name, other),
        }
    }

    /// Compares a file that is all there with what the hub says of it, and gives it its name; a wrong one is removed.
    pub fn finish(&self, file: &Listed, part: &File) -> Result<(), StoreError> {
        let blob = self.blob(file);
        let path = blob.with_extension("part");
        let at = |source| StoreError::Io { path: path.clone(), source };
        part.sync_all().map_err(at)?;
        let right = file.sha256().map_or(Ok(true), |expected| Ok(sha256_file(&path)? == expected)).map_err(at)?;
        let _ = fs::remove_file(blob.with_extension("map"));
        if !right {
            fs::remove_file(&path).map_err(at)?;
            let why = "damaged on the way (its SHA-256 is not the hub's); pull again";
            return Err(StoreError::Other(format!("{}, {}: {why}", self.id, file.name)));
        }
        fs::rename(&path, &blob).and_then(|()| self.link(file, &blob)).map_err(at)
    }
}

impl Map {
    /// True if it can be the map of a file of `size` bytes of which `len` are on the disk, with holes or without.
    fn is_sound(&self, size: u64, len: u64) -> bool {
        let ends = self.missing.windows(2).all(|pair| pair[0].1 < pair[1].0);
        let inside = self.missing.iter().all(|(from, to)| from <= to && *to <= size);
        // The end of the file, if it has come.
        let last = self.missing.last().filter(|last| last.1 == size).map_or(size, |last| last.0);
        self.size == size && ends && inside && last <= len && len <= size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_that_cannot_be_is_not_believed() {
        let map = |missing: &[(u64, u64)]| Map { size: 100, tag: None, missing: missing.into() };
        for (missing, len, sound) in [
            (&[][..], 100, true),
            (&[], 99, false),
            (&[(0, 100)], 0, true),
            (&[(50, 100)], 50, true),
            (&[(50, 100)], 49, false),
            (&[(10, 20), (60, 100)], 60, true),
            (&[(10, 20)], 60, false),
            (&[(10, 20)], 101, false),
            (&[(10, 20), (20, 100)], 100, false),
            (&[(20, 10)], 100, false),
            (&[(10, 30), (20, 100)], 100, false),
            (&[(90, 101)], 100, false),
        ] {
            assert_eq!(map(missing).is_sound(100, len), sound, "{missing:?} {len}");
        }
        assert!(!map(&[]).is_sound(101, 100));
    }
}
