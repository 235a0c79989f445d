//! `probe`: every kind of peer is told from every other, and nothing is left behind at any of them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::process::CommandExt;
use std::sync::atomic::AtomicBool;

use serde_json::Value;
use smc_policy_tests::tun_peer::{Style, TunPeers, ports};
use smc_policy_tests::{Home, Kind, Lab, Need, Run, command, eventually, lab, needs, netns};

/// Both families' targets for a host and a port.
fn targets(style: Style, port: u16) -> [SocketAddr; 2] {
    style.addresses().map(|ip| SocketAddr::new(ip, port))
}

/// What is said of each target.
fn by_target(run: &Run) -> HashMap<SocketAddr, Value> {
    let document = run.json();
    assert_eq!(document["version"], 1, "{document:#}");
    let targets = document["targets"].as_array().expect("targets").iter();
    let of = |target: &Value| {
        let ip: IpAddr = target["address"].as_str().expect("an address").parse().expect("an address");
        SocketAddr::new(ip, u16::try_from(target["port"].as_u64().expect("a port")).expect("a port"))
    };
    targets.map(|target| (of(target), target.clone())).collect()
}

/// Connections of this namespace that somebody may still be waiting for, both families: ESTABLISHED (01), SYN_RECV (03).
fn open_connections() -> Vec<String> {
    let read = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}")).expect("connections");
    let all = read("tcp") + &read("tcp6");
    let state = |line: &str| line.split_whitespace().nth(3).map(str::to_owned);
    all.lines()
        .filter(|line| ["01", "03"].contains(&state(line).as_deref().unwrap_or("")))
        .map(str::to_owned)
        .collect()
}

#[test]
fn probe_tells_every_style_of_echo_from_plain_peers() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let peers = TunPeers::start();
        let home = Home::new();
        let behaviours = [
            (ports::SILENT, "ETIMEDOUT"),
            (ports::ECHO, "EPROTO"),
            (ports::HTTP, "\"HTTP/1.1 400 Bad\""),
            (ports::BANNER, "\"SSH-2.0-x..\""),
            (ports::FIN, "ECONNRESET"),
            (ports::RST, "ECONNRESET"),
        ];
        let styles = [
            Style::WholeBlock,
            Style::OwnMssAndUnknown,
            Style::Reordered,
            Style::Only254,
            Style::UnknownOf4,
            Style::OnlySmc,
        ];
        let of = |style: Style| behaviours.map(|(port, note)| (style, port, note));
        let mut echoes: Vec<(Style, u16, &str)> = styles.into_iter().flat_map(of).collect();
        echoes.push((Style::WholeBlock, ports::DECLINES, "genuine SMC server is behind"));
        let known = behaviours.map(|(port, _)| (Style::OnlyKnown, port, "ignores", ""));
        let others = [
            (Style::OnlySmc, ports::DECLINES, "smc", ""),
            (Style::Only253, ports::HTTP, "ignores", "without consequence"),
            (Style::Plain, ports::HTTP, "ignores", ""),
            (Style::NoPing, ports::HTTP, "ignores", ""),
            (Style::Lossy, ports::HTTP, "ignores", ""),
            (Style::Drops254, ports::HTTP, "drops", "a SYN with the SMC option is not answered"),
            (Style::DropsUnknown, ports::HTTP, "drops", "(kind 253) is not answered"),
            (Style::Strips, ports::HTTP, "strips", ""),
            (Style::Closed, ports::HTTP, "closed", ""),
            (Style::BlackHole, ports::HTTP, "no-answer", ""),
        ];
        let expected: Vec<(Style, u16, &str, &str)> = (echoes.iter())
            .map(|(style, port, note)| (*style, *port, "echoes", *note))
            .chain(known)
            .chain(others)
            .collect();
        let mut arguments: Vec<String> =
            ["probe", "--json", "--rate", "1000", "--concurrency", "64", "--timeout", "2s"]
                .map(str::to_owned)
                .into();
        arguments.extend(
            expected.iter().flat_map(|(style, port, ..)| targets(*style, *port)).map(|t| t.to_string()),
        );
        let run = home.run(&arguments).expect_code(1);
        let found = by_target(&run);
        assert_eq!(run.json()["echoes"], 2 * echoes.len());
        for (style, port, class, note) in expected {
            for target in targets(style, port) {
                let found = &found[&target];
                assert_eq!(found["class"], class, "{style:?} {found:#}");
                if style == Style::OnlySmc && class == "echoes" {
                    assert!(found["notes"].to_string().contains("does not speak SMC"), "{found:#}");
                }
                assert!(
                    found["notes"].to_string().replace("\\\"", "\"").contains(note),
                    "'{note}': {style:?} {found:#}"
                );
                let pings = ![Style::NoPing, Style::BlackHole].contains(&style);
                assert_eq!(found["ping_milliseconds"].is_f64(), pings, "{style:?} {found:#}");
                assert_eq!(
                    found["remedy"].is_object(),
                    ["echoes", "drops", "strips"].contains(&class),
                    "{found:#}"
                );
            }
        }
        // Every connection was reset where the peer expected it.
        eventually("nothing is left at the peers", || peers.open().is_empty());
        assert_eq!(peers.seen().0, [""; 0]);
    });
}

#[test]
fn probe_by_options_alone_leaves_it_open_who_returns_only_the_smc_option() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let peers = TunPeers::start();
        let home = Home::new();
        let target = |style, port| targets(style, port)[0].to_string();
        let unclear = target(Style::OnlySmc, ports::SILENT);
        let run = home.run(["probe", "--options-only", &unclear]).ok();
        assert!(run.stdout.contains("answers with the SMC option"), "{run:#?}");
        assert!(run.stdout.contains("known only by negotiating"), "{run:#?}");
        let echo = target(Style::WholeBlock, ports::SILENT);
        let run = home.run(["probe", "--options-only", "--details", &echo]).expect_code(1);
        for words in ["echoes options", "SYN-ACK with smc, canary", "[[rule]]", "peers = [\"10.77.0.10\"]"] {
            assert!(run.stdout.contains(words), "'{words}': {run:#?}");
        }
        assert!(run.time.as_secs() < 6, "no CLC proposal was sent: {run:#?}");
        assert_eq!((peers.open(), peers.seen()), (vec![], (vec![], 10)));
    });
}

/// The rule that is printed keeps SMC off the peer: `explain` says so.
#[test]
fn the_rule_that_probe_prints_can_be_used() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let _peers = TunPeers::start();
        let home = Home::new();
        for target in targets(Style::WholeBlock, ports::HTTP) {
            let target = target.to_string();
            let run = home.run(["probe", "--json", &target]).expect_code(1);
            let rule = run.json()["targets"][0]["remedy"]["toml"].as_str().expect("a rule").to_owned();
            let policy = home.write("policy.toml", &format!("version = 1\n{rule}"));
            let policy = policy.to_str().unwrap();
            home.run(["explain", "--policy", policy, &target]).expect_code(1);
            home.run(["explain", "--policy", policy, &target.replace(":80", ":81")]).ok();
        }
    });
}

#[test]
fn a_probed_listener_sees_nothing_and_keeps_nothing() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let home = Home::new();
        let listeners = ["127.0.0.1:0", "[::1]:0"].map(|address| TcpListener::bind(address).unwrap());
        let open = listeners.each_ref().map(|listener| listener.local_addr().unwrap());
        // A port that was open a moment ago and is not now.
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let all = [open[0], open[1], closed].map(|address| address.to_string());
        let run = home.run(["probe", "--json"].iter().copied().chain(all.iter().map(String::as_str))).ok();
        let left = open_connections();
        let found = by_target(&run);
        for address in open {
            assert_eq!(found[&address]["class"], "ignores", "{:#}", found[&address]);
            assert!(found[&address]["ping_milliseconds"].is_f64(), "{:#}", found[&address]);
        }
        assert_eq!(found[&closed]["class"], "closed");
        assert_eq!(left, [""; 0], "half-open connections");
        for listener in &listeners {
            listener.set_nonblocking(true).unwrap();
            assert!(listener.accept().is_err(), "no handshake was completed");
        }
        let text = home.run(["probe", &all[0]]).ok().stdout;
        assert!(text.contains("ping") && text.contains("plain TCP"), "{text}");
    });
}

/// Whoever has rules that swallow the kernel's resets is not the cause of half-open connections: the tool resets too.
#[test]
fn resets_come_from_probe_too() {
    needs!(Root, Tool, Netns, Nft);
    netns::in_new_namespace(&[], || {
        let home = Home::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = listener.local_addr().unwrap().to_string();
        // A reset of the kernel for a segment that no socket wants has no owner; the tool's has its user.
        let rules = "table inet t { chain out { type filter hook output priority 0; \
                     tcp flags & (rst | ack) == rst meta skuid 0 accept; tcp flags & (rst | ack) == rst counter drop; }; }";
        command::run_with("nft", &["-f", "-"], rules).unwrap();
        home.run(["probe", &target]).ok();
        assert_eq!(open_connections(), [""; 0]);
        let counted = command::output("nft", &["list", "ruleset"]);
        assert!(counted.contains("counter packets 5 "), "the kernel's were dropped: {counted}");
    });
}

#[test]
fn probe_finds_a_firewall_that_drops_kind_254() {
    needs!(Root, Tool, Netns, Nft);
    netns::in_new_namespace(&[], || {
        let home = Home::new();
        let rules =
            "table inet t { chain in { type filter hook input priority 0; tcp option 254 exists drop; }; }";
        command::run_with("nft", &["-f", "-"], rules).unwrap();
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(address).unwrap();
            let target = listener.local_addr().unwrap();
            let run = home.run(["probe", "--json", "--timeout", "1s", &target.to_string()]).ok();
            let found = &by_target(&run)[&target];
            assert_eq!(found["class"], "drops", "{found:#}");
            let answers: Vec<&str> =
                found["syns"].as_array().unwrap().iter().map(|syn| syn["answer"].as_str().unwrap()).collect();
            assert_eq!(answers, ["syn-ack", "none", "syn-ack", "none", "none"], "{found:#}");
            assert!(found["ping_milliseconds"].is_f64(), "{found:#}");
            assert_eq!(open_connections(), [""; 0]);
        }
    });
}

/// A genuine SMC listener: SMC speaks, over both families, and is left with nothing.
#[test]
fn probe_knows_a_genuine_smc_peer() {
    needs!(Root, Tool, Netns, Smc);
    let body = |lab: &Lab| {
        for (kind, ip) in [(Kind::AfSmc, "127.0.0.1"), (Kind::AfSmc6, "::1")] {
            let listener = lab::listen(kind, ip);
            let target = listener.address();
            let run = lab.home.run(["probe", "--json", &target.to_string()]).ok();
            let left = open_connections();
            let found = &by_target(&run)[&target];
            assert_eq!(found["class"], "smc", "{found:#}");
            assert!(found["ping_milliseconds"].is_f64() && found["remedy"].is_null(), "{found:#}");
            let syns = found["syns"].as_array().unwrap();
            let returned: Vec<String> = syns.iter().map(|syn| syn["returned"].to_string()).collect();
            assert_eq!(returned, ["[]", "[\"smc\"]", "[]", "[]", "[\"smc\"]"], "{found:#}");
            assert_eq!(found["negotiations"][0]["reply"]["kind"], "decline", "{found:#}");
            println!("{ip}: {}", found["negotiations"]);
            assert_eq!(left, [""; 0], "connections at the listener");
            let text = lab.home.run(["probe", "--details", &target.to_string()]).ok().stdout;
            assert!(text.contains("genuine SMC"), "{text}");
            for _ in 0..2 {
                // What its application has of the two probes: connections without a byte.
                let accepted = listener.accept(&AtomicBool::new(false)).expect("a connection of a probe");
                let error = accepted.answer(&[1]).expect_err("no byte comes");
                assert_eq!(error.error.kind(), ErrorKind::ConnectionReset, "{error}");
            }
            if Need::SmcD.is_met() {
                // It is as good as before.
                lab::assert_smc(kind, None, &listener);
            }
        }
    };
    if Need::SmcD.is_met() { Lab::run(body) } else { Lab::run_without_smc_d(body) }
}

#[test]
fn probe_takes_what_a_policy_allows() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let _peers = TunPeers::start();
        let home = Home::new();
        let policy = "version = 1\n\
            [[rule]]\nname = \"not-the-plain-one\"\naction = \"deny\"\npeers = [\"10.77.0.18\"]\n\
            [[rule]]\nname = \"lab\"\naction = \"allow\"\npeers = [\"10.77.0.17-10.77.0.18\", \"10.0.0.0/12\"]\n\
            ports = [80]\ndirection = \"outbound\"\n";
        home.write("etc/policy.d/policy.toml", policy);
        let run = home.run(["probe", "--json", "--from-policy"]).ok();
        assert_eq!(by_target(&run).keys().map(ToString::to_string).collect::<Vec<_>>(), ["10.77.0.17:80"]);
        let skipped = run.json()["skipped"].to_string();
        assert!(skipped.contains("10.0.0.0/12") && skipped.contains("[default]"), "{skipped}");
        // Another policy, and a file of targets beside it.
        let other = home.write("other.toml", &policy.replace("10.77.0.17-", ""));
        let list = home.write("targets", "# ours\n10.77.0.23:80  # does not ping\n");
        let option = format!("--from-policy={}", other.display());
        let run = home.run(["probe", &option, "--file", list.to_str().unwrap()]).ok();
        assert!(run.stdout.starts_with("10.77.0.23:80  no ping  plain TCP\n"), "{run:#?}");
        assert!(run.stdout.contains("Allowed by the policy and not probed:"), "{run:#?}");
    });
}

/// A policy in force keeps the SMC option out of connections; a probe shows the peer all the same.
#[test]
fn probe_sees_the_peer_past_this_hosts_policy() {
    needs!(Root, Tool, Netns, Bpffs);
    netns::in_new_namespace(&[], || {
        let _peers = TunPeers::start();
        let home = Home::new();
        home.write("etc/config.toml", "hook = \"tc\"\n");
        let [target, _] = targets(Style::WholeBlock, ports::HTTP).map(|target| target.to_string());
        let rule = "version = 1\n[[rule]]\nname = \"no\"\naction = \"deny\"\n";
        home.write("etc/policy.d/policy.toml", rule);
        home.run(["apply"]).ok();
        home.run(["explain", &target]).expect_code(1);
        let run = home.run(["probe", "--options-only", &target]).expect_code(1);
        assert!(run.stdout.contains("echoes options"), "{run:#?}");
    });
}

#[test]
fn what_cannot_be_probed_is_said() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let home = Home::new();
        home.run(["probe"]).refused(2, &["nothing to probe"]);
        home.run(["probe", "224.0.0.1:80"]).refused(2, &["multicast"]);
        home.run(["probe", "10.0.0.0/8"]).refused(2, &["is no target"]);
        let list = home.write("targets", "192.0.2.1\n\nnot one\n");
        home.run(["probe", "--file", list.to_str().unwrap()])
            .refused(2, &["targets:3: 'not one' is no target"]);
        home.run(["probe", "--file", "nowhere"]).refused(2, &["nowhere: "]);
        home.run(["probe", "--rate", "0", "127.0.0.1"]).refused(2, &["--rate"]);
        // No route: said of that target, the others are probed.
        let run = home.run(["probe", "192.0.2.1:80", "127.0.0.1:1"]).ok();
        assert!(run.stdout.contains("not sent") && run.stdout.contains("unreachable"), "{run:#?}");
        assert!(run.stdout.contains("closed"), "{run:#?}");
        // Without CAP_NET_RAW.
        let mut command = home.command(["probe", "127.0.0.1:1"]);
        command.uid(65_534);
        home.start_command(command).wait().refused(4, &["CAP_NET_RAW"]);
    });
}

#[test]
fn probe_without_a_port_tries_three() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let home = Home::new();
        let _web = TcpListener::bind("127.0.0.1:80").unwrap();
        let run = home.run(["probe", "--json", "127.0.0.1"]).ok();
        assert!(run.stderr.contains("443, 80, 22"), "{run:#?}");
        let found: HashMap<u16, String> =
            by_target(&run).iter().map(|(at, found)| (at.port(), found["class"].to_string())).collect();
        let expected = [(443, "closed"), (80, "ignores"), (22, "closed")];
        assert_eq!(found, expected.map(|(port, class)| (port, format!("\"{class}\""))).into());
    });
}

/// Not more packets a second than asked for, and not more at a time.
#[test]
fn probe_keeps_the_rate() {
    needs!(Root, Tool, Netns);
    netns::in_new_namespace(&[], || {
        let peers = TunPeers::start();
        let home = Home::new();
        let arguments = ["probe", "--rate", "20", "--options-only"].map(str::to_owned);
        let to = targets(Style::Plain, ports::HTTP).into_iter().chain(targets(Style::Plain, ports::ECHO));
        let run = home.run(arguments.into_iter().chain(to.map(|target| target.to_string()))).ok();
        assert_eq!(peers.seen().1, 20);
        // 20 SYNs and 4 echo requests: 23 pauses of 50 ms.
        assert!(run.time.as_millis() >= 1_150, "{run:#?}");
    });
}
