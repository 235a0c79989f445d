//! More addresses that echo than the quarantine has room for: the oldest go, what an operator said stays, and the next
//! connection is as well protected as the first.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Instant;

use smc_policy::kernel::guard::{Quarantine, Store, now};
use smc_policy::kernel::sys as kernel;
use smc_policy_common::canary::{Opening, nonce};
use smc_policy_common::quarantine::{Cause, Entry, Key, LEARNED_ENTRIES};
use smc_policy_common::query::Addr;
use smc_policy_tests::echo_peer::{ADDRESSES, Behaviour, EchoPeer, Style};
use smc_policy_tests::lab::{assert_denied, listen};
use smc_policy_tests::meeting::{HELLO, Meeting};
use smc_policy_tests::packet::{MAGIC, Packet, SMC, flags, parse_with};
use smc_policy_tests::{Hook, Kind, Lab, hook, is_full, needs_hook, scaled};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
/// SYN-ACKs that are looked at byte by byte.
const CHECKED: u32 = 200;

/// The address number `n`; every other one is IPv6.
fn address(n: u32) -> (IpAddr, IpAddr) {
    if n.is_multiple_of(2) {
        (Ipv4Addr::from_bits(0x0a00_0000 + n).into(), Ipv4Addr::new(172, 16, 0, 1).into())
    } else {
        let of = |low: u128| Ipv6Addr::from_bits(0xfd77 << 112 | low).into();
        (of(0x1_0000_0000 + u128::from(n)), of(1))
    }
}

fn addr(ip: IpAddr) -> Addr {
    match ip {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

/// The SYN-ACK of an address that returns our canary, as it would to a SYN of ours.
fn echo(key: [u64; 2], n: u32) -> Packet {
    let (peer, local) = address(n);
    let opening = Opening {
        peer: addr(peer),
        local: addr(local),
        peer_port: 443,
        local_port: 40_000,
        sequence: n.wrapping_mul(2_654_435_761),
    };
    let canary = nonce(key, opening.peer, opening.local, opening.word()).to_be_bytes();
    let options = [&[2, 4, 5, 0xb4][..], &SMC, &[254, 8, b'S', b'P'], &canary].concat();
    Packet {
        source_port: opening.peer_port,
        acknowledged: opening.sequence.wrapping_add(1),
        flags: flags::SYN | flags::ACK,
        ..Packet::syn(&peer.to_string(), &local.to_string(), opening.local_port, &options)
    }
}

#[test]
fn echoing_addresses_without_number_exhaust_nothing() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        lab.home.run(["quarantine", "add", "127.0.0.2", "--comment", "ours"]).ok();
        let quarantine = Quarantine::open(&lab.pins()).unwrap().expect("a quarantine");
        let precious = quarantine.list(Store::Commanded).unwrap();
        assert_eq!(precious.len(), 1);

        let many = u32::try_from(scaled(100_000)).unwrap();
        if !is_full() {
            // So many before that the others do not fit.
            let entry = Entry {
                until: now() + 3_600_000_000_000,
                directions: Entry::OUTBOUND,
                cause: Cause::Echo as u8,
                count: 1,
                span: 3600,
                ..Entry::default()
            };
            let before: Vec<_> =
                (0..60_000).map(|n| (Key::new(Addr::v4(0xc600_0000 + n), 443), entry)).collect();
            quarantine.put_all(Store::Learned, &before).unwrap();
        }

        let [instance] = &lab.instances()[..] else { panic!("{:?}", lab.instances()) };
        let program = if hook() == Hook::Tc { "in-eth" } else { "ack-eth" };
        let program = kernel::get_pinned(&lab.pins().join(instance).join(program)).unwrap();
        let keys =
            kernel::map_lookup(kernel::get_pinned(&lab.pins().join("shared/keys")).unwrap().as_fd(), 0);
        let word = |at: usize| u64::from_ne_bytes(keys.as_ref().unwrap()[at..at + 8].try_into().unwrap());
        let key = [word(0), word(8)];
        let start = Instant::now();
        for n in 0..many {
            let packet = echo(key, n);
            let before = packet.bytes();
            let mut after = before.clone();
            kernel::test_run(program.as_fd(), &mut after, 1).unwrap();
            assert_ne!(before, after, "{n}: {packet:x?}");
            if n < CHECKED {
                let answer = flags::SYN | flags::ACK;
                let parsed = parse_with(&after, &packet.link, &[MAGIC], answer).expect("a SYN-ACK");
                assert!(parsed.smc.is_empty(), "{after:02x?}");
            }
        }
        println!("{many} echoing addresses in {:.1?}", start.elapsed());

        let status = lab.status();
        assert_eq!(status["counters"]["echoes"], many, "{status:#}");
        let counted = quarantine.counted().unwrap();
        println!("{counted:?}");
        assert_eq!((counted.refused, counted.commanded), (0, 1));
        // The kernel's LRU gives room up in batches.
        assert!((50_000..=u64::from(LEARNED_ENTRIES)).contains(&counted.learned), "{counted:?}");
        if is_full() {
            assert_eq!(counted.evicted, u64::from(many) - counted.learned, "every one was learned");
        }
        let last = quarantine.get(Store::Learned, Key::new(addr(address(many - 1).0), 443)).unwrap();
        assert_eq!(last.map(|entry| (entry.cause, entry.count)), Some((Cause::Echo as u8, 1)));
        assert_eq!(quarantine.list(Store::Commanded).unwrap(), precious);
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
        // The next one is protected too.
        for (_, ip) in ADDRESSES {
            peer.set(Style::All, Behaviour::Echo);
            let kind = if ip.contains(':') { Kind::AfSmc6 } else { Kind::AfSmc };
            let met =
                Meeting::arrange(&peer, kind, SocketAddr::new(ip.parse().unwrap(), 443), Behaviour::Echo);
            assert_eq!((&met.got[..], &met.said[..]), (HELLO, HELLO), "{met:?}");
        }
        // Saving what is learned takes a machine without optimized code half a minute.
        quarantine.flush(Store::Learned).unwrap();
    });
}
