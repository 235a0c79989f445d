//! No receiver ever throws a segment away because of what the tc programs did to it, whoever computes the checksums.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::io::Write;
use std::time::Instant;

use smc_policy_tests::enforce::{Enforced, Hook};
use smc_policy_tests::packet::{Link, Packet, SMC};
use smc_policy_tests::tcp_counters::TcpErrors;
use smc_policy_tests::world::{add, join, only_at};
use smc_policy_tests::{
    Capture, Host, Kind, Lab, Listener, Pair, Rng, command, eventually, needs, scaled, sys, ueid,
};

/// Denied where it leaves, where it arrives, nowhere.
const PORTS: [u16; 3] = [6001, 6002, 6003];
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

const NONE: TcpErrors = TcpErrors { in_errs: 0, in_csum_errors: 0 };

/// The judge itself: a segment with a wrong checksum is counted.
#[test]
fn a_wrong_checksum_is_counted() {
    needs!(Root, Netns);
    let host = Host::new("host");
    let mut wire = host.run(|| sys::open_tun("tun0")).unwrap();
    host.ip(&format!("link set tun0 up\n{}", add("tun0", "10.1.0.1/24")));
    let mut bytes = Packet { link: Link::Ip, ..Packet::syn("10.1.0.2", "10.1.0.1", 1, &SMC) }.bytes();
    wire.write_all(&bytes).unwrap();
    assert_eq!(host.run(TcpErrors::now), NONE);
    *bytes.last_mut().unwrap() ^= 1;
    wire.write_all(&bytes).unwrap();
    eventually("the kernel counts it", || {
        host.run(TcpErrors::now) == TcpErrors { in_errs: 1, in_csum_errors: 1 }
    });
}

/// Connections of all sorts in random order, with offloads and without: none of their segments is thrown away.
#[test]
fn mixed_connections_lose_no_segment() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let mut rng = Rng::from_environment("checksums");
    let [client, server] = ["client", "server"].map(Host::new);
    join((&client, "eth0", "10.1.0.2/24 fd00:1::2/64"), (&server, "eth0", "10.1.0.1/24 fd00:1::1/64"));
    let families = [(Kind::AfSmc, "10.1.0.1"), (Kind::AfSmc6, "fd00:1::1")];
    let listeners = families.map(|(kind, ip)| PORTS.map(|port| (kind, server.listen(kind, ip, port))));
    let listeners = listeners.as_flattened();
    let lab = Lab::default();
    let enforced = Enforced::nothing(&lab);
    enforced.change(POLICY, &only_at(&[&client, &server]), Hook::Tc);

    let mut counts = [0_u64; PORTS.len()];
    for offload in ["on", "off"] {
        for host in [&client, &server] {
            host.run(|| {
                let set = ["tx", offload, "rx", offload, "tso", offload, "gso", offload, "gro", offload];
                command::output("ethtool", &[&["-K", "eth0"], &set[..]].concat());
            });
        }
        // One of each, looked at closely.
        for (kind, listener) in listeners {
            let capture = client.run(|| Capture::begin("eth0"));
            let outcome =
                client.exchange((*kind, None), listener.address(), (&server, listener), &[1, 100_000]);
            let outcome = outcome.unwrap_or_else(|failure| panic!("{}: {failure}", listener.address()));
            let port = PORTS.iter().position(|port| *port == listener.port()).unwrap();
            assert!(if port < 2 { outcome.is_denied() } else { outcome.is_negotiated() }, "{outcome}");
            counts[port] += 1;
            for seen in capture.take() {
                assert_eq!(seen.is_partial, offload == "on", "offloads {offload}: {seen}");
            }
        }
        let count = scaled(10_000) / 2;
        let begin = Instant::now();
        client.run(|| {
            for number in 0..count {
                let which = rng.below(listeners.len() as u64) as usize;
                let (kind, listener) = &listeners[which];
                connect(*kind, listener)
                    .unwrap_or_else(|failure| panic!("number {number}, {}: {failure}", listener.address()));
                counts[which % PORTS.len()] += 1;
            }
        });
        println!("offloads {offload}: {count} connections in {:.1?}", begin.elapsed());
    }
    assert_eq!([&client, &server].map(|host| host.run(TcpErrors::now)), [NONE; 2]);
    assert_eq!([lab.hits("leaving"), lab.hits("arriving")], counts[..2], "each was judged once");
}

fn connect(kind: Kind, listener: &Listener) -> Result<(), smc_policy_tests::connection::Failure> {
    let pair = Pair::open(kind, None, listener)?;
    pair.exchange(&[1, 3000])?;
    pair.close()
}
