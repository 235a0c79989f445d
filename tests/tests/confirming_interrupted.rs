//! `apply --confirm` when something comes in between: a killed process, another apply, a detach.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs;

use smc_policy_tests::{Lab, Running, Services, Trap, eventually, needs_hook, sys};

const OLD: u64 = 0b0101;
const NEW: u64 = 0b1010;
const THIRD: u64 = 0b0011;

/// Starts an apply of policy `number` that is to be confirmed within `time`, and waits until it is in force. Second: the
/// process that returns to the old policy when the time is over.
fn try_out(lab: &Lab, services: &Services, number: u64, time: &str) -> (Running, u32) {
    let running = lab.home.start_with_input(["apply", "--confirm", time, &services.file(lab, number)]);
    eventually("the policy on trial is in force", || services.enforced() == number);
    let children = running.children();
    assert_eq!(children.len(), 1, "one process that returns to the old policy");
    (running, children[0])
}

#[test]
fn without_its_guard_the_command_itself_returns() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let (running, guard) = try_out(lab, &services, NEW, "4s");
        sys::kill(guard).unwrap();
        let run = running.wait().expect_code(1);
        assert!(run.stderr.contains("Not confirmed: generation"), "{run:#?}");
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        lab.assert_nothing_piles_up();
    });
}

#[test]
fn without_the_command_its_guard_returns() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let (running, _) = try_out(lab, &services, NEW, "5s");
        running.kill();
        assert_eq!(services.enforced(), NEW, "until the time is over");
        eventually("the old policy returns", || services.enforced() == OLD);
        eventually("all is as it should be", || lab.status()["ok"] == true);
        assert_eq!(services.explained(lab), OLD);
        lab.assert_nothing_piles_up();
    });
}

#[test]
fn without_both_it_is_overdue_and_rollback_returns() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        for way_out in ["rollback", "apply"] {
            let (running, guard) = try_out(lab, &services, NEW, "3s");
            sys::kill(guard).unwrap();
            running.kill();
            eventually("it is overdue", || lab.status()["unconfirmed_seconds_left"] == 0);
            let run = lab.home.run(["status"]).expect_code(1);
            assert!(run.stdout.contains("never confirmed") && run.stdout.contains("rollback"), "{run:#?}");
            assert_eq!(services.enforced(), NEW);
            let expected = if way_out == "rollback" {
                lab.home.run(["rollback"]).ok();
                OLD
            } else {
                services.apply(lab, NEW);
                NEW
            };
            assert_eq!((services.enforced(), services.explained(lab)), (expected, expected), "{way_out}");
            assert!(lab.status()["unconfirmed_seconds_left"].is_null(), "{way_out}");
            lab.home.run(["status"]).ok();
        }
    });
}

#[test]
fn a_damaged_note_of_what_waits_is_no_hindrance() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let (running, guard) = try_out(lab, &services, NEW, "60s");
        sys::kill(guard).unwrap();
        running.kill();
        let note = lab.home.path("run/unconfirmed.json");
        fs::write(&note, "{").unwrap();
        assert!(lab.status()["unconfirmed_seconds_left"].is_null());
        lab.home.run(["rollback"]).ok();
        assert_eq!((services.enforced(), note.exists()), (OLD, false));
        fs::write(&note, "{").unwrap();
        services.apply(lab, NEW);
        assert_eq!((services.enforced(), note.exists()), (NEW, false));
    });
}

#[test]
fn another_apply_in_between_stays() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let (running, _) = try_out(lab, &services, NEW, "8s");
        services.apply(lab, THIRD);
        let generation = lab.generation();
        let run = running.wait().expect_code(1);
        let says = format!("generation {generation} is in force");
        assert!(run.stderr.contains(&says), "{run:#?}");
        assert!(run.stderr.contains(&format!("policy-{THIRD}.toml")), "{run:#?}");
        assert_eq!((services.enforced(), lab.generation()), (THIRD, generation));
    });
}

#[test]
fn the_guard_of_a_detached_policy_reverts_no_other() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let (running, _) = try_out(lab, &services, NEW, "10s");
        let generation = lab.generation();
        lab.home.run(["detach"]).ok();
        assert_eq!(services.enforced(), 0);
        services.apply(lab, THIRD);
        assert_eq!(lab.generation(), generation, "numbers begin anew: the guard must not go by them");
        let run = running.wait().expect_code(1);
        assert!(run.stderr.contains(&format!("policy-{THIRD}.toml")), "{run:#?}");
        assert_eq!((services.enforced(), lab.generation()), (THIRD, generation));
    });
}

/// A policy that nobody confirmed is nothing to return to.
#[test]
fn a_trial_over_a_trial_returns_to_what_was_confirmed() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let (first, _) = try_out(lab, &services, NEW, "60s");
        let (second, _) = try_out(lab, &services, THIRD, "4s");
        let run = second.wait().expect_code(1);
        assert!(run.stderr.contains(&format!("policy-{OLD}.toml")), "{run:#?}");
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        first.kill();
    });
}

/// What waits goes on waiting when the apply that was to follow it does not come into force.
#[test]
fn a_killed_apply_over_a_trial_leaves_it_waiting() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let (running, _) = try_out(lab, &services, NEW, "10s");
        // The announcement is the last file written before the policy is in force.
        let trap = Trap::set(&lab.home.path("state/next.tmp"));
        trap.kill(lab.home.start(["apply", &services.file(lab, THIRD)]));
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        assert!(lab.status()["unconfirmed_seconds_left"].is_u64());
        running.wait().expect_code(1);
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        lab.assert_nothing_piles_up();
    });
}
