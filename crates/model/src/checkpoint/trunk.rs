//! Loads weights from safetensors files into memory.
//!
//! A [`Checkpoint`] finds tensors by canonical name, checks their shapes and infers their quantization. A tensor that
//! the model does not use is an error. A [`TrunkLoader`] loads the trunk (all weights except the experts) into a slab.

use super::{
    names::canonical_name,
    quantization::{QuantizationTable, float, foreign_format, infer_format},
};
use crate::{
    checkpoint::index::{Dtype, Index, TensorEntry, zero_weights},
    error::ModelError,
};
use moestro_base::{error::StoreError, platform::open_regular_file};
use moestro_compute::{
    device::{Region, Slab},
    experts::{PIECES, Piece},
    ops::{FP8_BLOCK, ReservedBuffer, Weight, WeightFormat},
};
use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    os::unix::fs::FileExt,
    path::Path,
    sync::Arc,
};

/// If the mean weight of the query and key norms exceeds this value, a converter has probably added 1 twice. The value
/// is halfway between the usual mean, 1.75, and 2.75.
const SHIFTED_TWICE: f32 = 2.25;

/// Number of bytes of two tensors that are compared at once.
const COMPARED_BYTES: usize = 4 << 20;
/// Endings of the names of tensors that are not needed: frequencies that follow from the configuration, and scales for
/// caches of keys and values and for activations in FP8, which have more bits here.
const UNNEEDED: [&str; 7] = [
    "rotary_emb.inv_freq",
    "rotary_emb.original_inv_freq",
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".activation_scale",
    ".input_scale",
];
/// Parts of a matrix in all formats. The first is the codes or values.
const MATRIX_PARTS: [&str; 6] = ["weight", "scales", "biases", "global_scale", "weight_scale_inv", "weight_scale"];

/// Alignment of trunk tensors in bytes: the size of a cache line.
const ALIGN: usize = 64;

/// A checkpoint that records which tensors are used.
pub struct Checkpoint {
    pub index: Index,
    /// Name of each tensor in the files, by canonical name.
    names: BTreeMap<String, String>,
    /// Canonical names of the tensors that were used.
    used: RefCell<BTreeSet<String>>,
    table: QuantizationTable,
    /// Mean of the effective weights of each query and key norm.
    norms: RefCell<Vec<f32>>,
    /// True for Hugging Face's layout, where norms store `w - 1` and convolutions have shape `[C, 1, K]`. False for
    /// MLX's layout. `None` if the layout is unknown.
    pub hugging_face: Option<bool>,
}

/// Format and location of a matrix or of a stack of matrices in the checkpoint.
#[derive(Debug, Clone)]
pub struct MatrixLayout {
    pub codes: WeightFormat,
    pub rows: usize,
    pub cols: usize,
    /// Codes, scales and biases. An entry is `None` if the format does not have that part.
    pub entries: [Option<TensorEntry>; 3],
}

impl Checkpoint {
    /// `quantization` is the value of the key `quantization` in `config.json`, or null.
    pub fn open(index: Index, quantization: &serde_json::Value) -> Result<Self, ModelError> {
        Self::open_as(index, quantization, canonical_name)
    }

    /// Like [`Checkpoint::open`], but `name_of` maps names in the files to canonical names.
    pub fn open_as(
        index: Index,
        quantization: &serde_json::Value,
        name_of: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ModelError> {
        let mut names = BTreeMap::new();
        for found in index.tensors.keys() {
            let Some(name) = name_of(found) else { continue };
            if let Some(why) = foreign_format(found) {
                return Err(ModelError::Config(why));
            }
            if let Some(other) = names.insert(name, found.clone()) {
                let why = format!("{other} and {found} are two names of the same tensor");
                return Err(StoreError::NotACheckpoint { path: index.dir.clone(), why }.into());
            }
        }
        let hugging_face = is_hugging_face(&index);
        let table = match QuantizationTable::new(quantization) {
            Ok(table) => table,
            // A model that was fine-tuned in a quantized form and merged may keep the table.
            Err(why) if index.tensors.values().all(|entry| float(entry.dtype).is_some()) => {
                tracing::warn!("no matrix is quantized; ignoring the quantization in config.json: {why}");
                QuantizationTable::default()
            }
            Err(why) => return Err(ModelError::Config(why)),
        };
        Ok(Self { index, names, used: RefCell::default(), table, norms: RefCell::default(), hugging_face })
    }

    /// Finds a tensor and marks it as used. `None` if the checkpoint does not have the tensor.
    pub fn find(&self, name: &str) -> Option<&TensorEntry> {
        let entry = self.index.tensors.get(self.names.get(name)?)?;
        self.used.borrow_mut().insert(name.to_string());
        Some(entry)
    }

    /// True if the checkpoint has the tensor. Does not mark the tensor as used.
    pub fn has(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    /// Finds a tensor and marks it as used.
    ///
    /// # Errors
    /// The checkpoint does not have the tensor.
    pub fn get(&self, name: &str) -> Result<&TensorEntry, ModelError> {
        Ok(self.find(name).ok_or_else(|| self.index.missing_tensor(name))?)
    }

    /// Uses the matrix at `from` under the name `to`.
    pub fn rename_matrix(&mut self, from: &str, to: &str) {
        for part in MATRIX_PARTS {
            if let Some(found) = self.names.remove(&format!("{from}.{part}")) {
                self.names.insert(format!("{to}.{part}"), found);
            }
        }
    }

    /// Removes the matrix at `path`, as if the files did not have it.
    pub fn remove_matrix(&mut self, path: &str) {
        for part in MATRIX_PARTS {
            self.names.remove(&format!("{path}.{part}"));
        }
    }

    /// True if two matrices have the same format and the same bytes.
    pub fn are_equal_matrices(&self, one: &str, other: &str) -> Result<bool, ModelError> {
        for part in MATRIX_PARTS {
            let entry = |path: &str| self.index.tensors.get(self.names.get(&format!("{path}.{part}"))?);
            let are_equal = match (entry(one), entry(other)) {
                (None, None) => true,
                (Some(one), Some(other)) => self.are_equal_tensors(one, other)?,
                _ => false,
            };
            if !are_equal {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn are_equal_tensors(&self, one: &TensorEntry, other: &TensorEntry) -> Result<bool, ModelError> {
        if (one.dtype, &one.shape) != (other.dtype, &other.shape) {
            return Ok(false);
        }
        let part = |entry: &TensorEntry, at: usize| {
            let len = (entry.len - at).min(COMPARED_BYTES);
            self.read(&TensorEntry { offset: entry.offset + at as u64, len, ..entry.clone() })
        };
        for at in (0..one.len).step_by(COMPARED_BYTES) {
            if part(one, at)? != part(other, at)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Fails if a tensor was not used. Logs warnings about suspicious values. Must be called after all tensors were
    /// requested.
    pub fn finish(&self) -> Result<(), ModelError> {
        self.table.report();
        if let Some(mean) = self.shifted_twice() {
            tracing::warn!(
                mean,
                "the query and key norms are unusually large: an old converter may have added 1 twice; \
                 if answers are poor, convert the checkpoint again"
            );
        }
        let used = self.used.borrow();
        let is_unknown = |(name, found): &(&String, &String)| {
            let is_optional = self.index.tensors.get(*found).is_none_or(|entry| self.index.is_optional(entry));
            !used.contains(*name) && !is_optional && !UNNEEDED.iter().any(|ending| name.ends_with(ending))
        };
        let Some((_, found)) = self.names.iter().find(is_unknown) else { return Ok(()) };
        let file = self.index.tensors.get(found).map(|entry| self.index.path(entry).to_path_buf());
        Err(StoreError::Unknown { name: found.clone(), file: file.unwrap_or_default() }.into())
    }

    /// The error for a tensor whose type or shape is not `expected`.
    pub fn mismatch(&self, name: &str, entry: &TensorEntry, expected: String) -> ModelError {
        let found = format!("{:?} {:?}", entry.dtype, entry.shape);
        let file = self.index.path(entry).to_path_buf();
        StoreError::Mismatch { name: name.into(), file, expected, found }.into()
    }

    /// Reads a small tensor that has `len` floats in any shape. A value that is infinite or no number is an error.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let entry = self.get(name)?;
        let Some(float) = float(entry.dtype).filter(|_| entry.shape.iter().product::<usize>() == len) else {
            return Err(self.mismatch(name, entry, format!("{len} floats")));
        };
        let bytes = self.read(entry)?;
        let values: Vec<f32> = (0..len).map(|index| float.get(&bytes, index)).collect();
        if let Some(wrong) = values.iter().find(|value| !value.is_finite()) {
            let why = format!("{name} has the value {wrong}; download or convert it again");
            return Err(StoreError::NotACheckpoint { path: self.index.path(entry).into(), why }.into());
        }
        Ok(values)
    }

    /// Reads a convolution over time of each channel. `[C, 1, K]` and `[C, K, 1]` have the same order of values.
    pub fn convolution(&self, name: &str, channels: usize, width: usize) -> Result<Vec<f32>, ModelError> {
        let entry = self.get(name)?;
        let is_side = |side: &&usize| **side != 1;
        if !entry.shape.iter().filter(is_side).eq([channels, width].iter().filter(is_side)) {
            return Err(self.mismatch(name, entry, format!("floats [{channels}, {width}, 1]")));
        }
        self.vector(name, channels * width)
    }

    /// Reads a small tensor of 64-bit integers. `None` if the checkpoint does not have the tensor.
    pub fn integers(&self, name: &str) -> Result<Option<Vec<i64>>, ModelError> {
        let Some(entry) = self.find(name) else { return Ok(None) };
        if entry.dtype != Dtype::I64 {
            return Err(self.mismatch(name, entry, "64-bit integers".into()));
        }
        let bytes = self.read(entry)?;
        Ok(Some(bytes.as_chunks().0.iter().map(|word| i64::from_le_bytes(*word)).collect()))
    }

    /// Reads the effective weight of a norm: the factor by which the normalised value is multiplied.
    pub fn norm(&self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let mut weight = self.vector(name, len)?;
        let Some(hugging_face) = self.hugging_face else {
            let why =
                "cannot tell from convolutions or tensor names whether norms store w (MLX) or w - 1 (Hugging Face)"
                    .into();
            return Err(StoreError::NotACheckpoint { path: self.index.dir.clone(), why }.into());
        };
        if hugging_face {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        if name.ends_with("q_norm.weight") || name.ends_with("k_norm.weight") {
            self.norms.borrow_mut().push(weight.iter().sum::<f32>() / len.max(1) as f32);
        }
        Ok(weight)
    }

    /// The mean weight of the query and key norms, if this mean is implausibly large. In Qwen3.5 checkpoints the mean
    /// is 1.7 to 1.8 (stored as 0.7 to 0.8 by transformers). Some converters added 1 twice to checkpoints with an MTP
    /// head.
    fn shifted_twice(&self) -> Option<f32> {
        let norms = self.norms.borrow();
        let mean = norms.iter().sum::<f32>() / norms.len().max(1) as f32;
        (mean > SHIFTED_TWICE).then_some(mean)
    }

    fn read(&self, entry: &TensorEntry) -> Result<Vec<u8>, ModelError> {
        let mut bytes = vec![0; entry.len];
        self.read_into(entry, &mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&self, entry: &TensorEntry, bytes: &mut [u8]) -> Result<(), ModelError> {
        let path = self.index.path(entry);
        let read = open_regular_file(path).and_then(|file| file.read_exact_at(bytes, entry.offset));
        Ok(read.map_err(StoreError::at(path))?)
    }

    /// The layout of the unquantized tensor `name` (without the suffix `.weight`) with the given shape,
    /// `[.., rows, cols]`.
    pub fn dense(&self, name: &str, shape: &[usize]) -> Result<MatrixLayout, ModelError> {
        let entry = self.get(name)?;
        let (Some(float), [.., rows, cols]) = (float(entry.dtype).filter(|_| entry.shape == shape), shape) else {
            return Err(self.mismatch(name, entry, format!("floats {shape:?}")));
        };
        Ok(MatrixLayout {
            codes: WeightFormat::Dense(float),
            rows: *rows,
            cols: *cols,
            entries: [Some(entry.clone()), None, None],
        })
    }

    /// The layout of the matrix at `path`, with shape `[lead.., rows, cols]`.
    ///
    /// Infers the format from the shapes, because the `quantization` table of some checkpoints is out of date. Logs
    /// differences between format and table.
    pub fn layout(&self, path: &str, lead: &[usize], rows: usize, cols: usize) -> Result<MatrixLayout, ModelError> {
        let name = format!("{path}.weight");
        let weight = self.get(&name)?;
        let differs = |expected: String| self.mismatch(&name, weight, expected);
        let Some(scales) = self.find(&format!("{path}.scales")) else {
            let expected = [lead, &[rows, cols]].concat();
            if weight.dtype == Dtype::F8_E4M3 && weight.shape == expected {
                // llm-compressor writes `weight_scale`. Both names have the factor of the codes.
                let names = ["weight_scale_inv", "weight_scale"].map(|part| format!("{path}.{part}"));
                let [usual, other] = names;
                let name = if self.has(&usual) || !self.has(&other) { usual } else { other };
                let blocks = [lead, &[rows.div_ceil(FP8_BLOCK), cols.div_ceil(FP8_BLOCK)]].concat();
                let scales = self.get(&name)?;
                // ModelOpt writes `[rows, 1, columns, 1]`.
                let [down, across] = [blocks[lead.len()], blocks[lead.len() + 1]];
                let has_blocks = scales.shape == blocks || scales.shape == [lead, &[down, 1, across, 1]].concat();
                let Some(scale) = float(scales.dtype).filter(|_| has_blocks) else {
                    let expected = format!("a scale for each block of {FP8_BLOCK} rows and columns, {blocks:?}");
                    return Err(self.mismatch(&name, scales, expected));
                };
                let codes = WeightFormat::Fp8(Some(scale));
                let entries = [Some(weight), Some(scales), None];
                return Ok(MatrixLayout { codes, rows, cols, entries: entries.map(|entry| entry.cloned()) });
            }
            let Some(float) = float(weight.dtype).filter(|_| weight.shape == expected) else {
                return Err(differs(format!("floats {expected:?}")));
            };
            let codes = WeightFormat::Dense(float);
            self.table.compare(path, codes).map_err(differs)?;
            return Ok(MatrixLayout { codes, rows, cols, entries: [Some(weight.clone()), None, None] });
        };
        let has_biases = self.names.contains_key(&format!("{path}.biases"));
        let shape = |last: usize| [lead, &[rows, last]].concat();
        let expected = |why: String| differs(format!("packed codes for {:?}{why}", shape(cols)));
        let fits = |entry: &TensorEntry| entry.shape.last().is_some_and(|&last| entry.shape == shape(last));
        if !fits(weight) || !fits(scales) {
            return Err(expected(format!(" (its scales are {:?})", scales.shape)));
        }
        let codes = infer_format(cols, weight, scales, has_biases).map_err(|why| expected(format!(", not {why}")))?;
        let biases = match codes {
            WeightFormat::Affine { .. } => {
                let name = format!("{path}.biases");
                let biases = self.get(&name)?;
                if (biases.dtype, &biases.shape) != (scales.dtype, &scales.shape) {
                    return Err(self.mismatch(&name, biases, format!("{:?} {:?}", scales.dtype, scales.shape)));
                }
                Some(biases.clone())
            }
            _ => None,
        };
        self.table.compare(path, codes).map_err(differs)?;
        Ok(MatrixLayout { codes, rows, cols, entries: [Some(weight.clone()), Some(scales.clone()), biases] })
    }

    /// The global scale of each of `count` matrices: `global_scale / (6 * 448)` for nvfp4, 1 for other formats.
    pub fn global_scales(&self, path: &str, count: usize) -> Result<Vec<f32>, ModelError> {
        let name = format!("{path}.global_scale");
        if self.find(&name).is_none() {
            return Ok(vec![1.0; count]);
        }
        Ok(self.vector(&name, count)?.into_iter().map(|global| global / (6.0 * 448.0)).collect())
    }
}

/// True for Hugging Face's layout, false for MLX's layout. Decides by the shape of a convolution that is wider than 1.
/// If there is no such convolution, decides by tensor names. A convolution without the dimension of 1 does not show the
/// layout.
fn is_hugging_face(index: &Index) -> Option<bool> {
    let convs = index.tensors.iter().filter(|(name, _)| name.ends_with("conv1d.weight")).map(|(_, entry)| &entry.shape);
    let convs = convs.filter(|shape| shape.len() == 3);
    let wide = convs.filter(|shape| shape.iter().skip(1).product::<usize>() > 1);
    let by_shape = wide.map(|shape| shape.last().is_some_and(|last| *last != 1)).reduce(|a, b| a || b);
    let named = |prefix: &str| index.tensors.keys().any(|name| name.starts_with(prefix));
    by_shape
        .or_else(|| named("model.language_model.").then_some(true))
        .or_else(|| named("language_model.").then_some(false))
}

/// The byte ranges of codes, scales and biases of matrix `index` in a stack of matrices.
pub fn matrix_pieces(layout: &MatrixLayout, index: usize) -> [Piece; 3] {
    let bytes = layout.codes.part_bytes(layout.rows, layout.cols);
    std::array::from_fn(|part| match &layout.entries[part] {
        None => Piece::default(),
        Some(entry) => {
            let len = bytes[part];
            Piece { file: entry.file as u32, offset: entry.offset + (index * len) as u64, len }
        }
    })
}

/// Combines the pieces of an expert's three projections (gate, up, down).
pub fn expert_pieces(projections: [[Piece; 3]; 3]) -> [Piece; PIECES] {
    std::array::from_fn(|index| projections[index / 3][index % 3])
}

/// A filled buffer of weights. The [`Region`]s of the weights refer to the buffer by its reserved number.
pub struct TrunkBuffer {
    pub buffer: ReservedBuffer,
    pub slab: Arc<Slab>,
}

/// Loads the trunk (all weights except the routed experts): its matrices into a slab, its small vectors into a
/// second slab.
///
/// The same sequence of calls must be made twice: first on a loader from [`TrunkLoader::measure`], which computes the
/// size of the slab, then on a loader from [`TrunkLoader::read`], which reads the matrices.
pub struct TrunkLoader<'a> {
    pub from: &'a Checkpoint,
    slab: Option<Slab>,
    /// Total bytes of the matrices so far.
    len: usize,
    /// Names and files of norms, of convolutions, and of matrices of which a part (codes, scales or biases) is zero,
    /// until they are reported.
    zero: Vec<(String, &'a Path)>,
    vectors: Vec<f32>,
    /// The buffers of matrices and of small vectors.
    buffers: [ReservedBuffer; 2],
    progress: Option<&'a mut dyn FnMut(u64, u64)>,
}

impl<'a> TrunkLoader<'a> {
    /// A loader that computes sizes. The weights that it returns must not be used.
    pub fn measure(from: &'a Checkpoint) -> Self {
        Self {
            from,
            slab: None,
            len: 0,
            zero: Vec::new(),
            vectors: Vec::new(),
            buffers: [ReservedBuffer::Matrices, ReservedBuffer::Vectors],
            progress: None,
        }
    }

    /// A loader that reads into a slab of `len` bytes, the measured size.
    pub fn read(from: &'a Checkpoint, len: usize) -> Result<Self, ModelError> {
        Ok(Self { slab: Some(new_slab(len)?), ..Self::measure(from) })
    }

    /// After each matrix, calls `progress` with the bytes read and the total bytes.
    pub fn with_progress(self, progress: &'a mut dyn FnMut(u64, u64)) -> Self {
        Self { progress: Some(progress), ..self }
    }

    /// Sets the buffers of matrices and of small vectors.
    pub fn with_buffers(self, buffers: [ReservedBuffer; 2]) -> Self {
        Self { buffers, ..self }
    }

    /// Total bytes of the matrices so far.
    #[allow(clippy::len_without_is_empty)] // No code asks whether a trunk is empty.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Checks that the weights of `what`, which were read last, are not zero.
    ///
    /// # Errors
    /// A norm, or a part of a matrix (codes, scales or biases), is zero. Programs that download reserve a file's whole
    /// size at the start, so the file looks complete.
    pub fn check_not_zero(&mut self, what: &str) -> Result<(), ModelError> {
        let Some((name, file)) = std::mem::take(&mut self.zero).into_iter().next() else { return Ok(()) };
        Err(zero_weights(file, &format!("{what} ({name})")).into())
    }

    /// Logs that weights which were read last are zero. A model that is made by hand may have them.
    pub fn report_zero(&mut self) {
        let zero = std::mem::take(&mut self.zero);
        if let Some((name, file)) = zero.first() {
            tracing::warn!(count = zero.len(), file = %file.display(), "{name} is zero, as in a file whose download did not end");
        }
    }

    /// Returns the filled buffers: first the matrices, then the vectors.
    pub fn finish(self) -> Result<[TrunkBuffer; 2], ModelError> {
        let mut vectors = new_slab(self.vectors.len() * 4)?;
        for (into, value) in vectors.as_mut_slice().chunks_exact_mut(4).zip(&self.vectors) {
            into.copy_from_slice(&value.to_le_bytes());
        }
        let matrices = self.slab.map_or_else(|| new_slab(0), Ok)?;
        let [first, second] = self.buffers;
        let filled = |buffer, slab| TrunkBuffer { buffer, slab: Arc::new(slab) };
        Ok([filled(first, matrices), filled(second, vectors)])
    }

    /// Loads the matrix at `path` with shape `[rows, cols]`.
    pub fn weight(&mut self, path: &str, rows: usize, cols: usize) -> Result<Weight, ModelError> {
        let layout = self.from.layout(path, &[], rows, cols)?;
        self.take(path, &layout)
    }

    /// Loads the unquantized matrix `name` (without the suffix `.weight`) with shape `[rows, cols]`.
    pub fn dense(&mut self, name: &str, rows: usize, cols: usize) -> Result<Weight, ModelError> {
        let layout = self.from.dense(name, &[rows, cols])?;
        self.take(name, &layout)
    }

    fn take(&mut self, path: &str, layout: &MatrixLayout) -> Result<Weight, ModelError> {
        let &MatrixLayout { codes, rows, cols, ref entries } = layout;
        let global_scale = self.from.global_scales(path, 1)?.first().copied().unwrap_or(1.0);
        let mut parts = [Region::default(); 3];
        let from = self.from;
        for (part, entry) in parts.iter_mut().zip(entries) {
            let Some(entry) = entry else { continue };
            *part = self.append(path, entry, entry.len, |bytes| from.read_into(entry, bytes))?;
        }
        Ok(Weight { codes, rows, cols, global_scale, parts })
    }

    /// Loads the matrix at `path` with shape `[rows, parts * cols]`, and splits it into `parts` matrices of `cols`
    /// columns.
    pub fn columns(&mut self, path: &str, rows: usize, cols: usize, parts: usize) -> Result<Vec<Weight>, ModelError> {
        let MatrixLayout { codes, entries, .. } = self.from.layout(path, &[], rows, parts * cols)?;
        if !cols.is_multiple_of(codes.group().max(32)) || matches!(codes, WeightFormat::Fp8(_)) {
            return Err(ModelError::Config(format!("cannot split {path} every {cols} columns")));
        }
        let global_scale = self.from.global_scales(path, 1)?.first().copied().unwrap_or(1.0);
        let from = self.from;
        let widths = codes.row_bytes(cols);
        let mut found = Vec::with_capacity(parts);
        for part in 0..parts {
            let mut regions = [Region::default(); 3];
            for ((region, entry), width) in regions.iter_mut().zip(&entries).zip(widths) {
                let Some(entry) = entry else { continue };
                *region = self.append(path, entry, rows * width, |bytes| {
                    let all = from.read(entry)?;
                    for (row, from) in bytes.chunks_exact_mut(width).zip(all.chunks_exact(parts * width)) {
                        row.copy_from_slice(&from[part * width..(part + 1) * width]);
                    }
                    Ok(())
                })?;
            }
            found.push(Weight { codes, rows, cols, global_scale, parts: regions });
        }
        Ok(found)
    }

    /// Loads the effective weight of a norm.
    pub fn norm(&mut self, name: &str, len: usize) -> Result<Region, ModelError> {
        let values = self.from.norm(name, len)?;
        self.note_zero(name, &values)?;
        Ok(self.vector(&values))
    }

    /// Reads a norm whose weight is stored as it is in every layout.
    pub fn plain_norm(&mut self, name: &str, len: usize) -> Result<Vec<f32>, ModelError> {
        let values = self.from.vector(name, len)?;
        self.note_zero(name, &values)?;
        Ok(values)
    }

    /// Notes that the factors `values` of the tensor `name` are zero, until this is reported. A layer with them does
    /// nothing.
    pub fn note_zero(&mut self, name: &str, values: &[f32]) -> Result<(), ModelError> {
        if self.slab.is_some() && values.iter().all(|value| *value == 0.0) {
            self.zero.push((name.into(), self.from.index.path(self.from.get(name)?)));
        }
        Ok(())
    }

    /// Appends a small vector to the buffer of vectors.
    pub fn vector(&mut self, values: &[f32]) -> Region {
        let offset = self.vectors.len() * 4;
        self.vectors.extend(values);
        self.vectors.resize(self.vectors.len().next_multiple_of(ALIGN / 4), 0.0);
        Region { buffer: self.buffers[1].number(), offset, len: values.len() * 4 }
    }

    /// Appends `len` bytes of `entry`, a part of the matrix `path`, to the slab, which `fill` writes. A loader that
    /// computes sizes does not call `fill`.
    fn append(
        &mut self,
        path: &str,
        entry: &TensorEntry,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), ModelError>,
    ) -> Result<Region, ModelError> {
        let offset = self.len.next_multiple_of(ALIGN);
        self.len = offset + len;
        if let Some(slab) = &mut self.slab {
            let bytes = &mut slab.as_mut_slice()[offset..self.len];
            fill(bytes)?;
            if self.zero.last().is_none_or(|last| last.0 != path) && bytes.iter().all(|byte| *byte == 0) {
                self.zero.push((path.into(), self.from.index.path(entry)));
            }
            if let Some(progress) = &mut self.progress {
                progress(self.len as u64, slab.len() as u64);
            }
        }
        Ok(Region { buffer: self.buffers[0].number(), offset, len })
    }
}

fn new_slab(len: usize) -> Result<Slab, ModelError> {
    Slab::new(len).map_err(|error| ModelError::Memory(format!("cannot allocate {len} bytes for the trunk: {error}")))
}
