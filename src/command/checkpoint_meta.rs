//! A checkpoint without its weights: finds its directory, and reads its tokenizer, chat template and sampling defaults.

use super::pull;
use crate::{
    config::{self, GenerationDefaults, ModelSource},
    demo,
    error::CommandError,
};
use moestro_base::{error::StoreError, platform::check_small_file};
use moestro_chat::{Template, Tokenizer};
use moestro_engine::Sampling;
use serde_json::Value;
use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Returns the directory of a checkpoint. Unpacks the demo model, or downloads a model of the hub. Checks that the
/// files exist.
pub fn resolve(source: &ModelSource) -> Result<PathBuf, CommandError> {
    let dir = match source {
        ModelSource::Demo => demo::unpack()?,
        ModelSource::Directory(path) => path.clone(),
        ModelSource::Hub(id) => pull::find_or_download(id)?,
    };
    let not_a_checkpoint = |why: &str| Err(StoreError::NotACheckpoint { path: dir.clone(), why: why.into() }.into());
    if !dir.exists() {
        Err(CommandError::NoSuchDirectory(dir))
    } else if is_gguf(&dir) {
        not_a_checkpoint(
            "it is a GGUF file, which Moestro does not read; pull an MLX version of the model, such as one of mlx-community",
        )
    } else if !dir.is_dir() {
        not_a_checkpoint("it is a file; a checkpoint is a directory with config.json, tokenizer.json and *.safetensors")
    } else {
        // Before `exists`, which is false for a link to a missing file and for a loop of links.
        for (name, most) in SMALL_FILES {
            let path = dir.join(name);
            check_small_file(&path, most).map_err(|source| StoreError::Io { path, source })?;
        }
        if dir.join("config.json").exists() {
            Ok(dir)
        } else if dir.join("adapter_config.json").exists() {
            not_a_checkpoint("it is an adapter; merge it into its model")
        } else {
            not_a_checkpoint("it has no config.json")
        }
    }
}

/// True for a GGUF file, and for a directory that has a GGUF file and no `config.json`.
fn is_gguf(path: &Path) -> bool {
    let is_file = |path: &Path| path.extension().is_some_and(|ending| ending == "gguf");
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    is_file(path) || !path.join("config.json").exists() && entries.take(1_000).any(|entry| is_file(&entry.path()))
}

/// The files of a checkpoint that are read whole, with their size limits in bytes. A pipe or a device in place of such
/// a file is an error, because reading it could block.
const SMALL_FILES: [(&str, u64); 5] = [
    ("config.json", 32 << 20),
    ("generation_config.json", 32 << 20),
    ("tokenizer.json", 256 << 20),
    ("tokenizer_config.json", 32 << 20),
    ("chat_template.jinja", 32 << 20),
];

/// A checkpoint without its weights: tokenizer, chat template and sampling defaults.
pub struct CheckpointMeta {
    pub dir: PathBuf,
    /// The name in messages: the last component of the path or hub id, or the id in the list of models.
    pub name: String,
    pub tokenizer: Arc<Tokenizer>,
    /// `None` for a base model.
    pub template: Option<Template>,
    /// The sampling defaults of the checkpoint. The flags override them.
    pub generation: GenerationDefaults,
}

impl CheckpointMeta {
    /// Opens a checkpoint. `flags` are the sampling flags.
    pub fn open(source: &ModelSource, flags: GenerationDefaults) -> Result<Self, CommandError> {
        let dir = resolve(source)?;
        let name = match source {
            ModelSource::Hub(id) => id.clone(),
            _ => config::name(&dir),
        };
        let name = name.rsplit('/').next().unwrap_or(&name).to_string();
        if !dir.join("tokenizer.json").exists() {
            let why = if dir.join("merges.txt").exists() {
                "it has merges.txt, but no tokenizer.json; copy that of the original model, or save the tokenizer with transformers"
            } else {
                "it has no tokenizer.json; `moestro pull ORG/NAME` downloads it"
            };
            return Err(StoreError::NotACheckpoint { path: dir, why: why.into() }.into());
        }
        let tokenizer = Tokenizer::load(&dir)?;
        let template = Template::find(&dir)?;
        let ends = end_tokens(&dir, &tokenizer, template.as_ref())?;
        let generation = flags.or(GenerationDefaults::read(&dir)?).or(GenerationDefaults::ending_at(ends));
        // Without its added tokens, a tokenizer encodes the marks of the chat template as text.
        if template.is_some()
            && let Some(first) = generation.eos.first()
            && generation.eos.iter().all(|id| tokenizer.token(*id).is_none())
        {
            let why = format!("its tokenizer.json has no token {first}, which ends an answer");
            return Err(StoreError::NotACheckpoint { path: dir, why }.into());
        }
        Ok(Self { dir, name, tokenizer: Arc::new(tokenizer), template, generation })
    }

    /// Storage format of the weights, see [`quantization`].
    pub fn quantization(&self) -> Option<String> {
        quantization(&config::generation_config::json(&self.dir.join("config.json")).ok()??)
    }
}

/// The tokens that end an answer according to the tokenizer's configuration and the template. The files of base models
/// that were tuned for chat often name only the end of a document, but the template ends each turn with `<|im_end|>`.
fn end_tokens(dir: &Path, tokenizer: &Tokenizer, template: Option<&Template>) -> Result<Vec<u32>, CommandError> {
    let texts = config::generation_config::json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
    let declared = texts["eos_token"].as_str().or(texts["eos_token"]["content"].as_str());
    let declared = declared.and_then(|text| tokenizer.id(text));
    let after_answer = template.and_then(Template::after_answer);
    let turn = after_answer.and_then(|text| tokenizer.encode(text.trim_start()).ok()?.first().copied());
    Ok(declared.into_iter().chain(turn.filter(|id| tokenizer.is_added(*id))).collect())
}

impl GenerationDefaults {
    /// Sampling parameters for requests that do not set them. If a default is not set, tokens are drawn from the
    /// model's unchanged distribution.
    pub fn sampling(&self) -> Sampling {
        let neutral = Sampling::default();
        Sampling {
            temperature: self.temperature.unwrap_or(neutral.temperature),
            top_p: self.top_p.unwrap_or(neutral.top_p),
            top_k: self.top_k.unwrap_or(neutral.top_k),
            min_p: self.min_p.unwrap_or(neutral.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(neutral.repetition_penalty),
            ..neutral
        }
    }
}

/// Storage format of the weights of a `config.json`: `4-bit affine, groups of 64`, or the data type of unquantized
/// weights.
pub fn quantization(config: &Value) -> Option<String> {
    let table = config.get("quantization").or(config.get("quantization_config"));
    let bits = table.and_then(|table| table["bits"].as_u64());
    match (table, bits) {
        (Some(table), Some(bits)) => {
            let mode = table["mode"].as_str().unwrap_or("affine");
            let groups = table["group_size"].as_u64().map(|size| format!(", groups of {size}"));
            Some(format!("{bits}-bit {mode}{}", groups.unwrap_or_default()))
        }
        _ => {
            let text = &config["text_config"];
            let kinds = [&config["dtype"], &config["torch_dtype"], &text["dtype"], &text["torch_dtype"]];
            kinds.into_iter().find_map(|kind| kind.as_str()).map(str::to_owned)
        }
    }
}
