//! The hash over everything that decides the bytes of the objects, apart from the builder itself.

use std::{collections::BTreeSet, path::Path};

use serde::Deserialize;

use super::build;
use crate::{
    error::{Error, Result},
    files,
};

/// The crates that are compiled for the bpf targets.
const CRATES: [&str; 2] = ["smc-policy-ebpf", "smc-policy-common"];

/// SHA-256 over the sources of both crates, the part of Cargo.lock and of the workspace manifest that reaches them,
/// and the builder's flags.
pub(crate) fn hash(workspace: &Path) -> Result<String> {
    let mut hash = files::PartsHash::default();
    for name in CRATES {
        for path in files::walk(&workspace.join(name))? {
            let relative = path.strip_prefix(workspace).unwrap_or(&path).to_string_lossy().into_owned();
            if is_source(&path) {
                hash.add(&relative, &files::read(&path)?);
            }
        }
    }
    let packages = closure(&files::read_text(&workspace.join("Cargo.lock"))?)?;
    for package in &packages {
        hash.add("package", package.identity().as_bytes());
    }
    let names: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    hash.add(
        "manifest",
        manifest_part(&files::read_text(&workspace.join("Cargo.toml"))?, &names)?.as_bytes(),
    );
    for flag in build::flags_for_hash() {
        hash.add("flag", flag.as_bytes());
    }
    Ok(hash.finish())
}

/// Rust sources and manifests; snapshots, recorded proptest failures and editors' files decide nothing.
fn is_source(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs" || extension == "toml")
}

#[derive(Deserialize)]
struct CargoLock {
    package: Vec<Package>,
}

/// A package of Cargo.lock.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct Package {
    name: String,
    version: String,
    source: Option<String>,
    checksum: Option<String>,
    #[serde(default)]
    dependencies: Vec<String>,
}

impl Package {
    fn identity(&self) -> String {
        let checksum = self.checksum.as_deref().unwrap_or("workspace");
        format!("{} {} {checksum}", self.name, self.version)
    }

    /// Whether a `dependencies` entry ("name", "name version" or "name version (source)") means this package.
    fn is_meant_by(&self, dependency: &str) -> bool {
        let mut words = dependency.splitn(3, ' ');
        words.next() == Some(&self.name)
            && words.next().is_none_or(|version| version == self.version)
            && words.next().is_none_or(|source| {
                self.source.as_deref() == Some(source.trim_start_matches('(').trim_end_matches(')'))
            })
    }
}

/// The eBPF crate and everything it depends on, sorted.
fn closure(cargo_lock: &str) -> Result<Vec<Package>> {
    let lock: CargoLock =
        toml::from_str(cargo_lock).map_err(|e| Error::new(format!("Cargo.lock: {}", e.message())))?;
    let mut found = BTreeSet::new();
    let mut open = vec![CRATES[0].to_owned()];
    while let Some(dependency) = open.pop() {
        let package =
            lock.package.iter().find(|package| package.is_meant_by(&dependency)).ok_or_else(|| {
                Error::new(format!("Cargo.lock has no package {dependency}"))
                    .next("run `cargo build` to bring it up to date")
            })?;
        if found.insert(package.clone()) {
            open.extend(package.dependencies.iter().cloned());
        }
    }
    Ok(found.into_iter().collect())
}

/// Edition and version that the crates inherit, and the workspace dependencies (features!) of the packages named.
fn manifest_part(manifest: &str, names: &BTreeSet<&str>) -> Result<String> {
    let invalid = |why: &str| Error::new(format!("Cargo.toml: {why}"));
    let manifest: toml::Table = manifest.parse().map_err(|e: toml::de::Error| invalid(e.message()))?;
    let workspace =
        manifest.get("workspace").and_then(toml::Value::as_table).ok_or_else(|| invalid("no [workspace]"))?;
    let mut part = toml::Table::new();
    part.extend(workspace.get("resolver").map(|value| ("resolver".to_owned(), value.clone())));
    for (section, keep) in [("package", &["edition", "version"].into()), ("dependencies", names)] {
        let table = workspace.get(section).and_then(toml::Value::as_table).cloned().unwrap_or_default();
        let kept: toml::Table = table.into_iter().filter(|(key, _)| keep.contains(key.as_str())).collect();
        part.insert(section.to_owned(), toml::Value::Table(kept));
    }
    toml::to_string(&part).map_err(|e| invalid(&e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = r#"
version = 4
[[package]]
name = "smc-policy-ebpf"
version = "0.1.0"
dependencies = ["aya-ebpf", "shared 2.0.0"]
[[package]]
name = "aya-ebpf"
version = "0.2.1"
source = "registry"
checksum = "aa"
dependencies = ["shared 1.0.0 (registry)"]
[[package]]
name = "shared"
version = "1.0.0"
source = "registry"
checksum = "bb"
[[package]]
name = "shared"
version = "2.0.0"
source = "registry"
checksum = "cc"
[[package]]
name = "unrelated"
version = "1.0.0"
"#;

    #[test]
    fn the_closure_has_what_the_ebpf_crate_reaches_and_nothing_else() {
        let names: Vec<String> = closure(LOCK).unwrap().iter().map(Package::identity).collect();
        assert_eq!(
            names,
            ["aya-ebpf 0.2.1 aa", "shared 1.0.0 bb", "shared 2.0.0 cc", "smc-policy-ebpf 0.1.0 workspace"]
        );
    }

    #[test]
    fn a_lock_file_without_the_crate_is_an_error() {
        let error = closure("version = 4\npackage = []").unwrap_err().to_string();
        assert!(error.contains("no package smc-policy-ebpf"), "{error}");
    }

    #[test]
    fn only_the_parts_of_the_manifest_that_reach_the_crates_count() {
        let manifest = |edition: &str, aya: &str, clap: &str| {
            manifest_part(
                &format!(
                    "[workspace.package]\nedition = \"{edition}\"\nlicense = \"MIT\"\n\
                     [workspace.dependencies]\naya-ebpf = \"{aya}\"\nclap = \"{clap}\""
                ),
                &["aya-ebpf"].into(),
            )
            .unwrap()
        };
        let base = manifest("2024", "=0.2.1", "=4");
        assert_eq!(base, manifest("2024", "=0.2.1", "=5"));
        assert_ne!(base, manifest("2024", "=0.2.2", "=4"));
        assert_ne!(base, manifest("2021", "=0.2.1", "=4"));
    }

    #[test]
    fn every_source_file_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| files::write_whole(&dir.path().join(name), text.as_bytes()).unwrap();
        write("Cargo.lock", LOCK);
        write("Cargo.toml", "[workspace]");
        write("smc-policy-ebpf/src/main.rs", "fn main() {}");
        write("smc-policy-common/src/lib.rs", "");
        let base = hash(dir.path()).unwrap();
        write("smc-policy-common/src/notes.swp", "editor");
        assert_eq!(hash(dir.path()).unwrap(), base);
        write("smc-policy-common/src/lib.rs", "//");
        assert_ne!(hash(dir.path()).unwrap(), base);
    }
}
