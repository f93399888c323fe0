//! `Service`: Moestro as a system service, a launchd agent on macOS and a systemd user unit elsewhere.
//!
//! A [`Service`] is a value. [`launchd`] and [`systemd`] turn an action into files and commands. Only [`Service::act`] has
//! side effects.

mod activation;
mod launchd;
mod systemd;

pub use activation::{inherited_listener, notify_ready, notify_watchdog, watchdog_interval};

use super::atomic_file::replace_file;
use std::{ffi::OsString, fs, io, path::PathBuf, process::Command};

/// The name of the launchd agent.
const LABEL: &str = "dev.moestro.serve";

/// Number of old log lines shown by `service logs`.
const LOG_LINES: &str = "100";

/// A program that runs as a service of one user.
#[derive(Debug, Clone)]
pub struct Service {
    /// An absolute path.
    pub program: PathBuf,
    /// Arguments after `serve`.
    pub args: Vec<String>,
    pub home: PathBuf,
    /// The numeric user id, which launchd uses in the name of the session.
    pub user: u32,
    /// The address on which the system listens: the first connection starts the service. If `None`, it starts at login.
    pub on_demand: Option<(String, u16)>,
    /// Runs in private namespaces; see [`ServiceManager::can_confine`].
    pub is_confined: bool,
}

/// The actions on a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServiceCommand {
    Install,
    Uninstall,
    Start,
    Stop,
    /// Sends SIGHUP, which reloads the configuration.
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

/// A change to a file, or a command of the service manager.
#[derive(Debug, Clone, PartialEq)]
pub enum ServiceStep {
    Write(PathBuf, String),
    Remove(PathBuf),
    Run(Vec<OsString>),
    /// As [`ServiceStep::Run`], but failures are ignored, such as stopping a service that is not running.
    Try(Vec<OsString>),
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
            ServiceManager::Launchd => launchd::steps(self, action),
            ServiceManager::Systemd => systemd::steps(self, action),
        }
    }

    /// Performs an action. The manager's output goes to the terminal.
    ///
    /// # Errors
    /// The file system's, with the path; a command that fails or cannot be run, with its command line.
    pub fn act(&self, manager: ServiceManager, action: ServiceCommand) -> Result<(), String> {
        self.steps(manager, action).iter().try_for_each(|step| match step {
            ServiceStep::Write(path, text) => {
                replace_file(path, text.as_bytes()).map_err(|error| format!("{}: {error}", path.display()))
            }
            ServiceStep::Remove(path) => match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
                _ => Ok(()),
            },
            ServiceStep::Run(words) => run(words),
            ServiceStep::Try(words) => {
                // Ignores the status and the output.
                let _ = words.split_first().map(|(program, args)| Command::new(program).args(args).output());
                Ok(())
            }
        })
    }
}

fn run(words: &[OsString]) -> Result<(), String> {
    let line = || words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let Some((program, args)) = words.split_first() else { return Ok(()) };
    match Command::new(program).args(args).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("`{}` failed: {status}", line())),
        Err(error) => Err(format!("`{}`: {error}", line())),
    }
}

/// A command line.
fn words<const N: usize>(words: [&str; N]) -> Vec<OsString> {
    words.map(OsString::from).to_vec()
}

#[cfg(test)]
mod tests;
