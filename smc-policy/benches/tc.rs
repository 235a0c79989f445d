//! What the tc programs cost a packet, by test runs beside an empty program in the same run. As root:
//! `cargo bench --bench tc`. The figure to reach: a packet that is no SYN, at most 5 ns above the empty program.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a benchmark")]

use std::{
    ffi::CString,
    net::{Ipv6Addr, TcpListener},
    os::fd::{AsFd, AsRawFd, OwnedFd},
};

use aya_obj::generated::{bpf_insn, bpf_map_type, bpf_prog_type};
use smc_policy::{
    kernel::{
        object::{Prepared, Sizes, TcProgram},
        sys::{self, MapSpec, ProgramSpec, SharedCells},
    },
    policy::{Moment, Settings, Slots, SourceFile, compile, load},
};

/// Repetitions of one test run.
const REPEAT: u32 = 200_000;
/// Runs of each program, in turns; the median counts.
const ROUNDS: usize = 15;

/// The SMC option as Linux sends it.
const SMC: [u8; 8] = [1, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9];
/// What Linux sends before it.
const USUAL: [u8; 20] = [2, 4, 5, 0xb4, 4, 2, 8, 10, 9, 8, 7, 6, 0, 0, 0, 0, 1, 3, 3, 8];

const DENIED_PORT: u16 = 47_811;
const ALLOWED_PORT: u16 = 47_812;
const POLICY: &str = r#"
version = 1
[[rule]]
name = "denied"
action = "deny"
ports = [47811]
"#;

fn instruction(code: u8, to: u8, from: u8, offset: i16, immediate: i32) -> bpf_insn {
    bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(to, from),
        off: offset,
        imm: immediate,
    }
}

fn program(name: &str, instructions: &[bpf_insn]) -> OwnedFd {
    let license = CString::new("GPL").unwrap();
    let spec = ProgramSpec {
        name,
        kind: bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS,
        instructions,
        license: &license,
        btf: None,
        struct_ops: None,
    };
    sys::prog_load(&spec).unwrap_or_else(|e| panic!("{name}: {}\n{}", e.error, e.log))
}

/// `return TC_ACT_UNSPEC`.
fn end() -> [bpf_insn; 2] {
    [instruction(0xb7, 0, 0, 0, -1), instruction(0x95, 0, 0, 0, 0)]
}

/// Puts the SMC option back where the last repetition blanked it, then goes on with `next`.
fn restoring(next: &OwnedFd, option_at: usize) -> (OwnedFd, OwnedFd) {
    let map = sys::map_create(&MapSpec {
        name: "next",
        kind: bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY as u32,
        key_size: 4,
        value_size: 4,
        max_entries: 1,
        flags: 0,
    })
    .unwrap();
    sys::map_update(map.as_fd(), 0, &next.as_raw_fd().to_ne_bytes()).unwrap();
    let option = u64::from_ne_bytes(SMC);
    let mut code = vec![
        instruction(0xbf, 6, 1, 0, 0),
        // r1 = the option; on the stack
        instruction(0x18, 1, 0, 0, option as u32 as i32),
        instruction(0, 0, 0, 0, (option >> 32) as i32),
        instruction(0x7b, 10, 1, -8, 0),
        // bpf_skb_store_bytes(skb, option_at, stack, 8, 0)
        instruction(0xbf, 1, 6, 0, 0),
        instruction(0xb7, 2, 0, 0, option_at as i32),
        instruction(0xbf, 3, 10, 0, 0),
        instruction(0x07, 3, 0, 0, -8),
        instruction(0xb7, 4, 0, 0, 8),
        instruction(0xb7, 5, 0, 0, 0),
        instruction(0x85, 0, 0, 0, 9),
        // bpf_tail_call(skb, map, 0)
        instruction(0xbf, 1, 6, 0, 0),
        instruction(0x18, 2, 1, 0, map.as_raw_fd()),
        instruction(0, 0, 0, 0, 0),
        instruction(0xb7, 3, 0, 0, 0),
        instruction(0x85, 0, 0, 0, 12),
    ];
    code.extend(end());
    (program("restoring", &code), map)
}

/// An Ethernet frame. The checksums are zero: nothing looks at them.
fn frame(
    v6: bool,
    tags: usize,
    protocol: u8,
    port: u16,
    flags: u8,
    options: &[u8],
    payload: usize,
) -> Vec<u8> {
    let mut rest = Vec::new();
    rest.extend(40_000u16.to_be_bytes());
    rest.extend(port.to_be_bytes());
    if protocol == 6 {
        rest.extend([
            0,
            0,
            0,
            1,
            0,
            0,
            0,
            0,
            ((5 + options.len() / 4) << 4) as u8,
            flags,
            0xfa,
            0xf0,
            0,
            0,
            0,
            0,
        ]);
        rest.extend(options);
    } else {
        rest.extend([0, 8 + payload as u8, 0, 0]);
    }
    rest.resize(rest.len() + payload, 0x55);
    let mut out = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    for _ in 0..tags {
        out.extend([0x81, 0, 0, 7]);
    }
    if v6 {
        out.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
        out.extend((rest.len() as u16).to_be_bytes());
        out.extend([protocol, 64]);
        out.extend([[0; 15].as_slice(), &[1]].concat());
        out.extend([[0; 15].as_slice(), &[1]].concat());
    } else {
        out.extend([8, 0, 0x45, 0]);
        out.extend((20 + rest.len() as u16).to_be_bytes());
        out.extend([0, 0, 0x40, 0, 64, protocol, 0, 0, 127, 0, 0, 1, 127, 0, 0, 1]);
    }
    out.extend(rest);
    out
}

/// The IPv6 frame as a fragment that is not the first.
fn fragment(mut frame: Vec<u8>) -> Vec<u8> {
    const NEXT_HEADER_AT: usize = 14 + 6;
    let header = [frame[NEXT_HEADER_AT], 0, 1, 1, 0, 0, 0, 9];
    frame[NEXT_HEADER_AT] = 44;
    frame[NEXT_HEADER_AT - 1] += header.len() as u8;
    frame.splice(14 + 40..14 + 40, header);
    frame
}

fn median(mut of: Vec<u32>) -> u32 {
    of.sort_unstable();
    of[of.len() / 2]
}

/// Median durations of one repetition, ns: the empty program's and the other's.
fn compare(empty: &OwnedFd, ours: &OwnedFd, packet: &[u8]) -> (u32, u32) {
    let run = |program: &OwnedFd| {
        sys::test_run(program.as_fd(), &mut packet.to_vec(), REPEAT).expect("a test run").nanoseconds
    };
    let (with_empty, with_ours) = (0..ROUNDS).map(|_| (run(empty), run(ours))).unzip();
    (median(with_empty), median(with_ours))
}

fn main() {
    let prepared = match Prepared::new(Sizes { cells: 512, slots: 64 }, None) {
        Ok(prepared) => prepared,
        Err(error) => return println!("{error}"),
    };
    let loaded = load(&[SourceFile::policy("bench.toml", POLICY)], Moment::default()).expect("a policy");
    let settings = Settings { forwarded: true, canary: true, ..Settings::default() };
    let tables = compile(&loaded.policy, &Slots::in_order(&loaded.policy), &settings).expect("tables");
    let map = |name| SharedCells::map(prepared.map(name).unwrap().as_fd()).expect("a mapping");
    assert!(map("smcpol_tab1").fill(&tables.cells));
    map("smcpol_gen").store(0, 1);
    let _listeners = [DENIED_PORT, ALLOWED_PORT]
        .map(|port| TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).expect("a listener"));

    let empty = program("empty", &end());
    let syn = |v6, tags, port, smc: &[u8]| frame(v6, tags, 6, port, 2, &[&USUAL, smc].concat(), 0);
    println!("ns a packet, median of {ROUNDS} runs of {REPEAT}\n");
    println!("{:<16}{:<34}{:>8}{:>8}{:>8}", "program", "packet", "empty", "ours", "above");
    for tc in TcProgram::ALL {
        let ours = prepared.load_tc(tc).expect("the program");
        let link = match tc {
            TcProgram::EgressEthernet | TcProgram::IngressEthernet | TcProgram::AnswersEthernet => 14,
            TcProgram::EgressIp | TcProgram::IngressIp | TcProgram::AnswersIp => 0,
        };
        let line = |what: &str, (empty, ours): (u32, u32)| {
            let above = i64::from(ours) - i64::from(empty);
            println!("{:<16}{what:<34}{empty:>8}{ours:>8}{above:>8}", tc.program());
        };
        // Ethernet frames lose their header for the other programs.
        let bytes = |frame: Vec<u8>| frame[14 - link..].to_vec();
        for (family, v6) in [("IPv4", false), ("IPv6", true)] {
            let mut direct = vec![
                ("UDP", frame(v6, 0, 17, 53, 0, &[], 32)),
                ("TCP data", frame(v6, 0, 6, 443, 0x18, &[1, 1, 8, 10, 0, 0, 0, 0, 0, 0, 0, 0], 100)),
                ("plain SYN", syn(v6, 0, ALLOWED_PORT, &[])),
                ("plain SYN-ACK", frame(v6, 0, 6, ALLOWED_PORT, 0x12, &USUAL, 0)),
                ("SMC SYN-ACK", frame(v6, 0, 6, ALLOWED_PORT, 0x12, &[&USUAL, &SMC[..]].concat(), 0)),
            ];
            if link != 0 {
                direct.insert(2, ("TCP data, one VLAN tag", frame(v6, 1, 6, 443, 0x18, &[], 100)));
            }
            if v6 {
                direct.insert(1, ("UDP, later fragment", fragment(frame(true, 0, 17, 53, 0, &[], 32))));
            }
            for (what, frame) in direct {
                let bytes = bytes(frame);
                line(&format!("{family} {what}"), compare(&empty, &ours, &bytes));
            }
            for (what, port) in [("SMC SYN, allowed", ALLOWED_PORT), ("SMC SYN, denied", DENIED_PORT)] {
                let frame = syn(v6, 0, port, &SMC);
                let bytes = bytes(frame);
                let option_at = bytes.len() - SMC.len();
                let (empty, _next) = restoring(&empty, option_at);
                let (ours, _next_too) = restoring(&ours, option_at);
                line(&format!("{family} {what}"), compare(&empty, &ours, &bytes));
            }
        }
    }
    println!("\nThe SMC SYNs' option is put back before each repetition, for both programs.");
}
