//! `probe`: which peers echo options, which speak SMC, which do neither.

use std::{
    fs, io,
    net::{IpAddr, ToSocketAddrs},
    path::PathBuf,
    time::Duration,
};

use clap::Args;

use super::{
    check,
    outcome::{Done, Exit, Failure},
    output::Output,
    quarantine, sources,
};
use crate::{
    guard::probe::{
        Class,
        policy_targets::allowed,
        target::{self, DEFAULT_PORTS, Wanted},
    },
    kernel::capability,
    paths::Paths,
};

mod document;
mod pace;
mod text;

pub(super) use pace::PaceArguments;

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
    #[command(flatten)]
    pace: PaceArguments,
    /// Look at options only: complete no handshake, send no CLC proposal.
    #[arg(long)]
    options_only: bool,
    /// Show how each SYN was answered.
    #[arg(long)]
    details: bool,
    /// Put what echoes into the quarantine, as entries by command.
    #[arg(long)]
    quarantine: bool,
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

    if arguments.quarantine {
        // Before anything is sent.
        capability::require("the quarantine")?;
    }
    let reports = arguments.pace.probe(&targets, !arguments.options_only)?;
    let recorded = arguments.quarantine.then(|| quarantine::record(paths, &reports, out));
    let (recorded, failed) = match recorded.transpose() {
        Ok(recorded) => (recorded, None),
        // What was found is said all the same.
        Err(failure) => (None, Some(failure)),
    };
    if failed.is_none() {
        out.json(&document::Document::new(&reports, &skipped, recorded.as_ref()));
    }
    out.text(&text::text(&reports, &skipped, recorded.as_ref(), arguments.details, out));
    if let Some(failure) = failed {
        return Err(failure);
    }
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

fn milliseconds(time: Duration) -> f64 {
    // To the microsecond: more digits are noise.
    (time.as_secs_f64() * 1e6).round() / 1e3
}
