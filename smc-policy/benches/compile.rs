//! Compiling large policies, from parsed ranges to table cells, and asking the tables in user space.
//!
//! `cargo bench --bench compile`. The figures to reach: a million IPv4 networks in about 0.2 s, IPv6 in about 0.25 s.

use std::{hint::black_box, sync::Arc};

use criterion::{BatchSize, BenchmarkId, Criterion, criterion_group, criterion_main};
use smc_policy::policy::{
    Action, Directions, Moment, Place, Policy, Rule, Settings, Slots, SourceFile, address::AddrSet, compile,
    load, parse,
};
use smc_policy_common::query::{Addr, Direction, Query};

/// The same numbers in every run (splitmix64).
struct Random(u64);

impl Random {
    fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }
}

/// Networks with lengths as in a routing table: mostly /24, some down to /16.
fn v4(count: usize, random: &mut Random) -> Vec<(u32, u32)> {
    let network = |number: u64| {
        let bits = if number & 3 == 0 { 16 + (number >> 2 & 7) as u32 } else { 24 };
        let base = (number >> 32) as u32 >> (32 - bits) << (32 - bits);
        (base, base | u32::MAX >> bits)
    };
    (0..count).map(|_| network(random.number())).collect()
}

/// Networks of /32 to /48 below the few top /16 that are in use.
fn v6(count: usize, random: &mut Random) -> Vec<(u128, u128)> {
    const TOPS: [u128; 8] = [0x2001, 0x2400, 0x2401, 0x2600, 0x2607, 0x2800, 0x2a00, 0x2a02];
    let network = |number: u64| {
        let bits = if number & 3 == 0 { 32 + (number >> 2 & 15) as u32 } else { 48 };
        let base = TOPS[(number >> 8 & 7) as usize] << 112 | u128::from(number >> 24) << 72;
        let base = base >> (128 - bits) << (128 - bits);
        (base, base | u128::MAX >> bits)
    };
    (0..count).map(|_| network(random.number())).collect()
}

fn rule(number: usize, peers: AddrSet) -> Rule {
    let peers = Some(Arc::new(peers));
    Rule {
        name: format!("rule-{number}"),
        action: if number.is_multiple_of(2) { Action::Deny } else { Action::Allow },
        direction: Directions::Both,
        listed: peers.clone(),
        except: None,
        peers,
        local: None,
        ports: None,
        comment: None,
        expires: None,
        expired: false,
        trust: false,
        enabled: true,
        place: Place { file: 0, start: 0, end: 0, line: 1 },
    }
}

fn policy(rules: Vec<Rule>) -> Policy {
    Policy { rules, ..Policy::default() }
}

fn cells(policy: &Policy) -> usize {
    compile(policy, &Slots::in_order(policy), &Settings::default()).map_or(0, |tables| tables.cells.len())
}

fn compiling(criterion: &mut Criterion) {
    let random = &mut Random(1);
    let mut group = criterion.benchmark_group("compile");
    group.sample_size(10);
    for count in [10_000, 100_000, 1_000_000] {
        let (four, six) = (v4(count, random), v6(count, random));
        group.bench_with_input(
            BenchmarkId::new("v4: sort, merge, compile", count),
            &four,
            |bencher, four| {
                bencher.iter_batched(
                    || four.clone(),
                    |four| cells(&policy(vec![rule(0, AddrSet::new(four, Vec::new()))])),
                    BatchSize::LargeInput,
                );
            },
        );
        group.bench_with_input(BenchmarkId::new("v6: sort, merge, compile", count), &six, |bencher, six| {
            bencher.iter_batched(
                || six.clone(),
                |six| cells(&policy(vec![rule(0, AddrSet::new(Vec::new(), six))])),
                BatchSize::LargeInput,
            );
        });
        let ready = policy(vec![rule(0, AddrSet::new(four, Vec::new()))]);
        group.bench_with_input(BenchmarkId::new("v4: compile only", count), &ready, |bencher, ready| {
            bencher.iter(|| cells(ready));
        });
        let ready = policy(vec![rule(0, AddrSet::new(Vec::new(), six))]);
        group.bench_with_input(BenchmarkId::new("v6: compile only", count), &ready, |bencher, ready| {
            bencher.iter(|| cells(ready));
        });
    }
    let overlapping: Vec<Rule> =
        (0..500).map(|number| rule(number, AddrSet::new(v4(2000, random), Vec::new()))).collect();
    let overlapping = policy(overlapping);
    group.bench_function("500 rules of 2,000 networks each", |bencher| bencher.iter(|| cells(&overlapping)));
    group.finish();
}

fn reading(criterion: &mut Criterion) {
    let random = &mut Random(2);
    let lines: Vec<String> = v4(1_000_000, random)
        .into_iter()
        .map(|(lo, hi)| format!("{}/{}", std::net::Ipv4Addr::from_bits(lo), (lo ^ hi).leading_zeros()))
        .collect();
    let mut group = criterion.benchmark_group("read");
    group.sample_size(10);
    group.bench_function("1,000,000 IPv4 networks", |bencher| {
        bencher.iter(|| lines.iter().filter(|line| parse::addresses(line).is_ok()).count());
    });
    let text = format!(
        "version = 1\n[[rule]]\nname = \"big\"\naction = \"deny\"\npeers = [\"{}\"]\n",
        lines.join("\",\n\"")
    );
    let files = [SourceFile::policy("big.toml", text)];
    group.bench_function("a policy file of 1,000,000 IPv4 networks, with lints", |bencher| {
        bencher.iter(|| load(&files, Moment::default()).map_or(0, |loaded| loaded.policy.rules.len()));
    });
    group.finish();
}

fn deciding(criterion: &mut Criterion) {
    let random = &mut Random(3);
    let mut group = criterion.benchmark_group("decide");
    for count in [100, 10_000, 100_000, 1_000_000] {
        let policy = policy(vec![rule(0, AddrSet::new(v4(count, random), v6(count, random)))]);
        let Ok(tables) = compile(&policy, &Slots::in_order(&policy), &Settings::default()) else { continue };
        let query = |peer: Addr| Query { peer, local: peer, port: 443, direction: Direction::Outbound };
        let four: Vec<Query> = (0..1 << 16).map(|_| query(Addr::v4(random.number() as u32))).collect();
        let six: Vec<Query> =
            v6(1 << 16, random).into_iter().map(|(lo, _)| query(Addr::v6(lo | 1))).collect();
        for (family, queries) in [("v4", four), ("v6", six)] {
            let mut at = 0;
            group.bench_function(BenchmarkId::new(family, count), |bencher| {
                bencher.iter(|| {
                    at = (at + 1) % queries.len();
                    tables.decide(black_box(&queries[at]))
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, compiling, reading, deciding);
criterion_main!(benches);
