//! The checkpoints in `tests/fixtures`. Each checkpoint is one file that expands into a directory, in MLX's or Hugging
//! Face's layout.

use super::tensors;
use std::{collections::HashMap, path::Path};

pub const DEMO: &str = test_support::DEMO;
pub const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");

/// The names of the checkpoints in `micro/`, one per encoding.
pub fn encodings() -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        Some(entry.unwrap().file_name().to_str()?.strip_suffix(".expected.safetensors")?.to_string())
    };
    let mut names: Vec<String> = std::fs::read_dir(format!("{FIXTURES}/micro")).unwrap().filter_map(name).collect();
    names.sort();
    assert_eq!(names.len(), 15);
    names
}

/// mlx-lm's logits and ids for the checkpoint `name`.
pub fn expected(name: &str) -> HashMap<String, Vec<f32>> {
    tensors(Path::new(&format!("{FIXTURES}/micro/{name}.expected.safetensors")))
}

/// A question to the demo and mlx-lm's answer.
#[derive(serde::Deserialize)]
pub struct Case {
    pub question: String,
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
}

/// The questions, and the logits of some questions. The keys contain the question's index: `0.prompt_logits`,
/// `0.decode_logits`.
pub fn demo() -> (Vec<Case>, HashMap<String, Vec<f32>>) {
    let cases = std::fs::read(format!("{FIXTURES}/demo/greedy.json")).unwrap();
    (serde_json::from_slice(&cases).unwrap(), tensors(Path::new(&format!("{FIXTURES}/demo/logits.safetensors"))))
}

/// A checkpoint in one file: its configuration and tensors.
pub struct Folded {
    pub config: String,
    pub file: Vec<u8>,
}

impl Folded {
    pub fn read(name: &str) -> Self {
        let file = std::fs::read(format!("{FIXTURES}/micro/{name}.safetensors")).unwrap();
        let (_, header) = safetensors::SafeTensors::read_metadata(&file).unwrap();
        Self { config: header.metadata().as_ref().unwrap()["config"].clone(), file }
    }

    /// A copy with another configuration and other tensors. `tensor` edits one tensor and returns whether to keep it.
    pub fn edit(&self, config: impl Fn(&mut serde_json::Value), tensor: impl Fn(&str, &mut Owned) -> bool) -> Self {
        let mut json = serde_json::from_str(&self.config).unwrap();
        config(&mut json);
        let file = safetensors::SafeTensors::deserialize(&self.file).unwrap();
        let mut tensors: HashMap<String, Owned> = HashMap::new();
        for (name, view) in file.tensors() {
            let mut owned = Owned { dtype: view.dtype(), shape: view.shape().to_vec(), data: view.data().to_vec() };
            if tensor(&name, &mut owned) {
                tensors.insert(name, owned);
            }
        }
        let views = tensors.iter().map(|(name, owned)| (name.as_str(), owned.view()));
        Self { config: json.to_string(), file: safetensors::serialize(views, None).unwrap() }
    }

    /// Expands the checkpoint into a directory in MLX's layout.
    pub fn unfold(&self) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), &self.config).unwrap();
        std::fs::write(dir.path().join("model.safetensors"), &self.file).unwrap();
        dir
    }

    /// Expands the same weights into a directory in a Hugging Face layout: zero-centred norms, `[C, 1, K]`
    /// convolutions, other names, and two shards with an index. If `fused`, all experts of a layer are one tensor.
    pub fn unfold_as_hugging_face(&self, fused: bool) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), &self.config).unwrap();
        let tensors = hugging_face(&self.file, fused);
        // Write two shards and an index.
        let mut map = serde_json::Map::new();
        let names: Vec<&String> = tensors.keys().collect();
        for (shard, names) in names.chunks(names.len().div_ceil(2)).enumerate() {
            let file = format!("model.safetensors-0000{}-of-00002.safetensors", shard + 1);
            let views = names.iter().map(|name| (name.as_str(), tensors[*name].view()));
            let bytes = safetensors::serialize(views, None).unwrap();
            std::fs::write(dir.path().join(&file), bytes).unwrap();
            map.extend(names.iter().map(|name| (name.to_string(), file.clone().into())));
        }
        let index = serde_json::json!({ "weight_map": map }).to_string();
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        dir
    }
}

pub struct Owned {
    pub dtype: safetensors::Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

impl Owned {
    fn view(&self) -> safetensors::tensor::TensorView<'_> {
        safetensors::tensor::TensorView::new(self.dtype, self.shape.clone(), &self.data).unwrap()
    }
}

fn hugging_face(file: &[u8], fused: bool) -> HashMap<String, Owned> {
    let mlx = safetensors::SafeTensors::deserialize(file).unwrap();
    let mut tensors = HashMap::new();
    for (name, tensor) in mlx.tensors() {
        let (mut dtype, mut shape, mut data) = (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec());
        if name.ends_with("conv1d.weight") {
            shape = vec![shape[0], 1, shape[1]];
        }
        if name.contains("norm") && !name.contains("linear_attn.norm") {
            // The file stores `1 + w` in bf16. Writing `w` in f32 loses no bits.
            let values = data.as_chunks::<2>().0.iter().map(|pair| half::bf16::from_le_bytes(*pair).to_f32() - 1.0);
            data = values.flat_map(f32::to_le_bytes).collect();
            dtype = safetensors::Dtype::F32;
        }
        let name = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm", "lm");
        if name.contains("switch_mlp") && !fused {
            let len = data.len() / shape[0];
            for (expert, data) in data.chunks(len).enumerate() {
                let name = name.replace("switch_mlp", &format!("experts.{expert}"));
                tensors.insert(name, Owned { dtype, shape: shape[1..].to_vec(), data: data.to_vec() });
            }
            continue;
        }
        tensors.insert(name, Owned { dtype, shape, data });
    }
    let gates: Vec<String> =
        tensors.keys().filter(|name| name.ends_with("switch_mlp.gate_proj.weight")).cloned().collect();
    for name in gates {
        let path = name.trim_end_matches("switch_mlp.gate_proj.weight").to_string();
        let gate = tensors.remove(&name).unwrap();
        let up = tensors.remove(&format!("{path}switch_mlp.up_proj.weight")).unwrap();
        let down = tensors.remove(&format!("{path}switch_mlp.down_proj.weight")).unwrap();
        let len = gate.data.len() / gate.shape[0];
        let pairs = gate.data.chunks(len).zip(up.data.chunks(len));
        let data = pairs.flat_map(|(gate, up)| [gate, up].concat()).collect();
        let shape = vec![gate.shape[0], 2 * gate.shape[1], gate.shape[2]];
        tensors.insert(format!("{path}experts.gate_up_proj"), Owned { dtype: gate.dtype, shape, data });
        tensors.insert(format!("{path}experts.down_proj"), down);
    }
    tensors
}
