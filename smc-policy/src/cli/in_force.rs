//! The policy in force, as its record tells it.

use super::outcome::{Exit, Failure};
use crate::{
    kernel::{hs_ctrl::Selected, instance::Instance, record::Record, state::State},
    paths::Paths,
    policy::{Policy, Slots},
};

/// What decides, and what that says.
pub(super) struct Recorded {
    pub(super) instance: Instance,
    pub(super) record: Record,
    pub(super) policy: Policy,
    pub(super) slots: Slots,
    /// What this namespace has selected in `net.smc.hs_ctrl`.
    pub(super) selected: Selected,
}

/// Reads it. `None`: nothing is in force. What decides and cannot be told is a failure: an answer would be a guess.
pub(super) fn read(paths: &Paths) -> Result<Option<Recorded>, Failure> {
    let state = State::read(paths)?;
    if let Some(trouble) = state.trouble(paths) {
        return Err(Failure::new(Exit::Host, trouble));
    }
    let State { selected, instance: Some(instance), record: Some(record), .. } = state else {
        return Ok(None);
    };
    let (policy, slots) = record.policy().ok_or_else(|| {
        Failure::new(
            Exit::Host,
            format!(
                "generation {} was applied by smc-policy {}, and this version does not accept its policy: \
                 `smc-policy apply` another, or use that version",
                record.generation, record.tool
            ),
        )
    })?;
    Ok(Some(Recorded { instance, record, policy, slots, selected }))
}
