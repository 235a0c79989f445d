//! Which peers, local addresses and ports are alike to a policy.
//!
//! Two peers are of one class if every connection with either is decided by the same rule. A class is known by the rules
//! that decide something for it, in their order; from that list all its verdicts follow. Peers that merely *match* different
//! rules, of which the later ones never come to decide, are not told apart: 500 overlapping rules make about 500 classes so,
//! but 800,000 sets of matching rules.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use smc_policy_common::query::Direction;

use super::{
    CompileError, MAX_VERDICTS,
    sweep::{Axis, Members, States, ones, words},
};
use crate::policy::{
    address::{AddrSet, MAPPED},
    model::{Policy, Rule},
    ranges::RangeSet,
};

/// A class of a stretch of an axis: where it begins, and the class; the next one begins where it ends.
pub(super) type Stretches<K> = Vec<(K, u32)>;

/// Verdicts that are worked with before equal columns are merged.
const MAX_WORKING_VERDICTS: usize = 4 * MAX_VERDICTS;

/// Words that remembered states may take (256 MiB) before they are forgotten and found again.
const MAX_STATE_WORDS: usize = 1 << 25;

/// No rule decides: the default does.
pub(super) const DEFAULT: u32 = u32::MAX;

/// An address family, as a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Family {
    V4 = 1,
    V6 = 2,
}

/// Distinct sets of one axis and the rules that use each.
#[derive(Debug)]
struct Uses<T> {
    sets: Vec<T>,
    users: Vec<Vec<usize>>,
    /// Rules that name no set, one bit a rule.
    always: Vec<u64>,
}

impl<T> Uses<T> {
    fn new(rules: usize) -> Self {
        Self { sets: Vec::new(), users: Vec::new(), always: vec![0; words(rules)] }
    }

    fn add(&mut self, rule: usize, set: Option<T>, same: impl Fn(&T, &T) -> bool) {
        let Some(set) = set else {
            self.always[rule / 64] |= 1 << (rule % 64);
            return;
        };
        match self.sets.iter().position(|known| same(known, &set)) {
            Some(at) => self.users[at].push(rule),
            None => {
                self.sets.push(set);
                self.users.push(vec![rule]);
            }
        }
    }

    fn axis<'a, K>(&'a self, half: impl Fn(&'a T) -> &'a RangeSet<K>) -> Axis<'a, K> {
        Axis { sets: self.sets.iter().map(half).collect(), users: &self.users, always: &self.always }
    }
}

/// The rules of a policy along its axes; ports and local addresses are cut into stretches already.
pub(super) struct Classifier<'a> {
    /// The rules looked at, indices into the policy's.
    pub(super) rules: Vec<usize>,
    peers: Uses<&'a Arc<AddrSet>>,
    directions: Vec<Vec<usize>>,
    /// For each rule one bit for each port column.
    pub(super) ports_of: Vec<Vec<u64>>,
    /// For each rule its local columns.
    locals_of: Vec<Vec<u32>>,
    /// For each local column the families of its addresses.
    pub(super) local_families: Vec<u8>,
    pub(super) port_columns: usize,
    pub(super) ports: Stretches<u16>,
    pub(super) local4: Stretches<u32>,
    pub(super) local6: Stretches<u128>,
    pub(super) uses_local: bool,
}

/// The peers of a policy in classes.
#[derive(Debug)]
pub(super) struct Classes {
    /// IPv4 peers.
    pub(super) peer4: Stretches<u32>,
    /// IPv6 peers.
    pub(super) peer6: Stretches<u128>,
    /// For each class the rules that decide something, in their order.
    pub(super) rows: Vec<Box<[u32]>>,
    /// For each rule looked at: does it decide any connection?
    live: Vec<bool>,
}

/// Extends stretches: equal neighbours are one.
pub(super) fn push<K>(stretches: &mut Stretches<K>, start: K, class: u32) {
    if stretches.last().is_none_or(|(_, last)| *last != class) {
        stretches.push((start, class));
    }
}

/// Does a stretch of IPv6 addresses hold IPv4-mapped ones only? Such are looked up as IPv4; nobody is there.
fn is_mapped(first: u128, last: u128) -> bool {
    MAPPED.0 <= first && last <= MAPPED.1
}

impl<'a> Classifier<'a> {
    /// Over the active rules of a policy.
    pub(super) fn new(policy: &'a Policy) -> Result<Self, CompileError> {
        let active = policy.rules.iter().enumerate().filter(|(_, rule)| rule.is_active());
        Self::over(policy, active.map(|(index, _)| index).collect())
    }

    /// Over these rules of a policy, indices ascending.
    fn over(policy: &'a Policy, rules: Vec<usize>) -> Result<Self, CompileError> {
        let mut peers = Uses::new(rules.len());
        let mut locals = Uses::new(rules.len());
        let mut ports = Uses::new(rules.len());
        let mut known = KnownSets::default();
        let mut directions = Vec::with_capacity(rules.len());
        let mut uses_local = false;
        for (at, index) in rules.iter().enumerate() {
            let rule: &'a Rule = &policy.rules[*index];
            known.add(&mut peers, at, rule.peers.as_ref());
            locals.add(at, rule.local.as_deref(), |a, b| a == b);
            ports.add(at, rule.ports.as_ref(), |a, b| a == b);
            uses_local |= rule.local.is_some();
            let both = [Direction::Outbound, Direction::Inbound];
            directions
                .push(both.into_iter().filter(|d| rule.direction.contains(*d)).map(|d| d as usize).collect());
        }
        let mut port_states = States::new(rules.len());
        let mut port_stretches = Vec::new();
        let mut local_states = States::new(rules.len());
        let (mut local4, mut local6) = (Vec::new(), Vec::new());
        let mut local_families: Vec<u8> = Vec::new();
        let fits = |columns: usize| if columns > MAX_WORKING_VERDICTS { Err(()) } else { Ok(()) };
        let mut swept = ports.axis(|ports| *ports).sweep(|first, _, members| {
            push(&mut port_stretches, first, port_states.number(members));
            fits(port_states.len())
        });
        let mut local = |members: &Members, family: Family| {
            let state = local_states.number(members);
            local_families.resize(local_states.len(), 0);
            local_families[state as usize] |= family as u8;
            fits(local_states.len()).map(|()| state)
        };
        swept = swept.and_then(|()| {
            locals.axis(|set| set.v4()).sweep(|first, _, members| {
                push(&mut local4, first, local(members, Family::V4)?);
                Ok(())
            })
        });
        swept = swept.and_then(|()| {
            locals.axis(|set| set.v6()).sweep(|first, last, members| {
                if !is_mapped(first, last) {
                    push(&mut local6, first, local(members, Family::V6)?);
                }
                Ok(())
            })
        });
        let port_columns = port_states.len();
        let columns = port_columns.saturating_mul(local_states.len()).saturating_mul(2);
        if swept.is_err() || columns > MAX_WORKING_VERDICTS {
            return Err(CompileError::TooManyVerdicts {
                peers: 1,
                locals: local_states.len(),
                ports: port_columns,
            });
        }
        let mut ports_of = vec![vec![0; words(port_columns)]; rules.len()];
        for column in 0..port_columns {
            for rule in ones(port_states.rules(column as u32)) {
                ports_of[rule][column / 64] |= 1 << (column % 64);
            }
        }
        let mut locals_of = vec![Vec::new(); rules.len()];
        for column in 0..local_states.len() as u32 {
            for rule in ones(local_states.rules(column)) {
                locals_of[rule].push(column);
            }
        }
        Ok(Self {
            rules,
            peers,
            directions,
            ports_of,
            locals_of,
            local_families,
            port_columns,
            ports: port_stretches,
            local4,
            local6,
            uses_local,
        })
    }

    /// Columns of the working matrix: directions x local columns x port columns.
    fn columns(&self) -> usize {
        2 * self.local_families.len() * self.port_columns
    }

    /// Every column, as bits: for each direction and local column one stretch of port bits.
    pub(super) fn all_columns(&self) -> Vec<u64> {
        let width = words(self.port_columns);
        let mut stretch = vec![u64::MAX; width];
        if let (Some(last), rest) = (stretch.last_mut(), self.port_columns % 64)
            && rest != 0
        {
            *last = (1 << rest) - 1;
        }
        stretch.repeat(2 * self.local_families.len())
    }

    /// Calls `visit(first bit word, local column)` for the stretches of port bits that a rule speaks of.
    pub(super) fn stretches(&self, rule: usize) -> impl Iterator<Item = (usize, u32)> + '_ {
        let width = words(self.port_columns);
        self.directions[rule].iter().flat_map(move |direction| {
            let locals = self.locals_of[rule].iter();
            locals
                .map(move |local| ((direction * self.local_families.len() + *local as usize) * width, *local))
        })
    }

    /// Cuts all peers into stretches of one class each.
    pub(super) fn classify(&self) -> Result<Classes, CompileError> {
        let mut rows = Rows {
            classifier: self,
            all: self.all_columns(),
            left: Vec::new(),
            known: HashMap::new(),
            rows: Vec::new(),
            live: vec![false; self.rules.len()],
        };
        let mut peers = PeerClasses { states: States::new(self.rules.len()), classes: Vec::new() };
        let (axis4, axis6) = (self.peers.axis(|set| set.v4()), self.peers.axis(|set| set.v6()));
        let mut peer4 = Vec::with_capacity(axis4.stretches());
        let mut peer6 = Vec::with_capacity(axis6.stretches());
        axis4.sweep(|first, _, members| {
            push(&mut peer4, first, peers.class(&mut rows, members, Family::V4)?);
            Ok(())
        })?;
        axis6.sweep(|first, last, members| {
            if !is_mapped(first, last) {
                push(&mut peer6, first, peers.class(&mut rows, members, Family::V6)?);
            }
            Ok::<_, CompileError>(())
        })?;
        Ok(Classes { peer4, peer6, rows: rows.rows, live: rows.live })
    }

    /// The rules that decide no connection at all, as indices into the policy's.
    pub(super) fn dead(&self, classes: &Classes) -> Vec<usize> {
        let rules = self.rules.iter().zip(&classes.live);
        rules.filter(|(_, live)| !**live).map(|(rule, _)| *rule).collect()
    }

    /// The same over the rules that decide something: what the others cut up is whole again.
    pub(super) fn living(
        self,
        policy: &'a Policy,
        classes: Classes,
    ) -> Result<(Self, Classes), CompileError> {
        if classes.live.iter().all(|live| *live) {
            return Ok((self, classes));
        }
        let rules = self.rules.iter().zip(&classes.live);
        let living = Self::over(policy, rules.filter(|(_, live)| **live).map(|(rule, _)| *rule).collect())?;
        let classes = living.classify()?;
        Ok((living, classes))
    }

    /// For each of these rules (indices into the policy's, none of which decides anything) the earlier rules that decide in
    /// its place, ascending; no more than `limit` are looked for, and one beyond shows that there are others.
    pub(super) fn deciders(&self, dead: &[usize], limit: usize) -> Vec<Vec<usize>> {
        let dead: Vec<usize> =
            dead.iter().filter_map(|rule| self.rules.iter().position(|known| known == rule)).collect();
        let mut found = vec![Vec::new(); dead.len()];
        if dead.is_empty() {
            return found;
        }
        let mut seen = HashSet::new();
        let mut states = States::new(self.rules.len());
        let mut look = |members: &Members, family: Family| {
            if states.size() > MAX_STATE_WORDS {
                states = States::new(self.rules.len());
                seen.clear();
            }
            let state = states.number(members);
            if seen.insert((state, family as u8)) {
                for (rule, found) in dead.iter().zip(&mut found) {
                    if found.len() <= limit && members.rules[rule / 64] >> (rule % 64) & 1 == 1 {
                        self.decide_instead(*rule, &members.rules, family, limit, found);
                    }
                }
            }
        };
        let swept: Result<(), ()> = self.peers.axis(|set| set.v4()).sweep(|_, _, members| {
            look(members, Family::V4);
            Ok(())
        });
        let _ = swept.and_then(|()| {
            self.peers.axis(|set| set.v6()).sweep(|first, last, members| {
                if !is_mapped(first, last) {
                    look(members, Family::V6);
                }
                Ok(())
            })
        });
        for found in &mut found {
            found.sort_unstable();
            for rule in found {
                *rule = self.rules[*rule];
            }
        }
        found
    }

    fn decide_instead(
        &self,
        rule: usize,
        rules: &[u64],
        family: Family,
        limit: usize,
        found: &mut Vec<usize>,
    ) {
        let mut left = vec![0; self.all_columns().len()];
        for (at, local) in self.stretches(rule) {
            if self.local_families[local as usize] & family as u8 != 0 {
                left[at..at + words(self.port_columns)].copy_from_slice(&self.ports_of[rule]);
            }
        }
        for earlier in ones(rules).take_while(|earlier| *earlier < rule) {
            let mut decides = false;
            for (at, _) in self.stretches(earlier) {
                for (left, ports) in left[at..].iter_mut().zip(&self.ports_of[earlier]) {
                    decides |= *left & ports != 0;
                    *left &= !ports;
                }
            }
            if decides && !found.contains(&earlier) {
                found.push(earlier);
                if found.len() > limit {
                    return;
                }
            }
        }
    }
}

/// A set's size and last ranges.
type Ends = (usize, Option<(u32, u32)>, Option<(u128, u128)>);

/// The sets of peers met so far. Comparing large sets with each other for every rule would cost more than compiling them:
/// most are shared, and others are told apart by their size and ends.
#[derive(Default)]
struct KnownSets {
    shared: HashMap<*const AddrSet, usize>,
    alike: HashMap<Ends, Vec<usize>>,
}

impl KnownSets {
    fn add<'a>(&mut self, uses: &mut Uses<&'a Arc<AddrSet>>, rule: usize, set: Option<&'a Arc<AddrSet>>) {
        let Some(set) = set else {
            return uses.add(rule, None, |_, _| false);
        };
        if let Some(at) = self.shared.get(&Arc::as_ptr(set)) {
            uses.users[*at].push(rule);
            return;
        }
        let ends = (set.len(), set.v4().ranges().last().copied(), set.v6().ranges().last().copied());
        let alike = self.alike.entry(ends).or_default();
        let at = alike.iter().copied().find(|at| uses.sets[*at] == set);
        let at = at.unwrap_or_else(|| {
            uses.sets.push(set);
            uses.users.push(Vec::new());
            alike.push(uses.sets.len() - 1);
            uses.sets.len() - 1
        });
        uses.users[at].push(rule);
        self.shared.insert(Arc::as_ptr(set), at);
    }
}

/// Classes by the rules that match, remembered.
struct PeerClasses {
    states: States,
    /// For each state its class as IPv4 and as IPv6 peers, [`DEFAULT`]: not known yet.
    classes: Vec<[u32; 2]>,
}

impl PeerClasses {
    fn class(
        &mut self,
        rows: &mut Rows<'_, '_>,
        members: &Members,
        family: Family,
    ) -> Result<u32, CompileError> {
        if self.states.size() > MAX_STATE_WORDS {
            self.states = States::new(rows.classifier.rules.len());
            self.classes.clear();
        }
        let state = self.states.number(members) as usize;
        self.classes.resize(self.states.len(), [DEFAULT; 2]);
        let known = &mut self.classes[state][usize::from(family == Family::V6)];
        if *known == DEFAULT {
            *known = rows.class(&members.rules, family)?;
        }
        Ok(*known)
    }
}

/// Interns rows of verdicts.
struct Rows<'c, 'a> {
    classifier: &'c Classifier<'a>,
    all: Vec<u64>,
    left: Vec<u64>,
    known: HashMap<Box<[u32]>, u32>,
    rows: Vec<Box<[u32]>>,
    live: Vec<bool>,
}

impl Rows<'_, '_> {
    /// The class of peers that match `rules`; marks the rules that decide something for peers of this family.
    fn class(&mut self, rules: &[u64], family: Family) -> Result<u32, CompileError> {
        let classifier = self.classifier;
        self.left.clone_from(&self.all);
        let mut left = classifier.columns();
        let mut row = Vec::new();
        for rule in ones(rules) {
            let mut decides = false;
            for (at, local) in classifier.stretches(rule) {
                for (left_word, ports) in self.left[at..].iter_mut().zip(&classifier.ports_of[rule]) {
                    let won = *left_word & ports;
                    if won != 0 {
                        *left_word &= !won;
                        left -= won.count_ones() as usize;
                        decides = true;
                        // A connection's two addresses are of one family.
                        self.live[rule] |= classifier.local_families[local as usize] & family as u8 != 0;
                    }
                }
            }
            if decides {
                row.push(rule as u32);
            }
            if left == 0 {
                break;
            }
        }
        if let Some(class) = self.known.get(row.as_slice()) {
            return Ok(*class);
        }
        let row: Box<[u32]> = row.into();
        let class = self.rows.len() as u32;
        self.rows.push(row.clone());
        self.known.insert(row, class);
        if self.rows.len().saturating_mul(classifier.columns()) > MAX_WORKING_VERDICTS {
            return Err(CompileError::TooManyVerdicts {
                peers: self.rows.len(),
                locals: classifier.local_families.len(),
                ports: classifier.port_columns,
            });
        }
        Ok(class)
    }
}
