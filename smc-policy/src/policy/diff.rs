//! What changes from one policy to the next.

use std::{
    collections::{HashMap, HashSet},
    fmt,
};

use serde::Serialize;
use smc_policy_common::query::Direction;

use super::model::{Policy, Rule, direction_name};

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "change", rename_all = "lowercase")]
pub enum Change {
    /// A rule that did not exist.
    Added {
        /// Its name.
        rule: String,
    },
    /// A rule that is gone.
    Removed {
        /// Its name.
        rule: String,
    },
    /// A rule that says something else.
    Changed {
        /// Its name.
        rule: String,
        /// The keys that differ; "file" if it stands in another file.
        keys: Vec<&'static str>,
    },
    /// A rule that is tried earlier or later than before, relative to the others.
    Moved {
        /// Its name.
        rule: String,
    },
    /// Another default.
    Default {
        /// "outbound" or "inbound".
        direction: &'static str,
        /// Before.
        old: super::model::Action,
        /// Now.
        new: super::model::Action,
    },
}

/// One line.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Added { rule } => write!(f, "+ rule {rule}"),
            Self::Removed { rule } => write!(f, "- rule {rule}"),
            Self::Changed { rule, keys } => write!(f, "~ rule {rule}: {} changed", keys.join(", ")),
            Self::Moved { rule } => write!(f, "~ rule {rule}: moved"),
            Self::Default { direction, old, new } => write!(f, "~ default {direction}: {old} -> {new}"),
        }
    }
}

/// What changes from `old` to `new`: defaults, then removed rules, then added, changed and moved ones in their new order.
/// Empty if both decide alike by the same rules.
pub fn diff(old: &Policy, new: &Policy) -> Vec<Change> {
    let mut changes = Vec::new();
    for direction in [Direction::Outbound, Direction::Inbound] {
        let (before, now) = (old.defaults.of(direction), new.defaults.of(direction));
        if before != now {
            changes.push(Change::Default { direction: direction_name(direction), old: before, new: now });
        }
    }
    let old_index: HashMap<&str, usize> =
        old.rules.iter().enumerate().map(|(index, rule)| (rule.name.as_str(), index)).collect();
    let kept: HashSet<&str> = new.rules.iter().map(|rule| rule.name.as_str()).collect();
    let removed = old.rules.iter().filter(|rule| !kept.contains(rule.name.as_str()));
    changes.extend(removed.map(|rule| Change::Removed { rule: rule.name.clone() }));
    let common: Vec<usize> =
        new.rules.iter().filter_map(|rule| old_index.get(rule.name.as_str()).copied()).collect();
    let in_order = longest_ascending(&common);
    for rule in &new.rules {
        let name = || rule.name.clone();
        let Some(index) = old_index.get(rule.name.as_str()) else {
            changes.push(Change::Added { rule: name() });
            continue;
        };
        let keys = changed_keys((old, &old.rules[*index]), (new, rule));
        if !keys.is_empty() {
            changes.push(Change::Changed { rule: name(), keys });
        }
        if !in_order.contains(index) {
            changes.push(Change::Moved { rule: name() });
        }
    }
    changes
}

fn changed_keys(
    (old_policy, old): (&Policy, &Rule),
    (new_policy, new): (&Policy, &Rule),
) -> Vec<&'static str> {
    let keys = [
        ("action", old.action != new.action),
        ("direction", old.direction != new.direction),
        ("peers", old.listed != new.listed),
        ("except", old.except != new.except),
        ("local", old.local != new.local),
        ("ports", old.ports != new.ports),
        ("comment", old.comment != new.comment),
        ("expires", (old.expires, old.expired) != (new.expires, new.expired)),
        ("trust", old.trust != new.trust),
        ("enabled", old.enabled != new.enabled),
        ("file", old_policy.file(old.place) != new_policy.file(new.place)),
    ];
    keys.into_iter().filter(|(_, changed)| *changed).map(|(key, _)| key).collect()
}

/// A longest ascending subsequence of distinct numbers: what is not in it has moved.
fn longest_ascending(numbers: &[usize]) -> HashSet<usize> {
    // `ends[n]`: where in `numbers` the ascending subsequence of n + 1 numbers with the smallest end ends.
    let mut ends: Vec<usize> = Vec::new();
    let mut before = vec![None; numbers.len()];
    for (at, number) in numbers.iter().enumerate() {
        let length = ends.partition_point(|end| numbers[*end] < *number);
        before[at] = length.checked_sub(1).map(|shorter| ends[shorter]);
        ends.truncate(length.max(ends.len()));
        match ends.get_mut(length) {
            Some(end) => *end = at,
            None => ends.push(at),
        }
    }
    std::iter::successors(ends.last().copied(), |at| before[*at]).map(|at| numbers[at]).collect()
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use proptest::prelude::*;

    use super::*;
    use crate::policy::{SourceFile, arbitrary, load};

    fn policy(text: &str) -> Policy {
        let text = format!("version = 1\n{text}");
        load(&[SourceFile::policy("p.toml", text)], arbitrary::NOW).unwrap().policy
    }

    fn lines(old: &str, new: &str) -> String {
        let changes = diff(&policy(old), &policy(new));
        changes.iter().map(Change::to_string).collect::<Vec<_>>().join("\n")
    }

    fn rules(names: &str) -> String {
        let rules = names.chars().map(|name| {
            format!("[[rule]]\nname = \"{name}\"\naction = \"deny\"\nports = [{}]\n", name as u32)
        });
        rules.collect()
    }

    #[test]
    fn nothing_changes_with_comments_and_line_numbers() {
        assert_eq!(lines(&rules("ab"), &format!("# a comment\n\n{}", rules("ab"))), "");
    }

    #[test]
    fn every_kind() {
        let old =
            "[[rule]]\nname=\"x\"\naction=\"deny\"\npeers=[\"10.0.0.0/9\", \"10.128.0.0/9\"]\nports=[1]";
        let new = "[default]\ninbound=\"deny\"\n[sets]\nten=[\"10.0.0.0/8\"]\n[[rule]]\nname=\"x\"\naction=\"allow\"
            peers=[\"@ten\"]\nports=[2]\ntrust=true\ncomment=\"c\"\n[[rule]]\nname=\"y\"\naction=\"deny\"";
        assert_snapshot!(lines(old, new), @r"
        ~ default inbound: allow -> deny
        ~ rule x: action, ports, comment, trust changed
        + rule y
        ");
        assert_snapshot!(lines(new, old), @r"
        ~ default inbound: deny -> allow
        - rule y
        ~ rule x: action, ports, comment, trust changed
        ");
    }

    #[test]
    fn moved_is_the_fewest_rules() {
        assert_eq!(lines(&rules("abcde"), &rules("ebcda")), "~ rule e: moved\n~ rule a: moved");
        assert_eq!(lines(&rules("abcde"), &rules("bcdea")), "~ rule a: moved");
        assert_eq!(lines(&rules("abcde"), &rules("bxcdae")), "+ rule x\n~ rule a: moved");
        assert_eq!(lines(&rules("abc"), &rules("bc")), "- rule a");
    }

    #[test]
    fn as_data() {
        let json = serde_json::to_string(&diff(&policy(&rules("ab")), &policy("[default]\noutbound = \"deny\"\n[[rule]]\nname=\"b\"\naction=\"allow\"\n[[rule]]\nname=\"c\"\naction=\"allow\""))).unwrap();
        assert_snapshot!(json, @r#"[{"change":"default","direction":"outbound","old":"allow","new":"deny"},{"change":"removed","rule":"a"},{"change":"changed","rule":"b","keys":["action","ports"]},{"change":"added","rule":"c"}]"#);
    }

    proptest! {
        #[test]
        fn ascending_and_as_long_as_by_brute_force(numbers in Just((0..9usize).collect::<Vec<_>>()).prop_shuffle()) {
            let found = longest_ascending(&numbers);
            let kept: Vec<_> = numbers.iter().filter(|number| found.contains(number)).collect();
            prop_assert!(kept.is_sorted());
            let best = (0u32..1 << numbers.len()).filter(|bits| {
                let chosen = numbers.iter().enumerate().filter(|(at, _)| bits >> at & 1 == 1);
                chosen.map(|(_, number)| number).is_sorted()
            });
            prop_assert_eq!(best.map(u32::count_ones).max(), Some(kept.len() as u32));
        }
    }
}
