//! launchd: a property list in the user's `LaunchAgents`, and `launchctl` commands.

use super::{LABEL, LOG_LINES, Service, ServiceCommand, ServiceStep, words};
use plist::{Dictionary, Value};
use std::{ffi::OsString, path::PathBuf};

/// The agent's property list file.
pub fn file(service: &Service) -> PathBuf {
    service.home.join("Library/LaunchAgents").join(format!("{LABEL}.plist"))
}

/// The log directory. `serve --log-dir` keeps files of bounded size in it.
fn logs(service: &Service) -> PathBuf {
    service.home.join("Library/Logs/moestro")
}

/// The agent's property list.
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
            // Restart after a crash, but not after a regular exit.
            let keep = Dictionary::from_iter([("SuccessfulExit", Value::Boolean(false))]);
            list.insert("KeepAlive".into(), Value::Dictionary(keep));
        }
    }
    // A checkpoint that cannot be loaded fails at each start, so limit the restarts.
    list.insert("ThrottleInterval".into(), Value::Integer(30.into()));
    // Background and Standard processes get less CPU and I/O, which would slow down every token.
    list.insert("ProcessType".into(), text("Interactive"));
    list.insert("LowPriorityIO".into(), Value::Boolean(false));
    // Longer than the grace period of running requests.
    list.insert("ExitTimeOut".into(), Value::Integer(15.into()));
    // The log has its own files. This one gets panic messages and output before the log is open.
    list.insert("StandardErrorPath".into(), path(logs.join("stderr.log")));
    list.insert("StandardOutPath".into(), text("/dev/null"));
    list
}

pub fn steps(service: &Service, action: ServiceCommand) -> Vec<ServiceStep> {
    let (file, session) = (file(service), format!("gui/{}", service.user));
    let target = format!("{session}/{LABEL}");
    match action {
        ServiceCommand::Install => {
            let mut text = Vec::new();
            // Writing to memory does not fail.
            let _ = Value::Dictionary(plist(service)).to_writer_xml(&mut text);
            let mut load = words(["launchctl", "bootstrap", &session]);
            load.push(file.clone().into_os_string());
            vec![
                ServiceStep::Try(words(["launchctl", "bootout", &target])),
                ServiceStep::Write(logs(service).join("stderr.log"), String::new()),
                ServiceStep::Write(file, String::from_utf8_lossy(&text).into_owned()),
                ServiceStep::Run(load),
            ]
        }
        ServiceCommand::Uninstall => {
            vec![ServiceStep::Try(words(["launchctl", "bootout", &target])), ServiceStep::Remove(file)]
        }
        ServiceCommand::Start => vec![ServiceStep::Run(words(["launchctl", "kickstart", &target]))],
        ServiceCommand::Stop => vec![ServiceStep::Run(words(["launchctl", "kill", "SIGTERM", &target]))],
        ServiceCommand::Reload => vec![ServiceStep::Run(words(["launchctl", "kill", "SIGHUP", &target]))],
        ServiceCommand::Status => vec![ServiceStep::Run(words(["launchctl", "print", &target]))],
        ServiceCommand::Logs => {
            let mut follow: Vec<OsString> = words(["/bin/sh", "-c"]);
            // Follow the newest file.
            follow.push(format!("exec tail -n {LOG_LINES} -F \"$(ls -t \"$0\"/moestro.log* | head -n 1)\"").into());
            follow.push(logs(service).into_os_string());
            vec![ServiceStep::Run(follow)]
        }
    }
}
