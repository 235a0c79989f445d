//! The choice of hook where somebody else's smc_hs_ctrl is selected, where the sysctl cannot be written, and where smc is
//! not loaded.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::path::Path;

use smc_policy_tests::command::output;
use smc_policy_tests::lab::{programs_attached, selected};
use smc_policy_tests::{
    Foreign, Hook, Lab, Rng, Run, Services, Traffic, eventually, needs, needs_hook, sys, ueid,
};

const OLD: u64 = 0b0101;
const NEW: u64 = 0b1010;

fn apply(lab: &Lab, services: &Services, options: &[&str], number: u64) -> Run {
    let file = services.file(lab, number);
    let fixed = ["apply", "--json"];
    lab.home.run(fixed.iter().chain(options).chain([&file.as_str()]))
}

#[track_caller]
fn assert_in_force(lab: &Lab, services: &Services, number: u64, hook: Hook) {
    assert_eq!((services.enforced(), services.explained(lab)), (number, number));
    lab.assert_enforced_by(hook);
}

/// The foreign one is selected, and of ours there are no programs, pins or registrations.
#[track_caller]
fn assert_foreign_alone(lab: &Lab, services: &Services) {
    assert_eq!((services.enforced(), selected().as_str()), (0, Foreign::NAME));
    assert_eq!((lab.instances(), programs_attached()), (vec![], vec![]));
    eventually("nothing is registered", || lab.registrations().is_empty());
}

#[test]
fn hooks_beside_a_foreign_choice() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let foreign = Foreign::register();
        foreign.select();
        apply(lab, &services, &[], OLD).refused(3, &[Foreign::NAME, "--replace"]);
        assert_foreign_alone(lab, &services);
        // tc works beside it.
        apply(lab, &services, &["--hook", "tc"], OLD).ok();
        assert_in_force(lab, &services, OLD, Hook::Tc);
        assert_eq!(selected(), Foreign::NAME);
        for hook in ["auto", "hs_ctrl"] {
            let refused = apply(lab, &services, &["--hook", hook], NEW);
            refused.refused(3, &[Foreign::NAME, "--replace"]);
            assert_in_force(lab, &services, OLD, Hook::Tc);
        }
        apply(lab, &services, &["--hook", "tc"], NEW).ok();
        assert_in_force(lab, &services, NEW, Hook::Tc);
        let json = lab.home.run(["detach", "--json"]).ok().json();
        assert!(json["restored"].is_null(), "it was never taken away: {json:#}");
        assert_foreign_alone(lab, &services);
        drop(foreign);
    });
}

#[test]
fn hooks_give_a_foreign_choice_back() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let foreign = Foreign::register();
        foreign.select();
        // First tc beside it, then in its place.
        apply(lab, &services, &["--hook", "tc"], NEW).ok();
        let json = apply(lab, &services, &["--replace"], OLD).ok().json();
        assert_eq!((&json["hook"], &json["restored"]), (&"hs_ctrl".into(), &serde_json::Value::Null));
        assert_in_force(lab, &services, OLD, Hook::HsCtrl);
        // Without being asked again, as long as it is ours.
        lab.pretend_other_version();
        apply(lab, &services, &[], NEW).ok();
        assert_in_force(lab, &services, NEW, Hook::HsCtrl);
        let json = apply(lab, &services, &["--hook", "tc"], OLD).ok().json();
        assert_eq!(json["restored"], Foreign::NAME, "{json:#}");
        assert_in_force(lab, &services, OLD, Hook::Tc);
        assert_eq!(selected(), Foreign::NAME);
        // What it returns to had taken over, with leave.
        lab.home.run(["rollback"]).ok();
        assert_in_force(lab, &services, NEW, Hook::HsCtrl);
        let run = apply(lab, &services, &["--hook", "tc", "--confirm", "1s"], OLD).expect_code(1);
        assert!(run.stderr.contains("Not confirmed"), "{run:#?}");
        assert_in_force(lab, &services, NEW, Hook::HsCtrl);
        let json = lab.home.run(["detach", "--json"]).ok().json();
        assert_eq!(json["restored"], Foreign::NAME, "{json:#}");
        assert_foreign_alone(lab, &services);
        drop(foreign);
        lab.assert_nothing_in_force();
    });
}

#[test]
fn hooks_do_not_change_while_the_sysctl_cannot_be_written() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        apply(lab, &services, &[], OLD).ok();
        let file = services.file(lab, NEW);
        let mut command = lab.home.command(["apply", "--hook", "tc", &file]);
        sys::with_read_only_proc_sys(&mut command);
        lab.home.start_command(command).wait().refused(3, &["/proc/sys is mounted read-only"]);
        assert_in_force(lab, &services, OLD, Hook::HsCtrl);
    });
}

/// Loads the modules again, whatever becomes of the test.
struct Loaded;

impl Loaded {
    fn again(&self) {
        for module in ["smc", "smc_diag"] {
            output("modprobe", &[module]);
        }
        ueid::ensure().expect("a UEID");
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.again();
    }
}

fn is_loaded() -> bool {
    Path::new("/sys/module/smc").exists()
}

#[test]
fn hooks_move_when_smc_comes() {
    needs!(Root, Tool, Netns, Bpffs, Smc, HsCtrl, SmcModule, SmcDiag, SmcD);
    let rng = Rng::from_environment("hooks_move_when_smc_comes");
    Lab::run(|lab| {
        let loaded = Loaded;
        lab.home.write("etc/config.toml", "retransmit = \"keep\"\n");
        // Sockets and namespaces of earlier tests may still be on their way out.
        eventually("smc can be unloaded", || {
            ["smc_diag", "smc"].iter().all(|module| {
                !Path::new("/sys/module").join(module).exists()
                    || smc_policy_tests::command::run("rmmod", &[module]).is_ok()
            })
        });
        // Ports that nobody listens on yet: the policy is about them all the same.
        let file = lab.home.write("policy.toml", "version = 1\n[default]\noutbound = \"deny\"\n");
        let file = file.to_str().unwrap();
        lab.home
            .run(["apply", "--hook", "hs_ctrl", file])
            .refused(3, &["modprobe smc", "/etc/modules-load.d"]);
        lab.assert_nothing_in_force();
        let json = lab.home.run(["apply", "--json", file]).ok().json();
        assert_eq!(json["hook"], "tc", "{json:#}");
        assert!(json["why_tc"].as_str().unwrap().contains("SMC is not there"), "{json:#}");
        lab.home.run(["status"]).ok();
        lab.home.run(["explain", "127.0.0.2:80"]).expect_code(1);
        let guard = &lab.status()["guard"];
        let waits =
            guard["not_learning"].as_str().is_some_and(|why| why.contains("waits for the module smc"));
        assert!(guard["learns"] == false && waits, "{guard:#}");
        assert!(!is_loaded(), "nothing has loaded it");

        loaded.again();
        let services = Services::open();
        assert_eq!(services.enforced(), 0b1111);
        let status = lab.home.run(["status", "--json"]).ok().json();
        let notes = status["notes"].as_array().unwrap();
        let is_told =
            |note: &serde_json::Value| note.as_str().unwrap().contains("hook hs_ctrl can be used now");
        assert!(notes.iter().any(is_told), "{status:#}");
        Traffic::run(&services, 0b1111, rng, |traffic| {
            traffic.wait(5);
            let json = lab.home.run(["apply", "--json", file]).ok().json();
            assert_eq!((&json["hook"], &json["why_tc"]), (&"hs_ctrl".into(), &serde_json::Value::Null));
            traffic.wait(5);
        });
        lab.assert_enforced_by(Hook::HsCtrl);
        assert_eq!(lab.status()["guard"]["learns"], true, "{:#}", lab.status());
        // Registered, it holds the module, and so does the learner.
        let refused = smc_policy_tests::command::run("rmmod", &["smc_diag"])
            .and_then(|_| smc_policy_tests::command::run("rmmod", &["smc"]));
        assert!(refused.is_err());
        loaded.again();
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}
