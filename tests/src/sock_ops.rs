//! A sock_ops program of somebody else, at the root of all cgroups.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use aya_obj::generated::{bpf_insn, bpf_map_type, bpf_prog_type};
use smc_policy::kernel::guard::mark::cgroup_root;
use smc_policy::kernel::sys::{self, MapSpec, ProgramSpec};

/// Attached until this goes.
#[derive(Debug)]
pub struct SockOps {
    seen: OwnedFd,
    _link: OwnedFd,
}

/// Set in what is seen.
const SEEN: u32 = 1 << 30;

impl SockOps {
    /// Sets `flags` (`BPF_SOCK_OPS_*_CB_FLAG`) at every connect, beside those that are set; if header options are among
    /// them, asks for `reserve` bytes in every header. With `BPF_SOCK_OPS_STATE_CB_FLAG` it notes the flags of a socket
    /// that leaves its connection.
    ///
    /// # Panics
    /// When the kernel refuses it.
    #[must_use]
    pub fn attach(reserve: i32, flags: u32) -> Self {
        // Offsets in struct bpf_sock_ops (include/uapi/linux/bpf.h).
        const NEW_STATE: i16 = 8;
        const FLAGS: i16 = 84;
        const CONNECT: i32 = 3;
        const STATE: i32 = 10;
        const LENGTH: i32 = 14;
        const ESTABLISHED: i32 = 1;
        let seen = sys::map_create(&MapSpec {
            name: "seen",
            kind: bpf_map_type::BPF_MAP_TYPE_ARRAY as u32,
            key_size: 4,
            value_size: 4,
            max_entries: 1,
            flags: 0,
        });
        let seen = seen.expect("a map");
        let instructions = [
            instruction(0xbf, 6, 1, 0, 0),
            instruction(0x61, 2, 6, 0, 0),
            instruction(0x15, 2, 0, 4, CONNECT),
            instruction(0x15, 2, 0, 8, LENGTH),
            instruction(0x15, 2, 0, 12, STATE),
            // 5: the end
            instruction(0xb7, 0, 0, 0, 1),
            instruction(0x95, 0, 0, 0, 0),
            // 7: connect: bpf_sock_ops_cb_flags_set
            instruction(0x61, 2, 6, FLAGS, 0),
            instruction(0x47, 2, 0, 0, flags as i32),
            instruction(0xbf, 1, 6, 0, 0),
            instruction(0x85, 0, 0, 0, 59),
            instruction(0x05, 0, 0, -7, 0),
            // 12: length: bpf_reserve_hdr_opt
            instruction(0xbf, 1, 6, 0, 0),
            instruction(0xb7, 2, 0, 0, reserve),
            instruction(0xb7, 3, 0, 0, 0),
            instruction(0x85, 0, 0, 0, 144),
            instruction(0x05, 0, 0, -12, 0),
            // 17: state
            instruction(0x61, 2, 6, NEW_STATE, 0),
            instruction(0x15, 2, 0, -14, ESTABLISHED),
            instruction(0x61, 3, 6, FLAGS, 0),
            instruction(0x47, 3, 0, 0, SEEN as i32),
            // r1 = address of element 0 (BPF_PSEUDO_MAP_VALUE)
            instruction(0x18, 1, 2, 0, seen.as_raw_fd()),
            instruction(0, 0, 0, 0, 0),
            instruction(0x63, 1, 3, 0, 0),
            instruction(0x05, 0, 0, -20, 0),
        ];
        let program = sys::prog_load(&ProgramSpec {
            name: "foreign",
            kind: bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS,
            instructions: &instructions,
            license: &CString::new("GPL").expect("no NUL"),
            btf: None,
            struct_ops: None,
        });
        let program = program.expect("a program");
        let root = File::open(cgroup_root().expect("cgroup2")).expect("its folder");
        let link = sys::cgroup_link_create(root.as_fd(), program.as_fd()).expect("attached");
        Self { seen, _link: link }
    }

    /// The callback flags of the socket that left its connection last.
    ///
    /// # Panics
    /// When the map cannot be read.
    #[must_use]
    pub fn flags_at_the_end(&self) -> Option<u32> {
        let bytes = sys::map_lookup(self.seen.as_fd(), 0).expect("the map");
        let seen = u32::from_ne_bytes(bytes.try_into().expect("four bytes"));
        (seen & SEEN != 0).then_some(seen & !SEEN)
    }
}

fn instruction(code: u8, destination: u8, source: u8, off: i16, imm: i32) -> bpf_insn {
    bpf_insn {
        code,
        _bitfield_align_1: [],
        _bitfield_1: bpf_insn::new_bitfield_1(destination, source),
        off,
        imm,
    }
}
