//! Others on the same machine: programs that use the hook themselves, and network namespaces with a policy of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command};

use smc_policy_tests::foreign::select;
use smc_policy_tests::lab::selected;
use smc_policy_tests::{Foreign, Lab, Run, Services, eventually, needs_hook, netns, sys};

#[test]
fn a_foreign_choice_is_left_alone_unless_replaced() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let policy = services.file(lab, 0b0101);
        let foreign = Foreign::register();
        foreign.select();

        lab.home.run(["apply", &policy]).refused(3, &[Foreign::NAME, "--replace"]);
        assert_eq!((services.enforced(), selected().as_str()), (0, Foreign::NAME));
        assert_eq!((lab.instances(), lab.registrations()), (vec![], vec![]), "nothing was loaded");
        lab.home.run(["rollback"]).expect_code(2); // nothing is kept
        lab.home.run(["detach"]).ok();
        assert_eq!(selected(), Foreign::NAME, "detach clears what is ours only");

        lab.home.run(["apply", "--replace", &policy]).ok();
        assert_eq!((services.enforced(), services.explained(lab)), (0b0101, 0b0101));
        services.apply(lab, 0b1010);
        assert_eq!(services.enforced(), 0b1010);
        // What it took over from survives a replacement of the programs.
        lab.pretend_other_version();
        services.apply(lab, 0b0110);
        let json = lab.home.run(["detach", "--json"]).ok().json();
        assert_eq!(json["restored"], Foreign::NAME, "{json:#}");
        assert_eq!((services.enforced(), selected().as_str()), (0, Foreign::NAME));
        assert_eq!((lab.instances(), lab.registrations()), (vec![], vec![]));
        drop(foreign);
    });
}

#[test]
fn what_a_foreign_program_decides_is_not_made_up() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, 0b0101);
        let foreign = Foreign::register();
        foreign.select();
        assert_eq!(services.enforced(), 0);
        for listener in &services.0 {
            let run = lab.home.run(["explain", &listener.address().to_string()]);
            let run = run.refused(3, &[Foreign::NAME, "not known here"]);
            assert_eq!(run.stdout, "", "no answer: {run:#?}");
        }
        let run = lab.home.run(["status"]).expect_code(1);
        assert!(run.stdout.contains(Foreign::NAME), "{run:#?}");
        let other = services.file(lab, 0b1010);
        for arguments in [&["apply", &other][..], &["apply", "--confirm", "1s", &other], &["rollback"]] {
            lab.home.run(arguments).refused(3, &[Foreign::NAME]);
            assert_eq!((services.enforced(), selected().as_str()), (0, Foreign::NAME), "{arguments:?}");
        }
        // To confirm takes something to return to, and a foreign choice could not be returned to.
        lab.home
            .run(["apply", "--replace", "--confirm", "1s", &other])
            .refused(3, &["--confirm", Foreign::NAME]);
        assert_eq!((services.enforced(), selected().as_str()), (0, Foreign::NAME));
        drop(foreign);
    });
}

#[test]
fn what_the_administrator_cleared_does_not_return() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let foreign = Foreign::register();
        // With an apply after the clearing, and without.
        for again in [true, false] {
            foreign.select();
            lab.home.run(["apply", "--replace", &services.file(lab, 0b0101)]).ok();
            select("");
            if again {
                services.apply(lab, 0b0101);
                assert_eq!(services.enforced(), 0b0101);
            }
            let json = lab.home.run(["detach", "--json"]).ok().json();
            assert!(json["restored"].is_null(), "{json:#}");
            lab.assert_nothing_in_force();
            services.apply(lab, 0b1010);
            lab.home.run(["detach"]).ok();
            lab.assert_nothing_in_force();
        }
        drop(foreign);
    });
}

#[test]
fn a_foreign_choice_that_is_gone_is_not_restored() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let mut foreign = Foreign::register();
        foreign.select();
        lab.home.run(["apply", "--replace", &services.file(lab, 0b0101)]).ok();
        foreign.unregister();
        let run = lab.home.run(["detach"]).ok();
        assert!(
            run.stderr.contains(Foreign::NAME) && run.stderr.contains("no longer registered"),
            "{run:#?}"
        );
        assert_eq!(services.enforced(), 0);
        lab.assert_nothing_in_force();
    });
}

#[test]
fn a_choice_made_while_an_apply_loads_is_not_overwritten() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let foreign = Foreign::register();
        let policy = services.file(lab, 0b0101);
        let mut refused = 0;
        for round in 0..3 {
            let running = lab.home.start(["apply", &policy]);
            eventually("it loads", || !lab.instances().is_empty());
            foreign.select();
            let run = running.wait();
            assert_eq!(selected(), Foreign::NAME, "round {round}: {run:#?}");
            if run.code() != Some(0) {
                run.refused(3, &["changed meanwhile", Foreign::NAME]);
                assert_eq!((lab.instances(), lab.registrations()), (vec![], vec![]), "round {round}");
                refused += 1;
            }
            assert_eq!(services.enforced(), 0);
            select("");
            lab.home.run(["detach"]).ok();
        }
        assert!(refused > 0, "never in time");
        drop(foreign);
        lab.assert_nothing_in_force();
    });
}

/// A network namespace that lives as long as this process in it.
struct Namespace {
    keeper: Child,
    inode: u64,
}

impl Namespace {
    fn open() -> Self {
        let keeper = netns::in_new_namespace(&[], || Command::new("sleep").arg("600").spawn().unwrap());
        let inode = fs::metadata(format!("/proc/{}/ns/net", keeper.id())).unwrap().ino();
        Self { keeper, inode }
    }

    /// Runs the tool in it.
    fn run(&self, lab: &Lab, arguments: &[&str]) -> Run {
        let namespace = File::open(format!("/proc/{}/ns/net", self.keeper.id())).unwrap();
        let mut command = lab.home.command(arguments);
        sys::in_network(&mut command, namespace.into());
        lab.home.start_command(command).wait()
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.keeper.kill().unwrap();
        self.keeper.wait().unwrap();
    }
}

#[test]
fn another_network_namespaces_policy_is_left_alone() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let there = Namespace::open();
        there.run(lab, &["apply", &services.file(lab, 0b0101)]).ok();
        let before = there.run(lab, &["status", "--json"]).ok().json();
        let name = format!("net:[{}]", there.inode);
        let other = services.file(lab, 0b1010);
        for arguments in [
            &["apply", &other][..],
            &["apply", "--confirm", "1s", &other],
            &["detach"],
            &["rollback"],
            &["status"],
        ] {
            lab.home.run(arguments).refused(3, &[&name, "another network namespace"]);
            assert_eq!((services.enforced(), selected().as_str()), (0, ""), "{arguments:?}");
            let now = there.run(lab, &["status", "--json"]).ok().json();
            assert_eq!((&now["generation"], &now["digest"]), (&before["generation"], &before["digest"]));
            assert_eq!(now["namespaces"], before["namespaces"], "{arguments:?}");
        }
        let subject = services.0[0].address().to_string();
        let answer = there.run(lab, &["explain", "--json", &subject]).expect_code(1).json();
        assert_eq!(answer["action"], "deny", "still in force there: {answer:#}");
        // Once it is gone, nothing of it is in the way.
        drop(there);
        services.apply(lab, 0b1010);
        assert_eq!((services.enforced(), services.explained(lab)), (0b1010, 0b1010));
        lab.assert_nothing_piles_up();
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}
