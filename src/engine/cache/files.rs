//! Checkpoints on the SSD: a file for each state and one for each whole page of keys and values, which the states that
//! begin with the same tokens share.
//!
//! ```text
//! DIR/KEY/LEN-DIGEST.state   header, the states, the tokens, the keys and values behind the last whole page
//! DIR/KEY/DIGEST.page        header, the keys and values of 256 positions
//! header (64 bytes): "MOESTRO2", the key (32), tokens, bytes behind the header, their CRC-32 (u64 each, little-endian)
//! ```
//!
//! The key is of all that the bytes depend on beside the tokens, a digest is of the tokens up to the end of what is in the
//! file. A file gets its name when it is whole. Prompts are private, and so are these files.

use super::{
    live,
    read::{READERS, Reader, Room, SHARE},
    unfinished::{UNFINISHED, Unfinished, gone, is_abandoned, is_old, remove},
};
use crate::{
    model::{KvPage, PAGE, Snapshot, SnapshotSize},
    platform::{MAX_BLOCK, run_jobs, zeroed_buffer},
};
use sha2::{Digest as _, Sha256};
use std::{
    borrow::Cow,
    fs::{self, OpenOptions},
    io::{self, Read},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::SystemTime,
};

const MAGIC: &[u8; 8] = b"MOESTRO2";
const HEADER: usize = 64;

/// Makes a page of its bytes.
pub type Keep<'a> = dyn Fn(Vec<u8>) -> io::Result<Arc<KvPage>> + Sync + 'a;

/// Names the tokens up to a place.
pub type Digest = [u8; 16];

/// A directory of checkpoints of one model.
pub struct Files {
    dir: PathBuf,
    key: [u8; 32],
    size: SnapshotSize,
    reader: Reader,
    _used: fs::File,
}

/// A state that was found or written.
pub struct Filed {
    pub tokens: Vec<u32>,
    /// Of the state's own file.
    pub bytes: u64,
    pub used: SystemTime,
}

impl Files {
    /// The files below `root` for what `key` names. A file that is not whole, or of another key, is removed.
    pub fn open(root: &Path, key: &str, size: SnapshotSize) -> io::Result<(Self, Vec<Filed>)> {
        let key: [u8; 32] = Sha256::digest(key).into();
        let dir = root.join(hex::encode(&key[..16]));
        let used = live::enter(&dir)?;
        // A directory that cannot be written to fails here rather than at the first checkpoint.
        let probe = Unfinished::write(&dir.join("probe"), &[&[0; 4 * MAX_BLOCK]])?;
        let reader = Reader::trying(probe.path())?;
        drop(probe);
        let files = Self { dir, key, size, reader, _used: used };
        let mut found = Vec::new();
        for entry in fs::read_dir(&files.dir)? {
            let path = entry?.path();
            match path.extension().and_then(|ending| ending.to_str()) {
                Some("state") => match files.tokens(&path) {
                    Ok(filed) => found.push(filed),
                    // Another server of this model needed the room.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => {
                        tracing::warn!(path = %path.display(), %error, "a checkpoint's file is of no use");
                        fs::remove_file(&path).or_else(gone)?;
                    }
                },
                Some(UNFINISHED) if is_abandoned(&path) => remove(&path),
                _ => {}
            }
        }
        Ok((files, found))
    }

    /// Leaves at most `most` bytes to other keys (models, devices, versions) that no server uses, those last written to;
    /// returns how many all have left. A directory that cannot be looked at or removed stays: this one is none the worse for it.
    pub fn make_way(&self, root: &Path, most: u64) -> io::Result<u64> {
        let looked_at = |path: &PathBuf| {
            // Other servers give files their names meanwhile, and remove some.
            let len =
                |entry: io::Result<fs::DirEntry>| entry.and_then(|entry| entry.metadata()).map_or(0, |meta| meta.len());
            let bytes = fs::read_dir(path).map_or(0, |entries| entries.map(len).sum::<u64>());
            (fs::metadata(path).and_then(|meta| meta.modified()).ok(), bytes)
        };
        let others = keys(root)?.into_iter().filter(|path| *path != self.dir);
        let mut others: Vec<_> = others.map(|path| (looked_at(&path), path)).collect();
        others.sort();
        let mut left: u64 = others.iter().map(|((_, bytes), _)| bytes).sum();
        for ((_, bytes), path) in others {
            if left > most {
                match live::remove_unused(&path) {
                    Ok(true) => left -= bytes,
                    Ok(false) => {}
                    Err(error) => tracing::debug!(path = %path.display(), %error, "old checkpoints stay"),
                }
            }
        }
        Ok(left)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The digests of each whole page of `ids`, and of all of them.
    pub fn digests(&self, ids: &[u32]) -> (Vec<Digest>, Digest) {
        let mut hash = Sha256::new_with_prefix(self.key);
        let short = |hash: &Sha256| -> Digest { std::array::from_fn(|i| hash.clone().finalize()[i]) };
        let mut pages = Vec::with_capacity(ids.len() / PAGE);
        for page in ids.chunks(PAGE) {
            hash.update(words(page));
            if page.len() == PAGE {
                pages.push(short(&hash));
            }
        }
        (pages, short(&hash))
    }

    /// Bytes of a state's file and of a page's.
    pub fn bytes(&self, len: usize) -> (u64, u64) {
        let state = HEADER as u64 + 4 * len as u64 + self.size.bytes(len, len);
        (state, HEADER as u64 + PAGE as u64 * self.size.position)
    }

    /// Writes the state behind `ids`, after those of its pages that `wanted` says are not there yet; adds the bytes to `bytes`.
    /// False: one of them is somebody else's by now, or its device does not give it. That is no error of the disk. What was
    /// written until then, or until an error, is removed again: no state needs it.
    pub fn write(
        &self,
        ids: &[u32],
        state: &Arc<Vec<u8>>,
        pages: &[Weak<KvPage>],
        wanted: &[bool],
        bytes: &mut u64,
    ) -> io::Result<bool> {
        let mut written = Vec::new();
        let whole = self.write_all(ids, state, (pages, wanted), &mut written);
        let (state, page) = self.bytes(ids.len());
        *bytes += page * written.len() as u64;
        match whole {
            Ok(true) => *bytes += state,
            _ => written.iter().for_each(|digest| self.remove_page(digest)),
        }
        whole
    }

    fn write_all(
        &self,
        ids: &[u32],
        state: &Arc<Vec<u8>>,
        (pages, wanted): (&[Weak<KvPage>], &[bool]),
        written: &mut Vec<Digest>,
    ) -> io::Result<bool> {
        let (digests, whole) = self.digests(ids);
        // One page at a time is kept from others, for as long as it is read.
        let read = |page: &Weak<KvPage>| page.upgrade().and_then(|page| page.read().map(Cow::into_owned).ok());
        for ((digest, page), _) in digests.iter().zip(pages).zip(wanted).filter(|(_, wanted)| **wanted) {
            let Some(bytes) = read(page) else { return Ok(false) };
            self.put(&page_name(digest), PAGE, &[&bytes])?;
            written.push(*digest);
        }
        let tail = match pages.get(ids.len() / PAGE) {
            Some(tail) => read(tail),
            None => Some(Vec::new()),
        };
        let Some(tail) = tail else { return Ok(false) };
        self.put(&state_name(ids.len(), &whole), ids.len(), &[state, &words(ids), &tail])?;
        Ok(true)
    }

    /// Reads the state behind `ids`. The first pages are `known`, so they need not be read; each other one goes to `keep`.
    pub fn read(&self, ids: &[u32], known: &[Arc<KvPage>], keep: &Keep<'_>) -> io::Result<Snapshot> {
        enum Job<'a> {
            Page(&'a Digest, &'a mut Option<Arc<KvPage>>),
            /// A part of the state's file, from this byte of it on: the header if it begins there, and the body.
            State(usize, &'a mut [u8], &'a mut [u8]),
        }
        let (digests, whole) = self.digests(ids);
        let tokens = words(ids);
        let tail = ids.len() % PAGE * self.size.position as usize;
        let path = self.dir.join(state_name(ids.len(), &whole));
        let mut body = zeroed_buffer(self.size.state as usize + tokens.len() + tail);
        let missing = &digests[known.len().min(digests.len())..];
        let mut pages = vec![None; missing.len()];
        let (len, mut header) = (body.len(), [0; HEADER]);
        // The state first: its parts are the longest jobs.
        let (first, rest) = body.split_at_mut(len.min(SHARE - HEADER));
        let rest =
            rest.chunks_mut(SHARE).enumerate().map(|(number, part)| Job::State((number + 1) * SHARE, &mut [], part));
        let page = |(digest, page)| Job::Page(digest, page);
        let jobs =
            [Job::State(0, &mut header, first)].into_iter().chain(rest).chain(missing.iter().zip(&mut pages).map(page));
        let sums = run_jobs("prompt cache", READERS, jobs.collect(), Room::new, |job, room| match job {
            Job::Page(digest, into) => {
                *into = Some(keep(self.page(digest, room)?)?);
                Ok(None)
            }
            Job::State(at, head, part) => {
                self.reader.read(&path, (HEADER + len) as u64, at as u64, head, part, room).map(Some)
            }
        })?;
        let mut sum = crc32fast::Hasher::new();
        sums.iter().flatten().for_each(|part| sum.combine(part));
        self.compare(&header, ids.len(), len, sum)?;
        let mut behind = body.split_off(self.size.state as usize);
        if !behind.starts_with(&tokens) {
            return Err(damaged("it is of another prompt"));
        }
        body.shrink_to_fit();
        let read = pages.into_iter().flatten();
        let mut pages: Vec<Arc<KvPage>> = known.iter().take(digests.len()).cloned().chain(read).collect();
        if tail > 0 {
            pages.push(Arc::new(behind.split_off(tokens.len()).into()));
        }
        // The next server lets go of what has not been used for longest.
        if let Ok(file) = OpenOptions::new().write(true).open(&path) {
            let _ = file.set_modified(SystemTime::now());
        }
        Ok(Snapshot { len: ids.len(), pages, state: Arc::new(body) })
    }

    fn page(&self, digest: &Digest, room: &mut Room) -> io::Result<Vec<u8>> {
        let mut header = [0; HEADER];
        let mut page = zeroed_buffer(PAGE * self.size.position as usize);
        let (path, len) = (self.dir.join(page_name(digest)), (HEADER + page.len()) as u64);
        let sum = self.reader.read(&path, len, 0, &mut header, &mut page, room)?;
        self.compare(&header, PAGE, page.len(), sum)?;
        Ok(page)
    }

    pub fn remove_state(&self, ids: &[u32]) {
        let (_, whole) = self.digests(ids);
        remove(&self.dir.join(state_name(ids.len(), &whole)));
    }

    pub fn remove_page(&self, digest: &Digest) {
        remove(&self.dir.join(page_name(digest)));
    }

    /// Removes pages that no state needs.
    pub fn sweep(&self, needed: impl Fn(&str) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.ends_with(".page") && !needed(name) && is_old(&path) {
                remove(&path);
            }
        }
        Ok(())
    }

    /// A file of this name: the header, and `parts`.
    fn put(&self, name: &str, tokens: usize, parts: &[&[u8]]) -> io::Result<()> {
        let mut hash = crc32fast::Hasher::new();
        parts.iter().for_each(|part| hash.update(part));
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&self.key);
        for number in [tokens as u64, len as u64, u64::from(hash.finalize())] {
            header.extend_from_slice(&number.to_le_bytes());
        }
        let path = self.dir.join(name);
        Unfinished::write(&path, &[&[&header[..]], parts].concat())?.finish(&path)
    }

    /// A file is what was written: of this model, for `tokens` tokens, `len` bytes with this sum.
    fn compare(&self, header: &[u8; HEADER], tokens: usize, len: usize, sum: crc32fast::Hasher) -> io::Result<()> {
        let (found, bytes, hash) = self.header(header)?;
        if (found, bytes) != (tokens as u64, len as u64) {
            return Err(damaged("its size is wrong"));
        }
        if u64::from(sum.finalize()) != hash {
            return Err(damaged("its checksum is wrong"));
        }
        Ok(())
    }

    /// The tokens of a state's file; the rest is looked at when it is wanted.
    fn tokens(&self, path: &Path) -> io::Result<Filed> {
        let mut file = fs::File::open(path)?;
        let mut header = [0; HEADER];
        file.read_exact(&mut header).map_err(|_| damaged("it is too short"))?;
        let (len, bytes, _) = self.header(&header)?;
        let meta = file.metadata()?;
        let whole = meta.len() == HEADER as u64 + bytes;
        let len = usize::try_from(len).ok().filter(|len| whole && *len > 0 && *len as u64 <= bytes / 4);
        let len = len.filter(|&len| self.bytes(len).0 == meta.len()).ok_or_else(|| damaged("its size is wrong"))?;
        let mut words = vec![0; 4 * len];
        file.read_exact_at(&mut words, HEADER as u64 + self.size.state)?;
        let tokens: Vec<u32> = words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let name = state_name(len, &self.digests(&tokens).1);
        if path.file_name() != Some(name.as_ref()) {
            return Err(damaged("its name is of other tokens"));
        }
        Ok(Filed { tokens, bytes: meta.len(), used: meta.modified()? })
    }

    /// Tokens, bytes behind the header, and their sum.
    fn header(&self, header: &[u8; HEADER]) -> io::Result<(u64, u64, u64)> {
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

/// Removes every checkpoint below `root`, whatever model it is of. A server that still counts on one computes it again.
///
/// # Errors
/// A directory that cannot be read, or a file that cannot be removed.
pub fn forget_all(root: &Path) -> io::Result<()> {
    for dir in keys(root)? {
        let Some(entries) = live::found(fs::read_dir(dir))? else { continue };
        for entry in entries {
            let path = entry?.path();
            let ending = path.extension().and_then(|ending| ending.to_str());
            // What another server is writing gets its name, or that server would take its disk to be broken.
            let goes = match ending {
                Some("state" | "page") => true,
                Some(UNFINISHED) => is_abandoned(&path),
                _ => false,
            };
            if goes {
                fs::remove_file(&path).or_else(gone)?;
            }
        }
    }
    Ok(())
}

/// The directories of all keys.
fn keys(root: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    let is_key = |name: &str| name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    let named = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()).is_some_and(is_key);
    Ok(paths.into_iter().filter(|path| named(path) && path.is_dir()).collect())
}

pub fn page_name(digest: &Digest) -> String {
    format!("{}.page", hex::encode(digest))
}

fn state_name(len: usize, digest: &Digest) -> String {
    format!("{len}-{}.state", hex::encode(digest))
}

fn words(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

fn damaged(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
