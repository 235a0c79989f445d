//! The compiled eBPF object: parses it, creates its maps, loads its programs. A small layer on aya-obj and bpf(2),
//! because aya has no struct_ops and cannot map an array into memory.

use std::{
    collections::{HashMap, HashSet},
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
};

use aya_obj::{
    Object,
    btf::BtfFeatures,
    generated::{bpf_attach_type, bpf_map_type, bpf_prog_type},
};
use sha2::{Digest, Sha256};

use super::{
    error::{Doing, KernelError},
    offsets::Offsets,
    sys::{self, MapSpec, ProgramSpec},
};

/// aya-obj reads the ELF headers in place.
#[repr(align(8))]
struct Aligned<T: ?Sized>(T);

#[cfg(target_endian = "little")]
static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!("objects/smc_policy.bpfel.o"));
#[cfg(target_endian = "big")]
static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!("objects/smc_policy.bpfeb.o"));

const BPF_F_RDONLY_PROG: u32 = 1 << 7;

/// The first 16 bytes of the object's SHA-256: two programs of one id are the same program.
pub fn object_id() -> [u8; 16] {
    let mut id = [0; 16];
    id.copy_from_slice(&Sha256::digest(&OBJECT.0)[..16]);
    id
}

/// How large an instance's maps are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Cells of each of the two tables.
    pub cells: u32,
    /// Counter slots.
    pub slots: u32,
}

/// The struct_ops callbacks in the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Callback {
    /// `syn_option`.
    Syn,
    /// `synack_option`.
    SynAck,
}

impl Callback {
    /// The program's name in the object.
    pub fn program(self) -> &'static str {
        match self {
            Self::Syn => "smcpol_syn",
            Self::SynAck => "smcpol_synack",
        }
    }

    /// The member of `struct smc_hs_ctrl`.
    pub fn member(self) -> &'static str {
        match self {
            Self::Syn => "syn_option",
            Self::SynAck => "synack_option",
        }
    }
}

/// The tc programs in the object. Their names fit what the kernel keeps of a name, so that they are told apart there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TcProgram {
    /// Egress of a device whose packets begin with an Ethernet header (`ARPHRD_ETHER`, `ARPHRD_LOOPBACK`).
    EgressEthernet,
    /// Egress of a device whose packets begin with the IP header (tun, ipip, wireguard).
    EgressIp,
    /// Ingress, with Ethernet header.
    IngressEthernet,
    /// Ingress, without.
    IngressIp,
    /// Ingress where something else judges SYNs, with Ethernet header: the guard alone.
    AnswersEthernet,
    /// The same, without.
    AnswersIp,
}

impl TcProgram {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::EgressEthernet,
        Self::EgressIp,
        Self::IngressEthernet,
        Self::IngressIp,
        Self::AnswersEthernet,
        Self::AnswersIp,
    ];

    /// The program's name in the object and in the kernel.
    pub fn program(self) -> &'static str {
        match self {
            Self::EgressEthernet => "smcpol_out_eth",
            Self::EgressIp => "smcpol_out_ip",
            Self::IngressEthernet => "smcpol_in_eth",
            Self::IngressIp => "smcpol_in_ip",
            Self::AnswersEthernet => "smcpol_ack_eth",
            Self::AnswersIp => "smcpol_ack_ip",
        }
    }
}

/// The learner's programs in the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LearnProgram {
    /// At the end of `smc_clc_wait_msg`.
    Clc,
    /// At the tracepoint `smc_switch_to_fallback`.
    Fallback,
}

impl LearnProgram {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Clc, Self::Fallback];

    /// The program's name in the object and in the kernel.
    pub fn program(self) -> &'static str {
        match self {
            Self::Clc => "smcpol_clc",
            Self::Fallback => "smcpol_fallback",
        }
    }

    /// How it is attached.
    pub fn attach_type(self) -> bpf_attach_type {
        match self {
            Self::Clc => bpf_attach_type::BPF_TRACE_FEXIT,
            Self::Fallback => bpf_attach_type::BPF_TRACE_RAW_TP,
        }
    }
}

/// The object with its maps created and its programs ready to be loaded.
pub struct Prepared {
    object: Object,
    maps: HashMap<String, OwnedFd>,
    btf: Option<OwnedFd>,
}

impl Prepared {
    /// Creates the maps in the kernel and points the programs at them. `offsets`: none for the programs that read no
    /// socket.
    ///
    /// # Errors
    /// [`KernelError::Object`], [`KernelError::Io`].
    pub fn new(sizes: Sizes, offsets: Option<&Offsets>) -> Result<Self, KernelError> {
        Self::with_maps(sizes, offsets, HashMap::new())
    }

    /// As [`Self::new`], but with these maps of an instance that exists: its programs share what is in force and what is
    /// counted. Constants are the programs' own.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_maps(
        sizes: Sizes,
        offsets: Option<&Offsets>,
        mut maps: HashMap<String, OwnedFd>,
    ) -> Result<Self, KernelError> {
        let broken = |e: &dyn std::fmt::Display| KernelError::Object(e.to_string());
        let mut object = Object::parse(&OBJECT.0).map_err(|e| broken(&e))?;
        if let Some(offsets) = offsets {
            let values: Vec<_> = offsets.globals().map(|(n, v)| (n, v.to_ne_bytes())).collect();
            object
                .patch_map_data(values.iter().map(|(n, v)| (*n, (&v[..], true))).collect())
                .map_err(|e| broken(&e))?;
        }
        for (name, map) in &mut object.maps {
            if maps.contains_key(name) {
                continue;
            }
            match name.as_str() {
                "smcpol_tab0" | "smcpol_tab1" => map.set_max_entries(sizes.cells),
                "smcpol_hits" => map.set_max_entries(sizes.slots),
                _ => {}
            }
            if map.map_type() == bpf_map_type::BPF_MAP_TYPE_SK_STORAGE as u32 {
                let fd = sys::map_create_socket_storage(name).doing(|| format!("create the map {name}"))?;
                maps.insert(name.clone(), fd);
                continue;
            }
            // aya-obj leaves the type of a data section's map open.
            let data = !map.data().is_empty();
            let read_only = data && name.starts_with(".rodata");
            let fd = sys::map_create(&MapSpec {
                name: if data { "smcpol.rodata" } else { name },
                kind: if data { bpf_map_type::BPF_MAP_TYPE_ARRAY as u32 } else { map.map_type() },
                key_size: if data { 4 } else { map.key_size() },
                value_size: map.value_size(),
                max_entries: if data { 1 } else { map.max_entries() },
                flags: map.map_flags() | if read_only { BPF_F_RDONLY_PROG } else { 0 },
            })
            .doing(|| format!("create the map {name}"))?;
            if data {
                sys::map_update(fd.as_fd(), 0, map.data()).doing(|| format!("fill the map {name}"))?;
            }
            if read_only {
                sys::map_freeze(fd.as_fd()).doing(|| format!("freeze the map {name}"))?;
            }
            maps.insert(name.clone(), fd);
        }
        let text: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let described = object.maps.clone();
        object
            .relocate_maps(
                described.iter().filter_map(|(n, m)| Some((n.as_str(), maps.get(n)?.as_raw_fd(), m))),
                &text,
            )
            .map_err(|e| broken(&e))?;
        object.relocate_calls(&text).map_err(|e| broken(&e))?;
        // Every kernel from 6.1 on knows all of these.
        let features = BtfFeatures::new(true, true, true, true, true, true, true, true);
        let btf = match object.fixup_and_sanitize_btf(&features).map_err(|e| broken(&e))? {
            Some(btf) => Some(sys::btf_load(&btf.to_bytes()).doing(|| "load the programs' BTF".into())?),
            None => None,
        };
        Ok(Self { object, maps, btf })
    }

    /// A map of the object.
    ///
    /// # Errors
    /// [`KernelError::Object`] when it has none of that name.
    pub fn map(&self, name: &str) -> Result<BorrowedFd<'_>, KernelError> {
        self.maps
            .get(name)
            .map(AsFd::as_fd)
            .ok_or_else(|| KernelError::Object(format!("it has no map {name}")))
    }

    /// Hands a map over.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn take_map(&mut self, name: &str) -> Result<OwnedFd, KernelError> {
        self.maps.remove(name).ok_or_else(|| KernelError::Object(format!("it has no map {name}")))
    }

    /// The programs' own BTF, which a struct_ops map wants to see.
    ///
    /// # Errors
    /// [`KernelError::Object`] when the object was built without.
    pub fn btf(&self) -> Result<BorrowedFd<'_>, KernelError> {
        self.btf.as_ref().map(AsFd::as_fd).ok_or_else(|| KernelError::Object("it has no BTF".into()))
    }

    /// Loads the program that answers a test run's queries.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Object`].
    pub fn load_query(&self) -> Result<OwnedFd, KernelError> {
        self.load("smcpol_query", bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS, None)
    }

    /// Loads a program for a device's egress or ingress.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Object`].
    pub fn load_tc(&self, program: TcProgram) -> Result<OwnedFd, KernelError> {
        self.load(program.program(), bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS, None)
    }

    /// Loads the program that marks SYNs.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Object`].
    pub fn load_mark(&self) -> Result<OwnedFd, KernelError> {
        self.load("smcpol_mark", bpf_prog_type::BPF_PROG_TYPE_SOCK_OPS, None)
    }

    /// Loads a program of the learner for the function or tracepoint with this BTF id.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Object`].
    pub fn load_learn(
        &self,
        program: LearnProgram,
        target: u32,
        module: Option<BorrowedFd<'_>>,
    ) -> Result<OwnedFd, KernelError> {
        let at = program.attach_type() as u32;
        self.load(program.program(), bpf_prog_type::BPF_PROG_TYPE_TRACING, Some((target, at, module)))
    }

    /// Loads a struct_ops callback for the member number `member` of the kernel's struct with this BTF id.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Object`].
    pub fn load_callback(
        &self,
        callback: Callback,
        struct_id: u32,
        member: u32,
        module: Option<BorrowedFd<'_>>,
    ) -> Result<OwnedFd, KernelError> {
        self.load(
            callback.program(),
            bpf_prog_type::BPF_PROG_TYPE_STRUCT_OPS,
            Some((struct_id, member, module)),
        )
    }

    fn load(
        &self,
        name: &str,
        kind: bpf_prog_type,
        struct_ops: Option<(u32, u32, Option<BorrowedFd<'_>>)>,
    ) -> Result<OwnedFd, KernelError> {
        let missing = || KernelError::Object(format!("it has no program {name}"));
        let program = self.object.programs.get(name).ok_or_else(missing)?;
        let function = self.object.functions.get(&program.function_key()).ok_or_else(missing)?;
        let records = function.func_info.func_info_bytes();
        sys::prog_load(&ProgramSpec {
            name,
            kind,
            instructions: &function.instructions,
            license: &self.object.license,
            btf: self.btf.as_ref().map(|b| (b.as_fd(), &records[..], function.func_info_rec_size)),
            struct_ops,
        })
        .map_err(|e| KernelError::Refused {
            program: name.to_owned(),
            error: e.error,
            log: last_lines(&e.log, 12),
        })
    }
}

/// The verifier says at the end what it minds.
fn last_lines(log: &str, count: usize) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_has_what_the_loader_names() {
        let object = Object::parse(&OBJECT.0).unwrap();
        let callbacks = [Callback::Syn, Callback::SynAck].map(Callback::program);
        let tc = TcProgram::ALL.map(TcProgram::program);
        let learn = LearnProgram::ALL.map(LearnProgram::program);
        let others = ["smcpol_query", "smcpol_mark"];
        for program in others.into_iter().chain(callbacks).chain(tc).chain(learn) {
            assert!(object.programs.contains_key(program), "{program}");
        }
        for name in tc.into_iter().chain(learn) {
            assert!(name.len() <= sys::NAME_MAX, "{name} would be cut");
        }
        for map in ["smcpol_gen", "smcpol_tab0", "smcpol_tab1", "smcpol_hits", "smcpol_stat"] {
            assert!(object.maps.contains_key(map), "{map}");
        }
        assert_eq!(object.license.to_bytes(), b"GPL");
        assert!(object.btf.is_some(), "func_info and struct_ops need it");
    }

    #[test]
    fn the_end_of_a_log() {
        assert_eq!(last_lines("a\nb\nc", 2), "b\nc");
        assert_eq!(last_lines("", 2), "");
    }
}
