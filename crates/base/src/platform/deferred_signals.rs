//! [`DeferredSignals`] delays the signals that end a process, so that the process can save its work before.

use std::{marker::PhantomData, mem::MaybeUninit, ptr};

/// Ctrl-C, `kill`, and the hangup of the terminal.
const END_SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// While this value exists, the signals that end a process wait in the threads that this thread starts, and in this
/// thread. After the value is dropped, a signal that has arrived ends the process.
pub struct DeferredSignals {
    /// The thread's signal mask before.
    previous: libc::sigset_t,
    /// A signal mask belongs to a thread, so the value must be dropped by the thread that created it.
    _not_send: PhantomData<*const ()>,
}

impl DeferredSignals {
    /// Does not defer signals that the process ignores or handles.
    pub fn begin() -> Self {
        let mut previous = MaybeUninit::uninit();
        // SAFETY: both pointers are valid. The system initialises the previous mask.
        let previous = unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, &end_signals(), previous.as_mut_ptr());
            previous.assume_init()
        };
        Self { previous, _not_send: PhantomData }
    }

    /// True if a signal that ends the process has arrived. Any thread that was started meanwhile may ask.
    pub fn has_arrived() -> bool {
        let mut pending = MaybeUninit::uninit();
        // SAFETY: the pointers are valid. The set is read only if the system has initialised it.
        unsafe {
            libc::sigpending(pending.as_mut_ptr()) == 0
                && END_SIGNALS.iter().any(|&signal| libc::sigismember(pending.as_ptr(), signal) == 1)
        }
    }

    /// Ends the process by the signal that has arrived. Returns if there is none.
    pub fn deliver() {
        // SAFETY: the set is initialised, and the previous mask is not requested.
        unsafe {
            libc::pthread_sigmask(libc::SIG_UNBLOCK, &end_signals(), ptr::null_mut());
        }
    }
}

impl Drop for DeferredSignals {
    fn drop(&mut self) {
        // SAFETY: `begin` has initialised the mask.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.previous, ptr::null_mut());
        }
    }
}

/// The end signals that have their default effect.
fn end_signals() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: `sigemptyset` initialises the set. The pointers are valid, and no action is changed.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in END_SIGNALS {
            let mut action = MaybeUninit::<libc::sigaction>::uninit();
            if libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) == 0
                && action.assume_init().sa_sigaction == libc::SIG_DFL
            {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
        }
        set.assume_init()
    }
}
