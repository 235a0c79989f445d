//! Tables that grow and shrink, and what is counted meanwhile.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fmt::Write as _;

use smc_policy_tests::lab::{assert_denied, listen};
use smc_policy_tests::{Kind, Lab, Run, is_full, needs_hook};

/// Networks that do not touch each other. Fewer than a hundred thousand would not make tables of the size that is worth
/// replacing by smaller ones (smc-policy/src/kernel/apply/sizes.rs, `WASTEFUL_CELLS`).
fn networks(count: u32) -> String {
    let mut text = String::from("[[rule]]\nname = \"bulk\"\naction = \"deny\"\npeers = [\n");
    for number in 0..count {
        let [_, a, b, c] = (number * 2).to_be_bytes();
        writeln!(text, "\"10.{a}.{b}.{c}\",").unwrap();
    }
    text + "]\n"
}

fn apply(lab: &Lab, text: &str) -> Run {
    let path = lab.home.write("policy.toml", text);
    lab.home.run(["apply".as_ref(), "--json".as_ref(), path.as_os_str()]).ok()
}

fn table_bytes(lab: &Lab) -> u64 {
    lab.status()["table_bytes"].as_u64().unwrap()
}

#[test]
fn one_apply_shrinks_wasteful_tables_and_keeps_hits() {
    needs_hook!();
    Lab::run(|lab| {
        let service = listen(Kind::AfSmc, "127.0.0.2");
        let kept = format!(
            "version = 1\n[[rule]]\nname = \"kept\"\naction = \"deny\"\ndirection = \"outbound\"\nports = [{}]\n",
            service.port()
        );
        let count = if is_full() { 200_000 } else { 135_000 };
        apply(lab, &format!("{kept}{}", networks(count)));
        let large = table_bytes(lab);
        assert!(large >= 16 << 19, "two tables of 4 MiB: {large}");
        assert_denied(Kind::AfSmc, None, &service);
        assert_eq!(lab.hits("kept"), 1);
        let decisions = lab.status()["counters"]["decisions"].as_u64().unwrap();

        let run = apply(lab, &kept);
        assert_eq!(run.json()["change"], "replaced", "{run:#?}");
        let small = table_bytes(lab);
        assert!(small <= 64 << 10, "{large} -> {small}");
        assert_eq!(lab.hits("kept"), 1);
        assert_denied(Kind::AfSmc, None, &service);
        assert_eq!(lab.hits("kept"), 2);
        let now = lab.status()["counters"]["decisions"].as_u64().unwrap();
        assert!(now > decisions && decisions > 0, "the instance's own counters: {decisions} -> {now}");
        lab.assert_nothing_piles_up();

        let run = apply(lab, &format!("{kept}# again\n"));
        assert_eq!(run.json()["change"], "switched", "once is enough: {run:#?}");
        assert_eq!((table_bytes(lab), lab.hits("kept")), (small, 2));
    });
}

#[test]
fn a_replacement_carries_all_counters() {
    needs_hook!();
    Lab::run(|lab| {
        let service = listen(Kind::AfSmc, "127.0.0.2");
        let text = "version = 1\n[[rule]]\nname = \"kept\"\naction = \"deny\"\npeers = [\"127.0.0.2\"]\n";
        apply(lab, text);
        assert_denied(Kind::AfSmc, None, &service);
        let counted = |lab: &Lab| {
            let status = lab.status();
            assert!(status["counters"]["decisions"].as_u64().unwrap() > 0, "{status:#}");
            [&status["counters"], &status["rules"], &status["defaults"]].map(ToString::to_string)
        };
        let before = counted(lab);
        lab.pretend_other_version();
        assert_eq!(apply(lab, text).json()["change"], "replaced");
        assert_eq!(counted(lab), before);
        // And carries them once more: what was carried is not lost.
        lab.pretend_other_version();
        assert_eq!(apply(lab, text).json()["change"], "replaced");
        assert_eq!(counted(lab), before);
    });
}
