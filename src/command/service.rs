//! `moestro service`: installs and controls a service that runs `moestro serve` from login or from the first request.

use super::text::print_line;
use crate::service::{Service, ServiceCommand, ServiceManager, ServiceStep, command_line};
use crate::{
    cli::{self, Command},
    config::{
        ServeConfig,
        config_file::{self, sentence},
        foreign_flags,
    },
    error::CommandError,
};
use moestro_base::platform::os;
use std::{
    env,
    ffi::{OsStr, OsString},
    path::{self, Path, PathBuf},
};

pub fn run(args: cli::ServiceArgs) -> Result<(), CommandError> {
    let failed = |what: &str| CommandError::Usage(format!("cannot find {what}, which a service needs"));
    let (action, install) = match args.action {
        cli::ServiceAction::Install(install) => {
            let refused = |reason: String| CommandError::Usage(format!("moestro serve would not start: {reason}"));
            check_serve_args(&install.args).map_err(refused)?;
            (ServiceCommand::Install, install)
        }
        cli::ServiceAction::Uninstall => (ServiceCommand::Uninstall, cli::InstallArgs::default()),
        cli::ServiceAction::Start => (ServiceCommand::Start, cli::InstallArgs::default()),
        cli::ServiceAction::Stop => (ServiceCommand::Stop, cli::InstallArgs::default()),
        cli::ServiceAction::Reload => (ServiceCommand::Reload, cli::InstallArgs::default()),
        cli::ServiceAction::Status => (ServiceCommand::Status, cli::InstallArgs::default()),
        cli::ServiceAction::Logs => (ServiceCommand::Logs, cli::InstallArgs::default()),
    };
    let manager = ServiceManager::current();
    let service = Service {
        program: program().ok_or_else(|| failed("this program's path"))?,
        args: install.args.into_iter().map(make_absolute).collect(),
        home: env::home_dir().ok_or_else(|| failed("your home directory"))?,
        user: os::user(),
        is_confined: matches!(action, ServiceCommand::Install) && manager.can_confine(),
        on_demand: install.on_demand.then_some((install.host, install.port)),
    };
    if install.dry_run {
        for step in service.steps(manager, action) {
            match step {
                ServiceStep::Write(path, text) => print_line(format_args!("write {}:\n{text}", path.display())),
                ServiceStep::Remove(path) => print_line(format_args!("remove {}", path.display())),
                ServiceStep::Run(words) | ServiceStep::Try(words) | ServiceStep::Retry(words, _) => {
                    print_line(format_args!("run {}", command_line(&words)));
                }
                ServiceStep::WaitUntilGone(words) => {
                    print_line(format_args!("repeat until it fails: {}", command_line(&words)))
                }
            }
        }
        return Ok(());
    }
    service.act(manager, action).map_err(CommandError::Service)
}

/// Parses the arguments as the service will, so that an error is shown now and not in a log.
fn check_serve_args(args: &[String]) -> Result<(), String> {
    let line = ["moestro", "serve"].into_iter().chain(args.iter().map(String::as_str)).map(OsString::from);
    let translated = foreign_flags::translate(line)?;
    let (cli, _) = config_file::parse(translated.args).map_err(|error| sentence(&error))?;
    match cli.command {
        Command::Serve(args) => ServeConfig::new(args).map(|_| ()),
        _ => Ok(()),
    }
}

/// Path under which this program was called. The resolved path is not used, because it may contain a version, such as
/// Homebrew's `Cellar/moestro/1.0`, which an upgrade deletes.
fn program() -> Option<PathBuf> {
    let resolved = env::current_exe().ok()?;
    let called =
        env::args_os().next().and_then(|called| called_path(&called, env::var_os("PATH").as_deref(), &resolved));
    Some(called.unwrap_or(resolved))
}

/// The absolute path of the command `called`, found as a shell finds it. `None` if the path is not the file `resolved`.
fn called_path(called: &OsStr, search: Option<&OsStr>, resolved: &Path) -> Option<PathBuf> {
    let is_same = |path: &PathBuf| path.canonicalize().ok() == resolved.canonicalize().ok();
    if Path::new(called).components().count() > 1 {
        return path::absolute(called).ok().filter(is_same);
    }
    env::split_paths(search?).map(|dir| dir.join(called)).find(|path| path.is_file()).filter(is_same)
}

/// Makes an argument absolute if it is an existing path, because the service runs in another directory.
fn make_absolute(arg: String) -> String {
    let there = !arg.starts_with('-') && Path::new(&arg).exists();
    let whole = path::absolute(&arg).ok().filter(|_| there);
    whole.map_or(arg, |whole| whole.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, os::unix::fs::symlink};

    #[test]
    fn program_path_is_the_called_one() {
        let root = tempfile::tempdir().unwrap();
        let [bin, other] = ["bin", "other"].map(|name| root.path().join(name));
        let real = root.path().join("Cellar/moestro/1.0/moestro");
        for dir in [&bin, &other, &real.parent().unwrap().to_owned()] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(&real, "program").unwrap();
        fs::write(other.join("moestro"), "another program").unwrap();
        let link = bin.join("moestro");
        symlink(&real, &link).unwrap();
        let search = env::join_paths([root.path().join("none"), bin.clone()]).unwrap();
        assert_eq!(called_path(link.as_os_str(), None, &real), Some(link.clone()));
        assert_eq!(called_path("moestro".as_ref(), Some(&search), &real), Some(link));
        let search = env::join_paths([other, bin]).unwrap();
        assert_eq!(called_path("moestro".as_ref(), Some(&search), &real), None);
        assert_eq!(called_path("/no/such/moestro".as_ref(), Some(&search), &real), None);
    }

    #[test]
    fn existing_paths_become_absolute() {
        let here = env::current_dir().unwrap();
        assert_eq!(make_absolute("src/main.rs".into()), here.join("src/main.rs").to_str().unwrap());
        for arg in ["--memory-limit", "8GiB", "org/name", "/", "-"] {
            assert_eq!(make_absolute(arg.into()), arg);
        }
    }
}
