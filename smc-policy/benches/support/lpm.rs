//! The peer of the decision benchmark: a longest-prefix-match trie of the kernel's, asked by a program that reads and
//! answers the same packets as `smcpol_query`. And the same program with other work, to tell what is whose.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use aya_obj::generated::{bpf_insn, bpf_map_type, bpf_prog_type};
use smc_policy::kernel::{
    query::QueryProgram,
    sys::{self, MapSpec, ProgramSpec},
};
use smc_policy_common::{
    counters::RuleCounters,
    query::{PACKET_HEADER, PACKET_QUERIES, WireAnswer, WireQuery},
};

use super::networks::{Family, Network};

const BPF_F_NO_PREALLOC: u32 = 1;
/// Elements of one system call.
const BATCH: usize = 4096;

/// A trie that says for each network which answer is given there.
pub fn trie(family: Family, networks: &[(Network, WireAnswer)]) -> io::Result<OwnedFd> {
    let key_size = 4 + family.width() / 8;
    let map = sys::map_create(&MapSpec {
        name: "smcpol_bench",
        kind: bpf_map_type::BPF_MAP_TYPE_LPM_TRIE as u32,
        key_size,
        value_size: 8,
        max_entries: networks.len() as u32,
        flags: BPF_F_NO_PREALLOC,
    })?;
    for batch in networks.chunks(BATCH) {
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (network, answer) in batch {
            keys.extend(network.bits.to_ne_bytes());
            match family {
                Family::V4 => keys.extend((network.first as u32).to_be_bytes()),
                Family::V6 => keys.extend(network.first.to_be_bytes()),
            }
            values.extend(answer.0.to_ne_bytes());
        }
        sys::map_update_batch(map.as_fd(), &keys, &values)?;
    }
    Ok(map)
}

/// What a program does for each query of a packet besides reading it and storing an answer.
#[derive(Clone, Copy)]
pub enum Work<'a> {
    /// Nothing: what all but the work costs.
    Nothing,
    /// Looks the peer up in the trie; its answer is the network's.
    LookUp(Family, BorrowedFd<'a>),
    /// Counts, as a decision of the real programs does: in a rule's element of the first array and in the only element of
    /// the second, both per CPU, the first of [`SLOTS`].
    Count(BorrowedFd<'a>, BorrowedFd<'a>),
}

/// Elements of an array for [`Work::Count`]; a power of two.
pub const SLOTS: u32 = 256;

/// A per-CPU array like the real one of counters.
pub fn counters(slots: u32) -> io::Result<OwnedFd> {
    sys::map_create(&MapSpec {
        name: "smcpol_bench",
        kind: bpf_map_type::BPF_MAP_TYPE_PERCPU_ARRAY as u32,
        key_size: 4,
        value_size: size_of::<RuleCounters>() as u32,
        max_entries: slots,
        flags: 0,
    })
}

/// A program that does this `work` for each query and answers `other` where the work gives no answer.
pub fn program(work: Work<'_>, other: WireAnswer) -> Result<QueryProgram, String> {
    let instructions = assemble(work, other);
    let license = CString::new("GPL").map_err(|e| e.to_string())?;
    sys::prog_load(&ProgramSpec {
        name: "smcpol_bench",
        kind: bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS,
        instructions: &instructions,
        license: &license,
        btf: None,
        struct_ops: None,
    })
    .map(QueryProgram)
    .map_err(|e| format!("the kernel refused the benchmark's program: {}\n{}", e.error, e.log))
}

/// One instruction (include/uapi/linux/bpf.h).
fn instruction(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> bpf_insn {
    bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(destination, source),
        off: offset,
        imm: immediate,
    }
}

const ADD_IMMEDIATE: u8 = 0x07;
const AND_IMMEDIATE: u8 = 0x57;
const MOVE_IMMEDIATE: u8 = 0xb7;
const MOVE: u8 = 0xbf;
const TO_BIG_ENDIAN: u8 = 0xdc;
const LOAD_32: u8 = 0x61;
const LOAD_64: u8 = 0x79;
const STORE_32: u8 = 0x63;
const STORE_64: u8 = 0x7b;
const STORE_IMMEDIATE_32: u8 = 0x62;
const LOAD_IMMEDIATE_64: u8 = 0x18;
const SHIFT_RIGHT_IMMEDIATE: u8 = 0x77;
const JUMP: u8 = 0x05;
const JUMP_EQUAL: u8 = 0x15;
const JUMP_NOT_EQUAL: u8 = 0x55;
const JUMP_GREATER: u8 = 0x2d;
const JUMP_GREATER_IMMEDIATE: u8 = 0x25;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// The immediate of [`LOAD_IMMEDIATE_64`] is a map's file descriptor.
const PSEUDO_MAP_FD: u8 = 1;

const HELPER_MAP_LOOKUP: i32 = 1;
const HELPER_SKB_STORE_BYTES: i32 = 9;
const HELPER_SKB_LOAD_BYTES: i32 = 26;

/// Registers that survive calls, and the frame.
const SKB: u8 = 6;
const OFFSET: u8 = 7;
const LENGTH: u8 = 8;
const FRAME: u8 = 10;

/// Places in the frame.
const QUERY_AT: i16 = -40;
const KEY_AT: i16 = -64;
const ANSWER_AT: i16 = -72;

fn wide(destination: u8, source: u8, value: u64) -> [bpf_insn; 2] {
    [
        instruction(LOAD_IMMEDIATE_64, destination, source, 0, value as u32 as i32),
        instruction(0, 0, 0, 0, (value >> 32) as u32 as i32),
    ]
}

fn frame_pointer(register: u8, at: i16) -> [bpf_insn; 2] {
    [instruction(MOVE, register, FRAME, 0, 0), instruction(ADD_IMMEDIATE, register, 0, 0, i32::from(at))]
}

/// Calls the look-up of the map under the key in the frame; register 0 is the value's address or 0.
fn map_value(map: BorrowedFd<'_>) -> Vec<bpf_insn> {
    let mut code = wide(1, PSEUDO_MAP_FD, map.as_raw_fd() as u32 as u64).to_vec();
    code.extend(frame_pointer(2, KEY_AT));
    code.push(instruction(CALL, 0, 0, 0, HELPER_MAP_LOOKUP));
    code
}

fn count(rules: BorrowedFd<'_>, instance: BorrowedFd<'_>) -> Vec<bpf_insn> {
    let mut code = vec![
        instruction(LOAD_64, 1, FRAME, QUERY_AT + 8, 0),
        instruction(AND_IMMEDIATE, 1, 0, 0, SLOTS as i32 - 1),
    ];
    for map in [rules, instance] {
        code.push(instruction(STORE_32, FRAME, 1, KEY_AT, 0));
        code.extend(map_value(map));
        code.push(instruction(JUMP_EQUAL, 0, 0, 3, 0));
        code.push(instruction(LOAD_64, 1, 0, 0, 0));
        code.push(instruction(ADD_IMMEDIATE, 1, 0, 0, 1));
        code.push(instruction(STORE_64, 0, 1, 0, 0));
        code.push(instruction(MOVE_IMMEDIATE, 1, 0, 0, 0));
    }
    code
}

fn look_up(family: Family, trie: BorrowedFd<'_>) -> Vec<bpf_insn> {
    let mut code = vec![instruction(STORE_IMMEDIATE_32, FRAME, 0, KEY_AT, family.width() as i32)];
    // The query holds the halves of the peer's address as numbers; the trie wants bytes as on the wire.
    match family {
        Family::V4 => {
            let low_word = if cfg!(target_endian = "little") { 8 } else { 12 };
            code.push(instruction(LOAD_32, 1, FRAME, QUERY_AT + low_word, 0));
            code.push(instruction(TO_BIG_ENDIAN, 1, 0, 0, 32));
            code.push(instruction(STORE_32, FRAME, 1, KEY_AT + 4, 0));
        }
        Family::V6 => {
            for half in [0, 8] {
                code.push(instruction(LOAD_64, 1, FRAME, QUERY_AT + half, 0));
                code.push(instruction(TO_BIG_ENDIAN, 1, 0, 0, 64));
                // The key's bytes begin after a word: two stores, the frame is read aligned only.
                let (first, second) = if cfg!(target_endian = "little") { (4, 8) } else { (8, 4) };
                code.push(instruction(STORE_32, FRAME, 1, KEY_AT + half + first, 0));
                code.push(instruction(SHIFT_RIGHT_IMMEDIATE, 1, 0, 0, 32));
                code.push(instruction(STORE_32, FRAME, 1, KEY_AT + half + second, 0));
            }
        }
    }
    code.extend(map_value(trie));
    // No network: leave the answer that is there already.
    code.push(instruction(JUMP_EQUAL, 0, 0, 2, 0));
    code.push(instruction(LOAD_64, 1, 0, 0, 0));
    code.push(instruction(STORE_64, FRAME, 1, ANSWER_AT, 0));
    code
}

fn assemble(work: Work<'_>, other: WireAnswer) -> Vec<bpf_insn> {
    let query = size_of::<WireQuery>() as i32;
    let meta = std::mem::offset_of!(WireQuery, meta) as i32;
    let last = PACKET_HEADER as i32 + (PACKET_QUERIES as i32 - 1) * query;
    let mut code = vec![
        instruction(MOVE, SKB, 1, 0, 0),
        instruction(LOAD_32, LENGTH, SKB, 0, 0),
        instruction(MOVE_IMMEDIATE, OFFSET, 0, 0, PACKET_HEADER as i32),
    ];
    let top = code.len();
    // Is there another query in the packet?
    code.push(instruction(MOVE, 1, OFFSET, 0, 0));
    code.push(instruction(ADD_IMMEDIATE, 1, 0, 0, query));
    let mut leave = vec![code.len()];
    code.push(instruction(JUMP_GREATER, 1, LENGTH, 0, 0));
    // For the verifier: no more than fit a packet.
    leave.push(code.len());
    code.push(instruction(JUMP_GREATER_IMMEDIATE, OFFSET, 0, 0, last));
    code.push(instruction(MOVE, 1, SKB, 0, 0));
    code.push(instruction(MOVE, 2, OFFSET, 0, 0));
    code.extend(frame_pointer(3, QUERY_AT));
    code.push(instruction(MOVE_IMMEDIATE, 4, 0, 0, query));
    code.push(instruction(CALL, 0, 0, 0, HELPER_SKB_LOAD_BYTES));
    leave.push(code.len());
    code.push(instruction(JUMP_NOT_EQUAL, 0, 0, 0, 0));
    code.extend(wide(1, 0, other.0));
    code.push(instruction(STORE_64, FRAME, 1, ANSWER_AT, 0));
    match work {
        Work::Nothing => {}
        Work::LookUp(family, trie) => code.extend(look_up(family, trie)),
        Work::Count(rules, instance) => code.extend(count(rules, instance)),
    }
    code.push(instruction(MOVE, 1, SKB, 0, 0));
    code.push(instruction(MOVE, 2, OFFSET, 0, 0));
    code.push(instruction(ADD_IMMEDIATE, 2, 0, 0, meta));
    code.extend(frame_pointer(3, ANSWER_AT));
    code.push(instruction(MOVE_IMMEDIATE, 4, 0, 0, 8));
    code.push(instruction(MOVE_IMMEDIATE, 5, 0, 0, 0));
    code.push(instruction(CALL, 0, 0, 0, HELPER_SKB_STORE_BYTES));
    leave.push(code.len());
    code.push(instruction(JUMP_NOT_EQUAL, 0, 0, 0, 0));
    code.push(instruction(ADD_IMMEDIATE, OFFSET, 0, 0, query));
    let back = top as i16 - code.len() as i16 - 1;
    code.push(instruction(JUMP, 0, 0, back, 0));
    for at in leave {
        code[at].off = (code.len() - at - 1) as i16;
    }
    code.push(instruction(MOVE_IMMEDIATE, 0, 0, 0, 0));
    code.push(instruction(EXIT, 0, 0, 0, 0));
    code
}
