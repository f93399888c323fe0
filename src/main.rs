//! Parses what was typed, sets up the log, runs, and is the only exit.

use clap::Parser;
use moestro::{cli::Cli, command};
use std::{io, process::ExitCode};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    // A usage error ends here, with clap's words and exit code 2.
    let cli = Cli::parse();
    let filter = EnvFilter::try_from_env("MOESTRO_LOG").unwrap_or_else(|_| EnvFilter::new("moestro=info,warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    match command::run(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("moestro: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
