//! `cargo xtask test`: everything there is to check, on this host and in every kernel of the lab.

mod integration;
mod libtest;
mod report;

pub(crate) use self::integration::PACKAGE;

use std::{
    panic::resume_unwind,
    process::{Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
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
    let (in_lab, here): (Vec<&Step>, Vec<&Step>) = steps.iter().partition(|step| step.is_in_lab());
    for step in here {
        let (tally, took) = timed(step, || run(step, cache, &settings, &mut suite));
        report.add(step.name(), tally, took);
    }
    if !in_lab.is_empty() {
        let suite = built(&mut suite);
        let label = |step: &Step| if in_lab.len() > 1 { format!("{}: ", step.name()) } else { String::new() };
        let results = in_parallel(&in_lab, |step| {
            timed(step, || match (&suite, step) {
                (Err(error), _) => Err(Error::new(error.to_string())),
                (Ok(suite), Step::Kernel(row)) => suite.in_kernel(row, cache, &settings, &label(step)),
                (Ok(suite), Step::Pair(row, _)) => suite.in_two(row, cache, &settings, &label(step)),
                (Ok(_), _) => Err(Error::new(format!("{} runs in no machine", step.name()))),
            })
        });
        for (step, (tally, took)) in in_lab.iter().zip(results) {
            report.add(step.name(), tally, took);
        }
    }
    print!("\n{report}");
    Ok(report.is_good())
}

/// Does a step, and says when it begins and ends and what failed.
fn timed(step: &Step, work: impl FnOnce() -> Result<Tally>) -> (Tally, Duration) {
    println!("== {}", step.name());
    let began = Instant::now();
    let tally = work().unwrap_or_else(|error| Tally { failed: vec![error.to_string()], ..Tally::default() });
    for failure in &tally.failed {
        eprintln!("FAILED: {}: {failure}", step.name());
    }
    println!("== {} took {:.1} s", step.name(), began.elapsed().as_secs_f64());
    (tally, began.elapsed())
}

/// So many lab steps run at once. An emulated machine that runs one test after the other keeps one processor busy, and waits
/// now and then; more than two machines wait for each other so long that tests meet their time limits.
const AT_ONCE: usize = 2;

/// Works on all items, a few at once, in their order; the results are in it too.
fn in_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(AT_ONCE).min(items.len());
    let next = AtomicUsize::new(0);
    let mut results: Vec<(usize, R)> = thread::scope(|scope| {
        let worker = || {
            let mut done = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                match items.get(at) {
                    Some(item) => done.push((at, work(item))),
                    None => return done,
                }
            }
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        let joined =
            workers.into_iter().map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)));
        joined.flatten().collect()
    });
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
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
        Step::Kernel(_) | Step::Pair(..) => {
            return Err(Error::new(format!("{} runs in a machine", step.name())));
        }
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
    fn all_items_are_worked_on_and_the_results_are_in_order() {
        let items: Vec<u32> = (0..50).collect();
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let results = in_parallel(&items, |item| {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            thread::yield_now();
            running.fetch_sub(1, Ordering::SeqCst);
            item * 2
        });
        assert_eq!(results, items.iter().map(|item| item * 2).collect::<Vec<_>>());
        assert!(most.into_inner() <= AT_ONCE);
        assert!(in_parallel(&[] as &[u32], |item| *item).is_empty());
    }

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
