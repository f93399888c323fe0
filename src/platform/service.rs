//! Moestro as a service of the system: a launchd agent on macOS, a systemd user unit elsewhere. A [`Service`] is a value;
//! [`launchd`] and [`systemd`] say which files describe it and which commands act on it, and only [`Service::act`] touches
//! anything.

mod activation;
mod launchd;
mod systemd;

pub use activation::{alive, inherited, ready, watched};

use super::atomic_file::replace_file;
use std::{ffi::OsString, fs, io, path::PathBuf, process::Command};

/// The name of the launchd agent.
const LABEL: &str = "dev.moestro.serve";

/// Lines of the log that are shown before it is followed.
const LINES: &str = "100";

/// A program that is run as a service, and its user.
#[derive(Debug, Clone)]
pub struct Service {
    /// An absolute path.
    pub program: PathBuf,
    /// Behind `serve`.
    pub args: Vec<String>,
    pub home: PathBuf,
    /// The user's number, by which launchd names his session.
    pub user: u32,
    /// The address that the system listens on for it: the first connection starts it. Else it runs from login on.
    pub on_demand: Option<(String, u16)>,
    /// In namespaces of its own: see [`Manager::confines`].
    pub confined: bool,
}

/// The actions on a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Install,
    Uninstall,
    Start,
    Stop,
    /// SIGHUP: it reads its configuration again.
    Reload,
    Status,
    Logs,
}

/// The service manager of this system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manager {
    Launchd,
    Systemd,
}

/// A file that describes the service, or a command of the manager.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    Write(PathBuf, String),
    Remove(PathBuf),
    Run(Vec<OsString>),
    /// As [`Step::Run`]; that there is nothing to stop, for one, is no failure.
    Try(Vec<OsString>),
}

impl Manager {
    /// The manager of this system.
    pub fn here() -> Self {
        if cfg!(target_os = "macos") { Manager::Launchd } else { Manager::Systemd }
    }

    /// True if this system's units may have namespaces of their own, where there are units.
    pub fn confines(self) -> bool {
        self == Manager::Systemd && systemd::confines()
    }
}

impl Service {
    /// The steps of an action, in order.
    pub fn steps(&self, manager: Manager, action: Action) -> Vec<Step> {
        match manager {
            Manager::Launchd => launchd::steps(self, action),
            Manager::Systemd => systemd::steps(self, action),
        }
    }

    /// Does it. The manager's own output goes to the terminal.
    ///
    /// # Errors
    /// The file system's, with the path; a command that cannot be run or that fails, with its words.
    pub fn act(&self, manager: Manager, action: Action) -> Result<(), String> {
        self.steps(manager, action).iter().try_for_each(|step| match step {
            Step::Write(path, text) => {
                replace_file(path, text.as_bytes()).map_err(|error| format!("{}: {error}", path.display()))
            }
            Step::Remove(path) => match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(format!("{}: {error}", path.display())),
                _ => Ok(()),
            },
            Step::Run(words) => run(words),
            Step::Try(words) => {
                // Nor are its words told: that there was nothing to stop is no news.
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

/// A command line from words.
fn words<const N: usize>(words: [&str; N]) -> Vec<OsString> {
    words.map(OsString::from).to_vec()
}

#[cfg(test)]
mod tests;
