//! Who marks SYNs: a sock_ops program at cgroups, attached by links that are pinned beside the shared maps as
//! `cgroup-<cgroup>`; the key it marks with; the network namespaces it marks in.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
};

use smc_policy_common::canary::{Keys, PREVIOUS_HOLDS};

use super::{Shared, now};
use crate::kernel::{
    error::{Doing, KernelError, remove_if_there},
    pinned::pin,
    random, sys,
};

/// Begins the names of links.
const LINK: &str = "cgroup-";
/// A key is replaced by an apply when it is older: a day, in ns.
const KEY_HOLDS: u64 = 24 * 3600 * 1_000_000_000;

/// Where cgroup2 is mounted: all processes are in cgroups below, those in containers too.
///
/// # Errors
/// [`KernelError::Missing`].
pub fn cgroup_root() -> Result<PathBuf, KernelError> {
    let mounts = fs::read_to_string("/proc/self/mounts").doing(|| "read /proc/self/mounts".into())?;
    root_in(&mounts).ok_or_else(|| KernelError::Missing {
        feature: "no cgroup2 is mounted".into(),
        next: "mount -t cgroup2 none /sys/fs/cgroup".into(),
    })
}

fn root_in(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let at = fields.next()?;
        (fields.next()? == "cgroup2").then(|| PathBuf::from(at))
    })
}

/// Attaches the program to these cgroups and to no others. A program that is attached is replaced in place. What could not be
/// done is returned, and the other cgroups have the program all the same.
///
/// # Errors
/// [`KernelError::Io`] when not even the links that are there can be read.
pub fn attach(
    pins: &Path,
    cgroups: &[PathBuf],
    program: BorrowedFd<'_>,
) -> Result<Vec<KernelError>, KernelError> {
    let folder = Shared::folder(pins);
    let wanted = sys::program_info(program).doing(|| "ask what a sock_ops program is".into())?.id;
    let (mut kept, mut problems) = (Vec::new(), Vec::new());
    for cgroup in cgroups {
        match attach_one(&folder, cgroup, program, wanted) {
            Ok(path) => kept.push(path),
            Err(problem) => problems.push(problem),
        }
    }
    remove_others(&folder, &kept)?;
    Ok(problems)
}

/// The pin of the link.
fn attach_one(
    folder: &Path,
    cgroup: &Path,
    program: BorrowedFd<'_>,
    wanted: u32,
) -> Result<PathBuf, KernelError> {
    let doing = || format!("mark SYNs of the cgroup {}", cgroup.display());
    let file = File::open(cgroup).doing(doing)?;
    let id = cgroup_id(&file).doing(doing)?;
    let path = folder.join(format!("{LINK}{id}"));
    match open(&path)? {
        Some((_, found, at)) if found == wanted && at == id => {}
        Some((link, _, at)) if at == id => {
            sys::link_update(link.as_fd(), program).doing(doing)?;
        }
        _ => {
            remove_if_there(&path)?;
            let link = sys::cgroup_link_create(file.as_fd(), program);
            pin(&link.map_err(|e| refused(e, cgroup))?, folder, &format!("{LINK}{id}"))?;
        }
    }
    Ok(path)
}

/// A cgroup's id is the inode number of its folder (`kernfs_ino`, include/linux/kernfs.h).
fn cgroup_id(folder: &File) -> io::Result<u64> {
    folder.metadata().map(|metadata| metadata.ino())
}

/// Does this cgroup have the program?
///
/// # Errors
/// [`KernelError::Io`].
pub fn is_attached(pins: &Path, cgroup: &Path) -> Result<bool, KernelError> {
    let Ok(id) = File::open(cgroup).and_then(|folder| cgroup_id(&folder)) else { return Ok(false) };
    let link = open(&Shared::folder(pins).join(format!("{LINK}{id}")))?;
    Ok(link.is_some_and(|(.., at)| at == id))
}

fn refused(error: io::Error, cgroup: &Path) -> KernelError {
    match error.raw_os_error() {
        Some(libc::EBADF) => KernelError::Missing {
            feature: format!("{} is no cgroup of cgroup2", cgroup.display()),
            next: "mount -t cgroup2 none /sys/fs/cgroup".into(),
        },
        _ => KernelError::Io { doing: format!("mark SYNs of the cgroup {}", cgroup.display()), error },
    }
}

/// Marks no SYNs any more.
///
/// # Errors
/// [`KernelError::Io`].
pub fn detach(pins: &Path) -> Result<(), KernelError> {
    remove_others(&Shared::folder(pins), &[])
}

/// The programs attached, by the kernel's ids, to cgroups that exist.
///
/// # Errors
/// [`KernelError::Io`].
pub fn attached(pins: &Path) -> Result<Vec<u32>, KernelError> {
    let mut programs = Vec::new();
    for path in links(&Shared::folder(pins))? {
        programs.extend(open(&path)?.filter(|(_, _, cgroup)| *cgroup != 0).map(|(_, program, _)| program));
    }
    Ok(programs)
}

fn remove_others(folder: &Path, kept: &[PathBuf]) -> Result<(), KernelError> {
    for path in links(folder)?.into_iter().filter(|path| !kept.contains(path)) {
        if let Some((link, ..)) = open(&path)? {
            sys::link_detach(link.as_fd()).doing(|| format!("end the link {}", path.display()))?;
        }
        remove_if_there(&path)?;
    }
    Ok(())
}

fn links(folder: &Path) -> Result<Vec<PathBuf>, KernelError> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.doing(|| format!("list {}", folder.display()))?,
    };
    let mut links = Vec::new();
    for entry in entries {
        let entry = entry.doing(|| format!("list {}", folder.display()))?;
        if entry.file_name().to_string_lossy().starts_with(LINK) {
            links.push(entry.path());
        }
    }
    Ok(links)
}

/// A pinned link, its program and its cgroup. `None`: there is none.
fn open(path: &Path) -> Result<Option<(OwnedFd, u32, u64)>, KernelError> {
    let opened = sys::get_pinned(path).and_then(|link| {
        let info = sys::cgroup_link_info(link.as_fd())?;
        Ok(info.map(|(program, cgroup)| (link, program, cgroup)))
    });
    match opened {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.doing(|| format!("open {}", path.display())),
    }
}

/// Sees to it that there is a key, and one that is not too old.
///
/// # Errors
/// [`KernelError::Io`].
pub fn renew_key(shared: &Shared) -> Result<(), KernelError> {
    let map = shared.map("smcpol_keys")?;
    let bytes = sys::map_lookup(map, 0).doing(|| "read the canary's key".into())?;
    let keys = keys_of(&bytes);
    let now = now();
    if keys.since != 0 && now.checked_sub(keys.since).is_some_and(|age| age < KEY_HOLDS) {
        return Ok(());
    }
    let new = Keys {
        current: [random::number()?, random::number()?],
        previous: keys.current,
        previous_until: if keys.since == 0 { 0 } else { now.saturating_add(PREVIOUS_HOLDS) },
        since: now,
    };
    // A SYN that is marked in this moment may get a nonce under half a key: then its echo goes unnoticed, once.
    sys::map_update(map, 0, &bytes_of(&new)).doing(|| "write the canary's key".into())
}

fn keys_of(bytes: &[u8]) -> Keys {
    let word = |at: usize| {
        let word = bytes.get(at * 8..at * 8 + 8).and_then(|b| b.try_into().ok());
        word.map_or(0, u64::from_ne_bytes)
    };
    Keys {
        current: [word(0), word(1)],
        previous: [word(2), word(3)],
        previous_until: word(4),
        since: word(5),
    }
}

fn bytes_of(keys: &Keys) -> Vec<u8> {
    let [a, b] = keys.current;
    let [c, d] = keys.previous;
    [a, b, c, d, keys.previous_until, keys.since].iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Marks SYNs in the namespaces with these cookies only; `None`: in all.
///
/// # Errors
/// [`KernelError::Io`].
pub fn set_namespaces(shared: &Shared, cookies: Option<&[u64]>) -> Result<(), KernelError> {
    let map = shared.map("smcpol_netns")?;
    let doing = || "write where SYNs are marked".to_owned();
    let wanted = cookies.unwrap_or(&[0]);
    // First those that are added: none is left out for a moment.
    for cookie in wanted {
        sys::element_update(map, &cookie.to_ne_bytes(), &1u32.to_ne_bytes()).doing(doing)?;
    }
    for key in sys::keys(map).doing(doing)? {
        if wanted.iter().all(|cookie| cookie.to_ne_bytes()[..] != key[..]) {
            sys::element_delete(map, &key).doing(doing)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_cgroup2_is() {
        let hybrid = "tmpfs /sys/fs/cgroup tmpfs ro 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(root_in(hybrid), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(root_in("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn keys_are_written_as_they_are_read() {
        let keys = Keys { current: [1, 2], previous: [3, 4], previous_until: 5, since: 6 };
        assert_eq!(bytes_of(&keys).len(), size_of::<Keys>());
        assert_eq!(keys_of(&bytes_of(&keys)), keys);
    }
}
