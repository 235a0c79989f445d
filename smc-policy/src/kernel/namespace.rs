//! Network namespaces: which one this process is in, and whether another still exists.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::error::{Doing, KernelError};

/// A network namespace: the inode number of its file in nsfs, unique while it exists.
pub type NamespaceId = u64;

/// The one this process is in.
///
/// # Errors
/// [`KernelError::Io`] without /proc.
pub fn current() -> Result<NamespaceId, KernelError> {
    let path = "/proc/self/ns/net";
    fs::metadata(path).map(|m| m.ino()).doing(|| format!("read {path}"))
}

/// Is some process in it, or is it mounted under /run/netns?
pub fn exists(id: NamespaceId) -> bool {
    let of = |path: PathBuf| fs::metadata(path).is_ok_and(|m| m.ino() == id);
    let entries = |dir: &str| fs::read_dir(dir).into_iter().flatten().flatten();
    let is_process =
        |name: &std::ffi::OsStr| name.to_str().is_some_and(|n| n.bytes().all(|b| b.is_ascii_digit()));
    entries("/proc").any(|e| is_process(&e.file_name()) && of(e.path().join(Path::new("ns/net"))))
        || entries("/run/netns").any(|e| of(e.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_exists() {
        assert!(exists(current().unwrap()));
        assert!(!exists(0));
    }
}
