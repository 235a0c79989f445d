//! What an apply does, step by step.

use std::path::Path;

use super::{
    ApplyError, Change, Outcome, Request,
    sizes::{Compiled, fits, is_wasteful, room_for},
};
use crate::{
    kernel::{
        barrier::wait_for_programs,
        detach,
        enforce::{self, Scope},
        error::KernelError,
        guard,
        hook::Hook,
        hs_ctrl::{self, Selected},
        instance::Instance,
        object::{self, Sizes},
        pinned,
        record::{self, Record},
        replaced,
        state::State,
        store, tc,
        unconfirmed::{self, Unconfirmed},
        unsettled,
    },
    paths::Paths,
    policy::{Policy, Slots, compile, config::Namespaces},
};

/// An apply at work, under the lock.
pub(super) struct Apply<'a> {
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

impl<'a> Apply<'a> {
    /// Begins, with what an apply that was killed had announced.
    pub(super) fn begin(scope: Scope<'a>, request: &'a Request<'a>, state: &State) -> Self {
        let paths = scope.paths;
        let mut apply = Self {
            scope,
            paths,
            request,
            selected: state.selected.clone(),
            is_orphaned: state.is_orphaned,
            had_shared: guard::Shared::folder(&paths.pins()).exists(),
            is_unsettled: false,
            // A file that cannot be read keeps nothing waiting.
            waits: unconfirmed::read(&paths.run, state.record.as_ref()).unwrap_or_default(),
            attached: Vec::new(),
            restored: None,
            quarantine_restored: 0,
            warnings: Vec::new(),
        };
        let recovered = store::recover(&paths.state, state.record.as_ref());
        apply.warn(recovered);
        apply
    }

    /// Can the policy be put in force on trial?
    pub(super) fn check_trial(&self, state: &State) -> Result<(), ApplyError> {
        if let Some(waits) = self.waits.as_ref().filter(|_| self.is_in_force(state)) {
            return Err(ApplyError::Waiting { seconds: waits.seconds_left() });
        }
        match state.trouble(self.paths) {
            Some(trouble) => Err(ApplyError::NoWayBack(trouble)),
            None => Ok(()),
        }
    }

    fn warn(&mut self, result: Result<(), KernelError>) {
        if let Err(e) = result {
            self.warnings.push(e.to_string());
        }
    }

    /// After it failed half way: what was in force is where it was and nowhere else, and what was made for the new policy is
    /// removed. The error in hand says more than one of this would, and the next apply does the same again.
    pub(super) fn clean_up(&self) {
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
        let same_rules = |(policy, _): (Policy, _)| {
            let expired = |policy: &Policy| policy.rules.iter().map(|rule| rule.expired).collect::<Vec<_>>();
            expired(&policy) == expired(self.request.policy)
        };
        record.digest == record::digest(self.request.sources)
            // The same texts say something else once a rule has expired.
            && (self.request.policy.rules.iter().all(|rule| rule.expires.is_none())
                || record.policy().is_some_and(same_rules))
            && record.config == *self.request.config
            && record.hook == self.scope.hook
    }

    /// Does it.
    pub(super) fn run(&mut self, state: State, compiled: &Compiled) -> Result<Outcome, KernelError> {
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
