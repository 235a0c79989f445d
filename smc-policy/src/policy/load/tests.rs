use insta::assert_snapshot;
use proptest::prelude::*;
use smc_policy_common::query::Direction;

use super::*;
use crate::policy::{
    address::AddrRange,
    arbitrary::{self, Random},
    diagnostic::{Severity, render},
    model::{Action, Directions},
    run_tests,
};

fn files(texts: &[&str]) -> Vec<SourceFile> {
    let name = |at: usize| ["a.toml", "b.toml", "c.toml"][at];
    texts.iter().enumerate().map(|(at, text)| SourceFile::policy(name(at), (*text).to_owned())).collect()
}

/// Everything that is wrong, as printed.
fn wrong(texts: &[&str]) -> String {
    let files = files(texts);
    match load(&files, arbitrary::NOW) {
        Ok(_) => "nothing".to_owned(),
        Err(found) => render(&found, &files, false),
    }
}

/// What is wrong with a rule of these lines, without the text around it.
fn wrong_lines(lines: &str) -> String {
    let text = format!("version = 1\n[[rule]]\nname = \"r\"\naction = \"allow\"\n{lines}\n");
    let files = files(&[&text]);
    let found = load(&files, arbitrary::NOW).map(|loaded| loaded.warnings).unwrap_or_else(|found| found);
    let words = |found: &Diagnostic| {
        let help = found.help.as_ref().map(|help| format!(" ({help})")).unwrap_or_default();
        format!("{}{help}", found.record(&files))
    };
    found.iter().map(words).collect::<Vec<_>>().join("\n")
}

fn policy(texts: &[&str]) -> Policy {
    let files = files(texts);
    load(&files, arbitrary::NOW).unwrap_or_else(|found| panic!("{}", render(&found, &files, false))).policy
}

fn warnings(texts: &[&str]) -> String {
    let files = files(texts);
    let loaded =
        load(&files, arbitrary::NOW).unwrap_or_else(|found| panic!("{}", render(&found, &files, false)));
    assert!(loaded.warnings.iter().all(|lint| lint.severity == Severity::Warning && lint.code.is_lint()));
    render(&loaded.warnings, &files, false)
}

#[test]
fn the_whole_language() {
    let policy = policy(&[r#"
version = 1

[default]
outbound = "deny"

[sets]
vpc = ["10.0.0.0/8", "fd00::/8"]
all = ["@vpc", "192.0.2.1-192.0.2.9"]

[[rule]]
name = "internet"
action = "allow"
direction = "outbound"
peers = ["0.0.0.0/0", "::/0", "::ffff:192.0.2.1"]
except = ["@all"]
local = ["10.1.0.0/16"]
ports = [443, "8000-8099", 0x1f90]
comment = "why"
trust = true
enabled = false

[[rule]]
name = "everything"
action = "deny"

[[test]]
peer = "[::ffff:203.0.113.7]:443"
local = "10.1.0.5"
direction = "outbound"
expect = "deny"
rule = "everything"

[[test]]
peer = "203.0.113.7"
expect = "deny"
"#]);
    assert_eq!((policy.defaults.outbound, policy.defaults.inbound), (Action::Deny, Action::Allow));
    let rule = &policy.rules[0];
    assert_eq!(
        (rule.name.as_str(), rule.action, rule.direction),
        ("internet", Action::Allow, Directions::Outbound)
    );
    assert_eq!((rule.comment.as_deref(), rule.trust, rule.enabled), (Some("why"), true, false));
    assert_eq!(rule.ports.as_ref().unwrap().ranges(), [(443, 443), (8000, 8099)]);
    let text = |set: &Option<Arc<AddrSet>>| {
        let ranges = set.as_ref().unwrap().ranges().map(|range: AddrRange| range.to_string());
        ranges.collect::<Vec<_>>().join(" ")
    };
    assert_snapshot!(text(&rule.except), @"10.0.0.0/8 192.0.2.1-192.0.2.9 fd00::/8");
    assert_snapshot!(text(&rule.peers), @"0.0.0.0-9.255.255.255 11.0.0.0-192.0.2.0 192.0.2.10-255.255.255.255 ::-::fffe:ffff:ffff ::1:0:0:0-fcff:ffff:ffff:ffff:ffff:ffff:ffff:ffff fe00::/7");
    assert_eq!(text(&rule.local), "10.1.0.0/16");
    assert_eq!(policy.location(rule), "a.toml:11");
    let rule = &policy.rules[1];
    assert_eq!((&rule.peers, &rule.local, &rule.ports), (&None, &None, &None));
    assert_eq!((rule.direction, rule.trust, rule.enabled), (Directions::Both, false, true));
    let test = &policy.tests[0];
    assert_eq!((test.port, test.direction), (Some(443), Some(Direction::Outbound)));
    assert_eq!(test.peer.as_v4(), Some(0xcb00_7107));
    assert_eq!(test.rule.as_deref(), Some("everything"));
    assert_eq!(run_tests(&policy), []);
}

#[test]
fn no_file_allows_everything() {
    assert_eq!(load(&[], arbitrary::NOW).unwrap().policy, Policy::default());
}

#[test]
fn equal_sets_are_shared() {
    let policy = policy(&[
        "version = 1\n[sets]\na = [\"10.0.0.0/8\"]\nb = [\"@a\"]\n[[rule]]\nname = \"x\"\naction = \"deny\"\npeers = [\"@b\"]\n\
         [[rule]]\nname = \"y\"\naction = \"deny\"\npeers = [\"@a\"]\nports = [1]\n",
    ]);
    let peers = |rule: usize| policy.rules[rule].peers.as_ref().unwrap();
    assert!(Arc::ptr_eq(peers(0), peers(1)));
}

#[test]
fn lists_are_read_from_where_the_policy_file_is() {
    let text = "version = 1\n[[rule]]\nname = \"x\"\naction = \"deny\"\npeers = [\"192.0.2.1\"]\npeers_file = \"lists/cdn.txt\"\n\
                [[rule]]\nname = \"y\"\naction = \"allow\"\npeers_file = \"/srv/all.txt\"\n";
    let policy_file = SourceFile::policy("/etc/p.d/a.toml", text);
    let wanted = lists(std::slice::from_ref(&policy_file));
    assert_eq!(wanted, ["/etc/p.d/lists/cdn.txt", "/srv/all.txt"].map(PathBuf::from));
    let folder = SourceFile::policy("a.toml", "[[rule]]\npeers_file = \".\"\n");
    assert_eq!(lists(&[folder]), [PathBuf::from(".")], "not a file without a name");
    let files = [
        policy_file,
        SourceFile::list(&wanted[0], "10.0.0.0/8 # all of it\n\n2001:db8::/32\n"),
        SourceFile::list(&wanted[1], "# nobody yet\n"),
    ];
    let Loaded { policy, warnings } = load(&files, arbitrary::NOW).unwrap();
    let peers = |rule: usize| {
        let ranges = policy.rules[rule].peers.as_ref().unwrap().ranges().map(|range| range.to_string());
        ranges.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(peers(0), "10.0.0.0/8 192.0.2.1 2001:db8::/32");
    assert_eq!(peers(1), "");
    assert_snapshot!(render(&warnings, &files, false), @r#"
    warning[never-matches]: rule `y` can never match: its `peers` are empty
     --> /etc/p.d/a.toml:7:1
      |
    7 | [[rule]]
      | ^^^^^^^^
    
    warning[empty-set]: /srv/all.txt lists no address
      --> /etc/p.d/a.toml:10:14
       |
    10 | peers_file = "/srv/all.txt"
       |              ^^^^^^^^^^^^^^
       |
       = help: a rule whose peers are this list matches nothing
    "#);
}

#[test]
fn wrong_lines_of_lists_stand_beside_other_errors() {
    let text = "version = 1\n[[rule]]\nname = \"x\"\naction = \"deni\"\npeers_file = \"l.txt\"\n[[rule]]\nname = \"y\"\n\
                action = \"deny\"\npeers_file = \"./l.txt\"\n[[rule]]\nname = \"z\"\naction = \"deny\"\npeers_file = \"m.txt\"\n";
    let unread = SourceFile { kind: SourceKind::Unread, ..SourceFile::list("m.txt", "no such file") };
    let list = |path: &str| SourceFile::list(path, "192.0.2.1\n192.0.2.256\n");
    let files = [SourceFile::policy("a.toml", text), list("l.txt"), unread];
    assert_eq!(lists(&files), ["l.txt", "m.txt"].map(PathBuf::from));
    assert_snapshot!(render(&load(&files, arbitrary::NOW).unwrap_err(), &files, false), @r#"
    error[bad-value]: `action` is "allow" or "deny", not "deni"
     --> a.toml:4:10
      |
    4 | action = "deni"
      |          ^^^^^^
      |
      = help: did you mean "deny"?

    error[unreadable]: m.txt: no such file
      --> a.toml:13:14
       |
    13 | peers_file = "m.txt"
       |              ^^^^^^^
       |
       = help: `peers_file` is relative to the folder of the policy file

    error[address]: `192.0.2.256` is not an address, a network or a range
     --> l.txt:2:1
      |
    2 | 192.0.2.256
      | ^^^^^^^^^^^
      |
      = help: an IPv4 address has four numbers from 0 to 255, a network is written 10.0.0.0/8
    "#);
}

#[test]
fn entries_of_a_list_that_others_cover_are_told_once() {
    let text = "version = 1\n[[rule]]\nname = \"x\"\naction = \"deny\"\npeers_file = \"l.txt\"\n[[rule]]\nname = \"y\"\n\
                action = \"deny\"\nports = [1]\npeers_file = \"l.txt\"\n";
    let list = SourceFile::list("l.txt", "192.0.2.0/24\n192.0.2.1\n192.0.2.1\n");
    let found = load(&[SourceFile::policy("a.toml", text), list], arbitrary::NOW).unwrap().warnings;
    let of_list: Vec<_> = found.iter().filter(|found| found.code == Code::DuplicatePeers).collect();
    assert_eq!(of_list.len(), 1, "{found:?}");
    assert_eq!(of_list[0].message, "l.txt: 2 entries are part of others in the list, line 2 first");
}

#[test]
fn a_rule_ends_when_it_expires() {
    let text =
        "version = 1\n[[rule]]\nname = \"x\"\naction = \"deny\"\nexpires = 2027-01-31T01:00:00+01:00\n";
    let files = [SourceFile::policy("a.toml", text)];
    let end = Moment::parse("2027-01-31T00:00:00Z").unwrap();
    let before = Moment::from_unix(end.to_unix() - 1);
    let loaded = load(&files, before).unwrap();
    let [rule] = loaded.policy.rules.as_slice() else { panic!("one rule") };
    assert_eq!((rule.expires, rule.is_active(), rule.is_overdue(before)), (Some(end), true, false));
    assert!(rule.is_overdue(end), "it still matches, but should not");
    assert!(loaded.warnings.is_empty(), "{:?}", loaded.warnings);
    let loaded = load(&files, end).unwrap();
    assert!(!loaded.policy.rules[0].is_active() && !loaded.policy.rules[0].is_overdue(end));
    assert_snapshot!(render(&loaded.warnings, &files, false), @r"
    warning[expired]: rule `x` expired at 2027-01-31T00:00:00Z: it matches nothing
     --> a.toml:5:11
      |
    5 | expires = 2027-01-31T01:00:00+01:00
      |           ^^^^^^^^^^^^^^^^^^^^^^^^^
      |
      = help: remove the rule, or give it more time
    ");
}

#[test]
fn moments_that_are_none() {
    assert_snapshot!(wrong(&[
        "version = 1\n[[rule]]\nname = \"a\"\naction = \"deny\"\nexpires = \"2027-01-31\"\n[[rule]]\nname = \"b\"\naction = \"deny\"\n\
         expires = 2027-01-31\n[[rule]]\nname = \"c\"\naction = \"deny\"\nexpires = 2027-01-31T00:00:00\n[[rule]]\nname = \"d\"\n\
         action = \"deny\"\nexpires = 1960-01-31T00:00:00Z\n",
    ]), @r#"
    error[wrong-type]: `expires` is a date with time and offset, not a string
     --> a.toml:5:11
      |
    5 | expires = "2027-01-31"
      |           ^^^^^^^^^^^^
      |
      = help: written 2027-01-31T00:00:00Z, without quotes

    error[bad-value]: `expires` needs a date and a time
     --> a.toml:9:11
      |
    9 | expires = 2027-01-31
      |           ^^^^^^^^^^
      |
      = help: written 2027-01-31T00:00:00Z, without quotes

    error[bad-value]: `expires` needs an offset from UTC: hosts differ in their time zones
      --> a.toml:13:11
       |
    13 | expires = 2027-01-31T00:00:00
       |           ^^^^^^^^^^^^^^^^^^^
       |
       = help: 2027-01-31T00:00:00Z is UTC

    error[bad-value]: `expires` is no moment after 1970
      --> a.toml:17:11
       |
    17 | expires = 1960-01-31T00:00:00Z
       |           ^^^^^^^^^^^^^^^^^^^^
       |
       = help: written 2027-01-31T00:00:00Z, without quotes
    "#);
}

#[test]
fn all_errors_of_all_files_at_once() {
    assert_snapshot!(wrong(&[
        r#"
version = 1
colour = "red"

[default]
outbound = "alow"
other = true

[[rule]]
nane = "web"
action = "deny"
peers = ["10.0.0.1/8", "example.com", 5, "@vcp"]
ports = [443, 70000, "99-1", 1.5]
expires = 2027-01-31T00:00:00Z

[sets]
vpc = "10.0.0.0/8"
"#,
        r#"
[default]
inbound = "deny"

[[rule]]
name = "Web Server"
action = "deny"
trust = true
peers_file = "lists/cdn.txt"

[[test]]
peer = "203.0.113.0/24"
port = 0
expect = "denied"
rule = "wbe"
"#
    ]), @r#"
    error[unknown-key]: a policy file has no key `colour`
     --> a.toml:3:1
      |
    3 | colour = "red"
      | ^^^^^^
      |
      = help: its keys are version, default, sets, rule, test

    error[bad-value]: `outbound` is "allow" or "deny", not "alow"
     --> a.toml:6:12
      |
    6 | outbound = "alow"
      |            ^^^^^^
      |
      = help: did you mean "allow"?

    error[unknown-key]: [default] has no key `other`
     --> a.toml:7:1
      |
    7 | other = true
      | ^^^^^
      |
      = help: its keys are outbound, inbound

    error[missing-key]: the rule has no `name`
     --> a.toml:9:1
      |
    9 | [[rule]]
      | ^^^^^^^^
      |
      = help: write name = "what-it-is-for"

    error[unknown-key]: a rule has no key `nane`
      --> a.toml:10:1
       |
    10 | nane = "web"
       | ^^^^
       |
       = help: did you mean `name`?

    error[address]: 10.0.0.1/8 has host bits set
      --> a.toml:12:10
       |
    12 | peers = ["10.0.0.1/8", "example.com", 5, "@vcp"]
       |          ^^^^^^^^^^^^
       |
       = help: did you mean 10.0.0.0/8? a single address is written 10.0.0.1

    error[address]: `example.com` is a host name
      --> a.toml:12:24
       |
    12 | peers = ["10.0.0.1/8", "example.com", 5, "@vcp"]
       |                        ^^^^^^^^^^^^^
       |
       = help: a policy must not depend on DNS: write its addresses, or a list of them under [sets]

    error[wrong-type]: an element of `peers` is a string, not an integer
      --> a.toml:12:39
       |
    12 | peers = ["10.0.0.1/8", "example.com", 5, "@vcp"]
       |                                       ^

    error[reference]: there is no set `vcp`
      --> a.toml:12:42
       |
    12 | peers = ["10.0.0.1/8", "example.com", 5, "@vcp"]
       |                                          ^^^^^^
       |
       = help: did you mean "@vpc"?

    error[port]: 70000 is not a port
      --> a.toml:13:15
       |
    13 | ports = [443, 70000, "99-1", 1.5]
       |               ^^^^^
       |
       = help: ports are 1 to 65535

    error[port]: 99-1 ends before it begins
      --> a.toml:13:22
       |
    13 | ports = [443, 70000, "99-1", 1.5]
       |                      ^^^^^^
       |
       = help: did you mean 1-99?

    error[wrong-type]: an element of `ports` is a port or a range of ports as "8000-8099", not a float
      --> a.toml:13:30
       |
    13 | ports = [443, 70000, "99-1", 1.5]
       |                              ^^^

    error[wrong-type]: `vpc` is a list, not a string
      --> a.toml:17:7
       |
    17 | vpc = "10.0.0.0/8"
       |       ^^^^^^^^^^^^
       |
       = help: write vpc = ["10.0.0.0/8"]

    error[version]: `version` is missing
     --> b.toml:1:1
      |
    1 |
      | ^
      |
      = help: begin the file with: version = 1

    error[duplicate]: [default] is given a second time
     --> b.toml:2:1
      |
    2 | [default]
      | ^^^^^^^^^
      |
     ::: a.toml:5:1
      |
    5 | [default]
      | --------- the first one
      |
      = help: give it once over all files: both `outbound` and `inbound` may stand there

    error[name]: the name of a rule cannot be "Web Server"
     --> b.toml:6:8
      |
    6 | name = "Web Server"
      |        ^^^^^^^^^^^^
      |
      = help: names are of a-z 0-9 -: "web-server"

    error[conflict]: a rule that denies cannot `trust`
     --> b.toml:8:9
      |
    8 | trust = true
      |         ^^^^
      |
      = help: `trust` exempts peers of an allow rule from the quarantine

    error[unreadable]: lists/cdn.txt: was not read
     --> b.toml:9:14
      |
    9 | peers_file = "lists/cdn.txt"
      |              ^^^^^^^^^^^^^^^
      |
      = help: `peers_file` is relative to the folder of the policy file

    error[address]: `203.0.113.0/24` is more than one address
      --> b.toml:12:8
       |
    12 | peer = "203.0.113.0/24"
       |        ^^^^^^^^^^^^^^^^
       |
       = help: a test is one connection: write one address of it

    error[port]: 0 is not a port
      --> b.toml:13:8
       |
    13 | port = 0
       |        ^
       |
       = help: ports are 1 to 65535

    error[bad-value]: `expect` is "allow" or "deny", not "denied"
      --> b.toml:14:10
       |
    14 | expect = "denied"
       |          ^^^^^^^^

    error[reference]: there is no rule `wbe`
      --> b.toml:15:8
       |
    15 | rule = "wbe"
       |        ^^^^^
    "#);
}

#[test]
fn syntax_errors_do_not_hide_each_other_nor_what_follows() {
    assert_snapshot!(wrong(&[
        "version = 1\n[[rule]]\nname = \"a\naction = deny\nports = [1,,2]\npeers = [\"10.0.0.1/8\"]\nbad bad\n",
        "version = 1\n[[rule]]\nname = \"b\"\naction = \"deny\"\npeers = [\"10.0.0.1\",\n  \"@later\"\nports = [1]\n\n[sets]\nlater = []\n",
    ]), @r#"
    error[syntax]: invalid basic string, expected `"`
     --> a.toml:3:10
      |
    3 | name = "a
      |          ^

    error[syntax]: string values must be quoted, expected literal string
     --> a.toml:4:10
      |
    4 | action = deny
      |          ^^^^

    error[syntax]: extra comma in array, expected value
     --> a.toml:5:12
      |
    5 | ports = [1,,2]
      |            ^

    error[address]: 10.0.0.1/8 has host bits set
     --> a.toml:6:10
      |
    6 | peers = ["10.0.0.1/8"]
      |          ^^^^^^^^^^^^
      |
      = help: did you mean 10.0.0.0/8? a single address is written 10.0.0.1

    error[syntax]: key with no value, expected `=`
     --> a.toml:7:5
      |
    7 | bad bad
      |     ^

    error[syntax]: this bracket is never closed
     --> b.toml:5:9
      |
    5 | peers = ["10.0.0.1",
      |         ^
      |
      = help: every `[` needs its `]`, every `{` its `}`
    "#);
}

#[test]
fn defined_twice() {
    assert_snapshot!(wrong(&[
        "version = 1\n[default]\noutbound = \"deny\"\n[sets]\nvpc = []\n[[rule]]\nname = \"web\"\naction = \"deny\"\n",
        "version = 1\n[default]\n[sets]\nvpc = []\n[[rule]]\nname = \"web\"\naction = \"deny\"\n",
    ]), @r#"
    error[duplicate]: [default] is given a second time
     --> b.toml:2:1
      |
    2 | [default]
      | ^^^^^^^^^
      |
     ::: a.toml:2:1
      |
    2 | [default]
      | --------- the first one
      |
      = help: give it once over all files: both `outbound` and `inbound` may stand there

    error[duplicate]: a set named `vpc` exists already
     --> b.toml:4:1
      |
    4 | vpc = []
      | ^^^
      |
     ::: a.toml:5:1
      |
    5 | vpc = []
      | --- the first one
      |
      = help: a set's name may be given once over all files

    error[duplicate]: a rule named `web` exists already
     --> b.toml:6:8
      |
    6 | name = "web"
      |        ^^^^^
      |
     ::: a.toml:7:8
      |
    7 | name = "web"
      |        ----- the first one
      |
      = help: hits are counted by name: names are unique over all files
    "#);
    assert_snapshot!(wrong(&["version = 1\n[default]\n[default]\n"]), @r"
    error[syntax]: duplicate key
     --> a.toml:3:2
      |
    3 | [default]
      |  ^^^^^^^
    ");
}

#[test]
fn sets_that_contain_themselves() {
    assert_snapshot!(wrong(&[
        "version = 1\n[sets]\na = [\"@b\"]\nb = [\"10.0.0.1\", \"@c\"]\nself = [\"@self\"]\n",
        "version = 1\n[sets]\nc = [\"@a\", \"@missing\"]\n",
    ]), @r#"
    error[reference]: the set `self` contains itself: self -> self
     --> a.toml:5:9
      |
    5 | self = ["@self"]
      |         ^^^^^^^

    error[reference]: the set `a` contains itself: a -> b -> c -> a
     --> b.toml:3:6
      |
    3 | c = ["@a", "@missing"]
      |      ^^^^

    error[reference]: there is no set `missing`
     --> b.toml:3:12
      |
    3 | c = ["@a", "@missing"]
      |            ^^^^^^^^^^
      |
      = help: sets are defined under [sets], in any of the files
    "#);
}

#[test]
fn a_long_chain_of_sets() {
    let sets: String = (0..20_000).map(|at| format!("s{at} = [\"@s{}\"]\n", at + 1)).collect();
    let text = format!(
        "version = 1\n[[rule]]\nname = \"x\"\naction = \"deny\"\npeers = [\"@s0\"]\n[sets]\n{sets}s20000 = [\"10.0.0.1\"]\n"
    );
    assert!(
        policy(&[&text]).rules[0]
            .peers
            .as_ref()
            .unwrap()
            .contains(smc_policy_common::query::Addr::v4(0x0a00_0001))
    );
}

#[test]
fn versions() {
    assert_snapshot!(wrong(&["", "version = 2\n", "version = \"1\"\n"]), @r#"
    error[version]: `version` is missing
     --> a.toml:1:1
      |
    1 |
      | ^
      |
      = help: begin the file with: version = 1

    error[version]: version 2 is not one this program reads
     --> b.toml:1:11
      |
    1 | version = 2
      |           ^
      |
      = help: begin the file with: version = 1

    error[wrong-type]: `version` is a number, not a string
     --> c.toml:1:11
      |
    1 | version = "1"
      |           ^^^
    "#);
}

#[test]
fn types_and_empty_lists() {
    let lines = [
        "peers = \"10.0.0.1\"",
        "peers = []",
        "except = []",
        "local = []",
        "ports = []",
        "ports = 443",
        "ports = [\"443\"]",
        "enabled = \"yes\"",
        "trust = 1",
        "comment = 1",
        "direction = \"out\"",
        "direction = \"outbuond\"",
        "peers = [[\"10.0.0.1\"]]",
        "peers = [\"@\"]",
        "port = [1]",
        "peer = [\"10.0.0.1\"]",
        "something = 1",
        "ports = [99999999999999999999999999999999999999999999]",
        "ports = [-1]",
    ];
    let all: Vec<String> = lines.iter().map(|line| format!("{line}\n    {}", wrong_lines(line))).collect();
    assert_snapshot!(all.join("\n"), @r#"
    peers = "10.0.0.1"
        a.toml:5:9: error: `peers` is a list, not a string (write peers = ["10.0.0.1"])
    peers = []
        a.toml:5:9: error: `peers` is an empty list (leave `peers` out to match every peer)
    except = []
        a.toml:5:10: error: `except` is an empty list (leave `except` out if nothing is carved out)
    local = []
        a.toml:5:9: error: `local` is an empty list (leave `local` out to match every local address)
    ports = []
        a.toml:5:9: error: `ports` is an empty list (leave `ports` out to match every port)
    ports = 443
        a.toml:5:9: error: `ports` is a list, not an integer (write ports = [443])
    ports = ["443"]
        a.toml:5:10: error: `443` is not a range of ports (a single port is a number without quotes: 443)
    enabled = "yes"
        a.toml:5:11: error: `enabled` is true or false, not a string (without quotes)
    trust = 1
        a.toml:5:9: error: `trust` is true or false, not an integer
    comment = 1
        a.toml:5:11: error: `comment` is a string, not an integer
    direction = "out"
        a.toml:5:13: error: `direction` is "outbound" or "inbound" or "both", not "out"
    direction = "outbuond"
        a.toml:5:13: error: `direction` is "outbound" or "inbound" or "both", not "outbuond" (did you mean "outbound"?)
    peers = [["10.0.0.1"]]
        a.toml:5:10: error: an element of `peers` is a string, not an array
    peers = ["@"]
        a.toml:5:10: error: there is no set `` (sets are defined under [sets], in any of the files)
    port = [1]
        a.toml:5:1: error: a rule has no key `port` (did you mean `ports`?)
    peer = ["10.0.0.1"]
        a.toml:5:1: error: a rule has no key `peer` (did you mean `peers`?)
    something = 1
        a.toml:5:1: error: a rule has no key `something` (its keys are name, action, direction, peers, peers_file, except, local, ports, comment, expires, trust, enabled)
    ports = [99999999999999999999999999999999999999999999]
        a.toml:5:10: error: 99999999999999999999999999999999999999999999 is not a port (ports are 1 to 65535)
    ports = [-1]
        a.toml:5:10: error: -1 is not a port (ports are 1 to 65535)
    "#);
}

#[test]
fn tables_in_the_wrong_brackets() {
    assert_snapshot!(wrong(&[
        "version = 1\n[rule]\nname = \"a\"\n",
        "version = 1\nrule = [1]\ntest = 5\n[[default]]\n",
        "version = 1\n[[sets]]\nx = []\n",
    ]), @r"
    error[wrong-type]: `rule` is a list of tables, not a table
     --> a.toml:2:1
      |
    2 | [rule]
      | ^^^^^^
      |
      = help: write [[rule]], in double brackets, before each one

    error[wrong-type]: `rule` is a list of tables, not an integer
     --> b.toml:2:9
      |
    2 | rule = [1]
      |         ^
      |
      = help: write [[rule]], in double brackets, before each one

    error[wrong-type]: `test` is a list of tables, not an integer
     --> b.toml:3:8
      |
    3 | test = 5
      |        ^
      |
      = help: write [[test]], in double brackets, before each one

    error[wrong-type]: `default` is a table, not an array
     --> b.toml:4:1
      |
    4 | [[default]]
      | ^^^^^^^^^^^
      |
      = help: write [default] on a line of its own

    error[wrong-type]: `sets` is a table, not an array
     --> c.toml:2:1
      |
    2 | [[sets]]
      | ^^^^^^^^
      |
      = help: write [sets] on a line of its own
    ");
}

#[test]
fn tests_are_checked_too() {
    assert_snapshot!(wrong(&[r#"
version = 1
[[test]]
peer = "10.0.0.1:443"
port = 443
local = "fd00::1"
direction = "both"
expect = "deny"
[[test]]
peer = "www.example.com"
local = "10.0.0.1:80"
expect = "deny"
[[test]]
port = "443"
"#]), @r#"
    error[conflict]: the port is given twice: `peer` says 443 already
     --> a.toml:5:8
      |
    5 | port = 443
      |        ^^^
      |
      = help: leave one of them out

    error[conflict]: `peer` and `local` are of different address families
     --> a.toml:6:9
      |
    6 | local = "fd00::1"
      |         ^^^^^^^^^

    error[bad-value]: `direction` is "outbound" or "inbound", not "both"
     --> a.toml:7:13
      |
    7 | direction = "both"
      |             ^^^^^^

    error[address]: `www.example.com` is a host name
      --> a.toml:10:8
       |
    10 | peer = "www.example.com"
       |        ^^^^^^^^^^^^^^^^^
       |
       = help: a policy must not depend on DNS: write its addresses, or a list of them under [sets]

    error[address]: `local` has no port of its own
      --> a.toml:11:9
       |
    11 | local = "10.0.0.1:80"
       |         ^^^^^^^^^^^^^
       |
       = help: the service port is `port`

    error[missing-key]: the test has no `peer`
      --> a.toml:13:1
       |
    13 | [[test]]
       | ^^^^^^^^
       |
       = help: write peer = "10.0.0.1"

    error[missing-key]: the test has no `expect`
      --> a.toml:13:1
       |
    13 | [[test]]
       | ^^^^^^^^
       |
       = help: write expect = "allow" or expect = "deny"

    error[wrong-type]: `port` is a number, not a string
      --> a.toml:14:8
       |
    14 | port = "443"
       |        ^^^^^
    "#);
}

#[test]
fn a_test_of_a_rule_that_could_not_be_read_is_no_second_error() {
    let found = wrong(&[
        "version = 1\n[[rule]]\nname = \"a\"\n[[test]]\npeer = \"10.0.0.1\"\nexpect = \"deny\"\nrule = \"a\"\n",
    ]);
    assert!(found.contains("no `action`") && found.matches("error").count() == 1, "{found}");
}

#[test]
fn carriage_returns_and_byte_order_marks() {
    assert_eq!(wrong(&["version = 1\r\n[[rule]]\r\nname = \"a\"\r\naction = \"deny\"\r\n"]), "nothing");
    assert_eq!(wrong(&["\u{feff}version = 1\n"]), "nothing");
    assert_snapshot!(wrong(&["version = 1\r\n[[rule]]\r\nname = \"é\"\r\naction = \"deny\" # é\r\npeers = [\"é\"]\r\n"]), @r#"
    error[name]: the name of a rule cannot be "é"
     --> a.toml:3:8
      |
    3 | name = "é"
      |        ^^^
      |
      = help: names are of a-z 0-9 -

    error[address]: `é` is a host name
     --> a.toml:5:10
      |
    5 | peers = ["é"]
      |          ^^^
      |
      = help: a policy must not depend on DNS: write its addresses, or a list of them under [sets]
    "#);
}

#[test]
fn lints() {
    assert_snapshot!(warnings(&[r#"
version = 1
[sets]
vpc = ["10.0.0.0/8", "10.1.0.0/16"]
none = []
[[rule]]
name = "first"
action = "deny"
peers = ["@vpc", "10.2.0.0/16", "192.0.2.1", "192.0.2.1"]
except = ["198.51.100.1"]
ports = [443, "400-500"]
[[rule]]
name = "second"
action = "allow"
peers = ["10.1.0.0/16"]
direction = "inbound"
ports = [443]
[[rule]]
name = "off"
action = "allow"
enabled = false
[[test]]
peer = "10.0.0.1:1"
expect = "allow"
rule = "off"
"#]), @r#"
    warning[duplicate-peers]: 10.1.0.0/16 is already part of 10.0.0.0/8 in the set `vpc`
     --> a.toml:4:22
      |
    4 | vpc = ["10.0.0.0/8", "10.1.0.0/16"]
      |        ------------  ^^^^^^^^^^^^^
      |        |
      |        here

    warning[empty-set]: the set `none` is empty
     --> a.toml:5:1
      |
    5 | none = []
      | ^^^^
      |
      = help: a rule whose peers are this set matches nothing

    warning[unused-set]: no rule uses the set `none`
     --> a.toml:5:1
      |
    5 | none = []
      | ^^^^

    warning[duplicate-peers]: 10.2.0.0/16 is already part of "@vpc" in `peers`
     --> a.toml:9:18
      |
    9 | peers = ["@vpc", "10.2.0.0/16", "192.0.2.1", "192.0.2.1"]
      |          ------  ^^^^^^^^^^^^^
      |          |
      |          here

    warning[duplicate-peers]: 192.0.2.1 is listed twice in `peers`
     --> a.toml:9:46
      |
    9 | peers = ["@vpc", "10.2.0.0/16", "192.0.2.1", "192.0.2.1"]
      |                                 -----------  ^^^^^^^^^^^
      |                                 |
      |                                 here

    warning[useless-except]: `except` carves out nothing
      --> a.toml:10:10
       |
    10 | except = ["198.51.100.1"]
       |          ^^^^^^^^^^^^^^^^
       |
       = help: none of these addresses is in `peers`

    warning[duplicate-ports]: 443 is already part of 400-500 in `ports`
      --> a.toml:11:10
       |
    11 | ports = [443, "400-500"]
       |          ^^^  --------- here

    warning[never-matches]: rule `second` can never match: `first` decides before it
      --> a.toml:12:1
       |
     6 | [[rule]]
       | -------- decides first
    ...
    12 | [[rule]]
       | ^^^^^^^^
       |
       = help: the first rule that matches wins: move this one up, or remove it

    warning[disabled-rule]: the test expects rule `off`, which is not enabled
      --> a.toml:25:8
       |
    18 | [[rule]]
       | -------- enabled = false
    ...
    25 | rule = "off"
       |        ^^^^^
    "#);
}

#[test]
fn why_a_rule_never_matches() {
    let text = |rules: &str| format!("version = 1\n[sets]\nnone = []\nten = [\"10.0.0.0/8\"]\n{rules}");
    let never = |rules: &str| {
        let files = files(&[&text(rules)]);
        let found = load(&files, arbitrary::NOW).unwrap().warnings;
        let never =
            found.iter().filter(|lint| lint.code == Code::NeverMatches).map(|lint| lint.message.clone());
        never.collect::<Vec<_>>().join("\n")
    };
    let rule = |name: &str, lines: &str| format!("[[rule]]\nname = \"{name}\"\naction = \"deny\"\n{lines}\n");
    assert_snapshot!(never(&rule("a", "peers = [\"@none\"]")), @"rule `a` can never match: its `peers` are empty");
    assert_snapshot!(never(&rule("a", "peers = [\"10.1.0.0/16\"]\nexcept = [\"@ten\"]")), @"rule `a` can never match: `except` carves out all of its peers");
    assert_snapshot!(never(&rule("a", "local = [\"@none\"]")), @"rule `a` can never match: its `local` is empty");
    assert_snapshot!(never(&rule("a", "peers = [\"10.0.0.1\"]\nlocal = [\"fd00::1\"]")), @"rule `a` can never match: its `peers` and `local` are of different address families");
    let halves = rule("low", "peers = [\"0.0.0.0/1\"]\ndirection = \"outbound\"")
        + &rule("high", "peers = [\"128.0.0.0/1\"]\nports = [\"1-1000\"]")
        + &rule("higher", "peers = [\"128.0.0.0/1\"]\nports = [\"1000-65535\"]");
    assert_snapshot!(never(&(halves.clone() + &rule("x", "peers = [\"0.0.0.0/0\"]\ndirection = \"outbound\"\nports = [80, 2000]"))), @"rule `x` can never match: `low`, `high` and `higher` decide before it");
    assert_snapshot!(never(&(halves.clone() + &rule("x", "peers = [\"0.0.0.0/0\"]\nports = [80]"))), @"");
    let all: String = ["1", "2", "3", "4"]
        .iter()
        .map(|port| rule(&format!("p{port}"), &format!("ports = [{port}]")))
        .collect();
    assert_snapshot!(never(&(all + &rule("x", "ports = [\"1-4\"]"))), @"rule `x` can never match: `p1`, `p2`, `p3` and others decide before it");
    // IPv4-mapped addresses are no IPv6 addresses: nothing is left of ::/0 without both sides of them.
    let v6 = rule("below", "peers = [\"::-::fffe:ffff:ffff\", \"0.0.0.0/0\"]")
        + &rule("above", "peers = [\"::1:0:0:0-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff\"]");
    assert_snapshot!(never(&(v6 + &rule("x", ""))), @"rule `x` can never match: `below` and `above` decide before it");
}

#[test]
fn a_list_with_many_repetitions_is_told_once() {
    let text = format!(
        "version = 1\n[[rule]]\nname = \"a\"\naction = \"deny\"\npeers = [\"10.0.0.0/8\"{}]\n",
        ", \"10.0.0.1\"".repeat(1000)
    );
    let files = files(&[&text]);
    let found = load(&files, arbitrary::NOW).unwrap().warnings;
    assert_eq!(found.len(), 8);
    assert_eq!(found[7].help.as_deref(), Some("992 more in this list"));
}

#[test]
fn as_data() {
    let files =
        files(&["version = 1\n[[rule]]\nname = \"é\"\naction = \"deny\"\npeers = [\"é\", \"10.0.0.1/8\"]\n"]);
    let records: Vec<_> =
        load(&files, arbitrary::NOW).unwrap_err().iter().map(|found| found.record(&files)).collect();
    assert_snapshot!(serde_json::to_string_pretty(&records).unwrap(), @r#"
    [
      {
        "file": "a.toml",
        "line": 3,
        "column": 8,
        "severity": "error",
        "code": "name",
        "message": "the name of a rule cannot be \"é\"",
        "label": null,
        "help": "names are of a-z 0-9 -"
      },
      {
        "file": "a.toml",
        "line": 5,
        "column": 10,
        "severity": "error",
        "code": "address",
        "message": "`é` is a host name",
        "label": null,
        "help": "a policy must not depend on DNS: write its addresses, or a list of them under [sets]"
      },
      {
        "file": "a.toml",
        "line": 5,
        "column": 15,
        "severity": "error",
        "code": "address",
        "message": "10.0.0.1/8 has host bits set",
        "label": null,
        "help": "did you mean 10.0.0.0/8? a single address is written 10.0.0.1"
      }
    ]
    "#);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,200}", lines in "([a-z]{0,8} ?[=\\[\\]\"{},.0-9@/:-]{0,12}\n?){0,20}") {
        for text in [text, lines] {
            let files = files(&[&text]);
            let found = load(&files, arbitrary::NOW).map(|loaded| loaded.warnings).unwrap_or_else(|found| found);
            let records: Vec<_> = found.iter().map(|found| found.record(&files).to_string()).collect();
            prop_assert_eq!(records.is_empty(), render(&found, &files, true).is_empty());
        }
    }

    #[test]
    fn any_change_of_a_policy_is_read_or_refused(seed in any::<u64>()) {
        let random = &mut Random::new(seed);
        let text = arbitrary::policy(seed % 64);
        let tests = "\n[[test]]\npeer = \"10.0.0.1:80\"\nlocal = \"10.0.0.2\"\nexpect = \"deny\"\nrule = \"r0\"\n";
        for _ in 0..4 {
            let text = arbitrary::mutate(&(text.clone() + tests), random);
            let files = files(&[&text, "version = 1\n[sets]\ns0 = [\"@s1\"]\n"]);
            match load(&files, arbitrary::NOW) {
                Ok(loaded) => { run_tests(&loaded.policy); }
                Err(found) => {
                    prop_assert!(!found.is_empty());
                    prop_assert!(!render(&found, &files, false).is_empty());
                    for found in &found {
                        let record = found.record(&files);
                        prop_assert!(record.line >= 1 && record.column >= 1);
                        prop_assert!(record.line <= files[found.place.file].text.lines().count() + 1);
                    }
                }
            }
        }
    }
}

#[test]
fn a_config_is_told_as_one() {
    assert_snapshot!(wrong(&["# mine\nhook = \"tc\"\n[interfaces]\ninclude = [\"lo\"]\n"]), @r#"
    error[unknown-key]: a policy file has no key `hook`
     --> a.toml:2:1
      |
    2 | hook = "tc"
      | ^^^^
      |
      = help: this is a config.toml: it belongs beside policy.d, or is named with --config
    "#);
    assert_snapshot!(wrong(&["version = 1\nmode = \"observe\"\n"]), @r#"
    error[unknown-key]: a policy file has no key `mode`
     --> a.toml:2:1
      |
    2 | mode = "observe"
      | ^^^^
      |
      = help: `mode` belongs in config.toml
    "#);
}
