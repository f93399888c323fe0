//! `moestro service`: installs and controls a service that runs `moestro serve` from login or from the first request.

use crate::{
    cli,
    error::CommandError,
    platform::{
        os,
        service::{Service, ServiceCommand, ServiceManager, ServiceStep},
    },
};
use std::{env, path};

pub fn run(typed: cli::ServiceArgs) -> Result<(), CommandError> {
    let failed = |what: &str| CommandError::Usage(format!("cannot find {what}, which a service needs"));
    let (action, install) = match typed.action {
        cli::ServiceAction::Install(install) => (ServiceCommand::Install, install),
        cli::ServiceAction::Uninstall => (ServiceCommand::Uninstall, cli::InstallArgs::default()),
        cli::ServiceAction::Start => (ServiceCommand::Start, cli::InstallArgs::default()),
        cli::ServiceAction::Stop => (ServiceCommand::Stop, cli::InstallArgs::default()),
        cli::ServiceAction::Reload => (ServiceCommand::Reload, cli::InstallArgs::default()),
        cli::ServiceAction::Status => (ServiceCommand::Status, cli::InstallArgs::default()),
        cli::ServiceAction::Logs => (ServiceCommand::Logs, cli::InstallArgs::default()),
    };
    let manager = ServiceManager::current();
    let service = Service {
        program: env::current_exe().map_err(|_| failed("this program's path"))?,
        args: install.args.into_iter().map(make_absolute).collect(),
        home: env::home_dir().ok_or_else(|| failed("your home directory"))?,
        user: os::user(),
        is_confined: matches!(action, ServiceCommand::Install) && manager.can_confine(),
        on_demand: install.on_demand.then_some((install.host, install.port)),
    };
    if install.dry_run {
        for step in service.steps(manager, action) {
            match step {
                ServiceStep::Write(path, text) => println!("write {}:\n{text}", path.display()),
                ServiceStep::Remove(path) => println!("remove {}", path.display()),
                ServiceStep::Run(words) | ServiceStep::Try(words) => {
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
