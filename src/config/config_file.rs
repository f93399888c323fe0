//! `moestro.toml`: flags by their names, in a file. The command line overrides the environment, the environment
//! overrides the file, the file overrides the defaults.
//!
//! ```toml
//! model = "coder"                  # the model if none is named
//! port = 5413
//! memory-limit = "48GiB"
//!
//! [models.coder]                   # overrides the settings above for this model
//! path = "mlx-community/Qwen3.5-122B-A10B-4bit"
//! ctx-size = 65536
//! ```
//!
//! The settings of the file are inserted before the flags of the command line, so one parser checks both.

use super::{
    foreign_flags::explain,
    setting_names::{MODEL, PATH, setting, settings_of},
    toml_lines::{line_of, toml_error},
};
use crate::cli::{Cli, Command, help, model_args::ModelArgs, values::MODEL_OPTION};
use clap::{
    Arg, ArgMatches, FromArgMatches,
    error::{ContextKind, ContextValue},
    parser::ValueSource,
};
use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Says how a model is written.
const NOT_A_MODEL: &str = "a model is a table [models.NAME], with path = \"...\" in the next line";
/// Maximum size of a configuration file in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// Flags by name, without the dashes.
type Flags = BTreeMap<String, String>;

/// A parsed configuration file, which contains only names of known settings.
#[derive(Debug, Default)]
pub struct ConfigFile {
    path: PathBuf,
    text: String,
    settings: Flags,
    models: BTreeMap<String, Flags>,
    /// Why the program runs without the user's default file, if the file may exist.
    warning: Option<String>,
}

/// The settings of a command, and the source of each setting.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The configuration file, if there is one.
    pub file: Option<PathBuf>,
    /// The content of the file when it was read.
    pub content: Arc<ConfigFile>,
    /// Name of the command's model in the file. `None` if the file does not list the model.
    pub model: Option<String>,
    /// Name of each model in the file, and its directory or hub id.
    pub models: Vec<(String, String)>,
    /// The command line.
    pub args: Vec<OsString>,
    pub rows: Vec<SettingRow>,
}

/// The value of one flag, and its source.
#[derive(Debug, Clone)]
pub struct SettingRow {
    pub flag: String,
    pub value: Option<String>,
    /// The command line, an environment variable, a table of the file, or the default.
    pub from: String,
}

/// Parses a command line, with settings from the configuration file.
///
/// # Errors
/// Returns clap's errors, which include requests for help and version. Also fails if the configuration file cannot be
/// read or has a setting with an unknown name.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<(Cli, Settings), clap::Error> {
    parse_with(args.into_iter().collect(), None, None)
}

/// Like [`parse`], but uses a file that was read before, and the model `other` and its settings instead of the model on
/// the command line.
pub fn parse_for(args: Vec<OsString>, file: Arc<ConfigFile>, other: &str) -> Result<(Cli, Settings), clap::Error> {
    parse_with(args, Some(file), Some(other))
}

/// The sentence of a parser's error, in one line and without the usage that follows it.
pub fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let words = first.trim_start_matches("error: ").split_whitespace();
    words.collect::<Vec<_>>().join(" ")
}

fn parse_with(
    args: Vec<OsString>,
    file: Option<Arc<ConfigFile>>,
    other: Option<&str>,
) -> Result<(Cli, Settings), clap::Error> {
    let given = help::command().ignore_errors(true).try_get_matches_from(&args)?;
    let wrong = |sentence: String| help::command().error(clap::error::ErrorKind::ValueValidation, sentence);
    let named = given.try_get_one::<PathBuf>("config").ok().flatten();
    let read = || ConfigFile::find(named.map(PathBuf::as_path)).map(Arc::new);
    let file = file.map_or_else(read, Ok).map_err(wrong)?;
    let Some((name, sub)) = given.subcommand() else {
        // Without a subcommand, clap prints help or an error.
        let matches = help::command().try_get_matches_from(&args).map_err(|error| explain(error, &args))?;
        return Ok((Cli::from_arg_matches(&matches)?, Settings::default()));
    };
    let text = |id| sub.try_get_one::<String>(id).ok().flatten();
    let asked = text(MODEL_OPTION).or(text(MODEL)).or(file.settings.get(MODEL)).cloned();
    let asked = other.map(str::to_owned).or(asked);
    let model = asked.filter(|model| file.models.contains_key(model));
    let whole = file.before(&args, name, model.as_deref());
    let matches = help::command().try_get_matches_from(&whole).map_err(|error| {
        match source_of_error(&error, &args, name, &file, model.as_deref()) {
            Some(sentence) => wrong(sentence),
            None => explain(error, &args),
        }
    })?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    let is_argument = sub.try_contains_id(MODEL).is_ok() && sub.value_source(MODEL) == Some(ValueSource::CommandLine);
    cli.command.merge_model_option(is_argument).map_err(wrong)?;
    if let Some(argument) = cli.command.model() {
        let fallback = || file.settings.get(MODEL).cloned();
        let given = other.map(str::to_owned).or(argument.take());
        *argument = given.or_else(fallback).map(|model| file.path_of(&model).unwrap_or(model));
    }
    let rows = matches.subcommand_matches(name).map(|matches| file.rows(name, sub, matches, model.as_deref()));
    let paths = file.models.keys().filter_map(|name| Some((name.clone(), file.path_of(name)?))).collect();
    let path = Some(file.path.clone()).filter(|path| !path.as_os_str().is_empty());
    let rows = rows.unwrap_or_default();
    Ok((cli, Settings { file: path, content: file, model, models: paths, args, rows }))
}

impl ConfigFile {
    /// Reads the configuration file `named`, which must exist. If `named` is `None`, reads the user's default file,
    /// which may be missing.
    fn find(named: Option<&Path>) -> Result<Self, String> {
        let Some(path) = named.map(Path::to_path_buf).or_else(default_path) else { return Ok(Self::default()) };
        match read_file(&path) {
            Ok(text) => Self::parse(&path, &text).map_err(|reason| format!("{}: {reason}", path.display())),
            // The second kind: a parent of the file, such as the home directory, is a file.
            Err(error)
                if named.is_none()
                    && matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
            {
                Ok(Self::default())
            }
            // The home directory may belong to another user.
            Err(error) if named.is_none() && fs::symlink_metadata(&path).is_err() => {
                let warning =
                    format!("cannot look for {}: {error}; running without settings of a file", path.display());
                Ok(Self { warning: Some(warning), ..Self::default() })
            }
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    /// Logs why the program runs without the user's default file, if the file may exist.
    pub fn log_warning(&self) {
        if let Some(warning) = &self.warning {
            tracing::warn!("{warning}");
        }
    }

    /// True if the file has no setting, or if there is no file.
    pub fn is_empty(&self) -> bool {
        self.settings.is_empty() && self.models.is_empty()
    }

    fn parse(path: &Path, text: &str) -> Result<Self, String> {
        let table: toml::Table = text.parse().map_err(|error| toml_error(text, &error))?;
        let mut file = Self { path: path.to_path_buf(), text: text.to_owned(), ..Self::default() };
        let in_line = |model: Option<&str>, name: &str, reason: String| match line_of(text, model, name) {
            Some(line) => format!("line {line}: {reason}"),
            None => reason,
        };
        for (name, value) in table {
            match (name.as_str(), value) {
                ("models", toml::Value::Table(models)) => {
                    for (model, value) in models {
                        let toml::Value::Table(table) = value else {
                            return Err(in_line(None, "models", format!("{model}: {NOT_A_MODEL}")));
                        };
                        let settings = table.into_iter().map(|(name, value)| {
                            setting(name.clone(), value, true).map_err(|reason| in_line(Some(&model), &name, reason))
                        });
                        let settings = settings.collect::<Result<_, _>>()?;
                        file.models.insert(model, settings);
                    }
                }
                ("models", _) => return Err(in_line(None, "models", NOT_A_MODEL.into())),
                (_, value) => {
                    let checked = setting(name.clone(), value, false);
                    let (name, value) = checked.map_err(|reason| in_line(None, &name, reason))?;
                    file.settings.insert(name, value);
                }
            }
        }
        Ok(file)
    }

    /// Inserts the settings of this file after the subcommand's name. Skips settings for which the subcommand has no
    /// flag, and settings that the environment sets. Flags on the command line come later, so they override the
    /// inserted settings.
    fn before(&self, args: &[OsString], subcommand: &str, model: Option<&str>) -> Vec<OsString> {
        let command = help::command();
        let own = |flag: &str| self.setting(model, flag).map(|(value, _)| value);
        let is_in_environment = |arg: &Arg| arg.get_env().is_some_and(|name| env::var_os(name).is_some());
        let added = settings_of(&command, subcommand).filter_map(|arg| {
            let flag = arg.get_long()?;
            let value = own(flag).filter(|_| !is_in_environment(arg))?;
            if arg.get_action().takes_values() {
                Some(OsString::from(format!("--{flag}={value}")))
            } else {
                (value == "true").then(|| OsString::from(format!("--{flag}")))
            }
        });
        let at = args.iter().skip(1).position(|arg| arg == subcommand).map_or(args.len(), |at| at + 2);
        let (head, tail) = args.split_at(at.min(args.len()));
        head.iter().cloned().chain(added).chain(tail.iter().cloned()).collect()
    }

    /// The value of a setting, and the table of the file that contains it.
    fn setting(&self, model: Option<&str>, flag: &str) -> Option<(&str, String)> {
        let own = model.and_then(|model| Some((self.models.get(model)?.get(flag)?, format!(" [models.{model}]"))));
        let (value, table) = own.or_else(|| Some((self.settings.get(flag)?, String::new())))?;
        Some((value, format!("{}{table}", self.path.display())))
    }

    /// The file and the line of a setting that has this value.
    fn position(&self, model: Option<&str>, flag: &str, value: &str) -> Option<String> {
        let is_of_model = |model: &&str| self.models.get(*model).is_some_and(|settings| settings.contains_key(flag));
        self.setting(model, flag).filter(|(found, _)| *found == value)?;
        let line = line_of(&self.text, model.filter(is_of_model), flag)?;
        Some(format!("{}, line {line}", self.path.display()))
    }

    /// All flags of the subcommand. `given` is parsed without the file, `matches` is parsed with the file.
    fn rows(&self, subcommand: &str, given: &ArgMatches, matches: &ArgMatches, model: Option<&str>) -> Vec<SettingRow> {
        let command = help::command();
        let rows = settings_of(&command, subcommand).filter_map(|arg| {
            let id = arg.get_id().as_str();
            let flag = arg.get_long()?;
            let raw = matches.try_get_raw(id).ok().flatten();
            let value = raw.and_then(|mut values| values.next()).map(|value| value.to_string_lossy().into_owned());
            let is_on = matches.try_get_one::<bool>(id).ok().flatten().filter(|_| !arg.get_action().takes_values());
            let value = is_on.map_or(value, |is_on| Some(is_on.to_string()));
            let value = if arg.is_hide_env_values_set() { value.map(|_| "(hidden)".into()) } else { value };
            let from = match given.value_source(id) {
                Some(ValueSource::CommandLine) => "command line".into(),
                Some(ValueSource::EnvVariable) => arg.get_env().unwrap_or_default().to_string_lossy().into_owned(),
                _ => self.setting(model, flag).map_or_else(|| default_of(arg, value.is_some()), |(_, table)| table),
            };
            Some(SettingRow { flag: flag.into(), value, from })
        });
        rows.collect()
    }

    /// Directory or hub id of a model that the file lists.
    fn path_of(&self, model: &str) -> Option<String> {
        self.models.get(model)?.get(PATH).cloned()
    }
}

/// "default", with what the help says about a flag that has no value by default.
fn default_of(arg: &Arg, has_value: bool) -> String {
    let help = arg.get_help().filter(|_| !has_value).map(ToString::to_string).unwrap_or_default();
    match help.split_once("[default: ").and_then(|(_, rest)| rest.split_once(']')) {
        Some((default, _)) => format!("default: {default}"),
        None => "default".into(),
    }
}

impl Command {
    /// The model argument, as written on the command line. `None` if the command has no such argument.
    pub fn model(&mut self) -> Option<&mut Option<String>> {
        self.model_args().map(|args| &mut args.model)
    }

    fn model_args(&mut self) -> Option<&mut ModelArgs> {
        match self {
            Command::Serve(given) | Command::Config(given) => Some(&mut given.model),
            Command::Generate(given) => Some(&mut given.model),
            Command::Run(given) => Some(&mut given.generate.model),
            Command::Info(given) => Some(&mut given.model),
            Command::Bench(given) => Some(&mut given.model),
            Command::Pack(given) => Some(&mut given.model),
            _ => None,
        }
    }

    /// If `--model X` is set, makes X the model. The first word after `run` then belongs to the prompt. `is_argument`
    /// is true if MODEL is on the command line, and not only in the environment.
    ///
    /// # Errors
    /// The model is given twice.
    fn merge_model_option(&mut self, is_argument: bool) -> Result<(), String> {
        let Some(args) = self.model_args() else { return Ok(()) };
        let Some(option) = args.option.take() else { return Ok(()) };
        let argument = args.model.replace(option).filter(|_| is_argument);
        match (self, argument) {
            (_, None) => Ok(()),
            (Command::Run(run), Some(word)) if run.generate.prompt.is_none() => {
                run.words.insert(0, word);
                Ok(())
            }
            (_, Some(word)) => Err(format!("the model is given twice: {word} and --model")),
        }
    }
}

/// Reads a configuration file. A pipe or a device could block or never end, so only a regular file is read.
fn read_file(path: &Path) -> io::Result<String> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() || meta.len() > MAX_BYTES {
        return Err(io::Error::other(format!("not a regular file of at most {MAX_BYTES} bytes")));
    }
    fs::read_to_string(path)
}

/// The sentence about a value that a variable or the file has set. `None` if the command line is wrong.
fn source_of_error(
    error: &clap::Error,
    args: &[OsString],
    subcommand: &str,
    file: &ConfigFile,
    model: Option<&str>,
) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let argument = text(ContextKind::InvalidArg)?;
    let value = text(ContextKind::InvalidValue)?;
    let is_typed = |arg: &OsString| {
        let arg = arg.to_string_lossy();
        let is_short = |flag: &str| flag.len() == 2 && flag.starts_with('-') && !value.is_empty();
        arg == value || arg.strip_suffix(value).is_some_and(|flag| flag.ends_with('=') || is_short(flag))
    };
    if args.iter().any(is_typed) {
        return None;
    }
    let flag = argument.trim_start_matches('-').split([' ', '=']).next()?;
    let whole = help::command();
    let variable = settings_of(&whole, subcommand).find(|arg| arg.get_long() == Some(flag))?.get_env()?;
    let sentence = sentence(error);
    if env::var_os(variable).is_some_and(|set| set == value) {
        let variable = variable.to_string_lossy();
        return Some(sentence.replace(&format!("'{argument}'"), &format!("the environment variable {variable}")));
    }
    let position = file.position(model, flag, value)?;
    Some(format!("{position}: {}", sentence.replace(&format!("'{argument}'"), flag)))
}

/// `moestro/moestro.toml` in the user's configuration directory.
fn default_path() -> Option<PathBuf> {
    let is_absolute = |path: &PathBuf| path.is_absolute();
    let set = |name| env::var_os(name).map(super::expand).filter(is_absolute);
    let base = set("XDG_CONFIG_HOME").or_else(|| Some(env::home_dir().filter(is_absolute)?.join(".config")))?;
    Some(base.join("moestro/moestro.toml"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::{fifo::make_fifo, own_process::ran_without_settings};

    fn parsed(text: &str, given: &str) -> Result<(Cli, Settings), String> {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        fs::write(file.path(), text).unwrap();
        let head = ["moestro".into(), "--config".into(), file.path().into()];
        parse(head.into_iter().chain(given.split_whitespace().map(OsString::from))).map_err(|error| error.to_string())
    }

    fn serve(text: &str, given: &str) -> crate::cli::ServeArgs {
        match parsed(text, given).unwrap().0.command {
            Command::Serve(serve) => serve,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn command_line_overrides_file() {
        if ran_without_settings(command_line_overrides_file) {
            return;
        }
        let text = "port = 6000\nmax-queue = 3\nmemory-limit = \"2GiB\"\ntemp = 0.5";
        let serve = serve(text, "serve --port 7000");
        assert_eq!((serve.port, serve.max_queue, serve.load.memory_limit), (7000, 3, Some(2 << 30)));
        assert_eq!((serve.sampling.temp, serve.host.as_str()), (Some(0.5), "127.0.0.1"));
    }

    #[test]
    fn model_table_overrides_settings() {
        if ran_without_settings(model_table_overrides_settings) {
            return;
        }
        let text = "model = \"small\"\nctx-size = 100\n[models.small]\npath = \"/models/s\"\n[models.large]\npath = \"org/l\"\nctx-size = 7";
        let small = serve(text, "serve");
        assert_eq!((small.model.model.as_deref(), small.load.ctx_size), (Some("/models/s"), Some(100)));
        let large = serve(text, "serve large");
        assert_eq!((large.model.model.as_deref(), large.load.ctx_size), (Some("org/l"), Some(7)));
        let other = serve(text, "serve ./elsewhere");
        assert_eq!((other.model.model.as_deref(), other.load.ctx_size), (Some("./elsewhere"), Some(100)));
    }

    #[test]
    fn settings_of_other_commands_are_ignored() {
        if ran_without_settings(settings_of_other_commands_are_ignored) {
            return;
        }
        let (cli, _) = parsed("port = 6000\nio-threads = 4", "info --json").unwrap();
        assert!(matches!(cli.command, Command::Info(info) if info.json && info.load.io_threads == 4));
        assert!(parsed("json = true", "info").err().unwrap().contains("is not a setting"));
        let (cli, _) = parsed("draft-model = \"lookup\"", "bench --cold").unwrap();
        assert!(matches!(cli.command, Command::Bench(bench) if bench.draft_model.is_none()));
    }

    #[test]
    fn model_is_an_argument_or_an_option() {
        if ran_without_settings(model_is_an_argument_or_an_option) {
            return;
        }
        let text = "[models.large]\npath = \"org/l\"\nctx-size = 7";
        for given in ["serve large", "serve -m large", "serve --model large", "serve --model=large"] {
            let large = serve(text, given);
            assert_eq!((large.model.model.as_deref(), large.load.ctx_size), (Some("org/l"), Some(7)), "{given}");
        }
        assert!(parsed("", "serve a -m b").err().unwrap().contains("given twice"));
        let run = |given: &str| match parsed("", given).unwrap().0.command {
            Command::Run(run) => (run.generate.model.model, run.words.join(" ")),
            other => panic!("{other:?}"),
        };
        assert_eq!(run("run x Why is it so?"), (Some("x".into()), "Why is it so?".into()));
        assert_eq!(run("run -m x Why not?"), (Some("x".into()), "Why not?".into()));
    }

    #[test]
    fn mistakes_are_reported() {
        if ran_without_settings(mistakes_are_reported) {
            return;
        }
        let wrong = |text| parsed(text, "serve").err().unwrap();
        assert!(wrong("memory-limt = \"2G\"").contains("did you mean memory-limit?"));
        assert!(wrong("[models.a]\nmemory-limt = 1").contains("did you mean memory-limit?"));
        let unlike = wrong("foo = 1");
        assert!(unlike.contains("prints all settings") && !unlike.contains("did you mean"), "{unlike}");
        assert!(wrong("port = [1]").contains("port must be"));
        assert!(wrong("memory-limit = \"8Q\"").contains("8GiB"), "clap checks the values of the file");
        let error = wrong("port = 1\napi-key = \"secret");
        assert!(error.contains("line 2, column") && !error.contains("secret"), "{error}");
        let missing = parse(["moestro", "--config", "/no/where.toml", "serve"].map(OsString::from));
        assert!(missing.err().unwrap().to_string().contains("/no/where.toml"));
    }

    #[test]
    fn sentence_has_no_usage() {
        if ran_without_settings(sentence_has_no_usage) {
            return;
        }
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        for (text, reason) in [
            ("foo = 1", "\"foo\" is not a setting; `moestro config` prints all settings"),
            ("device = \"tpu\"", "[possible values: auto, cpu, metal, cuda]"),
            (
                "# a comment\nport = \"x\"",
                ".toml, line 2: invalid value 'x' for port: it must be a whole number from 0 to 65535",
            ),
            ("port = 1\n\n[models.a]\npath = \"x\"\ntmp = 1", "line 5: \"tmp\" is not a setting (did you mean temp?)"),
            (
                "[models.a]\napi-key = \"secret\"",
                "line 2: api-key is a setting of the server, not of a model; it comes before the first table",
            ),
            ("[models.a]\nmodel = \"x\"", "line 2: a model's table names its directory or hub id with path = \"...\""),
            (
                "\n[server]\nport = 1",
                "line 2: there is no table [server]; settings come before the first table [models.NAME]",
            ),
            ("\nallowed-host = [\"a\"]", "line 2: allowed-host must be one string, with commas between several values"),
            ("seed = 18446744073709551615", "line 1, column 8: the number is too large; write it in quotes"),
            ("port = 1\nmodels.a = \"org/name\"", &format!("line 2: a: {NOT_A_MODEL}")),
            ("[[models]]\npath = \"org/name\"", &format!("line 1: {NOT_A_MODEL}")),
        ] {
            fs::write(file.path(), text).unwrap();
            let args = ["moestro".into(), "--config".into(), file.path().into(), "serve".into()];
            let said = sentence(&parse(args).unwrap_err());
            assert!(said.ends_with(reason) && !said.starts_with("error") && !said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn switches_take_words_of_variables() {
        if ran_without_settings(switches_take_words_of_variables) {
            return;
        }
        for (values, is_on) in [("true \"true\" \"on\" \"YES\" 1", true), ("false \"off\" 0", false)] {
            for value in values.split(' ') {
                assert_eq!(serve(&format!("no-vision = {value}"), "serve").load.no_vision, is_on, "{value}");
            }
        }
        for value in ["\"nope\"", "\"\"", "2", "0.5"] {
            let text = parsed(&format!("temp = 0\nno-vision = {value}"), "serve").unwrap_err();
            assert!(text.contains("line 2: no-vision must be true or false"), "{text}");
        }
    }

    #[test]
    fn pipe_as_file_is_refused() {
        if ran_without_settings(pipe_as_file_is_refused) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        make_fifo(&pipe);
        let args = ["moestro".into(), "--config".into(), pipe.into(), "serve".into()];
        assert!(parse(args).err().unwrap().to_string().contains("not a regular file"));
    }

    #[test]
    fn rows_name_their_source() {
        if ran_without_settings(rows_name_their_source) {
            return;
        }
        let (_, settings) = parsed("port = 6000\napi-key = \"secret\"", "config --temp 0.1").unwrap();
        let row = |name: &str| settings.rows.iter().find(|row| row.flag == name).unwrap();
        assert_eq!((row("temp").value.as_deref(), row("temp").from.as_str()), (Some("0.1"), "command line"));
        assert!(row("port").value.as_deref() == Some("6000") && row("port").from.ends_with(".toml"));
        assert_eq!((row("max-queue").value.as_deref(), row("max-queue").from.as_str()), (Some("512"), "default"));
        assert_eq!(row("threads").from, "default: the physical cores");
        assert_eq!(row("api-key").value.as_deref(), Some("(hidden)"));
    }
}
