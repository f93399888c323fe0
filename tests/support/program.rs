//! [`moestro`]: a command that runs the program for a test. [`signal`] sends a signal to it.
#![allow(dead_code)] // Each test binary uses only a part of this module.

use std::{
    env,
    ffi::OsString,
    net::TcpListener,
    path::Path,
    process::{self, Command},
    sync::atomic::{AtomicU16, Ordering},
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
/// uses the CPU, and it has no settings from the environment. Variables that `command` sets already are kept.
pub fn isolate(command: &mut Command, home: &Path) {
    let own = |(name, value): (&std::ffi::OsStr, Option<&std::ffi::OsStr>)| Some((name.to_owned(), value?.to_owned()));
    let own: Vec<(OsString, OsString)> = command.get_envs().filter_map(own).collect();
    command.env_clear().env("HOME", home).env("MOESTRO_DEVICE", "cpu");
    command.envs(KEPT.iter().filter_map(|name| Some((name, env::var_os(name)?)))).envs(own);
}

/// A port that was free a moment ago. The system gives ports from 32768 on to clients, and to servers that ask for any port,
/// so a port of that range may be in use before a test uses it.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = (process::id() % 100 * 200) as u16;
    let mut ports = (0..20_000).map(|_| 10_000 + (first + NEXT.fetch_add(1, Ordering::Relaxed)) % 20_000);
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
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
