//! The integration tests of crate `tests`: compiled once, run on this host and inside every lab kernel.

use std::{collections::BTreeMap, path::PathBuf, process::Command, sync::atomic::AtomicBool, time::Duration};

use super::{
    Settings, libtest,
    report::{Skip, Tally},
};
use crate::{
    cargo,
    error::{Error, Result},
    exec, files,
    lab::{
        kernel::{self, Row},
        machine::{JOB_DIR, Job, Machine, RESULTS_DIR},
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
        Ok(Self { binaries, program })
    }

    /// Runs the tests here. What this host lacks is skipped, whatever it is.
    pub(crate) fn on_host(&self, settings: &Settings) -> Result<Tally> {
        let skips = paths::workspace().join("target/lab/skips-host");
        files::write_whole(&skips, b"")?;
        let mut output = String::new();
        for (name, path) in &self.binaries {
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

    /// Runs the tests in a lab kernel.
    pub(crate) fn in_kernel(&self, row: &Row, cache: &Cache, settings: &Settings) -> Result<Tally> {
        let kernel = kernel::ready(row, cache)?;
        println!("{}: Linux {}", row.name, kernel.version);
        let mut job = Job {
            command: ["sh", &format!("{JOB_DIR}/run-tests")].map(str::to_owned).to_vec(),
            environment: environment(settings, &row.name, "/bin/smc-policy"),
            ..Job::default()
        };
        job.environment.insert("SMC_POLICY_SKIPS".into(), format!("{RESULTS_DIR}/skips"));
        job.files.push((self.program.clone(), "/bin/smc-policy".into()));
        let arguments: Vec<String> =
            harness_arguments(settings).iter().map(|word| shell::quote(word)).collect();
        let mut script = String::new();
        for (name, path) in &self.binaries {
            job.files.push((path.clone(), format!("{JOB_DIR}/{name}")));
            let run = format!("./{name} {}", arguments.join(" "));
            script.push_str(&format!("echo '{BEGIN}{name}'; {run}; code=$?; echo; echo '{END}'$code\n"));
        }
        let script_path = paths::workspace().join("target/lab/run-tests");
        files::write_whole(&script_path, script.as_bytes())?;
        job.files.push((script_path, format!("{JOB_DIR}/run-tests")));
        let policies = paths::workspace().join("policies");
        if policies.is_dir() {
            job.trees.push((policies, format!("{JOB_DIR}/policies")));
        }
        let machine = Machine {
            kernel: &kernel,
            memory: row.memory,
            time_limit: Duration::from_secs(if settings.full { 3600 } else { 900 }),
            wire: None,
            job,
        };
        let mut output = Vec::new();
        let outcome = machine.run(&AtomicBool::new(false), &mut |bytes| {
            output.extend_from_slice(bytes);
            crate::lab::print(bytes);
        })?;
        let skips =
            outcome.files.get("skips").map(|bytes| String::from_utf8_lossy(bytes)).unwrap_or_default();
        let allowed = |reason: &str| row.lacks.contains_key(reason.trim_start_matches("needs "));
        let mut tally = tally(&String::from_utf8_lossy(&output), &skips, allowed);
        tally.failed.extend(outcome.complaints.into_iter().map(|line| format!("the kernel says: {line}")));
        tally.place = format!("Linux {}", kernel.version);
        Ok(tally)
    }
}

/// Announce a binary and its exit code in the output.
const BEGIN: &str = "@@ begin ";
const END: &str = "@@ end ";

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
