//! The main job: a policy decides which connections negotiate SMC. Each connection is judged by what the kernel says
//! about both ends, and by its data arriving intact.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use smc_policy_tests::lab::{assert_denied, assert_smc, listen};
use smc_policy_tests::{Kind, Lab, Pair, Transport, connection, exchange, needs_hook};

/// A listener of every SMC kind that takes IPv4 on `ip`, with the kind.
fn each_v4(ip: &str) -> impl Iterator<Item = (Kind, connection::Listener)> {
    Kind::smc_v4().into_iter().map(move |kind| (kind, listen(kind, ip)))
}

fn each_v6(ip: &str) -> impl Iterator<Item = (Kind, connection::Listener)> {
    Kind::smc_v6().into_iter().map(move |kind| (kind, listen(kind, ip)))
}

/// `IPPROTO_SMC` sockets, where the kernel has them.
fn other() -> Kind {
    if Kind::IpprotoSmc.is_there() { Kind::IpprotoSmc } else { Kind::AfSmc }
}

#[test]
fn outbound_deny_by_address() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "one-address"
            action = "deny"
            direction = "outbound"
            peers = ["127.0.0.2"]
            "#,
        );
        for (kind, listener) in each_v4("127.0.0.2") {
            assert_denied(kind, None, &listener);
        }
        for (kind, listener) in each_v4("127.0.0.1").chain(each_v4("127.0.0.3")) {
            assert_smc(kind, None, &listener);
        }
        for (kind, listener) in each_v6("fd00:5::2") {
            assert_smc(kind, None, &listener);
        }
        assert_eq!(lab.hits("one-address"), Kind::smc_v4().len() as u64);
    });
}

#[test]
fn outbound_deny_by_network() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "one-network"
            action = "deny"
            direction = "outbound"
            peers = ["127.1.0.0/16"]
            "#,
        );
        for ip in ["127.1.0.1", "127.1.0.0", "127.1.128.7", "127.1.255.255"] {
            assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, ip));
        }
        for ip in ["127.0.255.255", "127.2.0.0"] {
            assert_smc(Kind::AfSmc, None, &listen(Kind::AfSmc, ip));
        }
        for (kind, listener) in each_v4("127.1.2.3") {
            assert_denied(kind, None, &listener);
        }
    });
}

#[test]
fn outbound_deny_by_range() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [sets]
            some = ["127.3.0.5-127.3.0.9"]
            [[rule]]
            name = "a-range"
            action = "deny"
            direction = "outbound"
            peers = ["@some"]
            "#,
        );
        for ip in ["127.3.0.5", "127.3.0.7", "127.3.0.9"] {
            assert_denied(other(), None, &listen(Kind::AfSmc, ip));
        }
        for ip in ["127.3.0.4", "127.3.0.10"] {
            assert_smc(other(), None, &listen(Kind::AfSmc, ip));
        }
    });
}

#[test]
fn outbound_deny_by_port() {
    needs_hook!();
    Lab::run(|lab| {
        let denied: Vec<_> = each_v4("127.0.0.2").chain(each_v6("fd00:5::2")).collect();
        let ports: Vec<_> = denied.iter().map(|(_, listener)| listener.port()).collect();
        lab.apply(&format!(
            r#"
            version = 1
            [[rule]]
            name = "some-ports"
            action = "deny"
            direction = "outbound"
            ports = {ports:?}
            "#
        ));
        for (kind, listener) in &denied {
            assert_denied(*kind, None, listener);
        }
        for (kind, listener) in each_v4("127.0.0.2").chain(each_v6("fd00:5::2")) {
            assert!(!ports.contains(&listener.port()));
            assert_smc(kind, None, &listener);
        }
        assert_eq!(lab.hits("some-ports"), denied.len() as u64);
    });
}

#[test]
fn a_port_range_includes_both_ends() {
    needs_hook!();
    Lab::run(|lab| {
        let at = |port| connection::Listener::bind(Kind::AfSmc, ([127, 0, 0, 2], port).into());
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "range"
            action = "deny"
            direction = "outbound"
            ports = ["8000-8003"]
            "#,
        );
        for port in [8000, 8003] {
            assert_denied(Kind::AfSmc, None, &at(port));
        }
        for port in [7999, 8004] {
            assert_smc(Kind::AfSmc, None, &at(port));
        }
    });
}

#[test]
fn outbound_deny_by_local_address() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "from-there"
            action = "deny"
            direction = "outbound"
            local = ["127.0.0.9", "fd00:5::4"]
            "#,
        );
        for (kind, listener) in each_v4("127.0.0.2") {
            assert_denied(kind, Some("127.0.0.9"), &listener);
            assert_smc(kind, Some("127.0.0.8"), &listener);
            assert_smc(kind, None, &listener);
        }
        for (kind, listener) in each_v6("fd00:5::2") {
            assert_denied(kind, Some("fd00:5::4"), &listener);
            assert_smc(kind, Some("fd00:5::3"), &listener);
        }
    });
}

#[test]
fn inbound_deny_by_peer() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "not-from-them"
            action = "deny"
            direction = "inbound"
            peers = ["127.0.9.0/24", "fd00:5::4"]
            "#,
        );
        for (kind, listener) in each_v4("127.0.0.2") {
            assert_denied(kind, Some("127.0.9.9"), &listener);
            assert_smc(kind, Some("127.0.8.9"), &listener);
        }
        // Outbound to the same address is another matter.
        assert_smc(Kind::AfSmc, Some("127.0.0.1"), &listen(Kind::AfSmc, "127.0.9.9"));
        for (kind, listener) in each_v6("fd00:5::2") {
            assert_denied(kind, Some("fd00:5::4"), &listener);
            assert_smc(kind, Some("fd00:5::3"), &listener);
        }
        assert_eq!(lab.hits("not-from-them"), (Kind::smc_v4().len() + Kind::smc_v6().len()) as u64);
    });
}

#[test]
fn inbound_deny_by_port() {
    needs_hook!();
    Lab::run(|lab| {
        let denied: Vec<_> = each_v4("127.0.0.2").chain(each_v6("fd00:5::2")).collect();
        let ports: Vec<_> = denied.iter().map(|(_, listener)| listener.port()).collect();
        lab.apply(&format!(
            r#"
            version = 1
            [[rule]]
            name = "plain-services"
            action = "deny"
            direction = "inbound"
            ports = {ports:?}
            "#
        ));
        for (kind, listener) in &denied {
            assert_denied(*kind, None, listener);
        }
        for (kind, listener) in each_v4("127.0.0.2").chain(each_v6("fd00:5::2")) {
            assert_smc(kind, None, &listener);
        }
    });
}

#[test]
fn inbound_deny_by_local_address() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "not-there"
            action = "deny"
            direction = "inbound"
            local = ["127.0.0.9", "fd00:6::/48"]
            "#,
        );
        for (kind, listener) in each_v4("127.0.0.9").chain(each_v6("fd00:6::1")) {
            assert_denied(kind, None, &listener);
        }
        for (kind, listener) in each_v4("127.0.0.8").chain(each_v6("fd00:5::1")) {
            assert_smc(kind, None, &listener);
        }
        // A wildcard listener is judged by the address that was connected to.
        let everywhere = listen(Kind::AfSmc, "0.0.0.0");
        let at = |ip: &str| everywhere.reached_at(ip.parse().unwrap());
        assert_denied(Kind::AfSmc, None, &at("127.0.0.9"));
        assert_smc(Kind::AfSmc, None, &at("127.0.0.8"));
    });
}

#[test]
fn except_carves_out() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [sets]
            near = ["127.1.2.0/24", "fd00:5::2"]
            [[rule]]
            name = "far"
            action = "deny"
            direction = "outbound"
            peers = ["127.1.0.0/16", "fd00:5::/32"]
            except = ["@near"]
            "#,
        );
        for (kind, listener) in each_v4("127.1.1.255").chain(each_v4("127.1.3.0")) {
            assert_denied(kind, None, &listener);
        }
        for (kind, listener) in each_v4("127.1.2.7").chain(each_v4("127.2.0.1")) {
            assert_smc(kind, None, &listener);
        }
        for (kind, listener) in each_v6("fd00:5::1") {
            assert_denied(kind, None, &listener);
        }
        for (kind, listener) in each_v6("fd00:5::2").chain(each_v6("fd00:6::1")) {
            assert_smc(kind, None, &listener);
        }
    });
}

#[test]
fn ipv4_over_ipv6_sockets_is_ipv4() {
    needs_hook!();
    Lab::run(|lab| {
        // Whole IPv6 is allowed by name first: it must not cover mapped IPv4.
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "all-ipv6"
            action = "allow"
            peers = ["::/0"]
            [[rule]]
            name = "ipv4-network"
            action = "deny"
            direction = "outbound"
            peers = ["127.4.0.0/16"]
            [[rule]]
            name = "mapped-spelling"
            action = "deny"
            direction = "outbound"
            peers = ["::ffff:127.5.0.1"]
            "#,
        );
        for client in Kind::smc_v6() {
            for server in Kind::smc_v4() {
                assert_denied(client, None, &listen(server, "127.4.0.1"));
                assert_denied(client, None, &listen(server, "127.5.0.1"));
                assert_smc(client, None, &listen(server, "127.6.0.1"));
            }
        }
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.5.0.1"));
        let pairs = (Kind::smc_v6().len() * Kind::smc_v4().len()) as u64;
        assert_eq!(lab.hits("ipv4-network"), pairs);
        assert_eq!(lab.hits("mapped-spelling"), pairs + 1);
        assert_eq!(lab.hits("all-ipv6"), 0);
    });
}

#[test]
fn native_ipv6() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "one"
            action = "deny"
            direction = "outbound"
            peers = ["fd00:5::2"]
            [[rule]]
            name = "network"
            action = "deny"
            direction = "outbound"
            peers = ["fd00:6::/48"]
            "#,
        );
        for ip in ["fd00:5::2", "fd00:6::1"] {
            for (kind, listener) in each_v6(ip) {
                assert_denied(kind, None, &listener);
            }
        }
        for ip in ["fd00:5::1", "fd00:5::3", "::1"] {
            for (kind, listener) in each_v6(ip) {
                assert_smc(kind, None, &listener);
            }
        }
        assert_smc(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
    });
}

#[test]
fn default_deny_with_one_allow() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [default]
            outbound = "deny"
            [[rule]]
            name = "this-one"
            action = "allow"
            peers = ["127.0.0.5", "fd00:5::3"]
            "#,
        );
        for (kind, listener) in each_v4("127.0.0.5").chain(each_v6("fd00:5::3")) {
            assert_smc(kind, None, &listener);
        }
        for (kind, listener) in each_v4("127.0.0.4").chain(each_v6("fd00:5::2")) {
            assert_denied(kind, None, &listener);
        }
        lab.apply(
            r#"
            version = 1
            [default]
            inbound = "deny"
            [[rule]]
            name = "from-this-one"
            action = "allow"
            direction = "inbound"
            peers = ["127.0.0.5", "fd00:5::3"]
            "#,
        );
        for (kind, listener) in each_v4("127.0.0.2") {
            assert_smc(kind, Some("127.0.0.5"), &listener);
            assert_denied(kind, Some("127.0.0.4"), &listener);
        }
        for (kind, listener) in each_v6("fd00:5::2") {
            assert_smc(kind, Some("fd00:5::3"), &listener);
            assert_denied(kind, Some("fd00:5::4"), &listener);
        }
    });
}

#[test]
fn the_first_matching_rule_wins() {
    needs_hook!();
    Lab::run(|lab| {
        let listener = listen(Kind::AfSmc, "127.7.0.1");
        lab.apply(&format!(
            r#"
            version = 1
            [[rule]]
            name = "but-this-service"
            action = "allow"
            peers = ["127.7.0.1"]
            ports = [{}]
            [[rule]]
            name = "network"
            action = "deny"
            peers = ["127.7.0.0/16"]
            [[rule]]
            name = "too-late"
            action = "allow"
            peers = ["127.7.0.2"]
            "#,
            listener.port()
        ));
        assert_smc(Kind::AfSmc, None, &listener);
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.7.0.1"));
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.7.0.2"));
        assert_eq!((lab.hits("but-this-service"), lab.hits("network"), lab.hits("too-late")), (1, 2, 0));
    });
}

#[test]
fn a_plain_tcp_end_is_no_decision() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(
            r#"
            version = 1
            [[rule]]
            name = "all"
            action = "deny"
            "#,
        );
        let listener = listen(Kind::Tcp, "127.0.0.2");
        let outcome = exchange(Kind::Tcp, None, &listener).unwrap();
        assert_eq!(outcome.client.transport, Transport::Tcp);
        assert_eq!(lab.hits("all"), 0, "the kernel asks for SMC sockets only");
    });
}

#[test]
fn observe_changes_nothing_and_counts() {
    needs_hook!();
    Lab::run(|lab| {
        let policy = lab.home.write(
            "observe.toml",
            r#"
            version = 1
            [[rule]]
            name = "would-deny"
            action = "deny"
            direction = "outbound"
            peers = ["127.0.0.2"]
            "#,
        );
        let policy = policy.to_str().unwrap();
        lab.home.run(["apply", "--mode", "observe", policy]).ok();
        assert_eq!(lab.status()["mode"], "observe");
        for (kind, listener) in each_v4("127.0.0.2") {
            assert_smc(kind, None, &listener);
        }
        assert_eq!(lab.hits("would-deny"), Kind::smc_v4().len() as u64);
        // The same policy in earnest, and back.
        lab.home.run(["apply", policy]).ok();
        assert_eq!(lab.status()["mode"], "enforce");
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
        lab.home.run(["apply", "--mode", "observe", policy]).ok();
        assert_smc(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
    });
}

#[test]
fn detach_brings_smc_back() {
    needs_hook!();
    Lab::run(|lab| {
        assert_eq!(lab.deciding(), "");
        let listener = listen(Kind::AfSmc, "127.0.0.2");
        lab.apply(
            r#"
            version = 1
            [default]
            outbound = "deny"
            inbound = "deny"
            "#,
        );
        assert!(lab.deciding().starts_with("smcpol_"), "{}", lab.deciding());
        assert_denied(Kind::AfSmc, None, &listener);
        lab.home.run(["detach"]).ok();
        assert_eq!(lab.deciding(), "");
        assert_smc(Kind::AfSmc, None, &listener);
        let left = std::fs::read_dir(lab.home.bpffs()).unwrap().flatten();
        let left: Vec<_> = left.map(|entry| entry.path()).filter(|path| has_files(path)).collect();
        assert!(left.is_empty(), "pins left: {left:?}");
        // Nothing to detach is no error, and an apply afterwards starts anew.
        lab.home.run(["detach"]).ok();
        lab.apply("version = 1\n[default]\noutbound = \"deny\"\n");
        assert_denied(Kind::AfSmc, None, &listener);
    });
}

fn has_files(path: &std::path::Path) -> bool {
    match std::fs::read_dir(path) {
        Ok(mut entries) => entries.any(|entry| entry.is_ok_and(|entry| has_files(&entry.path()))),
        Err(_) => true,
    }
}

#[test]
fn an_open_connection_lives_on_and_is_reported() {
    needs_hook!(SmcD);
    Lab::run(|lab| {
        let listener = listen(Kind::AfSmc, "127.0.0.2");
        let pair = Pair::open(Kind::AfSmc, None, &listener).unwrap();
        pair.exchange(&[1000]).unwrap();
        assert!(pair.judge().unwrap().is_smc());
        let other = listen(Kind::AfSmc, "127.0.0.3");
        let bystander = Pair::open(Kind::AfSmc, None, &other).unwrap();
        let path = lab.home.write(
            "no-more.toml",
            r#"
            version = 1
            [[rule]]
            name = "no-more"
            action = "deny"
            direction = "outbound"
            peers = ["127.0.0.2"]
            "#,
        );
        let run = lab.home.run(["apply".as_ref(), "--json".as_ref(), path.as_os_str()]).ok();
        let client = pair.judge().unwrap().client;
        let expected = serde_json::json!([{
            "direction": "outbound",
            "local": client.local.to_string(),
            "peer": listener.address().to_string(),
            "rule": "no-more",
        }]);
        assert_eq!(run.json()["live_denied"], expected, "{run:#?}");
        let text = lab.home.run(["apply".as_ref(), path.as_os_str()]).ok().stdout;
        assert!(text.contains("1 live SMC connection that this policy denies: it lives on"), "{text}");
        assert!(text.contains(&client.local.to_string()) && text.contains("by rule no-more"), "{text}");
        pair.exchange(&[1, 100_000]).unwrap();
        assert!(pair.judge().unwrap().is_smc());
        assert_denied(Kind::AfSmc, None, &listener);
        pair.close().unwrap();
        bystander.close().unwrap();
        let run = lab.home.run(["apply".as_ref(), "--json".as_ref(), path.as_os_str()]).ok();
        assert_eq!(run.json()["live_denied"], serde_json::json!([]), "closed: {run:#?}");
    });
}

#[test]
fn explain_says_what_happens() {
    needs_hook!();
    Lab::run(|lab| {
        let (open, closed) = (listen(Kind::AfSmc, "127.0.0.2"), listen(Kind::AfSmc, "127.0.0.2"));
        let path = lab.home.write(
            "explained.toml",
            &format!(
                r#"version = 1
[[rule]]
name = "service"
action = "deny"
direction = "outbound"
peers = ["127.0.0.2"]
ports = [{}]

[[rule]]
name = "network"
action = "deny"
direction = "inbound"
peers = ["127.0.9.0/24"]
"#,
                closed.port()
            ),
        );
        lab.home.run(["apply".as_ref(), path.as_os_str()]).ok();

        assert_denied(Kind::AfSmc, None, &closed);
        let answer = lab.explain(&[&closed.address().to_string()]);
        assert_eq!(
            (&answer["action"], &answer["by"], &answer["rule"]),
            (&"deny".into(), &"rule".into(), &"service".into())
        );
        assert_smc(Kind::AfSmc, None, &open);
        let answer = lab.explain(&[&open.address().to_string()]);
        assert_eq!((&answer["action"], &answer["by"]), (&"allow".into(), &"default".into()));
        // Without a port the answer depends on it.
        assert_eq!(lab.explain(&["127.0.0.2"])["action"], "mixed");

        assert_denied(Kind::AfSmc, Some("127.0.9.9"), &open);
        let answer = lab.explain(&["--inbound", "127.0.9.9"]);
        assert_eq!((&answer["action"], &answer["rule"]), (&"deny".into(), &"network".into()));
        let text = lab.home.run(["explain", "--inbound", "127.0.9.9"]).expect_code(1).stdout;
        assert!(text.contains("network") && text.contains("explained.toml"), "{text}");
    });
}

#[test]
fn explain_answers_without_a_policy() {
    needs_hook!();
    Lab::run(|lab| {
        let mut answer = lab.explain(&["127.0.0.2:443"]);
        let regions = answer.as_object_mut().unwrap().remove("regions").unwrap();
        assert_eq!(regions.as_array().map(Vec::len), Some(1), "{regions:#}");
        // The same fields as with a policy, or a reader of them would stumble.
        let expected = serde_json::json!({
            "version": 1,
            "peer": "127.0.0.2",
            "port": 443,
            "local": null,
            "direction": "outbound",
            "judged_by": "in force",
            "generation": null,
            "mode": "enforce",
            "only_observed": false,
            "files_differ": false,
            "beside": null,
            "quarantine": [],
            "action": "allow",
            "by": "nothing",
            "rule": null,
            "file": null,
            "line": null,
            "passed": [],
        });
        assert_eq!(answer, expected);
        lab.apply("version = 1\n");
        let with = lab.explain(&["127.0.0.2:443"]);
        let names = |document: &serde_json::Value| -> Vec<String> {
            document.as_object().unwrap().keys().filter(|name| *name != "regions").cloned().collect()
        };
        assert_eq!(names(&with), names(&answer));
    });
}
