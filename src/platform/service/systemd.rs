//! The systemd user unit, a socket beside it if it is to start on demand, and `systemctl --user`.

use super::{Action, LINES, Service, Step, words};
use std::{path::PathBuf, process::Command};

const UNIT: &str = "moestro.service";
const SOCKET: &str = "moestro.socket";

fn dir(service: &Service) -> PathBuf {
    service.home.join(".config/systemd/user")
}

/// A word of `ExecStart`: quoted, with what systemd would expand taken literally.
fn quoted(word: &str) -> String {
    let escaped = word.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%").replace('$', "$$");
    format!("\"{escaped}\"")
}

/// A user's manager can shut off files and drop capabilities only inside of a user namespace. Some systems give users none:
/// there a unit with these would not start at all.
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

/// True if the user's systemd can start a program with [`CONFINED`]: it tries.
pub fn confines() -> bool {
    let mut attempt = Command::new("systemd-run");
    attempt.args(["--user", "--wait", "--quiet", "--collect"]);
    for option in CONFINED {
        attempt.args(["-p", option]);
    }
    attempt.arg("true").output().is_ok_and(|output| output.status.success())
}

/// The unit.
///
/// It shuts off all that a server of tokens has no use for. The server must map memory and read models wherever they
/// are, and it writes to its cache, its log and the Hugging Face cache only. See [`CONFINED`] for what not every system
/// lets a user do.
pub fn unit(service: &Service) -> String {
    let mut command = vec![quoted(&service.program.to_string_lossy()), "serve".into()];
    command.extend(service.args.iter().map(|arg| quoted(arg)));
    let command = command.join(" ");
    let install = match service.on_demand {
        Some(_) => format!("Also={SOCKET}"),
        None => "WantedBy=default.target".into(),
    };
    let confined = if service.confined { CONFINED.join("\n") + "\n" } else { String::new() };
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
         # The port is open, and says so, before the model is loaded.\n\
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

/// The socket that starts the unit with the first connection.
pub fn socket(host: &str, port: u16) -> String {
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.into() };
    format!(
        "[Unit]\nDescription=Moestro's port\n\n[Socket]\nListenStream={host}:{port}\nNoDelay=yes\n\n\
         [Install]\nWantedBy=sockets.target\n"
    )
}

pub fn steps(service: &Service, action: Action) -> Vec<Step> {
    let dir = dir(service);
    let main = if service.on_demand.is_some() { SOCKET } else { UNIT };
    match action {
        Action::Install => {
            let mut steps = vec![Step::Write(dir.join(UNIT), unit(service))];
            match &service.on_demand {
                Some((host, port)) => steps.push(Step::Write(dir.join(SOCKET), socket(host, *port))),
                None => {
                    steps.push(Step::Try(words(["systemctl", "--user", "disable", "--now", SOCKET])));
                    steps.push(Step::Remove(dir.join(SOCKET)));
                }
            }
            steps.push(Step::Run(words(["systemctl", "--user", "daemon-reload"])));
            steps.push(Step::Run(words(["systemctl", "--user", "enable", "--now", main])));
            steps
        }
        Action::Uninstall => vec![
            Step::Try(words(["systemctl", "--user", "disable", "--now", SOCKET])),
            Step::Try(words(["systemctl", "--user", "disable", "--now", UNIT])),
            Step::Remove(dir.join(SOCKET)),
            Step::Remove(dir.join(UNIT)),
            Step::Run(words(["systemctl", "--user", "daemon-reload"])),
        ],
        Action::Start => vec![Step::Run(words(["systemctl", "--user", "start", UNIT]))],
        Action::Stop => vec![Step::Run(words(["systemctl", "--user", "stop", UNIT]))],
        Action::Reload => vec![Step::Run(words(["systemctl", "--user", "reload", UNIT]))],
        Action::Status => vec![Step::Run(words(["systemctl", "--user", "--no-pager", "status", UNIT]))],
        Action::Logs => vec![Step::Run(words(["journalctl", "--user-unit", UNIT, "-n", LINES, "-f"]))],
    }
}
