use super::*;
use std::sync::atomic::Ordering;

fn small(seed: u64, layers: usize) -> SynthOptions {
    let dimensions = Dimensions::narrow(layers, 16);
    let extras = vec![("chat_template.jinja".to_owned(), b"{{ messages }}".to_vec())];
    let eos_token_ids = vec![298, 296];
    SynthOptions { dimensions, seed, router_skew: 0.5, eos_token_ids, shard: 1 << 20, threads: 3, extras }
}

fn bytes_of(dir: &Path) -> std::collections::BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap())).collect()
}

#[test]
fn sizes_match_the_real_models() {
    let of = |dimensions| SynthOptions { dimensions, ..small(0, 1) };
    // The sizes follow from the published dimensions: 19.5, 68.7 and 223 GB.
    let sizes = [Dimensions::of_35b(), Dimensions::of_122b(), Dimensions::of_397b()].map(|d| size(&of(d)) as f64 / 1e9);
    assert!((sizes[0] - 19.5).abs() < 0.05, "{sizes:?}");
    assert!((sizes[1] - 68.7).abs() < 0.05, "{sizes:?}");
    assert!((sizes[2] - 223.0).abs() < 0.5, "{sizes:?}");
    let dense = [Dimensions::of_4b(), Dimensions::of_9b(), Dimensions::of_27b()].map(|d| size(&of(d)) as f64 / 1e9);
    assert!(dense.iter().zip([2.37, 5.04, 15.14]).all(|(size, known)| (size - known).abs() < 0.01), "{dense:?}");
    // 67.9 GB of experts, 2.9 GB of other weights, and 8 million rows of 320 bytes.
    let flash = size(&of(Dimensions::of_flash_next())) as f64 / 1e9;
    assert!((flash - 73.4).abs() < 0.1, "{flash}");
    let shards = layout::shards(&layout::tensors(&of(Dimensions::of_35b())), 5 << 30).len();
    assert_eq!(shards, 4);
}

#[test]
fn safetensors_crate_reads_the_files() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("model");
    let options = small(1, 5);
    let written = std::sync::atomic::AtomicU64::new(0);
    let summary = write(&out, &options, &|n| _ = written.fetch_add(n, Ordering::Relaxed)).unwrap();
    assert_eq!((summary.bytes, written.into_inner()), (size(&options), size(&options)));
    assert!(summary.shards > 1);
    let index = fs::read(out.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), summary.tensors);
    let mut seen = 0;
    for (file, bytes) in bytes_of(&out).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_ne!(header % 4, 0, "tensors of {file} would be aligned");
        let tensors = safetensors::SafeTensors::deserialize(bytes).unwrap();
        for (name, view) in tensors.tensors() {
            assert_eq!(map[&name], file.as_str());
            seen += view.data().len() as u64;
            if view.dtype() == safetensors::Dtype::BF16 {
                let values = view.data().chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32());
                assert!(values.clone().all(f32::is_finite) && values.clone().any(|v| v != 0.0), "{name}");
            }
        }
    }
    assert_eq!(seen, summary.bytes);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "no partial files are left");
}

#[test]
fn bytes_depend_on_seed_not_threads() {
    let root = tempfile::tempdir().unwrap();
    let make = |name: &str, options: &SynthOptions| {
        write(&root.path().join(name), options, &|_| ()).unwrap();
        bytes_of(&root.path().join(name))
    };
    let one = make("one", &SynthOptions { threads: 1, ..small(5, 2) });
    assert_eq!(one, make("four", &SynthOptions { threads: 4, ..small(5, 2) }));
    assert_ne!(one, make("other", &small(6, 2)));
}

#[test]
fn skew_makes_some_router_rows_larger() {
    let spread = |router_skew| {
        let tensors = layout::tensors(&SynthOptions { router_skew, ..small(1, 1) });
        let scales = tensors.iter().find(|t| t.name.ends_with("mlp.gate.scales")).unwrap();
        let mut bytes = vec![0; scales.bytes() as usize];
        scales.fill(0, &mut bytes);
        let sizes = bytes.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32().abs());
        sizes.clone().fold(0.0, f32::max) / sizes.fold(f32::MAX, f32::min)
    };
    assert!(spread(0.0) <= 1.51, "only the noise of 0.8 to 1.2");
    assert!(spread(1.0) > 4.0, "{}", spread(1.0));
}

#[test]
fn existing_directory_and_bad_sizes_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("model");
    fs::create_dir(&out).unwrap();
    write(&out, &small(1, 1), &|_| ()).unwrap();
    let before = bytes_of(&out);
    let text = write(&out, &small(2, 1), &|_| ()).unwrap_err().to_string();
    assert!(text.contains("overwrites nothing"), "{text}");
    assert_eq!(bytes_of(&out), before);
    let mut few = small(1, 1);
    few.dimensions.experts = 3;
    let text = write(&root.path().join("few"), &few, &|_| ()).unwrap_err().to_string();
    assert!(text.contains("3 experts are too few"), "{text}");
    let mut huge = small(1, 1);
    huge.dimensions.layers = 1000;
    huge.dimensions.expert_hidden = 1 << 20;
    let text = write(&root.path().join("huge"), &huge, &|_| ()).unwrap_err().to_string();
    assert!(text.contains("are free"), "{text}");
    assert!(!root.path().join("few").exists() && !root.path().join("huge").exists());
}
