//! Checkpoints from the Hugging Face hub, in the Hugging Face cache, where other programs find them too.
//!
//! Only what a model needs is downloaded: the safetensors that its index names (or `model*.safetensors` without one) and
//! seven small files. All come from one commit, whose sizes are known before the first byte. A download that breaks goes
//! on where it stopped, now or at the next run, and every file whose SHA-256 the hub knows is checked. `HF_HOME`,
//! `HF_HUB_CACHE`, `HF_ENDPOINT` and `HF_TOKEN` mean what they mean to other programs.
//!
//! A hub, or a mirror of it, may be anybody's: what it says is checked before it becomes a path, it cannot make us write
//! more than it announced, and the token goes to no other host.

mod cache;
mod client;
pub mod listing;

use crate::{checkpoint::index::Index, error::StoreError, platform::os, platform::read_small};
use cache::Shelf;
use client::{Client, Failure};
use listing::{Listed, Listing};
use sha2::{Digest, Sha256};
use std::{
    env,
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::Duration,
};

/// The branch that counts.
const REVISION: &str = "main";
/// Attempts at one file in which nothing arrives before it is given up.
const ATTEMPTS: u32 = 5;
const ENDPOINT: &str = "https://huggingface.co";

/// The hub and the cache on this machine.
pub struct Hub {
    endpoint: String,
    token: Option<String>,
    cache: PathBuf,
    /// Before the second attempt; each further one waits twice as long.
    wait: Duration,
}

impl Hub {
    /// As the environment says.
    pub fn from_env() -> Result<Self, StoreError> {
        let homeless = || StoreError::Other("no place for downloads: neither HF_HOME nor HOME is set".into());
        let cache = cache::root().ok_or_else(homeless)?;
        let set = |name| env::var(name).ok().filter(|value: &String| !value.is_empty());
        let token = set("HF_TOKEN").or_else(|| cache::token(&cache));
        let endpoint = set("HF_ENDPOINT").unwrap_or_else(|| ENDPOINT.into());
        Ok(Self { endpoint, token, cache, wait: Duration::from_secs(1) })
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
    pub fn pull(&self, id: &str, progress: &dyn Fn(u64, u64)) -> Result<PathBuf, StoreError> {
        let client = Client::new(&self.endpoint, self.token.clone());
        let listing = self.list(&client, id)?;
        let shelf = Shelf::new(&self.cache, id);
        let dir = shelf.snapshot(&listing.sha);
        let blobs = shelf.blobs();
        let mut download =
            Download { hub: self, client, id, commit: listing.sha.clone(), dir, blobs, here: 0, total: 0, progress };

        let small = listing.small();
        // The index says which shards there are; it is small and comes first.
        if let Some(index) = small.iter().find(|file| file.name == listing::INDEX) {
            let size = download.size(index)?;
            if !download.has(index, size) {
                download.fetch(index, size)?;
            }
        }
        let shards = listing.shards(&download.dir)?;
        let files: Vec<&Listed> = small.into_iter().chain(shards).collect();
        let sizes: Vec<u64> = files.iter().map(|file| download.size(file)).collect::<Result<_, _>>()?;
        let sum = |sizes: &[u64]| sizes.iter().try_fold(0u64, |sum, size| sum.checked_add(*size));
        let absurd = || StoreError::Other(format!("{id}: the hub lists more bytes than can be counted"));
        download.total = sum(&sizes).ok_or_else(absurd)?;
        let lacking = files.iter().zip(&sizes).filter(|(file, size)| !download.has(file, **size));
        let missing: u64 = lacking.map(|(_, size)| size).sum();
        if let Some(free) = os::free_space(&self.cache).filter(|&free| free < missing) {
            let why = format!("{missing} bytes are to be downloaded and {free} are free");
            let source = io::Error::new(io::ErrorKind::StorageFull, why);
            return Err(StoreError::Io { path: self.cache.clone(), source });
        }
        for (file, size) in files.iter().zip(sizes) {
            if !download.has(file, size) {
                download.fetch(file, size)?;
            }
            download.here += size;
            progress(download.here, download.total);
        }
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

/// One model on its way.
struct Download<'a> {
    hub: &'a Hub,
    client: Client,
    id: &'a str,
    commit: String,
    /// The snapshot.
    dir: PathBuf,
    blobs: PathBuf,
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

    fn url(&self, file: &Listed) -> String {
        format!("{}/resolve/{}/{}", self.id, self.commit, file.name)
    }

    /// A file's bytes. A mirror that lists no sizes is asked for the first byte.
    fn size(&self, file: &Listed) -> Result<u64, StoreError> {
        if let Some(size) = file.size {
            return Ok(size);
        }
        let part = self.client.part(&self.url(file), 0, Some(0));
        let unknown = || Failure::Nonsense("no size of it".into());
        part.and_then(|part| part.size.ok_or_else(unknown)).map_err(|error| self.hub.failed(self.id, &file.name, error))
    }

    /// A file's name among the blobs: the hub's hash, else one of its revision and name.
    fn blob(&self, file: &Listed) -> String {
        let made_up = || hex::encode(Sha256::digest(format!("{}/{}", self.commit, file.name)));
        file.hash().map_or_else(made_up, str::to_owned)
    }

    /// Downloads one file of `size` bytes, or what is missing of it, and checks it.
    fn fetch(&self, file: &Listed, size: u64) -> Result<(), StoreError> {
        let blob = self.blob(file);
        let whole = self.blobs.join(&blob);
        let part = whole.with_extension("part");
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| StoreError::Io { path, source }
        };
        fs::create_dir_all(&self.blobs).map_err(at(&self.blobs))?;
        fs::create_dir_all(&self.dir).map_err(at(&self.dir))?;
        // A blob that another revision has downloaded already is used.
        if !fs::metadata(&whole).is_ok_and(|meta| meta.len() == size) {
            let lock = whole.with_extension("lock");
            let lock = File::create(&lock).and_then(|file| file.lock().map(|()| file)).map_err(at(&lock))?;
            // Another run may have brought it meanwhile.
            if !fs::metadata(&whole).is_ok_and(|meta| meta.len() == size) {
                self.bring(file, size, &part)?;
                self.check(file, &part)?;
                fs::rename(&part, &whole).map_err(at(&whole))?;
            }
            drop(lock);
        }
        let link = self.dir.join(&file.name);
        if link.symlink_metadata().is_ok() {
            fs::remove_file(&link).map_err(at(&link))?;
        }
        std::os::unix::fs::symlink(Path::new("../../blobs").join(&blob), &link).map_err(at(&link))
    }

    /// Fills `part` to `size` bytes, over broken connections as long as something arrives.
    fn bring(&self, file: &Listed, size: u64, part: &Path) -> Result<(), StoreError> {
        let (mut wait, mut left) = (self.hub.wait, ATTEMPTS);
        loop {
            let had = fs::metadata(part).map_or(0, |meta| meta.len());
            let error = match self.bring_once(file, size, part) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if let Failure::Disk(source) = error {
                return Err(StoreError::Io { path: part.to_owned(), source });
            }
            left = if fs::metadata(part).is_ok_and(|meta| meta.len() > had) { ATTEMPTS } else { left - 1 };
            if left == 0 || !error.passes() {
                return Err(self.hub.failed(self.id, &file.name, error));
            }
            tracing::info!(file = file.name, %error, "the download broke and goes on");
            std::thread::sleep(wait);
            wait = (wait * 2).min(30 * self.hub.wait);
        }
    }

    fn bring_once(&self, file: &Listed, size: u64, part: &Path) -> Result<(), Failure> {
        let mut out = OpenOptions::new().create(true).append(true).open(part).map_err(Failure::Disk)?;
        let mut had = out.metadata().map_err(Failure::Disk)?.len();
        if had > size {
            // It is longer than the file: it was begun for another one.
            out.set_len(0).map_err(Failure::Disk)?;
            had = 0;
        }
        if had == size {
            return Ok(());
        }
        let mut answer = self.client.part(&self.url(file), had, None)?;
        if let Some(said) = answer.size.filter(|said| *said != size) {
            return Err(Failure::Nonsense(format!("{said} bytes where its listing says {size}")));
        }
        if answer.start < had {
            out.set_len(0).map_err(Failure::Disk)?;
            had = 0;
        }
        let mut block = vec![0; 1 << 18];
        while had < size {
            let most = block.len().min(usize::try_from(size - had).unwrap_or(usize::MAX));
            let got = match answer.body.read(&mut block[..most]) {
                Ok(0) => return Err(Failure::Broken(format!("the connection ended at byte {had} of {size}"))),
                Ok(got) => got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Failure::Broken(error.to_string())),
            };
            out.write_all(&block[..got]).map_err(Failure::Disk)?;
            had += got as u64;
            if self.total > 0 {
                (self.progress)(self.here + had, self.total);
            }
        }
        out.sync_all().map_err(Failure::Disk)
    }

    /// Compares a finished file with what the hub says of it; a wrong one is removed.
    fn check(&self, file: &Listed, part: &Path) -> Result<(), StoreError> {
        let at = |source| StoreError::Io { path: part.to_owned(), source };
        let Some(expected) = file.sha256() else { return Ok(()) };
        if sha256(part).map_err(at)? == expected {
            return Ok(());
        }
        fs::remove_file(part).map_err(at)?;
        let why = "damaged on the way (its SHA-256 is not the hub's); pull again";
        Err(StoreError::Other(format!("{}, {}: {why}", self.id, file.name)))
    }
}

fn sha256(path: &Path) -> io::Result<String> {
    let (mut file, mut hash, mut block) = (File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut block)? {
            0 => break,
            read => hash.update(&block[..read]),
        }
    }
    Ok(hex::encode(hash.finalize()))
}

/// True if a snapshot has every file that its own index asks for.
fn is_complete(dir: &Path) -> bool {
    let path = dir.join(listing::INDEX);
    if !path.exists() {
        return Index::open(dir).is_ok();
    }
    let names = read_small(&path, listing::MOST_INDEX).ok().and_then(|index| listing::shard_names(&index).ok());
    names.is_some_and(|names| names.iter().all(|name| dir.join(name).exists()))
}

#[cfg(test)]
mod tests;
