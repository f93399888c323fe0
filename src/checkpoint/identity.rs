//! The identity of files: a cache that was made from a checkpoint is used only while it is the same.

use crate::{error::StoreError, platform::Stamp};
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// 32 hexadecimal digits that name these files as they lie on the disk now: a hash of their [`Stamp`]s, in order.
///
/// It costs one system call a file and reads no data. Whatever is written to a file, copied over it or renamed in its
/// place makes another identity, and so does a copy of the same bytes: a cache filed under it may be lost for nothing,
/// but never belongs to other bytes.
///
/// # Errors
/// A file that is not there.
pub fn identity(files: &[PathBuf]) -> Result<String, StoreError> {
    Ok(name(&stamps(files)?))
}

/// As [`identity`], if the files have been left alone for so long that a later write cannot hide behind the same time.
pub fn settled_identity(files: &[PathBuf]) -> Result<Option<String>, StoreError> {
    let stamps = stamps(files)?;
    Ok(stamps.iter().all(Stamp::is_settled).then(|| name(&stamps)))
}

fn stamps(files: &[PathBuf]) -> Result<Vec<Stamp>, StoreError> {
    let stamp = |path: &PathBuf| Stamp::of(path).map_err(|source| StoreError::Io { path: path.clone(), source });
    files.iter().map(stamp).collect()
}

fn name(stamps: &[Stamp]) -> String {
    let mut hash = Sha256::new();
    for stamp in stamps {
        hash.update(format!("{stamp:?}\n"));
    }
    hex::encode(&hash.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, time::SystemTime};

    #[test]
    fn whatever_happens_to_a_file_makes_another_identity() {
        let dir = tempfile::tempdir().unwrap();
        let files: Vec<PathBuf> = ["a", "b"].map(|name| dir.path().join(name)).into();
        files.iter().for_each(|file| fs::write(file, [7; 100]).unwrap());
        let first = identity(&files).unwrap();
        assert_eq!((first.len(), identity(&files).unwrap()), (32, first.clone()), "asking changes nothing");
        assert_ne!(identity(&[files[1].clone(), files[0].clone()]).unwrap(), first, "the order counts");

        // A copy with the same bytes and the same time takes the file's place.
        let written = fs::metadata(&files[1]).unwrap().modified().unwrap();
        let copy = dir.path().join("copy");
        fs::copy(&files[1], &copy).unwrap();
        fs::File::options().write(true).open(&copy).unwrap().set_modified(written).unwrap();
        fs::rename(&copy, &files[1]).unwrap();
        let second = identity(&files).unwrap();
        assert_ne!(second, first);

        // Written to, and the time set back.
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&files[1], [8; 100]).unwrap();
        fs::File::options().write(true).open(&files[1]).unwrap().set_modified(written).unwrap();
        assert_ne!(identity(&files).unwrap(), second);

        fs::remove_file(&files[0]).unwrap();
        assert!(identity(&files).unwrap_err().to_string().contains("/a: "));
    }

    #[test]
    fn what_was_written_a_moment_ago_is_not_settled() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let files = [file.path().to_owned()];
        // A time in the future must not count as long ago.
        file.as_file().set_modified(SystemTime::now() + std::time::Duration::from_secs(900)).unwrap();
        assert_eq!(settled_identity(&files).unwrap(), None);
    }
}
