//! What is in force, read without changing anything.

use std::io;

use super::{
    error::KernelError,
    hs_ctrl::{self, Selected},
    instance::{self, Instance},
    record::{self, Record},
};
use crate::paths::Paths;

/// The kernel's side and the record that belongs to it.
#[derive(Debug)]
pub struct State {
    /// What this namespace has selected.
    pub selected: Selected,
    /// The selected instance, if its pins are there.
    pub instance: Option<Instance>,
    /// The record of the generation in force.
    pub record: Option<Record>,
}

impl State {
    /// Reads it. A missing or damaged record is none; the kernel goes on without.
    ///
    /// # Errors
    /// [`KernelError::Missing`] without SMC, the hook or bpffs; [`KernelError::NotPermitted`]; [`KernelError::Io`].
    pub fn read(paths: &Paths) -> Result<Self, KernelError> {
        let selected = hs_ctrl::selected()?;
        let instance = match &selected {
            Selected::Ours(id) => open(paths, id)?,
            _ => None,
        };
        let record = match &instance {
            Some(instance) if instance.generation() > 0 => {
                let n = instance.generation();
                record::read(&record::path_of(&paths.run, n)).ok().flatten().filter(|r| r.generation == n)
            }
            _ => None,
        };
        Ok(Self { selected, instance, record })
    }

    /// Instances that are loaded but not selected here: left by a killed process, or somebody cleared the sysctl.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unselected(&self, paths: &Paths) -> Result<Vec<String>, KernelError> {
        let mut ids = instance::complete_ids(&paths.pins())?;
        ids.retain(|id| self.instance.as_ref().is_none_or(|i| i.id() != id));
        Ok(ids)
    }
}

fn open(paths: &Paths, id: &str) -> Result<Option<Instance>, KernelError> {
    match Instance::open(&paths.pins(), id) {
        Err(KernelError::Io { error, .. }) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(KernelError::NotPermitted {
                doing: "reading the policy in force".into(),
                capability: "CAP_SYS_ADMIN (or CAP_BPF and CAP_NET_ADMIN)".into(),
            })
        }
        other => other,
    }
}
