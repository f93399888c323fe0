//! Checkpoints from the Hugging Face hub, in the Hugging Face cache, where other programs find them too.
//!
//! Only what a model needs is downloaded: the safetensors that its index names (or `model*.safetensors` without one) and
//! seven small files. All come from one commit, whose sizes are known before the first byte. A download that breaks goes
//! on where it stopped, now or at the next run, and every file whose SHA-256 the hub knows is checked. `HF_HOME`,
//! `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_TOKEN` mean what they mean to other programs.

mod listing;

use crate::{checkpoint::index::Index, error::StoreError, platform::os};
use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        Progress,
        sync::{Api, ApiBuilder, ApiError, ApiRepo},
    },
};
use listing::{Listed, Listing};
use sha2::{Digest, Sha256};
use std::{
    env,
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

/// The branch that counts.
const REVISION: &str = "main";
/// Attempts at one file in which nothing arrives before it is given up.
const ATTEMPTS: u32 = 5;

/// The hub and the cache on this machine.
pub struct Hub {
    endpoint: Option<String>,
    token: Option<String>,
    cache: Cache,
    /// Before the second attempt; each further one waits twice as long.
    wait: Duration,
}

impl Hub {
    /// As the environment says.
    pub fn from_env() -> Result<Self, StoreError> {
        if env::var_os("HF_HOME").is_none() && env::home_dir().is_none() {
            return Err(StoreError::Other("no place for downloads: neither HF_HOME nor HOME is set".into()));
        }
        let set = |name| env::var(name).ok().filter(|value: &String| !value.is_empty());
        let cache = set("HF_HUB_CACHE").map_or_else(Cache::from_env, |dir| Cache::new(dir.into()));
        let token = set("HF_TOKEN").or_else(|| cache.token());
        Ok(Self { endpoint: set("HF_ENDPOINT"), token, cache, wait: Duration::from_secs(1) })
    }

    /// Where the model `id` (`org/name`) lies, if all of it is here. Asks nobody.
    pub fn local(&self, id: &str) -> Option<PathBuf> {
        let dir = self.cache.model(id.into()).get("config.json")?.parent()?.to_owned();
        is_complete(&dir).then_some(dir)
    }

    /// Downloads what is missing of the model `id` and returns its directory. `progress` gets bytes that are here and
    /// bytes in all.
    ///
    /// # Errors
    /// What the hub answers, in words; a file that does not have the hub's checksum; disk full.
    pub fn pull(&self, id: &str, progress: &dyn Fn(u64, u64)) -> Result<PathBuf, StoreError> {
        let mut builder = ApiBuilder::from_cache(self.cache.clone())
            .with_progress(false)
            .with_token(self.token.clone())
            .with_user_agent("moestro", env!("CARGO_PKG_VERSION"));
        if let Some(endpoint) = &self.endpoint {
            builder = builder.with_endpoint(endpoint.trim_end_matches('/').into());
        }
        let api = builder.build().map_err(|error| self.failed(id, "", &error))?;
        let listing = self.list(&api, id)?;
        let repo = Repo::with_revision(id.into(), RepoType::Model, listing.sha.clone());
        let dir = self.cache.repo(repo.clone()).pointer_path(&listing.sha);
        let mut download = Download { hub: self, id, repo: api.repo(repo), dir, here: 0, total: 0, progress };

        let small = listing.small();
        // The index says which shards there are; it is small and comes first.
        if let Some(index) = small.iter().find(|file| file.name == listing::INDEX) {
            download.fetch(index)?;
        }
        let shards = listing.shards(&download.dir)?;
        let files: Vec<&Listed> = small.into_iter().chain(shards).collect();
        let (mut missing, mut sizes) = (0, Vec::with_capacity(files.len()));
        for file in &files {
            let size = match file.size {
                Some(size) => size,
                // A mirror that lists no sizes is asked file by file.
                None => {
                    let url = download.repo.url(&file.name);
                    api.metadata(&url).map_err(|error| self.failed(id, &file.name, &error))?.size() as u64
                }
            };
            missing += if download.has(file, size) { 0 } else { size };
            sizes.push(size);
        }
        download.total = sizes.iter().sum();
        if let Some(free) = os::free_space(self.cache.path()).filter(|&free| free < missing) {
            let why = format!("{missing} bytes are to be downloaded and {free} are free");
            let source = io::Error::new(io::ErrorKind::StorageFull, why);
            return Err(StoreError::Io { path: self.cache.path().clone(), source });
        }
        download.here = 0;
        for (file, size) in files.iter().zip(sizes) {
            if !download.has(file, size) {
                download.fetch(file)?;
            }
            download.here += size;
            progress(download.here, download.total);
        }
        // Only now is it the revision that programs find.
        let main = self.cache.repo(Repo::with_revision(id.into(), RepoType::Model, REVISION.into()));
        let at = |source| StoreError::Io { path: download.dir.clone(), source };
        main.create_ref(&listing.sha).map_err(at)?;
        Ok(download.dir)
    }

    fn list(&self, api: &Api, id: &str) -> Result<Listing, StoreError> {
        let repo = api.repo(Repo::with_revision(id.into(), RepoType::Model, REVISION.into()));
        let ask = || -> Result<Listing, ApiError> {
            let mut answer = repo.info_request().query("blobs", "true").call().map_err(Box::new)?;
            Ok(answer.body_mut().read_json().map_err(Box::new)?)
        };
        let mut wait = self.wait;
        for _ in 1..ATTEMPTS {
            match ask() {
                // Nobody there is said at once: perhaps the model is here already.
                Err(error) if passes(&error) && status(&error).is_some() => std::thread::sleep(wait),
                other => return other.map_err(|error| self.failed(id, "", &error)),
            }
            wait *= 2;
        }
        ask().map_err(|error| self.failed(id, "", &error))
    }

    /// An error of the hub, in words that help.
    fn failed(&self, id: &str, file: &str, error: &ApiError) -> StoreError {
        let what = if file.is_empty() { id.to_owned() } else { format!("{id}, {file}") };
        let key = if self.token.is_some() { "HF_TOKEN must be allowed to read it" } else { "HF_TOKEN opens those" };
        let why = match status(error) {
            Some(401 | 403) => format!("the hub says no: the model does not exist, or is private or gated; {key}"),
            Some(404) => "the hub has no such model or file".into(),
            Some(429) => "the hub says that we ask too often; try again later".into(),
            Some(status) => format!("the hub answers with status {status}"),
            None => error.to_string(),
        };
        StoreError::Other(format!("{what}: {why}"))
    }
}

/// The HTTP status an error stands for.
fn status(error: &ApiError) -> Option<u16> {
    match error {
        ApiError::RequestError(error) => match **error {
            ureq::Error::StatusCode(status) => Some(status),
            _ => None,
        },
        _ => None,
    }
}

/// Whether trying again may help.
fn passes(error: &ApiError) -> bool {
    match (status(error), error) {
        (Some(status), _) => status == 429 || status >= 500,
        (None, ApiError::RequestError(_) | ApiError::IoError(_)) => true,
        _ => false,
    }
}

/// One model on its way.
struct Download<'a> {
    hub: &'a Hub,
    id: &'a str,
    repo: ApiRepo,
    /// The snapshot.
    dir: PathBuf,
    /// Bytes of the files that are whole.
    here: u64,
    /// Bytes of all files; 0 until it is known.
    total: u64,
    progress: &'a dyn Fn(u64, u64),
}

impl Download<'_> {
    fn has(&self, file: &Listed, size: u64) -> bool {
        fs::metadata(self.dir.join(&file.name)).is_ok_and(|meta| meta.len() == size)
    }

    /// Downloads one file, or what is missing of it, and checks it.
    fn fetch(&self, file: &Listed) -> Result<(), StoreError> {
        let path = self.dir.join(&file.name);
        if self.link(file, &path)? {
            return Ok(());
        }
        let (mut wait, mut left, mut reached) = (self.hub.wait, ATTEMPTS, 0);
        loop {
            let mut meter = Meter { download: self, position: 0 };
            let outcome = self.repo.download_with_progress(&file.name, &mut meter);
            let position = meter.position;
            match outcome {
                Ok(_) => break,
                Err(error) if passes(&error) => {
                    // As long as something arrives we go on.
                    left = if position > reached { ATTEMPTS } else { left - 1 };
                    reached = reached.max(position);
                    if left == 0 {
                        return Err(self.hub.failed(self.id, &file.name, &error));
                    }
                    tracing::info!(file = file.name, %error, "the download broke and goes on");
                    std::thread::sleep(wait);
                    wait = (wait * 2).min(30 * self.hub.wait);
                }
                Err(ApiError::IoError(source)) => return Err(StoreError::Io { path, source }),
                Err(error) => return Err(self.hub.failed(self.id, &file.name, &error)),
            }
        }
        self.check(file, &path)
    }

    /// Uses what another revision has downloaded already, and clears away what cannot be continued.
    fn link(&self, file: &Listed, path: &Path) -> Result<bool, StoreError> {
        let (Some(etag), Some(size)) = (file.etag(), file.size) else { return Ok(false) };
        let at = |source| StoreError::Io { path: path.to_owned(), source };
        let blob = self.hub.cache.model(self.id.into()).blob_path(etag);
        let part = blob.with_extension("part");
        if fs::metadata(&part).is_ok_and(|meta| meta.len() >= size) {
            // Complete but never renamed, or of something else: asking for the rest of it would be an error.
            fs::remove_file(&part).map_err(at)?;
        }
        if !fs::metadata(&blob).is_ok_and(|meta| meta.len() == size) {
            return Ok(false);
        }
        fs::create_dir_all(&self.dir).map_err(at)?;
        if path.symlink_metadata().is_ok() {
            fs::remove_file(path).map_err(at)?;
        }
        std::os::unix::fs::symlink(Path::new("../../blobs").join(etag), path).map_err(at)?;
        Ok(true)
    }

    /// Compares a finished file with what the hub says of it; a wrong one is removed.
    fn check(&self, file: &Listed, path: &Path) -> Result<(), StoreError> {
        let at = |source| StoreError::Io { path: path.to_owned(), source };
        let size = fs::metadata(path).map_err(at)?.len();
        let why = match (&file.sha256(), file.size) {
            (_, Some(expected)) if expected != size => format!("it has {size} bytes, the hub's {expected}"),
            (Some(expected), _) if &sha256(path).map_err(at)? != expected => "its SHA-256 is not the hub's".into(),
            _ => return Ok(()),
        };
        let blob = fs::canonicalize(path).map_err(at)?;
        fs::remove_file(path).and_then(|()| fs::remove_file(blob)).map_err(at)?;
        Err(StoreError::Other(format!("{}, {}: damaged on the way ({why}); pull again", self.id, file.name)))
    }
}

/// Tells the whole download's progress from one file's.
struct Meter<'a> {
    download: &'a Download<'a>,
    position: u64,
}

impl Progress for &mut Meter<'_> {
    fn init(&mut self, _size: usize, _file: &str) {
        self.position = 0;
    }

    fn update(&mut self, bytes: usize) {
        self.position += bytes as u64;
        let Download { here, total, progress, .. } = self.download;
        if *total > 0 {
            progress(here + self.position, *total);
        }
    }

    fn finish(&mut self) {}
}

fn sha256(path: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut block) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut block)? {
            0 => break,
            read => hash.update(&block[..read]),
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Whether a snapshot has everything its own index asks for.
fn is_complete(dir: &Path) -> bool {
    let Ok(index) = fs::read(dir.join(listing::INDEX)) else { return Index::open(dir).is_ok() };
    listing::shard_names(&index).is_ok_and(|names| names.iter().all(|name| dir.join(name).exists()))
}

#[cfg(test)]
mod tests;
