//! Puts a policy in force.
//!
//! Every change of the policy is one store of a generation number. What else changes (hook, devices, namespaces, programs,
//! the size of tables) changes before or after it, while the old way and the new one decide alike:
//!
//! - a new instance is first given the policy *in force* and takes the old one's place everywhere, then the new policy is
//!   one store; smaller tables follow after it in the same way;
//! - another hook, device or namespace is added before the store, and what is not to be is taken away after it.
//!
//! Killed anywhere, the old policy or the new one is in force, whole, and the next apply removes what was left.

use std::path::{Path, PathBuf};

use super::{
    capability,
    enforce::Scope,
    error::KernelError,
    guard,
    hook::{self, Hook},
    hs_ctrl::{self, Selected},
    lock::{self, Lock},
    pinned,
    record::{Overrides, Record},
    state::State,
};
use crate::{
    paths::Paths,
    policy::{CompileError, Config, Policy, SourceFile},
};

mod sizes;
mod steps;

use sizes::Compiled;
pub use sizes::room_for;
use steps::Apply;

/// What to put in force.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The texts the policy was read from, which are recorded.
    pub sources: &'a [SourceFile],
    /// The policy.
    pub policy: &'a Policy,
    /// The files and folders they were found by; empty: the two policy folders.
    pub origin: &'a [PathBuf],
    /// How it is enforced.
    pub config: &'a Config,
    /// What of that the command line said.
    pub overrides: Overrides,
    /// The file read instead of config.toml; an absolute path.
    pub config_file: Option<&'a Path>,
    /// Take over from a foreign smc_hs_ctrl.
    pub replace_foreign: bool,
    /// Random; tells this apply from every other.
    pub token: &'a str,
    /// It waits for confirmation until then, seconds since 1970.
    pub unconfirmed_until: Option<u64>,
}

/// How it came into force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was in force already.
    None,
    /// It was in force already, waiting for confirmation; it no longer does.
    Confirmed,
    /// The first policy since start or `detach`.
    First,
    /// One store of the generation.
    Switched,
    /// New programs or larger tables replaced the old ones.
    Replaced,
}

/// A policy that is in force.
#[derive(Debug)]
pub struct Outcome {
    /// Its generation.
    pub generation: u64,
    /// How.
    pub change: Change,
    /// What was in force before, as far as it is recorded.
    pub before: Option<Record>,
    /// The hook that enforces it.
    pub hook: Hook,
    /// Why it is tc, where the choice was left to the tool.
    pub why_tc: Option<String>,
    /// Devices that have programs now and had none.
    pub attached: Vec<String>,
    /// The foreign smc_hs_ctrl that is selected again, now that the policy is enforced by the other hook.
    pub restored: Option<String>,
    /// Entries of the saved quarantine that hold again.
    pub quarantine_restored: usize,
    /// What did not work without harm to the policy in force.
    pub warnings: Vec<String>,
}

/// Why a policy was not put in force. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The kernel or host.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The policy needs too much.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// `--confirm` for a policy that is in force and waits already.
    #[error(
        "this policy is in force and waits for confirmation: what was in force before returns in {seconds} s, unless \
         Enter is pressed there, or the same `smc-policy apply` is given without --confirm"
    )]
    Waiting {
        /// Until the old policy returns.
        seconds: u64,
    },
    /// `--confirm` where what is in force cannot be returned to.
    #[error("--confirm needs something to return to: {0}")]
    NoWayBack(String),
}

/// Puts a policy in force. `waiting` is called once if another process holds the lock.
///
/// # Errors
/// [`ApplyError`]; then nothing was changed.
pub fn apply(paths: &Paths, request: &Request<'_>, waiting: impl FnOnce()) -> Result<Outcome, ApplyError> {
    capability::require("putting a policy in force")?;
    // Before the lock and the work: is there anything to apply it to? And compile without the lock.
    let early = State::read(paths)?;
    let compiled = Compiled::new(request, early.record.as_ref())?;
    let lock = lock::take(&paths.lock(), waiting)?;
    locked(paths, request, Some((early.record, compiled)), &lock)
}

/// [`apply`] under the lock. `early`: compiled before, for what was in force then.
///
/// # Errors
/// As [`apply`].
pub(super) fn locked(
    paths: &Paths,
    request: &Request<'_>,
    early: Option<(Option<Record>, Compiled)>,
    _lock: &Lock,
) -> Result<Outcome, ApplyError> {
    let state = State::read(paths)?;
    pinned::refuse_other_namespaces(&paths.pins())?;
    guard::Shared::check(&paths.pins())?;
    let (hook, why_tc) = hook::choose(request.config.hook)?;
    if hook == Hook::HsCtrl || matches!(state.selected, Selected::Ours(_)) {
        hs_ctrl::check_writable()?;
    }
    if hook == Hook::HsCtrl
        && let Selected::Foreign(name) = &state.selected
        && !request.replace_foreign
    {
        return Err(KernelError::ForeignHsCtrl { name: name.clone() }.into());
    }
    let compiled = match early {
        Some((record, compiled)) if record == state.record => compiled,
        _ => Compiled::new(request, state.record.as_ref())?,
    };
    let mut apply = Apply::begin(Scope { paths, hook, config: request.config }, request, &state);
    if request.unconfirmed_until.is_some() {
        apply.check_trial(&state)?;
    }
    match apply.run(state, &compiled) {
        Ok(outcome) => Ok(Outcome { why_tc, ..outcome }),
        Err(e) => {
            apply.clean_up();
            Err(capability::explain_refusal(e).into())
        }
    }
}
