//! Subcommands that serve, chat or manage models, one file per subcommand. Shared code finds and loads a checkpoint.
//! `tools` has the subcommands that measure.

mod agents;
mod answer_printer;
mod auto_pack;
mod chat_input;
mod chat_model;
mod chat_settings;
pub mod completions;
mod confirm;
mod conversation_file;
pub mod device_choice;
pub mod draft_source;
pub mod generate;
pub mod launch;
pub mod list;
mod local_model;
pub mod local_models;
pub mod log;
mod log_files;
pub mod man;
mod model_catalog;
pub mod pack;
pub mod progress;
pub mod ps;
pub mod pull;
mod remote_model;
mod remote_server;
pub mod rm;
pub mod run;
pub mod serve;
pub mod service;
pub mod show_config;

use crate::{
    cli::model_args::DraftArgs,
    config::{self, ExpertIo, GenerationDefaults, LoadSettings, ModelSource, Switch},
    demo,
    error::CommandError,
};
use device_choice::DeviceChoice;
use moestro_base::{error::StoreError, metrics::Metrics, platform::check_small_file};
use moestro_chat::{Template, Tokenizer};
use moestro_compute::{experts, ops::KvBits};
use moestro_engine::{self as engine, Sampling};
use moestro_model::{
    model::{self, CheckpointInfo, Model, Qwen, StoreOptions, VisionOptions, config::FfnShape},
    plan::{MachineLimits, Plan, PlanOptions, Size},
};
use serde::Serialize;
use serde_json::Value;
use std::{
    borrow::Cow,
    fmt::Display,
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
};

/// Prints a report as text or as one JSON object. A closed stdout is not an error.
pub fn show(report: &(impl Display + Serialize), json: bool) {
    let text = if json { serde_json::to_string_pretty(report).unwrap_or_default() + "\n" } else { report.to_string() };
    let _ = io::stdout().write_all(text.as_bytes());
}

/// Replaces control characters except line feed and tab, so that text from other programs cannot control the terminal.
pub fn printable(text: &str) -> Cow<'_, str> {
    let is_control = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if text.contains(is_control) { text.replace(is_control, "\u{fffd}").into() } else { text.into() }
}

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
    } else if !dir.join("config.json").exists() {
        not_a_checkpoint("it has no config.json")
    } else {
        for (name, most) in SMALL_FILES {
            let path = dir.join(name);
            check_small_file(&path, most).map_err(|source| StoreError::Io { path, source })?;
        }
        Ok(dir)
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
const SMALL_FILES: [(&str, u64); 6] = [
    ("config.json", 32 << 20),
    ("generation_config.json", 1 << 20),
    ("tokenizer.json", 256 << 20),
    ("tokenizer_config.json", 32 << 20),
    ("chat_template.jinja", 4 << 20),
    ("chat_template.json", 4 << 20),
];

/// A checkpoint without its weights: tokenizer, chat template and sampling defaults.
pub struct CheckpointMeta {
    pub dir: PathBuf,
    /// Last component of the path or hub id.
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
            ModelSource::Hub(id) => id.rsplit('/').next().unwrap_or(id).to_string(),
            _ => config::name(&dir),
        };
        if !dir.join("tokenizer.json").exists() {
            let why = "it has no tokenizer.json; `moestro pull ORG/NAME` downloads it".into();
            return Err(StoreError::NotACheckpoint { path: dir, why }.into());
        }
        let tokenizer = Tokenizer::load(&dir)?;
        let texts = config::generation_config::json(&dir.join("tokenizer_config.json"))?.unwrap_or_default();
        let has_template = dir.join("chat_template.jinja").exists() || !texts["chat_template"].is_null();
        let template = if has_template { Some(Template::load(&dir)?) } else { None };
        let mut generation = flags.or(GenerationDefaults::read(&dir)?);
        let end = texts["eos_token"].as_str().or(texts["eos_token"]["content"].as_str());
        let end = end.and_then(|text| tokenizer.id(text)).filter(|id| !generation.eos.contains(id));
        generation.eos.extend(end);
        Ok(Self { dir, name, tokenizer: Arc::new(tokenizer), template, generation })
    }

    /// Storage format of the weights, see [`quantization`].
    pub fn quantization(&self) -> Option<String> {
        quantization(&config::generation_config::json(&self.dir.join("config.json")).ok()??)
    }
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

/// Describes a memory plan: `on cpu, all experts in memory, context 32768`.
fn describe_plan(plan: &Value) -> String {
    let device = plan["device"].as_str().unwrap_or("?");
    let experts = describe_residency(plan["residency"].as_f64().unwrap_or(1.0));
    format!("on {device}, {experts}, context {}", plan["context"])
}

fn describe_residency(share: f64) -> String {
    if share < 1.0 {
        format!("{:.0} % of the experts in memory", share * 100.0)
    } else {
        "all experts in memory".into()
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

/// Aligns the columns of a table with a header. Columns are separated by two spaces. The last column is not padded.
pub fn table<const N: usize>(header: [&str; N], rows: &[[String; N]]) -> String {
    let all: Vec<[Cow<'_, str>; N]> = std::iter::once(header.map(Cow::from))
        .chain(rows.iter().map(|row| row.each_ref().map(|cell| printable(cell))))
        .collect();
    let width = |column: usize| all.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &all {
        let cells = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

/// The path of a directory, with `~` for the home directory.
pub fn short_path(path: &Path) -> String {
    let home = std::env::home_dir().filter(|home| !home.as_os_str().is_empty());
    match home.and_then(|home| Some(path.strip_prefix(home).ok()?.to_path_buf())) {
        Some(rest) => Path::new("~").join(rest).display().to_string(),
        None => path.display().to_string(),
    }
}

/// Adds the speculation flags to the engine's options.
pub fn speculation(drafts: Option<&DraftArgs>, options: engine::Options) -> engine::Options {
    let Some(drafts) = drafts.filter(|drafts| drafts.are_used()) else { return options };
    engine::Options {
        speculate: match drafts.speculation {
            config::SpeculationMode::Off => engine::DraftPolicy::Off,
            config::SpeculationMode::Auto => engine::DraftPolicy::Auto,
            config::SpeculationMode::Force => engine::DraftPolicy::Force,
        },
        draft_tokens: drafts.num_draft_tokens,
        ..options
    }
}

/// Starts the engine's thread.
pub fn start_engine(
    model: Qwen,
    draft: Box<dyn engine::Draft<Qwen>>,
    options: engine::Options,
    metrics: Arc<Metrics>,
) -> Result<(engine::Handle, engine::Worker), CommandError> {
    engine::spawn_with(model, draft, options, metrics).map_err(CommandError::io("starting the engine thread"))
}

/// A loaded model with its draft.
pub struct ReadyModel {
    pub model: Qwen,
    /// The draft. The default is prompt lookup.
    pub draft: Box<dyn engine::Draft<Qwen>>,
    /// Name of the device: `cpu`, `metal` or `cuda`.
    pub device: &'static str,
    /// Number of experts per token. `None` for a dense model.
    pub experts_per_token: Option<usize>,
    /// The memory plan, with the name of the device.
    pub plan: serde_json::Value,
    /// Number of bytes that the plan reserves for requests.
    pub requests: u64,
}

/// Converts the value of `--kv-bits`.
pub fn kv_bits(bits: config::KvBitsArg) -> KvBits {
    match bits {
        config::KvBitsArg::Sixteen => KvBits::Sixteen,
        config::KvBitsArg::Eight => KvBits::Eight,
        config::KvBitsArg::Four => KvBits::Four,
    }
}

/// Converts the loading flags to the model's options.
pub fn options(load: &LoadSettings) -> model::LoadOptions {
    let cores = thread::available_parallelism().map_or(usize::MAX, usize::from);
    let flags = &load.flags;
    if let Some(threads) = flags.threads.filter(|&threads| threads > cores) {
        tracing::warn!(
            "--threads {threads}: this machine has {cores} cores; more threads than cores slow decoding down"
        );
    }
    model::LoadOptions {
        threads: flags.threads,
        plan: PlanOptions {
            prompt_cache: load.prompt_cache,
            limit: flags.memory_limit,
            stream: flags.stream_experts.decided(),
            context: flags.ctx_size,
            chunk: flags.prefill_chunk,
            parallel: load.parallel,
            sequences: 1,
            serving: load.serving,
            buffered: flags.expert_io == ExpertIo::Buffered,
        },
        experts_per_token: flags.experts_per_token,
        max_experts_per_token: load.max_experts_per_token,
        verify: load.drafts.as_ref().is_some_and(DraftArgs::are_used),
        kv_bits: kv_bits(flags.kv_bits),
        vision: VisionOptions { disabled: flags.no_vision, max_tokens: flags.image_max_tokens },
        store: StoreOptions {
            slots: None,
            io: match flags.expert_io {
                ExpertIo::Auto => experts::ReadMode::Auto,
                ExpertIo::Direct => experts::ReadMode::Direct,
                ExpertIo::Buffered => experts::ReadMode::Buffered,
            },
            threads: flags.io_threads,
            prefetch: match flags.prefetch {
                Switch::Auto => experts::Prefetch::Auto,
                Switch::On => experts::Prefetch::On,
                Switch::Off => experts::Prefetch::Off,
            },
            warm: true,
            ..StoreOptions::default()
        },
        gpu_awake: flags.gpu_awake.decided(),
        ..model::LoadOptions::default()
    }
}

/// Inspects the draft, and returns it with the options of the model.
fn inspect_draft(
    checkpoint: &CheckpointMeta,
    load: &LoadSettings,
    gpu: Option<u64>,
) -> Result<(draft_source::DraftSource, model::LoadOptions), CommandError> {
    let found = draft_source::DraftSource::new(load, &checkpoint.dir, Some(&checkpoint.tokenizer))?;
    let options = model::LoadOptions { gpu, draft: found.shape(), drafter: found.drafter(), ..options(load) };
    Ok((found, options))
}

/// Checks a model's tensors and memory plan as [`load_model`] does, without loading the weights. `gpu` is the GPU's
/// working set. The plan counts no memory for the process itself, whose memory includes another model now.
pub fn check_model(checkpoint: &CheckpointMeta, load: &LoadSettings, gpu: Option<u64>) -> Result<(), CommandError> {
    let (_, options) = inspect_draft(checkpoint, load, gpu)?;
    let limits = MachineLimits { process: 0, ..MachineLimits::here(gpu) };
    CheckpointInfo::new(&checkpoint.dir, &options)?.plan(&limits, &options.plan)?;
    Ok(())
}

/// Loads a model on the CPU and shows a progress bar.
pub fn load_weights(
    dir: &Path,
    name: &str,
    options: &model::LoadOptions,
    metrics: &Arc<Metrics>,
) -> Result<Qwen, CommandError> {
    let bar = progress::bytes(0, format!("Loading {name}"));
    let model = Qwen::load(dir, options, metrics, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(model?)
}

/// Loads a model with its draft, and moves it to the chosen device.
pub fn load_model(
    checkpoint: &CheckpointMeta,
    load: &LoadSettings,
    chosen: DeviceChoice,
    metrics: &Arc<Metrics>,
) -> Result<ReadyModel, CommandError> {
    let (found, options) = inspect_draft(checkpoint, load, chosen.working_set())?;
    let model = load_weights(&checkpoint.dir, &checkpoint.name, &options, metrics)?;
    let model = chosen.place(model)?;
    let draft = found.load(&model)?;
    if let Some(images) = model.info().images {
        tracing::info!(most_tokens = images.max_tokens(), "the model reads images");
    }
    let device = device_choice::name(&model);
    metrics.set_device(device);
    let experts_per_token = match model.config().ffn {
        FfnShape::Moe { k, .. } => Some(k),
        FfnShape::Dense { .. } => None,
    };
    tracing::info!("memory plan of {}: {}", checkpoint.name, plan_line(model.plan()));
    let requests = model.plan().requests;
    let mut plan = serde_json::to_value(model.plan()).unwrap_or_default();
    plan["device"] = device.into();
    plan["reserved"] = model.plan().total().into();
    Ok(ReadyModel { model, draft, device, experts_per_token, plan, requests })
}

/// Describes a memory plan in one line: `2.51 GiB of 8.00 GiB: trunk 1.20 GiB, ...; 24 % of the experts in memory,
/// context 32768 tokens`.
fn plan_line(plan: &Plan) -> String {
    let parts = [
        ("trunk", plan.trunk),
        ("experts", plan.experts),
        ("keys and values", plan.kv),
        ("workspace", plan.workspace),
        ("prompt cache", plan.prompt_cache),
        ("draft", plan.draft),
    ];
    let parts = parts.iter().filter(|(_, bytes)| *bytes > 0).map(|(name, bytes)| format!("{name} {}", Size(*bytes)));
    let parts: Vec<String> = parts.collect();
    let residency = describe_residency(plan.residency);
    let total = Size(plan.total());
    let limit = Size(plan.limit);
    format!("{total} of {limit}: {}; {residency}, context {} tokens", parts.join(", "), plan.context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_aligns_columns_under_headers() {
        let rows = [["a".into(), "1.0 GiB".into()], ["longer\x1b".into(), "2".into()]];
        assert_eq!(table(["NAME", "SIZE"], &rows), "NAME     SIZE\na        1.0 GiB\nlonger\u{fffd}  2\n");
    }

    #[test]
    fn control_characters_are_replaced() {
        assert_eq!(printable("a\tb\n"), "a\tb\n");
        assert_eq!(printable("a\x1b]52;c;eA==\x07\u{9b}1m\r"), "a\u{fffd}]52;c;eA==\u{fffd}\u{fffd}1m\u{fffd}");
    }
}
