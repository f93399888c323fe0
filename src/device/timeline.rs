//! The progress of a device through its work. Work is done in order, so one number says it.

use super::DeviceError;

/// A point in a device's work: behind everything encoded before it was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Mark(pub u64);

impl Mark {
    /// A point that every device has passed before it begins.
    pub const START: Mark = Mark(0);
}

/// A device's marks, which only grow (a timeline semaphore, or a shared event of Metal). A device says nothing of its own
/// if an operation is done when its call returns, as on the CPU.
pub trait Timeline {
    /// The point behind everything encoded so far.
    fn mark(&mut self) -> Mark {
        Mark::START
    }

    /// The last point passed. Everything encoded before it is done.
    fn passed(&mut self) -> Mark {
        Mark::START
    }

    /// Hands over what has been encoded before `mark`, and waits until the device has passed it. A device that cannot get
    /// there any more is an error.
    fn wait_for(&mut self, mark: Mark) -> Result<(), DeviceError> {
        let _ = mark;
        Ok(())
    }

    /// The caller waits for a disk now: the device may rest.
    fn rest(&mut self) {}
}

/// The CPU: an operation is done when its call returns.
#[derive(Debug, Clone, Copy, Default)]
pub struct Immediate;

impl Timeline for Immediate {}
