//! Where things are: the workspace, the cache outside it, the folder that may stand beside it.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

use crate::{
    error::{Error, Result},
    files,
};

/// The workspace's root, fixed when xtask is compiled (cargo runs it in the workspace it was built from).
pub(crate) fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_owned()
}

/// A folder with ready-made kernels and library sources that may stand beside the workspace. It only saves
/// downloads: everything in it can be got without it.
pub(crate) fn shared() -> PathBuf {
    env::var_os("SMC_POLICY_SHARED").map_or_else(|| workspace().join("../shared"), PathBuf::from)
}

/// Things that are slow to make or fetch, kept across workspaces; safe to delete at any time.
#[derive(Debug, Clone)]
pub(crate) struct Cache(PathBuf);

impl Cache {
    /// `$SMC_POLICY_CACHE`, else `$XDG_CACHE_HOME/smc-policy`, else `~/.cache/smc-policy`.
    pub(crate) fn open() -> Result<Self> {
        let dir =
            Self::locate(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))?;
        files::create_dir(&dir)?;
        // Absolute: the path ends up in run-time search paths and in the arguments of programs run elsewhere.
        dir.canonicalize().map(Self).map_err(|e| Error::io("open", &dir, &e))
    }

    fn locate(var: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf> {
        if let Some(dir) = var("SMC_POLICY_CACHE") {
            return Ok(dir);
        }
        if let Some(dir) = var("XDG_CACHE_HOME") {
            return Ok(dir.join("smc-policy"));
        }
        var("HOME")
            .map(|home| home.join(".cache/smc-policy"))
            .ok_or_else(|| Error::new("no place for the cache: HOME is not set").next("set SMC_POLICY_CACHE"))
    }

    /// A path inside the cache.
    pub(crate) fn join(&self, path: impl AsRef<Path>) -> PathBuf {
        self.0.join(path)
    }

    /// Holds the cache's lock of this name until dropped: two xtasks must not fill the same entry at once.
    pub(crate) fn lock(&self, name: &str) -> Result<fs::File> {
        let path = self.0.join(format!("{name}.lock"));
        let file = fs::File::create(&path).map_err(|e| Error::io("create", &path, &e))?;
        file.lock().map_err(|e| Error::io("lock", &path, &e))?;
        Ok(file)
    }

    /// The directory `name`, made by `fill` if it is not there yet. `fill` gets an empty directory beside it, which
    /// is renamed when it is complete: an interrupted run leaves nothing that looks finished.
    pub(crate) fn dir(&self, name: &str, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
        let target = self.0.join(name);
        if target.is_dir() {
            return Ok(target);
        }
        let _lock = self.lock(&name.replace('/', "-"))?;
        if target.is_dir() {
            return Ok(target);
        }
        let partial = target.with_added_extension("partial");
        files::remove_tree(&partial)?;
        files::create_dir(&partial)?;
        fill(&partial)?;
        files::rename(&partial, &target)?;
        Ok(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_variable_names_the_cache() {
        let with = |set: &'static [(&str, &str)]| {
            Cache::locate(|name| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value))
            })
        };
        let all = [("SMC_POLICY_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        let all: &'static [(&str, &str)] = Box::leak(Box::new(all));
        assert_eq!(with(all).unwrap(), Path::new("/a"));
        assert_eq!(with(&all[1..]).unwrap(), Path::new("/b/smc-policy"));
        assert_eq!(with(&all[2..]).unwrap(), Path::new("/c/.cache/smc-policy"));
        assert!(with(&[]).unwrap_err().to_string().contains("SMC_POLICY_CACHE"));
    }

    #[test]
    fn a_failed_fill_leaves_nothing_behind_that_looks_finished() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache(dir.path().to_owned());
        let half = |path: &Path| {
            files::write_whole(&path.join("half"), b"")?;
            Err(Error::new("interrupted"))
        };
        assert!(cache.dir("thing", half).is_err());
        assert!(!cache.join("thing").exists());
        let made = cache.dir("thing", |path| files::write_whole(&path.join("whole"), b"")).unwrap();
        assert!(made.join("whole").is_file() && !made.join("half").exists());
        assert_eq!(cache.dir("thing", |_| Err(Error::new("not called"))).unwrap(), made);
    }
}
