//! `moestro.toml`: flags by their names, in a file. The command line wins over the environment, the environment over
//! the file, the file over what is built in.
//!
//! ```toml
//! model = "coder"                  # what is served if nothing is named
//! port = 5413
//! memory-limit = "48GiB"
//!
//! [models.coder]                   # over the settings above, for this model only
//! path = "mlx-community/Qwen3.5-122B-A10B-4bit"
//! ctx-size = 65536
//! ```
//!
//! The file's settings become arguments in front of the typed ones, so that one parser checks both and says the same of both.

use crate::cli::{Cli, Command};
use clap::{ArgMatches, CommandFactory, FromArgMatches, parser::ValueSource};
use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
};

/// The positional argument's name in the file.
const MODEL: &str = "model";
/// The place of a model of the file: a directory or a hub id. Not a flag.
const PATH: &str = "path";

/// Flags by name, without the dashes.
type Flags = BTreeMap<String, String>;

/// A configuration file that has been read; every name in it is a flag's.
#[derive(Debug, Default)]
pub struct ConfigFile {
    path: PathBuf,
    settings: Flags,
    models: BTreeMap<String, Flags>,
}

/// The settings that a command runs with.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The file that was read, if there was one.
    pub file: Option<PathBuf>,
    /// The file's name for the model, if it has one.
    pub model: Option<String>,
    /// The file's models, and where they lie.
    pub models: Vec<(String, String)>,
    /// The command line.
    pub args: Vec<OsString>,
    pub rows: Vec<SettingRow>,
}

/// One flag.
#[derive(Debug, Clone)]
pub struct SettingRow {
    pub flag: String,
    pub value: Option<String>,
    /// The command line, an environment variable, a table of the file, or the default.
    pub from: String,
}

/// Parses this process's arguments.
///
/// # Errors
/// clap's own, help and version among them; and a file that cannot be read or names no flag.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<(Cli, Settings), clap::Error> {
    parse_for(args, None)
}

/// The same for another model than the one that was typed: with its own settings, if the file has any.
pub fn parse_for(
    args: impl IntoIterator<Item = OsString>,
    other: Option<&str>,
) -> Result<(Cli, Settings), clap::Error> {
    let args: Vec<OsString> = args.into_iter().collect();
    let typed = Cli::command().ignore_errors(true).try_get_matches_from(&args)?;
    let wrong = |sentence: String| Cli::command().error(clap::error::ErrorKind::ValueValidation, sentence);
    let named = typed.try_get_one::<PathBuf>("config").ok().flatten();
    let file = ConfigFile::find(named.map(PathBuf::as_path)).map_err(wrong)?;
    let Some((name, sub)) = typed.subcommand() else {
        // Nothing was asked for: clap says so, or prints the help that was.
        let cli = Cli::from_arg_matches(&Cli::command().try_get_matches_from(&args)?)?;
        return Ok((cli, Settings::default()));
    };
    let asked = sub.try_get_one::<String>(MODEL).ok().flatten().or(file.settings.get(MODEL)).cloned();
    let asked = other.map(str::to_owned).or(asked);
    let model = asked.filter(|model| file.models.contains_key(model));
    let whole = file.before(&args, name, sub, model.as_deref());
    let matches = Cli::command().try_get_matches_from(whole)?;
    let mut cli = Cli::from_arg_matches(&matches)?;
    if let Some(place) = cli.command.model() {
        let fallback = || file.settings.get(MODEL).cloned();
        let typed = other.map(str::to_owned).or(place.take());
        *place = typed.or_else(fallback).map(|model| file.place_of(&model).unwrap_or(model));
    }
    let rows = matches.subcommand_matches(name).map(|matches| file.rows(name, sub, matches, model.as_deref()));
    let places = file.models.keys().filter_map(|name| Some((name.clone(), file.place_of(name)?))).collect();
    let path = Some(file.path).filter(|path| !path.as_os_str().is_empty());
    Ok((cli, Settings { file: path, model, models: places, args, rows: rows.unwrap_or_default() }))
}

impl ConfigFile {
    /// The file at `named`, which must be there; else the user's own, if there is one.
    fn find(named: Option<&Path>) -> Result<Self, String> {
        let Some(path) = named.map(Path::to_path_buf).or_else(default_path) else { return Ok(Self::default()) };
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&path, &text).map_err(|why| format!("{}: {why}", path.display())),
            Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    fn parse(path: &Path, text: &str) -> Result<Self, String> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
        let mut file = Self { path: path.to_path_buf(), ..Self::default() };
        for (name, value) in table {
            match (name.as_str(), value) {
                ("models", toml::Value::Table(models)) => {
                    for (model, value) in models {
                        let toml::Value::Table(table) = value else {
                            return Err(format!("models.{model} is not a table of settings"));
                        };
                        let settings = table.into_iter().map(|(name, value)| setting(name, value, true));
                        file.models.insert(model, settings.collect::<Result<_, _>>()?);
                    }
                }
                (_, value) => {
                    let (name, value) = setting(name, value, false)?;
                    file.settings.insert(name, value);
                }
            }
        }
        Ok(file)
    }

    /// `args` with this file's settings behind the subcommand's name: those that it has a flag for, and that the environment
    /// does not say. The command line comes later and wins.
    fn before(&self, args: &[OsString], subcommand: &str, typed: &ArgMatches, model: Option<&str>) -> Vec<OsString> {
        let command = Cli::command();
        let Some(command) = command.find_subcommand(subcommand) else { return args.to_vec() };
        let own = |flag: &str| self.setting(model, flag).map(|(value, _)| value);
        let said = |id: &str| typed.value_source(id) == Some(ValueSource::EnvVariable);
        let added = command.get_arguments().filter_map(|arg| {
            // To a bench, a draft is not a setting: it asks for another bench.
            let flag = arg.get_long().filter(|flag| (subcommand, *flag) != ("bench", "draft-model"))?;
            let value = own(flag).filter(|_| !said(arg.get_id().as_str()))?;
            match arg.get_action().takes_values() {
                true => Some(OsString::from(format!("--{flag}={value}"))),
                false => (value == "true").then(|| OsString::from(format!("--{flag}"))),
            }
        });
        let at = args.iter().skip(1).position(|arg| arg == subcommand).map_or(args.len(), |at| at + 2);
        let (head, tail) = args.split_at(at.min(args.len()));
        head.iter().cloned().chain(added).chain(tail.iter().cloned()).collect()
    }

    /// A flag's value, and the table it stands in.
    fn setting(&self, model: Option<&str>, flag: &str) -> Option<(&str, String)> {
        let own = model.and_then(|model| Some((self.models.get(model)?.get(flag)?, format!(" [models.{model}]"))));
        let (value, table) = own.or_else(|| Some((self.settings.get(flag)?, String::new())))?;
        Some((value, format!("{}{table}", self.path.display())))
    }

    /// Each flag of the subcommand. `typed` is without the file, `matches` with it.
    fn rows(&self, subcommand: &str, typed: &ArgMatches, matches: &ArgMatches, model: Option<&str>) -> Vec<SettingRow> {
        let command = Cli::command();
        let Some(command) = command.find_subcommand(subcommand) else { return Vec::new() };
        let rows = command.get_arguments().filter_map(|arg| {
            let (id, flag) = (arg.get_id().as_str(), arg.get_long()?);
            if !is_setting(flag) {
                return None;
            }
            let raw = matches.try_get_raw(id).ok().flatten();
            let value = raw.and_then(|mut values| values.next()).map(|value| value.to_string_lossy().into_owned());
            let value = if arg.is_hide_env_values_set() { value.map(|_| "(hidden)".into()) } else { value };
            let from = match typed.value_source(id) {
                Some(ValueSource::CommandLine) => "command line".into(),
                Some(ValueSource::EnvVariable) => arg.get_env().unwrap_or_default().to_string_lossy().into_owned(),
                _ => self.setting(model, flag).map_or("default".into(), |(_, table)| table),
            };
            Some(SettingRow { flag: flag.into(), value, from })
        });
        rows.collect()
    }

    /// The place of the model of that name.
    fn place_of(&self, model: &str) -> Option<String> {
        self.models.get(model)?.get(PATH).cloned()
    }
}

impl Command {
    /// The model that it works with, as typed.
    pub fn model(&mut self) -> Option<&mut Option<String>> {
        match self {
            Command::Serve(typed) | Command::Config(typed) => Some(&mut typed.model.model),
            Command::Generate(typed) => Some(&mut typed.model.model),
            Command::Run(typed) => Some(&mut typed.generate.model.model),
            Command::Info(typed) => Some(&mut typed.model.model),
            Command::Bench(typed) => Some(&mut typed.model.model),
            Command::Pack(typed) => Some(&mut typed.model.model),
            _ => None,
        }
    }
}

/// `moestro/moestro.toml` in the user's configuration directory.
fn default_path() -> Option<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CONFIG_HOME").or_else(|| Some(env::home_dir()?.join(".config")))?;
    Some(base.join("moestro/moestro.toml"))
}

/// A flag's name and its value as it would be typed.
fn setting(name: String, value: toml::Value, of_model: bool) -> Result<(String, String), String> {
    let known = names();
    if !(known.contains(&name) || of_model && name == PATH) {
        let near = super::nearest(&name, known.iter().map(AsRef::as_ref));
        let hint = near.map_or(String::new(), |(_, near)| format!(" (did you mean {near}?)"));
        return Err(format!("{name:?} is not a setting{hint}"));
    }
    let value = match value {
        toml::Value::String(text) => text,
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(on) => on.to_string(),
        _ => return Err(format!("{name} must be a word, a number, true or false")),
    };
    Ok((name, value))
}

/// True for every flag but help, version and the file's own.
fn is_setting(flag: &str) -> bool {
    !["help", "version", "config"].contains(&flag)
}

/// Every flag of every subcommand, and the model.
fn names() -> Vec<String> {
    let command = Cli::command();
    let flags = command.get_subcommands().flat_map(|command| command.get_arguments());
    let flags = flags.filter_map(|arg| arg.get_long()).filter(|flag| is_setting(flag));
    let mut names: Vec<String> = flags.map(String::from).chain([MODEL.into()]).collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str, typed: &str) -> Result<(Cli, Settings), String> {
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        fs::write(file.path(), text).unwrap();
        let head = ["moestro".into(), "--config".into(), file.path().into()];
        parse(head.into_iter().chain(typed.split_whitespace().map(OsString::from))).map_err(|error| error.to_string())
    }

    fn serve(text: &str, typed: &str) -> crate::cli::ServeArgs {
        match parsed(text, typed).unwrap().0.command {
            Command::Serve(serve) => serve,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_typed_wins_over_the_file_and_the_file_over_the_default() {
        let text = "port = 6000\nmax-queue = 3\nmemory-limit = \"2GiB\"\ntemp = 0.5";
        let serve = serve(text, "serve --port 7000");
        assert_eq!((serve.port, serve.max_queue, serve.load.memory_limit), (7000, 3, Some(2 << 30)));
        assert_eq!((serve.sampling.temp, serve.host.as_str()), (Some(0.5), "127.0.0.1"));
    }

    #[test]
    fn a_model_of_the_file_has_settings_of_its_own() {
        let text = "model = \"small\"\nctx-size = 100\n[models.small]\npath = \"/models/s\"\n[models.large]\npath = \"org/l\"\nctx-size = 7";
        let small = serve(text, "serve");
        assert_eq!((small.model.model.as_deref(), small.load.ctx_size), (Some("/models/s"), Some(100)));
        let large = serve(text, "serve large");
        assert_eq!((large.model.model.as_deref(), large.load.ctx_size), (Some("org/l"), Some(7)));
        let other = serve(text, "serve ./elsewhere");
        assert_eq!((other.model.model.as_deref(), other.load.ctx_size), (Some("./elsewhere"), Some(100)));
    }

    #[test]
    fn a_setting_that_a_command_has_no_flag_for_is_not_its_business() {
        let (cli, _) = parsed("port = 6000\nio-threads = 4", "info --json").unwrap();
        assert!(matches!(cli.command, Command::Info(info) if info.json && info.load.io_threads == 4));
        let (cli, _) = parsed("draft-model = \"lookup\"", "bench --cold").unwrap();
        assert!(matches!(cli.command, Command::Bench(bench) if bench.draft_model.is_none()));
    }

    #[test]
    fn mistakes_are_named() {
        let wrong = |text| parsed(text, "serve").err().unwrap();
        assert!(wrong("memory-limt = \"2G\"").contains("did you mean memory-limit?"));
        assert!(wrong("[models.a]\nprt = 1").contains("did you mean port?"));
        assert!(wrong("port = [1]").contains("port must be"));
        assert!(wrong("memory-limit = \"8Q\"").contains("8GiB"), "the parser of flags checks the file, too");
        assert!(wrong("port 6000").contains("moestro") || wrong("port 6000").contains("expected"));
        let missing = parse(["moestro", "--config", "/no/where.toml", "serve"].map(OsString::from));
        assert!(missing.err().unwrap().to_string().contains("/no/where.toml"));
    }

    #[test]
    fn each_value_says_where_it_came_from() {
        let (_, settings) = parsed("port = 6000\napi-key = \"secret\"", "config --temp 0.1").unwrap();
        let row = |name: &str| settings.rows.iter().find(|row| row.flag == name).unwrap();
        assert_eq!((row("temp").value.as_deref(), row("temp").from.as_str()), (Some("0.1"), "command line"));
        assert!(row("port").value.as_deref() == Some("6000") && row("port").from.ends_with(".toml"));
        assert_eq!(row("max-queue").from, "default");
        assert_eq!(row("api-key").value.as_deref(), Some("(hidden)"));
    }
}
