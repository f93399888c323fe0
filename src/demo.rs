//! The demo model, embedded in the binary so that `moestro serve` answers without a download. `models/demo/` describes
//! its training.

use moestro_base::{
    error::StoreError,
    platform::{atomic_file, os, sha256_file},
};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Name of the demo model and of its directory.
pub const NAME: &str = "moestro-demo";

/// Says what the demo is, and names a first real model.
pub const ABOUT: &str = "moestro-demo is a 9 MB toy that does sums, capitals and short stories; a first real model (about 3 GB): \
                         moestro run mlx-community/Qwen3.5-4B-MLX-4bit";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../models/demo/moestro-demo/", $name)))),*]
    };
}

const FILES: &[(&str, &[u8])] = files![
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Checksums of the embedded files, in the format of `sha256sum`. They save hashing the embedded files at each start.
const SUMS: &str = include_str!("../models/demo/SHA256SUMS");

/// Content of a file of the demo model. Synthetic checkpoints use the demo model's tokenizer and template.
pub fn file(name: &str) -> Option<&'static [u8]> {
    FILES.iter().find(|(file, _)| *file == name).map(|(_, bytes)| *bytes)
}

/// Directory of the demo model: in the user's cache, or in a private temporary directory if the cache cannot be
/// written. Checks every file and writes those that are missing or damaged.
pub fn unpack() -> Result<PathBuf, StoreError> {
    let mut refused = Vec::new();
    if let Some(cache) = os::cache_dir() {
        match unpack_into(&cache.join("demo")) {
            Ok(dir) => return Ok(dir),
            Err(error) => refused.push(error),
        }
    }
    for root in [std::env::temp_dir(), "/dev/shm".into()] {
        let private = atomic_file::private_dir(&root).map_err(StoreError::at(&root));
        match private.and_then(|dir| unpack_into(&dir.join("demo"))) {
            Ok(dir) => {
                let why = refused.first().map_or_else(|| "HOME is not set".into(), ToString::to_string);
                tracing::info!("cannot write the demo model to the cache ({why}); using {}", dir.display());
                return Ok(dir);
            }
            Err(error) => refused.push(error),
        }
    }
    Err(StoreError::DemoUnwritable(refused))
}

/// Unpacks into a directory named after the contents, so that two versions of the program use different directories.
/// Files are replaced atomically and only if damaged, so several processes may run this at the same time.
fn unpack_into(cache: &Path) -> Result<PathBuf, StoreError> {
    let version = hex::encode(Sha256::digest(SUMS));
    let dir = cache.join(&version[..16]).join(NAME);
    for (name, bytes) in FILES {
        let path = dir.join(name);
        if !is_whole(&path, sum(name)) {
            atomic_file::replace_file(&path, bytes).map_err(StoreError::at(&path))?;
        }
    }
    Ok(dir)
}

/// Checksum of a file in SHA256SUMS.
fn sum(name: &str) -> &'static str {
    SUMS.lines().filter_map(|line| line.split_once("  ")).find(|(_, file)| *file == name).map_or("", |(sum, _)| sum)
}

/// True if the file can be read and has this checksum.
fn is_whole(path: &Path, sum: &str) -> bool {
    sha256_file(path).is_ok_and(|found| found == sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn assert_whole(dir: &Path) {
        for (name, bytes) in FILES {
            assert!(fs::read(dir.join(name)).unwrap() == *bytes, "{name}");
        }
        assert_eq!(fs::read_dir(dir).unwrap().count(), FILES.len(), "no other files");
    }

    #[test]
    fn checksums_match_embedded_files() {
        assert_eq!(SUMS.lines().count(), FILES.len());
        for (name, bytes) in FILES {
            assert_eq!(hex::encode(Sha256::digest(bytes)), sum(name), "{name}");
        }
    }

    #[test]
    fn unpack_repairs_only_damaged_files() {
        let cache = tempfile::tempdir().unwrap();
        let dir = unpack_into(cache.path()).unwrap();
        assert_eq!(dir.file_name().unwrap(), NAME);
        assert_whole(&dir);
        let written = |name| fs::metadata(dir.join(name)).unwrap().modified().unwrap();
        let before = written("model.safetensors");

        fs::remove_file(dir.join("config.json")).unwrap();
        fs::write(dir.join("tokenizer.json"), "{").unwrap();
        let mut damaged = fs::read(dir.join("chat_template.jinja")).unwrap();
        damaged[100] ^= 1;
        fs::write(dir.join("chat_template.jinja"), damaged).unwrap();
        assert_eq!(unpack_into(cache.path()).unwrap(), dir);
        assert_whole(&dir);
        assert_eq!(written("model.safetensors"), before, "undamaged files are not rewritten");
    }

    #[test]
    fn concurrent_unpacking_succeeds() {
        let cache = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(unpack_into(cache.path()).is_ok()));
            }
        });
        assert_whole(&unpack_into(cache.path()).unwrap());
    }

    #[test]
    fn unwritable_directory_is_named_in_error() {
        let cache = tempfile::tempdir().unwrap();
        let file = cache.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(unpack_into(&file).unwrap_err().to_string().contains("chat_template.jinja"));
    }
}
