//! [`KeepAwake`] prevents idle sleep while this machine answers a request, even if the client runs on another machine.

use parking_lot::Mutex;

/// Number of live guards, and the id of the system's power assertion. The id is `None` if there is no power assertion.
static HELD: Mutex<(usize, Option<u32>)> = Mutex::new((0, None));

/// Prevents idle sleep (macOS) until the last guard is dropped.
#[derive(Debug)]
pub struct KeepAwake(());

impl KeepAwake {
    pub fn begin() -> Self {
        let (count, assertion) = &mut *HELD.lock();
        *count += 1;
        if *count == 1 {
            *assertion = sys::prevent_sleep();
        }
        Self(())
    }
}

impl Drop for KeepAwake {
    fn drop(&mut self) {
        let (count, assertion) = &mut *HELD.lock();
        *count -= 1;
        if *count == 0
            && let Some(id) = assertion.take()
        {
            sys::allow_sleep(id);
        }
    }
}

#[cfg(target_os = "macos")]
mod sys {
    use objc2::rc::Retained;
    use objc2_foundation::NSString;
    use std::ffi::c_void;

    #[link(name = "IOKit", kind = "framework")]
    unsafe extern "C" {
        fn IOPMAssertionCreateWithName(kind: *const c_void, level: u32, name: *const c_void, id: *mut u32) -> i32;
        fn IOPMAssertionRelease(id: u32) -> i32;
    }

    /// `kIOPMAssertionLevelOn`.
    const ON: u32 = 255;

    /// Creates a power assertion, which `pmset -g assertions` lists. Returns `None` if the system refuses. The machine
    /// may then fall asleep.
    pub(super) fn prevent_sleep() -> Option<u32> {
        let [kind, name] = ["PreventUserIdleSystemSleep", "Moestro answers a request"].map(NSString::from_str);
        let [kind_text, name_text] = [&kind, &name].map(|text| Retained::as_ptr(text).cast::<c_void>());
        let mut id = 0;
        // SAFETY: NSString and CFString are the same type at run time, and both strings live until the call returns.
        let code = unsafe { IOPMAssertionCreateWithName(kind_text, ON, name_text, &mut id) };
        (code == 0).then_some(id)
    }

    pub(super) fn allow_sleep(id: u32) {
        // SAFETY: `prevent_sleep` created the assertion, and it is released once.
        unsafe { IOPMAssertionRelease(id) };
    }
}

#[cfg(not(target_os = "macos"))]
mod sys {
    /// Does nothing, because systems other than macOS normally do not sleep while a server runs.
    pub(super) fn prevent_sleep() -> Option<u32> {
        None
    }

    pub(super) fn allow_sleep(_: u32) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_stays_awake_while_a_guard_lives() {
        let first = KeepAwake::begin();
        let second = KeepAwake::begin();
        drop(first);
        assert!(HELD.lock().0 > 0);
        drop(second);
    }
}
