//! The policies that outlast a reboot, in the state folder: `current.json` (the last good one), `previous.json` (what
//! `rollback` returns to), and `next.json` while an apply is under way.

use std::{fs, io, path::Path};

use super::{
    error::{Doing, KernelError},
    record::{self, Record},
};

const CURRENT: &str = "current.json";
const PREVIOUS: &str = "previous.json";
const NEXT: &str = "next.json";

/// Announces the policy that is about to be put in force.
///
/// # Errors
/// [`KernelError::Io`].
pub fn announce(state: &Path, next: &Record) -> Result<(), KernelError> {
    record::write(&state.join(NEXT), next)
}

/// The announced policy is in force: it becomes the current one, and the current one, if it was another, the previous.
/// Without an announcement nothing happens.
///
/// # Errors
/// [`KernelError::Io`].
pub fn settle(state: &Path) -> Result<(), KernelError> {
    let (next, current) = (state.join(NEXT), state.join(CURRENT));
    let Ok(Some(announced)) = record::read(&next) else { return Ok(()) };
    // A current one that cannot be read is no policy to return to.
    if let Ok(Some(old)) = record::read(&current)
        && !is_same(&old, &announced)
    {
        rename(&current, &state.join(PREVIOUS))?;
    }
    rename(&next, &current)
}

/// An apply was killed: finish what it announced if that is in force, else forget it.
///
/// # Errors
/// [`KernelError::Io`].
pub fn recover(state: &Path, in_force: Option<&Record>) -> Result<(), KernelError> {
    let path = state.join(NEXT);
    match record::read(&path) {
        Ok(None) => Ok(()),
        Ok(Some(next)) if in_force.is_some_and(|r| r.token == next.token) => settle(state),
        _ => fs::remove_file(&path).doing(|| format!("remove {}", path.display())),
    }
}

/// Makes the policy in force the current one, if that could not be written when it was applied.
///
/// # Errors
/// [`KernelError::Io`].
pub fn heal(state: &Path, in_force: &Record) -> Result<(), KernelError> {
    match current(state) {
        Ok(Some(current)) if is_same(&current, in_force) => Ok(()),
        _ => {
            announce(state, in_force)?;
            settle(state)
        }
    }
}

fn is_same(a: &Record, b: &Record) -> bool {
    a.digest == b.digest && a.config == b.config
}

/// The last good policy.
///
/// # Errors
/// [`KernelError::Record`], [`KernelError::Io`].
pub fn current(state: &Path) -> Result<Option<Record>, KernelError> {
    record::read(&state.join(CURRENT))
}

/// What `rollback` returns to.
///
/// # Errors
/// [`KernelError::Record`], [`KernelError::Io`].
pub fn previous(state: &Path) -> Result<Option<Record>, KernelError> {
    record::read(&state.join(PREVIOUS))
}

fn rename(from: &Path, to: &Path) -> Result<(), KernelError> {
    match fs::rename(from, to) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).doing(|| format!("rename {} to {}", from.display(), to.display()))
        }
        _ => Ok(()),
    }
}
