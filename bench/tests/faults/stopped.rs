//! Stops one thread of a process with ptrace while the others run on.

use std::io;
use std::ptr::null_mut;

use nix::unistd::Pid;

/// A thread that is stopped until this is dropped, or until the test ends.
pub(crate) struct StoppedThread(Pid);

impl StoppedThread {
    pub(crate) fn new(thread: Pid) -> Self {
        for request in [libc::PTRACE_SEIZE, libc::PTRACE_INTERRUPT] {
            request_of(request, thread).unwrap();
        }
        let mut status = 0;
        // SAFETY: the kernel writes one int and waits for a thread that was just stopped.
        let waited = unsafe { libc::waitpid(thread.as_raw(), &raw mut status, libc::__WALL) };
        assert!(waited == thread.as_raw() && libc::WIFSTOPPED(status), "{status:#x}: {}", io::Error::last_os_error());
        Self(thread)
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        // The thread may have ended with its process.
        let _ = request_of(libc::PTRACE_DETACH, self.0);
    }
}

fn request_of(request: libc::c_uint, thread: Pid) -> io::Result<()> {
    let none = null_mut::<libc::c_void>();
    // SAFETY: these requests pass no memory.
    let result = unsafe { libc::ptrace(request, thread.as_raw(), none, none) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
