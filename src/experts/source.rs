//! The source of the reader's bytes: the checkpoint's files, or a test's double that fails on purpose.

use super::{ExpertMap, Packed};
use crate::{
    error::StoreError,
    platform::{Access, File},
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Numbered files that can be read at any offset by many threads at once.
pub trait Source: Send + Sync {
    /// One read; may return fewer bytes than asked for, 0 at the end of the file.
    fn read(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<usize>;

    /// The files' records, if they are a pack.
    fn packed(&self) -> Option<&Packed> {
        None
    }

    /// Bytes in the file; `None` if there is no such file.
    fn size(&self, file: u32) -> Option<u64>;

    /// For messages.
    fn path(&self, file: u32) -> PathBuf;

    /// Offset, length and address of every read are multiples of this power of two.
    fn block(&self) -> usize;
}

/// The shards of a checkpoint, or the files of its pack, held open. None is ever written to.
pub struct Files {
    files: Vec<File>,
    block: usize,
    packed: Option<Arc<Packed>>,
}

impl Files {
    pub fn open(paths: &[PathBuf], access: Access) -> Result<Self, StoreError> {
        let mut files = Vec::with_capacity(paths.len());
        let mut block = 1;
        for path in paths {
            let file = File::open(path, access).map_err(|source| StoreError::Io { path: path.clone(), source })?;
            block = block.max(file.block());
            files.push(file);
        }
        Ok(Self { files, block, packed: None })
    }

    /// As the files of a pack, whose records are checked and, if they are damaged, read from its checkpoint.
    pub fn with_packed(self, packed: Option<Arc<Packed>>) -> Self {
        Self { packed, ..self }
    }

    fn get(&self, file: u32) -> io::Result<&File> {
        self.files.get(file as usize).ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))
    }

    /// See [`File::drop_cached`].
    pub fn drop_cached(&self, file: u32, offset: u64, len: usize) {
        if let Ok(file) = self.get(file) {
            file.drop_cached(offset, len);
        }
    }
}

impl Source for Files {
    fn read(&self, file: u32, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        let file = self.get(file)?;
        let got = file.read_at(into, offset)?;
        // After the read: what was written to before it has been noticed by now.
        file.check_unchanged()?;
        Ok(got)
    }

    fn packed(&self) -> Option<&Packed> {
        self.packed.as_deref()
    }

    fn size(&self, file: u32) -> Option<u64> {
        self.files.get(file as usize).map(File::len)
    }

    fn path(&self, file: u32) -> PathBuf {
        self.files.get(file as usize).map_or(Path::new("?"), File::path).to_owned()
    }

    fn block(&self) -> usize {
        self.block
    }
}

/// No shard may be shorter than what is expected of it.
pub(super) fn check_sizes(source: &dyn Source, map: &ExpertMap) -> Result<(), StoreError> {
    for (layer, experts) in map.layers.iter().enumerate() {
        for (expert, pieces) in experts.iter().enumerate() {
            for piece in pieces.iter().filter(|piece| piece.len > 0) {
                let end = piece.offset.saturating_add(piece.len as u64);
                let size = source.size(piece.file);
                if size.is_none_or(|size| end > size) {
                    return Err(StoreError::NotACheckpoint {
                        path: source.path(piece.file),
                        why: format!(
                            "layer {layer}, expert {expert} ends at byte {end}, the file at byte {}: truncated?",
                            size.unwrap_or(0)
                        ),
                    });
                }
            }
        }
    }
    Ok(())
}
