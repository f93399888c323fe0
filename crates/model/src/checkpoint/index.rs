//! [`Index`]: offset, shape and type of each tensor of a checkpoint. Reads and validates only the safetensors headers.

use moestro_base::{
    error::StoreError,
    platform::{open_regular_file, read_small_file},
};
pub use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    io::Read,
    marker::PhantomData,
    path::{Path, PathBuf},
};

/// Maximum size of a header or an index in bytes, as in the safetensors library.
const MAX_HEADER_BYTES: u64 = 100 << 20;
/// Maximum number of dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// Location, type and shape of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorEntry {
    /// Index into [`Index::files`].
    pub file: usize,
    /// Offset in bytes from the start of the file. The offset may be unaligned.
    pub offset: u64,
    /// Length in bytes.
    pub len: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

/// All tensors of a checkpoint directory, by their names in the safetensors files.
#[derive(Debug, Clone)]
pub struct Index {
    pub dir: PathBuf,
    pub files: Vec<PathBuf>,
    pub tensors: BTreeMap<String, TensorEntry>,
}

#[derive(Deserialize)]
struct TensorHeader {
    dtype: Dtype,
    shape: TensorShape,
    data_offsets: [u64; 2],
}

/// A shape with a bounded number of dimensions.
struct TensorShape(Vec<usize>);

impl<'de> Deserialize<'de> for TensorShape {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct ShapeVisitor;
        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = TensorShape;

            fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(text, "a shape of at most {MAX_DIMENSIONS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<TensorShape, A::Error> {
                let mut dimensions = Vec::new();
                while let Some(dimension) = from.next_element()? {
                    if dimensions.len() == MAX_DIMENSIONS {
                        return Err(de::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                    }
                    dimensions.push(dimension);
                }
                Ok(TensorShape(dimensions))
            }
        }
        from.deserialize_seq(ShapeVisitor)
    }
}

/// A JSON object without duplicate names. Duplicate names are an error, since parsers disagree about which value
/// counts.
struct UniqueMap<T>(BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for UniqueMap<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct UniqueMapVisitor<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for UniqueMapVisitor<T> {
            type Value = UniqueMap<T>;

            fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
                text.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<UniqueMap<T>, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(name) = from.next_key::<String>()? {
                    if name == "__metadata__" {
                        from.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let value = from.next_value().map_err(|error| de::Error::custom(format!("{name}: {error}")))?;
                    if entries.insert(name.clone(), value).is_some() {
                        return Err(de::Error::custom(format!("duplicate name {name}")));
                    }
                }
                Ok(UniqueMap(entries))
            }
        }
        from.deserialize_map(UniqueMapVisitor(PhantomData))
    }
}

impl Index {
    /// Reads the headers of the shards listed in `model.safetensors.index.json`. Without that file, reads the headers
    /// of all `model*.safetensors`.
    ///
    /// # Errors
    /// The directory has no shards. A shard is missing, invalid or truncated. No shard has a tensor that the index file
    /// lists.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let listed = listed_tensors(dir)?;
        let names = match &listed {
            Some(map) => map.values().cloned().collect(),
            None => shards(dir)?,
        };
        let not_a_checkpoint = |why| StoreError::NotACheckpoint { path: dir.to_path_buf(), why };
        let names: BTreeSet<String> = names;
        if let Some(name) = names.iter().find(|name| !is_plain(name)) {
            let why = format!("its index names {name:?}, which is not a file of its directory");
            return Err(not_a_checkpoint(why));
        }
        let missing: Vec<&String> = names.iter().filter(|name| !dir.join(name).exists()).collect();
        if let Some(first) = missing.first() {
            let count = missing.len();
            let all = names.len();
            let why = format!(
                "{count} of {all} weight files missing, such as {first}; `moestro pull ORG/NAME` downloads them"
            );
            return Err(not_a_checkpoint(why));
        }
        let mut index = Self { dir: dir.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        for name in names {
            index.add(dir.join(name))?;
        }
        match listed.unwrap_or_default().into_keys().find(|name| !index.tensors.contains_key(name)) {
            Some(name) => Err(StoreError::Missing { name, dir: dir.to_path_buf() }),
            None => Ok(index),
        }
    }

    /// Reads the header of a single file of the checkpoint in `dir`.
    pub fn open_file(dir: &Path, path: PathBuf) -> Result<Self, StoreError> {
        let mut index = Self { dir: dir.to_path_buf(), files: Vec::new(), tensors: BTreeMap::new() };
        index.add(path)?;
        Ok(index)
    }

    /// Path of the file that contains a tensor.
    pub fn path(&self, entry: &TensorEntry) -> &Path {
        self.files.get(entry.file).unwrap_or(&self.dir)
    }

    fn add(&mut self, path: PathBuf) -> Result<(), StoreError> {
        let io = StoreError::at(&path);
        let bad = |why: String| StoreError::NotACheckpoint { path: path.clone(), why };
        let mut file = open_regular_file(&path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut len = [0; 8];
        file.read_exact(&mut len).map_err(|_| bad("too short for a safetensors file".into()))?;
        if len == *b"version " {
            let why = "it is a Git LFS pointer, not the file; fetch it with `git lfs pull` or `moestro pull ORG/NAME`";
            return Err(bad(why.into()));
        }
        let len = u64::from_le_bytes(len);
        if len > MAX_HEADER_BYTES || len + 8 > size {
            return Err(bad(format!("a safetensors header of {len} bytes in a file of {size}")));
        }
        let mut header = vec![0; len as usize];
        file.read_exact(&mut header).map_err(io)?;
        let UniqueMap(header): UniqueMap<TensorHeader> = serde_json::from_slice(&header)
            .map_err(|error| bad(format!("its header is not a list of tensors: {error}")))?;
        let mut ranges = Vec::with_capacity(header.len());
        for (name, TensorHeader { dtype, shape: TensorShape(shape), data_offsets: [start, end] }) in header {
            let elements = shape.iter().try_fold(1usize, |product, &side| product.checked_mul(side));
            let bits = elements.and_then(|elements| elements.checked_mul(dtype.bitsize()));
            let bytes = bits.filter(|bits| bits.is_multiple_of(8)).map(|bits| bits / 8);
            // `bytes` is `None` if the shape overflows. Without the first check, `None == None` would accept an
            // overflowing shape whose end is before its start.
            if bytes.is_none() || end.checked_sub(start) != bytes.map(|bytes| bytes as u64) {
                return Err(bad(format!("tensor {name}: {dtype:?} {shape:?} does not match bytes {start} to {end}")));
            }
            let last = (8 + len).saturating_add(end);
            if last > size {
                return Err(bad(format!("it is truncated: tensor {name} ends at byte {last} of {size}")));
            }
            ranges.push((start, end, name.clone()));
            let entry = TensorEntry {
                file: self.files.len(),
                offset: 8 + len + start,
                len: (end - start) as usize,
                dtype,
                shape,
            };
            if self.tensors.insert(name.clone(), entry).is_some() {
                return Err(bad(format!("tensor {name} is also in another shard")));
            }
        }
        ranges.sort();
        // An empty tensor overlaps no other tensor.
        ranges.retain(|(start, end, _)| start < end);
        let mut pairs = ranges.iter().zip(ranges.iter().skip(1));
        if let Some(((.., one), (.., two))) = pairs.find(|(one, two)| one.1 > two.0) {
            return Err(bad(format!("tensors {one} and {two} overlap")));
        }
        self.files.push(path);
        Ok(())
    }
}

/// True if a name refers to a safetensors file directly in the checkpoint directory.
fn is_plain(name: &str) -> bool {
    name.ends_with(".safetensors") && !name.contains(['/', '\0'])
}

/// Reads the index file: the shard of each tensor. `None` if the checkpoint has no index file.
pub fn listed_tensors(dir: &Path) -> Result<Option<BTreeMap<String, String>>, StoreError> {
    #[derive(Deserialize)]
    struct ShardIndex {
        weight_map: UniqueMap<String>,
    }
    let path = dir.join("model.safetensors.index.json");
    let text = match read_small_file(&path, MAX_HEADER_BYTES) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(StoreError::at(&path)(error)),
    };
    match serde_json::from_slice::<ShardIndex>(&text) {
        Ok(weights) => Ok(Some(weights.weight_map.0)),
        Err(error) => Err(StoreError::NotACheckpoint { path, why: error.to_string() }),
    }
}

fn shards(dir: &Path) -> Result<BTreeSet<String>, StoreError> {
    let io = StoreError::at(dir);
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
