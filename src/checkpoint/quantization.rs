//! The quantisation of a matrix. Its shapes and the type of its scales say it; `config.json` is compared with them.
//!
//! Converters write the `quantization` table in many ways, and some write a wrong one (JANG names the least width of
//! all tensors, others rename tensors afterwards). Bits and group size follow from the shapes without doubt, since the
//! architecture says how many columns a matrix has: where the table says otherwise, it is out of date. A mode does not
//! follow from shapes alone, so a contradiction there is an error: the numbers would be read as other numbers.

use super::{
    index::{Dtype, TensorEntry},
    names::{TensorName, canonical_name},
};
use crate::ops::{Float, WeightFormat};
use serde_json::Value;
use std::{cell::RefCell, collections::BTreeMap};

/// The table's entry for one matrix, or for all.
#[derive(Debug, Clone, Default, PartialEq)]
struct TableEntry {
    bits: Option<u64>,
    group: Option<u64>,
    mode: Option<String>,
}

/// `config.json`'s `quantization`.
#[derive(Debug, Default)]
pub struct QuantizationTable {
    every: TableEntry,
    /// By canonical path; `None` is `false`: not quantised.
    each: BTreeMap<String, Option<TableEntry>>,
    /// Paths of matrices that are stored otherwise than it says.
    differing: RefCell<Vec<String>>,
}

/// Methods with other tensors than MLX's; a checkpoint of one of them is told by its name.
const FOREIGN: [&str; 10] =
    ["fp8", "awq", "gptq", "compressed-tensors", "modelopt", "bitnet", "bitsandbytes", "hqq", "quark", "mxtq"];

impl QuantizationTable {
    /// # Errors
    /// A method that is not MLX's, or two entries for one matrix that do not agree.
    pub fn new(json: &Value) -> Result<Self, String> {
        let said = |table: &Value| TableEntry {
            bits: table.get("bits").and_then(Value::as_u64),
            group: table.get("group_size").and_then(Value::as_u64),
            mode: table.get("mode").and_then(Value::as_str).map(str::to_owned),
        };
        let every = said(json);
        let method = json.get("quant_method").and_then(Value::as_str).unwrap_or_default();
        if every.bits.is_none() && FOREIGN.contains(&method) {
            return Err(format!("the quantisation method {method} is not supported, only MLX's"));
        }
        let mut each = BTreeMap::new();
        for (path, value) in json.as_object().into_iter().flatten() {
            let Some(path) = normal(path) else { continue };
            let entry = match value {
                Value::Object(_) => Some(said(value)),
                Value::Bool(false) => None,
                _ => continue,
            };
            if each.insert(path.clone(), entry.clone()).is_some_and(|before| before != entry) {
                return Err(format!("quantization says two things of {path}"));
            }
        }
        Ok(Self { every, each, differing: RefCell::default() })
    }

    /// Compares what the table says of the matrix at a canonical path with how it is stored.
    ///
    /// # Errors
    /// The encoding that is expected instead of `codes`, in words.
    pub fn compare(&self, path: &str, codes: WeightFormat) -> Result<(), String> {
        let exact = self.each.get(path);
        let quantised = !matches!(codes, WeightFormat::Dense(_));
        let said = match exact {
            Some(None) if quantised => return Err("no scales, since config.json says that it is not quantised".into()),
            Some(None) => return Ok(()),
            Some(Some(said)) => said,
            // Without an entry a plain matrix is a plain matrix, and mlx-lm infers the rest, too.
            None if !quantised => return Ok(()),
            None => &self.every,
        };
        let Some((bits, mode)) = width(codes) else {
            self.differing.borrow_mut().push(path.into());
            return Ok(());
        };
        let differs = said.mode.as_ref().is_some_and(|said| said != mode);
        if differs && exact.is_some() {
            return Err(format!("mode {}, as config.json says", said.mode.as_deref().unwrap_or_default()));
        }
        let group = codes.group() as u64;
        if differs || said.bits.is_some_and(|said| said != bits) || said.group.is_some_and(|said| said != group) {
            self.differing.borrow_mut().push(path.into());
        }
        Ok(())
    }

    /// Says in one line of the log which matrices are stored otherwise than the table says, if any are.
    pub fn report(&self) {
        let differing = self.differing.borrow();
        if let Some(first) = differing.first() {
            tracing::info!(
                matrices = differing.len(),
                first,
                "config.json says otherwise how these are quantised; their shapes decide"
            );
        }
    }
}

/// The canonical form of a table's key; `None` if the matrix is none of ours, or it is no matrix.
fn normal(key: &str) -> Option<String> {
    let TensorName::Text(path) = canonical_name(key.strip_suffix(".weight").unwrap_or(key)) else { return None };
    let stacked =
        ["gate_proj", "up_proj", "down_proj"].iter().any(|part| path.ends_with(&format!(".mlp.experts.{part}")));
    Some(if stacked { path.replace(".mlp.experts.", ".mlp.switch_mlp.") } else { path })
}

/// Bits a code and the mode's name; `None` where nothing is quantised.
fn width(codes: WeightFormat) -> Option<(u64, &'static str)> {
    match codes {
        WeightFormat::Dense(_) => None,
        WeightFormat::Affine { bits, .. } => Some((bits.into(), "affine")),
        WeightFormat::Mxfp4 => Some((4, "mxfp4")),
        WeightFormat::Nvfp4 => Some((4, "nvfp4")),
        WeightFormat::Mxfp8 => Some((8, "mxfp8")),
    }
}

/// The encoding of a matrix of `cols` columns, from its packed codes and their scales. The leading dimensions are the
/// caller's to compare.
///
/// # Errors
/// An encoding that is not known, in words.
pub fn infer(
    cols: usize,
    weight: &TensorEntry,
    scales: &TensorEntry,
    has_biases: bool,
) -> Result<WeightFormat, String> {
    let last = |entry: &TensorEntry| entry.shape.last().copied().filter(|last| *last > 0);
    let (Some(words), Some(groups)) = (last(weight), last(scales)) else {
        return Err("it is empty".into());
    };
    let packed = words.checked_mul(32).filter(|bits| weight.dtype == Dtype::U32 && bits.is_multiple_of(cols));
    let (Some(packed), true) = (packed, cols.is_multiple_of(groups)) else {
        return Err(format!("{words} words of codes and {groups} scales a row are no {cols} columns"));
    };
    let (bits, group) = (packed / cols, cols / groups);
    match (scales.dtype, bits, group) {
        (Dtype::U8, ..) if has_biases => {
            Err("scales of one byte, as mxfp4 has them, and biases, as affine has them".into())
        }
        (Dtype::U8, 4, 32) => Ok(WeightFormat::Mxfp4),
        (Dtype::U8, 4, 16) => Ok(WeightFormat::Nvfp4),
        (Dtype::U8, 8, 32) => Ok(WeightFormat::Mxfp8),
        (dtype, 2..=6 | 8, 32 | 64 | 128) if float(dtype).is_some() => {
            let scale = float(dtype).unwrap_or(Float::F32);
            Ok(WeightFormat::Affine { bits: bits as u8, group: group as u16, scale })
        }
        (dtype, ..) => Err(format!("{bits} bits in groups of {group} with {dtype:?} scales")),
    }
}

/// The float type of a tensor's elements, if they are floats that we read.
pub fn float(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::F32 => Some(Float::F32),
        Dtype::F16 => Some(Float::F16),
        Dtype::Bf16 => Some(Float::Bf16),
        _ => None,
    }
}
