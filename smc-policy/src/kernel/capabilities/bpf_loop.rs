//! A program that does nothing but call bpf_loop: a verifier that takes it has the helper. (What a verifier says of one that
//! it does not take is worded differently in every other version.)

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
};

use aya_obj::generated::{bpf_insn, bpf_prog_type};

use super::probes::{end, instruction};
use crate::kernel::sys::{self, LoadError, ProgramSpec};

/// BPF_FUNC_loop (include/uapi/linux/bpf.h).
const BPF_FUNC_LOOP: i32 = 181;
/// Where the function that it calls begins in [`program`].
const CALLBACK: u32 = 8;

/// Loads it for a moment.
pub(super) fn load() -> Result<(), LoadError> {
    let types = load_types().map_err(|error| LoadError { error, log: String::new() })?;
    // struct bpf_func_info: instruction, type.
    let records: Vec<u8> = [0, MAIN, CALLBACK, CALLED].into_iter().flat_map(u32::to_ne_bytes).collect();
    let license = CString::from(c"GPL");
    let spec = ProgramSpec {
        name: "smcpol_probe",
        kind: bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS,
        instructions: &program(),
        license: &license,
        btf: Some((types.as_fd(), &records, 8)),
        struct_ops: None,
    };
    sys::prog_load(&spec).map(drop)
}

/// `bpf_loop(1, called, NULL, 0); return 0;`
fn program() -> [bpf_insn; 10] {
    const MOVE: u8 = 0xb7;
    const LOAD_64_BITS: u8 = 0x18;
    const CALL: u8 = 0x85;
    const BPF_PSEUDO_FUNC: u8 = 4;
    let set = |register, value| instruction(MOVE, register, 0, value);
    [
        set(1, 1),
        // Relative to the instruction after this one's first half.
        instruction(LOAD_64_BITS, 2, BPF_PSEUDO_FUNC, CALLBACK as i32 - 2),
        instruction(0, 0, 0, 0),
        set(3, 0),
        set(4, 0),
        instruction(CALL, 0, 0, BPF_FUNC_LOOP),
        set(0, 0),
        end(),
        // `static int called(int a, int b) { return 0; }`
        set(0, 0),
        end(),
    ]
}

/// Type numbers in [`load_types`].
const INT: u32 = 1;
const MAIN: u32 = 4;
const CALLED: u32 = 5;

/// The verifier wants to know the called function's type, and that it is static (Documentation/bpf/btf.rst).
fn load_types() -> io::Result<OwnedFd> {
    const STRINGS: &[u8] = b"\0int\0a\0b\0main\0called\0";
    // Where each begins in STRINGS.
    let [int, a, b, main, called] = [1, 5, 7, 9, 14];
    const KIND_INT: u32 = 1 << 24;
    const KIND_FUNC: u32 = 12 << 24;
    const KIND_FUNC_PROTO: u32 = 13 << 24;
    const SIGNED_32_BITS: u32 = 1 << 24 | 32;
    let types = [
        [int, KIND_INT, 4, SIGNED_32_BITS].as_slice(),
        &[0, KIND_FUNC_PROTO | 1, INT, a, INT],
        &[0, KIND_FUNC_PROTO | 2, INT, a, INT, b, INT],
        &[main, KIND_FUNC, 2],
        &[called, KIND_FUNC, 3],
    ]
    .concat();
    let length = size_of_val(types.as_slice()) as u32;
    let mut btf = Vec::new();
    btf.extend(0xeb9f_u16.to_ne_bytes());
    btf.extend([1, 0]);
    for word in [24, 0, length, length, STRINGS.len() as u32].into_iter().chain(types) {
        btf.extend(word.to_ne_bytes());
    }
    btf.extend(STRINGS);
    sys::btf_load(&btf)
}
