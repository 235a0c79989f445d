//! Writer of cpio archives in the "newc" format, the one that the kernel unpacks as its first file system
//! (Documentation/driver-api/early-userspace/buffer-format.rst). Not compressed: the emulated processor is slower at
//! unpacking than the emulator is at copying.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Write},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use crate::error::{Error, Result};

const DIRECTORY: u32 = 0o040_755;
const SYMLINK: u32 = 0o120_777;
const REGULAR: u32 = 0o100_000;

/// One entry that is not a directory.
enum Entry {
    /// Contents held in memory, and permission bits.
    Text(Vec<u8>, u32),
    /// Contents and permission bits of a host file.
    Host(PathBuf),
    /// Target of a symbolic link.
    Link(String),
}

/// A file tree to be written; parents of entries come by themselves.
#[derive(Default)]
pub(crate) struct Tree {
    directories: BTreeSet<String>,
    entries: BTreeMap<String, Entry>,
}

impl Tree {
    /// An empty directory.
    pub(crate) fn directory(&mut self, path: &str) {
        let path = path.trim_matches('/');
        if !path.is_empty() && self.directories.insert(path.to_owned()) {
            self.parents_of(path);
        }
    }

    /// A file with the given contents.
    pub(crate) fn text(&mut self, path: &str, contents: impl Into<Vec<u8>>, mode: u32) {
        self.put(path, Entry::Text(contents.into(), mode));
    }

    /// A copy of a host file, read when the archive is written.
    pub(crate) fn host(&mut self, path: &str, from: &Path) {
        self.put(path, Entry::Host(from.to_owned()));
    }

    /// A symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.put(path, Entry::Link(target.to_owned()));
    }

    /// Copies a host directory with everything in it.
    pub(crate) fn host_tree(&mut self, path: &str, from: &Path) -> Result<()> {
        self.directory(path);
        for file in crate::files::walk(from)? {
            let relative = file.strip_prefix(from).unwrap_or(&file).to_string_lossy().into_owned();
            self.host(&format!("{path}/{relative}"), &file);
        }
        Ok(())
    }

    /// Whether there is an entry at this path already.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.entries.contains_key(path.trim_matches('/'))
    }

    fn put(&mut self, path: &str, entry: Entry) {
        let path = path.trim_matches('/').to_owned();
        self.parents_of(&path);
        self.entries.insert(path, entry);
    }

    fn parents_of(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
    }

    /// Writes the archive: directories first, so that every parent exists.
    pub(crate) fn write(&self, out: &Path) -> Result<()> {
        let file = fs::File::create(out).map_err(|e| Error::io("create", out, &e))?;
        let mut writer = Writer { out: io::BufWriter::with_capacity(1 << 20, file), inode: 0 };
        let failed = |e: io::Error| Error::io("write", out, &e);
        for path in &self.directories {
            writer.entry(path, DIRECTORY, &[]).map_err(failed)?;
        }
        for (path, entry) in &self.entries {
            match entry {
                Entry::Text(contents, mode) => {
                    writer.entry(path, REGULAR | mode, contents).map_err(failed)?
                }
                Entry::Link(target) => writer.entry(path, SYMLINK, target.as_bytes()).map_err(failed)?,
                Entry::Host(from) => {
                    let contents = crate::files::read(from)?;
                    let mode = from.metadata().map_err(|e| Error::io("read", from, &e))?.permissions().mode();
                    writer.entry(path, REGULAR | (mode & 0o777), &contents).map_err(failed)?;
                }
            }
        }
        writer.entry("TRAILER!!!", 0, &[]).map_err(failed)?;
        writer.out.flush().map_err(failed)
    }
}

struct Writer<W> {
    out: W,
    inode: u32,
}

impl<W: Write> Writer<W> {
    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        let too_big = |_| io::Error::new(io::ErrorKind::FileTooLarge, format!("{path} is larger than 4 GiB"));
        let size = u32::try_from(contents.len()).map_err(too_big)?;
        let name_size = u32::try_from(path.len() + 1).map_err(too_big)?;
        self.inode += 1;
        let links = if mode & REGULAR == 0 && mode != 0 { 2 } else { 1 };
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08X}")?;
        }
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(&[0])?;
        self.pad(110 + path.len() + 1)?;
        self.out.write_all(contents)?;
        self.pad(contents.len())
    }

    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..written.next_multiple_of(4) - written])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_has_parents_before_children_and_aligned_entries() {
        let dir = tempfile::tempdir().unwrap();
        let mut tree = Tree::default();
        tree.text("/a/b/hello", "hi\n", 0o755);
        tree.link("/bin/sh", "busybox");
        let out = dir.path().join("x.cpio");
        tree.write(&out).unwrap();
        let bytes = fs::read(&out).unwrap();
        assert_eq!(bytes.len() % 4, 0);
        // Read back with an independent little parser.
        let mut at = 0;
        let mut seen = Vec::new();
        while at < bytes.len() {
            let field = |n: usize| {
                let start = at + 6 + n * 8;
                usize::from_str_radix(std::str::from_utf8(&bytes[start..start + 8]).unwrap(), 16).unwrap()
            };
            assert_eq!(&bytes[at..at + 6], b"070701");
            let (mode, size, name_size) = (field(1), field(6), field(11));
            let name = String::from_utf8(bytes[at + 110..at + 109 + name_size].to_vec()).unwrap();
            let data = (at + 110 + name_size).next_multiple_of(4);
            seen.push((name, mode, String::from_utf8(bytes[data..data + size].to_vec()).unwrap()));
            at = (data + size).next_multiple_of(4);
        }
        let expected = [
            ("a", 0o040_755, ""),
            ("a/b", 0o040_755, ""),
            ("bin", 0o040_755, ""),
            ("a/b/hello", 0o100_755, "hi\n"),
            ("bin/sh", 0o120_777, "busybox"),
            ("TRAILER!!!", 0, ""),
        ];
        assert_eq!(seen, expected.map(|(name, mode, data)| (name.to_owned(), mode, data.to_owned())));
    }
}
