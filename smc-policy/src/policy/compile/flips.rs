//! Where two policies decide differently, in as few regions as can be.

use std::{collections::HashMap, hash::Hash};

use smc_policy_common::query::{Addr, Direction, Query};

use super::{
    CompileError, Slots, Tables,
    classes::{Classes, Classifier, Stretches},
    compile,
};
use crate::policy::{
    address::{AddrSet, MAPPED},
    decide::{By, Decision},
    model::{Action, Policy},
    ranges::{Key, RangeSet},
    settings::Settings,
};

/// So many kinds of connections are compared; it takes about ten seconds.
const MOST_COMPARED: usize = 1 << 25;

/// Connections of one address family whose verdict another policy turns over: any of `peers` with any of `local` and any of
/// `ports`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flip {
    /// Who connects.
    pub direction: Direction,
    /// The other hosts.
    pub peers: AddrSet,
    /// This host's addresses.
    pub local: AddrSet,
    /// The service ports; never 0.
    pub ports: RangeSet<u16>,
    /// What was decided.
    pub before: Decision,
    /// What is decided now.
    pub now: Decision,
}

impl Flip {
    /// The share of its family's connections, 0 to 1, that it makes up by peers and ports.
    pub fn share(&self) -> f64 {
        let v4 = self.peers.v4().ranges().iter().map(|(lo, hi)| f64::from(hi - lo) + 1.0).sum::<f64>();
        let v6 = self.peers.v6().ranges().iter().map(|(lo, hi)| (hi - lo) as f64 + 1.0).sum::<f64>();
        let ports = self.ports.ranges().iter().map(|(lo, hi)| f64::from(hi - lo) + 1.0).sum::<f64>();
        (v4 / 2f64.powi(32) + v6 / 2f64.powi(128)) * (ports / f64::from(u16::MAX))
    }
}

/// Why two policies cannot be compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FlipsError {
    /// One of them cannot be compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// Together they tell too much apart.
    #[error("the two policies tell {0} kinds of connections apart, more than are compared")]
    TooMany(usize),
}

/// A policy and what it tells apart.
struct Side<'a> {
    classifier: Classifier<'a>,
    classes: Classes,
    tables: Tables,
    slots: Slots,
}

impl<'a> Side<'a> {
    fn new(policy: &'a Policy) -> Result<Self, CompileError> {
        let classifier = Classifier::new(policy)?;
        let classes = classifier.classify()?;
        let slots = Slots::in_order(policy);
        let tables = compile(policy, &slots, &Settings::default())?;
        Ok(Self { classifier, classes, tables, slots })
    }

    fn decide(&self, query: &Query) -> Option<Decision> {
        let verdict = self.tables.decide(query)?;
        let action = if verdict.allow { Action::Allow } else { Action::Deny };
        Some(Decision { action, by: self.slots.by(verdict.slot, query.direction)? })
    }
}

/// A stretch of an axis that neither policy cuts.
type Part<K> = (K, K);

/// For each part of the ports: what was decided and is decided now, if that differs.
type Row = Vec<Option<(Decision, Decision)>>;

/// What turns over for the peers of a pair of classes.
#[derive(PartialEq, Eq, Hash)]
struct Turn<K> {
    outbound: bool,
    locals: Vec<Part<K>>,
    ports: Vec<Part<u16>>,
    before: Decision,
    now: Decision,
}

/// All connections that `old` and `new` decide differently, the largest regions first. No connection is in two of them.
///
/// # Errors
/// [`FlipsError`].
pub fn flips(old: &Policy, new: &Policy) -> Result<Vec<Flip>, FlipsError> {
    let (old, new) = (Side::new(old)?, Side::new(new)?);
    let ports = parts(&old.classifier.ports, &new.classifier.ports);
    // Port 0 is none that a connection is made to.
    let ports: Vec<Part<u16>> =
        ports.filter(|(part, _)| part.1 != 0).map(|(p, _)| (p.0.max(1), p.1)).collect();
    let v4 = turned(
        (&old, &new),
        (&old.classes.peer4, &new.classes.peer4),
        (&old.classifier.local4, &new.classifier.local4),
        &ports,
        Addr::v4,
    )?;
    let v6 = turned(
        (&old, &new),
        (&old.classes.peer6, &new.classes.peer6),
        (&old.classifier.local6, &new.classifier.local6),
        &ports,
        real,
    )?;
    let v4 = v4.into_iter().map(|(turn, peers)| {
        flip(&turn, AddrSet::new(peers, Vec::new()), AddrSet::new(turn.locals.clone(), Vec::new()))
    });
    let v6 = v6.into_iter().map(|(turn, peers)| {
        flip(&turn, AddrSet::new(Vec::new(), peers), AddrSet::new(Vec::new(), turn.locals.clone()))
    });
    let mut flips: Vec<Flip> = v4.chain(v6).collect();
    // The rest makes the order the same every time.
    let first = |flip: &Flip| {
        (flip.peers.ranges().next(), flip.ports.ranges().first().copied(), flip.direction as u8)
    };
    flips.sort_by(|a, b| b.share().total_cmp(&a.share()).then_with(|| first(a).cmp(&first(b))));
    Ok(flips)
}

fn flip<K>(turn: &Turn<K>, peers: AddrSet, local: AddrSet) -> Flip {
    Flip {
        direction: if turn.outbound { Direction::Outbound } else { Direction::Inbound },
        peers,
        local,
        ports: RangeSet::new(turn.ports.clone()),
        before: turn.before,
        now: turn.now,
    }
}

/// An IPv6 address at the begin of a stretch: IPv4-mapped ones are none, nobody is there.
fn real(first: u128) -> Addr {
    if MAPPED.0 <= first && first <= MAPPED.1 { Addr::v6(MAPPED.1 + 1) } else { Addr::v6(first) }
}

/// Cuts an axis where either policy does; with the classes that both give the part.
fn parts<'a, K: Key>(
    old: &'a Stretches<K>,
    new: &'a Stretches<K>,
) -> impl Iterator<Item = (Part<K>, (u32, u32))> + 'a {
    let (mut a, mut b) = (0, 0);
    let mut start = Some(K::MIN);
    std::iter::from_fn(move || {
        let from = start?;
        let classes = (old.get(a)?.1, new.get(b)?.1);
        let (next_old, next_new) = (old.get(a + 1).map(|s| s.0), new.get(b + 1).map(|s| s.0));
        let next = match (next_old, next_new) {
            (Some(x), Some(y)) => Some(x.min(y)),
            (x, y) => x.or(y),
        };
        a += usize::from(next.is_some() && next_old == next);
        b += usize::from(next.is_some() && next_new == next);
        start = next;
        let last = next.and_then(K::previous).unwrap_or(K::MAX);
        Some(((from, last), classes))
    })
}

/// What turns over in one address family, and for which peers.
fn turned<K: Key>(
    (old, new): (&Side<'_>, &Side<'_>),
    peers: (&Stretches<K>, &Stretches<K>),
    locals: (&Stretches<K>, &Stretches<K>),
    ports: &[Part<u16>],
    addr: fn(K) -> Addr,
) -> Result<HashMap<Turn<K>, Vec<Part<K>>>, FlipsError> {
    let mut by_classes: HashMap<(u32, u32), Vec<Part<K>>> = HashMap::new();
    for (part, classes) in parts(peers.0, peers.1) {
        by_classes.entry(classes).or_default().push(part);
    }
    let locals: Vec<Part<K>> = parts(locals.0, locals.1).map(|(part, _)| part).collect();
    let compared = by_classes.len().saturating_mul(2 * locals.len()).saturating_mul(ports.len());
    if compared > MOST_COMPARED {
        return Err(FlipsError::TooMany(compared));
    }
    let mut turned: HashMap<Turn<K>, Vec<Part<K>>> = HashMap::new();
    for parts in by_classes.into_values() {
        let Some((first, _)) = parts.first() else { continue };
        for direction in [Direction::Outbound, Direction::Inbound] {
            let mut rows: HashMap<Row, Vec<Part<K>>> = HashMap::new();
            for local in &locals {
                let turns = |port: &Part<u16>| {
                    let query = Query { peer: addr(*first), local: addr(local.0), port: port.0, direction };
                    let (before, now) = (old.decide(&query)?, new.decide(&query)?);
                    (before.action != now.action).then_some((before, now))
                };
                rows.entry(ports.iter().map(turns).collect()).or_default().push(*local);
            }
            for (row, locals) in rows {
                let mut by_turn: HashMap<(Decision, Decision), Vec<Part<u16>>> = HashMap::new();
                for (turn, port) in row.into_iter().zip(ports) {
                    if let Some(turn) = turn {
                        by_turn.entry(turn).or_default().push(*port);
                    }
                }
                for ((before, now), ports) in by_turn {
                    let outbound = direction == Direction::Outbound;
                    let turn = Turn { outbound, locals: locals.clone(), ports, before, now };
                    turned.entry(turn).or_default().extend_from_slice(&parts);
                }
            }
        }
    }
    Ok(turned)
}

impl Flip {
    /// The rule that decided before, and the one that decides now; none: the default.
    pub fn rules<'p>(&self, old: &'p Policy, new: &'p Policy) -> [Option<&'p crate::policy::Rule>; 2] {
        let rule = |policy: &'p Policy, by: By| match by {
            By::Rule(index) => policy.rules.get(index),
            By::Default(_) => None,
        };
        [rule(old, self.before.by), rule(new, self.now.by)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::{SourceFile, arbitrary, decide, load};

    fn policy(text: &str) -> Policy {
        load(&[SourceFile::policy("p.toml", text)], arbitrary::NOW).unwrap().policy
    }

    fn lines(old: &str, new: &str) -> Vec<String> {
        let (old, new) = (policy(&format!("version = 1\n{old}")), policy(&format!("version = 1\n{new}")));
        let line = |flip: &Flip| {
            let peers: Vec<_> = flip.peers.ranges().map(|range| range.to_string()).collect();
            let names = flip.rules(&old, &new).map(|rule| rule.map_or("default", |rule| rule.name.as_str()));
            format!(
                "{:?} {} {:?} {}({}) -> {}({})",
                flip.direction,
                peers.join(" "),
                flip.ports.ranges(),
                flip.before.action,
                names[0],
                flip.now.action,
                names[1]
            )
        };
        flips(&old, &new).unwrap().iter().map(line).collect()
    }

    const DENY: &str = "[[rule]]\nname = \"no\"\naction = \"deny\"\ndirection = \"outbound\"\n";

    #[test]
    fn what_decides_alike_is_no_flip() {
        assert_eq!(lines("", ""), [""; 0]);
        let (a, b) = (
            format!("{DENY}peers = [\"10.0.0.0/8\"]"),
            format!("{DENY}peers = [\"10.0.0.0/9\", \"10.128.0.0/9\"]"),
        );
        assert_eq!(lines(&a, &b), [""; 0]);
    }

    #[test]
    fn the_largest_comes_first_and_apart_from_others() {
        let new = format!(
            "{DENY}peers = [\"10.0.0.0/8\", \"192.0.2.1\", \"2001:db8::/32\"]\nports = [443, \"8000-8099\"]"
        );
        assert_eq!(
            lines("", &new),
            [
                "Outbound 10.0.0.0/8 192.0.2.1 [(443, 443), (8000, 8099)] allow(default) -> deny(no)",
                "Outbound 2001:db8::/32 [(443, 443), (8000, 8099)] allow(default) -> deny(no)",
            ]
        );
        let other = format!("{DENY}peers = [\"10.0.0.0/8\", \"192.0.2.1\"]");
        assert_eq!(
            lines(&new, &other),
            [
                "Outbound 10.0.0.0/8 192.0.2.1 [(1, 442), (444, 7999), (8100, 65535)] allow(default) -> deny(no)",
                "Outbound 2001:db8::/32 [(443, 443), (8000, 8099)] deny(no) -> allow(default)",
            ]
        );
    }

    #[test]
    fn another_default_is_everything() {
        let found = lines("", "[default]\ninbound = \"deny\"");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].starts_with("Inbound 0.0.0.0/0 [(1, 65535)] allow(default) -> deny(default)"),
            "{found:?}"
        );
        let share = flips(&policy("version = 1"), &policy("version = 1\n[default]\ninbound = \"deny\""));
        assert!(share.unwrap().iter().all(|flip| (flip.share() - 1.0).abs() < 1e-9));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// A connection is in one region if the verdicts differ, with the rules that the evaluator names, and else in none.
        #[test]
        fn the_evaluator_agrees(a: u64, b: u64, seed: u64) {
            let (old, new) = (policy(&arbitrary::policy(a)), policy(&arbitrary::policy(b)));
            let Ok(found) = flips(&old, &new) else { return Ok(()) };
            let queries = arbitrary::connections(&old, seed, 60).into_iter().chain(arbitrary::connections(&new, !seed, 60));
            for query in queries.filter(|query| query.port != 0) {
                let (before, now) = (decide(&old, &query), decide(&new, &query));
                let within: Vec<_> = found
                    .iter()
                    .filter(|flip| {
                        flip.direction == query.direction
                            && flip.peers.contains(query.peer)
                            && flip.local.contains(query.local)
                            && flip.ports.contains(query.port)
                    })
                    .map(|flip| (flip.before, flip.now))
                    .collect();
                let expected = if before.action == now.action { vec![] } else { vec![(before, now)] };
                prop_assert_eq!(within, expected, "{:?}", query);
            }
        }
    }
}
