//! `probe --quarantine` and `quarantine recheck`: what a probe finds keeps SMC off a peer at once, and brings it back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::{IpAddr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::sync::atomic::AtomicBool;

use serde_json::{Value, json};
use smc_policy::kernel::guard::{Quarantine, Store, now};
use smc_policy_common::quarantine::{Cause, Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::echo_peer::{ADDRESSES, Behaviour, EchoPeer, Style};
use smc_policy_tests::lab::{assert_denied, assert_smc, listen};
use smc_policy_tests::{Half, Kind, Lab, Need, Run, needs, needs_hook};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
const SECOND: u64 = 1_000_000_000;
/// The peers do not answer pings, which are waited for as long.
const QUICK: [&str; 4] = ["--rate", "1000", "--timeout", "1s"];

fn kernel(lab: &Lab) -> Quarantine {
    Quarantine::open(&lab.pins()).unwrap().expect("a quarantine")
}

fn key(ip: &str, port: u16) -> Key {
    match ip.parse().unwrap() {
        IpAddr::V4(v4) => Key::new(Addr::v4(v4.to_bits()), port),
        IpAddr::V6(v6) => Key::new(Addr::v6(v6.to_bits()), port),
    }
}

/// As programs learn it; holds for a minute.
fn suspicion(cause: Cause) -> Entry {
    Entry {
        until: now() + 60 * SECOND,
        first_seen: now(),
        last_seen: now(),
        count: 1,
        span: 60,
        cause: cause as u8,
        directions: Entry::OUTBOUND,
        ..Entry::default()
    }
}

fn run(lab: &Lab, words: &[&str]) -> Run {
    lab.home.run(words.iter().chain(&QUICK))
}

fn recheck(lab: &Lab, words: &[&str]) -> Run {
    run(lab, &[&["quarantine", "recheck"], words].concat())
}

/// What `recheck --json` says of each entry: "peer port action reason".
#[track_caller]
fn rechecked(lab: &Lab, words: &[&str], code: i32) -> Vec<String> {
    let answer = recheck(lab, &[&["--json"], words].concat()).expect_code(code).json();
    let of = |entry: &Value| {
        let text = |name: &str| entry[name].as_str().map_or_else(|| entry[name].to_string(), str::to_owned);
        ["peer", "port", "action", "reason"].map(text).join(" ")
    };
    answer["entries"].as_array().expect("entries").iter().map(of).collect()
}

/// Whether an SMC socket's SYN to the peer carries the SMC option. The peer is one of plain TCP afterwards.
#[track_caller]
fn offers_smc(peer: &EchoPeer, to: SocketAddr) -> bool {
    peer.set(Style::Nothing, Behaviour::Silent);
    let kind = if to.is_ipv6() { Kind::AfSmc6 } else { Kind::AfSmc };
    drop(Half::connect(kind, None, to).unwrap_or_else(|failure| panic!("{to}: {failure}")));
    let [syn] = &peer.syns()[..] else { panic!("{:?}", peer.syns()) };
    syn.has_smc()
}

#[test]
fn an_echo_is_recorded_confirmed_and_lifted_when_it_is_over() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        for (_, ip) in ADDRESSES {
            let to = SocketAddr::new(ip.parse().unwrap(), 443);
            let words = to.to_string();
            // Of a peer of plain TCP there is nothing to record.
            assert!(offers_smc(&peer, to));
            let found = run(lab, &["probe", "--json", "--quarantine", &words]).ok().json();
            assert_eq!(found["targets"][0]["quarantine"]["recorded"], false, "{found:#}");
            assert_eq!(kernel(lab).list(Store::Commanded).unwrap(), []);

            peer.set(Style::All, Behaviour::Echo);
            let found = run(lab, &["probe", "--json", "--quarantine", &words]).expect_code(1).json();
            let told = &found["targets"][0]["quarantine"];
            assert_eq!((&told["recorded"], &told["source"]), (&json!(true), &json!("kernel")), "{found:#}");
            let evidence = told["entry"]["evidence"].as_str().unwrap();
            assert!(evidence.contains("fe085350") && evidence.contains("fe06e2d4c3d9"), "{found:#}");
            let entry = kernel(lab).get(Store::Commanded, key(ip, 443)).unwrap().expect("an entry");
            assert_eq!((entry.cause, entry.span), (Cause::Probe as u8, 3600));
            assert!(!offers_smc(&peer, to), "at once");
            let explained = lab.explain(&[&words]);
            assert_eq!(explained["by"], "quarantine");
            assert_eq!(explained["quarantine"][0]["cause"], "probe");

            peer.set(Style::All, Behaviour::Http);
            assert_eq!(rechecked(lab, &[], 1), [format!("{ip} 443 confirmed null")]);
            let entry = kernel(lab).get(Store::Commanded, key(ip, 443)).unwrap().expect("an entry");
            assert_eq!((entry.count, entry.span), (2, 3600), "the same storm");
            assert!(!offers_smc(&peer, to));

            // It is over.
            let text = recheck(lab, &["--dry-run"]).ok().stdout;
            assert!(text.contains("lifted") && text.contains("Nothing was changed"), "{text}");
            assert!(!offers_smc(&peer, to), "a dry run");
            assert_eq!(rechecked(lab, &[&words], 0), [format!("{ip} 443 lifted null")]);
            assert!(offers_smc(&peer, to));
            assert_eq!(rechecked(lab, &[], 0), [""; 0]);
        }
    });
}

/// Entries that programs learned: a genuine SMC server that was restarted at the wrong time, and an echo that a probe confirms.
#[test]
fn what_was_learned_is_lifted_or_becomes_certain() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        let listener = listen(Kind::AfSmc, "127.0.0.2");
        kernel(lab).put(Store::Learned, key("127.0.0.2", listener.port()), &suspicion(Cause::Reset)).unwrap();
        kernel(lab).put(Store::Learned, key(ADDRESSES[0].1, 443), &suspicion(Cause::Silence)).unwrap();
        assert_denied(Kind::AfSmc, None, &listener);
        peer.set(Style::All, Behaviour::Http);
        let before = now();
        let said = rechecked(lab, &[], 1);
        let genuine = format!("127.0.0.2 {} lifted null", listener.port());
        assert_eq!(said, [format!("{} 443 confirmed null", ADDRESSES[0].1), genuine]);
        // What the application of the genuine one has of it: a connection without a byte.
        drop(listener.accept(&AtomicBool::new(false)));
        assert_smc(Kind::AfSmc, None, &listener);
        let entry = kernel(lab).get(Store::Learned, key(ADDRESSES[0].1, 443)).unwrap().expect("an entry");
        assert_eq!((entry.cause, entry.span, entry.count), (Cause::Probe as u8, 3600, 2));
        let left = entry.until.saturating_sub(before) / SECOND;
        assert!((3600..3700).contains(&left), "{left} s");
        assert_eq!(entry.evidence[0], 254, "{entry:02x?}");
    });
}

/// Nothing follows from silence, a probe knows nothing of RDMA, and what an operator said is the operator's.
#[test]
fn what_a_probe_cannot_decide_is_kept_and_said() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        let ip = ADDRESSES[0].1;
        for (of, port) in [("127.0.0.9", 1), ("192.0.2.1", 443), (ip, 0)] {
            kernel(lab).put(Store::Learned, key(of, port), &suspicion(Cause::Echo)).unwrap();
        }
        lab.home.run(["quarantine", "add", "127.0.0.8:22", "--comment", "ours"]).ok();
        lab.home.run(["quarantine", "add", "127.0.0.7", "--cause", "rdma-path"]).ok();
        let said = rechecked(lab, &[], 0).join("\n");
        for words in [
            &format!("{ip} 0 kept about all services"),
            "127.0.0.7 0 kept is about RDMA",
            "127.0.0.8 22 kept an operator's",
            "127.0.0.9 1 kept nobody listens there now",
            "192.0.2.1 443 kept cannot be reached from here",
        ] {
            assert!(said.contains(words), "'{words}': {said}");
        }
        // With a port that is named, and with one that is known.
        peer.set(Style::All, Behaviour::Http);
        let named = format!("{ip}:80");
        assert_eq!(rechecked(lab, &[&named], 1), [format!("{ip} 0 confirmed null")]);
        peer.set(Style::Nothing, Behaviour::Http);
        kernel(lab).put(Store::Learned, key(ip, 443), &suspicion(Cause::Echo)).unwrap();
        assert_eq!(
            rechecked(lab, &[ip], 0),
            [format!("{ip} 0 lifted null"), format!("{ip} 443 lifted null")]
        );
        // An operator's: named, or --all.
        let at = |port: u16| SocketAddr::new(ip.parse().unwrap(), port).to_string();
        for port in [1, 2] {
            lab.home.run(["quarantine", "add", &at(port)]).ok();
        }
        assert_eq!(rechecked(lab, &[&at(1)], 0), [format!("{ip} 1 lifted null")]);
        assert!(rechecked(lab, &["--all"], 0).contains(&format!("{ip} 2 lifted null")));
        recheck(lab, &[&at(2)]).expect_code(1);
        recheck(lab, &["example.org"]).refused(2, &["is no peer"]);
    });
}

#[test]
fn without_a_policy_it_works_on_what_is_saved() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        let to = SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), 443);
        peer.set(Style::All, Behaviour::Http);
        let text = run(lab, &["probe", "--quarantine", &to.to_string()]).expect_code(1).stdout;
        assert!(text.contains("recorded: no SMC") && text.contains("No policy is in force"), "{text}");
        assert!(offers_smc(&peer, to));
        let run = lab.apply(ALLOW);
        assert!(run.stdout.contains("quarantine: 1 entry restored"), "{}", run.stdout);
        assert!(!offers_smc(&peer, to));
        lab.home.run(["detach"]).ok();
        let text = recheck(lab, &[]).ok().stdout;
        assert!(text.contains("lifted") && text.contains("No policy is in force"), "{text}");
        lab.apply(ALLOW);
        assert!(offers_smc(&peer, to));
    });
}

/// Where tc judges what has no socket, a probe would see peers as if they did not echo.
#[test]
fn it_refuses_to_be_deceived_by_this_hosts_own_policy() {
    needs!(Root, Tool, Netns, Bpffs);
    Lab::run_without_smc_d(|lab| {
        lab.home.write("etc/config.toml", "hook = \"tc\"\nforwarded = true\n");
        lab.apply(ALLOW);
        lab.home.run(["quarantine", "add", "127.0.0.2:1", "--cause", "probe"]).ok();
        recheck(lab, &[]).refused(3, &["forwarded", "look clean"]);
        assert_eq!(kernel(lab).list(Store::Commanded).unwrap().len(), 1);
    });
}

#[test]
fn without_privileges_nothing_is_sent() {
    needs!(Tool);
    let lab = Lab::default();
    for words in [&["quarantine", "recheck"][..], &["probe", "--quarantine", "127.0.0.1:1"]] {
        let mut command = lab.home.command(words);
        if Need::Root.is_met() {
            command.uid(65534);
        }
        lab.home.start_command(command).wait().refused(4, &["CAP_SYS_ADMIN"]);
    }
}
