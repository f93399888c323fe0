//! The progress of a device. Work completes in order, so one number describes the progress.

use super::DeviceError;
use std::time::Duration;

/// A point in the order of a device's work. The point is complete when all work encoded before [`Timeline::sync_point`]
/// is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct SyncPoint(pub u64);

impl SyncPoint {
    /// The point before all work. Every device has completed it.
    pub const START: SyncPoint = SyncPoint(0);
}

/// Tracks a device's progress with ascending sync points, like a timeline semaphore or Metal's shared event.
///
/// The default methods are for a device that completes every operation before the call returns, such as the CPU.
pub trait Timeline {
    /// The point after all work encoded so far.
    fn sync_point(&mut self) -> SyncPoint {
        SyncPoint::START
    }

    /// The last completed point.
    fn completed(&mut self) -> SyncPoint {
        SyncPoint::START
    }

    /// Submits the work encoded before `point` and waits until the device has completed that work.
    ///
    /// # Errors
    /// The work failed, so the device will never complete `point`.
    fn wait_for(&mut self, _point: SyncPoint) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Called before the caller waits for a disk read. Lets worker threads sleep instead of spinning for work. If the
    /// device needs calls of [`Timeline::stay_awake`] during the wait, returns the interval of these calls.
    fn begin_disk_wait(&mut self) -> Option<Duration> {
        None
    }

    /// Called repeatedly during a wait for a disk read. A device that lowers its clock rate when idle submits a little
    /// work to keep the rate high.
    fn stay_awake(&mut self) {}
}

/// The CPU's timeline: every operation is complete when its call returns.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuTimeline;

impl Timeline for CpuTimeline {}
