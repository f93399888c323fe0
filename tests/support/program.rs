//! [`moestro`]: a command that runs the program for a test. [`signal`] sends a signal to it.
#![allow(dead_code)] // Each test binary uses only a part of this module.

use std::{env, ffi::OsString, path::Path, process::Command};

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

/// `text` as one word of a shell.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Sends the signal `name` (`TERM`) to the process `id`.
pub fn signal(name: &str, id: u32) {
    let status = Command::new("kill").args([format!("-{name}"), id.to_string()]).status().unwrap();
    assert!(status.success(), "kill -{name} {id}: {status}");
}
