//! `apply --confirm`: a policy that nobody confirms does not stay.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::time::Duration;

use smc_policy_tests::{Lab, Mount, Running, Services, eventually, needs_hook};

const OLD: u64 = 0b0101;
const NEW: u64 = 0b1010;
const THIRD: u64 = 0b0011;

/// Starts an apply of policy `number` that is to be confirmed within `time`, and waits until it is in force.
fn try_out(lab: &Lab, services: &Services, number: u64, time: &str) -> Running {
    let running = lab.home.start_with_input(["apply", "--confirm", time, &services.file(lab, number)]);
    eventually("the policy on trial is in force", || services.enforced() == number);
    running
}

/// Seconds until the old policy returns, as `status` tells.
fn seconds_left(lab: &Lab) -> Option<u64> {
    lab.status()["unconfirmed_seconds_left"].as_u64()
}

#[test]
fn enter_keeps_it() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let mut running = try_out(lab, &services, NEW, "60s");
        eventually("it waits", || seconds_left(lab).is_some());
        let left = seconds_left(lab).unwrap();
        assert!((1..=60).contains(&left), "{left}");
        let text = lab.home.run(["status"]).ok().stdout;
        assert!(text.contains("the policy before returns in"), "{text}");
        assert_eq!(running.children().len(), 1, "the process that would return to the old policy");
        let guard = running.children()[0];
        running.press_enter();
        let run = running.wait().ok();
        assert!(run.stderr.contains("Confirmed."), "{run:#?}");
        assert!(run.time < Duration::from_secs(60), "{run:#?}");
        assert_eq!((services.enforced(), seconds_left(lab)), (NEW, None));
        assert!(!std::path::Path::new(&format!("/proc/{guard}")).exists(), "no process stays behind");
        assert!(!lab.home.path("run/unconfirmed.json").exists());
        lab.assert_nothing_piles_up();
        // Back again is an ordinary rollback.
        lab.home.run(["rollback"]).ok();
        assert_eq!(services.enforced(), OLD);
    });
}

#[test]
fn without_enter_the_old_policy_returns() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let before = lab.generation();
        let run = try_out(lab, &services, NEW, "4s").wait().expect_code(1);
        // The policy before as a new generation: numbers only grow.
        let says = format!("Not confirmed: generation {} is in force", before + 2);
        assert!(run.stderr.contains(&says) && run.stderr.contains(&format!("policy-{OLD}.toml")), "{run:#?}");
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        assert_eq!((lab.generation(), seconds_left(lab)), (before + 2, None));
        lab.assert_nothing_piles_up();
        lab.home.run(["status"]).ok();
    });
}

#[test]
fn the_end_of_input_is_no_confirmation() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        // Standard input is at its end from the start.
        let run = lab.home.run(["apply", "--confirm", "3s", &services.file(lab, NEW)]).expect_code(1);
        assert!(run.stderr.contains("Not confirmed"), "{run:#?}");
        assert!(run.time >= Duration::from_secs(3), "{run:#?}");
        assert_eq!(services.enforced(), OLD);
    });
}

#[test]
fn the_first_policy_ever_reverts_to_nothing() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let run = try_out(lab, &services, NEW, "4s").wait().expect_code(1);
        assert!(run.stderr.contains("Not confirmed: no policy is in force"), "{run:#?}");
        assert_eq!((services.enforced(), lab.deciding().as_str()), (0, ""));
        lab.assert_nothing_in_force();
    });
}

#[test]
fn the_same_apply_confirms_from_elsewhere() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let running = try_out(lab, &services, NEW, "8s");
        let run = lab.home.run(["apply", "--json", &services.file(lab, NEW)]).ok();
        assert_eq!(run.json()["change"], "confirmed", "{run:#?}");
        assert_eq!(seconds_left(lab), None);
        let generation = lab.generation();
        let run = running.wait().ok();
        let says = format!("Confirmed meanwhile: generation {generation} is in force");
        assert!(run.stderr.contains(&says), "{run:#?}");
        assert_eq!((services.enforced(), lab.generation()), (NEW, generation));
    });
}

#[test]
fn it_does_not_wait_twice() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let running = try_out(lab, &services, NEW, "8s");
        let again = lab.home.run(["apply", "--confirm", "60s", &services.file(lab, NEW)]);
        again.refused(1, &["waits for confirmation", "without --confirm"]);
        // The first one's course is not changed.
        running.wait().expect_code(1);
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
    });
}

#[test]
fn the_right_policy_returns_although_nothing_can_be_kept() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, THIRD);
        services.apply(lab, OLD);
        let _read_only = Mount::read_only(&lab.home.path("state"));
        let run = try_out(lab, &services, NEW, "4s").wait().expect_code(1);
        assert!(run.stderr.contains("warning:") && run.stderr.contains("Read-only"), "{run:#?}");
        assert!(run.stderr.contains("Not confirmed: generation"), "{run:#?}");
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        // rollback while it waits does the same, at once.
        let running = try_out(lab, &services, NEW, "60s");
        lab.home.run(["rollback"]).ok();
        assert_eq!(services.enforced(), OLD);
        running.kill();
    });
}
