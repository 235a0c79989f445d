//! The learner: who fails to negotiate is spoken to without SMC from the second connection on, by either hook.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use smc_policy::kernel::guard::{Quarantine, Store, now};
use smc_policy_common::quarantine::{Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::connection::Listener;
use smc_policy_tests::echo_peer::{ADDRESSES, Behaviour, EchoPeer, Style};
use smc_policy_tests::half::Transport;
use smc_policy_tests::lab::{assert_smc, listen};
use smc_policy_tests::packet::{Packet, SMC, flags};
use smc_policy_tests::{Half, Kind, Lab, Need, clc, eventually, is_full, needs_hook, netns, sys};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
/// "The peer did not answer with the SMC option" (SMC_CLC_DECL_PEERNOSMC).
const PEER_NO_SMC: u32 = 0x0301_0000;
/// Without the guard: 6 s.
const SOON: Duration = Duration::from_secs(2);
const PORT: u16 = 443;

fn addr(ip: IpAddr) -> Addr {
    match ip {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

/// What clients can do here: kinds of sockets, and the peer's address.
struct World<'a> {
    lab: &'a Lab,
    peer: &'a EchoPeer,
    ways: Vec<(Kind, IpAddr)>,
}

/// Runs `body` with a peer that returns the SMC option alone, which the canary does not notice, and this policy.
fn with_peer(policy: &str, body: impl FnOnce(&World<'_>) + Send) {
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        let ways = if Need::ClcDevice.is_met() { clc::device("echo0", &peer) } else { Vec::new() };
        lab.apply(policy);
        let world = World { lab, peer: &peer, ways };
        body(&world);
    });
}

impl World<'_> {
    fn entries(&self) -> Vec<Value> {
        let list = self.lab.home.run(["quarantine", "list", "--json"]).ok().json();
        list["entries"].as_array().expect("entries").clone()
    }

    fn quarantine(&self) -> Quarantine {
        Quarantine::open(&self.lab.pins()).unwrap().expect("a quarantine")
    }

    fn forget(&self) {
        self.quarantine().flush(Store::Learned).unwrap();
    }

    /// Lets the peer's entry end now.
    fn end(&self, ip: IpAddr) {
        let (quarantine, key) = (self.quarantine(), Key::new(addr(ip), PORT));
        let entry = quarantine.get(Store::Learned, key).unwrap().expect("an entry");
        quarantine.put(Store::Learned, key, &Entry { until: now(), ..entry }).unwrap();
    }

    #[track_caller]
    fn counter(&self, name: &str) -> u64 {
        let status = self.lab.status();
        status["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {status:#}"))
    }

    /// The first connection: its error and how long it took.
    #[track_caller]
    fn fails(&self, kind: Kind, ip: IpAddr, behaviour: Behaviour) -> Duration {
        self.peer.set(Style::SmcOnly, behaviour);
        let start = Instant::now();
        let failure = Half::connect(kind, None, SocketAddr::new(ip, PORT))
            .expect_err(&format!("{kind:?} to {ip}: {behaviour:?}"));
        let expected = match behaviour {
            Behaviour::Silent => libc::ETIMEDOUT,
            Behaviour::Echo | Behaviour::Http | Behaviour::Banner => libc::EPROTO,
            Behaviour::Fin | Behaviour::Rst => libc::ECONNRESET,
            Behaviour::Decline => panic!("that one does not fail"),
        };
        assert_eq!(failure.error.raw_os_error(), Some(expected), "{kind:?} to {ip}: {behaviour:?}");
        start.elapsed()
    }

    /// A connection that is plain TCP, at once and with nothing before or behind its data.
    #[track_caller]
    fn is_clean(&self, kind: Kind, ip: IpAddr, behaviour: Behaviour) {
        self.peer.set(Style::SmcOnly, behaviour);
        let shown = format!("{kind:?} to {ip}: {behaviour:?}");
        let half = Half::connect(kind, None, SocketAddr::new(ip, PORT))
            .unwrap_or_else(|failure| panic!("{shown}: {failure}"));
        assert!(half.time < SOON, "{:?}: {shown}", half.time);
        let end = half.judge().unwrap();
        assert!(matches!(end.transport, Transport::Fallback(PEER_NO_SMC, _)), "{}: {shown}", end.transport);
        let mut stream = half.stream();
        stream.write_all(b"hello").unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        if behaviour == Behaviour::Echo {
            let mut said = [0; 5];
            stream.read_exact(&mut said).unwrap();
            assert_eq!(&said, b"hello", "{shown}");
        }
        eventually("the peer has the data", || !self.peer.received(end.local.port()).is_empty());
        assert_eq!(self.peer.received(end.local.port()), b"hello", "{shown}");
        let _ = stream.shutdown(Shutdown::Write);
        assert!(!self.peer.syns()[0].has_smc(), "{shown}");
    }

    /// The only entry is this.
    #[track_caller]
    fn has_learned(&self, ip: IpAddr, cause: &str, span: u64, count: u64) -> Value {
        let entries = self.entries();
        let [entry] = &entries[..] else { panic!("{entries:#?}") };
        let shown = json!({
            "peer": entry["peer"], "port": entry["port"], "store": entry["store"], "cause": entry["cause"],
            "direction": entry["direction"], "span": entry["span"], "count": entry["count"],
        });
        let expected = json!({
            "peer": ip.to_string(), "port": PORT, "store": "learned", "cause": cause, "direction": "outbound",
            "span": span, "count": count,
        });
        assert_eq!(shown, expected);
        entry.clone()
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every behaviour, IPv4, IPv6 and mapped.
#[test]
fn the_second_connection_works() {
    needs_hook!(ClcDevice);
    with_peer(ALLOW, |world| {
        let silent_ways = if is_full() { world.ways.len() } else { 1 };
        let (mut slowest, mut cells) = (Duration::ZERO, 0);
        for (at, (kind, ip)) in world.ways.clone().into_iter().enumerate() {
            for behaviour in Behaviour::ALL {
                if behaviour == Behaviour::Silent && at >= silent_ways {
                    continue;
                }
                let time = world.fails(kind, ip, behaviour);
                let (cause, span, evidence) = match behaviour {
                    Behaviour::Silent => ("silence", 60, None),
                    Behaviour::Fin | Behaviour::Rst => ("reset", 60, None),
                    Behaviour::Http => ("no-clc", 3600, Some(hex(b"HTTP/1.1"))),
                    Behaviour::Banner => ("no-clc", 3600, Some(hex(b"SSH-2.0-"))),
                    // Our own proposal.
                    _ => ("no-clc", 3600, Some("e2d4c3d901".to_owned())),
                };
                let entry = world.has_learned(ip, cause, span, 1);
                match (&entry["evidence"], evidence) {
                    (Value::Null, None) => {}
                    (Value::String(text), Some(evidence)) => assert!(text.starts_with(&evidence), "{text}"),
                    other => panic!("{behaviour:?}: {other:?}"),
                }
                world.is_clean(kind, ip, behaviour);
                if behaviour == Behaviour::Silent {
                    println!("{kind:?} to {ip}: silence took {time:?}");
                } else {
                    slowest = slowest.max(time);
                }
                cells += 1;
                world.forget();
                // What the peer is remembered for would count towards a third time.
                world.forget_peers();
            }
        }
        println!("{cells} pairs of connections, the slowest first one but for silence took {slowest:?}");
        assert_eq!(world.counter("quarantined"), cells);
        let failures = ["no_clc", "resets", "silences"].map(|name| world.counter(name));
        assert_eq!(failures.iter().sum::<u64>(), cells, "{failures:?}");
        world.lab.home.run(["status"]).ok();
    });
}

/// A minute, two, and an hour; for a peer that spoke SMC lately a minute each time.
#[test]
fn who_keeps_resetting_is_held_for_longer() {
    needs_hook!(ClcDevice);
    with_peer(ALLOW, |world| {
        let (kind, ip) = world.ways[0];
        for (count, span) in [(1, 60), (2, 120), (3, 3600), (4, 7200)] {
            world.fails(kind, ip, Behaviour::Rst);
            world.has_learned(ip, "reset", span, count);
            world.is_clean(kind, ip, Behaviour::Echo);
            world.end(ip);
        }
        world.forget();
        world.forget_peers();
        world.declines(kind, ip);
        for count in 1..=4 {
            world.fails(kind, ip, Behaviour::Fin);
            world.has_learned(ip, "reset", 60, count);
            world.is_clean(kind, ip, Behaviour::Echo);
            world.end(ip);
        }
        // A proof is one whoever gives it.
        world.fails(kind, ip, Behaviour::Http);
        world.has_learned(ip, "no-clc", 3600, 5);
    });
}

impl World<'_> {
    fn forget_peers(&self) {
        use std::os::fd::AsFd;
        let map = smc_policy::kernel::sys::get_pinned(&self.lab.pins().join("shared/peers")).unwrap();
        for key in smc_policy::kernel::sys::keys(map.as_fd()).unwrap() {
            smc_policy::kernel::sys::element_delete(map.as_fd(), &key).unwrap();
        }
    }

    /// A connection that the peer declines, as an SMC server may.
    #[track_caller]
    fn declines(&self, kind: Kind, ip: IpAddr) {
        self.peer.set(Style::SmcOnly, Behaviour::Decline);
        let half = Half::connect(kind, None, SocketAddr::new(ip, PORT))
            .unwrap_or_else(|failure| panic!("{kind:?} to {ip}: {failure}"));
        let end = half.judge().unwrap();
        assert!(
            matches!(end.transport, Transport::Fallback(reason, 0x0307_0000) if reason != PEER_NO_SMC),
            "{kind:?} to {ip}: {}",
            end.transport
        );
    }
}

#[test]
fn a_decline_is_no_offence() {
    needs_hook!(ClcDevice);
    with_peer(ALLOW, |world| {
        for (kind, ip) in world.ways.clone() {
            world.declines(kind, ip);
            world.declines(kind, ip);
        }
        assert_eq!(world.entries(), Vec::<Value>::new());
        let ips: std::collections::BTreeSet<_> = world.ways.iter().map(|(_, ip)| ip).collect();
        assert_eq!(world.lab.status()["guard"]["known_peers"], ips.len());
        assert_eq!(["no_clc", "resets", "silences"].map(|name| world.counter(name)), [0; 3]);
    });
}

/// Many servers that spoke SMC reset their connections at the same time: most of them are left alone.
#[test]
fn a_storm_does_not_quarantine_a_fleet() {
    needs_hook!(ClcDevice);
    with_peer(ALLOW, |world| {
        let kind = world.ways[0].0;
        let fleet: Vec<IpAddr> = (100..124).map(|last| Ipv4Addr::new(10, 77, 0, last).into()).collect();
        for ip in &fleet {
            world.declines(kind, *ip);
        }
        for ip in &fleet {
            world.fails(kind, *ip, Behaviour::Rst);
        }
        let entries = world.entries();
        assert_eq!(entries.len(), fleet.len() / 4, "{entries:#?}");
        assert!(entries.iter().all(|e| (&e["cause"], &e["span"]) == (&"reset".into(), &60.into())));
        assert_eq!(world.counter("storm_reports"), fleet.len() as u64 * 3 / 4);
        let guard = &world.lab.status()["guard"];
        let numbers =
            ["known_peers", "suspected_peers", "suspected_at_most"].map(|name| guard[name].as_u64());
        assert_eq!(numbers, [Some(24), Some(6), Some(6)], "{guard:#}");
        // A peer that nothing is known of is no part of it, nor is a proof.
        let stranger = Ipv4Addr::new(10, 77, 0, 200).into();
        world.fails(kind, stranger, Behaviour::Rst);
        world.fails(kind, fleet[20], Behaviour::Http);
        assert_eq!(world.entries().len(), 8);
    });
}

#[test]
fn who_is_trusted_and_what_is_observed_is_only_counted() {
    needs_hook!(ClcDevice);
    let trusted = "version = 1\n[[rule]]\nname = \"t\"\naction = \"allow\"\ntrust = true\nports = [443]\n";
    with_peer(trusted, |world| {
        let (kind, ip) = world.ways[0];
        for behaviour in [Behaviour::Rst, Behaviour::Http] {
            world.fails(kind, ip, behaviour);
            // Again with SMC.
            world.fails(kind, ip, behaviour);
        }
        assert_eq!(world.entries(), Vec::<Value>::new());
        assert_eq!(["no_clc", "resets", "observed_failures"].map(|name| world.counter(name)), [2, 2, 0]);
        let path = world.lab.home.write("observe.toml", ALLOW);
        world.lab.home.run(["apply", "--mode", "observe", path.to_str().unwrap()]).ok();
        for behaviour in [Behaviour::Rst, Behaviour::Http] {
            world.fails(kind, ip, behaviour);
        }
        assert_eq!(world.entries(), Vec::<Value>::new());
        assert_eq!(["no_clc", "resets", "observed_failures"].map(|name| world.counter(name)), [3, 3, 2]);
    });
}

/// Our own server waits with the same function: what clients send it is none of the learner's business.
#[test]
fn garbage_from_a_client_is_not_recorded() {
    needs_hook!();
    with_peer(ALLOW, |world| {
        for (host, ip) in ADDRESSES {
            let kind = if ip.contains(':') { Kind::AfSmc6 } else { Kind::AfSmc };
            let socket = kind.open().unwrap();
            sys::bind(&socket, SocketAddr::new(host.parse().unwrap(), 0)).unwrap();
            sys::listen(&socket, 5).unwrap();
            let listener = TcpListener::from(socket);
            listener.set_nonblocking(true).unwrap();
            let port = listener.local_addr().unwrap().port();
            world.peer.set(Style::SmcOnly, Behaviour::Silent);
            let options = [&[2, 4, 5, 0xb4][..], &SMC[2..], &[1, 1]].concat();
            // As the peer answers (a SYN and an ACK, from its first number on), the connection stands at once.
            let syn = Packet { source_port: 5555, sequence: 1000, ..Packet::syn(ip, host, port, &options) };
            world.peer.send(&syn);
            eventually("the host answers", || !world.peer.syns().is_empty());
            let answer = world.peer.syns()[0].clone();
            assert!(answer.has_smc(), "{answer:02x?}");
            world.peer.send(&Packet {
                sequence: 1001,
                acknowledged: answer.sequence.wrapping_add(1),
                flags: flags::PSH | flags::ACK,
                options: vec![],
                payload: b"GET / HTTP/1.0\r\n\r\n".to_vec(),
                ..syn
            });
            // A connection that failed is closed when the next one is asked for.
            eventually("the host ends the connection", || {
                let accepted = listener.accept().map(drop).map_err(|e| e.kind());
                assert_eq!(accepted, Err(ErrorKind::WouldBlock), "it came to a connection");
                world.peer.is_ended(port)
            });
        }
        assert_eq!(world.entries(), Vec::<Value>::new());
        assert_eq!(["no_clc", "resets", "silences"].map(|name| world.counter(name)), [0; 3]);
    });
}

/// Other network namespaces than the policy's.
#[test]
fn what_happens_elsewhere_is_not_recorded() {
    needs_hook!(ClcDevice);
    with_peer(ALLOW, |world| {
        let (kind, ip) = (world.ways[0].0, world.ways[0].1);
        netns::in_new_namespace(&[], || {
            let peer = EchoPeer::start("echo1");
            assert_eq!(clc::device("echo1", &peer)[0], (kind, ip));
            peer.set(Style::SmcOnly, Behaviour::Rst);
            let _ = Half::connect(kind, None, SocketAddr::new(ip, PORT)).expect_err("a reset");
        });
        assert_eq!(world.entries(), Vec::<Value>::new());
        world.fails(kind, ip, Behaviour::Rst);
        assert_eq!(world.entries().len(), 1);
    });
}

/// `guard = "learn"` is the learner alone; with "off", and after `detach`, nothing is left of it.
#[test]
fn the_learner_comes_and_goes_with_the_guard() {
    needs_hook!(ClcDevice);
    with_peer(ALLOW, |world| {
        let World { lab, peer, .. } = world;
        let (kind, ip) = world.ways[0];
        let hook = smc_policy_tests::hook();
        let config = |guard: &str| {
            lab.home.write("etc/config.toml", &format!("hook = \"{hook}\"\nguard = \"{guard}\"\n"));
            lab.apply(ALLOW);
            let status = lab.status();
            assert_eq!(status["guard"]["guard"], guard);
            let links = std::fs::read_dir(lab.pins().join("shared")).unwrap().flatten();
            let links = links.filter(|link| link.file_name().to_string_lossy().starts_with("learn-")).count();
            (status["guard"]["learns"].as_bool().unwrap(), links)
        };
        assert_eq!(lab.status()["guard"]["learns"], true, "{:#}", lab.status());
        assert_eq!(config("learn"), (true, 2));
        // A peer that the canary would have noticed.
        peer.set(Style::All, Behaviour::Http);
        let _ = Half::connect(kind, None, SocketAddr::new(ip, PORT)).expect_err("no canary");
        assert_eq!(peer.syns()[0].canary(), None);
        world.has_learned(ip, "no-clc", 3600, 1);
        world.is_clean(kind, ip, Behaviour::Echo);
        world.forget();
        assert_eq!(config("off"), (false, 0));
        world.fails(kind, ip, Behaviour::Http);
        assert_eq!(world.entries(), Vec::<Value>::new());
        assert_eq!(config("canary"), (true, 2));
        lab.pretend_other_version();
        lab.apply(ALLOW);
        assert_eq!(lab.status()["guard"]["learns"], true, "{:#}", lab.status());
        world.fails(kind, ip, Behaviour::Http);
        world.has_learned(ip, "no-clc", 3600, 1);
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

/// Also on kernels where clients never wait for want of a device.
#[test]
fn the_programs_load() {
    needs_hook!();
    Lab::run(|lab| {
        let run = lab.apply(ALLOW);
        assert!(!run.stderr.contains("does not learn"), "{run:#?}");
        let guard = &lab.status()["guard"];
        assert_eq!((&guard["learns"], &guard["not_learning"]), (&true.into(), &Value::Null), "{guard:#}");
    });
}

/// A server that goes and comes at one port, and takes what connects.
struct Server {
    address: SocketAddr,
    kind: Kind,
}

impl Server {
    /// Serves until `is_over`, then goes at once with all its connections.
    fn serve(&self, is_over: &AtomicBool) {
        let listener = Listener::bind(self.kind, self.address);
        let mut open = Vec::new();
        while let Ok(half) = listener.accept(is_over) {
            open.push(half);
            if open.len() > 20 {
                open.clear();
            }
        }
    }
}

/// A genuine server is restarted again and again while clients connect: a minute after the first failure at the latest they
/// speak SMC with it again.
#[test]
fn a_restarted_server_gets_smc_again() {
    needs_hook!(SmcD);
    Lab::run(|lab| {
        lab.apply(ALLOW);
        for ip in ["127.0.0.2", "fd00:5::2"] {
            let kind = if ip.contains(':') { Kind::AfSmc6 } else { Kind::AfSmc };
            let first = listen(kind, ip);
            assert_smc(kind, None, &first);
            let server = Server { address: first.address(), kind };
            drop(first);
            let (no_more, failed, succeeded) =
                (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
            thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        while !no_more.load(Ordering::Acquire) {
                            match Half::connect(kind, None, server.address) {
                                Ok(_) => succeeded.fetch_add(1, Ordering::Relaxed),
                                Err(_) => failed.fetch_add(1, Ordering::Relaxed),
                            };
                        }
                    });
                }
                for _ in 0..20 {
                    let is_over = AtomicBool::new(false);
                    thread::scope(|scope| {
                        let before = succeeded.load(Ordering::Relaxed);
                        scope.spawn(|| server.serve(&is_over));
                        eventually("it serves", || succeeded.load(Ordering::Relaxed) >= before + 3);
                        is_over.store(true, Ordering::Release);
                    });
                }
                no_more.store(true, Ordering::Release);
            });
            let restarted = Instant::now();
            let quarantine = Quarantine::open(&lab.pins()).unwrap().expect("a quarantine");
            let entries = quarantine.list(Store::Learned).unwrap();
            println!(
                "{ip}: {failed:?} of the storm's connections failed, {succeeded:?} did not; then {entries:?}, {:#}",
                lab.status()["counters"]
            );
            for (_, entry) in &entries {
                assert!(entry.span <= 60 && entry.until <= now() + 60_000_000_000, "{entry:?}");
            }
            let listener = Listener::bind(kind, server.address);
            if is_full() {
                let again = || smc_policy_tests::exchange(kind, None, &listener).is_ok_and(|o| o.is_smc());
                while !again() {
                    assert!(restarted.elapsed() < Duration::from_secs(61), "no SMC after a minute");
                    thread::sleep(Duration::from_millis(100));
                }
                println!("{ip}: SMC again after {:?}", restarted.elapsed());
            } else {
                // An hour is not waited for, nor is a minute.
                for (key, entry) in entries {
                    quarantine.put(Store::Learned, key, &Entry { until: now(), ..entry }).unwrap();
                }
            }
            assert_smc(kind, None, &listener);
        }
        assert!(Need::SmcD.is_met());
    });
}
