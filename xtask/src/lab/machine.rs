//! One emulated machine: started, watched, ended.

use std::{
    collections::BTreeMap,
    fs,
    io::Read as _,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    console::{self, Channel},
    image,
    kernel::Kernel,
};
use crate::{
    error::{Error, Result},
    exec, files,
    packages::Need,
    shell::quote,
};

/// Where the job's own files are in the machine, and its working directory.
pub(crate) const JOB_DIR: &str = "/lab/job";
/// Files that the job leaves here come back in [`Outcome::files`].
pub(crate) const RESULTS_DIR: &str = "/run/lab/results";

/// What to run and with what.
#[derive(Debug, Clone, Default)]
pub(crate) struct Job {
    /// Program and arguments, as seen in the machine.
    pub(crate) command: Vec<String>,
    /// Environment variables on top of the machine's own.
    pub(crate) environment: BTreeMap<String, String>,
    /// Host files (executables with their libraries) and their places in the machine.
    pub(crate) files: Vec<(PathBuf, String)>,
    /// Host directories and their places in the machine.
    pub(crate) trees: Vec<(PathBuf, String)>,
}

/// The wire between two machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    /// The first machine: waits for the other on this TCP port of the host.
    Listen(u16),
    /// The second machine: connects to it.
    Connect(u16),
}

/// A machine to be run.
#[derive(Debug, Clone)]
pub(crate) struct Machine<'a> {
    /// What boots.
    pub(crate) kernel: &'a Kernel,
    /// Memory in MiB.
    pub(crate) memory: u32,
    /// From start to end; then the machine is killed.
    pub(crate) time_limit: Duration,
    /// Network interface, if any.
    pub(crate) wire: Option<Wire>,
    /// What runs in it.
    pub(crate) job: Job,
}

/// How a run ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// The job's exit code.
    pub(crate) exit: u8,
    /// What the job left in its results folder.
    pub(crate) files: BTreeMap<String, Vec<u8>>,
    /// The kernel's complaints about itself.
    pub(crate) complaints: Vec<String>,
    /// Wall-clock time from start to end.
    pub(crate) took: Duration,
}

impl Machine<'_> {
    /// As [`Self::run_once`], but a kernel that panics while it boots is booted again, twice at most: under emulation a
    /// stock kernel does that now and then, always at another place.
    ///
    /// # Errors
    /// As [`Self::run_once`].
    pub(crate) fn run(&self, stop: &AtomicBool, output: &mut dyn FnMut(&[u8])) -> Result<Outcome> {
        again_if_it_may_pass(|| self.run_once(stop, output))
    }

    /// Boots, runs the job, ends. `output` gets the job's output as it comes. `stop` ends the machine early, which is
    /// reported as exit code 0: the other machine's job is over and this one only served it.
    ///
    /// # Errors
    /// The machine did not get as far as the job, ended without an exit code, or ran out of time.
    fn run_once(&self, stop: &AtomicBool, output: &mut dyn FnMut(&[u8])) -> Result<Outcome> {
        let work = WorkDir::new()?;
        self.write_image(&work.0.join("initrd"))?;
        let log_path = work.0.join("console.log");
        let began = Instant::now();
        let mut command = self.qemu(&work.0, &log_path)?;
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| exec::cannot_start(&command, &e))?;

        let (channel, ended) = watch(&mut child, self.time_limit, stop, output)?;
        let log = String::from_utf8_lossy(&fs::read(&log_path).unwrap_or_default()).into_owned();
        let complaints: Vec<String> = console::complaints(&log).into_iter().map(str::to_owned).collect();
        let took = began.elapsed();
        let failed = |what: String| {
            let name = &self.kernel.row.name;
            let complaint = complaints.first().map(|line| format!(" ({line})")).unwrap_or_default();
            Error::new(format!(
                "{name}: {what}{complaint}; its console ends with:\n{}",
                console::tail(&log, 25)
            ))
        };
        if let Some(trouble) = &channel.trouble {
            return Err(failed(trouble.clone()));
        }
        match (ended, channel.exit) {
            (Ended::Stopped, _) => Ok(Outcome { exit: 0, files: channel.files, complaints, took }),
            (Ended::OutOfTime, _) => {
                let at = if channel.started { "the job ran" } else { "it was still booting" };
                Err(failed(format!("no end after {} s ({at})", self.time_limit.as_secs())))
            }
            // isa-debug-exit: (value << 1) | 1. Anything else is a reset or qemu's own error.
            (Ended::Exited(Some(status), _), Some(exit)) if status == i32::from(exit & 0x7f) << 1 | 1 => {
                Ok(Outcome { exit, files: channel.files, complaints, took })
            }
            (Ended::Exited(status, message), _) => {
                let status =
                    status.map_or_else(|| "a signal".to_owned(), |status| format!("status {status}"));
                let said = message.trim().lines().next().map(|line| format!(": {line}")).unwrap_or_default();
                let error = failed(format!("ended with {status} and no exit code of the job{said}"));
                let panicked = log.contains("Kernel panic - not syncing");
                Err(if panicked && !channel.started { error.that_may_pass() } else { error })
            }
        }
    }

    fn write_image(&self, to: &Path) -> Result<()> {
        let mut tree = image::base(self.kernel)?;
        tree.text("lab/settings", self.settings(), 0o644);
        let export = |(name, value): (&String, &String)| format!("export {name}={}\n", quote(value));
        tree.text("lab/environment", self.job.environment.iter().map(export).collect::<String>(), 0o644);
        let words: Vec<String> = self.job.command.iter().map(|word| quote(word)).collect();
        tree.text("lab/command", format!("exec {}\n", words.join(" ")), 0o644);
        for (from, to) in &self.job.files {
            image::place(&mut tree, to, from)?;
        }
        for (from, to) in &self.job.trees {
            tree.host_tree(to, from)?;
        }
        tree.write(to)
    }

    fn settings(&self) -> String {
        let mut modules = self.kernel.row.load.clone();
        let [v4, v6] = match self.wire {
            None => ["", ""],
            Some(Wire::Listen(_)) => ["10.99.0.1/24", "fd00:99::1/64"],
            Some(Wire::Connect(_)) => ["10.99.0.2/24", "fd00:99::2/64"],
        };
        modules.dedup();
        format!("LAB_MODULES={}\nLAB_ADDRESS={v4}\nLAB_ADDRESS6={v6}\n", quote(&modules.join(" ")))
    }

    fn qemu(&self, work: &Path, log: &Path) -> Result<Command> {
        let mut command = Command::new(Need::find("qemu-system-x86_64")?);
        // Software emulation always: the same everywhere, and hardware virtualisation may be missing or broken.
        command.args(["-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max", "-smp", "2"]);
        command.args([
            "-m",
            &format!("{}M", self.memory),
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
        ]);
        command.args(["-no-reboot", "-monitor", "none"]);
        command.args(["-device", "isa-debug-exit,iobase=0xf4,iosize=1"]);
        command.arg("-serial").arg(format!("file:{}", log.display())).args(["-serial", "stdio"]);
        command.arg("-kernel").arg(self.kernel.image()).arg("-initrd").arg(work.join("initrd"));
        // Warnings to the console (they fail the run), but no watchdogs: an emulator that gets no processor time for
        // a while looks like a stuck kernel to them.
        command.args([
            "-append",
            "console=ttyS0 loglevel=5 panic=-1 oops=panic mitigations=off nokaslr nowatchdog \
             rcupdate.rcu_cpu_stall_suppress=1 tsc=reliable",
        ]);
        if let Some(wire) = self.wire {
            let (end, mac) = match wire {
                Wire::Listen(port) => (format!("listen=127.0.0.1:{port}"), "52:54:00:99:00:01"),
                Wire::Connect(port) => (format!("connect=127.0.0.1:{port}"), "52:54:00:99:00:02"),
            };
            command.args(["-netdev", &format!("socket,id=wire,{end}")]);
            command.args(["-device", &format!("virtio-net-pci,netdev=wire,mac={mac},romfile=")]);
        }
        Ok(command)
    }
}

/// How the emulator's process ended.
enum Ended {
    /// By itself, with this status and this on standard error.
    Exited(Option<i32>, String),
    /// Killed because the time was over.
    OutOfTime,
    /// Killed because nobody needs it any more.
    Stopped,
}

/// Reads the job's channel and kills the emulator when it must end; never leaves one behind.
fn watch(
    child: &mut Child,
    limit: Duration,
    stop: &AtomicBool,
    output: &mut dyn FnMut(&[u8]),
) -> Result<(Channel, Ended)> {
    let began = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let stdout = child.stdout.take();
    let reader = thread::spawn(move || {
        let Some(mut stdout) = stdout else { return };
        let mut buffer = [0; 4096];
        while let Ok(read) = stdout.read(&mut buffer) {
            if read == 0 || sender.send(buffer[..read].to_vec()).is_err() {
                break;
            }
        }
    });
    let mut channel = Channel::default();
    let ended = loop {
        match receiver.recv_timeout(Duration::from_millis(100)) {
            Ok(bytes) => {
                let text = channel.take(&bytes);
                if !text.is_empty() {
                    output(&text);
                }
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let status = child.wait().map_err(|e| Error::new(format!("qemu: {e}")))?;
                let mut message = String::new();
                if let Some(mut stderr) = child.stderr.take() {
                    let _ = stderr.read_to_string(&mut message);
                }
                break Ended::Exited(status.code(), message);
            }
        }
        let over = if stop.load(Ordering::Relaxed) {
            Ended::Stopped
        } else if began.elapsed() > limit {
            Ended::OutOfTime
        } else {
            continue;
        };
        let _ = child.kill();
        let _ = child.wait();
        break over;
    };
    let _ = reader.join();
    Ok((channel, ended))
}

/// A folder for one run, removed afterwards.
struct WorkDir(PathBuf);

impl WorkDir {
    fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let parent = crate::paths::workspace().join("target/lab");
        files::create_dir(&parent)?;
        // What runs left behind that were killed.
        for entry in fs::read_dir(&parent).into_iter().flatten().flatten() {
            if owner(&entry.file_name().to_string_lossy()).is_some_and(|owner| !owner.exists()) {
                let _ = files::remove_tree(&entry.path());
            }
        }
        let dir =
            parent.join(format!("run-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        files::create_dir(&dir)?;
        Ok(Self(dir))
    }
}

/// The process that made a folder of this name, as a path that exists while it runs.
fn owner(name: &str) -> Option<PathBuf> {
    let (id, _) = name.strip_prefix("run-")?.split_once('-')?;
    id.parse::<u32>().ok().map(|id| PathBuf::from(format!("/proc/{id}")))
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        let _ = files::remove_tree(&self.0);
    }
}

/// Does it again, twice at most, after a failure that may pass; says so.
///
/// # Errors
/// Of the last time.
pub(crate) fn again_if_it_may_pass<T>(mut work: impl FnMut() -> Result<T>) -> Result<T> {
    for _ in 0..2 {
        match work() {
            Err(error) if error.may_pass() => println!("{error}\nonce more"),
            other => return other,
        }
    }
    work()
}

/// When two machines are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// The first one's end is the end of both: a second one that is still running then is stopped.
    First,
    /// Each runs to its own end, unless the other fails.
    Both,
}

/// Runs two machines joined by a wire. Returns both outcomes.
pub(crate) fn pair(
    first: Machine<'_>,
    second: Machine<'_>,
    until: Until,
    output: &mut (dyn FnMut(usize, &[u8]) + Send),
) -> Result<(Outcome, Outcome)> {
    let port = free_port()?;
    let first = Machine { wire: Some(Wire::Listen(port)), ..first };
    let second = Machine { wire: Some(Wire::Connect(port)), ..second };
    let output = std::sync::Mutex::new(output);
    let print = |machine: usize, bytes: &[u8]| {
        if let Ok(mut output) = output.lock() {
            output(machine, bytes);
        }
    };
    let (over, useless) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let first_run = scope.spawn(|| {
            let outcome = first.run_once(&useless, &mut |bytes| print(0, bytes));
            over.store(until == Until::First || outcome.is_err(), Ordering::Relaxed);
            outcome
        });
        let second_run = scope.spawn(|| {
            let outcome = wait_until_listening(port, &over)
                .and_then(|()| second.run_once(&over, &mut |bytes| print(1, bytes)));
            // Without its peer the first machine would only run out of time.
            useless.store(outcome.is_err(), Ordering::Relaxed);
            outcome
        });
        let crashed = |_| Error::new("a thread of the lab panicked");
        let first = first_run.join().map_err(crashed)?;
        let second = second_run.join().map_err(crashed)?;
        // The first one's error says more, unless it was stopped.
        first.and_then(|first| second.map(|second| (first, second)))
    })
}

fn free_port() -> Result<u16> {
    let unavailable = |e: std::io::Error| Error::new(format!("no free TCP port on 127.0.0.1: {e}"));
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).map_err(unavailable)?;
    listener.local_addr().map(|address| address.port()).map_err(unavailable)
}

/// Waits for the first machine's emulator. Asking the kernel's table instead of connecting: it takes one connection.
fn wait_until_listening(port: u16, over: &AtomicBool) -> Result<()> {
    // 0100007F is 127.0.0.1, 0A is LISTEN (include/net/tcp_states.h).
    let listening = format!("0100007F:{port:04X} 00000000:0000 0A");
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(30) && !over.load(Ordering::Relaxed) {
        if files::read_text(Path::new("/proc/net/tcp"))?.contains(&listening) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(20));
    }
    Err(Error::new("the first machine did not start"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_pass_is_tried_again() {
        let tries = |may_pass: bool, good_at: u32| {
            let mut count = 0;
            let result = again_if_it_may_pass(|| {
                count += 1;
                let error = Error::new("panicked");
                if count == good_at {
                    Ok(())
                } else {
                    Err(if may_pass { error.that_may_pass() } else { error })
                }
            });
            (result.is_ok(), count)
        };
        assert_eq!(tries(true, 2), (true, 2));
        assert_eq!(tries(true, 9), (false, 3));
        assert_eq!(tries(false, 2), (false, 1));
    }

    #[test]
    fn folders_of_dead_runs_are_known() {
        assert_eq!(owner("run-12-0"), Some(PathBuf::from("/proc/12")));
        assert_eq!([owner("run-tests"), owner("skips-host"), owner("run-x-0")], [None, None, None]);
    }

    #[test]
    fn a_listening_port_is_noticed() {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        wait_until_listening(port, &AtomicBool::new(false)).unwrap();
        drop(listener);
        assert!(wait_until_listening(port, &AtomicBool::new(true)).is_err());
    }
}
