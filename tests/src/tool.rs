//! Runs the real binary, with its files in places of its own.

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::Hook;

/// Where bpffs is expected.
pub const BPFFS: &str = "/sys/fs/bpf";
/// A command that takes longer hangs. Loading programs takes a few seconds in emulation.
const LIMIT: Duration = Duration::from_secs(60);

/// The binary under test: `SMC_POLICY_BIN`, or `smc-policy` beside the `deps` folder of the running test.
#[must_use]
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("SMC_POLICY_BIN") {
        return path.into();
    }
    let test = std::env::current_exe().unwrap_or_default();
    test.ancestors().nth(2).unwrap_or(Path::new("")).join("smc-policy")
}

/// Whether there is a binary under test that can run on this machine.
#[must_use]
pub fn is_there() -> bool {
    let output = Command::new(binary()).arg("--version").output();
    output.is_ok_and(|output| output.status.success() && output.stdout.starts_with(b"smc-policy "))
}

/// Folders for the binary's files that no other test and no installation uses. Whatever is still applied is detached
/// when this goes.
#[derive(Debug)]
pub struct Home {
    folder: TempDir,
    bpffs: PathBuf,
    is_used: AtomicBool,
}

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

impl Home {
    /// # Panics
    /// When the folders cannot be made.
    #[must_use]
    pub fn new() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let folder = TempDir::new().expect("a temporary folder");
        for name in ["run", "state", "etc/policy.d", "usr/policy.d"] {
            fs::create_dir_all(folder.path().join(name)).expect("a folder in it");
        }
        if crate::hook() == Hook::Tc {
            fs::write(folder.path().join("etc/config.toml"), "hook = \"tc\"\n").expect("config.toml");
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let bpffs = Path::new(BPFFS).join(format!("smc-policy-test-{}-{number}", std::process::id()));
        // Without bpffs or privilege the folder is missing, and the binary must say what is wrong.
        let _ = fs::create_dir(&bpffs);
        Self { folder, bpffs, is_used: false.into() }
    }

    /// A path inside the temporary folder.
    #[must_use]
    pub fn path(&self, relative: &str) -> PathBuf {
        self.folder.path().join(relative)
    }

    /// The folder for pins.
    #[must_use]
    pub fn bpffs(&self) -> &Path {
        &self.bpffs
    }

    /// Writes a file, usually a policy, and returns its path. Slashes in `name` make folders.
    ///
    /// # Panics
    /// When it cannot be written.
    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a file in a folder")).expect("its folder");
        fs::write(&path, text).expect("a file");
        path
    }

    /// The command, ready to run, with every folder of the binary moved here.
    #[must_use]
    pub fn command<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(binary());
        command
            .args(arguments)
            .env("SMC_POLICY_RUN_DIR", self.path("run"))
            .env("SMC_POLICY_STATE_DIR", self.path("state"))
            .env("SMC_POLICY_ETC", self.path("etc"))
            .env("SMC_POLICY_USR", self.path("usr"))
            .env("SMC_POLICY_BPFFS", &self.bpffs)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    /// Starts the command without waiting for it.
    ///
    /// # Panics
    /// When the binary cannot be started.
    pub fn start<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Running {
        self.start_command(self.command(arguments))
    }

    /// Starts a command made by [`Self::command`].
    ///
    /// # Panics
    /// When the binary cannot be started.
    pub fn start_command(&self, mut command: Command) -> Running {
        self.is_used.store(true, Ordering::Relaxed);
        let shown = shown(&command);
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{shown}: {error}"));
        let stdout = collect(child.stdout.take().expect("stdout is piped"));
        let stderr = collect(child.stderr.take().expect("stderr is piped"));
        let stdin = child.stdin.take();
        Running { child, shown, started: Instant::now(), stdin, stdout: Some(stdout), stderr: Some(stderr) }
    }

    /// As [`Self::start`], with a standard input that is open and silent: [`Running::press_enter`].
    ///
    /// # Panics
    /// When the binary cannot be started.
    pub fn start_with_input<S: AsRef<std::ffi::OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Running {
        let mut command = self.command(arguments);
        command.stdin(Stdio::piped());
        self.start_command(command)
    }

    /// Runs the command to its end.
    ///
    /// # Panics
    /// When the binary cannot be started or hangs.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Run {
        self.start(arguments).wait()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if *self.is_used.get_mut() && !thread::panicking() {
            // What a test left in force must not reach the next one.
            let _ = self.run(["detach"]);
        } else if *self.is_used.get_mut() {
            let _ = self.command(["detach"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        remove_pins(&self.bpffs);
    }
}

/// Removes a folder of bpffs with all pins in it. (bpffs refuses remove_dir_all's way of opening folders on some
/// kernels.)
pub fn remove_pins(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_pins(&entry.path());
        } else {
            let _ = fs::remove_file(entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}

/// A command that was started.
#[derive(Debug)]
pub struct Running {
    child: Child,
    shown: String,
    started: Instant,
    stdin: Option<ChildStdin>,
    stdout: Option<thread::JoinHandle<String>>,
    stderr: Option<thread::JoinHandle<String>>,
}

impl Running {
    /// Waits for its end.
    ///
    /// # Panics
    /// When it takes longer than a minute.
    pub fn wait(mut self) -> Run {
        loop {
            if let Some(status) = self.child.try_wait().expect("wait for the command") {
                return self.finished(status);
            }
            if self.started.elapsed() > LIMIT {
                let _ = self.child.kill();
                let status = self.child.wait().expect("wait for the killed command");
                panic!("hangs: {:?}", self.finished(status));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends SIGKILL and waits for its end.
    ///
    /// # Panics
    /// When the kernel does not let go of it.
    pub fn kill(mut self) -> Run {
        // An error means that it has ended already.
        let _ = self.child.kill();
        let status = self.child.wait().expect("wait for the killed command");
        self.finished(status)
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The processes that it has started and that still run.
    ///
    /// # Panics
    /// When /proc cannot be read.
    #[must_use]
    pub fn children(&self) -> Vec<u32> {
        let processes = fs::read_dir("/proc").expect("/proc").flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        pids.filter(|pid| parent_of(*pid) == Some(self.pid())).collect()
    }

    /// Gives it an empty line.
    ///
    /// # Panics
    /// When it was not started by [`Home::start_with_input`] or has ended.
    pub fn press_enter(&mut self) {
        let stdin = self.stdin.as_mut().expect("a command with input");
        stdin.write_all(b"\n").expect("the command reads");
    }

    /// Whether it still runs.
    ///
    /// # Panics
    /// When waitpid(2) fails.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("wait for the command").is_none()
    }

    fn finished(&mut self, status: ExitStatus) -> Run {
        let text = |handle: Option<thread::JoinHandle<String>>| {
            handle.map(|handle| handle.join().expect("a reading thread")).unwrap_or_default()
        };
        Run {
            shown: std::mem::take(&mut self.shown),
            stdout: text(self.stdout.take()),
            stderr: text(self.stderr.take()),
            time: self.started.elapsed(),
            status,
        }
    }
}

/// A command that has ended.
#[derive(Debug)]
pub struct Run {
    /// The command line.
    pub shown: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
    /// From start to end.
    pub time: Duration,
}

impl Run {
    /// The exit code; `None` after a signal.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Itself, if the exit code is `code`.
    ///
    /// # Panics
    /// If it is another one, with everything that was printed.
    #[track_caller]
    #[allow(clippy::must_use_candidate, reason = "often called for the check alone")]
    pub fn expect_code(self, code: i32) -> Self {
        assert_eq!(self.code(), Some(code), "exit code of {self:#?}");
        self
    }

    /// Itself, if the exit code is 0.
    ///
    /// # Panics
    /// If it is another one, with everything that was printed.
    #[track_caller]
    pub fn ok(self) -> Self {
        self.expect_code(0)
    }

    /// Itself, if it was refused: exit code `code`, everything in `says` on standard error, and no panic.
    ///
    /// # Panics
    /// If it was not, with everything that was printed.
    #[track_caller]
    #[allow(clippy::must_use_candidate, reason = "often called for the check alone")]
    pub fn refused(self, code: i32, says: &[&str]) -> Self {
        let run = self.expect_code(code);
        for words in says {
            assert!(run.stderr.contains(words), "'{words}' is not in {run:#?}");
        }
        assert!(!run.stderr.contains("panicked"), "{run:#?}");
        run
    }

    /// Standard output as JSON.
    ///
    /// # Panics
    /// If it is none.
    #[track_caller]
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("no JSON ({error}): {self:#?}"))
    }
}

/// The parent of a running process; none when it has ended.
fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // PID (NAME) STATE PARENT: the name may hold spaces and parentheses.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    (fields.next()? != "Z").then(|| fields.next()?.parse().ok())?
}

fn shown(command: &Command) -> String {
    let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
    format!("smc-policy {}", words.collect::<Vec<_>>().join(" "))
}

fn collect(mut stream: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        match stream.read_to_end(&mut bytes) {
            Ok(_) => String::from_utf8_lossy(&bytes).into_owned(),
            Err(error) => io::Error::to_string(&error),
        }
    })
}
