//! The reference evaluator, the compiled tables in user space and the tables in the kernel say the same.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use smc_policy::kernel::barrier::wait_for_programs;
use smc_policy::kernel::instance::Instance;
use smc_policy::kernel::object::{Prepared, Sizes, TcProgram};
use smc_policy::kernel::sys;
use smc_policy::policy::{
    Action, Policy, Settings, Slots, SourceFile, Tables, arbitrary, compile, decide, load,
};
use smc_policy_common::query::{Addr, Direction, Query};
use smc_policy_tests::{Home, Rng, needs, scaled};

/// What the verifier may follow at most for one program; the kernel's own limit is a million.
const INSTRUCTION_LIMIT: u32 = 200_000;

fn random_policy(seed: u64) -> Policy {
    let text = arbitrary::policy(seed);
    let file = SourceFile::policy(PathBuf::from("random.toml"), text);
    match load(std::slice::from_ref(&file), arbitrary::NOW) {
        Ok(loaded) => loaded.policy,
        Err(errors) => panic!("seed {seed}: {errors:?}\n{}", file.text),
    }
}

/// An instance large enough for `cells`, pinned where nobody else looks.
fn instance(home: &Home, cells: usize) -> Instance {
    let pins = home.bpffs().join("smc-policy");
    let sizes = Sizes { cells: cells as u32, slots: 64 };
    Instance::create(&pins, sizes, false).expect("an instance")
}

fn remove(home: &Home) {
    let removed = smc_policy::kernel::pinned::remove_others(&home.bpffs().join("smc-policy"), None);
    assert_eq!((removed.ids.len(), removed.problems), (1, vec![]));
    smc_policy::kernel::pinned::remove_empty(&home.bpffs().join("smc-policy"));
}

fn put(instance: &Instance, tables: &Tables) {
    let generation = instance.generation() + 1;
    wait_for_programs().unwrap();
    instance.fill(generation, &tables.cells).unwrap();
    instance.switch(generation);
}

/// Compares the three on `queries`.
fn compare(
    instance: &Instance,
    policy: &Policy,
    tables: &Tables,
    slots: &Slots,
    queries: &[Query],
    seed: u64,
) {
    let kernel = instance.query().ask(queries).unwrap();
    assert_eq!(kernel.len(), queries.len());
    for (query, kernel) in queries.iter().zip(kernel) {
        let decision = decide(policy, query);
        let expected = Some((decision.action == Action::Allow, slots.of(decision.by).unwrap()));
        let in_user_space = tables.decide(query).map(|verdict| (verdict.allow, verdict.slot));
        assert_eq!(in_user_space, expected, "tables, seed {seed}: {query:x?}");
        assert_eq!(kernel, expected, "kernel, seed {seed}: {query:x?}");
    }
}

#[test]
fn random_policies_and_connections() {
    needs!(Root, Bpffs);
    let mut rng = Rng::from_environment("agreement");
    let home = Home::new();
    let policies = scaled(1_000);
    let instance = instance(&home, 1 << 17);
    let (mut compared, mut denied) = (0, 0);
    for _ in 0..policies {
        let seed = rng.number();
        let policy = random_policy(seed);
        let slots = Slots::in_order(&policy);
        let tables =
            compile(&policy, &slots, &Settings::default()).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        put(&instance, &tables);
        let queries = arbitrary::connections(&policy, seed, 100);
        compare(&instance, &policy, &tables, &slots, &queries, seed);
        compared += queries.len();
        denied += queries.iter().filter(|query| decide(&policy, query).action == Action::Deny).count();
    }
    println!("{policies} policies, {compared} connections, {denied} of them denied");
    assert_eq!(compared, policies * 100);
    assert!(
        denied * 10 > compared && denied * 10 < compared * 9,
        "a lopsided sample proves little: {denied}"
    );
    remove(&home);
}

/// Searches with many turns: every interval's first and last address, and the ones beside them.
#[test]
fn large_lists() {
    needs!(Root, Bpffs);
    let mut rng = Rng::from_environment("agreement");
    let home = Home::new();
    let count = scaled(200_000);
    let mut text = String::from("version = 1\n[[rule]]\nname = \"list\"\naction = \"deny\"\npeers = [\n");
    let mut addresses = Vec::with_capacity(count);
    for number in 0..count {
        let address = if number % 2 == 0 {
            let v4 = rng.number() as u32 & !1;
            text += &format!("\"{}\",\n", std::net::Ipv4Addr::from_bits(v4));
            Addr::v4(v4)
        } else {
            // Most share their first 32 bits, as the networks of one provider do.
            let high =
                if rng.below(10) == 0 { rng.number() } else { 0x2001_0db8_0000_0000 | rng.below(1 << 32) };
            let v6 = u128::from(high) << 64 | u128::from(rng.number() & !1);
            text += &format!("\"{}\",\n", std::net::Ipv6Addr::from_bits(v6));
            Addr::v6(v6)
        };
        addresses.push(address);
    }
    text += "]\n";
    let file = SourceFile::policy(PathBuf::from("list.toml"), text);
    let policy = load(std::slice::from_ref(&file), arbitrary::NOW).expect("a policy").policy;
    let slots = Slots::in_order(&policy);
    let tables = compile(&policy, &slots, &Settings::default()).expect("tables");
    let instance = instance(&home, tables.cells.len());
    put(&instance, &tables);
    let step = |address: Addr, by: u64| Addr { hi: address.hi, lo: address.lo.wrapping_add(by) };
    let queries: Vec<Query> = (0..scaled(20_000))
        .flat_map(|_| {
            let address = addresses[rng.below(addresses.len() as u64) as usize];
            [step(address, u64::MAX), address, step(address, 1)]
        })
        .map(|peer| Query { peer, local: Addr::v4(1), port: 443, direction: Direction::Outbound })
        .collect();
    compare(&instance, &policy, &tables, &slots, &queries, 0);
    remove(&home);
}

/// Without a table everything is allowed, and the answer says that none decided.
#[test]
fn without_a_table_nothing_is_decided() {
    needs!(Root, Bpffs);
    let home = Home::new();
    let instance = instance(&home, 512);
    let query = Query { peer: Addr::v4(1), local: Addr::v4(2), port: 3, direction: Direction::Inbound };
    assert_eq!(instance.query().ask(&[query; 3]).unwrap(), [None; 3]);
    // Damaged: another layout, or a descriptor that points beyond the end.
    put(&instance, &Tables { cells: vec![1; 16] });
    assert_eq!(instance.query().ask(&[query]).unwrap(), [None]);
    let mut cells = vec![u64::MAX; 16];
    cells[0] = smc_policy_common::table::head(0);
    put(&instance, &Tables { cells });
    assert_eq!(instance.query().ask(&[query]).unwrap(), [None]);
    remove(&home);
}

/// The program that answers queries and those for tc load on every kernel, and the verifier's work for them is bounded.
#[test]
fn the_verifier_has_little_to_follow() {
    needs!(Root);
    let prepared = Prepared::new(Sizes { cells: 512, slots: 64 }, None).expect("maps");
    let query = prepared.load_query().expect("the verifier accepts smcpol_query");
    report("smcpol_query", sys::verified_instructions(query.as_fd()).unwrap());
    for tc in TcProgram::ALL {
        let program = prepared.load_tc(tc).unwrap_or_else(|error| panic!("{}: {error}", tc.program()));
        report(tc.program(), sys::verified_instructions(program.as_fd()).unwrap());
    }
}

/// So does the one that marks SYNs.
#[test]
fn the_verifier_has_little_to_follow_in_the_mark() {
    needs!(Root, Smc);
    let offsets = smc_policy::kernel::hs_ctrl::read_offsets().expect("the kernel's types");
    assert!(offsets.has_smc());
    let prepared = Prepared::new(Sizes { cells: 512, slots: 64 }, Some(&offsets)).expect("maps");
    let program = prepared.load_mark().unwrap_or_else(|error| panic!("{error}"));
    report("smcpol_mark", sys::verified_instructions(program.as_fd()).unwrap());
}

/// So do the callbacks, where the kernel has the hook.
#[test]
fn the_verifier_has_little_to_follow_in_the_callbacks() {
    needs!(Root, HsCtrl);
    let types = smc_policy::kernel::hs_ctrl::KernelTypes::read().expect("the kernel's types");
    let prepared = Prepared::new(Sizes { cells: 512, slots: 64 }, Some(&types.offsets)).expect("maps");
    for (name, program) in types.load_callbacks(&prepared).expect("the verifier accepts the callbacks") {
        report(name, sys::verified_instructions(program.as_fd()).unwrap());
    }
}

fn report(program: &str, count: u32) {
    let kernel = std::fs::read_to_string(Path::new("/proc/sys/kernel/osrelease")).unwrap_or_default();
    println!("{program} on {}: {count} verified instructions", kernel.trim());
    assert!(count > 100, "the kernel says how many it followed: {count}");
    assert!(count <= INSTRUCTION_LIMIT, "{program}: {count}");
}
