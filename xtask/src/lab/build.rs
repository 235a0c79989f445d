//! `cargo xtask lab kernel NAME`: builds a committed kernel again, from Debian's kernel source and the fragment of the
//! configuration beside its archive.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use super::kernel::{self, Row};
use crate::{
    apt::Apt,
    error::{Error, Result},
    exec, files, packages,
    paths::Cache,
};

/// Suite, package and version of the source that the committed kernels were built from.
const SUITE: &str = "trixie-backports";
const PACKAGE: &str = "linux-source-7.3";
const VERSION: &str = "7.3.4-1~bpo13+1";
/// Without this option a lab kernel is of no use; `make` drops options silently.
const NEEDED: &str = "CONFIG_SMC_HS_CTRL_BPF=y";

/// Builds the kernel and puts archive, configuration and checksum into tests/kernels.
pub(crate) fn command(name: &str, cache: &Cache) -> Result<()> {
    let row = kernel::row(name)?;
    let fragment = kernel::committed().join(format!("{name}.fragment"));
    if !fragment.is_file() {
        return Err(Error::new(format!("{name} is not built here: there is no {}", fragment.display())));
    }
    packages::ensure(packages::LAB, "the lab")?;
    packages::ensure(packages::KERNEL_BUILD, "building a kernel")?;
    let source = source(cache)?;
    let work = cache.join(format!("kernel-build-{name}"));
    files::remove_tree(&work)?;
    let out = work.join("out");
    files::create_dir(&out)?;
    println!("building {name} (about 10 minutes on two processors)");
    compile(&source, &fragment, &work.join("objects"), &out)?;
    install(&row, &out)?;
    files::remove_tree(&work)
}

/// The unpacked source tree, in the cache.
fn source(cache: &Cache) -> Result<PathBuf> {
    let dir = cache.dir(&format!("{PACKAGE}_{VERSION}"), |partial| {
        let apt = Apt::open(cache, SUITE)?;
        let offered = apt.versions(PACKAGE)?;
        let version = match offered.iter().find(|version| *version == VERSION) {
            Some(version) => version,
            None => {
                let other = offered
                    .first()
                    .ok_or_else(|| Error::new(format!("Debian's {SUITE} has no {PACKAGE}")))?;
                println!("note: Debian offers {PACKAGE} {other}, the committed kernels are from {VERSION}");
                other
            }
        };
        println!("fetching {PACKAGE} {version} (160 MB, once)");
        let whole = partial.join("whole");
        apt.unpack(&format!("{PACKAGE}={version}"), &whole)?;
        let archive = whole.join("usr/src").join(format!("{PACKAGE}.tar.xz"));
        exec::run(Command::new("tar").arg("-xJf").arg(archive).arg("-C").arg(partial))?;
        files::remove_tree(&whole)
    })?;
    Ok(dir.join(PACKAGE))
}

fn compile(source: &Path, fragment: &Path, objects: &Path, out: &Path) -> Result<()> {
    files::create_dir(objects)?;
    let make = || {
        let mut command = Command::new("make");
        command.arg("-s").arg("-C").arg(source).arg(format!("O={}", objects.display()));
        // Names of people and machines have no place in an archive that is committed.
        command.env("KBUILD_BUILD_USER", "lab").env("KBUILD_BUILD_HOST", "smc-policy");
        command
    };
    exec::run(make().arg(format!("KCONFIG_ALLCONFIG={}", fragment.display())).arg("allnoconfig"))?;
    let config = files::read_text(&objects.join(".config"))?;
    if !config.lines().any(|line| line == NEEDED) {
        return Err(Error::new(format!("the configuration came out without {NEEDED}")).next(format!(
            "compare {} with {}",
            fragment.display(),
            objects.join(".config").display()
        )));
    }
    let jobs = thread::available_parallelism().map_or(1, usize::from);
    exec::run(make().arg(format!("-j{jobs}")).args(["bzImage", "modules"]))?;
    exec::run(make().arg(format!("INSTALL_MOD_PATH={}", out.display())).arg("modules_install"))?;
    for (from, to) in [("arch/x86/boot/bzImage", "bzImage"), (".config", "config")] {
        fs::copy(objects.join(from), out.join(to)).map_err(|e| Error::io("copy", &objects.join(from), &e))?;
    }
    let modules = out.join("lib/modules");
    for entry in fs::read_dir(&modules).map_err(|e| Error::io("read", &modules, &e))?.flatten() {
        // A link to the build folder, which nobody else has.
        let _ = fs::remove_file(entry.path().join("build"));
    }
    for module in files::walk(&modules)?.iter().filter(|path| path.extension().is_some_and(|e| e == "ko")) {
        // Keeps .BTF.
        exec::run(Command::new("objcopy").arg("--strip-debug").arg(module))?;
    }
    Ok(())
}

/// Packs what was built and puts it in the place of the committed files.
fn install(row: &Row, out: &Path) -> Result<()> {
    let committed = kernel::committed();
    let archive = committed.join(format!("{}.tar.gz", row.name));
    let mut command = Command::new("tar");
    command.args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "-czf"]).arg(&archive);
    exec::run(command.arg("-C").arg(out).args(["bzImage", "config", "lib"]))?;
    let config = committed.join(format!("{}.config", row.name));
    fs::copy(out.join("config"), &config).map_err(|e| Error::io("copy", &config, &e))?;
    let sha256 = files::sha256_file(&archive)?;
    let matrix = committed.join("matrix.toml");
    let text = files::read_text(&matrix)?.replace(&row.sha256, &sha256);
    files::write_whole(&matrix, text.as_bytes())?;
    println!("{}: sha256 {sha256}, entered in {}", archive.display(), matrix.display());
    println!("next: `cargo xtask test --only {}`, then commit tests/kernels", row.name);
    Ok(())
}
