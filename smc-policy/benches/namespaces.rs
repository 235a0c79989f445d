//! Finding all network namespaces of a host with many processes, beside reading the same links by `readlink`.

mod support;

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use smc_policy::kernel::namespace;

use support::{
    Options, Result, median,
    usage::{self, cpu_time},
};

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
    println!(
        "CPU time of one walk, ms: the first after the processes were started, the median of 11, and of readlink(1)"
    );
    for own in [0, processes / 10] {
        let row = format!("{processes} processes, {own} in namespaces of their own");
        if !options.wants(&row) {
            continue;
        }
        let crowd = Crowd::start(processes, own)?;
        // unshare(1) needs its moment, which must not be waited for by a walk.
        thread::sleep(Duration::from_secs(if options.quick { 1 } else { 5 }));
        let walk = || -> Result<f64> {
            let start = cpu_time();
            let (found, _) = namespace::all()?;
            let time = cpu_time().saturating_sub(start);
            if found.len() <= own {
                return Err(format!("{row}: only {} were found", found.len()).into());
            }
            Ok(time.as_secs_f64() * 1e3)
        };
        let first = walk()?;
        let again = (0..11).map(|_| walk()).collect::<Result<Vec<_>>>()?;
        let links = crowd.0.iter().map(|child| format!("/proc/{}/ns/net", child.id()));
        let peer = usage::run(Command::new("readlink").args(links))?;
        println!("{row}: {first:.1}, {:.1}, {:.1}", median(again), peer.cpu.as_secs_f64() * 1e3);
    }
    Ok(())
}
