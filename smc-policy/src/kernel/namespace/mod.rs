//! Network namespaces: which there are, how a person finds each, and work inside one.
//!
//! A namespace exists while a thread is in it, while it is mounted, or while somebody holds a file or socket of it. The
//! first two are found (`find`); one that only a descriptor or a socket keeps is not, nor what a mount namespace
//! without any process has mounted, nor processes that this process's /proc does not show (a container's shows its own).

mod enter;
mod find;
mod mountinfo;

use std::{
    fmt, fs,
    fs::File,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

pub use find::{Unreached, all, exists};

use super::{
    error::{Doing, KernelError},
    sys,
};

/// A network namespace: the inode number of its file in nsfs, unique while it exists.
pub type NamespaceId = u64;

/// Where `ip netns` mounts namespaces under names (ip-netns(8)).
const NAMES: &str = "/run/netns";
/// NSFS_MAGIC (include/uapi/linux/magic.h).
const NSFS_MAGIC: i64 = 0x6e73_6673;
/// The first namespace's number since Linux 6.18 (`NET_NS_INIT_INO`, include/uapi/linux/nsfs.h). Numbers that are given
/// out begin above it in every kernel (`PROC_DYNAMIC_FIRST`, fs/proc/generic.c).
const INITIAL: NamespaceId = 0xefff_fff9;
/// The calling thread's: threads may be in different ones.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace, which exists at least as long as this value.
#[derive(Debug)]
pub struct Namespace {
    /// Its number.
    pub id: NamespaceId,
    /// How a person finds it.
    pub found: Found,
    fd: OwnedFd,
}

/// How a person finds a namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// The one that this tool was started in.
    Own,
    /// A process is in it.
    Process {
        /// Its id.
        pid: u32,
        /// Its name (/proc/PID/comm).
        command: String,
    },
    /// A thread of a process is in it, whose first thread is not.
    Thread {
        /// The process's id.
        pid: u32,
        /// The thread's.
        tid: u32,
        /// The thread's name.
        command: String,
    },
    /// It is mounted: a path that works from here, under /proc/PID/root when only process PID sees it.
    Mounted(PathBuf),
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own => f.write_str("this process's own namespace"),
            Self::Process { pid, command } => {
                write!(f, "the namespace of process {pid} ({})", printable(command))
            }
            Self::Thread { pid, tid, command } => {
                write!(f, "the namespace of thread {tid} ({}) of process {pid}", printable(command))
            }
            Self::Mounted(path) => f.write_str(&printable(&path.to_string_lossy())),
        }
    }
}

/// Names come from whoever runs the process or made the mount: no control characters for the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

impl AsFd for Namespace {
    /// Its open file in nsfs.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The one that the calling thread is in.
///
/// # Errors
/// [`KernelError::Io`] without /proc.
pub fn current() -> Result<NamespaceId, KernelError> {
    fs::metadata(OWN).map(|m| m.ino()).doing(|| format!("read {OWN}"))
}

/// The one that the calling thread is in.
///
/// # Errors
/// [`KernelError::Io`] without /proc.
pub fn own() -> Result<Namespace, KernelError> {
    let (id, fd) = open(Path::new(OWN)).doing(|| format!("open {OWN}"))?;
    Ok(Namespace { id, found: Found::Own, fd })
}

/// The one mounted as /run/netns/`name`.
///
/// # Errors
/// [`KernelError::Missing`] when there is none, with the next step; [`KernelError::Io`].
pub fn named(name: &str) -> Result<Namespace, KernelError> {
    let missing = |feature| KernelError::Missing {
        feature,
        next: format!("`ip netns add {name}` makes one, `ip netns list` names those that there are"),
    };
    if matches!(name, "" | "." | "..") || name.contains(['/', '\0']) {
        return Err(KernelError::Missing {
            feature: format!("'{}' cannot be a network namespace's name", printable(name)),
            next: format!("give the name of a file in {NAMES}, as `ip netns list` prints it"),
        });
    }
    let path = Path::new(NAMES).join(name);
    match open(&path) {
        Ok((id, fd)) => Ok(Namespace { id, found: Found::Mounted(path), fd }),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Err(missing(format!("there is no network namespace {name} (no {})", path.display())))
        }
        Err(e) if e.kind() == io::ErrorKind::InvalidData => {
            Err(missing(format!("{} is no mounted network namespace", path.display())))
        }
        Err(e) => Err(e).doing(|| format!("open {}", path.display())),
    }
}

/// Is it the namespace that the kernel began with? Before Linux 6.18 that is taken to be process 1's; false when it is
/// not known.
pub fn is_initial(id: NamespaceId) -> bool {
    id == INITIAL || fs::metadata("/proc/1/ns/net").is_ok_and(|m| m.ino() == id)
}

/// Opens a namespace's file. Whatever else it turns out to be (`InvalidData`) is not opened: opening a device may do
/// something, and opening a FIFO waits.
fn open(path: &Path) -> io::Result<(NamespaceId, OwnedFd)> {
    open_found(File::options().read(true).custom_flags(libc::O_PATH).open(path)?.as_fd())
}

/// As [`open`], of a file that was found but not opened (`O_PATH`).
fn open_found(found: BorrowedFd<'_>) -> io::Result<(NamespaceId, OwnedFd)> {
    let other = || io::Error::new(io::ErrorKind::InvalidData, "it is no network namespace");
    let path = PathBuf::from(format!("/proc/thread-self/fd/{}", found.as_raw_fd()));
    if sys::filesystem_magic(&path)? != NSFS_MAGIC {
        return Err(other());
    }
    let file = File::open(path)?;
    if !sys::is_network_namespace(file.as_fd())? {
        return Err(other());
    }
    Ok((file.metadata()?.ino(), file.into()))
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn ours() {
        let own = own().unwrap();
        assert_eq!((own.id, own.found), (current().unwrap(), Found::Own));
    }

    #[test]
    fn what_is_no_namespace_is_not_opened() {
        for path in ["/dev/null", "/proc/self/ns/mnt", "/proc/version", "/"] {
            assert_eq!(open(Path::new(path)).unwrap_err().kind(), io::ErrorKind::InvalidData, "{path}");
        }
        assert_eq!(open(Path::new("/proc/nothing")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_missing_name_has_a_next_step() {
        assert_snapshot!(
            named("no-such-one").unwrap_err(),
            @"there is no network namespace no-such-one (no /run/netns/no-such-one); `ip netns add no-such-one` makes one, `ip netns list` names those that there are"
        );
        assert_snapshot!(
            named("../../etc/passwd").unwrap_err(),
            @"'../../etc/passwd' cannot be a network namespace's name; give the name of a file in /run/netns, as `ip netns list` prints it"
        );
        for name in ["", ".", "..", "a\0b"] {
            assert!(matches!(named(name), Err(KernelError::Missing { .. })), "{name:?}");
        }
    }

    #[test]
    fn how_a_person_finds_one() {
        let command = "a\x1b[31mb\n".to_owned();
        assert_snapshot!(Found::Own, @"this process's own namespace");
        assert_snapshot!(Found::Process { pid: 123, command: "nginx".into() }, @"the namespace of process 123 (nginx)");
        assert_snapshot!(
            Found::Thread { pid: 123, tid: 125, command },
            @"the namespace of thread 125 (a�[31mb�) of process 123"
        );
        assert_snapshot!(Found::Mounted("/run/netns/blue".into()), @"/run/netns/blue");
    }

    #[test]
    fn the_first_namespace() {
        assert!(is_initial(INITIAL));
        assert!(!is_initial(0));
    }
}
