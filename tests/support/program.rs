//! [`moestro`]: a command that runs the program for a test. [`signal`] sends a signal to it.
#![allow(dead_code)] // Each test binary uses only a part of this module.

use std::{
    env,
    ffi::OsString,
    net::{TcpListener, UdpSocket},
    path::Path,
    process::{self, Command},
    sync::Mutex,
};

/// Path of the program.
pub const MOESTRO: &str = env!("CARGO_BIN_EXE_moestro");

/// Environment variables of the test that the program gets, too. All others may change its behaviour.
const KEPT: [&str; 4] = ["PATH", "TMPDIR", "LD_LIBRARY_PATH", "LLVM_PROFILE_FILE"];

/// A command that runs the program as [`isolate`] says.
pub fn moestro(home: &Path) -> Command {
    let mut command = Command::new(MOESTRO);
    isolate(&mut command, home);
    command
}

/// Makes `command`, which runs the program or starts it, independent of the machine: its home directory is `home`, it
/// uses the CPU, and it has no settings from the environment. Its default port is any free port: a server on Moestro's
/// default port changes nothing. Variables that `command` sets already are kept.
pub fn isolate(command: &mut Command, home: &Path) {
    let own = |(name, value): (&std::ffi::OsStr, Option<&std::ffi::OsStr>)| Some((name.to_owned(), value?.to_owned()));
    let own: Vec<(OsString, OsString)> = command.get_envs().filter_map(own).collect();
    command.env_clear().env("HOME", home).env("MOESTRO_DEVICE", "cpu").env("MOESTRO_PORT", "0");
    command.envs(KEPT.iter().filter_map(|name| Some((name, env::var_os(name)?)))).envs(own);
}

/// A TCP port that no server has. As long as this process runs, it has the UDP port of the same number, which no server
/// uses, so that this function and `free_port.py` return the port to no other test and to no other process. The system
/// gives ports from 32768 on to clients, and to servers that ask for any port, so a port of that range may be in use
/// before a test uses it.
pub fn free_port() -> u16 {
    free_port_from(10_000 + (process::id() % 100 * 200) as u16)
}

/// Like [`free_port`], and looks at `first` first.
pub fn free_port_from(first: u16) -> u16 {
    static OWN: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());
    for port in (first..30_000).chain(10_000..first) {
        let Ok(own) = UdpSocket::bind(("127.0.0.1", port)) else { continue };
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            OWN.lock().unwrap().push(own);
            return port;
        }
    }
    panic!("no port is free");
}

/// `text` as one word of a shell.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Sends the signal `name` (`TERM`) to the process `id`.
pub fn signal(name: &str, id: u32) {
    let status = Command::new("kill").args([format!("-{name}"), id.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {id}: {status}");
}
