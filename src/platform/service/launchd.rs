//! The launchd agent: a property list in the user's `LaunchAgents`, and `launchctl`.

use super::{Action, LABEL, LINES, Service, Step, words};
use plist::{Dictionary, Value};
use std::{ffi::OsString, path::PathBuf};

/// The file that describes the agent.
pub fn file(service: &Service) -> PathBuf {
    service.home.join("Library/LaunchAgents").join(format!("{LABEL}.plist"))
}

/// The directory of its logs: `serve --log-dir` keeps a week of them, a file a day.
fn logs(service: &Service) -> PathBuf {
    service.home.join("Library/Logs/moestro")
}

/// The property list.
pub fn plist(service: &Service) -> Dictionary {
    let text = |text: &str| Value::String(text.into());
    let path = |path: PathBuf| Value::String(path.to_string_lossy().into_owned());
    let logs = logs(service);
    let mut program = vec![path(service.program.clone()), text("serve"), text("--log-dir"), path(logs.clone())];
    program.extend(service.args.iter().map(|arg| text(arg)));
    let mut list = Dictionary::new();
    list.insert("Label".into(), text(LABEL));
    list.insert("ProgramArguments".into(), Value::Array(program));
    match &service.on_demand {
        Some((host, port)) => {
            let mut socket = Dictionary::new();
            socket.insert("SockNodeName".into(), text(host));
            socket.insert("SockServiceName".into(), Value::String(port.to_string()));
            socket.insert("SockType".into(), text("stream"));
            let sockets = Dictionary::from_iter([(super::activation::SOCKET, Value::Dictionary(socket))]);
            list.insert("Sockets".into(), Value::Dictionary(sockets));
        }
        None => {
            list.insert("RunAtLoad".into(), Value::Boolean(true));
            // A crash is mended by starting again; who stops it means it.
            let keep = Dictionary::from_iter([("SuccessfulExit", Value::Boolean(false))]);
            list.insert("KeepAlive".into(), Value::Dictionary(keep));
        }
    }
    // A checkpoint that cannot be loaded fails anew each time: not more often than the reading takes.
    list.insert("ThrottleInterval".into(), Value::Integer(30.into()));
    // Somebody waits for each token. Background and Standard processes are slowed down, in computing and in reading.
    list.insert("ProcessType".into(), text("Interactive"));
    list.insert("LowPriorityIO".into(), Value::Boolean(false));
    // Longer than the grace that running requests get.
    list.insert("ExitTimeOut".into(), Value::Integer(15.into()));
    // The log has files of its own; here end a panic's words and what is said before the log is open.
    list.insert("StandardErrorPath".into(), path(logs.join("stderr.log")));
    list.insert("StandardOutPath".into(), text("/dev/null"));
    list
}

pub fn steps(service: &Service, action: Action) -> Vec<Step> {
    let (file, session) = (file(service), format!("gui/{}", service.user));
    let target = format!("{session}/{LABEL}");
    match action {
        Action::Install => {
            let mut text = Vec::new();
            // Writing to memory does not fail.
            let _ = Value::Dictionary(plist(service)).to_writer_xml(&mut text);
            let mut load = words(["launchctl", "bootstrap", &session]);
            load.push(file.clone().into_os_string());
            vec![
                Step::Try(words(["launchctl", "bootout", &target])),
                Step::Write(logs(service).join("stderr.log"), String::new()),
                Step::Write(file, String::from_utf8_lossy(&text).into_owned()),
                Step::Run(load),
            ]
        }
        Action::Uninstall => vec![Step::Try(words(["launchctl", "bootout", &target])), Step::Remove(file)],
        Action::Start => vec![Step::Run(words(["launchctl", "kickstart", &target]))],
        Action::Stop => vec![Step::Run(words(["launchctl", "kill", "SIGTERM", &target]))],
        Action::Reload => vec![Step::Run(words(["launchctl", "kill", "SIGHUP", &target]))],
        Action::Status => vec![Step::Run(words(["launchctl", "print", &target]))],
        Action::Logs => {
            let mut follow: Vec<OsString> = words(["/bin/sh", "-c"]);
            // The newest of the daily files.
            follow.push(format!("exec tail -n {LINES} -F \"$(ls -t \"$0\"/moestro.log* | head -n 1)\"").into());
            follow.push(logs(service).into_os_string());
            vec![Step::Run(follow)]
        }
    }
}
