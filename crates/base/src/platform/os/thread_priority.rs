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
            libc::setpriority(libc::PRIO_PROCESS, libc::gettid() as libc::id_t, 19);
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
