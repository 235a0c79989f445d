//! `apply --confirm`: what is in force for a while only, and what returns when nobody confirms. One file,
//! `<run>/unconfirmed.json`, written before the policy is in force and removed when it is confirmed or gone.

use std::{fs, io, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    error::{Doing, KernelError, remove_if_there},
    record::{self, Record},
};

const FILE: &str = "unconfirmed.json";

/// An apply that waits for confirmation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unconfirmed {
    /// [`Record::token`] of the policy in force.
    pub token: String,
    /// When it ends, seconds since 1970.
    pub until: u64,
    /// What returns; none: nothing was in force.
    pub before: Option<Record>,
}

impl Unconfirmed {
    /// Seconds until the old policy returns; 0: overdue.
    pub fn seconds_left(&self) -> u64 {
        self.until.saturating_sub(record::unix_now())
    }
}

/// Writes them down: the policy that is about to be in force, and the one in force if that waits too.
///
/// # Errors
/// [`KernelError::Io`].
pub fn write(run: &Path, waiting: &[&Unconfirmed]) -> Result<(), KernelError> {
    let path = run.join(FILE);
    let json = serde_json::to_vec(waiting)
        .map_err(|e| KernelError::Record { path: path.clone(), what: e.to_string() })?;
    record::write_beside(&path, &json).doing(|| format!("write {}", path.display()))
}

/// What waits for confirmation, if it is the policy in force.
///
/// # Errors
/// [`KernelError::Record`], [`KernelError::Io`].
pub fn read(run: &Path, in_force: Option<&Record>) -> Result<Option<Unconfirmed>, KernelError> {
    let path = run.join(FILE);
    let bytes = match fs::read(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.doing(|| format!("read {}", path.display()))?,
    };
    let found: Vec<Unconfirmed> = serde_json::from_slice(&bytes)
        .map_err(|e| KernelError::Record { path: path.clone(), what: e.to_string() })?;
    Ok(found.into_iter().find(|u| in_force.is_some_and(|r| r.token == u.token)))
}

/// Nothing waits any more.
///
/// # Errors
/// [`KernelError::Io`].
pub fn clear(run: &Path) -> Result<(), KernelError> {
    remove_if_there(&run.join(FILE))
}
