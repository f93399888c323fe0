//! Keeps a GPU's buffers resident in memory while the GPU is idle.
//!
//! macOS revokes the residency of buffers about a second after the last GPU work. Making tens of gigabytes resident
//! again delays the next token. Therefore a thread renews residency for some minutes after the last use.

use parking_lot::{Condvar, Mutex};
use std::{
    io,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// A thread that repeats an action at a fixed interval, until some time after the last [`Heartbeat::mark_used`].
pub struct Heartbeat {
    state: Arc<(Mutex<HeartbeatState>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct HeartbeatState {
    last_use: Option<Instant>,
    is_sleeping: bool,
    is_closing: bool,
}

impl Heartbeat {
    /// Calls `beat` every `interval` until `keep` after the last [`Heartbeat::mark_used`].
    pub fn new(interval: Duration, keep: Duration, beat: impl Fn() + Send + 'static) -> io::Result<Self> {
        let state = Arc::<(Mutex<HeartbeatState>, Condvar)>::default();
        let shared = state.clone();
        let thread = std::thread::Builder::new().name("residency".into()).spawn(move || {
            let (state, wake) = &*shared;
            let mut state = state.lock();
            while !state.is_closing {
                if state.last_use.is_some_and(|last| last.elapsed() < keep) {
                    parking_lot::MutexGuard::unlocked(&mut state, &beat);
                    if !state.is_closing {
                        wake.wait_for(&mut state, interval);
                    }
                } else {
                    state.is_sleeping = true;
                    wake.wait(&mut state);
                    state.is_sleeping = false;
                }
            }
        })?;
        Ok(Self { state, thread: Some(thread) })
    }

    /// Records a use of the device. Wakes the thread if the thread sleeps.
    pub fn mark_used(&self) {
        let (state, wake) = &*self.state;
        let mut state = state.lock();
        state.last_use = Some(Instant::now());
        if state.is_sleeping {
            wake.notify_one();
        }
    }
}

impl Drop for Heartbeat {
    /// Waits for an action in progress, since the action uses the device.
    fn drop(&mut self) {
        let (state, wake) = &*self.state;
        state.lock().is_closing = true;
        wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Timeout that turns a hang into a test failure.
    const LIMIT: Duration = Duration::from_secs(60);

    fn wait_until_sleeping(heartbeat: &Heartbeat) {
        let begin = Instant::now();
        while !heartbeat.state.0.lock().is_sleeping {
            assert!(begin.elapsed() < LIMIT, "the thread never sleeps");
            std::thread::yield_now();
        }
    }

    #[test]
    fn heartbeat_continues_after_last_use() {
        let (beat, beats) = mpsc::channel();
        let beat = move || beat.send(()).unwrap_or(());
        let heartbeat = Heartbeat::new(Duration::from_millis(1), Duration::from_secs(1), beat).unwrap();
        wait_until_sleeping(&heartbeat);
        assert!(beats.try_recv().is_err(), "nothing was used yet");
        for _ in 0..2 {
            heartbeat.mark_used();
            beats.recv_timeout(LIMIT).expect("a beat at the use");
            beats.recv_timeout(LIMIT).expect("a beat while idle");
            wait_until_sleeping(&heartbeat);
            while beats.try_recv().is_ok() {}
        }
    }
}
