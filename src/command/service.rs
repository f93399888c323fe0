//! `moestro service`: installs and controls a service that runs `moestro serve` from login or from the first request.

use crate::{
    cli,
    error::CommandError,
    platform::{
        os,
        service::{Action, Manager, Service, Step},
    },
};
use std::{env, path};

pub fn run(typed: cli::ServiceArgs) -> Result<(), CommandError> {
    let failed = |what: &str| CommandError::Usage(format!("cannot find {what}, which a service needs"));
    let (action, install) = match typed.action {
        cli::ServiceAction::Install(install) => (Action::Install, install),
        cli::ServiceAction::Uninstall => (Action::Uninstall, cli::InstallArgs::default()),
        cli::ServiceAction::Start => (Action::Start, cli::InstallArgs::default()),
        cli::ServiceAction::Stop => (Action::Stop, cli::InstallArgs::default()),
        cli::ServiceAction::Reload => (Action::Reload, cli::InstallArgs::default()),
        cli::ServiceAction::Status => (Action::Status, cli::InstallArgs::default()),
        cli::ServiceAction::Logs => (Action::Logs, cli::InstallArgs::default()),
    };
    let manager = Manager::here();
    let service = Service {
        program: env::current_exe().map_err(|_| failed("this program's path"))?,
        args: install.args.into_iter().map(make_absolute).collect(),
        home: env::home_dir().ok_or_else(|| failed("your home directory"))?,
        user: os::user(),
        confined: matches!(action, Action::Install) && manager.confines(),
        on_demand: install.on_demand.then_some((install.host, install.port)),
    };
    if install.dry_run {
        for step in service.steps(manager, action) {
            match step {
                Step::Write(path, text) => println!("write {}:\n{text}", path.display()),
                Step::Remove(path) => println!("remove {}", path.display()),
                Step::Run(words) | Step::Try(words) => {
                    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
                    println!("run {}", words.join(" "));
                }
            }
        }
        return Ok(());
    }
    service.act(manager, action).map_err(CommandError::Service)
}

/// Makes an argument absolute if it is an existing path, since the service runs in another directory.
fn make_absolute(arg: String) -> String {
    let there = !arg.starts_with('-') && path::Path::new(&arg).exists();
    let whole = path::absolute(&arg).ok().filter(|_| there);
    whole.map_or(arg, |whole| whole.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn existing_paths_become_absolute() {
        let here = env::current_dir().unwrap();
        assert_eq!(make_absolute("src/main.rs".into()), here.join("src/main.rs").to_str().unwrap());
        for arg in ["--memory-limit", "8GiB", "org/name", "/", "-"] {
            assert_eq!(make_absolute(arg.into()), arg);
        }
    }
}
