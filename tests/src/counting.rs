//! A tc program that counts packets.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use aya_obj::generated::{bpf_insn, bpf_map_type, bpf_prog_type};
use smc_policy::kernel::sys::{self, MapSpec, ProgramSpec};

/// Counts every packet that meets it and passes it on to the next program.
#[derive(Debug)]
pub struct Counting {
    program: OwnedFd,
    id: u32,
    count: OwnedFd,
}

impl Counting {
    /// Loads one, attached to nothing; the kernel keeps the first 15 characters of the name.
    ///
    /// # Panics
    /// When the kernel refuses it.
    #[must_use]
    pub fn load(name: &str) -> Self {
        let count = sys::map_create(&MapSpec {
            name: "count",
            kind: bpf_map_type::BPF_MAP_TYPE_ARRAY as u32,
            key_size: 4,
            value_size: 8,
            max_entries: 1,
            flags: 0,
        });
        let count = count.expect("a map");
        let license = CString::new("GPL").expect("no NUL");
        let fd = std::os::fd::AsRawFd::as_raw_fd(&count);
        let program = sys::prog_load(&ProgramSpec {
            name,
            kind: bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS,
            instructions: &[
                // r1 = address of element 0 (BPF_PSEUDO_MAP_VALUE)
                instruction(0x18, 1, 2, fd),
                instruction(0, 0, 0, 0),
                // lock *(u64 *)r1 += 1
                instruction(0xb7, 2, 0, 1),
                instruction(0xdb, 1, 2, 0),
                // return TC_ACT_UNSPEC
                instruction(0xb7, 0, 0, -1),
                instruction(0x95, 0, 0, 0),
            ],
            license: &license,
            btf: None,
            struct_ops: None,
        });
        let program = program.expect("a program");
        let id = sys::program_info(program.as_fd()).expect("the program's id").id;
        Self { program, id, count }
    }

    /// The kernel's id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.id
    }

    /// How many packets it has met.
    ///
    /// # Panics
    /// When the kernel does not tell.
    #[must_use]
    pub fn count(&self) -> u64 {
        let bytes = sys::map_lookup(self.count.as_fd(), 0).expect("the count");
        u64::from_ne_bytes(bytes.try_into().expect("8 bytes"))
    }
}

impl AsFd for Counting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.program.as_fd()
    }
}

fn instruction(code: u8, to: u8, from: u8, immediate: i32) -> bpf_insn {
    bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(to, from),
        off: 0,
        imm: immediate,
    }
}
