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
        let chosen = Vec::from_iter(&files.chosen);
        let mut entries: BTreeMap<String, Vec<TensorEntry>> = BTreeMap::new();
        for (file, name) in chosen.iter().enumerate() {
            for (tensor, entry) in read_header(&dir.join(name), file)? {
                entries.entry(tensor).or_default().push(entry);
            }
        }
        let mut tensors = BTreeMap::new();
        for (name, mut entries) in entries {
            if let [first, second, ..] = &entries[..] {
                let [first, second] = [first, second].map(|entry| chosen[entry.file]);
                entries.retain(|entry| listed.get(&name) == Some(chosen[entry.file]));
                if entries.is_empty() {
                    let files = format!("is in two shards, {first} and {second}");
                    let why = format!("tensor {name} {files}, and no index says which one to use");
                    return Err(StoreError::NotACheckpoint { path: dir.into(), why });
                }
            }
            tensors.extend(entries.pop().map(|entry| (name, entry)));
        }
        let mut index = Self {
            dir: dir.into(),
            files: chosen.iter().map(|name| dir.join(name)).collect(),
            tensors,
            chosen: chosen.len(),
            missing: files.describe_missing(),
            ignores_index: files.ignores_index,
        };
        for name in &files.others {
            index.add_other(dir.join(name));
        }
        Ok(index)
    }

    /// Reads the header of a single file of the checkpoint in `dir`.
    pub fn open_file(dir: &Path, path: PathBuf) -> Result<Self, StoreError> {
        let tensors = read_header(&path, 0)?.into_iter().collect();
        Ok(Self { dir: dir.into(), files: vec![path], tensors, chosen: 1, missing: None, ignores_index: false })
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
        match read_header(&path, self.files.len()) {
            Ok(tensors) if tensors.iter().all(|(name, _)| !self.tensors.contains_key(name)) => {
                self.tensors.extend(tensors);
                self.files.push(path);
            }
            Ok(_) => tracing::debug!(file = %path.display(), "not used: other files have the same tensors"),
            Err(error) => tracing::debug!(%error, "not used: another file that is not a weight file"),
        }
    }
}

/// The error for weights of `file` that are zero.
pub fn zero_weights(file: &Path, what: &str) -> StoreError {
    let why = format!("{what} is zero, as in a file whose download did not end; download it again");
    StoreError::NotACheckpoint { path: file.to_path_buf(), why }
}

/// The tensors of a file. `file` is the number of the file in [`Index::files`].
fn read_header(path: &Path, file: usize) -> Result<Vec<(String, TensorEntry)>, StoreError> {
    let io = StoreError::at(path);
    let bad = |why: String| StoreError::NotACheckpoint { path: path.into(), why };
    let mut reader = open_regular_file(path).map_err(io)?;
    let size = reader.metadata().map_err(io)?.len();
    let mut len = [0; 8];
    reader.read_exact(&mut len).map_err(|_| bad("too short for a safetensors file".into()))?;
    if len == *LFS_START {
        return Err(bad(IS_LFS_POINTER.into()));
    }
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER_BYTES || len + 8 > size {
        let why = format!("it is not a safetensors file: its header would have {len} bytes, but it has {size}");
        return Err(bad(why));
    }
    let mut header = vec![0; len as usize];
    reader.read_exact(&mut header).map_err(io)?;
    let UniqueMap(header): UniqueMap<TensorHeader> = serde_json::from_slice(&header)
        .map_err(|error| bad(format!("its header is not a list of tensors: {error}")))?;
    let mut tensors = Vec::with_capacity(header.len());
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
        tensors.push((name, TensorEntry { file, offset: 8 + len + start, len: (end - start) as usize, dtype, shape }));
    }
    ranges.sort();
    // An empty tensor overlaps no other tensor.
    ranges.retain(|(start, end, _)| start < end);
    let mut pairs = ranges.iter().zip(ranges.iter().skip(1));
    if let Some(((.., one), (.., two))) = pairs.find(|(one, two)| one.1 > two.0) {
        return Err(bad(format!("tensors {one} and {two} overlap")));
    }
    Ok(tensors)
}
