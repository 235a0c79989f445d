//! What a program costs: the only `unsafe` of the benchmarks.

use std::{
    io::{self, Read as _},
    mem,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// What a program that has ended cost.
#[derive(Clone, Debug)]
pub struct Usage {
    /// CPU time, its own and the kernel's on its behalf.
    pub cpu: Duration,
    /// From start to end.
    pub wall: Duration,
    /// Most memory it had at a time, MiB; not what the kernel holds for it.
    pub mib: f64,
    /// It ended with exit code 0.
    pub success: bool,
    /// What it printed.
    pub stdout: String,
}

fn duration(time: libc::timeval) -> Duration {
    Duration::from_secs(time.tv_sec.unsigned_abs()) + Duration::from_micros(time.tv_usec.unsigned_abs())
}

/// Runs a program to its end.
pub fn run(command: &mut Command) -> io::Result<Usage> {
    let start = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut stdout = String::new();
    if let Some(pipe) = &mut child.stdout {
        pipe.read_to_string(&mut stdout)?;
    }
    let mut status = 0;
    // SAFETY: plain integers.
    let mut usage: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: both places are valid for the answers. The child has not been waited for: its id is still its own, and
    // `child` is not used any more.
    let waited = unsafe { libc::wait4(child.id() as libc::pid_t, &mut status, 0, &mut usage) };
    if waited < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Usage {
        cpu: duration(usage.ru_utime) + duration(usage.ru_stime),
        wall: start.elapsed(),
        mib: usage.ru_maxrss as f64 / 1024.0,
        success: libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
        stdout,
    })
}

/// CPU time of this process so far.
pub fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a valid place for the answer; the clock exists on every Linux, a failure leaves zero.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
