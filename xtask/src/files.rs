//! Reading, writing and hashing files, with errors that name the path.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use sha2::{Digest as _, Sha256};

use crate::error::{Error, Result};

/// The whole file as bytes.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| Error::io("read", path, &e))
}

/// The whole file as text.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| Error::io("read", path, &e))
}

/// Creates a directory and its parents.
pub(crate) fn create_dir(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(|e| Error::io("create", path, &e))
}

/// Removes a directory tree; one that is not there is fine.
pub(crate) fn remove_tree(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path, &e)),
        _ => Ok(()),
    }
}

/// Moves a file or directory within one file system.
pub(crate) fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).map_err(|e| Error::io("move into place", to, &e))
}

/// Writes beside the target and renames, so that a reader never sees half a file.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(parent) = path.parent() {
        create_dir(parent)?;
    }
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".new-{}", std::process::id()));
    let beside = path.with_file_name(name);
    fs::write(&beside, bytes).map_err(|e| Error::io("write", &beside, &e))?;
    rename(&beside, path)
}

/// Every regular file below `root`, sorted by path; a symbolic link is an error (an input must be what it seems).
pub(crate) fn walk(root: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut open = vec![root.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(&dir).map_err(|e| Error::io("read", &dir, &e))? {
            let entry = entry.map_err(|e| Error::io("read", &dir, &e))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(|e| Error::io("read", &path, &e))?;
            if kind.is_dir() {
                open.push(path);
            } else if kind.is_file() {
                found.push(path);
            } else {
                return Err(Error::new(format!("{} is neither a file nor a directory", path.display())));
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 as lower-case hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of a file, read in pieces.
pub(crate) fn sha256_file(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path).map_err(|e| Error::io("open", path, &e))?;
    let mut hasher = HashWriter(Sha256::new());
    io::copy(&mut file, &mut hasher).map_err(|e| Error::io("read", path, &e))?;
    Ok(hex(&hasher.0.finalize()))
}

struct HashWriter(Sha256);

impl io::Write for HashWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A hash over labelled parts, each prefixed with its length, so that no two different lists of parts collide.
#[derive(Clone, Default)]
pub(crate) struct PartsHash(Sha256);

impl PartsHash {
    /// Adds one part under a label.
    pub(crate) fn add(&mut self, label: &str, bytes: &[u8]) {
        for part in [label.as_bytes(), bytes] {
            self.0.update((part.len() as u64).to_le_bytes());
            self.0.update(part);
        }
    }

    /// The hash in hexadecimal.
    pub(crate) fn finish(self) -> String {
        hex(&self.0.finalize())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashing_a_file_equals_hashing_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        write_whole(&path, b"abc").unwrap();
        assert_eq!(sha256_file(&path).unwrap(), sha256(b"abc"));
        assert_eq!(sha256(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(walk(dir.path()).unwrap(), [path]);
    }

    #[test]
    fn parts_are_kept_apart() {
        let hash = |parts: &[(&str, &[u8])]| {
            let mut hash = PartsHash::default();
            parts.iter().for_each(|(label, bytes)| hash.add(label, bytes));
            hash.finish()
        };
        assert_ne!(hash(&[("a", b"bc")]), hash(&[("ab", b"c")]));
        assert_ne!(hash(&[("a", b"b"), ("c", b"")]), hash(&[("a", b""), ("c", b"b")]));
    }
}
