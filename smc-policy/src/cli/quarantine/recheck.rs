//! `quarantine recheck`: probes peers in quarantine, and lifts the entries of those that no longer echo.

use std::net::{IpAddr, SocketAddr};

use clap::Args;
use serde::Serialize;
use smc_policy_common::quarantine::Cause;

use super::{Place, lock, peer, text};
use crate::{
    cli::{
        outcome::{Done, Exit, Failure},
        output::{Output, Style, columns},
        probe::PaceArguments,
        words::{duration, many},
    },
    guard::{
        probe::{Class, Report, Target},
        quarantine::{Record, Store, cause_name, key},
        recheck::{Follows, Wanted, confirmed, follows, reconsidered},
    },
    kernel::{hook::Hook, state::State},
    paths::Paths,
};

#[derive(Debug, Args)]
pub(super) struct RecheckArguments {
    /// 192.0.2.1, 192.0.2.1:443, [2001:db8::1]:443: the entries of these; without, all but those that an operator made.
    #[arg(value_name = "PEER[:PORT]")]
    peers: Vec<String>,
    /// Those that an operator made, too.
    #[arg(long)]
    all: bool,
    /// Probe, say what would be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    pace: PaceArguments,
}

/// What became of an entry.
#[derive(Debug)]
struct Checked<'a> {
    /// As it was.
    before: Record,
    /// What was found.
    found: Vec<&'a Report>,
    follows: Follows,
    /// As it is, if it was confirmed.
    now: Option<Record>,
}

pub(super) fn run(paths: &Paths, arguments: &RecheckArguments, out: &mut Output) -> Done {
    let named = arguments.peers.iter().map(|words| peer(words));
    let named = named.map(|named| named.map(|(ip, port)| (ip, (port != 0).then_some(port))));
    let wanted = Wanted { named: named.collect::<Result<_, _>>()?, operators: arguments.all };
    if is_judged(paths)? {
        return Err(Failure::new(
            Exit::Host,
            "the policy in force also judges what a probe sends (forwarded = true): peers in quarantine would look clean. \
             Probe them from another host, or `smc-policy apply` with forwarded = false first",
        ));
    }

    let place = Place::open(paths)?;
    let all = place.records()?;
    let meant: Vec<&Record> = all.iter().filter(|r| r.holds(place.now()) && wanted.means(r)).collect();
    let services: Vec<Result<Vec<SocketAddr>, String>> =
        meant.iter().map(|record| wanted.services(record, &all)).collect();
    let mut targets: Vec<SocketAddr> = services.iter().flatten().flatten().copied().collect();
    targets.sort();
    targets.dedup();
    let targets: Vec<Target> = targets.into_iter().map(|address| Target { address, name: None }).collect();
    // Without the lock: this takes seconds, or minutes.
    let reports = if targets.is_empty() { Vec::new() } else { arguments.pace.probe(&targets, true)? };

    let checked = meant.iter().zip(services).map(|(record, services)| {
        let (found, follows) = match services {
            Ok(services) => {
                let of = |report: &&Report| services.contains(&report.target.address);
                let found: Vec<&Report> = reports.iter().filter(of).collect();
                let follows = follows(record, &found);
                (found, follows)
            }
            Err(why) => (Vec::new(), Follows::Keep(why)),
        };
        Checked { before: (*record).clone(), found, follows, now: None }
    });
    let mut checked: Vec<Checked<'_>> = checked.collect();
    let place = if arguments.dry_run { place } else { act(paths, &mut checked, out)? };

    let missing: Vec<&str> = (arguments.peers.iter().zip(&wanted.named))
        .filter(|(_, (ip, port))| !meant.iter().any(|record| is_of(record, *ip, *port)))
        .map(|(words, _)| words.as_str())
        .collect();
    out.json(&Document::new(&place, arguments.dry_run, &checked, &missing));
    out.text(&told(&checked, &missing, arguments.dry_run, place.now(), out));
    if !arguments.dry_run && checked.iter().any(|c| !matches!(c.follows, Follows::Keep(_))) {
        place.note(out);
    }
    let echoes = reports.iter().any(|report| report.finding.class == Class::Echoes);
    Ok(if echoes || !missing.is_empty() { Exit::No } else { Exit::Ok })
}

fn is_of(record: &Record, ip: IpAddr, port: Option<u16>) -> bool {
    Wanted { named: vec![(ip, port)], operators: false }.means(record)
}

/// Whether the tc programs in force judge SYNs without a socket, as a probe sends them.
fn is_judged(paths: &Paths) -> Result<bool, Failure> {
    let record = State::read(paths)?.record;
    Ok(record
        .is_some_and(|record| record.hook == Hook::Tc && record.config.forwarded && !record.config.observe))
}

/// Lifts and confirms. What was met again, changed or taken out meanwhile is left as it is.
fn act<'a>(paths: &'a Paths, checked: &mut [Checked<'_>], out: &Output) -> Result<Place<'a>, Failure> {
    let _lock = lock(paths, out)?;
    let place = Place::open(paths)?;
    let there = place.records()?;
    let mut gone = Vec::new();
    let mut new = Vec::new();
    for one in checked.iter_mut().filter(|one| !matches!(one.follows, Follows::Keep(_))) {
        let now = there.iter().find(|record| key(record) == key(&one.before));
        one.follows = reconsidered(one.follows.clone(), &one.before, now);
        match (&one.follows, now) {
            (Follows::Lift, Some(record)) => gone.push(record.clone()),
            (Follows::Confirm, Some(record)) => {
                let record = confirmed(record, &one.found, place.now());
                one.now = Some(record.clone());
                new.push(record);
            }
            _ => {}
        }
    }
    if !gone.is_empty() {
        place.remove(&gone, out)?;
    }
    if !new.is_empty() {
        place.put(&new, out)?;
    }
    Ok(place)
}

#[derive(Serialize)]
struct Document<'a> {
    /// "kernel", or "file" when no policy is in force.
    source: &'static str,
    dry_run: bool,
    lifted: usize,
    confirmed: usize,
    kept: usize,
    entries: Vec<EntryDocument<'a>>,
    /// Peers that were named and have no entry that holds.
    missing: &'a [&'a str],
}

#[derive(Serialize)]
struct EntryDocument<'a> {
    peer: IpAddr,
    /// 0: all.
    port: u16,
    store: Store,
    cause: &'static str,
    /// "lifted", "confirmed" or "kept".
    action: &'static str,
    /// Why it is kept; `null`: it is not, or the peer echoes.
    reason: Option<&'a str>,
    /// Seconds; 0: it is gone.
    expires_in: u64,
    found: Vec<FoundDocument>,
}

#[derive(Serialize)]
struct FoundDocument {
    port: u16,
    class: Class,
}

impl<'a> Document<'a> {
    fn new(place: &Place<'_>, dry_run: bool, checked: &'a [Checked<'a>], missing: &'a [&'a str]) -> Self {
        let [lifted, confirmed, kept] = counts(checked);
        Self {
            source: place.source(),
            dry_run,
            lifted,
            confirmed,
            kept,
            entries: checked.iter().map(|one| EntryDocument::new(one, dry_run, place.now())).collect(),
            missing,
        }
    }
}

impl<'a> EntryDocument<'a> {
    fn new(one: &'a Checked<'a>, dry_run: bool, now: u64) -> Self {
        let Record { peer, port, store, cause, .. } = one.before;
        let (action, reason) = match &one.follows {
            Follows::Lift => ("lifted", None),
            Follows::Confirm => ("confirmed", None),
            Follows::Keep(why) => ("kept", Some(why.as_str())),
        };
        let until = one.now.as_ref().unwrap_or(&one.before).until;
        let is_gone = one.follows == Follows::Lift && !dry_run;
        let of = |report: &&Report| FoundDocument {
            port: report.target.address.port(),
            class: report.finding.class,
        };
        Self {
            peer,
            port,
            store,
            cause: cause_name(cause),
            action,
            reason,
            expires_in: if is_gone { 0 } else { until.saturating_sub(now) },
            found: one.found.iter().map(of).collect(),
        }
    }
}

/// Lifted, confirmed, kept.
fn counts(checked: &[Checked<'_>]) -> [usize; 3] {
    let number = |is: fn(&Follows) -> bool| checked.iter().filter(|one| is(&one.follows)).count();
    [
        number(|f| *f == Follows::Lift),
        number(|f| *f == Follows::Confirm),
        number(|f| matches!(f, Follows::Keep(_))),
    ]
}

/// A line for each entry; then how many.
fn told(checked: &[Checked<'_>], missing: &[&str], dry_run: bool, now: u64, out: &Output) -> String {
    let rows: Vec<Vec<String>> = checked
        .iter()
        .map(|one| {
            let (style, action) = match &one.follows {
                Follows::Lift => (Style::Good, "lifted"),
                Follows::Confirm => (Style::Bad, "confirmed"),
                Follows::Keep(_) => (Style::Note, "kept"),
            };
            let classes = || {
                let mut classes: Vec<&str> = one.found.iter().map(|r| r.finding.class.words()).collect();
                classes.dedup();
                classes.join(", ")
            };
            let what = match &one.follows {
                Follows::Lift => classes(),
                Follows::Confirm => {
                    let until = one.now.as_ref().unwrap_or(&one.before).until;
                    format!("{}; expires in {}", classes(), duration(until.saturating_sub(now)))
                }
                Follows::Keep(why) => why.clone(),
            };
            let cause = match one.before {
                Record { store: Store::Commanded, cause: Cause::Operator, .. } => "by command".to_owned(),
                Record { store: Store::Commanded, cause, .. } => format!("{}, by command", cause_name(cause)),
                Record { cause, .. } => cause_name(cause).to_owned(),
            };
            vec![text::peer(&one.before), cause, out.paint(style, action), what]
        })
        .collect();
    let mut told = columns(&rows, &[]);
    for words in missing {
        told.push_str(&format!("{words} has no entry in the quarantine that holds.\n"));
    }
    if checked.is_empty() && missing.is_empty() {
        told.push_str("Nobody is in quarantine.\n");
    }
    if !checked.is_empty() {
        let [lifted, confirmed, kept] = counts(checked);
        let number = many(checked.len(), "entry", "entries");
        let would = if dry_run { " Nothing was changed (--dry-run)." } else { "" };
        told.push_str(&format!("{number}: {lifted} lifted, {confirmed} confirmed, {kept} kept.{would}\n"));
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::probe::{Finding, Observations};

    fn report(address: &str, class: Class) -> Report {
        let target = Target { address: address.parse().unwrap(), name: None };
        Report { target, seen: Observations::default(), finding: Finding { class, notes: vec![] } }
    }

    fn record(peer: &str, port: u16, cause: Cause) -> Record {
        Record::commanded(peer.parse().unwrap(), port, cause, None, None, 1000)
    }

    #[test]
    fn what_people_read() {
        let reports = [
            report("192.0.2.1:443", Class::Ignores),
            report("192.0.2.2:443", Class::Smc),
            report("[2001:db8::1]:80", Class::Echoes),
            report("192.0.2.4:443", Class::NoAnswer),
        ];
        let learned = |peer, port, cause| Record { store: Store::Learned, ..record(peer, port, cause) };
        let records = [
            learned("192.0.2.1", 443, Cause::Echo),
            record("192.0.2.2", 0, Cause::Probe),
            Record { span: 60, until: 1060, ..learned("2001:db8::1", 80, Cause::Silence) },
            learned("192.0.2.4", 443, Cause::Reset),
        ];
        let mut checked: Vec<Checked<'_>> = (records.iter().zip(&reports))
            .map(|(record, report)| Checked {
                before: record.clone(),
                found: vec![report],
                follows: follows(record, &[report]),
                now: None,
            })
            .collect();
        checked[2].now = Some(confirmed(&records[2], &[&reports[2]], 1020));
        for (peer, cause) in [("192.0.2.5", Cause::Operator), ("192.0.2.6", Cause::LinkCheck)] {
            let before = record(peer, 0, cause);
            let follows = Follows::Keep(Wanted::default().services(&before, &[]).unwrap_err());
            checked.push(Checked { before, found: vec![], follows, now: None });
        }
        let out = Output::new(false);
        insta::assert_snapshot!(told(&checked, &["192.0.2.9:1"], false, 1020, &out), @r"
        192.0.2.1:443     echo                    lifted     plain TCP
        192.0.2.2         probe, by command       lifted     genuine SMC
        [2001:db8::1]:80  silence                 confirmed  echoes options; expires in 1 h
        192.0.2.4:443     reset                   kept       does not answer
        192.0.2.5         by command              kept       an operator's: name it, or say --all
        192.0.2.6         link-check, by command  kept       is about RDMA, which a probe does not test: `smc-policy quarantine remove` lifts it
        192.0.2.9:1 has no entry in the quarantine that holds.
        6 entries: 2 lifted, 1 confirmed, 3 kept.
        ");
        insta::assert_snapshot!(told(&checked[..1], &[], true, 1020, &out), @r"
        192.0.2.1:443  echo  lifted  plain TCP
        1 entry: 1 lifted, 0 confirmed, 0 kept. Nothing was changed (--dry-run).
        ");
        insta::assert_snapshot!(told(&[], &[], false, 1020, &out), @"Nobody is in quarantine.");
        let documents: Vec<EntryDocument<'_>> =
            checked[..4].iter().map(|one| EntryDocument::new(one, false, 1020)).collect();
        let lines: Vec<String> = documents.iter().map(|d| serde_json::to_string(d).unwrap()).collect();
        insta::assert_snapshot!(lines.join("\n"), @r#"
        {"peer":"192.0.2.1","port":443,"store":"learned","cause":"echo","action":"lifted","reason":null,"expires_in":0,"found":[{"port":443,"class":"ignores"}]}
        {"peer":"192.0.2.2","port":0,"store":"commanded","cause":"probe","action":"lifted","reason":null,"expires_in":0,"found":[{"port":443,"class":"smc"}]}
        {"peer":"2001:db8::1","port":80,"store":"learned","cause":"silence","action":"confirmed","reason":null,"expires_in":3600,"found":[{"port":80,"class":"echoes"}]}
        {"peer":"192.0.2.4","port":443,"store":"learned","cause":"reset","action":"kept","reason":"does not answer","expires_in":3580,"found":[{"port":443,"class":"no-answer"}]}
        "#);
    }
}
