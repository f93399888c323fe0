//! The names of settings in the configuration file, and their values.

use crate::cli::help;
use clap::{
    Arg, ArgAction,
    builder::{BoolishValueParser, TypedValueParser},
};
use std::{collections::BTreeMap, ffi::OsStr};

/// Name of the positional argument in the file.
pub const MODEL: &str = "model";
/// Key of a model's directory or hub id. Not a flag.
pub const PATH: &str = "path";
/// Settings of the server, which a model's table must not have. The server would use those of its first model only.
const OF_THE_SERVER: [&str; 17] = [
    "allowed-host",
    "api-key",
    "api-key-file",
    "cors",
    "host",
    "image-urls",
    "keep-alive",
    "keep-billing-header",
    "log-dir",
    "log-format",
    "log-level",
    MODEL,
    "models-dir",
    "ollama-port",
    "port",
    "request-timeout",
    "reuse-tools",
];

/// Converts a setting of the file to a flag and the text of its value.
pub fn setting(name: String, value: toml::Value, of_model: bool) -> Result<(String, String), String> {
    let mut known = names();
    if of_model {
        if name == MODEL {
            return Err(format!("a model's table names its directory or hub id with {PATH} = \"...\""));
        }
        if OF_THE_SERVER.contains(&name.as_str()) {
            return Err(format!("{name} is a setting of the server, not of a model; it comes before the first table"));
        }
        known.retain(|name, _| !OF_THE_SERVER.contains(&name.as_str()));
    }
    if !(known.contains_key(&name) || of_model && name == PATH) {
        if value.is_table() && of_model {
            return Err(format!("a model has no table {name}"));
        } else if value.is_table() {
            return Err(format!("there is no table [{name}]; settings come before the first table [models.NAME]"));
        }
        let near = super::nearest(&name, known.keys().map(AsRef::as_ref));
        let hint = super::suggestion(near, "; `moestro config` prints all settings");
        return Err(format!("{name:?} is not a setting{hint}"));
    }
    let text = match value {
        toml::Value::String(text) => text,
        toml::Value::Integer(number) => number.to_string(),
        toml::Value::Float(number) => number.to_string(),
        toml::Value::Boolean(on) => on.to_string(),
        toml::Value::Array(_) => return Err(format!("{name} must be one string, with commas between several values")),
        _ => return Err(format!("{name} must be a string, a number, true or false")),
    };
    if known.get(&name).is_none_or(ArgAction::takes_values) {
        return Ok((name, text));
    }
    let is_on = switch(&text).ok_or_else(|| format!("{name} must be true or false, not {text:?}"))?;
    Ok((name, is_on.to_string()))
}

/// The words of an environment variable for a flag without a value.
fn switch(text: &str) -> Option<bool> {
    let parser = BoolishValueParser::new();
    parser.parse_ref(&clap::Command::default(), None, OsStr::new(text)).ok()
}

/// The flags of a subcommand that can be set in the file: those with an environment variable, except `--config`.
pub fn settings_of<'a>(whole: &'a clap::Command, subcommand: &str) -> impl Iterator<Item = &'a Arg> {
    let own = whole.find_subcommand(subcommand).into_iter().flat_map(clap::Command::get_arguments);
    own.chain(whole.get_arguments()).filter(|arg| arg.get_env().is_some() && arg.get_long() != Some("config"))
}

/// All names that the file may have, with the kinds of their flags: the settings of all subcommands, and the model.
fn names() -> BTreeMap<String, ArgAction> {
    let whole = help::command();
    let commands = whole.get_subcommands().map(clap::Command::get_name);
    let flags = commands.flat_map(|name| settings_of(&whole, name));
    let flags = flags.filter_map(|arg| Some((arg.get_long()?.to_owned(), arg.get_action().clone())));
    flags.chain([(MODEL.to_owned(), ArgAction::Set)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_the_server_are_listed() {
        let whole = help::command();
        let all = settings_of(&whole, "serve");
        let listed = |arg: &&Arg| OF_THE_SERVER.contains(&arg.get_long().unwrap_or_default());
        let of_models: Vec<_> = all
            .filter(|arg| !listed(arg) && arg.get_help_heading().is_none_or(|heading| heading == "Server"))
            .filter_map(Arg::get_long)
            .collect();
        assert_eq!(of_models, ["max-queue", "max-prompt-tokens", "pack"]);
        assert!(OF_THE_SERVER.iter().all(|name| names().contains_key(*name)));
    }
}
