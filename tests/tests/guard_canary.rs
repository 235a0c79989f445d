//! The canary: what is marked and what is not, whom an echo is believed of, and the ways to switch it off. What becomes of
//! connections to each kind of peer: guard_matrix.rs.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use smc_policy::kernel::guard::{Quarantine, Store};
use smc_policy::kernel::sys as kernel;
use smc_policy_common::quarantine::{Cause, Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::connection::exchange_sized;
use smc_policy_tests::echo_peer::{ADDRESSES, Behaviour, EchoPeer, Style};
use smc_policy_tests::lab::{is_smc, listen};
use smc_policy_tests::meeting::{HELLO, Meeting};
use smc_policy_tests::packet::{Packet, flags};
use smc_policy_tests::{Half, Kind, Lab, SockOps, eventually, needs_hook, sys};

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

#[test]
fn a_genuine_peer_keeps_smc_through_a_hundred_connections() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        let kinds = ["127.0.0.2", "fd00:5::2"].map(|ip| (ip, kinds(ip)));
        let each = 100_u64.div_ceil(kinds.iter().map(|(_, kinds)| kinds.len() as u64).sum());
        let mut connections = 0;
        for (ip, kinds) in kinds {
            for kind in kinds {
                let listener = listen(kind, ip);
                for nth in 0..each {
                    let outcome = exchange_sized(kind, None, &listener, &[1])
                        .unwrap_or_else(|failure| panic!("{kind:?}, {nth}: {failure}"));
                    assert!(is_smc(&outcome), "{kind:?}, {nth}: {outcome}");
                    connections += 1;
                }
            }
        }
        assert!(connections >= 100);
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
            assert_eq!(counter(lab, "unproven"), before + 1, "{ip}");
            // Whose reset, where SMC has a device, says no more than that it is suspect.
            let causes: Vec<u8> = learned(lab).iter().map(|(_, entry)| entry.cause).collect();
            assert!(causes.iter().all(|cause| *cause == Cause::Reset as u8), "{ip}: {causes:?}");
            forget(lab);
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
            let met = Meeting::arrange(peer, kinds(ip)[0], to, Behaviour::Echo);
            assert_eq!((met.reason(), &met.got[..], &met.said[..]), (Some(PEER_NO_SMC), HELLO, HELLO));
            assert!(met.time < SOON, "{met:?}");
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
