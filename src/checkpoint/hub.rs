//! Checkpoints from the Hugging Face hub, in the Hugging Face cache, where other programs find them too.
//!
//! Only what a model needs is downloaded: the safetensors that its index names (or `model*.safetensors` without one) and
//! seven small files. All come from one commit, whose sizes are known before the first byte, several at once ([`work`]). A
//! download that breaks goes on where it stopped, now or at the next run, and every file whose SHA-256 the hub knows is checked. `HF_HOME`,
//! `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_TOKEN` mean what they mean to other programs.
//!
//! A hub, or a mirror of it, may be anybody's: what it says is checked before it becomes a path, it cannot make us write
//! more than it announced, and the token goes to no other host.

mod cache;
mod client;
mod download;
pub mod listing;
mod work;

use crate::{checkpoint::index::Index, error::StoreError, platform::os, platform::read_small_file};
use cache::Shelf;
use client::{Client, Failure};
use download::Download;
use listing::{Listed, Listing};
use std::{
    env, fs, io,
    path::{Path, PathBuf},
    time::Duration,
};
use work::Progress;

/// The branch that counts.
const REVISION: &str = "main";
/// Attempts at one file in which nothing arrives before it is given up.
const ATTEMPTS: u32 = 5;
/// Bytes that a connection is asked for at once.
const PIECE: u64 = 32 << 20;
const ENDPOINT: &str = "https://huggingface.co";

/// The hub and the cache on this machine.
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    cache: PathBuf,
    /// Before the second attempt; each further one waits twice as long.
    wait: Duration,
    piece: u64,
}

impl Hub {
    /// As the environment says.
    pub fn from_env() -> Result<Self, StoreError> {
        let homeless = || StoreError::Other("no place for downloads: neither HF_HOME nor HOME is set".into());
        let cache = cache::root().ok_or_else(homeless)?;
        let set = |name| env::var(name).ok().filter(|value: &String| !value.is_empty());
        let token = set("HF_TOKEN").or_else(|| cache::token(&cache));
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        Ok(Self { endpoint, token, cache, wait: Duration::from_secs(1), piece: PIECE })
    }

    /// The directory of the model `id` (`org/name`), if all of it is here. Asks nobody.
    pub fn local(&self, id: &str) -> Option<PathBuf> {
        let shelf = Shelf::new(&self.cache, id);
        let dir = shelf.snapshot(&shelf.commit()?);
        (dir.join("config.json").exists() && is_complete(&dir)).then_some(dir)
    }

    /// All models that are here whole, and where.
    pub fn all(&self) -> Vec<(String, PathBuf)> {
        cache::ids(&self.cache).into_iter().filter_map(|id| Some((id.clone(), self.local(&id)?))).collect()
    }

    /// Deletes all that was downloaded of a model, older revisions too.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        fs::remove_dir_all(Shelf::new(&self.cache, id).dir())
    }

    /// Downloads what is missing of the model `id` and returns its directory. `progress` gets bytes that are here and
    /// bytes in all.
    ///
    /// # Errors
    /// The hub's, in words; a file that does not have the hub's checksum; disk full.
    pub fn pull(&self, id: &str, progress: Progress<'_>) -> Result<PathBuf, StoreError> {
        let client = Client::new(&self.endpoint, self.token.clone());
        let listing = self.list(&client, id)?;
        let shelf = Shelf::new(&self.cache, id);
        let (dir, blobs) = (shelf.snapshot(&listing.sha), shelf.blobs());
        let download = Download { hub: self, client, id, commit: listing.sha.clone(), dir, blobs };

        let small = listing.small();
        // The index says which shards there are; it is small and comes first.
        if let Some(index) = small.iter().find(|file| file.name == listing::INDEX) {
            let size = download.size(index)?;
            if !download.has(index, size) {
                work::fetch(&download, &[(index, size)], 0, 0, progress)?;
            }
        }
        let shards = listing.shards(&download.dir)?;
        let files = small.into_iter().chain(shards).map(|file| Ok((file, download.size(file)?)));
        let files: Vec<(&Listed, u64)> = files.collect::<Result<_, StoreError>>()?;
        let sum = |files: &[(&Listed, u64)]| files.iter().try_fold(0u64, |sum, (_, size)| sum.checked_add(*size));
        let absurd = || StoreError::Other(format!("{id}: the hub lists more bytes than can be counted"));
        let total = sum(&files).ok_or_else(absurd)?;
        let lacking: Vec<_> = files.into_iter().filter(|(file, size)| !download.has(file, *size)).collect();
        let missing = sum(&lacking).ok_or_else(absurd)?;
        if let Some(free) = os::free_space(&self.cache).filter(|&free| free < missing) {
            let why = format!("{missing} bytes are to be downloaded and {free} are free");
            let source = io::Error::new(io::ErrorKind::StorageFull, why);
            return Err(StoreError::Io { path: self.cache.clone(), source });
        }
        progress(total - missing, total);
        work::fetch(&download, &lacking, total - missing, total, progress)?;
        // Only now is it the revision that programs find.
        let at = |source| StoreError::Io { path: download.dir.clone(), source };
        shelf.set_commit(&listing.sha).map_err(at)?;
        Ok(download.dir)
    }

    fn list(&self, client: &Client, id: &str) -> Result<Listing, StoreError> {
        let ask = || client.json(&format!("api/models/{id}/revision/{REVISION}?blobs=true"));
        let mut wait = self.wait;
        let mut left = ATTEMPTS;
        let listing: Listing = loop {
            left -= 1;
            match ask() {
                // A hub that is not there is said at once: perhaps the model is here already.
                Err(error @ Failure::Status(_)) if error.passes() && left > 0 => std::thread::sleep(wait),
                other => break other.map_err(|error| self.failed(id, "", error))?,
            }
            wait *= 2;
        };
        listing.check().map_err(|why| StoreError::Other(format!("{id}: the hub's listing is not sound: {why}")))?;
        Ok(listing)
    }

    /// An error of the hub, in words that help.
    fn failed(&self, id: &str, file: &str, error: Failure) -> StoreError {
        let what = if file.is_empty() { id.to_owned() } else { format!("{id}, {file}") };
        let key = if self.token.is_some() { "HF_TOKEN must be allowed to read it" } else { "HF_TOKEN opens those" };
        let why = match error {
            Failure::Status(401 | 403) => {
                format!("the hub says no: the model does not exist, or is private or gated; {key}")
            }
            Failure::Status(404) => "the hub has no such model or file".into(),
            Failure::Status(429) => "the hub says that we ask too often; try again later".into(),
            Failure::Status(status) => format!("the hub answers with status {status}"),
            Failure::Nonsense(why) => format!("the hub sent {why}"),
            Failure::Broken(why) => why,
            Failure::Disk(source) => return StoreError::Io { path: self.cache.clone(), source },
        };
        StoreError::Other(format!("{what}: {why}"))
    }
}

/// True if a snapshot has every file that its own index asks for.
fn is_complete(dir: &Path) -> bool {
    let path = dir.join(listing::INDEX);
    if !path.exists() {
        return Index::open(dir).is_ok();
    }
    let names = read_small_file(&path, listing::MOST_INDEX).ok().and_then(|index| listing::shard_names(&index).ok());
    names.is_some_and(|names| names.iter().all(|name| dir.join(name).exists()))
}

#[cfg(test)]
mod tests;
