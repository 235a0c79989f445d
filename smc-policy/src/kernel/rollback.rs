//! Returns to a policy that was in force before. What to return to is chosen under the lock.

use super::{
    apply::{self, ApplyError, Outcome, Request},
    capability,
    detach::{self, Detached},
    error::KernelError,
    lock, random,
    record::{self, Record},
    state::State,
    store,
    unconfirmed::{self, Unconfirmed},
};
use crate::{
    paths::Paths,
    policy::{Config, Loaded, Policy, load},
};

/// How it ended.
#[derive(Debug)]
pub enum RolledBack {
    /// An earlier policy is in force again.
    To {
        /// The policy.
        policy: Box<Policy>,
        /// How it is enforced.
        config: Box<Config>,
        /// How it came into force.
        outcome: Box<Outcome>,
    },
    /// Nothing was in force before: detached.
    ToNothing(Detached),
    /// What waited for confirmation is no longer in force, or does not wait any more: nothing was changed.
    NotWaiting,
}

/// Why not. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// As an apply fails.
    #[error(transparent)]
    Apply(#[from] ApplyError),
    /// No earlier policy is kept.
    #[error("no earlier policy is kept in {0}: there is nothing to return to")]
    Nothing(std::path::PathBuf),
    /// This version does not accept the kept policy.
    #[error(
        "the kept policy (of {0}) is not one that this version of smc-policy accepts; `smc-policy apply` another"
    )]
    Unreadable(String),
}

impl From<KernelError> for RollbackError {
    fn from(e: KernelError) -> Self {
        Self::Apply(e.into())
    }
}

/// Returns to the policy before the one in force; with nothing in force, to the last good one. `waiting` is called once
/// if another process holds the lock.
///
/// # Errors
/// [`RollbackError`].
pub fn rollback(paths: &Paths, waiting: impl FnOnce()) -> Result<RolledBack, RollbackError> {
    capability::require("returning to the previous policy")?;
    let lock = lock::take(&paths.lock(), waiting)?;
    let state = State::read(paths)?;
    if let Ok(Some(Unconfirmed { before, .. })) = unconfirmed::read(&paths.run, state.record.as_ref()) {
        return to(paths, before, &lock);
    }
    // An apply that was killed may not have settled which policy is the one before.
    store::recover(&paths.state, state.record.as_ref())?;
    let kept =
        if state.instance.is_some() { store::previous(&paths.state)? } else { store::current(&paths.state)? };
    let record = kept.ok_or_else(|| RollbackError::Nothing(paths.state.clone()))?;
    to(paths, Some(record), &lock)
}

/// Returns to what was in force before the policy with this token, if that still waits for confirmation.
///
/// # Errors
/// [`RollbackError`].
pub fn revert(paths: &Paths, token: &str) -> Result<RolledBack, RollbackError> {
    capability::require("returning to the previous policy")?;
    let lock = lock::take(&paths.lock(), || {})?;
    let state = State::read(paths)?;
    match unconfirmed::read(&paths.run, state.record.as_ref())? {
        Some(Unconfirmed { token: waits, before, .. }) if waits == token => to(paths, before, &lock),
        _ => Ok(RolledBack::NotWaiting),
    }
}

/// Keeps the policy with this token. False: it is no longer in force.
///
/// # Errors
/// [`KernelError`].
pub fn confirm(paths: &Paths, token: &str) -> Result<bool, KernelError> {
    let _lock = lock::take(&paths.lock(), || {})?;
    let state = State::read(paths)?;
    if state.record.as_ref().is_none_or(|r| r.token != token) {
        return Ok(false);
    }
    unconfirmed::clear(&paths.run)?;
    Ok(true)
}

fn to(paths: &Paths, record: Option<Record>, lock: &lock::Lock) -> Result<RolledBack, RollbackError> {
    let Some(record) = record else { return Ok(RolledBack::ToNothing(detach::locked(paths, lock)?)) };
    let sources = record.source_files();
    let Ok(Loaded { policy, .. }) = load(&sources, record::now()) else {
        let files: Vec<_> = record.sources.iter().map(|s| s.path.display().to_string()).collect();
        return Err(RollbackError::Unreadable(files.join(", ")));
    };
    let token = random::hex(8)?;
    let request = Request {
        sources: &sources,
        policy: &policy,
        origin: &record.origin,
        config: &record.config,
        overrides: record.overrides,
        config_file: record.config_file.as_deref(),
        replace_foreign: record.replace_foreign,
        token: &token,
        unconfirmed_until: None,
    };
    let outcome = apply::locked(paths, &request, None, lock)?;
    Ok(RolledBack::To {
        policy: Box::new(policy),
        config: Box::new(record.config),
        outcome: Box::new(outcome),
    })
}
