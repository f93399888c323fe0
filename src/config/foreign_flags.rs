//! Command lines of other programs: flags of llama-server, SwiftLM, vLLM, mlx_lm.server and Ollama that have another
//! name here, have no effect here, or are not supported. For each of these flags, the user gets an explanation instead
//! of a guess.
//!
//! If a flag of another program has the same meaning as a flag of Moestro, its name is an alias in `cli`. The table in
//! this file has all other flags. A flag that Moestro itself has is never looked up in the table.

use crate::cli::help;
use clap::{
    Arg, Command,
    error::{ContextKind, ContextValue, ErrorKind},
};
use std::ffi::OsString;

/// The command for a command line that starts with a flag, as command lines of llama-server and SwiftLM do.
const DEFAULT_COMMAND: &str = "serve";

/// The treatment of a flag of another program.
#[derive(Debug, Clone, Copy)]
enum Treatment {
    /// Replaced by these words. The value of the flag follows the last word.
    Becomes(&'static [&'static str]),
    /// Removed, together with its value if the flag has one. Such a flag never changes an answer. The sentence says why
    /// the flag is not needed.
    Ignored(Values, &'static str),
    /// An error. The sentence names the alternative.
    Refused(&'static str),
}
use Treatment::{Becomes, Ignored, Refused};

/// The values that follow a flag.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Values {
    None,
    One,
    /// A switch that may be followed by on, off or auto.
    Switch,
}

const PLACED: &str = "the memory plan decides what is in memory; --memory-limit sets its size";
const DRAFT: &str = "a draft has the device and the context that the model leaves it";
const CACHE_BITS: &str = "use --kv-bits 16, 8 or 4 for keys and values together";
const BATCH: &str = "use --prefill-chunk N; the default is as many tokens as fit";
const ONE_MACHINE: &str = "Moestro computes on one device; remove the flag";
const TOOLS: &str = "tool calls and reasoning are always parsed";
const TEMPLATE: &str = "put the template into the model's directory as chat_template.jinja";
const NAME: &str = "name the model in moestro.toml: [models.NAME] with path = \"...\"";
const PER_REQUEST: &str = "requests set it; no flag sets a default";
const NO_ADAPTERS: &str = "adapters are not supported; merge them into the model first";
const NO_TLS: &str = "run the server behind a reverse proxy with TLS";
const NOT_LLAMA: &str =
    "Moestro reads MLX and Hugging Face safetensors, not GGUF; --model takes a directory or a hub id";

/// The flags, by their names on the command line.
const FLAGS: &[(&[&str], Treatment)] = &[
    // llama-server and llama-cli.
    (&["-hf", "-hfr", "--hf-repo", "--model-path"], Becomes(&["--model"])),
    (&["-md", "--model-draft", "--spec-draft-model"], Becomes(&["--draft-model"])),
    (&["-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"], Becomes(&["--draft-model"])),
    (&["-hff", "--hf-file", "-mu", "--model-url", "-dr", "--docker-repo"], Refused(NOT_LLAMA)),
    (&["-ngl", "--gpu-layers", "--n-gpu-layers"], Ignored(Values::One, PLACED)),
    (&["-ncmoe", "--n-cpu-moe", "-ot", "--override-tensor", "-ts", "--tensor-split"], Ignored(Values::One, PLACED)),
    (&["-ncffn", "--n-cpu-ffn", "-fitt", "--fit-target", "-fitc", "--fit-ctx"], Ignored(Values::One, PLACED)),
    (&["-fit", "--fit"], Ignored(Values::Switch, PLACED)),
    (
        &["-cmoe", "--cpu-moe", "--mlock", "--no-mmap", "--mmap", "--no-kv-offload", "-nkvo", "-kvo", "--kv-offload"],
        Ignored(Values::None, PLACED),
    ),
    (&["-lm", "--load-mode", "-lzm", "--lazy-mode"], Ignored(Values::One, PLACED)),
    (&["-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"], Ignored(Values::One, PLACED)),
    (&["-cd", "--ctx-size-draft", "--spec-draft-ctx-size"], Ignored(Values::One, DRAFT)),
    (&["-devd", "--device-draft", "--spec-draft-device"], Ignored(Values::One, DRAFT)),
    (&["-dev"], Refused("use --device auto, cpu, metal or cuda")),
    (&["-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified"], Ignored(Values::None, "requests share one KV cache")),
    (&["-fa", "--flash-attn"], Ignored(Values::Switch, "attention is always computed in one pass")),
    (&["--jinja", "--no-jinja"], Ignored(Values::None, "the model's chat template is always used")),
    (&["-cb", "--cont-batching", "--no-warmup", "-nr", "-sp", "--special"], Ignored(Values::None, "it is not needed")),
    (&["--no-webui"], Ignored(Values::None, "the page at / stays; it loads nothing from elsewhere")),
    (&["-np"], Becomes(&["--parallel"])),
    (&["-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--kv-cache-dtype"], Refused(CACHE_BITS)),
    (&["-ctkd", "-ctvd", "--cache-type-k-draft", "--cache-type-v-draft"], Ignored(Values::One, DRAFT)),
    (&["-b", "-ub", "--batch-size", "--ubatch-size", "--max-num-batched-tokens"], Refused(BATCH)),
    (&["-a", "--alias", "--served-model-name"], Refused(NAME)),
    (&["--chat-template", "--chat-template-file"], Refused(TEMPLATE)),
    (&["--chat-template-kwargs", "--chat-template-args"], Refused("send chat_template_kwargs with the request")),
    (&["--lora", "--lora-modules", "--adapter-path"], Refused(NO_ADAPTERS)),
    (&["--mmproj", "-mm"], Ignored(Values::One, "the vision tower is part of the checkpoint")),
    (&["--rope-scaling", "--rope-scale", "--rope-freq-base"], Refused("config.json sets the scaling of positions")),
    (&["--split-mode", "-sm", "--main-gpu", "-mg"], Ignored(Values::One, ONE_MACHINE)),
    (&["--presence-penalty", "--frequency-penalty", "--stop", "--seed", "-s"], Refused(PER_REQUEST)),
    (
        &["-tb", "--threads-batch", "--threads-http", "-td", "--threads-draft", "-tbd", "--threads-batch-draft"],
        Ignored(Values::One, "--threads sets the compute threads"),
    ),
    (&["--reasoning-format"], Ignored(Values::One, TOOLS)),
    (&["--metrics", "--props", "--slots", "--no-slots"], Ignored(Values::None, "/metrics and /health always answer")),
    (&["--context-shift", "--no-context-shift"], Ignored(Values::None, "a prompt is never truncated")),
    (&["--swa-full", "--no-repack"], Ignored(Values::None, "it is not needed")),
    (
        &["--cache-reuse", "-ctxcp", "--ctx-checkpoints", "-cms", "--checkpoint-min-step"],
        Ignored(Values::One, "snapshots of prompts are kept unasked"),
    ),
    (&["-cram", "--cache-ram"], Refused("use --prompt-cache SIZE")),
    (&["--slot-save-path"], Refused("use --prompt-cache-dir DIR; prompts are kept on the disk unasked")),
    (&["-dio", "--direct-io"], Refused("use --expert-io direct")),
    (&["--embedding", "--embeddings", "--rerank", "--reranking", "--pooling"], Refused("there are no embeddings")),
    (&["--ssl-key-file", "--ssl-cert-file", "--ssl-keyfile", "--ssl-certfile"], Refused(NO_TLS)),
    (&["--log-file"], Refused("use --log-dir DIR")),
    (&["-lv", "--verbosity", "--log-verbosity"], Refused("use --log-level LEVEL")),
    (&["-rea", "--reasoning"], Refused("use --thinking on or off")),
    (&["-cl", "--cache-list"], Refused("`moestro list` lists the models")),
    (&["-to", "--timeout"], Refused("use --request-timeout SECS")),
    // SwiftLM.
    (&["--vision"], Ignored(Values::None, "a model with a vision tower needs no switch")),
    (&["--audio"], Refused("audio is not supported")),
    (&["--mem-limit"], Refused("use --memory-limit with a unit, such as --memory-limit 24GiB")),
    (&["--turbo-kv"], Refused(CACHE_BITS)),
    (&["--dflash"], Ignored(Values::None, "--draft-model recognises a DFlash draft by its files")),
    (&["--dflash-block-size"], Refused("use --num-draft-tokens N")),
    (&["--mtp"], Becomes(&["--draft-model", "mtp"])),
    (&["--calibrate", "--ssd-prefetch"], Ignored(Values::None, "Moestro measures while it runs")),
    (&["--info"], Refused("`moestro info MODEL` prints the memory plan")),
    // vLLM.
    (&["--gpu-memory-utilization"], Refused("use --memory-limit SIZE, such as --memory-limit 24GiB")),
    (&["--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp"], Ignored(Values::One, ONE_MACHINE)),
    (&["--max-num-seqs"], Becomes(&["--parallel"])),
    (&["--dtype", "--quantization", "--load-format"], Refused("the model's files decide the format of its weights")),
    (&["--enable-auto-tool-choice", "--enable-reasoning"], Ignored(Values::None, TOOLS)),
    (&["--tool-call-parser", "--reasoning-parser"], Ignored(Values::One, TOOLS)),
    (&["--enable-prefix-caching"], Ignored(Values::None, "the prompt cache is on unless --prompt-cache off")),
    (&["--enable-chunked-prefill", "--enforce-eager"], Ignored(Values::None, "it is not needed")),
    (
        &["--disable-log-requests", "--no-enable-log-requests", "--disable-log-stats"],
        Ignored(Values::None, "-q logs errors only"),
    ),
    (&["--allowed-origins"], Refused("use --cors ORIGIN")),
    (&["--hf-token", "-hft"], Refused("set HF_TOKEN")),
    (&["--trust-remote-code"], Ignored(Values::None, "Moestro never runs code of a checkpoint")),
    (&["--speculative-config"], Refused("use --draft-model and --num-draft-tokens")),
    (&["--swap-space", "--cpu-offload-gb"], Ignored(Values::One, PLACED)),
    // mlx_lm.server.
    (&["--use-default-chat-template"], Ignored(Values::None, "the model's chat template is always used")),
    (&["--max-kv-size"], Refused("use --ctx-size N")),
    (&["--kv-group-size", "--quantized-kv-start"], Refused("use --kv-bits 8 or 4; the newest positions keep 16")),
    // Ollama.
    (&["--hidethinking", "--nowordwrap"], Refused("use `2>/dev/null`: reasoning goes to stderr, the answer to stdout")),
    (&["--think"], Refused("use --thinking on or off")),
    (
        &["--format"],
        Refused("list and cache have --json; for answers, send response_format with a request to the server"),
    ),
    (&["--insecure"], Refused("set HF_ENDPOINT to the address of a mirror")),
];

/// Commands of other programs.
const COMMANDS: &[(&str, &str)] = &[
    ("version", "`moestro --version` prints the version"),
    ("cp", "a second name for a model is a table [models.NAME] in moestro.toml, with path = \"...\""),
    ("create", "a model with its own settings is a table [models.NAME] in moestro.toml, with path = \"...\""),
    ("push", "Moestro uploads nothing; `hf upload` does"),
    ("login", "set HF_TOKEN, or run `hf auth login`, to access gated models"),
    ("signin", "set HF_TOKEN, or run `hf auth login`, to access gated models"),
    ("load", "`moestro run` and `moestro serve` load a model"),
    ("unload", "`moestro stop` unloads the model of a server"),
    ("import", "`moestro serve DIRECTORY` serves a model in any directory"),
];

/// A command line in Moestro's words.
#[derive(Debug, Default, PartialEq)]
pub struct Translation {
    pub args: Vec<OsString>,
    /// Sentences about flags without effect.
    pub notes: Vec<String>,
}

/// Translates a command line of another program. Everything after `--` stays as it is.
///
/// # Errors
/// Fails if a flag or command is not supported. The error names the alternative.
pub fn translate(args: impl IntoIterator<Item = OsString>) -> Result<Translation, String> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    let whole = help::command();
    let at = match args.iter().skip(1).position(|arg| arg.to_str().is_some_and(|arg| is_command(&whole, arg))) {
        Some(at) => at + 1,
        None => match args.get(1).and_then(|first| first.to_str()) {
            Some(first) if first.starts_with('-') && !stands_alone(first) => {
                args.insert(1, DEFAULT_COMMAND.into());
                1
            }
            first => {
                let named = first.and_then(|first| COMMANDS.iter().find(|(name, _)| *name == first));
                let refused = named.map(|(name, sentence)| format!("there is no command {name}: {sentence}"));
                return refused.map_or(Ok(Translation { args, notes: Vec::new() }), Err);
            }
        },
    };
    let own = args.get(at).and_then(|name| whole.find_subcommand(name)).cloned().unwrap_or_default();
    let tail = args.split_off(at + 1);
    let mut translation = Translation { args, notes: Vec::new() };
    translation.add(&own, tail)?;
    Ok(translation)
}

impl Translation {
    fn add(&mut self, own: &Command, tail: Vec<OsString>) -> Result<(), String> {
        let mut rest = tail.into_iter().peekable();
        while let Some(arg) = rest.next() {
            if arg == "--" {
                self.args.push(arg);
                self.args.extend(rest);
                return Ok(());
            }
            let text = arg.to_string_lossy();
            let (flag, value) = text.split_once('=').map_or((&*text, None), |(flag, value)| (flag, Some(value)));
            let found = FLAGS.iter().find(|(names, _)| is_named(names, flag)).filter(|_| !has_flag(own, flag));
            match found.map(|(_, treatment)| *treatment) {
                None => self.args.push(arg),
                Some(Refused(sentence)) => return Err(format!("{flag} is not supported: {sentence}")),
                Some(Becomes(words)) => match words {
                    // The command may not have the new flag either, so the new flag is translated, too.
                    [word] if !has_flag(own, word) => {
                        let tail = [OsString::from(*word)].into_iter().chain(value.map(Into::into)).chain(rest);
                        return self.add(own, tail.collect());
                    }
                    _ => {
                        self.args.extend(words.iter().map(OsString::from));
                        self.args.extend(value.map(OsString::from));
                    }
                },
                Some(Ignored(values, sentence)) => {
                    let is_switch = |next: &OsString| ["on", "off", "auto", "0", "1"].iter().any(|word| next == word);
                    let has_value = match values {
                        Values::None => false,
                        Values::One => value.is_none(),
                        Values::Switch => value.is_none() && rest.peek().is_some_and(is_switch),
                    };
                    if has_value {
                        rest.next();
                    }
                    self.notes.push(format!("{flag} has no effect: {sentence}"));
                }
            }
        }
        Ok(())
    }
}

/// True if a flag has one of these names. `--ngl` is `-ngl`, but `--s` is not `-s`.
fn is_named(names: &[&str], flag: &str) -> bool {
    let with_one_dash = flag.strip_prefix('-').filter(|rest| rest.starts_with('-') && rest.len() > 2);
    names.contains(&flag) || with_one_dash.is_some_and(|rest| names.contains(&rest))
}

/// True for the name or an alias of a command.
fn is_command(whole: &Command, word: &str) -> bool {
    word == "help" || whole.find_subcommand(word).is_some()
}

/// True for a flag that needs no command.
fn stands_alone(flag: &str) -> bool {
    ["-h", "--help", "-V", "--version"].contains(&flag)
}

/// True if a command has a flag with this name. Letters may be combined, but a word such as `-ngl` is not a
/// combination.
fn has_flag(command: &Command, flag: &str) -> bool {
    let is_long = |arg: &Arg, name: &str| {
        arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
    };
    match flag.strip_prefix("--") {
        Some(name) => command.get_arguments().any(|arg| is_long(arg, name)),
        None => {
            let mut letters = flag.chars().skip(1);
            let letter = letters.next();
            let rest = letters.next();
            rest.is_none() && command.get_arguments().any(|arg| arg.get_short() == letter)
        }
    }
}

/// Replaces the similar name that clap suggests by a closer name of this command, or removes it. clap compares letters
/// only.
pub fn explain(mut error: clap::Error, args: &[OsString]) -> clap::Error {
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        _ => String::new(),
    };
    match error.kind() {
        ErrorKind::UnknownArgument => {
            error.remove(ContextKind::SuggestedArg);
            error.remove(ContextKind::Suggested);
            let typed = text(&error, ContextKind::InvalidArg);
            let name = typed.trim_start_matches('-').split('=').next().unwrap_or_default().to_owned();
            let mut whole = help::command();
            whole.build();
            let mut sub = None;
            for arg in args {
                sub = sub.unwrap_or(&whole).find_subcommand(arg).or(sub);
            }
            if let Some(mut sub) = sub.cloned() {
                if let Some(flag) = super::nearest(&name, sub.get_arguments().filter_map(Arg::get_long)) {
                    error.insert(ContextKind::SuggestedArg, ContextValue::String(format!("--{flag}")));
                }
                // clap's own usage has the argument that it suggests.
                error.insert(ContextKind::Usage, ContextValue::StyledStr(sub.render_usage()));
            }
        }
        ErrorKind::InvalidValue => {
            error.remove(ContextKind::SuggestedValue);
        }
        ErrorKind::InvalidSubcommand => {
            let typed = text(&error, ContextKind::InvalidSubcommand);
            let whole = help::command();
            let near = super::nearest(&typed, whole.get_subcommands().map(Command::get_name));
            if near.is_none() || typed.len() < 3 {
                error.remove(ContextKind::SuggestedSubcommand);
                error.remove(ContextKind::Suggested);
            }
        }
        _ => {}
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(line: &str) -> Result<String, String> {
        let args = line.split_whitespace().map(OsString::from);
        let words = translate(args)?.args.into_iter().map(|arg| arg.into_string().unwrap());
        Ok(words.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn foreign_flags_are_translated() {
        for (typed, meant) in [
            ("moestro --model x --port 5413", "moestro serve --model x --port 5413"),
            ("moestro serve -hf org/name -ngl 99 -c 4096", "moestro serve --model org/name -c 4096"),
            ("moestro serve x -fa on --jinja --no-mmap", "moestro serve x"),
            ("moestro serve x -fa --port 1", "moestro serve x --port 1"),
            ("moestro serve x --gpu-layers=20", "moestro serve x"),
            ("moestro serve x --ngl 99 --fa on", "moestro serve x"),
            ("moestro serve --model-path x", "moestro serve --model x"),
            ("moestro serve x --vision --mtp", "moestro serve x --draft-model mtp"),
            ("moestro serve x -md=y", "moestro serve x --draft-model y"),
            ("moestro serve x -tb 8 --metrics --port 1", "moestro serve x --port 1"),
            ("moestro serve x -cd 512 -ngld 99 -td 4 -devd none -fit off -c 4096", "moestro serve x -c 4096"),
            ("moestro launch codex -- --jinja", "moestro launch codex -- --jinja"),
            ("moestro --version", "moestro --version"),
            ("moestro", "moestro"),
            ("moestro --config f serve", "moestro --config f serve"),
        ] {
            assert_eq!(translated(typed).as_deref(), Ok(meant), "{typed}");
        }
    }

    #[test]
    fn each_foreign_flag_is_listed_once() {
        let mut all: Vec<&str> = FLAGS.iter().flat_map(|(names, _)| names.iter().copied()).collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), count);
    }

    #[test]
    fn each_flag_of_the_page_is_known() {
        let page = include_str!("../../docs/migrating.md");
        let prose: String = page.split("```").step_by(2).collect();
        let words = prose.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
        let flags: Vec<&str> = words.filter(|word| word.starts_with('-')).collect();
        assert!(flags.len() > 80, "{flags:?}");
        let whole = help::command();
        for flag in flags {
            let is_own = std::iter::once(&whole).chain(whole.get_subcommands()).any(|command| has_flag(command, flag));
            assert!(is_own || FLAGS.iter().any(|(names, _)| is_named(names, flag)), "{flag}");
        }
    }

    #[test]
    fn unlike_names_are_not_suggested() {
        let message = |args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(OsString::from).collect();
            explain(help::command().try_get_matches_from(&args).unwrap_err(), &args).to_string()
        };
        assert!(message(&["moestro", "serve", "--memroy-limit", "8G"]).contains("--memory-limit"));
        assert!(message(&["moestro", "serve", "--mem", "8G"]).contains("exists: '--memory-limit'"));
        let nested = message(&["moestro", "service", "install", "--hots", "x"]);
        assert!(nested.contains("exists: '--host'") && nested.contains("moestro service install"), "{nested}");
        for flag in ["--colour", "--max", "--version"] {
            let text = message(&["moestro", "serve", flag]);
            assert!(!text.contains("similar") && text.contains("Usage: moestro serve [OPTIONS] [MODEL]"), "{text}");
        }
        assert!(!message(&["moestro", "info", "--like", "28b"]).contains("similar"));
        assert!(message(&["moestro", "srve"]).contains("serve"));
        assert!(!message(&["moestro", "zz"]).contains("similar"));
    }
}
