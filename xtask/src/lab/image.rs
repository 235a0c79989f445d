//! What a lab machine finds in its file system: host programs with their libraries, the kernel's modules, the job.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::{cpio::Tree, kernel::Kernel};
use crate::{
    error::{Error, Result},
    exec,
    packages::{self, Need},
};

/// The script that runs as the machine's first process.
const INIT: &str = include_str!("init.sh");

/// Names under which kmod's one program is called.
const KMOD: [&str; 5] = ["modprobe", "insmod", "rmmod", "lsmod", "modinfo"];

/// Fills in everything but the job: programs, modules, first process.
pub(crate) fn base(kernel: &Kernel) -> Result<Tree> {
    let mut tree = Tree::default();
    // One folder for all programs, under all the names that people use for it.
    for (path, target) in
        [("sbin", "bin"), ("usr/bin", "../bin"), ("usr/sbin", "../bin"), ("var/run", "../run")]
    {
        tree.link(path, target);
    }
    for path in ["dev", "proc", "sys", "tmp", "run", "root", "etc", "mnt", "lab/job"] {
        tree.directory(path);
    }
    tree.text("etc/passwd", "root:x:0:0::/root:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\n", 0o644);
    tree.text("etc/group", "root:x:0:\nnogroup:x:65534:\n", 0o644);
    tree.text("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n", 0o644);
    tree.text("init", INIT, 0o755);

    for need in packages::LAB.iter().chain(packages::OPTIONAL.iter().filter(|need| need.is_there())) {
        if let Some(path) = need.in_guest_from()? {
            program(&mut tree, need.program, &path)?;
        }
    }
    for name in KMOD {
        tree.link(&format!("bin/{name}"), "kmod");
    }
    let busybox = Need::find("busybox")?;
    for applet in exec::capture(Command::new(&busybox).arg("--list"))?.lines() {
        let path = format!("bin/{applet}");
        // Real programs before applets: the applets know less.
        if !applet.is_empty() && !tree.has(&path) {
            tree.link(&path, "busybox");
        }
    }
    for (from, place) in kernel.module_files()? {
        tree.host(&place, &from);
    }
    Ok(tree)
}

/// Adds a program as /bin/NAME, with the shared libraries it needs.
pub(crate) fn program(tree: &mut Tree, name: &str, from: &Path) -> Result<()> {
    place(tree, &format!("bin/{name}"), from)
}

/// Adds an executable at a path, with the shared libraries it needs.
pub(crate) fn place(tree: &mut Tree, path: &str, from: &Path) -> Result<()> {
    tree.host(path, from);
    for library in libraries(from)? {
        tree.host(&library.to_string_lossy(), &library);
    }
    Ok(())
}

/// Shared libraries of an executable; none for scripts and static programs.
fn libraries(executable: &Path) -> Result<Vec<PathBuf>> {
    let mut head = [0; 4];
    let mut file = std::fs::File::open(executable).map_err(|e| Error::io("open", executable, &e))?;
    if std::io::Read::read_exact(&mut file, &mut head).is_err() || head != *b"\x7fELF" {
        return Ok(Vec::new());
    }
    let output = exec::output(Command::new("ldd").arg(executable))?;
    parse_ldd(&String::from_utf8_lossy(&output.stdout)).map_err(|library| {
        Error::new(format!("{} needs {library}, which this host does not have", executable.display()))
    })
}

/// The paths in ldd's output, or the name of a library that it did not find.
fn parse_ldd(text: &str) -> std::result::Result<Vec<PathBuf>, String> {
    let mut found = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some((name, _)) = line.split_once(" => not found") {
            return Err(name.to_owned());
        }
        let path = line.split_once(" => ").map_or(line, |(_, path)| path);
        let path = path.split(" (0x").next().unwrap_or_default();
        if path.starts_with('/') {
            found.push(PathBuf::from(path));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_ldd() {
        let text = "\tlinux-vdso.so.1 (0x00007ffe)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f1)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f2)\n";
        let found = parse_ldd(text).unwrap();
        assert_eq!(
            found,
            ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from)
        );
        assert_eq!(parse_ldd("\tnot a dynamic executable\n").unwrap(), Vec::<PathBuf>::new());
        assert_eq!(parse_ldd("\tlibx.so.1 => not found\n").unwrap_err(), "libx.so.1");
    }

    #[test]
    fn scripts_have_no_libraries() {
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("s");
        crate::files::write_whole(&script, b"#!/bin/sh\n").unwrap();
        assert_eq!(libraries(&script).unwrap(), Vec::<PathBuf>::new());
        assert!(libraries(Path::new("/bin/sh")).unwrap().iter().any(|path| path.ends_with("libc.so.6")));
    }
}
