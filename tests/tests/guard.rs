//! The quarantine in the kernel: what is in it goes without SMC, by either hook.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::IpAddr;
use std::os::fd::AsFd;

use smc_policy::kernel::guard::{Quarantine, Store, now};
use smc_policy::kernel::sys;
use smc_policy_common::quarantine::{COMMANDED_ENTRIES, Cause, Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::lab::{assert_denied, assert_smc, listen};
use smc_policy_tests::{Kind, Lab, is_full, needs_hook};

const HOUR: u64 = 3_600_000_000_000;

fn addr(ip: &str) -> Addr {
    match ip.parse().expect("an address") {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

fn quarantine(lab: &Lab) -> Quarantine {
    Quarantine::open(&lab.pins()).unwrap().expect("a quarantine")
}

fn entry(directions: u8, until: u64) -> Entry {
    Entry { until, directions, cause: Cause::Operator as u8, count: 1, span: 3600, ..Entry::default() }
}

fn outbound() -> Entry {
    entry(Entry::OUTBOUND, now() + HOUR)
}

/// A counter of the instance.
#[track_caller]
fn counter(lab: &Lab, name: &str) -> u64 {
    let status = lab.status();
    status["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {status:#}"))
}

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";

#[test]
fn a_peer_in_quarantine_goes_without_smc() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        let quarantine = quarantine(lab);
        for (ip, kinds) in [("127.0.0.2", Kind::smc_v4()), ("fd00:5::2", Kind::smc_v6())] {
            let (held, other) = (listen(kinds[0], ip), listen(kinds[0], ip));
            let (service, all) = (Key::new(addr(ip), held.port()), Key::new(addr(ip), 0));
            for store in [Store::Learned, Store::Commanded] {
                assert_smc(kinds[0], None, &held);
                let before = (lab.hits("all"), counter(lab, "quarantined"), counter(lab, "decisions"));
                quarantine.put(store, service, &outbound()).unwrap();
                for kind in &kinds {
                    assert_denied(*kind, None, &held);
                }
                let denied = kinds.len() as u64;
                let after = (lab.hits("all"), counter(lab, "quarantined"), counter(lab, "decisions"));
                // The allow rule decides nothing outbound; tc strips the SYN, so there is nothing to judge inbound either.
                assert_eq!(after, (before.0, before.1 + denied, before.2 + denied), "{store:?} {ip}");
                assert_smc(kinds[0], None, &other);
                quarantine.put(store, service, &entry(Entry::OUTBOUND, now())).unwrap();
                assert_smc(kinds[0], None, &held);
                quarantine.put(store, all, &outbound()).unwrap();
                assert_denied(kinds[0], None, &held);
                assert_denied(kinds[0], None, &other);
                assert!(quarantine.remove(store, all).unwrap());
                assert_smc(kinds[0], None, &other);
                // Both ways: whole addresses only.
                let both = entry(Entry::OUTBOUND | Entry::INBOUND, now() + HOUR);
                let from = if ip.contains(':') { "fd00:5::3" } else { "127.0.0.3" };
                let client = Key::new(addr(from), 0);
                quarantine.put(store, client, &outbound()).unwrap();
                assert_smc(kinds[0], Some(from), &other);
                quarantine.put(store, client, &both).unwrap();
                assert_denied(kinds[0], Some(from), &other);
                assert_eq!(quarantine.list(store).unwrap().len(), 2);
                assert_eq!(quarantine.flush(store).unwrap(), 2);
                assert_eq!(quarantine.list(store).unwrap(), []);
                assert_smc(kinds[0], Some(from), &held);
            }
        }
        assert_eq!(quarantine.counted().unwrap().learned, 0);
    });
}

#[test]
fn trust_and_observe_do_not_heed_it() {
    needs_hook!();
    Lab::run(|lab| {
        let (trusted, other) = (listen(Kind::AfSmc, "127.0.0.2"), listen(Kind::AfSmc, "127.0.0.3"));
        let policy = r#"
            version = 1
            [[rule]]
            name = "trusted"
            action = "allow"
            trust = true
            peers = ["127.0.0.2"]
            [[rule]]
            name = "all"
            action = "allow"
            "#;
        lab.apply(policy);
        let quarantine = quarantine(lab);
        for ip in ["127.0.0.2", "127.0.0.3"] {
            quarantine.put(Store::Commanded, Key::new(addr(ip), 0), &outbound()).unwrap();
        }
        assert_smc(Kind::AfSmc, None, &trusted);
        assert_denied(Kind::AfSmc, None, &other);
        assert_eq!((counter(lab, "quarantined"), counter(lab, "observed_quarantined")), (1, 0));
        let path = lab.home.write("policy.toml", policy);
        lab.home.run(["apply", "--mode", "observe", path.to_str().unwrap()]).ok();
        assert_smc(Kind::AfSmc, None, &other);
        assert_eq!((counter(lab, "quarantined"), counter(lab, "observed_quarantined")), (1, 1));
    });
}

/// It belongs to no instance: a replacement of programs and tables keeps it; `detach` takes it away and saves it for the next
/// `apply`.
#[test]
fn it_outlives_a_replacement_and_detach() {
    needs_hook!();
    Lab::run(|lab| {
        let listener = listen(Kind::AfSmc, "127.0.0.2");
        lab.apply(ALLOW);
        quarantine(lab).put(Store::Commanded, Key::new(addr("127.0.0.2"), 0), &outbound()).unwrap();
        assert_denied(Kind::AfSmc, None, &listener);
        let counted = counter(lab, "quarantined");
        lab.pretend_other_version();
        lab.apply(ALLOW);
        assert_denied(Kind::AfSmc, None, &listener);
        assert_eq!(counter(lab, "quarantined"), counted + 1, "carried over");
        lab.apply("version = 1\n[default]\ninbound = \"allow\"\n");
        assert_denied(Kind::AfSmc, None, &listener);
        lab.assert_nothing_piles_up();
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
        assert_smc(Kind::AfSmc, None, &listener);
        lab.apply(ALLOW);
        assert_denied(Kind::AfSmc, None, &listener);
    });
}

#[test]
fn one_of_another_version_is_refused_before_anything_is_touched() {
    needs_hook!();
    Lab::run(|lab| {
        let listener = listen(Kind::AfSmc, "127.0.0.2");
        lab.apply(ALLOW);
        let (before, generation) = (lab.deciding(), lab.generation());
        let path = lab.pins().join("shared/info");
        let map = sys::get_pinned(&path).unwrap();
        let mut info = sys::map_lookup(map.as_fd(), 0).unwrap();
        info[4] ^= 0x80;
        sys::map_update(map.as_fd(), 0, &info).unwrap();
        lab.pretend_other_version();
        let policy = lab.home.write("other.toml", "version = 1\n[default]\noutbound = \"deny\"\n");
        let run = lab.home.run(["apply", policy.to_str().unwrap()]);
        run.refused(3, &["quarantine", "another version", "detach"]);
        assert_eq!((lab.deciding(), lab.generation()), (before, generation));
        let said = lab.home.run(["status"]).expect_code(1).stdout;
        assert!(said.contains("quarantine in") && said.contains("another version"), "{said}");
        assert_smc(Kind::AfSmc, None, &listener);
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
        lab.apply(ALLOW);
    });
}

#[test]
fn full_is_an_error_for_commands_and_evicts_what_was_learned() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        let quarantine = quarantine(lab);
        let key = |n: u32| Key::new(Addr::v4(0x0a00_0000 + n), 0);
        let precious = Key::new(addr("127.0.0.2"), 0);
        quarantine.put(Store::Commanded, precious, &outbound()).unwrap();
        let entries = |count: u32| (0..count).map(|n| (key(n), outbound())).collect::<Vec<_>>();
        quarantine.put_all(Store::Commanded, &entries(COMMANDED_ENTRIES - 1)).unwrap();
        let error = quarantine.put(Store::Commanded, key(COMMANDED_ENTRIES), &outbound()).unwrap_err();
        assert!(error.to_string().contains("full"), "{error}");
        quarantine.put(Store::Commanded, precious, &outbound()).unwrap();
        let many = if is_full() { 100_000 } else { 70_000 };
        quarantine.put_all(Store::Learned, &entries(many)).unwrap();
        let counted = quarantine.counted().unwrap();
        assert_eq!(counted.commanded, u64::from(COMMANDED_ENTRIES));
        assert!((50_000..=65_536).contains(&counted.learned), "{counted:?}");
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
    });
}
