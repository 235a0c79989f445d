//! `cargo xtask bench`: the benchmarks beside their peers; docs/performance.md says what they measure.

use crate::{cargo, error::Result, exec};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Small numbers and few repetitions: does everything work?
    #[arg(long)]
    quick: bool,
    /// Only the rows whose first column contains this, as "1M IPv4"
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// Builds and runs them. What they need and this machine lacks, root first of all, they name themselves.
pub(crate) fn command(arguments: &Arguments) -> Result<()> {
    let mut command = cargo::command();
    command.args(["bench", "--package", "smc-policy", "--bench", "decision", "--bench", "fill", "--"]);
    if arguments.quick {
        command.arg("--quick");
    }
    if let Some(only) = &arguments.only {
        command.args(["--only", only]);
    }
    exec::run(&mut command)
}
