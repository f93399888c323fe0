//! Parses the command line, sets up logging, runs the command, and sets the exit code.

#![deny(clippy::print_stderr, clippy::print_stdout)]

mod version;

use clap::error::ErrorKind;
use moestro::{
    cli::Command,
    command::{
        cache, completions, generate, launch, list, local_models, log, man, pack, ps, pull, rm, run as chat, serve,
        service, show_config,
        text::{print, print_line, print_note, printable_line},
    },
    config::{
        GenerateConfig, ServeConfig,
        config_file::{self, Settings},
        foreign_flags, variables,
    },
    error::{CommandError, bounded},
    tools::{bench, doctor, info, synth},
};
use moestro_base::platform::gpu_variables::set_gpu_variables;
use std::process::{ExitCode, exit};

/// Maximum number of bytes of the error that ends the program. It may have texts of a model's files.
const MAX_ERROR: usize = 2000;

fn main() -> ExitCode {
    set_gpu_variables();
    let translated = foreign_flags::translate(std::env::args_os()).unwrap_or_else(|sentence| {
        print_note(format_args!("moestro: {sentence}"));
        exit(2)
    });
    for note in &translated.notes {
        print_note(format_args!("moestro: {note}"));
    }
    // A usage error exits here with clap's message and exit code 2.
    let (mut cli, mut settings) = config_file::parse(translated.args).unwrap_or_else(|error| match error.kind() {
        ErrorKind::DisplayVersion => {
            print_line(format_args!("moestro {}", version::whole()));
            exit(0)
        }
        _ => error.exit(),
    });
    local_models::resolve_name(&mut cli.command, &mut settings);
    match log::init(&cli).and_then(|_guard| {
        settings.content.log_warning();
        variables::log_unknown();
        run(cli.command, &settings)
    }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let hint = local_models::hint(&error, &settings);
            // One line, so that a text in a file cannot look like another error.
            let text = error.to_string();
            print_note(format_args!("moestro: {}{hint}", bounded(&printable_line(&text), MAX_ERROR)));
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: Command, settings: &Settings) -> Result<(), CommandError> {
    match command {
        Command::Serve(args) => serve::run(ServeConfig::new(args).map_err(CommandError::Usage)?, settings),
        Command::Generate(args) => generate::run(&GenerateConfig::new(args).map_err(CommandError::Usage)?, settings),
        Command::Run(args) => {
            let remote = args.remote.clone();
            chat::run(GenerateConfig::chat(args).map_err(CommandError::Usage)?, &remote, settings)
        }
        Command::Launch(args) => launch::run(&args, settings),
        Command::Pack(args) => pack::run(&args),
        Command::List(args) => list::list(&args, settings),
        Command::Cache(args) => cache::run(&args, settings),
        Command::Rm(args) => rm::remove(&args, settings),
        Command::Ps(args) => ps::ps(&args),
        Command::Stop(args) => ps::stop(&args),
        Command::Pull(args) => pull::run(&args),
        Command::Info(args) => info::run(args, settings),
        Command::Bench(args) => bench::run(args, settings),
        Command::Doctor(args) => doctor::run(&args, &version::whole()),
        Command::Synth(args) => synth::command::run(&args),
        Command::Man { dir } => man::man(&dir),
        Command::Service(args) => service::run(args),
        Command::Config(_) => {
            print(show_config::report(settings));
            Ok(())
        }
        Command::Completions { shell } => {
            print(completions::completions(shell));
            Ok(())
        }
    }
}
