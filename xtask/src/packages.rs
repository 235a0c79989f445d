//! Programs that the lab and the tests need, and the Debian packages that have them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::{
    error::{Error, Result},
    exec,
};

/// A program and where it comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    /// Name of the executable, or the absolute path of a header file.
    pub(crate) program: &'static str,
    /// Debian package that has it.
    pub(crate) package: &'static str,
    /// Whether it is copied into lab machines.
    in_guest: bool,
}

const fn host(program: &'static str, package: &'static str) -> Need {
    Need { program, package, in_guest: false }
}

const fn guest(program: &'static str, package: &'static str) -> Need {
    Need { program, package, in_guest: true }
}

/// What the lab and the tests need.
pub(crate) const LAB: &[Need] = &[
    host("qemu-system-x86_64", "qemu-system-x86"),
    guest("busybox", "busybox-static"),
    guest("kmod", "kmod"),
    host("depmod", "kmod"),
    guest("ip", "iproute2"),
    guest("tc", "iproute2"),
    guest("ss", "iproute2"),
    guest("bridge", "iproute2"),
    guest("rdma", "iproute2"),
    guest("nft", "nftables"),
    guest("ethtool", "ethtool"),
    guest("wg", "wireguard-tools"),
    host("xz", "xz-utils"),
    host("tar", "tar"),
    host("gzip", "gzip"),
    // Rust calls it to link, ours or a dependency's build script to compile.
    host("cc", "gcc"),
    host("strip", "binutils"),
];

/// What lab machines have where the host has it: for looking around, no test needs it. (Ubuntu has no package bpftool.)
pub(crate) const OPTIONAL: &[Need] =
    &[guest("bpftool", "bpftool"), guest("strace", "strace"), guest("ipset", "ipset")];

/// What building a lab kernel needs besides (`cargo xtask lab kernel`).
pub(crate) const KERNEL_BUILD: &[Need] = &[
    host("gcc", "gcc"),
    host("make", "make"),
    host("flex", "flex"),
    host("bison", "bison"),
    host("bc", "bc"),
    host("perl", "perl"),
    host("pahole", "dwarves"),
    host("objcopy", "binutils"),
    host("/usr/include/libelf.h", "libelf-dev"),
    host("/usr/include/openssl/ssl.h", "libssl-dev"),
];

impl Need {
    /// Where the program is on this host.
    pub(crate) fn find(program: &str) -> Result<PathBuf> {
        exec::find_program(program)
            .ok_or_else(|| Error::new(format!("{program} is not installed")).next("run `cargo xtask setup`"))
    }

    /// The program's path if it goes into lab machines.
    pub(crate) fn in_guest_from(self) -> Result<Option<PathBuf>> {
        if self.in_guest { Self::find(self.program).map(Some) } else { Ok(None) }
    }

    /// Whether the program is there.
    pub(crate) fn is_there(&self) -> bool {
        !self.is_missing()
    }

    fn is_missing(&self) -> bool {
        if self.program.starts_with('/') {
            !Path::new(self.program).exists()
        } else {
            exec::find_program(self.program).is_none()
        }
    }
}

/// The needs that this host does not meet.
pub(crate) fn missing(needs: &[Need]) -> Vec<Need> {
    needs.iter().copied().filter(Need::is_missing).collect()
}

/// Installs what is missing where that is possible (root on a Debian-like system), else says what to do.
pub(crate) fn ensure(needs: &[Need], purpose: &str) -> Result<()> {
    let missing = missing(needs);
    if missing.is_empty() {
        return Ok(());
    }
    let packages = package_names(&missing);
    if exec::find_program("apt-get").is_none() {
        let programs: Vec<&str> = missing.iter().map(|need| need.program).collect();
        return Err(Error::new(format!(
            "{purpose} needs programs that are missing: {}",
            programs.join(", ")
        ))
        .next("install them with this system's package manager"));
    }
    let install = format!("apt-get install --no-install-recommends {}", packages.join(" "));
    if !is_root() {
        return Err(Error::new(format!(
            "{purpose} needs packages that are missing: {}",
            packages.join(", ")
        ))
        .next(format!("run as root: {install}")));
    }
    println!("installing for {purpose}: {}", packages.join(", "));
    apt_get(&["update", "-q"])?;
    apt_install(&packages)?;
    match self::missing(needs).first() {
        None => Ok(()),
        Some(need) => Err(Error::new(format!("package {} did not bring {}", need.package, need.program))),
    }
}

/// `cargo xtask setup`: what is needed must be there at the end, what is optional may be.
pub(crate) fn setup() -> Result<()> {
    ensure(LAB, "the lab")?;
    for need in missing(OPTIONAL) {
        let done =
            is_root() && exec::find_program("apt-get").is_some() && apt_install(&[need.package]).is_ok();
        if !done {
            println!("{} is not there: lab machines go without it", need.program);
        }
    }
    println!("everything that the lab needs is installed");
    Ok(())
}

fn apt_install(packages: &[&str]) -> Result<()> {
    let mut arguments = vec!["install", "-q", "-y", "--no-install-recommends"];
    arguments.extend(packages);
    apt_get(&arguments)
}

fn apt_get(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    exec::run(command.env("DEBIAN_FRONTEND", "noninteractive").args(arguments))
}

fn package_names(needs: &[Need]) -> Vec<&'static str> {
    let mut names: Vec<&str> = needs.iter().map(|need| need.package).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Whether this process has user id 0.
pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|meta| std::os::unix::fs::MetadataExt::uid(&meta) == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_named_once() {
        let needs = [guest("ip", "iproute2"), guest("tc", "iproute2"), host("xz", "xz-utils")];
        assert_eq!(package_names(&needs), ["iproute2", "xz-utils"]);
    }

    #[test]
    fn what_is_not_there_is_missing() {
        let needs = [host("sh", "dash"), host("no-such-program-here", "nothing")];
        assert_eq!(missing(&needs), [needs[1]]);
        assert!(Need::find("no-such-program-here").unwrap_err().to_string().contains("cargo xtask setup"));
    }
}
