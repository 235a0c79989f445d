//! Finding all network namespaces of a host with many processes, beside reading the same links by `readlink`.

mod support;

use std::{
    process::{Child, Command, Stdio},
    time::Instant,
};

use smc_policy::kernel::namespace;

use support::{Options, Result, median};

/// Processes that sleep, until this goes.
struct Crowd(Vec<Child>);

impl Crowd {
    /// `own`: how many of them are in a network namespace of their own.
    fn start(processes: usize, own: usize) -> Result<Self> {
        let mut crowd = Self(Vec::new());
        for number in 0..processes {
            let (program, arguments): (_, &[_]) =
                if number < own { ("unshare", &["--net", "sleep", "600"]) } else { ("sleep", &["600"]) };
            crowd.0.push(Command::new(program).args(arguments).stdin(Stdio::null()).spawn()?);
        }
        Ok(crowd)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // An error means that it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn main() -> Result<()> {
    let Some(options) = Options::read("namespaces") else { return Ok(()) };
    let processes = if options.quick { 100 } else { 2_000 };
    for own in [0, processes / 10] {
        let row = format!("{processes} processes, {own} in namespaces of their own");
        if !options.wants(&row) {
            continue;
        }
        let crowd = Crowd::start(processes, own)?;
        // unshare(1) needs its moment.
        while namespace::all()?.0.len() <= own {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let times = measure(|| namespace::all().map(drop))?;
        let links: Vec<_> = crowd.0.iter().map(|child| format!("/proc/{}/ns/net", child.id())).collect();
        let peer =
            measure(|| Command::new("readlink").args(&links).stdout(Stdio::null()).status().map(drop))?;
        println!("{row}: {times:.1} ms (readlink /proc/PID/ns/net ...: {peer:.1} ms)");
    }
    Ok(())
}

/// Milliseconds, median of 11.
fn measure<E: std::error::Error + 'static>(
    mut work: impl FnMut() -> std::result::Result<(), E>,
) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..11 {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(median(times))
}
