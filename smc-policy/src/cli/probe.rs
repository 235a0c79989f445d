//! `probe`: which peers echo options, which speak SMC, which do neither.

use std::{
    fs,
    io::{self, IsTerminal, Write},
    net::{IpAddr, ToSocketAddrs},
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Args;

use super::{
    check,
    outcome::{Done, Exit, Failure},
    output::Output,
    sources,
    words::parse_duration,
};
use crate::{
    guard::probe::{
        self, Class, Pace, ProbeError, Progress, Settings,
        policy_targets::allowed,
        target::{self, DEFAULT_PORTS, Wanted},
    },
    paths::Paths,
};

mod document;
mod text;

/// A quick probe shows no progress.
const SHOW_PROGRESS_AFTER: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(super) struct ProbeArguments {
    /// Hosts to probe: 192.0.2.1:443, [2001:db8::1]:443, server.example:443; without a port 443, 80 and 22 are tried.
    #[arg(value_name = "HOST[:PORT]")]
    targets: Vec<String>,
    /// Probe the targets in this file too: one a line, # begins a comment; - is the standard input.
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,
    /// Probe the addresses and small networks that the installed policy, or that in PATH, allows outbound.
    #[arg(long, value_name = "PATH", num_args = 0..=1, require_equals = true)]
    from_policy: Option<Option<PathBuf>>,
    /// How long to wait for an answer to a SYN, which is sent again after a quarter and after half of it.
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = parse_duration)]
    timeout: Duration,
    /// Targets at a time.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// Packets a second, to all targets together.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// Look at options only: complete no handshake, send no CLC proposal.
    #[arg(long)]
    options_only: bool,
    /// Show how each SYN was answered.
    #[arg(long)]
    details: bool,
}

pub(super) fn run(paths: &Paths, arguments: &ProbeArguments, out: &mut Output) -> Done {
    let mut wanted = named(arguments)?;
    let mut skipped = Vec::new();
    if let Some(path) = &arguments.from_policy {
        let named: Vec<PathBuf> = path.iter().cloned().collect();
        let files = sources::read(paths, &named)?;
        let found = allowed(&check::usable(&files, out)?);
        wanted.extend(found.wanted);
        skipped = found.skipped;
    } else if wanted.is_empty() && arguments.file.is_empty() {
        return Err(Failure::usage("nothing to probe: name a target, --file FILE, or --from-policy"));
    }
    let targets = target::expand(&wanted, look_up).map_err(|error| Failure::new(Exit::Host, error))?;
    if wanted.iter().any(|one| one.port.is_none()) {
        let ports = DEFAULT_PORTS.map(|port| port.to_string()).join(", ");
        out.note(&format!("Where no port is said, these are tried: {ports}."));
    }

    let settings = Settings { timeout: arguments.timeout, negotiate: !arguments.options_only };
    let pace = Pace { concurrency: arguments.concurrency as usize, rate: arguments.rate };
    let mut shown = Shown::new();
    let reports = probe::run(&targets, settings, pace, |progress| shown.tell(progress));
    shown.clear();
    let reports = reports.map_err(|error| {
        let exit = match error {
            ProbeError::NotPermitted | ProbeError::NotPermittedToNegotiate => Exit::Permission,
            ProbeError::Io(_) => Exit::Host,
        };
        Failure::new(exit, error.to_string())
    })?;
    out.json(&document::Document::new(&reports, &skipped));
    out.text(&text::text(&reports, &skipped, arguments.details, out));
    let echoes = reports.iter().any(|report| report.finding.class == Class::Echoes);
    Ok(if echoes { Exit::No } else { Exit::Ok })
}

/// The targets of the command line and of files.
fn named(arguments: &ProbeArguments) -> Result<Vec<Wanted>, Failure> {
    let mut wanted = Vec::new();
    for text in &arguments.targets {
        wanted.push(target::parse(text).map_err(Failure::usage)?);
    }
    for path in &arguments.file {
        let shown = path.display();
        let text =
            if path.as_os_str() == "-" { io::read_to_string(io::stdin()) } else { fs::read_to_string(path) };
        let text = text.map_err(|error| Failure::usage(format!("{shown}: {error}")))?;
        let found = target::parse_file(&text).map_err(|errors| {
            let lines: Vec<String> =
                errors.iter().map(|(line, error)| format!("{shown}:{line}: {error}")).collect();
            Failure::usage(lines.join("\n"))
        })?;
        wanted.extend(found);
    }
    Ok(wanted)
}

fn look_up(name: &str) -> io::Result<Vec<IpAddr>> {
    Ok((name, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
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

fn milliseconds(time: Duration) -> f64 {
    // To the microsecond: more digits are noise.
    (time.as_secs_f64() * 1e6).round() / 1e3
}
