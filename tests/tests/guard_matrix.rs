//! Every kind of peer that echoes TCP options, by what it returns and by what it does with a connection: what becomes of the
//! first connection and of the second, as a table in the log.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use smc_policy::guard::quarantine::cause_name;
use smc_policy::kernel::guard::{Quarantine, Store};
use smc_policy_common::quarantine::{Cause, Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::echo_peer::{ADDRESSES, BANNER, Behaviour, EchoPeer, Style};
use smc_policy_tests::meeting::{HELLO, Meeting};
use smc_policy_tests::{Kind, Lab, hook, is_full, needs_hook};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
/// "The peer did not answer with the SMC option" (SMC_CLC_DECL_PEERNOSMC).
const PEER_NO_SMC: u32 = 0x0301_0000;
/// Without the guard: 6 s.
const SOON: Duration = Duration::from_secs(2);
/// Bytes of the shortest SMC message that a client begins with: a decline, of hosts without a device for SMC.
const DECLINE: usize = 28;
/// How SMC messages begin: "SMCR" or "SMCD" in EBCDIC, but for the last byte.
const EYE_CATCHER: [u8; 3] = [0xe2, 0xd4, 0xc3];

/// A row of the table.
struct Cell {
    kind: Kind,
    to: SocketAddr,
    style: Style,
    behaviour: Behaviour,
    first: Meeting,
    second: Meeting,
    /// After the first connection, and after the second.
    entries: [Option<Entry>; 2],
}

const HEADING: &str =
    "family  style         behaviour  nth     result           time       reason      peer got    quarantine";

impl Cell {
    fn meet(
        lab: &Lab,
        peer: &EchoPeer,
        kind: Kind,
        to: SocketAddr,
        style: Style,
        behaviour: Behaviour,
    ) -> Self {
        let quarantine = Quarantine::open(&lab.pins()).unwrap().expect("a quarantine");
        quarantine.flush(Store::Learned).unwrap();
        peer.set(style, behaviour);
        let key = match to.ip() {
            IpAddr::V4(v4) => Key::new(Addr::v4(v4.to_bits()), to.port()),
            IpAddr::V6(v6) => Key::new(Addr::v6(v6.to_bits()), to.port()),
        };
        let once = || {
            let meeting = Meeting::arrange(peer, kind, to, behaviour);
            let entries = quarantine.list(Store::Learned).unwrap();
            assert!(entries.iter().all(|(found, _)| *found == key), "of others: {entries:?}");
            (meeting, entries.first().map(|(_, entry)| *entry))
        };
        let ((first, after_first), (second, after_second)) = (once(), once());
        Self { kind, to, style, behaviour, first, second, entries: [after_first, after_second] }
    }

    fn print(&self) {
        let family = if self.to.is_ipv4() { "IPv4" } else { "IPv6" };
        for (nth, meeting, entry) in
            [("first", &self.first, self.entries[0]), ("second", &self.second, self.entries[1])]
        {
            let entry = entry.map_or("none".to_owned(), |entry| {
                let cause = Cause::from_u8(entry.cause).map_or("unknown", cause_name);
                format!("{cause}, {} s, met {}", entry.span, entry.count)
            });
            println!(
                "{family:<6}  {:<12}  {:<9}  {nth:<6}  {meeting}  {entry}",
                format!("{:?}", self.style),
                format!("{:?}", self.behaviour)
            );
        }
    }

    fn shown(&self) -> String {
        format!("{:?} to {}: {:?} {:?}", self.kind, self.to, self.style, self.behaviour)
    }

    /// Plain TCP, soon, and the application's bytes alone.
    #[track_caller]
    fn assert_clean(&self, meeting: &Meeting) {
        let shown = self.shown();
        assert_eq!(meeting.reason(), Some(PEER_NO_SMC), "{shown}: {meeting:?}");
        assert!(meeting.time < SOON, "{shown}: {meeting:?}");
        assert_eq!(meeting.got, HELLO, "{shown}");
        match self.behaviour {
            Behaviour::Echo => assert_eq!(meeting.said, HELLO, "{shown}"),
            Behaviour::Banner => assert_eq!(meeting.said, BANNER, "{shown}"),
            Behaviour::Http => assert!(meeting.said.starts_with(b"HTTP/1.1 400"), "{shown}: {meeting:?}"),
            Behaviour::Silent | Behaviour::Fin | Behaviour::Rst | Behaviour::Decline => {
                assert_eq!(meeting.said, b"", "{shown}");
            }
        }
    }
}

/// Kinds of sockets take turns.
fn cells(lab: &Lab, peer: &EchoPeer, styles: &[Style], judge: impl FnMut(&Cell)) -> u64 {
    cells_of(lab, peer, styles, &Behaviour::ALL, judge)
}

fn cells_of(
    lab: &Lab,
    peer: &EchoPeer,
    styles: &[Style],
    behaviours: &[Behaviour],
    mut judge: impl FnMut(&Cell),
) -> u64 {
    println!("{HEADING}");
    let mut count = 0;
    for (_, ip) in ADDRESSES {
        let to = SocketAddr::new(ip.parse().unwrap(), 443);
        let kinds = if to.is_ipv6() { Kind::smc_v6() } else { Kind::smc_v4() };
        for style in styles {
            for (at, behaviour) in behaviours.iter().copied().enumerate() {
                let kind = kinds[at % kinds.len()];
                let cell = Cell::meet(lab, peer, kind, to, *style, behaviour);
                cell.print();
                judge(&cell);
                count += 1;
            }
        }
    }
    count
}

#[track_caller]
fn counter(lab: &Lab, name: &str) -> u64 {
    let status = lab.status();
    status["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {status:#}"))
}

#[test]
fn the_first_connection_works_already() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        let caught = [Style::All, Style::Unknown, Style::Reordered, Style::Experimental, Style::AtLeast4];
        let count = cells(lab, &peer, &caught, |cell| {
            cell.assert_clean(&cell.first);
            cell.assert_clean(&cell.second);
            let syns = peer.syns();
            let [first, second] = &syns[..] else { panic!("{syns:02x?}") };
            assert!(first.has_smc() && first.canary().is_some_and(|c| c.len() == 8), "{syns:02x?}");
            assert!(!second.has_smc() && second.canary().is_none(), "{syns:02x?}");
            let entry = cell.entries[0].unwrap_or_else(|| panic!("no entry: {}", cell.shown()));
            assert_eq!((entry.cause, entry.count, entry.span), (Cause::Echo as u8, 1, 3600));
            assert_eq!(entry.evidence[..8], first.canary().unwrap());
            assert_eq!(cell.entries[1], Some(entry), "the second one needs no second entry");
        });
        assert_eq!((counter(lab, "echoes"), counter(lab, "quarantined")), (count, count));
        assert_eq!((counter(lab, "unproven"), counter(lab, "unchanged")), (0, 0));
    });
}

#[test]
fn who_returns_known_options_only_is_plain_tcp_and_stays_unsuspected() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        let count = cells(lab, &peer, &[Style::Known], |cell| {
            cell.assert_clean(&cell.first);
            cell.assert_clean(&cell.second);
            assert_eq!(cell.entries, [None, None], "{}", cell.shown());
            assert!(peer.syns().iter().all(|syn| syn.has_smc() && syn.canary().is_some()));
        });
        assert_eq!((counter(lab, "echoes"), counter(lab, "quarantined")), (0, 0));
        assert_eq!(counter(lab, "marked"), 2 * count);
    });
}

/// A connection that the guard has not saved: it failed, or a host without a device for SMC has put a decline in front of
/// the application's bytes.
#[track_caller]
fn assert_broken(cell: &Cell, meeting: &Meeting) {
    let shown = cell.shown();
    assert_ne!(meeting.reason(), Some(PEER_NO_SMC), "{shown}");
    assert!(meeting.got.starts_with(&EYE_CATCHER), "{shown}: {meeting:02x?}");
    if meeting.result.is_ok() {
        assert!(meeting.got.len() >= DECLINE, "{shown}: {meeting:02x?}");
    }
}

/// What the guard is for: the same peers without it. (Those that answer at once: the others take 6 s each.)
#[test]
fn without_the_guard_connections_fail_or_have_foreign_bytes_in_their_stream() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.home.write("etc/config.toml", &format!("hook = \"{}\"\nguard = \"off\"\n", hook()));
        lab.apply(ALLOW);
        println!("{HEADING}");
        for (_, ip) in ADDRESSES {
            let to = SocketAddr::new(ip.parse().unwrap(), 443);
            let kind = if to.is_ipv6() { Kind::AfSmc6 } else { Kind::AfSmc };
            for behaviour in [Behaviour::Echo, Behaviour::Banner] {
                let cell = Cell::meet(lab, &peer, kind, to, Style::All, behaviour);
                cell.print();
                assert_broken(&cell, &cell.first);
                assert_broken(&cell, &cell.second);
                assert_eq!(cell.entries, [None, None]);
            }
        }
    });
}

/// Its SYN-ACK is that of a genuine SMC server: the canary cannot tell. The first connection fails, or has a decline in front
/// of its data; whoever learns of it keeps the second clean.
#[test]
fn who_returns_the_smc_option_alone_is_not_noticed_by_its_syn_ack() {
    needs_hook!();
    // Where the client waits for an answer, it waits for 6 s.
    let is_quick = |behaviour: &Behaviour| is_full() || *behaviour != Behaviour::Silent;
    let behaviours: Vec<Behaviour> = Behaviour::ALL.into_iter().filter(is_quick).collect();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        cells_of(lab, &peer, &[Style::SmcOnly], &behaviours, |cell| {
            let shown = cell.shown();
            assert_broken(cell, &cell.first);
            match cell.entries[0] {
                Some(entry) => {
                    assert_ne!(entry.cause, Cause::Echo as u8, "{shown}");
                    cell.assert_clean(&cell.second);
                }
                None => assert_broken(cell, &cell.second),
            }
        });
        assert_eq!(counter(lab, "echoes"), 0);
    });
}
