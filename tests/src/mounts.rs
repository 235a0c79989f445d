//! File systems that are full or cannot be written, for one test.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::sys;

/// Something mounted in the calling thread's own mount namespace, until it goes.
#[derive(Debug)]
pub struct Mount(PathBuf);

impl Mount {
    /// What is in the folder can be read, and nothing in it written.
    ///
    /// # Panics
    /// When that cannot be arranged.
    #[must_use]
    pub fn read_only(folder: &Path) -> Self {
        sys::unshare_mounts().expect("own mounts");
        sys::mount_read_only(&text(folder)).expect("a read-only mount");
        Self(folder.to_owned())
    }

    /// An empty file system of this size over the folder.
    ///
    /// # Panics
    /// When it cannot be mounted.
    #[must_use]
    pub fn small(folder: &Path, kibibytes: u32) -> Self {
        sys::unshare_mounts().expect("own mounts");
        let options = CString::new(format!("size={kibibytes}k")).expect("no NUL");
        sys::mount_tmpfs(&text(folder), &options).expect("a tmpfs");
        Self(folder.to_owned())
    }

    /// Fills it; the file that does so.
    ///
    /// # Panics
    /// When it does not become full.
    #[must_use]
    pub fn fill(&self) -> PathBuf {
        let path = self.0.join("fill");
        // A page at a time: a larger write fails as a whole.
        let mut file = fs::File::create(&path).expect("a file");
        let full = (0..1 << 20).find_map(|_| std::io::Write::write_all(&mut file, &[0; 4096]).err());
        assert_eq!(full.map(|error| error.kind()), Some(std::io::ErrorKind::StorageFull));
        path
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        sys::unmount(&text(&self.0)).expect("unmounted");
    }
}

fn text(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("no NUL in a path")
}
