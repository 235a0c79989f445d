//! What is allowed but probably not meant.

use std::collections::HashSet;

use super::{
    address::AddrRange,
    compile,
    diagnostic::{Code, Diagnostic},
    load::Sets,
    model::{Policy, Rule},
    reader::At,
    source::{Element, List, Ports, RawFile},
};

/// So many findings of a kind are told for one list; a list of a million networks may have as many.
const MOST_PER_LIST: usize = 8;

/// So many rules are named that decide in the place of one that never does.
const MOST_DECIDERS: usize = 3;

/// All lints of a policy without errors.
pub(super) fn lint(policy: &Policy, raw: &[RawFile], sets: &Sets<'_>) -> Vec<Diagnostic> {
    let mut found = Vec::new();
    for set in raw.iter().flat_map(|file| &file.sets) {
        duplicates(&set.list, sets, &format!("the set `{}`", set.name.value), &mut found);
    }
    for rule in raw.iter().flat_map(|file| &file.rules) {
        for (key, list) in [("peers", &rule.peers), ("except", &rule.except), ("local", &rule.local)] {
            if let Some(list) = list {
                duplicates(list, sets, &format!("`{key}`"), &mut found);
            }
        }
        if let Some(ports) = &rule.ports {
            repeated_ports(ports, &mut found);
        }
    }
    set_lints(raw, sets, &mut found);
    rule_lints(policy, raw, &mut found);
    for test in &policy.tests {
        if let Some((_, rule)) = test.rule.as_deref().and_then(|name| policy.rule(name))
            && !rule.is_active()
        {
            let (why, label) =
                if rule.enabled { ("has expired", "expires") } else { ("is not enabled", "enabled = false") };
            let message = format!("the test expects rule `{}`, which {why}", rule.name);
            found.push(
                Diagnostic::warning(Code::DisabledRule, test.rule_place, message).related(rule.place, label),
            );
        }
    }
    found
}

/// An element that is told twice: its place in its list, and that of the element that covers it.
struct Repeated {
    index: usize,
    by: usize,
}

/// Elements that others of the same list cover already.
fn duplicates(list: &List, sets: &Sets<'_>, of: &str, found: &mut Vec<Diagnostic>) {
    let mut repeated: Vec<Repeated> = Vec::new();
    let (mut v4, mut v6) = (Vec::new(), Vec::new());
    let mut named: Vec<(&str, usize)> = Vec::new();
    for (index, element) in list.value.iter().enumerate() {
        match &element.value {
            Element::Range(AddrRange::V4(lo, hi)) => v4.push((*lo, *hi, index)),
            Element::Range(AddrRange::V6(lo, hi)) => v6.push((*lo, *hi, index)),
            Element::Set(name) => match named.iter().find(|(known, _)| known == name) {
                Some((_, first)) => repeated.push(Repeated { index, by: *first }),
                None => named.push((name, index)),
            },
        }
    }
    nested(&mut v4, &mut repeated);
    nested(&mut v6, &mut repeated);
    for (name, by) in &named {
        let Some(set) = sets.get(name) else { continue };
        for (index, element) in list.value.iter().enumerate() {
            let part = match element.value {
                Element::Range(AddrRange::V4(lo, hi)) => set.v4().covers(lo, hi),
                Element::Range(AddrRange::V6(lo, hi)) => set.v6().covers(lo, hi),
                Element::Set(_) => false,
            };
            if part {
                repeated.push(Repeated { index, by: *by });
            }
        }
    }
    tell(Code::DuplicatePeers, &list.value, repeated, of, found);
}

/// Ranges that others cover; ranges are (first, last, index).
fn nested<K: Copy + Ord>(ranges: &mut [(K, K, usize)], repeated: &mut Vec<Repeated>) {
    ranges.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)).then(a.2.cmp(&b.2)));
    let mut widest: Option<(K, usize)> = None;
    for (_, last, index) in ranges {
        match widest {
            Some((end, by)) if *last <= end => repeated.push(Repeated { index: *index, by }),
            _ => widest = Some((*last, *index)),
        }
    }
}

fn repeated_ports(ports: &Ports, found: &mut Vec<Diagnostic>) {
    let ranges = ports.value.iter().enumerate();
    let mut ranges: Vec<_> = ranges.map(|(index, at)| (at.value.0, at.value.1, index)).collect();
    let mut repeated = Vec::new();
    nested(&mut ranges, &mut repeated);
    tell(Code::DuplicatePorts, &ports.value, repeated, "`ports`", found);
}

/// An element of a list, as it is written.
trait Written: PartialEq {
    fn text(&self) -> String;
}

impl Written for Element {
    fn text(&self) -> String {
        match self {
            Self::Range(range) => range.to_string(),
            Self::Set(name) => format!("\"@{name}\""),
        }
    }
}

impl Written for (u16, u16) {
    fn text(&self) -> String {
        if self.0 == self.1 { format!("{}", self.0) } else { format!("{}-{}", self.0, self.1) }
    }
}

fn tell<T: Written>(
    code: Code,
    list: &[At<T>],
    mut repeated: Vec<Repeated>,
    of: &str,
    found: &mut Vec<Diagnostic>,
) {
    repeated.sort_unstable_by_key(|repeated| repeated.index);
    repeated.dedup_by_key(|repeated| repeated.index);
    let more = repeated.len().saturating_sub(MOST_PER_LIST);
    for Repeated { index, by } in repeated.into_iter().take(MOST_PER_LIST) {
        let (inner, outer) = (&list[index], &list[by]);
        let message = if inner.value == outer.value {
            format!("{} is listed twice in {of}", inner.value.text())
        } else {
            format!("{} is already part of {} in {of}", inner.value.text(), outer.value.text())
        };
        found.push(Diagnostic::warning(code, inner.place, message).related(outer.place, "here"));
    }
    if let (Some(last), true) = (found.last_mut(), more > 0) {
        last.help = Some(format!("{more} more in this list"));
    }
}

fn set_lints(raw: &[RawFile], sets: &Sets<'_>, found: &mut Vec<Diagnostic>) {
    let lists = raw.iter().flat_map(|file| &file.rules);
    let mut open: Vec<&List> =
        lists.flat_map(|rule| [&rule.peers, &rule.except, &rule.local]).flatten().collect();
    let mut used = HashSet::new();
    while let Some(list) = open.pop() {
        for element in &list.value {
            if let Element::Set(name) = &element.value
                && used.insert(name.as_str())
            {
                open.extend(sets.list(name));
            }
        }
    }
    for (set, addresses) in sets.iter() {
        let name = &set.name.value;
        if addresses.is_empty() {
            let message = format!("the set `{name}` is empty");
            found.push(
                Diagnostic::warning(Code::EmptySet, set.name.place, message)
                    .help("a rule whose peers are this set matches nothing"),
            );
        }
        if !used.contains(name.as_str()) {
            let message = format!("no rule uses the set `{name}`");
            found.push(Diagnostic::warning(Code::UnusedSet, set.name.place, message));
        }
    }
}

fn rule_lints(policy: &Policy, raw: &[RawFile], found: &mut Vec<Diagnostic>) {
    let raw_rules = raw.iter().flat_map(|file| &file.rules);
    for (rule, raw) in policy.rules.iter().zip(raw_rules) {
        let useless = rule.except.as_ref().is_some() && rule.listed.is_some() && rule.peers == rule.listed;
        if let (true, Some(except)) = (useless, &raw.except) {
            found.push(
                Diagnostic::warning(Code::UselessExcept, except.place, "`except` carves out nothing")
                    .help("none of these addresses is in `peers`"),
            );
        }
    }
    for (rule, raw) in policy.rules.iter().zip(raw.iter().flat_map(|file| &file.rules)) {
        if let (true, Some(expires)) = (rule.expired, &raw.expires) {
            let message = format!("rule `{}` expired at {}: it matches nothing", rule.name, expires.value);
            found.push(
                Diagnostic::warning(Code::Expired, expires.place, message)
                    .help("remove the rule, or give it more time"),
            );
        }
    }
    // A policy that is too large for the tables is refused as such.
    let Ok(dead) = compile::dead_rules(policy, MOST_DECIDERS) else { return };
    for dead in dead {
        let rule = &policy.rules[dead.rule];
        let deciders: Vec<&Rule> = dead.deciders.iter().map(|rule| &policy.rules[*rule]).collect();
        found.push(never_matches(rule, &deciders));
    }
}

fn never_matches(rule: &Rule, deciders: &[&Rule]) -> Diagnostic {
    let finding = |why: &str| {
        Diagnostic::warning(
            Code::NeverMatches,
            rule.place,
            format!("rule `{}` can never match: {why}", rule.name),
        )
    };
    if deciders.is_empty() {
        let empty = |set: &Option<std::sync::Arc<super::address::AddrSet>>| {
            set.as_ref().is_some_and(|set| set.is_empty())
        };
        return finding(if empty(&rule.listed) {
            "its `peers` are empty"
        } else if empty(&rule.peers) {
            "`except` carves out all of its peers"
        } else if empty(&rule.local) {
            "its `local` is empty"
        } else {
            "its `peers` and `local` are of different address families"
        });
    }
    let mut names: Vec<String> =
        deciders.iter().take(MOST_DECIDERS).map(|decider| format!("`{}`", decider.name)).collect();
    if deciders.len() > MOST_DECIDERS {
        names.push("others".to_owned());
    }
    let list = match names.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last} decide", rest.join(", ")),
        _ => format!("{} decides", names.join("")),
    };
    let mut finding = finding(&format!("{list} before it"));
    for decider in deciders.iter().take(MOST_DECIDERS) {
        finding = finding.related(decider.place, "decides first");
    }
    finding.help("the first rule that matches wins: move this one up, or remove it")
}
