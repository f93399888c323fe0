//! The files of a repository on the hub, and those that a model needs.

use super::cache::is_hash;
use crate::{error::StoreError, platform::read_small_file};
use serde::Deserialize;
use std::{collections::BTreeSet, path::Path};

pub const INDEX: &str = "model.safetensors.index.json";
/// Bytes of an index at most; the largest model's has ten millions.
pub const MOST_INDEX: u64 = 100 << 20;

/// Everything but the weights.
const SMALL: [&str; 7] = [
    INDEX,
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// One commit.
#[derive(Debug, Deserialize)]
pub struct Listing {
    pub sha: String,
    siblings: Vec<Listed>,
}

/// One file of it.
#[derive(Debug, Deserialize)]
pub struct Listed {
    #[serde(rename = "rfilename")]
    pub name: String,
    pub size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Debug, Deserialize)]
struct Lfs {
    sha256: Option<String>,
}

impl Listed {
    /// The hub knows it of large files.
    pub fn sha256(&self) -> Option<String> {
        self.lfs.as_ref()?.sha256.as_ref().map(|hash| hash.to_lowercase())
    }

    /// The file's name among the cache's blobs, if the hub says.
    pub fn hash(&self) -> Option<&str> {
        let large = self.lfs.as_ref().and_then(|lfs| lfs.sha256.as_deref());
        large.or(self.blob.as_deref())
    }
}

impl Listing {
    /// Checks everything that becomes a part of a path.
    pub fn check(&self) -> Result<(), String> {
        if !is_hash(&self.sha) {
            return Err(format!("{:?} is no commit", self.sha));
        }
        for file in &self.siblings {
            let sha256 = file.lfs.as_ref().and_then(|lfs| lfs.sha256.as_deref());
            if let Some(hash) = sha256.iter().chain(&file.blob.as_deref()).find(|hash| !is_hash(hash)) {
                return Err(format!("{hash:?} is no hash of a file"));
            }
            if sha256.is_some_and(|hash| hash.len() != 64) {
                return Err(format!("{} has a SHA-256 of another length", file.name));
            }
        }
        Ok(())
    }

    /// The files beside the weights.
    pub fn small(&self) -> Vec<&Listed> {
        SMALL.iter().filter_map(|name| self.find(name)).collect()
    }

    /// The weights: what the index in `dir` names, else `model*.safetensors`; and a draft head's, if there is one.
    pub fn shards(&self, dir: &Path) -> Result<Vec<&Listed>, StoreError> {
        let mut names: BTreeSet<String> = match self.find(INDEX) {
            None => {
                self.siblings.iter().map(|file| file.name.clone()).filter(|name| name.starts_with("model")).collect()
            }
            Some(_) => {
                let path = dir.join(INDEX);
                let text = read_small_file(&path, MOST_INDEX)
                    .map_err(|source| StoreError::Io { path: path.clone(), source })?;
                shard_names(&text).map_err(|error| StoreError::NotACheckpoint { path, why: error.to_string() })?
            }
        };
        names.extend(self.siblings.iter().map(|file| file.name.clone()).filter(|name| name.contains("mtp")));
        names.retain(|name| is_weights(name));
        if names.is_empty() {
            return Err(StoreError::Other(
                "this repository on the hub has no model.safetensors: not a model we read".into(),
            ));
        }
        let missing =
            |name: &str| StoreError::Other(format!("the hub's index names {name}, which the hub does not have"));
        names.iter().map(|name| self.find(name).ok_or_else(|| missing(name))).collect()
    }

    fn find(&self, name: &str) -> Option<&Listed> {
        self.siblings.iter().find(|file| file.name == name)
    }
}

/// A file that lies directly in the repository, whose name means the same in a URL and in a path.
fn is_weights(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    name.ends_with(".safetensors") && !name.starts_with('.') && name.bytes().all(plain)
}

/// The files an index names.
pub fn shard_names(index: &[u8]) -> Result<BTreeSet<String>, serde_json::Error> {
    #[derive(Deserialize)]
    struct Names {
        weight_map: std::collections::HashMap<String, String>,
    }
    Ok(serde_json::from_slice::<Names>(index)?.weight_map.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn listing(names: &[&str]) -> Listing {
        let file = |name: &&str| Listed { name: name.to_string(), size: Some(1), blob: None, lfs: None };
        Listing { sha: "c".into(), siblings: names.iter().map(file).collect() }
    }

    fn names(files: Vec<&Listed>) -> Vec<&str> {
        files.into_iter().map(|file| file.name.as_str()).collect()
    }

    #[test]
    fn what_could_lead_out_of_the_cache_is_refused() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let check = |text: &str| {
            let listing: Listing = serde_json::from_str(text).unwrap();
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
        for name in
            ["a/b.safetensors", "..safetensors", "a?b.safetensors", "a#.safetensors", "%2e.safetensors", "a.bin"]
        {
            assert!(!is_weights(name), "{name}");
        }
    }

    #[test]
    fn only_what_a_model_needs() {
        let dir = tempfile::tempdir().unwrap();
        let all = [
            "README.md",
            "config.json",
            "tokenizer.json",
            "vocab.json",
            "model.gguf",
            "pytorch_model.bin",
            "original/consolidated.safetensors",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model-mtp.safetensors",
            "../evil.safetensors",
        ];
        let hub = listing(&all);
        assert_eq!(names(hub.small()), ["config.json", "tokenizer.json"]);
        let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model-mtp.safetensors"];
        assert_eq!(names(hub.shards(dir.path()).unwrap()), shards);

        let hub = listing(&[&all[..], &[INDEX]].concat());
        let index =
            r#"{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}"#;
        fs::write(dir.path().join(INDEX), index).unwrap();
        assert_eq!(names(hub.shards(dir.path()).unwrap()), [shards[0], shards[2]]);

        fs::write(dir.path().join(INDEX), r#"{"weight_map": {"a": "lost.safetensors"}}"#).unwrap();
        assert!(hub.shards(dir.path()).unwrap_err().to_string().contains("lost.safetensors"));
        fs::write(dir.path().join(INDEX), "{").unwrap();
        assert!(hub.shards(dir.path()).is_err());
        assert!(listing(&["config.json"]).shards(dir.path()).is_err());
    }
}
