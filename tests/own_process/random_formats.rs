//! Compiles random output formats and follows each format for a few tokens. Checks bounds on the time and the memory of
//! each format.
//!
//! Times are CPU times of this process, so that a busy machine does not affect the result. `MOESTRO_FORMATS` sets the
//! number of formats. `MOESTRO_FORMATS_SEED` sets the seed of the first format. `MOESTRO_MUTATE_SECONDS` sets the time
//! after which no further format starts.

use crate::{counting::cpu_time, format_check};
use std::{
    env, fs,
    time::{Duration, Instant},
};
use test_support::formats::Source;
use test_support::own_process::ran_in_own_process;
use test_support::process_memory::memory;

/// Maximum CPU time to compile a format. The server answers with status 400 after 5 s of wall time.
const COMPILE_TIME: Duration = Duration::from_secs(4);
/// Maximum CPU time to compute a mask, or to accept a token.
const STEP_TIME: Duration = Duration::from_secs(1);
/// Maximum memory of one format in bytes. Random formats took 6 MiB.
const MEMORY: u64 = 256 << 20;

fn from_env(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn formats_stay_within_time_and_memory() {
    if ran_in_own_process(formats_stay_within_time_and_memory) {
        return;
    }
    run(from_env("MOESTRO_FORMATS", 60));
}

#[test]
#[ignore = "takes a minute"]
fn many_formats_stay_within_time_and_memory() {
    if ran_in_own_process(many_formats_stay_within_time_and_memory) {
        return;
    }
    run(from_env("MOESTRO_FORMATS", 20_000));
}

/// Checks `count` formats. Checks fewer formats if the time runs out.
fn run(count: u64) {
    let compiler = format_check::compiler();
    compiler.warm_up();
    let (first, seconds) = (from_env("MOESTRO_FORMATS_SEED", 0), from_env("MOESTRO_MUTATE_SECONDS", 60));
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut done, mut accepted, mut most) = (0, 0, (0, 0));
    let mut slowest = [("compile", Duration::ZERO, 0), ("mask", Duration::ZERO, 0), ("token", Duration::ZERO, 0)];
    for seed in (first..first + count).take_while(|_| Instant::now() < end) {
        let mut source = Source::new(&[], seed);
        let fields = test_support::formats::fields(&mut source);
        // Writing 5 resets the peak of resident memory. Without permission, the peak covers all formats so far.
        let _ = fs::write("/proc/self/clear_refs", "5");
        let (before, mut since) = (memory("self", "VmRSS"), cpu_time());
        let followed = format_check::follow(&compiler, &fields, &mut source, |step| {
            let now = cpu_time();
            let limit = if step == "compile" { COMPILE_TIME } else { STEP_TIME };
            assert!(now - since <= limit, "seed {seed}: {:?} for a {step}: {:.2000}", now - since, fields.to_string());
            if let Some(slow) = slowest.iter_mut().find(|slow| slow.0 == step && slow.1 < now - since) {
                *slow = (step, now - since, seed);
            }
            since = now;
        });
        let grown = memory("self", "VmHWM").saturating_sub(before);
        assert!(grown <= MEMORY, "seed {seed}: {} MiB: {:.2000}", grown >> 20, fields.to_string());
        most = most.max((grown >> 20, seed));
        (done, accepted) = (done + 1, accepted + u64::from(followed.is_ok()));
    }
    eprintln!(
        "{done} formats, {accepted} accepted; slowest {slowest:.2?}; most memory {} MiB (seed {})",
        most.0, most.1
    );
    assert!(accepted > done / 10, "most formats are refused");
}
