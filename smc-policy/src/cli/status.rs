//! `status`: what is in force, its hit counters, and whether the files still say the same.

use clap::Args;
use serde::Serialize;
use smc_policy_common::counters::InstanceCounters;

use super::{
    apply::mode_name,
    outcome::{Done, Exit},
    output::{Output, Style, columns},
    sources,
    words::{bytes, count, duration},
};
use crate::{
    kernel::{
        capability,
        hs_ctrl::{self, Selected},
        instance::{self, Instance},
        namespace, object,
        record::{self, Record},
        release,
        state::State,
        unconfirmed,
    },
    paths::Paths,
    policy::{Action, Policy, Slots},
};

#[derive(Debug, Args)]
pub(super) struct StatusArguments {}

#[derive(Debug, Serialize)]
struct StatusDocument {
    /// Nothing is in force or something differs: exit code 1.
    ok: bool,
    hook: Option<&'static str>,
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
    counters: Option<CountersDocument>,
    defaults: Vec<DefaultDocument>,
    rules: Vec<RuleDocument>,
    namespaces: Vec<NamespaceDocument>,
    /// What is not as it should be.
    findings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct CountersDocument {
    decisions: u64,
    undecided: u64,
    observed_denies: u64,
    /// Allowed SYNs that were sent again without the SMC option.
    plain_retransmissions: u64,
}

#[derive(Debug, Serialize)]
struct RuleDocument {
    name: String,
    action: Action,
    hits: u64,
    retransmissions: u64,
    direction: String,
    enabled: bool,
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
    hs_ctrl: String,
}

pub(super) fn run(paths: &Paths, _: &StatusArguments, out: &mut Output) -> Done {
    capability::require("reading what is in force")?;
    let state = State::read(paths)?;
    if state.selected == Selected::None {
        // Nothing here, but that is not to say that an apply would do.
        instance::refuse_other_namespaces(&paths.pins())?;
    }
    let document = gather(paths, &state)?;
    out.json(&document);
    out.text(&text(&document, out));
    Ok(if document.ok { Exit::Ok } else { Exit::No })
}

/// What differs between the policy in force and the files it was read from, with the command that applies them.
fn drift(paths: &Paths, record: &Record) -> Option<String> {
    let origin: Vec<_> = record.origin.iter().map(|p| format!(" {}", p.display())).collect();
    let apply = format!("`smc-policy apply{}`", origin.concat());
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

fn gather(paths: &Paths, state: &State) -> Result<StatusDocument, super::Failure> {
    let mut findings: Vec<String> = state.trouble(paths).into_iter().collect();
    let selected = match &state.selected {
        Selected::None => String::new(),
        Selected::Ours(id) => hs_ctrl::name(id),
        Selected::Foreign(name) => name.clone(),
    };
    if state.selected == Selected::None {
        findings.push("no policy is in force: `smc-policy apply`".to_owned());
    }
    if let Some(instance) = &state.instance
        && instance.info().object != object::object_id()
    {
        findings.push(
            "other programs than this version's are loaded: `smc-policy apply` replaces them".to_owned(),
        );
    }
    let unconfirmed = unconfirmed::read(&paths.run, state.record.as_ref()).unwrap_or_default();
    if let Some(record) = &state.record {
        findings.extend(drift(paths, record));
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
    let mut document = StatusDocument {
        ok: findings.is_empty(),
        hook: state.instance.as_ref().map(|_| "hs_ctrl"),
        mode: state.record.as_ref().map(|r| mode_name(r.observe)),
        kernel: release(),
        generation: state.instance.as_ref().map(Instance::generation),
        applied_at: state.record.as_ref().map(|r| r.applied_at),
        age_seconds: state.record.as_ref().map(|r| record::unix_now().saturating_sub(r.applied_at)),
        digest: state.record.as_ref().map(|r| r.digest.clone()),
        tool: state.record.as_ref().map(|r| r.tool.clone()),
        unconfirmed_seconds_left: unconfirmed.map(|u| u.seconds_left()),
        table_bytes: state.instance.as_ref().map(|i| u64::from(i.info().sizes.cells) * 16),
        counters: None,
        defaults: Vec::new(),
        rules: Vec::new(),
        namespaces: vec![NamespaceDocument {
            name: format!("net:[{}]", namespace::current()?),
            hs_ctrl: selected,
        }],
        findings,
    };
    if let Some(instance) = &state.instance {
        let InstanceCounters { decisions, undecided, observed_denies, plain_retransmissions, .. } =
            instance.instance_counters()?;
        document.counters =
            Some(CountersDocument { decisions, undecided, observed_denies, plain_retransmissions });
        if let Some((policy, slots)) = state.record.as_ref().and_then(Record::policy) {
            count_rules(instance, &policy, &slots, &mut document)?;
        }
    }
    Ok(document)
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

fn text(d: &StatusDocument, out: &Output) -> String {
    let mut text = String::new();
    let mut facts = vec![vec!["kernel".to_owned(), d.kernel.clone()]];
    let mut fact = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            facts.push(vec![name.to_owned(), value]);
        }
    };
    fact("hook", d.hook.map(str::to_owned));
    fact("mode", d.mode.map(str::to_owned));
    let age = d.age_seconds.map(|s| format!(", applied {} ago", duration(s))).unwrap_or_default();
    fact("generation", d.generation.map(|g| format!("{g}{age}")));
    fact(
        "unconfirmed",
        d.unconfirmed_seconds_left.map(|s| format!("the policy before returns in {}", duration(s))),
    );
    for namespace in &d.namespaces {
        let selected = if namespace.hs_ctrl.is_empty() { "nothing selected" } else { &namespace.hs_ctrl };
        fact("namespace", Some(format!("{} ({selected})", namespace.name)));
    }
    fact("tables", d.table_bytes.map(bytes));
    fact(
        "decisions",
        d.counters.as_ref().map(|c| {
            let observed = if c.observed_denies > 0 {
                format!(", {} only observed", c.observed_denies)
            } else {
                String::new()
            };
            let open =
                if c.undecided > 0 { format!(", {} without a table", c.undecided) } else { String::new() };
            let again = if c.plain_retransmissions > 0 {
                format!(", {} sent again without SMC", c.plain_retransmissions)
            } else {
                String::new()
            };
            format!("{}{observed}{again}{open}", c.decisions)
        }),
    );
    text.push_str(&columns(&facts, &[]));
    if !d.rules.is_empty() || !d.defaults.is_empty() {
        let heading = |word: &str| if word.is_empty() { String::new() } else { out.paint(Style::Dim, word) };
        let mut rows = vec![
            ["", "hits", "action", "direction", "rule", "from"]
                .iter()
                .map(|w| heading(w))
                .collect::<Vec<_>>(),
        ];
        for r in &d.rules {
            let name = if r.enabled { r.name.clone() } else { format!("{} (not enabled)", r.name) };
            let from = format!("{}:{}", r.file, r.line);
            rows.push(vec![
                String::new(),
                r.hits.to_string(),
                action(r.action, out),
                r.direction.clone(),
                name,
                from,
            ]);
        }
        for r in &d.defaults {
            rows.push(vec![
                String::new(),
                r.hits.to_string(),
                action(r.action, out),
                r.direction.to_owned(),
                "[default]".to_owned(),
            ]);
        }
        text.push('\n');
        text.push_str(&columns(&rows, &[1]));
    }
    if !d.findings.is_empty() {
        let heading = count(d.findings.len(), "finding");
        text.push_str(&format!("\n{}:\n", out.paint(Style::Note, &heading)));
        for finding in &d.findings {
            text.push_str(&format!("  {finding}\n"));
        }
    }
    text
}

fn action(action: Action, out: &Output) -> String {
    let style = if action == Action::Allow { Style::Good } else { Style::Bad };
    out.paint(style, &action.to_string())
}
