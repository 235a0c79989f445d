//! A folder on bpffs that is gone when the benchmark ends.

use std::path::{Path, PathBuf};

use smc_policy::kernel::instance::{remove_empty, remove_others};

use super::Result;

/// The folder.
pub struct Pins(PathBuf);

impl Pins {
    /// A folder of this name; what an interrupted run left in it is removed.
    pub fn new(name: &str) -> Result<Self> {
        let pins = Self(Path::new("/sys/fs/bpf").join(name));
        pins.clear()?;
        Ok(pins)
    }

    /// Removes the instances in it.
    pub fn clear(&self) -> Result<()> {
        match remove_others(&self.0, None).problems.as_slice() {
            [] => Ok(()),
            problems => Err(problems.join("; ").into()),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if let Err(error) = self.clear() {
            eprintln!("left behind in {}: {error}", self.0.display());
        }
        remove_empty(&self.0);
    }
}
