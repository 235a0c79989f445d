//! A cgroup's folder as config.toml names it.

/// What is wrong with the folder of a cgroup, and what to write instead.
pub(super) fn no_cgroup(path: &str) -> Option<(String, String)> {
    let shown = path.escape_debug();
    if path.contains('\0') {
        Some((format!("a folder cannot be called \"{shown}\""), "leave out the NUL".to_owned()))
    } else if !path.starts_with('/') {
        let below = path.trim_start_matches("./");
        let help = format!("write the whole path, as \"/sys/fs/cgroup/{}\"", below.escape_debug());
        Some((format!("\"{shown}\" is no absolute path"), help))
    } else if path.split('/').any(|name| matches!(name, "." | "..")) {
        let help = "write the path without `.` and `..`".to_owned();
        Some((format!("\"{shown}\" is not written out"), help))
    } else {
        None
    }
}

/// The path without slashes that say nothing.
pub(super) fn plain(path: &str) -> String {
    let names = path.split('/').filter(|name| !name.is_empty());
    names.fold(String::new(), |path, name| path + "/" + name)
}

/// Is a cgroup, written as [`plain`] does, another one or below it? Then that one's programs run for it too.
pub(super) fn is_in(inner: &str, outer: &str) -> bool {
    inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders() {
        for good in ["/sys/fs/cgroup", "/sys/fs/cgroup/a.slice/", "/", "/a..b"] {
            assert_eq!(no_cgroup(good), None, "{good}");
        }
        for bad in ["", "a.slice", "./a", "/sys/../a", "/sys/.", "/a\0b"] {
            assert!(no_cgroup(bad).is_some(), "{bad}");
        }
        assert_eq!(plain("//sys//fs/cgroup/"), "/sys/fs/cgroup");
        assert!(is_in("/a/b", "/a") && is_in("/a", "/a") && is_in("/a", &plain("/")));
        assert!(!is_in("/ab", "/a") && !is_in("/a", "/a/b"));
    }
}
