//! Which devices have the programs of the tc hook, and what becomes of others' programs there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use serde_json::Value;
use smc_policy::kernel::tc::{self, Side, Way};
use smc_policy_tests::attaching::{World, add_devices, chain, device, qdiscs, run};
use smc_policy_tests::lab::programs_attached;
use smc_policy_tests::{Counting, Hook, Lab, Run, Services, needs, sys, tool};

const OLD: u64 = 0b0101;
const NEW: u64 = 0b1010;

/// Runs `body` with hook tc and `interfaces` in config.toml.
fn with_tc(body: impl FnOnce(&Lab, &Services) + Send) {
    Lab::run(|lab| {
        interfaces(lab, "");
        body(lab, &Services::open());
    });
}

fn interfaces(lab: &Lab, text: &str) {
    lab.home.write("etc/config.toml", &format!("hook = \"tc\"\n[interfaces]\n{text}"));
}

fn apply(lab: &Lab, services: &Services, number: u64) -> Value {
    lab.home.run(["apply", "--json", &services.file(lab, number)]).ok().json()
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect()
}

/// What `status` says that is not as it should be, and the exit code that goes with it.
#[track_caller]
fn findings(lab: &Lab) -> Vec<String> {
    let run = lab.home.run(["status", "--json"]);
    let json = run.json();
    let findings: Vec<_> = strings(&json["findings"]).into_iter().map(str::to_owned).collect();
    assert_eq!(run.code(), Some(i32::from(!findings.is_empty())), "{json:#}");
    findings
}

/// The names of the devices that have programs at both sides, of the kind that fits them.
fn covered() -> Vec<String> {
    let attached = programs_attached();
    let mut names: Vec<String> = tc::devices().unwrap().into_iter().map(|d| d.name).collect();
    names.retain(|name| attached.iter().any(|line| line.starts_with(&format!("{name} "))));
    for name in &names {
        let kind = if name == "t0" { "ip" } else { "eth" };
        for program in ["egress smcpol_out", "ingress smcpol_in"] {
            assert!(attached.contains(&format!("{name} {program}_{kind}")), "{attached:?}");
        }
    }
    assert_eq!(attached.len(), names.len() * 2, "{attached:?}");
    names.sort();
    names
}

#[test]
fn coverage_of_devices_that_appear_later() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        assert_eq!(apply(lab, services, OLD)["attached"], serde_json::json!(["lo"]));
        add_devices();
        let found = findings(lab);
        for (name, is_named) in [("v0", true), ("t0", true), ("v1", false), ("lo", false)] {
            let is_about =
                |text: &String| text.starts_with(&format!("{name} is not covered: `smc-policy apply"));
            assert_eq!(found.iter().any(is_about), is_named, "{name}: {found:?}");
        }
        let status = lab.status();
        let devices = status["namespaces"][0]["devices"].as_array().unwrap();
        let attached = |name: &str| devices.iter().find(|d| d["name"] == name).map(|d| &d["attached"]);
        assert_eq!((attached("v0"), attached("v1")), (Some(&Value::Null), None), "{status:#}");
        assert_eq!(attached("lo"), Some(&tc::way().name().into()), "{status:#}");

        let run = lab.home.run(["apply", &services.file(lab, OLD)]).ok();
        let lines: Vec<_> = run.stdout.lines().collect();
        assert_eq!(lines[1..], ["  programs attached to v0, t0"], "{run:#?}");
        assert!(lines[0].starts_with("Already in force"), "{run:#?}");
        assert_eq!((findings(lab), covered()), (vec![], vec!["lo".into(), "t0".into(), "v0".into()]));
        assert_eq!(apply(lab, services, OLD)["attached"], serde_json::json!([]), "once is enough");

        // One that gets an address, and one that is made anew under its old name.
        run_all(&["ip link del v0", "ip link add v0 type veth peer name v1", "ip link set v0 up"]);
        run_all(&["ip address add 10.8.0.1/24 dev v0", "ip address add 10.8.1.1/24 dev v1"]);
        let found = findings(lab);
        assert!(found.len() == 2 && found[0].starts_with("v") && found[1].starts_with("v"), "{found:?}");
        let json = apply(lab, services, NEW);
        let mut attached = strings(&json["attached"]);
        attached.sort_unstable();
        assert_eq!((attached, &json["change"]), (vec!["v0", "v1"], &"switched".into()), "{json:#}");
        assert_eq!((findings(lab), covered().len()), (vec![], 4));
        let links = || fs::read_dir(lab.pins().join("links")).map_or(0, Iterator::count);
        assert_eq!(links(), if tc::way() == Way::Tcx { 8 } else { 0 }, "none of devices that are gone");
        assert_eq!(services.enforced(), NEW);

        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
        assert_eq!(qdiscs(), "");
    });
}

fn run_all(commands: &[&str]) {
    for command in commands {
        run(command);
    }
}

#[test]
fn coverage_is_what_config_says() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        add_devices();
        for (text, devices) in [
            ("", &["lo", "t0", "v0"][..]),
            ("exclude = [\"v*\"]\n", &["lo", "t0"]),
            ("include = [\"v?\", \"lo\"]\n", &["lo", "v0", "v1"]),
            (
                "include = [\"*\"]\nexclude = [\"t*\", \"v1\", \"d*\", \"e*\", \"s*\", \"g*\", \"i*\"]\n",
                &["lo", "v0"],
            ),
            ("exclude = [\"lo\"]\n", &["t0", "v0"]),
        ] {
            interfaces(lab, text);
            let json = apply(lab, services, OLD);
            assert_eq!(json["warnings"], serde_json::json!([]), "{json:#}");
            assert_eq!(
                (findings(lab), covered()),
                (vec![], devices.iter().map(|d| (*d).to_owned()).collect())
            );
            assert_eq!(services.enforced(), if devices.contains(&"lo") { OLD } else { 0 }, "{text}");
        }
        // Killed when it had attached programs that another configuration does not want.
        interfaces(lab, "");
        let trap =
            smc_policy_tests::Trap::set(&lab.home.path(&format!("run/gen-{}.tmp", lab.generation() + 1)));
        trap.kill(lab.home.start(["apply", &services.file(lab, NEW)]));
        assert_eq!((services.enforced(), covered().len()), (OLD, 3));
        interfaces(lab, "exclude = [\"lo\"]\n");
        apply(lab, services, NEW);
        assert_eq!((findings(lab), covered()), (vec![], vec!["t0".to_owned(), "v0".to_owned()]));
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
        assert_eq!(qdiscs(), "");
    });
}

#[test]
fn coverage_without_any_device() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        run_all(&["ip link set lo down", "ip address flush dev lo"]);
        let run = lab.home.run(["apply", &services.file(lab, OLD)]).ok();
        assert!(run.stderr.contains("has no device to cover"), "{run:#?}");
        let run = lab.home.run(["status"]).ok();
        assert!(run.stdout.contains("no device covered"), "{run:#?}");
        run_all(&["ip link set lo up", "ip address add 127.0.0.2/32 dev lo"]);
        assert!(findings(lab)[0].starts_with("lo is not covered"));
        apply(lab, services, OLD);
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        lab.assert_enforced_by(Hook::Tc);
    });
}

/// A device of a type that the programs do not understand: InfiniBand's, as IP over InfiniBand has it.
#[test]
fn coverage_of_a_device_of_an_unknown_type() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        sys::make_device_of_type("odd0", 32).unwrap();
        run("ip address add 10.77.0.1/24 dev odd0");
        let says = ["odd0 is not covered", "hardware type 32", "`exclude` of config.toml"];
        let run = lab.home.run(["apply", &services.file(lab, OLD)]).ok();
        let found = findings(lab);
        for words in says {
            assert!(run.stderr.contains(words), "{run:#?}");
            assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
        }
        assert_eq!((services.enforced(), covered()), (OLD, vec!["lo".to_owned()]));
        interfaces(lab, "exclude = [\"odd*\"]\n");
        assert_eq!(apply(lab, services, OLD)["warnings"], serde_json::json!([]));
        lab.assert_enforced_by(Hook::Tc);

        // The only one that is wanted: nothing is changed.
        let before = (lab.generation(), lab.instances());
        for version_change in [false, true] {
            interfaces(lab, "include = [\"odd*\"]\n");
            if version_change {
                lab.pretend_other_version();
            }
            let refused = lab.home.run(["apply", &services.file(lab, NEW)]);
            refused.refused(3, &["hardware type 32"]);
            assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
            assert_eq!(
                (lab.generation(), lab.instances(), covered()),
                (before.0, before.1.clone(), vec!["lo".into()])
            );
        }
        lab.home.run(["detach"]).ok();
        lab.home.run(["apply", &services.file(lab, NEW)]).refused(3, &["hardware type 32"]);
        assert_eq!(services.enforced(), 0);
        lab.assert_nothing_in_force();
        run_all(&["ip link del odd0"]);
    });
}

/// Programs of others that are there before ours come, come while they are there, and stay when they go.
#[test]
fn coverage_beside_others_programs() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    for way in smc_policy_tests::attaching::ways() {
        with_tc(|lab, services| {
            let world = World::here(way);
            let lo = device("lo");
            if way == Way::Clsact {
                run("tc qdisc add dev lo clsact");
            }
            let foreign = |name| Side::ALL.map(|_| Counting::load(name));
            let (behind, ahead) = (foreign("behind"), foreign("ahead"));
            let add = |programs: &[Counting; 2], is_ahead| {
                let links = Side::ALL.into_iter().zip(programs);
                links
                    .map(|(side, program)| world.add_foreign(&lo, side, program, is_ahead))
                    .collect::<Vec<_>>()
            };
            let behind_links = add(&behind, false);
            apply(lab, services, OLD);
            let ours = [(Side::Egress, "smcpol_out_eth"), (Side::Ingress, "smcpol_in_eth")];
            let expect = |names: &dyn Fn(&'static str) -> Vec<&'static str>| {
                for (side, program) in ours {
                    let found: Vec<_> = chain(&lo, side).into_iter().map(|(name, _)| name).collect();
                    assert_eq!(found, names(program), "{way:?} {side}");
                }
            };
            expect(&|ours| vec![ours, "behind"]);
            let status = lab.home.run(["status", "--json"]).ok().json();
            assert_eq!(strings(&status["notes"]).iter().filter(|n| n.contains("of others")).count(), 0);

            let ahead_links = add(&ahead, true);
            let is_first = way == tc::way();
            let all =
                |ours| if is_first { vec!["ahead", ours, "behind"] } else { vec![ours, "ahead", "behind"] };
            expect(&all);
            let status = lab.home.run(["status", "--json"]).ok().json();
            let notes = strings(&status["notes"]).join("\n");
            let device = &status["namespaces"][0]["devices"][0];
            if is_first {
                assert!(notes.contains("lo first: egress ahead, ingress ahead"), "{status:#}");
                assert_eq!(strings(&device["ahead"]), ["egress ahead", "ingress ahead"], "{status:#}");
            } else {
                assert_eq!((notes.as_str(), &device["ahead"]), ("", &serde_json::json!([])));
            }
            for change in [false, true] {
                if change {
                    lab.pretend_other_version();
                }
                apply(lab, services, NEW);
                expect(&all);
                assert_eq!(services.enforced(), NEW);
            }
            let counts = || [&behind, &ahead].map(|p| p.each_ref().map(Counting::count));
            let before = counts();
            assert_eq!(services.enforced(), NEW);
            for (now, before) in counts().as_flattened().iter().zip(before.as_flattened()) {
                assert!(now > before, "every one of them still meets the packets");
            }
            lab.home.run(["detach"]).ok();
            expect(&|_| vec!["ahead", "behind"]);
            lab.assert_nothing_in_force();
            assert_eq!(!qdiscs().is_empty(), way == Way::Clsact, "their qdisc stays");
            drop((behind_links, ahead_links));
        });
    }
}

/// A qdisc of kind ingress leaves no place for filters at the egress, where there are no links.
#[test]
fn coverage_of_a_device_with_a_foreign_qdisc() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        add_devices();
        run("tc qdisc add dev v0 ingress");
        let before = qdiscs();
        let json = apply(lab, services, OLD);
        let warnings = strings(&json["warnings"]).join("\n");
        let found = findings(lab);
        if tc::way() == Way::Tcx {
            assert_eq!((warnings.as_str(), found, covered().len()), ("", vec![], 3), "it does not matter");
        } else {
            for words in ["v0 is not covered", "'ingress'", "tc qdisc del dev v0 ingress"] {
                assert!(warnings.contains(words), "{json:#}");
                assert!(found.len() == 1 && found[0].contains(words), "{found:?}");
            }
            assert_eq!(covered(), ["lo", "t0"], "the rest is");
        }
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
        assert_eq!(qdiscs(), before, "theirs stays, ours goes");
    });
}

fn as_nobody(lab: &Lab, arguments: &[&str]) -> Run {
    let mut command = lab.home.command(arguments);
    command.uid(65_534).gid(65_534);
    lab.home.start_command(command).wait()
}

#[test]
fn coverage_is_nothing_that_nobody_can_ask_or_change() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        apply(lab, services, OLD);
        let other = services.file(lab, NEW);
        let subject = services.0[0].address().to_string();
        for folders in [0o755, 0o700] {
            for folder in [lab.home.path(""), lab.pins(), lab.home.bpffs().to_owned()] {
                fs::set_permissions(folder, Permissions::from_mode(folders)).unwrap();
            }
            fs::set_permissions(lab.home.path(""), Permissions::from_mode(0o755)).unwrap();
            for arguments in
                [&["status"][..], &["apply", &other], &["detach"], &["rollback"], &["explain", &subject]]
            {
                let run = as_nobody(lab, arguments).refused(4, &["CAP_"]);
                assert_eq!(run.stdout, "", "no answer: {run:#?}");
            }
        }
        assert_eq!((services.enforced(), services.explained(lab)), (OLD, OLD));
        lab.assert_enforced_by(Hook::Tc);
    });
}

#[test]
fn coverage_needs_no_sysctl_that_can_be_written() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        let run = |arguments: &[&str]| {
            let mut command = lab.home.command(arguments);
            sys::with_read_only_proc_sys(&mut command);
            lab.home.start_command(command).wait().ok()
        };
        run(&["apply", &services.file(lab, OLD)]);
        assert_eq!(services.enforced(), OLD);
        run(&["apply", &services.file(lab, NEW)]);
        assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW));
        run(&["status"]);
        run(&["detach"]);
        lab.assert_nothing_in_force();
    });
}

#[test]
fn coverage_needs_a_bpffs() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        let elsewhere = lab.home.path("a-folder");
        fs::create_dir(&elsewhere).unwrap();
        let mut command = lab.home.command(["apply", &services.file(lab, OLD)]);
        command.env("SMC_POLICY_BPFFS", &elsewhere);
        let run = lab.home.start_command(command).wait();
        run.refused(3, &["no BPF file system is mounted at", "mount -t bpf bpf", "a-folder"]);
        assert_eq!((services.enforced(), programs_attached()), (0, vec![]));
        assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0, "nothing left behind");
        assert_eq!(qdiscs(), "");
    });
}

/// What is not known is not made up: the programs go on, and the next apply replaces them.
#[test]
fn coverage_by_programs_that_lost_their_pins() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    with_tc(|lab, services| {
        let subject = services.0[0].address().to_string();
        for (pin, is_told) in [("info", true), ("out-eth", false), ("current", true)] {
            apply(lab, services, OLD);
            let instance = lab.pins().join(&lab.instances()[0]);
            match pin {
                "current" => fs::remove_file(lab.pins().join(pin)).unwrap(),
                _ => fs::remove_file(instance.join(pin)).unwrap(),
            }
            assert_eq!(services.enforced(), OLD, "{pin}");
            let found = findings(lab).join("\n");
            if is_told {
                assert!(
                    found.contains("smc-policy decide here") && found.contains("smc-policy apply"),
                    "{found}"
                );
                let run = lab.home.run(["explain", &subject]).refused(3, &["smc-policy decide here"]);
                assert_eq!(run.stdout, "", "no answer: {run:#?}");
            } else {
                assert!(found.contains("lo is not covered"), "{found}");
            }
            apply(lab, services, NEW);
            assert_eq!((services.enforced(), services.explained(lab)), (NEW, NEW), "{pin}");
            lab.assert_enforced_by(Hook::Tc);
        }
        tool::remove_pins(&lab.pins().join(&lab.instances()[0]));
        let json = lab.home.run(["detach", "--json"]).ok().json();
        assert_eq!(json["was_in_force"], true, "{json:#}");
        assert_eq!(services.enforced(), 0);
        lab.assert_nothing_in_force();
        assert_eq!(qdiscs(), "");
    });
}
