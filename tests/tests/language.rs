//! Rules with lists of their own and rules that end, on the real kernel; and what `plan` says about them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fmt::Write as _;
use std::thread::sleep;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use smc_policy_tests::lab::{assert_denied, assert_smc, listen};
use smc_policy_tests::{Home, Kind, Lab, needs, needs_hook, scaled};

const LISTED: &str =
    "version = 1\n[[rule]]\nname = \"listed\"\naction = \"deny\"\npeers_file = \"lists/peers.txt\"\n";

#[test]
fn a_list_of_peers_is_part_of_the_policy() {
    needs_hook!();
    Lab::run(|lab| {
        let (a, b) = (listen(Kind::AfSmc, "127.0.0.2"), listen(Kind::AfSmc, "127.0.0.3"));
        lab.home.write("lists/peers.txt", "# broken hosts\n127.0.0.2   # ticket 42\nfd00:5::/64\n");
        lab.apply(LISTED);
        assert_denied(Kind::AfSmc, None, &a);
        assert_smc(Kind::AfSmc, None, &b);
        assert_eq!(lab.home.run(["status", "--json"]).ok().json()["findings"], serde_json::json!([]));

        // Another list is another policy: status says so, plan says what changes, apply does it.
        lab.home.write("lists/peers.txt", "127.0.0.3\n");
        let said = lab.home.run(["status"]).expect_code(1).stdout;
        assert!(said.contains("the policy files differ"), "{said}");
        let policy = lab.home.path("policy.toml");
        let plan = |code| {
            lab.home.run(["plan".as_ref(), "--json".as_ref(), policy.as_os_str()]).expect_code(code).json()
        };
        let planned = plan(1);
        assert_eq!(
            planned["changes"],
            serde_json::json!([{"change": "changed", "rule": "listed", "keys": ["peers"]}]),
            "{planned:#}"
        );
        let regions = planned["regions"].as_array().unwrap();
        let peers: Vec<_> = regions
            .iter()
            .map(|r| (r["peers"][0].as_str().unwrap(), r["now"]["action"].as_str().unwrap()))
            .collect();
        for expected in [("127.0.0.2", "allow"), ("127.0.0.3", "deny"), ("fd00:5::/64", "allow")] {
            assert_eq!(
                peers.iter().filter(|found| **found == expected).count(),
                2,
                "{expected:?}: {planned:#}"
            );
        }
        assert_eq!(lab.home.run(["status"]).code(), Some(1), "plan changes nothing");
        assert_denied(Kind::AfSmc, None, &a);
        lab.apply(LISTED);
        assert_smc(Kind::AfSmc, None, &a);
        assert_denied(Kind::AfSmc, None, &b);
        let planned = plan(0);
        assert_eq!(
            (&planned["changes"], &planned["regions"]),
            (&serde_json::json!([]), &serde_json::json!([]))
        );

        // A list that is gone or wrong changes nothing; rollback needs none.
        lab.home.write("lists/peers.txt", "127.0.0.3\nexample.com\n");
        let run = lab.home.run(["apply".as_ref(), policy.as_os_str()]);
        run.refused(2, &["lists/peers.txt:2:1", "host name"]);
        std::fs::remove_file(lab.home.path("lists/peers.txt")).unwrap();
        lab.home
            .run(["apply".as_ref(), policy.as_os_str()])
            .refused(2, &["policy.toml:5", "lists/peers.txt: no such file"]);
        assert_denied(Kind::AfSmc, None, &b);
        lab.home.run(["rollback"]).ok();
        assert_denied(Kind::AfSmc, None, &a);
        assert_smc(Kind::AfSmc, None, &b);
    });
}

#[test]
fn a_rule_ends_with_the_first_apply_after_it_expires() {
    needs_hook!();
    Lab::run(|lab| {
        let service = listen(Kind::AfSmc, "127.0.0.2");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        // An apply takes seconds in emulation.
        let end = now + 12;
        let time = utc(end);
        let text = format!(
            "version = 1\n[[rule]]\nname = \"for-now\"\naction = \"deny\"\nports = [{}]\nexpires = {time}\n",
            service.port()
        );
        let run = lab.apply(&text);
        assert!(run.stderr.contains(&format!("rule `for-now` expires at {time}")), "{run:#?}");
        assert_denied(Kind::AfSmc, None, &service);
        let policy = lab.home.path("policy.toml");
        let plan = || lab.home.run(["plan".as_ref(), policy.as_os_str()]);
        while SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() <= end {
            sleep(Duration::from_millis(200));
        }
        assert_denied(Kind::AfSmc, None, &service);
        let said = lab.home.run(["status"]).expect_code(1).stdout;
        assert!(said.contains("the rule `for-now` has expired and still decides"), "{said}");
        let said = plan().expect_code(1).stdout;
        assert!(
            said.contains("rule for-now: expires changed")
                && said.contains("deny (for-now) -> allow (default)"),
            "{said}"
        );
        let generation = lab.generation();
        let run = lab.apply(&text);
        assert!(run.stderr.contains("warning[expired]"), "{run:#?}");
        assert_eq!(lab.generation(), generation + 1, "the same texts, and another policy");
        assert_smc(Kind::AfSmc, None, &service);
        plan().expect_code(0);
        let status = lab.home.run(["status", "--json"]).ok().json();
        assert_eq!(
            (&status["rules"][0]["expired"], &status["rules"][0]["expires"]),
            (&true.into(), &time.into())
        );
        lab.apply(&text);
        assert_eq!(lab.generation(), generation + 1, "nothing to do");
    });
}

/// A moment as the language writes it.
fn utc(seconds: u64) -> String {
    smc_policy::policy::Moment::from_unix(seconds).to_string()
}

#[test]
fn a_long_list_is_checked_and_explained() {
    needs!(Tool);
    let home = Home::default();
    let count = scaled(1_000_000);
    let mut list = String::new();
    for number in 0..count as u32 {
        let [_, a, b, c] = (number * 2).to_be_bytes();
        writeln!(list, "10.{a}.{b}.{c}").unwrap();
    }
    home.write("lists/peers.txt", &list);
    let policy = home.write("policy.toml", LISTED);
    let policy = policy.as_os_str();
    let run = home.run(["check".as_ref(), policy]).ok();
    assert!(run.stdout.contains("1 rule in 2 files"), "{run:#?}");
    home.run(["explain".as_ref(), "10.0.0.2".as_ref(), "--policy".as_ref(), policy]).expect_code(1);
    home.run(["explain".as_ref(), "10.0.0.3".as_ref(), "--policy".as_ref(), policy]).expect_code(0);
    // The line is found among all of them.
    home.write("lists/peers.txt", &format!("{list}10.0.0.1/8\n"));
    home.run(["check".as_ref(), policy])
        .refused(2, &[&format!("lists/peers.txt:{}:1", count + 1), "did you mean 10.0.0.0/8?"]);
}
