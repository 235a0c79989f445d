//! What goes wrong on the way leaves the policy in force as it was, whole.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

use smc_policy_tests::lab::{assert_denied, assert_smc, listen};
use smc_policy_tests::{Kind, Lab, Run, Services, eventually, needs_hook};

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
            let run = lab.home.run(["apply".as_ref(), "--json".as_ref(), path.as_os_str()]);
            let document = run.refused(code, &[name]).json();
            let finding = &document["findings"][0];
            assert_eq!(finding["file"], path.to_str().unwrap(), "{document:#}");
            assert!(finding["line"].as_u64().unwrap() > 0 && finding["message"].is_string(), "{document:#}");
            assert_eq!(document["exit"], code, "{document:#}");
            assert_eq!(lab.generation(), before, "{name}");
        }
        let missing = lab.home.path("not-there.toml");
        let run = lab.home.run(["apply".as_ref(), missing.as_os_str()]);
        run.refused(2, &["not-there.toml"]);
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
            as_nobody(lab, arguments).refused(4, &["CAP_"]);
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
        let elsewhere = lab.home.path("a-folder");
        fs::create_dir(&elsewhere).unwrap();
        let mut command = lab.home.command(["apply".as_ref(), policy.as_os_str()]);
        command.env("SMC_POLICY_BPFFS", &elsewhere);
        let run = lab.home.start_command(command).wait();
        run.refused(3, &["no BPF file system is mounted at", "mount -t bpf bpf", "a-folder"]);
        assert_eq!((services.enforced(), lab.deciding().as_str()), (0, ""));
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0, "nothing left behind");
    });
}

/// With /proc/sys read-only for it alone.
fn without_sysctls(lab: &Lab, arguments: &[&str]) -> Run {
    let mut command = lab.home.command(arguments);
    smc_policy_tests::sys::with_read_only_proc_sys(&mut command);
    lab.home.start_command(command).wait()
}

#[test]
fn a_read_only_proc_sys_is_named_by_a_first_apply() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        without_sysctls(lab, &["apply", &services.file(lab, 0b1010)]).refused(3, &["/proc/sys"]);
        assert_eq!(services.enforced(), 0);
        lab.assert_nothing_in_force();
        // Nothing of the attempt is in the way.
        services.apply(lab, 0b1010);
        assert_eq!(services.enforced(), 0b1010);
    });
}

#[test]
fn a_read_only_proc_sys_leaves_what_is_in_force() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, 0b0101);
        let before = (lab.generation(), lab.deciding());
        let other = services.file(lab, 0b1010);
        for arguments in [&["detach"][..], &["apply", &other], &["apply", "--confirm", "1s", &other]] {
            without_sysctls(lab, arguments).refused(3, &["/proc/sys"]);
            assert_eq!((lab.generation(), lab.deciding()), before, "{arguments:?}");
            assert_eq!(services.enforced(), 0b0101, "{arguments:?}");
        }
        lab.assert_nothing_piles_up();
        lab.home.run(["status"]).ok();
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
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
fn nobody_else_can_hold_the_lock() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, 0b0101);
        fs::set_permissions(lab.home.path(""), Permissions::from_mode(0o755)).unwrap();
        let lock = lab.home.path("run/lock");
        let mode = || fs::metadata(&lock).unwrap().permissions().mode() & 0o777;
        let open_as_nobody = |how: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", &format!("exec 3{how} \"$0\"")]).arg(&lock);
            command.uid(65_534).gid(65_534).output().unwrap().status.success()
        };
        assert_eq!(mode(), 0o600);
        assert!(!open_as_nobody("<") && !open_as_nobody(">>"));
        // Also one that was there before, open to all.
        fs::set_permissions(&lock, Permissions::from_mode(0o666)).unwrap();
        assert!(open_as_nobody("<"), "the attempt itself works");
        services.apply(lab, 0b1010);
        assert_eq!(mode(), 0o600);
    });
}

#[test]
fn whoever_waits_for_a_lock_that_is_removed_waits_for_the_next() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, 0b0101);
        let path = lab.home.path("run/lock");
        let lock = || {
            let file = File::options().create(true).truncate(false).write(true).open(&path).unwrap();
            file.lock().unwrap();
            file
        };
        let first = lock();
        let mut running = lab.home.start(["apply", &services.file(lab, 0b1010)]);
        let waits = || is_waiting_for(running.pid(), &first);
        eventually("it waits", waits);
        fs::remove_file(&path).unwrap();
        let second = lock();
        drop(first);
        eventually("it waits for the other file", || is_waiting_for(running.pid(), &second));
        assert!(running.is_running());
        assert_eq!(services.enforced(), 0b0101);
        drop(second);
        let run = running.wait().ok();
        assert!(run.stderr.contains("waiting for another smc-policy"), "{run:#?}");
        assert_eq!(services.enforced(), 0b1010);
    });
}

/// Whether the process waits for a lock on the file (/proc/locks: `1: -> FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE ...`).
fn is_waiting_for(pid: u32, file: &File) -> bool {
    let inode = std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    let locks = fs::read_to_string("/proc/locks").unwrap();
    locks.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.get(1) == Some(&"->")
            && fields.get(5) == Some(&pid.to_string().as_str())
            && fields.get(6).is_some_and(|place| place.ends_with(&format!(":{inode}")))
    })
}
