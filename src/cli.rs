//! The command line as typed: all subcommands and flags. `config` says what they mean. Each flag has an environment
//! variable, `MOESTRO_` and its name, which the command line overrides.

pub mod values;

use clap::{Args, Parser, Subcommand, builder::BoolishValueParser};
use std::path::PathBuf;
use values::{Device, DraftModel, ExpertIo, KvBitsArg, LogFormat, OnOff, Parallel, SpeculationMode, Switch};

#[derive(Debug, Parser)]
#[command(name = "moestro", version, about, max_term_width = 120, args_override_self = true)]
pub struct Cli {
    /// Configuration file [default: moestro/moestro.toml in ~/.config or $XDG_CONFIG_HOME]
    #[arg(long, env = "MOESTRO_CONFIG", value_name = "FILE", global = true)]
    pub config: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model through an OpenAI-compatible API
    Serve(ServeArgs),
    /// Print one answer while it is generated
    Generate(GenerateArgs),
    /// Chat on the terminal; with a prompt or a pipe, print one answer
    Run(RunArgs),
    /// Show the memory plan of a model and its estimated speed on this machine
    Info(InfoArgs),
    /// Measure prefill, decode, cache hits, stalls and disk reads
    Bench(BenchArgs),
    /// Write a synthetic checkpoint with a real model's dimensions
    Synth(SynthArgs),
    /// Write a pack: one page-aligned record per expert, for faster reads
    Pack(PackArgs),
    /// Download a model from the Hugging Face hub
    Pull(PullArgs),
    /// List the models on this machine
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Delete a model from this machine
    Rm(RmArgs),
    /// Show the model that a running server has loaded
    Ps(PsArgs),
    /// Make a running server unload a model
    Stop(StopArgs),
    /// Check that this machine computes correctly, for a bug report
    Doctor(DoctorArgs),
    /// Install and control a service of launchd or systemd
    Service(ServiceArgs),
    /// Show every setting of `serve` and its source
    Config(ServeArgs),
    /// Print a completion script for a shell
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write manual pages to a directory
    #[command(hide = true)]
    Man { dir: PathBuf },
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address or host name to listen on; 0.0.0.0 means all addresses
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 means a free port
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// Serve Ollama's API on this port, too, for tools that speak nothing else [default: off; Ollama itself uses 11434]
    #[arg(long, env = "MOESTRO_OLLAMA_PORT", value_name = "PORT")]
    pub ollama_port: Option<u16>,
    /// API key that clients must send (`Authorization: Bearer KEY`)
    #[arg(long, env = "MOESTRO_API_KEY", value_name = "KEY", hide_env_values = true, value_parser = values::key)]
    pub api_key: Option<String>,
    /// File with the API key; other users can see keys on the command line
    #[arg(long, env = "MOESTRO_API_KEY_FILE", value_name = "FILE", conflicts_with = "api_key")]
    pub api_key_file: Option<PathBuf>,
    /// Origin whose web pages may call the API; * means any
    #[arg(long, env = "MOESTRO_CORS", value_name = "ORIGIN", value_parser = values::origin)]
    pub cors: Option<String>,
    /// Host names of this server in URLs, separated by commas; on a loopback address, all other names but local ones are
    /// refused
    #[arg(long, env = "MOESTRO_ALLOWED_HOST", value_name = "NAMES", value_parser = values::hosts)]
    pub allowed_host: Option<String>,
    #[command(flatten)]
    pub parallel: ParallelArgs,
    /// Most waiting requests; further ones get status 429
    #[arg(long, env = "MOESTRO_MAX_QUEUE", value_name = "N", default_value_t = 16, value_parser = values::from_0_to::<65_536>)]
    pub max_queue: usize,
    /// Time limit of a request in seconds, including its wait [default: no limit]
    #[arg(long, env = "MOESTRO_REQUEST_TIMEOUT", value_name = "SECS", value_parser = values::seconds)]
    pub request_timeout: Option<std::time::Duration>,
    /// Unload a model that was idle for this long (90s, 30m, 2h); the next request loads it again [default: never]
    #[arg(long, env = "MOESTRO_KEEP_ALIVE", value_name = "DURATION", value_parser = values::duration)]
    pub keep_alive: Option<std::time::Duration>,
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Keep Claude Code's `x-anthropic-billing-header:` in the prompt; it changes with every request, so the prompt cache
    /// misses
    #[arg(long, env = "MOESTRO_KEEP_BILLING_HEADER", value_parser = BoolishValueParser::new())]
    pub keep_billing_header: bool,
    /// Hosts that images may be fetched from, separated by commas, with a port unless it is the scheme's own [default: none]
    #[arg(long, env = "MOESTRO_IMAGE_URLS", value_name = "HOSTS", value_parser = values::hosts_with_ports)]
    pub image_urls: Option<String>,
    /// Write the log to files in this directory, at most 128 MiB of them, instead of stderr
    #[arg(long, env = "MOESTRO_LOG_DIR", value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Format of log lines
    #[arg(long, env = "MOESTRO_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    /// Directory of the prompt cache on disk, or off [default: in the user's cache directory]
    #[arg(long, env = "MOESTRO_PROMPT_CACHE_DIR", value_name = "DIR", help_heading = "Prompt cache")]
    pub prompt_cache_dir: Option<String>,
    /// Size limit of the prompt cache on disk
    #[arg(long, env = "MOESTRO_PROMPT_CACHE_DISK", value_name = "SIZE", default_value = "16GiB", value_parser = values::size, help_heading = "Prompt cache")]
    pub prompt_cache_disk: u64,
    #[command(flatten)]
    pub drafts: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Requests that run at the same time.
#[derive(Debug, Args)]
pub struct ParallelArgs {
    /// Requests that run at the same time; auto: 4 if all experts fit with room to spare, else 2, or 1 if memory is short
    #[arg(long, env = "MOESTRO_PARALLEL", value_name = "N|auto", default_value = "auto", value_parser = values::parallel)]
    pub parallel: Parallel,
}

/// Snapshots of earlier prompts, reused by later ones.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompt cache")]
pub struct PromptCacheArgs {
    /// Memory of the prompt cache: 1GiB, 500M or off [default: 1/16 of the memory beyond the smallest plan, at most 2GiB]
    #[arg(long, env = "MOESTRO_PROMPT_CACHE", value_name = "SIZE|off", value_parser = values::size_or_off)]
    pub prompt_cache: Option<u64>,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt, sent as a user message; - or a pipe reads it from stdin
    #[arg(short, long, env = "MOESTRO_PROMPT")]
    pub prompt: Option<String>,
    /// Most tokens to generate [default: to the end of the context]
    #[arg(short = 'n', long, env = "MOESTRO_MAX_TOKENS", value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Seed for a reproducible answer
    #[arg(long, env = "MOESTRO_SEED", value_name = "N")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub drafts: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// The model of a command.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// A directory, a hub id (org/name) or a name from `moestro list` [default: the demo model]
    #[arg(env = "MOESTRO_MODEL", value_name = "MODEL")]
    pub model: Option<String>,
}

/// Flags for loading a model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct LoadArgs {
    /// Device that computes
    #[arg(long, env = "MOESTRO_DEVICE", value_enum, default_value_t)]
    pub device: Device,
    /// Compute threads of the CPU [default: the physical cores]
    #[arg(long, env = "MOESTRO_THREADS", value_name = "N", value_parser = values::up_to::<1_024>)]
    pub threads: Option<usize>,
    /// Memory limit: 8GiB, 8G, 500M [default: what the machine can spare]
    #[arg(long, env = "MOESTRO_MEMORY_LIMIT", value_name = "SIZE", value_parser = values::size)]
    pub memory_limit: Option<u64>,
    /// Read experts from the SSD when they are needed; auto: if they do not all fit in memory
    #[arg(long, env = "MOESTRO_STREAM_EXPERTS", value_enum, default_value_t)]
    pub stream_experts: Switch,
    /// Read experts directly or through the page cache
    #[arg(long, env = "MOESTRO_EXPERT_IO", value_enum, default_value_t)]
    pub expert_io: ExpertIo,
    /// Most expert reads in flight
    #[arg(long, env = "MOESTRO_IO_THREADS", value_name = "N", default_value_t = 16, value_parser = values::up_to::<1_024>)]
    pub io_threads: usize,
    /// Prefetch the experts that the next layers will probably need
    #[arg(long, env = "MOESTRO_PREFETCH", value_enum, default_value_t)]
    pub prefetch: Switch,
    /// Use fewer experts per token than the model was trained with: faster, but a worse model. Without this flag,
    /// SWIFTLM_TOP_K sets it, at most to the model's own number
    #[arg(long, env = "MOESTRO_EXPERTS_PER_TOKEN", value_name = "N", value_parser = values::count)]
    pub experts_per_token: Option<usize>,
    /// Context size in tokens, prompt and answer together [default: as many as fit]
    #[arg(long, env = "MOESTRO_CTX_SIZE", value_name = "N", value_parser = values::up_to::<16_777_216>)]
    pub ctx_size: Option<usize>,
    /// Bits per key or value: 8 and 4 need half and a quarter of the memory but change answers a little (see `bench
    /// --quality`); the newest 64 to 127 positions keep 16
    #[arg(long, env = "MOESTRO_KV_BITS", value_name = "16|8|4", default_value = "16", value_parser = values::kv_bits)]
    pub kv_bits: KvBitsArg,
    /// Prompt tokens per forward pass [default: as many as fit]
    #[arg(long, env = "MOESTRO_PREFILL_CHUNK", value_name = "N", value_parser = values::up_to::<65_536>)]
    pub prefill_chunk: Option<usize>,
    /// Read text only: load no vision tower, and keep no memory for images
    #[arg(long, env = "MOESTRO_NO_VISION", value_parser = BoolishValueParser::new())]
    pub no_vision: bool,
    /// Most tokens of an image; larger images are scaled down [default: 1024 on a CPU, 2048 on Metal]
    #[arg(long, env = "MOESTRO_IMAGE_MAX_TOKENS", value_name = "N", value_parser = values::up_to::<65_536>)]
    pub image_max_tokens: Option<usize>,
}

/// Sampling defaults of requests. Without a flag, the model's generation_config.json applies.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling defaults (else the model's own)")]
pub struct SamplingArgs {
    /// Temperature; 0 means greedy
    #[arg(long, env = "MOESTRO_TEMP", value_name = "T", value_parser = values::not_negative)]
    pub temp: Option<f32>,
    /// Sample from the smallest set of likeliest tokens with this total probability
    #[arg(long, env = "MOESTRO_TOP_P", value_name = "P", value_parser = values::probability)]
    pub top_p: Option<f32>,
    /// Sample from the N likeliest tokens; 0 means all
    #[arg(long, env = "MOESTRO_TOP_K", value_name = "N")]
    pub top_k: Option<usize>,
    /// Sample only tokens with at least this fraction of the likeliest token's probability
    #[arg(long, env = "MOESTRO_MIN_P", value_name = "P", value_parser = values::probability)]
    pub min_p: Option<f32>,
    /// Penalty for repeated tokens; above 1 makes them less likely
    #[arg(long, env = "MOESTRO_REPEAT_PENALTY", value_name = "R", value_parser = values::positive)]
    pub repeat_penalty: Option<f32>,
    /// Let the model reason before it answers [default: as its chat template says]
    #[arg(long, env = "MOESTRO_THINKING", value_enum)]
    pub thinking: Option<OnOff>,
}

/// Flags of `moestro info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Simulate another machine instead of measuring this one (m1-ultra-64, m4-max-128, ...; all)
    #[arg(long, env = "MOESTRO_MACHINE", value_name = "NAME")]
    pub machine: Option<String>,
    /// Without a checkpoint: a 4-bit model with these dimensions (with --machine)
    #[arg(long, env = "MOESTRO_LIKE", value_parser = LIKE)]
    pub like: Option<String>,
    /// Print one JSON object instead of a table
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
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
    /// Prompt tokens
    #[arg(long, env = "MOESTRO_PROMPT_TOKENS", value_name = "N", default_value_t = 512, value_parser = values::up_to::<16_777_216>)]
    pub prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, env = "MOESTRO_GEN_TOKENS", value_name = "N", default_value_t = 128, value_parser = values::up_to::<16_777_216>)]
    pub gen_tokens: usize,
    /// Start every run with empty expert slots and, on Linux, without the checkpoint in the page cache
    #[arg(long, env = "MOESTRO_COLD", value_parser = BoolishValueParser::new())]
    pub cold: bool,
    /// Measure instead how --kv-bits (default: 8 and 4) changes probabilities and the answer
    #[arg(long, env = "MOESTRO_QUALITY", value_parser = BoolishValueParser::new(), conflicts_with = "cold")]
    pub quality: bool,
    /// Measure instead the time from this image to the first token
    #[arg(long, env = "MOESTRO_IMAGE", value_name = "FILE", conflicts_with_all = ["cold", "quality", "draft_model"])]
    pub image: Option<PathBuf>,
    /// Measure instead the same answer with and without this draft
    #[arg(long, value_name = "mtp|lookup|PATH|ID", value_parser = values::draft, conflicts_with_all = ["cold", "quality"])]
    pub draft_model: Option<DraftModel>,
    /// Most tokens drafted at a time
    #[arg(long, env = "MOESTRO_NUM_DRAFT_TOKENS", value_name = "N", default_value_t = 7, value_parser = values::drafts)]
    pub num_draft_tokens: usize,
    /// When to use drafts; auto: while they save time
    #[arg(long, env = "MOESTRO_SPECULATION", value_enum, default_value_t)]
    pub speculation: SpeculationMode,
    /// Text file for the prompt [default: an embedded text]
    #[arg(long, env = "MOESTRO_TEXT", value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Runs; the median is reported
    #[arg(long, env = "MOESTRO_REPEAT", value_name = "N", default_value_t = 3, value_parser = values::up_to::<1_000>)]
    pub repeat: usize,
    /// Print one JSON object instead of a table
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
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
    /// Number of layers [default: as the original]
    #[arg(long, env = "MOESTRO_LAYERS", value_name = "N", value_parser = values::up_to::<1_024>)]
    pub layers: Option<usize>,
    /// Number of experts [default: as the original]
    #[arg(long, env = "MOESTRO_EXPERTS", value_name = "N", value_parser = values::up_to::<65_536>)]
    pub experts: Option<usize>,
    /// Vocabulary size [default: as the original]
    #[arg(long, env = "MOESTRO_VOCAB", value_name = "N", value_parser = values::up_to::<16_777_216>)]
    pub vocab: Option<usize>,
    /// Seed; the same seed writes the same bytes
    #[arg(long, env = "MOESTRO_SEED", value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Skew of the routers: 0 is even; with 0.5, a quarter of the experts serves most tokens
    #[arg(long, env = "MOESTRO_ROUTER_SKEW", value_name = "S", default_value_t = 0.5, value_parser = values::not_negative)]
    pub router_skew: f32,
    /// Rows of the n-gram table, with --like flash-next [default: 8000000; the original has 320 million]
    #[arg(long, env = "MOESTRO_NGRAM_ROWS", value_name = "N", value_parser = clap::value_parser!(u64).range(1_024..=4_294_967_296))]
    pub ngram_rows: Option<u64>,
}

/// Flags of `moestro pack`.
#[derive(Debug, Args)]
pub struct PackArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Directory to write [default: in the user's cache directory]
    #[arg(long, env = "MOESTRO_OUT", value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Compare the existing pack, or the one in --out, with the checkpoint byte by byte; write nothing
    #[arg(long, env = "MOESTRO_VERIFY", value_parser = BoolishValueParser::new())]
    pub verify: bool,
}

/// Flags of `moestro pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// Hub id: org/name
    pub id: String,
}

/// Flags of `moestro doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object instead of tables
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,

    /// Try a GPU that is refused by default: older than M1, or of a virtual machine
    #[arg(long, env = "MOESTRO_ANY_GPU", value_parser = BoolishValueParser::new())]
    pub any_gpu: bool,
}

#[derive(Debug, Args)]
#[command(mut_arg("prompt", |arg| arg.help("Answer this prompt and exit; - or a pipe reads it from stdin")))]
pub struct RunArgs {
    #[command(flatten)]
    pub generate: GenerateArgs,
    /// System prompt
    #[arg(long, env = "MOESTRO_SYSTEM", value_name = "TEXT")]
    pub system: Option<String>,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
}

/// Flags of speculation: several tokens per pass, where that is faster.
#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation (never changes the answer)")]
pub struct DraftArgs {
    /// Source of drafts: the checkpoint's MTP head, the text so far, or a directory or a hub id with an MTP head, a DFlash
    /// draft or a small model of the same vocabulary; auto is mtp if there is a head, else lookup
    #[arg(long, env = "MOESTRO_DRAFT_MODEL", value_name = "auto|mtp|lookup|off|PATH|ID", default_value = "auto", value_parser = values::draft)]
    pub draft_model: DraftModel,
    /// Most tokens drafted at a time
    #[arg(long, env = "MOESTRO_NUM_DRAFT_TOKENS", value_name = "N", default_value_t = 7, value_parser = values::drafts)]
    pub num_draft_tokens: usize,
    /// When to use drafts; auto: while they save time
    #[arg(long, env = "MOESTRO_SPECULATION", value_enum, default_value_t)]
    pub speculation: SpeculationMode,
}

/// The user's model directory, besides the Hugging Face cache.
#[derive(Debug, Default, Args)]
pub struct ModelsDirArgs {
    /// Directory of your models, NAME or ORG/NAME below it [default: moestro/models in ~/.local/share or $XDG_DATA_HOME]
    #[arg(long, env = "MOESTRO_MODELS_DIR", value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Print one JSON object instead of a table
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Name from `moestro list`
    pub name: String,
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Delete without asking
    #[arg(short, long)]
    pub yes: bool,
}

/// Address of a running server.
#[derive(Debug, Args)]
pub struct RemoteArgs {
    /// Address of the server
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port of the server
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// API key of the server
    #[arg(long, env = "MOESTRO_API_KEY", value_name = "KEY", hide_env_values = true, value_parser = values::key)]
    pub api_key: Option<String>,
}

#[derive(Debug, Args)]
pub struct PsArgs {
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Debug, Args)]
pub struct StopArgs {
    /// Name from `moestro ps`
    pub name: String,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Debug, Args)]
pub struct ServiceArgs {
    #[command(subcommand)]
    pub action: ServiceAction,
}

#[derive(Debug, Subcommand)]
pub enum ServiceAction {
    /// Install the service and start it
    Install(InstallArgs),
    /// Stop the service and remove it
    Uninstall,
    /// Start the service
    Start,
    /// Stop the service
    Stop,
    /// Reload its configuration file
    Reload,
    /// Show its status
    Status,
    /// Show the end of its log, and follow it
    Logs,
}

#[derive(Debug, Default, Args)]
pub struct InstallArgs {
    /// Let the system open the port and start the server at the first connection
    #[arg(long, env = "MOESTRO_ON_DEMAND", value_parser = BoolishValueParser::new())]
    pub on_demand: bool,
    /// With --on-demand: address to listen on
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// With --on-demand: port to listen on
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// Show what would be written and run, without doing it
    #[arg(long, env = "MOESTRO_DRY_RUN", value_parser = BoolishValueParser::new())]
    pub dry_run: bool,
    /// Arguments of `moestro serve`, after --; under systemd it writes only to the user's cache directory
    #[arg(last = true)]
    pub args: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn clap_accepts_the_definition() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_a_variable() {
        for command in Cli::command().get_subcommands() {
            for arg in command.get_arguments() {
                let Some(long) = arg.get_long().filter(|&long| long != "help") else { continue };
                // `bench --draft-model` selects another measurement, and `rm --yes` must be typed.
                if [("bench", "draft-model"), ("rm", "yes")].contains(&(command.get_name(), long)) {
                    assert!(arg.get_env().is_none());
                    continue;
                }
                let variable = format!("MOESTRO_{}", long.to_uppercase().replace('-', "_"));
                assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(&*variable), "--{long}");
            }
        }
    }

    #[test]
    fn invalid_values_are_refused() {
        let refused = |flags: &[&str]| {
            let typed = ["moestro", "serve"].iter().chain(flags);
            Cli::try_parse_from(typed).map(|_| ()).unwrap_err().to_string()
        };
        assert!(refused(&["--top-p", "1.5"]).contains("not between 0 and 1"));
        assert!(refused(&["--temp", "nan"]).contains("not a number from 0 up"));
        assert!(refused(&["--threads", "0"]).contains("from 1 to 1024"));
        assert!(refused(&["--threads", "10000"]).contains("from 1 to 1024"));
        assert!(refused(&["--io-threads", "100000"]).contains("from 1 to 1024"));
        assert!(refused(&["--ctx-size", "4611686018427387904"]).contains("from 1 to 16777216"));
        assert!(refused(&["--prefill-chunk", "1000000"]).contains("from 1 to 65536"));
        assert!(refused(&["--max-queue", "99999999"]).contains("from 0 to 65536"));
        assert!(refused(&["--allowed-host", "http://x"]).contains("without scheme or port"));
        assert!(refused(&["--api-key", "a", "--api-key-file", "b"]).contains("cannot be used with"));
        assert!(refused(&["--memory-limit", "8Q"]).contains("8GiB"));
        assert!(refused(&["--api-key", ""]).contains("empty"));
        assert!(refused(&["--port", "70000"]).contains("65535"));
        assert!(refused(&["--cors", "example.com"]).contains("https://"));
        assert!(refused(&["--device", "tpu"]).contains("cuda"));
    }
}
