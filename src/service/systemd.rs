//! systemd: creates a user unit and a socket unit for start on demand, and runs `systemctl --user` commands.

use super::{LOG_LINES, Service, ServiceCommand, ServiceStep, words};
use std::{ffi::OsString, path::PathBuf, process::Command};

const UNIT: &str = "moestro.service";
const SOCKET: &str = "moestro.socket";

fn dir(service: &Service) -> PathBuf {
    service.home.join(".config/systemd/user")
}

/// Quotes a word of `ExecStart`, in which systemd replaces variables.
fn quoted(word: &str) -> String {
    quoted_value(word).replace('$', "$$")
}

/// Quotes a word of any other option. Escapes specifiers and control characters, because a raw newline would start
/// another directive.
fn quoted_value(word: &str) -> String {
    let mut escaped = String::with_capacity(word.len() + 2);
    for c in word.chars() {
        match c {
            '\\' | '"' => escaped.extend(['\\', c]),
            '%' => escaped.extend([c, c]),
            c if c.is_control() => c.to_string().bytes().for_each(|byte| escaped += &format!("\\x{byte:02x}")),
            c => escaped.push(c),
        }
    }
    format!("\"{escaped}\"")
}

/// Options that need a user namespace in a user unit. On systems without user namespaces, a unit with these options
/// does not start.
const CONFINED: [&str; 9] = [
    "PrivateUsers=yes",
    "ProtectSystem=strict",
    "ProtectHome=read-only",
    "PrivateTmp=yes",
    "ProtectKernelTunables=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelLogs=yes",
    "ProtectControlGroups=yes",
    "CapabilityBoundingSet=",
];

/// True if the user's systemd can start a program with the options in [`CONFINED`]. Tests this by starting a program.
pub fn can_confine() -> bool {
    let mut attempt = Command::new("systemd-run");
    attempt.args(["--user", "--wait", "--quiet", "--collect"]);
    for option in CONFINED {
        attempt.args(["-p", option]);
    }
    attempt.arg("true").output().is_ok_and(|output| output.status.success())
}

/// Checks that the user's systemd can be reached.
pub fn check_session(user: u32) -> Result<(), String> {
    let mut ask = Command::new("systemctl");
    match ask.args(["--user", "show-environment"]).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(_) => Err(format!(
            "there is no session of systemd for this user; log in directly (not with su or sudo), or run `sudo loginctl \
             enable-linger $USER` and `export XDG_RUNTIME_DIR=/run/user/{user}`, then try again"
        )),
        Err(_) => Err("this system has no systemctl; run `moestro serve` with its own service manager".into()),
    }
}

/// The text of the service unit.
///
/// The unit removes all privileges that the server does not need. The server may read models anywhere. The server
/// writes only to its cache, its log and the Hugging Face cache. [`CONFINED`] has the options that only some systems
/// support.
pub fn unit(service: &Service) -> String {
    let mut command = vec![quoted(&service.program.to_string_lossy()), "serve".into()];
    command.extend(service.args.iter().map(|arg| quoted(arg)));
    let command = command.join(" ");
    let install = match service.on_demand {
        Some(_) => format!("Also={SOCKET}"),
        None => "WantedBy=default.target".into(),
    };
    let variables = service.environment.iter().map(|(name, value)| format!("{name}={value}"));
    let environment: String = variables.map(|set| format!("Environment={}\n", quoted_value(&set))).collect();
    // A directory after a minus sign may be missing.
    let caches = service.caches.iter().map(|dir| quoted_value(&format!("-{}", dir.display())));
    let caches: String = caches.map(|dir| format!("ReadWritePaths={dir}\n")).collect();
    let confined = if service.is_confined { CONFINED.join("\n") + "\n" + &caches } else { String::new() };
    format!(
        "[Unit]\n\
         Description=Moestro, a server of language models\n\
         StartLimitIntervalSec=300\n\
         StartLimitBurst=5\n\
         \n\
         [Service]\n\
         Type=notify\n\
         NotifyAccess=main\n\
         ExecStart={command}\n\
         ExecReload=/bin/kill -HUP $MAINPID\n\
         {environment}\
         # The port opens, and readiness is signalled, before the model is loaded.\n\
         TimeoutStartSec=60\n\
         TimeoutStopSec=15\n\
         WatchdogSec=60\n\
         Restart=on-failure\n\
         RestartSec=10\n\
         CacheDirectory=moestro huggingface\n\
         NoNewPrivileges=yes\n\
         RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX\n\
         RestrictNamespaces=yes\n\
         RestrictRealtime=yes\n\
         RestrictSUIDSGID=yes\n\
         LockPersonality=yes\n\
         MemoryDenyWriteExecute=yes\n\
         SystemCallArchitectures=native\n\
         SystemCallFilter=@system-service\n\
         UMask=0077\n\
         {confined}\
         \n\
         [Install]\n\
         {install}\n"
    )
}

/// The text of the socket unit, which starts the service at the first connection.
pub fn socket(host: &str, port: u16) -> String {
    let host: String = host.chars().filter(|c| !c.is_control()).collect();
    // systemd replaces words that begin with %.
    let host = host.replace('%', "%%");
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
    format!(
        "[Unit]\nDescription=Moestro's port\n\n[Socket]\nListenStream={host}:{port}\nNoDelay=yes\n\n\
         [Install]\nWantedBy=sockets.target\n"
    )
}

/// The words of a `systemctl` command for user units.
fn systemctl(args: &[&str]) -> Vec<OsString> {
    ["systemctl", "--user"].iter().chain(args).map(OsString::from).collect()
}

pub fn steps(service: &Service, action: ServiceCommand) -> Vec<ServiceStep> {
    let dir = dir(service);
    let main = if service.on_demand.is_some() { SOCKET } else { UNIT };
    match action {
        ServiceCommand::Install => {
            let mut steps = vec![ServiceStep::Write(dir.join(UNIT), unit(service))];
            match &service.on_demand {
                Some((host, port)) => steps.push(ServiceStep::Write(dir.join(SOCKET), socket(host, *port))),
                None => {
                    steps.push(ServiceStep::Try(systemctl(&["disable", "--now", SOCKET])));
                    steps.push(ServiceStep::Remove(dir.join(SOCKET)));
                }
            }
            steps.push(ServiceStep::Run(systemctl(&["daemon-reload"])));
            steps.push(ServiceStep::Run(systemctl(&["enable", "--now", main])));
            steps
        }
        ServiceCommand::Uninstall => vec![
            ServiceStep::Try(systemctl(&["disable", "--now", SOCKET])),
            ServiceStep::Try(systemctl(&["disable", "--now", UNIT])),
            ServiceStep::Remove(dir.join(SOCKET)),
            ServiceStep::Remove(dir.join(UNIT)),
            // Without a session, no unit is loaded.
            ServiceStep::Try(systemctl(&["daemon-reload"])),
        ],
        ServiceCommand::Start => vec![ServiceStep::Run(systemctl(&["start", UNIT]))],
        ServiceCommand::Stop => vec![ServiceStep::Run(systemctl(&["stop", UNIT]))],
        ServiceCommand::Reload => vec![ServiceStep::Run(systemctl(&["reload", UNIT]))],
        ServiceCommand::Status => vec![ServiceStep::Run(systemctl(&["--no-pager", "status", UNIT]))],
        ServiceCommand::Logs => {
            vec![ServiceStep::Run(words(["journalctl", "--user-unit", UNIT, "-n", LOG_LINES, "-f"]))]
        }
    }
}
