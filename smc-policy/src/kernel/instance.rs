//! One instance: the tables, generation and counters of one load, pinned in a folder `<bpffs>/smc-policy/<id>`, and the
//! programs that work with them. Whatever hook calls them, they decide and count alike: the hook can be changed without
//! changing the instance.
//!
//! The folder is called `new-<id>` (bpffs takes no dots) until it is complete, and it is made before anything is registered: whoever finds
//! it after a crash can remove all that belongs to it.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_map_type;
use smc_policy_common::counters::{InstanceCounters, RuleCounters};

use super::{
    error::{Doing, KernelError, remove_if_there},
    guard::Shared,
    hook::Hook,
    hs_ctrl::{self, KernelTypes},
    namespace::{self, NamespaceId},
    object::{self, LearnProgram, Prepared, Sizes, TcProgram},
    offsets::Offsets,
    pinned::{self, get_pin, pin, tc_pin},
    query::QueryProgram,
    random,
    sys::{self, MapSpec, SharedCells},
};

const INFO_MAGIC: u32 = 0x534d_4349;
/// Version of the pinned maps' set and meaning; raised with every change an older tool would misread.
const INFO_VERSION: u32 = 5;
const INFO_BYTES: usize = 64;

/// What an instance says of itself, in the map `smcpol_info`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Info {
    /// How large its maps are.
    pub sizes: Sizes,
    /// Which programs it runs: [`object::object_id`].
    pub object: [u8; 16],
    /// The network namespace that it was made for.
    pub namespace: NamespaceId,
    /// Registered with smc_hs_ctrl, namespaces created later take it over.
    pub inheritable: bool,
}

/// Maps of the object and the names of their pins.
const MAPS: [(&str, &str); 6] = [
    ("smcpol_gen", "generation"),
    ("smcpol_tab0", "table0"),
    ("smcpol_tab1", "table1"),
    ("smcpol_hits", "hits"),
    ("smcpol_stat", "stat"),
    ("smcpol_last", "last"),
];

/// The programs for devices that the tc hook consists of.
const JUDGING: [TcProgram; 4] =
    [TcProgram::EgressEthernet, TcProgram::EgressIp, TcProgram::IngressEthernet, TcProgram::IngressIp];

/// The pin of the smc_hs_ctrl registration.
const REGISTRATION: &str = "registration";
/// The pin of the program that marks SYNs.
const MARK: &str = "mark";

impl Info {
    fn to_bytes(self) -> [u8; INFO_BYTES] {
        let mut out = [0; INFO_BYTES];
        for (i, word) in
            [INFO_MAGIC, INFO_VERSION, self.sizes.cells, self.sizes.slots].into_iter().enumerate()
        {
            out[i * 4..i * 4 + 4].copy_from_slice(&word.to_ne_bytes());
        }
        out[16..32].copy_from_slice(&self.object);
        out[32..40].copy_from_slice(&self.namespace.to_ne_bytes());
        out[40] = u8::from(self.inheritable);
        out
    }

    /// `None`: of another version of the tool.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |i: usize| bytes.get(i..i + 4)?.try_into().ok().map(u32::from_ne_bytes);
        if word(0)? != INFO_MAGIC || word(4)? != INFO_VERSION {
            return None;
        }
        Some(Self {
            sizes: Sizes { cells: word(8)?, slots: word(12)? },
            object: bytes.get(16..32)?.try_into().ok()?,
            namespace: u64::from_ne_bytes(bytes.get(32..40)?.try_into().ok()?),
            inheritable: *bytes.get(40)? != 0,
        })
    }
}

/// Elements of `smcpol_base` behind the slots': the instance's own counters, two an element.
const CARRIED_STAT: u32 = InstanceCounters::COUNT.div_ceil(2) as u32;

/// An instance with its maps open.
#[derive(Debug)]
pub struct Instance {
    id: String,
    dir: PathBuf,
    info: Info,
    generation: SharedCells,
    tables: [OwnedFd; 2],
    hits: OwnedFd,
    stat: OwnedFd,
    base: OwnedFd,
    query: QueryProgram,
}

impl Instance {
    /// Creates and pins a new instance that no hook calls yet.
    ///
    /// # Errors
    /// [`KernelError`] with nothing left behind but, at worst, a folder that [`pinned::remove_others`] removes.
    pub fn create(pins: &Path, sizes: Sizes, inheritable: bool) -> Result<Self, KernelError> {
        pinned::check_bpffs(pins)?;
        let id = random::hex(4)?;
        let dir = pins.join(format!("new-{id}"));
        fs::create_dir_all(pins).doing(|| format!("make the folder {}", pins.display()))?;
        fs::create_dir(&dir).doing(|| format!("make the folder {}", dir.display()))?;
        let info = Info { sizes, object: object::object_id(), namespace: namespace::current()?, inheritable };
        let made = Shared::ensure(pins).and_then(|shared| Self::make(&id, &dir, info, shared));
        if made.is_err() {
            // The error in hand says more than one of the clean-up could.
            let _ = pinned::remove_dir(&dir);
        }
        made
    }

    fn make(id: &str, dir: &Path, info: Info, shared: Shared) -> Result<Self, KernelError> {
        let mut prepared = Prepared::with_maps(info.sizes, None, shared.into_maps().collect())?;
        let array = |name, value_size, max_entries| {
            sys::map_create(&MapSpec {
                name,
                kind: bpf_map_type::BPF_MAP_TYPE_ARRAY as u32,
                key_size: 4,
                value_size,
                max_entries,
                flags: 0,
            })
            .doing(|| format!("create the map {name}"))
        };
        let info_map = array("smcpol_info", INFO_BYTES as u32, 1)?;
        sys::map_update(info_map.as_fd(), 0, &info.to_bytes()).doing(|| "fill the map smcpol_info".into())?;
        let slots = info.sizes.slots;
        let base = array("smcpol_base", size_of::<RuleCounters>() as u32, slots + CARRIED_STAT)?;
        let query = prepared.load_query()?;
        pin(&info_map, dir, "info")?;
        pin(&base, dir, "base")?;
        pin(&query, dir, "query")?;
        for (map, name) in MAPS {
            pin(&prepared.take_map(map)?, dir, name)?;
        }
        Self::open_all(dir, id)
    }

    /// Gives a new instance's folder its final name: from here on it is complete.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn complete(&mut self, pins: &Path) -> Result<(), KernelError> {
        let (from, to) = (&self.dir, pins.join(&self.id));
        fs::rename(from, &to).doing(|| format!("rename {} to {}", from.display(), to.display()))?;
        self.dir = to;
        Ok(())
    }

    /// Opens a complete instance. `None`: there is none of this id, or some of its pins are gone.
    ///
    /// # Errors
    /// [`KernelError::Missing`] when another version of the tool made it, [`KernelError::Io`].
    pub fn open(pins: &Path, id: &str) -> Result<Option<Self>, KernelError> {
        match Self::open_all(&pins.join(id), id) {
            Err(KernelError::Io { error, .. }) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        }
    }

    fn open_all(dir: &Path, id: &str) -> Result<Self, KernelError> {
        let get = |name: &str| get_pin(dir, name);
        let info = pinned::read_info(dir)?.ok_or_else(|| KernelError::Missing {
            feature: format!(
                "the policy in force ({}) was loaded by another version of smc-policy",
                dir.display()
            ),
            next: "use that version, or `smc-policy detach` and apply again".into(),
        })?;
        Ok(Self {
            id: id.to_owned(),
            dir: dir.to_owned(),
            info,
            generation: SharedCells::map(get("generation")?.as_fd()).doing(|| "map the generation".into())?,
            tables: [get("table0")?, get("table1")?],
            hits: get("hits")?,
            stat: get("stat")?,
            base: get("base")?,
            query: QueryProgram(get("query")?),
        })
    }

    /// Eight hexadecimal digits.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Sizes and programs.
    pub fn info(&self) -> Info {
        self.info
    }

    /// The object with this instance's maps.
    fn prepare(&self, offsets: Option<&Offsets>) -> Result<Prepared, KernelError> {
        let pins = self.dir.parent().unwrap_or(Path::new("/"));
        let shared = Shared::ensure(pins)?.into_maps().map(Ok);
        let maps = MAPS.iter().map(|(map, name)| Ok(((*map).to_owned(), get_pin(&self.dir, name)?)));
        Prepared::with_maps(self.info.sizes, offsets, maps.chain(shared).collect::<Result<_, KernelError>>()?)
    }

    /// Registers the programs with smc_hs_ctrl, unless they are. Whether they were not.
    ///
    /// # Errors
    /// As [`KernelTypes::read`] and [`hs_ctrl::register`].
    pub fn register(&self) -> Result<bool, KernelError> {
        if self.is_registered() {
            return Ok(false);
        }
        // Killed between the two steps of a registration or of its removal, a process left one of them.
        self.unpin(REGISTRATION)?;
        if let Some(left) = hs_ctrl::registered(&self.id)? {
            pin(&left, &self.dir, REGISTRATION)?;
            return Ok(false);
        }
        let types = KernelTypes::read()?;
        let prepared = self.prepare(Some(&types.offsets))?;
        let registration = hs_ctrl::register(&prepared, &types, &self.id, self.info.inheritable)?;
        pin(&registration, &self.dir, REGISTRATION)?;
        Ok(true)
    }

    /// Is it registered with smc_hs_ctrl, as its pin says?
    fn is_registered(&self) -> bool {
        get_pin(&self.dir, REGISTRATION).is_ok_and(|map| hs_ctrl::is_registered(map.as_fd()))
    }

    /// Removes the registration. Only when no namespace has selected it any more.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unregister(&self) -> Result<(), KernelError> {
        hs_ctrl::unregister_by_id(&self.id)?;
        self.unpin(REGISTRATION)
    }

    /// Is there anything of it that belongs to the other hook than this one?
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn has_traces_of_other(&self, hook: Hook) -> Result<bool, KernelError> {
        Ok(match hook {
            Hook::HsCtrl => JUDGING.iter().any(|program| self.dir.join(tc_pin(*program)).exists()),
            Hook::Tc => self.dir.join(REGISTRATION).exists() || hs_ctrl::registered(&self.id)?.is_some(),
        })
    }

    /// The programs for devices that are wanted, loaded unless they are.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Io`].
    pub fn tc_programs(&self, wanted: impl Fn(TcProgram) -> bool) -> Result<TcPrograms, KernelError> {
        let mut prepared = None;
        let mut programs = Vec::new();
        for program in TcProgram::ALL.into_iter().filter(|program| wanted(*program)) {
            let fd = if self.dir.join(tc_pin(program)).exists() {
                get_pin(&self.dir, tc_pin(program))?
            } else {
                if prepared.is_none() {
                    prepared = Some(self.prepare(None)?);
                }
                let Some(prepared) = &prepared else { continue };
                let fd = prepared.load_tc(program)?;
                pin(&fd, &self.dir, tc_pin(program))?;
                fd
            };
            let info = sys::program_info(fd.as_fd()).doing(|| format!("ask for {}", program.program()))?;
            programs.push((program, info.id, fd));
        }
        Ok(TcPrograms(programs))
    }

    /// Unpins the programs for devices that no device has any more.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unpin_tc_programs(&self, which: impl Fn(TcProgram) -> bool) -> Result<(), KernelError> {
        let mut programs = TcProgram::ALL.into_iter().filter(|program| which(*program));
        programs.try_for_each(|program| self.unpin(tc_pin(program)))
    }

    /// The program that marks SYNs, loaded unless it is.
    ///
    /// # Errors
    /// [`KernelError::Missing`] when the kernel has no SMC, [`KernelError::Refused`], [`KernelError::Io`].
    pub fn mark_program(&self) -> Result<OwnedFd, KernelError> {
        if self.dir.join(MARK).exists() {
            return get_pin(&self.dir, MARK);
        }
        let offsets = hs_ctrl::read_offsets()?;
        if !offsets.has_smc() {
            return Err(KernelError::Missing {
                feature: format!("this kernel ({}) is built without SMC", super::release()),
                next: "nothing needs to be done: it sends no SYNs with the SMC option".into(),
            });
        }
        let program = self.prepare(Some(&offsets))?.load_mark()?;
        pin(&program, &self.dir, MARK)?;
        Ok(program)
    }

    /// Unpins the program that marks SYNs.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unpin_mark_program(&self) -> Result<(), KernelError> {
        self.unpin(MARK)
    }

    /// A program of the learner, if it is loaded.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn learn_program(&self, program: LearnProgram) -> Result<Option<OwnedFd>, KernelError> {
        let pin = learn_pin(program);
        self.dir.join(pin).exists().then(|| get_pin(&self.dir, pin)).transpose()
    }

    /// Loads a program of the learner for the function or tracepoint with this BTF id.
    ///
    /// # Errors
    /// [`KernelError::Refused`], [`KernelError::Io`].
    pub fn load_learn_program(
        &self,
        program: LearnProgram,
        offsets: &Offsets,
        target: u32,
        module: Option<BorrowedFd<'_>>,
    ) -> Result<OwnedFd, KernelError> {
        let fd = self.prepare(Some(offsets))?.load_learn(program, target, module)?;
        pin(&fd, &self.dir, learn_pin(program))?;
        Ok(fd)
    }

    /// Unpins the programs of the learner, which hold the module smc.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unpin_learn_programs(&self) -> Result<(), KernelError> {
        LearnProgram::ALL.into_iter().try_for_each(|program| self.unpin(learn_pin(program)))
    }

    fn unpin(&self, name: &str) -> Result<(), KernelError> {
        remove_if_there(&self.dir.join(name))
    }

    /// The program that answers queries.
    pub fn query(&self) -> &QueryProgram {
        &self.query
    }

    /// The generation in force; 0: none yet.
    pub fn generation(&self) -> u64 {
        self.generation.load(0).unwrap_or(0)
    }

    /// Writes the cells of generation `generation` where that generation is looked for. Only for a generation that is
    /// not in force and that no running program may still be reading.
    ///
    /// # Errors
    /// [`KernelError::Io`]; `InvalidInput` when they do not fit.
    pub fn fill(&self, generation: u64, cells: &[u64]) -> Result<(), KernelError> {
        let table = self.tables[(generation & 1) as usize].as_fd();
        let shared = SharedCells::map(table).doing(|| "map the idle table".into())?;
        if shared.fill(cells) {
            Ok(())
        } else {
            Err(KernelError::Io {
                doing: "fill the idle table".into(),
                error: io::Error::new(io::ErrorKind::InvalidInput, "the policy outgrew it"),
            })
        }
    }

    /// The one store that puts a generation in force.
    pub fn switch(&self, generation: u64) {
        // The array has one element; it was mapped writable.
        self.generation.store(0, generation);
    }

    /// Sets a slot's counters to zero; for a slot that nothing in force counts in.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn clear_slot(&self, slot: u32) -> Result<(), KernelError> {
        self.set_carried(slot, RuleCounters::default())?;
        let cpus = super::cpus::possible().doing(|| "count the CPUs".into())?;
        sys::map_update(self.hits.as_fd(), slot, &vec![0; size_of::<RuleCounters>() * cpus])
            .doing(|| format!("clear the counters of slot {slot}"))
    }

    /// Counts that a slot begins with: what a replaced instance had counted.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn set_carried(&self, slot: u32, counters: RuleCounters) -> Result<(), KernelError> {
        let mut bytes = counters.hits.to_ne_bytes().to_vec();
        bytes.extend(counters.retransmissions.to_ne_bytes());
        sys::map_update(self.base.as_fd(), slot, &bytes)
            .doing(|| format!("write the counters of slot {slot}"))
    }

    /// What a slot has counted on all CPUs.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn counters(&self, slot: u32) -> Result<RuleCounters, KernelError> {
        let read = |map: &OwnedFd| {
            sys::map_lookup(map.as_fd(), slot).doing(|| format!("read the counters of slot {slot}"))
        };
        let [hits, retransmissions] = sum::<2>(&read(&self.hits)?);
        let [carried_hits, carried_retransmissions] = sum::<2>(&read(&self.base)?);
        Ok(RuleCounters {
            hits: hits.wrapping_add(carried_hits),
            retransmissions: retransmissions.wrapping_add(carried_retransmissions),
        })
    }

    /// What the instance has counted on all CPUs.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn instance_counters(&self) -> Result<InstanceCounters, KernelError> {
        let bytes = sys::map_lookup(self.stat.as_fd(), 0).doing(|| "read the instance's counters".into())?;
        let mut counters = sum::<{ InstanceCounters::COUNT }>(&bytes);
        for (i, element) in self.carried_stat().enumerate() {
            let bytes = sys::map_lookup(self.base.as_fd(), element)
                .doing(|| "read the counters carried over".into())?;
            for (counter, carried) in counters[i * 2..].iter_mut().zip(sum::<2>(&bytes)) {
                *counter = counter.wrapping_add(carried);
            }
        }
        Ok(InstanceCounters::from_array(counters))
    }

    fn carried_stat(&self) -> std::ops::Range<u32> {
        self.info.sizes.slots..self.info.sizes.slots + CARRIED_STAT
    }

    /// What the instance begins with: the counters of the one that it replaces.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn set_carried_stat(&self, counters: InstanceCounters) -> Result<(), KernelError> {
        for (element, pair) in self.carried_stat().zip(counters.to_array().chunks(2)) {
            let second = pair.get(1).copied().unwrap_or(0);
            self.set_carried(element, RuleCounters { hits: pair[0], retransmissions: second })?;
        }
        Ok(())
    }
}

/// The pin of a program of the learner.
fn learn_pin(program: LearnProgram) -> &'static str {
    match program {
        LearnProgram::Clc => "learn-clc",
        LearnProgram::Fallback => "learn-fallback",
    }
}

/// The programs for devices of one instance.
#[derive(Debug)]
pub struct TcPrograms(Vec<(TcProgram, u32, OwnedFd)>);

impl TcPrograms {
    /// The open program and the kernel's id of it.
    pub fn get(&self, program: TcProgram) -> Option<(u32, BorrowedFd<'_>)> {
        self.0.iter().find(|(p, ..)| *p == program).map(|(_, id, fd)| (*id, fd.as_fd()))
    }
}

/// Adds up structs of `N` u64.
fn sum<const N: usize>(bytes: &[u8]) -> [u64; N] {
    let mut out = [0u64; N];
    for (i, word) in bytes.chunks_exact(8).enumerate() {
        let mut w = [0; 8];
        w.copy_from_slice(word);
        out[i % N] = out[i % N].wrapping_add(u64::from_ne_bytes(w));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_survives_the_map() {
        let info = Info {
            sizes: Sizes { cells: 512, slots: 64 },
            object: *b"0123456789abcdef",
            namespace: 4026531840,
            inheritable: true,
        };
        let mut bytes = info.to_bytes();
        assert_eq!(Info::from_bytes(&bytes), Some(info));
        bytes[4] ^= 1;
        assert_eq!(Info::from_bytes(&bytes), None, "of another version");
        assert_eq!(Info::from_bytes(&[]), None);
    }

    #[test]
    fn counters_add_up_over_cpus() {
        let bytes: Vec<u8> = [1u64, 10, 2, 20, 3, 30].iter().flat_map(|w| w.to_ne_bytes()).collect();
        assert_eq!(sum::<2>(&bytes), [6, 60]);
        assert_eq!(sum::<2>(&[]), [0, 0]);
    }
}
