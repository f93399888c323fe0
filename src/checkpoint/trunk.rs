//! From a directory of safetensors to weights: finds each tensor by its canonical name, checks its shape, says how it is
//! quantised, and gathers the trunk in one slab. What nobody asked for in the end is an error.

use super::names::{Name, canonical};
use crate::{
    checkpoint::index::{Dtype, Entry, Index},
    device::{Filling, Span},
    error::{ModelError, StoreError},
    experts::{PIECES, Piece},
    ops::{Codes, Float, Weight},
};
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::unix::fs::FileExt,
};

/// Trunk tensors start at multiples of this (bytes): a cache line.
const ALIGN: usize = 64;

/// A checkpoint whose tensors are being claimed.
pub struct Checkpoint {
    pub index: Index,
    /// Canonical name to the name in the files.
    names: BTreeMap<String, String>,
    claimed: RefCell<BTreeSet<String>>,
    quantization: serde_json::Map<String, serde_json::Value>,
    /// Hugging Face's layout: norms hold `w - 1`, the convolution `[C, 1, K]`.
    pub hugging_face: bool,
}

/// How one matrix is stored, before its bytes are read.
#[derive(Debug, Clone)]
pub struct Layout {
    pub codes: Codes,
    pub rows: usize,
    pub cols: usize,
    /// Codes, scales, biases, where they exist.
    pub entries: [Option<Entry>; 3],
}

impl Checkpoint {
    /// `quantization` is the table of that name in `config.json`, or null.
    pub fn open(index: Index, quantization: &serde_json::Value) -> Result<Self, ModelError> {
        let mut names = BTreeMap::new();
        for found in index.tensors.keys() {
            if let Name::Ours(name) = canonical(found) {
                names.insert(name, found.clone());
            }
        }
        let hugging_face = index
            .tensors
            .iter()
            .any(|(name, entry)| name.ends_with("conv1d.weight") && entry.shape.last().is_some_and(|last| *last != 1));
        let table = quantization.as_object().cloned().unwrap_or_default();
        let quantization = table.into_iter().map(|(path, value)| match canonical(&path) {
            Name::Ours(path) if value.is_object() || value.is_boolean() => (path, value),
            _ => (path, value),
        });
        let quantization = quantization.collect();
        Ok(Self { index, names, claimed: RefCell::default(), quantization, hugging_face })
    }

    /// A tensor that may be absent.
    pub fn find(&self, name: &str) -> Option<&Entry> {
        let entry = self.index.tensors.get(self.names.get(name)?)?;
        self.claimed.borrow_mut().insert(name.to_string());
        Some(entry)
    }

    /// A tensor that must be there.
    pub fn get(&self, name: &str) -> Result<&Entry, ModelError> {
        let missing = || StoreError::Missing { name: name.into(), dir: self.index.dir.clone() };
        Ok(self.find(name).ok_or_else(missing)?)
    }

    /// Fails if a tensor of the text model is left that nobody has claimed.
    pub fn finish(&self) -> Result<(), ModelError> {
        let claimed = self.claimed.borrow();
        let Some((_, found)) = self.names.iter().find(|(name, _)| !claimed.contains(*name)) else { return Ok(()) };
        let file = self.index.tensors.get(found).map(|entry| self.index.path(entry).to_path_buf());
        Err(StoreError::Unknown { name: found.clone(), file: file.unwrap_or_default() }.into())
    }

    /// Says that `name` is not as it should be.
    pub fn mismatch(&self, name: &str, entry: &Entry, expected: String) -> ModelError {
        let found = format!("{:?} {:?}", entry.dtype, entry.shape);
        let file = self.index.path(entry).to_path_buf();
        StoreError::Mismatch { name: name.into(), file, expected, found }.into()
    }

    /// A small tensor of floats, expected to have `len` values in any shape.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let entry = self.get(name)?;
        let Some(float) = float(entry.dtype).filter(|_| entry.shape.iter().product::<usize>() == len) else {
            return Err(self.mismatch(name, entry, format!("{len} floats")));
        };
        let bytes = self.read(entry)?;
        Ok((0..len).map(|index| float.get(&bytes, index)).collect())
    }

    /// A norm's effective weight.
    pub fn norm(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut weight = self.vector(name, len)?;
        if self.hugging_face {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        Ok(weight)
    }

    fn read(&self, entry: &Entry) -> Result<Vec<u8>, ModelError> {
        let mut bytes = vec![0; entry.len];
        self.read_into(entry, &mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&self, entry: &Entry, bytes: &mut [u8]) -> Result<(), ModelError> {
        let path = self.index.path(entry);
        let read = File::open(path).and_then(|file| file.read_exact_at(bytes, entry.offset));
        Ok(read.map_err(|source| StoreError::Io { path: path.to_path_buf(), source })?)
    }

    /// An unquantised tensor `[lead.., rows, cols]` that is called `name`, without `.weight`.
    pub fn dense(&self, name: &str, shape: &[usize]) -> Result<Layout, ModelError> {
        let entry = self.get(name)?;
        let (Some(float), [.., rows, cols]) = (float(entry.dtype).filter(|_| entry.shape == shape), shape) else {
            return Err(self.mismatch(name, entry, format!("floats {shape:?}")));
        };
        Ok(Layout { codes: Codes::Dense(float), rows: *rows, cols: *cols, entries: [Some(entry.clone()), None, None] })
    }

    /// How the matrix at `path` (`[lead.., rows, cols]`) is stored. Shapes decide; the `quantization` table is checked
    /// against them, since files exist whose table is out of date.
    pub fn layout(&self, path: &str, lead: &[usize], rows: usize, cols: usize) -> Result<Layout, ModelError> {
        let name = format!("{path}.weight");
        let weight = self.get(&name)?;
        let Some(scales) = self.find(&format!("{path}.scales")) else {
            let expected = [lead, &[rows, cols]].concat();
            let Some(float) = float(weight.dtype).filter(|_| weight.shape == expected) else {
                return Err(self.mismatch(&name, weight, format!("floats {expected:?}")));
            };
            return Ok(Layout { codes: Codes::Dense(float), rows, cols, entries: [Some(weight.clone()), None, None] });
        };
        let groups = scales.shape.last().copied().unwrap_or(0);
        let words = weight.shape.last().copied().unwrap_or(0);
        let (group, bits) = (cols.checked_div(groups).unwrap_or(0), (words * 32).checked_div(cols).unwrap_or(0));
        let codes = match (scales.dtype, bits, group) {
            (Dtype::U8, 4, 32) => Some(Codes::Mxfp4),
            (Dtype::U8, 4, 16) => Some(Codes::Nvfp4),
            (Dtype::U8, 8, 32) => Some(Codes::Mxfp8),
            (dtype, 2..=6 | 8, 32 | 64 | 128) => {
                float(dtype).map(|scale| Codes::Affine { bits: bits as u8, group: group as u16, scale })
            }
            _ => None,
        };
        let shape = |last: usize| [lead, &[rows, last]].concat();
        let expected = format!("packed codes for {:?}", shape(cols));
        let Some(codes) = codes.filter(|_| {
            weight.dtype == Dtype::U32
                && weight.shape == shape(cols * bits / 32)
                && scales.shape == shape(groups)
                && groups * group == cols
                && words * 32 == cols * bits
        }) else {
            return Err(self.mismatch(&name, weight, expected));
        };
        let biases = match codes {
            Codes::Affine { .. } => {
                let name = format!("{path}.biases");
                let biases = self.get(&name)?;
                if (biases.dtype, &biases.shape) != (scales.dtype, &scales.shape) {
                    return Err(self.mismatch(&name, biases, format!("{:?} {:?}", scales.dtype, scales.shape)));
                }
                Some(biases.clone())
            }
            _ => None,
        };
        self.compare_with_table(path, codes, bits);
        Ok(Layout { codes, rows, cols, entries: [Some(weight.clone()), Some(scales.clone()), biases] })
    }

    /// Warns where the `quantization` table contradicts the shapes.
    fn compare_with_table(&self, path: &str, codes: Codes, bits: usize) {
        let table = self.quantization.get(path).and_then(|value| value.as_object()).unwrap_or(&self.quantization);
        let said = |key: &str| table.get(key).and_then(serde_json::Value::as_u64);
        let mode = table.get("mode").and_then(serde_json::Value::as_str).unwrap_or("affine");
        let is = match codes {
            Codes::Mxfp4 => "mxfp4",
            Codes::Nvfp4 => "nvfp4",
            Codes::Mxfp8 => "mxfp8",
            _ => "affine",
        };
        if said("bits").is_some_and(|said| said != bits as u64)
            || said("group_size").is_some_and(|said| said != codes.group() as u64)
            || mode != is
        {
            tracing::warn!(path, ?codes, "config.json says otherwise how this matrix is quantised; its shape decides");
        }
    }

    /// nvfp4's global scale, one a matrix (`count` matrices): `global / (6 * 448)`; else 1.
    pub fn gains(&self, path: &str, count: usize) -> Result<Vec<f32>, ModelError> {
        let name = format!("{path}.global_scale");
        if self.find(&name).is_none() {
            return Ok(vec![1.0; count]);
        }
        Ok(self.vector(&name, count)?.into_iter().map(|global| global / (6.0 * 448.0)).collect())
    }
}

/// Where matrix `index` of a stack lies.
pub fn pieces(layout: &Layout, index: usize) -> [Piece; 3] {
    let bytes = layout.codes.row_bytes(layout.cols);
    std::array::from_fn(|part| match &layout.entries[part] {
        None => Piece::default(),
        Some(entry) => {
            let len = bytes[part] * layout.rows;
            Piece { file: entry.file as u32, offset: entry.offset + (index * len) as u64, len }
        }
    })
}

/// An expert's nine pieces from its three projections.
pub fn expert(projections: [[Piece; 3]; 3]) -> [Piece; PIECES] {
    std::array::from_fn(|index| projections[index / 3][index % 3])
}

fn float(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::F32 => Some(Float::F32),
        Dtype::F16 => Some(Float::F16),
        Dtype::Bf16 => Some(Float::Bf16),
        _ => None,
    }
}

/// Gathers the trunk's matrices in one slab. Run the same claims twice: first with [`Trunk::measure`], which reads nothing
/// and learns the size, then with [`Trunk::read`].
pub struct Trunk<'a> {
    pub from: &'a Checkpoint,
    slab: Option<Filling>,
    /// Bytes taken so far.
    len: usize,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl<'a> Trunk<'a> {
    /// Reads nothing: every matrix it returns is empty.
    pub fn measure(from: &'a Checkpoint, progress: &'a mut dyn FnMut(u64, u64)) -> Self {
        Self { from, slab: None, len: 0, progress }
    }

    /// Reads into a slab of `len` bytes, as measured.
    pub fn read(from: &'a Checkpoint, len: usize, progress: &'a mut dyn FnMut(u64, u64)) -> Result<Self, ModelError> {
        let refused = |error| ModelError::Memory(format!("no memory for a trunk of {len} bytes: {error}"));
        Ok(Self { from, slab: Some(Filling::new(len).map_err(refused)?), len: 0, progress })
    }

    /// Bytes taken so far.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The matrix at `path`, `[rows, cols]`.
    pub fn weight(&mut self, path: &str, rows: usize, cols: usize) -> Result<Weight, ModelError> {
        let Layout { codes, entries, .. } = self.from.layout(path, &[], rows, cols)?;
        let gain = self.from.gains(path, 1)?.first().copied().unwrap_or(1.0);
        let mut parts = Vec::with_capacity(3);
        for entry in &entries {
            parts.push(self.span(entry.as_ref())?);
        }
        let parts = parts.try_into().map_err(|_| ModelError::Memory("three parts a matrix".into()))?;
        Ok(Weight { codes, rows, cols, gain, parts })
    }

    fn span(&mut self, entry: Option<&Entry>) -> Result<Span, ModelError> {
        self.len = self.len.next_multiple_of(ALIGN) + entry.map_or(0, |entry| entry.len);
        let (Some(entry), Some(slab)) = (entry, &mut self.slab) else {
            return Span::from_bytes(&[]).map_err(|error| ModelError::Memory(error.to_string()));
        };
        let span = slab.fill(entry.len, ALIGN, |bytes| self.from.read_into(entry, bytes))?;
        let (done, total) = slab.progress();
        (self.progress)(done as u64, total as u64);
        Ok(span)
    }
}
