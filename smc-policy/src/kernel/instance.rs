//! One instance: the maps and programs of one load, pinned in a folder `<bpffs>/smc-policy/<id>` and registered as
//! `smcpol_<id>`.
//!
//! The folder is called `new-<id>` (bpffs takes no dots) until it is complete, and it is made before anything is registered: whoever finds
//! it after a crash can remove all that belongs to it.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use aya_obj::generated::bpf_map_type;
use smc_policy_common::counters::{InstanceCounters, RuleCounters};

use super::{
    error::{Doing, KernelError},
    hs_ctrl::{self, KernelTypes},
    namespace::{self, NamespaceId},
    object::{self, Prepared, Sizes},
    query::QueryProgram,
    random,
    sys::{self, MapSpec, SharedCells},
};

/// bpffs's magic number (BPF_FS_MAGIC, include/uapi/linux/magic.h).
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

const INFO_MAGIC: u32 = 0x534d_4349;
/// Version of the pinned maps' set and meaning; raised with every change an older tool would misread.
const INFO_VERSION: u32 = 2;
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
}

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
        out
    }

    /// `None`: of another version of the tool.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let word = |i: usize| bytes.get(i..i + 4)?.try_into().ok().map(u32::from_ne_bytes);
        if word(0)? != INFO_MAGIC || word(4)? != INFO_VERSION {
            return None;
        }
        Some(Self {
            sizes: Sizes { cells: word(8)?, slots: word(12)? },
            object: bytes.get(16..32)?.try_into().ok()?,
            namespace: u64::from_ne_bytes(bytes.get(32..40)?.try_into().ok()?),
        })
    }
}

/// Elements of `smcpol_base` behind the slots': the instance's own counters, two an element.
const CARRIED_STAT: u32 = InstanceCounters::COUNT as u32 / 2;

/// An instance with its maps open.
#[derive(Debug)]
pub struct Instance {
    id: String,
    info: Info,
    generation: SharedCells,
    tables: [OwnedFd; 2],
    hits: OwnedFd,
    stat: OwnedFd,
    base: OwnedFd,
    query: QueryProgram,
}

impl Instance {
    /// Loads and pins a new instance without registering it. `types`: none for one that is only asked (tests,
    /// benchmarks).
    ///
    /// # Errors
    /// [`KernelError`] with nothing left behind but, at worst, a folder that [`remove_others`] removes.
    pub fn create(pins: &Path, sizes: Sizes, types: Option<&KernelTypes>) -> Result<Self, KernelError> {
        check_bpffs(pins)?;
        let id = random::hex(4)?;
        let dir = pins.join(format!("new-{id}"));
        fs::create_dir_all(pins).doing(|| format!("make the folder {}", pins.display()))?;
        fs::create_dir(&dir).doing(|| format!("make the folder {}", dir.display()))?;
        let made = Self::load(&id, &dir, sizes, types);
        if made.is_err() {
            // The error in hand says more than one of the clean-up could.
            let _ = remove_dir(&dir);
        }
        made
    }

    fn load(id: &str, dir: &Path, sizes: Sizes, types: Option<&KernelTypes>) -> Result<Self, KernelError> {
        let mut prepared = Prepared::new(sizes, types.map(|t| &t.offsets))?;
        let info = Info { sizes, object: object::object_id(), namespace: namespace::current()? };
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
        let base = array("smcpol_base", size_of::<RuleCounters>() as u32, sizes.slots + CARRIED_STAT)?;
        let query = prepared.load_query()?;
        pin(&info_map, dir, "info")?;
        pin(&base, dir, "base")?;
        pin(&query, dir, "query")?;
        if let Some(types) = types {
            let registration = hs_ctrl::register(&prepared, types, id)?;
            pin(&registration, dir, "registration")?;
        }
        let mut take = |map: &str, name: &str| {
            let fd = prepared.take_map(map)?;
            pin(&fd, dir, name)?;
            Ok::<_, KernelError>(fd)
        };
        let generation = take("smcpol_gen", "generation")?;
        let tables = [take("smcpol_tab0", "table0")?, take("smcpol_tab1", "table1")?];
        let (hits, stat) = (take("smcpol_hits", "hits")?, take("smcpol_stat", "stat")?);
        Ok(Self {
            id: id.to_owned(),
            info,
            generation: SharedCells::map(generation.as_fd()).doing(|| "map the generation".into())?,
            tables,
            hits,
            stat,
            base,
            query: QueryProgram(query),
        })
    }

    /// Gives a new instance's folder its final name: from here on it is complete.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn complete(&self, pins: &Path) -> Result<(), KernelError> {
        let (from, to) = (pins.join(format!("new-{}", self.id)), pins.join(&self.id));
        fs::rename(&from, &to).doing(|| format!("rename {} to {}", from.display(), to.display()))
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
        let info = read_info(dir)?.ok_or_else(|| KernelError::Missing {
            feature: format!(
                "the policy in force ({}) was loaded by another version of smc-policy",
                dir.display()
            ),
            next: "use that version, or `smc-policy detach` and apply again".into(),
        })?;
        Ok(Self {
            id: id.to_owned(),
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
        for (element, pair) in self.carried_stat().zip(counters.to_array().chunks_exact(2)) {
            self.set_carried(element, RuleCounters { hits: pair[0], retransmissions: pair[1] })?;
        }
        Ok(())
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

fn pin(fd: &OwnedFd, dir: &Path, name: &str) -> Result<(), KernelError> {
    let path = dir.join(name);
    sys::pin(fd.as_fd(), &path).doing(|| format!("pin {}", path.display()))
}

/// Pins need a bpffs.
fn check_bpffs(pins: &Path) -> Result<(), KernelError> {
    let root = pins.parent().unwrap_or(Path::new("/"));
    if sys::filesystem_magic(root).is_ok_and(|magic| magic == BPF_FS_MAGIC) {
        return Ok(());
    }
    Err(KernelError::Missing {
        feature: format!("no BPF file system is mounted at {}", root.display()),
        next: format!("mount -t bpf bpf {}", root.display()),
    })
}

/// The folders of instances: (id, complete, path).
fn folders(pins: &Path) -> Result<Vec<(String, bool, PathBuf)>, KernelError> {
    let entries = match fs::read_dir(pins) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.doing(|| format!("list {}", pins.display()))?,
    };
    let mut out = Vec::new();
    for entry in entries {
        let entry = entry.doing(|| format!("list {}", pins.display()))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let id = name.strip_prefix("new-").unwrap_or(&name);
        if hs_ctrl::is_instance_id(id) {
            out.push((id.to_owned(), id == name, entry.path()));
        }
    }
    Ok(out)
}

fn get_pin(dir: &Path, name: &str) -> Result<OwnedFd, KernelError> {
    let path = dir.join(name);
    sys::get_pinned(&path).doing(|| format!("open {}", path.display()))
}

/// What the instance pinned in `dir` says of itself. `None`: it is another version's.
fn read_info(dir: &Path) -> Result<Option<Info>, KernelError> {
    let map = get_pin(dir, "info")?;
    let bytes = sys::map_lookup(map.as_fd(), 0).doing(|| "read the map smcpol_info".into())?;
    Ok(Info::from_bytes(&bytes))
}

/// The ids of complete instances, with the namespace that each was made for, as far as it says so.
///
/// # Errors
/// [`KernelError::Io`].
pub fn complete(pins: &Path) -> Result<Vec<(String, Option<NamespaceId>)>, KernelError> {
    let complete = folders(pins)?.into_iter().filter(|(_, complete, _)| *complete);
    Ok(complete.map(|(id, _, path)| (id, read_info(&path).ok().flatten().map(|i| i.namespace))).collect())
}

/// An instance that another network namespace, which still exists, has in force: this namespace must leave it alone.
///
/// # Errors
/// [`KernelError::Missing`] naming that namespace; [`KernelError::Io`].
pub fn refuse_other_namespaces(pins: &Path) -> Result<(), KernelError> {
    let here = namespace::current()?;
    for (id, made_for) in complete(pins)? {
        if let Some(other) = made_for.filter(|n| *n != here && namespace::exists(*n)) {
            return Err(KernelError::Missing {
                feature: format!(
                    "a policy is in force in another network namespace, net:[{other}] ({}), and this version keeps \
                     one namespace's; nothing was changed",
                    hs_ctrl::name(&id)
                ),
                next: "run smc-policy in that namespace (`nsenter --net=...`), or detach it there first"
                    .into(),
            });
        }
    }
    Ok(())
}

/// What [`remove_others`] did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Removed {
    /// Ids of the instances that are gone.
    pub ids: Vec<String>,
    /// What could not be removed, and why.
    pub problems: Vec<String>,
}

/// Unregisters and unpins every instance but `keep`: what a replacement or a killed process left. Goes on past what
/// cannot be removed.
pub fn remove_others(pins: &Path, keep: Option<&str>) -> Removed {
    let mut removed = Removed::default();
    let doomed: Vec<_> = match folders(pins) {
        Ok(all) => all.into_iter().filter(|(id, complete, _)| keep != Some(id) || !complete).collect(),
        Err(e) => {
            removed.problems.push(e.to_string());
            return removed;
        }
    };
    if doomed.is_empty() {
        return removed;
    }
    match hs_ctrl::registrations() {
        Ok(all) => {
            for (id, registration) in all {
                if doomed.iter().any(|(d, _, _)| *d == id)
                    && keep != Some(&id)
                    && let Err(e) = hs_ctrl::unregister(registration.as_fd())
                {
                    removed.problems.push(e.to_string());
                }
            }
        }
        Err(e) => removed.problems.push(e.to_string()),
    }
    for (id, _, path) in doomed {
        match remove_dir(&path) {
            Ok(()) => removed.ids.push(id),
            Err(e) => removed.problems.push(format!("cannot remove {}: {e}", path.display())),
        }
    }
    removed
}

/// Removes the folder of pins once nothing is in it.
pub fn remove_empty(pins: &Path) {
    // Another instance may be there, or it may be gone already: both are fine.
    let _ = fs::remove_dir(pins);
}

fn remove_dir(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        fs::remove_file(entry?.path())?;
    }
    fs::remove_dir(dir)
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
