//! Flags of the commands that measure, check or convert a model.

use super::{
    model_args::{DraftArgs, LoadArgs, ModelArgs, ParallelArgs, PromptCacheArgs},
    values::{self, DraftModel},
};
use clap::{Args, builder::BoolishValueParser};
use moestro_engine::DraftPolicy;
use std::path::PathBuf;

/// Flags of `moestro info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Estimate the speed on another machine from published figures: chip and GB of memory (m4-max-128, pc-64), or all
    /// [default: measure this machine]
    #[arg(long, env = "MOESTRO_MACHINE", value_name = "NAME")]
    pub machine: Option<String>,
    /// Estimate a 4-bit model with the dimensions of this Qwen model, without its files
    #[arg(long, env = "MOESTRO_LIKE", value_parser = LIKE)]
    pub like: Option<String>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub parallel: ParallelArgs,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    #[command(flatten)]
    pub drafts: DraftArgs,
}

/// Flags of `moestro bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Number of prompt tokens
    #[arg(long, env = "MOESTRO_PROMPT_TOKENS", value_name = "N", default_value_t = 512, value_parser = values::up_to::<16_777_216>)]
    pub prompt_tokens: usize,
    /// Number of tokens to generate
    #[arg(long, env = "MOESTRO_GEN_TOKENS", value_name = "N", default_value_t = 128, value_parser = values::up_to::<16_777_216>)]
    pub gen_tokens: usize,
    /// Start every run with empty expert slots and, on Linux, without the checkpoint in the page cache
    #[arg(long, env = "MOESTRO_COLD", value_parser = BoolishValueParser::new())]
    pub cold: bool,
    /// Measure quality instead of speed: how --kv-bits (8 and 4 if not set) changes token probabilities and the answer
    #[arg(long, conflicts_with = "cold")]
    pub quality: bool,
    /// Measure the time from an image file to the first token of the answer, instead of prefill and decode speed
    #[arg(long, env = "MOESTRO_IMAGE", value_name = "FILE", conflicts_with_all = ["cold", "quality", "draft_model"])]
    pub image: Option<PathBuf>,
    /// Compare the speed of the same answer with and without this draft, instead of measuring prefill and decode
    #[arg(long, value_name = "mtp|lookup|PATH|ID", value_parser = values::draft, conflicts_with_all = ["cold", "quality"])]
    pub draft_model: Option<DraftModel>,
    /// Maximum number of tokens drafted at a time
    #[arg(long, env = "MOESTRO_NUM_DRAFT_TOKENS", value_name = "N", default_value_t = 7, value_parser = values::drafts)]
    pub num_draft_tokens: usize,
    /// When to use drafts; auto: while they save time
    #[arg(long, env = "MOESTRO_SPECULATION", default_value = "auto", value_parser = values::speculation())]
    pub speculation: DraftPolicy,
    /// Text file for the prompt [default: an embedded text]
    #[arg(long, env = "MOESTRO_TEXT", value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Number of runs; the median is reported
    #[arg(long, env = "MOESTRO_REPEAT", value_name = "N", default_value_t = 3, value_parser = values::up_to::<1_000>)]
    pub repeat: usize,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// The models that `--like` knows.
const LIKE: [&str; 7] = ["4b", "9b", "27b", "35b", "122b", "397b", "flash-next"];

/// Flags of `moestro synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// Directory to write, which must not exist
    pub out: PathBuf,
    /// Model whose dimensions to use
    #[arg(long, env = "MOESTRO_LIKE", value_parser = LIKE)]
    pub like: String,
    /// Number of layers [default: as in that model]
    #[arg(long, env = "MOESTRO_LAYERS", value_name = "N", value_parser = values::up_to::<1_024>)]
    pub layers: Option<usize>,
    /// Number of experts [default: as in that model]
    #[arg(long, env = "MOESTRO_EXPERTS", value_name = "N", value_parser = values::up_to::<65_536>)]
    pub experts: Option<usize>,
    /// Vocabulary size [default: as in that model]
    #[arg(long, env = "MOESTRO_VOCAB", value_name = "N", value_parser = values::up_to::<16_777_216>)]
    pub vocab: Option<usize>,
    /// Seed; the same seed writes the same bytes
    #[arg(long, env = "MOESTRO_SEED", value_name = "N", default_value_t = 0, value_parser = values::seed)]
    pub seed: u64,
    /// Skew of the router: with 0, all experts are selected equally often; with 0.5, a quarter of the experts gets most
    /// tokens
    #[arg(long, env = "MOESTRO_ROUTER_SKEW", value_name = "S", default_value_t = 0.5, value_parser = values::not_negative)]
    pub router_skew: f32,
    /// Rows of the n-gram table, with --like flash-next [default: 8000000; the real model has 320 million]
    #[arg(long, env = "MOESTRO_NGRAM_ROWS", value_name = "N", value_parser = clap::value_parser!(u64).range(1_024..=4_294_967_296))]
    pub ngram_rows: Option<u64>,
}

/// Flags of `moestro pack`.
#[derive(Debug, Args)]
pub struct PackArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Directory to write [default: in the user's cache directory]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Compare the existing pack, or the one in --out, with the checkpoint byte by byte; write nothing
    #[arg(long)]
    pub verify: bool,
}

/// Flags of `moestro doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object instead of tables
    #[arg(long)]
    pub json: bool,

    /// Check even a GPU that is refused by default: older than M1, or in a virtual machine
    #[arg(long, env = "MOESTRO_ANY_GPU", value_parser = BoolishValueParser::new())]
    pub any_gpu: bool,

    /// Also measure the speed of this machine, print a report to paste into an issue, and save the figures for `moestro
    /// info`. Takes some minutes, and about 5 GB of temporary files
    #[arg(long, conflicts_with = "print_kernels")]
    pub report: bool,

    /// Write the source of every Metal kernel to this directory and exit
    #[arg(long, value_name = "DIR")]
    pub print_kernels: Option<PathBuf>,
}
