//! The cargo invocation that compiles the eBPF crate for one target.

use std::ffi::OsString;

use super::{Reference, Target};
use crate::{
    cargo,
    error::{Error, Result},
    files,
};

/// Given on the command line, so that neither the workspace's profiles nor a user's configuration reach the bytes.
const PROFILE: [&str; 7] = [
    "profile.release.opt-level=3",
    "profile.release.debug=2",
    "profile.release.lto=\"fat\"",
    "profile.release.codegen-units=1",
    "profile.release.overflow-checks=false",
    "profile.release.panic=\"abort\"",
    "profile.release.strip=\"none\"",
];

/// Flags for every crate; debug information is what bpf-linker makes BTF of.
const RUSTFLAGS: [&str; 2] = ["-Cdebuginfo=2", "-Clink-arg=--btf"];

/// What happens to the linked object; counts as a flag.
const AFTERWARDS: &str = "rust-objcopy --strip-debug";

/// A compiled object.
pub(crate) struct Built {
    /// The ELF file.
    pub(crate) bytes: Vec<u8>,
    /// Compiler warnings about the workspace's own crates.
    pub(crate) warnings: usize,
}

/// Everything in the invocation that may change the bytes, without this machine's paths.
pub(crate) fn flags_for_hash() -> Vec<String> {
    let targets = super::TARGETS.iter().map(|target| format!("{} {}", target.triple, target.arch));
    PROFILE
        .iter()
        .chain(&RUSTFLAGS)
        .map(|flag| (*flag).to_owned())
        .chain(targets)
        .chain([AFTERWARDS.to_owned()])
        .collect()
}

/// Compiles and links the object of one target.
pub(crate) fn object(reference: &Reference, target: Target) -> Result<Built> {
    let mut command = reference.cargo()?;
    command.args(["build", "--locked", "--release", "--bins", "--package", "smc-policy-ebpf"]);
    command.args(["-Zbuild-std=core", "--target", target.triple]);
    for setting in PROFILE {
        command.args(["--config", setting]);
    }
    command.env("CARGO_ENCODED_RUSTFLAGS", rustflags(reference, target)?);
    let linker = format!("CARGO_TARGET_{}_LINKER", target.triple.to_uppercase().replace('-', "_"));
    command.env(linker, reference.linker());

    let seen = cargo::messages(&mut command)
        .map_err(|_| Error::new(format!("the eBPF crate does not compile for {}", target.triple)))?;
    let linked = seen.executables.first().ok_or_else(|| Error::new("cargo named no compiled object"))?;
    let stripped = linked.path.with_added_extension("stripped");
    reference.strip(&linked.path, &stripped)?;
    Ok(Built { bytes: files::read(&stripped)?, warnings: seen.warnings })
}

/// Flags joined the way cargo splits them, with this machine's folders replaced by fixed names.
fn rustflags(reference: &Reference, target: Target) -> Result<OsString> {
    let mut flags: Vec<OsString> = RUSTFLAGS.iter().map(OsString::from).collect();
    flags.push(format!("--cfg=bpf_target_arch=\"{}\"", target.arch).into());
    for (folder, name) in reference.folders()? {
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(folder);
        flag.push("=");
        flag.push(name);
        flags.push(flag);
    }
    Ok(flags.join(std::ffi::OsStr::new("\x1f")))
}
