//! [`DownloadInterrupt`] ends a download early, with its progress saved.

use moestro_base::error::StoreError;
use parking_lot::{Condvar, Mutex};
use std::{mem, time::Duration};

/// Maximum time that an interruption waits for the disk.
const SAVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A request to end the download of a hub. At most one is running.
#[derive(Default)]
pub struct DownloadInterrupt {
    state: Mutex<InterruptState>,
    changed: Condvar,
}

#[derive(Default)]
struct InterruptState {
    is_requested: bool,
    /// True if a download is running and its progress is not saved.
    is_unsaved: bool,
}

/// A running download. Dropping this value means that the progress is saved.
pub struct RunningDownload<'a>(&'a DownloadInterrupt);

impl DownloadInterrupt {
    /// Requests the end, and waits until the progress is saved. Connections may still wait for bytes. Returns false if
    /// the end was requested before.
    pub fn request(&self) -> bool {
        let mut state = self.state.lock();
        let is_new = !mem::replace(&mut state.is_requested, true);
        self.changed.wait_while_for(&mut state, |state| state.is_unsaved, SAVE_TIMEOUT);
        is_new
    }

    pub fn is_requested(&self) -> bool {
        self.state.lock().is_requested
    }

    /// Registers a running download.
    ///
    /// # Errors
    /// The end was requested.
    pub fn start(&self) -> Result<RunningDownload<'_>, StoreError> {
        let mut state = self.state.lock();
        if state.is_requested {
            return Err(StoreError::Other("the download was interrupted".into()));
        }
        state.is_unsaved = true;
        Ok(RunningDownload(self))
    }

    /// Reports that the progress of the download is saved.
    pub fn confirm_saved(&self) {
        self.state.lock().is_unsaved = false;
        self.changed.notify_all();
    }
}

impl Drop for RunningDownload<'_> {
    fn drop(&mut self) {
        self.0.confirm_saved();
    }
}
