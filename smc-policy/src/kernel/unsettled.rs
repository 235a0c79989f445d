//! `<run>/unsettled`: there while an apply changes where or how the policy is enforced. Found by the next one, it says that
//! one was killed, and that there may be programs or choices that no scope says anything of.

use std::{fs, path::Path};

use super::error::{Doing, KernelError, remove_if_there};

const FILE: &str = "unsettled";

/// Says that the change begins.
///
/// # Errors
/// [`KernelError::Io`].
pub fn set(run: &Path) -> Result<(), KernelError> {
    let path = run.join(FILE);
    fs::create_dir_all(run).and_then(|()| fs::write(&path, "")).doing(|| format!("write {}", path.display()))
}

/// Has one begun that nobody ended?
pub fn is_set(run: &Path) -> bool {
    run.join(FILE).exists()
}

/// All that is not in the scope has been taken away.
///
/// # Errors
/// [`KernelError::Io`].
pub fn clear(run: &Path) -> Result<(), KernelError> {
    remove_if_there(&run.join(FILE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_the_beginning_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let run = dir.path().join("run");
        clear(&run).unwrap();
        assert!(!is_set(&run));
        set(&run).unwrap();
        set(&run).unwrap();
        assert!(is_set(&run));
        clear(&run).unwrap();
        assert!(!is_set(&run));
    }
}
