//! The `[[test]]` blocks: what the policy itself says it must decide.

use super::{
    decide::{By, Decision},
    diagnostic::{Code, Diagnostic},
    explain::{Grid, Question, mismatch},
    model::{Policy, Test, direction_name},
};

/// Runs every `[[test]]`; one finding for each that does not hold or must say more. Empty: all hold.
pub fn run_tests(policy: &Policy) -> Vec<Diagnostic> {
    policy.tests.iter().filter_map(|test| run(policy, test)).collect()
}

fn run(policy: &Policy, test: &Test) -> Option<Diagnostic> {
    let question =
        Question { peer: test.peer, port: test.port, local: test.local, direction: test.direction };
    let grid = Grid::new(policy, &question, &[]);
    let expected_rule = test.rule.as_deref().map(|name| policy.rule(name).map(|(index, _)| index));
    let holds = |decision: Decision| {
        decision.action == test.expect
            && expected_rule.is_none_or(|rule| rule.map(By::Rule) == Some(decision.by))
    };
    let (directions, locals, ports) = (grid.directions.len(), grid.locals.len(), grid.ports.len());
    let all = || {
        (0..directions).flat_map(move |direction| {
            (0..locals).flat_map(move |local| (0..ports).map(move |port| (direction, local, port)))
        })
    };
    let outcome = |(direction, local, port)| holds(grid.decision(direction, local, port));
    if all().all(outcome) {
        return None;
    }
    if all().any(outcome) {
        // What is left out decides over the outcome: where the outcome differs along a key alone, that key is needed.
        let needed = [
            ("direction", all().any(|(d, l, p)| outcome((d, l, p)) != outcome((0, l, p)))),
            ("local", all().any(|(d, l, p)| outcome((d, l, p)) != outcome((d, 0, p)))),
            ("port", all().any(|(d, l, p)| outcome((d, l, p)) != outcome((d, l, 0)))),
        ];
        let needed = needed.into_iter().filter(|(_, needed)| *needed).map(|(key, _)| format!("`{key}`"));
        let needed = needed.collect::<Vec<_>>().join(" and ");
        return Some(ambiguous(
            policy,
            test,
            &grid,
            all().find(|at| outcome(*at)),
            all().find(|at| !outcome(*at)),
            &needed,
        ));
    }
    Some(failed(policy, test, &question, grid.decision(0, 0, 0)))
}

/// "deny by rule `x` at file:line".
fn decided(policy: &Policy, decision: Decision) -> String {
    match decision.by {
        By::Rule(index) => match policy.rules.get(index) {
            Some(rule) => format!("{} by rule `{}` at {}", decision.action, rule.name, policy.location(rule)),
            None => decision.action.to_string(),
        },
        By::Default(direction) => format!("{} by [default] {}", decision.action, direction_name(direction)),
    }
}

fn ambiguous(
    policy: &Policy,
    test: &Test,
    grid: &Grid,
    held: Option<(usize, usize, usize)>,
    failed: Option<(usize, usize, usize)>,
    needed: &str,
) -> Diagnostic {
    let message = format!("the outcome depends on what the test leaves out: it must give {needed}");
    let mut finding = Diagnostic::error(Code::TestAmbiguous, test.place, message);
    let example = |(direction, local, port): (usize, usize, usize)| {
        let mut words = vec![direction_name(grid.directions[direction]).to_owned()];
        if test.local.is_none() && grid.locals.len() > 1 {
            words.push(format!("local {}", super::address::to_ip(grid.locals[local].0)));
        }
        if test.port.is_none() && grid.ports.len() > 1 {
            words.push(format!("port {}", grid.ports[port].0));
        }
        format!("{}: {}", words.join(", "), decided(policy, grid.decision(direction, local, port)))
    };
    if let (Some(held), Some(failed)) = (held, failed) {
        finding = finding.help(format!("{}; {}", example(held), example(failed)));
    }
    finding
}

fn failed(policy: &Policy, test: &Test, question: &Question, got: Decision) -> Diagnostic {
    let decider = match got.by {
        By::Rule(index) => policy.rules.get(index),
        By::Default(_) => None,
    };
    let mut finding = if got.action != test.expect {
        let message = format!("expected {}, got {}", test.expect, decided(policy, got));
        Diagnostic::error(Code::TestFailed, test.expect_place, message)
    } else {
        let expected = test.rule.as_deref().unwrap_or_default();
        let message = format!("expected rule `{expected}` to decide, got {}", decided(policy, got));
        Diagnostic::error(Code::TestFailed, test.rule_place, message)
    };
    if let Some(rule) = decider {
        finding = finding.related(rule.place, "this rule decides");
    }
    let expected = test.rule.as_deref().and_then(|name| policy.rule(name));
    match expected.and_then(|(_, rule)| Some((rule, mismatch(rule, question)?))) {
        Some((rule, why)) => finding.help(format!("rule `{}` does not match: {why}", rule.name)),
        None => finding,
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::policy::{SourceFile, arbitrary, load, render};

    fn outcome(text: &str) -> String {
        let files = [SourceFile::policy("p.toml", format!("version = 1\n{text}"))];
        render(&run_tests(&load(&files, arbitrary::NOW).unwrap().policy), &files, false)
    }

    const POLICY: &str = r#"
[default]
inbound = "deny"

[[rule]]
name = "web"
action = "deny"
direction = "outbound"
peers = ["203.0.113.0/24"]
local = ["10.1.0.0/16"]
ports = [443]

[[rule]]
name = "rest"
action = "allow"
direction = "outbound"
peers = ["203.0.113.0/24"]
"#;

    #[test]
    fn tests_that_hold() {
        assert_eq!(
            outcome(&format!(
                "{POLICY}\n{}",
                r#"
[[test]]
peer = "203.0.113.7:443"
local = "10.1.0.5"
direction = "outbound"
expect = "deny"
rule = "web"
[[test]]
peer = "203.0.113.7"
port = 80
direction = "outbound"
expect = "allow"
rule = "rest"
[[test]]
peer = "198.51.100.1"
direction = "inbound"
expect = "deny"
[[test]]
peer = "2001:db8::1"
direction = "outbound"
expect = "allow"
"#
            )),
            ""
        );
    }

    #[test]
    fn tests_that_fail() {
        assert_snapshot!(outcome(&format!("{POLICY}\n{}", r#"
[[test]]
peer = "203.0.113.7:443"
local = "10.1.0.5"
direction = "outbound"
expect = "allow"
[[test]]
peer = "203.0.113.7:80"
direction = "outbound"
expect = "allow"
rule = "web"
[[test]]
peer = "198.51.100.1"
direction = "outbound"
expect = "deny"
rule = "web"
"#)), @r#"
        error[test-failed]: expected allow, got deny by rule `web` at p.toml:6
          --> p.toml:25:10
           |
         6 | [[rule]]
           | -------- this rule decides
        ...
        25 | expect = "allow"
           |          ^^^^^^^

        error[test-failed]: expected rule `web` to decide, got allow by rule `rest` at p.toml:14
          --> p.toml:30:8
           |
        14 | [[rule]]
           | -------- this rule decides
        ...
        30 | rule = "web"
           |        ^^^^^
           |
           = help: rule `web` does not match: port 80 not in 443

        error[test-failed]: expected deny, got allow by [default] outbound
          --> p.toml:34:10
           |
        34 | expect = "deny"
           |          ^^^^^^
           |
           = help: rule `web` does not match: peer not in peers
        "#);
    }

    #[test]
    fn tests_that_must_say_more() {
        assert_snapshot!(outcome(&format!("{POLICY}\n{}", r#"
[[test]]
peer = "198.51.100.1"
expect = "deny"
[[test]]
peer = "203.0.113.7:443"
direction = "outbound"
expect = "deny"
[[test]]
peer = "203.0.113.7"
expect = "allow"
"#)), @r"
        error[test-ambiguous]: the outcome depends on what the test leaves out: it must give `direction`
          --> p.toml:21:1
           |
        21 | [[test]]
           | ^^^^^^^^
           |
           = help: inbound: deny by [default] inbound; outbound: allow by [default] outbound

        error[test-ambiguous]: the outcome depends on what the test leaves out: it must give `local`
          --> p.toml:24:1
           |
        24 | [[test]]
           | ^^^^^^^^
           |
           = help: outbound, local 10.1.0.0: deny by rule `web` at p.toml:6; outbound, local 0.0.0.0: allow by rule `rest` at p.toml:14

        error[test-ambiguous]: the outcome depends on what the test leaves out: it must give `direction` and `local` and `port`
          --> p.toml:28:1
           |
        28 | [[test]]
           | ^^^^^^^^
           |
           = help: outbound, local 0.0.0.0, port 1: allow by rule `rest` at p.toml:14; outbound, local 10.1.0.0, port 443: deny by rule `web` at p.toml:6
        ");
    }
}
