//! The tc programs take the SMC option out of the right SYNs, and change nothing else.
//!
//! Most of it by test runs: a packet goes in, what the program made of it comes out.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use smc_policy::kernel::barrier::wait_for_programs;
use smc_policy::kernel::object::{Prepared, Sizes, TcProgram};
use smc_policy::kernel::sys as kernel;
use smc_policy::policy::settings::Magic;
use smc_policy::policy::{Action, Policy, Settings, Slots, SourceFile, arbitrary, compile, decide, load};
use smc_policy_common::counters::InstanceCounters;
use smc_policy_common::query::{Addr, Direction, Query};
use smc_policy_tests::lab::listen;
use smc_policy_tests::packet::{self, Link, MAGIC, Packet, SMC, Syn, check, flags, parse};
use smc_policy_tests::{Kind, Lab, Rng, exchange, needs, needs_hook, netns, scaled, sys};

/// What the programs return: TC_ACT_UNSPEC.
const UNSPEC: u32 = u32::MAX;
const VENDOR_MAGIC: u32 = 0x0a0b_0c0d;

/// The programs with a policy of their own, attached to nothing.
struct Rig {
    prepared: Prepared,
    programs: [(TcProgram, OwnedFd); 6],
    generation: Cell<u64>,
}

/// The instance's counters by name.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counters {
    decisions: u64,
    observed_denies: u64,
    plain_retransmissions: u64,
    no_listener: u64,
    no_socket: u64,
    signed: u64,
}

impl Rig {
    fn new(policy: &str, settings: Settings) -> Self {
        let prepared = Prepared::new(Sizes { cells: 4096, slots: 16 }, None).expect("maps");
        let programs = TcProgram::ALL.map(|p| (p, prepared.load_tc(p).expect("the verifier accepts it")));
        let rig = Self { prepared, programs, generation: Cell::new(0) };
        rig.put(policy, settings);
        rig
    }

    fn put(&self, policy: &str, settings: Settings) {
        let policy = read(policy);
        let tables = compile(&policy, &Slots::in_order(&policy), &settings).expect("tables");
        let generation = self.generation.get() + 1;
        let name = if generation & 1 == 0 { "smcpol_tab0" } else { "smcpol_tab1" };
        let map = |name| kernel::SharedCells::map(self.prepared.map(name).unwrap()).unwrap();
        wait_for_programs().unwrap();
        assert!(map(name).fill(&tables.cells), "the table is large enough");
        map("smcpol_gen").store(0, generation);
        self.generation.set(generation);
    }

    fn program(&self, wanted: TcProgram) -> &OwnedFd {
        self.programs.iter().find(|(p, _)| *p == wanted).map(|(_, fd)| fd).unwrap()
    }

    /// What the program makes of a packet.
    fn run(&self, program: TcProgram, packet: &[u8]) -> io::Result<Vec<u8>> {
        let mut bytes = packet.to_vec();
        let run = kernel::test_run(self.program(program).as_fd(), &mut bytes, 1)?;
        assert_eq!(run.returned, UNSPEC, "the other programs of the chain must run");
        Ok(bytes)
    }

    /// Whether the program took the SMC options out of `packet`, which must have some; everything else must be as it was.
    #[track_caller]
    fn removes(&self, program: TcProgram, packet: &Packet) -> bool {
        let before = packet.bytes();
        let after = self.run(program, &before).expect("a test run");
        let syn = parse(&before, &packet.link, &[MAGIC, VENDOR_MAGIC]).expect("a SYN");
        assert!(!syn.smc.is_empty(), "no SMC option: {packet:x?}");
        let removed = before != after;
        if let Err(error) = check(&before, &after, Some(&syn), removed) {
            panic!("{error}\n{before:02x?}\n{after:02x?}");
        }
        removed
    }

    fn counters(&self) -> Counters {
        let bytes = kernel::map_lookup(self.prepared.map("smcpol_stat").unwrap(), 0).unwrap();
        let mut sums = [0; InstanceCounters::COUNT];
        for (at, word) in bytes.chunks_exact(8).enumerate() {
            sums[at % InstanceCounters::COUNT] += u64::from_ne_bytes(word.try_into().unwrap());
        }
        let InstanceCounters {
            decisions,
            undecided,
            observed_denies,
            plain_retransmissions,
            no_listener,
            no_socket,
            signed,
            unchanged,
            ..
        } = InstanceCounters::from_array(sums);
        assert_eq!((undecided, unchanged), (0, 0));
        Counters { decisions, observed_denies, plain_retransmissions, no_listener, no_socket, signed }
    }

    /// Hits and retransmissions of the rule number `rule`.
    fn rule(&self, rule: u32) -> (u64, u64) {
        let bytes = kernel::map_lookup(self.prepared.map("smcpol_hits").unwrap(), 2 + rule).unwrap();
        let words = bytes.chunks_exact(16).map(|pair| {
            let (hits, retransmissions) = pair.split_at(8);
            [hits, retransmissions].map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
        });
        words.fold((0, 0), |sum, [hits, again]| (sum.0 + hits, sum.1 + again))
    }
}

fn read(policy: &str) -> Policy {
    let file = SourceFile::policy(PathBuf::from("rewrite.toml"), format!("version = 1\n{policy}"));
    load(std::slice::from_ref(&file), arbitrary::NOW).unwrap_or_else(|errors| panic!("{errors:?}")).policy
}

fn forwarded() -> Settings {
    let mut settings = Settings { forwarded: true, ..Settings::default() };
    settings.magics[1] = Some(Magic { syn: VENDOR_MAGIC, syn_ack: 1 });
    settings
}

const DENY_ALL: &str = "[default]\noutbound = \"deny\"\ninbound = \"deny\"\n";
/// Half of the packets that [`Packet::random`] makes.
const DENY_SOME: &str = r#"
[[rule]]
name = "some"
action = "deny"
direction = "outbound"
peers = ["10.0.0.0/9", "fd00::/9"]
[[rule]]
name = "others"
action = "deny"
direction = "inbound"
peers = ["10.128.0.0/9", "fd80::/9"]
"#;

fn addr(ip: IpAddr) -> Addr {
    match ip {
        IpAddr::V4(v4) => Addr::v4(v4.to_bits()),
        IpAddr::V6(v6) => Addr::v6(v6.to_bits()),
    }
}

fn query(syn: &Syn, direction: Direction) -> Query {
    let (peer, local) = match direction {
        Direction::Outbound => (syn.destination, syn.source),
        Direction::Inbound => (syn.source, syn.destination),
    };
    Query { peer: addr(peer), local: addr(local), port: syn.destination_port, direction }
}

/// A random packet's bytes, one in three of them damaged.
fn random_bytes(rng: &mut Rng, link: &Link) -> Vec<u8> {
    let packet = Packet::random(rng, link.clone(), VENDOR_MAGIC);
    let mut bytes = packet.bytes();
    if rng.below(3) == 0 {
        // A test run wants an Ethernet header.
        packet::damage(&mut bytes, rng, 14);
    }
    bytes
}

fn random_link(rng: &mut Rng) -> Link {
    if rng.below(2) == 0 {
        return Link::Ip;
    }
    let tags = if rng.below(3) == 0 { rng.below(4) } else { 0 };
    let protocols = [0x8100, 0x88a8];
    Link::Ethernet((0..tags).map(|_| (protocols[rng.below(2) as usize], rng.number() as u16)).collect())
}

#[derive(Default, Debug)]
struct Tally {
    removed: usize,
    kept: usize,
    signed: usize,
    refused: usize,
}

/// Runs random packets through the programs of one way. `is_owned`: whether the namespace has a socket for it.
fn fuzz(
    rig: &Rig,
    rng: &mut Rng,
    direction: Direction,
    programs: [TcProgram; 2],
    is_owned: impl Fn(&Syn) -> bool,
) {
    let policy = read(DENY_SOME);
    let (mut tally, count) = (Tally::default(), scaled(10_000));
    for number in 0..count {
        let link = random_link(rng);
        let program = if link == Link::Ip { programs[1] } else { programs[0] };
        let before = random_bytes(rng, &link);
        let after = match rig.run(program, &before) {
            Ok(after) => after,
            // Some kernels refuse to run on what is too short for the header it announces.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) && before.len() < 14 + 40 => {
                tally.refused += 1;
                continue;
            }
            Err(error) => panic!("packet {number}: {error}\n{before:02x?}"),
        };
        let syn = parse(&before, &link, &[MAGIC, VENDOR_MAGIC]);
        let remove = syn.as_ref().is_some_and(|syn| {
            !syn.signed && is_owned(syn) && decide(&policy, &query(syn, direction)).action == Action::Deny
        });
        if let Err(error) = check(&before, &after, syn.as_ref(), remove) {
            panic!("packet {number} of {program:?}: {error}\n{syn:?}\n{before:02x?}\n{after:02x?}");
        }
        match syn {
            Some(syn) if !syn.smc.is_empty() => {
                tally.signed += usize::from(syn.signed);
                tally.removed += usize::from(remove);
                tally.kept += usize::from(!remove);
            }
            _ => {}
        }
    }
    println!("{count} packets {direction:?}: {tally:?}");
    assert!(tally.removed * 10 > count && tally.kept * 20 > count, "a lopsided sample: {tally:?}");
    assert!(tally.refused * 20 < count, "{tally:?}");
}

#[test]
fn random_packets_at_egress() {
    needs!(Root);
    let mut rng = Rng::from_environment("rewrite");
    let rig = Rig::new(DENY_SOME, forwarded());
    let programs = [TcProgram::EgressEthernet, TcProgram::EgressIp];
    fuzz(&rig, &mut rng, Direction::Outbound, programs, |_| true);
}

/// At ingress with listeners on any address.
#[test]
fn random_packets_at_ingress() {
    needs!(Root, Netns);
    let mut rng = Rng::from_environment("rewrite");
    netns::in_new_namespace(&[], || {
        // Ports 1 to 6 for IPv4 and IPv6, 7 for IPv4 only, none on 8: its SYNs pass, whatever the policy says.
        let both: Vec<_> =
            (1..=6).map(|port| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap()).collect();
        let _v4 = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 7)).unwrap();
        let is_owned = |syn: &Syn| match syn.destination_port {
            1..=6 => !both.is_empty(),
            7 => syn.destination.is_ipv4(),
            _ => false,
        };
        let rig = Rig::new(DENY_SOME, forwarded());
        let programs = [TcProgram::IngressEthernet, TcProgram::IngressIp];
        fuzz(&rig, &mut rng, Direction::Inbound, programs, is_owned);
    });
}

/// The headers may be anywhere outside the packet's linear part.
#[test]
fn packets_that_are_not_linear() {
    needs!(Root, NonlinearRuns);
    let mut rng = Rng::from_environment("rewrite");
    let rig = Rig::new(DENY_SOME, forwarded());
    let policy = read(DENY_SOME);
    let (mut removed, count) = (0, scaled(2_000));
    for _ in 0..count {
        let link = random_link(&mut rng);
        let program = if link == Link::Ip { TcProgram::EgressIp } else { TcProgram::EgressEthernet };
        let before = Packet::random(&mut rng, link.clone(), VENDOR_MAGIC).bytes();
        // The kernel wants the Ethernet header and what it announces to be linear.
        let linear = 54 + rng.below(60) as u32;
        if before.len() <= linear as usize {
            continue;
        }
        let after = sys::test_run_nonlinear(rig.program(program), &before, linear).expect("a test run");
        let syn = parse(&before, &link, &[MAGIC, VENDOR_MAGIC]);
        let remove = syn.as_ref().is_some_and(|syn| {
            !syn.signed && decide(&policy, &query(syn, Direction::Outbound)).action == Action::Deny
        });
        removed += usize::from(remove && syn.as_ref().is_some_and(|syn| !syn.smc.is_empty()));
        if let Err(error) = check(&before, &after, syn.as_ref(), remove) {
            panic!("{linear} linear bytes, {program:?}: {error}\n{before:02x?}\n{after:02x?}");
        }
    }
    println!("{count} packets, {removed} of them changed");
    assert!(removed * 50 > count);
}

/// A SYN that this host forwards, with these options.
fn passing(options: &[u8]) -> Packet {
    Packet::syn("10.1.0.1", "10.2.0.2", 443, options)
}

/// Every way in which the option may stand in a SYN, and what must not be taken for it.
#[test]
fn where_the_option_stands() {
    needs!(Root);
    let rig = Rig::new(DENY_ALL, forwarded());
    let run = |options: &[u8]| {
        let before = passing(options).bytes();
        let after = rig.run(TcProgram::EgressEthernet, &before).unwrap();
        let syn = parse(&before, &Link::Ethernet(vec![]), &[MAGIC, VENDOR_MAGIC]);
        let changed = before != after;
        check(&before, &after, syn.as_ref(), changed)
            .unwrap_or_else(|error| panic!("{error}: {options:02x?}"));
        after[54..54 + options.len()].to_vec()
    };
    const S: [u8; 6] = [254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
    const N: [u8; 6] = [1; 6];
    // Linux: with and without timestamps.
    let usual = [2, 4, 5, 0xb4, 4, 2, 8, 10, 9, 8, 7, 6, 0, 0, 0, 0, 1, 3, 3, 8, 1, 1];
    assert_eq!(run(&[&usual[..], &S].concat()), [&usual[..], &N].concat());
    assert_eq!(run(&SMC), [1; 8]);
    // Any alignment, first and last, more than one.
    for before in 0..4 {
        let nops = vec![1; before];
        let timestamp = [8, 10, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9, 0, 0];
        assert_eq!(
            run(&[&nops[..], &S, &[3, 3, 8], &timestamp, &S].concat()),
            [&nops[..], &N, &[3, 3, 8], &timestamp, &N].concat()
        );
    }
    assert_eq!(run(&[S, S, S, S, S, S].concat()), [1; 36]);
    assert_eq!(run(&[[1; 34].as_slice(), &S].concat()), [1; 40]);
    // Longer ones are SMC options to the kernel too, if the length is even.
    assert_eq!(run(&[254, 8, 0xe2, 0xd4, 0xc3, 0xd9, 7, 7]), [1; 8]);
    for same in [
        [254, 7, 0xe2, 0xd4, 0xc3, 0xd9, 7, 1],
        [254, 6, 0xe2, 0xd4, 0xc3, 0xda, 1, 1],
        [253, 6, 0xe2, 0xd4, 0xc3, 0xd9, 1, 1],
        // Behind the end of the options, or in an option that does not fit.
        [0, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9],
        [9, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9],
        [2, 9, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9],
        // Another user of kind 254: Fast Open.
        [254, 4, 0xf9, 0x89, 1, 1, 1, 1],
    ] {
        assert_eq!(run(&same), same);
    }
    // The kernel takes what stands before a malformed option, so it must go.
    assert_eq!(run(&[&S[..], &[3, 1]].concat()), [&N[..], &[3, 1]].concat());
    // A vendor's magic from the settings.
    assert_eq!(run(&[254, 6, 0x0a, 0x0b, 0x0c, 0x0d, 1, 1]), [1; 8]);
    assert_eq!(rig.counters().signed, 0);
    // TCP-AO signs the options.
    let signed = [&S[..], &[29, 6, 1, 2, 3, 4]].concat();
    assert_eq!(run(&signed), signed);
    assert_eq!(rig.counters().signed, 1);
}

/// Who takes the SMC option out of a SYN takes the guard's canary too, and nothing if there is no SMC option.
#[test]
fn the_canary_goes_with_the_option() {
    needs!(Root);
    let rig = Rig::new(DENY_ALL, forwarded());
    let canary = [254, 8, b'S', b'P', 1, 2, 3, 4];
    let short = [254, 4, b'S', b'P'];
    let other = [254, 8, b'S', b'Q', 1, 2, 3, 4];
    for (options, expected) in [
        ([&SMC[..], &canary].concat(), vec![1; 16]),
        ([&short[..], &SMC].concat(), vec![1; 12]),
        ([&[1][..], &canary, &SMC, &short, &[3, 3, 8]].concat(), [&[1; 21][..], &[3, 3, 8]].concat()),
        ([&other[..], &SMC].concat(), [&other[..], &[1; 8]].concat()),
        (canary.to_vec(), canary.to_vec()),
    ] {
        let packet = passing(&options);
        let after = rig.run(TcProgram::EgressEthernet, &packet.bytes()).unwrap();
        assert_eq!(after, Packet { options: expected, ..packet }.bytes(), "{options:02x?}");
    }
}

#[test]
fn what_is_no_syn_passes() {
    needs!(Root);
    let rig = Rig::new(DENY_ALL, forwarded());
    assert!(rig.removes(TcProgram::EgressEthernet, &passing(&SMC)));
    for other in
        [flags::SYN | flags::ACK, flags::ACK, flags::SYN | flags::RST, flags::SYN | flags::FIN, flags::PSH, 0]
    {
        let bytes = Packet { flags: other, ..passing(&SMC) }.bytes();
        assert_eq!(rig.run(TcProgram::EgressEthernet, &bytes).unwrap(), bytes, "flags {other:#04x}");
    }
    // ECN's flags belong to a SYN.
    assert!(rig.removes(TcProgram::EgressEthernet, &Packet { flags: flags::SYN | 0xc0, ..passing(&SMC) }));
}

/// The settings come and go with the policy, by the same store.
#[test]
fn settings_are_in_force_with_the_policy() {
    needs!(Root);
    let out = TcProgram::EgressEthernet;
    let vendor = passing(&[254, 6, 0x0a, 0x0b, 0x0c, 0x0d, 1, 1]);
    let rig = Rig::new(DENY_ALL, Settings::default());
    assert!(!rig.removes(out, &passing(&SMC)), "forwarded SYNs pass by default");
    assert_eq!(rig.counters(), Counters { no_socket: 1, ..Counters::default() });
    rig.put(DENY_ALL, forwarded());
    assert!(rig.removes(out, &passing(&SMC)));
    assert!(rig.removes(out, &vendor));
    rig.put(DENY_ALL, Settings { magics: [None; 3], ..forwarded() });
    assert!(rig.removes(out, &passing(&SMC)));
    assert!(!rig.removes(out, &vendor), "without its magic it is no SMC option");
    rig.put(DENY_ALL, Settings { observe: true, ..forwarded() });
    assert!(!rig.removes(out, &passing(&SMC)));
    let counters = rig.counters();
    assert_eq!((counters.decisions, counters.observed_denies), (4, 1));
    rig.put("", forwarded());
    assert!(!rig.removes(out, &passing(&SMC)), "allowed");
    rig.put(DENY_ALL, forwarded());
    let plain = passing(&[2, 4, 5, 0xb4]).bytes();
    assert_eq!(rig.run(out, &plain).unwrap(), plain);
    assert_eq!(rig.counters().decisions, 5, "a SYN without the option is not judged");
}

/// A SYN that goes through two devices, a VLAN and the one below it, is one connection.
#[test]
fn a_syn_at_two_devices_is_counted_once() {
    needs!(Root);
    let rig = Rig::new("[[rule]]\nname = \"all\"\naction = \"allow\"\n", forwarded());
    let twice = |second: Packet| {
        let packet = passing(&SMC);
        let second = Packet { sequence: packet.sequence, ..second };
        let before = rig.rule(0);
        assert!(!rig.removes(TcProgram::EgressEthernet, &packet));
        assert!(!rig.removes(TcProgram::EgressEthernet, &second));
        let now = rig.rule(0);
        assert_eq!(now.1, before.1, "not sent again");
        now.0 - before.0
    };
    // The counter is the CPU's: another attempt when this thread was moved between the two.
    assert!((0..50).any(|_| twice(passing(&SMC)) == 1));
    let other_port = Packet { source_port: 999, ..passing(&SMC) };
    assert_eq!(twice(other_port), 2);
}

/// At ingress the policy is about this namespace's sockets, in whatever state they are.
#[test]
fn sockets_that_a_syn_is_for() {
    needs!(Root, Netns);
    netns::in_new_namespace(&[], || {
        let rig = Rig::new(
            "[[rule]]\nname = \"in\"\naction = \"deny\"\ndirection = \"inbound\"\n\
             [[rule]]\nname = \"out\"\naction = \"deny\"\ndirection = \"outbound\"\n",
            Settings::default(),
        );
        let removes = |from: SocketAddr, to: SocketAddr| {
            let (source, destination) = (from.ip().to_string(), to.ip().to_string());
            let packet =
                Packet { source_port: from.port(), ..Packet::syn(&source, &destination, to.port(), &SMC) };
            rig.removes(TcProgram::IngressEthernet, &packet)
        };
        for address in ["127.0.0.1", "::1"] {
            let before = [rig.rule(0), rig.rule(1)];
            let counted = |rule: usize| {
                let now = rig.rule(rule as u32);
                (now.0 - before[rule].0, now.1 - before[rule].1)
            };
            let listener = TcpListener::bind((address, 0)).expect("a listener");
            let here = listener.local_addr().unwrap();
            let somewhere = SocketAddr::new(here.ip(), 999);
            assert!(removes(somewhere, here));
            assert_eq!(counted(0), (1, 0), "the first SYN to a listener");
            // Established: such a SYN gets a challenge ACK, nothing is negotiated.
            let client = TcpStream::connect(here).expect("a connection");
            let there = client.local_addr().unwrap();
            let (server, _) = listener.accept().unwrap();
            assert!(!removes(there, here));
            assert_eq!(rig.counters().no_listener, if here.is_ipv4() { 1 } else { 3 });
            // TIME_WAIT: a new connection of the same ports may begin.
            drop(server);
            io::Read::read(&mut &client, &mut [0]).expect("the end");
            drop(client);
            assert!(removes(there, here));
            assert_eq!(counted(0), (2, 0));
            // Answered before: a retransmission.
            sys::set_defer_accept(&listener, 10).unwrap();
            let client = TcpStream::connect(here).expect("a connection");
            assert!(removes(client.local_addr().unwrap(), here));
            assert_eq!(counted(0), (2, 1));
            // No listener.
            drop((listener, client));
            assert!(!removes(somewhere, here));
            assert_eq!(counted(0), (2, 1));
            // Both ends connect at once.
            let silent = Silent::new(address);
            let client = silent.begin_to_connect();
            assert!(removes(silent.address(), client.local_addr().unwrap()));
            assert_eq!((counted(0), counted(1)), ((2, 1), (0, 1)), "ours was counted when it was sent");
        }
    });
}

/// A listener that answers no SYN: one connection fills its queue.
struct Silent {
    listener: TcpListener,
    _filling: TcpStream,
}

impl Silent {
    fn new(address: &str) -> Self {
        let listener = TcpListener::bind((address, 0)).expect("a listener");
        sys::listen(&listener, 0).expect("a short queue");
        let filling = TcpStream::connect(listener.local_addr().unwrap()).expect("a connection");
        Self { listener, _filling: filling }
    }

    fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    /// A socket in SYN_SENT.
    fn begin_to_connect(&self) -> TcpStream {
        let family = if self.address().is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let socket = TcpStream::from(sys::stream_socket(family, 0).unwrap());
        socket.set_nonblocking(true).unwrap();
        let error = sys::connect(&socket, self.address()).expect_err("it takes a while");
        assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS));
        socket
    }

    /// Makes room in the queue.
    fn answer(&self) {
        self.listener.accept().expect("the filling connection");
    }
}

/// The loopback interface of every namespace.
const LO: u32 = 1;

/// SYNs of real sockets at the loopback interface: judged by the socket, option and all.
#[test]
fn real_sockets() {
    needs!(Root, Netns, Tcx, Smc, SmcDiag, IpprotoSmc);
    Lab::run(|_| {
        let rig = Rig::new(
            r#"
            [[rule]]
            name = "out"
            action = "deny"
            direction = "outbound"
            peers = ["127.0.0.2", "fd00:5::2"]
            [[rule]]
            name = "in"
            action = "deny"
            direction = "inbound"
            local = ["127.0.0.4", "fd00:5::4"]
            [[rule]]
            name = "rest"
            action = "allow"
            "#,
            Settings::default(),
        );
        let _out =
            sys::attach_tcx(rig.program(TcProgram::EgressEthernet), LO, sys::Way::Out).expect("attached");
        let _in =
            sys::attach_tcx(rig.program(TcProgram::IngressEthernet), LO, sys::Way::In).expect("attached");
        let mut rest = 0;
        for (kinds, addresses) in [
            (&Kind::SMC_V4[..], ["127.0.0.2", "127.0.0.4", "127.0.0.3"]),
            (&Kind::SMC_V6[..], ["fd00:5::2", "fd00:5::4", "fd00:5::3"]),
        ] {
            for kind in kinds {
                let open = |ip: &str| {
                    let outcome = exchange(*kind, None, &listen(*kind, ip));
                    outcome.unwrap_or_else(|error| panic!("{kind:?} to {ip}: {error}"))
                };
                let before = [0, 1].map(|rule| rig.rule(rule).0);
                let [out, inbound, allowed] = addresses.map(open);
                assert!(out.is_denied(), "{kind:?}: {out}");
                assert!(inbound.is_denied(), "{kind:?}: {inbound}");
                assert!(!allowed.is_denied(), "{kind:?}: {allowed}");
                assert_eq!([0, 1].map(|rule| rig.rule(rule).0), before.map(|hits| hits + 1), "{kind:?}");
                // One decision of the SYN that is denied at ingress, two of the allowed one.
                rest += 3;
                assert_eq!(rig.rule(2), (rest, 0), "{kind:?}");
            }
        }
        let counters = rig.counters();
        assert_eq!((counters.no_listener, counters.no_socket, counters.plain_retransmissions), (0, 0, 0));
        let denied = TcpStream::connect("127.0.0.2:1");
        assert!(denied.is_err(), "nobody listens");
        assert_eq!(rig.counters(), counters, "plain TCP is not judged");
    });
}

/// Connects an SMC socket to somebody who is silent for one and a half seconds: SYNs at 0, 1 and 3 seconds.
fn connect_in_the_end(kind: Kind, address: &str) {
    let silent = Silent::new(address);
    let socket = kind.open().expect("an SMC socket");
    thread::scope(|scope| {
        let connect = scope.spawn(|| sys::connect(&socket, silent.address()));
        thread::sleep(Duration::from_millis(1500));
        silent.answer();
        connect.join().unwrap().expect("connects when answered");
    });
}

/// Rule 0 counts the SYNs with the option that arrive.
const ARRIVING: &str = "[[rule]]\nname = \"in\"\naction = \"allow\"\ndirection = \"inbound\"\n";

#[test]
fn a_syn_sent_again_goes_without_the_option() {
    needs!(Root, Netns, Tcx, Smc, SmcDiag);
    Lab::run(|_| {
        let settings = Settings::default();
        let rig = Rig::new(ARRIVING, settings);
        let _out =
            sys::attach_tcx(rig.program(TcProgram::EgressEthernet), LO, sys::Way::Out).expect("attached");
        let _in =
            sys::attach_tcx(rig.program(TcProgram::IngressEthernet), LO, sys::Way::In).expect("attached");
        connect_in_the_end(Kind::AfSmc, "127.0.0.1");
        assert_eq!(rig.rule(0), (1, 0), "only the first SYN arrives with the option");
        let relieved = rig.counters().plain_retransmissions;
        assert!(relieved >= 1, "{relieved}");
        assert_eq!(rig.counters().decisions, 2, "one connection, seen at both ends");
        // Switched off, or only observed, every SYN keeps it.
        for keep in
            [Settings { plain_retransmissions: false, ..settings }, Settings { observe: true, ..settings }]
        {
            rig.put(ARRIVING, keep);
            let before = rig.rule(0).0;
            connect_in_the_end(Kind::AfSmc, "127.0.0.1");
            assert!(rig.rule(0).0 - before >= 2, "{keep:?}");
            assert_eq!(rig.counters().plain_retransmissions, relieved, "{keep:?}");
        }
    });
}

/// The same with smc_hs_ctrl; the tc program only counts what arrives.
#[test]
fn a_syn_sent_again_goes_without_the_option_by_hs_ctrl() {
    needs_hook!();
    Lab::run(|lab| {
        let rig = Rig::new(ARRIVING, Settings::default());
        let _in =
            sys::attach_tcx(rig.program(TcProgram::IngressEthernet), LO, sys::Way::In).expect("attached");
        connect_in_the_end(Kind::AfSmc, "127.0.0.1");
        let without_a_policy = rig.rule(0).0;
        assert!(without_a_policy >= 2, "every SYN arrives with the option: {without_a_policy}");
        lab.apply("version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n");
        // With smc_hs_ctrl no program of that name stays at a device.
        let _in =
            sys::attach_tcx(rig.program(TcProgram::IngressEthernet), LO, sys::Way::In).expect("attached");
        connect_in_the_end(Kind::AfSmc, "127.0.0.1");
        assert_eq!(rig.rule(0).0 - without_a_policy, 1, "only the first SYN arrives with the option");
        assert_eq!(lab.hits("all"), 1, "one connection");
    });
}
