//! Puts a policy in force, and takes it away.
//!
//! Every change is one store: of the generation number when the instance in force can hold the policy, of the
//! namespace's choice of instance otherwise. A replacement has two phases: the new instance is first given the policy
//! *in force* and selected (both instances decide alike), then the new policy is one store like any other. Killed
//! anywhere, the old policy or the new one is in force, whole, and the next apply removes what was left.

use std::{fs, io, path::PathBuf};

use super::{
    barrier::wait_for_programs,
    capability,
    error::{Doing, KernelError},
    hs_ctrl::{self, KernelTypes, Selected},
    instance::{self, Instance},
    lock,
    object::{self, Sizes},
    record::{self, Record},
    state::State,
    store,
};
use crate::{
    paths::Paths,
    policy::{CompileError, Policy, Slots, SourceFile, Tables, compile},
};

/// What to put in force.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The texts the policy was read from, which are recorded.
    pub sources: &'a [SourceFile],
    /// The policy.
    pub policy: &'a Policy,
    /// The files and folders they were found by; empty: the two policy folders.
    pub origin: &'a [PathBuf],
    /// Decide and count, change nothing.
    pub observe: bool,
    /// Take over from a foreign smc_hs_ctrl.
    pub replace_foreign: bool,
}

/// How it came into force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It was in force already.
    None,
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
}

/// A compiled policy with the slots it counts in.
struct Compiled {
    tables: Tables,
    slots: Slots,
    fresh: Vec<u32>,
}

impl Compiled {
    fn new(request: &Request<'_>, in_force: Option<&Record>) -> Result<Self, CompileError> {
        let (slots, fresh) = record::assign_slots(request.policy, in_force);
        Ok(Self { tables: compile(request.policy, &slots, request.observe)?, slots, fresh })
    }

    fn needs(&self) -> Sizes {
        let slots =
            self.slots.rules.iter().copied().chain([self.slots.default_outbound, self.slots.default_inbound]);
        Sizes { cells: self.tables.cells.len() as u32, slots: slots.max().unwrap_or(0) + 1 }
    }
}

/// Cells and slots of a new instance: room to grow, and no less than a page.
fn room_for(needs: Sizes) -> Sizes {
    Sizes {
        cells: needs.cells.next_power_of_two().max(512),
        slots: (needs.slots + needs.slots / 4).next_power_of_two().max(64),
    }
}

/// Tables this much larger than needed are replaced by smaller ones: 4 MiB and eight times too large.
const WASTEFUL_CELLS: u32 = 1 << 19;

fn fits(have: Sizes, needs: Sizes) -> bool {
    let wasteful = have.cells >= WASTEFUL_CELLS && have.cells / 8 > needs.cells;
    have.cells >= needs.cells && have.slots >= needs.slots && !wasteful
}

/// Puts a policy in force. `waiting` is called once if another process holds the lock.
///
/// # Errors
/// [`ApplyError`]; then nothing was changed.
pub fn apply(paths: &Paths, request: &Request<'_>, waiting: impl FnOnce()) -> Result<Outcome, ApplyError> {
    capability::require("putting a policy in force")?;
    // Before the lock and the work: is there anything to apply it to? And compile without the lock.
    let early = State::read(paths)?;
    hs_ctrl::check_writable()?;
    let mut compiled = Compiled::new(request, early.record.as_ref())?;
    let _lock = lock::take(&paths.lock(), waiting)?;
    let state = State::read(paths)?;
    if state.record != early.record {
        compiled = Compiled::new(request, state.record.as_ref())?;
    }
    if let Selected::Foreign(name) = &state.selected {
        if !request.replace_foreign {
            return Err(KernelError::ForeignHsCtrl { name: name.clone() }.into());
        }
        write_replaced(paths, name)?;
    }
    let mut apply = Apply { paths, request, warnings: Vec::new() };
    apply.recover(&state);
    match apply.run(state, &compiled) {
        Ok(outcome) => Ok(outcome),
        Err(e) => {
            clean_up(paths);
            Err(capability::explain_refusal(e).into())
        }
    }
}

/// After an apply that failed half way: removes what it made and is not in force. The error in hand says more than one
/// of this would, and the next apply does the same again.
fn clean_up(paths: &Paths) {
    let Ok(state) = State::read(paths) else { return };
    if let Selected::Foreign(_) = state.selected {
        let _ = fs::remove_file(paths.run.join(REPLACED));
    }
    let keep = state.instance.as_ref().map(Instance::id);
    let _ = instance::remove_others(&paths.pins(), keep);
    let _ = store::recover(&paths.state, state.record.as_ref());
    record::prune(&paths.run, state.record.map(|r| r.generation));
}

/// In the run folder: the foreign name that `--replace` took over from.
const REPLACED: &str = "replaced";

struct Apply<'a> {
    paths: &'a Paths,
    request: &'a Request<'a>,
    warnings: Vec<String>,
}

impl Apply<'_> {
    fn recover(&mut self, state: &State) {
        if let Err(e) = store::recover(&self.paths.state, state.record.as_ref()) {
            self.warnings.push(e.to_string());
        }
    }

    fn run(&mut self, state: State, compiled: &Compiled) -> Result<Outcome, KernelError> {
        let State { instance, record: before, selected } = state;
        let current_programs = |i: &Instance| i.info().object == object::object_id();
        let done = |generation, change, warnings: &mut Vec<String>, before| {
            Ok(Outcome { generation, change, before, warnings: std::mem::take(warnings) })
        };
        match (instance, before) {
            (Some(instance), Some(before)) => {
                let in_place = current_programs(&instance) && fits(instance.info().sizes, compiled.needs());
                let same = before.digest == record::digest(self.request.sources)
                    && before.observe == self.request.observe;
                if in_place && same {
                    self.tidy(&instance, None)?;
                    return done(before.generation, Change::None, &mut self.warnings, Some(before));
                }
                if in_place {
                    let generation = self.switch(&instance, &before, compiled)?;
                    self.tidy(&instance, None)?;
                    return done(generation, Change::Switched, &mut self.warnings, Some(before));
                }
                let generation = match before.policy() {
                    Some((policy, slots)) => self.replace(&instance, &before, &policy, &slots, compiled)?,
                    // Another version's record: one switch of the namespace is as whole as two phases.
                    None => self.start(Some(before.generation), Some(instance.id()), compiled)?,
                };
                done(generation, Change::Replaced, &mut self.warnings, Some(before))
            }
            (instance, before) => {
                let change = if instance.is_some() { Change::Replaced } else { Change::First };
                let old = match &selected {
                    Selected::Ours(id) => Some(id.as_str()),
                    _ => None,
                };
                let generation = self.start(instance.map(|i| i.generation()), old, compiled)?;
                done(generation, change, &mut self.warnings, before)
            }
        }
    }

    fn create(&self, needs: Sizes) -> Result<Instance, KernelError> {
        Instance::create(&self.paths.pins(), room_for(needs), Some(&KernelTypes::read()?))
    }

    /// One store on an instance that holds the policy in force.
    fn switch(
        &mut self,
        instance: &Instance,
        before: &Record,
        compiled: &Compiled,
    ) -> Result<u64, KernelError> {
        let generation = before.generation + 1;
        // The idle table was in force before the last switch: whoever began to read it then must have ended.
        wait_for_programs()?;
        for slot in &compiled.fresh {
            instance.clear_slot(*slot)?;
        }
        instance.fill(generation, &compiled.tables.cells)?;
        self.record(generation, compiled)?;
        wait_for_programs()?;
        instance.switch(generation);
        self.settle();
        Ok(generation)
    }

    /// A new instance with the policy in force, then the switch.
    fn replace(
        &mut self,
        old: &Instance,
        before: &Record,
        policy: &Policy,
        slots: &Slots,
        compiled: &Compiled,
    ) -> Result<u64, KernelError> {
        let old_tables = compile(policy, slots, before.observe)
            .map_err(|e| KernelError::Object(format!("the policy in force no longer compiles: {e}")))?;
        let needs = compiled.needs();
        let needs = Sizes {
            cells: needs.cells.max(old_tables.cells.len() as u32),
            slots: needs.slots.max(before.slots().max().unwrap_or(0) + 1),
        };
        let new = self.create(needs)?;
        new.fill(before.generation, &old_tables.cells)?;
        new.switch(before.generation);
        new.complete(&self.paths.pins())?;
        hs_ctrl::select(&hs_ctrl::name(new.id()))?;
        // From here on the old instance decides nothing: its counters stand still.
        wait_for_programs()?;
        for slot in before.slots() {
            new.set_carried(slot, old.counters(slot)?)?;
        }
        let generation = self.switch(&new, before, compiled)?;
        self.tidy(&new, Some(old.id()))?;
        Ok(generation)
    }

    /// A new instance with the new policy; the namespace's choice is the one store.
    fn start(
        &mut self,
        after: Option<u64>,
        old: Option<&str>,
        compiled: &Compiled,
    ) -> Result<u64, KernelError> {
        // Above every number that is or was in force: a record left over must not be taken for this generation's.
        let generation = record::recorded(&self.paths.run).into_iter().chain(after).max().unwrap_or(0) + 1;
        let new = self.create(compiled.needs())?;
        new.fill(generation, &compiled.tables.cells)?;
        new.switch(generation);
        self.record(generation, compiled)?;
        new.complete(&self.paths.pins())?;
        hs_ctrl::select(&hs_ctrl::name(new.id()))?;
        self.settle();
        self.tidy(&new, old)?;
        Ok(generation)
    }

    /// Says on disk what the next store puts in force.
    fn record(&mut self, generation: u64, compiled: &Compiled) -> Result<(), KernelError> {
        let record = Record::new(generation, self.request, &compiled.slots);
        record::write(&record::path_of(&self.paths.run, generation), &record)?;
        if let Err(e) = store::announce(&self.paths.state, &record) {
            self.warnings
                .push(format!("{e}: the policy will be in force now, but not be kept for the next boot"));
        }
        Ok(())
    }

    fn settle(&mut self) {
        if let Err(e) = store::settle(&self.paths.state) {
            self.warnings.push(e.to_string());
        }
    }

    /// Removes what is not in force any more.
    fn tidy(&mut self, keep: &Instance, old: Option<&str>) -> Result<(), KernelError> {
        record::prune(&self.paths.run, Some(keep.generation()));
        let removed = instance::remove_others(&self.paths.pins(), Some(keep.id()))?;
        // An instance whose pins are gone (bpffs mounted anew) has no folder to be found by.
        match old {
            Some(old) if !removed.iter().any(|id| id == old) => unregister_by_id(old),
            _ => Ok(()),
        }
    }
}

fn unregister_by_id(id: &str) -> Result<(), KernelError> {
    use std::os::fd::AsFd;
    for (found, registration) in hs_ctrl::registrations()? {
        if found == id {
            hs_ctrl::unregister(registration.as_fd())?;
        }
    }
    Ok(())
}

/// The foreign name that `--replace` took over from, so that `detach` can restore it.
fn write_replaced(paths: &Paths, name: &str) -> Result<(), KernelError> {
    let path = paths.run.join(REPLACED);
    record::write_beside(&path, name.as_bytes()).doing(|| format!("write {}", path.display()))
}

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

/// Takes the policy away: every connection negotiates as without the tool. Needs no file that can be read.
///
/// # Errors
/// [`KernelError`].
pub fn detach(paths: &Paths, waiting: impl FnOnce()) -> Result<Detached, KernelError> {
    capability::require("removing the policy")?;
    let _lock = lock::take(&paths.lock(), waiting)?;
    let mut done = Detached::default();
    // Without SMC nothing can be selected, but pins may be left.
    let selected = hs_ctrl::selected().unwrap_or(Selected::None);
    if let Selected::Ours(id) = &selected {
        done.was_in_force = true;
        // An orphan that some namespace goes on with must change nothing.
        match allow_all(paths, id) {
            Ok(()) => {}
            Err(e) => done.warnings.push(e.to_string()),
        }
        let path = paths.run.join(REPLACED);
        match fs::read_to_string(&path) {
            Ok(name) => match hs_ctrl::select(&name) {
                Ok(()) => done.restored = Some(name),
                Err(_) => {
                    hs_ctrl::select("")?;
                    done.warnings
                        .push(format!("'{name}', which was selected before, is no longer registered"));
                }
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => hs_ctrl::select("")?,
            Err(error) => {
                hs_ctrl::select("")?;
                done.warnings.push(format!("cannot read {}: {error}", path.display()));
            }
        }
        // Already gone is fine.
        let _ = fs::remove_file(&path);
        unregister_by_id(id)?;
    }
    done.removed = instance::remove_others(&paths.pins(), None)?;
    instance::remove_empty(&paths.pins());
    record::prune(&paths.run, None);
    Ok(done)
}

/// A generation without a table: everything is allowed.
fn allow_all(paths: &Paths, id: &str) -> Result<(), KernelError> {
    let Some(instance) = Instance::open(&paths.pins(), id)? else { return Ok(()) };
    let generation = instance.generation() + 1;
    wait_for_programs()?;
    instance.fill(generation, &[0])?;
    wait_for_programs()?;
    instance.switch(generation);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_policies_stay_small_and_large_ones_have_room() {
        assert_eq!(room_for(Sizes { cells: 100, slots: 5 }), Sizes { cells: 512, slots: 64 });
        assert_eq!(room_for(Sizes { cells: 600, slots: 120 }), Sizes { cells: 1024, slots: 256 });
    }

    #[test]
    fn when_tables_are_replaced() {
        let have = Sizes { cells: 512, slots: 64 };
        assert!(fits(have, Sizes { cells: 1, slots: 64 }));
        assert!(!fits(have, Sizes { cells: 513, slots: 1 }));
        assert!(!fits(have, Sizes { cells: 1, slots: 65 }));
        let large = Sizes { cells: 1 << 20, slots: 64 };
        assert!(!fits(large, Sizes { cells: 100, slots: 1 }), "8 MiB for a page");
        assert!(fits(large, Sizes { cells: 1 << 19, slots: 1 }));
    }
}
