//! [`Index`]: offset, shape and type of each tensor of a checkpoint. Reads and validates only the safetensors headers.

use super::{names::canonical_name, weight_files::WeightFiles};
use moestro_base::{
    error::StoreError,
    platform::{IS_LFS_POINTER, LFS_START, open_regular_file},
};
pub use safetensors::Dtype;
use serde::{
    Deserialize, Deserializer,
    de::{self, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{
    collections::BTreeMap,
    fmt,
    io::Read,
    marker::PhantomData,
    path::{Path, PathBuf},
};

/// Maximum size of a header in bytes, as in the safetensors library.
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
    /// Number of [`Index::files`] that certainly belong to the checkpoint. The others are [`WeightFiles::others`].
    chosen: usize,
    /// Says how many shards do not exist. `None` if all exist.
    missing: Option<String>,
    /// True if the index file belongs to another conversion.
    ignores_index: bool,
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
    /// Reads the headers of the [`WeightFiles`] in `dir`.
    ///
    /// # Errors
    /// The directory has no weight files. A weight file is invalid or truncated. Several files have the same tensor,
    /// and the index names none of them for it.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let (files, listed) = WeightFiles::in_dir(dir)?;
        let mut index = Self::empty(dir);
        index.missing = files.describe_missing();
        index.ignores_index = files.ignores_index;
        let mut unresolved = BTreeMap::new();
        for name in &files.chosen {
            index.add(dir.join(name), &listed, &mut unresolved)?;
        }
        if let Some((name, second)) = unresolved.first_key_value() {
            return Err(index.ambiguous_tensor(name, second));
        }
        index.chosen = index.files.len();
        for name in &files.others {
            index.add_other(dir.join(name));
        }
        Ok(index)
    }

    /// Reads the header of a single file of the checkpoint in `dir`.
    pub fn open_file(dir: &Path, path: PathBuf) -> Result<Self, StoreError> {
        let mut index = Self::empty(dir);
        // A single file has no duplicate tensors, so nothing is unresolved.
        index.add(path, &BTreeMap::new(), &mut BTreeMap::new())?;
        index.chosen = index.files.len();
        Ok(index)
    }

    fn empty(dir: &Path) -> Self {
        let files = Vec::new();
        Self { dir: dir.to_path_buf(), files, tensors: BTreeMap::new(), chosen: 0, missing: None, ignores_index: false }
    }

    /// Path of the file that contains a tensor.
    pub fn path(&self, entry: &TensorEntry) -> &Path {
        self.files.get(entry.file).unwrap_or(&self.dir)
    }

    /// True if the tensor's file may belong to another checkpoint.
    pub fn is_optional(&self, entry: &TensorEntry) -> bool {
        entry.file >= self.chosen
    }

    /// The error for a tensor that no file has.
    pub fn missing_tensor(&self, name: &str) -> StoreError {
        let dir = self.dir.clone();
        let part = name.trim_start_matches("language_model.").trim_start_matches("model.");
        let is_similar = |found: &&String| found.ends_with(&format!(".{part}")) && canonical_name(found).is_some();
        let similar = self.tensors.keys().find(is_similar);
        match (&self.missing, similar) {
            (None, None) => StoreError::Missing { name: name.into(), dir },
            (None, Some(found)) => {
                let why = format!("tensor {name} is missing; the prefix of {found} is not known");
                StoreError::NotACheckpoint { path: dir, why }
            }
            (Some(missing), _) => {
                let why = format!("{missing}, and no other has {name}; `moestro pull ORG/NAME` downloads them");
                StoreError::NotACheckpoint { path: dir, why }
            }
        }
    }

    /// The error for a tensor that is in the file `second`, too, if the index does not say which file to use.
    fn ambiguous_tensor(&self, name: &str, second: &Path) -> StoreError {
        let first = self.tensors.get(name).map_or(&*self.dir, |entry| self.path(entry));
        let [first, second] = [first, second].map(|path| path.strip_prefix(&self.dir).unwrap_or(path).display());
        let why = format!("tensor {name} is in two shards, {first} and {second}, and no index says which one to use");
        StoreError::NotACheckpoint { path: self.dir.clone(), why }
    }

    /// Logs that files are missing, although the checkpoint has all tensors that the model needs.
    pub fn report_missing_files(&self) {
        let dir = self.dir.display();
        if let Some(missing) = &self.missing {
            tracing::warn!(%dir, "{missing}; the model does not need them");
        }
        if self.ignores_index {
            tracing::info!(%dir, "the index names files that do not exist; using the complete files beside it");
        }
    }

    /// Adds a file of which it is unknown whether it belongs to the checkpoint. Its tensors are used if the chosen
    /// files have no tensor of the same name.
    fn add_other(&mut self, path: PathBuf) {
        match Self::open_file(&self.dir, path.clone()) {
            Ok(other) if other.tensors.keys().all(|name| !self.tensors.contains_key(name)) => {
                let file = self.files.len();
                self.tensors
                    .extend(other.tensors.into_iter().map(|(name, entry)| (name, TensorEntry { file, ..entry })));
                self.files.push(path);
            }
            Ok(_) => tracing::debug!(file = %path.display(), "not used: other files have the same tensors"),
            Err(error) => tracing::debug!(%error, "not used: another file that is not a weight file"),
        }
    }

    /// Adds a file. If several files have a tensor, the one that `listed` (the index) names is used. `unresolved` maps
    /// each tensor that is in several files, so far without the named one, to the second of these files.
    fn add(
        &mut self,
        path: PathBuf,
        listed: &BTreeMap<String, String>,
        unresolved: &mut BTreeMap<String, PathBuf>,
    ) -> Result<(), StoreError> {
        let io = StoreError::at(&path);
        let bad = |why: String| StoreError::NotACheckpoint { path: path.clone(), why };
        let mut file = open_regular_file(&path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut len = [0; 8];
        file.read_exact(&mut len).map_err(|_| bad("too short for a safetensors file".into()))?;
        if len == *LFS_START {
            return Err(bad(IS_LFS_POINTER.into()));
        }
        let len = u64::from_le_bytes(len);
        if len > MAX_HEADER_BYTES || len + 8 > size {
            let why = format!("it is not a safetensors file: its header would have {len} bytes, but it has {size}");
            return Err(bad(why));
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
            if let Some(other) = self.tensors.get(&name) {
                match listed.get(&name).map(|file| self.dir.join(file)) {
                    Some(file) if file == path => _ = unresolved.remove(&name),
                    Some(file) if file == self.path(other) => continue,
                    _ => {
                        // A later file may be the one that the index names.
                        unresolved.entry(name).or_insert_with(|| path.clone());
                        continue;
                    }
                }
            }
            self.tensors.insert(name, entry);
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
