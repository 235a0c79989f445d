//! The canary: the first connection to a peer that echoes TCP options works already, by either hook.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use smc_policy::kernel::guard::{Quarantine, Store};
use smc_policy::kernel::sys as kernel;
use smc_policy_common::quarantine::{Cause, Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::echo_peer::{ADDRESSES, BANNER, Behaviour, EchoPeer, Style};
use smc_policy_tests::half::Transport;
use smc_policy_tests::lab::{assert_smc, listen};
use smc_policy_tests::packet::{Packet, flags};
use smc_policy_tests::{Half, Kind, Lab, Need, SockOps, eventually, needs_hook, sys};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
/// "The peer did not answer with the SMC option" (SMC_CLC_DECL_PEERNOSMC).
const PEER_NO_SMC: u32 = 0x0301_0000;
/// Without the guard: 6 s.
const SOON: Duration = Duration::from_secs(2);

fn addr(ip: &str) -> Addr {
    match ip.parse().expect("an address") {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

fn kinds(ip: &str) -> Vec<Kind> {
    if ip.contains(':') { Kind::smc_v6() } else { Kind::smc_v4() }
}

/// Runs `body` with a peer and a policy that allows everything.
fn with_peer(policy: &str, body: impl FnOnce(&Lab, &EchoPeer) + Send) {
    let run = |lab: &Lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(policy);
        body(lab, &peer);
    };
    Lab::run(run);
}

fn learned(lab: &Lab) -> Vec<(Key, Entry)> {
    Quarantine::open(&lab.pins()).unwrap().expect("a quarantine").list(Store::Learned).unwrap()
}

fn forget(lab: &Lab) {
    Quarantine::open(&lab.pins()).unwrap().expect("a quarantine").flush(Store::Learned).unwrap();
}

#[track_caller]
fn counter(lab: &Lab, name: &str) -> u64 {
    let status = lab.status();
    status["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {status:#}"))
}

/// Connects, says hello and returns what the peer got and said, and how long connect(2) took.
fn call(peer: &EchoPeer, kind: Kind, to: SocketAddr, behaviour: Behaviour) -> (Vec<u8>, Vec<u8>, Duration) {
    let half = Half::connect(kind, None, to).unwrap_or_else(|failure| panic!("{kind:?} to {to}: {failure}"));
    let end = half.judge().unwrap();
    assert!(
        matches!(end.transport, Transport::Fallback(PEER_NO_SMC, _)),
        "{kind:?} {behaviour:?}: {}",
        end.transport
    );
    let mut stream = half.stream();
    stream.write_all(b"hello").unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut said = vec![0; 512];
    let length = match behaviour {
        Behaviour::Silent => 0,
        // A reset is an error, or the end for a kernel that gives it late.
        _ => stream.read(&mut said).unwrap_or(0),
    };
    said.truncate(length);
    eventually("the peer has the data", || !peer.received(end.local.port()).is_empty());
    let _ = stream.shutdown(Shutdown::Write);
    (peer.received(end.local.port()), said, half.time)
}

#[test]
fn the_first_connection_works_already() {
    needs_hook!();
    with_peer(ALLOW, |lab, peer| {
        let (mut slowest, mut cells) = (Duration::ZERO, 0);
        for (_, ip) in ADDRESSES {
            let to = SocketAddr::new(ip.parse().unwrap(), 443);
            let kinds = kinds(ip);
            for style in [Style::All, Style::Unknown, Style::Reordered, Style::Experimental] {
                for (at, behaviour) in Behaviour::ALL.into_iter().enumerate() {
                    let kind = kinds[at % kinds.len()];
                    peer.set(style, behaviour);
                    for first in [true, false] {
                        let (got, said, time) = call(peer, kind, to, behaviour);
                        let shown = format!("{kind:?} to {to}: {style:?} {behaviour:?}, first: {first}");
                        assert_eq!(got, b"hello", "{shown}");
                        match behaviour {
                            Behaviour::Echo => assert_eq!(said, b"hello", "{shown}"),
                            Behaviour::Banner => assert_eq!(said, BANNER, "{shown}"),
                            Behaviour::Http => assert!(said.starts_with(b"HTTP/1.1 400"), "{shown}"),
                            Behaviour::Silent | Behaviour::Fin | Behaviour::Rst => {
                                assert_eq!(said, b"", "{shown}");
                            }
                        }
                        assert!(time < SOON, "{time:?}: {shown}");
                        slowest = slowest.max(time);
                        cells += 1;
                    }
                    let syns = peer.syns();
                    assert_eq!(syns.len(), 2, "{syns:02x?}");
                    assert!(
                        syns[0].has_smc() && syns[0].canary().is_some_and(|c| c.len() == 8),
                        "{syns:02x?}"
                    );
                    assert!(!syns[1].has_smc() && syns[1].canary().is_none(), "{syns:02x?}");
                    let entries = learned(lab);
                    let [(key, entry)] = entries[..] else { panic!("{entries:?}") };
                    assert_eq!(key, Key::new(addr(ip), 443));
                    assert_eq!((entry.cause, entry.count), (Cause::Echo as u8, 1));
                    assert_eq!(entry.evidence[..8], syns[0].canary().unwrap());
                    forget(lab);
                }
            }
        }
        println!("{cells} connections, the slowest took {slowest:?}");
        assert_eq!(counter(lab, "echoes"), cells / 2);
        assert_eq!((counter(lab, "unproven"), counter(lab, "unchanged")), (0, 0));
        assert_eq!(counter(lab, "quarantined"), cells / 2);
    });
}

/// Its SYN-ACK looks like that of a genuine SMC server: this is what the learner is for.
#[test]
fn who_returns_the_smc_option_alone_is_not_noticed() {
    needs_hook!();
    with_peer(ALLOW, |lab, peer| {
        peer.set(Style::SmcOnly, Behaviour::Echo);
        let to = SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), 443);
        assert!(Half::connect(Kind::AfSmc, None, to).is_err() || !Need::SmcD.is_met());
        assert_eq!((counter(lab, "echoes"), learned(lab)), (0, vec![]));
    });
}

#[test]
fn a_genuine_peer_is_not_disturbed() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        let mut connections = 0;
        for ip in ["127.0.0.2", "fd00:5::2"] {
            for kind in kinds(ip) {
                let listener = listen(kind, ip);
                for _ in 0..5 {
                    assert_smc(kind, None, &listener);
                    connections += 1;
                }
            }
        }
        assert_eq!((counter(lab, "marked"), counter(lab, "echoes")), (connections, 0));
        assert_eq!((counter(lab, "unproven"), learned(lab)), (0, vec![]));
        let status = lab.status();
        assert_eq!(status["guard"]["marks"], true, "{status:#}");
        assert_eq!(status["guard"]["unguarded"], serde_json::json!([]), "{status:#}");
    });
}

/// Plain TCP, trusted peers, denied ones and observe mode: their SYNs are what they are without the guard.
#[test]
fn only_allowed_smc_syns_are_marked() {
    needs_hook!();
    let policy = r#"
        version = 1
        [[rule]]
        name = "trusted"
        action = "allow"
        trust = true
        ports = [1]
        [[rule]]
        name = "denied"
        action = "deny"
        direction = "outbound"
        ports = [2]
        "#;
    with_peer(policy, |lab, peer| {
        let syn = |kind: Kind, port: u16| {
            peer.set(Style::Nothing, Behaviour::Silent);
            let to = SocketAddr::new(ADDRESSES[usize::from(kind.is_v6())].1.parse().unwrap(), port);
            drop(Half::connect(kind, None, to).unwrap_or_else(|failure| panic!("{kind:?}: {failure}")));
            let [syn] = &peer.syns()[..] else { panic!("{:?}", peer.syns()) };
            syn.clone()
        };
        // Kinds and lengths; timestamps differ.
        let shape = |options: &[u8]| {
            let mut options = options.to_vec();
            if let Some(at) = options.windows(2).position(|pair| pair == [8, 10]) {
                options[at + 2..at + 10].fill(0);
            }
            options
        };
        const KINDS: [Kind; 4] = [Kind::Tcp, Kind::Tcp6, Kind::AfSmc, Kind::AfSmc6];
        lab.home.run(["detach"]).ok();
        let without = KINDS.map(|kind| shape(&syn(kind, 1).options));
        lab.apply(policy);
        for (kind, without) in KINDS.into_iter().zip(without) {
            assert_eq!(shape(&syn(kind, 1).options), without, "{kind:?}: trusted");
            let (denied, other) = (syn(kind, 2), syn(kind, 3));
            assert!(!denied.has_smc() && denied.canary().is_none(), "{denied:02x?}");
            if kind.is_smc() {
                assert_eq!(other.canary().map(|canary| canary.len()), Some(8), "{other:02x?}");
                assert_eq!(other.options.len(), without.len() + 8, "{other:02x?}");
            } else {
                assert_eq!(shape(&other.options), without, "{kind:?}");
            }
        }
        let path = lab.home.write("observe.toml", policy);
        lab.home.run(["apply", "--mode", "observe", path.to_str().unwrap()]).ok();
        let observed = syn(Kind::AfSmc, 3);
        assert!(observed.has_smc() && observed.canary().is_none(), "{observed:02x?}");
    });
}

/// Nobody can put others into quarantine: neither by a nonce that is wrong, nor by one that was right for another SYN, nor
/// by the short form.
#[test]
fn forged_answers_poison_nothing() {
    needs_hook!();
    with_peer(ALLOW, |lab, peer| {
        for (host, ip) in ADDRESSES {
            let to = SocketAddr::new(ip.parse().unwrap(), 443);
            let kind = kinds(ip)[0];
            // The peer's SYN-ACK itself, with another nonce.
            let before = counter(lab, "unproven");
            peer.set(Style::WrongNonce, Behaviour::Rst);
            let _ = Half::connect(kind, None, to);
            assert_eq!((counter(lab, "unproven"), learned(lab)), (before + 1, vec![]), "{ip}");
            // One SYN's nonce, learned by listening.
            peer.set(Style::Nothing, Behaviour::Silent);
            drop(Half::connect(kind, None, to).unwrap());
            let [syn] = &peer.syns()[..] else { panic!("{:?}", peer.syns()) };
            let canary = syn.canary().unwrap();
            let smc = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
            let forged = |from: &str, port: u16, acknowledged: u32, canary: &[u8]| {
                let options = [&[2, 4, 5, 0xb4][..], &smc, canary].concat();
                peer.send(&Packet {
                    source_port: port,
                    acknowledged,
                    flags: flags::SYN | flags::ACK,
                    ..Packet::syn(from, host, syn.port, &options)
                });
            };
            let next = syn.sequence.wrapping_add(1);
            let other = if ip.contains(':') { "fd77::6" } else { "10.77.0.6" };
            forged(other, 443, next, &canary);
            forged(ip, 444, next, &canary);
            forged(ip, 443, next.wrapping_add(1), &canary);
            forged(ip, 443, next, &[254, 8, b'S', b'P', 0, 0, 0, 0]);
            forged(other, 443, next, &[254, 4, b'S', b'P']);
            eventually("all five were seen", || {
                (counter(lab, "unproven"), counter(lab, "unlearned") % 100)
                    == (before + 5, { u64::from(ip.contains(':')) + 1 })
            });
            assert_eq!(learned(lab), vec![], "{ip}");
            // The genuine article, for comparison.
            forged(ip, 443, next, &canary);
            eventually("the right one is learned", || learned(lab).len() == 1);
            forget(lab);
        }
    });
}

/// Where the long canary finds no room, the short one does: it counts only for a connection that waits.
#[test]
fn the_short_canary() {
    needs_hook!();
    with_peer(ALLOW, |lab, peer| {
        // A program of others, ahead of ours, that takes so much of the SYN that four bytes are left.
        lab.home.run(["detach"]).ok();
        let _other = SockOps::attach(8, 64);
        lab.apply(ALLOW);
        for (_, ip) in ADDRESSES {
            let to = SocketAddr::new(ip.parse().unwrap(), 443);
            peer.set(Style::Experimental, Behaviour::Echo);
            let (got, said, time) = call(peer, kinds(ip)[0], to, Behaviour::Echo);
            assert_eq!((&got[..], &said[..]), (&b"hello"[..], &b"hello"[..]));
            assert!(time < SOON, "{time:?}");
            assert_eq!(peer.syns()[0].canary(), Some(vec![254, 4, b'S', b'P']), "{:02x?}", peer.syns());
            let entries = learned(lab);
            let [(key, entry)] = entries[..] else { panic!("{entries:?}") };
            assert_eq!((key, entry.cause), (Key::new(addr(ip), 443), Cause::ShortEcho as u8));
            forget(lab);
        }
        assert_eq!((counter(lab, "marked_short"), counter(lab, "marked")), (2, 0));
    });
}

/// Other users of sock_ops keep their callback flags, also the one that we use.
#[test]
fn other_users_keep_their_flags() {
    needs_hook!();
    const STATE: u32 = 4;
    const RTO: u32 = 1;
    const WRITE: u32 = 64;
    with_peer(ALLOW, |_, peer| {
        peer.set(Style::Nothing, Behaviour::Silent);
        let to = SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), 443);
        for (theirs, kind) in [(STATE | RTO, Kind::AfSmc), (STATE, Kind::Tcp), (STATE | WRITE, Kind::Tcp)] {
            let other = SockOps::attach(0, theirs);
            drop(Half::connect(kind, None, to).unwrap());
            eventually("the socket's state changed", || other.flags_at_the_end().is_some());
            assert_eq!(other.flags_at_the_end(), Some(theirs), "{kind:?}");
        }
    });
}

/// TCP-AO signs all options: nothing is added.
#[test]
fn signed_syns_are_left_alone() {
    needs_hook!(TcpAo);
    with_peer(ALLOW, |lab, peer| {
        // Room for the signature, the SMC option and the short canary.
        std::fs::write("/proc/sys/net/ipv4/tcp_timestamps", "0\n").unwrap();
        peer.set(Style::Nothing, Behaviour::Silent);
        let to: SocketAddr = SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), 443);
        let IpAddr::V4(ip) = to.ip() else { panic!("{to}") };
        let socket = Kind::AfSmc.open().unwrap();
        sys::set_tcp_ao_key(&socket, ip).unwrap();
        // The peer does not sign.
        sys::set_time_limits(&socket, Duration::from_millis(300)).unwrap();
        sys::connect(&socket, to).expect_err("an unsigned answer");
        let syn = &peer.syns()[0];
        assert!(syn.has_smc() && syn.canary().is_none(), "{syn:02x?}");
        assert!(syn.list().iter().any(|option| option[0] == 29), "{syn:02x?}");
        assert_eq!((counter(lab, "marked"), counter(lab, "marked_short")), (0, 0));
    });
}

/// A key that was replaced holds for some minutes, and no longer.
#[test]
fn the_key_before_holds_for_a_while() {
    needs_hook!();
    with_peer(ALLOW, |lab, peer| {
        let (host, ip) = ADDRESSES[0];
        peer.set(Style::Nothing, Behaviour::Silent);
        drop(Half::connect(Kind::AfSmc, None, SocketAddr::new(ip.parse().unwrap(), 443)).unwrap());
        let [syn] = &peer.syns()[..] else { panic!("{:?}", peer.syns()) };
        let echo = || {
            let smc = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
            let options = [&[2, 4, 5, 0xb4][..], &smc, &syn.canary().unwrap()].concat();
            peer.send(&Packet {
                source_port: 443,
                acknowledged: syn.sequence.wrapping_add(1),
                flags: flags::SYN | flags::ACK,
                ..Packet::syn(ip, host, syn.port, &options)
            });
        };
        let keys = kernel::get_pinned(&lab.pins().join("shared/keys")).unwrap();
        let read = || kernel::map_lookup(keys.as_fd(), 0).unwrap();
        let before = read();
        // In use since later than now: no key of this boot. (smc_policy_common::canary::Keys)
        let mut old = before.clone();
        old[40..].fill(0xff);
        kernel::map_update(keys.as_fd(), 0, &old).unwrap();
        lab.apply(ALLOW);
        assert_ne!(read()[..16], before[..16], "another key");
        assert_eq!(read()[16..32], before[..16], "the one before");
        echo();
        eventually("the old key holds", || learned(lab).len() == 1);
        let mut over = read();
        over[32..40].fill(0);
        kernel::map_update(keys.as_fd(), 0, &over).unwrap();
        let count = learned(lab)[0].1.count;
        echo();
        eventually("it does not any more", || counter(lab, "unproven") == 1);
        assert_eq!(learned(lab)[0].1.count, count);
    });
}

#[test]
fn the_guard_can_be_switched_off_and_goes_with_detach() {
    needs_hook!();
    with_peer(ALLOW, |lab, peer| {
        let links = || {
            let entries = std::fs::read_dir(lab.pins().join("shared")).into_iter().flatten().flatten();
            entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("cgroup-")).count()
        };
        let is_marked = || {
            peer.set(Style::Nothing, Behaviour::Silent);
            let to = SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), 443);
            drop(Half::connect(Kind::AfSmc, None, to).unwrap());
            peer.syns()[0].canary().is_some()
        };
        assert_eq!((links(), is_marked()), (1, true));
        let hook = smc_policy_tests::hook();
        let config = |guard: &str| {
            lab.home.write("etc/config.toml", &format!("hook = \"{hook}\"\nguard = \"{guard}\"\n"))
        };
        config("off");
        lab.apply(ALLOW);
        assert_eq!((links(), is_marked()), (0, false));
        assert_eq!(lab.status()["guard"]["guard"], "off");
        config("canary");
        lab.apply(ALLOW);
        assert_eq!((links(), is_marked()), (1, true));
        lab.pretend_other_version();
        lab.apply(ALLOW);
        assert_eq!((links(), is_marked()), (1, true));
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
        assert!(!is_marked());
    });
}
