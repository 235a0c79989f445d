//! What `status` says to people.

use smc_policy_common::counters::InstanceCounters;

use super::{GuardDocument, NamespaceDocument, RuleDocument, StatusDocument};
use crate::{
    cli::{
        output::{Output, Style, columns},
        words::{bytes, count, duration},
    },
    kernel::hook::Hook,
    policy::{
        Action,
        config::{Guard, OnEcho},
    },
};

pub(super) fn of(d: &StatusDocument, out: &Output) -> String {
    let mut text = String::new();
    let mut facts = vec![vec!["kernel".to_owned(), d.kernel.clone()]];
    let mut fact = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            facts.push(vec![name.to_owned(), value]);
        }
    };
    fact("hook", d.hook.map(|hook| hook.to_string()));
    fact("mode", d.mode.map(str::to_owned));
    let age = d.age_seconds.map(|s| format!(", applied {} ago", duration(s))).unwrap_or_default();
    fact("generation", d.generation.map(|g| format!("{g}{age}")));
    fact(
        "unconfirmed",
        d.unconfirmed_seconds_left.map(|s| format!("the policy before returns in {}", duration(s))),
    );
    for namespace in &d.namespaces {
        fact("namespace", Some(namespace_line(namespace, d.hook)));
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
    fact("guard", d.guard.as_ref().map(|guard| guard_line(guard, d.counters.as_ref())));
    fact(
        "events",
        d.events.as_ref().and_then(|events| {
            let reader = events.reader.then(|| "read by a monitor".to_owned());
            let parts: Vec<String> = reader.into_iter().chain(events.lost.in_words()).collect();
            (!parts.is_empty()).then(|| parts.join(", "))
        }),
    );
    fact("untouched", d.counters.as_ref().and_then(untouched));
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
            let name = match r {
                RuleDocument { enabled: false, .. } => format!("{} (not enabled)", r.name),
                RuleDocument { expired: true, .. } => format!("{} (expired)", r.name),
                RuleDocument { expires: Some(expires), .. } => format!("{} (until {expires})", r.name),
                _ => r.name.clone(),
            };
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
    if !d.notes.is_empty() {
        text.push_str(&format!("\n{}:\n", out.paint(Style::Dim, &count(d.notes.len(), "note"))));
        for note in &d.notes {
            text.push_str(&format!("  {note}\n"));
        }
    }
    text
}

/// What decides there.
fn namespace_line(namespace: &NamespaceDocument, hook: Option<Hook>) -> String {
    let what = match hook {
        Some(Hook::Tc) => {
            let devices: Vec<String> = namespace
                .devices
                .iter()
                .map(|d| format!("{} {}", d.name, d.attached.unwrap_or("not covered")))
                .collect();
            if devices.is_empty() { "no device covered".to_owned() } else { devices.join(", ") }
        }
        _ if namespace.hs_ctrl.is_empty() => "nothing selected".to_owned(),
        _ => namespace.hs_ctrl.clone(),
    };
    let found = if namespace.own { String::new() } else { format!(", {}", namespace.found) };
    format!("{}{found} ({what})", namespace.name)
}

/// SYNs with the SMC option that the tc programs let pass unjudged; none: there were none.
fn untouched(c: &InstanceCounters) -> Option<String> {
    let parts: Vec<String> = [
        (c.no_socket, "of no socket here"),
        (c.no_listener, "for no listener here"),
        (c.signed, "signed by TCP-AO"),
        (c.unchanged, "not changed for want of memory"),
    ]
    .iter()
    .filter(|(n, _)| *n > 0)
    .map(|(n, what)| format!("{n} {what}"))
    .collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// What the guard does and has met.
fn guard_line(guard: &GuardDocument, counters: Option<&InstanceCounters>) -> String {
    let way = match guard.guard {
        Guard::Off => "off".to_owned(),
        Guard::Canary if !guard.marks => "canary, but no SYNs are marked".to_owned(),
        Guard::Canary => {
            let only = if guard.on_echo == OnEcho::LearnOnly { ", only learning" } else { "" };
            format!("canary{only}, {}", count(guard.devices, "device"))
        }
        Guard::Learn => "learn".to_owned(),
    };
    let learner = match (guard.guard, guard.learns) {
        (Guard::Off, _) => "",
        (_, true) => ", learns from failures",
        (_, false) => ", does not learn from failures",
    };
    let numbers = counters.map(|c| {
        [
            (c.marked + c.marked_short, "SYNs marked"),
            (c.echoes, "echoes blanked"),
            (c.kept_echoes, "echoes left as they are"),
            (c.reset_blanked, "connections reset by the peer after its echo was blanked"),
            (c.quarantined, "connections kept from SMC"),
            (c.observed_quarantined, "connections only observed"),
            (c.unproven, "answers with a false mark"),
            (c.unmarked, "SYNs without room for the mark"),
            (c.no_clc, "answers without CLC"),
            (c.silences, "negotiations without an answer"),
            (c.resets, "negotiations reset"),
            (c.rdma_failures, "connections without working RDMA"),
            (c.storm_reports, "suspicions only reported (too many known peers have some)"),
            (c.observed_failures, "failures only observed"),
        ]
    });
    let entries = [
        (guard.learned, "learned in quarantine"),
        (guard.commanded, "by command in quarantine"),
        (guard.evicted, "evicted"),
        (guard.refused, "not learned for want of memory"),
    ];
    let all = numbers.into_iter().flatten().chain(entries);
    let said = all.filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {n} {what}"));
    format!("{way}{learner}{}", said.collect::<String>())
}

fn action(action: Action, out: &Output) -> String {
    let style = if action == Action::Allow { Style::Good } else { Style::Bad };
    out.paint(style, &action.to_string())
}
