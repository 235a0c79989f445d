//! Two hosts between which RDMA does not work although SMC is negotiated: after two connections that fell back for it, the peer
//! is in quarantine, both ways.
//!
//! Every test runs on both at the same time (see `joined`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

use serde_json::json;
use smc_policy_tests::connection::Listener;
use smc_policy_tests::half::Transport;
use smc_policy_tests::joined::{DEVICE, Joined, RDMA, Role};
use smc_policy_tests::{Half, Kind, Lab, command, needs};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
const PORT: u16 = 6100;
/// "The peer did not answer with the SMC option", and what an RDMA path that does not work looks like.
const PEER_NO_SMC: u32 = 0x0301_0000;
const RDMA_FAILED: u32 = 0x0201_0000;
/// The other one said so first.
const PEER_DECLINED: u32 = 0x0500_0000;
/// What carries RDMA over Ethernet.
const RULES: &str = "table inet rdma { \
    chain in { type filter hook input priority 0; udp dport 4791 drop; }; \
    chain out { type filter hook output priority 0; udp dport 4791 drop; }; };";

/// One connection, and how it went on at this end.
fn connect(joined: &mut Joined) -> Transport {
    let address = SocketAddr::new(Role::Server.addresses()[0], PORT);
    let listener = (joined.role == Role::Server).then(|| Listener::bind(Kind::AfSmc, address));
    joined.step("listening");
    let half = match &listener {
        Some(listener) => listener.accept(&AtomicBool::new(false)),
        None => Half::connect(Kind::AfSmc, None, address),
    };
    let half = half.unwrap_or_else(|failure| panic!("{failure}"));
    let transport = half.judge().unwrap().transport;
    println!("{:?}: {transport}, {:?}", joined.role, half.time);
    // Kernels leave bytes of theirs in the stream of such a connection: it is not used.
    joined.step("connected");
    transport
}

#[test]
fn a_path_without_rdma_is_learned() {
    needs!(Root, Peer, Tool, Bpffs, Smc, SmcDiag, IpprotoSmc, Nft);
    let mut joined = Joined::meet("a_path_without_rdma_is_learned");
    joined.set_up_smc_r(PORT);
    let lab = Lab::default();
    lab.apply(ALLOW);
    // A link that stands would fail in another way: the device goes with its links, and comes again when nothing passes.
    command::output("rdma", &["link", "delete", RDMA]);
    command::run_with("nft", &["-f", "-"], RULES).unwrap();
    command::output("rdma", &["link", "add", RDMA, "type", "rxe", "netdev", DEVICE]);
    joined.step("nothing passes");
    let mut failed = 0;
    for _ in 0..10 {
        // Until SMC has heard of the device, it falls back for want of one.
        let transport = connect(&mut joined);
        let ours = u32::from(matches!(
            transport,
            Transport::Fallback(RDMA_FAILED, _) | Transport::Fallback(PEER_DECLINED, RDMA_FAILED)
        ));
        let theirs: u32 = joined.swap(ours);
        assert_eq!(ours, theirs, "both ends see it");
        failed += ours;
        if failed == 2 {
            break;
        }
    }
    assert_eq!(failed, 2, "fallbacks for want of RDMA");
    let status = lab.status();
    assert_eq!(status["counters"]["rdma_failures"], 2, "{status:#}");
    let other = if joined.role == Role::Client { Role::Server } else { Role::Client };
    let peer = other.addresses()[0].to_string();
    let list = lab.home.run(["quarantine", "list", "--json"]).ok().json();
    let entry = &list["entries"][0];
    let shown = ["peer", "port", "store", "cause", "direction", "span", "count"].map(|name| &entry[name]);
    let expected =
        [json!(peer), json!(0), json!("learned"), json!("rdma-path"), json!("both"), json!(3600), json!(1)];
    assert_eq!(shown, expected.each_ref(), "{list:#}");
    assert_eq!(lab.explain(&[&peer, "--inbound"])["by"], "quarantine");
    let transport = connect(&mut joined);
    assert!(matches!(transport, Transport::Fallback(PEER_NO_SMC, _)), "{transport}");
    lab.home.run(["detach"]).ok();
    command::output("nft", &["delete", "table", "inet", "rdma"]);
    joined.step("as it was");
}
