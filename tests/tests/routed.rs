//! Between a socket and the wire there may be address translation, and a host may forward what others send: a host judges
//! its own connections by their sockets' addresses, and lets the others' pass.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::{IpAddr, SocketAddr};

use smc_policy_tests::enforce::{Enforced, Hook};
use smc_policy_tests::world::{add, join, only_at};
use smc_policy_tests::{Capture, Host, Kind, Lab, Listener, Need, Outcome, Routed, needs, ueid};

/// Ports of services.
const ONE: u16 = 6001;
const TWO: u16 = 6002;
const THREE: u16 = 6003;
/// A kind of socket of either family, and the server's address.
const FAMILIES: [(Kind, &str); 2] = [(Kind::AfSmc, Routed::SERVER[0]), (Kind::AfSmc6, Routed::SERVER[1])];
const DENY_ALL: &str = "[default]\noutbound = \"deny\"\ninbound = \"deny\"\n";

/// Rules that deny.
fn deny(direction: &str, rules: &[&str]) -> String {
    let rule = |(number, what): (usize, &&str)| {
        format!("[[rule]]\nname = \"no-{number}\"\naction = \"deny\"\ndirection = \"{direction}\"\n{what}\n")
    };
    rules.iter().enumerate().map(rule).collect()
}

/// Loads rules that translate addresses: the kernel's NAT, or where it is built without, rules that write the addresses
/// into every packet.
#[track_caller]
fn translate(host: &Host, nat: &str, stateless: &str) {
    host.nft(if Need::Nat.is_met() { nat } else { stateless });
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The connection was denied, or else both ends have seen the option.
#[track_caller]
fn assert_is(denied: bool, what: &str, outcome: &Outcome) {
    if denied {
        assert!(outcome.is_denied(), "{what}: expected a fallback: {outcome}");
    } else {
        assert!(outcome.is_negotiated(), "{what}: expected SMC to be negotiated: {outcome}");
    }
}

/// Through a router: one service denied, another not, at either end.
#[test]
fn denied_at_either_end() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let world = Routed::new();
    let listeners = FAMILIES.map(|(kind, ip)| [ONE, TWO].map(|port| world.server.listen(kind, ip, port)));
    let connect = |denied: Option<&str>| {
        for ((kind, _), [one, two]) in FAMILIES.iter().zip(&listeners) {
            let capture = world.router.run(|| Capture::begin("wan"));
            let outcome = world.exchange(*kind, one.address(), one);
            println!("{denied:?}: {outcome}");
            assert_is(denied.is_some(), "one", &outcome);
            // At the server it is only the answer that has no option.
            let expected = [denied != Some("outbound"), denied.is_none()];
            assert_eq!(capture.one(), expected, "{denied:?}");
            assert_is(false, "two", &world.exchange(*kind, two.address(), two));
            assert_eq!(capture.one(), [true, true], "{denied:?}");
        }
    };
    connect(None);
    let lab = Lab::default();
    let at = |host: &Host, direction| (deny(direction, &[&format!("ports = [{ONE}]")]), only_at(&[host]));
    let enforced = Enforced::nothing(&lab);
    for hook in Hook::all() {
        for (host, direction) in [(&world.client, "outbound"), (&world.server, "inbound")] {
            let (policy, config) = at(host, direction);
            enforced.change(&policy, &config, hook);
            println!("{hook}:");
            connect(Some(direction));
        }
    }
    drop(enforced);
    connect(None);
}

/// A router's own policy is about its own connections; those of others pass, unless `forwarded = true`.
#[test]
fn forwarded_syns_pass_unless_asked_for() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let world = Routed::new();
    let lab = Lab::default();
    let router = only_at(&[&world.router]);
    let enforced = Enforced::nothing(&lab);
    let mut cases = vec![(Hook::Tc, "", true), (Hook::Tc, "forwarded = true\n", false)];
    if Need::HsCtrl.is_met() {
        // It is asked about sockets: nothing is forwarded.
        cases.push((Hook::HsCtrl, "", true));
    }
    let listeners = FAMILIES.map(|(kind, ip)| world.server.listen(kind, ip, ONE));
    for (hook, config, passes) in cases {
        enforced.change(DENY_ALL, &format!("{config}{router}"), hook);
        for ((kind, _), listener) in FAMILIES.iter().zip(&listeners) {
            let capture = world.server.run(|| Capture::begin("eth0"));
            let what = format!("{hook} {config:?}");
            assert_is(!passes, &what, &world.exchange(*kind, listener.address(), listener));
            assert_eq!(capture.one(), [passes; 2], "{what}");
            let from = (*kind, None);
            let own = world.router.exchange(from, listener.address(), (&world.server, listener), &[1]);
            assert_is(true, &format!("{what}, the router's own"), &own.unwrap());
            assert_eq!(capture.one(), [false; 2], "{what}");
        }
    }
}

/// The server sees the router's address in place of the client's: each end judges by what its own socket says.
#[test]
fn masqueraded_by_a_router() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let world = Routed::new();
    let line = |ip: &str, client: &str, router: &str| {
        [
            format!("oifname \"wan\" {ip} saddr {client} {ip} saddr set {router}\n"),
            format!("iifname \"wan\" {ip} daddr {router} tcp sport {ONE}-{THREE} {ip} daddr set {client}\n"),
        ]
    };
    let [v4, v6] = [line("ip", "10.1.0.2", "10.2.0.1"), line("ip6", "fd00:1::2", "fd00:2::1")];
    translate(
        &world.router,
        "table inet nat { chain out { type nat hook postrouting priority 100; oifname \"wan\" masquerade; }; }",
        &format!(
            "table inet nat {{
                chain out {{ type filter hook postrouting priority 100; {}{} }}
                chain in {{ type filter hook prerouting priority -300; {}{} }}
            }}",
            v4[0], v6[0], v4[1], v6[1]
        ),
    );
    let listeners =
        FAMILIES.map(|(kind, ip)| [ONE, TWO, THREE].map(|port| world.server.listen(kind, ip, port)));
    let rule = |port, what, addresses| format!("ports = [{port}]\n{what} = {addresses}");
    let (clients, routers) = ("[\"10.1.0.2\", \"fd00:1::2\"]", "[\"10.2.0.1\", \"fd00:2::1\"]");
    // One by the client, two by the server, three by what neither of them sees.
    let policy = deny("outbound", &[&rule(ONE, "local", clients), &rule(THREE, "local", routers)])
        + &deny("inbound", &[&rule(TWO, "peers", routers), &rule(THREE, "peers", clients)])
            .replace("no-", "not-");
    let lab = Lab::default();
    let config = only_at(&[&world.client, &world.server]);
    let enforced = Enforced::nothing(&lab);
    for hook in Hook::all() {
        enforced.change(&policy, &config, hook);
        for ((kind, _), [one, two, three]) in FAMILIES.iter().zip(&listeners) {
            for (listener, denied) in [(one, true), (two, true), (three, false)] {
                let outcome = world.exchange(*kind, listener.address(), listener);
                assert!(["10.2.0.1", "fd00:2::1"].map(ip).contains(&outcome.server.peer.ip()), "{outcome}");
                assert_is(denied, &hook.to_string(), &outcome);
            }
        }
    }
}

/// Address translation in the connecting host itself: its packets already have other addresses when they leave.
#[test]
fn translated_by_the_connecting_host() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let world = Routed::new();
    // A service's address that is nobody's, as a cluster has them, and an own address that others do not know.
    world.client.ip(&format!("link add own type dummy\nlink set own up\n{}", add("own", "10.8.0.1/32")));
    let there = Routed::SERVER[0];
    let services = [(80, ONE), (81, TWO), (82, THREE)];
    let lines = |line: &dyn Fn(u16, u16) -> String| services.map(|(from, to)| line(from, to)).concat();
    let dnat = lines(&|from, to| format!("ip daddr 10.7.0.1 tcp dport {from} dnat to {there}:{to}\n"));
    let set = lines(&|from, to| {
        format!("ip daddr 10.7.0.1 tcp dport {from} ip daddr set {there} tcp dport set {to}\n")
    });
    let back = lines(&|from, to| {
        format!(
            "ip saddr {there} tcp sport {to} ip saddr set 10.7.0.1 tcp sport set {from} ip daddr set 10.8.0.1\n"
        )
    });
    translate(
        &world.client,
        &format!(
            "table ip nat {{
                chain to {{ type nat hook output priority -100; {dnat} }}
                chain out {{ type nat hook postrouting priority 100; oifname \"eth0\" masquerade; }}
            }}"
        ),
        &format!(
            "table ip nat {{
                chain to {{ type route hook output priority -100; {set} }}
                chain out {{ type filter hook postrouting priority 100; ip saddr 10.8.0.1 ip saddr set 10.1.0.2; }}
                chain in {{ type filter hook prerouting priority -300; {back} }}
            }}"
        ),
    );
    // 80 and 81 as the socket says; the rest as the packet on the wire says, in vain.
    let policy = deny(
        "outbound",
        &[
            "peers = [\"10.7.0.1\"]\nports = [80]",
            "local = [\"10.8.0.1\"]\nports = [81]",
            "peers = [\"10.2.0.2\"]",
            &format!("ports = [{THREE}]"),
            "local = [\"10.1.0.2\"]",
        ],
    );
    let listeners = services.map(|(_, port)| world.server.listen(Kind::AfSmc, there, port));
    let lab = Lab::default();
    let config = only_at(&[&world.client]);
    let enforced = Enforced::nothing(&lab);
    for hook in Hook::all() {
        enforced.change(&policy, &config, hook);
        for ((port, _), listener) in services.iter().zip(&listeners) {
            let capture = world.server.run(|| Capture::begin("eth0"));
            let (from, to) = ((Kind::AfSmc, Some(ip("10.8.0.1"))), SocketAddr::new(ip("10.7.0.1"), *port));
            let outcome = world.client.exchange(from, to, (&world.server, listener), &[1, 1000]);
            let outcome = outcome.unwrap_or_else(|failure| panic!("{hook}, {to}: {failure}"));
            assert_eq!((outcome.client.peer, outcome.client.local.ip()), (to, ip("10.8.0.1")));
            assert_eq!(outcome.server.peer.ip(), ip("10.1.0.2"));
            let denied = *port != 82;
            assert_is(denied, &format!("{hook}, {to}"), &outcome);
            assert_eq!(capture.one(), [!denied; 2], "{hook}, {to}");
        }
    }
}

/// A port that the accepting host redirects to another one of its own: by hs_ctrl the connection is judged, by the port of
/// its socket. Where SYNs arrive, tc finds no socket for the port on the wire: it leaves them alone and counts them.
#[test]
fn redirected_by_the_accepting_host() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let world = Routed::new();
    let there = Routed::SERVER[0];
    translate(
        &world.server,
        &format!(
            "table ip nat {{
                chain in {{ type nat hook prerouting priority -100; tcp dport 8080 redirect to {ONE}; }}
            }}"
        ),
        &format!(
            "table ip nat {{
                chain in {{ type filter hook prerouting priority -300; tcp dport 8080 tcp dport set {ONE}; }}
                chain out {{ type filter hook postrouting priority 100; tcp sport {ONE} tcp sport set 8080; }}
            }}"
        ),
    );
    let listener = world.server.listen(Kind::AfSmc, there, ONE);
    let policy = deny("inbound", &[&format!("ports = [{ONE}]")]);
    let lab = Lab::default();
    let enforced = Enforced::nothing(&lab);
    for hook in Hook::all() {
        enforced.change(&policy, &only_at(&[&world.server]), hook);
        let outcome = world.exchange(Kind::AfSmc, SocketAddr::new(ip(there), 8080), &listener);
        assert_eq!((outcome.client.peer.port(), outcome.server.local.port()), (8080, ONE));
        assert_is(hook == Hook::HsCtrl, &hook.to_string(), &outcome);
        assert_eq!(lab.status()["counters"]["no_listener"], 1, "{hook}");
    }
}

/// A host's port that is a container's: the connection is the container's, in whose namespace it is judged, by the
/// addresses there.
#[test]
fn published_by_a_container() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let world = Routed::new();
    let container = Host::new("container");
    join((&world.server, "bridge", "172.30.0.1/24"), (&container, "eth0", "172.30.0.2/24"));
    container.ip("route add default via 172.30.0.1");
    world.server.sysctl("net.ipv4.ip_forward", "1");
    let there = Routed::SERVER[0];
    translate(
        &world.server,
        "table ip nat {
            chain in {
                type nat hook prerouting priority -100;
                tcp dport 8080 dnat to 172.30.0.2:80
                tcp dport 8081 dnat to 172.30.0.2:81
            }
        }",
        &format!(
            "table ip nat {{
                chain in {{
                    type filter hook prerouting priority -300;
                    tcp dport 8080 ip daddr set 172.30.0.2 tcp dport set 80
                    tcp dport 8081 ip daddr set 172.30.0.2 tcp dport set 81
                }}
                chain out {{
                    type filter hook postrouting priority 100;
                    ip saddr 172.30.0.2 tcp sport 80 ip saddr set {there} tcp sport set 8080
                    ip saddr 172.30.0.2 tcp sport 81 ip saddr set {there} tcp sport set 8081
                }}
            }}"
        ),
    );
    let listeners = [80, 81].map(|port| container.listen(Kind::AfSmc, "172.30.0.2", port));
    let connect = |port: u16, listener: &Listener| {
        let to = SocketAddr::new(ip(there), port);
        let outcome = world.client.exchange((Kind::AfSmc, None), to, (&container, listener), &[1, 1000]);
        outcome.unwrap_or_else(|failure| panic!("{to}: {failure}"))
    };
    // 8080, which is 80 there, by what holds at the host in question; 8081, which is 81, by what does not.
    let at_client = deny("outbound", &["ports = [8080, 81]"]);
    let on_the_way = deny("outbound", &["ports = [80, 8081]\npeers = [\"172.30.0.2\"]"]);
    let at_container = deny("inbound", &["ports = [80, 8081]\npeers = [\"10.1.0.2\"]"]);
    let lab = Lab::default();
    let enforced = Enforced::nothing(&lab);
    for (host, policy, config, denied) in [
        (&world.client, at_client.as_str(), "", true),
        (&world.server, DENY_ALL, "", false),
        (&world.server, &on_the_way, "forwarded = true\n", true),
        (&container, &at_container, "", true),
    ] {
        // Only tc sees what is forwarded.
        let hooks = if config.is_empty() { Hook::all() } else { vec![Hook::Tc] };
        for hook in hooks {
            enforced.change(policy, &format!("{config}{}", only_at(&[host])), hook);
            let what = format!("{hook}, {}: {policy}{config}", host.name());
            assert_is(denied, &what, &connect(8080, &listeners[0]));
            assert_is(false, &what, &connect(8081, &listeners[1]));
        }
    }
}
