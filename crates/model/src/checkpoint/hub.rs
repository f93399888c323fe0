//! [`Hub`] downloads checkpoints from the Hugging Face hub into the Hugging Face cache, which other programs share.
//!
//! A download contains only the files that a model needs: its [`WeightFiles`] and a few small files. All files come from
//! one commit. The size of every file is known before the download starts. Several files are transferred in parallel ([`transfer`]). An interrupted
//! download is resumed, in the same run or in the next. If the hub reports the SHA-256 of a file, it is verified.
//! The variables of huggingface_hub have their usual meaning ([`cache`]).
//!
//! Hubs and mirrors are untrusted. Every text that becomes part of a path is validated. A file never becomes larger
//! than its listed size. The token is never sent to another host.
//!
//! The crate `hf-hub` 0.5 uses the same cache layout but does not give these guarantees. The crate uses the ETag and
//! the commit of a response as parts of paths without validation, and sends the token to the host of a redirect. It
//! does not verify checksums, limit the size of responses, transfer pieces of a file in parallel, or use the system's
//! certificate authorities. A listing of the crate has neither sizes nor hashes. Its `Cache` knows only `HF_HOME`, and
//! reads and writes the commit of a branch without validation. `hf-hub` 1.0 has no build without its network code.

mod cache;
mod client;
mod download;
mod interrupt;
pub mod listing;
mod transfer;

pub use transfer::DownloadProgress;

use crate::checkpoint::weight_files::{INDEX, WeightFiles};
use cache::{HubCache, HubPaths};
use client::{HubClient, MAX_ATTEMPTS, RequestError};
use download::ModelDownload;
use interrupt::DownloadInterrupt;
use listing::{RepoFile, RepoListing};
use moestro_base::{
    error::StoreError,
    platform::{FileLock, os},
};
use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    io,
    path::PathBuf,
    time::Duration,
};
use transfer::{OnProgress, download_files};

/// Maximum number of bytes per request.
const PIECE_BYTES: u64 = 32 << 20;
/// Interval between two saves of the progress. After SIGKILL, a resumed download repeats the bytes of this time.
const SAVE_INTERVAL: Duration = Duration::from_secs(1);
const ENDPOINT: &str = "https://huggingface.co";

/// Files of a model that no complete revision uses.
#[derive(Debug, PartialEq)]
pub struct UnusedFiles {
    pub id: String,
    /// The directory of the files.
    pub dir: PathBuf,
    pub files: Vec<PathBuf>,
}

/// A hub, and the cache of its files on this machine.
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    cache: PathBuf,
    /// True if downloads are forbidden.
    is_offline: bool,
    /// Delay before the second attempt of a request. The delay doubles with each further attempt.
    retry_delay: Duration,
    piece_bytes: u64,
    save_interval: Duration,
    interrupt: DownloadInterrupt,
}

impl Hub {
    /// The hub and the cache that the environment variables select.
    pub fn from_env() -> Result<Self, StoreError> {
        let no_home = || StoreError::Other("no directory for downloads: neither HF_HOME nor HOME is set".into());
        let paths = HubPaths::from_env().ok_or_else(no_home)?;
        let set = |name| env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty());
        let token = set("HF_TOKEN").or_else(|| set("HUGGING_FACE_HUB_TOKEN")).or_else(|| paths.token());
        let cache = paths.cache;
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        Ok(Self {
            endpoint,
            token,
            cache,
            is_offline: set("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
            retry_delay: Duration::from_secs(1),
            piece_bytes: PIECE_BYTES,
            save_interval: SAVE_INTERVAL,
            interrupt: DownloadInterrupt::default(),
        })
    }

    /// The directory of the model `id` (`org/name`). `None` if the model is not complete on disk. Sends no request.
    pub fn local(&self, id: &str) -> Option<PathBuf> {
        let cache = HubCache::new(&self.cache, id);
        let commit = cache.commit()?;
        let dir = cache.snapshot(&commit);
        let is_complete = |files: &WeightFiles| files.missing.iter().all(|name| cache.is_absent(&commit, name));
        let files = WeightFiles::in_dir(&dir).ok().map(|(files, _)| files).filter(is_complete);
        (dir.join("config.json").exists() && files.is_some()).then_some(dir)
    }

    /// The ids and directories of all complete models.
    pub fn all(&self) -> Vec<(String, PathBuf)> {
        cache::ids(&self.cache).into_iter().filter_map(|id| Some((id.clone(), self.local(&id)?))).collect()
    }

    /// Files that no complete revision of a model uses: those of unfinished downloads, and of older revisions. Only
    /// models with such files are listed.
    pub fn unused(&self) -> Vec<UnusedFiles> {
        let unused = |id: String| {
            let cache = HubCache::new(&self.cache, &id);
            let files = cache.unused_blobs();
            (!files.is_empty()).then(|| UnusedFiles { id, dir: cache.blobs(), files })
        };
        cache::ids(&self.cache).into_iter().filter_map(unused).collect()
    }

    /// Deletes the [`UnusedFiles`] of a model.
    ///
    /// # Errors
    /// A process is downloading the model, or a file cannot be deleted.
    pub fn remove_unused(&self, id: &str) -> io::Result<()> {
        let cache = HubCache::new(&self.cache, id);
        let locks = cache::entries(&cache.blobs()).filter(|path| path.extension() == Some(OsStr::new("lock")));
        let lock = |path: PathBuf| FileLock::try_lock(File::open(path)?).map_err(io::Error::from);
        let _locks: Vec<FileLock> =
            locks.map(lock).collect::<io::Result<_>>().map_err(|_| io::Error::other("it is being downloaded"))?;
        cache.remove_blobs(&cache.unused_blobs())
    }

    /// Deletes all downloaded files of a model, including older revisions.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        fs::remove_dir_all(HubCache::new(&self.cache, id).dir())
    }

    /// Downloads the missing files of the model `id` at a branch, tag or commit. Returns the model's directory.
    ///
    /// # Errors
    /// The hub reports an error (the message includes a hint), a checksum is wrong, or the disk is full.
    pub fn pull(&self, id: &str, revision: &str, on_progress: OnProgress<'_>) -> Result<PathBuf, StoreError> {
        if !cache::is_revision(revision) {
            return Err(StoreError::Other(format!("{id}: {revision:?} is not a branch, tag or commit")));
        }
        check_variables(&self.endpoint, self.token.as_deref()).map_err(StoreError::Other)?;
        if self.is_offline {
            return Err(StoreError::Unreachable(format!("{id}: HF_HUB_OFFLINE forbids downloads; unset it")));
        }
        let client = HubClient::new(&self.endpoint, self.token.clone());
        let listing = self.list(&client, id, revision)?;
        tracing::info!(model = id, licence = listing.licence().unwrap_or("not named"), "downloading a model");
        let cache = HubCache::new(&self.cache, id);
        let download = ModelDownload {
            client,
            id,
            commit: listing.sha.clone(),
            snapshot: cache.snapshot(&listing.sha),
            blobs: cache.blobs(),
            retry_delay: self.retry_delay,
            piece_bytes: self.piece_bytes,
            save_interval: self.save_interval,
        };
        let with_size = |file| {
            let size = download.size(file)?;
            file.check_size(size).map_err(|why| StoreError::Other(format!("{id}: {why}")))?;
            Ok((file, size))
        };
        let small: Vec<(&RepoFile, u64)> =
            listing.small_files().into_iter().map(with_size).collect::<Result<_, StoreError>>()?;
        // Download the index first, because it lists the shards.
        if let Some(&(index, size)) = small.iter().find(|(file, _)| file.name == INDEX)
            && !download.has(index, size)
        {
            download_files(&download, &[(index, size)], (0, 0), on_progress, &self.interrupt)?;
        }
        let shards = listing.shards(&download.snapshot).map_err(|error| match error {
            StoreError::Other(why) => StoreError::Other(format!("{id}: {why}")),
            error => error,
        })?;
        let shards = shards.into_iter().map(with_size);
        let files = small.into_iter().map(Ok).chain(shards).collect::<Result<Vec<_>, StoreError>>()?;
        let sum = |files: &[(&RepoFile, u64)]| files.iter().try_fold(0u64, |sum, (_, size)| sum.checked_add(*size));
        let overflow = || StoreError::Other(format!("{id}: the sizes in the hub's listing overflow"));
        let total = sum(&files).ok_or_else(overflow)?;
        let needed: Vec<_> = files.into_iter().filter(|(file, size)| !download.has(file, *size)).collect();
        let missing = sum(&needed).ok_or_else(overflow)?;
        let allocated: u64 = needed.iter().map(|(file, size)| download.allocated(file).min(*size)).sum();
        self.check_free_space(missing - allocated)?;
        on_progress(DownloadProgress { on_disk: total - missing, received: 0, total });
        download_files(&download, &needed, (total - missing, total), on_progress, &self.interrupt)?;
        let absent = listing.absent(&download.snapshot)?;
        cache.mark_absent(&listing.sha, &absent).map_err(StoreError::at(&download.snapshot))?;
        // Record the commit last, so that other programs see the revision only when it is complete.
        cache.set_commit(revision, &listing.sha).map_err(StoreError::at(&download.snapshot))?;
        Ok(download.snapshot)
    }

    /// Ends a running download, and waits until its progress is saved. Further downloads of this hub fail. Returns false
    /// if this was called before.
    pub fn interrupt(&self) -> bool {
        self.interrupt.request()
    }

    fn check_free_space(&self, needed: u64) -> Result<(), StoreError> {
        let Some(free) = os::free_space(&self.cache).filter(|&free| free < needed) else { return Ok(()) };
        let gigabytes = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
        let why = format!(
            "the disk is too small: the download needs {} more, but only {} are free; free some space, or set HF_HOME to a \
             directory on a larger disk",
            gigabytes(needed),
            gigabytes(free)
        );
        Err(StoreError::at(&self.cache)(io::Error::new(io::ErrorKind::StorageFull, why)))
    }

    fn list(&self, client: &HubClient, id: &str, revision: &str) -> Result<RepoListing, StoreError> {
        // A slash of the revision is not a separator of the address.
        let path = format!("api/models/{id}/revision/{}?blobs=true", revision.replace('/', "%2F"));
        let mut delay = self.retry_delay;
        let mut attempt = 1;
        let listing: RepoListing = loop {
            attempt += 1;
            match client.json(&path) {
                // Retry only after a temporary error response. If the hub is unreachable, the model may be complete on
                // disk.
                Err(error @ RequestError::Status { .. }) if error.is_temporary() && attempt <= MAX_ATTEMPTS => {
                    tracing::warn!("the hub returned {error}; trying again ({attempt} of {MAX_ATTEMPTS})");
                    std::thread::sleep(delay);
                    delay *= 2;
                }
                other => break other.map_err(|error| client.describe(id, "", error))?,
            }
        };
        listing.check().map_err(|why| StoreError::Other(format!("{id}: the hub's listing is invalid: {why}")))?;
        Ok(listing)
    }
}

/// Checks the address of a hub and the token for it, which come from the environment.
fn check_variables(endpoint: &str, token: Option<&str>) -> Result<(), String> {
    let rest = ["https://", "http://"].iter().find_map(|scheme| endpoint.strip_prefix(scheme));
    if !rest.is_some_and(|rest| !rest.is_empty() && rest.chars().all(|c| c.is_ascii_graphic() && c != '?' && c != '#'))
    {
        return Err(format!("HF_ENDPOINT is {endpoint:?}, not an address such as {ENDPOINT}"));
    }
    match token {
        Some(token) if !token.chars().all(|c| c.is_ascii_graphic()) => {
            Err("the token, of HF_TOKEN or saved by `hf auth login`, has a space or a character that is not ASCII"
                .into())
        }
        _ => Ok(()),
    }
}

/// True for the words that huggingface_hub takes for a switch.
fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

#[cfg(all(test, feature = "hub"))]
mod tests;
