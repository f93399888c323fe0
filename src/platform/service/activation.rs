//! The other end: a process that may have been started by launchd or systemd.

use std::{io, net::TcpListener, time::Duration};

/// The name of the socket in the launchd agent's description.
pub const SOCKET: &str = "Listener";

/// The port that the service manager has opened for this process, if it has.
///
/// # Errors
/// A socket was promised that is none.
pub fn inherited() -> io::Result<Option<TcpListener>> {
    if let Some(listener) = listenfd::ListenFd::from_env().take_tcp_listener(0)? {
        return Ok(Some(listener));
    }
    #[cfg(target_os = "macos")]
    return Ok(launchd());
    #[cfg(not(target_os = "macos"))]
    Ok(None)
}

/// launchd's socket; `None` for a process that launchd has not started with one.
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
    // SAFETY: the name is a C string, and the two places are written only if 0 is returned.
    if unsafe { launch_activate_socket(name.as_ptr(), &mut fds, &mut count) } != 0 || fds.is_null() || count == 0 {
        return None;
    }
    // SAFETY: launchd hands over `count` descriptors that are ours from now on, in memory that `free` takes.
    unsafe {
        let first = *fds;
        libc::free(fds.cast());
        Some(TcpListener::from_raw_fd(first))
    }
}

/// Tells systemd that the port answers, and in words what is going on. Elsewhere nobody is told.
pub fn ready(status: &str) {
    tell(&[sd_notify::NotifyState::Ready, sd_notify::NotifyState::Status(status)]);
}

/// The interval at which systemd wants to hear that this process is well, if it does.
pub fn watched() -> Option<Duration> {
    sd_notify::watchdog_enabled().map(|within| within / 3)
}

/// This process is well.
pub fn alive() {
    tell(&[sd_notify::NotifyState::Watchdog]);
}

fn tell(what: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(what) {
        tracing::debug!(%error, "the service manager was not reached");
    }
}
