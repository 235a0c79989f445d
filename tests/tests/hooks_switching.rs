//! One hook takes over from the other on a running host: without a gap, without a mixture, whatever comes in between.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fmt::Write as _;
use std::fs;

use smc_policy::kernel::{hs_ctrl, sys as kernel};
use smc_policy_tests::attaching::run;
use smc_policy_tests::{
    Hook, Killer, Lab, Mount, Rng, Run, Services, Traffic, Trap, is_full, needs_hook, scaled, sys,
};

const OLD: u64 = 0b0101;
const NEW: u64 = 0b1010;

/// A file with policy `number` that denies connections made and accepted, with `extra` more networks that concern nobody
/// here.
fn file(lab: &Lab, services: &Services, number: u64, extra: usize) -> String {
    let mut text = services.policy_both_ways(number);
    if extra > 0 {
        text += "[[rule]]\nname = \"bulk\"\naction = \"deny\"\npeers = [\n";
        for number in 0..extra {
            let [_, a, b, c] = (number as u32 * 2).to_be_bytes();
            writeln!(text, "\"10.{a}.{b}.{c}\",").unwrap();
        }
        text += "]\n";
    }
    let path = lab.home.write(&format!("policy-{number}.toml"), &text);
    path.into_os_string().into_string().unwrap()
}

fn apply(lab: &Lab, services: &Services, hook: Hook, number: u64) -> Run {
    lab.home.run(["apply", "--json", "--hook", &hook.to_string(), &file(lab, services, number, 0)])
}

#[track_caller]
fn assert_in_force(lab: &Lab, services: &Services, number: u64) {
    assert_eq!((services.enforced(), services.explained_both_ways(lab)), (number, number));
}

const fn other(hook: Hook) -> Hook {
    match hook {
        Hook::HsCtrl => Hook::Tc,
        Hook::Tc => Hook::HsCtrl,
    }
}

#[test]
fn hooks_are_switched_without_a_gap() {
    needs_hook!();
    let rng = Rng::from_environment("hooks_are_switched_without_a_gap");
    Lab::run(|lab| {
        // On a busy machine SYNs are sent again.
        lab.home.write("etc/config.toml", "retransmit = \"keep\"\n");
        let services = Services::open();
        apply(lab, &services, Hook::HsCtrl, OLD).ok();
        Traffic::run(&services, OLD, rng, |traffic| {
            // As many are worth smaller tables afterwards (smc-policy/src/kernel/apply/sizes.rs, `WASTEFUL_CELLS`).
            let large = if is_full() { 135_000 } else { 2_000 };
            for (hook, number, extra, version_change, expected) in [
                (Hook::Tc, OLD, 0, false, "switched"),
                (Hook::HsCtrl, NEW, 0, false, "switched"),
                (Hook::Tc, 0b0110, 0, true, "replaced"),
                (Hook::HsCtrl, 0b0011, large, false, "replaced"),
                (Hook::Tc, 0b1100, 0, false, if is_full() { "replaced" } else { "switched" }),
                (Hook::HsCtrl, OLD, 0, true, "replaced"),
            ] {
                traffic.wait(10);
                let file = file(lab, &services, number, extra);
                let run = traffic.change(number, || {
                    if version_change {
                        lab.pretend_other_version();
                    }
                    lab.home.run(["apply", "--json", "--hook", &hook.to_string(), &file]).ok()
                });
                println!("{hook} {number:04b}: {:?}", run.time);
                assert_eq!(run.json()["change"], expected, "{run:#?}");
                lab.assert_enforced_by(hook);
            }
            traffic.wait(10);
        });
        let bytes = lab.status()["table_bytes"].as_u64().unwrap();
        assert!(bytes <= 64 << 10 || !is_full(), "the tables have shrunk: {bytes}");
        assert_in_force(lab, &services, OLD);
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

#[test]
fn hooks_that_a_killed_apply_was_to_switch_are_whole() {
    needs_hook!();
    let mut rng = Rng::from_environment("hooks_that_a_killed_apply_was_to_switch_are_whole");
    Lab::run(|lab| {
        lab.home.write("etc/config.toml", "retransmit = \"keep\"\n");
        let services = Services::open();
        apply(lab, &services, Hook::Tc, NEW).ok();
        let to_hs_ctrl = apply(lab, &services, Hook::HsCtrl, OLD).time;
        let to_tc = apply(lab, &services, Hook::Tc, OLD).time;
        let connecting = rng.branch();
        Traffic::run(&services, OLD, connecting, |traffic| {
            let (mut old, mut hook) = (OLD, Hook::Tc);
            let (mut kept, mut switched, mut late) = (0, 0, 0);
            for round in 0..scaled(60) {
                let new = old ^ (1 + rng.below(15));
                if round % 3 == 2 {
                    lab.pretend_other_version();
                }
                let usual = if hook == Hook::Tc { to_hs_ctrl } else { to_tc };
                let mut killer = Killer { rng: rng.branch(), usual };
                let file = file(lab, &services, new, 0);
                let mut now = 0;
                let killed = traffic.attempt(
                    new,
                    || killer.kill(lab, ["apply", "--hook", &other(hook).to_string(), &file]),
                    || {
                        now = traffic.enforced();
                        now
                    },
                );
                assert!(now == old || now == new, "round {round}: {old:04b} -> {new:04b}, but {now:04b}");
                assert!(killed || now == new, "round {round}: finished, but {now:04b} is enforced");
                assert_eq!(services.explained_both_ways(lab), now, "round {round}");
                match (killed, now == new) {
                    (false, _) => late += 1,
                    (true, true) => switched += 1,
                    (true, false) => kept += 1,
                }
                old = now;
                // The next apply finishes it, or goes back.
                if round % 2 == 0 {
                    hook = if rng.below(2) == 0 { hook } else { other(hook) };
                    traffic.change(now, || apply(lab, &services, hook, now)).ok();
                    lab.assert_enforced_by(hook);
                }
            }
            println!(
                "killed with the old policy in force {kept}, with the new one {switched}, too late {late}"
            );
            traffic.change(old, || apply(lab, &services, hook, old)).ok();
            lab.assert_enforced_by(hook);
        });
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

/// Both hooks are there when an apply is killed just before its store: whatever comes next, one of them stays.
#[test]
fn hooks_that_a_killed_apply_has_added_are_taken_away() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        for (before, version_change) in [(Hook::HsCtrl, false), (Hook::Tc, false), (Hook::HsCtrl, true)] {
            apply(lab, &services, before, OLD).ok();
            if version_change {
                lab.pretend_other_version();
            }
            let trap = Trap::set(&lab.home.path(&format!("run/gen-{}.tmp", lab.generation() + 1)));
            let hook = other(before).to_string();
            trap.kill(lab.home.start(["apply", "--hook", &hook, &file(lab, &services, NEW, 0)]));
            assert_in_force(lab, &services, OLD);
            let run = lab.home.run(["status"]).expect_code(1);
            assert!(run.stdout.contains("killed") || run.stdout.contains("not covered"), "{run:#?}");
            apply(lab, &services, before, OLD).ok();
            assert_in_force(lab, &services, OLD);
            lab.assert_enforced_by(before);
        }
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

/// A process may be killed between registering and pinning, and between unregistering and unpinning.
#[test]
fn hooks_registrations_that_a_killed_apply_left_are_found() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let pin = || lab.pins().join(&lab.instances()[0]).join("registration");
        // Not pinned.
        apply(lab, &services, Hook::HsCtrl, OLD).ok();
        fs::remove_file(pin()).unwrap();
        apply(lab, &services, Hook::HsCtrl, OLD).ok();
        lab.assert_enforced_by(Hook::HsCtrl);
        fs::remove_file(pin()).unwrap();
        apply(lab, &services, Hook::Tc, OLD).ok();
        lab.assert_enforced_by(Hook::Tc);
        // Pinned, and not registered any more; who has selected it goes on with it.
        apply(lab, &services, Hook::HsCtrl, OLD).ok();
        let map = kernel::get_pinned(&pin()).unwrap();
        hs_ctrl::unregister(std::os::fd::AsFd::as_fd(&map)).unwrap();
        drop(map);
        assert_eq!(services.enforced(), OLD);
        apply(lab, &services, Hook::HsCtrl, OLD).ok();
        assert_in_force(lab, &services, OLD);
        lab.assert_enforced_by(Hook::HsCtrl);
        apply(lab, &services, Hook::Tc, NEW).ok();
        assert_in_force(lab, &services, NEW);
        lab.assert_enforced_by(Hook::Tc);
    });
}

/// A device that no program understands is the only one that is wanted.
#[test]
fn hooks_that_cannot_be_switched_stay() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        sys::make_device_of_type("odd0", 32).unwrap();
        apply(lab, &services, Hook::HsCtrl, OLD).ok();
        let (generation, instances) = (lab.generation(), lab.instances());
        for version_change in [false, true] {
            lab.home.write("etc/config.toml", "[interfaces]\ninclude = [\"odd0\"]\n");
            if version_change {
                lab.pretend_other_version();
            }
            apply(lab, &services, Hook::Tc, NEW).refused(3, &["hardware type 32", "exclude"]);
            assert_in_force(lab, &services, OLD);
            assert_eq!((lab.generation(), lab.instances()), (generation, instances.clone()));
        }
        lab.home.write("etc/config.toml", "");
        apply(lab, &services, Hook::HsCtrl, OLD).ok();
        lab.assert_enforced_by(Hook::HsCtrl);
        run("ip link del odd0");
    });
}

/// Without its record nobody could say what is in force: the hook that was added goes again.
#[test]
fn hooks_that_cannot_be_recorded_are_not_switched() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let mount = Mount::small(&lab.home.path("run"), 64);
        for before in [Hook::HsCtrl, Hook::Tc] {
            apply(lab, &services, before, OLD).ok();
            let generation = lab.generation();
            let fill = mount.fill();
            for version_change in [false, true] {
                if version_change {
                    lab.pretend_other_version();
                }
                apply(lab, &services, other(before), NEW).refused(3, &["gen-", "No space left"]);
                assert_in_force(lab, &services, OLD);
                assert_eq!(lab.generation(), generation);
            }
            fs::remove_file(fill).unwrap();
            let status = lab.home.run(["status", "--json"]).json();
            assert_eq!(status["hook"], before.to_string(), "{status:#}");
            apply(lab, &services, before, OLD).ok();
            lab.assert_enforced_by(before);
        }
    });
}
