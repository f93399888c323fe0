//! [`ran_in_own_process`] runs a test in a separate process.
//!
//! Resident memory, open files, CPU time, allocations and disk reads belong to the whole process. A test that measures
//! one of them next to other tests also measures what those tests do.

use std::{any, env, process::Command};

/// The name of the only test that this process runs. Set for a child process.
const OWN_PROCESS: &str = "MOESTRO_TEST_OWN_PROCESS";

/// Runs `test`, the calling test, in a child process that runs no other test, and returns true. Fails if the child
/// fails. In the child process, returns false, so that the test runs.
pub fn ran_in_own_process<T: Copy>(test: T) -> bool {
    ran_in_own_process_with(test, |_| ())
}

/// Does the same as [`ran_in_own_process`]. `set_up` changes the environment of the child process.
pub fn ran_in_own_process_with<T: Copy>(_test: T, set_up: impl FnOnce(&mut Command)) -> bool {
    // The type of a function is named after the function.
    let (_crate, name) = any::type_name::<T>().split_once("::").expect("a path");
    if env::var_os(OWN_PROCESS).is_some_and(|only| only == name) {
        return false;
    }
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", name, "--include-ignored", "--nocapture", "--test-threads", "1"]).env(OWN_PROCESS, name);
    set_up(&mut child);
    let output = child.output().unwrap();
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    // The test runner captures this output and prints it if the test fails.
    print!("{stdout}{stderr}");
    assert!(output.status.success() && stdout.contains("1 passed"), "{name} failed in its own process");
    true
}

/// Does the same as [`ran_in_own_process`]. The child process has no settings of the program in its environment, and no
/// configuration file.
pub fn ran_without_settings<T: Copy>(test: T) -> bool {
    ran_in_own_process_with(test, |child| {
        let is_setting =
            |name: &str| ["MOESTRO_", "SWIFTLM_", "HF_", "XDG_"].iter().any(|start| name.starts_with(start));
        for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_setting)) {
            if name != OWN_PROCESS {
                child.env_remove(name);
            }
        }
        child.env("HOME", "/no/such/home");
    })
}
