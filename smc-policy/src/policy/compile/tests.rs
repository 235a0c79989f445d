use std::{collections::HashSet, sync::Arc};

use proptest::prelude::*;
use smc_policy_common::query::Addr;

use super::*;
use crate::policy::{
    SourceFile,
    address::AddrSet,
    arbitrary::{self, Random},
    decide, load,
    model::{Directions, Place, Rule},
    settings::Magic,
};

fn policy(text: &str) -> Policy {
    match load(&[SourceFile::policy("p.toml", text.to_owned())], arbitrary::NOW) {
        Ok(loaded) => loaded.policy,
        Err(found) => panic!("{found:#?}\n{text}"),
    }
}

fn compiled(policy: &Policy) -> Tables {
    compile(policy, &Slots::in_order(policy), &Settings::default()).unwrap()
}

/// The tables and the evaluator say the same about `query`.
fn check(policy: &Policy, slots: &Slots, tables: &Tables, query: &Query) {
    let expected = decide(policy, query);
    let rule = match expected.by {
        By::Rule(index) => Some(&policy.rules[index]),
        By::Default(_) => None,
    };
    let verdict = Verdict {
        allow: expected.action == Action::Allow,
        trust: rule.is_some_and(|rule| rule.trust),
        observe: false,
        plain_retransmissions: true,
        slot: slots.of(expected.by).unwrap(),
    };
    assert_eq!(tables.decide(query), Some(verdict), "{query:x?}, expected {expected:?}");
    assert_eq!(slots.by(verdict.slot, query.direction), Some(expected.by));
}

fn rule(name: usize, peers: AddrSet) -> Rule {
    let peers = Arc::new(peers);
    Rule {
        name: format!("r{name}"),
        action: if name.is_multiple_of(2) { Action::Deny } else { Action::Allow },
        direction: Directions::Both,
        listed: Some(peers.clone()),
        except: None,
        peers: Some(peers),
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

type Ranges<K> = Vec<(K, K)>;

/// So many networks as a routing table has them: most of them small, some large.
fn networks(random: &mut Random, count: usize) -> (Ranges<u32>, Ranges<u128>) {
    let v4 = (0..count).map(|_| {
        let bits = 24 - random.below(9) as u32;
        let base = random.number() as u32 >> (32 - bits) << (32 - bits);
        (base, base | u32::MAX >> bits)
    });
    let v4 = v4.collect();
    let v6 = (0..count).map(|_| {
        let bits = 48 - random.below(17) as u32;
        let top = [0x2001u128, 0x2400, 0x2600, 0x2a00, 0x2a01][random.below(5)] << 112;
        let base = (top | u128::from(random.number()) << 48) >> (128 - bits) << (128 - bits);
        (base, base | u128::MAX >> bits)
    });
    (v4, v6.collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn tables_and_evaluator_agree(seed in any::<u64>()) {
        let policy = policy(&arbitrary::policy(seed));
        let slots = Slots::in_order(&policy);
        let tables = compile(&policy, &slots, &Settings::default()).unwrap();
        for query in arbitrary::connections(&policy, seed, 300) {
            check(&policy, &slots, &tables, &query);
        }
    }

    #[test]
    fn lint_and_brute_force_agree_on_what_never_matches(seed in any::<u64>()) {
        let policy = policy(&arbitrary::policy(seed));
        let edges = arbitrary::edges(&policy);
        prop_assume!(edges.len() < 120);
        let ports: HashSet<u16> = policy.rules.iter().filter_map(|rule| rule.ports.as_ref())
            .flat_map(|ports| ports.ranges()).flat_map(|(lo, hi)| [*lo, hi.saturating_add(1)]).chain([0]).collect();
        // No set changes between two edges, so that they stand for every address.
        let mut deciding: Vec<HashSet<usize>> = vec![HashSet::new(); policy.rules.len()];
        for peer in &edges {
            for local in edges.iter().filter(|local| local.as_v4().is_some() == peer.as_v4().is_some()) {
                for port in &ports {
                    for direction in [Direction::Outbound, Direction::Inbound] {
                        let query = Query { peer: *peer, local: *local, port: *port, direction };
                        let By::Rule(first) = decide(&policy, &query).by else { continue };
                        for (index, rule) in policy.rules.iter().enumerate() {
                            if rule.matches(&query) {
                                deciding[index].insert(first);
                            }
                        }
                    }
                }
            }
        }
        let expected: Vec<Dead> = deciding.iter().enumerate()
            .filter(|(index, first)| policy.rules[*index].is_active() && !first.contains(index))
            .map(|(rule, first)| {
                let mut deciders: Vec<usize> = first.iter().copied().collect();
                deciders.sort_unstable();
                Dead { rule, deciders }
            })
            .collect();
        prop_assert_eq!(dead_rules(&policy, 100).unwrap(), expected);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn large_lists_agree(seed in any::<u64>(), lists in 1usize..6, count in 1usize..6000) {
        let random = &mut Random::new(seed);
        let rules = (0..lists).map(|name| {
            let (v4, v6) = networks(random, count);
            rule(name, AddrSet::new(v4, v6))
        });
        let policy = Policy { rules: rules.collect(), ..Policy::default() };
        let slots = Slots::in_order(&policy);
        let tables = compile(&policy, &slots, &Settings::default()).unwrap();
        for query in arbitrary::connections(&policy, seed, 500) {
            check(&policy, &slots, &tables, &query);
        }
    }
}

#[test]
fn more_networks_than_index_buckets_agree() {
    let random = &mut Random::new(7609);
    let (v4, v6) = networks(random, 150_000);
    let policy = Policy { rules: vec![rule(0, AddrSet::new(v4, v6))], ..Policy::default() };
    let slots = Slots::in_order(&policy);
    let tables = compile(&policy, &slots, &Settings::default()).unwrap();
    for query in arbitrary::connections(&policy, 7609, 20_000) {
        check(&policy, &slots, &tables, &query);
    }
}

#[test]
fn many_single_addresses_of_one_network_agree() {
    // All below one index bucket, with and without room for a second index.
    for top in [0xfd00u128 << 112, (0xfd00_1234_5678_9abc << 64) | 0xff << 32] {
        let shift = if top as u64 == 0 { 80 } else { 0 };
        let addresses = (0..50_000u128).map(|host| top | (host * 3) << shift);
        let policy = Policy {
            rules: vec![rule(0, AddrSet::new(vec![], addresses.map(|a| (a, a)).collect()))],
            ..Policy::default()
        };
        let slots = Slots::in_order(&policy);
        let tables = compiled(&policy);
        for host in 0..10_000u128 {
            let peer = Addr::v6(top | host << shift);
            check(
                &policy,
                &slots,
                &tables,
                &Query { peer, local: peer, port: 1, direction: Direction::Inbound },
            );
        }
    }
}

#[test]
fn a_small_policy_is_small() {
    let policy = policy(
        "version = 1\n[[rule]]\nname = \"internet\"\naction = \"deny\"\ndirection = \"outbound\"\n\
         except = [\"10.0.0.0/8\", \"fd00::/8\"]\nports = [443, \"8000-8099\"]\n",
    );
    assert!(compiled(&policy).cells.len() < 100, "{}", compiled(&policy).cells.len());
    assert!(compiled(&Policy::default()).cells.len() < 40);
}

#[test]
fn an_empty_policy_allows() {
    let policy = Policy::default();
    let slots = Slots::in_order(&policy);
    for query in arbitrary::connections(&policy, 1, 100) {
        check(&policy, &slots, &compiled(&policy), &query);
    }
}

#[test]
fn settings_are_properties_of_the_table() {
    let policy = Policy::default();
    let slots = Slots::in_order(&policy);
    let query = arbitrary::connections(&policy, 1, 1)[0];
    let with = |settings| compile(&policy, &slots, &settings).unwrap();
    let off = Settings { plain_retransmissions: false, ..Settings::default() };
    assert_eq!(table::flags(with(off).cells.as_slice()), Some(0));
    let tables = with(Settings { observe: true, ..off });
    assert!(tables.decide(&query).unwrap().observe);
    let tables = with(Settings { plain_retransmissions: true, ..off });
    assert!(tables.decide(&query).unwrap().plain_retransmissions);
    assert!(!tables.decide(&query).unwrap().observe);
    let tables = with(Settings { forwarded: true, ..off });
    assert_eq!(table::flags(tables.cells.as_slice()), Some(table::FLAG_FORWARDED));
    let mut settings = off;
    settings.magics[2] = Some(Magic { syn: 0x0102_0304, syn_ack: 0x0506_0708 });
    let first = table::H_MAGICS as usize;
    assert_eq!(
        with(settings).cells[first..first + table::EXTRA_MAGICS],
        [0, 0, table::pack(0x0102_0304, 0x0506_0708)]
    );
}

#[test]
fn overlapping_rules_make_as_many_classes_as_rules() {
    // 500 rules of 40 overlapping networks each: nearly every address matches another set of rules.
    let random = &mut Random::new(7);
    let rules = (0..500).map(|name| {
        let networks = (0..40).map(|_| {
            let bits = 4 + random.below(12) as u32;
            let base = random.number() as u32 >> (32 - bits) << (32 - bits);
            (base, base | u32::MAX >> bits)
        });
        rule(name, AddrSet::new(networks.collect(), vec![]))
    });
    let policy = Policy { rules: rules.collect(), ..Policy::default() };
    let classes = Classifier::new(&policy).unwrap().classify().unwrap();
    assert!(classes.rows.len() <= 501, "{}", classes.rows.len());
    let slots = Slots::in_order(&policy);
    let tables = compiled(&policy);
    for query in arbitrary::connections(&policy, 1, 2000) {
        check(&policy, &slots, &tables, &query);
    }
}

#[test]
fn rules_that_never_decide_cost_nothing() {
    let shadowed = "version = 1\n[[rule]]\nname = \"all\"\naction = \"deny\"\n";
    let ports: Vec<String> = (0..500).map(|at| format!("{}", 2 * at + 1)).collect();
    let more = format!("[[rule]]\nname = \"never\"\naction = \"allow\"\nports = [{}]\n", ports.join(", "));
    assert_eq!(
        compiled(&policy(shadowed)).cells.len(),
        compiled(&policy(&format!("{shadowed}{more}"))).cells.len()
    );
}

#[test]
fn a_thousand_rules_of_a_port_and_peers_fit_and_more_are_refused() {
    let rules = |count: usize| {
        let rules = (0..count).map(|name| {
            let at = (name as u32) << 8;
            let mut rule = rule(name, AddrSet::new(vec![(at, at + 255)], vec![]));
            rule.ports =
                Some(crate::policy::ranges::RangeSet::new(vec![(name as u16 * 2 + 1, name as u16 * 2 + 1)]));
            rule
        });
        Policy { rules: rules.collect(), ..Policy::default() }
    };
    let policy = rules(1000);
    let slots = Slots::in_order(&policy);
    let tables = compiled(&policy);
    for query in arbitrary::connections(&policy, 3, 2000) {
        check(&policy, &slots, &tables, &query);
    }
    let policy = rules(2000);
    let error = compile(&policy, &Slots::in_order(&policy), &Settings::default()).unwrap_err();
    insta::assert_snapshot!(error, @"the rules tell too much apart: 2001 kinds of peers x 2001 kinds of ports x 2 directions, the limit is 2097152 in all. Most come from ports: use the same list of ports in more rules, or leave `ports` out of some");
    let policy = rules(5000);
    let error = compile(&policy, &Slots::in_order(&policy), &Settings::default()).unwrap_err();
    assert!(matches!(error, CompileError::TooManyVerdicts { .. }), "{error}");
}

#[test]
fn slots_must_be_the_policys() {
    let policy = policy("version = 1\n[[rule]]\nname = \"a\"\naction = \"deny\"\n");
    let slots = Slots::in_order(&Policy::default());
    assert_eq!(
        compile(&policy, &slots, &Settings::default()),
        Err(CompileError::Slots { rules: 1, slots: 0 })
    );
}
