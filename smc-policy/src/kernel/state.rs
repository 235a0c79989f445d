//! What is in force, read without changing anything.

use std::io;

use super::{
    current, enforce,
    error::KernelError,
    hs_ctrl::{self, Selected},
    instance::Instance,
    namespace, pinned,
    record::{self, Record},
};
use crate::paths::Paths;

/// The kernel's side and the record that belongs to it.
#[derive(Debug)]
pub struct State {
    /// What this namespace has selected in `net.smc.hs_ctrl`; nothing without SMC or the hook.
    pub selected: Selected,
    /// The instance that decides, by whichever hook, if its pins are there.
    pub instance: Option<Instance>,
    /// The record of the generation in force.
    pub record: Option<Record>,
    /// Programs at devices decide that belong to no instance whose pins are there.
    pub is_orphaned: bool,
}

/// How often a reader meets an apply in the middle before it gives up.
const TRIES: u32 = 20;

impl State {
    /// Reads it. A missing or damaged record is none; the kernel goes on without.
    ///
    /// # Errors
    /// [`KernelError::NotPermitted`]; [`KernelError::Io`].
    pub fn read(paths: &Paths) -> Result<Self, KernelError> {
        let mut tries = 0;
        loop {
            let (selected, id) = choice(paths)?;
            let opened = match &id {
                Some(id) => open(paths, id)?,
                None => None,
            };
            let is_orphaned = opened.is_none()
                && selected == Selected::None
                && enforce::has_programs_here().map_err(not_permitted)?;
            // Generation 0: a first apply was killed before its store.
            let instance = opened.filter(|instance| instance.generation() > 0);
            let generation = instance.as_ref().map_or(0, Instance::generation);
            let record = match &instance {
                Some(instance) => read_record(paths, instance, generation),
                _ => None,
            };
            // An apply may have pruned the record, or removed the instance, between two of these reads.
            let still = instance.as_ref().map_or(0, Instance::generation) == generation
                && choice(paths)? == (selected.clone(), id);
            tries += 1;
            if still || tries == TRIES {
                return Ok(Self { selected, instance, record, is_orphaned });
            }
        }
    }

    /// The instance and record in force, if all is as it should be.
    pub fn in_force(&self) -> Option<(&Instance, &Record)> {
        self.instance.as_ref().zip(self.record.as_ref())
    }

    /// Why what is in force cannot be told from the record, in words; none when it can, or when nothing is in force.
    pub fn trouble(&self, paths: &Paths) -> Option<String> {
        let (pins, run) = (paths.pins(), &paths.run);
        match (&self.selected, &self.instance, &self.record) {
            (Selected::None, None, _) if self.is_orphaned => Some(format!(
                "tc programs of smc-policy decide here, but their pins in {} are gone: `smc-policy apply` loads them anew",
                pins.display()
            )),
            (_, Some(_), Some(_)) | (Selected::None, None, _) => None,
            (Selected::Foreign(name), None, _) => Some(format!(
                "net.smc.hs_ctrl is '{name}', which is not smc-policy's: what it decides is not known here"
            )),
            (Selected::Ours(id), None, _) => Some(format!(
                "{} decides, but its pins in {} are gone: `smc-policy apply` loads it anew",
                hs_ctrl::name(id),
                pins.display()
            )),
            (_, Some(i), None) => Some(format!(
                "generation {} is in force, but {} has no usable record of it: `smc-policy apply` writes it anew",
                i.generation(),
                run.display()
            )),
        }
    }

    /// Instances that are loaded but not selected here and that no other namespace uses: left by a killed process, or
    /// somebody cleared the sysctl.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unselected(&self, paths: &Paths) -> Result<Vec<String>, KernelError> {
        let here = namespace::current()?;
        let selected = self.instance.as_ref().map(Instance::id);
        Ok(pinned::complete(&paths.pins())?
            .into_iter()
            .filter(|(id, _)| Some(id.as_str()) != selected)
            .filter(|(_, made_for)| made_for.is_none_or(|n| n == here || !namespace::exists(n)))
            .map(|(id, _)| id)
            .collect())
    }

    /// Registrations under this tool's name that are neither selected here nor pinned in our folder: their pins were
    /// lost, or an instance of the tool with other folders made them.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn unknown_registrations(&self, paths: &Paths) -> Result<Vec<String>, KernelError> {
        let pinned = pinned::complete(&paths.pins())?;
        Ok(hs_ctrl::registrations()?
            .into_iter()
            .map(|(id, _)| id)
            .filter(|id| self.selected != Selected::Ours(id.clone()) && pinned.iter().all(|(p, _)| p != id))
            .map(|id| hs_ctrl::name(&id))
            .collect())
    }
}

/// This namespace's choice, and the instance that decides: the one selected, else the one that `current` names.
fn choice(paths: &Paths) -> Result<(Selected, Option<String>), KernelError> {
    let selected = hs_ctrl::selected_if_there()?;
    let id = match &selected {
        Selected::Ours(id) => Some(id.clone()),
        _ => current::get(&paths.pins())?,
    };
    Ok((selected, id))
}

/// A record that does not fit the instance is none: its slots would be somebody else's memory.
fn read_record(paths: &Paths, instance: &Instance, generation: u64) -> Option<Record> {
    let record = record::read(&record::path_of(&paths.run, generation)).ok().flatten()?;
    let fits =
        record.generation == generation && record.slots().all(|slot| slot < instance.info().sizes.slots);
    fits.then_some(record)
}

fn open(paths: &Paths, id: &str) -> Result<Option<Instance>, KernelError> {
    Instance::open(&paths.pins(), id).map_err(not_permitted)
}

fn not_permitted(error: KernelError) -> KernelError {
    match error {
        KernelError::Io { error, .. } if error.kind() == io::ErrorKind::PermissionDenied => {
            KernelError::NotPermitted {
                doing: "reading the policy in force".into(),
                capability: "CAP_SYS_ADMIN (or CAP_BPF and CAP_NET_ADMIN)".into(),
            }
        }
        other => other,
    }
}
