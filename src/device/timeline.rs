//! The progress of a device. Work completes in order, so one number describes it.

use super::DeviceError;
use std::time::Duration;

/// A point in a device's work: it comes after everything encoded before it was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct SyncPoint(pub u64);

impl SyncPoint {
    /// A point that every device has completed from the start.
    pub const START: SyncPoint = SyncPoint(0);
}

/// A device's sync points, which only grow, like a timeline semaphore or Metal's shared event.
///
/// The defaults are those of a device that completes an operation before its call returns, such as the CPU.
pub trait Timeline {
    /// The point after everything encoded so far.
    fn sync_point(&mut self) -> SyncPoint {
        SyncPoint::START
    }

    /// The last completed point. Everything encoded before it is done.
    fn completed(&mut self) -> SyncPoint {
        SyncPoint::START
    }

    /// Submits what was encoded before `point` and waits until the device has completed it.
    ///
    /// # Errors
    /// The device cannot reach the point any more.
    fn wait_for(&mut self, point: SyncPoint) -> Result<(), DeviceError> {
        let _ = point;
        Ok(())
    }

    /// Called before the caller waits for a disk: threads that spin for work may sleep. Returns the interval at which the
    /// caller then calls [`Timeline::stay_awake`], if the device needs that.
    fn rest(&mut self) -> Option<Duration> {
        None
    }

    /// Called during a wait for a disk. A device that lowers its clock when idle submits a little work.
    fn stay_awake(&mut self) {}
}

/// The CPU's timeline: an operation is done when its call returns.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuTimeline;

impl Timeline for CpuTimeline {}
