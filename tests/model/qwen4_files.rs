//! Checks that checkpoints of qwen4_exp with other dimensions, encodings and files are read correctly.

use crate::{
    common::{
        self, decode, distance, fixtures::FIXTURES, fp8_checkpoint, load_with, narrow, prefill, synth_options,
        write_synthetic,
    },
    qwen4_exp::{LOGIT, STAGE, Tensors, cases, check, dir, load, options, tensors, values, written},
};
use candle_core::{DType, Device};
use moestro::tools::synth::{Dimensions, StreamDimensions, SynthOptions};
use moestro_base::metrics::Metrics;
use moestro_model::{
    checkpoint::{RowFiles, pack},
    model::{CheckpointInfo, LoadOptions, Model, Qwen, Reference, Rows, StoreOptions},
};
use safetensors::Dtype;
use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

/// A checkpoint with other dimensions in every field: three streams, two n-gram tables of 4-grams, blocks of eight
/// positions, attention in the first layer, and tied embeddings. An independent implementation in numpy computed the
/// expected results in f64.
fn other() -> PathBuf {
    Path::new(FIXTURES).join("qwen4_exp_other")
}

#[test]
fn other_dimensions_match_independent_implementation() {
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(other().join("refs.json")).unwrap()).unwrap();
    let ids = |name: &str| serde_json::from_value::<Vec<u32>>(json[name].clone()).unwrap();
    let (prompt, greedy) = (ids("tokens"), ids("greedy"));
    let stored = common::tensors(&other().join("ref.safetensors"));
    let all = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
    let reference = Reference::open(&other(), Device::Cpu, DType::F64).unwrap().forward(&all).unwrap();
    for (layer, found) in reference.residuals.iter().enumerate() {
        check(&format!("layer {layer}"), &values(found), &stored[&format!("layer{layer}.R")], STAGE);
    }
    for layer in [1, 4] {
        let name = format!("layer{layer}.ple_rows");
        check(&name, &values(&reference.stages[&name]), &stored[&name], 0.0);
    }
    check("reference", &values(&reference.logits), &stored["logits"], LOGIT);
    let (expected, ..) = prefill(&mut load_with(&other(), options()), &all, all.len());
    check("fast pass", &expected.data, &stored["logits"], LOGIT);
    // At least 15 slots are needed: 5 layers with 3 experts per token each.
    for (chunk, slots) in [(1, None), (7, Some(15)), (30, None)] {
        let store = StoreOptions { slots, ..StoreOptions::default() };
        let (found, ..) = prefill(&mut load_with(&other(), LoadOptions { store, ..options() }), &all, chunk);
        assert!(found.data == expected.data, "chunks of {chunk}, {slots:?} slots");
    }
    let mut model = load_with(&other(), options());
    let (logits, mut state, _) = prefill(&mut model, &prompt, 1024);
    assert_eq!(decode(&mut model, &mut state, logits.row(logits.rows() - 1), greedy.len()).0, greedy);
}

/// Changes every number of the configuration. A wrong size must be an error, and no value may cause a panic.
#[test]
fn changed_dimensions_are_refused_without_panic() {
    // These keys change no shape.
    let free = [
        "bos_token_id",
        "eos_token_id",
        "max_position_embeddings",
        "num_experts_per_tok",
        "indexer_budget",
        "indexer_compress_ratio",
        "indexer_kv_heads",
        "split_ngram_parts",
    ];
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(other().join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(other().join("config.json")).unwrap()).unwrap();
    let load = |json: &serde_json::Value| {
        std::fs::write(copy.path().join("config.json"), json.to_string()).unwrap();
        CheckpointInfo::unpacked(copy.path(), &options()).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(load(&json), Ok(()));
    let (mut refused, mut loads) = (0, Vec::new());
    for (key, value) in json["text_config"].as_object().unwrap() {
        let Some(value) = value.as_u64() else { continue };
        for changed in [0, value - 1, value + 1, 2 * value, 1 << 40] {
            let mut json = json.clone();
            json["text_config"][key] = changed.into();
            if load(&json).is_err() {
                refused += 1;
            } else if !free.contains(&key.as_str()) {
                loads.push((key.as_str(), changed));
            }
        }
    }
    assert!(refused > 100, "{refused}");
    // Two changes are accepted. 37 is the first prime from 36 on, and the tables have 280 and 440 rows, which are
    // multiples of 20.
    assert_eq!(loads, [("ngram_vocab_size_base", 36), ("make_ngram_vocab_size_divisible_by", 20)]);
}

#[test]
fn fp8_checkpoint_equals_its_values_in_f32() {
    let [fp8, plain] = fp8_checkpoint::written();
    for case in cases() {
        let (expected, ..) = prefill(&mut load_with(plain.path(), options()), &case.prompt, 1024);
        let off = distance(&expected.data, &case.stored["prompt_logits"]);
        assert!(off > 0.01, "FP8 changes nothing, so this test is void: {off}");
        for (slots, chunk) in [(None, 1024), (Some(60), 7)] {
            let store = StoreOptions { slots, ..StoreOptions::default() };
            let mut model = load_with(fp8.path(), LoadOptions { store, ..options() });
            let (found, ..) = prefill(&mut model, &case.prompt, chunk);
            assert!(found.data == expected.data, "{}, {slots:?} slots", case.name);
        }
        let reference = Reference::open(fp8.path(), Device::Cpu, DType::F32).unwrap().forward(&case.prompt).unwrap();
        check(case.name, &values(&reference.logits), &expected.data, LOGIT);
    }
}

/// Some converters write the table to a separate file.
#[test]
fn table_in_own_file_gives_same_logits() {
    let case = &cases()[1];
    let (expected, ..) = prefill(&mut load(), &case.prompt, 1024);
    let (mut all, mut table) = (tensors(), Vec::new());
    let (prefix, dtype, mut rows) =
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_", Dtype::BF16, 0);
    for shard in 0..8 {
        let (_, shape, data) = all.remove(&format!("{prefix}{shard}.weight")).unwrap();
        rows += shape[0];
        table.extend(data);
    }
    let own = Tensors::from([("ngram.weight".to_string(), (dtype, vec![rows, 32], table))]);
    let copy = written(&all);
    std::fs::copy(written(&own).path().join("model.safetensors"), copy.path().join("ngram-table.safetensors")).unwrap();
    let (found, ..) = prefill(&mut load_with(copy.path(), options()), &case.prompt, 1024);
    assert!(found.data == expected.data);
}

#[test]
fn rows_are_read_once_then_cached() {
    let (case, metrics) = (&cases()[1], Metrics::new("test", "cpu"));
    let mut model = Qwen::load(&dir(), &options(), &metrics, &mut |_, _| ()).unwrap();
    let mut rows: Vec<i64> = case.stored["layer1.ple_rows"].iter().map(|row| *row as i64).collect();
    rows.sort_unstable();
    rows.dedup();
    let counts = || [&metrics.ngram_rows_read, &metrics.ngram_rows_cached].map(|count| count.get());
    for cached in [0, rows.len() as u64] {
        let mut state = model.start().unwrap();
        model.forward(&mut state, &case.prompt, Rows::Last).unwrap();
        assert_eq!(counts(), [rows.len() as u64, cached]);
    }
    // A row has 32 values in bf16.
    assert_eq!(metrics.ngram_read_bytes.get(), 64 * rows.len() as u64);
}

#[test]
fn table_outside_safetensors_is_refused() {
    let path = dir().join("config.json");
    let mut json: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    json["text_config"]["ple_storage"] = serde_json::json!({ "layout": "affine" });
    let error = moestro_model::model::Config::new(&json).unwrap_err().to_string();
    assert!(error.contains("ple_storage"), "{error}");
}

/// A synthetic checkpoint whose table has several chunks of the pack, in shards that end within a block.
fn synthetic(root: &Path) -> PathBuf {
    let real = Dimensions::of_flash_next();
    let streams = StreamDimensions { rank: 64, ngram_rows: 300_000, ngram_width: 256, ..real.streams.clone().unwrap() };
    let dimensions = Dimensions {
        hidden: 64,
        layers: 4,
        linear_value_heads: 2,
        experts: 12,
        streams: Some(streams),
        ..narrow(real)
    };
    let options = synth_options(dimensions, 4);
    write_synthetic(root, SynthOptions { eos_token_ids: vec![298, 296], shard: 3 << 20, ..options })
}

#[test]
fn packed_rows_are_the_tables_rows() {
    let root = tempfile::tempdir().unwrap();
    let (dir, out) = (synthetic(root.path()), root.path().join("model.pack"));
    let ids: Vec<u32> = (0..60u32).map(|n| (n * n * 37 + n * 11 + 5) % 300).collect();
    let logits = || prefill(&mut load_with(&dir, options()), &ids, 20).0.data;
    let expected = logits();

    let found = CheckpointInfo::unpacked(&dir, &options()).unwrap();
    let done = std::sync::atomic::AtomicU64::new(0);
    let progress = |bytes| {
        done.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
    };
    let (summary, bytes) = pack::write_with_rows(&found.experts, &found.tables, &found.files, &out, &progress).unwrap();
    assert!(summary.written && summary.bytes > 0);
    let table = &found.tables[0];
    let blocks = pack::row_blocks(table);
    // A block has 127 rows of 32 bytes, and a chunk has 1,024 blocks.
    assert!(blocks.per_block == 127 && blocks.count() > 2 * 1024 && table.shards() > 2, "{blocks:?}");
    assert_eq!((bytes, done.into_inner()), (blocks.file_bytes(), 2 * (summary.bytes + bytes - 4096)));
    assert_eq!(pack::write_rows(&found.tables, &found.files, &out, &|_| ()).unwrap(), 0, "it is written once");

    let packed = || CheckpointInfo::new(&dir, &options()).unwrap().packed_rows.pop().unwrap();
    let shared = std::sync::Arc::new(table.clone());
    let [plain, packed_files] = [None, packed()].map(|packed| RowFiles::open(shared.clone(), packed).unwrap());
    assert!(packed().is_some());
    let mut space = Vec::new();
    for row in (0..table.rows).step_by(91).chain(table.rows - 300..table.rows) {
        assert_eq!(plain.read(row, &mut space).unwrap(), packed_files.read(row, &mut space).unwrap(), "row {row}");
    }
    assert!(logits() == expected);
    assert_eq!(pack::verify_rows(&out, &found.tables, &|_| ()).unwrap(), table.rows);

    // A damaged block is detected, and its rows are read from the checkpoint.
    let file = File::options().read(true).write(true).open(out.join("table-000.rows")).unwrap();
    for block in 0..blocks.count() {
        let mut byte = [0];
        file.read_exact_at(&mut byte, blocks.offset(block) + 17).unwrap();
        file.write_all_at(&[byte[0] ^ 4], blocks.offset(block) + 17).unwrap();
    }
    let error = pack::verify_rows(&out, &found.tables, &|_| ()).unwrap_err().to_string();
    assert!(error.contains("table-000.rows") && error.contains("differs from the checkpoint"), "{error}");
    assert!(packed().is_some() && logits() == expected);

    // Rows of a table with other bytes are not used.
    let shard = &table.files[table.pieces(5..6).0[0].file as usize];
    let at = table.pieces(5..6).0[0].offset;
    File::options().write(true).open(shard).unwrap().write_all_at(&[1, 2, 3, 4], at).unwrap();
    assert!(packed().is_none());
}
