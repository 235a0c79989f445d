//! How a scope is covered.

use std::collections::HashSet;

use super::{
    Scope,
    devices::{link_layer, wanted_devices},
    wanted,
};
use crate::kernel::{
    error::KernelError,
    hook::Hook,
    hs_ctrl::{self, Selected},
    instance::Instance,
    namespace::{self, NamespaceId},
    pinned,
    tc::{self, Device, Side},
};

/// How a namespace is covered.
#[derive(Debug)]
pub struct NamespaceCoverage {
    /// Its inode number.
    pub id: NamespaceId,
    /// Where it was found.
    pub found: String,
    /// The tool runs in it.
    pub is_own: bool,
    /// Its `net.smc.hs_ctrl`.
    pub selected: Selected,
    /// Its devices that are to be covered (tc only).
    pub devices: Vec<DeviceCoverage>,
    /// Why it is not covered.
    pub problem: Option<String>,
}

/// How a device is covered.
#[derive(Debug)]
pub struct DeviceCoverage {
    /// Its name.
    pub name: String,
    /// How the programs are attached; none: they are not, at one of its sides at least.
    pub way: Option<tc::Way>,
    /// Programs of others that see packets first: "ingress NAME".
    pub ahead: Vec<String>,
    /// Why it is not covered.
    pub problem: Option<String>,
}

/// How the scope is covered by `instance`.
///
/// # Errors
/// [`KernelError`].
pub fn inspect(scope: &Scope<'_>, instance: &Instance) -> Result<Coverage, KernelError> {
    let (namespaces, gaps) = wanted(scope.config)?;
    let own = namespace::current()?;
    let programs = match scope.hook {
        Hook::Tc => pinned::tc_program_ids_of(&scope.paths.pins(), instance.id())?,
        Hook::HsCtrl => HashSet::new(),
    };
    let mut unreached: Vec<NamespaceId> = tc::pinned(&scope.paths.links())?
        .iter()
        .map(|link| link.namespace)
        .filter(|id| namespaces.iter().all(|n| n.id != *id))
        .collect();
    unreached.sort_unstable();
    unreached.dedup();
    let covered = namespaces
        .iter()
        .map(|namespace| {
            let seen = namespace
                .run(|| {
                    let devices = match scope.hook {
                        Hook::Tc => inspect_devices(scope, &programs)?,
                        Hook::HsCtrl => Vec::new(),
                    };
                    Ok((hs_ctrl::selected_if_there()?, devices))
                })
                .and_then(|inner| inner);
            let ((selected, devices), mut problem) = match seen {
                Ok(seen) => (seen, None),
                Err(e) => ((Selected::None, Vec::new()), Some(e.to_string())),
            };
            if scope.hook == Hook::HsCtrl
                && problem.is_none()
                && selected != Selected::Ours(instance.id().to_owned())
            {
                problem = Some(format!("net.smc.hs_ctrl is {selected} there"));
            }
            NamespaceCoverage {
                id: namespace.id,
                found: namespace.found.to_string(),
                is_own: namespace.id == own,
                selected,
                devices,
                problem,
            }
        })
        .collect();
    Ok(Coverage { namespaces: covered, gaps, unreached })
}

/// How a scope is covered.
#[derive(Debug)]
pub struct Coverage {
    /// The namespaces that could be reached.
    pub namespaces: Vec<NamespaceCoverage>,
    /// What could not, and why.
    pub gaps: Vec<String>,
    /// Namespaces that have programs and that nothing shows any more: only a descriptor or a socket keeps them.
    pub unreached: Vec<NamespaceId>,
}

fn inspect_devices(scope: &Scope<'_>, programs: &HashSet<u32>) -> Result<Vec<DeviceCoverage>, KernelError> {
    wanted_devices(scope)?.iter().map(|device| inspect_device(device, programs)).collect()
}

fn inspect_device(device: &Device, programs: &HashSet<u32>) -> Result<DeviceCoverage, KernelError> {
    let mut ways = Vec::new();
    let mut ahead = Vec::new();
    for side in Side::ALL {
        let chain = tc::chain(device, side)?;
        if let Some(at) = chain.iter().position(|a| programs.contains(&a.program)) {
            ways.push(chain[at].way);
            ahead.extend(chain[..at].iter().map(|a| format!("{side} {}", a.name)));
        }
    }
    let way = ways.first().copied().filter(|_| ways.len() == Side::ALL.len());
    let problem = link_layer(device).err().or_else(|| tc::obstacle(device));
    let problem = problem.filter(|_| way.is_none()).map(|e| e.to_string());
    Ok(DeviceCoverage { name: device.name.clone(), way, ahead, problem })
}
