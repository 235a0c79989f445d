//! The one lock of whoever changes what is in force.

use std::{
    fs::{self, File, TryLockError},
    path::Path,
};

use super::error::{Doing, KernelError};

/// Held until dropped; the kernel lets go of it when the process dies.
#[derive(Debug)]
pub struct Lock(#[expect(dead_code, reason = "held, never read")] File);

/// Takes the lock, waiting for another holder; `waiting` is called once if there is one.
///
/// # Errors
/// [`KernelError::Io`].
pub fn take(path: &Path, waiting: impl FnOnce()) -> Result<Lock, KernelError> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).doing(|| format!("make the folder {}", dir.display()))?;
    }
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .doing(|| format!("open {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            waiting();
            file.lock().doing(|| format!("lock {}", path.display()))?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(KernelError::Io { doing: format!("lock {}", path.display()), error });
        }
    }
    Ok(Lock(file))
}
