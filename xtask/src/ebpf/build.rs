//! The cargo invocation that compiles the eBPF crate for one target.

use std::{ffi::OsString, io::BufRead as _, path::Path, process::Stdio};

use super::{Reference, Target};
use crate::{
    error::{Error, Result},
    exec, files, paths,
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
    let mut command = reference.cargo();
    command.args(["build", "--locked", "--release", "--bins", "--package", "smc-policy-ebpf"]);
    command.args(["-Zbuild-std=core", "--message-format=json", "--target", target.triple]);
    command.arg("--target-dir").arg(paths::workspace().join("target/ebpf"));
    for setting in PROFILE {
        command.args(["--config", setting]);
    }
    command.env("CARGO_ENCODED_RUSTFLAGS", rustflags(reference, target)?);
    let linker = format!("CARGO_TARGET_{}_LINKER", target.triple.to_uppercase().replace('-', "_"));
    command.env(linker, reference.linker());
    command.current_dir(paths::workspace());

    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| exec::cannot_start(&command, &e))?;
    let mut seen = Messages::default();
    if let Some(stdout) = child.stdout.take() {
        for line in std::io::BufReader::new(stdout).lines() {
            let line = line.map_err(|e| Error::new(format!("cannot read cargo's messages: {e}")))?;
            if let Some(text) = seen.take(&line) {
                eprint!("{text}");
            }
        }
    }
    let status = child.wait().map_err(|e| Error::new(format!("cargo: {e}")))?;
    if !status.success() {
        return Err(Error::new(format!("the eBPF crate does not compile for {}", target.triple)));
    }
    let path = seen.executable.ok_or_else(|| Error::new("cargo named no compiled object"))?;
    let stripped = Path::new(&path).with_added_extension("stripped");
    reference.strip(path.as_ref(), &stripped)?;
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

/// What cargo says in JSON, line by line.
#[derive(Default)]
struct Messages {
    executable: Option<String>,
    warnings: usize,
}

impl Messages {
    /// Takes one line in; returns text to show to the user, if any.
    fn take(&mut self, line: &str) -> Option<String> {
        let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else {
            return Some(format!("{line}\n"));
        };
        match message["reason"].as_str() {
            Some("compiler-artifact") => {
                if let Some(path) = message["executable"].as_str() {
                    self.executable = Some(path.to_owned());
                }
                None
            }
            Some("compiler-message") => {
                // Dependencies' warnings are capped by cargo; what arrives is about path crates.
                if message["message"]["level"] == "warning" && !message["message"]["spans"][0].is_null() {
                    self.warnings += 1;
                }
                message["message"]["rendered"].as_str().map(str::to_owned)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_and_the_warnings_are_taken_from_cargos_messages() {
        let mut seen = Messages::default();
        assert_eq!(seen.take(r#"{"reason":"compiler-artifact","executable":null}"#), None);
        assert_eq!(seen.take(r#"{"reason":"compiler-artifact","executable":"/t/smc"}"#), None);
        let warning = r#"{"reason":"compiler-message","message":{"level":"warning","spans":[{}],"rendered":"unused\n"}}"#;
        assert_eq!(seen.take(warning).as_deref(), Some("unused\n"));
        let closing = r#"{"reason":"compiler-message","message":{"level":"warning","spans":[],"rendered":"1 warning"}}"#;
        assert!(seen.take(closing).is_some());
        assert_eq!(seen.take("plain text").as_deref(), Some("plain text\n"));
        assert_eq!((seen.executable.as_deref(), seen.warnings), (Some("/t/smc"), 1));
    }
}
