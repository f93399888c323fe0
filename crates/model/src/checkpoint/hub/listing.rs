//! [`RepoListing`]: the files of a repository on the hub. Selects the files that a model needs. Listings are untrusted.

use super::cache::is_hash;
use crate::checkpoint::{
    mtp::HEAD_FILES,
    weight_files::{INDEX, MAX_INDEX_BYTES, TOWER_FILES, WeightFiles, read_index},
};
use moestro_base::error::StoreError;
use serde::Deserialize;
use std::{collections::BTreeSet, path::Path};

/// Maximum size of any other small file in bytes. Tokenizers have 10 to 30 MB.
const MAX_SMALL_BYTES: u64 = 256 << 20;
/// Maximum number of weight files. The largest models have about a hundred weight files.
const MAX_SHARDS: usize = 1000;

/// The files that a model needs besides its weights.
const SMALL_FILES: [&str; 11] = [
    INDEX,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    // The size limits of images.
    "preprocessor_config.json",
    "processor_config.json",
    // The model card, which contains the licence.
    "README.md",
];
/// The folder of further chat templates, one file `NAME.jinja` for each.
const TEMPLATES: &str = "additional_chat_templates/";

/// The files of one commit.
#[derive(Debug, Deserialize)]
pub struct RepoListing {
    pub sha: String,
    siblings: Vec<RepoFile>,
    /// Tags of the repository, such as `license:apache-2.0`.
    #[serde(default)]
    tags: Vec<String>,
}

/// A file of a commit.
#[derive(Debug, Deserialize)]
pub struct RepoFile {
    #[serde(rename = "rfilename")]
    pub name: String,
    pub size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<LfsInfo>,
}

#[derive(Debug, Deserialize)]
struct LfsInfo {
    sha256: Option<String>,
}

impl RepoFile {
    /// The SHA-256 of the file. `None` for a small file, since the hub reports the SHA-256 only for large files.
    pub fn sha256(&self) -> Option<String> {
        self.lfs.as_ref()?.sha256.as_ref().map(|hash| hash.to_lowercase())
    }

    /// The hash of the file, which is the name of its blob. `None` if the hub reports no hash.
    pub fn hash(&self) -> Option<&str> {
        let large = self.lfs.as_ref().and_then(|lfs| lfs.sha256.as_deref());
        large.or(self.blob.as_deref())
    }

    /// Fails if a small file is unreasonably large. A malicious mirror could use such a file to fill the disk.
    pub fn check_size(&self, size: u64) -> Result<(), String> {
        let max = if self.name == INDEX { MAX_INDEX_BYTES } else { MAX_SMALL_BYTES };
        if self.is_small() && size > max {
            return Err(format!("{} has {size} bytes; at most {max} are allowed", self.name));
        }
        Ok(())
    }

    /// True for a file that a model needs besides its weights.
    fn is_small(&self) -> bool {
        let template = self.name.strip_prefix(TEMPLATES).and_then(|name| name.strip_suffix(".jinja"));
        SMALL_FILES.contains(&self.name.as_str()) || template.is_some_and(is_plain)
    }
}

impl RepoListing {
    /// Validates every text of the listing that becomes a part of a path.
    pub fn check(&self) -> Result<(), String> {
        if !is_hash(&self.sha) {
            return Err(format!("{:?} is not a commit", self.sha));
        }
        for file in &self.siblings {
            let sha256 = file.lfs.as_ref().and_then(|lfs| lfs.sha256.as_deref());
            if let Some(hash) = sha256.iter().chain(&file.blob.as_deref()).find(|hash| !is_hash(hash)) {
                return Err(format!("{hash:?} is not a file hash"));
            }
            if sha256.is_some_and(|hash| hash.len() != 64) {
                return Err(format!("{} has a SHA-256 of the wrong length", file.name));
            }
        }
        Ok(())
    }

    /// The licence in the tags of the repository.
    pub fn licence(&self) -> Option<&str> {
        self.tags.iter().find_map(|tag| tag.strip_prefix("license:"))
    }

    /// The files that a model needs besides its weights.
    pub fn small_files(&self) -> Vec<&RepoFile> {
        let names: BTreeSet<&str> =
            self.siblings.iter().filter(|file| file.is_small()).map(|file| file.name.as_str()).collect();
        names.into_iter().filter_map(|name| self.find(name)).collect()
    }

    /// The weight files. The index, if there is one, is in `dir`. Also includes the files of an MTP head, of an n-gram
    /// table and of a vision tower.
    pub fn shards(&self, dir: &Path) -> Result<Vec<&RepoFile>, StoreError> {
        let files = self.weight_files(dir)?;
        let mut names = files.chosen;
        if self.find(INDEX).is_none() {
            names.extend(files.others);
        }
        let is_part = |name: &&String| {
            HEAD_FILES.iter().chain(&TOWER_FILES).any(|part| part == name)
                || !name.contains('/') && (name.contains("mtp") || name.contains("ngram"))
        };
        let all = self.siblings.iter().map(|file| &file.name).filter(|name| is_weights(name));
        names.extend(all.filter(is_part).cloned());
        if names.is_empty() {
            let why = if self.siblings.iter().any(|file| file.name.ends_with(".gguf")) {
                "the repository has GGUF files, which Moestro does not read; pull an MLX version of the model, such \
                         as one of mlx-community"
            } else {
                "the repository has no model.safetensors, so it is not a model in a supported format"
            };
            return Err(StoreError::Other(why.into()));
        }
        if names.len() > MAX_SHARDS {
            let why = format!("the repository has {} weight files; at most {MAX_SHARDS} are allowed", names.len());
            return Err(StoreError::Other(why));
        }
        Ok(names.iter().filter_map(|name| self.find(name)).collect())
    }

    /// The files that the index in `dir` names and that the repository does not have, if no other files are complete.
    pub fn absent(&self, dir: &Path) -> Result<BTreeSet<String>, StoreError> {
        Ok(self.weight_files(dir)?.missing)
    }

    fn weight_files(&self, dir: &Path) -> Result<WeightFiles, StoreError> {
        let available = self.siblings.iter().map(|file| file.name.clone()).filter(|name| is_weights(name)).collect();
        let listed =
            if self.find(INDEX).is_some() { read_index(dir)?.into_values().collect() } else { BTreeSet::new() };
        WeightFiles::choose(&available, &listed).map_err(StoreError::Other)
    }

    fn find(&self, name: &str) -> Option<&RepoFile> {
        self.siblings.iter().find(|file| file.name == name)
    }
}

/// True for a safetensors file whose name and folders need no escaping in URLs and paths.
fn is_weights(name: &str) -> bool {
    name.ends_with(".safetensors") && name.split('/').all(is_plain)
}

/// True if a file's name needs no escaping in URLs and paths.
fn is_plain(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    !name.is_empty() && !name.starts_with('.') && name.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn listing(names: &[&str]) -> RepoListing {
        let file = |name: &&str| RepoFile { name: name.to_string(), size: Some(1), blob: None, lfs: None };
        RepoListing { sha: "c".into(), siblings: names.iter().map(file).collect(), tags: Vec::new() }
    }

    fn names(files: Vec<&RepoFile>) -> Vec<&str> {
        files.into_iter().map(|file| file.name.as_str()).collect()
    }

    #[test]
    fn names_leading_outside_the_cache_are_rejected() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let check = |text: &str| {
            let listing: RepoListing = serde_json::from_str(text).unwrap();
            listing.check()
        };
        let file =
            |more: &str| format!(r#"{{"sha": "{commit}", "siblings": [{{"rfilename": "a", "size": 1{more}}}]}}"#);
        check(&file("")).unwrap();
        check(&file(&format!(r#", "blobId": "{commit}""#))).unwrap();
        for bad in [
            file(r#", "blobId": "../../../.bashrc""#),
            file(r#", "lfs": {"sha256": "/etc/passwd"}"#),
            file(&format!(r#", "lfs": {{"sha256": "{commit}"}}"#)),
            file("").replace(commit, "../../x"),
            file("").replace(commit, ""),
            file("").replace(commit, "main"),
        ] {
            assert!(check(&bad).is_err(), "{bad}");
        }
        let names =
            "/a a/../b a//b .a/b a/. a/.b . a?b a#b a\\b %2e".split(' ').map(|name| format!("{name}.safetensors"));
        for name in names.chain(["a.bin".to_owned(), "a.safetensors/b".to_owned()]) {
            assert!(!is_weights(&name), "{name}");
        }
        assert!(is_weights("optiq/a-1.b_2.safetensors"));
    }

    #[test]
    fn licence_is_read_from_tags() {
        let hash = "c".repeat(40);
        let text = format!(r#"{{"sha":"{hash}","siblings":[],"tags":["mlx","license:other"]}}"#);
        let listing: RepoListing = serde_json::from_str(&text).unwrap();
        assert_eq!(listing.licence(), Some("other"));
        let without: RepoListing = serde_json::from_str(&format!(r#"{{"sha":"{hash}","siblings":[]}}"#)).unwrap();
        assert_eq!(without.licence(), None);
    }

    #[test]
    fn only_needed_files_are_selected() {
        let dir = tempfile::tempdir().unwrap();
        let all = "README.md config.json tokenizer.json vocab.json model.gguf pytorch_model.bin \
            original/consolidated.safetensors consolidated.safetensors model-00001-of-00002.safetensors \
            model-00002-of-00002.safetensors model-extra.safetensors model-mtp.safetensors ngram-table.safetensors \
            ../evil.safetensors additional_chat_templates/tool_use.jinja \
            additional_chat_templates/../../evil.jinja additional_chat_templates/.jinja/evil.jinja \
            preprocessor_config.json processor_config.json video_preprocessor_config.json other/mtp.safetensors \
            optiq/mtp.safetensors optiq/optiq_vision.safetensors optiq/other.safetensors";
        let all: Vec<_> = all.split(' ').collect();
        let hub = listing(&all);
        let small = [
            "README.md",
            "additional_chat_templates/tool_use.jinja",
            "config.json",
            "preprocessor_config.json",
            "processor_config.json",
            "tokenizer.json",
        ];
        assert_eq!(names(hub.small_files()), small);
        let shards = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model-extra.safetensors",
            "model-mtp.safetensors",
            "ngram-table.safetensors",
            "optiq/mtp.safetensors",
            "optiq/optiq_vision.safetensors",
        ];
        assert_eq!(names(hub.shards(dir.path()).unwrap()), shards);

        let hub = listing(&[&all[..], &[INDEX]].concat());
        let index =
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}"#;
        fs::write(dir.path().join(INDEX), index).unwrap();
        // The index names one shard of its series, and not the extra file.
        let needed = [&shards[..2], &shards[3..]].concat();
        assert_eq!(names(hub.shards(dir.path()).unwrap()), needed);

        // The repository has other shards than its index says, or the index is damaged.
        for index in [r#"{"weight_map": {"a": "lost.safetensors"}}"#, "{"] {
            fs::write(dir.path().join(INDEX), index).unwrap();
            assert_eq!(names(hub.shards(dir.path()).unwrap()), needed);
            assert_eq!(hub.absent(dir.path()).unwrap(), BTreeSet::new());
        }
        let lost = r#"{"weight_map": {"a": "model-a.safetensors", "b": "model-b.safetensors"}}"#;
        fs::write(dir.path().join(INDEX), lost).unwrap();
        let hub = listing(&["model-a.safetensors", INDEX]);
        assert_eq!(names(hub.shards(dir.path()).unwrap()), ["model-a.safetensors"]);
        assert_eq!(hub.absent(dir.path()).unwrap(), BTreeSet::from(["model-b.safetensors".to_owned()]));
        assert!(listing(&["config.json"]).shards(dir.path()).is_err());
    }
}
