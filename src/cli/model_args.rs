//! Flags that several commands share: the model, how it is loaded, drafts, sampling, and the address of a server.

use super::values::{self, Device, DraftModel, Switch};
use clap::{
    Args,
    builder::{BoolishValueParser, NonEmptyStringValueParser},
};
use moestro_compute::{
    experts::{Prefetch, ReadMode},
    ops::KvBits,
};
use moestro_engine::DraftPolicy;
use moestro_model::plan::Parallel;
use std::path::PathBuf;

/// The model of a command.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// A directory, a hub id (org/name) or a name from `moestro list` [default: the demo model]
    #[arg(env = "MOESTRO_MODEL", value_name = "MODEL", value_parser = NonEmptyStringValueParser::new())]
    pub model: Option<String>,
    /// The same as MODEL
    #[arg(short = 'm', long = "model", id = values::MODEL_OPTION, value_name = "MODEL")]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub option: Option<String>,
}

/// Flags for loading a model.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct LoadArgs {
    /// Memory limit: 8GiB, 8G, 500M [default: 75 % of RAM, or less on a GPU or in a control group]
    #[arg(long, env = "MOESTRO_MEMORY_LIMIT", value_name = "SIZE", value_parser = values::size, help_heading = "Memory")]
    pub memory_limit: Option<u64>,
    /// Context size in tokens, prompt and answer together [default: as many as fit]
    #[arg(short, long, aliases = ["context-length", "context-size", "max-model-len", "num-ctx"], env = "MOESTRO_CTX_SIZE", value_name = "N", value_parser = values::up_to::<16_777_216>, help_heading = "Memory")]
    pub ctx_size: Option<usize>,
    /// Bits per key or value: 8 and 4 take 0.53 and 0.28 of the memory of 16 but change answers a little (see `bench
    /// --quality`); the newest 64 to 127 positions keep 16 bits, or f32 on a GPU
    #[arg(long, env = "MOESTRO_KV_BITS", value_name = "16|8|4", default_value = "16", value_parser = values::kv_bits, help_heading = "Memory", hide_short_help = true)]
    pub kv_bits: KvBits,
    /// Read experts from the SSD when they are needed; auto: if they do not all fit in memory
    #[arg(long, env = "MOESTRO_STREAM_EXPERTS", value_enum, default_value_t, num_args = 0..=1, default_missing_value = "on", help_heading = "Memory", hide_short_help = true)]
    pub stream_experts: Switch,
    /// Device that computes
    #[arg(long, env = "MOESTRO_DEVICE", value_enum, default_value_t, help_heading = "Speed")]
    pub device: Device,
    /// Compute threads of the CPU [default: the physical cores]
    #[arg(short, long, alias = "num-threads", env = "MOESTRO_THREADS", value_name = "N", value_parser = values::up_to::<1_024>, help_heading = "Speed")]
    pub threads: Option<usize>,
    /// Read experts directly or through the page cache
    #[arg(long, env = "MOESTRO_EXPERT_IO", default_value = "auto", value_parser = values::expert_io())]
    #[arg(help_heading = "Speed", hide_short_help = true)]
    pub expert_io: ReadMode,
    /// Maximum number of expert reads in flight
    #[arg(long, env = "MOESTRO_IO_THREADS", value_name = "N", default_value_t = 16, value_parser = values::up_to::<1_024>, help_heading = "Speed", hide_short_help = true)]
    pub io_threads: usize,
    /// Prefetch the experts that the next layers will probably need
    #[arg(long, env = "MOESTRO_PREFETCH", default_value = "auto", value_parser = values::prefetch(), help_heading = "Speed", hide_short_help = true)]
    pub prefetch: Prefetch,
    /// Keep the GPU's clock high while experts are read, with small launches on the idle GPU; auto: on Metal
    #[arg(long, env = "MOESTRO_GPU_AWAKE", value_enum, default_value_t)]
    #[arg(help_heading = "Speed", hide_short_help = true)]
    pub gpu_awake: Switch,
    /// Use fewer experts per token than the model was trained with: faster, but a worse model; a value
    /// above the model's own number has no effect [default: as the model was trained]
    #[arg(long, env = "MOESTRO_EXPERTS_PER_TOKEN", value_name = "N", value_parser = values::count, help_heading = "Speed", hide_short_help = true)]
    pub experts_per_token: Option<usize>,
    /// Prompt tokens per forward pass [default: as many as fit]
    #[arg(long, aliases = ["prefill-size", "prefill-step-size"], env = "MOESTRO_PREFILL_CHUNK", value_name = "N", value_parser = values::up_to::<65_536>, help_heading = "Speed", hide_short_help = true)]
    pub prefill_chunk: Option<usize>,
    /// Read text only: load no vision tower, and keep no memory for images
    #[arg(long, env = "MOESTRO_NO_VISION", value_parser = BoolishValueParser::new(), help_heading = "Memory", hide_short_help = true)]
    pub no_vision: bool,
    /// Maximum number of tokens of an image; larger images are scaled down [default: 1024 on a CPU, 2048 on Metal]
    #[arg(long, env = "MOESTRO_IMAGE_MAX_TOKENS", value_name = "N", value_parser = values::up_to::<65_536>, help_heading = "Memory", hide_short_help = true)]
    pub image_max_tokens: Option<usize>,
}

/// Requests that run at the same time.
#[derive(Debug, Args)]
pub struct ParallelArgs {
    /// Requests that run at the same time; auto: 4 if all experts fit with room to spare, else 2, or 1 if memory is
    /// short
    #[arg(long, env = "MOESTRO_PARALLEL", value_name = "N|auto", default_value = "auto", value_parser = values::parallel, help_heading = "Memory", hide_short_help = true)]
    pub parallel: Parallel,
}

/// Snapshots of earlier prompts, reused by later ones.
#[derive(Debug, Args)]
pub struct PromptCacheArgs {
    /// Memory of the prompt cache: 1GiB, 500M or off [default: 1/16 of the memory beyond the smallest plan, at most
    /// 2GiB]
    #[arg(long, env = "MOESTRO_PROMPT_CACHE", value_name = "SIZE|off", value_parser = values::size_or_off, help_heading = "Memory", hide_short_help = true)]
    pub prompt_cache: Option<u64>,
}

/// Flags of speculation: several tokens per pass, where that is faster. It never changes an answer.
#[derive(Debug, Clone, PartialEq, Args)]
pub struct DraftArgs {
    /// Source of drafts, which never change an answer: mtp is the checkpoint's MTP head, lookup repeats earlier text;
    /// or a directory or hub id with an MTP head, a DFlash draft or a small model of the same vocabulary; auto is mtp
    /// if there is a head, else lookup
    #[arg(long, env = "MOESTRO_DRAFT_MODEL", value_name = "auto|mtp|lookup|off|PATH|ID", default_value = "auto", value_parser = values::draft, help_heading = "Speed", hide_short_help = true)]
    pub draft_model: DraftModel,
    /// Maximum number of tokens drafted at a time
    #[arg(long, aliases = ["num-mtp-tokens", "draft-max", "draft", "num-speculative-tokens"], env = "MOESTRO_NUM_DRAFT_TOKENS", value_name = "N", default_value_t = 7, value_parser = values::drafts, help_heading = "Speed", hide_short_help = true)]
    pub num_draft_tokens: usize,
    /// When to use drafts; auto: while they save time
    #[arg(long, env = "MOESTRO_SPECULATION", default_value = "auto", value_parser = values::speculation())]
    #[arg(help_heading = "Speed", hide_short_help = true)]
    pub speculation: DraftPolicy,
}

/// Defaults of answers. Without a sampling flag, the model's generation_config.json applies.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// Temperature, 0 to 2; 0 means greedy [default: the model's]
    #[arg(long, alias = "temperature", env = "MOESTRO_TEMP", value_name = "T", value_parser = values::temperature, help_heading = "Sampling")]
    pub temp: Option<f32>,
    /// Sample from the smallest set of likeliest tokens with this total probability [default: the model's]
    #[arg(long, env = "MOESTRO_TOP_P", value_name = "P", value_parser = values::probability, help_heading = "Sampling")]
    pub top_p: Option<f32>,
    /// Sample from the N likeliest tokens; 0 means all [default: the model's]
    #[arg(long, env = "MOESTRO_TOP_K", value_name = "N", value_parser = values::range::<0, { usize::MAX }>, help_heading = "Sampling", hide_short_help = true)]
    pub top_k: Option<usize>,
    /// Sample only tokens with at least this fraction of the likeliest token's probability [default: the model's]
    #[arg(long, env = "MOESTRO_MIN_P", value_name = "P", value_parser = values::probability, help_heading = "Sampling", hide_short_help = true)]
    pub min_p: Option<f32>,
    /// Penalty for repeated tokens; above 1 makes them less likely [default: the model's]
    #[arg(long, alias = "repetition-penalty", env = "MOESTRO_REPEAT_PENALTY", value_name = "R", value_parser = values::positive, help_heading = "Sampling", hide_short_help = true)]
    pub repeat_penalty: Option<f32>,
    /// Maximum number of tokens of an answer, if a request sets no limit [default: to the end of the context]
    #[arg(short = 'n', long, aliases = ["n-predict", "num-predict"], env = "MOESTRO_MAX_TOKENS", value_name = "N", value_parser = values::count, help_heading = "Sampling")]
    pub max_tokens: Option<usize>,
    /// Let the model reason before it answers [default: as its chat template says]
    #[arg(long, env = "MOESTRO_THINKING", value_parser = values::on_off(), help_heading = "Sampling")]
    pub thinking: Option<bool>,
}

/// The user's model directory. Models in the Hugging Face cache are found, too.
#[derive(Debug, Default, Args)]
pub struct ModelsDirArgs {
    /// Directory of your models, NAME or ORG/NAME below it [default: moestro/models in ~/.local/share, on macOS in
    /// ~/Library/Application Support, or in $XDG_DATA_HOME]
    #[arg(long, env = "MOESTRO_MODELS_DIR", value_name = "DIR", hide_short_help = true)]
    pub models_dir: Option<PathBuf>,
}

/// Address of a running server.
#[derive(Debug, Clone, Args)]
pub struct RemoteArgs {
    /// Address of the server
    #[arg(long, env = "MOESTRO_HOST", default_value = values::DEFAULT_HOST, value_parser = values::host, help_heading = "Server")]
    pub host: String,
    /// Port of the server
    #[arg(long, env = "MOESTRO_PORT", default_value_t = values::DEFAULT_PORT, value_parser = values::port, help_heading = "Server")]
    pub port: u16,
    /// API key of the server
    #[arg(long, env = "MOESTRO_API_KEY", value_name = "KEY", hide_env_values = true, value_parser = values::key, help_heading = "Server")]
    pub api_key: Option<String>,
}
