//! How fast peers are probed, and how far it is: for every verb that does so.

use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use clap::Args;

use crate::{
    cli::{
        outcome::{Exit, Failure},
        words::parse_duration,
    },
    guard::probe::{self, Pace, ProbeError, Progress, Report, Settings, Target},
};

/// A quick probe shows no progress.
const SHOW_PROGRESS_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(in crate::cli) struct PaceArguments {
    /// How long to wait for an answer to a SYN, which is sent again after a quarter and after half of it.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = parse_duration)]
    timeout: Duration,
    /// Targets at a time.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// Packets a second, to all targets together.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
}

impl PaceArguments {
    /// Probes these targets; the reports are in their order.
    pub(in crate::cli) fn probe(&self, targets: &[Target], negotiate: bool) -> Result<Vec<Report>, Failure> {
        let settings = Settings { timeout: self.timeout, negotiate };
        let pace = Pace { concurrency: self.concurrency as usize, rate: self.rate };
        let mut shown = Shown::new();
        let reports = probe::run(targets, settings, pace, |progress| shown.tell(progress));
        shown.clear();
        reports.map_err(|error| {
            let exit = match error {
                ProbeError::NotPermitted | ProbeError::NotPermittedToNegotiate => Exit::Permission,
                ProbeError::Io(_) => Exit::Host,
            };
            Failure::new(exit, error.to_string())
        })
    }
}

/// A line on a terminal that says how far it is, and is gone at the end.
struct Shown {
    start: Instant,
    is_terminal: bool,
    is_there: bool,
}

impl Shown {
    fn new() -> Self {
        Self { start: Instant::now(), is_terminal: io::stderr().is_terminal(), is_there: false }
    }

    fn tell(&mut self, Progress { done, total }: Progress) {
        if self.is_terminal && self.start.elapsed() >= SHOW_PROGRESS_AFTER {
            self.is_there = true;
            self.write(&format!("\r{done} of {total} targets probed\x1b[K"));
        }
    }

    fn clear(&mut self) {
        if self.is_there {
            self.write("\r\x1b[K");
        }
    }

    fn write(&self, text: &str) {
        let mut stderr = io::stderr().lock();
        // Nobody reads it: nothing is lost.
        let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
    }
}
