//! Runs Moestro as a service: a launchd agent on macOS, a systemd user unit on other systems.
//!
//! A [`Service`] is a plain value. The modules [`launchd`] and [`systemd`] translate an action to [`ServiceStep`]s,
//! which are file changes and commands. [`Service::act`] performs the steps.

mod launchd;
mod systemd;

use moestro_base::platform::atomic_file::replace_file;
use std::{
    collections::BTreeMap,
    env,
    ffi::OsString,
    fs, io,
    path::PathBuf,
    process::Command,
    thread,
    time::{Duration, Instant},
};

/// The name of the launchd agent.
const LABEL: &str = "dev.moestro.serve";

/// Number of old log lines shown by `service logs`.
const LOG_LINES: &str = "100";

/// Maximum time to wait until a stopped service has exited.
const EXIT_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between two checks whether a stopped service has exited.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of retries of a command that the service manager may refuse temporarily.
const RETRIES: u32 = 3;
/// Time between two retries.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// A program that runs as a service of one user.
#[derive(Debug, Clone)]
pub struct Service {
    /// The absolute path of the program.
    pub program: PathBuf,
    /// Arguments after `serve`.
    pub args: Vec<String>,
    /// Environment variables of the server.
    pub environment: BTreeMap<String, String>,
    /// Directories outside of `~/.cache` in which the server keeps its caches.
    pub caches: Vec<PathBuf>,
    pub home: PathBuf,
    /// The numeric user id, which is part of launchd's domain names.
    pub user: u32,
    /// Host and port on which the system listens. The first connection starts the service. If `None`, the service
    /// starts at login.
    pub on_demand: Option<(String, u16)>,
    /// True if the service runs in private namespaces. See [`ServiceManager::can_confine`].
    pub is_confined: bool,
}

/// The actions on a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceCommand {
    Install,
    Uninstall,
    Start,
    Stop,
    /// Sends SIGHUP to the service, which then reloads its configuration.
    Reload,
    Status,
    Logs,
}

/// The service manager of this system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceManager {
    Launchd,
    Systemd,
}

/// The directory of the service's log files. `None` if the service manager keeps the log.
pub fn log_dir() -> Option<PathBuf> {
    let has_files = ServiceManager::current() == ServiceManager::Launchd;
    env::home_dir().filter(|_| has_files).map(|home| launchd::logs(&home))
}

/// A change to a file, or a command of the service manager.
#[derive(Debug, Clone, PartialEq)]
pub enum ServiceStep {
    Write(PathBuf, String),
    Remove(PathBuf),
    Run(Vec<OsString>),
    /// Runs a command and ignores a failure. An example is stopping a service that is not running.
    Try(Vec<OsString>),
    /// Repeats a command that prints a service's state until the command fails. The failure means that the service no
    /// longer exists.
    WaitUntilGone(Vec<OsString>),
    /// Runs a command, and repeats the command while it exits with this code.
    Retry(Vec<OsString>, i32),
}

impl ServiceManager {
    /// The manager of this system.
    pub fn current() -> Self {
        if cfg!(target_os = "macos") { ServiceManager::Launchd } else { ServiceManager::Systemd }
    }

    /// True if this system allows private namespaces in user units.
    pub fn can_confine(self) -> bool {
        self == ServiceManager::Systemd && systemd::can_confine()
    }
}

impl Service {
    /// The steps of an action, in order.
    pub fn steps(&self, manager: ServiceManager, action: ServiceCommand) -> Vec<ServiceStep> {
        match manager {
            ServiceManager::Launchd => launchd::steps(self, action, &succeeds),
            ServiceManager::Systemd => systemd::steps(self, action),
        }
    }

    /// Performs an action. The output of the service manager goes to the terminal. A failed installation removes the files
    /// that it created.
    ///
    /// # Errors
    /// The service manager cannot be reached (the error says what to do), a file system error occurs (the error names
    /// the path), or a command fails or cannot be run (the error has the command line).
    pub fn act(&self, manager: ServiceManager, action: ServiceCommand) -> Result<(), String> {
        if manager == ServiceManager::Systemd && action != ServiceCommand::Uninstall {
            systemd::check_session(self.user)?;
        }
        let steps = self.steps(manager, action);
        let new_files: Vec<&PathBuf> = steps.iter().filter_map(new_file).collect();
        steps.iter().try_for_each(perform).inspect_err(|_| {
            for file in new_files {
                let _ = fs::remove_file(file);
            }
        })
    }
}

/// The file that a step creates. `None` if the step writes no file, or one that exists.
fn new_file(step: &ServiceStep) -> Option<&PathBuf> {
    match step {
        ServiceStep::Write(path, _) if !path.exists() => Some(path),
        _ => None,
    }
}

fn perform(step: &ServiceStep) -> Result<(), String> {
    match step {
        ServiceStep::Write(path, text) => {
            replace_file(path, text.as_bytes()).map_err(|error| format!("{}: {error}", path.display()))
        }
        ServiceStep::Remove(path) => match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
            _ => Ok(()),
        },
        ServiceStep::Run(words) => run(words, None),
        ServiceStep::Retry(words, code) => run(words, Some(*code)),
        ServiceStep::Try(words) => {
            // A failure is ignored.
            succeeds(words);
            Ok(())
        }
        ServiceStep::WaitUntilGone(words) => {
            let begin = Instant::now();
            while succeeds(words) {
                if begin.elapsed() > EXIT_TIMEOUT {
                    let seconds = EXIT_TIMEOUT.as_secs();
                    return Err(format!(
                        "the old service still exists after {seconds} s: `{}` finds it",
                        command_line(words)
                    ));
                }
                thread::sleep(POLL_INTERVAL);
            }
            Ok(())
        }
    }
}

/// Runs a command and discards its output. Returns true if the command succeeds.
fn succeeds(words: &[OsString]) -> bool {
    let output = words.split_first().map(|(program, args)| Command::new(program).args(args).output());
    output.is_some_and(|output| output.is_ok_and(|output| output.status.success()))
}

/// Runs a command. Repeats the command up to [`RETRIES`] times while it exits with code `retry_on`.
fn run(words: &[OsString], retry_on: Option<i32>) -> Result<(), String> {
    let Some((program, args)) = words.split_first() else { return Ok(()) };
    let mut retries = if retry_on.is_some() { RETRIES } else { 0 };
    loop {
        match Command::new(program).args(args).status() {
            Ok(status) if status.success() => return Ok(()),
            Ok(status) if retries > 0 && status.code() == retry_on => thread::sleep(RETRY_INTERVAL),
            Ok(status) => return Err(format!("`{}` failed: {status}", command_line(words))),
            Err(error) => return Err(format!("`{}`: {error}", command_line(words))),
        }
        retries -= 1;
    }
}

/// Formats a command line for messages.
pub fn command_line(words: &[OsString]) -> String {
    words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Converts the words of a command line.
fn words<const N: usize>(words: [&str; N]) -> Vec<OsString> {
    words.map(OsString::from).to_vec()
}

#[cfg(test)]
mod tests;
