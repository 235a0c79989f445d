//! What the benchmarks share.

// Each benchmark is a program of its own and uses a part of this.
#![allow(dead_code)]

pub mod figures;
pub mod lpm;
pub mod networks;
pub mod pins;
pub mod usage;

use std::{env, fs};

use smc_policy::kernel::capability;

/// Any error ends a benchmark with its message.
pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// How a benchmark was called.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--quick`: small numbers, few repetitions: does it work at all?
    pub quick: bool,
    /// `--only TEXT`: the rows whose first column contains it.
    only: Option<String>,
}

impl Options {
    /// `None`: there is nothing to measure, and why was printed.
    pub fn read(name: &str) -> Option<Self> {
        let arguments: Vec<String> = env::args().skip(1).collect();
        let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
        // `cargo test --all-targets` runs benchmarks without `--bench`.
        if !given("--bench") {
            println!("{name}: run it by `cargo bench -p smc-policy --bench {name}`");
            return None;
        }
        if let Err(error) = capability::require("this benchmark") {
            println!("skipped {name}: {error}");
            return None;
        }
        let only = arguments.iter().skip_while(|argument| *argument != "--only").nth(1).cloned();
        println!("{}\n", machine());
        Some(Self { quick: given("--quick"), only })
    }

    /// Is the row with this first column asked for?
    pub fn wants(&self, row: &str) -> bool {
        self.only.as_ref().is_none_or(|only| row.contains(only))
    }

    /// The seed of everything random; the same every time unless `SMC_POLICY_SEED` says otherwise.
    pub fn seed() -> u64 {
        env::var("SMC_POLICY_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(7609)
    }
}

/// What kind of machine this is, and how busy.
fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let models: Vec<&str> = cpus.lines().filter_map(|line| line.strip_prefix("model name\t: ")).collect();
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or_default();
    let (count, model) = (models.len(), models.first().unwrap_or(&"unknown"));
    format!("Linux {}, {count} CPUs ({model}), load {load} at the start", smc_policy::kernel::release())
}

/// The middle one; 0 of none.
pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    samples.get(samples.len() / 2).copied().unwrap_or(0.0)
}

/// The smallest; 0 of none.
pub fn smallest(samples: &[f64]) -> f64 {
    samples.iter().copied().min_by(f64::total_cmp).unwrap_or(0.0)
}

/// 10000 as `10k`, 1000000 as `1M`.
pub fn short(count: usize) -> String {
    match count {
        count if count % 1_000_000 == 0 => format!("{}M", count / 1_000_000),
        count if count % 1000 == 0 => format!("{}k", count / 1000),
        count => count.to_string(),
    }
}
