//! SIGKILL at random moments: the old policy or the new one is in force, whole, and the next command cleans up.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::path::Path;

use smc_policy_tests::{Killer, Lab, Rng, Services, needs_hook, scaled};

#[test]
fn a_killed_apply_leaves_one_whole_policy() {
    needs_hook!();
    let rng = Rng::from_environment("a_killed_apply_leaves_one_whole_policy");
    Lab::run(|lab| {
        let services = Services::open();
        let write = |number| lab.home.write(&format!("policy-{number}.toml"), &services.policy(number));
        let apply = |path: &Path| lab.home.run(["apply".as_ref(), path.as_os_str()]).ok();
        apply(&write(0b1010));
        let mut old = 0b0101;
        let usual = apply(&write(old)).time;
        let mut killer = Killer { rng, usual };

        let (mut kept, mut replaced, mut late) = (0, 0, 0);
        for round in 0..scaled(40).max(8) {
            let new = loop {
                let number = killer.rng.below(16);
                if number != old {
                    break number;
                }
            };
            let path = write(new);
            let killed = killer.kill(lab, ["apply", path.to_str().unwrap()]);
            let now = services.enforced();
            assert!(now == old || now == new, "round {round}: {old:04b} -> {new:04b}, but {now:04b}");
            assert!(killed || now == new, "round {round}: finished, but {now:04b} is enforced");
            assert_eq!(services.explained(lab), now, "round {round}: explain speaks of what is in force");
            match (killed, now == new) {
                (false, _) => late += 1,
                (true, true) => replaced += 1,
                (true, false) => kept += 1,
            }
            // Every other time the next apply meets what the killed one left.
            old = now;
            if round % 2 == 1 {
                old = killer.rng.below(16);
                apply(&write(old));
                assert_eq!(services.enforced(), old, "round {round}: the next apply");
                assert_eq!(services.explained(lab), old);
            }
        }
        println!("killed with the old policy in force {kept}, with the new one {replaced}, too late {late}");
        apply(&write(0b1010));
        assert_eq!(services.enforced(), 0b1010);
        lab.assert_nothing_piles_up();
    });
}

#[test]
fn a_killed_replacement_leaves_one_whole_policy() {
    needs_hook!();
    let rng = Rng::from_environment("a_killed_replacement_leaves_one_whole_policy");
    Lab::run(|lab| {
        let services = Services::open();
        let (old, new) = (0b0101, 0b1010);
        services.apply(lab, new);
        lab.pretend_other_version();
        let usual = services.apply(lab, old).time;
        let mut killer = Killer { rng, usual };
        let mut killed = 0;
        for round in 0..scaled(40).max(8) {
            lab.pretend_other_version();
            killed += usize::from(killer.kill(lab, ["apply", &services.file(lab, new)]));
            let now = services.enforced();
            assert!(now == old || now == new, "round {round}: {now:04b}");
            assert_eq!(services.explained(lab), now, "round {round}: explain speaks of what is in force");
            services.apply(lab, old);
            assert_eq!(services.enforced(), old, "round {round}: the next apply");
            lab.assert_nothing_piles_up();
        }
        println!("{killed} killed in time");
        assert!(killed > 0, "no replacement was interrupted");
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

#[test]
fn a_killed_first_apply_leaves_nothing_or_all() {
    needs_hook!();
    let rng = Rng::from_environment("a_killed_first_apply_leaves_nothing_or_all");
    Lab::run(|lab| {
        let services = Services::open();
        let policy = lab.home.write("policy.toml", &services.policy_both_ways(0b1001));
        let policy = policy.to_str().unwrap();
        let usual = lab.home.run(["apply", policy]).ok().time;
        lab.home.run(["detach"]).ok();
        let mut killer = Killer { rng, usual };
        for round in 0..scaled(20).max(4) {
            killer.kill(lab, ["apply", policy]);
            let now = services.enforced();
            assert!(now == 0 || now == 0b1001, "round {round}: {now:04b}");
            if round % 2 == 0 {
                lab.home.run(["apply", policy]).ok();
                assert_eq!(services.enforced(), 0b1001, "round {round}");
            }
            lab.home.run(["detach"]).ok();
            assert_eq!((services.enforced(), lab.deciding().as_str()), (0, ""), "round {round}");
        }
        lab.assert_nothing_in_force();
    });
}

#[test]
fn a_killed_detach_can_be_repeated() {
    needs_hook!();
    let rng = Rng::from_environment("a_killed_detach_can_be_repeated");
    Lab::run(|lab| {
        let services = Services::open();
        let policy = lab.home.write("policy.toml", &services.policy(0b0110));
        let policy = policy.to_str().unwrap();
        lab.home.run(["apply", policy]).ok();
        let usual = lab.home.run(["detach"]).ok().time;
        let mut killer = Killer { rng, usual };
        for round in 0..scaled(20).max(4) {
            lab.home.run(["apply", policy]).ok();
            assert_eq!(services.enforced(), 0b0110, "round {round}");
            killer.kill(lab, ["detach", ""]);
            let now = services.enforced();
            assert!(now == 0 || now == 0b0110, "round {round}: {now:04b}");
            lab.home.run(["detach"]).ok();
            assert_eq!((services.enforced(), lab.deciding().as_str()), (0, ""), "round {round}");
        }
        lab.assert_nothing_in_force();
    });
}
