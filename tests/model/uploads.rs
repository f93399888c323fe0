//! Uploads whose files are in folders or have other names, and files that are not what their names say. A layout that
//! loads gives the logits of the original. Any other layout is refused with the file and the remedy.

use crate::{
    common::{fixtures::FIXTURES, load, load_error, tensor_file::serialized},
    layouts::{INDEX, Layout, POINTER, check_same, logits},
    quantizations::read,
};
use moestro_compute::device::CpuArithmetic;
use moestro_model::model::Model;
use safetensors::Dtype;
use serde_json::json;
use std::{collections::BTreeMap, fs, path::Path};

/// The error of loading a small checkpoint whose directory was changed.
fn refusal(change: impl FnOnce(&Path)) -> String {
    let dir = Layout::of("affine4").written();
    change(dir.path());
    load_error(dir.path())
}

#[test]
fn wrapped_modules_give_same_logits() {
    for module in ["_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"] {
        for part in ["layers.0.", "mlp.", "self_attn.q_proj.", "lm_head.", "language_model."] {
            let what = format!("{part}{module}");
            let rename = |layout: &mut Layout| layout.rename(|name| name.replace(part, &format!("{part}{module}.")));
            check_same("affine4", &[(&what, &rename)]);
        }
    }
}

#[test]
fn fused_stacks_give_same_logits() {
    for name in ["affine4", "mixed", "mxfp4", "mxfp8", "nvfp4", "bf16"] {
        let fuse = |layout: &mut Layout| {
            let is_gate = |name: &&String| name.contains("switch_mlp.gate_proj.");
            for gate in layout.tensors.keys().filter(is_gate).cloned().collect::<Vec<_>>() {
                let (dtype, mut shape, first) = layout.tensors.remove(&gate).unwrap();
                let (_, other, second) = layout.tensors.remove(&gate.replace("gate_proj", "up_proj")).unwrap();
                assert_eq!(shape, other, "{name}: gate and up have the same format");
                let expert = first.len() / shape[0];
                let pairs = first.chunks(expert).zip(second.chunks(expert));
                let data = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
                shape[1] *= 2;
                layout.tensors.insert(gate.replace("gate_proj", "gate_up_proj"), (dtype, shape, data));
            }
        };
        check_same(name, &[("gate and up in one tensor", &fuse)]);
    }
}

#[test]
fn scales_of_activations_are_ignored() {
    let matrix = "language_model.model.layers.0.mlp.shared_expert.gate_proj";
    for part in ["input_scale", "activation_scale"] {
        check_same("affine4", &[(part, &|layout| layout.add(&format!("{matrix}.{part}"), Dtype::F32, &[1]))]);
    }
}

#[test]
fn shards_in_a_folder_give_same_logits() {
    let mut layout = Layout::of("affine4");
    let known = layout.logits();
    let index = layout.divide("model", 2);
    layout.index = Some(index.into_iter().map(|(name, file)| (name, format!("weights/{file}"))).collect());
    let dir = layout.written();
    fs::create_dir(dir.path().join("weights")).unwrap();
    for file in &layout.files {
        fs::rename(dir.path().join(file), dir.path().join("weights").join(file)).unwrap();
    }
    assert!(logits(dir.path()) == known);
    fs::remove_file(dir.path().join("weights").join(&layout.files[1])).unwrap();
    assert!(load_error(dir.path()).contains("missing, such as weights/model-00002-of-00002.safetensors"));
}

/// OptiQ writes the tower to a separate file, which its index may name.
#[test]
fn tower_in_its_own_file_reads_images() {
    let fixture = format!("{FIXTURES}/vision");
    let rows = |dir: &Path| {
        let model = load(dir, CpuArithmetic::Integer);
        let image = fs::read(format!("{fixture}/images/gradient.png")).unwrap();
        let image = model.info().images.map(|images| images.prepare(&image, None).unwrap());
        image.map(|image| model.encode_image(&image).unwrap())
    };
    let known = rows(Path::new(&format!("{fixture}/mlx_4bit"))).unwrap();
    let (all, _) = read(&fs::read(format!("{fixture}/mlx_4bit/model.safetensors")).unwrap());
    let (tower, text): (BTreeMap<_, _>, _) = all.into_iter().partition(|(name, _)| name.starts_with("vision_tower."));
    for (file, is_listed, is_used) in [
        ("optiq/optiq_vision.safetensors", false, true),
        ("optiq/optiq_vision.safetensors", true, true),
        ("optiq_vision.safetensors", false, true),
        ("vision/tower.safetensors", true, true),
        ("vision/tower.safetensors", false, false),
    ] {
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "preprocessor_config.json"] {
            fs::copy(format!("{fixture}/mlx_4bit/{name}"), dir.path().join(name)).unwrap();
        }
        let path = dir.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, serialized(&tower)).unwrap();
        fs::write(dir.path().join("model.safetensors"), serialized(&text)).unwrap();
        let names = text.keys().map(|name| (name.clone(), "model.safetensors"));
        let listed = tower.keys().filter(|_| is_listed).map(|name| (name.clone(), file));
        let map: BTreeMap<_, _> = names.chain(listed).collect();
        fs::write(dir.path().join(INDEX), json!({"weight_map": map}).to_string()).unwrap();
        let found = rows(dir.path());
        assert_eq!(found.as_ref(), is_used.then_some(&known), "{file}, listed: {is_listed}");
        // Earlier versions did not download the file.
        fs::write(&path, POINTER).unwrap();
        if !is_listed {
            assert!(rows(dir.path()).is_none(), "{file}");
        }
        fs::remove_file(&path).unwrap();
        assert!(rows(dir.path()).is_none(), "{file}");
    }
}

#[test]
fn unknown_names_of_tensors_are_named() {
    for prefix in ["thinker.model.", "text_model.", "transformer."] {
        let mut layout = Layout::of("affine4");
        layout.rename(|name| name.replace("language_model.model.", prefix));
        let reason = format!("the prefix of {prefix}embed_tokens.weight is not known");
        assert!(layout.refusal().contains(&reason), "{}", layout.refusal());
    }
    // The layer of an MTP head does not show the prefix of the model's layers.
    let mut layout = Layout::of("affine4");
    layout.rename(|name| name.replace("language_model.model.layers.0.input_layernorm", "mtp.layers.0.input_layernorm"));
    let error = layout.refusal();
    assert!(error.contains("layers.0.input_layernorm.weight is missing (looked for it in"), "{error}");
    let mut layout = Layout::of("affine4");
    layout.rename(|name| name.replace("lm_head.", "lm_head.modules_to_save.default."));
    assert!(layout.refusal().contains("unmerged LoRA"), "{}", layout.refusal());
}

#[test]
fn directory_without_weights_names_other_files() {
    for (file, remedy) in [
        ("adapter_model.safetensors", "which is an adapter; merge it into its model"),
        ("model-Q4_K_M.gguf", "pull an MLX version of the model"),
        ("pytorch_model.bin", "convert it to safetensors files"),
        ("weights.npz", "convert it to safetensors files"),
        ("model.safetensors.crdownload", "an unfinished download; finish it"),
        ("pytorch_model.safetensors", "if it is the whole model, rename it to model.safetensors"),
        ("consolidated.safetensors", "if it is the whole model, rename it to model.safetensors"),
        ("Model.safetensors", "if it is the whole model, rename it to model.safetensors"),
    ] {
        let error = refusal(|dir| fs::rename(dir.join("model.safetensors"), dir.join(file)).unwrap());
        assert!(error.contains(&format!("it has no model*.safetensors; it has {file}, ")), "{error}");
        assert!(error.contains(remedy), "{error}");
    }
    let error = refusal(|dir| {
        fs::remove_file(dir.join("model.safetensors")).unwrap();
        std::os::unix::fs::symlink("../blobs/0", dir.join("model.safetensors")).unwrap();
    });
    assert!(error.contains("model.safetensors is a link to a missing file; download it again"), "{error}");
    let error = refusal(|dir| fs::remove_file(dir.join("model.safetensors")).unwrap());
    assert!(error.ends_with("it has no model*.safetensors"), "{error}");
}

#[test]
fn other_contents_of_files_are_refused() {
    let page = "<!DOCTYPE html><html><body>Not Found</body></html>";
    for (file, text, reason) in [
        ("model.safetensors", page, "it is not a safetensors file"),
        ("model.safetensors", "PK\u{3}\u{4} a zip archive, as PyTorch writes", "it is not a safetensors file"),
        ("model.safetensors", POINTER, "it is a Git LFS pointer"),
        ("model.safetensors", "", "too short for a safetensors file"),
        ("config.json", page, "it is a web page, not the file; download it again"),
        ("config.json", POINTER, "it is a Git LFS pointer"),
        ("config.json", "\n", "it is empty; download it again"),
        ("config.json", "{\"model_type\": ", "it is not valid JSON: EOF"),
    ] {
        let error = refusal(|dir| fs::write(dir.join(file), text).unwrap());
        assert!(error.contains(file) && error.contains(reason), "{error}");
    }
}

/// Divides a model into `count` shards, and adds a tensor of one shard to the other shards, with other bytes. The index
/// names the shard with the right bytes, number `right`.
fn repeat_tensor(layout: &mut Layout, count: usize, right: usize) {
    let index = layout.divide("model", count);
    let files = layout.files.clone();
    let (repeated, _) = index.iter().find(|(_, file)| **file == files[right]).unwrap();
    let (dtype, shape, data) = layout.tensors[repeated].clone();
    for other in files.iter().filter(|file| **file != files[right]) {
        let mut tensors = layout.tensors.clone();
        tensors.retain(|name, _| index[name] == *other);
        tensors.insert(repeated.clone(), (dtype, shape.clone(), vec![0; data.len()]));
        layout.extras.push((other.clone(), serialized(tensors.iter())));
    }
    layout.index = Some(index);
}

#[test]
fn repeated_tensor_comes_from_indexed_shard() {
    for (count, right) in [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)] {
        let what = format!("shard {right} of {count}");
        check_same("affine4", &[(&what, &|layout| repeat_tensor(layout, count, right))]);
    }
}

#[test]
fn repeated_tensor_needs_an_index() {
    for count in [2, 3] {
        let mut layout = Layout::of("affine4");
        repeat_tensor(&mut layout, count, count - 1);
        layout.index = None;
        let [one, two] = [1, 2].map(|number| format!("model-{number:05}-of-{count:05}.safetensors"));
        let error = layout.refusal();
        let sentence = format!(" is in two shards, {one} and {two}, and no index says which one to use");
        assert!(error.contains(&sentence), "{error}");
    }
}

#[test]
fn transposed_convolution_is_refused() {
    let mut layout = Layout::of("affine4");
    let (name, (_, shape, _)) = layout.tensors.iter_mut().find(|(name, _)| name.ends_with("conv1d.weight")).unwrap();
    shape.reverse();
    let (name, shape) = (name.clone(), shape.clone());
    let error = layout.refusal();
    assert!(error.contains(&name) && error.contains(&format!("{shape:?}")), "{error}");
}

#[test]
fn blank_embedding_and_head_are_refused() {
    let blank = |parts: &[&str]| {
        let mut layout = Layout::of("affine4");
        let zeroed = layout.tensors.iter_mut().filter(|(name, _)| parts.iter().any(|part| name.contains(part)));
        zeroed.for_each(|(_, (_, _, data))| data.fill(0));
        layout
    };
    for (part, what) in [("embed_tokens", "the embedding"), ("lm_head", "the LM head"), ("", "the embedding")] {
        let error = blank(&[part]).refusal();
        assert!(
            error.contains(&format!("{what} (")) && error.contains("is zero, as in a file whose download did not end"),
            "{part}: {error}"
        );
    }
    for part in ["embed_tokens.weight", "embed_tokens.scales", "lm_head.weight", "lm_head.scales", "model.norm.weight"]
    {
        assert!(blank(&[part]).refusal().contains(" is zero, as in a file whose download did not end"), "{part}");
    }
    // A layer that is zero does nothing.
    blank(&["layers.0."]).logits();
}

#[test]
fn vectors_that_are_not_finite_are_refused() {
    let layout = Layout::of("affine4");
    let is_vector =
        |name: &&String| ["norm.weight", "A_log", "dt_bias", "conv1d.weight"].iter().any(|end| name.ends_with(end));
    let names: Vec<_> = layout.tensors.keys().filter(is_vector).cloned().collect();
    assert_eq!(names.len(), 11, "{names:?}");
    for (number, name) in names.iter().enumerate() {
        let mut layout = Layout::of("affine4");
        let (dtype, _, data) = layout.tensors.get_mut(name).unwrap();
        let wrong = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][number % 3];
        let bytes = match dtype {
            Dtype::F32 => wrong.to_le_bytes().to_vec(),
            // BF16 is the upper half of an F32.
            _ => wrong.to_le_bytes()[2..].to_vec(),
        };
        let count = data.len() / bytes.len();
        data[number * 7 % count * bytes.len()..][..bytes.len()].copy_from_slice(&bytes);
        let error = layout.refusal();
        assert!(error.contains(&format!("has the value {wrong}")), "{name}: {error}");
    }
}
