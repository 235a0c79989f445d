//! Takes the policy away: every connection negotiates as without the tool. Needs no file that can be read.

use super::{
    barrier::wait_for_programs,
    capability,
    error::KernelError,
    hs_ctrl::{self, Selected},
    instance::{self, Instance},
    lock::{self, Lock},
    record, replaced, unconfirmed,
};
use crate::paths::Paths;

/// What `detach` did.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Detached {
    /// A policy was in force.
    pub was_in_force: bool,
    /// The foreign smc_hs_ctrl that was selected again.
    pub restored: Option<String>,
    /// Instances removed.
    pub removed: Vec<String>,
    /// What did not work.
    pub warnings: Vec<String>,
}

/// Takes the policy away. `waiting` is called once if another process holds the lock.
///
/// # Errors
/// [`KernelError`]; then nothing was changed.
pub fn detach(paths: &Paths, waiting: impl FnOnce()) -> Result<Detached, KernelError> {
    capability::require("removing the policy")?;
    let lock = lock::take(&paths.lock(), waiting)?;
    locked(paths, &lock)
}

/// [`detach`] under the lock.
///
/// # Errors
/// As [`detach`].
pub(super) fn locked(paths: &Paths, _lock: &Lock) -> Result<Detached, KernelError> {
    // Without SMC nothing can be selected, but pins may be left.
    let selected = match hs_ctrl::selected() {
        Err(KernelError::Missing { .. }) => Selected::None,
        other => other?,
    };
    instance::refuse_other_namespaces(&paths.pins())?;
    let mut done = Detached::default();
    if let Selected::Ours(id) = &selected {
        hs_ctrl::check_writable()?;
        done.was_in_force = true;
        // An orphan that some namespace goes on with must change nothing.
        let allowed = allow_all(paths, id);
        done.warn(allowed);
        unselect(paths, &mut done)?;
        let unregistered = hs_ctrl::unregister_by_id(id);
        done.warn(unregistered);
    }
    let forgotten = replaced::forget(&paths.run).and_then(|()| unconfirmed::clear(&paths.run));
    done.warn(forgotten);
    let removed = instance::remove_others(&paths.pins(), None);
    done.removed = removed.ids;
    done.warnings.extend(removed.problems);
    instance::remove_empty(&paths.pins());
    record::prune(&paths.run, None);
    Ok(done)
}

impl Detached {
    fn warn(&mut self, result: Result<(), KernelError>) {
        if let Err(e) = result {
            self.warnings.push(e.to_string());
        }
    }
}

/// Clears this namespace's choice, or returns to the foreign one that was replaced.
fn unselect(paths: &Paths, done: &mut Detached) -> Result<(), KernelError> {
    let noted = replaced::noted(&paths.run).unwrap_or_else(|e| {
        done.warnings.push(e.to_string());
        None
    });
    if let Some(name) = noted {
        if hs_ctrl::select(&name).is_ok() {
            done.restored = Some(name);
            return Ok(());
        }
        done.warnings.push(format!("'{name}', which was selected before, is no longer registered"));
    }
    hs_ctrl::select("")
}

/// A generation without a table: everything is allowed.
fn allow_all(paths: &Paths, id: &str) -> Result<(), KernelError> {
    let Some(instance) = Instance::open(&paths.pins(), id)? else { return Ok(()) };
    let generation = instance.generation().wrapping_add(1);
    wait_for_programs()?;
    instance.fill(generation, &[0])?;
    wait_for_programs()?;
    instance.switch(generation);
    Ok(())
}
