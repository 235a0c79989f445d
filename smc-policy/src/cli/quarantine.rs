//! `quarantine`: shows and changes which peers this host does not negotiate SMC with for a while.
//!
//! While a policy is in force it works on the kernel's maps and saves them after each change. Without one it works on what is
//! saved, which the next `apply` restores.

use std::{fs, io, net::IpAddr, path::PathBuf, time::Duration};

use clap::{Args, Subcommand};
use serde::Serialize;
use smc_policy_common::quarantine::{COMMANDED_ENTRIES, Cause};

use super::{
    outcome::{Done, Exit, Failure},
    output::Output,
    question::{self, Subject},
    words::{duration, many, parse_duration},
};
use crate::{
    guard::quarantine::{
        Clock, Counts, File, Record, Store, cause_named, directions_of, key, longest, merge, sort,
    },
    kernel::{
        capability,
        guard::{Quarantine, keep},
        lock::{self, Lock},
        record::write_beside,
    },
    paths::Paths,
};

mod probed;
mod recheck;
pub(super) mod text;

pub(super) use probed::{Recorded, record};

#[derive(Debug, Args)]
pub(super) struct QuarantineArguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Show who is in quarantine, why, and for how long.
    List,
    /// Keep a peer off SMC for a while.
    Add(AddArguments),
    /// Take a peer out: with a port, the entry of that service; without, all entries of the address.
    Remove {
        /// 192.0.2.1, 192.0.2.1:443, [2001:db8::1]:443.
        peer: String,
    },
    /// Take everybody out.
    Flush {
        /// Only what programs learned; entries by command stay.
        #[arg(long)]
        learned: bool,
    },
    /// Write all entries that hold as JSON, for another host.
    Export {
        /// Without: standard output.
        file: Option<PathBuf>,
    },
    /// Take in what another host exported: of two entries about the same, the one that holds longer; their counts add up.
    Import {
        /// `-`: standard input.
        file: PathBuf,
    },
    /// Save it for the next boot. Every change by command does that too, and `detach`.
    Save,
    /// Put back what is saved. The first `apply` after a boot does that.
    Restore,
    /// Probe peers again: who no longer echoes is taken out, who does is kept.
    Recheck(recheck::RecheckArguments),
}

#[derive(Debug, Args)]
struct AddArguments {
    /// 192.0.2.1, 192.0.2.1:443, [2001:db8::1]:443; without a port: all of its services.
    peer: String,
    /// How long (60s, 5m, 2h, 7d; at most 7d). Without: an hour, and twice as long each time it is added again afterwards.
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_span)]
    span: Option<Duration>,
    /// Why: echo, short-echo, no-clc, silence, reset, probe, operator; rdma-path and link-check are about an address, and
    /// connections in both directions.
    #[arg(long, default_value = "operator", value_parser = cause_named)]
    cause: Cause,
    /// A note, which `list` and `explain` show.
    #[arg(long, value_name = "TEXT")]
    comment: Option<String>,
}

fn parse_span(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if time.as_secs() > longest() {
        return Err("it must be at most 7 d; what is to last longer is a rule: action = \"deny\"".into());
    }
    Ok(time)
}

#[derive(Serialize)]
struct ListDocument<'a> {
    /// "kernel", or "file" when no policy is in force.
    source: &'static str,
    entries: Vec<Listed<'a>>,
    /// Learned entries that had to go for others; `null`: no policy is in force.
    evicted: Option<u64>,
    /// Entries that could not be learned for want of memory.
    refused: Option<u64>,
}

#[derive(Serialize)]
struct Listed<'a> {
    #[serde(flatten)]
    record: &'a Record,
    /// Seconds; 0: expired.
    expires_in: u64,
}

#[derive(Serialize)]
struct ChangeDocument<'a> {
    /// "kernel", or "file" when no policy is in force.
    source: &'static str,
    /// How many entries were put in, taken out or written.
    changed: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    entry: Option<Listed<'a>>,
}

pub(super) fn run(paths: &Paths, arguments: &QuarantineArguments, out: &mut Output) -> Done {
    // Without privileges the pins are invisible, not missing.
    capability::require("the quarantine")?;
    match &arguments.what {
        What::List => list(paths, out),
        What::Add(arguments) => add(paths, arguments, out),
        What::Remove { peer } => remove(paths, peer, out),
        What::Flush { learned } => flush(paths, *learned, out),
        What::Export { file } => export(paths, file.as_ref(), out),
        What::Import { file } => import(paths, file, out),
        What::Save => save(paths, out),
        What::Restore => restore(paths, out),
        What::Recheck(arguments) => recheck::run(paths, arguments, out),
    }
}

/// Where the quarantine is now.
struct Place<'a> {
    paths: &'a Paths,
    clock: Clock,
    /// None: no policy is in force, and the saved file is meant.
    kernel: Option<Quarantine>,
}

impl<'a> Place<'a> {
    fn open(paths: &'a Paths) -> Result<Self, Failure> {
        Ok(Self { paths, clock: keep::clock(), kernel: Quarantine::open(&paths.pins())? })
    }

    fn source(&self) -> &'static str {
        if self.kernel.is_some() { "kernel" } else { "file" }
    }

    fn now(&self) -> u64 {
        self.clock.now()
    }

    /// All entries, sorted.
    fn records(&self) -> Result<Vec<Record>, Failure> {
        match &self.kernel {
            Some(quarantine) => Ok(keep::snapshot(self.paths, quarantine, &self.clock)?),
            None => {
                let mut records = keep::saved(self.paths)?.entries;
                records.retain(|record| record.holds(self.now()));
                sort(&mut records);
                Ok(records)
            }
        }
    }

    /// After a change of the kernel's maps. They are changed already: that this cannot be saved is a warning.
    fn save(&self, adds: &[Record], out: &Output) {
        if let Err(e) = keep::save(self.paths, adds) {
            out.warn(&format!("{e}: it holds now, but not after a reboot"));
        }
    }

    /// Without a policy in force: the file's entries anew.
    fn write(&self, entries: Vec<Record>) -> Result<(), Failure> {
        Ok(keep::write(self.paths, &File { saved: self.now(), entries })?)
    }

    /// The entry by command of exactly this key.
    fn commanded(&self, ip: IpAddr, port: u16) -> Result<Option<Record>, Failure> {
        let wanted = (ip, port, Store::Commanded);
        match &self.kernel {
            Some(quarantine) => Ok(keep::one(self.paths, quarantine, wanted, &self.clock)?),
            None => Ok(self.records()?.into_iter().find(|record| key(record) == wanted)),
        }
    }

    /// Puts entries in the place of those of the same keys, and saves. Under the lock.
    fn put(&self, new: &[Record], out: &Output) -> Result<(), Failure> {
        let Some(quarantine) = &self.kernel else {
            let keys: Vec<_> = new.iter().map(key).collect();
            let mut all = self.records()?;
            all.retain(|record| !keys.contains(&key(record)));
            all.extend_from_slice(new);
            check_room(&all)?;
            return self.write(all);
        };
        new.iter().try_for_each(|record| keep::replace(quarantine, record, &self.clock))?;
        self.save(new, out);
        Ok(())
    }

    /// Takes entries out, and saves. How many were there. Under the lock.
    fn remove(&self, gone: &[Record], out: &Output) -> Result<usize, Failure> {
        let Some(quarantine) = &self.kernel else {
            let mut all = self.records()?;
            let before = all.len();
            all.retain(|record| gone.iter().all(|other| key(other) != key(record)));
            let removed = before - all.len();
            if removed > 0 {
                self.write(all)?;
            }
            return Ok(removed);
        };
        let mut removed = 0;
        for record in gone {
            removed += usize::from(quarantine.remove(record.store, record.kernel_key())?);
        }
        if removed > 0 {
            self.save(&[], out);
        }
        Ok(removed)
    }

    /// Says that nothing in the kernel was changed, if so.
    fn note(&self, out: &mut Output) {
        if self.kernel.is_none() {
            out.text("No policy is in force: this is saved, and holds from the next `smc-policy apply` on.");
        }
    }
}

fn lock(paths: &Paths, out: &Output) -> Result<Lock, Failure> {
    Ok(lock::take(&paths.lock(), || out.note("waiting for another smc-policy to finish"))?)
}

fn listed(record: &Record, now: u64) -> Listed<'_> {
    Listed { record, expires_in: record.until.saturating_sub(now) }
}

/// A peer, with its service port or 0.
fn peer(text: &str) -> Result<(IpAddr, u16), Failure> {
    match question::parse(text) {
        Ok(Subject::Peer { port: Some(0), .. }) => {
            Err(Failure::usage("no service has port 0; leave it out to mean all"))
        }
        Ok(Subject::Peer { ip, port }) => Ok((ip, port.unwrap_or(0))),
        _ => Err(Failure::usage(format!(
            "'{text}' is no peer; write an address, with or without a port: 192.0.2.1, 192.0.2.1:443, [2001:db8::1]:443"
        ))),
    }
}

fn list(paths: &Paths, out: &mut Output) -> Done {
    let place = Place::open(paths)?;
    let records = place.records()?;
    let counted = place.kernel.as_ref().map(Quarantine::counted).transpose()?;
    out.json(&ListDocument {
        source: place.source(),
        entries: records.iter().map(|record| listed(record, place.now())).collect(),
        evicted: counted.map(|c| c.evicted),
        refused: counted.map(|c| c.refused),
    });
    if place.kernel.is_none() {
        out.text(
            "No policy is in force: this is what is saved, and what the next `smc-policy apply` restores.",
        );
    }
    if records.is_empty() {
        out.text("Nobody is in quarantine.");
    } else {
        out.text(&text::table(&records, place.now(), out));
        out.text(&format!("{}.", text::summary(&records, place.now())));
    }
    if let Some(counted) = counted.filter(|c| c.evicted + c.refused > 0) {
        out.text(&format!(
            "{} learned had to go for others, {} found no memory.",
            many(counted.evicted as usize, "entry", "entries"),
            counted.refused
        ));
    }
    Ok(Exit::Ok)
}

fn add(paths: &Paths, arguments: &AddArguments, out: &mut Output) -> Done {
    let AddArguments { peer: words, span, cause, comment } = arguments;
    let (ip, port) = peer(words)?;
    if port != 0 && directions_of(*cause) != directions_of(Cause::Operator) {
        return Err(Failure::usage(format!(
            "this cause is about the path to an address, whatever the port: write {ip} without :{port}"
        )));
    }
    let _lock = lock(paths, out)?;
    let place = Place::open(paths)?;
    let now = place.now();
    let before = place.commanded(ip, port)?;
    let span = span.map(|span| span.as_secs() as u32);
    let mut record = Record::commanded(ip, port, *cause, span, before.as_ref(), now);
    record.comment = comment.clone().or(record.comment);
    place.put(std::slice::from_ref(&record), out)?;
    out.json(&ChangeDocument { source: place.source(), changed: 1, entry: Some(listed(&record, now)) });
    out.text(&format!(
        "{} is in quarantine for {}: {} without SMC.",
        text::peer(&record),
        duration(record.until - now),
        if directions_of(*cause) == directions_of(Cause::Operator) {
            "this host connects to it"
        } else {
            "connections to it and from it are made"
        }
    ));
    place.note(out);
    Ok(Exit::Ok)
}

/// What the kernel will take at the next apply.
fn check_room(records: &[Record]) -> Result<(), Failure> {
    let commanded = records.iter().filter(|record| record.store == Store::Commanded).count();
    let room = COMMANDED_ENTRIES as usize;
    if commanded > room { Err(keep::full(room, commanded - room).into()) } else { Ok(()) }
}

fn remove(paths: &Paths, words: &str, out: &mut Output) -> Done {
    let (ip, port) = peer(words)?;
    let is_meant = |record: &Record| record.peer == ip && (port == 0 || record.port == port);
    let (place, removed) = take_out(paths, is_meant, out)?;
    out.json(&ChangeDocument { source: place.source(), changed: removed, entry: None });
    let left = place.records()?.into_iter().any(|r| r.peer == ip && r.port == 0 && r.holds(place.now()));
    if removed > 0 {
        out.text(&format!("Removed {} about {words}.", many(removed, "entry", "entries")));
    } else {
        out.text(&format!("{words} has no entry in the quarantine."));
    }
    if left {
        out.text(&format!(
            "All services of {ip} are in quarantine: `smc-policy quarantine remove {ip}` lifts that."
        ));
    }
    if removed > 0 {
        place.note(out);
    }
    Ok(if removed > 0 { Exit::Ok } else { Exit::No })
}

fn flush(paths: &Paths, learned: bool, out: &mut Output) -> Done {
    let (place, removed) = take_out(paths, |record| !learned || record.store == Store::Learned, out)?;
    out.json(&ChangeDocument { source: place.source(), changed: removed, entry: None });
    out.text(&format!("Removed {}.", many(removed, "entry", "entries")));
    if removed > 0 {
        place.note(out);
    }
    Ok(Exit::Ok)
}

/// Removes entries, in the kernel or in the file. How many.
fn take_out<'a>(
    paths: &'a Paths,
    is_meant: impl Fn(&Record) -> bool,
    out: &mut Output,
) -> Result<(Place<'a>, usize), Failure> {
    let _lock = lock(paths, out)?;
    let place = Place::open(paths)?;
    let mut gone = place.records()?;
    gone.retain(is_meant);
    let removed = place.remove(&gone, out)?;
    Ok((place, removed))
}

fn export(paths: &Paths, file: Option<&PathBuf>, out: &mut Output) -> Done {
    let place = Place::open(paths)?;
    let mut entries = place.records()?;
    entries.retain(|record| record.holds(place.now()));
    let number = entries.len();
    let failed =
        |e: &dyn std::fmt::Display| Failure::new(Exit::Host, format!("cannot export the quarantine: {e}"));
    let text = File { saved: place.now(), entries }.to_text().map_err(|e| failed(&e))?;
    match file {
        None => out.data(&text),
        Some(file) => {
            write_beside(file, text.as_bytes()).map_err(|e| failed(&format!("{}: {e}", file.display())))?;
            out.json(&ChangeDocument { source: place.source(), changed: number, entry: None });
            out.text(&format!("Exported {} to {}.", many(number, "entry", "entries"), file.display()));
        }
    }
    Ok(Exit::Ok)
}

fn import(paths: &Paths, file: &PathBuf, out: &mut Output) -> Done {
    let shown = file.display();
    let read =
        if file.as_os_str() == "-" { io::read_to_string(io::stdin()) } else { fs::read_to_string(file) };
    let text = read.map_err(|e| Failure::usage(format!("cannot read {shown}: {e}")))?;
    let File { saved, entries } =
        File::parse(&text).map_err(|e| Failure::usage(format!("{shown} is no exported quarantine: {e}")))?;
    let _lock = lock(paths, out)?;
    let place = Place::open(paths)?;
    let all = entries.len();
    let number = match &place.kernel {
        Some(quarantine) => {
            let number = keep::put(quarantine, entries.clone(), saved, Counts::Add, &place.clock)?;
            place.save(&entries, out);
            number
        }
        None => {
            let new = keep::by_clock(entries, saved, &place.clock);
            let number = new.len();
            let merged = merge(place.records()?, new, Counts::Add);
            check_room(&merged)?;
            place.write(merged)?;
            number
        }
    };
    out.json(&ChangeDocument { source: place.source(), changed: number, entry: None });
    out.text(&format!("Imported {}.", many(number, "entry", "entries")));
    if number < all {
        out.text(&format!("{} had expired.", many(all - number, "entry", "entries")));
    }
    place.note(out);
    Ok(Exit::Ok)
}

fn save(paths: &Paths, out: &mut Output) -> Done {
    let _lock = lock(paths, out)?;
    let Some(number) = keep::save(paths, &[])? else { return Err(nothing("there is nothing to save")) };
    out.json(&ChangeDocument { source: "kernel", changed: number, entry: None });
    out.text(&format!("Saved {} in {}.", many(number, "entry", "entries"), keep::path(paths).display()));
    Ok(Exit::Ok)
}

fn restore(paths: &Paths, out: &mut Output) -> Done {
    let _lock = lock(paths, out)?;
    if Quarantine::open(&paths.pins())?.is_none() {
        return Err(nothing("`smc-policy apply` restores the quarantine by itself"));
    }
    let number = keep::restore(paths)?;
    out.json(&ChangeDocument { source: "kernel", changed: number, entry: None });
    out.text(&format!("Restored {}.", many(number, "entry", "entries")));
    Ok(Exit::Ok)
}

fn nothing(then: &str) -> Failure {
    Failure::new(
        Exit::Host,
        format!("no policy is in force, and without one the kernel has no quarantine: {then}"),
    )
}
