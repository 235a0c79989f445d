//! Work inside a namespace.

use std::{os::fd::AsFd, panic, thread};

use super::{Namespace, current};
use crate::kernel::{
    error::{Doing, KernelError},
    sys,
};

impl Namespace {
    /// Does `work` in this namespace: in a thread of its own that has entered it, or in the calling one if that is in it
    /// already. Sockets that it opens and programs that it starts are of this namespace, and so is /proc/sys/net (looked
    /// up by the calling thread, `net_ctl_header_lookup`, net/sysctl_net.c). /proc/net and /proc/self/net are the
    /// process's first thread's and stay what they were: /proc/thread-self/net is right.
    ///
    /// # Panics
    /// As `work` does.
    ///
    /// # Errors
    /// [`KernelError::Io`] when the namespace cannot be entered (EPERM: CAP_SYS_ADMIN in the user namespace that owns
    /// it) or no thread started; `work` was not called then.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T, KernelError> {
        if current()? == self.id {
            return Ok(work());
        }
        let inside = || {
            sys::enter_network(self.as_fd()).doing(|| format!("enter {}", self.found))?;
            Ok(work())
        };
        thread::scope(|scope| {
            let thread = thread::Builder::new()
                .name(format!("netns {}", self.id))
                .spawn_scoped(scope, inside)
                .doing(|| "start a thread".into())?;
            thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::own;

    #[test]
    fn no_thread_for_the_own_one() {
        let here = thread::current().id();
        assert_eq!(own().unwrap().run(|| thread::current().id()).unwrap(), here);
    }
}
