//! Files and pins that were lost, damaged or left behind: the kernel goes on deciding, what cannot be told is not made
//! up, and the next apply puts everything right.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs;
use std::path::Path;

use serde_json::Value;
use smc_policy::kernel::sys::{MapSpec, map_create};
use smc_policy_tests::tool::remove_pins;
use smc_policy_tests::{Lab, Mount, Services, Trap, foreign, needs_hook, sys};

const OLD: u64 = 0b0101;
const NEW: u64 = 0b1010;
const THIRD: u64 = 0b0011;

/// The policy is in force in the kernel, and nobody claims to know what it says: neither the kernel's answer nor a
/// made-up one is given.
#[track_caller]
fn assert_untold(lab: &Lab, services: &Services, enforced: u64, says: &[&str]) {
    assert_eq!(services.enforced(), enforced);
    let subject = services.0[0].address().to_string();
    let policy = services.file(lab, NEW);
    for question in [["explain", &subject], ["plan", &policy]] {
        let run = lab.home.run(question).refused(3, says);
        assert_eq!(run.stdout, "", "no answer: {run:#?}");
    }
    let run = lab.home.run(["status"]).expect_code(1);
    for words in says {
        assert!(run.stdout.contains(words), "'{words}' is not in {run:#?}");
    }
}

/// An apply puts everything right; a detach leaves nothing.
#[track_caller]
fn assert_mended(lab: &Lab, services: &Services, number: u64) {
    services.apply(lab, number);
    assert_eq!((services.enforced(), services.explained(lab)), (number, number));
    lab.assert_nothing_piles_up();
    lab.home.run(["status"]).ok();
    lab.home.run(["detach"]).ok();
    lab.assert_nothing_in_force();
}

#[test]
fn all_pins_lost() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        remove_pins(&lab.pins());
        assert_untold(lab, &services, OLD, &["its pins in", "are gone", "smc-policy apply"]);
        assert_mended(lab, &services, NEW);
        // detach works as well, although it finds nothing but the registration.
        services.apply(lab, OLD);
        remove_pins(&lab.pins());
        lab.home.run(["detach"]).ok();
        assert_eq!(services.enforced(), 0);
        lab.assert_nothing_in_force();
    });
}

#[test]
fn one_pin_lost() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        for pin in ["info", "generation", "hits", "query"] {
            services.apply(lab, OLD);
            fs::remove_file(lab.pins().join(&lab.instances()[0]).join(pin)).unwrap();
            assert_untold(lab, &services, OLD, &["its pins in", "are gone", "smc-policy apply"]);
            services.apply(lab, NEW);
            assert_eq!(services.enforced(), NEW, "{pin}");
            lab.assert_nothing_piles_up();
        }
        assert_mended(lab, &services, NEW);
    });
}

#[test]
fn the_pins_and_the_choice_lost() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let name = lab.deciding();
        remove_pins(&lab.pins());
        foreign::select("");
        assert_eq!(services.enforced(), 0);
        // Another smc-policy with folders of its own may use it: it is told, not taken away.
        let run = lab.home.run(["status"]).expect_code(1);
        assert!(run.stdout.contains(&name) && run.stdout.contains("pinned nowhere"), "{run:#?}");
        services.apply(lab, NEW);
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        lab.home.run(["detach"]).ok();
        smc_policy::kernel::hs_ctrl::unregister_by_id(name.strip_prefix("smcpol_").unwrap()).unwrap();
        lab.assert_nothing_in_force();
    });
}

#[test]
fn the_record_lost() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let before = lab.generation();
        fs::remove_file(lab.record(before)).unwrap();
        assert_untold(lab, &services, OLD, &["no usable record", "smc-policy apply"]);
        // Until the new policy is in force, its record must not be taken for that of the old one.
        let trap = Trap::set(&lab.home.path("state/next.tmp"));
        trap.kill(lab.home.start(["apply", &services.file(lab, NEW)]));
        assert_untold(lab, &services, OLD, &["no usable record", "smc-policy apply"]);
        services.apply(lab, NEW);
        assert!(lab.generation() > before, "generations only grow: {before} -> {}", lab.generation());
        assert_mended(lab, &services, NEW);
    });
}

/// Replaces the record of generation `n` by what `change` makes of it.
fn edit(lab: &Lab, n: u64, change: impl FnOnce(&mut Value)) {
    let path = lab.record(n);
    let mut record = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut record);
    fs::write(&path, record.to_string()).unwrap();
}

#[test]
fn an_edited_record_is_not_believed() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        edit(lab, 1, |record| {
            let text = record["sources"][0]["text"].as_str().unwrap().replace("deny", "allow");
            record["sources"][0]["text"] = text.into();
        });
        assert_untold(lab, &services, OLD, &["no usable record", "smc-policy apply"]);
        // The same policy again is no "already in force".
        assert_mended(lab, &services, OLD);
    });
}

#[test]
fn a_record_with_absurd_slots() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        for (pointer, slot) in [("/default_slots/1", u32::MAX), ("/rule_slots/0/slot", 5_000)] {
            services.apply(lab, OLD);
            edit(lab, lab.generation(), |record| *record.pointer_mut(pointer).unwrap() = slot.into());
            assert_untold(lab, &services, OLD, &["no usable record"]);
            services.apply(lab, NEW);
        }
        assert_mended(lab, &services, NEW);
    });
}

#[test]
fn records_of_absurd_generations() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        for name in
            ["gen-18446744073709551615", "gen-18446744073709551616", "gen-9223372036854775808", "gen-x"]
        {
            lab.home.write(&format!("run/{name}"), "");
        }
        services.apply(lab, OLD);
        assert_eq!((lab.generation(), services.enforced(), services.explained(lab)), (1, OLD, OLD));
        services.apply(lab, NEW);
        assert_eq!((lab.generation(), services.enforced(), services.explained(lab)), (2, NEW, NEW));
    });
}

#[test]
fn a_damaged_previous_policy_is_named() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        services.apply(lab, NEW);
        lab.home.write("state/previous.json", "{");
        lab.home.run(["rollback"]).refused(3, &["previous.json", "smc-policy apply"]);
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        services.apply(lab, THIRD);
        lab.home.run(["rollback"]).ok();
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
    });
}

#[test]
fn a_damaged_current_policy_is_written_anew() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        services.apply(lab, NEW);
        // Also by an apply of what is in force already.
        for (damage, next) in [("{", NEW), ("", THIRD)] {
            lab.home.write("state/current.json", damage);
            services.apply(lab, next);
            assert_eq!(kept(lab, "current"), Some(next));
            // A damaged one never becomes what rollback returns to.
            assert_eq!(kept(lab, "previous"), Some(OLD));
        }
        lab.home.run(["rollback"]).ok();
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        // With nothing in force, rollback wants the current one.
        lab.home.run(["detach"]).ok();
        lab.home.write("state/current.json", "{");
        lab.home.run(["rollback"]).refused(3, &["current.json", "smc-policy apply"]);
        lab.assert_nothing_in_force();
    });
}

/// The number of the policy in `state/NAME.json`.
fn kept(lab: &Lab, name: &str) -> Option<u64> {
    let text = fs::read_to_string(lab.home.path(&format!("state/{name}.json"))).ok()?;
    let record: Value = serde_json::from_str(&text).unwrap();
    let text = record["sources"][0]["text"].as_str().unwrap();
    let number = text.lines().find_map(|line| line.strip_prefix("# policy ")).unwrap();
    Some(number.parse().unwrap())
}

#[test]
fn a_damaged_announcement_and_half_written_files_are_removed() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        for name in
            ["run/gen-7.tmp", "run/gen-2.tmp", "run/unconfirmed.tmp", "run/replaced.tmp", "state/next.tmp"]
        {
            lab.home.write(name, "{\"version");
        }
        lab.home.write("run/gen-7", "{");
        lab.home.write("state/next.json", "{");
        services.apply(lab, NEW);
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        lab.assert_nothing_piles_up();
        assert_eq!((kept(lab, "current"), kept(lab, "previous")), (Some(NEW), Some(OLD)));
    });
}

#[test]
fn a_full_state_folder_is_a_warning() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let mount = Mount::small(&lab.home.path("state"), 64);
        services.apply(lab, OLD);
        let fill = mount.fill();
        let run = services.apply(lab, NEW);
        assert!(run.stderr.contains("warning:") && run.stderr.contains("next boot"), "{run:#?}");
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        assert_eq!(kept(lab, "current"), Some(OLD), "what was there is whole");
        lab.assert_nothing_piles_up();
        // With room again, the same apply keeps it.
        fs::remove_file(fill).unwrap();
        let run = services.apply(lab, NEW);
        assert_eq!(run.stderr, "", "{run:#?}");
        assert_eq!((kept(lab, "current"), kept(lab, "previous")), (Some(NEW), Some(OLD)));
        lab.home.run(["rollback"]).ok();
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
    });
}

/// Without its record nobody could say what is in force: that is no warning.
#[test]
fn a_full_run_folder_changes_nothing() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let mount = Mount::small(&lab.home.path("run"), 64);
        services.apply(lab, OLD);
        let before = lab.generation();
        let fill = mount.fill();
        lab.home.run(["apply", &services.file(lab, NEW)]).refused(3, &["gen-", "No space left"]);
        assert_eq!((services.enforced(), services.explained(lab), lab.generation()), (OLD, OLD, before));
        lab.assert_nothing_piles_up();
        fs::remove_file(fill).unwrap();
        assert_mended(lab, &services, NEW);
    });
}

#[test]
fn rollback_after_an_apply_that_was_killed_before_it_settled() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, THIRD);
        services.apply(lab, OLD);
        // The old policy's file is read when the new one is in force, to see whether it becomes the previous one.
        let trap = Trap::set(&lab.home.path("state/current.json"));
        trap.kill(lab.home.start(["apply", &services.file(lab, NEW)]));
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        let kept_now = ["next", "current", "previous"].map(|name| kept(lab, name));
        assert_eq!(kept_now, [Some(NEW), Some(OLD), Some(THIRD)], "as the kill left it");
        lab.home.run(["rollback"]).ok();
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        lab.assert_nothing_piles_up();
    });
}

#[test]
fn an_apply_that_was_killed_before_its_store_is_forgotten() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, THIRD);
        services.apply(lab, OLD);
        let trap = Trap::set(&lab.home.path("state/next.tmp"));
        trap.kill(lab.home.start(["apply", &services.file(lab, NEW)]));
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        lab.home.run(["rollback"]).ok();
        assert_eq!((services.enforced(), services.explained(lab)), (THIRD, THIRD));
        lab.assert_nothing_piles_up();
    });
}

/// Looking for its registrations, the tool meets every map of the machine.
#[test]
fn more_maps_than_it_may_open() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let others: Vec<_> = (0..60)
            .map(|_| {
                map_create(&MapSpec {
                    name: "other",
                    kind: 2, // BPF_MAP_TYPE_ARRAY
                    key_size: 4,
                    value_size: 4,
                    max_entries: 1,
                    flags: 0,
                })
                .unwrap()
            })
            .collect();
        let run = |arguments: &[&str]| {
            let mut command = lab.home.command(arguments);
            sys::with_file_limit(&mut command, 50);
            lab.home.start_command(command).wait()
        };
        lab.pretend_other_version();
        let json = run(&["apply", "--json", &services.file(lab, NEW)]).ok().json();
        assert_eq!((&json["change"], &json["warnings"]), (&"replaced".into(), &serde_json::json!([])));
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        lab.assert_nothing_piles_up();
        run(&["status"]).ok();
        let json = run(&["detach", "--json"]).ok().json();
        assert_eq!(json["warnings"], serde_json::json!([]));
        lab.assert_nothing_in_force();
        drop(others);
    });
}

#[test]
fn a_strangers_folder_among_the_pins_is_a_warning() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        services.apply(lab, OLD);
        let stranger = lab.pins().join("new-deadbeef");
        fs::create_dir_all(stranger.join("sub")).unwrap();
        // A name that is none of the tool's is not even looked at.
        let other = lab.pins().join("other");
        fs::create_dir(&other).unwrap();
        let warned = |json: &Value| {
            let warnings = json["warnings"].as_array().unwrap();
            assert!(warnings.iter().any(|text| text.as_str().unwrap().contains("new-deadbeef")), "{json:#}");
        };
        let run = lab.home.run(["apply", "--json", &services.file(lab, NEW)]).ok();
        warned(&run.json());
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        let run = lab.home.run(["detach", "--json"]).ok();
        warned(&run.json());
        assert_eq!((services.enforced(), lab.deciding().as_str()), (0, ""));
        assert!(is_folder(&stranger.join("sub")) && is_folder(&other), "what is not ours stays");
        assert_eq!(lab.registrations(), [""; 0]);
    });
}

fn is_folder(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.is_dir())
}
