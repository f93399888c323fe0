//! Waiting for command buffers, and what becomes of the queue when one fails or none ends.

use super::{ATTEMPTS, Queue};
use crate::device::{Driver, Status};
use std::time::{Duration, Instant};

/// A wait spins for so long before it asks the system to be woken, and then looks again after so long.
const SPIN: Duration = Duration::from_millis(2);
const PARK: Duration = Duration::from_millis(100);
/// A shorter command buffer says nothing about the rate (seconds).
const TELLING: f64 = 1e-3;

impl<D: Driver> Queue<D> {
    /// Forgets command buffers that are over, the oldest first.
    pub(super) fn reap(&mut self) {
        while let Some(oldest) = self.committed.front() {
            match self.driver.status(&oldest.commands) {
                Status::Done(seconds) => {
                    if seconds >= TELLING && oldest.threads > 0.0 {
                        self.rate = (seconds / oldest.threads).max(self.rate / 2.0);
                    }
                }
                Status::Failed(why) => drop(self.failure.get_or_insert(why)),
                // Its own number can come from nobody else; a later number does not say that this one succeeded.
                Status::Pending if self.driver.signalled() == oldest.value => {}
                Status::Pending => return,
            }
            self.over = oldest.value;
            self.committed.pop_front();
        }
    }

    /// Waits until the event has `value`, a command buffer has failed, or none is left.
    pub(super) fn reach(&mut self, value: u64) {
        let mut last_change = Instant::now();
        let mut pending = self.committed.len();
        while self.driver.signalled() < value && self.failure.is_none() {
            self.reap();
            if self.committed.is_empty() || self.is_stuck(&mut pending, &mut last_change) {
                return;
            }
            self.rest(value, last_change);
        }
    }

    /// True if no command buffer has ended for too long: then the device is lost.
    fn is_stuck(&mut self, pending: &mut usize, last_change: &mut Instant) -> bool {
        if self.committed.len() < *pending {
            (*pending, *last_change) = (self.committed.len(), Instant::now());
        }
        if last_change.elapsed() > self.patience {
            let seconds = self.patience.as_secs_f64();
            self.failure.get_or_insert_with(|| format!("the GPU has ended nothing for {seconds} s"));
            self.lost = true;
        }
        self.lost
    }

    /// Work up to `value` was well done: what failed before no longer counts.
    pub(super) fn forgive(&mut self, value: u64) {
        if value > self.settled {
            (self.settled, self.failures) = (value, 0);
        }
    }

    /// Passes a moment of a wait for `value`.
    fn rest(&self, value: u64, since: Instant) {
        if since.elapsed() < SPIN {
            std::hint::spin_loop();
        } else {
            self.driver.park(value, PARK.min(self.patience));
        }
    }

    /// Hands over and waits until all is over. A failure stays to be reported.
    pub(super) fn settle(&mut self) {
        self.hand_over();
        let mut last_change = Instant::now();
        let mut pending = self.committed.len();
        loop {
            self.reap();
            match self.committed.is_empty() {
                true => break,
                false if self.is_stuck(&mut pending, &mut last_change) => return,
                false => self.rest(self.last, last_change),
            }
        }
        if self.failure.is_none() {
            return self.forgive(self.last);
        }
        self.failures += 1;
        self.fenced = false;
        // The new event has the last number already, which says of no work that it was well done.
        self.settled = self.last;
        self.lost |= self.failures >= ATTEMPTS || self.driver.renew(self.last).is_err();
    }
}
