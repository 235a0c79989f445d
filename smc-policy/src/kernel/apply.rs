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
    barrier::wait_for_programs,
    capability, detach,
    enforce::{self, Scope},
    error::KernelError,
    guard,
    hook::{self, Hook},
    hs_ctrl::{self, Selected},
    instance::Instance,
    lock::{self, Lock},
    object::{self, Sizes},
    pinned,
    record::{self, Overrides, Record},
    replaced,
    state::State,
    store, tc,
    unconfirmed::{self, Unconfirmed},
    unsettled,
};
use crate::{
    paths::Paths,
    policy::{CompileError, Config, Policy, Slots, SourceFile, Tables, compile, config::Namespaces},
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

/// A compiled policy with the slots it counts in.
pub(super) struct Compiled {
    tables: Tables,
    slots: Slots,
    fresh: Vec<u32>,
}

impl Compiled {
    fn new(request: &Request<'_>, in_force: Option<&Record>) -> Result<Self, CompileError> {
        let (slots, fresh) = record::assign_slots(request.policy, in_force);
        Ok(Self { tables: compile(request.policy, &slots, &request.config.settings())?, slots, fresh })
    }

    fn needs(&self) -> Sizes {
        Sizes { cells: self.tables.cells.len() as u32, slots: self.slots.all().max().unwrap_or(0) + 1 }
    }
}

/// Cells and slots of a new instance that is to hold a policy which needs `needs`: room to grow, and no less than a
/// page.
pub fn room_for(needs: Sizes) -> Sizes {
    Sizes {
        cells: needs.cells.next_power_of_two().max(512),
        slots: (needs.slots + needs.slots / 4).next_power_of_two().max(64),
    }
}

/// Tables this much larger than needed are replaced by smaller ones: 4 MiB and eight times too large.
const WASTEFUL_CELLS: u32 = 1 << 19;

fn is_wasteful(have: Sizes, needs: Sizes) -> bool {
    have.cells >= WASTEFUL_CELLS && have.cells / 8 > needs.cells
}

fn fits(have: Sizes, needs: Sizes) -> bool {
    have.cells >= needs.cells && have.slots >= needs.slots
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
    // A file that cannot be read keeps nothing waiting.
    let waits = unconfirmed::read(&paths.run, state.record.as_ref()).unwrap_or_default();
    let mut apply = Apply {
        scope: Scope { paths, hook, config: request.config },
        paths,
        request,
        selected: state.selected.clone(),
        is_orphaned: state.is_orphaned,
        had_shared: guard::Shared::folder(&paths.pins()).exists(),
        is_unsettled: false,
        waits,
        attached: Vec::new(),
        restored: None,
        quarantine_restored: 0,
        warnings: Vec::new(),
    };
    apply.recover(&state);
    if request.unconfirmed_until.is_some() {
        if let Some(waits) = apply.waits.as_ref().filter(|_| apply.is_in_force(&state)) {
            return Err(ApplyError::Waiting { seconds: waits.seconds_left() });
        }
        if let Some(trouble) = state.trouble(paths) {
            return Err(ApplyError::NoWayBack(trouble));
        }
    }
    match apply.run(state, &compiled) {
        Ok(outcome) => Ok(Outcome { why_tc, ..outcome }),
        Err(e) => {
            apply.clean_up();
            Err(capability::explain_refusal(e).into())
        }
    }
}

struct Apply<'a> {
    paths: &'a Paths,
    request: &'a Request<'a>,
    /// What this namespace has selected.
    selected: Selected,
    /// Programs decide of which nothing is known.
    is_orphaned: bool,
    /// A quarantine was there.
    had_shared: bool,
    /// Something could not be taken away: the next apply is to try again.
    is_unsettled: bool,
    /// The policy in force, if it waits for confirmation.
    waits: Option<Unconfirmed>,
    attached: Vec<String>,
    restored: Option<String>,
    quarantine_restored: usize,
    warnings: Vec<String>,
    scope: Scope<'a>,
}

impl Apply<'_> {
    fn recover(&mut self, state: &State) {
        let recovered = store::recover(&self.paths.state, state.record.as_ref());
        self.warn(recovered);
    }

    fn warn(&mut self, result: Result<(), KernelError>) {
        if let Err(e) = result {
            self.warnings.push(e.to_string());
        }
    }

    /// After it failed half way: what was in force is where it was and nowhere else, and what was made for the new policy is
    /// removed. The error in hand says more than one of this would, and the next apply does the same again.
    fn clean_up(&self) {
        let (paths, pins) = (self.paths, self.paths.pins());
        let Ok(state) = State::read(paths) else { return };
        let released = match (&state.instance, &state.record) {
            // Somebody has chosen another meanwhile.
            (Some(_), Some(Record { hook: Hook::HsCtrl, .. })) if matches!(&state.selected, Selected::Foreign(name) if self.restored.as_ref() != Some(name)) => {
                None
            }
            (Some(instance), Some(record)) => {
                let scope = Scope { paths, hook: record.hook, config: &record.config };
                let established = enforce::establish(&scope, instance, &state.selected);
                Some(established.and_then(|_| enforce::release(paths, Some((&scope, instance)))))
            }
            // What it says is not known, nor where it is to be: it stays as it is.
            (Some(_), None) => None,
            // Its pins are gone, and it goes on.
            (None, _) if self.is_orphaned || matches!(state.selected, Selected::Ours(_)) => None,
            (None, _) => Some(enforce::release(paths, None)),
        };
        if released.is_some_and(|r| r.is_ok_and(|released| released.problems.is_empty())) {
            let _ = unsettled::clear(&paths.run);
        }
        if !matches!(hs_ctrl::selected_if_there(), Ok(Selected::Ours(_))) {
            let _ = replaced::forget(&paths.run);
        }
        pinned::remove_others(&pins, state.instance.as_ref().map(Instance::id));
        if !self.had_shared {
            let _ = guard::Shared::remove(&pins);
            pinned::remove_empty(&pins);
        }
        let _ = store::recover(&paths.state, state.record.as_ref());
        if unconfirmed::read(&paths.run, state.record.as_ref()).is_ok_and(|u| u.is_none()) {
            let _ = unconfirmed::clear(&paths.run);
        }
        record::prune(&paths.run, state.record.map(|r| r.generation));
    }

    /// Is it the policy in force?
    fn is_in_force(&self, state: &State) -> bool {
        state.record.as_ref().is_some_and(|record| self.is_same(record))
    }

    /// Does the record say the same policy, enforced the same way?
    fn is_same(&self, record: &Record) -> bool {
        record.digest == record::digest(self.request.sources)
            && record.config == *self.request.config
            && record.hook == self.scope.hook
    }

    fn run(&mut self, state: State, compiled: &Compiled) -> Result<Outcome, KernelError> {
        let before = state.record;
        let (generation, change) = match &state.instance {
            Some(instance) if self.is_current(instance) && fits(instance.info().sizes, compiled.needs()) => {
                self.in_place(instance, before.as_ref(), compiled)?
            }
            Some(instance) => {
                let in_force = before.as_ref().and_then(|record| Some((record, record.policy()?)));
                let generation = match in_force {
                    Some((record, (policy, slots))) => {
                        self.replace(instance, record, &policy, &slots, compiled)?
                    }
                    // What is in force is not known, or in a record of another version.
                    None => self.start(Some((instance, before.as_ref())), compiled)?,
                };
                (generation, Change::Replaced)
            }
            None => (self.start(None, compiled)?, Change::First),
        };
        Ok(Outcome {
            generation,
            change,
            before,
            hook: self.scope.hook,
            why_tc: None,
            attached: std::mem::take(&mut self.attached),
            restored: self.restored.take(),
            quarantine_restored: self.quarantine_restored,
            warnings: std::mem::take(&mut self.warnings),
        })
    }

    /// On the instance in force, which can hold the policy.
    fn in_place(
        &mut self,
        instance: &Instance,
        before: Option<&Record>,
        compiled: &Compiled,
    ) -> Result<(u64, Change), KernelError> {
        // A killed replacement left some of its programs, perhaps: they would go on with the old policy.
        let others = pinned::ids(&self.paths.pins())?.iter().any(|id| id != instance.id());
        let moves = others
            || unsettled::is_set(&self.paths.run)
            || before.is_none_or(|b| b.config != *self.request.config || b.hook != self.scope.hook)
            || instance.has_traces_of_other(self.scope.hook)?;
        if moves {
            unsettled::set(&self.paths.run)?;
        }
        self.establish(instance)?;
        if others {
            self.release(instance);
        }
        let (generation, change) = match before.filter(|before| self.is_same(before)) {
            Some(before) => (before.generation, self.keep(before)),
            None => (self.switch(instance, before, compiled)?, Change::Switched),
        };
        if moves {
            self.release(instance);
        }
        let small = if is_wasteful(instance.info().sizes, compiled.needs()) {
            self.shrink(instance, generation, compiled)
        } else {
            None
        };
        let small_or_same = small.as_ref().unwrap_or(instance);
        self.tidy(small_or_same, None);
        Ok((generation, if small.is_some() { Change::Replaced } else { change }))
    }

    /// The policy in force moves to tables of the size that it needs: both decide alike. The policy is in force: what goes
    /// wrong is no failure.
    fn shrink(&mut self, large: &Instance, generation: u64, compiled: &Compiled) -> Option<Instance> {
        let made = self.create(compiled.needs()).and_then(|mut small| {
            small.fill(generation, &compiled.tables.cells)?;
            small.switch(generation);
            small.complete(&self.paths.pins())?;
            self.establish(&small)?;
            Ok(small)
        });
        match made {
            Ok(small) => {
                self.release(&small);
                self.carry(large, compiled.slots.all(), &small);
                Some(small)
            }
            Err(e) => {
                self.warnings.push(format!("the tables stay larger than they need be: {e}"));
                let back = self.establish(large);
                self.warn(back);
                self.release(large);
                None
            }
        }
    }

    /// Does it run this version's programs, registered as they are to be?
    fn is_current(&self, instance: &Instance) -> bool {
        let info = instance.info();
        let is_registered_right =
            self.scope.hook != Hook::HsCtrl || info.inheritable == self.is_inheritable();
        info.object == object::object_id() && is_registered_right
    }

    fn is_inheritable(&self) -> bool {
        self.request.config.namespaces == Namespaces::All
    }

    /// Makes the instance decide wherever it is to.
    fn establish(&mut self, instance: &Instance) -> Result<(), KernelError> {
        let done = enforce::establish(&self.scope, instance, &self.selected)?;
        self.selected = done.selected;
        self.attached.extend(done.attached);
        self.warnings.extend(done.gaps);
        Ok(())
    }

    /// Takes away what decided before, wherever it did.
    fn release(&mut self, instance: &Instance) {
        // A SYN that the one hook has let pass may still be on its way to where the other one is asked.
        let waited = wait_for_programs();
        self.warn(waited);
        match enforce::release(self.paths, Some((&self.scope, instance))) {
            Ok(released) => {
                self.restored = released.restored.or(self.restored.take());
                self.is_unsettled |= !released.problems.is_empty();
                self.warnings.extend(released.problems);
            }
            Err(e) => {
                self.is_unsettled = true;
                self.warnings.push(e.to_string());
            }
        }
    }

    /// The policy is in force already: what does not change the kernel may still be wrong.
    fn keep(&mut self, before: &Record) -> Change {
        let Request { origin, overrides, config_file, .. } = *self.request;
        let now = Record {
            origin: origin.to_owned(),
            overrides,
            config_file: config_file.map(Path::to_owned),
            ..before.clone()
        };
        if now != *before {
            let written = record::write(&record::path_of(&self.paths.run, now.generation), &now);
            self.warn(written);
        }
        let healed = store::heal(&self.paths.state, &now);
        self.warn(healed);
        if self.waits.is_none() {
            return Change::None;
        }
        let cleared = unconfirmed::clear(&self.paths.run);
        self.warn(cleared);
        Change::Confirmed
    }

    /// A new instance, which is to take the place of what there is.
    fn create(&mut self, needs: Sizes) -> Result<Instance, KernelError> {
        unsettled::set(&self.paths.run)?;
        let instance = Instance::create(&self.paths.pins(), room_for(needs), self.is_inheritable())?;
        // Before anything is judged by it.
        if !self.had_shared {
            match guard::keep::restore(self.paths) {
                Ok(restored) => self.quarantine_restored = restored,
                Err(e) => self.warnings.push(format!("the saved quarantine is not restored: {e}")),
            }
        }
        Ok(instance)
    }

    /// One store on an instance that holds the policy in force. `before`: its record, if there is one.
    fn switch(
        &mut self,
        instance: &Instance,
        before: Option<&Record>,
        compiled: &Compiled,
    ) -> Result<u64, KernelError> {
        let in_force = instance.generation();
        let generation = match before {
            Some(_) => in_force + 1,
            None => record::unused(&self.paths.run, in_force),
        };
        // The idle table was in force before the last switch: whoever began to read it then must have ended.
        wait_for_programs()?;
        for slot in &compiled.fresh {
            instance.clear_slot(*slot)?;
        }
        instance.fill(generation, &compiled.tables.cells)?;
        self.record(generation, before, compiled)?;
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
        let Ok(old_tables) = compile(policy, slots, &before.config.settings()) else {
            // This version refuses what another accepted.
            return self.start(Some((old, Some(before))), compiled);
        };
        let needs = compiled.needs();
        let needs = Sizes {
            cells: needs.cells.max(old_tables.cells.len() as u32),
            slots: needs.slots.max(before.slots().max().unwrap_or(0) + 1),
        };
        let mut new = self.create(needs)?;
        new.fill(before.generation, &old_tables.cells)?;
        new.switch(before.generation);
        new.complete(&self.paths.pins())?;
        self.establish(&new)?;
        self.release(&new);
        self.carry(old, before.slots(), &new);
        let generation = self.switch(&new, Some(before), compiled)?;
        self.tidy(&new, Some(old.id()));
        Ok(generation)
    }

    /// A new instance with the new policy. `old`: what is in force, of which the policy is not known, with its record if
    /// there is one.
    fn start(
        &mut self,
        old: Option<(&Instance, Option<&Record>)>,
        compiled: &Compiled,
    ) -> Result<u64, KernelError> {
        let in_force = old.map_or(0, |(instance, _)| instance.generation());
        let generation = record::unused(&self.paths.run, in_force);
        let lost = match &self.selected {
            Selected::Ours(id) => Some(id.clone()),
            _ => None,
        };
        let mut new = self.create(compiled.needs())?;
        new.fill(generation, &compiled.tables.cells)?;
        if old.is_some() || self.is_orphaned || self.scope.hook == Hook::HsCtrl {
            // The namespace's choice is the one store; and what the old one decides is not to end before the new begins.
            new.switch(generation);
        }
        self.record(generation, old.and_then(|(_, record)| record), compiled)?;
        new.complete(&self.paths.pins())?;
        self.establish(&new)?;
        // Devices, of which there are many, allowed everything until here.
        wait_for_programs()?;
        new.switch(generation);
        self.settle();
        self.release(&new);
        if let Some((old, Some(_))) = old {
            let kept = compiled.slots.all().filter(|slot| !compiled.fresh.contains(slot));
            self.carry(old, kept, &new);
        }
        self.tidy(&new, lost.as_deref());
        Ok(generation)
    }

    /// Takes over what a replaced instance had counted.
    fn carry(&mut self, old: &Instance, slots: impl Iterator<Item = u32>, new: &Instance) {
        let carried = (|| {
            // From here on the old instance decides nothing: its counters stand still.
            wait_for_programs()?;
            for slot in slots {
                new.set_carried(slot, old.counters(slot)?)?;
            }
            new.set_carried_stat(old.instance_counters()?)
        })();
        self.warn(carried);
    }

    /// Says on disk what the next store puts in force.
    fn record(
        &mut self,
        generation: u64,
        before: Option<&Record>,
        compiled: &Compiled,
    ) -> Result<(), KernelError> {
        let run = &self.paths.run;
        let mut record = Record::new(generation, self.request, self.scope.hook, &compiled.slots);
        let from_foreign = self.request.replace_foreign || replaced::noted(run)?.is_some();
        record.replace_foreign = self.scope.hook == Hook::HsCtrl && from_foreign;
        record::write(&record::path_of(run, generation), &record)?;
        if let Some(until) = self.request.unconfirmed_until {
            let token = record.token.clone();
            // What nobody confirmed is nothing to return to.
            let before = self.waits.as_ref().map_or(before, |waits| waits.before.as_ref());
            let new = Unconfirmed { token, until, before: before.cloned() };
            // Until the store, the old policy waits as before.
            let all: Vec<_> = self.waits.iter().chain([&new]).collect();
            unconfirmed::write(run, &all)?;
        }
        if let Err(e) = store::announce(&self.paths.state, &record) {
            self.warnings
                .push(format!("{e}: the policy will be in force now, but not be kept for the next boot"));
        }
        Ok(())
    }

    /// After the one store.
    fn settle(&mut self) {
        let settled = store::settle(&self.paths.state);
        self.warn(settled);
        if self.request.unconfirmed_until.is_none() {
            // What waited was the old policy: it is over with it.
            let cleared = unconfirmed::clear(&self.paths.run);
            self.warn(cleared);
        }
    }

    /// Removes what is not in force any more. The policy is in force: what stays behind is no failure.
    fn tidy(&mut self, keep: &Instance, old: Option<&str>) {
        record::prune(&self.paths.run, Some(keep.generation()));
        // An orphan that a namespace which could not be reached goes on with must change nothing.
        for (id, _) in pinned::complete(&self.paths.pins()).unwrap_or_default() {
            if id != keep.id() {
                // Of another version's nothing is known, and nothing is changed.
                let _ = detach::allow_all(self.paths, &id);
            }
        }
        if !self.is_unsettled {
            let cleared = unsettled::clear(&self.paths.run);
            self.warn(cleared);
        }
        let pruned = tc::prune(&self.paths.links()).map(drop);
        self.warn(pruned);
        let removed = pinned::remove_others(&self.paths.pins(), Some(keep.id()));
        self.warnings.extend(removed.problems);
        // An instance whose pins are gone (bpffs mounted anew) has no folder to be found by.
        if let Some(old) = old.filter(|old| !removed.ids.iter().any(|id| id == old)) {
            let unregistered = hs_ctrl::unregister_by_id(old);
            self.warn(unregistered);
        }
    }
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
        assert!(!is_wasteful(have, Sizes { cells: 1, slots: 1 }));
        let large = Sizes { cells: 1 << 20, slots: 64 };
        assert!(is_wasteful(large, Sizes { cells: 100, slots: 1 }), "8 MiB for a page");
        assert!(!is_wasteful(large, Sizes { cells: 1 << 19, slots: 1 }));
    }
}
