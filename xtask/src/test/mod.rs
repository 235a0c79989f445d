//! `cargo xtask test`: everything there is to check, on this host and in every kernel of the lab.

mod integration;
mod libtest;
mod report;

pub(crate) use self::integration::PACKAGE;

use std::{
    process::{Command, Stdio},
    time::Instant,
};

use clap::Args;

use self::{
    integration::Suite,
    report::{Report, Skip, Tally},
};
use crate::{
    cargo, deny, ebpf,
    error::{Error, Result},
    exec,
    lab::kernel::{self, Row},
    packages,
    paths::Cache,
};

/// Arguments of `cargo xtask test`.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// The large numbers, instead of a tenth of them
    #[arg(long)]
    full: bool,
    /// Only these steps: fmt, clippy, deny, unit, doc, ebpf, host, lab (all kernels), a kernel's name, or
    /// KERNEL-pair: two joined machines with it
    #[arg(long, value_name = "STEP")]
    only: Vec<String>,
    /// Seed of everything random in the tests [default: from the clock; printed]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Only the integration tests whose name contains this
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

/// What the steps have to know.
#[derive(Debug)]
pub(crate) struct Settings {
    /// Whether the large numbers were asked for.
    full: bool,
    /// Seed of everything random.
    seed: u64,
    /// Part of the names of the integration tests to run.
    filter: Option<String>,
}

/// A thing to check.
enum Step {
    Format,
    Clippy,
    Deny,
    Unit,
    Doc,
    Ebpf,
    Host,
    Kernel(Box<Row>),
    /// Two joined machines; the step's name.
    Pair(Box<Row>, String),
}

impl Step {
    fn name(&self) -> &str {
        match self {
            Self::Format => "fmt",
            Self::Clippy => "clippy",
            Self::Deny => "deny",
            Self::Unit => "unit",
            Self::Doc => "doc",
            Self::Ebpf => "ebpf",
            Self::Host => "host",
            Self::Kernel(row) => &row.name,
            Self::Pair(_, name) => name,
        }
    }

    fn is_in_lab(&self) -> bool {
        matches!(self, Self::Kernel(_) | Self::Pair(..))
    }

    /// The steps with this kernel.
    fn of_kernel(row: Row) -> Vec<Self> {
        let row = Box::new(row);
        let pair = row.pair.then(|| Self::Pair(row.clone(), format!("{}-pair", row.name)));
        [Self::Kernel(row)].into_iter().chain(pair).collect()
    }

    fn is_wanted(&self, only: &[String]) -> bool {
        let all_kernels = self.is_in_lab() && only.iter().any(|name| name == "lab");
        only.is_empty() || all_kernels || only.iter().any(|name| name == self.name())
    }
}

/// Runs the steps; whether all of them passed.
pub(crate) fn command(arguments: Arguments, cache: &Cache) -> Result<bool> {
    let rows = kernel::matrix()?;
    let mut steps =
        vec![Step::Format, Step::Clippy, Step::Deny, Step::Unit, Step::Doc, Step::Ebpf, Step::Host];
    steps.extend(rows.into_iter().flat_map(Step::of_kernel));
    if let Some(unknown) =
        arguments.only.iter().find(|name| *name != "lab" && !steps.iter().any(|step| step.name() == *name))
    {
        let names: Vec<&str> = steps.iter().map(Step::name).chain(["lab"]).collect();
        return Err(
            Error::new(format!("there is no step {unknown}")).next(format!("known are {}", names.join(", ")))
        );
    }
    steps.retain(|step| step.is_wanted(&arguments.only));
    if steps.iter().any(Step::is_in_lab) {
        packages::ensure(packages::LAB, "the lab")?;
    }
    let seed = arguments.seed.unwrap_or_else(seed_from_clock);
    println!("seed {seed} (the same numbers again: --seed {seed})");
    let settings = Settings { full: arguments.full, seed, filter: arguments.filter };

    let mut report = Report::default();
    let mut suite = None;
    for step in &steps {
        println!("== {}", step.name());
        let began = Instant::now();
        let tally = run(step, cache, &settings, &mut suite)
            .unwrap_or_else(|error| Tally { failed: vec![error.to_string()], ..Tally::default() });
        for failure in &tally.failed {
            eprintln!("FAILED: {failure}");
        }
        println!("== {} took {:.1} s", step.name(), began.elapsed().as_secs_f64());
        report.add(step.name(), tally, began.elapsed());
    }
    print!("\n{report}");
    Ok(report.is_good())
}

fn run(step: &Step, cache: &Cache, settings: &Settings, suite: &mut Option<Suite>) -> Result<Tally> {
    Ok(match step {
        Step::Format => Tally::of_check(exec::run(cargo::command().args(["fmt", "--all", "--check"]))),
        Step::Clippy => {
            let host = ["clippy", "--workspace", "--exclude", "smc-policy-ebpf", "--all-targets", "--quiet"];
            Tally::of_check(exec::run(cargo::command().args(host).args(["--", "-D", "warnings"])))
        }
        Step::Deny => Tally::of_check(deny::check(cache)),
        Step::Unit => {
            let packages = ["--workspace", "--exclude", "smc-policy-ebpf", "--exclude", PACKAGE];
            cargo_test(cargo::command().args(["test", "--no-fail-fast", "--tests"]).args(packages), settings)?
        }
        Step::Doc => {
            let packages = ["--workspace", "--exclude", "smc-policy-ebpf", "--exclude", "xtask"];
            cargo_test(cargo::command().args(["test", "--no-fail-fast", "--doc"]).args(packages), settings)?
        }
        Step::Ebpf => match ebpf::check(cache, true)? {
            ebpf::Checked::Whole => Tally { passed: 1, ..Tally::default() },
            ebpf::Checked::InputsOnly(reason) => {
                let skip = Skip { name: "bytes of the eBPF objects".to_owned(), reason };
                Tally { passed: 1, skipped: vec![skip], ..Tally::default() }
            }
        },
        Step::Host => built(suite)?.on_host(settings)?,
        Step::Kernel(row) => built(suite)?.in_kernel(row, cache, settings)?,
        Step::Pair(row, _) => built(suite)?.in_two(row, cache, settings)?,
    })
}

/// The integration tests, compiled when the first step needs them.
fn built(suite: &mut Option<Suite>) -> Result<&Suite> {
    if suite.is_none() {
        *suite = Some(Suite::build()?);
    }
    suite.as_ref().ok_or_else(|| Error::new("the integration tests are not built"))
}

/// Runs `cargo test` with its output passed on and read.
fn cargo_test(command: &mut Command, settings: &Settings) -> Result<Tally> {
    use std::io::BufRead as _;

    command.env("SMC_POLICY_SEED", settings.seed.to_string()).stdin(Stdio::null()).stdout(Stdio::piped());
    if settings.full {
        command.env("SMC_POLICY_FULL", "1");
    }
    let mut child = command.spawn().map_err(|e| exec::cannot_start(command, &e))?;
    let mut output = String::new();
    if let Some(stdout) = child.stdout.take() {
        for line in std::io::BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(|e| Error::new(format!("cannot read the tests' output: {e}")))?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            output.push_str(&line);
            output.push('\n');
        }
    }
    let status = child.wait().map_err(|e| Error::new(format!("cargo: {e}")))?;
    let counts = libtest::read(&output);
    let mut tally = Tally { passed: counts.passed, failed: counts.failed, ..Tally::default() };
    if counts.ignored > 0 {
        tally
            .skipped
            .push(Skip { name: format!("{} tests", counts.ignored), reason: "marked ignore".to_owned() });
    }
    if !status.success() && tally.failed.is_empty() {
        tally.failed.push(format!("`{}` failed ({status})", exec::describe(command)));
    }
    Ok(tally)
}

fn seed_from_clock() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(1, |since| since.as_secs() ^ u64::from(since.subsec_nanos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_chosen_by_name() {
        let row = kernel::matrix().unwrap().remove(0);
        let name = row.name.clone();
        let steps = Step::of_kernel(row);
        let [kernel, pair] = &steps[..] else { panic!("this row has a pair") };
        let only = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert!(kernel.is_wanted(&[]) && kernel.is_wanted(&only(&["lab"])) && kernel.is_wanted(&[name]));
        assert!(
            pair.is_wanted(&[]) && pair.is_wanted(&only(&["lab"])) && pair.is_wanted(&only(&[pair.name()]))
        );
        assert!(!pair.is_wanted(&only(&[kernel.name()])));
        assert!(!kernel.is_wanted(&only(&["fmt"])) && !Step::Format.is_wanted(&only(&["lab"])));
    }
}
