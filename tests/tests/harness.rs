//! The harness itself, on the real kernel: without a policy, SMC sockets speak SMC-D, and fall back to TCP exactly when
//! one end is no SMC socket. What the other tests conclude rests on this.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;

use smc_policy::smc::diag::{self, Family, State};
use smc_policy::smc::reasons::PEER_NO_SMC;
use smc_policy_tests::connection::{End, exchange_sized};
use smc_policy_tests::{Kind, Lab, Listener, Transport, exchange, needs, netns, sys};

fn address(text: &str) -> SocketAddr {
    SocketAddr::new(text.parse().unwrap(), 0)
}

/// `SMC_DIAG`, completed by the join, says the same as the socket itself.
fn assert_addresses(end: &End) {
    let Some(diag) = end.diag else { panic!("no SMC socket: {end:?}") };
    assert_eq!((diag.local, diag.peer), (Some(end.local), Some(end.peer)), "{diag:?}");
    assert_eq!(diag.state, State::Active);
    assert_eq!(diag.uid, 0);
}

#[test]
fn every_kind_of_smc_socket_speaks_smc_d() {
    needs!(Root, Netns, Smc, IpprotoSmc, SmcDiag, SmcD);
    Lab::run(|_| {
        let v4 = Kind::SMC_V4.map(|kind| (kind, "127.0.0.2"));
        let v6 = Kind::SMC_V6.map(|kind| (kind, "fd00:5::2"));
        for (server, at) in v4.into_iter().chain(v6) {
            let listener = Listener::bind(server, address(at));
            let clients = if at.contains(':') { &Kind::SMC_V6[..] } else { &Kind::SMC_V4 };
            for &client in clients {
                let outcome = exchange(client, None, &listener)
                    .unwrap_or_else(|failure| panic!("{client:?} -> {server:?} {at}: {failure}"));
                println!("{client:?} -> {server:?}: {outcome}");
                assert_eq!(outcome.client.transport, Transport::SmcD);
                assert_eq!(outcome.server.transport, Transport::SmcD);
                assert!(outcome.is_smc() && !outcome.is_denied());
                assert_addresses(&outcome.client);
                assert_addresses(&outcome.server);
                assert_eq!(outcome.client.local, outcome.server.peer);
            }
        }
    });
}

#[test]
fn an_end_that_is_no_smc_socket_makes_it_tcp() {
    needs!(Root, Netns, Smc, IpprotoSmc, SmcDiag, SmcD);
    Lab::run(|_| {
        let fallback = Transport::Fallback(PEER_NO_SMC, 0);
        for (client, server, at) in [
            (Kind::AfSmc, Kind::Tcp, "127.0.0.3"),
            (Kind::IpprotoSmc, Kind::Tcp, "127.0.0.3"),
            (Kind::AfSmc6, Kind::Tcp6, "fd00:5::3"),
            (Kind::IpprotoSmc6, Kind::Tcp6, "127.0.0.3"),
        ] {
            let outcome = exchange(client, None, &Listener::bind(server, address(at))).unwrap();
            assert_eq!((outcome.client.transport, outcome.server.transport), (fallback, Transport::Tcp));
            assert_addresses(&outcome.client);
            let outcome = exchange(server, None, &Listener::bind(client, address(at))).unwrap();
            assert_eq!((outcome.client.transport, outcome.server.transport), (Transport::Tcp, fallback));
            assert_addresses(&outcome.server);
            assert!(!outcome.is_smc() && !outcome.is_denied());
        }
    });
}

#[test]
fn plain_tcp_needs_no_smc() {
    let listener = Listener::bind(Kind::Tcp, address("127.0.0.1"));
    let outcome = exchange(Kind::Tcp, None, &listener).unwrap();
    assert_eq!(outcome.client.transport, Transport::Tcp);
    assert_eq!(outcome.client.peer, listener.address());
}

/// Rules name ports alone: a listener at another address must not share one by chance.
#[test]
fn no_two_listeners_share_a_port() {
    needs!(Root, Netns);
    netns::in_new_namespace(&["fd00:5::2", "fd00:5::3"].map(|ip| ip.parse().unwrap()), || {
        fs::write("/proc/sys/net/ipv4/ip_local_port_range", "50000 50015").unwrap();
        let listeners: Vec<_> = ["127.0.0.2", "127.0.0.3", "fd00:5::2", "fd00:5::3"]
            .into_iter()
            .flat_map(|at| {
                let kind = if at.contains(':') { Kind::Tcp6 } else { Kind::Tcp };
                [(); 4].map(|()| Listener::bind(kind, address(at)))
            })
            .collect();
        let ports: BTreeSet<_> = listeners.iter().map(Listener::port).collect();
        assert_eq!(ports.len(), 16, "{ports:?}");
    });
}

#[test]
fn a_local_address_is_used() {
    needs!(Root, Netns, Smc, IpprotoSmc, SmcDiag, SmcD);
    Lab::run(|_| {
        for (kind, local, at) in [
            (Kind::AfSmc, "127.0.0.9", "127.0.0.2"),
            (Kind::IpprotoSmc6, "127.0.0.9", "127.0.0.2"),
            (Kind::IpprotoSmc6, "fd00:5::4", "fd00:6::1"),
        ] {
            let local: IpAddr = local.parse().unwrap();
            let outcome = exchange(kind, Some(local), &Listener::bind(kind, address(at))).unwrap();
            assert_eq!(outcome.server.peer.ip(), local);
            assert!(outcome.is_smc(), "{outcome}");
        }
    });
}

#[test]
fn a_megabyte_arrives() {
    needs!(Root, Netns, Smc, SmcDiag, SmcD);
    Lab::run(|_| {
        let listener = Listener::bind(Kind::AfSmc, address("127.0.0.2"));
        let outcome = exchange_sized(Kind::AfSmc, None, &listener, &[1 << 20, 0, 1]).unwrap();
        assert!(outcome.is_smc(), "{outcome}");
    });
}

#[test]
fn listening_sockets_are_listed_with_their_address() {
    needs!(Root, Netns, Smc, IpprotoSmc, SmcDiag, SmcD);
    Lab::run(|_| {
        for (kind, family, at) in [
            (Kind::AfSmc, Family::Smc, "127.0.0.2"),
            (Kind::AfSmc, Family::Smc, "0.0.0.0"),
            (Kind::AfSmc6, Family::Smc, "::"),
            (Kind::AfSmc6, Family::Smc, "fd00:5::1"),
            (Kind::IpprotoSmc, Family::Inet, "0.0.0.0"),
            (Kind::IpprotoSmc, Family::Inet, "127.0.0.2"),
            (Kind::IpprotoSmc6, Family::Inet6, "::"),
            (Kind::IpprotoSmc6, Family::Inet6, "fd00:5::1"),
        ] {
            let listener = Listener::bind(kind, address(at));
            let sockets = diag::sockets().unwrap();
            let [socket] = sockets[..] else { panic!("{sockets:?}") };
            assert_eq!(socket.family, family);
            assert_eq!(socket.state, State::Listen);
            assert_eq!(socket.local, Some(listener.address()));
            assert_eq!(socket.peer, None);
            assert_eq!(socket.carried_by(), None, "the kernel says {:?}", socket.mode);
            assert_ne!(socket.cookie, 0);
        }
        assert!(diag::sockets().unwrap().iter().all(|socket| socket.state != State::Listen));
    });
}

#[test]
fn a_command_can_be_given_a_read_only_proc_sys() {
    needs!(Root, Netns);
    Lab::run_without_smc_d(|_| {
        let write = || {
            let mut command = Command::new("sh");
            command.args(["-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]);
            command
        };
        assert!(write().output().unwrap().status.success(), "this namespace's own sysctl");
        let mut command = write();
        sys::with_read_only_proc_sys(&mut command);
        let output = command.output().unwrap();
        assert!(!output.status.success(), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("Read-only"), "{output:?}");
    });
}
