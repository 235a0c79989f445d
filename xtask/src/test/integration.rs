//! The integration tests of crate `tests`: compiled once, run on this host and inside every lab kernel.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::AtomicBool,
    time::Duration,
};

use super::{
    Settings, libtest,
    report::{Skip, Tally},
};
use crate::{
    cargo,
    error::{Error, Result},
    exec, files,
    lab::{
        kernel::{self, Kernel, Row},
        machine::{self, JOB_DIR, Job, Machine, Outcome, RESULTS_DIR, Until},
    },
    paths::{self, Cache},
    shell,
};

/// The package with the integration tests.
pub(crate) const PACKAGE: &str = "smc-policy-tests";

/// Compiled tests and the program under test.
pub(crate) struct Suite {
    /// Test binaries by name, which is also the first part of their tests' names.
    binaries: BTreeMap<String, PathBuf>,
    program: PathBuf,
    /// All of them without what only debuggers use.
    stripped: BTreeMap<PathBuf, PathBuf>,
}

impl Suite {
    /// Compiles everything.
    pub(crate) fn build() -> Result<Self> {
        let program = cargo::build_program()?;
        let seen =
            cargo::messages(cargo::command().args(["test", "--no-run", "--quiet", "--package", PACKAGE]))?;
        let tests = seen
            .executables
            .into_iter()
            .filter(|executable| executable.test && executable.package == PACKAGE);
        let binaries: BTreeMap<String, PathBuf> = tests.map(|test| (test.target, test.path)).collect();
        if binaries.is_empty() {
            return Err(Error::new(format!("package {PACKAGE} has no tests")));
        }
        let stripped = binaries.values().chain([&program]).map(|path| Ok((path.clone(), stripped(path)?)));
        let stripped = stripped.collect::<Result<_>>()?;
        Ok(Self { binaries, program, stripped })
    }

    /// Runs the tests here. What this host lacks is skipped, whatever it is.
    pub(crate) fn on_host(&self, settings: &Settings) -> Result<Tally> {
        let skips = paths::workspace().join("target/lab/skips-host");
        files::write_whole(&skips, b"")?;
        let mut output = String::new();
        for (name, path) in self.binaries.iter().filter(|(name, _)| !is_for_two(name)) {
            let mut command = Command::new(path);
            command.envs(environment(settings, "host", &self.program.to_string_lossy()));
            command.env("SMC_POLICY_SKIPS", &skips).args(harness_arguments(settings));
            command.current_dir(paths::workspace().join("tests"));
            let run = exec::output(&mut command)?;
            let text = String::from_utf8_lossy(&run.stdout);
            print!("{text}{}", String::from_utf8_lossy(&run.stderr));
            let code = run.status.code().unwrap_or(-1);
            output.push_str(&format!("\n{BEGIN}{name}\n{text}\n{END}{code}\n"));
        }
        let mut tally = tally(&output, &files::read_text(&skips)?, |_| true);
        tally.place = exec::capture(Command::new("uname").arg("-r"))?.trim().to_owned();
        Ok(tally)
    }

    /// Runs the tests of one host in a lab kernel. `label`: how lines of its output begin.
    pub(crate) fn in_kernel(
        &self,
        row: &Row,
        cache: &Cache,
        settings: &Settings,
        label: &str,
    ) -> Result<Tally> {
        let kernel = kernel::ready(row, cache)?;
        println!("{}: Linux {}", row.name, kernel.version);
        let mut job = self.job(row, settings, "run-tests", |name| !is_for_two(name))?;
        let policies = paths::workspace().join("policies");
        if policies.is_dir() {
            job.trees.push((policies, format!("{JOB_DIR}/policies")));
        }
        let (mut lines, mut output) = (Lines::new(label), Vec::new());
        let outcome = machine(&kernel, settings, job).run(&AtomicBool::new(false), &mut |bytes| {
            output.extend_from_slice(bytes);
            crate::lab::print(&lines.whole(bytes));
        })?;
        let mut tally = of_machine(row, &output, outcome);
        tally.place = format!("Linux {}", kernel.version);
        Ok(tally)
    }

    /// Runs the tests of two hosts in two joined machines with a lab kernel: the same tests in both, each in its role.
    pub(crate) fn in_two(&self, row: &Row, cache: &Cache, settings: &Settings, label: &str) -> Result<Tally> {
        let kernel = kernel::ready(row, cache)?;
        println!("{}: Linux {}, two machines", row.name, kernel.version);
        let job = |role: &str| {
            let mut job = self.job(row, settings, &format!("run-tests-{role}"), is_for_two)?;
            job.environment.insert("SMC_POLICY_ROLE".into(), role.into());
            Ok(machine(&kernel, settings, job))
        };
        let (shown, outcomes) = machine::again_if_it_may_pass(|| {
            let mut shown = ROLES.map(|role| (Lines::new(&format!("{label}{role}: ")), Vec::new()));
            let print = &mut |machine: usize, bytes: &[u8]| {
                let (lines, output) = &mut shown[machine];
                output.extend_from_slice(bytes);
                crate::lab::print(&lines.whole(bytes));
            };
            let outcomes = machine::pair(job(ROLES[0])?, job(ROLES[1])?, Until::Both, print)?;
            Ok((shown, outcomes))
        })?;
        let mut sum = Tally { place: format!("Linux {}, two machines", kernel.version), ..Tally::default() };
        for ((role, (_, output)), outcome) in ROLES.iter().zip(&shown).zip([outcomes.0, outcomes.1]) {
            sum.add(role, of_machine(row, output, outcome));
        }
        Ok(sum)
    }

    /// What runs the wanted test binaries in a machine, by a script of this name.
    fn job(
        &self,
        row: &Row,
        settings: &Settings,
        script_name: &str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Job> {
        let mut job = Job {
            command: ["sh", &format!("{JOB_DIR}/run-tests")].map(str::to_owned).to_vec(),
            environment: environment(settings, &row.name, "/bin/smc-policy"),
            ..Job::default()
        };
        job.environment.insert("SMC_POLICY_SKIPS".into(), format!("{RESULTS_DIR}/skips"));
        job.files.push((self.stripped(&self.program), "/bin/smc-policy".into()));
        let arguments: Vec<String> =
            harness_arguments(settings).iter().map(|word| shell::quote(word)).collect();
        let mut script = String::new();
        for (name, path) in self.binaries.iter().filter(|(name, _)| wanted(name)) {
            job.files.push((self.stripped(path), format!("{JOB_DIR}/{name}")));
            // Two hosts say what they have measured.
            let shown = if is_for_two(name) { " --nocapture" } else { "" };
            let run = format!("./{name} {}{shown}", arguments.join(" "));
            script.push_str(&scripted(name, &run));
            if BY_BOTH_HOOKS.contains(&name.as_str()) {
                let name = format!("{name}@tc");
                let by_tc = format!("SMC_POLICY_HOOK=tc SMC_POLICY_RUN_AS={name} {run}");
                script.push_str(&scripted(&name, &by_tc));
            }
        }
        let script_path = paths::workspace().join("target/lab").join(format!("{script_name}-{}", row.name));
        files::write_whole(&script_path, script.as_bytes())?;
        job.files.push((script_path, format!("{JOB_DIR}/run-tests")));
        Ok(job)
    }

    fn stripped(&self, executable: &Path) -> PathBuf {
        self.stripped.get(executable).map_or(executable, PathBuf::as_path).to_owned()
    }
}

/// A copy of the executable without what only debuggers use: a machine holds all of them in memory, several times as
/// large otherwise.
fn stripped(executable: &Path) -> Result<PathBuf> {
    let folder = paths::workspace().join("target/lab/stripped");
    files::create_dir(&folder)?;
    let copy = folder.join(executable.file_name().unwrap_or_default());
    let made = |path: &Path| path.metadata().and_then(|metadata| metadata.modified());
    let is_fresh = matches!((made(executable), made(&copy)), (Ok(of), Ok(copied)) if copied > of);
    if !is_fresh {
        exec::run(Command::new("strip").arg("--strip-debug").arg("-o").arg(&copy).arg(executable))?;
    }
    Ok(copy)
}

/// Whether this test binary is about two hosts.
fn is_for_two(binary: &str) -> bool {
    binary.starts_with("two_hosts")
}

/// What two machines are, the first one first.
const ROLES: [&str; 2] = ["server", "client"];

fn machine<'a>(kernel: &'a Kernel, settings: &Settings, job: Job) -> Machine<'a> {
    Machine {
        kernel,
        memory: kernel.row.memory,
        time_limit: Duration::from_secs(if settings.full { 7200 } else { 3000 }),
        wire: None,
        job,
    }
}

/// What the tests in a machine came to.
fn of_machine(row: &Row, output: &[u8], outcome: Outcome) -> Tally {
    let skips = outcome.files.get("skips").map(|bytes| String::from_utf8_lossy(bytes)).unwrap_or_default();
    let allowed = |reason: &str| row.lacks.contains_key(reason.trim_start_matches("needs "));
    let mut tally = tally(&String::from_utf8_lossy(output), &skips, allowed);
    tally.failed.extend(outcome.complaints.into_iter().map(|line| format!("the kernel says: {line}")));
    tally
}

/// Output of one of several machines, a line at a time and each with a label, so that they can be told apart.
struct Lines {
    label: String,
    begun: Vec<u8>,
}

impl Lines {
    fn new(label: &str) -> Self {
        Self { label: label.to_owned(), begun: Vec::new() }
    }

    /// The lines that these bytes make whole.
    fn whole(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for byte in bytes {
            self.begun.push(*byte);
            if *byte == b'\n' {
                out.extend_from_slice(self.label.as_bytes());
                out.append(&mut self.begun);
            }
        }
        out
    }
}

/// Announce a binary and its exit code in the output.
const BEGIN: &str = "@@ begin ";
const END: &str = "@@ end ";

/// Test binaries that run once by smc_hs_ctrl and once by tc.
const BY_BOTH_HOOKS: &[&str] = &[
    "echoes",
    "guard",
    "guard_canary",
    "guard_learner",
    "guard_many",
    "guard_matrix",
    "guard_wire",
    "killed",
    "language",
    "main_job",
    "monitor",
    "quarantine",
    "recheck",
    "scopes",
    "switching",
    "tables",
];

/// A line of the script that runs a test binary under this name.
fn scripted(name: &str, run: &str) -> String {
    format!("echo '{BEGIN}{name}'; {run}; code=$?; echo; echo '{END}'$code\n")
}

/// Why a skip is a failure.
const NOT_ALLOWED: &str = "which the kernel's row in tests/kernels/matrix.toml does not say that it lacks";

fn harness_arguments(settings: &Settings) -> Vec<String> {
    // One at a time: the tests share the machine's SMC and its BPF maps.
    let mut arguments = vec!["--test-threads=1".to_owned()];
    arguments.extend(settings.filter.clone());
    arguments
}

fn environment(settings: &Settings, kernel: &str, program: &str) -> BTreeMap<String, String> {
    let mut environment = BTreeMap::from([
        ("SMC_POLICY_BIN".to_owned(), program.to_owned()),
        ("SMC_POLICY_KERNEL".to_owned(), kernel.to_owned()),
        ("SMC_POLICY_SEED".to_owned(), settings.seed.to_string()),
    ]);
    environment.extend(crate::lab::terminal());
    if settings.full {
        environment.insert("SMC_POLICY_FULL".to_owned(), "1".to_owned());
    }
    environment
}

/// Adds up the output of several binaries and the file of skips ("TEST: needs X", a line each).
fn tally(output: &str, skips: &str, allowed: impl Fn(&str) -> bool) -> Tally {
    let mut tally = Tally::default();
    for part in output.split(BEGIN).skip(1) {
        let (name, rest) = part.split_once('\n').unwrap_or((part, ""));
        let name = name.trim();
        let (body, code) = rest.rsplit_once(END).map_or((rest, ""), |(body, code)| (body, code.trim()));
        let counts = libtest::read(body);
        tally.passed += counts.passed;
        tally.failed.extend(counts.failed.iter().map(|test| format!("{name}::{test}")));
        let ignored =
            Skip { name: format!("{} tests of {name}", counts.ignored), reason: "marked #[ignore]".into() };
        tally.skipped.extend((counts.ignored > 0).then_some(ignored));
        if counts.finished != 1 {
            tally.failed.push(format!("{name}: the test binary did not come to its end (exit code {code})"));
        } else if counts.failed.is_empty() != (code == "0") {
            tally.failed.push(format!("{name}: exit code {code} does not fit its results"));
        }
    }
    for line in skips.lines() {
        let Some((name, reason)) = line.split_once(": ") else { continue };
        let skip = Skip { name: name.to_owned(), reason: reason.to_owned() };
        // A test that skipped itself and then failed counts once, as failed.
        if tally.skipped.contains(&skip) || tally.failed.iter().any(|failed| failed == name) {
            continue;
        }
        tally.passed = tally.passed.saturating_sub(1);
        if allowed(reason) {
            tally.skipped.push(skip);
        } else {
            tally.failed.push(format!("{name} {reason}, {NOT_ALLOWED}"));
        }
    }
    if tally.passed == 0 && tally.failed.is_empty() && tally.skipped.is_empty() {
        tally.failed.push("no test ran".to_owned());
    }
    tally
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(result: &str, code: i32) -> String {
        format!("boot noise\n{BEGIN}main_job\ntest a ... ok\n{result}\n\n{END}{code}\n")
    }

    const GOOD: &str =
        "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s";

    #[test]
    fn a_skip_is_no_pass() {
        let tally =
            tally(&output(GOOD, 0), "main_job::a: needs hs_ctrl\n", |reason| reason == "needs hs_ctrl");
        assert_eq!((tally.passed, tally.failed.len(), tally.skipped.len()), (2, 0, 1));
        assert_eq!(tally.skipped[0].name, "main_job::a");
    }

    #[test]
    fn a_skip_that_the_matrix_does_not_allow_fails() {
        let tally = tally(&output(GOOD, 0), "main_job::a: needs SMC\n", |reason| reason == "needs hs_ctrl");
        assert_eq!((tally.passed, tally.skipped.len()), (2, 0));
        assert!(tally.failed[0].contains("main_job::a needs SMC"), "{:?}", tally.failed);
    }

    #[test]
    fn lines_of_two_machines_are_told_apart() {
        let mut lines = Lines::new("client: ");
        let parts = [b"a".as_slice(), b"b\n\nc", b"d\n"].map(|bytes| lines.whole(bytes));
        assert_eq!(
            parts.map(|part| String::from_utf8(part).unwrap()),
            ["", "client: ab\nclient: \n", "client: cd\n"]
        );
    }

    #[test]
    fn a_crash_is_a_failure() {
        let crashed = tally(&output("", 101), "", |_| true);
        assert!(
            crashed.failed[0].contains("did not come to its end (exit code 101)"),
            "{:?}",
            crashed.failed
        );
        let odd = tally(&output(GOOD, 1), "", |_| true);
        assert!(odd.failed[0].contains("exit code 1"), "{:?}", odd.failed);
        let cut = tally(&format!("{BEGIN}main_job\ntest a ..."), "", |_| true);
        assert_eq!(cut.failed.len(), 1);
        assert_eq!(tally("", "", |_| true).failed, ["no test ran"]);
    }
}
