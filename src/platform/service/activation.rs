//! Socket activation and notifications: the side of a process that launchd or systemd started.

use std::{io, net::TcpListener, time::Duration};

/// Name of the socket in the launchd property list.
pub const SOCKET: &str = "Listener";

/// The listening socket that the service manager opened for this process, if any.
///
/// # Errors
/// The inherited descriptor is not a TCP socket.
pub fn inherited_listener() -> io::Result<Option<TcpListener>> {
    if let Some(listener) = listenfd::ListenFd::from_env().take_tcp_listener(0)? {
        return Ok(Some(listener));
    }
    #[cfg(target_os = "macos")]
    return Ok(launchd());
    #[cfg(not(target_os = "macos"))]
    Ok(None)
}

/// The socket from launchd; `None` if launchd did not start this process with one.
#[cfg(target_os = "macos")]
fn launchd() -> Option<TcpListener> {
    use std::{ffi::CString, os::fd::FromRawFd, ptr};

    unsafe extern "C" {
        fn launch_activate_socket(
            name: *const libc::c_char,
            fds: *mut *mut libc::c_int,
            count: *mut libc::size_t,
        ) -> libc::c_int;
    }
    let name = CString::new(SOCKET).ok()?;
    let (mut fds, mut count) = (ptr::null_mut(), 0);
    // SAFETY: the name is a C string. The two out-pointers are valid and written only if 0 is returned.
    if unsafe { launch_activate_socket(name.as_ptr(), &mut fds, &mut count) } != 0 || fds.is_null() || count == 0 {
        return None;
    }
    // SAFETY: launchd returned `count` descriptors that this process owns, in memory that `free` accepts.
    unsafe {
        let first = *fds;
        libc::free(fds.cast());
        Some(TcpListener::from_raw_fd(first))
    }
}

/// Notifies systemd that the port is open, with a status text. Does nothing without systemd.
pub fn notify_ready(status: &str) {
    notify(&[sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status(status)]);
}

/// The interval at which systemd's watchdog expects notifications, if it is enabled.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|within| within / 3)
}

/// Notifies systemd's watchdog.
pub fn notify_watchdog() {
    notify(&[sd_notify::NotifyState::Watchdog]);
}

fn notify(states: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "cannot notify the service manager");
    }
}
