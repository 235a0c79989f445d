//! The command `smc-policy`: parse arguments, call a verb, map the result to an exit code.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    smc_policy::cli::run(smc_policy::cli::Arguments::parse())
}
