//! Lists the tensors of a synthetic checkpoint, the encodings of the tensors, and the JSON files, as MLX's converters
//! write Qwen3.5 and qwen4_exp in 4 bits. An n-gram table is not quantized. Routers and shared-expert gates have 8
//! bits. The safetensors header is not padded, so tensors start at odd offsets.
//!
//! Matrices have a gain of 1 unless stated otherwise. The step between codes is chosen so that the weights of a row
//! have the variance gain^2 / columns. With the gains below, activations neither vanish nor explode over 60 layers.

use super::{
    noise,
    options::{Dimensions, GROUP, NGRAM_HEADS, StreamDimensions, SynthOptions},
};
use half::bf16;
use moestro_model::model;
use serde_json::{Value, json};

/// Number of bits per weight, except in routers and shared-expert gates.
const BITS: u32 = 4;
/// Number of bits per weight in routers and shared-expert gates.
const GATE_BITS: u32 = 8;
/// Width of the causal convolution.
const CONV_WIDTH: usize = 4;
/// Index of the layer before which the rows of the n-gram table are added.
const NGRAM_LAYER: usize = 1;
/// Number of tensors of the n-gram table.
const NGRAM_SHARDS: usize = 8;
const PREFIX: &str = "language_model.model";

/// A tensor of the checkpoint.
pub struct SynthTensor {
    pub name: String,
    shape: Vec<usize>,
    fill: Fill,
    key: u64,
}

/// The contents of a tensor.
#[derive(Clone, Copy)]
enum Fill {
    /// u32: packed codes, which are random bits.
    Codes,
    /// bf16: `step` times a random sign, times a random factor from 0.8 to 1.2, times the gain of the row.
    Scales(CodeStep),
    /// bf16: the value that maps the middle code to zero.
    Biases(CodeStep, f32),
    /// bf16: normally distributed with mean 1 and standard deviation 0.1.
    Ones,
    /// bf16: normally distributed with mean 0 and this standard deviation.
    Normal(f32),
    /// bf16: a random sign and a magnitude from 1/16 to 1/8. Fast to compute, for a table of many gigabytes.
    TableRows,
    /// f32: `ln(uniform(1, 16))`, the decay rates of the delta net.
    DecayLog,
    /// bf16: inverse softplus of step sizes from 0.002 to 0.1.
    StepBias,
}

#[derive(Clone, Copy)]
struct CodeStep {
    size: f32,
    /// Number of groups per row.
    groups: usize,
    /// Standard deviation of the logarithm of the row gains.
    skew: f32,
}

impl CodeStep {
    fn scale(&self, key: u64, i: u64) -> bf16 {
        let bits = noise::bits(key, i);
        let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
        let mut scale = self.size * sign * noise::uniform(bits, 0.8, 1.2);
        if self.skew > 0.0 {
            let row = noise::bits(!key, i / self.groups as u64);
            scale *= (self.skew * noise::normal(row)).exp();
        }
        bf16::from_f32(scale)
    }
}

impl SynthTensor {
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product::<u64>() * self.width() as u64
    }

    /// Number of bytes of one element.
    fn width(&self) -> usize {
        if matches!(self.fill, Fill::Codes | Fill::DecayLog) { 4 } else { 2 }
    }

    fn dtype(&self) -> &'static str {
        match self.fill {
            Fill::Codes => "U32",
            Fill::DecayLog => "F32",
            _ => "BF16",
        }
    }

    /// Fills `out` with bytes of the tensor. `from` is the position of the first of these bytes in the tensor, a
    /// multiple of 8.
    pub fn fill(&self, from: u64, out: &mut [u8]) {
        let key = self.key;
        match self.fill {
            Fill::Codes => noise::fill(key, from, out),
            Fill::Scales(step) => halves(from, out, |i| step.scale(key, i)),
            Fill::Biases(step, middle) => halves(from, out, |i| bf16::from_f32(-middle * step.scale(key, i).to_f32())),
            Fill::Ones => halves(from, out, |i| bf16::from_f32(1.0 + 0.1 * noise::normal(noise::bits(key, i)))),
            Fill::Normal(size) => halves(from, out, |i| bf16::from_f32(size * noise::normal(noise::bits(key, i)))),
            Fill::TableRows => halves(from, out, |i| {
                let bits = noise::bits(key, i);
                bf16::from_bits(((bits >> 48) as u16 & 0x807f) | (123 << 7))
            }),
            Fill::StepBias => halves(from, out, |i| {
                let step = noise::uniform(noise::bits(key, i), 2e-3f32.ln(), 1e-1f32.ln()).exp();
                bf16::from_f32(step.exp_m1().ln())
            }),
            Fill::DecayLog => {
                for (i, word) in (from / 4..).zip(out.chunks_exact_mut(4)) {
                    word.copy_from_slice(&noise::uniform(noise::bits(key, i), 1.0, 16.0).ln().to_le_bytes());
                }
            }
        }
    }
}

/// Fills `out` with bf16 values. `out` starts at byte `from` of the tensor. `value` gets the index of an element in the
/// tensor.
fn halves(from: u64, out: &mut [u8], value: impl Fn(u64) -> bf16) {
    for (i, half) in (from / 2..).zip(out.chunks_exact_mut(2)) {
        half.copy_from_slice(&value(i).to_le_bytes());
    }
}

/// Collects tensors in the order of the forward pass.
struct TensorList {
    seed: u64,
    tensors: Vec<SynthTensor>,
}

impl TensorList {
    fn dense(&mut self, name: String, shape: &[usize], fill: Fill) {
        let key = noise::key(self.seed, &name);
        self.tensors.push(SynthTensor { name, shape: shape.to_vec(), fill, key });
    }

    /// Adds a quantized matrix `[rows, cols]`.
    fn matrix(&mut self, name: String, rows: usize, cols: usize, gain: f32) {
        self.quantized(&name, &[rows], cols, gain, BITS, 0.0);
    }

    fn quantized(&mut self, name: &str, rows: &[usize], cols: usize, gain: f32, bits: u32, skew: f32) {
        let levels = (1u32 << bits) as f32;
        // Codes are uniform over `levels` values, whose variance is (levels^2 - 1) / 12.
        let size = gain / (cols as f32).sqrt() / ((levels * levels - 1.0) / 12.0).sqrt();
        let groups = cols / GROUP;
        let step = CodeStep { size, groups, skew };
        let codes = [rows, &[cols * bits as usize / 32]].concat();
        let scales = [rows, &[groups]].concat();
        let codes_key = noise::key(self.seed, &format!("{name}.weight"));
        let key = noise::key(self.seed, name);
        let mut push = |part: &str, shape: &[usize], fill, key| {
            self.tensors.push(SynthTensor { name: format!("{name}.{part}"), shape: shape.to_vec(), fill, key });
        };
        push("weight", &codes, Fill::Codes, codes_key);
        push("scales", &scales, Fill::Scales(step), key);
        push("biases", &scales, Fill::Biases(step, (levels - 1.0) / 2.0), key);
    }
}

fn is_full(layer: usize) -> bool {
    (layer + 1).is_multiple_of(4)
}

/// All tensors, in file order.
pub fn tensors(options: &SynthOptions) -> Vec<SynthTensor> {
    let d = &options.dimensions;
    let h = d.hidden;
    let mut list = TensorList { seed: options.seed, tensors: Vec::new() };
    list.matrix(format!("{PREFIX}.embed_tokens"), d.vocab, h, (h as f32).sqrt());
    for layer in 0..d.layers {
        let layer_name = format!("{PREFIX}.layers.{layer}");
        match &d.streams {
            None => list.dense(format!("{layer_name}.input_layernorm.weight"), &[h], Fill::Ones),
            Some(streams) => {
                if layer == NGRAM_LAYER {
                    ngram_tensors(&mut list, &format!("{layer_name}.ple"), streams, h);
                }
                mix_tensors(&mut list, &format!("{layer_name}.attn_hyper_connection"), streams, h, true);
            }
        }
        if is_full(layer) {
            let name = |part: &str| format!("{layer_name}.self_attn.{part}");
            let q = d.heads * d.head_dim;
            let kv = d.kv_heads * d.head_dim;
            list.matrix(name("q_proj"), 2 * q, h, 1.0);
            list.matrix(name("k_proj"), kv, h, 1.0);
            list.matrix(name("v_proj"), kv, h, 1.0);
            list.matrix(name("o_proj"), h, q, 0.25);
            list.dense(name("q_norm.weight"), &[d.head_dim], Fill::Ones);
            list.dense(name("k_norm.weight"), &[d.head_dim], Fill::Ones);
            if let Some(streams) = &d.streams {
                let rows = (streams.indexer_heads + 1) * streams.indexer_dim;
                list.dense(name("indexer.index_qk_proj.weight"), &[rows, h], Fill::Normal(1.0 / (h as f32).sqrt()));
                list.dense(name("indexer.q_layernorm.weight"), &[streams.indexer_dim], Fill::Ones);
                list.dense(name("indexer.k_layernorm.weight"), &[streams.indexer_dim], Fill::Ones);
            }
        } else {
            let name = |part: &str| format!("{layer_name}.linear_attn.{part}");
            let heads = d.linear_value_heads;
            let values = d.linear_value_heads * d.linear_head_dim;
            let channels = 2 * d.linear_key_heads * d.linear_head_dim + values;
            list.dense(name("A_log"), &[heads], Fill::DecayLog);
            list.dense(name("conv1d.weight"), &[channels, CONV_WIDTH, 1], Fill::Normal(0.5));
            list.dense(name("dt_bias"), &[heads], Fill::StepBias);
            list.matrix(name("in_proj_qkv"), channels, h, 1.0);
            list.matrix(name("in_proj_z"), values, h, 1.0);
            list.matrix(name("in_proj_b"), heads, h, 1.0);
            list.matrix(name("in_proj_a"), heads, h, 1.0);
            list.dense(name("norm.weight"), &[d.linear_head_dim], Fill::Ones);
            list.matrix(name("out_proj"), h, values, 0.25);
        }
        match &d.streams {
            None => list.dense(format!("{layer_name}.post_attention_layernorm.weight"), &[h], Fill::Ones),
            Some(streams) => mix_tensors(&mut list, &format!("{layer_name}.mlp_hyper_connection"), streams, h, true),
        }
        let name = |part: &str| format!("{layer_name}.mlp.{part}");
        if let Some(dense) = d.dense {
            list.matrix(name("gate_proj"), dense, h, 1.4);
            list.matrix(name("up_proj"), dense, h, 1.4);
            list.matrix(name("down_proj"), h, dense, 0.35);
            continue;
        }
        list.quantized(&name("gate"), &[d.experts], h, 2.0, GATE_BITS, options.router_skew);
        list.quantized(&name("shared_expert_gate"), &[1], h, 1.0, GATE_BITS, 0.0);
        for part in ["gate_proj", "up_proj"] {
            list.matrix(name(&format!("shared_expert.{part}")), d.shared_hidden, h, 1.4);
            let rows = [d.experts, d.expert_hidden];
            list.quantized(&name(&format!("switch_mlp.{part}")), &rows, h, 1.4, BITS, 0.0);
        }
        list.matrix(name("shared_expert.down_proj"), h, d.shared_hidden, 0.35);
        list.quantized(&name("switch_mlp.down_proj"), &[d.experts, h], d.expert_hidden, 0.35, BITS, 0.0);
    }
    match &d.streams {
        None => list.dense(format!("{PREFIX}.norm.weight"), &[h], Fill::Ones),
        Some(streams) => mix_tensors(&mut list, &format!("{PREFIX}.hyper_connection_mixer"), streams, h, false),
    }
    if !d.tied {
        list.matrix("language_model.lm_head".into(), d.vocab, h, 3.0);
    }
    list.tensors
}

/// The weights that mix the residual streams for one part of a layer.
fn mix_tensors(list: &mut TensorList, path: &str, streams: &StreamDimensions, hidden: usize, has_inject: bool) {
    let width = streams.count * hidden;
    list.dense(format!("{path}.hc_norm.weight"), &[width], Fill::Ones);
    list.matrix(format!("{path}.input_mix_weight_down"), streams.rank, width, streams.count as f32);
    list.matrix(format!("{path}.input_mix_weight_up"), width, streams.rank, 1.0);
    if has_inject {
        let name = format!("{path}.block_inject_weight.weight");
        list.dense(name, &[streams.count, width], Fill::Normal(1.0 / (width as f32).sqrt()));
    }
}

/// Tensors of an n-gram table, and the weights that add the rows of the table to the residual streams.
fn ngram_tensors(list: &mut TensorList, path: &str, streams: &StreamDimensions, hidden: usize) {
    let width = streams.count * hidden;
    let row = streams.ngram_width / NGRAM_HEADS as usize;
    list.matrix(format!("{path}.key_proj"), width, streams.ngram_width, 8.0);
    list.matrix(format!("{path}.value_proj"), hidden, streams.ngram_width, 8.0);
    for norm in ["norm_key", "norm_query", "norm_conv"] {
        list.dense(format!("{path}.{norm}.weight"), &[width], Fill::Ones);
    }
    list.dense(format!("{path}.conv1d.weight"), &[width, CONV_WIDTH, 1], Fill::Normal(0.5));
    // The table is split into `NGRAM_SHARDS` tensors of about the same size.
    let rows = model::ngram_rows(ngram_base(streams)) as usize;
    let shard = rows.div_ceil(NGRAM_SHARDS);
    for (index, first) in (0..rows).step_by(shard).enumerate() {
        let name = format!("{path}.ple_embedding.ngram_embedding.shard_{index}.weight");
        list.dense(name, &[shard.min(rows - first), row], Fill::TableRows);
    }
}

/// Lower bound for the primes of the n-gram table, chosen so that the table has about the wanted number of rows.
fn ngram_base(streams: &StreamDimensions) -> u64 {
    (streams.ngram_rows / NGRAM_HEADS).max(2)
}

/// Splits the list into files of at most `limit` bytes. A larger tensor gets its own file.
pub fn shards(tensors: &[SynthTensor], limit: u64) -> Vec<&[SynthTensor]> {
    let mut shards = Vec::new();
    let mut first = 0;
    let mut bytes = 0;
    for (i, tensor) in tensors.iter().enumerate() {
        if i > first && bytes + tensor.bytes() > limit {
            shards.push(&tensors[first..i]);
            first = i;
            bytes = 0;
        }
        bytes += tensor.bytes();
    }
    shards.push(&tensors[first..]);
    shards
}

/// A safetensors header: the length of the JSON, then the JSON. As in most headers that MLX writes, the length is not a
/// multiple of 4.
pub fn header(tensors: &[SynthTensor]) -> Vec<u8> {
    let mut entries = serde_json::Map::from_iter([("__metadata__".to_owned(), json!({ "format": "mlx" }))]);
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.bytes();
        let entry = json!({ "dtype": tensor.dtype(), "shape": tensor.shape, "data_offsets": [start, end] });
        entries.insert(tensor.name.clone(), entry);
        start = end;
    }
    let mut json = Value::Object(entries).to_string();
    if json.len().is_multiple_of(4) {
        json.push(' ');
    }
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
}

/// Content of `config.json`.
pub fn config(options: &SynthOptions) -> Value {
    let d = &options.dimensions;
    let mut quantization = json!({ "group_size": GROUP, "bits": BITS, "mode": "affine" });
    for layer in 0..if d.dense.is_some() { 0 } else { d.layers } {
        for gate in ["gate", "shared_expert_gate"] {
            let path = format!("{PREFIX}.layers.{layer}.mlp.{gate}");
            quantization[path] = json!({ "group_size": GROUP, "bits": GATE_BITS });
        }
    }
    let kinds = (0..d.layers).map(|layer| if is_full(layer) { "full_attention" } else { "linear_attention" });
    let (family, architecture) = family(d);
    let mut text = json!({
        "model_type": format!("{family}_text"),
        "attention_bias": false,
        "attention_dropout": 0.0,
        "attn_output_gate": true,
        "dtype": "bfloat16",
        "eos_token_id": options.eos_token_ids.last(),
        "full_attention_interval": 4,
        "head_dim": d.head_dim,
        "hidden_act": "silu",
        "hidden_size": d.hidden,
        "initializer_range": 0.02,
        "layer_types": kinds.collect::<Vec<_>>(),
        "linear_conv_kernel_dim": CONV_WIDTH,
        "linear_key_head_dim": d.linear_head_dim,
        "linear_num_key_heads": d.linear_key_heads,
        "linear_num_value_heads": d.linear_value_heads,
        "linear_value_head_dim": d.linear_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262_144,
        "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": false,
        "moe_intermediate_size": d.expert_hidden,
        "num_attention_heads": d.heads,
        "num_experts": d.experts,
        "num_experts_per_tok": d.experts_per_token,
        "num_hidden_layers": d.layers,
        "num_key_value_heads": d.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": true,
            "mrope_section": [11, 11, 10],
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            "type": "default",
        },
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": d.shared_hidden,
        "tie_word_embeddings": d.tied,
        "use_cache": true,
        "vocab_size": d.vocab,
    });
    if let Some(dense) = d.dense {
        text["intermediate_size"] = dense.into();
    }
    if let Some(streams) = &d.streams {
        let more = json!({
            "hc_count": streams.count,
            "hc_lowrank": streams.rank,
            "indexer_budget": streams.indexer_budget,
            "indexer_compress_ratio": streams.indexer_ratio,
            "indexer_head_dim": streams.indexer_dim,
            "indexer_kv_heads": 1,
            "indexer_n_heads": streams.indexer_heads,
            "heads_per_ngram": NGRAM_HEADS / 2,
            "ngram_size": 3,
            "ngram_vocab_size_base": ngram_base(streams),
            "output_gate_type": "sigmoid",
            "ple_conv_kernel_size": CONV_WIDTH,
            "ple_embed_dim": streams.ngram_width,
            "ple_layer_ids": if d.layers > NGRAM_LAYER { vec![NGRAM_LAYER + 1] } else { Vec::new() },
        });
        more.as_object().into_iter().flatten().for_each(|(key, value)| text[key] = value.clone());
    }
    json!({
        "architectures": [architecture],
        "eos_token_id": options.eos_token_ids,
        "model_type": family,
        "quantization": quantization,
        "quantization_config": quantization,
        "text_config": text,
        "tie_word_embeddings": d.tied,
    })
}

/// `model_type` of the model, and the class of its architecture.
fn family(d: &Dimensions) -> (&'static str, &'static str) {
    match (&d.streams, d.dense) {
        (Some(_), _) => ("qwen4_exp", "Qwen4ExpForConditionalGeneration"),
        (None, Some(_)) => ("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        (None, None) => ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
    }
}

/// Content of `generation_config.json`.
pub fn generation_config(options: &SynthOptions) -> Value {
    json!({
        "do_sample": true,
        "eos_token_id": options.eos_token_ids,
        "pad_token_id": options.eos_token_ids.last(),
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    })
}
