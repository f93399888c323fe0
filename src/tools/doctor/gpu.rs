//! Checks long buffers and recovery from errors on a GPU, and measures the cost of a launch.

use moestro_compute::{
    device::{CommandQueue, DeviceError, Driver},
    ops::{check::Finding, norm::rms_norm},
};
use serde::Serialize;
use std::time::Instant;

/// Length of the vector that each launch normalises.
const WIDTH: usize = 64;
/// Size in bytes of a buffer whose end needs 64-bit offsets.
const LONG: usize = 5 << 30;
/// Number of bytes of memory that must remain free.
const SPARE: u64 = 4 << 30;

/// Costs of launches in microseconds. Each cost is the minimum of many tries.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LaunchTimes {
    /// Time to encode a launch.
    pub launch: f64,
    /// Time to submit a command buffer.
    pub commit: f64,
    /// Time from the start of a launch to the end of the wait for its result.
    pub wait: f64,
}

pub fn times(gpu: &mut CommandQueue<impl Driver>) -> Result<LaunchTimes, DeviceError> {
    let room = gpu.allocate(3 * WIDTH * 4)?;
    let [x, w, y] = [0, 1, 2].map(|index| room.part(index * WIDTH * 4, WIDTH * 4));
    let launch = rms_norm(1, WIDTH, 1e-6, x, w, y);
    let mut times = LaunchTimes { launch: f64::INFINITY, commit: f64::INFINITY, wait: f64::INFINITY };
    let micros = |begin: Instant| begin.elapsed().as_secs_f64() * 1e6;
    for _ in 0..100 {
        let begin = Instant::now();
        gpu.launch(&launch)?;
        times.launch = times.launch.min(micros(begin));
        let before_commit = Instant::now();
        gpu.commit()?;
        times.commit = times.commit.min(micros(before_commit));
        gpu.wait()?;
        times.wait = times.wait.min(micros(begin));
    }
    gpu.release(room.buffer);
    Ok(times)
}

/// Launches a kernel at the end of a zeroed buffer of several GiB. `None` if there is not enough memory.
pub fn long_buffer(gpu: &mut CommandQueue<impl Driver>) -> Option<Finding> {
    let driver = &gpu.driver;
    let room =
        driver.working_set().is_some_and(|bytes| bytes >= LONG as u64 + SPARE) && driver.max_buffer_len() >= LONG;
    room.then(|| finding("(a buffer of 5 GiB)", at_the_end(gpu, LONG)))
}

fn at_the_end(gpu: &mut CommandQueue<impl Driver>, len: usize) -> Result<bool, DeviceError> {
    let long = gpu.allocate(len)?;
    let part = |index: usize| long.part(len - index * WIDTH * 4, WIDTH * 4);
    let [x, w, y] = [part(3), part(2), part(1)];
    let cleared = gpu.read_words(y)?.iter().all(|word| *word == 0);
    let ones = [1f32.to_bits(); WIDTH];
    gpu.write_words(x, &ones)?;
    gpu.write_words(w, &ones)?;
    gpu.launch(&rms_norm(1, WIDTH, 1e-6, x, w, y))?;
    gpu.wait()?;
    let normed = gpu.read_floats(y)?.iter().all(|value| (value - 1.0).abs() < 1e-5);
    gpu.release(long.buffer);
    Ok(cleared && normed)
}

/// Provokes an error and launches a kernel again. `None` if the GPU cannot provoke an error. The result is only
/// reported, because a GPU that does not recover may still compute correctly.
pub fn recover(mut gpu: CommandQueue<impl Driver>) -> Option<Finding> {
    let provoked = gpu.inject_fault()?;
    let after = provoked.and_then(|reported| {
        tracing::debug!("the GPU reported the provoked error: {reported}");
        at_the_end(&mut gpu, 1 << 16)
    });
    Some(finding("(an error, and after it)", after))
}

fn finding(name: &str, outcome: Result<bool, DeviceError>) -> Finding {
    let outcome =
        outcome.map(|right| (if right { 0.0 } else { f64::INFINITY }, 0.0)).map_err(|error| error.to_string());
    Finding::new(name.into(), outcome)
}
