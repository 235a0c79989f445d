//! The echo guard of a scope: its programs at devices and cgroups, and whether they are there.

use std::{os::fd::AsFd, path::PathBuf};

use super::{
    Established, Scope,
    devices::wanted_devices,
    establish::{attach_everywhere, programs},
    wanted,
};
use crate::{
    kernel::{
        error::KernelError,
        guard::{self, learner::Learning},
        instance::Instance,
        namespace::Namespace,
        pinned, sys,
        tc::{self, Side},
    },
    policy::config::{Config, Guard, Namespaces},
};

/// With smc_hs_ctrl: the guard's programs at every device. Where there are none, the policy holds all the same.
pub(super) fn guard_devices(
    scope: &Scope<'_>,
    instance: &Instance,
    namespaces: &[Namespace],
    done: &mut Established,
) {
    let mut attached =
        Established { attached: Vec::new(), gaps: Vec::new(), selected: done.selected.clone() };
    let result = programs(scope, instance, namespaces)
        .and_then(|programs| attach_everywhere(scope, &programs, namespaces, &mut attached));
    let gaps = if attached.gaps.is_empty() {
        result.err().map(|e| e.to_string()).into_iter().collect()
    } else {
        attached.gaps
    };
    done.gaps.extend(gaps.into_iter().map(|gap| format!("the echo guard: {gap}")));
}

/// Says in which namespaces the guard works.
pub(super) fn guard_namespaces(scope: &Scope<'_>, namespaces: &[Namespace]) -> Result<(), KernelError> {
    let shared = guard::Shared::ensure(&scope.paths.pins())?;
    if scope.config.namespaces == Namespaces::All {
        return guard::mark::set_namespaces(&shared, None);
    }
    // One that cannot be entered is told when it cannot be covered.
    let cookies = namespaces.iter().filter_map(|namespace| namespace.run(sys::network_cookie).ok()?.ok());
    guard::mark::set_namespaces(&shared, Some(&cookies.collect::<Vec<_>>()))
}

/// Where SYNs are to be marked.
fn cgroups(config: &Config) -> Result<Vec<PathBuf>, KernelError> {
    if config.cgroups.is_empty() { Ok(vec![guard::mark::cgroup_root()?]) } else { Ok(config.cgroups.clone()) }
}

/// Marks the SYNs. Which cgroups that was not possible for.
pub(super) fn guard_sockets(scope: &Scope<'_>, instance: &Instance) -> Result<Vec<KernelError>, KernelError> {
    let pins = scope.paths.pins();
    let cgroups = cgroups(scope.config)?;
    let program = instance.mark_program()?;
    let shared = guard::Shared::ensure(&pins)?;
    guard::mark::renew_key(&shared)?;
    guard::mark::attach(&pins, &cgroups, program.as_fd())
}

/// How the guard is in place.
#[derive(Debug, Default)]
pub struct Guarded {
    /// SYNs are marked, in one cgroup at least.
    pub marks: bool,
    /// Cgroups of config.toml whose SYNs are not.
    pub unmarked: Vec<PathBuf>,
    /// Devices whose answers are looked at.
    pub devices: usize,
    /// Devices whose answers are not.
    pub unguarded: Vec<String>,
    /// Negotiations are learned from.
    pub learning: Option<Learning>,
}

/// How the guard of the scope is in place.
///
/// # Errors
/// [`KernelError`].
pub fn inspect_guard(scope: &Scope<'_>, instance: &Instance) -> Result<Guarded, KernelError> {
    let pins = scope.paths.pins();
    let learning = Some(guard::learner::inspect(&pins, instance)?);
    if scope.config.guard != Guard::Canary {
        return Ok(Guarded { learning, ..Guarded::default() });
    }
    let programs = pinned::tc_program_ids_of(&pins, instance.id())?;
    let marks = !guard::mark::attached(&pins)?.is_empty();
    let mut guarded = Guarded { marks, learning, ..Guarded::default() };
    for cgroup in &scope.config.cgroups {
        if !guard::mark::is_attached(&pins, cgroup)? {
            guarded.unmarked.push(cgroup.clone());
        }
    }
    // A namespace that cannot be reached is told with the namespaces.
    for namespace in wanted(scope.config)?.0 {
        let devices = namespace.run(|| {
            let devices = wanted_devices(scope)?.into_iter().map(|device| {
                let chain = tc::chain(&device, Side::Ingress)?;
                Ok((device.name, chain.iter().any(|attached| programs.contains(&attached.program))))
            });
            devices.collect::<Result<Vec<_>, KernelError>>()
        });
        for (name, is_guarded) in devices.and_then(|devices| devices).unwrap_or_default() {
            if is_guarded {
                guarded.devices += 1;
            } else {
                guarded.unguarded.push(name);
            }
        }
    }
    Ok(guarded)
}
