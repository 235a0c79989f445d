use std::fmt::Write;

use insta::assert_snapshot;
use proptest::{collection::vec, prelude::*};

use super::*;
use crate::policy::{
    SourceFile,
    diagnostic::{Severity, render},
};

fn file(text: &str) -> [SourceFile; 1] {
    [SourceFile::policy("config.toml", text.to_owned())]
}

/// Everything that is wrong or odd, as printed.
fn said(text: &str) -> String {
    let found = parse(0, text).map(|parsed| parsed.warnings).unwrap_or_else(|found| found);
    render(&found, &file(text), false)
}

/// The same, a line for each finding.
fn lines(texts: &[&str]) -> String {
    let mut out = Vec::new();
    for text in texts {
        let found = parse(0, text).map(|parsed| parsed.warnings).unwrap_or_else(|found| found);
        out.push(format!("{text:?}"));
        for finding in found {
            let help = finding.help.as_ref().map(|help| format!(" ({help})")).unwrap_or_default();
            out.push(format!("  {}{help}", finding.record(&file(text))));
        }
    }
    out.join("\n")
}

fn read(text: &str) -> Config {
    let parsed = parse(0, text).unwrap_or_else(|found| panic!("{}", render(&found, &file(text), false)));
    let lints = parsed.warnings.iter().all(|lint| lint.severity == Severity::Warning && lint.code.is_lint());
    assert!(lints, "{:?}", parsed.warnings);
    parsed.config
}

#[test]
fn an_empty_file_is_the_default() {
    for text in ["", "\n# nothing\n", "[interfaces]\n", "magic = []\n"] {
        assert_eq!(read(text), Config::default(), "{text}");
        assert_eq!(said(text), "");
    }
}

#[test]
fn the_whole_file() {
    let text = r#"
hook = "tc"
mode = "observe"
retransmit = "keep"
forwarded = true
guard = "canary"
on_echo = "learn-only"
cgroups = ["/sys/fs/cgroup/a.slice/", "/sys/fs/cgroup/a.slice2"]
namespaces = ["host", "blue"]

[interfaces]
include = ["eth*", "lo", "bond?.100"]
exclude = ["eth9"]

[[magic]]
syn = "01020304"

[[magic]]
syn = "e2d4c3d9"
syn_ack = "E2D4C3DA"

[[magic]]
syn = "01020304"
syn_ack = "01020305"
"#;
    assert_eq!(said(text), "");
    let texts = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        read(text),
        Config {
            hook: HookChoice::Tc,
            observe: true,
            interfaces: Interfaces {
                include: texts(&["eth*", "lo", "bond?.100"]),
                exclude: texts(&["eth9"]),
            },
            namespaces: Namespaces::Named(texts(&["host", "blue"])),
            plain_retransmissions: false,
            forwarded: true,
            magics: vec![
                Magic { syn: 0x0102_0304, syn_ack: 0x0102_0304 },
                Magic { syn: SMC_MAGIC, syn_ack: 0xe2d4_c3da },
                Magic { syn: 0x0102_0304, syn_ack: 0x0102_0305 },
            ],
            guard: Guard::Canary,
            on_echo: OnEcho::LearnOnly,
            cgroups: vec!["/sys/fs/cgroup/a.slice".into(), "/sys/fs/cgroup/a.slice2".into()],
        }
    );
}

#[test]
fn cgroups_that_are_none() {
    let text = r#"
guard = "canari"
on_echo = "learn"
cgroups = ["system.slice", 5, "/sys/fs/cgroup/../a", "/a/b", "/a/b/", "/a/b/c", "/a"]
"#;
    insta::assert_snapshot!(said(text), @r#"
    error[bad-value]: `guard` is "canary" or "learn" or "off", not "canari"
     --> config.toml:2:9
      |
    2 | guard = "canari"
      |         ^^^^^^^^
      |
      = help: did you mean "canary"?

    error[bad-value]: `on_echo` is "blank" or "learn-only", not "learn"
     --> config.toml:3:11
      |
    3 | on_echo = "learn"
      |           ^^^^^^^

    error[name]: "system.slice" is no absolute path
     --> config.toml:4:12
      |
    4 | cgroups = ["system.slice", 5, "/sys/fs/cgroup/../a", "/a/b", "/a/b/", "/a/b/c", "/a"]
      |            ^^^^^^^^^^^^^^
      |
      = help: write the whole path, as "/sys/fs/cgroup/system.slice"

    error[wrong-type]: an element of `cgroups` is a string, not an integer
     --> config.toml:4:28
      |
    4 | cgroups = ["system.slice", 5, "/sys/fs/cgroup/../a", "/a/b", "/a/b/", "/a/b/c", "/a"]
      |                            ^

    error[name]: "/sys/fs/cgroup/../a" is not written out
     --> config.toml:4:31
      |
    4 | cgroups = ["system.slice", 5, "/sys/fs/cgroup/../a", "/a/b", "/a/b/", "/a/b/c", "/a"]
      |                               ^^^^^^^^^^^^^^^^^^^^^
      |
      = help: write the path without `.` and `..`

    error[duplicate]: this cgroup is listed already
     --> config.toml:4:62
      |
    4 | cgroups = ["system.slice", 5, "/sys/fs/cgroup/../a", "/a/b", "/a/b/", "/a/b/c", "/a"]
      |                                                      ------  ^^^^^^^
      |                                                      |
      |                                                      the first time
      |
      = help: a cgroup stands for all below it: leave the inner one out

    error[duplicate]: this cgroup is part of another one in the list
     --> config.toml:4:71
      |
    4 | cgroups = ["system.slice", 5, "/sys/fs/cgroup/../a", "/a/b", "/a/b/", "/a/b/c", "/a"]
      |                                                      ------           ^^^^^^^^
      |                                                      |
      |                                                      of this one
      |
      = help: a cgroup stands for all below it: leave the inner one out

    error[duplicate]: another cgroup in the list is part of this one
     --> config.toml:4:81
      |
    4 | cgroups = ["system.slice", 5, "/sys/fs/cgroup/../a", "/a/b", "/a/b/", "/a/b/c", "/a"]
      |                                                      ------ this one            ^^^^
      |
      = help: a cgroup stands for all below it: leave the inner one out
    "#);
    insta::assert_snapshot!(said("cgroups = []\n"), @r#"
    error[bad-value]: `cgroups` is an empty list
     --> config.toml:1:11
      |
    1 | cgroups = []
      |           ^^
      |
      = help: leave `cgroups` out to mark the SYNs of all processes, or write guard = "off"
    "#);
    insta::assert_snapshot!(said("cgroups = \"/sys/fs/cgroup\"\n"), @r#"
    error[wrong-type]: `cgroups` is a list, not a string
     --> config.toml:1:11
      |
    1 | cgroups = "/sys/fs/cgroup"
      |           ^^^^^^^^^^^^^^^^
      |
      = help: write cgroups = ["/sys/fs/cgroup"]
    "#);
}

#[test]
fn each_key_on_its_own() {
    assert_eq!(read("hook = \"hs_ctrl\"").hook, HookChoice::HsCtrl);
    assert!(!read("mode = \"enforce\"").observe && read("mode = \"observe\"").observe);
    assert_eq!(read("guard = \"off\"").guard, Guard::Off);
    assert_eq!(read("guard = \"canary\"").guard, Guard::Canary);
    assert_eq!(read("on_echo = \"blank\"").on_echo, OnEcho::Blank);
    assert_eq!(read("on_echo = \"learn-only\"").on_echo, OnEcho::LearnOnly);
    assert_eq!(read("cgroups = [\"/a\"]").cgroups, [PathBuf::from("/a")]);
    assert_eq!(read("guard = \"learn\"").guard, Guard::Learn);
    assert!(read("retransmit = \"plain\"").plain_retransmissions);
    assert!(!read("retransmit = \"keep\"").plain_retransmissions);
    assert!(read("forwarded = true").forwarded && !read("forwarded = false").forwarded);
    assert_eq!(read("namespaces = \"all\"").namespaces, Namespaces::All);
    assert_eq!(read("namespaces = \"host\"").namespaces, Namespaces::Host);
    assert_eq!(read("namespaces = [\"host\"]").namespaces, Namespaces::Host, "the same, said longer");
    assert_eq!(read("namespaces = [\"b\"]").namespaces, Namespaces::Named(vec!["b".to_owned()]));
    assert_eq!(read("interfaces.exclude = []").interfaces, Interfaces::default());
    assert_eq!(read("interfaces = { include = [\"lo\"] }").interfaces.include, ["lo"]);
    assert_eq!(read("[interfaces]\nexclude = [\"*\"]").interfaces.exclude, ["*"]);
}

#[test]
fn names_at_their_limits() {
    let longest = "n".repeat(255);
    assert_eq!(read(&format!("namespaces = [\"{longest}\"]")).namespaces, Namespaces::Named(vec![longest]));
    assert_eq!(read("interfaces.include = [\"abcdefghijklmn?\"]").interfaces.include[0].len(), 15);
}

#[test]
fn all_errors_at_once() {
    assert_snapshot!(said(r#"
hok = "tc"
mode = "observ"
retransmit = true
forwarded = "yes"
namespaces = ["blue", "blue", "a/b", 7]

[interfaces]
include = []
exclude = ["veth*", "eth0/1"]

[[magic]]
syn = 0xe2d4c3d9

[[magic]]
syn_ack = "e2d4"
"#), @r#"
    error[unknown-key]: a config file has no key `hok`
     --> config.toml:2:1
      |
    2 | hok = "tc"
      | ^^^
      |
      = help: did you mean `hook`?

    error[bad-value]: `mode` is "enforce" or "observe", not "observ"
     --> config.toml:3:8
      |
    3 | mode = "observ"
      |        ^^^^^^^^
      |
      = help: did you mean "observe"?

    error[wrong-type]: `retransmit` is "plain" or "keep", not a boolean
     --> config.toml:4:14
      |
    4 | retransmit = true
      |              ^^^^

    error[wrong-type]: `forwarded` is true or false, not a string
     --> config.toml:5:13
      |
    5 | forwarded = "yes"
      |             ^^^^^
      |
      = help: without quotes

    error[duplicate]: the namespace `blue` is listed already
     --> config.toml:6:23
      |
    6 | namespaces = ["blue", "blue", "a/b", 7]
      |               ------  ^^^^^^
      |               |
      |               the first time
      |
      = help: leave one of them out

    error[name]: the name of a namespace cannot be "a/b"
     --> config.toml:6:31
      |
    6 | namespaces = ["blue", "blue", "a/b", 7]
      |                               ^^^^^
      |
      = help: a name as `ip netns list` shows it: a file in /run/netns

    error[wrong-type]: an element of `namespaces` is a string, not an integer
     --> config.toml:6:38
      |
    6 | namespaces = ["blue", "blue", "a/b", 7]
      |                                      ^

    error[bad-value]: `include` is an empty list
     --> config.toml:9:11
      |
    9 | include = []
      |           ^^
      |
      = help: leave `include` out for every device with an address

    error[name]: no device can be named "eth0/1"
      --> config.toml:10:21
       |
    10 | exclude = ["veth*", "eth0/1"]
       |                     ^^^^^^^^
       |
       = help: a name as `ip link` shows it: without / and :

    error[wrong-type]: `syn` is a string of 8 hex digits, not an integer
      --> config.toml:13:7
       |
    13 | syn = 0xe2d4c3d9
       |       ^^^^^^^^^^
       |
       = help: write syn = "e2d4c3d9"

    error[missing-key]: the magic has no `syn`
      --> config.toml:15:1
       |
    15 | [[magic]]
       | ^^^^^^^^^
       |
       = help: write syn = "e2d4c3d9", with the digits of the SYN's option

    error[bad-value]: `e2d4` is not 8 hex digits
      --> config.toml:16:11
       |
    16 | syn_ack = "e2d4"
       |           ^^^^^^
       |
       = help: the four bytes of the option after kind and length
    "#);
}

#[test]
fn values_that_are_refused_and_what_to_write_instead() {
    assert_snapshot!(lines(&[
        "hook = \"tcx\"",
        "hook = \"HS_CTRL\"",
        "hook = \"netfilter\"",
        "mode = \"off\"",
        "retransmit = \"keep \"",
        "forwarded = 1",
    ]), @r#"
    "hook = \"tcx\""
      config.toml:1:8: error: `hook` is "auto" or "hs_ctrl" or "tc", not "tcx" (did you mean "tc"?)
    "hook = \"HS_CTRL\""
      config.toml:1:8: error: `hook` is "auto" or "hs_ctrl" or "tc", not "HS_CTRL" (did you mean "hs_ctrl"?)
    "hook = \"netfilter\""
      config.toml:1:8: error: `hook` is "auto" or "hs_ctrl" or "tc", not "netfilter"
    "mode = \"off\""
      config.toml:1:8: error: `mode` is "enforce" or "observe", not "off"
    "retransmit = \"keep \""
      config.toml:1:14: error: `retransmit` is "plain" or "keep", not "keep " (did you mean "keep"?)
    "forwarded = 1"
      config.toml:1:13: error: `forwarded` is true or false, not an integer
    "#);
}

#[test]
fn namespaces_that_are_refused() {
    let long = format!("namespaces = [\"{}\"]", "n".repeat(256));
    assert_snapshot!(lines(&[
        "namespaces = \"blue\"",
        "namespaces = \"/run/netns/blue\"",
        "namespaces = true",
        "namespaces = []",
        "namespaces = [\"host\", \"all\"]",
        "namespaces = [\"/var/run/netns/blue\", \"/run/netns/a/b\", \"/proc/1/ns/net\"]",
        "namespaces = [\"\", \".\", \"..\", \"a\\u0000\"]",
        "namespaces = [\"a\", [\"b\"]]",
    ]), @r#"
    "namespaces = \"blue\""
      config.toml:1:14: error: `namespaces` is "host", "all" or a list of names, not "blue" (a list is written namespaces = ["blue"])
    "namespaces = \"/run/netns/blue\""
      config.toml:1:14: error: `namespaces` is "host", "all" or a list of names, not "/run/netns/blue" (a list is written namespaces = ["blue"])
    "namespaces = true"
      config.toml:1:14: error: `namespaces` is "host", "all" or a list of names, not a boolean (its names are those of `ip netns list`)
    "namespaces = []"
      config.toml:1:14: error: `namespaces` is an empty list (leave `namespaces` out to stay in the namespace that the tool runs in)
    "namespaces = [\"host\", \"all\"]"
      config.toml:1:23: error: "all" does not stand in a list (for every namespace write namespaces = "all")
    "namespaces = [\"/var/run/netns/blue\", \"/run/netns/a/b\", \"/proc/1/ns/net\"]"
      config.toml:1:15: error: the name of a namespace cannot be "/var/run/netns/blue" (names have no folder: "blue")
      config.toml:1:38: error: the name of a namespace cannot be "/run/netns/a/b" (a name as `ip netns list` shows it: a file in /run/netns)
      config.toml:1:56: error: the name of a namespace cannot be "/proc/1/ns/net" (a name as `ip netns list` shows it: a file in /run/netns)
    "namespaces = [\"\", \".\", \"..\", \"a\\u0000\"]"
      config.toml:1:15: error: the name of a namespace cannot be "" (a name as `ip netns list` shows it: a file in /run/netns)
      config.toml:1:19: error: the name of a namespace cannot be "." (a name as `ip netns list` shows it: a file in /run/netns)
      config.toml:1:24: error: the name of a namespace cannot be ".." (a name as `ip netns list` shows it: a file in /run/netns)
      config.toml:1:30: error: the name of a namespace cannot be "a\0" (a name as `ip netns list` shows it: a file in /run/netns)
    "namespaces = [\"a\", [\"b\"]]"
      config.toml:1:20: error: an element of `namespaces` is a string, not an array
    "#);
    assert_snapshot!(lines(&[&long]).replace(&"n".repeat(256), "n{256}"), @r#"
    "namespaces = [\"n{256}\"]"
      config.toml:1:15: error: the name of a namespace is longer than 255 bytes (it has 256; a name as `ip netns list` shows it: a file in /run/netns)
    "#);
}

#[test]
fn interfaces_that_are_no_table() {
    assert_snapshot!(lines(&[
        "interfaces = [\"eth0\", \"lo\"]",
        "interfaces = \"eth0\"",
        "interfaces = []",
        "interfaces = true",
        "[[interfaces]]\ninclude = [\"lo\"]",
    ]), @r#"
    "interfaces = [\"eth0\", \"lo\"]"
      config.toml:1:14: error: `interfaces` is a table, not an array (write [interfaces] on a line of its own, and below it include = ["eth0", "lo"])
    "interfaces = \"eth0\""
      config.toml:1:14: error: `interfaces` is a table, not a string (write [interfaces] on a line of its own, and below it include = ["eth0"])
    "interfaces = []"
      config.toml:1:14: error: `interfaces` is a table, not an array (write [interfaces] on a line of its own, and below it include = ["eth*"])
    "interfaces = true"
      config.toml:1:14: error: `interfaces` is a table, not a boolean (write [interfaces] on a line of its own, and below it include = ["eth*"])
    "[[interfaces]]\ninclude = [\"lo\"]"
      config.toml:1:1: error: `interfaces` is a table, not an array (write [interfaces], in single brackets, once)
    "#);
}

#[test]
fn patterns_that_no_device_matches() {
    let of = |pattern: &str| format!("interfaces.include = [\"{pattern}\"]");
    let texts = [
        "",
        ".",
        "..",
        "eth0 ",
        "eth0, eth1",
        "eth 0",
        " ",
        "a/b",
        "eth0:1",
        "eth0:x",
        "abcdefghijklmnop",
        "a\\u000b",
        "a\\u0000",
        "a\\u00e0",
    ];
    let texts: Vec<String> = texts.into_iter().map(of).collect();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    assert_snapshot!(lines(&texts), @r#"
    "interfaces.include = [\"\"]"
      config.toml:1:23: error: the pattern is empty ("*" is every device)
    "interfaces.include = [\".\"]"
      config.toml:1:23: error: no device can be named "." (a name as `ip link` shows it)
    "interfaces.include = [\"..\"]"
      config.toml:1:23: error: no device can be named ".." (a name as `ip link` shows it)
    "interfaces.include = [\"eth0 \"]"
      config.toml:1:23: error: no device can be named "eth0 " (without spaces: "eth0")
    "interfaces.include = [\"eth0, eth1\"]"
      config.toml:1:23: error: no device can be named "eth0, eth1" (one name an element: "eth0", "eth1")
    "interfaces.include = [\"eth 0\"]"
      config.toml:1:23: error: no device can be named "eth 0" (one name an element: "eth", "0")
    "interfaces.include = [\" \"]"
      config.toml:1:23: error: no device can be named " " (a name as `ip link` shows it)
    "interfaces.include = [\"a/b\"]"
      config.toml:1:23: error: no device can be named "a/b" (a name as `ip link` shows it: without / and :)
    "interfaces.include = [\"eth0:1\"]"
      config.toml:1:23: error: no device can be named "eth0:1" (what looks like a second device is an address of "eth0")
    "interfaces.include = [\"eth0:x\"]"
      config.toml:1:23: error: no device can be named "eth0:x" (a name as `ip link` shows it: without / and :)
    "interfaces.include = [\"abcdefghijklmnop\"]"
      config.toml:1:23: error: `abcdefghijklmnop` is longer than the name of a device can be (at most 15 bytes; "*" is any number of characters)
    "interfaces.include = [\"a\\u000b\"]"
      config.toml:1:23: error: no device can be named "a\u{b}" (without spaces: "a")
    "interfaces.include = [\"a\\u0000\"]"
      config.toml:1:23: error: no device can be named "a\0" (a name as `ip link` shows it: without / and :)
    "interfaces.include = [\"a\\u00e0\"]"
      config.toml:1:23: error: no device can be named "aà" (a name as `ip link` shows it)
    "#);
    assert_snapshot!(lines(&[
        "interfaces.include = \"eth*\"",
        "interfaces.exclude = [1, \"lo\"]",
    ]), @r#"
    "interfaces.include = \"eth*\""
      config.toml:1:22: error: `include` is a list, not a string (write include = ["eth*"])
    "interfaces.exclude = [1, \"lo\"]"
      config.toml:1:23: error: an element of `exclude` is a string, not an integer
    "#);
}

#[test]
fn patterns_that_mean_something_else() {
    assert_snapshot!(said("[interfaces]\ninclude = [\"eth[0-3]\", \"eth4@if7\", \"a,b\", \"!lo\"]\n"), @r#"
    warning[plain-character]: `[` stands for itself in a pattern
     --> config.toml:2:12
      |
    2 | include = ["eth[0-3]", "eth4@if7", "a,b", "!lo"]
      |            ^^^^^^^^^^
      |
      = help: only * (any number of characters) and ? (one) are wildcards

    warning[plain-character]: `@` stands for itself in a pattern
     --> config.toml:2:24
      |
    2 | include = ["eth[0-3]", "eth4@if7", "a,b", "!lo"]
      |                        ^^^^^^^^^^
      |
      = help: `ip link` shows where a device leads to: its name is "eth4"

    warning[plain-character]: `,` stands for itself in a pattern
     --> config.toml:2:36
      |
    2 | include = ["eth[0-3]", "eth4@if7", "a,b", "!lo"]
      |                                    ^^^^^
      |
      = help: one name an element: "a", "b"

    warning[plain-character]: `!` stands for itself in a pattern
     --> config.toml:2:43
      |
    2 | include = ["eth[0-3]", "eth4@if7", "a,b", "!lo"]
      |                                           ^^^^^
      |
      = help: only * (any number of characters) and ? (one) are wildcards
    "#);
}

#[test]
fn patterns_that_say_nothing_new() {
    assert_snapshot!(said(
        "[interfaces]\ninclude = [\"eth0\", \"eth*\", \"eth?\", \"lo\", \"lo\", \"veth?*\"]\nexclude = [\"v*\"]\n"
    ), @r#"
    warning[duplicate-patterns]: `eth0` is part of `eth*`
     --> config.toml:2:12
      |
    2 | include = ["eth0", "eth*", "eth?", "lo", "lo", "veth?*"]
      |            ^^^^^^  ------ this one covers it
      |
      = help: leave it out

    warning[duplicate-patterns]: `eth?` is part of `eth*`
     --> config.toml:2:28
      |
    2 | include = ["eth0", "eth*", "eth?", "lo", "lo", "veth?*"]
      |                    ------  ^^^^^^
      |                    |
      |                    this one covers it
      |
      = help: leave it out

    warning[duplicate-patterns]: `lo` is listed already
     --> config.toml:2:42
      |
    2 | include = ["eth0", "eth*", "eth?", "lo", "lo", "veth?*"]
      |                                    ----  ^^^^
      |                                    |
      |                                    this one covers it
      |
      = help: leave it out

    warning[never-matches]: `veth?*` never gets programs
     --> config.toml:2:48
      |
    2 | include = ["eth0", "eth*", "eth?", "lo", "lo", "veth?*"]
      |                                                ^^^^^^^^
    3 | exclude = ["v*"]
      |            ---- excludes it
      |
      = help: `exclude` goes before `include`
    "#);
}

#[test]
fn magics_that_are_refused() {
    assert_snapshot!(lines(&[
        "magic = \"e2d4c3da\"",
        "[magic]\nsyn = \"e2d4c3da\"",
        "[[magic]]",
        "[[magic]]\nsyn = \"0xE2D4C3DA\"",
        "[[magic]]\nsyn = \"e2 d4 c3 da\"",
        "[[magic]]\nsyn = \"e2d4c3\"",
        "[[magic]]\nsyn = \"+2d4c3da\"",
        "[[magic]]\nsyn = 0x1a",
        "[[magic]]\nsyn = 12345678",
        "[[magic]]\nsyn = 1.5",
        "[[magic]]\nsyn = \"00000000\"",
        "[[magic]]\nsyn = \"01020304\"\nsyn_ack = \"00000000\"",
        "[[magic]]\nsyn = \"e2d4c3d9\"",
        "[[magic]]\nsyn = \"e2d4c3da\"\nack = \"e2d4c3da\"",
    ]), @r#"
    "magic = \"e2d4c3da\""
      config.toml:1:9: error: `magic` is a list of tables, not a string (write [[magic]], in double brackets, before each one)
    "[magic]\nsyn = \"e2d4c3da\""
      config.toml:1:1: error: `magic` is a list of tables, not a table (write [[magic]], in double brackets, before each one)
    "[[magic]]"
      config.toml:1:1: error: the magic has no `syn` (write syn = "e2d4c3d9", with the digits of the SYN's option)
    "[[magic]]\nsyn = \"0xE2D4C3DA\""
      config.toml:2:7: error: `0xE2D4C3DA` is not 8 hex digits (write syn = "e2d4c3da")
    "[[magic]]\nsyn = \"e2 d4 c3 da\""
      config.toml:2:7: error: `e2 d4 c3 da` is not 8 hex digits (write syn = "e2d4c3da")
    "[[magic]]\nsyn = \"e2d4c3\""
      config.toml:2:7: error: `e2d4c3` is not 8 hex digits (the four bytes of the option after kind and length)
    "[[magic]]\nsyn = \"+2d4c3da\""
      config.toml:2:7: error: `+2d4c3da` is not 8 hex digits (the four bytes of the option after kind and length)
    "[[magic]]\nsyn = 0x1a"
      config.toml:2:7: error: `syn` is a string of 8 hex digits, not an integer (write syn = "0000001a")
    "[[magic]]\nsyn = 12345678"
      config.toml:2:7: error: `syn` is a string of 8 hex digits, not an integer (write syn = "12345678")
    "[[magic]]\nsyn = 1.5"
      config.toml:2:7: error: `syn` is a string of 8 hex digits, not a float (write syn = "e2d4c3d9")
    "[[magic]]\nsyn = \"00000000\""
      config.toml:2:7: error: a magic cannot be 0 (the four bytes of the option after kind and length)
    "[[magic]]\nsyn = \"01020304\"\nsyn_ack = \"00000000\""
      config.toml:3:11: error: a magic cannot be 0 (the four bytes of the option after kind and length)
    "[[magic]]\nsyn = \"e2d4c3d9\""
      config.toml:2:7: error: e2d4c3d9 is the standard magic, which is known (leave this [[magic]] out, or give the `syn_ack` that differs)
    "[[magic]]\nsyn = \"e2d4c3da\"\nack = \"e2d4c3da\""
      config.toml:3:1: error: [[magic]] has no key `ack` (its keys are syn, syn_ack)
    "#);
    let of = |syn: u32| format!("[[magic]]\nsyn = \"{syn:08x}\"\n");
    assert_snapshot!(said(&[of(1), of(2), of(1)].concat()), @r#"
    error[duplicate]: this magic is given already
     --> config.toml:6:7
      |
    2 | syn = "00000001"
      |       ---------- the first time
    ...
    6 | syn = "00000001"
      |       ^^^^^^^^^^
      |
      = help: leave one of them out
    "#);
    assert_snapshot!(said(&[of(1), of(2), of(3), of(4), of(5)].concat()), @r#"
    error[too-large]: there are more than 3 further magics
     --> config.toml:7:1
      |
    7 | [[magic]]
      | ^^^^^^^^^
      |
      = help: the kernel's tables have no room for more: leave this one out
    "#);
}

#[test]
fn keys_in_the_wrong_place() {
    assert_snapshot!(lines(&[
        "mode = \"observe\"\ninclude = [\"lo\"]\nsyn = \"e2d4c3da\"",
        "[interfaces]\ninclude = [\"lo\"]\nmode = \"observe\"",
        "[[magic]]\nsyn = \"e2d4c3da\"\nnamespaces = \"all\"",
        "version = 1\nmode = \"observe\"",
        "mode = \"observe\"\n[[rule]]\nname = \"x\"",
        "colour = \"red\"",
        "interface.include = [\"lo\"]",
    ]), @r#"
    "mode = \"observe\"\ninclude = [\"lo\"]\nsyn = \"e2d4c3da\""
      config.toml:2:1: error: a config file has no key `include` (`include` belongs under [interfaces])
      config.toml:3:1: error: a config file has no key `syn` (`syn` belongs under [[magic]])
    "[interfaces]\ninclude = [\"lo\"]\nmode = \"observe\""
      config.toml:3:1: error: [interfaces] has no key `mode` (`mode` is of the whole file: write it above the first [header])
    "[[magic]]\nsyn = \"e2d4c3da\"\nnamespaces = \"all\""
      config.toml:3:1: error: [[magic]] has no key `namespaces` (`namespaces` is of the whole file: write it above the first [header])
    "version = 1\nmode = \"observe\""
      config.toml:1:1: error: a config file has no key `version` (it needs no version: leave it out)
    "mode = \"observe\"\n[[rule]]\nname = \"x\""
      config.toml:2:3: error: a config file has no key `rule` (`rule` belongs in a policy file)
    "colour = \"red\""
      config.toml:1:1: error: a config file has no key `colour` (its keys are hook, mode, guard, on_echo, cgroups, retransmit, forwarded, namespaces, interfaces, magic)
    "interface.include = [\"lo\"]"
      config.toml:1:1: error: a config file has no key `interface` (did you mean `interfaces`?)
    "#);
}

#[test]
fn a_policy_is_told_as_one() {
    assert_snapshot!(said("version = 1\n[[rule]]\nname = \"x\"\naction = \"deny\"\n"), @r#"
    error[unknown-key]: a config file has no key `version`
     --> config.toml:1:1
      |
    1 | version = 1
      | ^^^^^^^
      |
      = help: this is a policy: it belongs in policy.d, or is named without --config
    "#);
}

#[test]
fn what_only_tc_uses() {
    assert_snapshot!(said(
        "hook = \"hs_ctrl\"\nforwarded = true\nguard = \"off\"\n[interfaces]\nexclude = [\"lo\"]\n[[magic]]\nsyn = \"e2d4c3da\"\n"
    ), @r#"
    warning[unused-setting]: only tc uses `forwarded`
     --> config.toml:2:1
      |
    1 | hook = "hs_ctrl"
      |        --------- this hook does not
    2 | forwarded = true
      | ^^^^^^^^^

    warning[unused-setting]: only tc uses `interfaces`
     --> config.toml:4:2
      |
    1 | hook = "hs_ctrl"
      |        --------- this hook does not
    ...
    4 | [interfaces]
      |  ^^^^^^^^^^

    warning[unused-setting]: only tc uses `magic`
     --> config.toml:6:3
      |
    1 | hook = "hs_ctrl"
      |        --------- this hook does not
    ...
    6 | [[magic]]
      |   ^^^^^
    "#);
    insta::assert_snapshot!(
        said("guard = \"off\"\non_echo = \"blank\"\ncgroups = [\"/sys/fs/cgroup/a\"]\n"),
        @r#"
    warning[unused-setting]: only the canary uses `on_echo`
     --> config.toml:2:1
      |
    1 | guard = "off"
      |         ----- there is none
    2 | on_echo = "blank"
      | ^^^^^^^

    warning[unused-setting]: only the canary uses `cgroups`
     --> config.toml:3:1
      |
    1 | guard = "off"
      |         ----- there is none
    2 | on_echo = "blank"
    3 | cgroups = ["/sys/fs/cgroup/a"]
      | ^^^^^^^
    "#
    );
    // The guard uses devices and magics with either hook.
    assert_eq!(
        said("hook = \"hs_ctrl\"\n[interfaces]\nexclude = [\"lo\"]\n[[magic]]\nsyn = \"e2d4c3da\"\n"),
        ""
    );
    // What it says holds with that hook too.
    assert_eq!(said("hook = \"hs_ctrl\"\nforwarded = false\n[interfaces]\n"), "");
    for hook in ["auto", "tc"] {
        assert_eq!(
            said(&format!("hook = \"{hook}\"\nforwarded = true\ninterfaces.exclude = [\"lo\"]\n")),
            ""
        );
    }
}

#[test]
fn what_is_no_toml() {
    assert_snapshot!(said("hook = tc\nmode = \"observe\nforwarded = 1\n"), @r#"
    error[syntax]: invalid boolean, expected `true`
     --> config.toml:1:8
      |
    1 | hook = tc
      |        ^^

    error[syntax]: invalid basic string, expected `"`
     --> config.toml:2:16
      |
    2 | mode = "observe
      |                ^

    error[wrong-type]: `forwarded` is true or false, not an integer
     --> config.toml:3:13
      |
    3 | forwarded = 1
      |             ^
    "#);
}

#[test]
fn long_lists_take_no_longer_than_they_are() {
    let names: Vec<String> = (0..100_000).map(|at| format!("\"n{at}\"")).collect();
    let text = format!(
        "namespaces = [{0}]\ninterfaces.include = [{0}]\ninterfaces.exclude = [{0}]\n",
        names.join(",")
    );
    assert!(parse(0, &text).is_ok());
    let folders = format!("namespaces = [\"{}\"]\n", "/run/netns/".repeat(100_000));
    assert_eq!(parse(0, &folders).unwrap_err().len(), 1);
}

/// A config as text.
fn written(config: &Config) -> String {
    let list = |texts: &[String]| {
        format!("[{}]", texts.iter().map(|t| toml_string(t)).collect::<Vec<_>>().join(", "))
    };
    let mut text = format!(
        "hook = \"{}\"\nguard = \"{}\"\non_echo = \"{}\"\nmode = \"{}\"\nretransmit = \"{}\"\nforwarded = {}\n",
        config.hook.word(),
        match config.guard {
            Guard::Canary => "canary",
            Guard::Learn => "learn",
            Guard::Off => "off",
        },
        if config.on_echo == OnEcho::Blank { "blank" } else { "learn-only" },
        if config.observe { "observe" } else { "enforce" },
        if config.plain_retransmissions { "plain" } else { "keep" },
        config.forwarded,
    );
    let cgroups: Vec<String> = config.cgroups.iter().map(|path| path.to_str().unwrap().to_owned()).collect();
    if !cgroups.is_empty() {
        writeln!(text, "cgroups = {}", list(&cgroups)).unwrap();
    }
    let namespaces = match &config.namespaces {
        Namespaces::Host => "\"host\"".to_owned(),
        Namespaces::All => "\"all\"".to_owned(),
        Namespaces::Named(names) => list(names),
    };
    writeln!(text, "namespaces = {namespaces}\n[interfaces]").unwrap();
    if !config.interfaces.include.is_empty() {
        writeln!(text, "include = {}", list(&config.interfaces.include)).unwrap();
    }
    writeln!(text, "exclude = {}", list(&config.interfaces.exclude)).unwrap();
    for magic in &config.magics {
        writeln!(text, "[[magic]]\nsyn = \"{:08x}\"", magic.syn).unwrap();
        if magic.syn_ack != magic.syn {
            writeln!(text, "syn_ack = \"{:08x}\"", magic.syn_ack).unwrap();
        }
    }
    text
}

fn toml_string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => write!(quoted, "\\u{:04x}", c as u32).unwrap(),
            c => quoted.push(c),
        }
    }
    quoted + "\""
}

fn configs() -> impl Strategy<Value = Config> {
    let hook = prop_oneof![Just(HookChoice::Auto), Just(HookChoice::HsCtrl), Just(HookChoice::Tc)];
    let guard = prop_oneof![Just(Guard::Canary), Just(Guard::Learn), Just(Guard::Off)];
    let pattern = || vec("[!-.0-9;-~]{1,15}".prop_filter("a name", |text| text != "." && text != ".."), 0..5);
    let names = proptest::collection::btree_set("[^/\u{0}]{1,60}", 1..5)
        .prop_filter("names", |names| !names.contains("all") && !names.contains(".") && !names.contains(".."))
        .prop_map(|names| match names.into_iter().collect::<Vec<_>>() {
            host if host == ["host"] => Namespaces::Host,
            names => Namespaces::Named(names),
        });
    let namespaces = prop_oneof![Just(Namespaces::Host), Just(Namespaces::All), names];
    let magic = (1..u32::MAX, 1..u32::MAX, any::<bool>());
    let magic = magic.prop_map(|(syn, other, same)| Magic { syn, syn_ack: if same { syn } else { other } });
    let magics = vec(magic, 0..=EXTRA_MAGICS).prop_filter("distinct", |magics| {
        let standard = Magic { syn: SMC_MAGIC, syn_ack: SMC_MAGIC };
        magics.iter().enumerate().all(|(at, magic)| *magic != standard && !magics[..at].contains(magic))
    });
    let cgroups = proptest::collection::btree_set("/c/[a-z. \"]{3}[a-z]{1,20}", 0..4)
        .prop_filter("none in another", |all| {
            let inside = |a: &String, b: &String| a != b && a.starts_with(&format!("{b}/"));
            !all.iter().any(|a| all.iter().any(|b| inside(a, b)))
        })
        .prop_map(|all| all.into_iter().map(PathBuf::from).collect::<Vec<_>>());
    ((hook, guard), any::<[bool; 4]>(), pattern(), pattern(), namespaces, magics, cgroups).prop_map(
        |(
            (hook, guard),
            [observe, plain_retransmissions, forwarded, blank],
            include,
            exclude,
            namespaces,
            magics,
            cgroups,
        )| Config {
            hook,
            observe,
            interfaces: Interfaces { include, exclude },
            namespaces,
            plain_retransmissions,
            forwarded,
            magics,
            guard,
            on_echo: if blank { OnEcho::Blank } else { OnEcho::LearnOnly },
            cgroups,
        },
    )
}

/// Pieces of config files, put together at random.
fn pieces() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        prop::sample::select(vec![
            "hook",
            "mode",
            "retransmit",
            "forwarded",
            "namespaces",
            "interfaces",
            "include",
            "exclude",
            "magic",
            "syn",
            "syn_ack",
            "version",
            "rule",
            "[",
            "]",
            "[[",
            "]]",
            "{",
            "}",
            "=",
            ".",
            ",",
            "\n",
            "\"",
            "'",
            "#",
            "\"\"\"",
            "\"auto\"",
            "\"hs_ctrl\"",
            "\"tc\"",
            "\"host\"",
            "\"all\"",
            "\"*\"",
            "\"eth*\"",
            "\"a,b\"",
            "\"/run/netns/\"",
            "\"e2d4c3d9\"",
            "0x1",
            "-0",
            "1e400",
            "1979-05-27",
            "true",
            "é",
            "à",
            "\u{0}",
        ])
        .prop_map(str::to_owned),
        "\\PC{0,6}",
    ];
    vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn what_is_written_reads_back(config in configs()) {
        let text = written(&config);
        let parsed = parse(0, &text);
        prop_assert!(parsed.is_ok(), "{}", said(&text));
        prop_assert_eq!(parsed.unwrap().config, config);
    }

    #[test]
    fn any_text_is_read_or_refused_with_a_place_in_it(text in prop_oneof![pieces(), "\\PC{0,200}"]) {
        let found = match parse(0, &text) {
            Ok(parsed) => parsed.warnings,
            Err(found) => {
                prop_assert!(!found.is_empty());
                found
            }
        };
        prop_assert!(found.iter().all(|f| f.place.start <= f.place.end && f.place.end <= text.len()));
        let _ = render(&found, &file(&text), true);
    }

    #[test]
    fn a_config_that_is_damaged_is_read_or_refused(config in configs(), at in any::<prop::sample::Index>(), with in "\\PC?") {
        let mut text = written(&config);
        let at = text.floor_char_boundary(at.index(text.len()));
        let end = text.ceil_char_boundary(at + 1);
        text.replace_range(at..end, &with);
        let _ = said(&text);
    }
}
