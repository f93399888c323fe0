//! Where each tensor of a checkpoint lies: the headers of its safetensors files, checked, without reading the data.

use crate::error::StoreError;
use serde::Deserialize;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io::Read,
    path::{Path, PathBuf},
};

/// No header of a real checkpoint comes near this (bytes).
const MOST_HEADER: u64 = 256 << 20;

/// A tensor's element type, as safetensors names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    U64,
    I64,
    U32,
    I32,
    U16,
    I16,
    U8,
    I8,
    Bool,
    #[serde(rename = "F8_E4M3")]
    F8E4m3,
    #[serde(rename = "F8_E5M2")]
    F8E5m2,
    #[serde(rename = "F8_E8M0")]
    F8E8m0,
}

impl Dtype {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F64 | Dtype::U64 | Dtype::I64 => 8,
            Dtype::F32 | Dtype::U32 | Dtype::I32 => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::U16 | Dtype::I16 => 2,
            Dtype::U8 | Dtype::I8 | Dtype::Bool | Dtype::F8E4m3 | Dtype::F8E5m2 | Dtype::F8E8m0 => 1,
        }
    }
}

/// One tensor's place.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// Index into [`Index::files`].
    pub file: usize,
    /// Bytes from the start of the file; of any alignment.
    pub offset: u64,
    /// Bytes.
    pub len: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

/// All tensors of a checkpoint directory, by the name they have in the files.
#[derive(Debug, Clone)]
pub struct Index {
    pub dir: PathBuf,
    pub files: Vec<PathBuf>,
    pub tensors: BTreeMap<String, Entry>,
}

#[derive(Deserialize)]
struct Header {
    dtype: Dtype,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl Index {
    /// Reads the headers of the shards that `model.safetensors.index.json` names, or of every `model*.safetensors`.
    ///
    /// # Errors
    /// A directory without shards, a shard that is missing, is not safetensors or is shorter than its header says, and a
    /// tensor that the index promises and no shard has.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let promised = promised(dir)?;
        let names = match &promised {
            Some(map) => map.values().cloned().collect(),
            None => shards(dir)?,
        };
        let mut index = Self { dir: dir.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        for name in names {
            index.add(dir.join(name))?;
        }
        match promised.unwrap_or_default().into_keys().find(|name| !index.tensors.contains_key(name)) {
            Some(name) => Err(StoreError::Missing { name, dir: dir.to_path_buf() }),
            None => Ok(index),
        }
    }

    /// The file a tensor lies in.
    pub fn path(&self, entry: &Entry) -> &Path {
        self.files.get(entry.file).unwrap_or(&self.dir)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), StoreError> {
        let io = |source| StoreError::Io { path: path.clone(), source };
        let bad = |why: String| StoreError::NotACheckpoint { path: path.clone(), why };
        let mut file = File::open(&path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut len = [0; 8];
        file.read_exact(&mut len).map_err(|_| bad("too short for a safetensors file".into()))?;
        let len = u64::from_le_bytes(len);
        if len > MOST_HEADER || len + 8 > size {
            return Err(bad(format!("a safetensors header of {len} bytes in a file of {size}")));
        }
        let mut header = vec![0; len as usize];
        file.read_exact(&mut header).map_err(io)?;
        let header: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| bad(format!("its header is not JSON: {error}")))?;
        for (name, value) in header {
            if name == "__metadata__" {
                continue;
            }
            let Header { dtype, shape, data_offsets: [start, end] } =
                serde_json::from_value(value).map_err(|error| bad(format!("tensor {name}: {error}")))?;
            let elements = shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side));
            let bytes = elements.and_then(|elements| elements.checked_mul(dtype.bytes()));
            if end.checked_sub(start) != bytes.map(|bytes| bytes as u64) {
                return Err(bad(format!("tensor {name}: {dtype:?} {shape:?} does not take bytes {start} to {end}")));
            }
            if (8 + len).checked_add(end).is_none_or(|end| end > size) {
                return Err(bad(format!(
                    "it is truncated: tensor {name} ends at byte {} of {size}",
                    (8 + len).saturating_add(end)
                )));
            }
            let entry =
                Entry { file: self.files.len(), offset: 8 + len + start, len: (end - start) as usize, dtype, shape };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(bad(format!("tensor {name} is in another shard, too")));
            }
        }
        self.files.push(path);
        Ok(())
    }
}

/// Tensor to shard, if the checkpoint has an index file.
fn promised(dir: &Path) -> Result<Option<BTreeMap<String, String>>, StoreError> {
    #[derive(Deserialize)]
    struct Weights {
        weight_map: BTreeMap<String, String>,
    }
    let path = dir.join("model.safetensors.index.json");
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(StoreError::Io { path, source }),
    };
    match serde_json::from_slice::<Weights>(&text) {
        Ok(weights) => Ok(Some(weights.weight_map)),
        Err(error) => Err(StoreError::NotACheckpoint { path, why: error.to_string() }),
    }
}

fn shards(dir: &Path) -> Result<BTreeSet<String>, StoreError> {
    let io = |source| StoreError::Io { path: dir.to_path_buf(), source };
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        if let Ok(name) = entry.map_err(io)?.file_name().into_string()
            && name.starts_with("model")
            && name.ends_with(".safetensors")
        {
            names.insert(name);
        }
    }
    if names.is_empty() {
        let why = "it has no model*.safetensors".into();
        return Err(StoreError::NotACheckpoint { path: dir.to_path_buf(), why });
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(dir: &Path, name: &str, header: &str, data: usize) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        std::fs::write(dir.join(name), bytes).unwrap();
    }

    #[test]
    fn unaligned_headers_and_several_shards() {
        let dir = tempfile::tempdir().unwrap();
        shard(dir.path(), "model-1.safetensors", r#"{"a":{"dtype":"U32","shape":[3],"data_offsets":[0,12]}}"#, 12);
        shard(dir.path(), "model-2.safetensors", r#"{"b":{"dtype":"BF16","shape":[],"data_offsets":[0,2]} }"#, 2);
        let index = Index::open(dir.path()).unwrap();
        assert_eq!((index.tensors["a"].offset, index.tensors["a"].len), (8 + 55, 12));
        assert_eq!((index.tensors["b"].file, index.tensors["b"].len), (1, 2));
    }

    #[test]
    fn damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let opened = || Index::open(dir.path()).unwrap_err().to_string();
        assert!(opened().contains("no model*.safetensors"));
        shard(dir.path(), "model.safetensors", r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, 11);
        assert!(opened().contains("truncated: tensor a"), "{}", opened());
        shard(dir.path(), "model.safetensors", r#"{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,12]}}"#, 12);
        assert!(opened().contains("does not take bytes"));
        shard(dir.path(), "model.safetensors", r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, 12);
        std::fs::write(dir.path().join("model.safetensors.index.json"), r#"{"weight_map":{"z":"model.safetensors"}}"#)
            .unwrap();
        assert!(opened().contains("tensor z is missing"));
        std::fs::write(dir.path().join("model.safetensors"), [255; 9]).unwrap();
        assert!(opened().contains("header of"));
    }
}
