//! Snapshot files: one file per snapshot, and one file per whole page of keys and values. Snapshots with a common
//! prefix share page files.
//!
//! ```text
//! DIR/KEY/LEN-DIGEST.state   header, recurrent states, tokens, keys and values after the last whole page
//! DIR/KEY/DIGEST.page        header, keys and values of 256 positions
//! header (64 bytes): "MOESTRO3", the key (32 bytes), then as little-endian u64: number of tokens, number of bytes
//!                    after the header, CRC-32 of these bytes
//! ```
//!
//! The key is a hash of all inputs of a state except the tokens (see [`super::DiskCacheOptions::key`]). The digest is a
//! hash of all tokens from the start of the prompt to the end of the snapshot or page. Files are renamed into place
//! atomically. Prompts are private, so directories have mode 0700 and files 0600.

use super::{
    dir_lock::DirLock,
    direct_reader::{DirectReader, READ_PART, READERS, ReadBuffer},
    page_requests::ReadPage,
};
use moestro_base::platform::{MAX_BLOCK, atomic_file::TempFile, run_jobs, zeroed_buffer};
use moestro_model::model::{KvPage, PAGE, Snapshot, SnapshotSize};
use sha2::{Digest as _, Sha256};
use std::{
    fs::{self, OpenOptions},
    io::{self, Read},
    os::unix::fs::{DirBuilderExt, FileExt},
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::SystemTime,
};

/// The last digit is the version of the files and of the layout of keys and values.
const MAGIC: &[u8; 8] = b"MOESTRO3";
const HEADER: usize = 64;
const FILE_MODE: u32 = 0o600;

/// Creates a page from its bytes.
pub type MakePage<'a> = dyn Fn(Vec<u8>) -> io::Result<Arc<KvPage>> + Sync + 'a;

/// Hash of a model's key and the tokens up to a position.
pub type TokenDigest = [u8; 16];

/// The snapshot files of one key.
pub struct SnapshotFiles {
    dir: PathBuf,
    key: [u8; 32],
    size: SnapshotSize,
    reader: DirectReader,
}

/// A snapshot file found by [`SnapshotFiles::open`].
pub struct StoredSnapshot {
    pub tokens: Vec<u32>,
    /// Size of the `.state` file in bytes.
    pub bytes: u64,
    pub last_used: SystemTime,
}

impl SnapshotFiles {
    /// Opens the files of `key` below `root`. Removes temporary files, and snapshots that are damaged, belong to
    /// another key, or have more than `max_tokens` tokens. Removes the files of all keys in another version of the format. The caller must hold the lock of `root`.
    pub fn open(
        root: &Path,
        key: &str,
        size: SnapshotSize,
        max_tokens: usize,
    ) -> io::Result<(Self, Vec<StoredSnapshot>)> {
        let key: [u8; 32] = Sha256::digest(key).into();
        remove_other_versions(root)?;
        let dir = root.join(hex::encode(&key[..16]));
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        // Write a file now, so that an unwritable directory is reported at the start and not at the first snapshot.
        let probe = dir.join("probe");
        TempFile::write(&probe, FILE_MODE, &[&[0; 4 * MAX_BLOCK]])?.persist(&probe)?;
        let reader = DirectReader::probe(&probe);
        fs::remove_file(&probe)?;
        let files = Self { dir, key, size, reader: reader? };
        let mut found = Vec::new();
        for path in regular_files(&files.dir)? {
            if is_temporary(&path) {
                remove(&path);
            }
            if has_extension(&path, "state") {
                match files.read_tokens(&path, max_tokens) {
                    Ok(stored) => found.push(stored),
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "removing an unusable prompt snapshot");
                        fs::remove_file(&path)?;
                    }
                }
            }
        }
        Ok((files, found))
    }

    /// Removes directories of other keys, least recently written first, until the remaining ones have at most
    /// `max_bytes` bytes together. Returns the bytes of the remaining directories. A directory that cannot be removed
    /// stays.
    pub fn evict_other_models(&self, root: &Path, max_bytes: u64) -> io::Result<u64> {
        let others = key_dirs(root)?.into_iter().filter(|path| *path != self.dir);
        let mut others: Vec<_> = others
            .map(|path| {
                let files = fs::read_dir(&path).into_iter().flatten().flatten();
                let bytes: u64 = files.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum();
                (fs::metadata(&path).and_then(|meta| meta.modified()).ok(), path, bytes)
            })
            .collect();
        others.sort();
        let mut left: u64 = others.iter().map(|(_, _, bytes)| bytes).sum();
        for (_, path, bytes) in others {
            if left <= max_bytes {
                break;
            }
            match fs::remove_dir_all(&path) {
                Ok(()) => left -= bytes,
                Err(error) => {
                    tracing::debug!(path = %path.display(), %error, "cannot remove another model's snapshots")
                }
            }
        }
        Ok(left)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The digest at the end of each whole page of `ids`, and the digest of all `ids`.
    pub fn digests(&self, ids: &[u32]) -> (Vec<TokenDigest>, TokenDigest) {
        let mut hash = Sha256::new_with_prefix(self.key);
        let digest = |hash: &Sha256| -> TokenDigest { std::array::from_fn(|i| hash.clone().finalize()[i]) };
        let mut pages = Vec::with_capacity(ids.len() / PAGE);
        for page in ids.chunks(PAGE) {
            hash.update(token_bytes(page));
            if page.len() == PAGE {
                pages.push(digest(&hash));
            }
        }
        (pages, digest(&hash))
    }

    /// Size of the `.state` file of a snapshot of `len` tokens, and size of a `.page` file, in bytes.
    pub fn bytes(&self, len: usize) -> (u64, u64) {
        let state = HEADER as u64 + 4 * len as u64 + self.size.bytes(len, len);
        (state, HEADER as u64 + self.size.page.bytes(PAGE))
    }

    /// Writes the pages that `missing` marks, then the snapshot of `ids`. Adds the bytes written to `bytes`.
    ///
    /// Returns false if a page was freed or cannot be read from its device, which is not a disk error. In this case,
    /// and after an error, removes the pages that this call wrote, since no snapshot uses them.
    pub fn write(
        &self,
        ids: &[u32],
        state: &[u8],
        (pages, missing): (&[Weak<KvPage>], &[bool]),
        read: &mut ReadPage<'_>,
        bytes: &mut u64,
    ) -> io::Result<bool> {
        let mut written = Vec::new();
        let done = self.write_all(ids, state, (pages, missing), read, &mut written);
        let (state, page) = self.bytes(ids.len());
        *bytes += page * written.len() as u64;
        match done {
            Ok(true) => *bytes += state,
            _ => written.iter().for_each(|digest| self.remove_page(digest)),
        }
        done
    }

    fn write_all(
        &self,
        ids: &[u32],
        state: &[u8],
        (pages, missing): (&[Weak<KvPage>], &[bool]),
        read: &mut ReadPage<'_>,
        written: &mut Vec<TokenDigest>,
    ) -> io::Result<bool> {
        let (digests, whole) = self.digests(ids);
        for ((digest, page), _) in digests.iter().zip(pages).zip(missing).filter(|(_, missing)| **missing) {
            let Some(bytes) = read(page) else { return Ok(false) };
            self.write_file(&page_name(digest), PAGE, &[&bytes])?;
            written.push(*digest);
        }
        let tail = match pages.get(ids.len() / PAGE) {
            Some(tail) => read(tail),
            None => Some(Vec::new()),
        };
        let Some(tail) = tail else { return Ok(false) };
        self.write_file(&snapshot_name(ids.len(), &whole), ids.len(), &[state, &token_bytes(ids), &tail])?;
        Ok(true)
    }

    /// Reads the snapshot of `ids`. The snapshot's first pages are in memory as `known`. `make_page` creates the other
    /// pages from their bytes.
    pub fn read(&self, ids: &[u32], known: &[Arc<KvPage>], make_page: &MakePage<'_>) -> io::Result<Snapshot> {
        enum FileJob<'a> {
            Page(&'a TokenDigest, &'a mut Option<Arc<KvPage>>),
            /// A part of the `.state` file: its offset, a buffer for the header (empty except at offset 0), a buffer
            /// for the bytes after the header.
            State(usize, &'a mut [u8], &'a mut [u8]),
        }
        let (digests, whole) = self.digests(ids);
        let tokens = token_bytes(ids);
        let tail = self.size.page.bytes(ids.len() % PAGE) as usize;
        let path = self.dir.join(snapshot_name(ids.len(), &whole));
        let mut body = zeroed_buffer(self.size.state as usize + tokens.len() + tail);
        let missing = &digests[known.len().min(digests.len())..];
        let mut pages = vec![None; missing.len()];
        let len = body.len();
        let mut header = [0; HEADER];
        // The state comes first, since its parts are the longest jobs.
        let (first, rest) = body.split_at_mut(len.min(READ_PART - HEADER));
        let rest = rest
            .chunks_mut(READ_PART)
            .enumerate()
            .map(|(number, part)| FileJob::State((number + 1) * READ_PART, &mut [], part));
        let page = |(digest, page)| FileJob::Page(digest, page);
        let jobs = [FileJob::State(0, &mut header, first)]
            .into_iter()
            .chain(rest)
            .chain(missing.iter().zip(&mut pages).map(page));
        let checksums = run_jobs("prompt cache", READERS, jobs.collect(), ReadBuffer::new, |job, buffer| match job {
            FileJob::Page(digest, into) => {
                *into = Some(make_page(self.read_page(digest, buffer)?)?);
                Ok(None)
            }
            FileJob::State(at, head, part) => {
                self.reader.read(&path, (HEADER + len) as u64, at as u64, head, part, buffer).map(Some)
            }
        })?;
        let mut checksum = crc32fast::Hasher::new();
        checksums.iter().flatten().for_each(|part| checksum.combine(part));
        self.check(&header, ids.len(), len, checksum)?;
        let mut after_state = body.split_off(self.size.state as usize);
        if !after_state.starts_with(&tokens) {
            return Err(damaged("it belongs to another prompt"));
        }
        body.shrink_to_fit();
        let read = pages.into_iter().flatten();
        let mut pages: Vec<Arc<KvPage>> = known.iter().take(digests.len()).cloned().chain(read).collect();
        if tail > 0 {
            pages.push(Arc::new(after_state.split_off(tokens.len()).into()));
        }
        // The file's modification time stores when the snapshot was last used.
        if let Ok(file) = OpenOptions::new().write(true).open(&path) {
            let _ = file.set_modified(SystemTime::now());
        }
        Ok(Snapshot { len: ids.len(), pages, state: Arc::new(body) })
    }

    fn read_page(&self, digest: &TokenDigest, buffer: &mut ReadBuffer) -> io::Result<Vec<u8>> {
        let mut header = [0; HEADER];
        let mut page = zeroed_buffer(self.size.page.bytes(PAGE) as usize);
        let path = self.dir.join(page_name(digest));
        let len = (HEADER + page.len()) as u64;
        let checksum = self.reader.read(&path, len, 0, &mut header, &mut page, buffer)?;
        self.check(&header, PAGE, page.len(), checksum)?;
        Ok(page)
    }

    pub fn remove_snapshot(&self, ids: &[u32]) {
        let (_, whole) = self.digests(ids);
        remove(&self.dir.join(snapshot_name(ids.len(), &whole)));
    }

    pub fn remove_page(&self, digest: &TokenDigest) {
        remove(&self.dir.join(page_name(digest)));
    }

    /// Removes page files whose names `is_needed` rejects.
    pub fn remove_unused_pages(&self, is_needed: impl Fn(&str) -> bool) -> io::Result<()> {
        for path in regular_files(&self.dir)? {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if has_extension(&path, "page") && !is_needed(name) {
                remove(&path);
            }
        }
        Ok(())
    }

    /// Writes a file with a header, followed by `parts`.
    fn write_file(&self, name: &str, tokens: usize, parts: &[&[u8]]) -> io::Result<()> {
        let mut checksum = crc32fast::Hasher::new();
        parts.iter().for_each(|part| checksum.update(part));
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&self.key);
        for number in [tokens as u64, len as u64, u64::from(checksum.finalize())] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        // `TempFile` would recreate a missing directory with a mode that lets other users read the directory.
        if !self.dir.try_exists()? {
            return Err(io::ErrorKind::NotFound.into());
        }
        let path = self.dir.join(name);
        TempFile::write(&path, FILE_MODE, &[&[&header[..]], parts].concat())?.persist(&path)
    }

    /// Checks that a header has this key, `tokens` tokens, `len` bytes and the given checksum.
    fn check(&self, header: &[u8; HEADER], tokens: usize, len: usize, checksum: crc32fast::Hasher) -> io::Result<()> {
        let (found, bytes, expected) = self.parse_header(header)?;
        if (found, bytes) != (tokens as u64, len as u64) {
            return Err(damaged("its size is wrong"));
        }
        if u64::from(checksum.finalize()) != expected {
            return Err(damaged("its checksum is wrong"));
        }
        Ok(())
    }

    /// Reads the tokens of a `.state` file and checks its header. [`SnapshotFiles::read`] verifies the checksum later.
    fn read_tokens(&self, path: &Path, max_tokens: usize) -> io::Result<StoredSnapshot> {
        let mut file = fs::File::open(path)?;
        let mut header = [0; HEADER];
        file.read_exact(&mut header).map_err(|_| damaged("it is too short"))?;
        let (len, bytes, _) = self.parse_header(&header)?;
        if len > max_tokens as u64 {
            return Err(damaged("it is longer than the context"));
        }
        let meta = file.metadata()?;
        let is_whole = meta.len() == HEADER as u64 + bytes;
        let len = usize::try_from(len).ok().filter(|len| is_whole && *len > 0 && *len as u64 <= bytes / 4);
        let len = len.filter(|&len| self.bytes(len).0 == meta.len()).ok_or_else(|| damaged("its size is wrong"))?;
        let mut words = vec![0; 4 * len];
        file.read_exact_at(&mut words, HEADER as u64 + self.size.state)?;
        let tokens: Vec<u32> = words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let name = snapshot_name(len, &self.digests(&tokens).1);
        if path.file_name() != Some(name.as_ref()) {
            return Err(damaged("its name does not match its tokens"));
        }
        Ok(StoredSnapshot { tokens, bytes: meta.len(), last_used: meta.modified()? })
    }

    /// Returns the number of tokens, the number of bytes after the header, and their checksum.
    fn parse_header(&self, header: &[u8; HEADER]) -> io::Result<(u64, u64, u64)> {
        let number = |index: usize| {
            let at = 40 + 8 * index;
            header[at..at + 8].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
        };
        if &header[..8] != MAGIC || header[8..40] != self.key {
            return Err(damaged("it belongs to another model, device or version"));
        }
        Ok((number(0), number(1), number(2)))
    }
}

/// Removes the directories of keys whose files have another version. Such files are never used again. A directory that
/// cannot be removed stays.
fn remove_other_versions(root: &Path) -> io::Result<()> {
    let mut removed = 0;
    for dir in key_dirs(root)? {
        let is_stored = |path: &PathBuf| has_extension(path, "state") || has_extension(path, "page");
        if regular_files(&dir)?.iter().find(|path| is_stored(path)).is_some_and(|path| is_other_version(path)) {
            match fs::remove_dir_all(&dir) {
                Ok(()) => removed += 1,
                Err(error) => tracing::debug!(path = %dir.display(), %error, "cannot remove unusable prompt snapshots"),
            }
        }
    }
    if removed > 0 {
        tracing::info!("removed {removed} directories of prompt snapshots, which another version of Moestro wrote");
    }
    Ok(())
}

/// True if the file has another version of the format.
fn is_other_version(path: &Path) -> bool {
    let mut magic = [0; MAGIC.len()];
    let name = MAGIC.len() - 1;
    let is_read = fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok();
    is_read && magic[..name] == MAGIC[..name] && magic != *MAGIC
}

/// Removes the snapshots of all keys below `root`. A running server that has a removed snapshot in its index recomputes
/// the prompt.
///
/// # Errors
/// A directory cannot be read, or a file cannot be removed.
pub fn clear_prompt_dir(root: &Path) -> io::Result<()> {
    if !root.try_exists()? {
        return Ok(());
    }
    // If another process holds the lock, it may be writing temporary files. These files are then kept.
    let lock = DirLock::try_lock(root)?;
    for dir in key_dirs(root)? {
        for path in regular_files(&dir)? {
            let is_snapshot = has_extension(&path, "state") || has_extension(&path, "page");
            if is_snapshot || (lock.is_some() && is_temporary(&path)) {
                fs::remove_file(&path).or_else(ignore_missing)?;
            }
        }
    }
    Ok(())
}

/// The directories of all keys. Skips symbolic links, since they may point to directories outside the cache.
fn key_dirs(root: &Path) -> io::Result<Vec<PathBuf>> {
    let is_key = |name: &str| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    entries(root, |entry| {
        entry.file_type().is_ok_and(|kind| kind.is_dir()) && entry.file_name().to_str().is_some_and(is_key)
    })
}

/// The regular files of a directory. Skips other files, since opening a FIFO would block.
fn regular_files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    entries(dir, |entry| entry.file_type().is_ok_and(|kind| kind.is_file()))
}

fn entries(dir: &Path, select: impl Fn(&fs::DirEntry) -> bool) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?.collect::<io::Result<Vec<_>>>()?,
    };
    Ok(entries.into_iter().filter(select).map(|entry| entry.path()).collect())
}

/// True for a temporary file, which a killed server may leave.
fn is_temporary(path: &Path) -> bool {
    has_extension(path, "partial")
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found == extension)
}

/// Removes a file if it exists.
fn remove(path: &Path) {
    if let Err(error) = fs::remove_file(path).or_else(ignore_missing) {
        tracing::debug!(path = %path.display(), %error, "cannot remove a prompt snapshot's file");
    }
}

fn ignore_missing(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

pub fn page_name(digest: &TokenDigest) -> String {
    format!("{}.page", hex::encode(digest))
}

fn snapshot_name(len: usize, digest: &TokenDigest) -> String {
    format!("{len}-{}.state", hex::encode(digest))
}

fn token_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
