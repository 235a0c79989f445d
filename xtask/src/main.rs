//! The project's build tool: `cargo xtask help` lists what it can do.

mod apt;
mod cargo;
mod ebpf;
mod error;
mod exec;
mod files;
mod lab;
mod packages;
mod paths;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::{error::Result, paths::Cache};

/// Everything around the code: the eBPF objects, the lab of real kernels, tests, demonstration.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Rebuild the committed eBPF objects with the reference builder
    Ebpf {
        /// Change nothing: say whether the committed objects belong to the sources
        #[arg(long)]
        check: bool,
    },
    /// Boot a real kernel under emulation and run a job in it
    Lab(lab::Arguments),
}

fn main() -> ExitCode {
    match run(Arguments::parse().task) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    let cache = Cache::open()?;
    match task {
        Task::Lab(arguments) => return Ok(lab::command(&arguments, &cache)?.into()),
        Task::Ebpf { check: false } => ebpf::write(&cache)?,
        Task::Ebpf { check: true } => match ebpf::check(&cache, std::env::var_os("CI").is_some())? {
            ebpf::Checked::Whole => println!("the committed objects are what the sources give"),
            ebpf::Checked::InputsOnly(why) => {
                println!("the inputs are those of the committed objects; {why}")
            }
        },
    }
    Ok(ExitCode::SUCCESS)
}
