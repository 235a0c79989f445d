//! What becomes of who echoes: settings of the guard, whole addresses, and genuine servers behind what echoes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use serde_json::Value;
use smc_policy::kernel::guard::{Quarantine, Store, mark};
use smc_policy_common::quarantine::{Cause, Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::echo_peer::{ADDRESSES, Behaviour, EchoPeer, SeenSyn, Style};
use smc_policy_tests::half::Transport;
use smc_policy_tests::middlebox::{HOST, Middlebox, SERVER};
use smc_policy_tests::packet::{Packet, flags};
use smc_policy_tests::sys::{Signal, signal};
use smc_policy_tests::{Half, Hook, Kind, Lab, Run, eventually, hook, needs_hook, sys};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";
/// "The peer did not answer with the SMC option" (SMC_CLC_DECL_PEERNOSMC).
const PEER_NO_SMC: u32 = 0x0301_0000;

fn addr(ip: &str) -> Addr {
    match ip.parse().expect("an address") {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

fn of(ip: &str, port: u16) -> SocketAddr {
    SocketAddr::new(ip.parse().unwrap(), port)
}

fn kind(ip: &str) -> Kind {
    if ip.contains(':') { Kind::AfSmc6 } else { Kind::AfSmc }
}

fn entries(lab: &Lab, store: Store) -> Vec<(Key, Entry)> {
    Quarantine::open(&lab.pins()).unwrap().expect("a quarantine").list(store).unwrap()
}

fn learned(lab: &Lab) -> Vec<(Key, Entry)> {
    entries(lab, Store::Learned)
}

#[track_caller]
fn counter(lab: &Lab, name: &str) -> u64 {
    let status = lab.status();
    status["counters"][name].as_u64().unwrap_or_else(|| panic!("no {name}: {status:#}"))
}

/// Applies with these lines in config.toml.
fn apply(lab: &Lab, config: &str, policy: &str) -> Run {
    let hook = if hook() == Hook::Tc { "hook = \"tc\"\n" } else { "" };
    lab.home.write("etc/config.toml", &format!("{hook}{config}"));
    lab.apply(policy)
}

/// Connects and closes; the SYN.
fn syn(peer: &EchoPeer, to: SocketAddr) -> SeenSyn {
    let before = peer.syns().len();
    drop(Half::connect(kind(&to.ip().to_string()), None, to).unwrap_or_else(|e| panic!("{to}: {e}")));
    peer.syns()[before].clone()
}

#[test]
fn an_echo_is_only_learned_from_where_one_asks_for_it() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        peer.set(Style::All, Behaviour::Rst);
        apply(lab, "on_echo = \"learn-only\"\n", ALLOW);
        for (at, (_, ip)) in ADDRESSES.into_iter().enumerate() {
            // As without the guard: the kernel believes that the peer speaks SMC, and tells it that it does, or cannot.
            let _ = Half::connect(kind(ip), None, of(ip, 443));
            let port = peer.syns().pop().expect("a SYN").port;
            eventually("the handshake came", || peer.received(port).starts_with(&[0xe2, 0xd4, 0xc3, 0xd9]));
            assert_eq!((counter(lab, "kept_echoes"), counter(lab, "echoes")), (at as u64 + 1, 0));
            let all = learned(lab);
            assert_eq!(
                (all.len(), all[at].0, all[at].1.cause),
                (at + 1, Key::new(addr(ip), 443), Cause::Echo as u8)
            );
            let next = syn(&peer, of(ip, 443));
            assert!(!next.has_smc() && next.canary().is_none(), "{next:02x?}");
        }
        let status = lab.status();
        assert_eq!(
            (&status["guard"]["on_echo"], &status["guard"]["marks"]),
            (&"learn-only".into(), &true.into())
        );
        // Back: one store.
        apply(lab, "", ALLOW);
        let (_, ip) = ADDRESSES[0];
        assert!(syn(&peer, of(ip, 444)).has_smc());
        assert_eq!(counter(lab, "echoes"), 1);
    });
}

#[test]
fn who_only_observes_changes_nothing() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        apply(lab, "", ALLOW);
        let (host, ip) = ADDRESSES[0];
        // A SYN that was marked before.
        peer.set(Style::Nothing, Behaviour::Silent);
        let syn = syn(&peer, of(ip, 443));
        let path = lab.home.write("policy.toml", ALLOW);
        lab.home.run(["apply", "--mode", "observe", path.to_str().unwrap()]).ok();
        let status = lab.status();
        let notes = status["notes"].as_array().unwrap();
        let said = |note: &Value| {
            note.as_str().is_some_and(|note| note.contains("marks no SYNs while the policy only observes"))
        };
        assert!(notes.iter().any(said), "{status:#}");
        let monitor = lab.home.start(["monitor", "--json"]);
        eventually("it reads", || lab.status()["events"]["reader"] == true);
        peer.send(&Packet {
            source_port: 443,
            acknowledged: syn.sequence.wrapping_add(1),
            flags: flags::SYN | flags::ACK,
            ..Packet::syn(
                ip,
                host,
                syn.port,
                &[&[254, 6, 0xe2, 0xd4, 0xc3, 0xd9][..], &syn.canary().unwrap()].concat(),
            )
        });
        eventually("it was counted", || counter(lab, "kept_echoes") == 1);
        assert_eq!((counter(lab, "echoes"), learned(lab)), (0, vec![]));
        signal(monitor.pid(), Signal::Terminate).unwrap();
        let run = monitor.wait().ok();
        let event: Value = serde_json::from_str(run.stdout.lines().next().unwrap()).unwrap();
        assert_eq!(
            (&event["kind"], &event["left"], &event["port"]),
            (&"echo".into(), &true.into(), &443.into())
        );
        assert_eq!(run.stdout.lines().count(), 2, "{run:#?}");
    });
}

/// A cgroup that goes with the test, which is back in the root then.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(name: &str) -> Self {
        let path = mark::cgroup_root().unwrap().join(format!("{name}-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn enter(&self) {
        enter(&self.0);
    }
}

fn enter(cgroup: &Path) {
    fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string()).unwrap();
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = mark::cgroup_root().map(|root| enter(&root));
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn only_the_cgroups_asked_for_are_marked() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        peer.set(Style::Nothing, Behaviour::Silent);
        let to = of(ADDRESSES[0].1, 443);
        let (one, two) = (Cgroup::new("smcpol-one"), Cgroup::new("smcpol-two"));
        let root = mark::cgroup_root().unwrap();
        let list = |cgroups: &[&Path]| {
            let all: Vec<String> =
                cgroups.iter().map(|path| format!("{:?}", path.to_str().unwrap())).collect();
            format!("cgroups = [{}]\n", all.join(", "))
        };
        let is_marked = |cgroup: &Path| {
            enter(cgroup);
            let marked = syn(&peer, to).canary().is_some();
            enter(&root);
            marked
        };
        apply(lab, "", ALLOW);
        assert!(is_marked(&root) && is_marked(&one.0));
        apply(lab, &list(&[&one.0, &two.0]), ALLOW);
        assert_eq!([&root, &one.0, &two.0].map(|cgroup| is_marked(cgroup)), [false, true, true]);
        apply(lab, &list(&[&two.0]), ALLOW);
        assert_eq!([&root, &one.0, &two.0].map(|cgroup| is_marked(cgroup)), [false, false, true]);
        // One that is not there is told, and the others are marked all the same.
        let missing = root.join("smcpol-missing");
        let run = apply(lab, &list(&[&missing, &one.0]), ALLOW);
        assert!(format!("{run:?}").contains("smcpol-missing"), "{run:#?}");
        assert_eq!([&root, &one.0, &two.0].map(|cgroup| is_marked(cgroup)), [false, true, false]);
        let status = lab.status();
        assert_eq!(status["guard"]["unmarked"], serde_json::json!([missing]), "{status:#}");
        assert_eq!(status["guard"]["marks"], true, "{status:#}");
        apply(lab, "", ALLOW);
        assert!(is_marked(&root) && is_marked(&two.0));
        one.enter();
    });
}

#[test]
fn three_ports_that_echo_make_it_the_address() {
    needs_hook!();
    let policy = r#"
        version = 1
        [[rule]]
        name = "trusted"
        action = "allow"
        trust = true
        ports = [1, 2, 3]
        "#;
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(policy);
        lab.home.run(["quarantine", "add", "192.0.2.9:443"]).ok();
        let commanded = entries(lab, Store::Commanded);
        for (_, ip) in ADDRESSES {
            // Those that are trusted are not marked, so that nothing is learned; the peer keeps silent about SMC then.
            peer.set(Style::Nothing, Behaviour::Silent);
            for port in [1, 2, 3] {
                assert!(syn(&peer, of(ip, port)).canary().is_none());
            }
            peer.set(Style::All, Behaviour::Silent);
            let ports = || {
                learned(lab)
                    .iter()
                    .filter(|(key, _)| key.peer == addr(ip))
                    .map(|(key, _)| key.port)
                    .collect::<Vec<_>>()
            };
            assert_eq!(ports(), [0; 0]);
            for (port, expected) in
                [(443, &[443][..]), (22, &[22, 443]), (443, &[22, 443]), (80, &[0, 22, 80, 443])]
            {
                syn(&peer, of(ip, port));
                assert_eq!(ports(), expected, "{ip} {port}");
            }
            // Every other service without SMC from the first connection on; trusted ones are exempt.
            let other = syn(&peer, of(ip, 8080));
            assert!(!other.has_smc(), "{other:02x?}");
            peer.set(Style::Nothing, Behaviour::Silent);
            assert!(syn(&peer, of(ip, 2)).has_smc());
            let answer = lab.explain(&[&of(ip, 8080).to_string()]);
            assert_eq!(
                (&answer["action"], &answer["by"]),
                (&"deny".into(), &"quarantine".into()),
                "{answer:#}"
            );
            // An entry that was lifted by hand comes back with the next echo only.
            lab.home.run(["quarantine", "remove", ip]).ok();
            assert!(syn(&peer, of(ip, 8080)).has_smc());
        }
        assert_eq!(entries(lab, Store::Commanded), commanded);
    });
}

/// An SMC server that accepts and says nothing: connections that fail before that are closed by its accept(2).
struct Server {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(at: SocketAddr) -> Self {
        let socket = Kind::AfSmc.open().unwrap();
        sys::bind(&socket, at).unwrap();
        sys::listen(&socket, 16).unwrap();
        let listener = TcpListener::from(socket);
        listener.set_nonblocking(true).unwrap();
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = is_over.clone();
        let thread = thread::spawn(move || {
            let mut accepted = Vec::new();
            while !ends.load(Ordering::Acquire) {
                if sys::is_readable(&listener, Duration::from_millis(50)).unwrap() {
                    accepted.extend(listener.accept());
                }
            }
        });
        Self { is_over, thread: Some(thread) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// After blanking it is plain TCP at this end, while a genuine server waits for a handshake.
#[test]
fn a_genuine_server_behind_what_echoes_is_told() {
    needs_hook!();
    Lab::run(|lab| {
        let _middlebox = Middlebox::start("box0");
        lab.apply(ALLOW);
        let port = 4711;
        let _server = Server::start(of(HOST, port));
        let call = || {
            let half = Half::connect(Kind::AfSmc, None, of(SERVER, port)).unwrap();
            let transport = half.judge().unwrap().transport;
            assert!(matches!(transport, Transport::Fallback(PEER_NO_SMC, _)), "{transport}");
            let mut stream = half.stream();
            stream.write_all(b"this is no handshake of SMC").unwrap();
            half
        };
        let first = call();
        let mut stream = first.stream();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let error = stream.read(&mut [0; 16]).expect_err("the server resets");
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
        assert_eq!((counter(lab, "echoes"), counter(lab, "reset_blanked")), (1, 1));
        let all = learned(lab);
        let [(key, entry)] = all[..] else { panic!("{all:?}") };
        assert_eq!((key, entry.resets), (Key::new(addr(SERVER), port), 1));
        let said = lab.home.run(["explain", &format!("{SERVER}:{port}")]).expect_code(1).stdout;
        let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
        for words in ["reset 1 connection", "genuine SMC server", "trust = true", "deny rule"] {
            assert!(said.contains(words), "no {words}: {said}");
        }
        let answer = lab.explain(&[&format!("{SERVER}:{port}")]);
        assert_eq!(answer["quarantine"][0]["resets"], 1, "{answer:#}");
        // It is kept.
        lab.home.run(["detach"]).ok();
        lab.apply(ALLOW);
        assert_eq!(learned(lab)[0].1.resets, 1);
        // The next one is plain TCP at both ends.
        let _second = call();
        assert_eq!(counter(lab, "reset_blanked"), 0, "since the detach");
    });
}

/// Of connections whose answer was blanked, those count that the peer resets before it has sent anything.
#[test]
fn only_resets_at_the_beginning_count() {
    needs_hook!();
    Lab::run(|lab| {
        let peer = EchoPeer::start("echo0");
        lab.apply(ALLOW);
        let mut resets = 0;
        for (_, ip) in ADDRESSES {
            for behaviour in Behaviour::ALL {
                peer.set(Style::All, behaviour);
                let half = Half::connect(kind(ip), None, of(ip, 443)).unwrap();
                let mut stream = half.stream();
                stream.write_all(b"hello").unwrap();
                if !matches!(behaviour, Behaviour::Silent | Behaviour::Banner) {
                    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                    let _ = stream.read(&mut [0; 64]);
                }
                drop(half);
                resets += u64::from(behaviour == Behaviour::Rst);
                assert_eq!(counter(lab, "reset_blanked"), resets, "{ip} {behaviour:?}");
                let quarantine = Quarantine::open(&lab.pins()).unwrap().unwrap();
                quarantine.flush(Store::Learned).unwrap();
            }
        }
        assert_eq!(counter(lab, "echoes"), 12);
        assert_eq!(resets, 2);
    });
}
