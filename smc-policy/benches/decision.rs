//! What a decision costs: the real program over real tables, beside a longest-prefix-match trie of the kernel's that
//! holds the same networks and must give the same answers.
//!
//! Both are asked by test runs over packets of 64 queries, every query another address. What the same program costs over
//! the same packets without searching is subtracted. They take turns, so that what else the machine does meets all.

mod support;

use std::{collections::BTreeMap, hint::black_box, os::fd::AsFd as _, sync::Arc};

use smc_policy::{
    kernel::{
        apply::room_for,
        instance::Instance,
        object::Sizes,
        query::{Answer, QueryProgram},
    },
    policy::{
        Action, Defaults, Directions, Place, Policy, Rule, Settings, Slots, Tables, address::AddrSet,
        compile, ranges::RangeSet,
    },
};
use smc_policy_common::{
    query::{Addr, Direction, PACKET_QUERIES, Query, WireAnswer},
    table::Verdict,
};

use support::{
    Options, Result,
    figures::{self, Figure},
    lpm::{self, Work},
    median,
    networks::{Family, Mix, Network, Rng, address, generate, name},
    pins::Pins,
    short, smallest,
};

/// The service port that is asked for; no rule with ports speaks of it.
const PORT: u16 = 443;
/// Rules of networks of one length: neighbours are of different ones, so that they are not joined.
const RULES_A_LENGTH: usize = 8;

fn main() -> Result<()> {
    let Some(options) = Options::read("decision") else { return Ok(()) };
    let pins = Pins::new("smc-policy-bench-decision")?;
    let plan = if options.quick {
        Plan { packets: 128, rounds: 3, cold: 11 }
    } else {
        Plan { packets: 4096, rounds: 9, cold: 151 }
    };
    let sizes: &[usize] = if options.quick { &[1_000, 10_000] } else { &[10_000, 100_000, 1_000_000] };
    println!("ns a decision, median (lowest round); cold: median after the caches were overwritten\n");
    println!(
        "| networks | peer is | smc-policy | LPM trie | times faster | cold: smc-policy | LPM trie | times faster |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    let (mut rows, mut baselines, mut counting) = (Vec::new(), Vec::new(), Vec::new());
    for family in [Family::V4, Family::V6] {
        for mix in [Mix::Routes, Mix::Hosts] {
            for count in sizes {
                let label = format!("{} {}", short(*count), name(family, mix));
                if !options.wants(&label) {
                    continue;
                }
                let set = Set::new(family, mix, *count, &pins)?;
                for (found, word) in [(true, "in one of them"), (false, "in none")] {
                    let row = set.measure(found, plan)?;
                    println!("| {label} | {word} | {row} |");
                    baselines.extend([row.warm[BASELINE].median, row.warm[TRIE_BASELINE].median]);
                    counting.push(row.warm[COUNTING].median - row.warm[TRIE_BASELINE].median);
                    rows.push((family, *count, format!("{label}, peer {word}"), row.ours()));
                }
                pins.clear()?;
            }
        }
    }
    println!(
        "\nsubtracted, ns a query: {:.0} to {:.0} (reading the query, storing the answer, the call)",
        smallest(&baselines),
        baselines.iter().copied().fold(0.0, f64::max)
    );
    let counting = median(counting);
    println!("what counting a decision adds in the hook, ns: {counting:.0}");
    let figure = |(family, count, what, ns): (Family, usize, String, f64)| {
        let limit = limit(family, count)?;
        Some(Figure::at_most(format!("a warm decision, counted: {what}"), ns + counting, limit, "ns"))
    };
    figures::print(&rows.into_iter().filter_map(figure).collect::<Vec<_>>());
    Ok(())
}

/// The figures to reach, ns.
fn limit(family: Family, count: usize) -> Option<f64> {
    match (family, count) {
        (_, 100_000) => Some(150.0),
        (Family::V4, 1_000_000) => Some(500.0),
        _ => None,
    }
}

#[derive(Clone, Copy)]
struct Plan {
    packets: usize,
    rounds: usize,
    cold: usize,
}

/// Who takes turns.
const OURS: usize = 0;
const BASELINE: usize = 1;
const TRIE: usize = 2;
const TRIE_BASELINE: usize = 3;
/// Beside [`TRIE_BASELINE`].
const COUNTING: usize = 4;
const TURNS: usize = 5;

/// The generation with the table; generation 0 has none.
const GENERATION: u64 = 1;

/// The same networks as a policy in an instance, and in a trie.
struct Set {
    networks: Vec<Network>,
    tables: Tables,
    other: WireAnswer,
    instance: Instance,
    trie: QueryProgram,
    trie_baseline: QueryProgram,
    counting: QueryProgram,
}

impl Set {
    fn new(family: Family, mix: Mix, count: usize, pins: &Pins) -> Result<Self> {
        let networks = generate(family, mix, count, Options::seed());
        let mut groups: BTreeMap<(std::cmp::Reverse<u32>, usize), Vec<Network>> = BTreeMap::new();
        for network in &networks {
            let part = (network.first >> (family.width() - network.bits)) as usize % RULES_A_LENGTH;
            groups.entry((std::cmp::Reverse(network.bits), part)).or_default().push(*network);
        }
        let policy = policy(groups.values());
        let slots = Slots::in_order(&policy);
        let tables = compile(&policy, &slots, &Settings::default())?;
        let needs = Sizes { cells: u32::try_from(tables.cells.len())?, slots: policy.rules.len() as u32 + 2 };
        let instance = Instance::create(pins.path(), room_for(needs), false)?;
        instance.fill(GENERATION, &tables.cells)?;
        let answer = |allow, slot| {
            WireAnswer::new(Some(Verdict {
                allow,
                trust: false,
                observe: false,
                plain_retransmissions: false,
                slot,
            }))
        };
        let other = answer(true, slots.default_outbound);
        let answers: Vec<_> = groups
            .values()
            .zip(policy.rules.iter().zip(&slots.rules).skip(1))
            .flat_map(|(group, (rule, slot))| {
                group.iter().map(|network| (*network, answer(rule.action == Action::Allow, *slot)))
            })
            .collect();
        let trie = lpm::trie(family, &answers)?;
        let rules = lpm::counters(lpm::SLOTS)?;
        let all = lpm::counters(1)?;
        Ok(Self {
            networks,
            tables,
            other,
            instance,
            trie: lpm::program(Work::LookUp(family, trie.as_fd()), other)?,
            trie_baseline: lpm::program(Work::Nothing, other)?,
            counting: lpm::program(Work::Count(rules.as_fd(), all.as_fd()), other)?,
        })
    }

    /// Packets of queries whose peer is in one of the networks, or near them and in none.
    fn packets(&self, found: bool, count: usize) -> Result<Vec<Vec<Query>>> {
        let mut rng = Rng(Options::seed() ^ u64::from(found));
        let none = WireAnswer::verdict(self.other).flatten();
        let mut queries = Vec::with_capacity(count * PACKET_QUERIES);
        let mut tried = 0;
        while queries.len() < count * PACKET_QUERIES {
            let network = rng.pick(&self.networks);
            let shared = match (found, network.family) {
                (true, _) => network.bits,
                (false, Family::V4) => 16.min(network.bits),
                (false, Family::V6) => 32.min(network.bits),
            };
            let query = query(network.random_address(shared, &mut rng));
            if found || self.tables.decide(&query).map(|v| (v.allow, v.slot)) == none {
                queries.push(query);
            }
            tried += 1;
            if tried > 1000 * count * PACKET_QUERIES {
                return Err("the networks cover every address".into());
            }
        }
        Ok(queries.chunks(PACKET_QUERIES).map(<[Query]>::to_vec).collect())
    }

    /// Tables, kernel and trie must say the same.
    fn check(&self, packets: &[Vec<Query>], found: bool) -> Result<()> {
        let none = WireAnswer::verdict(self.other).flatten();
        for packet in packets {
            let kernel = self.instance.query().ask(packet)?;
            let trie = self.trie.ask(packet)?;
            let tables = packet.iter().map(|query| self.tables.decide(query).map(|v| (v.allow, v.slot)));
            for (((query, kernel), trie), tables) in packet.iter().zip(&kernel).zip(&trie).zip(tables) {
                let alike = kernel == trie && *kernel == tables && (*kernel == none) != found;
                if !alike {
                    return Err(disagreement(query, kernel, trie, &tables).into());
                }
            }
        }
        Ok(())
    }

    fn measure(&self, found: bool, plan: Plan) -> Result<Row> {
        let packets = self.packets(found, plan.packets)?;
        self.instance.switch(GENERATION);
        self.check(&packets, found)?;
        let mut rounds: [Vec<f64>; TURNS] = Default::default();
        for _ in 0..plan.rounds {
            for (who, rounds) in rounds.iter_mut().enumerate() {
                let program = self.turn(who);
                // Once to warm up.
                self.pass(program, &packets)?;
                rounds.push(median(self.pass(program, &packets)?));
            }
        }
        let mut cold: [Vec<f64>; TURNS] = Default::default();
        let mut sweep = vec![0u64; SWEEP / 8];
        for packet in packets.iter().take(plan.cold) {
            for (who, cold) in cold.iter_mut().enumerate() {
                let program = self.turn(who);
                overwrite_caches(&mut sweep);
                // A single query: a packet's later ones would find the upper levels in the cache.
                cold.push(f64::from(program.time(&packet[..1], 1)?));
            }
        }
        self.instance.switch(0);
        Ok(Row {
            warm: rounds.map(|rounds| Timed { lowest: smallest(&rounds), median: median(rounds) }),
            cold: cold.map(median),
        })
    }

    fn turn(&self, who: usize) -> &QueryProgram {
        match who {
            OURS => {
                self.instance.switch(GENERATION);
                self.instance.query()
            }
            BASELINE => {
                self.instance.switch(0);
                self.instance.query()
            }
            TRIE => &self.trie,
            TRIE_BASELINE => &self.trie_baseline,
            _ => &self.counting,
        }
    }

    /// ns a query, one number a packet.
    fn pass(&self, program: &QueryProgram, packets: &[Vec<Query>]) -> Result<Vec<f64>> {
        let time = |packet: &Vec<Query>| Ok(f64::from(program.time(packet, 1)?) / PACKET_QUERIES as f64);
        packets.iter().map(time).collect()
    }
}

/// Twice the last-level cache of most machines.
const SWEEP: usize = 64 << 20;

fn overwrite_caches(sweep: &mut [u64]) {
    for word in sweep.iter_mut().step_by(8) {
        *word = word.wrapping_add(1);
    }
    black_box(sweep);
}

fn query(peer: Addr) -> Query {
    let local = match peer.as_v4() {
        Some(_) => Addr::v4(0x0a00_0001),
        None => address(Family::V6, 0xfd00 << 112 | 1),
    };
    Query { peer, local, port: PORT, direction: Direction::Outbound }
}

fn disagreement(query: &Query, kernel: &Answer, trie: &Answer, tables: &Answer) -> String {
    format!("{query:?}: the kernel says {kernel:?}, the trie {trie:?}, the tables {tables:?}")
}

/// A rule for each group, which are in the order of their prefix lengths, longest first: the first match is the longest
/// one, as in a trie. Before them a rule for some ports, so that ports are told apart.
fn policy<'a>(groups: impl Iterator<Item = &'a Vec<Network>>) -> Policy {
    let place = Place { file: 0, start: 0, end: 0, line: 1 };
    let rule = |name: String, action, peers: Option<Arc<AddrSet>>, ports| Rule {
        name,
        action,
        direction: Directions::Both,
        listed: peers.clone(),
        except: None,
        peers,
        local: None,
        ports,
        comment: None,
        expires: None,
        expired: false,
        trust: false,
        enabled: true,
        place,
    };
    let ports = RangeSet::new(vec![(22, 22), (25, 25), (53, 53), (6000, 6063), (8000, 8099)]);
    let mut rules = vec![rule("ports".to_owned(), Action::Deny, None, Some(ports))];
    for (at, group) in groups.enumerate() {
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for network in group {
            match network.family {
                Family::V4 => v4.push((network.first as u32, network.last() as u32)),
                Family::V6 => v6.push((network.first, network.last())),
            }
        }
        let action = if at % 2 == 0 { Action::Deny } else { Action::Allow };
        rules.push(rule(format!("networks-{at}"), action, Some(Arc::new(AddrSet::new(v4, v6))), None));
    }
    Policy { files: vec!["bench.toml".into()], defaults: Defaults::default(), rules, tests: Vec::new() }
}

/// ns a query over all rounds.
#[derive(Clone, Copy)]
struct Timed {
    median: f64,
    lowest: f64,
}

struct Row {
    warm: [Timed; TURNS],
    cold: [f64; TURNS],
}

impl Row {
    fn ours(&self) -> f64 {
        self.warm[OURS].median - self.warm[BASELINE].median
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { warm, cold } = self;
        let lowest = |who: usize, baseline: usize| warm[who].lowest - warm[baseline].lowest;
        let trie = warm[TRIE].median - warm[TRIE_BASELINE].median;
        let (cold_ours, cold_trie) = (cold[OURS] - cold[BASELINE], cold[TRIE] - cold[TRIE_BASELINE]);
        write!(
            f,
            "{:.0} ({:.0}) | {trie:.0} ({:.0}) | {:.1} | {cold_ours:.0} | {cold_trie:.0} | {:.1}",
            self.ours(),
            lowest(OURS, BASELINE),
            lowest(TRIE, TRIE_BASELINE),
            trie / self.ours(),
            cold_trie / cold_ours
        )
    }
}
