//! [`EventTimeline`] tracks the progress of a stream with CUDA events.

use super::error::cuda_error;
use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUevent, CUevent_flags, CUresult, CUstream},
};
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
};

/// An ascending value, with one CUDA event per command buffer. Emulates Metal's shared event.
#[derive(Default)]
pub struct EventTimeline {
    /// Value and event of each command buffer that may still run, oldest first.
    pending: RefCell<VecDeque<(u64, CUevent)>>,
    /// Unused events, kept to be recorded again.
    spare: RefCell<Vec<CUevent>>,
    /// The last value that was signalled.
    value: Cell<u64>,
    failure: RefCell<Option<String>>,
}

impl EventTimeline {
    /// Signals `value` after all work submitted to the stream so far. The context must be current.
    pub fn signal(&mut self, value: u64, stream: CUstream) {
        let event = match self.spare.get_mut().pop() {
            Some(event) => Ok(event),
            None => result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING),
        };
        // SAFETY: the event and the stream belong to this context, and the event is not in use.
        match event.and_then(|event| unsafe { result::event::record(event, stream) }.map(|()| event)) {
            Ok(event) => self.pending.get_mut().push_back((value, event)),
            Err(error) => self.set_failure(error),
        }
    }

    /// Queries the events and returns the last value that was signalled. The context must be current.
    pub fn reached(&self) -> u64 {
        let mut pending = self.pending.borrow_mut();
        while let Some((value, event)) = pending.front().copied() {
            // SAFETY: the event was recorded and is not destroyed.
            match unsafe { sys::cuEventQuery(event) } {
                CUresult::CUDA_SUCCESS => {
                    self.value.set(value);
                    self.spare.borrow_mut().push(event);
                    pending.pop_front();
                }
                CUresult::CUDA_ERROR_NOT_READY => break,
                error => {
                    self.set_failure(DriverError(error));
                    break;
                }
            }
        }
        self.value.get()
    }

    /// True if every value was signalled. The context must be current.
    pub fn is_idle(&self) -> bool {
        self.reached();
        self.pending.borrow().is_empty()
    }

    /// Records the first failure and ignores later failures. Values after a failure are never signalled.
    pub fn set_failure(&self, error: DriverError) {
        self.failure.borrow_mut().get_or_insert_with(|| cuda_error(error).to_string());
    }

    /// The first failure.
    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Destroys all events. The context must be current.
    pub fn clear(&mut self) {
        let pending = self.pending.get_mut().drain(..).map(|(_, event)| event);
        for event in pending.chain(self.spare.get_mut().drain(..)) {
            // SAFETY: this context created the event, and it is destroyed once.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}
