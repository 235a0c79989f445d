//! Stock kernels from Debian's archive.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde::Deserialize;

use super::kernel::Row;
use crate::{
    apt::Apt,
    error::{Error, Result},
    exec, files,
    paths::Cache,
};

/// Which package has the kernel.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Package {
    /// Suite, such as "bookworm".
    pub(crate) suite: String,
    /// Metapackage that depends on the newest kernel.
    pub(crate) package: String,
    /// Least kernel version, such as "6.12": an older one is refused.
    pub(crate) at_least: String,
    /// Modules that the tests use; what they depend on comes with them.
    pub(crate) modules: Vec<String>,
}

/// The kernel's folder in the cache, filled from the archive if it is not there.
pub(crate) fn kernel(cache: &Cache, row: &Row, package: &Package) -> Result<PathBuf> {
    let key = files::sha256(package.modules.join(" ").as_bytes());
    cache.dir(&format!("kernels/{}-{}", row.name, &key[..12]), |partial| {
        println!("fetching Debian's {} kernel (once)", package.suite);
        let apt = Apt::open(cache, &package.suite)?;
        let image = apt
            .depends(&package.package)?
            .into_iter()
            .find(|name| name.starts_with("linux-image-"))
            .ok_or_else(|| Error::new(format!("{} depends on no kernel", package.package)))?;
        let version = apt.version(&image)?;
        if !is_at_least(&version, &package.at_least) {
            return Err(Error::new(format!(
                "Debian's {} offers {version}, older than {}",
                package.suite, package.at_least
            )));
        }
        println!("  {image} {version}");
        let whole = partial.join("whole");
        apt.unpack(&image, &whole)?;
        let release = image.trim_start_matches("linux-image-");
        select(&whole, partial, release, &package.modules)?;
        files::remove_tree(&whole)
    })
}

/// Whether a Debian version such as "6.12.117-1" is at least an upstream version such as "6.12".
fn is_at_least(version: &str, least: &str) -> bool {
    let numbers = |text: &str| -> Vec<u32> {
        text.split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok()).collect()
    };
    numbers(version) >= numbers(least)
}

/// Takes the image, its configuration and the wanted modules with their dependencies out of an unpacked package.
fn select(whole: &Path, into: &Path, release: &str, wanted: &[String]) -> Result<()> {
    let boot = whole.join("boot");
    files::rename(&boot.join(format!("vmlinuz-{release}")), &into.join("bzImage"))?;
    files::rename(&boot.join(format!("config-{release}")), &into.join("config"))?;
    // Debian 13 ships modules below /usr; depmod and modprobe are told to look below a root with /lib.
    let lib = ["lib/modules", "usr/lib/modules"].map(|dir| whole.join(dir).join(release));
    let from = lib.iter().find(|dir| dir.is_dir()).ok_or_else(|| Error::new("the package has no modules"))?;
    let root = whole.join("root/lib/modules");
    files::create_dir(&root)?;
    let from = {
        let moved = root.join(release);
        files::rename(from, &moved)?;
        moved
    };
    depmod(&whole.join("root"), release)?;
    let dependencies = files::read_text(&from.join("modules.dep"))?;
    let to = into.join("lib/modules").join(release);
    files::create_dir(&to)?;
    for module in with_dependencies(&dependencies, wanted)? {
        let target = to.join(&module);
        if let Some(parent) = target.parent() {
            files::create_dir(parent)?;
        }
        fs::copy(from.join(&module), &target).map_err(|e| Error::io("copy", &target, &e))?;
        if module.ends_with(".xz") {
            exec::run(Command::new("xz").arg("-d").arg(&target))?;
        }
    }
    for table in ["modules.order", "modules.builtin", "modules.builtin.modinfo"] {
        fs::copy(from.join(table), to.join(table)).map_err(|e| Error::io("copy", &from.join(table), &e))?;
    }
    depmod(into, release)
}

fn depmod(root: &Path, release: &str) -> Result<()> {
    let depmod = crate::packages::Need::find("depmod")?;
    exec::capture(Command::new(depmod).arg("-b").arg(root).arg(release)).map(drop)
}

/// The name of the module at this path: hyphens and underscores are one.
pub(super) fn module_name(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    file.split(".ko").next().unwrap_or(file).replace('-', "_")
}

/// Paths of the wanted modules and of everything they depend on, from modules.dep.
fn with_dependencies(modules_dep: &str, wanted: &[String]) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for name in wanted {
        let line = modules_dep
            .lines()
            .find(|line| line.split(':').next().is_some_and(|path| module_name(path) == module_name(name)))
            .ok_or_else(|| Error::new(format!("the kernel has no module {name}")))?;
        found.extend(line.replace(':', " ").split_whitespace().map(str::to_owned));
    }
    found.sort();
    found.dedup();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEP: &str = "kernel/net/smc/smc.ko.xz: kernel/drivers/infiniband/core/ib_core.ko.xz\n\
        kernel/drivers/infiniband/core/ib_core.ko.xz:\nkernel/a/crc32c-intel.ko.xz:\n\
        kernel/net/smc/smc_diag.ko.xz: kernel/net/smc/smc.ko.xz kernel/drivers/infiniband/core/ib_core.ko.xz\n";

    #[test]
    fn modules_come_with_what_they_depend_on() {
        let wanted = ["smc", "crc32c_intel"].map(str::to_owned);
        assert_eq!(
            with_dependencies(DEP, &wanted).unwrap(),
            [
                "kernel/a/crc32c-intel.ko.xz",
                "kernel/drivers/infiniband/core/ib_core.ko.xz",
                "kernel/net/smc/smc.ko.xz"
            ]
        );
        let error = with_dependencies(DEP, &["nosuch".to_owned()]).unwrap_err().to_string();
        assert_eq!(error, "the kernel has no module nosuch");
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert!(is_at_least("6.12.117-1", "6.12"));
        assert!(is_at_least("6.12-1", "6.12"));
        assert!(!is_at_least("6.9.3-1", "6.12"));
        assert!(!is_at_least("6.1.192-3", "6.12"));
        assert!(is_at_least("10.0-1", "6.12"));
    }
}
