//! The events, as `monitor` shows them: what arrives, for whom, and what is lost.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::fd::AsFd;

use serde_json::Value;
use smc_policy::kernel::events::{self, Telling};
use smc_policy::kernel::{guard, sys as kernel};
use smc_policy_common::event::{RING_BYTES, Reader, Told, UNTIL};
use smc_policy_tests::echo_peer::{ADDRESSES, Behaviour, EchoPeer, Style};
use smc_policy_tests::sys::{Signal, signal};
use smc_policy_tests::{Half, Kind, Lab, Run, Running, eventually, needs_hook, sys};

const POLICY: &str = r#"
    version = 1
    [default]
    inbound = "deny"
    [[rule]]
    name = "no-smc-here"
    action = "deny"
    direction = "outbound"
    ports = [2]
    "#;

fn telling(lab: &Lab) -> Telling {
    events::telling(&lab.pins()).unwrap().expect("shared maps")
}

fn sum(told: &Told) -> (u64, u64) {
    (told.written.iter().sum(), told.lost.iter().sum())
}

/// Starts `monitor` and waits until it reads.
fn start(lab: &Lab, arguments: &[&str]) -> Running {
    let running = lab.home.start(["monitor"].iter().chain(arguments));
    eventually("it reads", || telling(lab).reader == Reader::Here);
    running
}

/// Ends it as a service manager does.
fn end(monitor: Running) -> Run {
    signal(monitor.pid(), Signal::Terminate).unwrap();
    monitor.wait().ok()
}

/// What `monitor --json` has printed, and the last line.
#[track_caller]
fn lines(run: &Run) -> (Vec<Value>, Value) {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {run:#?}"));
    let mut all: Vec<Value> = run.stdout.lines().map(parse).collect();
    let end = all.pop().unwrap_or_else(|| panic!("nothing printed: {run:#?}"));
    assert_eq!(end["kind"], "end", "{run:#?}");
    assert!(all.iter().all(|line| line["version"] == 1), "{run:#?}");
    (all, end)
}

/// A SYN with the SMC option to a port of this host where nobody listens.
fn knock(port: u16) {
    let socket = Kind::AfSmc.open().unwrap();
    sys::connect(&socket, SocketAddr::new("127.0.0.2".parse().unwrap(), port)).expect_err("nobody listens");
}

#[test]
fn who_reads_hears_of_all_that_happens() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        peer.set(Style::All, Behaviour::Silent);
        lab.apply(POLICY);
        let monitor = start(lab, &["--json", "--all"]);
        let to = |port| SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), port);
        // Echoes; is in quarantine then; is denied by a rule.
        for port in [443, 443, 2] {
            drop(Half::connect(Kind::AfSmc, None, to(port)).unwrap());
        }
        let (events, over) = lines(&end(monitor));
        assert_eq!(
            (over["events"].as_u64(), &over["lost"]["decision"]),
            (Some(5), &Value::from(0)),
            "{over}"
        );
        let [first, echo, entry, second, third] = &events[..] else { panic!("{events:#?}") };
        let by = |event: &Value| {
            assert_eq!(event["kind"], "decision", "{events:#?}");
            assert_eq!(event["decision"]["generation"], lab.generation(), "{events:#?}");
            let of = |key: &str| event["decision"][key].as_str().unwrap_or("null").to_owned();
            (of("action"), of("by"), of("rule"), event["port"].as_u64().unwrap())
        };
        let expected = |action: &str, by: &str, rule: &str, port| {
            (action.to_owned(), by.to_owned(), rule.to_owned(), port)
        };
        assert_eq!(by(first), expected("allow", "default", "null", 443));
        assert_eq!(by(second), expected("deny", "quarantine", "null", 443));
        assert_eq!(by(third), expected("deny", "rule", "no-smc-here", 2));
        for event in &events {
            assert_eq!((&event["peer"], &event["direction"]), (&ADDRESSES[0].1.into(), &"outbound".into()));
            if event["kind"] != "quarantine" {
                assert_eq!(event["local"], ADDRESSES[0].0);
            }
        }
        assert_eq!(
            (&echo["kind"], &echo["left"], &echo["port"]),
            (&"echo".into(), &false.into(), &443.into())
        );
        assert!(echo["evidence"].as_str().unwrap().starts_with("fe085350"), "{echo}");
        assert_eq!(
            (&entry["kind"], &entry["cause"], &entry["port"]),
            (&"quarantine".into(), &"echo".into(), &443.into())
        );
        assert_eq!((&entry["entry"]["renewed"], &entry["entry"]["span"]), (&false.into(), &3600.into()));
        assert_eq!(entry["evidence"], echo["evidence"]);
    });
}

#[test]
fn one_chooses_what_is_shown() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        peer.set(Style::All, Behaviour::Silent);
        lab.apply(POLICY);
        let kinds = |arguments: &[&str], port: u16| {
            let monitor = start(lab, &[&["--json"], arguments].concat());
            for port in [port, 2] {
                let to = SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), port);
                drop(Half::connect(Kind::AfSmc, None, to).unwrap());
            }
            let (events, _) = lines(&end(monitor));
            events.iter().map(|event| event["kind"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&[], 443), ["echo", "quarantine", "decision"]);
        assert_eq!(kinds(&["--denies"], 444), ["decision"]);
        // A tenth of them, by chance: fewer than 3 or more than 60 of 300 never happen.
        let monitor = start(lab, &["--denies", "--sample", "10"]);
        for _ in 0..300 {
            knock(2);
        }
        let run = end(monitor);
        let shown = run.stdout.lines().count();
        assert!((3..=60).contains(&shown), "{run:#?}");
        assert!(run.stdout.lines().all(|line| line.contains("127.0.0.2:2  rule no-smc-here")), "{run:#?}");
        assert!(run.stderr.contains(&format!("{shown} events, none lost")), "{run:#?}");
        // It ends by itself.
        let monitor = start(lab, &["--json", "--count", "2"]);
        for _ in 0..3 {
            knock(2);
        }
        assert_eq!(lines(&monitor.wait().ok()).0.len(), 2);
        let run = lab.home.run(["monitor", "--json", "--for", "1s"]).ok();
        assert_eq!(lines(&run), (vec![], lines(&run).1));
        // Inbound: the service port is ours.
        let monitor = start(lab, &["--json", "--denies"]);
        let listener = smc_policy_tests::lab::listen(Kind::AfSmc, "127.0.0.3");
        smc_policy_tests::lab::assert_denied(Kind::AfSmc, None, &listener);
        let (events, _) = lines(&end(monitor));
        let [event] = &events[..] else { panic!("{events:#?}") };
        assert_eq!((&event["direction"], &event["decision"]["by"]), (&"inbound".into(), &"default".into()));
        assert_eq!(
            (&event["local"], event["port"].as_u64()),
            (&"127.0.0.3".into(), Some(listener.address().port().into()))
        );
    });
}

#[test]
fn nothing_is_written_for_nobody() {
    needs_hook!();
    Lab::run(|lab| {
        lab.home.run(["monitor"]).refused(3, &["no policy is in force", "smc-policy apply"]);
        lab.apply(POLICY);
        knock(2);
        assert_eq!(sum(&telling(lab).told), (0, 0));
        let monitor = start(lab, &[]);
        knock(2);
        assert_eq!(sum(&telling(lab).told), (1, 0));
        assert_eq!(lab.status()["events"]["reader"], true);
        let run = end(monitor);
        assert!(run.stdout.contains("rule no-smc-here"), "{run:#?}");
        assert_eq!(
            (telling(lab).reader, &lab.status()["events"]["reader"]),
            (Reader::None, &Value::from(false))
        );
        knock(2);
        assert_eq!(sum(&telling(lab).told), (1, 0));
    });
}

#[test]
fn one_reads_at_a_time_and_one_that_dies_makes_room() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(POLICY);
        let first = start(lab, &[]);
        let said = format!("(process {})", first.pid());
        lab.home.run(["monitor"]).refused(3, &["another `smc-policy monitor`", &said, "only one can"]);
        knock(2);
        first.kill();
        // At once for another reader, who does not hear of what the first one was told.
        let second = start(lab, &["--json"]);
        knock(2);
        second.kill();
        // Nothing more is written for one that has died once its lease is over: it counts as lost for a while.
        eventually("its lease is over", || telling(lab).reader != Reader::Here);
        let (written, lost) = sum(&telling(lab).told);
        knock(2);
        assert_eq!(sum(&telling(lab).told), (written, lost + 1));
        let third = start(lab, &["--json"]);
        knock(2);
        let (events, over) = lines(&end(third));
        assert_eq!((events.len(), &over["lost"]["decision"]), (1, &Value::from(0)), "{events:#?}");
    });
}

#[test]
fn what_is_lost_is_counted() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(POLICY);
        let monitor = start(lab, &["--json", "--denies"]);
        signal(monitor.pid(), Signal::Stop).unwrap();
        // The lease ends.
        eventually("its lease is over", || telling(lab).reader == Reader::Slow);
        for _ in 0..10 {
            knock(2);
        }
        assert_eq!(sum(&telling(lab).told).1, 10);
        assert_eq!(lab.status()["events"]["lost"]["decision"], 10);
        // As if it had only just moved it on, until the ring is full.
        let shared = guard::Shared::open(&lab.pins()).unwrap().expect("shared maps");
        let lease = (guard::now() + 3600 * 1_000_000_000).to_ne_bytes();
        kernel::map_update(shared.map("smcpol_reader").unwrap().as_fd(), UNTIL, &lease).unwrap();
        let mut knocks = 10;
        while sum(&telling(lab).told).1 < 20 {
            for _ in 0..100 {
                knock(2);
            }
            knocks += 100;
            assert!(knocks < RING_BYTES / 96 + 1000, "the ring holds {knocks} events");
        }
        signal(monitor.pid(), Signal::Continue).unwrap();
        eventually("it has caught up and reads", || {
            knock(2);
            knocks += 1;
            let before = sum(&telling(lab).told).0;
            knock(2);
            knocks += 1;
            sum(&telling(lab).told).0 > before
        });
        let (events, over) = lines(&end(monitor));
        let lost = over["lost"]["decision"].as_u64().unwrap();
        assert!(lost >= 20, "{over}");
        assert_eq!(events.len() as u64 + lost, u64::from(knocks), "{over}");
        println!("{} shown, {lost} lost", events.len());
    });
}

#[test]
fn it_ends_quietly_and_outlives_a_detach() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(POLICY);
        let monitor = start(lab, &[]);
        signal(monitor.pid(), Signal::Interrupt).unwrap();
        let run = monitor.wait().ok();
        assert!(run.stderr.contains("0 events, none lost"), "{run:#?}");
        // `monitor | head -1`.
        let mut command = lab.home.command(["monitor", "--json"]);
        let mut child = command.spawn().unwrap();
        eventually("it reads", || telling(lab).reader == Reader::Here);
        knock(2);
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut next = || {
            let mut line = String::new();
            stdout.read_line(&mut line).unwrap();
            line
        };
        let line = next();
        assert!(line.contains("no-smc-here"), "{line}");
        // A switch under its eyes: the old policy's record is gone then.
        lab.apply(&POLICY.replace("no-smc-here", "another"));
        knock(2);
        let line = next();
        assert!(line.contains("another"), "{line}");
        drop(stdout);
        let status = child.wait().unwrap();
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(status.success() && said.is_empty(), "{status} {said}");
        assert_eq!(telling(lab).reader, Reader::None);
        // Through a detach and the next apply.
        let monitor = start(lab, &["--json"]);
        knock(2);
        lab.home.run(["detach"]).ok();
        // Generations and slots begin anew, with other rules.
        lab.apply(&POLICY.replace("no-smc-here", "third"));
        eventually("it reads again", || telling(lab).reader == Reader::Here);
        knock(2);
        let run = end(monitor);
        let rules: Vec<Value> = lines(&run).0.iter().map(|line| line["decision"]["rule"].clone()).collect();
        assert_eq!(rules, ["another", "third"], "{run:#?}");
        assert!(run.stderr.contains("waiting for the next `smc-policy apply`"), "{run:#?}");
    });
}
