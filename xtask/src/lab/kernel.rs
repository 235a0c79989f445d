//! The kernels of the lab: the matrix that names them, and getting one ready to boot.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use serde::Deserialize;

use super::debian;
use crate::{
    error::{Error, Result},
    exec, files,
    paths::{self, Cache},
};

/// One row of tests/kernels/matrix.toml.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Row {
    /// What the kernel is called on the command line and in SMC_POLICY_KERNEL.
    pub(crate) name: String,
    /// One line about it.
    pub(crate) about: String,
    /// Another row whose kernel this is; only what is loaded differs.
    #[serde(default)]
    pub(crate) same_as: Option<String>,
    /// SHA-256 of NAME.tar.gz.
    #[serde(default)]
    pub(crate) sha256: String,
    /// Where it can be got without such an archive.
    #[serde(default)]
    pub(crate) debian: Option<debian::Package>,
    /// Modules that are left out of the machine.
    #[serde(default)]
    pub(crate) without: Vec<String>,
    /// Modules loaded at boot, in this order.
    pub(crate) load: Vec<String>,
    /// Memory of a machine in MiB.
    pub(crate) memory: u32,
    /// Whether the tests of two hosts run with it, in two machines.
    #[serde(default)]
    pub(crate) pair: bool,
    /// Needs of tests that this kernel does not meet, with the reason: only tests that name one may skip.
    #[serde(default)]
    pub(crate) lacks: BTreeMap<String, String>,
}

/// The matrix file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Matrix {
    kernel: Vec<Row>,
}

/// A kernel that is ready to boot.
#[derive(Debug, Clone)]
pub(crate) struct Kernel {
    /// Its row in the matrix.
    pub(crate) row: Row,
    /// Holds bzImage and lib/modules.
    dir: PathBuf,
    /// `uname -r`.
    pub(crate) release: String,
    /// The version as the kernel image states it, with the distribution's package version.
    pub(crate) version: String,
}

impl Kernel {
    /// The bootable image.
    pub(crate) fn image(&self) -> PathBuf {
        self.dir.join("bzImage")
    }

    /// The folder of modules and of depmod's tables.
    fn modules(&self) -> PathBuf {
        self.dir.join("lib/modules").join(&self.release)
    }

    /// The files below that folder that belong into a machine, with their places.
    pub(crate) fn module_files(&self) -> Result<Vec<(PathBuf, String)>> {
        let dir = self.modules();
        let is_left_out = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            self.row.without.iter().any(|module| name == format!("{module}.ko"))
        };
        let place = |path: PathBuf| {
            let relative = path.strip_prefix(&dir).unwrap_or(&path).to_string_lossy();
            let place = format!("lib/modules/{}/{relative}", self.release);
            (path, place)
        };
        Ok(files::walk(&dir)?.into_iter().filter(|path| !is_left_out(path)).map(place).collect())
    }
}

/// The folder with the matrix and the committed kernels.
pub(crate) fn committed() -> PathBuf {
    paths::workspace().join("tests/kernels")
}

/// All rows.
pub(crate) fn matrix() -> Result<Vec<Row>> {
    let path = committed().join("matrix.toml");
    parse(&files::read_text(&path)?).map_err(|e| Error::new(format!("{}: {e}", path.display())))
}

fn parse(text: &str) -> std::result::Result<Vec<Row>, String> {
    let matrix: Matrix = toml::from_str(text).map_err(|e| e.message().to_owned())?;
    Ok(matrix.kernel)
}

/// The row of this name.
pub(crate) fn row(name: &str) -> Result<Row> {
    let rows = matrix()?;
    let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    let known = format!("known are {}", names.join(", "));
    rows.iter()
        .find(|row| row.name == name)
        .cloned()
        .ok_or_else(|| Error::new(format!("there is no lab kernel {name}")).next(known))
}

/// Makes a kernel ready: from the archive committed or in the shared folder, else from Debian's archive.
pub(crate) fn ready(row: &Row, cache: &Cache) -> Result<Kernel> {
    if let Some(same_as) = &row.same_as {
        let kernel = ready(&self::row(same_as)?, cache)?;
        return Ok(Kernel { row: row.clone(), ..kernel });
    }
    let archive_name = format!("{}.tar.gz", row.name);
    let committed = committed().join(&archive_name);
    let shared = paths::shared().join("lab/kernels").join(&archive_name);
    let archive = [committed, shared].into_iter().find(|path| path.is_file());
    let dir = match (archive, &row.debian) {
        (Some(archive), package) => {
            let short = row.sha256.get(..12).unwrap_or(&row.sha256);
            let dir = cache.dir(&format!("kernels/{}-{short}", row.name), |partial| {
                unpack(&archive, &row.sha256, partial)
            })?;
            match package {
                // The archive may hold a smaller selection of modules than the tests use by now.
                Some(package) if !missing_modules(&open(row, dir.clone())?, &package.modules)?.is_empty() => {
                    debian::kernel(cache, row, package)?
                }
                _ => dir,
            }
        }
        (None, Some(package)) => debian::kernel(cache, row, package)?,
        (None, None) => {
            return Err(Error::new(format!("tests/kernels/{archive_name} is missing")).next(format!(
                "`git checkout tests/kernels`, or build it: `cargo xtask lab kernel {}`",
                row.name
            )));
        }
    };
    open(row, dir)
}

/// Those of `wanted` that a kernel has neither as a module nor built in.
fn missing_modules<'a>(kernel: &Kernel, wanted: &'a [String]) -> Result<Vec<&'a str>> {
    let mut names = BTreeSet::new();
    for table in ["modules.dep", "modules.builtin"] {
        let text = files::read_text(&kernel.modules().join(table))?;
        names.extend(text.lines().filter_map(|line| line.split(':').next()).map(debian::module_name));
    }
    Ok(wanted.iter().map(String::as_str).filter(|name| !names.contains(&debian::module_name(name))).collect())
}

/// Reads what a kernel's folder holds.
fn open(row: &Row, dir: PathBuf) -> Result<Kernel> {
    let version = image_version(&dir.join("bzImage"))?;
    let release = version.split(' ').next().unwrap_or_default().to_owned();
    let kernel = Kernel { row: row.clone(), dir, release, version };
    if kernel.modules().is_dir() {
        Ok(kernel)
    } else {
        Err(Error::new(format!("{} has no modules of its kernel {}", kernel.dir.display(), kernel.release))
            .next(format!("delete {} and try again", kernel.dir.display())))
    }
}

fn unpack(archive: &Path, sha256: &str, into: &Path) -> Result<()> {
    let found = files::sha256_file(archive)?;
    if found != sha256 {
        return Err(Error::new(format!(
            "{} has sha256 {found}, the matrix says {sha256}",
            archive.display()
        ))
        .next("restore the file or correct tests/kernels/matrix.toml"));
    }
    exec::run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(into))
}

/// The version string inside a bzImage (Documentation/arch/x86/boot.rst, field kernel_version).
fn image_version(image: &Path) -> Result<String> {
    let bytes = files::read(image)?;
    let text = || {
        let pointer = u16::from_le_bytes(bytes.get(0x20e..0x210)?.try_into().ok()?);
        let tail = bytes.get(usize::from(pointer) + 0x200..)?;
        let end = tail.iter().position(|&byte| byte == 0)?;
        std::str::from_utf8(&tail[..end]).ok()
    };
    match text() {
        Some(text) if bytes.get(0x202..0x206) == Some(b"HdrS") => Ok(text.to_owned()),
        _ => Err(Error::new(format!("{} is no Linux kernel image", image.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_matrix_is_valid() {
        let rows = matrix().unwrap();
        let mut names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), rows.len());
        for row in rows {
            if let Some(same_as) = &row.same_as {
                assert!(super::row(same_as).unwrap().same_as.is_none(), "{}", row.name);
                continue;
            }
            assert_eq!(row.sha256.len(), 64, "{}", row.name);
            let archive = committed().join(format!("{}.tar.gz", row.name));
            assert_ne!(
                archive.is_file(),
                row.debian.is_some(),
                "{} is either committed or Debian's",
                row.name
            );
        }
    }

    #[test]
    fn an_unknown_kernel_is_answered_with_the_known_ones() {
        let error = row("2.6.32").unwrap_err().to_string();
        assert!(error.contains("7.3.4-smclab"), "{error}");
    }

    #[test]
    fn an_archive_with_another_hash_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let archive = dir.path().join("x.tar.gz");
        files::write_whole(&archive, b"no archive").unwrap();
        let error = unpack(&archive, &"0".repeat(64), dir.path()).unwrap_err().to_string();
        assert!(error.contains("matrix"), "{error}");
    }

    #[test]
    fn missing_modules_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let row = matrix().unwrap().remove(0);
        let kernel = Kernel { row, dir: dir.path().to_owned(), release: "1".into(), version: "1".into() };
        files::create_dir(&kernel.modules()).unwrap();
        let write = |name: &str, text: &str| {
            files::write_whole(&kernel.modules().join(name), text.as_bytes()).unwrap();
        };
        write("modules.dep", "kernel/net/smc/smc.ko.xz: kernel/core.ko\nkernel/core.ko:\n");
        write("modules.builtin", "kernel/net/ipv4/tcp-diag.ko\n");
        let wanted = ["smc", "tcp_diag", "veth"].map(str::to_owned);
        assert_eq!(missing_modules(&kernel, &wanted).unwrap(), ["veth"]);
    }

    #[test]
    fn the_version_is_read_from_the_image() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("bzImage");
        let mut bytes = vec![0u8; 0x400];
        bytes[0x202..0x206].copy_from_slice(b"HdrS");
        bytes[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        bytes[0x300..0x30e].copy_from_slice(b"7.3.4-x (me) 1");
        files::write_whole(&image, &bytes).unwrap();
        assert_eq!(image_version(&image).unwrap(), "7.3.4-x (me) 1");
        files::write_whole(&image, &bytes[..0x204]).unwrap();
        assert!(image_version(&image).is_err());
    }
}
