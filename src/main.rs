//! Parses what was typed, sets up the log, runs, and is the only exit.

use moestro::{
    cli::Command,
    command::{effective, generate, pack, pull, serve, shell},
    config::{
        Generate, Serve,
        file::{self, Settings},
    },
    error::CommandError,
    tools::{bench, doctor, info, synth},
};
use std::{
    io::{self, IsTerminal, Write},
    process::ExitCode,
};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // A usage error ends here, with clap's words and exit code 2.
    let (cli, settings) = file::parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    // A server tells what it does; the answer of any other command is what it prints.
    let level = if matches!(cli.command, Command::Serve(_)) { "moestro=info,warn" } else { "warn" };
    let filter = EnvFilter::try_from_env("MOESTRO_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let colours = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours).with_writer(io::stderr).init();
    match run(cli.command, &settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("moestro: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command, settings: &Settings) -> Result<(), CommandError> {
    match command {
        Command::Serve(typed) => serve::run(Serve::new(typed).map_err(CommandError::Usage)?),
        Command::Generate(typed) => generate::run(Generate::new(typed).map_err(CommandError::Usage)?),
        Command::Pack(typed) => pack::run(&typed),
        Command::Pull(typed) => pull::run(&typed),
        Command::Info(typed) => info::run(typed),
        Command::Bench(typed) => bench::run(typed),
        Command::Doctor(typed) => doctor::run(&typed),
        Command::Synth(typed) => synth::command::run(&typed),
        Command::Man { dir } => shell::man(&dir),
        Command::Config(_) => show(effective::report(settings).as_bytes()),
        Command::Completions { shell } => show(&shell::completions(shell)),
    }
}

/// If nobody reads it, nobody misses it.
fn show(text: &[u8]) -> Result<(), CommandError> {
    let _ = io::stdout().write_all(text);
    Ok(())
}
