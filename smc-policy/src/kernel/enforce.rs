//! Makes an instance decide where it is to, by the hook it is to, and nowhere else.
//!
//! The new way stands before the old one is taken away: in between both decide, alike or one of them as the new policy
//! says, so that no connection goes unjudged and none is judged by a mixture.

use std::{collections::HashSet, os::fd::AsFd, path::PathBuf};

use super::{
    current,
    error::KernelError,
    guard::{self, learner::Learning},
    hook::Hook,
    hs_ctrl::{self, Selected},
    instance::{Instance, TcPrograms},
    namespace::{self, Namespace, NamespaceId},
    object::TcProgram,
    pinned, replaced, sys,
    tc::{self, Device, Done, LinkLayer, Side},
};
use crate::{
    paths::Paths,
    policy::config::{Config, Guard, Interfaces, Namespaces},
};

/// Where and how a policy is enforced.
#[derive(Clone, Copy, Debug)]
pub struct Scope<'a> {
    /// The folders.
    pub paths: &'a Paths,
    /// The hook.
    pub hook: Hook,
    /// Namespaces and devices.
    pub config: &'a Config,
}

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

/// The name of this tool's own namespace among names.
const HOST: &str = "host";

/// The namespaces that the policy is to be enforced in, and those that there are not.
fn wanted(config: &Config) -> Result<(Vec<Namespace>, Vec<String>), KernelError> {
    match &config.namespaces {
        Namespaces::Host => Ok((vec![namespace::own()?], Vec::new())),
        Namespaces::All => {
            let (all, unreached) = namespace::all()?;
            Ok((all, unreached.iter().map(ToString::to_string).collect()))
        }
        Namespaces::Named(names) => {
            let (mut found, mut gaps) = (Vec::new(), Vec::new());
            for name in names {
                let namespace = if name == HOST { namespace::own() } else { namespace::named(name) };
                match namespace {
                    Ok(namespace) => found.push(namespace),
                    Err(e @ KernelError::Missing { .. }) => gaps.push(e.to_string()),
                    Err(e) => return Err(e),
                }
            }
            Ok((found, gaps))
        }
    }
}

/// Makes `instance`, which must hold the policy in force, decide everywhere in the scope. `before`: what this namespace
/// had selected before. What `instance` does not reach afterwards is left to [`release`].
///
/// # Errors
/// [`KernelError`]; then what was in force is in force. What was begun is taken back by the same and [`release`], with the
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

/// With smc_hs_ctrl: the guard's programs at every device. Where there are none, the policy holds all the same.
fn guard_devices(scope: &Scope<'_>, instance: &Instance, namespaces: &[Namespace], done: &mut Established) {
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
fn guard_namespaces(scope: &Scope<'_>, namespaces: &[Namespace]) -> Result<(), KernelError> {
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
fn guard_sockets(scope: &Scope<'_>, instance: &Instance) -> Result<Vec<KernelError>, KernelError> {
    let pins = scope.paths.pins();
    let cgroups = cgroups(scope.config)?;
    let program = instance.mark_program()?;
    let shared = guard::Shared::ensure(&pins)?;
    guard::mark::renew_key(&shared)?;
    guard::mark::attach(&pins, &cgroups, program.as_fd())
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
fn programs(
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

/// The devices of the calling thread's namespace that are to have programs.
fn wanted_devices(scope: &Scope<'_>) -> Result<Vec<Device>, KernelError> {
    let mut devices = tc::devices()?;
    devices.retain(|device| is_wanted(&scope.config.interfaces, device));
    Ok(devices)
}

fn attach_everywhere(
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

fn is_wanted(interfaces: &Interfaces, device: &Device) -> bool {
    interfaces.wants(&device.name, device.has_address)
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

fn link_layer(device: &Device) -> Result<LinkLayer, KernelError> {
    device.link_layer.ok_or_else(|| KernelError::Missing {
        feature: format!(
            "its packets begin with a header that is not known (hardware type {})",
            device.hardware
        ),
        next: "name it in `exclude` of config.toml if no SMC is used over it".into(),
    })
}

/// What a device that is to be covered gets at this side.
fn program_for(scope: &Scope<'_>, device: &Device, side: Side) -> Result<Option<TcProgram>, KernelError> {
    let guard = scope.config.guard == Guard::Canary;
    let link_layer = link_layer(device)?;
    Ok(match (scope.hook, side, link_layer) {
        (Hook::Tc, Side::Egress, LinkLayer::Ethernet) => Some(TcProgram::EgressEthernet),
        (Hook::Tc, Side::Egress, LinkLayer::Ip) => Some(TcProgram::EgressIp),
        (Hook::Tc, Side::Ingress, LinkLayer::Ethernet) => Some(TcProgram::IngressEthernet),
        (Hook::Tc, Side::Ingress, LinkLayer::Ip) => Some(TcProgram::IngressIp),
        (Hook::HsCtrl, Side::Ingress, LinkLayer::Ethernet) if guard => Some(TcProgram::AnswersEthernet),
        (Hook::HsCtrl, Side::Ingress, LinkLayer::Ip) if guard => Some(TcProgram::AnswersIp),
        (Hook::HsCtrl, ..) => None,
    })
}

fn is_our_name(name: &str) -> bool {
    TcProgram::ALL.iter().any(|program| program.program() == name)
}

/// Do devices of this namespace have programs of this tool, whichever instance they belong to?
///
/// # Errors
/// [`KernelError::Io`].
pub fn has_programs_here() -> Result<bool, KernelError> {
    for device in tc::devices()? {
        for side in Side::ALL {
            if tc::chain(&device, side)?.iter().any(|a| is_our_name(&a.name)) {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

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
