//! Makes an instance decide everywhere in a scope.

use std::collections::HashSet;

use super::{
    Scope,
    devices::{is_our_name, program_for, wanted_devices},
    guarding::{guard_devices, guard_namespaces, guard_sockets},
    wanted,
};
use crate::{
    kernel::{
        current,
        error::KernelError,
        guard,
        hook::Hook,
        hs_ctrl::{self, Selected},
        instance::{Instance, TcPrograms},
        namespace::{self, Namespace, NamespaceId},
        replaced,
        tc::{self, Device, Done, Side},
    },
    policy::config::Guard,
};

/// What [`establish`] did.
#[derive(Debug)]
pub struct Established {
    /// Devices that have programs now and had none.
    pub attached: Vec<String>,
    /// What is not covered, and why.
    pub gaps: Vec<String>,
    /// What this namespace has selected now.
    pub selected: Selected,
}

/// Makes `instance`, which must hold the policy in force, decide everywhere in the scope. `before`: what this namespace
/// had selected before. What `instance` does not reach afterwards is left to [`super::release`].
///
/// # Errors
/// [`KernelError`]; then what was in force is in force. What was begun is taken back by the same and [`super::release`], with the
/// scope and instance of before.
pub fn establish(
    scope: &Scope<'_>,
    instance: &Instance,
    before: &Selected,
) -> Result<Established, KernelError> {
    let (namespaces, gaps) = wanted(scope.config)?;
    let mut done = Established { attached: Vec::new(), gaps, selected: before.clone() };
    match scope.hook {
        Hook::HsCtrl => {
            let anew = instance.register()?;
            select_everywhere(scope, instance, anew, &namespaces, &mut done)?;
            if scope.config.guard == Guard::Canary {
                guard_devices(scope, instance, &namespaces, &mut done);
            }
        }
        Hook::Tc => {
            let pins = scope.paths.pins();
            let previous = current::get(&pins)?;
            let programs = programs(scope, instance, &namespaces)?;
            // First the name: killed after it, the next apply goes on from here.
            current::set(&pins, instance.id())?;
            if let Err(e) = attach_everywhere(scope, &programs, &namespaces, &mut done) {
                // The error in hand says more than one of the way back could.
                let _ = match previous {
                    Some(id) => current::set(&pins, &id),
                    None => current::clear(&pins),
                };
                return Err(e);
            }
        }
    }
    if scope.config.guard != Guard::Off
        && let Err(e) = guard_namespaces(scope, &namespaces)
    {
        done.gaps.push(format!("the echo guard: {e}"));
    }
    if scope.config.guard == Guard::Canary {
        match guard_sockets(scope, instance) {
            Ok(problems) => done.gaps.extend(problems.iter().map(|e| format!("the echo guard: {e}"))),
            Err(e) => done.gaps.push(format!("the echo guard marks no SYNs: {e}")),
        }
    }
    if scope.config.guard != Guard::Off {
        let problems = guard::learner::attach(&scope.paths.pins(), instance);
        let problems = problems.unwrap_or_else(|e| vec![e.to_string()]);
        done.gaps.extend(problems.into_iter().map(|what| format!("the echo guard does not learn: {what}")));
    }
    Ok(done)
}

/// `anew`: it was registered just now, and whoever has its name selected has one that is gone.
fn select_everywhere(
    scope: &Scope<'_>,
    instance: &Instance,
    anew: bool,
    namespaces: &[Namespace],
    done: &mut Established,
) -> Result<(), KernelError> {
    let (pins, run) = (scope.paths.pins(), &scope.paths.run);
    let own = namespace::current()?;
    let (id, name) = (instance.id(), hs_ctrl::name(instance.id()));
    if namespaces.iter().any(|n| n.id == own) {
        let wanted = Selected::Ours(id.to_owned());
        if anew || done.selected != wanted {
            match &done.selected {
                Selected::Foreign(name) => replaced::note(run, name)?,
                Selected::None => replaced::forget(run)?,
                Selected::Ours(_) => {}
            }
            hs_ctrl::select_if_unchanged(&name, &done.selected)?;
            done.selected = wanted;
        }
        current::clear(&pins)?;
    } else {
        current::set(&pins, id)?;
    }
    for namespace in namespaces.iter().filter(|n| n.id != own) {
        let selected = namespace.run(|| match hs_ctrl::selected()? {
            Selected::Foreign(foreign) => Ok(Some(foreign)),
            Selected::Ours(selected) if selected == id && !anew => Ok(None),
            _ => hs_ctrl::select(&name).map(|()| None),
        });
        match selected.and_then(|inner| inner) {
            Ok(None) => {}
            Ok(Some(foreign)) => done.gaps.push(format!(
                "{}: net.smc.hs_ctrl is '{foreign}' there, which was left alone",
                namespace.found
            )),
            Err(e) => done.gaps.push(format!("{}: {e}", namespace.found)),
        }
    }
    Ok(())
}

/// The programs that the devices there are take: loading one that none takes costs time.
pub(super) fn programs(
    scope: &Scope<'_>,
    instance: &Instance,
    namespaces: &[Namespace],
) -> Result<TcPrograms, KernelError> {
    let mut wanted = HashSet::new();
    for namespace in namespaces {
        // A namespace that cannot be entered is told when it cannot be covered.
        let Ok(Ok(devices)) = namespace.run(|| wanted_devices(scope)) else { continue };
        let programs = devices.iter().flat_map(|d| Side::ALL.map(|side| program_for(scope, d, side)));
        wanted.extend(programs.filter_map(Result::ok).flatten());
    }
    instance.tc_programs(|program| wanted.contains(&program))
}

pub(super) fn attach_everywhere(
    scope: &Scope<'_>,
    programs: &TcPrograms,
    namespaces: &[Namespace],
    done: &mut Established,
) -> Result<(), KernelError> {
    let own = namespace::current()?;
    let (mut covered, mut first_error) = (0, None);
    for namespace in namespaces {
        let place = |device: &Device| {
            if namespace.id == own {
                device.name.clone()
            } else {
                format!("{} of {}", device.name, namespace.found)
            }
        };
        let results = namespace.run(|| attach_here(scope, programs, namespace.id)).and_then(|r| r);
        match results {
            Ok(results) => {
                if results.is_empty() {
                    done.gaps.push(format!("{}: it has no device to cover", namespace.found));
                }
                for (device, result) in results {
                    covered += usize::from(result.is_ok());
                    match result {
                        Ok(true) => done.attached.push(place(&device)),
                        Ok(false) => {}
                        Err(e) => {
                            done.gaps.push(format!("{} is not covered: {e}", place(&device)));
                            first_error.get_or_insert(e);
                        }
                    }
                }
            }
            Err(e) => {
                done.gaps.push(format!("{}: {e}", namespace.found));
                first_error.get_or_insert(e);
            }
        }
    }
    match first_error {
        Some(e) if covered == 0 => Err(e),
        _ => Ok(()),
    }
}

/// A device, and whether it got programs that it had not.
type DeviceResult = (Device, Result<bool, KernelError>);

/// In the namespace of the calling thread: programs at every device that is to have them.
fn attach_here(
    scope: &Scope<'_>,
    programs: &TcPrograms,
    here: NamespaceId,
) -> Result<Vec<DeviceResult>, KernelError> {
    let devices = wanted_devices(scope)?;
    Ok(devices
        .into_iter()
        .map(|device| {
            let attached = attach_to(scope, programs, here, &device);
            (device, attached)
        })
        .collect())
}

fn attach_to(
    scope: &Scope<'_>,
    programs: &TcPrograms,
    here: NamespaceId,
    device: &Device,
) -> Result<bool, KernelError> {
    let mut anew = false;
    for side in Side::ALL {
        let Some(program) = program_for(scope, device, side)? else { continue };
        let (_, fd) = programs.get(program).ok_or_else(|| KernelError::Missing {
            feature: "it came while the programs were loaded".into(),
            next: "`smc-policy apply` again".into(),
        })?;
        anew |= tc::attach(&scope.paths.links(), here, device, side, fd, &|_, name| is_our_name(name))?
            == Done::Attached;
    }
    Ok(anew)
}
