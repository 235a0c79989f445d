//! The folder of pins: `<bpffs>/smc-policy` with a folder an instance.

use std::{
    collections::HashSet,
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use super::{
    error::{Doing, KernelError},
    hs_ctrl,
    instance::Info,
    namespace::{self, NamespaceId},
    object::TcProgram,
    sys,
};

/// bpffs's magic number (BPF_FS_MAGIC, include/uapi/linux/magic.h).
const BPF_FS_MAGIC: i64 = 0xcafe_4a11;

pub(super) fn pin(fd: &OwnedFd, dir: &Path, name: &str) -> Result<(), KernelError> {
    let path = dir.join(name);
    sys::pin(fd.as_fd(), &path).doing(|| format!("pin {}", path.display()))
}

/// Pins need a bpffs.
pub(super) fn check_bpffs(pins: &Path) -> Result<(), KernelError> {
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

pub(super) fn get_pin(dir: &Path, name: &str) -> Result<OwnedFd, KernelError> {
    let path = dir.join(name);
    sys::get_pinned(&path).doing(|| format!("open {}", path.display()))
}

/// What the instance pinned in `dir` says of itself. `None`: it is another version's.
pub(super) fn read_info(dir: &Path) -> Result<Option<Info>, KernelError> {
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

/// The ids of all instances, complete or not.
///
/// # Errors
/// [`KernelError::Io`].
pub fn ids(pins: &Path) -> Result<HashSet<String>, KernelError> {
    Ok(folders(pins)?.into_iter().map(|(id, ..)| id).collect())
}

/// The kernel's ids of the programs for devices of all instances.
///
/// # Errors
/// [`KernelError::Io`].
pub fn tc_program_ids(pins: &Path) -> Result<HashSet<u32>, KernelError> {
    Ok(folders(pins)?.iter().flat_map(|(_, _, dir)| tc_programs_in(dir)).collect())
}

/// Those of one instance.
///
/// # Errors
/// [`KernelError::Io`].
pub fn tc_program_ids_of(pins: &Path, id: &str) -> Result<HashSet<u32>, KernelError> {
    Ok(tc_programs_in(&pins.join(id)).collect())
}

/// Pins that are not there are programs that are attached nowhere.
fn tc_programs_in(dir: &Path) -> impl Iterator<Item = u32> {
    let dir = dir.to_owned();
    TcProgram::ALL.into_iter().filter_map(move |program| {
        let fd = get_pin(&dir, tc_pin(program)).ok()?;
        sys::program_info(fd.as_fd()).ok().map(|info| info.id)
    })
}

/// The pin of a tc program in an instance's folder.
pub(super) fn tc_pin(program: TcProgram) -> &'static str {
    match program {
        TcProgram::EgressEthernet => "out-eth",
        TcProgram::EgressIp => "out-ip",
        TcProgram::IngressEthernet => "in-eth",
        TcProgram::IngressIp => "in-ip",
        TcProgram::AnswersEthernet => "ack-eth",
        TcProgram::AnswersIp => "ack-ip",
    }
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

pub(super) fn remove_dir(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        fs::remove_file(entry?.path())?;
    }
    fs::remove_dir(dir)
}
