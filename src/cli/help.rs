//! What `--help` shows: commands in groups, common flags in `-h`, all flags in `--help`, and examples.

use super::Cli;
use clap::{Arg, Command, CommandFactory};

/// Commands, grouped by purpose.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Chat", &["run", "generate"]),
    ("Serve", &["serve", "launch", "ps", "stop", "service"]),
    ("Models", &["pull", "list", "rm", "cache", "pack"]),
    ("Measure and check", &["info", "bench", "doctor"]),
    ("Other", &["config", "synth", "completions", "help"]),
];

const EXAMPLES: &str = "\
Examples:
  moestro run                                           chat with the embedded demo model
  moestro info --like 35b --machine m4-pro-48           what to expect of another machine
  moestro pull mlx-community/Qwen3.5-35B-A3B-4bit       download a model
  moestro serve mlx-community/Qwen3.5-35B-A3B-4bit      serve it on http://localhost:5413
  moestro launch claude                                 start Claude Code with a local model

`moestro COMMAND -h` shows the common flags of a command, `--help` all of them.";

/// Examples of single commands.
pub const COMMAND_EXAMPLES: [(&str, &str); 11] = [
    (
        "run",
        "  moestro run                                           chat with the demo model
  moestro run org/name \"What is 12+7?\"                  print one answer
  git diff | moestro run org/name --system \"Review it\"  read the prompt from a pipe",
    ),
    ("generate", "  moestro generate org/name -p \"What is 12+7?\" --temp 0"),
    (
        "serve",
        "  moestro serve org/name --port 8080
  moestro serve ~/models/coder --memory-limit 24GiB --ctx-size 65536
  moestro serve --host 0.0.0.0 --api-key-file ~/key     for other machines",
    ),
    (
        "launch",
        "  moestro launch claude
  moestro launch codex --model org/name -- exec \"Fix the test\"
  moestro launch opencode --dry-run                     print what would be written and run",
    ),
    ("service", "  moestro service install -- org/name --memory-limit 24GiB"),
    (
        "pull",
        "  moestro pull mlx-community/Qwen3.5-35B-A3B-4bit
  moestro pull https://huggingface.co/mlx-community/Qwen3.5-35B-A3B-4bit",
    ),
    ("cache", "  moestro cache\n  moestro cache --remove packs,snapshots"),
    (
        "info",
        "  moestro info                                          rank models for this machine
  moestro info org/name --memory-limit 24GiB
  moestro info --like 122b --machine all                simulate without a download",
    ),
    (
        "bench",
        "  moestro bench org/name --cold
  moestro bench org/name --draft-model mtp              compare with and without drafts",
    ),
    ("config", "  moestro config > ~/.config/moestro/moestro.toml"),
    ("completions", "  moestro completions zsh > ~/.zfunc/_moestro"),
];

const VARIABLES: &str = "\
Each setting is also an environment variable, MOESTRO_ and its name in capitals (MOESTRO_CTX_SIZE), and a key of \
moestro.toml (ctx-size).";

/// The command line with its help texts.
pub fn command() -> Command {
    let mut whole = Cli::command();
    whole.build();
    let mut list = String::new();
    for (title, names) in GROUPS {
        list += &format!("{title}:\n");
        for name in names {
            let about = whole.find_subcommand(name).and_then(Command::get_about).map(ToString::to_string);
            list += &format!("  {name:<12} {}\n", about.unwrap_or_default());
        }
        list.push('\n');
    }
    let template = format!(
        "{{about-with-newline}}\nUsage: moestro COMMAND [OPTIONS]\n\n{list}{EXAMPLES}\n\nOptions:\n{{options}}"
    );
    let mut command = Cli::command().help_template(template).mut_args(|arg| arg.hide_env(true));
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    for name in names {
        command = command.mut_subcommand(name, with_help);
    }
    command
}

/// Adds examples, hides the names of environment variables, and passes negative numbers to the values' parsers, whose
/// messages are better than clap's. Names of values may have capitals.
fn with_help(command: Command) -> Command {
    let has_settings = command.get_arguments().any(|arg| arg.get_env().is_some());
    let example = COMMAND_EXAMPLES.iter().find(|(name, _)| *name == command.get_name());
    let mut after = example.map_or(String::new(), |(_, text)| format!("Examples:\n{text}"));
    let short = after.clone();
    if has_settings {
        let gap = if after.is_empty() { "" } else { "\n\n" };
        after = format!("{after}{gap}{VARIABLES}");
    }
    let takes_number = |arg: &Arg| arg.get_action().takes_values() && arg.get_long().is_some();
    let command = command.mut_args(|arg| {
        let negative = takes_number(&arg);
        arg.hide_env(true).allow_negative_numbers(negative).ignore_case(true)
    });
    if after.is_empty() { command } else { command.after_help(short).after_long_help(after) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let grouped = || GROUPS.iter().flat_map(|(_, names)| names.iter().copied());
        for sub in Cli::command().get_subcommands().filter(|sub| !sub.is_hide_set()) {
            assert_eq!(grouped().filter(|name| *name == sub.get_name()).count(), 1, "{}", sub.get_name());
        }
        for (name, _) in COMMAND_EXAMPLES {
            assert!(Cli::command().find_subcommand(name).is_some(), "{name}");
        }
    }

    #[test]
    fn help_fits_and_short_help_is_short() {
        let shown = |args: &[&str]| command().try_get_matches_from(args).unwrap_err().to_string();
        let top = shown(&["moestro", "-h"]);
        assert!(top.lines().count() <= 50 && top.contains("Serve:\n  serve "), "{top}");
        let short = shown(&["moestro", "serve", "-h"]);
        let long = shown(&["moestro", "serve", "--help"]);
        for text in [&top, &short, &long] {
            let widest = text.lines().max_by_key(|line| line.chars().count()).unwrap_or_default();
            assert!(widest.chars().count() <= 120, "{widest}");
        }
        assert!(short.contains("--memory-limit") && !short.contains("--io-threads"), "{short}");
        assert!(short.contains("Examples:\n  moestro serve "), "{short}");
        assert!(long.contains("--io-threads") && !long.contains("[env:"), "{long}");
        assert!(long.trim_end().ends_with(" moestro.toml (ctx-size)."), "a line break of the source: {long}");
        assert!(!long.contains("SWIFTLM"), "a variable of another program: {long}");
        let pack = shown(&["moestro", "pack", "-h"]);
        assert!(pack.find("--verify") < pack.find("--verbose"), "flags of all commands come last: {pack}");
        for heading in ["Server:", "Memory:", "Speed:", "Sampling:"] {
            assert!(short.contains(heading), "{heading} in {short}");
        }
    }
}
