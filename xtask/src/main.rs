//! The project's build tool: `cargo xtask help` lists what it can do.

mod apt;
mod bench;
mod cargo;
mod demo;
mod deny;
mod ebpf;
mod error;
mod exec;
mod files;
mod lab;
mod packages;
mod paths;
mod shell;
mod test;

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
    /// Install what the lab needs, or say what is missing
    Setup,
    /// Show the main job: real SMC connections on a real kernel, and a policy that makes one of them plain TCP
    Demo,
    /// Check everything, on this host and in every kernel of the lab
    Test(test::Arguments),
    /// Measure decisions and the filling of tables beside their peers, as root on a quiet machine
    Bench(bench::Arguments),
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
        Task::Setup => packages::setup()?,
        Task::Demo => return Ok(demo::command(&cache)?.into()),
        Task::Test(arguments) => {
            return Ok(if test::command(arguments, &cache)? { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Task::Lab(arguments) => return Ok(lab::command(&arguments, &cache)?.into()),
        Task::Bench(arguments) => bench::command(&arguments)?,
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
