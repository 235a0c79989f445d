//! What goes wrong on the way leaves the policy in force as it was, whole.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs::{self, Permissions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use smc_policy::kernel::hs_ctrl::{self, KernelTypes};
use smc_policy::kernel::object::{Prepared, Sizes};
use smc_policy_tests::connection::exchange_sized;
use smc_policy_tests::lab::{assert_denied, assert_smc, listen, selected};
use smc_policy_tests::{Kind, Lab, Listener, Rng, Run, needs, needs_hook, scaled};

/// Four services; policy number `n` (0 to 15) denies those whose bit is set in `n`, each by a rule of its own.
struct Services([Listener; 4]);

impl Services {
    fn open() -> Self {
        Self([(); 4].map(|()| listen(Kind::AfSmc, "127.0.0.2")))
    }

    fn policy(&self, number: u64) -> String {
        let mut text = format!("version = 1\n# policy {number}\n");
        for (bit, listener) in self.0.iter().enumerate() {
            if number >> bit & 1 == 1 {
                let port = listener.port();
                text += &format!(
                    "[[rule]]\nname = \"service-{bit}\"\naction = \"deny\"\ndirection = \"outbound\"\nports = [{port}]\n"
                );
            }
        }
        text
    }

    /// The number of the policy that the kernel enforces now.
    fn enforced(&self) -> u64 {
        let mut number = 0;
        for (bit, listener) in self.0.iter().enumerate() {
            let outcome = exchange_sized(Kind::AfSmc, None, listener, &[1, 100]).unwrap();
            assert_ne!(outcome.is_smc(), outcome.is_denied(), "{outcome}");
            number |= u64::from(outcome.is_denied()) << bit;
        }
        number
    }

    /// The number of the policy that `explain` speaks of.
    fn explained(&self, lab: &Lab) -> u64 {
        let mut number = 0;
        for (bit, listener) in self.0.iter().enumerate() {
            let answer = lab.explain(&[&listener.address().to_string()]);
            number |= u64::from(answer["action"] == "deny") << bit;
        }
        number
    }
}

/// Kills commands after a random part of the time that they take uninterrupted.
struct Killer {
    rng: Rng,
    usual: Duration,
}

impl Killer {
    /// Whether it was killed in time.
    fn kill(&mut self, lab: &Lab, arguments: [&str; 2]) -> bool {
        let share = self.rng.below(1200) as u32;
        let start = Instant::now();
        let running = lab.home.start(arguments.iter().filter(|word| !word.is_empty()));
        let wait = self.usual * share / 1000;
        thread::sleep(wait.saturating_sub(start.elapsed()));
        running.kill().code().is_none()
    }
}

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
        assert_nothing_piles_up(lab);
    });
}

/// Leftovers of killed commands are cleaned up by the next one.
fn assert_nothing_piles_up(lab: &Lab) {
    let records: Vec<PathBuf> = fs::read_dir(lab.home.path("run"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("gen-")))
        .collect();
    assert_eq!(records.len(), 1, "records: {records:?}");
}

#[test]
fn a_killed_first_apply_leaves_nothing_or_all() {
    needs_hook!();
    let rng = Rng::from_environment("a_killed_first_apply_leaves_nothing_or_all");
    Lab::run(|lab| {
        let services = Services::open();
        let policy = lab.home.write("policy.toml", &services.policy(0b1001));
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
            assert_eq!((services.enforced(), selected().as_str()), (0, ""), "round {round}");
        }
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
            assert_eq!((services.enforced(), selected().as_str()), (0, ""), "round {round}");
        }
    });
}

#[test]
fn the_policy_outlives_its_process_and_its_files() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        lab.apply(&services.policy(0b0011));
        let running = Command::new("pidof").arg("smc-policy").output();
        if let Ok(output) = running {
            assert_eq!(String::from_utf8_lossy(&output.stdout), "", "a process stayed behind");
        }
        fs::remove_file(lab.home.path("policy.toml")).unwrap();
        assert_eq!(services.enforced(), 0b0011);
        assert_eq!(services.explained(lab), 0b0011, "explain judges by the copy taken at apply");
    });
}

/// A refused command: one line on stderr that says what and what next; the same policy as before in force.
fn assert_refused(run: &Run, code: i32, says: &[&str]) {
    assert_eq!(run.code(), Some(code), "{run:#?}");
    for words in says {
        assert!(run.stderr.contains(words), "'{words}' is not in {run:#?}");
    }
    assert!(!run.stderr.contains("panicked"), "{run:#?}");
}

#[test]
fn a_bad_policy_changes_nothing() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        lab.apply(&services.policy(0b0101));
        let before = lab.generation();
        for (name, text, code) in [
            ("syntax.toml", "version = 1\n[[rule]\n".to_owned(), 2),
            ("unknown-key.toml", format!("{}colour = 7\n", services.policy(0b0010)), 2),
            (
                "failing-test.toml",
                format!(
                    "{}[[test]]\npeer = \"127.0.0.2\"\nport = {}\ndirection = \"outbound\"\nexpect = \"allow\"\n",
                    services.policy(0b0001),
                    services.0[0].port()
                ),
                1,
            ),
        ] {
            let path = lab.home.write(name, &text);
            let run = lab.home.run(["apply".as_ref(), path.as_os_str()]);
            assert_refused(&run, code, &[name]);
            assert_eq!(lab.generation(), before, "{name}");
        }
        let missing = lab.home.path("not-there.toml");
        let run = lab.home.run(["apply".as_ref(), missing.as_os_str()]);
        assert_refused(&run, 2, &["not-there.toml"]);
        assert_eq!(services.enforced(), 0b0101);
    });
}

/// Runs the binary as the user `nobody`, with folders it can reach.
fn as_nobody(lab: &Lab, arguments: &[&str]) -> Run {
    fs::set_permissions(lab.home.path(""), Permissions::from_mode(0o755)).unwrap();
    let mut command = lab.home.command(arguments);
    command.uid(65_534).gid(65_534);
    lab.home.start_command(command).wait()
}

#[test]
fn without_privilege_it_names_the_capability() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        lab.apply(&services.policy(0b0101));
        let before = lab.generation();
        let policy = lab.home.write("other.toml", &services.policy(0b1010));
        let policy = policy.to_str().unwrap();
        for arguments in [&["apply", policy][..], &["detach"]] {
            assert_refused(&as_nobody(lab, arguments), 4, &["CAP_"]);
        }
        assert_eq!(services.enforced(), 0b0101);
        assert_eq!(lab.generation(), before);
        // Reading a file needs no privilege.
        as_nobody(lab, &["check", policy]).ok();
        let address = services.0[1].address().to_string();
        let run = as_nobody(lab, &["explain", "--json", "--policy", policy, &address]).expect_code(1);
        assert_eq!(run.json()["action"], "deny");
    });
}

#[test]
fn without_bpffs_it_names_it() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let policy = lab.home.write("policy.toml", &services.policy(0b0101));
        let elsewhere = lab.home.path("no-bpffs");
        fs::create_dir(&elsewhere).unwrap();
        let mut command = lab.home.command(["apply".as_ref(), policy.as_os_str()]);
        command.env("SMC_POLICY_BPFFS", &elsewhere);
        let run = lab.home.start_command(command).wait();
        assert_refused(&run, 3, &["bpffs", "mount"]);
        assert_eq!((services.enforced(), selected().as_str()), (0, ""));
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0, "nothing left behind");
    });
}

#[test]
fn a_read_only_proc_sys_is_named() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        lab.apply(&services.policy(0b0101));
        let before = (lab.generation(), selected());
        lab.home.run(["detach"]).ok();
        let policy = lab.home.write("policy.toml", &services.policy(0b1010));
        let mut command = lab.home.command(["apply".as_ref(), policy.as_os_str()]);
        smc_policy_tests::sys::with_read_only_proc_sys(&mut command);
        let run = lab.home.start_command(command).wait();
        assert_refused(&run, 3, &["/proc/sys"]);
        assert_eq!((services.enforced(), selected().as_str()), (0, ""), "before: {before:?}");
        // Nothing of the attempt is in the way.
        lab.apply(&services.policy(0b1010));
        assert_eq!(services.enforced(), 0b1010);
    });
}

#[test]
fn a_kernel_without_the_hook_is_named() {
    needs!(Root, Tool, Netns, Smc, NoHsCtrl);
    Lab::run_without_smc_d(|lab| {
        let policy = lab.home.write("policy.toml", "version = 1\n[default]\noutbound = \"deny\"\n");
        let run = lab.home.run(["apply".as_ref(), policy.as_os_str()]);
        assert_refused(&run, 3, &["smc_hs_ctrl", "6.19"]);
        lab.home.run(["check".as_ref(), policy.as_os_str()]).ok();
    });
}

#[test]
fn a_kernel_without_smc_is_named() {
    needs!(Root, Tool, Netns, NoSmc);
    Lab::run_without_smc_d(|lab| {
        let policy = lab.home.write("policy.toml", "version = 1\n[default]\noutbound = \"deny\"\n");
        let run = lab.home.run(["apply".as_ref(), policy.as_os_str()]);
        assert_refused(&run, 3, &["modprobe smc"]);
    });
}

#[test]
fn rollback_returns_to_the_policy_before() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        lab.apply(&services.policy(0b0101));
        lab.apply(&services.policy(0b1010));
        assert_eq!(services.enforced(), 0b1010);
        lab.home.run(["rollback"]).ok();
        assert_eq!(services.enforced(), 0b0101);
        assert_eq!(services.explained(lab), 0b0101);
    });
}

#[test]
fn an_unconfirmed_apply_reverts() {
    needs_hook!();
    Lab::run(|lab| {
        let service = listen(Kind::AfSmc, "127.0.0.2");
        lab.apply("version = 1\n");
        assert_smc(Kind::AfSmc, None, &service);
        let policy = lab.home.write("trial.toml", "version = 1\n[default]\noutbound = \"deny\"\n");
        let arguments = ["apply", "--confirm", "4s", policy.to_str().unwrap()];
        let mut running = lab.home.start(arguments);
        let end = Instant::now() + Duration::from_secs(3);
        // Standard input is closed: nobody confirms.
        let mut denied = false;
        while Instant::now() < end && !denied {
            denied = exchange_sized(Kind::AfSmc, None, &service, &[1]).unwrap().is_denied();
        }
        assert!(denied, "the new policy is in force meanwhile; still running: {}", running.is_running());
        running.wait();
        let end = Instant::now() + Duration::from_secs(10);
        while exchange_sized(Kind::AfSmc, None, &service, &[1]).unwrap().is_denied() {
            assert!(Instant::now() < end, "never reverted");
            thread::sleep(Duration::from_millis(100));
        }
    });
}

#[test]
fn the_policy_folders_are_used_and_drift_is_told() {
    needs_hook!();
    Lab::run(|lab| {
        // The administrator's file replaces the vendor's of the same name.
        let service = listen(Kind::AfSmc, "127.0.0.2");
        lab.home.write("usr/policy.d/10-base.toml", "version = 1\n[default]\noutbound = \"deny\"\n");
        lab.home.run(["apply"]).ok();
        assert_denied(Kind::AfSmc, None, &service);
        lab.home.write("etc/policy.d/10-base.toml", "version = 1\n");
        lab.home.run(["status"]).expect_code(1); // the files differ from what is in force
        lab.home.run(["apply"]).ok();
        assert_smc(Kind::AfSmc, None, &service);
        lab.home.run(["status"]).ok();
    });
}

#[test]
fn a_foreign_choice_is_left_alone_unless_replaced() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let policy = lab.home.write("policy.toml", &services.policy(0b0101));
        let foreign = Foreign::register();
        fs::write("/proc/sys/net/smc/hs_ctrl", Foreign::NAME).unwrap();

        let run = lab.home.run(["apply".as_ref(), policy.as_os_str()]);
        assert_refused(&run, 3, &[Foreign::NAME, "--replace"]);
        assert_eq!((services.enforced(), selected().as_str()), (0, Foreign::NAME));
        lab.home.run(["detach"]).ok();
        assert_eq!(selected(), Foreign::NAME, "detach clears what is ours only");

        lab.home.run(["apply".as_ref(), "--replace".as_ref(), policy.as_os_str()]).ok();
        assert_eq!(services.enforced(), 0b0101);
        lab.apply(&services.policy(0b1010));
        assert_eq!(services.enforced(), 0b1010);
        lab.home.run(["detach"]).ok();
        assert_eq!((services.enforced(), selected().as_str()), (0, Foreign::NAME), "restored");
        drop(foreign);
    });
}

/// Somebody else's smc_hs_ctrl: made of this project's programs without a table, which allow everything, but under a
/// name that is no instance's.
struct Foreign(OwnedFd);

impl Foreign {
    const NAME: &str = "smcpol_foreign";

    fn register() -> Self {
        let types = KernelTypes::read().unwrap();
        let prepared = Prepared::new(Sizes { cells: 1, slots: 1 }, Some(&types.offsets)).unwrap();
        Self(hs_ctrl::register(&prepared, &types, "foreign").unwrap())
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // Deselected first, or it would go on as an orphan.
        let _ = fs::write("/proc/sys/net/smc/hs_ctrl", "\n");
        hs_ctrl::unregister(self.0.as_fd()).unwrap();
    }
}
