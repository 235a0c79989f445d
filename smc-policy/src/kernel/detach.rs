//! Takes the policy away: every connection negotiates as without the tool. Needs no file that can be read.

use super::{
    barrier::wait_for_programs,
    capability, current, enforce,
    error::KernelError,
    guard,
    hs_ctrl::{self, Selected},
    instance::Instance,
    lock::{self, Lock},
    pinned, record, replaced,
    state::State,
    store, unconfirmed, unsettled,
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
    let pins = paths.pins();
    pinned::refuse_other_namespaces(&pins)?;
    let mut done = Detached::default();
    // An apply that was killed may have announced a policy: that is settled while it can be told whether it is in force.
    let in_force = State::read(paths).ok().and_then(|state| state.record);
    let recovered = store::recover(&paths.state, in_force.as_ref());
    done.warn(recovered);
    let selected = hs_ctrl::selected_if_there()?;
    let mut decided = current::get(&pins)?;
    if let Selected::Ours(id) = &selected {
        hs_ctrl::check_writable()?;
        decided = Some(id.clone());
    }
    done.was_in_force = decided.is_some();
    // A namespace that cannot be reached goes on with an orphan: it must change nothing.
    let mut all = pinned::complete(&pins)?.into_iter().map(|(id, _)| id).collect::<Vec<_>>();
    all.extend(decided.clone().filter(|id| !all.contains(id)));
    for id in &all {
        let allowed = allow_all(paths, id);
        done.warn(allowed);
    }
    let noted = replaced::noted(&paths.run);
    match enforce::release(paths, None) {
        Ok(released) => {
            done.was_in_force |= released.was_covered;
            done.restored = released.restored;
            done.warnings.extend(released.problems);
        }
        Err(e) => done.warnings.push(e.to_string()),
    }
    match noted {
        Ok(Some(name)) if matches!(selected, Selected::Ours(_)) && done.restored.is_none() => {
            done.warnings.push(format!("'{name}', which was selected before, is no longer registered"))
        }
        Err(e) => done.warnings.push(e.to_string()),
        _ => {}
    }
    if matches!(hs_ctrl::selected_if_there()?, Selected::Ours(_)) {
        // The reason is among the warnings, but this is not what was asked for.
        hs_ctrl::select("")?;
    }
    if let Some(id) = &decided {
        let unregistered = hs_ctrl::unregister_by_id(id);
        done.warn(unregistered);
    }
    let forgotten = replaced::forget(&paths.run)
        .and_then(|()| unconfirmed::clear(&paths.run))
        .and_then(|()| unsettled::clear(&paths.run))
        .and_then(|()| current::clear(&pins));
    done.warn(forgotten);
    let removed = pinned::remove_others(&pins, None);
    done.removed = removed.ids;
    done.warnings.extend(removed.problems);
    // What was learned is not lost with the maps.
    let saved = guard::keep::save(paths, &[]).map(drop);
    done.warn(saved);
    let unshared = guard::Shared::remove(&pins);
    done.warn(unshared);
    pinned::remove_empty(&pins);
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

/// A generation without a table: everything is allowed, also by an orphan of the instance that some namespace goes on with.
pub(super) fn allow_all(paths: &Paths, id: &str) -> Result<(), KernelError> {
    let Some(instance) = Instance::open(&paths.pins(), id)? else { return Ok(()) };
    let generation = record::unused(&paths.run, instance.generation());
    wait_for_programs()?;
    instance.fill(generation, &[0])?;
    wait_for_programs()?;
    instance.switch(generation);
    Ok(())
}
