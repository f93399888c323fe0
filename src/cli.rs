//! The raw command line: all subcommands and flags. `config` checks them and turns them into settings. A flag that is a
//! setting has an environment variable, `MOESTRO_` and its name, which the command line overrides. Flags that confirm,
//! print or name outputs have none.

pub mod help;
pub mod model_args;
pub mod tool_args;
pub mod values;

use clap::{
    Args, Parser, Subcommand,
    builder::{BoolishValueParser, NonEmptyStringValueParser},
};
use model_args::{
    DraftArgs, LoadArgs, ModelArgs, ModelsDirArgs, ParallelArgs, PromptCacheArgs, RemoteArgs, SamplingArgs,
};
use std::path::PathBuf;
use tool_args::{BenchArgs, DoctorArgs, InfoArgs, PackArgs, SynthArgs};
use values::{LogFormat, LogLevel, PackMode};

/// The place in the help of flags that all commands have.
const AFTER_OWN_FLAGS: usize = 900;

#[derive(Debug, Parser)]
#[command(name = "moestro", version, about, max_term_width = 100, args_override_self = true)]
pub struct Cli {
    /// Configuration file [default: moestro/moestro.toml in ~/.config or $XDG_CONFIG_HOME]
    #[arg(long, env = "MOESTRO_CONFIG", value_name = "FILE", global = true, hide_short_help = true)]
    #[arg(display_order = AFTER_OWN_FLAGS)]
    pub config: Option<PathBuf>,
    /// Least severe messages to log [default: info for serve, else warn]
    #[arg(long, env = "MOESTRO_LOG_LEVEL", value_enum, global = true, ignore_case = true, hide_short_help = true)]
    #[arg(display_order = AFTER_OWN_FLAGS)]
    pub log_level: Option<LogLevel>,
    /// Log more: the same as --log-level debug
    #[arg(short, long, global = true, conflicts_with = "log_level", display_order = AFTER_OWN_FLAGS)]
    pub verbose: bool,
    /// Log errors only: the same as --log-level error
    #[arg(short, long, global = true, conflicts_with_all = ["log_level", "verbose"], display_order = AFTER_OWN_FLAGS)]
    pub quiet: bool,
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// The level of the log that the flags select.
    pub fn log_level(&self) -> Option<LogLevel> {
        match (self.verbose, self.quiet) {
            (true, _) => Some(LogLevel::Debug),
            (_, true) => Some(LogLevel::Error),
            _ => self.log_level,
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Chat on the terminal; with a prompt or a pipe, print one answer
    #[command(alias = "chat")]
    Run(RunArgs),
    /// Print one answer as it is generated
    Generate(GenerateArgs),
    /// Serve models through OpenAI- and Anthropic-compatible APIs
    Serve(ServeArgs),
    /// Start a coding agent that uses a local server
    Launch(LaunchArgs),
    /// Show the model that a running server has loaded
    Ps(PsArgs),
    /// Make a running server unload its model
    Stop(StopArgs),
    /// Run the server in the background, as a launchd or systemd service
    Service(ServiceArgs),
    /// Download a model from the Hugging Face hub
    Pull(PullArgs),
    /// List the models on this machine
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Delete a model from this machine
    Rm(RmArgs),
    /// Show what is on the disk (models, packs, prompt snapshots, kernels, logs), and remove it by kind
    Cache(CacheArgs),
    /// Copy a model's experts to a pack: one page-aligned record per expert, faster to read
    Pack(PackArgs),
    /// Show the memory plan of a model and its estimated speed on this machine; without a model, rank models
    #[command(alias = "show")]
    Info(InfoArgs),
    /// Measure the speed of prefill and decode, expert cache hits, stalls and disk reads
    Bench(BenchArgs),
    /// Check that this machine's CPU and GPU compute correctly
    Doctor(DoctorArgs),
    /// Show every setting of `serve` and its source
    Config(ServeArgs),
    /// Write a synthetic checkpoint with a real model's dimensions
    Synth(SynthArgs),
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
    #[arg(long, env = "MOESTRO_HOST", default_value = values::DEFAULT_HOST, value_parser = values::host, help_heading = "Server")]
    pub host: String,
    /// Port to listen on; 0 means a free port
    #[arg(long, env = "MOESTRO_PORT", default_value_t = values::DEFAULT_PORT, value_parser = values::port, help_heading = "Server")]
    pub port: u16,
    /// Serve Ollama's API on this port, too, for tools that support no other API [default: off; Ollama itself uses
    /// 11434]
    #[arg(long, env = "MOESTRO_OLLAMA_PORT", value_name = "PORT", value_parser = values::port, hide_short_help = true, help_heading = "Server")]
    pub ollama_port: Option<u16>,
    /// API key that clients must send (`Authorization: Bearer KEY`)
    #[arg(long, env = "MOESTRO_API_KEY", value_name = "KEY", hide_env_values = true, value_parser = values::key, help_heading = "Server")]
    pub api_key: Option<String>,
    /// File with the API key; other users can see keys on the command line
    #[arg(long, env = "MOESTRO_API_KEY_FILE", value_name = "FILE", conflicts_with = "api_key")]
    #[arg(hide_short_help = true, help_heading = "Server")]
    pub api_key_file: Option<PathBuf>,
    /// Origin whose web pages may call the API; * means any
    #[arg(long, env = "MOESTRO_CORS", value_name = "ORIGIN", value_parser = values::origin, hide_short_help = true, help_heading = "Server")]
    pub cors: Option<String>,
    /// Host names that clients use for this server besides local names, separated by commas; other names are refused if
    /// the address is loopback, if there is no API key, or if this flag is set
    #[arg(long, env = "MOESTRO_ALLOWED_HOST", value_name = "NAMES", value_parser = values::hosts, hide_short_help = true, help_heading = "Server")]
    pub allowed_host: Option<String>,
    #[command(flatten)]
    pub parallel: ParallelArgs,
    /// Maximum number of waiting requests. If more wait, or if they take more than half of the memory for requests, the
    /// client that has most of them gets status 429
    #[arg(long, env = "MOESTRO_MAX_QUEUE", value_name = "N", default_value_t = 512, value_parser = values::range::<0, 65_536>, hide_short_help = true, help_heading = "Server")]
    pub max_queue: usize,
    /// Time limit of a request (90s, 5m), including its wait [default: no limit]
    #[arg(long, env = "MOESTRO_REQUEST_TIMEOUT", value_name = "DURATION", value_parser = values::time_limit, hide_short_help = true, help_heading = "Server")]
    pub request_timeout: Option<std::time::Duration>,
    /// Maximum number of tokens of a prompt; longer ones get status 400 `context_length_exceeded`, so that agents
    /// shorten them [default: the context]
    #[arg(long, env = "MOESTRO_MAX_PROMPT_TOKENS", value_name = "N", value_parser = values::count, hide_short_help = true, help_heading = "Server")]
    pub max_prompt_tokens: Option<usize>,
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Keep Claude Code's `x-anthropic-billing-header:` in the prompt; it changes with every request, so the prompt
    /// cache misses
    #[arg(long, env = "MOESTRO_KEEP_BILLING_HEADER", value_parser = BoolishValueParser::new(), hide_short_help = true, help_heading = "Server")]
    pub keep_billing_header: bool,
    /// Give a request without tools the tools of the conversation that it continues, and forbid calls; agents that send
    /// no tools when they summarize a conversation then find it in the prompt cache
    #[arg(long, env = "MOESTRO_REUSE_TOOLS", value_parser = BoolishValueParser::new(), hide_short_help = true, help_heading = "Server")]
    pub reuse_tools: bool,
    /// Hosts that images may be fetched from, separated by commas, with a port unless it is the default port [default:
    /// none]
    #[arg(long, env = "MOESTRO_IMAGE_URLS", value_name = "HOSTS", value_parser = values::hosts_with_ports, hide_short_help = true, help_heading = "Server")]
    pub image_urls: Option<String>,
    /// Pack a model that reads its experts from an unpacked checkpoint: once, in the background, if the disk has room
    #[arg(long, env = "MOESTRO_PACK", value_enum, default_value_t, hide_short_help = true, help_heading = "Server")]
    pub pack: PackMode,
    /// Write the log to files in this directory, at most 128 MiB in total, instead of stderr
    #[arg(long, env = "MOESTRO_LOG_DIR", value_name = "DIR", hide_short_help = true, help_heading = "Server")]
    pub log_dir: Option<PathBuf>,
    /// Format of log lines
    #[arg(long, env = "MOESTRO_LOG_FORMAT", value_enum, default_value_t)]
    #[arg(hide_short_help = true, help_heading = "Server")]
    pub log_format: LogFormat,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    /// Directory of the prompt cache on disk, or off [default: in the user's cache directory]
    #[arg(long, env = "MOESTRO_PROMPT_CACHE_DIR", value_name = "DIR", value_parser = NonEmptyStringValueParser::new(), help_heading = "Memory", hide_short_help = true)]
    pub prompt_cache_dir: Option<String>,
    /// Size limit of the prompt cache on disk
    #[arg(long, env = "MOESTRO_PROMPT_CACHE_DISK", value_name = "SIZE", default_value = "16GiB", value_parser = values::size, help_heading = "Memory", hide_short_help = true)]
    pub prompt_cache_disk: u64,
    /// Unload a model that was idle for this long (90s, 30m, 2h); the next request loads it again [default: never]
    #[arg(long, alias = "keepalive", env = "MOESTRO_KEEP_ALIVE", value_name = "DURATION", value_parser = values::duration, help_heading = "Memory")]
    pub keep_alive: Option<std::time::Duration>,
    #[command(flatten)]
    pub drafts: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Maximum number of reasoning tokens in an answer, if a request sets no limit; -1 means no limit
    #[arg(long, alias = "reasoning-budget", env = "MOESTRO_THINKING_BUDGET", value_name = "N", value_parser = values::budget, help_heading = "Sampling")]
    pub thinking_budget: Option<values::TokenBudget>,
}

#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// The prompt, sent as a user message; - or a pipe reads it from stdin
    #[arg(short, long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// Seed for a reproducible answer
    #[arg(long, env = "MOESTRO_SEED", value_name = "N", value_parser = values::seed, help_heading = "Sampling")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub load: LoadArgs,
    #[command(flatten)]
    pub drafts: DraftArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// Flags of `moestro run`.
#[derive(Debug, Args)]
#[command(mut_arg("prompt", |arg| arg.help("Answer this prompt and exit; - or a pipe reads it from stdin")))]
pub struct RunArgs {
    #[command(flatten)]
    pub generate: GenerateArgs,
    /// Answer this prompt and exit: the same as --prompt
    #[arg(value_name = "PROMPT", conflicts_with = "prompt")]
    pub words: Vec<String>,
    /// System prompt
    #[arg(long, env = "MOESTRO_SYSTEM", value_name = "TEXT")]
    pub system: Option<String>,
    #[command(flatten)]
    pub cache: PromptCacheArgs,
    #[command(flatten)]
    pub remote: RemoteArgs,
}

/// Flags of `moestro launch`.
#[derive(Debug, Args)]
pub struct LaunchArgs {
    /// The agent to start
    #[arg(value_enum)]
    pub agent: values::Agent,
    /// A model, as for `serve` [default: the model of the running server, else the demo]
    #[arg(short, long, value_name = "MODEL")]
    pub model: Option<String>,
    #[command(flatten)]
    pub remote: RemoteArgs,
    /// Write the agent's configuration without asking
    #[arg(short, long)]
    pub yes: bool,
    /// Print the configuration and the command; write and start nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Arguments for the agent, after --
    #[arg(last = true, value_name = "ARGS")]
    pub args: Vec<String>,
}

/// Flags of `moestro pull`.
#[derive(Debug, Args)]
pub struct PullArgs {
    /// Hub id (org/name), or the address of its page
    pub id: String,
    /// Branch, tag or commit [default: that of the page, else main]
    #[arg(long, value_name = "REV")]
    pub revision: Option<String>,
    /// Print progress and the directory as lines of JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Flags of `moestro cache`.
#[derive(Debug, Args)]
pub struct CacheArgs {
    /// Remove everything of these kinds, separated by commas; `moestro rm` deletes models
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KINDS")]
    pub remove: Vec<values::CacheKind>,
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Remove without asking
    #[arg(short, long)]
    pub yes: bool,
    /// Print one JSON object instead of a table
    #[arg(long, conflicts_with = "remove")]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// Name from `moestro list`
    pub name: String,
    #[command(flatten)]
    pub home: ModelsDirArgs,
    /// Delete the model's packs, too
    #[arg(long)]
    pub all: bool,
    /// Delete without asking
    #[arg(short, long)]
    pub yes: bool,
}

#[derive(Debug, Args)]
pub struct PsArgs {
    #[command(flatten)]
    pub remote: RemoteArgs,
}

#[derive(Debug, Args)]
pub struct StopArgs {
    /// Name from `moestro ps` [default: the loaded model]
    pub name: Option<String>,
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
    /// Install and start the service
    Install(InstallArgs),
    /// Stop and remove the service
    Uninstall,
    /// Start the service
    Start,
    /// Stop the service
    Stop,
    /// Make the service reload its configuration file
    Reload,
    /// Show the status of the service
    Status,
    /// Show the end of the service's log and follow it until Ctrl-C
    Logs,
}

#[derive(Debug, Default, Args)]
pub struct InstallArgs {
    /// Socket activation: the system opens the port and starts the server at the first connection
    #[arg(long, env = "MOESTRO_ON_DEMAND", value_parser = BoolishValueParser::new())]
    pub on_demand: bool,
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long, env = "MOESTRO_HOST", value_parser = values::host)]
    pub host: Option<String>,
    /// Port to listen on [default: 5413]
    #[arg(long, env = "MOESTRO_PORT", value_parser = values::port)]
    pub port: Option<u16>,
    /// Show what would be written and run, without doing it
    #[arg(long)]
    pub dry_run: bool,
    /// Arguments for `moestro serve`, after --; under systemd, the server may write only to the user's cache directory
    #[arg(last = true)]
    pub args: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Flags that confirm, print, name outputs or select another measurement. They must be on the command line.
    const COMMAND_LINE_ONLY: &str = "yes all remove json dry-run prompt out verify quality report print-kernels \
        revision model verbose quiet help";

    #[test]
    fn clap_accepts_the_definition() {
        help::command().debug_assert();
    }

    #[test]
    fn settings_have_variables_and_others_none() {
        for command in help::command().get_subcommands() {
            for arg in command.get_arguments() {
                let Some(long) = arg.get_long() else { continue };
                let mut flags = COMMAND_LINE_ONLY.split(' ');
                if flags.any(|flag| flag == long) || (command.get_name(), long) == ("bench", "draft-model") {
                    assert!(arg.get_env().is_none(), "{} --{long}", command.get_name());
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
            help::command().try_get_matches_from(typed).map(|_| ()).unwrap_err().to_string()
        };
        assert!(refused(&["--temp", "nan"]).contains("a number from 0 to 2"));
        assert!(refused(&["--threads", "10000"]).contains("from 1 to 1024"));
        assert!(refused(&["--io-threads", "100000"]).contains("from 1 to 1024"));
        assert!(refused(&["--ctx-size", "4611686018427387904"]).contains("from 1 to 16777216"));
        assert!(refused(&["--prefill-chunk", "1000000"]).contains("from 1 to 65536"));
        assert!(refused(&["--max-queue", "99999999"]).contains("from 0 to 65536"));
        assert!(refused(&["--allowed-host", "http://x"]).contains("without scheme or port"));
        assert!(refused(&["--api-key", "a", "--api-key-file", "b"]).contains("cannot be used with"));
    }
}
