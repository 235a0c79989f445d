//! Reads policy files: those named, or the two policy folders.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::outcome::Failure;
use crate::{
    paths::Paths,
    policy::{
        SourceFile, SourceKind,
        folder::{Entry, Folder, files},
        load::lists,
    },
};

/// Reads the files of `named` (files, or folders of `*.toml`), or without any the vendor's and the administrator's
/// folder.
pub(super) fn read(paths: &Paths, named: &[PathBuf]) -> Result<Vec<SourceFile>, Failure> {
    let mut list = Vec::new();
    if named.is_empty() {
        let (vendor, administrator) = (paths.usr_policies(), paths.etc_policies());
        list = files(&[
            listing(&vendor)?.unwrap_or(empty(&vendor)),
            listing(&administrator)?.unwrap_or(empty(&administrator)),
        ]);
        if list.is_empty() {
            return Err(Failure::usage(format!(
                "no policy: {} and {} have no *.toml file; name a file or folder, or put one there",
                administrator.display(),
                vendor.display()
            )));
        }
    }
    for path in named {
        if path.is_dir() {
            let found = files(&[listing(path)?.unwrap_or(empty(path))]);
            if found.is_empty() {
                return Err(Failure::usage(format!("{}: a folder without *.toml files", path.display())));
            }
            list.extend(found);
        } else {
            list.push(path.clone());
        }
    }
    let mut files = list.into_iter().map(read_one).collect::<Result<Vec<_>, _>>()?;
    let lists: Vec<SourceFile> = lists(&files).into_iter().map(read_list).collect();
    files.extend(lists);
    Ok(files)
}

/// Reads a `peers_file`. One that cannot be read is reported where a policy file names it, together with all else that is
/// wrong.
fn read_list(path: PathBuf) -> SourceFile {
    let read = match fs::read(&path) {
        Ok(bytes) => String::from_utf8(bytes)
            .map_err(|e| format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err("no such file".to_owned()),
        Err(e) => Err(e.to_string()),
    };
    match read {
        Ok(text) => SourceFile::list(path, text),
        Err(why) => SourceFile { path, text: why, kind: SourceKind::Unread },
    }
}

/// As [`read`], with absolute paths: what is recorded must not depend on where the tool was called.
pub(super) fn read_absolute(
    paths: &Paths,
    named: &[PathBuf],
) -> Result<(Vec<PathBuf>, Vec<SourceFile>), Failure> {
    let named: Vec<PathBuf> = named.iter().map(|p| absolute(p)).collect::<Result<_, _>>()?;
    let sources = read(paths, &named)?;
    Ok((named, sources))
}

/// A path that does not depend on where the tool was called.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|e| Failure::usage(format!("{}: {e}", path.display())))
}

/// Reads one file.
pub(super) fn read_one(path: PathBuf) -> Result<SourceFile, Failure> {
    let bytes = fs::read(&path).map_err(|e| Failure::usage(unreadable(&path, &e)))?;
    text(path, bytes)
}

/// Reads one file that need not be there.
pub(super) fn read_if_there(path: PathBuf) -> Result<Option<SourceFile>, Failure> {
    match fs::read(&path) {
        Ok(bytes) => text(path, bytes).map(Some),
        // A link that leads nowhere is no missing file: somebody wanted one there.
        Err(e) if e.kind() == io::ErrorKind::NotFound && fs::symlink_metadata(&path).is_err() => Ok(None),
        Err(e) => Err(Failure::usage(unreadable(&path, &e))),
    }
}

fn text(path: PathBuf, bytes: Vec<u8>) -> Result<SourceFile, Failure> {
    let text = String::from_utf8(bytes).map_err(|e| {
        Failure::usage(format!("{}: not UTF-8 at byte {}", path.display(), e.utf8_error().valid_up_to()))
    })?;
    Ok(SourceFile::policy(path, text))
}

fn unreadable(path: &Path, e: &io::Error) -> String {
    match e.kind() {
        io::ErrorKind::NotFound => format!("{}: no such file or folder", path.display()),
        _ => format!("{}: {e}", path.display()),
    }
}

fn empty(path: &Path) -> Folder<'_> {
    Folder { path, entries: Vec::new() }
}

fn listing(path: &Path) -> Result<Option<Folder<'_>>, Failure> {
    let entries = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Failure::usage(format!("{}: {e}", path.display()))),
        Ok(entries) => entries,
    };
    let mut out = empty(path);
    for entry in entries {
        let entry = entry.map_err(|e| Failure::usage(format!("{}: {e}", path.display())))?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let masks = fs::read_link(entry.path()).is_ok_and(|target| target == Path::new("/dev/null"));
        out.entries.push(Entry { name, masks });
    }
    Ok(Some(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(root: &Path) -> Paths {
        Paths {
            etc: root.join("etc"),
            usr: root.join("usr"),
            run: root.join("run"),
            state: root.join("state"),
            bpffs: root.join("bpf"),
        }
    }

    #[test]
    fn two_folders_are_one_list() {
        let root = tempfile::tempdir().unwrap();
        let p = paths(root.path());
        fs::create_dir_all(p.etc_policies()).unwrap();
        fs::create_dir_all(p.usr_policies()).unwrap();
        fs::write(p.usr_policies().join("10-a.toml"), "vendor a").unwrap();
        fs::write(p.usr_policies().join("20-b.toml"), "vendor b").unwrap();
        fs::write(p.etc_policies().join("20-b.toml"), "admin b").unwrap();
        std::os::unix::fs::symlink("/dev/null", p.etc_policies().join("10-a.toml")).unwrap();
        let texts: Vec<_> = read(&p, &[]).unwrap().into_iter().map(|s| s.text).collect();
        assert_eq!(texts, ["admin b"]);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let root = tempfile::tempdir().unwrap();
        let p = paths(root.path());
        let said = |named: &[PathBuf]| read(&p, named).unwrap_err().message;
        assert!(said(&[]).contains("no policy"));
        assert!(said(&[root.path().join("x.toml")]).contains("no such file"));
        assert!(said(&[root.path().to_owned()]).contains("without *.toml"));
        fs::write(root.path().join("bad.toml"), [b'a', 0xff]).unwrap();
        assert!(said(&[root.path().join("bad.toml")]).contains("not UTF-8 at byte 1"));
    }
}
