//! The tiny qwen4_exp checkpoint in Hugging Face's FP8 format.

use super::qwen4_exp::{self, Tensors, tensors};
use safetensors::Dtype;

/// The value of an E4M3 code.
fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let size = if exponent == 0 { mantissa * 2f32.powi(-6) } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
    if code & 0x80 == 0 { size } else { -size }
}

/// The E4M3 code nearest to a value.
fn code(value: f32) -> u8 {
    let finite = (0..=255u8).filter(|code| code & 0x7f != 0x7f);
    finite.min_by(|a, b| (e4m3(*a) - value).abs().total_cmp(&(e4m3(*b) - value).abs())).unwrap()
}

fn floats(data: &[u8]) -> Vec<f32> {
    data.as_chunks::<2>().0.iter().map(|half| half::bf16::from_le_bytes(*half).to_f32()).collect()
}

/// Adds the matrix `[rows, cols]` to `fp8` in blocks of 128 rows and columns with bf16 scales, and to `plain` in f32.
/// Both copies have the same values.
fn add_blocks(fp8: &mut Tensors, plain: &mut Tensors, path: &str, [rows, cols]: [usize; 2], data: &[f32]) {
    let (down, across) = (rows.div_ceil(128), cols.div_ceil(128));
    let scale = |block: usize| half::bf16::from_f32((block % 5 + 1) as f32 / 300.0);
    let block = |at: usize| at / cols / 128 * across + at % cols / 128;
    let codes: Vec<u8> = (0..).zip(data).map(|(at, value)| code(value / scale(block(at)).to_f32())).collect();
    let same = (0..).zip(&codes).flat_map(|(at, code)| (e4m3(*code) * scale(block(at)).to_f32()).to_le_bytes());
    plain.insert(format!("{path}.weight"), (Dtype::F32, vec![rows, cols], same.collect()));
    fp8.insert(format!("{path}.weight"), (Dtype::F8_E4M3, vec![rows, cols], codes));
    let scales = (0..down * across).flat_map(|block| scale(block).to_le_bytes()).collect();
    fp8.insert(format!("{path}.weight_scale_inv"), (Dtype::BF16, vec![down, across], scales));
}

/// The checkpoint in Hugging Face's FP8 format, and the same values in f32. The FP8 tensors are the experts (each
/// stored separately), the projections of attention, and the n-gram table (with a single scale).
fn tensors_of_both() -> [Tensors; 2] {
    let (mut fp8, mut plain) = (Tensors::new(), Tensors::new());
    let scale = half::bf16::from_f32(0.015);
    for (name, (dtype, shape, data)) in tensors() {
        if let Some(mlp) = name.strip_suffix(".gate_up_proj").or(name.strip_suffix(".down_proj")) {
            let values = floats(&data);
            let parts = if name.ends_with("gate_up_proj") { &["gate_proj", "up_proj"][..] } else { &["down_proj"] };
            let (rows, cols) = (shape[1] / parts.len(), shape[2]);
            let matrices = values.chunks(rows * cols).enumerate();
            for (index, matrix) in matrices {
                let path = format!("{mlp}.{}.{}", index / parts.len(), parts[index % parts.len()]);
                add_blocks(&mut fp8, &mut plain, &path, [rows, cols], matrix);
            }
        } else if name.ends_with("q_proj.weight") || name.ends_with("o_proj.weight") {
            let path = name.strip_suffix(".weight").unwrap();
            add_blocks(&mut fp8, &mut plain, path, [shape[0], shape[1]], &floats(&data));
        } else if let Some((table, _)) = name.split_once(".shard_") {
            let codes: Vec<u8> = floats(&data).iter().map(|value| code(value / scale.to_f32())).collect();
            let same = codes.iter().flat_map(|code| (e4m3(*code) * scale.to_f32()).to_le_bytes()).collect();
            plain.insert(name.clone(), (Dtype::F32, shape.clone(), same));
            let name_of_scale = format!("{table}.weight_scale");
            fp8.insert(name_of_scale, (Dtype::BF16, vec![1], scale.to_le_bytes().to_vec()));
            fp8.insert(name, (Dtype::F8_E4M3, shape, codes));
        } else {
            fp8.insert(name.clone(), (dtype, shape.clone(), data.clone()));
            plain.insert(name, (dtype, shape, data));
        }
    }
    [fp8, plain]
}

/// The checkpoint in FP8, and in f32 with the same values.
pub fn written() -> [tempfile::TempDir; 2] {
    let [fp8, plain] = tensors_of_both().map(|tensors| qwen4_exp::written(&tensors));
    let path = fp8.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let block = [128, 128];
    json["quantization_config"] = serde_json::json!({ "quant_method": "fp8", "weight_block_size": block });
    std::fs::write(path, json.to_string()).unwrap();
    [fp8, plain]
}
