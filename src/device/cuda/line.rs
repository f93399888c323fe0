//! The events behind command buffers: how far the card has come.

use super::told;
use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUevent, CUevent_flags, CUresult, CUstream},
};
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
};

/// A number for each command buffer that was handed over.
#[derive(Default)]
pub struct Line {
    /// Recorded behind command buffers that may still run, the oldest first.
    pending: RefCell<VecDeque<(u64, CUevent)>>,
    /// Events to record again.
    spare: RefCell<Vec<CUevent>>,
    /// The last number that was reached.
    value: Cell<u64>,
    failed: RefCell<Option<String>>,
}

impl Line {
    /// Puts a number behind all that the stream was given. The context is current.
    pub fn mark(&mut self, value: u64, stream: CUstream) {
        let event = match self.spare.get_mut().pop() {
            Some(event) => Ok(event),
            None => result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING),
        };
        // SAFETY: event and stream are this context's, and the event is not in use.
        match event.and_then(|event| unsafe { result::event::record(event, stream) }.map(|()| event)) {
            Ok(event) => self.pending.get_mut().push_back((value, event)),
            Err(error) => self.fail(error),
        }
    }

    /// Looks how far the card has come: the last number that was reached. The context is current.
    pub fn reached(&self) -> u64 {
        let mut pending = self.pending.borrow_mut();
        while let Some((value, event)) = pending.front().copied() {
            // SAFETY: the event is recorded and not destroyed.
            match unsafe { sys::cuEventQuery(event) } {
                CUresult::CUDA_SUCCESS => {
                    self.value.set(value);
                    self.spare.borrow_mut().push(event);
                    pending.pop_front();
                }
                CUresult::CUDA_ERROR_NOT_READY => break,
                error => {
                    self.fail(DriverError(error));
                    break;
                }
            }
        }
        self.value.get()
    }

    /// Nothing behind this is reached.
    pub fn fail(&self, error: DriverError) {
        self.failed.borrow_mut().get_or_insert_with(|| told(error).0);
    }

    /// The first failure: no number behind it will be reached.
    pub fn failed(&self) -> Option<String> {
        self.failed.borrow().clone()
    }

    /// Destroys all events. The context is current.
    pub fn clear(&mut self) {
        let pending = self.pending.get_mut().drain(..).map(|(_, event)| event);
        for event in pending.chain(self.spare.get_mut().drain(..)) {
            // SAFETY: it was made by this context and is destroyed once.
            let _ = unsafe { result::event::destroy(event) };
        }
    }
}
