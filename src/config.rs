//! Checked settings, made from the command line. Only this module reads the raw flags of `cli`.

pub mod config_file;
pub mod foreign_flags;
pub mod generation_config;
mod setting_names;
mod toml_lines;
pub mod variables;

pub use crate::cli::values::{Device, DraftModel, PackMode};
pub use generation_config::GenerationDefaults;

use crate::cli::{
    self,
    model_args::{DraftArgs, LoadArgs},
    values,
};
use moestro_base::platform::os;
use moestro_engine::DraftPolicy;
use moestro_model::plan::Parallel;
use std::{
    env,
    ffi::OsStr,
    fs::File,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
    time::Duration,
};

/// The branch of a hub model that is used by default.
pub const MAIN_BRANCH: &str = "main";

/// The model to load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// The embedded demo model.
    Demo,
    Directory(PathBuf),
    /// `org/name` on the Hugging Face hub.
    Hub(String),
}

impl ModelSource {
    /// An existing path is a directory. Otherwise, a text of the form `org/name` is a hub id.
    pub fn new(name: Option<&str>) -> Self {
        let Some(name) = name else { return ModelSource::Demo };
        let path = expand(name);
        let (id, revision) = hub_address(name);
        if !path.exists() && is_hub_id(id) && revision.is_none() {
            ModelSource::Hub(id.into())
        } else {
            ModelSource::Directory(path)
        }
    }
}

/// The parts of a hub address after which the revision stands.
const PAGES: [&str; 6] = ["tree", "blob", "commit", "commits", "resolve", "raw"];

/// The hub id in the address of a model's page, and the page's revision unless it is the main branch. Any other text is
/// returned unchanged.
pub fn hub_address(text: &str) -> (&str, Option<String>) {
    let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or(text);
    let Some(path) = ["huggingface.co/", "hf.co/"].iter().find_map(|host| rest.strip_prefix(host)) else {
        return (text, None);
    };
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let end = path.match_indices('/').map(|(at, _)| at).nth(1).unwrap_or(path.len());
    let mut page = path[end..].split('/').skip(1);
    let revision = page.next().filter(|kind| PAGES.contains(kind)).and_then(|_| page.next());
    let revision = revision.filter(|revision| !["", MAIN_BRANCH].contains(revision));
    (path[..end].trim_end_matches('/'), revision.map(|revision| revision.replace("%2F", "/").replace("%2f", "/")))
}

/// Expands `~` and variables in a path.
pub fn expand(path: impl AsRef<OsStr>) -> PathBuf {
    os::expand_path(path.as_ref(), |name| env::var_os(name), env::home_dir().as_deref())
}

/// Minimum similarity of a name that is suggested for an unknown name: `foo` is no mistake for `log-format` (0.66).
const MIN_SIMILARITY: f64 = 0.85;

/// Minimum length of the beginning of a name that stands for the name.
const MIN_BEGINNING: usize = 3;

/// The known name that `name` probably means: the most similar name, if it is similar enough, else the only name that
/// begins so.
pub fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let known: Vec<&str> = known.collect();
    let similar = known.iter().map(|known| (strsim::jaro_winkler(known, name), *known));
    let nearest = similar.filter(|(near, _)| *near > MIN_SIMILARITY).max_by(|a, b| a.0.total_cmp(&b.0));
    let mut longer = known.into_iter().filter(|known| name.len() >= MIN_BEGINNING && known.starts_with(name));
    nearest.map(|(_, known)| known).or_else(|| longer.next().filter(|_| longer.next().is_none()))
}

/// A suggestion to append to an error about an unknown name, or else the text `otherwise`.
pub fn suggestion(near: Option<&str>, otherwise: &str) -> String {
    near.map_or_else(|| otherwise.to_owned(), |near| format!(" (did you mean {near}?)"))
}

/// True if `text` has the form `org/name`.
pub fn is_hub_id(text: &str) -> bool {
    let word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    text.split_once('/').is_some_and(|(org, name)| word(org) && word(name))
}

/// Settings for loading a model. `None`: the memory plan chooses. The parsers of `cli` have checked the flags.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadSettings {
    pub flags: LoadArgs,
    /// `SWIFTLM_TOP_K`. As in SwiftLM, a value above the model's k means k.
    pub max_experts_per_token: Option<usize>,
    /// Requests that run at the same time.
    pub parallel: Parallel,
    /// True if the model is served. The memory plan then reserves memory for requests.
    pub serving: bool,
    /// Bytes of memory for the prompt cache. 0 for a command without one.
    pub prompt_cache: Option<u64>,
    /// Settings of speculation, which needs memory to undo rejected rows. `None` for a command without speculation.
    pub drafts: Option<DraftArgs>,
}

impl LoadSettings {
    /// # Errors
    /// `SWIFTLM_TOP_K` is not a number.
    pub fn new(flags: LoadArgs) -> Result<Self, String> {
        let swiftlm = env::var("SWIFTLM_TOP_K").ok();
        Ok(Self {
            flags,
            max_experts_per_token: max_experts_per_token(swiftlm.as_deref())?,
            parallel: Parallel::Count(1),
            serving: false,
            prompt_cache: Some(0),
            drafts: None,
        })
    }
}

fn max_experts_per_token(swiftlm: Option<&str>) -> Result<Option<usize>, String> {
    let text = swiftlm.filter(|text| !text.is_empty());
    let count =
        |text| values::count(text).map_err(|reason| format!("invalid value '{text}' for SWIFTLM_TOP_K: {reason}"));
    text.map(count).transpose()
}

/// Location of the prompt cache on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptCacheDir {
    Off,
    /// The user's cache directory.
    Cache,
    In(PathBuf),
}

/// `moestro serve`.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    pub model: ModelSource,
    pub host: String,
    pub port: u16,
    /// Port of Ollama's API.
    pub ollama_port: Option<u16>,
    pub api_key: Option<String>,
    pub cors: Option<String>,
    /// Host names by which clients reach this server, in addition to the local ones.
    pub allowed_host: Vec<String>,
    pub max_queue: usize,
    pub request_timeout: Option<Duration>,
    pub max_prompt_tokens: Option<usize>,
    /// Idle time after which the model is unloaded.
    pub keep_alive: Option<Duration>,
    pub models_dir: Option<PathBuf>,
    pub keep_billing_header: bool,
    pub reuse_tools: bool,
    /// Hosts that images may be fetched from.
    pub image_urls: Vec<String>,
    pub pack: PackMode,
    /// Directory of the prompt cache on disk.
    pub prompt_cache_dir: PromptCacheDir,
    /// Maximum size of the prompt cache on disk in bytes.
    pub prompt_cache_disk: u64,
    pub load: LoadSettings,
    pub generation: GenerationDefaults,
    /// Value of `enable_thinking` for requests that do not set it.
    pub thinking: Option<bool>,
    /// Maximum number of tokens in an answer, for requests that set no maximum.
    pub max_tokens: Option<usize>,
    /// Maximum number of reasoning tokens in an answer, for requests that set no maximum.
    pub thinking_budget: Option<usize>,
}

impl ServeConfig {
    pub fn new(args: cli::ServeArgs) -> Result<Self, String> {
        let from_file = args.api_key_file.as_deref().map(read_key).transpose()?;
        Ok(Self {
            model: ModelSource::new(args.model.model.as_deref()),
            host: args.host,
            port: args.port,
            ollama_port: args.ollama_port,
            api_key: args.api_key.or(from_file),
            cors: args.cors,
            allowed_host: args.allowed_host.iter().flat_map(|hosts| hosts.split(',')).map(str::to_owned).collect(),
            max_queue: args.max_queue,
            request_timeout: args.request_timeout,
            max_prompt_tokens: args.max_prompt_tokens,
            keep_alive: args.keep_alive,
            models_dir: args.home.models_dir,
            keep_billing_header: args.keep_billing_header,
            reuse_tools: args.reuse_tools,
            image_urls: args.image_urls.iter().flat_map(|hosts| hosts.split(',')).map(str::to_owned).collect(),
            pack: args.pack,
            prompt_cache_dir: match args.prompt_cache_dir.as_deref() {
                Some("off") => PromptCacheDir::Off,
                Some(dir) => PromptCacheDir::In(expand(dir)),
                None => PromptCacheDir::Cache,
            },
            prompt_cache_disk: args.prompt_cache_disk,
            load: LoadSettings {
                parallel: args.parallel.parallel,
                prompt_cache: args.cache.prompt_cache,
                drafts: Some(args.drafts),
                serving: true,
                ..LoadSettings::new(args.load)?
            },
            thinking: args.sampling.thinking,
            max_tokens: args.sampling.max_tokens,
            thinking_budget: args.thinking_budget.and_then(|budget| budget.0),
            generation: GenerationDefaults::from_flags(&args.sampling),
        })
    }
}

/// Maximum size of an API key file in bytes. A longer key does not fit into the head of a request.
const MAX_KEY_FILE_BYTES: u64 = 16 << 10;

/// Reads the API key from a file with one line. The file may be a pipe.
fn read_key(path: &Path) -> Result<String, String> {
    let failed = |reason: String| format!("--api-key-file {}: {reason}", path.display());
    let read = File::open(path).and_then(|file| io::read_to_string(file.take(MAX_KEY_FILE_BYTES + 1)));
    let text = read.map_err(|error| failed(error.to_string()))?;
    if text.len() as u64 > MAX_KEY_FILE_BYTES {
        return Err(failed(format!("it must have at most {MAX_KEY_FILE_BYTES} bytes")));
    }
    let key = text.trim_end_matches(['\r', '\n']);
    if key.contains(['\r', '\n']) {
        return Err(failed("it must have one line".into()));
    }
    values::key(key).map_err(failed)
}

impl DraftArgs {
    pub fn are_used(&self) -> bool {
        self.draft_model != DraftModel::Off && self.speculation != DraftPolicy::Off
    }
}

/// `moestro generate` and `run`.
#[derive(Debug, Clone)]
pub struct GenerateConfig {
    pub model: ModelSource,
    /// `None` if the command line has no prompt and stdin is a terminal.
    pub prompt: Option<String>,
    pub system: Option<String>,
    pub max_tokens: Option<usize>,
    pub seed: Option<u64>,
    pub load: LoadSettings,
    pub generation: GenerationDefaults,
    pub thinking: Option<bool>,
}

impl GenerateConfig {
    /// Settings of `generate`, which needs a prompt.
    pub fn new(args: cli::GenerateArgs) -> Result<Self, String> {
        let config = Self::from_args(args)?;
        if config.prompt.is_none() {
            return Err("there is no prompt: use -p PROMPT or a pipe, or `moestro run` for a chat".into());
        }
        Ok(config)
    }

    /// Settings of `run`, which gives one answer if there is a prompt, and otherwise starts a chat.
    pub fn chat(mut args: cli::RunArgs) -> Result<Self, String> {
        if !args.words.is_empty() {
            args.generate.prompt = Some(args.words.join(" "));
        }
        let config = Self::from_args(args.generate)?;
        let load = LoadSettings { prompt_cache: args.cache.prompt_cache, ..config.load };
        Ok(Self { system: args.system, load, ..config })
    }

    fn from_args(args: cli::GenerateArgs) -> Result<Self, String> {
        Ok(Self {
            model: ModelSource::new(args.model.model.as_deref()),
            prompt: read_prompt(args.prompt)?,
            system: None,
            max_tokens: args.sampling.max_tokens,
            seed: args.seed,
            load: LoadSettings { drafts: Some(args.drafts), ..LoadSettings::new(args.load)? },
            thinking: args.sampling.thinking,
            generation: GenerationDefaults::from_flags(&args.sampling),
        })
    }
}

/// The prompt: the value of the flag, or the text on stdin if the value is `-`. Without the flag, it is the text on
/// stdin, or `None` if stdin is a terminal.
fn read_prompt(flag: Option<String>) -> Result<Option<String>, String> {
    match flag {
        Some(text) if text.is_empty() => return Err("the prompt is empty".into()),
        Some(text) if text != "-" => return Ok(Some(text)),
        None if io::stdin().is_terminal() => return Ok(None),
        _ => {}
    }
    let text =
        io::read_to_string(io::stdin()).map_err(|error| format!("cannot read the prompt from stdin: {error}"))?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() { Err("the prompt on stdin is empty".into()) } else { Ok(Some(text.to_owned())) }
}

/// Name of a checkpoint: the name of its directory, or the id of a model in the Hugging Face cache.
pub fn name(dir: &Path) -> String {
    let whole = dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf());
    let last = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    cached_id(&whole).or_else(|| last(&whole)).unwrap_or_else(|| "model".into())
}

/// The id of the model to which a directory of the Hugging Face cache belongs: a snapshot
/// `models--ORG--NAME/snapshots/COMMIT`, or the directory of the model itself.
fn cached_id(path: &Path) -> Option<String> {
    let names = path.ancestors().filter_map(Path::file_name).filter_map(OsStr::to_str);
    // The directory of a model is at most two levels above a snapshot.
    let id = names.take(3).find_map(|name| name.strip_prefix("models--"))?;
    Some(id.replacen("--", "/", 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_is_directory_hub_id_or_demo() {
        let here = tempfile::tempdir().unwrap();
        let path = here.path().to_str().unwrap();
        assert_eq!(ModelSource::new(None), ModelSource::Demo);
        assert_eq!(ModelSource::new(Some(path)), ModelSource::Directory(path.into()));
        let id = "mlx-community/Qwen3.5-4bit";
        assert_eq!(ModelSource::new(Some(id)), ModelSource::Hub(id.into()));
        for url in ["https://huggingface.co/org/name", "hf.co/org/name/tree/main", "https://huggingface.co/org/name?x"]
        {
            assert_eq!(ModelSource::new(Some(url)), ModelSource::Hub("org/name".into()), "{url}");
        }
        for (page, revision) in [
            ("tree/dev", "dev"),
            ("blob/v2/config.json", "v2"),
            ("tree/refs%2Fpr%2f1", "refs/pr/1"),
            ("resolve/v2/a", "v2"),
        ] {
            let url = format!("https://huggingface.co/org/name/{page}");
            assert_eq!(hub_address(&url), ("org/name", Some(revision.into())));
            assert!(matches!(ModelSource::new(Some(&url)), ModelSource::Directory(_)), "only `pull` takes a revision");
        }
        // An existing directory takes precedence. A text that cannot be a hub id is a path.
        assert_eq!(ModelSource::new(Some("crates/engine/src")), ModelSource::Directory("crates/engine/src".into()));
        for path in ["./no/where", "/no/where", "nowhere", "a/b/c", "../models/x", "a/", "org/na me"] {
            assert_eq!(ModelSource::new(Some(path)), ModelSource::Directory(path.into()));
        }
    }

    #[test]
    fn cached_model_is_named_by_its_id() {
        let here = tempfile::tempdir().unwrap();
        let snapshot = here.path().join("models--org--my--model/snapshots/0123456789abcdef0123456789abcdef01234567");
        std::fs::create_dir_all(&snapshot).unwrap();
        let link = here.path().join("link");
        std::os::unix::fs::symlink(&snapshot, &link).unwrap();
        for dir in [snapshot.clone(), snapshot.join(""), snapshot.join("../../blobs/.."), link, snapshot.join("../..")]
        {
            std::fs::create_dir_all(snapshot.join("../../blobs")).unwrap();
            assert_eq!(name(&dir), "org/my--model", "{}", dir.display());
        }
        assert_eq!(name(&here.path().join("models--name/snapshots/main")), "name");
        assert_eq!(name(Path::new("/data/Qwen3.5-4bit/")), "Qwen3.5-4bit");
    }

    #[test]
    fn tilde_expands_to_home() {
        let home = env::home_dir().unwrap();
        assert_eq!(expand("~/models/x"), home.join("models/x"));
        assert_eq!(expand("~"), home);
    }

    #[test]
    fn key_file_has_one_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(file.path(), text).unwrap();
            read_key(file.path())
        };
        assert_eq!(read("secret\n"), Ok("secret".into()));
        assert_eq!(read("a b"), Ok("a b".into()));
        assert!(read("").unwrap_err().contains("protects nothing"));
        assert!(read("a\nb\n").unwrap_err().contains("one line"));
        assert!(read_key(Path::new("/dev/zero")).unwrap_err().contains("at most 16384 bytes"));
        assert!(read_key(Path::new("/no/such/file")).unwrap_err().contains("/no/such/file"));
    }

    #[test]
    fn swiftlm_top_k_must_be_a_number() {
        assert_eq!(max_experts_per_token(Some("6")), Ok(Some(6)));
        assert_eq!(max_experts_per_token(Some("")), Ok(None));
        assert_eq!(max_experts_per_token(None), Ok(None));
        assert!(max_experts_per_token(Some("six")).unwrap_err().contains("SWIFTLM_TOP_K"));
    }
}
