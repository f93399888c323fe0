//! Socket activation and notifications, for a process that launchd or systemd has started.

use std::{io, net::TcpListener, time::Duration};

/// Name of the socket in the launchd property list.
pub const SOCKET: &str = "Listener";

/// The listening sockets that the service manager has opened for this process. Empty if no service manager started the
/// process.
///
/// # Errors
/// An inherited descriptor is not a TCP socket.
pub fn inherited_listeners() -> io::Result<Vec<TcpListener>> {
    let mut passed = listenfd::ListenFd::from_env();
    let mut listeners = Vec::new();
    for index in 0..passed.len() {
        listeners.extend(passed.take_tcp_listener(index)?);
    }
    #[cfg(target_os = "macos")]
    listeners.extend(launchd());
    Ok(listeners)
}

/// The sockets that launchd has opened for this process. A host name with several addresses has one socket per address.
/// For example, `localhost` has a socket for `::1` and a socket for `127.0.0.1`.
#[cfg(target_os = "macos")]
fn launchd() -> Vec<TcpListener> {
    use std::{ffi::CString, os::fd::FromRawFd, ptr};

    unsafe extern "C" {
        fn launch_activate_socket(
            name: *const libc::c_char,
            fds: *mut *mut libc::c_int,
            count: *mut libc::size_t,
        ) -> libc::c_int;
    }
    let Ok(name) = CString::new(SOCKET) else { return Vec::new() };
    let mut fds = ptr::null_mut();
    let mut count = 0;
    // SAFETY: the name is a C string. The two out-pointers are valid and written only if 0 is returned.
    if unsafe { launch_activate_socket(name.as_ptr(), &mut fds, &mut count) } != 0 || fds.is_null() {
        return Vec::new();
    }
    // SAFETY: launchd returned `count` descriptors that this process owns, in memory that `free` accepts.
    unsafe {
        let listeners = (0..count).map(|index| TcpListener::from_raw_fd(*fds.add(index))).collect();
        libc::free(fds.cast());
        listeners
    }
}

/// Notifies systemd that the port is open, with a status text. Does nothing without systemd.
pub fn notify_ready(status: &str) {
    notify(&[sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status(status)]);
}

/// The interval at which to notify systemd's watchdog: a third of the watchdog's timeout. `None` if the watchdog is
/// disabled.
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
