//! Answers what a policy says about a connection, and why.

use serde::Serialize;
use smc_policy_common::query::{Addr, Direction, Query};

use super::{
    address::{AddrSet, MAPPED, to_ip, to_u128},
    decide::{By, Decision, decide},
    model::{Action, Policy, Rule},
    ranges::{RangeSet, stretches},
};

/// A question. What is left out is answered for all values, region by region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    /// The other host.
    pub peer: Addr,
    /// The service port: the peer's when outbound, ours when inbound.
    pub port: Option<u16>,
    /// This host's address; of the peer's family.
    pub local: Option<Addr>,
    /// Who connects.
    pub direction: Option<Direction>,
}

/// The answer over all regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Overall {
    /// Every connection asked about may negotiate SMC.
    Allow,
    /// None may.
    Deny,
    /// It depends on what the question leaves out.
    Mixed,
}

/// An earlier rule that does not match, and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Passed {
    /// The rule.
    pub rule: String,
    /// Its file.
    pub file: String,
    /// Its line, from 1.
    pub line: usize,
    /// Why it does not match, e.g. "port 80 not in 443".
    pub reason: String,
}

/// Connections that are decided alike by the same rule or default: any of `local` with any of `ports`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Region {
    /// Who connects.
    #[serde(serialize_with = "super::model::serialize_direction")]
    pub direction: Direction,
    /// This host's addresses: addresses, networks or `first-last`; empty: all.
    pub local: Vec<String>,
    /// Service ports: ports or `first-last`; empty: all.
    pub ports: Vec<String>,
    /// What is decided.
    pub action: Action,
    /// "quarantine", "rule" or "default".
    pub by: &'static str,
    /// The deciding rule's name.
    pub rule: Option<String>,
    /// Its file.
    pub file: Option<String>,
    /// Its line, from 1.
    pub line: Option<usize>,
    /// By the quarantine: what would allow these connections without it, if that is the same for all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub otherwise: Option<Otherwise>,
}

/// What decides where the quarantine does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Otherwise {
    /// "rule" or "default".
    pub by: &'static str,
    /// The rule's name.
    pub rule: Option<String>,
    /// Its file.
    pub file: Option<String>,
    /// Its line, from 1.
    pub line: Option<usize>,
}

/// The answer to a [`Question`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The answer over all regions.
    pub action: Overall,
    /// "quarantine", "rule" or "default" if all regions agree on who decides, else "mixed".
    pub by: &'static str,
    /// The deciding rule if all regions agree.
    pub rule: Option<String>,
    /// Its file.
    pub file: Option<String>,
    /// Its line, from 1.
    pub line: Option<usize>,
    /// The regions.
    pub regions: Vec<Region>,
    /// If there is one region: the rules before the deciding one, and why each does not match.
    pub passed: Vec<Passed>,
}

/// A quarantine entry about the peer that is asked about. It keeps off SMC what the rules allow, unless a rule with
/// `trust` allows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The service port that it is about; none: all of them.
    pub port: Option<u16>,
    /// It is about connections to the peer.
    pub outbound: bool,
    /// It is about connections from the peer; those have no port of the peer's: `port` must be none.
    pub inbound: bool,
}

impl Held {
    fn holds(self, direction: Direction, port: u16) -> bool {
        match direction {
            Direction::Outbound => self.outbound && self.port.is_none_or(|held| held == port),
            Direction::Inbound => self.inbound && self.port.is_none(),
        }
    }
}

/// Who decides a cell of the [`Grid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decider {
    Policy(Decision),
    Quarantine,
}

impl Decider {
    fn action(self) -> Action {
        match self {
            Self::Policy(decision) => decision.action,
            Self::Quarantine => Action::Deny,
        }
    }
}

/// Every combination of what a question leaves open, cut so finely that each cell is decided alike throughout.
pub(super) struct Grid {
    pub(super) directions: Vec<Direction>,
    /// First and last local address; both of the peer's family.
    pub(super) locals: Vec<(Addr, Addr)>,
    pub(super) ports: Vec<(u16, u16)>,
    /// `[direction][local][port]`.
    decisions: Vec<Decision>,
}

impl Grid {
    pub(super) fn new(policy: &Policy, question: &Question, held: &[Held]) -> Self {
        let candidates = || {
            let rules = policy.rules.iter().filter(|rule| rule.is_active());
            rules.filter(|rule| rule.peers.as_ref().is_none_or(|peers| peers.contains(question.peer)))
        };
        let directions = match question.direction {
            Some(direction) => vec![direction],
            None => vec![Direction::Outbound, Direction::Inbound],
        };
        let local_sets = || candidates().filter_map(|rule| rule.local.as_deref());
        let locals = match question.local {
            Some(local) => vec![(local, local)],
            None if question.peer.as_v4().is_some() => {
                let cut = stretches(local_sets().map(AddrSet::v4));
                cut.into_iter().map(|(lo, hi)| (Addr::v4(lo), Addr::v4(hi))).collect()
            }
            None => {
                let cut = stretches(local_sets().map(AddrSet::v6));
                // IPv4-mapped addresses are no IPv6 addresses: nobody is there.
                let real = cut.into_iter().filter(|(lo, hi)| *lo < MAPPED.0 || MAPPED.1 < *hi);
                let shown = |lo: u128| if Addr::v6(lo).as_v4().is_some() { MAPPED.1 + 1 } else { lo };
                real.map(|(lo, hi)| (Addr::v6(shown(lo)), Addr::v6(hi))).collect()
            }
        };
        let ports = match question.port {
            Some(port) => vec![(port, port)],
            None => {
                let held: Vec<_> = held
                    .iter()
                    .filter_map(|h| h.port)
                    .map(|port| RangeSet::new(vec![(port, port)]))
                    .collect();
                let ports = candidates().filter_map(|rule| rule.ports.as_ref());
                let cut = stretches(ports.chain(&held));
                // Port 0 is none that a connection is made to.
                cut.into_iter().filter(|(_, hi)| *hi != 0).map(|(lo, hi)| (lo.max(1), hi)).collect()
            }
        };
        let mut decisions = Vec::with_capacity(directions.len() * locals.len() * ports.len());
        for direction in &directions {
            for (local, _) in &locals {
                for (port, _) in &ports {
                    let query =
                        Query { peer: question.peer, local: *local, port: *port, direction: *direction };
                    decisions.push(decide(policy, &query));
                }
            }
        }
        Self { directions, locals, ports, decisions }
    }

    pub(super) fn decision(&self, direction: usize, local: usize, port: usize) -> Decision {
        self.decisions[(direction * self.locals.len() + local) * self.ports.len() + port]
    }

    /// Who decides for every port.
    fn row(&self, policy: &Policy, held: &[Held], direction: usize, local: usize) -> Vec<Decider> {
        let decider = |port: usize| {
            let decision = self.decision(direction, local, port);
            let trusted = match decision.by {
                By::Rule(index) => policy.rules.get(index).is_some_and(|rule| rule.trust),
                By::Default(_) => false,
            };
            let is_held = held.iter().any(|h| h.holds(self.directions[direction], self.ports[port].0));
            if is_held && decision.action == Action::Allow && !trusted {
                Decider::Quarantine
            } else {
                Decider::Policy(decision)
            }
        };
        (0..self.ports.len()).map(decider).collect()
    }
}

/// Answers a question. `held`: the quarantine entries in force about the peer.
pub fn explain(policy: &Policy, question: &Question, held: &[Held]) -> Explanation {
    let grid = Grid::new(policy, question, held);
    let mut regions = Vec::new();
    let mut deciders = Vec::new();
    for (direction, name) in grid.directions.iter().enumerate() {
        // Local addresses with the same decision for every port belong together, wherever they are.
        let mut groups: Vec<(Vec<Decider>, Vec<usize>)> = Vec::new();
        for local in 0..grid.locals.len() {
            let row = grid.row(policy, held, direction, local);
            match groups.iter_mut().find(|(known, _)| *known == row) {
                Some((_, locals)) => locals.push(local),
                None => groups.push((row, vec![local])),
            }
        }
        for (row, locals) in groups {
            let mut by_decider: Vec<(Decider, Vec<usize>)> = Vec::new();
            for (port, decider) in row.iter().enumerate() {
                match by_decider.iter_mut().find(|(known, _)| known == decider) {
                    Some((_, all)) => all.push(port),
                    None => by_decider.push((*decider, vec![port])),
                }
            }
            let addresses: Vec<(Addr, Addr)> = locals.iter().map(|local| grid.locals[*local]).collect();
            for (decider, at) in by_decider {
                let ports = at.iter().map(|port| grid.ports[*port]).collect();
                let mut region = region(policy, question, *name, &addresses, ports, decider);
                if decider == Decider::Quarantine {
                    let cells = locals.iter().flat_map(|local| at.iter().map(|port| (*local, *port)));
                    let mut beneath = cells.map(|(local, port)| grid.decision(direction, local, port).by);
                    let first = beneath.next();
                    let same = first.filter(|first| beneath.all(|by| by == *first));
                    region.otherwise = same.map(|by| otherwise(policy, by));
                }
                regions.push(region);
                deciders.push(decider);
            }
        }
    }
    let mut actions = deciders.iter().map(|decider| decider.action());
    let first = actions.next().unwrap_or(Action::Allow);
    let action = match (first, actions.all(|action| action == first)) {
        (_, false) => Overall::Mixed,
        (Action::Allow, true) => Overall::Allow,
        (Action::Deny, true) => Overall::Deny,
    };
    let same = |regions: &[Region]| {
        let (first, rest) = regions.split_first()?;
        rest.iter().all(|other| (other.by, &other.rule) == (first.by, &first.rule)).then(|| first.clone())
    };
    let (by, rule, file, line) = match same(&regions) {
        Some(Region { by, rule, file, line, .. }) => (by, rule, file, line),
        None => ("mixed", None, None, None),
    };
    let passed = match (regions.as_slice(), deciders.as_slice()) {
        ([region], [Decider::Policy(decision)]) => passed(policy, question, region.direction, decision.by),
        _ => Vec::new(),
    };
    Explanation { action, by, rule, file, line, regions, passed }
}

fn region(
    policy: &Policy,
    question: &Question,
    direction: Direction,
    locals: &[(Addr, Addr)],
    ports: Vec<(u16, u16)>,
    decider: Decider,
) -> Region {
    let (mut v4, mut v6) = (Vec::new(), Vec::new());
    for (lo, hi) in locals {
        match (lo.as_v4(), hi.as_v4()) {
            (Some(lo), Some(hi)) => v4.push((lo, hi)),
            _ => v6.push((to_u128(*lo), to_u128(*hi))),
        }
    }
    let local = AddrSet::new(v4, v6);
    let all_local = question.local.is_none() && {
        let full = AddrSet::full();
        local.v4() == full.v4() || local.v6() == full.v6()
    };
    let ports = RangeSet::new(ports);
    let all_ports = question.port.is_none() && ports.covers(1, u16::MAX);
    let (by, rule) = match decider {
        Decider::Quarantine => ("quarantine", None),
        Decider::Policy(Decision { by: By::Rule(index), .. }) => ("rule", policy.rules.get(index)),
        Decider::Policy(Decision { by: By::Default(_), .. }) => ("default", None),
    };
    Region {
        direction,
        local: if all_local { Vec::new() } else { local.ranges().map(|range| range.to_string()).collect() },
        ports: if all_ports { Vec::new() } else { port_texts(&ports) },
        action: decider.action(),
        by,
        rule: rule.map(|rule| rule.name.clone()),
        file: rule.map(|rule| policy.file(rule.place).display().to_string()),
        line: rule.map(|rule| rule.place.line),
        otherwise: None,
    }
}

fn otherwise(policy: &Policy, by: By) -> Otherwise {
    let (by, rule) = match by {
        By::Rule(index) => ("rule", policy.rules.get(index)),
        By::Default(_) => ("default", None),
    };
    Otherwise {
        by,
        rule: rule.map(|rule| rule.name.clone()),
        file: rule.map(|rule| policy.file(rule.place).display().to_string()),
        line: rule.map(|rule| rule.place.line),
    }
}

fn port_texts(ports: &RangeSet<u16>) -> Vec<String> {
    let text = |(lo, hi): &(u16, u16)| if lo == hi { format!("{lo}") } else { format!("{lo}-{hi}") };
    ports.ranges().iter().map(text).collect()
}

/// The rules before the deciding one.
fn passed(policy: &Policy, question: &Question, direction: Direction, by: By) -> Vec<Passed> {
    let before = match by {
        By::Rule(index) => index,
        By::Default(_) => policy.rules.len(),
    };
    let question = Question { direction: Some(direction), ..*question };
    let rules = policy.rules.iter().take(before);
    rules
        .filter_map(|rule| {
            Some(Passed {
                rule: rule.name.clone(),
                file: policy.file(rule.place).display().to_string(),
                line: rule.place.line,
                reason: mismatch(rule, &question)?,
            })
        })
        .collect()
}

/// Why a rule matches nothing of what is asked; `None`: it may match.
pub(super) fn mismatch(rule: &Rule, question: &Question) -> Option<String> {
    if !rule.enabled {
        return Some("not enabled".to_owned());
    }
    if let (true, Some(expires)) = (rule.expired, rule.expires) {
        return Some(format!("expired at {expires}"));
    }
    if question.direction.is_some_and(|direction| !rule.direction.contains(direction)) {
        return Some(format!("direction is {}", rule.direction));
    }
    if rule.listed.as_ref().is_some_and(|peers| !peers.contains(question.peer)) {
        return Some("peer not in peers".to_owned());
    }
    if rule.except.as_ref().is_some_and(|except| except.contains(question.peer)) {
        return Some("carved out by except".to_owned());
    }
    if let (Some(set), Some(local)) = (&rule.local, question.local)
        && !set.contains(local)
    {
        return Some(format!(
            "local {} not in {}",
            to_ip(local),
            few(set.ranges().map(|range| range.to_string()))
        ));
    }
    if let (Some(ports), Some(port)) = (&rule.ports, question.port)
        && !ports.contains(port)
    {
        return Some(format!("port {port} not in {}", few(port_texts(ports).into_iter())));
    }
    let family = |set: &AddrSet| match question.peer.as_v4() {
        Some(_) => set.v4().is_empty(),
        None => set.v6().is_empty(),
    };
    rule.local
        .as_ref()
        .filter(|local| family(local))
        .map(|_| "no local address of the peer's family".to_owned())
}

/// The first few of a list.
fn few(mut texts: impl Iterator<Item = String>) -> String {
    const FEW: usize = 4;
    let mut list = texts.by_ref().take(FEW).collect::<Vec<_>>().join(", ");
    let more = texts.count();
    if more > 0 {
        list.push_str(&format!(" and {more} more"));
    }
    list
}

#[cfg(test)]
mod tests;
