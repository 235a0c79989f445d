//! The one lock of whoever changes what is in force.

use std::{
    fs::{self, File, Permissions, TryLockError},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    process,
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
    let mut waiting = Some(waiting);
    loop {
        let file = open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                if let Some(waiting) = waiting.take() {
                    waiting();
                }
                file.lock().doing(|| format!("lock {}", path.display()))?;
            }
            Err(TryLockError::Error(error)) => {
                return Err(KernelError::Io { doing: format!("lock {}", path.display()), error });
            }
        }
        // The file may have been removed while we waited: then the next one locks another.
        let ours = file.metadata().map(|m| m.ino());
        if let (Ok(ours), Ok(there)) = (ours, fs::metadata(path).map(|m| m.ino()))
            && ours == there
        {
            return Ok(Lock(file));
        }
    }
}

/// Takes the lock if nobody holds it, and notes this process's id in the file; else the id of who holds it, if the file says.
///
/// # Errors
/// [`KernelError::Io`].
pub fn try_take(path: &Path) -> Result<Result<Lock, Option<u32>>, KernelError> {
    let file = open(path)?;
    match file.try_lock() {
        Ok(()) => {
            // A word to others: that it cannot be written is no reason not to go on.
            let _ = file.set_len(0).and_then(|()| (&file).write_all(process::id().to_string().as_bytes()));
            Ok(Ok(Lock(file)))
        }
        Err(TryLockError::WouldBlock) => {
            Ok(Err(fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok())))
        }
        Err(TryLockError::Error(error)) => {
            Err(KernelError::Io { doing: format!("lock {}", path.display()), error })
        }
    }
}

fn open(path: &Path) -> Result<File, KernelError> {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).doing(|| format!("make the folder {}", dir.display()))?;
    }
    // Whoever can open the file can hold the lock: nobody but root shall keep `detach` waiting.
    let opened = File::options().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = match opened {
        // A read-only /run must not be in the way of `detach`.
        Err(e) if e.kind() == io::ErrorKind::ReadOnlyFilesystem => File::open(path),
        other => other,
    }
    .doing(|| format!("open the lock {}", path.display()))?;
    if file.metadata().is_ok_and(|m| m.mode() & 0o077 != 0) {
        file.set_permissions(Permissions::from_mode(0o600))
            .doing(|| format!("close {} to others", path.display()))?;
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_for_root_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/lock");
        let first = take(&path, || panic!("nobody holds it")).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let (told, hears) = std::sync::mpsc::channel();
        let second = std::thread::spawn({
            let path = path.clone();
            move || take(&path, || told.send(()).unwrap()).map(drop)
        });
        hears.recv().unwrap();
        drop(first);
        second.join().unwrap().unwrap();
    }

    #[test]
    fn who_does_not_wait_is_told_who_holds_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("monitor");
        let first = try_take(&path).unwrap().unwrap();
        assert_eq!(try_take(&path).unwrap().unwrap_err(), Some(process::id()));
        drop(first);
        try_take(&path).unwrap().unwrap();
    }

    #[test]
    fn a_removed_lock_is_not_held() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let first = take(&path, || {}).unwrap();
        let (told, hears) = std::sync::mpsc::channel();
        let second = std::thread::spawn({
            let path = path.clone();
            move || take(&path, || told.send(()).unwrap())
        });
        hears.recv().unwrap();
        fs::remove_file(&path).unwrap();
        let third = take(&path, || panic!("a file of its own")).unwrap();
        drop(first);
        // The second must not believe that it holds the lock now.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!second.is_finished());
        drop(third);
        second.join().unwrap().unwrap();
    }
}
