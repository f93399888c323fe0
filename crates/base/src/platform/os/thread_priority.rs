//! Sets the priority of a thread.

/// Gives the calling thread the lowest priority for CPU and disk. If the system refuses, the priority does not change.
pub fn background_thread() {
    #[cfg(target_os = "linux")]
    {
        const WHO_PROCESS: libc::c_int = 1;
        /// I/O class 3 (idle), which gets disk time only when no other process needs the disk.
        const IDLE: libc::c_int = 3 << 13;
        // SAFETY: system calls without pointers on the calling thread. The results are ignored.
        unsafe {
            // On Linux, 0 is the calling thread. glibc 2.28, for which releases are linked, has no `gettid`.
            libc::setpriority(libc::PRIO_PROCESS, 0, 19);
            libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, IDLE);
        }
    }
    #[cfg(target_os = "macos")]
    // SAFETY: a system call without pointers on the calling thread. The result is ignored.
    unsafe {
        libc::pthread_set_qos_class_self_np(libc::qos_class_t::QOS_CLASS_BACKGROUND, 0);
    }
}

/// Marks the calling thread as interactive. macOS then runs the thread on performance cores, even if the process was
/// started by a background service.
pub fn interactive_thread() {
    #[cfg(target_os = "macos")]
    // SAFETY: a system call without pointers on the calling thread. The result is ignored.
    unsafe {
        libc::pthread_set_qos_class_self_np(libc::qos_class_t::QOS_CLASS_USER_INITIATED, 0);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn only_the_calling_thread_is_slowed() {
        // SAFETY: a system call without pointers.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        let background = thread::spawn(move || {
            background_thread();
            nice()
        });
        assert_eq!(background.join().unwrap(), 19);
        assert_eq!(nice(), before);
    }
}
