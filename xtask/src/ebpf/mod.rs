//! `cargo xtask ebpf`: the committed eBPF objects and the lock file that says what they were made from.

mod build;
mod elf;
mod inputs;
mod lock;
mod toolchain;

use std::path::PathBuf;

use crate::{
    error::{Error, Result},
    files,
    paths::{self, Cache},
};

pub(crate) use toolchain::Reference;

/// The two byte orders. `bpf_target_arch` only selects the layout of `pt_regs`, which the programs do not use; it is
/// fixed so that the bytes do not depend on the machine that builds.
const TARGETS: [Target; 2] = [
    Target { triple: "bpfel-unknown-none", arch: "x86_64", object: "smc_policy.bpfel.o", big_endian: false },
    Target { triple: "bpfeb-unknown-none", arch: "s390x", object: "smc_policy.bpfeb.o", big_endian: true },
];

/// One of the two objects.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    triple: &'static str,
    arch: &'static str,
    object: &'static str,
    big_endian: bool,
}

/// What a check found, apart from errors.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Checked {
    /// Inputs and bytes were compared.
    Whole,
    /// Only the inputs were compared; why the bytes were not.
    InputsOnly(String),
}

fn objects_dir() -> PathBuf {
    paths::workspace().join("smc-policy/src/kernel/objects")
}

fn lock_path() -> PathBuf {
    objects_dir().join("smc_policy.lock.toml")
}

/// Builds both objects with the reference builder and writes them and the lock file into the source tree.
pub(crate) fn write(cache: &Cache) -> Result<()> {
    let reference = Reference::find(cache)?.map_err(|other| {
        Error::new(format!("the objects are built with {} only, this is {other}", toolchain::wanted()))
            .next(format!("run `rustup toolchain install {} --component rust-src`", toolchain::RELEASE))
    })?;
    let inputs = inputs::hash(&paths::workspace())?;
    let mut lock = lock::Lock { inputs, builder: reference.record()?, objects: Default::default() };
    for target in TARGETS {
        let built = build::object(&reference, target)?;
        lock.objects.insert(target.object.to_owned(), files::sha256(&built.bytes));
        let path = objects_dir().join(target.object);
        let change =
            if std::fs::read(&path).is_ok_and(|old| old == built.bytes) { "unchanged" } else { "written" };
        files::write_whole(&path, &built.bytes)?;
        println!("{}: {} bytes, {change}", path.display(), built.bytes.len());
    }
    files::write_whole(&lock_path(), lock.to_toml()?.as_bytes())
}

/// Whether the committed objects belong to the sources: the inputs always, the bytes where the reference builder is.
/// Warnings of the eBPF crate's compiler are errors when `deny_warnings` is set.
pub(crate) fn check(cache: &Cache, deny_warnings: bool) -> Result<Checked> {
    let stale = |what: String| Error::new(what).next("run `cargo xtask ebpf` and commit what it writes");
    let lock = lock::Lock::read(&lock_path())?;
    let now = inputs::hash(&paths::workspace())?;
    if lock.inputs != now {
        return Err(stale(format!(
            "the eBPF sources changed after the committed objects were built (inputs {} in the lock file, {} now)",
            short(&lock.inputs),
            short(&now)
        )));
    }
    for target in TARGETS {
        let path = objects_dir().join(target.object);
        let bytes = files::read(&path)?;
        if lock.objects.get(target.object) != Some(&files::sha256(&bytes)) {
            return Err(stale(format!("{} is not the object that the lock file names", path.display())));
        }
        let summary = elf::check(&bytes, target.big_endian)
            .map_err(|e| Error::new(format!("{}: {e}", path.display())))?;
        println!("{}: {summary}", target.object);
    }
    let reference = match Reference::find(cache)? {
        Ok(reference) => reference,
        Err(other) => return Ok(Checked::InputsOnly(format!("bytes not compared: {other}"))),
    };
    let record = reference.record()?;
    for target in TARGETS {
        let built = build::object(&reference, target)?;
        if deny_warnings && built.warnings > 0 {
            return Err(Error::new(format!("{} compiler warnings in the eBPF crates", built.warnings)));
        }
        if lock.objects.get(target.object) != Some(&files::sha256(&built.bytes)) {
            let why = if record == lock.builder {
                "built again, it has other bytes".to_owned()
            } else {
                format!(
                    "built again, it has other bytes; the builder differs as well: {record} here, {} then",
                    lock.builder
                )
            };
            return Err(stale(format!("{}: {why}", target.object)));
        }
    }
    Ok(Checked::Whole)
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}
