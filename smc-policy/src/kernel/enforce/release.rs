//! Takes away what does not belong to a scope.

use std::collections::HashSet;

use super::{
    Scope,
    devices::{is_our_name, is_wanted, program_for},
    wanted,
};
use crate::{
    kernel::{
        error::KernelError,
        guard,
        hook::Hook,
        hs_ctrl::{self, Selected},
        instance::Instance,
        namespace::{self, Namespace, NamespaceId},
        object::TcProgram,
        pinned, replaced,
        tc::{self, Side},
    },
    paths::Paths,
    policy::config::{Guard, Namespaces},
};

/// How often the namespaces are walked until nothing of the old is found: they come and go meanwhile.
const PASSES: u32 = 10;

/// Takes away everything of this tool that does not belong to `keep` in its scope; without: everything there is. What
/// could not be taken away is said, and what it needs stays with it.
///
/// # Errors
/// [`KernelError`] when the namespaces cannot be listed.
pub fn release(paths: &Paths, keep: Option<(&Scope<'_>, &Instance)>) -> Result<Released, KernelError> {
    let (wanted, _) = keep.map_or(Ok((Vec::new(), Vec::new())), |(scope, _)| wanted(scope.config))?;
    let own = namespace::current()?;
    let pins = paths.pins();
    let ours = Ours {
        instances: pinned::ids(&pins)?,
        programs: pinned::tc_program_ids(&pins)?,
        kept: match keep {
            Some((_, instance)) => pinned::tc_program_ids_of(&pins, instance.id())?,
            None => HashSet::new(),
        },
    };
    let mut done = Released::default();
    for _ in 0..PASSES {
        done.problems.clear();
        let mut found = false;
        let (all, _) = namespace::all()?;
        for namespace in &all {
            let keep = keep.map(|(scope, instance)| (scope, instance.id()));
            let keep = keep.filter(|_| wanted.iter().any(|w| w.id == namespace.id));
            let is_own = namespace.id == own;
            let released = namespace.run(|| {
                let choice = release_choice(paths, keep, &ours, is_own)?;
                Ok((choice, release_devices(paths, keep, &ours, namespace.id, is_own)?))
            });
            match released.and_then(|inner| inner) {
                Ok((choice, devices)) => {
                    found |= choice.is_some() || devices;
                    done.was_covered |= found;
                    if let Some(Choice::Restored(name)) = choice {
                        done.restored = Some(name);
                    }
                }
                Err(e) => done.problems.push(format!("{}: {e}", namespace.found)),
            }
        }
        if !found {
            break;
        }
    }
    let covered = keep.filter(|(scope, _)| scope.hook == Hook::Tc || scope.config.guard == Guard::Canary);
    if let Err(e) = release_unreached(paths, covered, &wanted) {
        done.problems.push(e.to_string());
    }
    tc::prune(&paths.links())?;
    // Unregistered while a namespace has it selected, it would go on there where nobody finds it.
    if let Some((scope, instance)) = keep.filter(|_| done.problems.is_empty()) {
        match scope.hook {
            Hook::HsCtrl => {}
            Hook::Tc => instance.unregister()?,
        }
        let devices_may_have = |program: TcProgram| match (scope.hook, program) {
            (Hook::Tc, TcProgram::AnswersEthernet | TcProgram::AnswersIp) => false,
            (Hook::Tc, _) => true,
            (Hook::HsCtrl, TcProgram::AnswersEthernet | TcProgram::AnswersIp) => {
                scope.config.guard == Guard::Canary
            }
            (Hook::HsCtrl, _) => false,
        };
        instance.unpin_tc_programs(|program| !devices_may_have(program))?;
    }
    if keep.is_none_or(|(scope, _)| scope.config.guard != Guard::Canary) {
        guard::mark::detach(&paths.pins())?;
        if let Some((_, instance)) = keep {
            instance.unpin_mark_program()?;
        }
    }
    if keep.is_none_or(|(scope, _)| scope.config.guard == Guard::Off) {
        guard::learner::detach(&paths.pins())?;
        if let Some((_, instance)) = keep {
            instance.unpin_learn_programs()?;
        }
    }
    Ok(done)
}

/// Links to devices of namespaces that nothing shows any more, but that are alive: they are at hand without going there.
/// With a policy for all namespaces they get its programs, else they end.
fn release_unreached(
    paths: &Paths,
    covered: Option<(&Scope<'_>, &Instance)>,
    wanted: &[Namespace],
) -> Result<(), KernelError> {
    let (kept, others): (Vec<_>, Vec<_>) = tc::pinned(&paths.links())?
        .into_iter()
        .partition(|link| covered.is_some() && wanted.iter().any(|w| w.id == link.namespace));
    for link in others {
        // A device that moved to a namespace that is covered took its link along.
        if kept.iter().any(|k| k.id == link.id) {
            link.unpin()?;
            continue;
        }
        let Some((_, instance)) =
            covered.filter(|(s, _)| s.hook == Hook::Tc && s.config.namespaces == Namespaces::All)
        else {
            link.end()?;
            continue;
        };
        let name = link.program_name()?;
        let programs = instance.tc_programs(|program| program.program() == name)?;
        match TcProgram::ALL.into_iter().find_map(|program| programs.get(program)) {
            Some((id, program)) if id != link.program => link.replace(program)?,
            Some(_) => {}
            None => link.end()?,
        }
    }
    Ok(())
}

/// What [`release`] did.
#[derive(Debug, Default)]
pub struct Released {
    /// The foreign smc_hs_ctrl that this namespace has selected again.
    pub restored: Option<String>,
    /// Something was selected or attached.
    pub was_covered: bool,
    /// What could not be taken away.
    pub problems: Vec<String>,
}

/// What became of a namespace's choice.
enum Choice {
    /// None is selected any more.
    Cleared,
    /// The foreign one that was taken over from is selected again.
    Restored(String),
}

/// What belongs to the instances in our folder.
struct Ours {
    instances: HashSet<String>,
    programs: HashSet<u32>,
    /// Those of the instance that stays.
    kept: HashSet<u32>,
}

/// In the namespace of the calling thread: takes back its choice, if it is ours and not to stay.
fn release_choice(
    paths: &Paths,
    keep: Option<(&Scope<'_>, &str)>,
    ours: &Ours,
    is_own: bool,
) -> Result<Option<Choice>, KernelError> {
    let Selected::Ours(id) = hs_ctrl::selected_if_there()? else { return Ok(None) };
    let stays = keep.is_some_and(|(scope, kept)| scope.hook == Hook::HsCtrl && kept == id);
    if stays || !(is_own || ours.instances.contains(&id)) {
        return Ok(None);
    }
    if is_own && let Some(name) = replaced::restore(&paths.run)? {
        return Ok(Some(Choice::Restored(name)));
    }
    hs_ctrl::select("")?;
    Ok(Some(Choice::Cleared))
}

/// In the namespace of the calling thread: removes our programs from devices that are not to have them. Whether there
/// were some.
fn release_devices(
    paths: &Paths,
    keep: Option<(&Scope<'_>, &str)>,
    ours: &Ours,
    here: NamespaceId,
    is_own: bool,
) -> Result<bool, KernelError> {
    let is_ours =
        |id: u32, name: &str| is_our_name(name) && (is_own || keep.is_some() || ours.programs.contains(&id));
    // One that could not be replaced where it is would go on with a policy that is not in force any more.
    let is_old = |id: u32, name: &str| is_ours(id, name) && !ours.kept.contains(&id);
    let mut found = false;
    for device in tc::devices()? {
        for side in Side::ALL {
            // What is of an unknown kind has none.
            let stays = keep.is_some_and(|(scope, _)| {
                is_wanted(&scope.config.interfaces, &device)
                    && program_for(scope, &device, side).is_ok_and(|program| program.is_some())
            });
            if !stays {
                found |= tc::detach(&paths.links(), here, &device, side, &is_ours)?;
            } else if tc::chain(&device, side)?.iter().any(|a| is_old(a.program, &a.name)) {
                found |= tc::detach(&paths.links(), here, &device, side, &is_old)?;
            }
        }
    }
    Ok(found)
}
