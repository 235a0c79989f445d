//! Two hosts joined by a network, each with a kernel of its own: real SMC over RDMA, and policies at either end.
//!
//! Every test runs on both at the same time (see `joined`).
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::IpAddr;
use std::sync::Once;

use smc_policy_tests::enforce::{Enforced, Hook, enforce};
use smc_policy_tests::joined::{DEVICE, Joined, Met, Role};
use smc_policy_tests::{Kind, Lab, command, needs, ueid};

/// Services that the policies deny, and one that they do not mention.
const DENIED: u16 = 6001;
const FREE: u16 = 6002;

/// An RDMA device over the joining network, and a UEID: what SMC-R takes.
fn set_up(joined: &mut Joined) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        ueid::ensure().expect("a UEID");
        command::output("rdma", &["link", "add", "rxe0", "type", "rxe", "netdev", DEVICE]);
    });
    // SMC hears of a new device by and by.
    let is_ready = |_| joined.connect(Kind::AfSmc, Role::Server.addresses()[0], FREE).is_smc_r();
    assert!((0..10).any(is_ready), "no SMC-R");
}

/// A socket's kind, the server's address, and what it is to be.
type Case = (Kind, IpAddr, fn(&Met) -> bool);

/// Every kind of socket, where nothing is denied.
fn cases() -> Vec<Case> {
    let [v4, v6] = Role::Server.addresses();
    let mut cases: Vec<Case> = vec![(Kind::AfSmc, v4, Met::is_smc_r), (Kind::IpprotoSmc, v4, Met::is_smc_r)];
    // The software RDMA device has no RoCE v1 GID, and SMC-R v2 is for IPv4: they negotiate and find no device.
    // (Linux 6.12 takes mapped addresses for IPv6 here, 7.3 does not.)
    for (kind, address) in [(Kind::AfSmc6, v4), (Kind::AfSmc6, v6), (Kind::IpprotoSmc6, v6)] {
        cases.push((kind, address, Met::is_negotiated));
    }
    cases
}

/// Enforces a policy at one of the hosts.
fn at<'a>(host: Role, joined: &mut Joined, lab: &'a Lab, policy: &str, hook: Hook) -> Option<Enforced<'a>> {
    let enforced = (joined.role == host).then(|| enforce(lab, policy, "", hook));
    joined.step("in force");
    enforced
}

#[test]
fn without_a_policy_it_is_smc_r() {
    needs!(Root, Peer, Smc, SmcDiag, IpprotoSmc);
    let mut joined = Joined::meet("without_a_policy_it_is_smc_r");
    set_up(&mut joined);
    for (kind, address, is_as_expected) in cases() {
        let met = joined.connect(kind, address, FREE);
        assert!(is_as_expected(&met), "{kind:?} to {address}: {met}");
    }
}

/// Denied at the client, where SYNs leave.
#[test]
fn denied_outbound() {
    needs!(Root, Peer, Tool, Bpffs, Smc, SmcDiag, IpprotoSmc);
    denied(
        "denied_outbound",
        Role::Client,
        &format!(
            "[[rule]]\nname = \"no\"\naction = \"deny\"\ndirection = \"outbound\"\nports = [{DENIED}]\n"
        ),
    );
}

/// Denied at the server, where SYNs arrive.
#[test]
fn denied_inbound() {
    needs!(Root, Peer, Tool, Bpffs, Smc, SmcDiag, IpprotoSmc);
    denied(
        "denied_inbound",
        Role::Server,
        &format!("[[rule]]\nname = \"no\"\naction = \"deny\"\ndirection = \"inbound\"\nports = [{DENIED}]\n"),
    );
}

fn denied(test: &str, host: Role, policy: &str) {
    let mut joined = Joined::meet(test);
    set_up(&mut joined);
    for hook in Hook::all() {
        let lab = Lab::default();
        println!("{test}, by {hook}, at the {host:?}");
        let enforced = at(host, &mut joined, &lab, policy, hook);
        for (kind, address, is_as_expected) in cases() {
            let met = joined.connect(kind, address, DENIED);
            assert!(met.is_denied(), "{hook}: {kind:?} to {address}: {met}");
            let met = joined.connect(kind, address, FREE);
            assert!(is_as_expected(&met), "{hook}, another port: {kind:?} to {address}: {met}");
        }
        drop(enforced);
        joined.step("no longer in force");
        let met = joined.connect(Kind::AfSmc, Role::Server.addresses()[0], DENIED);
        assert!(met.is_smc_r(), "{hook}, no longer in force: {met}");
    }
}
