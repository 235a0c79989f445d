//! `status`: what is in force, its hit counters, and whether the files still say the same.

use std::path::PathBuf;

use clap::Args;
use serde::{Serialize, Serializer};
use smc_policy_common::{counters::InstanceCounters, event};

use super::{
    apply::mode_name,
    capabilities, config,
    monitor::Lost,
    outcome::{Done, Exit},
    output::Output,
    sources,
};
use crate::{
    kernel::{
        capability,
        enforce::{self, Guarded, Scope},
        error::KernelError,
        events,
        guard::{self, Counted, Quarantine, learner::Learning},
        hook::{self, Hook},
        hs_ctrl::{self, Selected},
        instance::Instance,
        namespace, object, pinned,
        record::{self, Record},
        release,
        state::State,
        tc::Way,
        unconfirmed,
    },
    paths::Paths,
    policy::{
        Action, Moment, Policy, Slots,
        config::{Guard, OnEcho},
    },
};

mod text;

#[derive(Debug, Args)]
pub(super) struct StatusArguments {
    /// Show what this kernel has of all that smc-policy can use, and what that means. Needs no privilege.
    #[arg(long)]
    capabilities: bool,
}

#[derive(Debug, Serialize)]
struct StatusDocument {
    /// Nothing is in force or something differs: exit code 1.
    ok: bool,
    hook: Option<Hook>,
    mode: Option<&'static str>,
    kernel: String,
    generation: Option<u64>,
    applied_at: Option<u64>,
    age_seconds: Option<u64>,
    digest: Option<String>,
    tool: Option<String>,
    /// It waits for confirmation: seconds until the old policy returns.
    unconfirmed_seconds_left: Option<u64>,
    table_bytes: Option<u64>,
    #[serde(serialize_with = "by_name")]
    counters: Option<InstanceCounters>,
    guard: Option<GuardDocument>,
    events: Option<EventsDocument>,
    defaults: Vec<DefaultDocument>,
    rules: Vec<RuleDocument>,
    namespaces: Vec<NamespaceDocument>,
    /// What is not as it should be.
    findings: Vec<String>,
    /// What is worth knowing and no fault.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct GuardDocument {
    /// What config.toml says.
    guard: Guard,
    /// SYNs are marked.
    marks: bool,
    /// What it does with an echo.
    on_echo: OnEcho,
    /// Cgroups of config.toml whose SYNs are not marked.
    unmarked: Vec<PathBuf>,
    /// Devices whose SYN-ACKs are looked at.
    devices: usize,
    /// Devices whose SYN-ACKs are not, though they are to be.
    unguarded: Vec<String>,
    /// Failed negotiations are learned from.
    learns: bool,
    /// Why they are not.
    not_learning: Option<String>,
    /// Peers that spoke SMC within a day or so.
    known_peers: u32,
    /// How many of them are in quarantine for silence or resets, as of the last one or two minutes.
    suspected_peers: u32,
    /// How many of them may be.
    suspected_at_most: u32,
    /// Learned entries of the quarantine.
    learned: u64,
    /// Its entries by command.
    commanded: u64,
    /// Learned entries that had to go for others.
    evicted: u64,
    /// Entries that could not be learned for want of memory.
    refused: u64,
}

#[derive(Debug, Serialize)]
struct EventsDocument {
    /// Somebody reads what the programs tell.
    reader: bool,
    /// What was lost since the first apply.
    lost: Lost,
}

#[derive(Debug, Serialize)]
struct RuleDocument {
    name: String,
    action: Action,
    hits: u64,
    retransmissions: u64,
    direction: String,
    enabled: bool,
    /// When it ends, in UTC.
    expires: Option<Moment>,
    /// It had ended when the policy was applied: it matches nothing.
    expired: bool,
    file: String,
    line: usize,
}

#[derive(Debug, Serialize)]
struct DefaultDocument {
    direction: &'static str,
    action: Action,
    hits: u64,
    retransmissions: u64,
}

#[derive(Debug, Serialize)]
struct NamespaceDocument {
    /// `net:[inode]`, as /proc/PID/ns/net shows it.
    name: String,
    /// This tool runs in it.
    own: bool,
    /// How a person finds it: "/run/netns/blue", "the namespace of process 123 (nginx)".
    found: String,
    /// What its net.smc.hs_ctrl names.
    hs_ctrl: String,
    /// Its devices that are to have programs (tc).
    devices: Vec<DeviceDocument>,
}

#[derive(Debug, Serialize)]
struct DeviceDocument {
    name: String,
    /// "tcx" or "clsact"; `null`: it has no programs of the policy in force, at one side at least.
    attached: Option<&'static str>,
    /// Programs of others that see packets first.
    ahead: Vec<String>,
}

pub(super) fn run(paths: &Paths, arguments: &StatusArguments, out: &mut Output) -> Done {
    if arguments.capabilities {
        return capabilities::run(paths, out);
    }
    capability::require("reading what is in force")?;
    let state = State::read(paths)?;
    if state.instance.is_none() && state.selected == Selected::None {
        // Nothing here, but that is not to say that an apply would do.
        pinned::refuse_other_namespaces(&paths.pins())?;
    }
    let document = gather(paths, &state)?;
    out.json(&document);
    out.text(&text::of(&document, out));
    Ok(if document.ok { Exit::Ok } else { Exit::No })
}

/// The command that applies the same files again, the same way.
fn apply_command(record: &Record) -> String {
    let mut words = vec!["smc-policy apply".to_owned()];
    words.extend(record.overrides.hook.map(|hook| format!("--hook {}", hook.word())));
    words.extend(record.overrides.observe.map(|observe| format!("--mode {}", mode_name(observe))));
    words.extend(record.config_file.iter().map(|file| format!("--config {}", file.display())));
    words.extend(record.origin.iter().map(|path| path.display().to_string()));
    format!("`{}`", words.join(" "))
}

/// What differs between the policy in force and the files it was read from, with the command that applies them.
fn drift(paths: &Paths, record: &Record) -> Option<String> {
    let apply = apply_command(record);
    match sources::read(paths, &record.origin) {
        Ok(now) if record::digest(&now) == record.digest => None,
        Ok(_) => Some(format!("the policy files differ from what is in force: {apply}")),
        Err(e) => Some(format!("the policy files cannot be compared with what is in force: {}", e.message)),
    }
}

/// Do the files that the policy in force was read from say something else now?
pub(super) fn files_differ(paths: &Paths, record: &Record) -> bool {
    drift(paths, record).is_some()
}

/// The rules that have expired since the policy was applied.
fn overdue(policy: &Policy, now: Moment, apply: &str) -> Option<String> {
    let rules = policy.rules.iter().filter(|rule| rule.is_overdue(now));
    let names: Vec<String> = rules.map(|rule| format!("`{}`", rule.name)).collect();
    let (rule, have, decide) =
        if names.len() == 1 { ("rule", "has", "decides") } else { ("rules", "have", "decide") };
    (!names.is_empty()).then(|| {
        format!("the {rule} {} {have} expired and still {decide}: {apply} ends that", names.join(", "))
    })
}

/// What differs between how the policy is enforced and config.toml.
fn config_drift(paths: &Paths, record: &Record) -> Option<String> {
    match config::read_quietly(paths, record.config_file.as_deref()) {
        Ok(now) if record.overrides.over(now.clone()) == record.config => None,
        Ok(_) => Some(format!("config.toml differs from what is in force: {}", apply_command(record))),
        Err(e) => Some(format!("config.toml cannot be compared with what is in force: {}", e.message)),
    }
}

/// Would an apply choose another hook now?
fn other_hook(record: &Record) -> Option<String> {
    let (now, _) = hook::choose(record.config.hook).ok()?;
    let apply = apply_command(record);
    (now != record.hook).then(|| format!("the hook {now} can be used now: {apply} moves to it"))
}

/// A foreign smc_hs_ctrl decides beside the tc programs.
pub(super) fn beside(name: &str) -> String {
    format!("net.smc.hs_ctrl is '{name}', which is not smc-policy's: it may deny what this policy allows")
}

/// The hook that the instance in force is called by, also without a record.
fn hook_of(state: &State) -> Hook {
    match (&state.record, &state.selected) {
        (Some(record), _) => record.hook,
        (None, Selected::Ours(_)) => Hook::HsCtrl,
        (None, _) => Hook::Tc,
    }
}

/// The namespaces that the policy is to be enforced in, or this one.
fn coverage(
    paths: &Paths,
    state: &State,
    findings: &mut Vec<String>,
    notes: &mut Vec<String>,
) -> Result<Vec<NamespaceDocument>, super::Failure> {
    let Some((instance, record)) = state.in_force() else {
        return Ok(vec![NamespaceDocument {
            name: format!("net:[{}]", namespace::current()?),
            own: true,
            found: namespace::own()?.found.to_string(),
            hs_ctrl: selected_name(&state.selected),
            devices: Vec::new(),
        }]);
    };
    let scope = Scope { paths, hook: record.hook, config: &record.config };
    let apply = apply_command(record);
    if instance.has_traces_of_other(record.hook)? {
        findings.push(format!(
            "an apply that changed the hook was killed: something of the other hook is left, which {apply} removes"
        ));
    }
    let coverage = enforce::inspect(&scope, instance)?;
    findings.extend(coverage.gaps.into_iter().map(|what| format!("not covered: {what}")));
    notes.extend(coverage.unreached.into_iter().map(|id| {
        format!(
            "net:[{id}] has the policy's programs, but no process or mount shows it any more: what else it has is not known"
        )
    }));
    let mut documents = Vec::new();
    for namespace in coverage.namespaces {
        let of = if namespace.is_own { String::new() } else { format!(" of {}", namespace.found) };
        if let Some(problem) = &namespace.problem {
            findings.push(format!("{} is not covered: {problem}: {apply}", namespace.found));
        }
        for device in &namespace.devices {
            let name = &device.name;
            match (&device.way, &device.problem) {
                (Some(_), _) => {}
                (None, None) => {
                    findings.push(format!("{name}{of} is not covered: {apply} attaches the programs"))
                }
                (None, Some(problem)) => findings.push(format!("{name}{of} is not covered: {problem}")),
            }
            if !device.ahead.is_empty() {
                notes.push(format!(
                    "programs of others see the packets of {name}{of} first: {} (what they take away is not judged)",
                    device.ahead.join(", ")
                ));
            }
        }
        documents.push(NamespaceDocument {
            name: format!("net:[{}]", namespace.id),
            own: namespace.is_own,
            found: namespace.found,
            hs_ctrl: selected_name(&namespace.selected),
            devices: namespace
                .devices
                .into_iter()
                .map(|d| DeviceDocument { name: d.name, attached: d.way.map(Way::name), ahead: d.ahead })
                .collect(),
        });
    }
    Ok(documents)
}

/// The guard and its quarantine.
fn guard(
    paths: &Paths,
    state: &State,
    findings: &mut Vec<String>,
    notes: &mut Vec<String>,
) -> Result<Option<GuardDocument>, super::Failure> {
    let Some((instance, record)) = state.in_force() else { return Ok(None) };
    let scope = Scope { paths, hook: record.hook, config: &record.config };
    let counted = match Quarantine::open(&paths.pins()) {
        Ok(Some(quarantine)) => quarantine.counted()?,
        Ok(None) => Counted::default(),
        // Of another version: the policy is in force all the same.
        Err(error @ KernelError::Missing { .. }) => {
            findings.push(error.to_string());
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let guarded = match record.config.guard {
        Guard::Off => Guarded::default(),
        Guard::Canary | Guard::Learn => enforce::inspect_guard(&scope, instance)?,
    };
    let storm = guard::learner::stormed(&paths.pins())?;
    if record.config.guard == Guard::Canary && !record.config.observe {
        if !guarded.marks {
            let why = guard::mark::cgroup_root().err().map(|e| format!(" ({e})")).unwrap_or_default();
            notes.push(format!(
                "the echo guard marks no SYNs{why}: peers that echo TCP options are not noticed"
            ));
        }
        if guarded.marks && !guarded.unmarked.is_empty() {
            let cgroups = guarded.unmarked.iter().map(|cgroup| cgroup.display().to_string());
            notes.push(format!(
                "the echo guard marks no SYNs of {} (no cgroup, or made after the last apply)",
                cgroups.collect::<Vec<_>>().join(", ")
            ));
        }
        if !guarded.unguarded.is_empty() {
            notes.push(format!("the echo guard has no program at {}", guarded.unguarded.join(", ")));
        }
    }
    if record.config.guard == Guard::Canary && record.config.observe {
        notes.push(
            "the echo guard marks no SYNs while the policy only observes, as that would change them: peers that echo TCP \
             options are not noticed"
                .to_owned(),
        );
    }
    let Guarded { marks, unmarked, devices, unguarded, learning } = guarded;
    let learns = learning == Some(Learning::On);
    let not_learning = match learning {
        Some(Learning::Waits) => Some(
            "the echo guard's learner waits for the module smc: the first `smc-policy apply` after it is loaded attaches it"
                .to_owned(),
        ),
        Some(Learning::Off(why)) => Some(format!("the echo guard does not learn: {why}")),
        Some(Learning::On) | None => None,
    };
    notes.extend(not_learning.clone());
    let Counted { learned, commanded, evicted, refused } = counted;
    Ok(Some(GuardDocument {
        guard: record.config.guard,
        marks,
        on_echo: record.config.on_echo,
        unmarked,
        devices,
        unguarded,
        learns,
        not_learning,
        known_peers: storm.known,
        suspected_peers: storm.held,
        suspected_at_most: storm.at_most,
        learned,
        commanded,
        evicted,
        refused,
    }))
}

fn selected_name(selected: &Selected) -> String {
    match selected {
        Selected::None => String::new(),
        Selected::Ours(id) => hs_ctrl::name(id),
        Selected::Foreign(name) => name.clone(),
    }
}

fn gather(paths: &Paths, state: &State) -> Result<StatusDocument, super::Failure> {
    let mut findings: Vec<String> = state.trouble(paths).into_iter().collect();
    let mut notes = Vec::new();
    if state.selected == Selected::None && state.instance.is_none() && !state.is_orphaned {
        findings.push("no policy is in force: `smc-policy apply`".to_owned());
    }
    if let Some(instance) = &state.instance
        && instance.info().object != object::object_id()
    {
        findings.push(
            "other programs than this version's are loaded: `smc-policy apply` replaces them".to_owned(),
        );
    }
    if let (Selected::Foreign(name), Some(_)) = (&state.selected, &state.instance) {
        notes.push(beside(name));
    }
    let unconfirmed = unconfirmed::read(&paths.run, state.record.as_ref()).unwrap_or_default();
    if let Some(record) = &state.record {
        findings.extend(drift(paths, record));
        findings.extend(config_drift(paths, record));
        notes.extend(other_hook(record));
    }
    if unconfirmed.as_ref().is_some_and(|u| u.seconds_left() == 0) {
        findings.push(
            "the policy in force was never confirmed, and the process that would have returned to the old one is gone: \
             `smc-policy rollback` returns, the same `smc-policy apply` confirms"
                .to_owned(),
        );
    }
    let left = state.unselected(paths)?;
    if !left.is_empty() {
        findings.push(format!(
            "loaded but not selected: {} (net.smc.hs_ctrl was cleared, or a process was killed): \
             `smc-policy apply` or `smc-policy detach`",
            left.join(", ")
        ));
    }
    let unknown = state.unknown_registrations(paths)?;
    if !unknown.is_empty() {
        findings.push(format!(
            "registered with the kernel, but pinned nowhere in {}: {} (its pins were lost, or an smc-policy with other \
             folders uses it)",
            paths.pins().display(),
            unknown.join(", ")
        ));
    }
    let namespaces = coverage(paths, state, &mut findings, &mut notes)?;
    let guard = guard(paths, state, &mut findings, &mut notes)?;
    // Maps of another version are told with the quarantine's.
    let events = state.instance.as_ref().and_then(|_| events::telling(&paths.pins()).ok().flatten());
    let events = events.map(|telling| EventsDocument {
        reader: telling.reader == event::Reader::Here,
        lost: Lost::new(telling.told.lost),
    });
    let mut document = StatusDocument {
        ok: findings.is_empty(),
        hook: state.instance.as_ref().map(|_| hook_of(state)),
        mode: state.record.as_ref().map(|r| mode_name(r.config.observe)),
        kernel: release(),
        generation: state.instance.as_ref().map(Instance::generation),
        applied_at: state.record.as_ref().map(|r| r.applied_at),
        age_seconds: state.record.as_ref().map(|r| record::unix_now().saturating_sub(r.applied_at)),
        digest: state.record.as_ref().map(|r| r.digest.clone()),
        tool: state.record.as_ref().map(|r| r.tool.clone()),
        unconfirmed_seconds_left: unconfirmed.map(|u| u.seconds_left()),
        table_bytes: state.instance.as_ref().map(|i| u64::from(i.info().sizes.cells) * 16),
        counters: None,
        guard,
        events,
        defaults: Vec::new(),
        rules: Vec::new(),
        namespaces,
        findings,
        notes,
    };
    if let Some(instance) = &state.instance {
        document.counters = Some(instance.instance_counters()?);
        if let Some((policy, slots)) = state.record.as_ref().and_then(Record::policy) {
            let apply = state.record.as_ref().map(apply_command).unwrap_or_default();
            document.findings.extend(overdue(&policy, record::now(), &apply));
            document.ok = document.findings.is_empty();
            count_rules(instance, &policy, &slots, &mut document)?;
        }
    }
    Ok(document)
}

/// Counters as an object, each under its name.
fn by_name<S: Serializer>(counters: &Option<InstanceCounters>, to: S) -> Result<S::Ok, S::Error> {
    match counters {
        Some(counters) => to.collect_map(InstanceCounters::NAMES.iter().zip(counters.to_array())),
        None => to.serialize_none(),
    }
}

fn count_rules(
    instance: &Instance,
    policy: &Policy,
    slots: &Slots,
    document: &mut StatusDocument,
) -> Result<(), super::Failure> {
    for (rule, slot) in policy.rules.iter().zip(&slots.rules) {
        let counters = instance.counters(*slot)?;
        document.rules.push(RuleDocument {
            name: rule.name.clone(),
            action: rule.action,
            hits: counters.hits,
            retransmissions: counters.retransmissions,
            direction: rule.direction.to_string(),
            enabled: rule.enabled,
            expires: rule.expires,
            expired: rule.expired,
            file: policy.file(rule.place).display().to_string(),
            line: rule.place.line,
        });
    }
    for (direction, action, slot) in [
        ("outbound", policy.defaults.outbound, slots.default_outbound),
        ("inbound", policy.defaults.inbound, slots.default_inbound),
    ] {
        let counters = instance.counters(slot)?;
        document.defaults.push(DefaultDocument {
            direction,
            action,
            hits: counters.hits,
            retransmissions: counters.retransmissions,
        });
    }
    Ok(())
}
