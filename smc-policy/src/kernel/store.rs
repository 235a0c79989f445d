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
///
/// # Errors
/// [`KernelError::Io`].
pub fn settle(state: &Path) -> Result<(), KernelError> {
    let (next, current) = (state.join(NEXT), state.join(CURRENT));
    let same = match (record::read(&next), record::read(&current)) {
        (Ok(Some(n)), Ok(Some(c))) => n.digest == c.digest && n.observe == c.observe,
        _ => false,
    };
    if !same {
        rename_if_there(&current, &state.join(PREVIOUS))?;
    }
    rename_if_there(&next, &current)
}

/// An apply was killed: finish what it announced if that is in force, else forget it.
///
/// # Errors
/// [`KernelError::Io`].
pub fn recover(state: &Path, in_force: Option<&Record>) -> Result<(), KernelError> {
    let path = state.join(NEXT);
    let Ok(Some(next)) = record::read(&path) else { return Ok(()) };
    let reached = in_force.is_some_and(|r| r.digest == next.digest && r.observe == next.observe);
    if reached {
        settle(state)
    } else {
        fs::remove_file(&path).doing(|| format!("remove {}", path.display()))
    }
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

fn rename_if_there(from: &Path, to: &Path) -> Result<(), KernelError> {
    match fs::rename(from, to) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(e).doing(|| format!("rename {} to {}", from.display(), to.display()))
        }
        _ => Ok(()),
    }
}
