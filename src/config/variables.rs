//! Environment variables whose names start with `MOESTRO_`: finds those that are not settings.

use super::{nearest, suggestion};
use crate::cli::help;
use clap::Arg;
use std::{collections::BTreeSet, env};

const PREFIX: &str = "MOESTRO_";
/// Read by the program, but no flag.
const LOG: &str = "MOESTRO_LOG";
/// Variables of builds and tests, which are no mistakes. Those that start with `MOESTRO_TEST_` are in no list.
const BUILDS_AND_TESTS: [&str; 13] = [
    "MOESTRO_COMMIT",
    "MOESTRO_FEATURES",
    "MOESTRO_FORMATS",
    "MOESTRO_FORMATS_SEED",
    "MOESTRO_HISTORY",
    "MOESTRO_MUTATE_SECONDS",
    "MOESTRO_MUTATE_SEED",
    "MOESTRO_RECORD",
    "MOESTRO_REQUIRE_CLANG",
    "MOESTRO_SANITIZE",
    "MOESTRO_SOAK_SECONDS",
    "MOESTRO_VECTORS",
    "MOESTRO_WRITE_DOCS",
];

/// Logs a warning for each variable that is not a setting.
pub fn log_unknown() {
    let names = env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for sentence in unknown(names) {
        tracing::warn!("{sentence}");
    }
}

/// The sentences about those variables that are not settings.
fn unknown(names: impl Iterator<Item = String>) -> Vec<String> {
    let known = settings();
    let is_known =
        |name: &str| known.contains(name) || BUILDS_AND_TESTS.contains(&name) || name.starts_with("MOESTRO_TEST_");
    let mut unknown: Vec<String> = names.filter(|name| name.starts_with(PREFIX) && !is_known(name)).collect();
    unknown.sort();
    let sentence = |name: String| {
        // The prefix that all names share says nothing about their similarity.
        let near = nearest(&name[PREFIX.len()..], known.iter().map(|known| &known[PREFIX.len()..]));
        let near = near.map(|near| format!("{PREFIX}{near}"));
        let hint = suggestion(near.as_deref(), "; `moestro config` prints all settings");
        format!("the environment variable {name} is not a setting{hint}")
    };
    unknown.into_iter().map(sentence).collect()
}

/// The variables of all settings, and that of the log.
pub fn settings() -> BTreeSet<String> {
    let whole = help::command();
    let args = whole.get_subcommands().flat_map(clap::Command::get_arguments).chain(whole.get_arguments());
    let names = args.filter_map(Arg::get_env).map(|name| name.to_string_lossy().into_owned());
    names.chain([LOG.to_owned()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_variable_gets_a_suggestion() {
        let found = |names: &[&str]| unknown(names.iter().map(|&name| name.to_owned()));
        let text = "the environment variable MOESTRO_CTX_SIZ is not a setting (did you mean MOESTRO_CTX_SIZE?)";
        assert_eq!(found(&["PATH", "MOESTRO_CTX_SIZ", "MOESTRO_PORT"]), [text]);
        let unlike = found(&["MOESTRO_ZZZ"]).remove(0);
        assert!(unlike.ends_with("MOESTRO_ZZZ is not a setting; `moestro config` prints all settings"), "{unlike}");
        assert!(found(&["MOESTRO_SANITIZE", "MOESTRO_TEST_SLOTS", "MOESTRO_LOG"]).is_empty());
    }
}
