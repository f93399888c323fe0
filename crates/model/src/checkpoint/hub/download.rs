//! [`ModelDownload`]: the complete and partial files of a model on disk.
//!
//! The part file `HASH.part` contains the received bytes at their final offsets. The map file `HASH.map` lists the
//! ranges that are missing. The map file is updated every second, so that a later run can resume the download of a
//! killed run. A part file without a map file has no gaps.

use super::{
    client::{FileResponse, HubClient, RequestError},
    listing::RepoFile,
};
use moestro_base::{
    error::StoreError,
    platform::{FileLock, atomic_file::replace_file, read_small_file, sha256_file},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, OpenOptions, TryLockError},
    hash::{BuildHasher, RandomState},
    io,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    time::Duration,
};

/// Maximum size of a map file in bytes.
const MAX_MAP_BYTES: u64 = 1 << 20;

/// The download of one model: its source and its directories.
pub struct ModelDownload<'a> {
    pub client: HubClient,
    pub id: &'a str,
    pub commit: String,
    pub snapshot: PathBuf,
    pub blobs: PathBuf,
    /// Delay before the second attempt of a request. The delay doubles with each further attempt.
    pub retry_delay: Duration,
    /// Maximum number of bytes per request.
    pub piece_bytes: u64,
    /// Interval between two saves of the progress.
    pub save_interval: Duration,
}

/// The contents of a map file: the missing ranges of a partial file.
#[derive(Serialize, Deserialize)]
pub struct MissingRanges {
    pub size: u64,
    /// The ETag of the received bytes. For a file without a checksum, a different ETag shows that the file has changed.
    #[serde(rename = "tag")]
    pub etag: Option<String>,
    /// Start and end of each missing range, ascending. Adjacent ranges are merged.
    pub missing: Vec<(u64, u64)>,
}

/// The state of a file on disk.
pub enum BlobState {
    /// The file is complete and linked into the snapshot.
    Complete,
    /// Another process is downloading the file.
    Busy,
    /// The file is partial. Other processes wait while this process has `lock`.
    Partial { part: File, lock: FileLock, progress: MissingRanges },
}

impl ModelDownload<'_> {
    pub fn has(&self, file: &RepoFile, size: u64) -> bool {
        fs::metadata(self.snapshot.join(&file.name)).is_ok_and(|meta| meta.len() == size)
    }

    /// The size of a file in bytes. If the listing has no size, requests the first byte of the file to get the size.
    pub fn size(&self, file: &RepoFile) -> Result<u64, StoreError> {
        if let Some(size) = file.size {
            return Ok(size);
        }
        let url = self.url(file);
        // Without `Content-Range`, only the response for the whole file shows its size.
        let response = match self.client.range(&url, 0, 0) {
            Ok(FileResponse { size: None, .. }) => self.client.whole(&url),
            first => first,
        };
        let unknown = || RequestError::Invalid("a response without the file's size".into());
        let size = response.and_then(|response| response.size.ok_or_else(unknown));
        size.map_err(|error| self.client.describe(self.id, &file.name, error))
    }

    pub fn create_dirs(&self) -> Result<(), StoreError> {
        let create = |dir: &PathBuf| fs::create_dir_all(dir).map_err(StoreError::at(dir));
        create(&self.blobs).and_then(|()| create(&self.snapshot))
    }

    pub fn url(&self, file: &RepoFile) -> String {
        format!("{}/resolve/{}/{}", self.id, self.commit, file.name)
    }

    /// Path of a file's blob. The name of the blob is the hash that the hub reports, or a hash of commit and file name
    /// if the hub reports no hash.
    pub fn blob(&self, file: &RepoFile) -> PathBuf {
        let fallback = || hex::encode(Sha256::digest(format!("{}/{}", self.commit, file.name)));
        self.blobs.join(file.hash().map_or_else(fallback, str::to_owned))
    }

    pub fn part(&self, file: &RepoFile) -> PathBuf {
        self.blob(file).with_extension("part")
    }

    /// Opens a file of `size` bytes for download, unless the file is complete or another process downloads it.
    pub fn open(&self, file: &RepoFile, size: u64) -> io::Result<BlobState> {
        let blob = self.blob(file);
        let is_complete = || fs::metadata(&blob).is_ok_and(|meta| meta.len() == size);
        // The blob may exist already from another revision.
        if is_complete() {
            return self.link(file, &blob).map(|()| BlobState::Complete);
        }
        let lock = match FileLock::try_lock(File::create(blob.with_extension("lock"))?) {
            Ok(lock) => lock,
            Err(TryLockError::WouldBlock) => return Ok(BlobState::Busy),
            Err(TryLockError::Error(error)) => return Err(error),
        };
        // Another process may have completed the file before this process got the lock.
        if is_complete() {
            return self.link(file, &blob).map(|()| BlobState::Complete);
        }
        let part = OpenOptions::new().create(true).truncate(false).write(true).open(self.part(file))?;
        let len = part.metadata()?.len();
        let map = blob.with_extension("map");
        let saved = read_small_file(&map, MAX_MAP_BYTES).ok();
        let saved = saved.and_then(|text| serde_json::from_slice::<MissingRanges>(&text).ok());
        let progress = match saved.filter(|saved| saved.is_valid(size, len)) {
            Some(saved) => saved,
            None if len <= size && !map.exists() => MissingRanges { size, etag: None, missing: vec![(len, size)] },
            None => MissingRanges { size, etag: None, missing: vec![(0, size)] },
        };
        if progress.missing == [(0, size)] {
            part.set_len(0)?;
        }
        if size > self.piece_bytes || map.exists() {
            // Pieces may arrive in any order and leave gaps, so the map file must exist before the first write.
            self.save_progress(file, None, &progress);
        }
        Ok(BlobState::Partial { part, lock, progress })
    }

    /// Links the blob into the snapshot. Replaces another link in one step, so that a process that has downloaded the
    /// file always finds it.
    fn link(&self, file: &RepoFile, blob: &Path) -> io::Result<()> {
        let link = self.snapshot.join(&file.name);
        link.parent().map_or(Ok(()), fs::create_dir_all)?;
        let model = "../".repeat(2 + file.name.matches('/').count());
        let target = Path::new(&model).join("blobs").join(blob.file_name().unwrap_or_default());
        if fs::read_link(&link).is_ok_and(|linked| linked == target) {
            return Ok(());
        }
        // Processes of several containers may share the cache, and their process ids may be equal.
        let temp = blob.with_extension(format!("{:016x}.link", RandomState::new().hash_one(&link)));
        symlink(target, &temp)?;
        fs::rename(&temp, &link).inspect_err(|_| drop(fs::remove_file(&temp)))
    }

    /// Syncs the part file, then writes the map file. If an operation fails, the next run downloads more than
    /// necessary.
    pub fn save_progress(&self, file: &RepoFile, part: Option<&File>, progress: &MissingRanges) {
        let path = self.blob(file).with_extension("map");
        let synced = part.map_or(Ok(()), |part| part.sync_data());
        let saved = synced.and_then(|()| replace_file(&path, &serde_json::to_vec(progress)?));
        if let Err(error) = saved {
            tracing::warn!(file = file.name, %error, "cannot save download progress");
        }
    }

    pub fn remove_progress(&self, file: &RepoFile) {
        let _ = fs::remove_file(self.blob(file).with_extension("map"));
    }

    /// Number of bytes of a partial file that take room on the disk. The part file may have gaps.
    pub fn allocated(&self, file: &RepoFile) -> u64 {
        fs::metadata(self.part(file)).map_or(0, |meta| 512 * meta.blocks())
    }

    /// Verifies the checksum of a complete part file, renames the file to its blob, and links the blob into the
    /// snapshot. If the checksum is wrong, removes the part file.
    pub fn finish(&self, file: &RepoFile, part: &File) -> Result<(), StoreError> {
        let blob = self.blob(file);
        let path = self.part(file);
        let at = StoreError::at(&path);
        part.sync_all().map_err(at)?;
        let is_right = file.sha256().map_or(Ok(true), |expected| Ok(sha256_file(&path)? == expected)).map_err(at)?;
        self.remove_progress(file);
        if !is_right {
            fs::remove_file(&path).map_err(at)?;
            let why = "its SHA-256 differs from the hub's, so it was damaged in transit; pull again";
            return Err(StoreError::Other(format!("{}, {}: {why}", self.id, file.name)));
        }
        fs::rename(&path, &blob).and_then(|()| self.link(file, &blob)).map_err(at)
    }
}

impl MissingRanges {
    /// True if these ranges can be the missing ranges of a file of `size` bytes whose part file has `len` bytes.
    fn is_valid(&self, size: u64, len: u64) -> bool {
        let ascending = self.missing.windows(2).all(|pair| pair[0].1 < pair[1].0);
        let inside = self.missing.iter().all(|(from, to)| from <= to && *to <= size);
        // The part file must contain the last byte that is not missing.
        let last = self.missing.last().filter(|last| last.1 == size).map_or(size, |last| last.0);
        self.size == size && ascending && inside && last <= len && len <= size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linked_file_is_never_missing() {
        let dir = tempfile::tempdir().unwrap();
        let file: RepoFile = serde_json::from_value(serde_json::json!({ "rfilename": "a/b.json" })).unwrap();
        let download = ModelDownload {
            client: HubClient::new("http://127.0.0.1:1", None),
            id: "org/name",
            commit: "0".repeat(40),
            snapshot: dir.path().join("snapshots").join("0"),
            blobs: dir.path().join("blobs"),
            retry_delay: Duration::ZERO,
            piece_bytes: 1,
            save_interval: Duration::ZERO,
        };
        download.create_dirs().unwrap();
        fs::write(download.blob(&file), "{}").unwrap();
        let open = || assert!(matches!(download.open(&file, 2), Ok(BlobState::Complete)));
        open();
        // Two other processes link the file, too.
        std::thread::scope(|scope| {
            let others = [(); 2].map(|()| scope.spawn(|| (0..1000).for_each(|_| open())));
            while !others.iter().all(|other| other.is_finished()) {
                assert!(download.has(&file, 2));
            }
        });
        assert_eq!(fs::read_dir(&download.blobs).unwrap().count(), 1, "no temporary link is left");
    }

    #[test]
    fn impossible_missing_ranges_are_invalid() {
        let ranges = |missing: &[(u64, u64)]| MissingRanges { size: 100, etag: None, missing: missing.into() };
        for (missing, len, is_valid) in [
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
            assert_eq!(ranges(missing).is_valid(100, len), is_valid, "{missing:?} {len}");
        }
        assert!(!ranges(&[]).is_valid(101, 100));
    }
}
