//! `cargo xtask lab`: real kernels under emulation, with a job in them.

mod build;
mod console;
mod cpio;
mod debian;
mod image;
pub(crate) mod kernel;
pub(crate) mod machine;

use std::{
    collections::BTreeMap,
    io::{IsTerminal as _, Write as _},
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::Duration,
};

use clap::{Args, Subcommand};

use self::machine::{JOB_DIR, Job, Machine, Until};
use crate::{
    cargo,
    error::{Error, Result},
    packages,
    paths::Cache,
};

/// Arguments of `cargo xtask lab`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    other: Option<Other>,
    #[command(flatten)]
    run: Run,
}

/// What can be done besides running a job.
#[derive(Debug, Subcommand)]
enum Other {
    /// Build a committed kernel again and put it into tests/kernels (10 minutes, 160 MB, 6 GB of disk)
    Kernel {
        /// Its name
        name: String,
    },
}

/// Arguments of running a job.
#[derive(Debug, Args)]
struct Run {
    /// Kernel to boot; without one, the kernels are listed
    kernel: Option<String>,
    /// Memory in MiB [default: the kernel's row in tests/kernels/matrix.toml]
    #[arg(long, value_name = "MB")]
    memory: Option<u32>,
    /// Seconds until the machine is killed
    #[arg(long, value_name = "S", default_value_t = 120)]
    time_limit: u64,
    /// Boot a second machine on the same wire (10.99.0.1 and 10.99.0.2, fd00:99::1 and fd00:99::2 on eth0) and run this in it; it is stopped
    /// when the first one's job ends
    #[arg(long, value_name = "SHELL COMMAND")]
    two: Option<String>,
    /// Copy a host file into the job's folder of each machine
    #[arg(long, value_name = "FILE")]
    put: Vec<PathBuf>,
    /// Program of this host (a path with a slash) or of the machine, with its arguments; smc-policy is there
    #[arg(last = true, value_name = "JOB")]
    job: Vec<String>,
}

/// Runs the command and returns the job's exit code.
pub(crate) fn command(arguments: &Arguments, cache: &Cache) -> Result<u8> {
    match &arguments.other {
        Some(Other::Kernel { name }) => build::command(name, cache).map(|()| 0),
        None => run(&arguments.run, cache),
    }
}

fn run(arguments: &Run, cache: &Cache) -> Result<u8> {
    let Some(name) = &arguments.kernel else {
        for row in kernel::matrix()? {
            println!("{:<18} {}", row.name, row.about);
        }
        return Ok(0);
    };
    let row = kernel::row(name)?;
    if arguments.job.is_empty() {
        return Err(
            Error::new("no job given").next(format!("for example: cargo xtask lab {name} -- uname -a"))
        );
    }
    packages::ensure(packages::LAB, "the lab")?;
    let kernel = kernel::ready(&row, cache)?;
    eprintln!("{}: Linux {}", row.name, kernel.version);
    let mut files = vec![(cargo::build_program()?, "/bin/smc-policy".to_owned())];
    for path in &arguments.put {
        files.push((path.clone(), in_job_folder(path)?));
    }
    let mut first = Job {
        command: arguments.job.clone(),
        files: files.clone(),
        environment: terminal(),
        ..Job::default()
    };
    if first.command[0].contains('/') {
        let path = PathBuf::from(&first.command[0]);
        let inside = in_job_folder(&path)?;
        first.command[0].clone_from(&inside);
        first.files.push((path, inside));
    }
    let machine = |job| Machine {
        kernel: &kernel,
        memory: arguments.memory.unwrap_or(row.memory),
        time_limit: Duration::from_secs(arguments.time_limit),
        wire: None,
        job,
    };
    let outcomes = match &arguments.two {
        None => vec![machine(first).run(&AtomicBool::new(false), &mut |bytes| print(bytes))?],
        Some(script) => {
            let command = ["sh", "-c", script].map(str::to_owned).to_vec();
            let second = Job { command, files, environment: terminal(), ..Job::default() };
            let (first, second) =
                machine::pair(machine(first), machine(second), Until::First, &mut |_, bytes| print(bytes))?;
            vec![first, second]
        }
    };
    for complaint in outcomes.iter().flat_map(|outcome| &outcome.complaints) {
        eprintln!("kernel: {complaint}");
    }
    if outcomes.iter().any(|outcome| !outcome.complaints.is_empty()) {
        return Err(Error::new("the kernel complained about itself (see above)"));
    }
    eprintln!("{:.1} s", outcomes[0].took.as_secs_f32());
    Ok(outcomes.iter().map(|outcome| outcome.exit).find(|&exit| exit != 0).unwrap_or(0))
}

fn in_job_folder(path: &Path) -> Result<String> {
    match path.file_name() {
        Some(name) if path.is_file() => Ok(format!("{JOB_DIR}/{}", name.to_string_lossy())),
        _ => Err(Error::new(format!("{} is no file of this host", path.display()))),
    }
}

/// What a job has to know of our terminal: its own is always one, ours may be a file.
pub(crate) fn terminal() -> BTreeMap<String, String> {
    let plain = !std::io::stdout().is_terminal();
    plain.then(|| ("NO_COLOR".to_owned(), "1".to_owned())).into_iter().collect()
}

/// Passes a job's output on.
pub(crate) fn print(bytes: &[u8]) {
    let mut stdout = std::io::stdout();
    // A closed pipe is the reader's choice, not an error of the job.
    let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
}
