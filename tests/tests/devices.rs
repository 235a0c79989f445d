//! Devices without an Ethernet header, and devices on top of others: the option leaves or stays, and the checksum is right.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use smc_policy_tests::enforce::{Enforced, Hook};
use smc_policy_tests::relay::Relay;
use smc_policy_tests::world::{add, join, only_at};
use smc_policy_tests::{Capture, Host, Kind, Lab, command, needs, ueid};

/// Denied where it leaves, where it arrives, nowhere.
const PORTS: [u16; 3] = [6001, 6002, 6003];
/// Sockets of both families, and the server's addresses.
const BOTH: [(Kind, &str); 2] = [(Kind::AfSmc, "10.2.0.1"), (Kind::AfSmc6, "fd00:2::1")];
const POLICY: &str = r#"
[[rule]]
name = "leaving"
action = "deny"
direction = "outbound"
ports = [6001]
[[rule]]
name = "arriving"
action = "deny"
direction = "inbound"
ports = [6002]
"#;

/// Two hosts joined by an Ethernet device.
fn hosts() -> [Host; 2] {
    ueid::ensure().unwrap();
    let hosts = ["client", "server"].map(Host::new);
    join((&hosts[0], "eth0", "10.1.0.2/24"), (&hosts[1], "eth0", "10.1.0.1/24"));
    hosts
}

/// Gives the device of this name at both hosts addresses, 10.2.0.2 and fd00:2::2 at the client and .1 and ::1 at the
/// server, and tries it. `below`: the device that it is on top of, if its packets have headers of TCP there too.
fn try_device([client, server]: &[Host; 2], device: &str, below: Option<&str>, families: &[(Kind, &str)]) {
    for (host, last) in [(client, 2), (server, 1)] {
        let addresses = add(device, &format!("10.2.0.{last}/24 fd00:2::{last}/64"));
        host.ip(&format!("link set {device} up\n{addresses}"));
    }
    let lab = Lab::default();
    let enforced = Enforced::nothing(&lab);
    enforced.change(POLICY, &only_at(&[client, server]), Hook::Tc);
    for &(kind, ip) in families {
        for port in PORTS {
            let listener = server.listen(kind, ip, port);
            let captures = [client, server].map(|host| host.run(|| Capture::begin(device)));
            let outcome =
                client.exchange((kind, None), listener.address(), (server, &listener), &[1, 20_000]);
            let outcome = outcome.unwrap_or_else(|failure| panic!("{device}, {ip} {port}: {failure}"));
            println!("{device}: {outcome}");
            // What the SYN and the SYN-ACK have: where it leaves and where it arrives, before the programs there.
            let (is_as_expected, on_the_wire) = match port {
                6001 => (outcome.is_denied(), [[false, false]; 2]),
                // Taken out at the device below already.
                6002 => (outcome.is_denied(), [[true, false], [below.is_none(), false]]),
                _ => (outcome.is_negotiated(), [[true, true]; 2]),
            };
            assert!(is_as_expected, "{device}, {port}: {outcome}");
            assert_eq!(captures.map(|capture| capture.one()), on_the_wire, "{device}, {ip} {port}");
        }
    }
    // A SYN that goes through two devices is one connection.
    let hits = families.len() as u64;
    assert_eq!((lab.hits("leaving"), lab.hits("arriving")), (hits, hits), "{device}");
}

#[test]
fn tun() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    let hosts = hosts();
    let _relay = Relay::between(&hosts[0], &hosts[1], "tun0");
    try_device(&hosts, "tun0", None, &BOTH);
}

#[test]
fn vlan() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag, Vlan);
    let hosts = hosts();
    for host in &hosts {
        host.ip("link add link eth0 name eth0.5 type vlan id 5");
    }
    try_device(&hosts, "eth0.5", Some("eth0"), &BOTH);
}

#[test]
fn ipip() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag, Ipip);
    let hosts = hosts();
    for (host, local, remote) in [(&hosts[0], 2, 1), (&hosts[1], 1, 2)] {
        host.ip(&format!("link add name ip0 type ipip local 10.1.0.{local} remote 10.1.0.{remote}"));
    }
    // It carries IPv4 only.
    try_device(&hosts, "ip0", None, &BOTH[..1]);
}

#[test]
fn wireguard() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag, Wireguard);
    let hosts = hosts();
    let keys = [(); 2].map(|()| {
        let private = command::output("wg", &["genkey"]);
        let public = command::run_with("wg", &["pubkey"], &private).unwrap();
        (private, public)
    });
    let folder = tempfile::tempdir().unwrap();
    for (this, other, address) in [(0, 1, "10.1.0.1"), (1, 0, "10.1.0.2")] {
        let file = folder.path().join(format!("key-{this}"));
        std::fs::write(&file, &keys[this].0).unwrap();
        let (file, public, endpoint) =
            (file.to_str().unwrap(), keys[other].1.trim(), format!("{address}:51820"));
        let set = ["set", "wg0", "listen-port", "51820", "private-key", file, "peer", public];
        let peer = ["endpoint", &endpoint, "allowed-ips", "0.0.0.0/0,::/0"];
        hosts[this].ip("link add name wg0 type wireguard");
        hosts[this].run(|| command::run("wg", &[&set[..], &peer].concat())).unwrap();
    }
    try_device(&hosts, "wg0", None, &BOTH);
}
