//! `moestro service`: installs and controls a service that runs `moestro serve` from login or from the first request.

use super::text::print_line;
use crate::service::{Service, ServiceCommand, ServiceManager, ServiceStep, command_line};
use crate::{
    cli::{self, Command, values},
    config::{
        self, ServeConfig,
        config_file::{self, sentence},
        foreign_flags, variables,
    },
    error::CommandError,
};
use moestro_base::platform::os;
use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    path::{self, Path, PathBuf},
};

/// Variables with directories in which a server writes.
const CACHES: [&str; 4] = ["HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"];
/// Variables with other paths that a server reads.
const DIRECTORIES: [&str; 4] = ["HF_TOKEN_PATH", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"];
/// Further variables that a server reads. Settings have their own variables.
const OTHERS: [&str; 3] = ["CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HUB_OFFLINE"];
/// The variable of a setting that must not be in the file of a service.
const API_KEY: &str = "MOESTRO_API_KEY";

pub fn run(args: cli::ServiceArgs) -> Result<(), CommandError> {
    let failed = |what: &str| CommandError::Usage(format!("cannot find {what}, which a service needs"));
    let (action, install) = match args.action {
        cli::ServiceAction::Install(install) => {
            let refused = |reason: String| CommandError::Usage(format!("moestro serve would not start: {reason}"));
            check_serve_args(&[address_args(&install), install.args.clone()].concat()).map_err(refused)?;
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
    let variables = env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let environment = match action {
        ServiceCommand::Install => server_environment(variables).map_err(CommandError::Usage)?,
        _ => BTreeMap::new(),
    };
    let service = Service {
        program: program().ok_or_else(|| failed("this program's path"))?,
        args: address_args(&install).into_iter().chain(install.args.into_iter().map(make_absolute)).collect(),
        caches: CACHES.iter().filter_map(|name| environment.get(*name)).map(PathBuf::from).collect(),
        environment,
        home: env::home_dir().ok_or_else(|| failed("your home directory"))?,
        user: os::user(),
        is_confined: matches!(action, ServiceCommand::Install) && manager.can_confine(),
        on_demand: install.on_demand.then(|| {
            (install.host.unwrap_or(values::DEFAULT_HOST.into()), install.port.unwrap_or(values::DEFAULT_PORT))
        }),
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

/// The address as arguments of `serve`. With socket activation, the service manager opens the port instead.
fn address_args(install: &cli::InstallArgs) -> Vec<String> {
    let host = install.host.as_ref().map(|host| format!("--host={host}"));
    let port = install.port.map(|port| format!("--port={port}"));
    host.into_iter().chain(port).filter(|_| !install.on_demand).collect()
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

/// The variables of this shell that a server reads. A service manager starts the server without those of the shell, so
/// the server would look for models in other directories than `moestro pull`.
///
/// # Errors
/// A variable has the API key. Other users may be able to read the file of the service.
fn server_environment(variables: impl Iterator<Item = (String, OsString)>) -> Result<BTreeMap<String, String>, String> {
    let settings = variables::settings();
    let mut environment = BTreeMap::new();
    for (name, value) in variables.filter(|(_, value)| !value.is_empty()) {
        if name == API_KEY {
            return Err(format!("a service does not get {API_KEY}: unset it, and use `-- --api-key-file FILE`"));
        }
        let text = value.to_string_lossy().into_owned();
        if DIRECTORIES.contains(&&*name) || CACHES.contains(&&*name) {
            let path = path::absolute(config::expand(&value)).map_err(|error| format!("{name}={text}: {error}"))?;
            environment.insert(name, path.to_string_lossy().into_owned());
        } else if settings.contains(&name) || OTHERS.contains(&&*name) {
            environment.insert(name, make_absolute(text));
        }
    }
    Ok(environment)
}

/// Makes an argument absolute if it is an existing path, or a flag with one after `=`. The service runs in another
/// directory.
fn make_absolute(arg: String) -> String {
    let (flag, value) = match arg.split_once('=').filter(|(flag, _)| flag.starts_with("--")) {
        Some((flag, value)) => (format!("{flag}="), value),
        None => (String::new(), arg.as_str()),
    };
    let there = !value.starts_with('-') && Path::new(value).exists();
    match path::absolute(value).ok().filter(|_| there) {
        Some(whole) => flag + &whole.to_string_lossy(),
        None => arg,
    }
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
        let flag = format!("--api-key-file={}", here.join("src/main.rs").display());
        assert_eq!(make_absolute("--api-key-file=src/main.rs".into()), flag);
        for arg in ["--memory-limit", "8GiB", "org/name", "/", "-", "--port=1", "--cors=*", "--config=/", "a=src"] {
            assert_eq!(make_absolute(arg.into()), arg);
        }
    }

    #[test]
    fn service_gets_variables_of_the_server() {
        let found = |variables: &[(&str, &str)]| {
            server_environment(variables.iter().map(|(name, value)| (name.to_string(), value.into())))
        };
        let here = env::current_dir().unwrap();
        let path = |name: &str| here.join(name).to_str().unwrap().to_owned();
        let shell = [
            ("HF_HOME", "hf"),
            ("HF_ENDPOINT", "https://mirror"),
            ("HF_HUB_OFFLINE", "1"),
            ("XDG_CACHE_HOME", ""),
            ("HF_TOKEN", "secret"),
            ("PATH", "/bin"),
            ("MOESTRO_MEMORY_LIMIT", "8GiB"),
            ("MOESTRO_MODELS_DIR", "src"),
            ("MOESTRO_LOG", "debug"),
            ("MOESTRO_MEMRY", "1"),
        ];
        let expected = [
            ("HF_ENDPOINT", "https://mirror".to_owned()),
            ("HF_HOME", path("hf")),
            ("HF_HUB_OFFLINE", "1".to_owned()),
            ("MOESTRO_LOG", "debug".to_owned()),
            ("MOESTRO_MEMORY_LIMIT", "8GiB".to_owned()),
            ("MOESTRO_MODELS_DIR", path("src")),
        ];
        let expected: BTreeMap<_, _> = expected.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        assert_eq!(found(&shell), Ok(expected));
        assert!(found(&[(API_KEY, "k")]).unwrap_err().contains("--api-key-file"));
    }
}
