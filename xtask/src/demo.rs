//! `cargo xtask demo`: the main job on a real kernel, told by tests/src/bin/smc-policy-demo.rs.

use std::{sync::atomic::AtomicBool, time::Duration};

use crate::{
    cargo,
    error::{Error, Result},
    lab::{
        self, kernel,
        machine::{JOB_DIR, Job, Machine},
    },
    packages,
    paths::{self, Cache},
};

/// The lab kernel with SMC-D over loopback and hs_ctrl: it is committed, so the demonstration needs no download.
const KERNEL: &str = "7.3.4-smclab";
/// The policy that is applied, from policies/.
const POLICY: &str = "no-smc-to-the-internet.toml";

/// Boots the kernel and runs the demonstration in it.
pub(crate) fn command(cache: &Cache) -> Result<u8> {
    packages::ensure(packages::LAB, "the demonstration")?;
    let program = cargo::build_program()?;
    let story = cargo::build(crate::test::PACKAGE, "smc-policy-demo")?;
    let kernel = kernel::ready(&kernel::row(KERNEL)?, cache)?;
    println!("Booting Linux {} in an emulated machine ...", kernel.release);
    let machine = Machine {
        kernel: &kernel,
        memory: kernel.row.memory,
        time_limit: Duration::from_secs(180),
        wire: None,
        job: Job {
            // Relative to the job's folder, as a person would type it.
            command: vec!["smc-policy-demo".to_owned(), POLICY.to_owned()],
            environment: lab::terminal(),
            files: vec![
                (program, "/bin/smc-policy".to_owned()),
                (story, "/bin/smc-policy-demo".to_owned()),
                (paths::workspace().join("policies").join(POLICY), format!("{JOB_DIR}/{POLICY}")),
            ],
            trees: Vec::new(),
        },
    };
    let outcome = machine.run(&AtomicBool::new(false), &mut |bytes| lab::print(bytes))?;
    if let Some(complaint) = outcome.complaints.first() {
        return Err(Error::new(format!("the kernel complained about itself: {complaint}")));
    }
    println!("\n({:.0} s, on Linux {})", outcome.took.as_secs_f32(), kernel.release);
    Ok(outcome.exit)
}
