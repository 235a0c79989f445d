//! `monitor`: what the programs tell, as it happens: connections that are denied, peers that echo, the quarantine.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    os::fd::AsFd,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::Args;
use serde::Serialize;
use smc_policy_common::event::{Event, KINDS, Kind, RING_BYTES};

use super::{
    outcome::{Done, Exit, Failure},
    output::Output,
    words::{count, parse_duration},
};
use crate::{
    kernel::{
        capability,
        error::{Doing, KernelError},
        events::{RENEWAL, Reader, Wanted},
        guard::keep,
        instance::Instance,
        record::{self, Record},
        ring,
        state::State,
    },
    paths::Paths,
};

mod line;

use line::{By, Line};

#[derive(Debug, Args)]
pub(super) struct MonitorArguments {
    /// Only connections that are denied. Without this and --all: these, peers that echo TCP options, and who enters the
    /// quarantine.
    #[arg(long, conflicts_with = "all")]
    denies: bool,
    /// Connections that are allowed too.
    #[arg(long)]
    all: bool,
    /// One of N decisions, chosen at random; everything else is shown always.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    sample: u32,
    /// End after this time (60s, 5m, 2h, 1d).
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
    time: Option<Duration>,
    /// End after N events.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

/// What was lost, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Lost {
    decision: u64,
    echo: u64,
    quarantine: u64,
    reset: u64,
}

impl Lost {
    pub(super) fn new(by_kind: [u64; KINDS]) -> Self {
        let of = |kind: Kind| by_kind[kind as usize];
        Self {
            decision: of(Kind::Decision),
            echo: of(Kind::Echo),
            quarantine: of(Kind::Quarantine),
            reset: of(Kind::Reset),
        }
    }

    fn add(&mut self, more: Self) {
        self.decision += more.decision;
        self.echo += more.echo;
        self.quarantine += more.quarantine;
        self.reset += more.reset;
    }

    pub(super) fn sum(self) -> u64 {
        self.decision + self.echo + self.quarantine + self.reset
    }

    /// `12 lost (10 decisions, 2 echoes)`; nothing, if none was.
    pub(super) fn in_words(self) -> Option<String> {
        let parts = [
            (self.decision, "decision", "decisions"),
            (self.echo, "echo", "echoes"),
            (self.quarantine, "entry", "entries"),
            (self.reset, "reset", "resets"),
        ];
        let parts = parts.into_iter().filter(|(n, ..)| *n > 0);
        let parts: Vec<String> =
            parts.map(|(n, one, more)| format!("{n} {}", if n == 1 { one } else { more })).collect();
        (!parts.is_empty()).then(|| format!("{} lost ({})", self.sum(), parts.join(", ")))
    }
}

#[derive(Serialize)]
struct EndLine {
    kind: &'static str,
    events: u64,
    lost: Lost,
}

pub(super) fn run(paths: &Paths, arguments: &MonitorArguments, out: &mut Output) -> Done {
    capability::require("reading what the programs tell")?;
    let signals = ring::termination().doing(|| "wait for signals".into())?;
    let wanted =
        Wanted { denies: true, allows: arguments.all, guard: !arguments.denies, one_in: arguments.sample };
    let names = Names::new(paths)?;
    let reader = Reader::open(paths, wanted)?.ok_or_else(|| {
        Failure::new(Exit::Host, "no policy is in force, so nothing is told: `smc-policy apply`")
    })?;
    let session = Session {
        paths,
        wanted,
        names,
        most: arguments.count.unwrap_or(u64::MAX),
        end: arguments.time.and_then(|time| Instant::now().checked_add(time)),
        shown: 0,
        lost: Lost::default(),
        out,
    };
    session.run(reader, signals.as_fd())
}

/// Most events that are printed in one go: as many as the ring holds.
const BATCH: usize = RING_BYTES as usize / Event::BYTES;

/// Why it goes on or ends.
#[derive(PartialEq, Eq)]
enum Go {
    On,
    /// As was asked for.
    End,
    /// Nobody reads what is printed.
    Silent,
}

struct Session<'a> {
    paths: &'a Paths,
    wanted: Wanted,
    names: Names,
    most: u64,
    end: Option<Instant>,
    shown: u64,
    /// By readers that are over.
    lost: Lost,
    out: &'a mut Output,
}

impl Session<'_> {
    fn run(mut self, reader: Reader, signals: std::os::fd::BorrowedFd<'_>) -> Done {
        let mut reader = Some(reader);
        let mut renewal = Instant::now();
        let go = loop {
            let go = match &mut reader {
                Some(reader) => self.show(reader)?,
                None => Go::On,
            };
            if go != Go::On || self.end.is_some_and(|end| Instant::now() >= end) {
                break if go == Go::Silent { go } else { Go::End };
            }
            let time = self.time_to(renewal);
            let stdout = io::stdout();
            let inputs: Vec<_> = [signals].into_iter().chain(reader.as_ref().map(AsFd::as_fd)).collect();
            let (readable, has_gone) =
                ring::wait(&inputs, &[stdout.as_fd()], time).doing(|| "wait for events".into())?;
            if has_gone {
                break Go::Silent;
            }
            if readable.first() == Some(&true) {
                // What came before the signal is shown.
                match &mut reader {
                    Some(reader) => break self.show(reader)?,
                    None => break Go::End,
                }
            }
            if Instant::now() >= renewal {
                renewal = Instant::now() + RENEWAL;
                self.renew(&mut reader)?;
            }
        };
        if let Some(reader) = reader {
            self.lost.add(Lost::new(reader.lost()?));
        }
        if go != Go::Silent {
            self.conclude();
        }
        Ok(Exit::Ok)
    }

    /// Until the lease is to be moved on, or the time is over.
    fn time_to(&self, renewal: Instant) -> Duration {
        let next = self.end.map_or(renewal, |end| renewal.min(end));
        // A part of a millisecond is one, or it would be waited for in vain.
        next.saturating_duration_since(Instant::now()) + Duration::from_millis(1)
    }

    /// Moves the lease on. After `detach` it waits for the next `apply`.
    fn renew(&mut self, reader: &mut Option<Reader>) -> Result<(), Failure> {
        match reader {
            Some(current) if current.is_current() => current.renew(),
            Some(current) => {
                self.lost.add(Lost::new(current.lost()?));
                self.out.note("no policy is in force any more: waiting for the next `smc-policy apply`");
                *reader = None;
            }
            None => {
                *reader = Reader::open(self.paths, self.wanted)?;
                if reader.is_some() {
                    // Generations begin anew after `detach`.
                    self.names.known.clear();
                }
            }
        }
        Ok(())
    }

    /// Shows what there is, so much of it that the lease can be moved on in between.
    fn show(&mut self, reader: &mut Reader) -> Result<Go, Failure> {
        let clock = keep::clock();
        let mut text = String::new();
        for _ in 0..BATCH {
            if self.shown >= self.most {
                break;
            }
            let Some(event) = reader.take() else { break };
            let Some(line) = Line::of(&event, &clock, self.names.by(&event)) else { continue };
            self.shown += 1;
            if self.out.is_json() {
                text.push_str(&json(&line)?);
            } else {
                text.push_str(&line.text(self.out));
            }
            text.push('\n');
        }
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Ok(()) if self.shown >= self.most => Ok(Go::End),
            Ok(()) => Ok(Go::On),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(Go::Silent),
            Err(error) => Err(KernelError::Io { doing: "print events".into(), error }.into()),
        }
    }

    fn conclude(&mut self) {
        let Self { shown, lost, .. } = *self;
        if self.out.is_json() {
            if let Ok(text) = json(&EndLine { kind: "end", events: shown, lost }) {
                self.out.data(&text);
            }
        } else {
            let lost = lost.in_words().unwrap_or_else(|| "none lost".into());
            self.out
                .note(&format!("{}, {lost}", count(usize::try_from(shown).unwrap_or(usize::MAX), "event")));
        }
    }
}

/// One line of JSON.
fn json<T: Serialize>(data: &T) -> Result<String, Failure> {
    serde_json::to_string(&super::output::Document::new(data))
        .map_err(|e| Failure::new(Exit::Host, format!("cannot print JSON: {e}")))
}

/// Who decides, by generation and slot.
struct Names {
    run: PathBuf,
    /// `None`: there is no record of it.
    known: BTreeMap<u64, Option<Record>>,
}

/// So many generations are kept in mind.
const GENERATIONS: usize = 16;

impl Names {
    /// What is in force is read now: when its last events come, an apply may have removed it.
    fn new(paths: &Paths) -> Result<Self, Failure> {
        let state = State::read(paths)?;
        let mut known = BTreeMap::new();
        if let (Some(instance), Some(record)) = (&state.instance, state.record) {
            known.insert(Instance::generation(instance), Some(record));
        }
        Ok(Self { run: paths.run.clone(), known })
    }

    fn by(&mut self, event: &Event) -> By<'_> {
        if event.kind != Kind::Decision as u8 {
            return By::Nobody;
        }
        if event.flags & Event::QUARANTINED != 0 {
            return By::Quarantine;
        }
        let generation = event.generation;
        if !self.known.contains_key(&generation) {
            while self.known.len() >= GENERATIONS {
                self.known.pop_first();
            }
            self.known.insert(generation, read(&self.run, generation));
        }
        let Some(Some(record)) = self.known.get(&generation) else {
            return By::Unknown;
        };
        if record.default_slots.contains(&event.slot) {
            return By::Default;
        }
        match record.rule_slots.iter().find(|rule| rule.slot == event.slot) {
            Some(rule) => By::Rule(&rule.name, &rule.file),
            None => By::Unknown,
        }
    }
}

fn read(run: &Path, generation: u64) -> Option<Record> {
    record::read(&record::path_of(run, generation)).ok().flatten().filter(|r| r.generation == generation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_in_words() {
        assert_eq!(Lost::default().in_words(), None);
        let mut lost = Lost::new([10, 1, 0, 0]);
        assert_eq!(lost.in_words().as_deref(), Some("11 lost (10 decisions, 1 echo)"));
        lost.add(Lost::new([0, 0, 1, 2]));
        assert_eq!(lost.in_words().as_deref(), Some("14 lost (10 decisions, 1 echo, 1 entry, 2 resets)"));
    }
}
