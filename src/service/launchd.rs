//! launchd: creates a property list in the user's `LaunchAgents`, and runs `launchctl` commands.

use super::{LABEL, LOG_LINES, Service, ServiceCommand, ServiceStep, words};
use moestro_base::platform::{activation, gpu_variables::GPU_VARIABLES};
use plist::{Dictionary, Value};
use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// Path of the agent's property list.
pub fn file(service: &Service) -> PathBuf {
    service.home.join("Library/LaunchAgents").join(format!("{LABEL}.plist"))
}

/// The log directory. `serve --log-dir` limits the size of the files in this directory.
pub fn logs(home: &Path) -> PathBuf {
    home.join("Library/Logs/moestro")
}

/// Exit code of `launchctl bootstrap` while the old agent's label is still in use.
const STILL_IN_USE: i32 = 5;

/// A launchd domain of one user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LaunchdDomain {
    /// The user's graphical session.
    Gui,
    /// All sessions of the user, including logins over SSH.
    User,
}

impl LaunchdDomain {
    fn name(self, user: u32) -> String {
        match self {
            LaunchdDomain::Gui => format!("gui/{user}"),
            LaunchdDomain::User => format!("user/{user}"),
        }
    }

    /// The domain for a new agent. There is no graphical session if the user is logged in only over SSH.
    fn for_new_agent(user: u32, succeeds: &dyn Fn(&[OsString]) -> bool) -> Self {
        let has_session = succeeds(&words(["launchctl", "print", &LaunchdDomain::Gui.name(user)]));
        if has_session { LaunchdDomain::Gui } else { LaunchdDomain::User }
    }

    /// The domain in which the agent is loaded.
    fn of_agent(user: u32, succeeds: &dyn Fn(&[OsString]) -> bool) -> Self {
        let has = |domain: Self| succeeds(&words(["launchctl", "print", &domain.target(user)]));
        if !has(LaunchdDomain::Gui) && has(LaunchdDomain::User) { LaunchdDomain::User } else { LaunchdDomain::Gui }
    }

    fn target(self, user: u32) -> String {
        format!("{}/{LABEL}", self.name(user))
    }
}

/// Creates the agent's property list.
fn plist(service: &Service, domain: LaunchdDomain) -> Dictionary {
    let text = |text: &str| Value::String(text.into());
    let path = |path: PathBuf| Value::String(path.to_string_lossy().into_owned());
    let logs = logs(&service.home);
    let mut program = vec![path(service.program.clone()), text("serve"), text("--log-dir"), path(logs.clone())];
    program.extend(service.args.iter().map(|arg| text(arg)));
    let mut list = Dictionary::new();
    list.insert("Label".into(), text(LABEL));
    list.insert("ProgramArguments".into(), Value::Array(program));
    match &service.on_demand {
        Some((host, port)) => {
            let mut socket = Dictionary::new();
            socket.insert("SockNodeName".into(), text(host.trim_start_matches('[').trim_end_matches(']')));
            socket.insert("SockServiceName".into(), Value::String(port.to_string()));
            socket.insert("SockType".into(), text("stream"));
            let sockets = Dictionary::from_iter([(activation::SOCKET, Value::Dictionary(socket))]);
            list.insert("Sockets".into(), Value::Dictionary(sockets));
        }
        None => {
            list.insert("RunAtLoad".into(), Value::Boolean(true));
            // launchd restarts the agent after a crash, but not after a regular exit.
            let keep = Dictionary::from_iter([("SuccessfulExit", Value::Boolean(false))]);
            list.insert("KeepAlive".into(), Value::Dictionary(keep));
        }
    }
    // This limits the rate of restarts, since a checkpoint that cannot be loaded fails at every start.
    list.insert("ThrottleInterval".into(), Value::Integer(30.into()));
    // Background and Standard processes get less CPU and I/O, which would make every token slower.
    list.insert("ProcessType".into(), text("Interactive"));
    list.insert("LowPriorityIO".into(), Value::Boolean(false));
    // Time in seconds, which is longer than the grace period of running requests.
    list.insert("ExitTimeOut".into(), Value::Integer(15.into()));
    let own = service.environment.iter().map(|(name, value)| (name.as_str(), text(value)));
    let variables = GPU_VARIABLES.map(|(name, value)| (name, text(value))).into_iter().chain(own);
    list.insert("EnvironmentVariables".into(), Value::Dictionary(Dictionary::from_iter(variables)));
    if domain == LaunchdDomain::User {
        // By default, agents belong to the graphical session.
        list.insert("LimitLoadToSessionType".into(), text("Background"));
    }
    // The log has its own files. The file set here receives panic messages, and output from before the log is open.
    list.insert("StandardErrorPath".into(), path(logs.join("stderr.log")));
    list.insert("StandardOutPath".into(), text("/dev/null"));
    list
}

/// The steps of an action, in order. `succeeds` runs a command and returns true if it succeeds.
pub fn steps(service: &Service, action: ServiceCommand, succeeds: &dyn Fn(&[OsString]) -> bool) -> Vec<ServiceStep> {
    let file = file(service);
    let user = service.user;
    // `bootout` returns before the process has ended. The label stays in use until the process has ended.
    let stop =
        [LaunchdDomain::Gui, LaunchdDomain::User].map(|domain| domain.target(user)).into_iter().flat_map(|old| {
            [
                ServiceStep::Try(words(["launchctl", "bootout", &old])),
                ServiceStep::WaitUntilGone(words(["launchctl", "print", &old])),
            ]
        });
    let run = |command: &[&str]| {
        let target = LaunchdDomain::of_agent(user, succeeds).target(user);
        let words = ["launchctl"].iter().chain(command).map(OsString::from).chain([target.into()]);
        vec![ServiceStep::Run(words.collect())]
    };
    match action {
        ServiceCommand::Install => {
            let domain = LaunchdDomain::for_new_agent(user, succeeds);
            let mut text = Vec::new();
            // Writing to a `Vec` does not fail.
            let _ = Value::Dictionary(plist(service, domain)).to_writer_xml(&mut text);
            let mut load = words(["launchctl", "bootstrap", &domain.name(user)]);
            load.push(file.clone().into_os_string());
            let install = [
                ServiceStep::Write(logs(&service.home).join("stderr.log"), String::new()),
                ServiceStep::Write(file, String::from_utf8_lossy(&text).into_owned()),
                ServiceStep::Retry(load, STILL_IN_USE),
            ];
            stop.chain(install).collect()
        }
        ServiceCommand::Uninstall => stop.chain([ServiceStep::Remove(file)]).collect(),
        ServiceCommand::Start => run(&["kickstart"]),
        ServiceCommand::Stop => run(&["kill", "SIGTERM"]),
        ServiceCommand::Reload => run(&["kill", "SIGHUP"]),
        ServiceCommand::Status => run(&["print"]),
        ServiceCommand::Logs => {
            let mut follow: Vec<OsString> = words(["/bin/sh", "-c"]);
            // This follows the newest log file.
            follow.push(format!("exec tail -n {LOG_LINES} -F \"$(ls -t \"$0\"/moestro.log* | head -n 1)\"").into());
            follow.push(logs(&service.home).into_os_string());
            vec![ServiceStep::Run(follow)]
        }
    }
}
