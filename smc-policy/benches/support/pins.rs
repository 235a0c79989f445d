//! A folder on bpffs that is gone when the benchmark ends.

use std::{
    env,
    fs::File,
    path::{Path, PathBuf},
};

use smc_policy::kernel::pinned::{remove_empty, remove_others};

use super::Result;

/// The folder. While there is one, no other benchmark runs on this machine: they would disturb each other.
pub struct Pins {
    path: PathBuf,
    _turn: File,
}

impl Pins {
    /// A folder of this name; what an interrupted run left in it is removed.
    pub fn new(name: &str) -> Result<Self> {
        let turn = File::create(env::temp_dir().join("smc-policy-bench.lock"))?;
        turn.try_lock().map_err(|_| "another benchmark is running; start this one when it has ended")?;
        let pins = Self { path: Path::new("/sys/fs/bpf").join(name), _turn: turn };
        pins.clear()?;
        Ok(pins)
    }

    /// Removes the instances in it.
    pub fn clear(&self) -> Result<()> {
        match remove_others(&self.path, None).problems.as_slice() {
            [] => Ok(()),
            problems => Err(problems.join("; ").into()),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if let Err(error) = self.clear() {
            eprintln!("left behind in {}: {error}", self.path.display());
        }
        remove_empty(&self.path);
    }
}
