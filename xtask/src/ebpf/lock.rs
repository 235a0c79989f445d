//! The lock file beside the objects.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    error::{Error, Result},
    files,
};

/// Which inputs and which builder the committed objects were made from.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lock {
    /// Hash over everything that goes into the objects (see [`super::inputs`]).
    pub(crate) inputs: String,
    /// What compiled and linked them.
    pub(crate) builder: Builder,
    /// SHA-256 by file name.
    pub(crate) objects: BTreeMap<String, String>,
}

/// Identity of a builder: equal builders give equal bytes.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Builder {
    /// Release of rustc, such as 1.95.0.
    pub(crate) rustc: String,
    /// Its commit hash.
    pub(crate) rustc_commit: String,
    /// Hash over the sources of `core` that were compiled in.
    pub(crate) core_sources: String,
    /// Version of bpf-linker.
    pub(crate) bpf_linker: String,
}

impl fmt::Display for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rustc, rustc_commit, core_sources, bpf_linker } = self;
        let commit = super::short(rustc_commit);
        let core = super::short(core_sources);
        write!(f, "rustc {rustc} ({commit}), core {core}, bpf-linker {bpf_linker}")
    }
}

impl Lock {
    /// Reads the lock file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        toml::from_str(&files::read_text(path)?).map_err(|e| {
            Error::new(format!("{}: {}", path.display(), e.message()))
                .next("run `cargo xtask ebpf` to write it anew")
        })
    }

    /// The file's text.
    pub(crate) fn to_toml(&self) -> Result<String> {
        let body =
            toml::to_string(self).map_err(|e| Error::new(format!("cannot write the lock file: {e}")))?;
        Ok(format!(
            "# What the objects beside this file were built from. Written by `cargo xtask ebpf`.\n{body}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let builder = Builder {
            rustc: "1.95.0".into(),
            rustc_commit: "5980".into(),
            core_sources: "abcd".into(),
            bpf_linker: "0.13.0".into(),
        };
        let lock = Lock { inputs: "ff".into(), builder, objects: [("a.o".into(), "00".into())].into() };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock.toml");
        files::write_whole(&path, lock.to_toml().unwrap().as_bytes()).unwrap();
        let again = Lock::read(&path).unwrap();
        assert_eq!((again.inputs, again.builder, again.objects), (lock.inputs, lock.builder, lock.objects));
        files::write_whole(&path, b"inputs = 3").unwrap();
        assert!(Lock::read(&path).unwrap_err().to_string().contains("cargo xtask ebpf"));
    }
}
