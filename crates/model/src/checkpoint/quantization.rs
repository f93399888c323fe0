//! Infers the quantization of a matrix from its shapes and the type of its scales, and compares the result with
//! `config.json`. Recognises the tensors of formats that are not supported.
//!
//! The `quantization` table of some checkpoints is wrong: the converter JANG writes the smallest number of bits
//! of all tensors, and some converters rename tensors without updating the table. Since the architecture defines the
//! number of columns of a matrix, bits and group size follow from the shapes. If the table has other values, they are
//! ignored. The quantization mode cannot be inferred from shapes alone. If a matrix has its own entry with another
//! mode, that is therefore an error, because the weights could be decoded wrongly.

use super::{
    index::{Dtype, TensorEntry},
    names::canonical_name,
};
use moestro_compute::ops::{FP8_BLOCK, Float, WeightFormat};
use serde_json::{Value, json};
use std::{cell::RefCell, collections::BTreeMap};

/// An entry of the table: the format of one matrix, or the default format of all matrices.
#[derive(Debug, Clone, Default, PartialEq)]
struct TableEntry {
    bits: Option<u64>,
    group: Option<u64>,
    mode: Option<String>,
}

/// The `quantization` table of `config.json`.
#[derive(Debug, Default)]
pub struct QuantizationTable {
    default: TableEntry,
    /// Entries by canonical path. `None` means that the matrix is not quantized (`false` in JSON).
    by_path: BTreeMap<String, Option<TableEntry>>,
    /// Paths of matrices whose stored format differs from the table.
    differing: RefCell<Vec<String>>,
}

/// Values of `quant_method` for quantization methods that are not supported. The tensors of these methods differ from
/// those of MLX and of Hugging Face's FP8.
const UNSUPPORTED_METHODS: [&str; 9] =
    ["awq", "gptq", "compressed-tensors", "modelopt", "bitnet", "bitsandbytes", "hqq", "quark", "mxtq"];

impl QuantizationTable {
    /// Parses the table.
    ///
    /// # Errors
    /// The quantization method is not supported, or a matrix has two contradictory entries.
    pub fn new(json: &Value) -> Result<Self, String> {
        let listed = |table: &Value| TableEntry {
            bits: table.get("bits").and_then(Value::as_u64),
            group: table.get("group_size").and_then(Value::as_u64),
            mode: table.get("mode").and_then(Value::as_str).map(str::to_owned),
        };
        let default = listed(json);
        let method = json.get("quant_method").and_then(Value::as_str).unwrap_or_default();
        if default.bits.is_none() && UNSUPPORTED_METHODS.contains(&method) && !has_only_fp8_blocks(json) {
            let supported = format!("only MLX's methods and fp8 in blocks of {FP8_BLOCK} rows and columns are");
            return Err(format!("the quantization method {method} is not supported; {supported}"));
        }
        let block = json.get("weight_block_size").filter(|_| method == "fp8");
        if block.is_some_and(|block| *block != json!([FP8_BLOCK, FP8_BLOCK])) {
            return Err(format!("weight_block_size must be [{FP8_BLOCK}, {FP8_BLOCK}] in fp8 checkpoints"));
        }
        let mut by_path = BTreeMap::new();
        for (path, value) in json.as_object().into_iter().flatten() {
            let Some(path) = canonical_path(path) else { continue };
            let entry = match value {
                Value::Object(_) => Some(listed(value)),
                Value::Bool(false) => None,
                _ => continue,
            };
            if by_path.insert(path.clone(), entry.clone()).is_some_and(|before| before != entry) {
                return Err(format!("quantization has two contradictory entries for {path}"));
            }
        }
        Ok(Self { default, by_path, differing: RefCell::default() })
    }

    /// Compares the table's entry for a matrix with the inferred format `codes`.
    ///
    /// # Errors
    /// The entry contradicts the inferred format. The error describes the format that the entry requires.
    pub fn compare(&self, path: &str, codes: WeightFormat) -> Result<(), String> {
        let exact = self.by_path.get(path);
        let is_quantized = !matches!(codes, WeightFormat::Dense(_));
        let listed = match exact {
            Some(None) if is_quantized => {
                return Err("no scales, because config.json says that it is not quantized".into());
            }
            Some(None) => return Ok(()),
            Some(Some(listed)) => listed,
            // A matrix without an entry may be unquantized. mlx-lm also accepts such matrices.
            None if !is_quantized => return Ok(()),
            None => &self.default,
        };
        let Some((bits, mode)) = bits_and_mode(codes) else {
            self.differing.borrow_mut().push(path.into());
            return Ok(());
        };
        let differs = listed.mode.as_ref().is_some_and(|listed| listed != mode);
        if differs && exact.is_some() {
            return Err(format!("mode {} from config.json", listed.mode.as_deref().unwrap_or_default()));
        }
        let group = codes.group() as u64;
        if differs
            || listed.bits.is_some_and(|listed| listed != bits)
            || listed.group.is_some_and(|listed| listed != group)
        {
            self.differing.borrow_mut().push(path.into());
        }
        Ok(())
    }

    /// Logs one line if the stored format of some matrices differs from the table.
    pub fn report(&self) {
        let differing = self.differing.borrow();
        if let Some(first) = differing.first() {
            tracing::info!(
                matrices = differing.len(),
                first,
                "the quantization in config.json is out of date for these matrices; using their shapes"
            );
        }
    }
}

/// True for a table of compressed-tensors or ModelOpt in which all weights are FP8 in the blocks of Hugging Face's FP8.
fn has_only_fp8_blocks(json: &Value) -> bool {
    let is_fp8 = |group: &Value| {
        let weights = &group["weights"];
        weights["type"] == "float"
            && weights["num_bits"] == 8
            && weights["block_structure"] == json!([FP8_BLOCK, FP8_BLOCK])
    };
    json["quant_algo"] == "FP8_PB_WO"
        || json["config_groups"].as_object().is_some_and(|groups| !groups.is_empty() && groups.values().all(is_fp8))
}

/// The canonical path of a key of the table. `None` if the matrix does not belong to the text model.
fn canonical_path(key: &str) -> Option<String> {
    let path = canonical_name(key.strip_suffix(".weight").unwrap_or(key))?;
    let stacked =
        ["gate_proj", "up_proj", "down_proj"].iter().any(|part| path.ends_with(&format!(".mlp.experts.{part}")));
    Some(if stacked { path.replace(".mlp.experts.", ".mlp.switch_mlp.") } else { path })
}

/// Number of bits per code, and name of the quantization mode. `None` for an unquantized format.
fn bits_and_mode(codes: WeightFormat) -> Option<(u64, &'static str)> {
    match codes {
        WeightFormat::Dense(_) => None,
        WeightFormat::Affine { bits, .. } => Some((bits.into(), "affine")),
        WeightFormat::Mxfp4 => Some((4, "mxfp4")),
        WeightFormat::Nvfp4 => Some((4, "nvfp4")),
        WeightFormat::Mxfp8 => Some((8, "mxfp8")),
        WeightFormat::Fp8(_) => Some((8, "fp8")),
    }
}

/// Infers the format of a matrix with `cols` columns from the last dimension of its packed codes and scales. The caller
/// checks the other dimensions.
///
/// # Errors
/// The format is unknown. The error describes the format.
pub fn infer_format(
    cols: usize,
    weight: &TensorEntry,
    scales: &TensorEntry,
    has_biases: bool,
) -> Result<WeightFormat, String> {
    let last = |entry: &TensorEntry| entry.shape.last().copied().filter(|last| *last > 0);
    let (Some(words), Some(groups)) = (last(weight), last(scales)) else {
        return Err("it is empty".into());
    };
    if weight.dtype != Dtype::U32 {
        return Err(format!("codes of type {:?}", weight.dtype));
    }
    let packed = words.checked_mul(32).filter(|bits| bits.is_multiple_of(cols));
    let (Some(packed), true) = (packed, cols.is_multiple_of(groups)) else {
        return Err(format!("{words} words of codes and {groups} scales per row"));
    };
    let bits = packed / cols;
    let group = cols / groups;
    match (scales.dtype, bits, group) {
        (Dtype::U8, ..) if has_biases => Err("one-byte scales as in mxfp4 together with biases as in affine".into()),
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

/// Converts a tensor's element type to a float type. `None` if the type is not a supported float type.
pub fn float(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::F32 => Some(Float::F32),
        Dtype::F16 => Some(Float::F16),
        Dtype::BF16 => Some(Float::Bf16),
        _ => None,
    }
}

/// The error for a tensor of a format that is not supported. `None` for any other tensor.
pub fn foreign_format(name: &str) -> Option<String> {
    let formats = [
        ("JANGTQ", &["tq_packed", "tq_norms", "tq_bits"][..]),
        ("GPTQ and AWQ", &[".qweight", ".qzeros", ".g_idx"]),
        ("packed compressed-tensors", &[".weight_packed", ".weight_shape", ".weight_zero_point"]),
        ("ModelOpt's NVFP4", &[".weight_scale_2"]),
        ("bitsandbytes", &[".absmax", ".quant_map", ".nested_absmax", ".quant_state.bitsandbytes__nf4", ".SCB"]),
        ("HQQ", &[".W_q"]),
        (
            "unmerged LoRA",
            &[
                ".lora_A.weight",
                ".lora_B.weight",
                ".lora_a",
                ".lora_b",
                ".base_layer.weight",
                ".modules_to_save.default.weight",
            ],
        ),
    ];
    let part = |parts: &[&'static str]| parts.iter().copied().find(|part| name.ends_with(part));
    let (format, part) = formats.iter().find_map(|(format, parts)| Some((format, part(parts)?)))?;
    Some(format!("{format} checkpoints are not supported (it has {} tensors)", part.trim_start_matches('.')))
}
