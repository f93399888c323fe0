//! The command line: every subcommand and flag, and nothing of what they mean (`config` says that). Each flag has an
//! environment variable, `MOESTRO_` and its name; what is typed wins.

pub mod values;

use clap::{Args, Parser, Subcommand, builder::BoolishValueParser};
use std::path::PathBuf;
use values::{Device, DraftModel, ExpertIo, KvBits, LogFormat, OnOff, SpeculationMode, Switch};

#[derive(Debug, Parser)]
#[command(name = "moestro", version, about, max_term_width = 120, args_override_self = true)]
pub struct Cli {
    /// Settings by the flags' names [default: moestro/moestro.toml in ~/.config or $XDG_CONFIG_HOME]
    #[arg(long, env = "MOESTRO_CONFIG", value_name = "FILE", global = true)]
    pub config: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model through an OpenAI-compatible API
    Serve(ServeArgs),
    /// One answer on the terminal, tokens as they come
    Generate(GenerateArgs),
    /// Chat on the terminal; with a prompt, or behind a pipe, one answer
    Run(RunArgs),
    /// The memory plan of a model, and its estimated speed on this machine
    Info(InfoArgs),
    /// Measure prefill, decode, hits, stall and disk
    Bench(BenchArgs),
    /// Write a synthetic checkpoint with a real model's dimensions
    Synth(SynthArgs),
    /// Write one page-aligned record per expert, for faster reads
    Pack(PackArgs),
    /// Download a model from the Hugging Face hub
    Pull(PullArgs),
    /// The models on this machine
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Delete a model from this machine
    Rm(RmArgs),
    /// What a running server has in memory
    Ps(PsArgs),
    /// Have a running server give a model's memory back
    Stop(StopArgs),
    /// Check that this machine computes what it should, for a bug report
    Doctor(DoctorArgs),
    /// Serve from login on, kept running by launchd or systemd
    Service(ServiceArgs),
    /// Every setting of `serve` and where it came from
    Config(ServeArgs),
    /// A completion script for a shell
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// Write the manual's pages into a directory
    #[command(hide = true)]
    Man { dir: PathBuf },
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address to listen on: an address of this machine or a name for one; 0.0.0.0 is all of them
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// Clients must send this key (`Authorization: Bearer KEY`)
    #[arg(long, env = "MOESTRO_API_KEY", value_name = "KEY", hide_env_values = true, value_parser = values::key)]
    pub api_key: Option<String>,
    /// A file with the key, which other users of this machine would see on the command line
    #[arg(long, env = "MOESTRO_API_KEY_FILE", value_name = "FILE", conflicts_with = "api_key")]
    pub api_key_file: Option<PathBuf>,
    /// Web pages of this origin may call the API; * is any
    #[arg(long, env = "MOESTRO_CORS", value_name = "ORIGIN", value_parser = values::origin)]
    pub cors: Option<String>,
    /// Names by which clients call this server, as in its URL, with commas between; a server on a loopback address answers
    /// to local names only, beside these
    #[arg(long, env = "MOESTRO_ALLOWED_HOST", value_name = "NAMES", value_parser = values::hosts)]
    pub allowed_host: Option<String>,
    /// Requests that may wait; more are answered 429
    #[arg(long, env = "MOESTRO_MAX_QUEUE", value_name = "N", default_value_t = 16, value_parser = values::from_0_to::<65_536>)]
    pub max_queue: usize,
    /// The most time a request may take, in seconds, the wait included [default: no limit]
    #[arg(long, env = "MOESTRO_REQUEST_TIMEOUT", value_name = "SECS", value_parser = values::seconds)]
    pub request_timeout: Option<std::time::Duration>,
    /// Give the model's memory back when nobody has asked for so long (90s, 30m, 2h); the next request loads it again
    /// [default: keep it]
    #[arg(long, env = "MOESTRO_KEEP_ALIVE", value_name = "DURATION", value_parser = values::duration)]
    pub keep_alive: Option<std::time::Duration>,
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Leave the `x-anthropic-billing-header:` that Claude Code puts before its system prompt in the prompt: it changes
    /// with every turn
    #[arg(long, env = "MOESTRO_KEEP_BILLING_HEADER", value_parser = BoolishValueParser::new())]
    pub keep_billing_header: bool,
    /// Write the log into files in this directory, one a day for a week, rather than to stderr
    #[arg(long, env = "MOESTRO_LOG_DIR", value_name = "DIR")]
    pub log_dir: Option<PathBuf>,
    /// Format of the log's lines
    #[arg(long, env = "MOESTRO_LOG_FORMAT", value_enum, default_value_t)]
    pub log_format: LogFormat,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    /// Directory for checkpoints of prompts, which outlive the server, or off [default: in the user's cache]
    #[arg(long, env = "MOESTRO_PROMPT_CACHE_DIR", value_name = "DIR", help_heading = "Prompt cache")]
    pub prompt_cache_dir: Option<String>,
    /// Room for them on the disk
    #[arg(long, env = "MOESTRO_PROMPT_CACHE_DISK", value_name = "SIZE", default_value = "16GiB", value_parser = values::size, help_heading = "Prompt cache")]
    pub prompt_cache_disk: u64,
    #[command(flatten)]
    pub drafts: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Checkpoints of earlier prompts, for later ones.
#[derive(Debug, Args)]
#[command(next_help_heading = "Prompt cache")]
pub struct PromptCacheArgs {
    /// Memory for what later prompts can go on from: 1GiB, 500M, off for nothing [default: 1/16 of what the least plan
    /// leaves, at most 2GiB]
    #[arg(long, env = "MOESTRO_PROMPT_CACHE", value_name = "SIZE|off", value_parser = values::size_or_off)]
    pub prompt_cache: Option<u64>,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt; a chat model gets it as a user's message. With -, or without it behind a pipe, it is read from stdin
    #[arg(short, long, env = "MOESTRO_PROMPT")]
    pub prompt: Option<String>,
    /// The most tokens to generate [default: to the end of the context]
    #[arg(short = 'n', long, env = "MOESTRO_MAX_TOKENS", value_name = "N")]
    pub max_tokens: Option<usize>,
    /// Makes the answer reproducible
    #[arg(long, env = "MOESTRO_SEED", value_name = "N")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub drafts: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// The model to work with.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// A directory, a hub id (org/name), or nothing: the demo model
    #[arg(env = "MOESTRO_MODEL", value_name = "MODEL")]
    pub model: Option<String>,
}

/// Loading a model.
#[derive(Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct LoadArgs {
    /// The device that computes
    #[arg(long, env = "MOESTRO_DEVICE", value_enum, default_value_t)]
    pub device: Device,
    /// Compute threads on the CPU [default: the physical cores]
    #[arg(long, env = "MOESTRO_THREADS", value_name = "N", value_parser = values::up_to::<1_024>)]
    pub threads: Option<usize>,
    /// Memory to use at most: 8GiB, 8G, 500M [default: what the machine can spare]
    #[arg(long, env = "MOESTRO_MEMORY_LIMIT", value_name = "SIZE", value_parser = values::size)]
    pub memory_limit: Option<u64>,
    /// Read experts from the SSD as they are asked for; auto does so if they do not all fit into memory
    #[arg(long, env = "MOESTRO_STREAM_EXPERTS", value_enum, default_value_t)]
    pub stream_experts: Switch,
    /// Read experts past the page cache or through it
    #[arg(long, env = "MOESTRO_EXPERT_IO", value_enum, default_value_t)]
    pub expert_io: ExpertIo,
    /// Reads of experts in flight at most
    #[arg(long, env = "MOESTRO_IO_THREADS", value_name = "N", default_value_t = 16, value_parser = values::up_to::<1_024>)]
    pub io_threads: usize,
    /// Read ahead the experts that the next layers will probably ask for
    #[arg(long, env = "MOESTRO_PREFETCH", value_enum, default_value_t)]
    pub prefetch: Switch,
    /// Fewer experts a token than the model was trained with: faster, and a different, worse model. SWIFTLM_TOP_K is
    /// honoured where this is not said, and lowered to what the model takes
    #[arg(long, env = "MOESTRO_EXPERTS_PER_TOKEN", value_name = "N", value_parser = values::count)]
    pub experts_per_token: Option<usize>,
    /// Tokens that a prompt and its answer may have together [default: as many as fit]
    #[arg(long, env = "MOESTRO_CTX_SIZE", value_name = "N", value_parser = values::up_to::<16_777_216>)]
    pub ctx_size: Option<usize>,
    /// Bits of a key or value: 8 and 4 take half and a quarter of the memory, and change answers a little (`bench --quality`
    /// says how much); the newest 64 to 127 positions keep 16
    #[arg(long, env = "MOESTRO_KV_BITS", value_name = "16|8|4", default_value = "16", value_parser = values::kv_bits)]
    pub kv_bits: KvBits,
    /// Prompt tokens evaluated at once [default: as many as fit]
    #[arg(long, env = "MOESTRO_PREFILL_CHUNK", value_name = "N", value_parser = values::up_to::<65_536>)]
    pub prefill_chunk: Option<usize>,
}

/// Sampling where a request says nothing; without a flag, the model's generation_config.json.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling defaults (else the model's own)")]
pub struct SamplingArgs {
    /// 0 is greedy
    #[arg(long, env = "MOESTRO_TEMP", value_name = "T", value_parser = values::not_negative)]
    pub temp: Option<f32>,
    /// Draw from the fewest likeliest tokens that have this probability together
    #[arg(long, env = "MOESTRO_TOP_P", value_name = "P", value_parser = values::share)]
    pub top_p: Option<f32>,
    /// Draw from the N likeliest tokens; 0 is all
    #[arg(long, env = "MOESTRO_TOP_K", value_name = "N")]
    pub top_k: Option<usize>,
    /// Draw only tokens that have this share of the likeliest one's probability
    #[arg(long, env = "MOESTRO_MIN_P", value_name = "P", value_parser = values::share)]
    pub min_p: Option<f32>,
    /// Above 1 makes tokens that occurred less likely
    #[arg(long, env = "MOESTRO_REPEAT_PENALTY", value_name = "R", value_parser = values::positive)]
    pub repeat_penalty: Option<f32>,
    /// Let the model reason before it answers [default: what its chat template does]
    #[arg(long, env = "MOESTRO_THINKING", value_enum)]
    pub thinking: Option<OnOff>,
}

/// The plan and the measured speed estimate.
#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Simulate another machine rather than measure this one (m1-ultra-64, m4-max-128, ...; all)
    #[arg(long, env = "MOESTRO_MACHINE", value_name = "NAME")]
    pub machine: Option<String>,
    /// Without a checkpoint: the model with these dimensions, in 4 bits (with --machine)
    #[arg(long, env = "MOESTRO_LIKE", value_parser = ["35b", "122b", "397b"])]
    pub like: Option<String>,
    /// One JSON object instead of a table
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    #[command(flatten)]
    pub drafts: DraftArgs,
}

/// Prefill, decode, hits, stall, disk.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of the prompt
    #[arg(long, env = "MOESTRO_PROMPT_TOKENS", value_name = "N", default_value_t = 512, value_parser = values::up_to::<16_777_216>)]
    pub prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, env = "MOESTRO_GEN_TOKENS", value_name = "N", default_value_t = 128, value_parser = values::up_to::<16_777_216>)]
    pub gen_tokens: usize,
    /// Start every run with empty slots and (Linux only) nothing of the checkpoint in the page cache
    #[arg(long, env = "MOESTRO_COLD", value_parser = BoolishValueParser::new())]
    pub cold: bool,
    /// Instead: what --kv-bits (8 and 4, unless one is said) do to the prompt's probabilities and to the answer
    #[arg(long, env = "MOESTRO_QUALITY", value_parser = BoolishValueParser::new(), conflicts_with = "cold")]
    pub quality: bool,
    /// Instead: the same answer plain and with this draft, side by side
    #[arg(long, value_name = "mtp|self|lookup|PATH|ID", value_parser = values::draft, conflicts_with_all = ["cold", "quality"])]
    pub draft_model: Option<DraftModel>,
    /// Tokens that are drafted at a time at most
    #[arg(long, env = "MOESTRO_NUM_DRAFT_TOKENS", value_name = "N", default_value_t = 7, value_parser = values::drafts)]
    pub num_draft_tokens: usize,
    /// Use of drafts: auto as long as they save time
    #[arg(long, env = "MOESTRO_SPECULATION", value_enum, default_value_t)]
    pub speculation: SpeculationMode,
    /// A text to take the prompt from, rather than the one in the binary
    #[arg(long, env = "MOESTRO_TEXT", value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Runs to take the median of
    #[arg(long, env = "MOESTRO_REPEAT", value_name = "N", default_value_t = 3, value_parser = values::up_to::<1_000>)]
    pub repeat: usize,
    /// One JSON object instead of a table
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
    #[command(flatten)]
    pub load: LoadArgs,
}

/// A synthetic checkpoint with real dimensions and random weights.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// Directory to write; must not exist
    pub out: PathBuf,
    /// The model whose dimensions it has
    #[arg(long, env = "MOESTRO_LIKE", value_parser = ["35b", "122b", "397b"])]
    pub like: String,
    /// Fewer layers than the original
    #[arg(long, env = "MOESTRO_LAYERS", value_name = "N", value_parser = values::up_to::<1_024>)]
    pub layers: Option<usize>,
    /// Fewer experts than the original
    #[arg(long, env = "MOESTRO_EXPERTS", value_name = "N", value_parser = values::up_to::<65_536>)]
    pub experts: Option<usize>,
    /// Fewer tokens than the original
    #[arg(long, env = "MOESTRO_VOCAB", value_name = "N", value_parser = values::up_to::<16_777_216>)]
    pub vocab: Option<usize>,
    /// The same seed writes the same bytes
    #[arg(long, env = "MOESTRO_SEED", value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Unevenness of the routers' choice: 0 is even, 0.5 lets a quarter of the experts serve most lookups
    #[arg(long, env = "MOESTRO_ROUTER_SKEW", value_name = "S", default_value_t = 0.5, value_parser = values::not_negative)]
    pub router_skew: f32,
}

/// One page-aligned record per expert: faster reads.
#[derive(Debug, Args)]
pub struct PackArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Directory to write [default: in the user's cache]
    #[arg(long, env = "MOESTRO_OUT", value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Write nothing; compare the pack that is there (or in --out) with the checkpoint, byte by byte
    #[arg(long, env = "MOESTRO_VERIFY", value_parser = BoolishValueParser::new())]
    pub verify: bool,
}

/// Download with progress, resume and checksum.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// A hub id: org/name
    pub id: String,
}

/// Every kernel compared with the CPU, and the demo's answer on each device.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// One JSON object instead of tables
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,

    /// Try a GPU that is refused otherwise: older than M1, or a virtual machine's
    #[arg(long, env = "MOESTRO_ANY_GPU", value_parser = BoolishValueParser::new())]
    pub any_gpu: bool,
}

#[derive(Debug, Args)]
#[command(mut_arg("prompt", |arg| arg.help("Answer this and end. With -, or without it behind a pipe, it is read from stdin")))]
pub struct RunArgs {
    #[command(flatten)]
    pub generate: GenerateArgs,
    /// A system prompt
    #[arg(long, env = "MOESTRO_SYSTEM", value_name = "TEXT")]
    pub system: Option<String>,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
}

/// Several tokens at once, where that is faster.
#[derive(Debug, Args)]
#[command(next_help_heading = "Speculation (the answer is the same with and without)")]
pub struct DraftArgs {
    /// Source of drafts: the checkpoint's MTP head, the text so far, or a directory or a hub id with an MTP head, a DFlash
    /// draft or a small model of the same vocabulary; auto is mtp if there is a head, else lookup
    #[arg(long, env = "MOESTRO_DRAFT_MODEL", value_name = "auto|mtp|lookup|off|PATH|ID", default_value = "auto", value_parser = values::draft)]
    pub draft_model: DraftModel,
    /// Tokens that are drafted at a time at most
    #[arg(long, env = "MOESTRO_NUM_DRAFT_TOKENS", value_name = "N", default_value_t = 7, value_parser = values::drafts)]
    pub num_draft_tokens: usize,
    /// Use drafts: auto does as long as they save time
    #[arg(long, env = "MOESTRO_SPECULATION", value_enum, default_value_t)]
    pub speculation: SpeculationMode,
}

/// The directory of models beside the Hugging Face cache.
#[derive(Debug, Default, Args)]
pub struct ModelsDirArgs {
    /// Models of your own: one directory each, NAME or ORG/NAME [default: moestro/models in ~/.local/share or $XDG_DATA_HOME]
    #[arg(long, env = "MOESTRO_MODELS_DIR", value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// One JSON object instead of a table
    #[arg(long, env = "MOESTRO_JSON", value_parser = BoolishValueParser::new())]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// As `moestro list` names it
    pub name: String,
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Do not ask
    #[arg(short, long, env = "MOESTRO_YES", value_parser = BoolishValueParser::new())]
    pub yes: bool,
}

/// A server on this machine or elsewhere.
#[derive(Debug, Args)]
pub struct RemoteArgs {
    /// The server's address
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// The server's port
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// The server's key
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
    /// As `moestro ps` names it
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
    /// Describe the service to the system and start it
    Install(InstallArgs),
    /// Stop it, and take its description away
    Uninstall,
    Start,
    Stop,
    /// Have it read its configuration file again
    Reload,
    /// Its status, from the service manager
    Status,
    /// The end of its log, and what comes
    Logs,
}

#[derive(Debug, Default, Args)]
pub struct InstallArgs {
    /// Let the system hold the port, and start with the first connection
    #[arg(long, env = "MOESTRO_ON_DEMAND", value_parser = BoolishValueParser::new())]
    pub on_demand: bool,
    /// On demand: the address to listen on
    #[arg(long, env = "MOESTRO_HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// On demand: the port to listen on
    #[arg(long, env = "MOESTRO_PORT", default_value_t = 5413)]
    pub port: u16,
    /// Show what would be written and run
    #[arg(long, env = "MOESTRO_DRY_RUN", value_parser = BoolishValueParser::new())]
    pub dry_run: bool,
    /// Arguments of `moestro serve`, behind --; under systemd it writes to the user's cache directory only
    #[arg(last = true)]
    pub args: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_has_its_variable() {
        for command in Cli::command().get_subcommands() {
            for arg in command.get_arguments() {
                let Some(long) = arg.get_long().filter(|&long| long != "help") else { continue };
                if (command.get_name(), long) == ("bench", "draft-model") {
                    // There it asks for another bench.
                    assert!(arg.get_env().is_none());
                    continue;
                }
                let variable = format!("MOESTRO_{}", long.to_uppercase().replace('-', "_"));
                assert_eq!(arg.get_env().and_then(|name| name.to_str()), Some(&*variable), "--{long}");
            }
        }
    }

    #[test]
    fn odd_values_are_refused_in_words() {
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
