//! What the guard's mark does on its way: sent again, swallowed by a firewall, answered by a SYN cookie; and plain TCP's SYNs,
//! which do not carry it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use smc_policy::kernel::guard::{Quarantine, Store};
use smc_policy_common::quarantine::{Cause, Entry};
use smc_policy_tests::echo_peer::{ADDRESSES, Behaviour, EchoPeer, SeenSyn, Style, Swallows};
use smc_policy_tests::lab::{assert_denied, assert_smc, listen};
use smc_policy_tests::meeting::{HELLO, Meeting};
use smc_policy_tests::{Half, Kind, Lab, hook, needs_hook};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
/// "The peer did not answer with the SMC option" (SMC_CLC_DECL_PEERNOSMC).
const PEER_NO_SMC: u32 = 0x0301_0000;
/// A SYN is sent again after a second. The clock of a machine that gets no processor for a while says something else; how
/// many SYNs came says for sure.
const A_SECOND: std::ops::Range<Duration> = Duration::from_millis(200)..Duration::from_secs(5);

/// Runs `body` with a peer and a policy that allows everything; `config`: lines of config.toml.
fn with_peer(config: &str, body: impl FnOnce(&Lab, &EchoPeer) + Send) {
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.home.write("etc/config.toml", &format!("hook = \"{}\"\n{config}", hook()));
        lab.apply(ALLOW);
        body(lab, &peer);
    });
}

fn targets() -> impl Iterator<Item = (Kind, SocketAddr)> {
    let kinds = [Kind::AfSmc, Kind::AfSmc6];
    ADDRESSES.iter().zip(kinds).map(|((_, ip), kind)| (kind, SocketAddr::new(ip.parse().unwrap(), 443)))
}

fn learned(lab: &Lab) -> Vec<Entry> {
    let quarantine = Quarantine::open(&lab.pins()).unwrap().expect("a quarantine");
    quarantine.list(Store::Learned).unwrap().into_iter().map(|(_, entry)| entry).collect()
}

#[track_caller]
fn counters(lab: &Lab, names: &[&str]) -> Vec<u64> {
    let status = lab.status();
    let number = |name: &&str| status["counters"][name].as_u64().unwrap_or_else(|| panic!("{status:#}"));
    names.iter().map(number).collect()
}

/// The packet without what differs from one connection to the next: IPv4's identification and IPv6's flow label, port,
/// sequence number, timestamps, checksums.
fn shape(syn: &SeenSyn) -> Vec<u8> {
    let mut packet = syn.packet.clone();
    let tcp = if packet[0] >> 4 == 4 {
        packet[4..6].fill(0);
        packet[10..12].fill(0);
        20
    } else {
        packet[1..4].fill(0);
        40
    };
    for range in [0..2, 4..8, 16..18] {
        packet[tcp..][range].fill(0);
    }
    if let Some(at) = packet[tcp + 20..].windows(2).position(|pair| pair == [8, 10]) {
        packet[tcp + 20 + at + 2..][..8].fill(0);
    }
    packet
}

#[test]
fn plain_tcp_sends_the_same_bytes_as_without_the_guard() {
    needs_hook!();
    with_peer("", |lab, peer| {
        let syns = || {
            let mut all = Vec::new();
            for timestamps in ["0\n", "1\n"] {
                fs::write("/proc/sys/net/ipv4/tcp_timestamps", timestamps).unwrap();
                for (kind, (_, ip)) in [Kind::Tcp, Kind::Tcp6].into_iter().zip(ADDRESSES) {
                    peer.set(Style::Nothing, Behaviour::Silent);
                    let to = SocketAddr::new(ip.parse().unwrap(), 443);
                    drop(Half::connect(kind, None, to).unwrap_or_else(|failure| panic!("{failure}")));
                    let [syn] = &peer.syns()[..] else { panic!("{:?}", peer.syns()) };
                    all.push(shape(syn));
                }
            }
            all
        };
        let with = syns();
        assert_eq!(counters(lab, &["marked", "decisions"]), [0, 0]);
        lab.home.run(["detach"]).ok();
        let without = syns();
        assert_eq!(with, without);
        assert_eq!(with.len(), 4);
        // The judge itself: an SMC socket's differ.
        lab.apply(ALLOW);
        fs::write("/proc/sys/net/ipv4/tcp_timestamps", "0\n").unwrap();
        peer.set(Style::Nothing, Behaviour::Silent);
        let to = SocketAddr::new(ADDRESSES[0].1.parse().unwrap(), 443);
        drop(Half::connect(Kind::AfSmc, None, to).unwrap_or_else(|failure| panic!("{failure}")));
        assert_eq!(shape(&peer.syns()[0]).len(), without[0].len() + 16);
    });
}

/// The first SYN is lost. With `retransmit = "keep"` the second one has the same mark, which is as good.
#[test]
fn a_syn_that_is_sent_again_carries_the_right_mark() {
    needs_hook!();
    with_peer("retransmit = \"keep\"\n", |lab, peer| {
        for (kind, to) in targets() {
            peer.set(Style::All, Behaviour::Echo);
            peer.swallow(Swallows::Next(1));
            let met = Meeting::arrange(peer, kind, to, Behaviour::Echo);
            println!("{to}: {met}");
            assert_eq!((met.reason(), &met.got[..], &met.said[..]), (Some(PEER_NO_SMC), HELLO, HELLO));
            assert!(A_SECOND.contains(&met.time), "{met}");
            let syns = peer.syns();
            let [first, second] = &syns[..] else { panic!("{syns:02x?}") };
            assert!(first.has_smc() && second.has_smc(), "{syns:02x?}");
            assert_eq!(first.canary().map(|canary| canary.len()), Some(8));
            assert_eq!((first.canary(), first.sequence), (second.canary(), second.sequence));
            let entries = learned(lab);
            let [entry] = entries[..] else { panic!("{entries:?}") };
            assert_eq!(entry.cause, Cause::Echo as u8);
            Quarantine::open(&lab.pins()).unwrap().unwrap().flush(Store::Learned).unwrap();
        }
        assert_eq!(counters(lab, &["echoes", "unproven", "plain_retransmissions"]), [2, 0, 0]);
    });
}

/// By default the second one has neither, and there is nothing that could be echoed.
#[test]
fn a_syn_that_is_sent_again_plain_has_no_mark_either() {
    needs_hook!();
    with_peer("", |lab, peer| {
        for (kind, to) in targets() {
            peer.set(Style::All, Behaviour::Echo);
            peer.swallow(Swallows::Next(1));
            let met = Meeting::arrange(peer, kind, to, Behaviour::Echo);
            println!("{to}: {met}");
            assert_eq!((met.reason(), &met.got[..], &met.said[..]), (Some(PEER_NO_SMC), HELLO, HELLO));
            assert!(A_SECOND.contains(&met.time), "{met}");
            assert_second_is_plain(&peer.syns());
        }
        assert_eq!(counters(lab, &["echoes", "unproven", "plain_retransmissions"]), [0, 0, 2]);
        assert_eq!(learned(lab), []);
    });
}

#[track_caller]
fn assert_second_is_plain(syns: &[SeenSyn]) {
    let [first, second] = syns else { panic!("{syns:02x?}") };
    assert!(first.has_smc() && first.canary().is_some(), "{syns:02x?}");
    assert!(!second.has_smc() && second.canary().is_none(), "{syns:02x?}");
    assert_eq!(first.sequence, second.sequence);
}

/// Our mark is what it does not let through: the connection comes up after a second, as plain TCP.
#[test]
fn a_firewall_that_drops_the_mark_costs_a_second() {
    needs_hook!();
    with_peer("", |lab, peer| {
        for (kind, to) in targets() {
            peer.set(Style::All, Behaviour::Http);
            peer.swallow(Swallows::Marked);
            let met = Meeting::arrange(peer, kind, to, Behaviour::Http);
            println!("{to}: {met}");
            assert_eq!((met.reason(), &met.got[..]), (Some(PEER_NO_SMC), HELLO));
            assert!(met.said.starts_with(b"HTTP/1.1 400"), "{met:?}");
            assert!(A_SECOND.contains(&met.time), "{met}");
            assert_second_is_plain(&peer.syns());
        }
        assert_eq!(counters(lab, &["plain_retransmissions", "echoes"]), [2, 0]);
        assert_eq!(learned(lab), []);
    });
}

/// With `retransmit = "keep"` the third SYN goes without the mark: the guard never keeps a connection from coming up.
#[test]
fn a_firewall_that_drops_the_mark_costs_two_seconds_where_syns_are_kept() {
    needs_hook!();
    with_peer("retransmit = \"keep\"\n", |lab, peer| {
        for (kind, to) in targets() {
            peer.set(Style::Nothing, Behaviour::Http);
            peer.swallow(Swallows::Marked);
            let met = Meeting::arrange(peer, kind, to, Behaviour::Http);
            println!("{to}: {met}");
            assert_eq!((met.reason(), &met.got[..]), (Some(PEER_NO_SMC), HELLO));
            // Two, or three before Linux 6.5 (tcp_syn_linear_timeouts).
            let limits = 2 * A_SECOND.start..2 * A_SECOND.end;
            assert!(limits.contains(&met.time), "{met}");
            let marks: Vec<_> = peer.syns().iter().map(|s| (s.has_smc(), s.canary().is_some())).collect();
            assert_eq!(marks, [(true, true), (true, true), (true, false)]);
        }
        assert_eq!(counters(lab, &["plain_retransmissions", "echoes", "unmarked"]), [0, 0, 0]);
    });
}

/// A server under a flood of SYNs answers with cookies, in which there is no room for the SMC option: plain TCP at both ends, and
/// nobody is suspected.
#[test]
fn syn_cookies_are_plain_tcp_and_no_echo() {
    needs_hook!(SynCookies);
    Lab::run(|lab| {
        lab.apply(ALLOW);
        let before: Value = lab.status()["counters"]["marked"].clone();
        for (kind, ip) in [(Kind::AfSmc, "127.0.0.2"), (Kind::AfSmc6, "fd00:5::2")] {
            let listener = listen(kind, ip);
            // 2: always.
            fs::write("/proc/sys/net/ipv4/tcp_syncookies", "2\n").unwrap();
            assert_denied(kind, None, &listener);
            fs::write("/proc/sys/net/ipv4/tcp_syncookies", "1\n").unwrap();
            assert_smc(kind, None, &listener);
        }
        assert_eq!(counters(lab, &["marked", "echoes", "unproven"]), [before.as_u64().unwrap() + 4, 0, 0]);
        assert_eq!(learned(lab), []);
    });
}
