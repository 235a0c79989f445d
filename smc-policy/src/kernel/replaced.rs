//! The foreign smc_hs_ctrl that `apply --replace` took over from: `<run>/replaced`, so that `detach` can restore it.

use std::{fs, io, path::Path};

use super::{
    error::{Doing, KernelError, remove_if_there},
    hs_ctrl,
    record::write_beside,
};

const FILE: &str = "replaced";

/// Notes the name.
///
/// # Errors
/// [`KernelError::Io`].
pub fn note(run: &Path, name: &str) -> Result<(), KernelError> {
    let path = run.join(FILE);
    write_beside(&path, name.as_bytes()).doing(|| format!("write {}", path.display()))
}

/// The name noted, if any.
///
/// # Errors
/// [`KernelError::Io`].
pub fn noted(run: &Path) -> Result<Option<String>, KernelError> {
    let path = run.join(FILE);
    match fs::read_to_string(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some).doing(|| format!("read {}", path.display())),
    }
}

/// Selects it again. `None`: none is noted, or it is no longer registered.
///
/// # Errors
/// [`KernelError::Io`].
pub fn restore(run: &Path) -> Result<Option<String>, KernelError> {
    let name = noted(run)?;
    forget(run)?;
    Ok(name.filter(|name| hs_ctrl::select(name).is_ok()))
}

/// Somebody chose anew since: there is nothing to restore.
///
/// # Errors
/// [`KernelError::Io`].
pub fn forget(run: &Path) -> Result<(), KernelError> {
    remove_if_there(&run.join(FILE))
}
