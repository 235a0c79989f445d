//! Which files make up the policy: the vendor's folder and the administrator's, as systemd reads its own.

use std::path::{Path, PathBuf};

/// The vendor's policies.
pub const VENDOR: &str = "/usr/lib/smc-policy/policy.d";
/// The administrator's policies.
pub const ADMINISTRATOR: &str = "/etc/smc-policy/policy.d";

/// An entry of a policy folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The file's name in its folder.
    pub name: String,
    /// It is a symbolic link to /dev/null.
    pub masks: bool,
}

/// A policy folder and what it holds, in any order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder<'a> {
    /// The folder.
    pub path: &'a Path,
    /// Its entries.
    pub entries: Vec<Entry>,
}

/// The files to read, in order: all `*.toml` of both folders by file name (bytes ascending), where the administrator's
/// file takes the place of the vendor's of the same name, and a link to /dev/null hides the name altogether. Names that
/// begin with a dot are left out.
pub fn files(folders: &[Folder<'_>]) -> Vec<PathBuf> {
    let mut by_name = std::collections::BTreeMap::new();
    for folder in folders {
        for entry in &folder.entries {
            if entry.name.ends_with(".toml") && !entry.name.starts_with('.') {
                by_name.insert(entry.name.as_bytes(), (!entry.masks).then(|| folder.path.join(&entry.name)));
            }
        }
    }
    by_name.into_values().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder<'a>(path: &'a str, names: &[&str]) -> Folder<'a> {
        let entries = names
            .iter()
            .map(|name| Entry { name: name.trim_end_matches('@').to_owned(), masks: name.ends_with('@') });
        Folder { path: Path::new(path), entries: entries.collect() }
    }

    fn order(vendor: &[&str], administrator: &[&str]) -> Vec<String> {
        let files = files(&[folder("/v", vendor), folder("/a", administrator)]);
        files.into_iter().map(|file| file.display().to_string()).collect()
    }

    #[test]
    fn name_order_over_both_folders() {
        assert_eq!(
            order(&["50-b.toml", "10-a.toml"], &["60-d.toml", "20-c.toml"]),
            ["/v/10-a.toml", "/a/20-c.toml", "/v/50-b.toml", "/a/60-d.toml"]
        );
    }

    #[test]
    fn the_administrators_file_replaces_the_vendors() {
        assert_eq!(order(&["10.toml", "20.toml"], &["20.toml"]), ["/v/10.toml", "/a/20.toml"]);
    }

    #[test]
    fn a_link_to_dev_null_masks() {
        assert_eq!(order(&["10.toml", "20.toml"], &["20.toml@", "30.toml@"]), ["/v/10.toml"]);
        // A vendor's own mask does not outlive the administrator's file.
        assert_eq!(order(&["10.toml@"], &["10.toml"]), ["/a/10.toml"]);
    }

    #[test]
    fn only_visible_toml_files() {
        assert_eq!(
            order(&["a.toml", ".b.toml", "c.toml~", "d.conf", "toml", ".toml"], &["README", "e.toml.bak"]),
            ["/v/a.toml"]
        );
    }
}
