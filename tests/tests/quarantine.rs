//! The verb `quarantine`: what it puts into the kernel holds at once, ends by itself, and comes back after a reboot.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs;
use std::os::unix::process::CommandExt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use smc_policy::kernel::guard::{Quarantine, Store, now};
use smc_policy_common::quarantine::{COMMANDED_ENTRIES, Entry, Key};
use smc_policy_common::query::Addr;
use smc_policy_tests::lab::{assert_denied, assert_smc, is_smc, listen};
use smc_policy_tests::{Kind, Lab, Need, Run, eventually, exchange, needs, needs_hook};

const ALLOW: &str = "version = 1\n[[rule]]\nname = \"all\"\naction = \"allow\"\n";

fn quarantine(lab: &Lab, arguments: &[&str]) -> Run {
    lab.home.run(["quarantine"].iter().chain(arguments))
}

/// `quarantine ... --json`.
#[track_caller]
fn json_of(lab: &Lab, arguments: &[&str]) -> Value {
    quarantine(lab, &[arguments, &["--json"]].concat()).ok().json()
}

/// Entries of `list`, as "peer port store cause count".
#[track_caller]
fn listed(lab: &Lab) -> Vec<String> {
    let list = json_of(lab, &["list"]);
    let entries = list["entries"].as_array().expect("entries").iter();
    entries
        .map(|e| {
            let text = |name: &str| e[name].as_str().map_or_else(|| e[name].to_string(), str::to_owned);
            ["peer", "port", "store", "cause", "count"].map(text).join(" ")
        })
        .collect()
}

fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn record(peer: &str, store: Store, count: u32, left: u64) -> Value {
    let now = unix_now();
    json!({
        "peer": peer, "port": 0, "store": store, "cause": "operator", "direction": "outbound", "count": count,
        "first_seen": now - 9000, "last_seen": now, "until": now + left, "span": 3600,
    })
}

fn file(lab: &Lab, name: &str, saved: u64, entries: &[Value]) -> String {
    let text = json!({ "version": 1, "saved": saved, "entries": entries }).to_string();
    lab.home.write(name, &text).to_str().unwrap().to_owned()
}

#[test]
fn what_is_added_is_denied_at_once_until_it_is_removed_or_ends() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        for (ip, kinds) in [("127.0.0.2", Kind::smc_v4()), ("fd00:5::2", Kind::smc_v6())] {
            let kind = kinds[0];
            let (held, other) = (listen(kind, ip), listen(kind, ip));
            assert_smc(kind, None, &held);
            let peer = held.address().to_string();
            quarantine(lab, &["add", &peer]).ok();
            assert_denied(kind, None, &held);
            assert_smc(kind, None, &other);
            quarantine(lab, &["remove", &peer]).ok();
            assert_smc(kind, None, &held);
            quarantine(lab, &["remove", &peer]).expect_code(1);
            quarantine(lab, &["add", ip]).ok();
            assert_denied(kind, None, &held);
            assert_denied(kind, None, &other);
            quarantine(lab, &["flush", "--learned"]).ok();
            assert_denied(kind, None, &held);
            quarantine(lab, &["flush"]).ok();
            assert_smc(kind, None, &held);
            // Without a port: all entries of the address.
            quarantine(lab, &["add", &peer]).ok();
            quarantine(lab, &["add", ip]).ok();
            assert_eq!(json_of(lab, &["remove", ip])["changed"], 2);
            assert_smc(kind, None, &held);
        }
        let peers = [(Kind::AfSmc, "127.0.0.2"), (Kind::AfSmc6, "fd00:5::2")];
        let held = peers.map(|(kind, ip)| {
            let listener = listen(kind, ip);
            quarantine(lab, &["add", ip, "--for", "4s"]).ok();
            assert_denied(kind, None, &listener);
            (kind, listener)
        });
        for (kind, listener) in &held {
            eventually("the entry ends", || exchange(*kind, None, listener).is_ok_and(|o| is_smc(&o)));
        }
        let list = json_of(lab, &["list"]);
        assert_eq!([0, 1].map(|at| list["entries"][at]["expires_in"].clone()), [0, 0], "{list:#}");
    });
}

#[test]
fn a_path_without_rdma_is_for_both_directions() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        let listener = listen(Kind::AfSmc, "127.0.0.2");
        quarantine(lab, &["add", "127.0.0.3"]).ok();
        assert_smc(Kind::AfSmc, Some("127.0.0.3"), &listener);
        quarantine(lab, &["add", "127.0.0.3", "--cause", "rdma-path"]).ok();
        assert_denied(Kind::AfSmc, Some("127.0.0.3"), &listener);
        assert_eq!(lab.explain(&["127.0.0.3", "--inbound"])["by"], "quarantine");
        quarantine(lab, &["add", "127.0.0.3:5", "--cause", "rdma-path"]).refused(2, &["without :5"]);
    });
}

#[test]
fn explain_says_that_it_is_the_quarantine_and_that_trust_is_exempt() {
    needs_hook!();
    Lab::run(|lab| {
        let policy = "version = 1\n[[rule]]\nname = \"trusted\"\naction = \"allow\"\ntrust = true\npeers = \
                      [\"127.0.0.2\"]\n[[rule]]\nname = \"never\"\naction = \"deny\"\npeers = [\"127.0.0.4\"]\n";
        lab.apply(policy);
        for ip in ["127.0.0.2", "127.0.0.3", "127.0.0.4"] {
            quarantine(lab, &["add", ip, "--cause", "probe", "--comment", "the load balancer"]).ok();
        }
        let trusted = lab.explain(&["127.0.0.2"]);
        assert_eq!((&trusted["by"], &trusted["rule"]), (&json!("rule"), &json!("trusted")));
        assert_eq!(trusted["quarantine"][0]["cause"], "probe");
        assert_smc(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
        let held = lab.explain(&["127.0.0.3:443"]);
        assert_eq!((&held["by"], &held["action"]), (&json!("quarantine"), &json!("deny")));
        assert_eq!(held["quarantine"][0]["comment"], "the load balancer");
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.3"));
        assert_eq!(lab.explain(&["127.0.0.4"])["rule"], "never", "what a rule denies needs no second reason");
        assert_eq!(lab.explain(&["127.0.0.3", "--inbound"])["by"], "default");
        let run = lab.home.run(["explain", "127.0.0.3"]).expect_code(1);
        for words in
            ["by the quarantine", "(probe)", "expires in 59 min", "the load balancer", "trust = true"]
        {
            assert!(run.stdout.contains(words), "{words}: {}", run.stdout);
        }
        quarantine(lab, &["flush"]).ok();
        quarantine(lab, &["add", "127.0.0.3:443"]).ok();
        assert_eq!(lab.explain(&["127.0.0.3"])["action"], "mixed");
        assert_eq!(lab.explain(&["127.0.0.3:80"])["action"], "allow");
    });
}

#[test]
fn what_is_exported_is_imported_and_counts_add_up() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        quarantine(lab, &["add", "127.0.0.2", "--comment", "from here"]).ok();
        quarantine(lab, &["add", "[fd00:5::2]:443", "--cause", "echo"]).ok();
        let out = lab.home.path("export.json");
        let out = out.to_str().unwrap();
        quarantine(lab, &["export", out]).ok();
        let text = fs::read_to_string(out).unwrap();
        assert_eq!(
            quarantine(lab, &["export"]).ok().stdout.lines().skip(3).collect::<Vec<_>>(),
            text.lines().skip(3).collect::<Vec<_>>()
        );
        let before = listed(lab);
        assert_eq!(before, ["127.0.0.2 0 commanded operator 1", "fd00:5::2 443 commanded echo 1"]);
        quarantine(lab, &["flush"]).ok();
        assert_smc(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
        assert_eq!(json_of(lab, &["import", out])["changed"], 2);
        assert_eq!(listed(lab), before);
        assert_eq!(json_of(lab, &["list"])["entries"][0]["comment"], "from here");
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
        quarantine(lab, &["import", out]).ok();
        assert_eq!(listed(lab), ["127.0.0.2 0 commanded operator 2", "fd00:5::2 443 commanded echo 2"]);
        lab.home.write("bad.json", "{\"version\": 1, \"saved\": 3, \"entries\": [3]}");
        let bad = lab.home.path("bad.json");
        quarantine(lab, &["import", bad.to_str().unwrap()]).refused(2, &["bad.json", "line 1"]);
        quarantine(lab, &["import", "/nowhere"]).refused(2, &["/nowhere"]);
        quarantine(lab, &["add", "example.org"]).refused(2, &["is no peer"]);
        quarantine(lab, &["add", "127.0.0.2", "--for", "8d"]).refused(2, &["7 d"]);
    });
}

/// `detach` saves, `apply` restores: so it goes at a reboot, with `quarantine save` instead of `detach`.
#[test]
fn it_comes_back_with_the_next_apply() {
    needs_hook!();
    Lab::run(|lab| {
        let (short, long) = (listen(Kind::AfSmc, "127.0.0.2"), listen(Kind::AfSmc, "127.0.0.3"));
        assert!(!lab.apply(ALLOW).stdout.contains("restored"));
        quarantine(lab, &["add", "127.0.0.2", "--for", "3s"]).ok();
        quarantine(lab, &["add", "127.0.0.3", "--comment", "kept"]).ok();
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
        assert_smc(Kind::AfSmc, None, &long);
        eventually("the short one ends", || listed(lab) == ["127.0.0.3 0 commanded operator 1"]);
        assert_eq!(json_of(lab, &["list"])["source"], "file");
        let run = lab.apply(ALLOW);
        assert!(run.stdout.contains("quarantine: 1 entry restored"), "{}", run.stdout);
        assert_denied(Kind::AfSmc, None, &long);
        assert_smc(Kind::AfSmc, None, &short);
        assert_eq!(json_of(lab, &["list"])["entries"][0]["comment"], "kept");
        assert!(!lab.apply(ALLOW).stdout.contains("restored"));
        // Gone is gone.
        quarantine(lab, &["flush"]).ok();
        assert_eq!(json_of(lab, &["save"])["changed"], 0);
        lab.home.run(["detach"]).ok();
        assert!(!lab.apply(ALLOW).stdout.contains("restored"));
        assert_smc(Kind::AfSmc, None, &long);
    });
}

#[test]
fn without_a_policy_it_works_on_what_is_saved() {
    needs_hook!();
    Lab::run(|lab| {
        let listener = listen(Kind::AfSmc, "127.0.0.2");
        assert_eq!(listed(lab), [""; 0]);
        let run = quarantine(lab, &["add", "127.0.0.2"]).ok();
        assert!(run.stdout.contains("No policy is in force"), "{}", run.stdout);
        assert_smc(Kind::AfSmc, None, &listener);
        quarantine(lab, &["add", "127.0.0.3"]).ok();
        quarantine(lab, &["remove", "127.0.0.3"]).ok();
        quarantine(lab, &["save"]).refused(3, &["no policy is in force"]);
        quarantine(lab, &["restore"]).refused(3, &["no policy is in force"]);
        let imported = [
            record("127.0.0.2", Store::Commanded, 5, 100),
            record("127.0.0.9", Store::Learned, 1, 100),
            record("127.0.0.8", Store::Learned, 1, 0),
        ];
        let path = file(lab, "import.json", unix_now() - 1, &imported);
        assert_eq!(json_of(lab, &["import", &path])["changed"], 2);
        let expected = ["127.0.0.2 0 commanded operator 6", "127.0.0.9 0 learned operator 1"];
        assert_eq!(listed(lab), expected);
        lab.apply(ALLOW);
        assert_eq!(listed(lab), expected);
        assert_denied(Kind::AfSmc, None, &listener);
        // Restoring adds nothing up.
        quarantine(lab, &["restore"]).ok();
        assert_eq!(listed(lab), expected);
    });
}

#[test]
fn a_damaged_file_is_named_and_in_nobodys_way() {
    needs_hook!();
    Lab::run(|lab| {
        lab.home.write("state/quarantine.json", "{\"version\": 7}");
        quarantine(lab, &["list"]).refused(3, &["quarantine.json", "version 7"]);
        let run = lab.apply(ALLOW);
        assert!(run.stderr.contains("the saved quarantine is not restored"), "{}", run.stderr);
        quarantine(lab, &["restore"]).refused(3, &["version 7", "quarantine save"]);
        quarantine(lab, &["save"]).ok();
        quarantine(lab, &["restore"]).ok();
    });
}

#[test]
fn full_is_an_error_that_changes_nothing() {
    needs_hook!();
    Lab::run(|lab| {
        lab.apply(ALLOW);
        quarantine(lab, &["add", "127.0.0.2"]).ok();
        // As many by commands would take minutes.
        let kernel = Quarantine::open(&lab.pins()).unwrap().expect("a quarantine");
        let entry =
            |until| Entry { until, directions: Entry::OUTBOUND, cause: 7, count: 1, ..Entry::default() };
        let key = |n: u32| Key::new(Addr::v4(0x0a00_0000 + n), 0);
        let fill: Vec<_> =
            (1..COMMANDED_ENTRIES).map(|n| (key(n), entry(now() + 3_600_000_000_000))).collect();
        kernel.put_all(Store::Commanded, &fill).unwrap();
        quarantine(lab, &["add", "127.0.0.3"]).refused(3, &["full", "nothing was changed", "remove"]);
        let one = file(lab, "one.json", unix_now(), &[record("127.0.0.3", Store::Commanded, 1, 3600)]);
        quarantine(lab, &["import", &one]).refused(3, &["65536 of at most 65536", "1 more"]);
        assert_smc(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.3"));
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2"));
        // What has expired makes room, and nothing else goes. (Most have: saving 65,536 entries takes a machine without
        // optimized code half a minute.)
        let expired: Vec<_> = fill[1..].iter().map(|(key, _)| (*key, entry(now()))).collect();
        kernel.put_all(Store::Commanded, &expired).unwrap();
        quarantine(lab, &["import", &one]).ok();
        assert_eq!(kernel.get(Store::Commanded, key(7)).unwrap(), None);
        assert_eq!(kernel.list(Store::Commanded).unwrap().len(), 3);
        assert_eq!(kernel.get(Store::Commanded, fill[0].0).unwrap(), Some(fill[0].1));
        assert_denied(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.3"));
    });
}

#[test]
fn without_privileges_it_says_which() {
    needs!(Tool);
    let lab = Lab::default();
    let mut command = lab.home.command(["quarantine", "list"]);
    if Need::Root.is_met() {
        command.uid(65534);
    }
    lab.home.start_command(command).wait().refused(4, &["CAP_SYS_ADMIN"]);
}
