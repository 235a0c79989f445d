//! `status --capabilities` says of every lab kernel what it is known to have, and changes nothing to find out.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

use serde_json::Value;
use smc_policy_tests::{Home, Need, needs, sys};

/// `nobody`.
const NOBODY: u32 = 65534;
const NAMES: [&str; 15] = [
    "kernel",
    "smc",
    "hs_ctrl",
    "tcx",
    "clsact",
    "bpf_loop",
    "btf",
    "btf_smc",
    "bpffs",
    "lockdown",
    "smc_diag",
    "ipproto_smc",
    "fexit_modules",
    "fmod_ret",
    "cgroup2",
];

/// What the kernels of tests/kernels/matrix.toml lack; they have the rest.
fn lacks(kernel: &str) -> &'static [(&'static str, &'static str)] {
    match kernel {
        "7.3.4-smclab" | "7.3.4-smcbuiltin" => &[("lockdown", "no")],
        "7.3.4-nosmc" => &[
            ("lockdown", "no"),
            ("smc", "no"),
            ("smc_diag", "no"),
            ("hs_ctrl", "no"),
            ("ipproto_smc", "no"),
            ("btf_smc", "unknown"),
            ("fexit_modules", "unknown"),
        ],
        "6.12-debian" => &[("lockdown", "no"), ("hs_ctrl", "no")],
        "6.1-debian" => {
            &[("lockdown", "no"), ("hs_ctrl", "no"), ("tcx", "no"), ("ipproto_smc", "no"), ("fmod_ret", "no")]
        }
        other => panic!("what does the kernel {other} have? Say it here"),
    }
}

/// Name and answer of every line.
fn answers(document: &Value) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let lines = document["capabilities"].as_array().unwrap();
    assert!(lines.iter().all(|l| !text(&l["detail"]).is_empty() && !text(&l["meaning"]).is_empty()));
    lines.iter().map(|line| (text(&line["name"]), text(&line["has"]))).collect()
}

fn works(document: &Value, hook: &str) -> String {
    let hooks = document["hooks"].as_array().unwrap();
    hooks.iter().find(|h| h["name"] == hook).unwrap()["works"].as_str().unwrap().to_owned()
}

#[test]
fn the_capabilities_of_a_lab_kernel_are_what_is_known_of_it() {
    needs!(Root, Tool, Bpffs);
    let document = Home::new().run(["status", "--capabilities", "--json"]).ok().json();
    let answers = answers(&document);
    assert_eq!(answers.len(), NAMES.len());
    // What other tests found out in their own way.
    for (name, need) in [
        ("smc", Need::Smc),
        ("hs_ctrl", Need::HsCtrl),
        ("tcx", Need::Tcx),
        ("ipproto_smc", Need::IpprotoSmc),
        ("bpffs", Need::Bpffs),
    ] {
        assert_eq!(answers[name] == "yes", need.is_met(), "{name}: {document:#}");
    }
    assert_eq!(document["kernel"], fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim());
    let Ok(kernel) = std::env::var("SMC_POLICY_KERNEL") else { return };
    if !Need::LabKernel.is_met() {
        // A host has whatever it has.
        return;
    }
    let lacks = lacks(&kernel);
    for name in NAMES {
        let expected = lacks.iter().find(|(lacking, _)| *lacking == name).map_or("yes", |(_, has)| has);
        assert_eq!(answers[name], expected, "{name}: {document:#}");
    }
    let has_hs_ctrl = !lacks.iter().any(|(name, _)| *name == "hs_ctrl");
    assert_eq!(works(&document, "hs_ctrl"), if has_hs_ctrl { "yes" } else { "no" }, "{document:#}");
    assert_eq!(works(&document, "tc"), "yes", "{document:#}");
}

#[test]
fn capabilities_are_told_without_privileges() {
    needs!(Root, Tool, Bpffs);
    let home = Home::new();
    // The program's folder may be root's only.
    let program = home.path("smc-policy");
    fs::copy(smc_policy_tests::tool::binary(), &program).unwrap();
    fs::set_permissions(home.path(""), fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = std::process::Command::new(program);
    command.args(["status", "--capabilities", "--json"]).env("SMC_POLICY_BPFFS", home.bpffs());
    let output = command.uid(NOBODY).gid(NOBODY).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    let as_root = home.run(["status", "--capabilities", "--json"]).ok().json();
    let (told, known) = (answers(&document), answers(&as_root));
    for name in NAMES {
        // Nothing else is said, but some things are not known.
        assert!(told[name] == known[name] || told[name] == "unknown", "{name}: {document:#} {as_root:#}");
    }
    for name in ["kernel", "smc", "hs_ctrl", "tcx", "bpf_loop", "btf", "smc_diag", "cgroup2"] {
        assert_eq!(told[name], known[name], "{name} can be told: {document:#}");
    }
    if known["fmod_ret"] == "yes" {
        let lines = document["capabilities"].as_array().unwrap();
        let line = lines.iter().find(|line| line["name"] == "fmod_ret").unwrap();
        assert!(line["detail"].as_str().unwrap().contains("CAP_BPF"), "{line}");
    }
}

#[test]
fn the_capabilities_without_bpffs_are_enough_for_no_hook() {
    needs!(Root, Tool);
    let home = Home::new();
    let mut command = home.command(["status", "--capabilities"]);
    command.env("SMC_POLICY_BPFFS", home.path("run"));
    let run = home.start_command(command).wait().expect_code(1);
    let lines: Vec<Vec<&str>> = run.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    for hook in ["hs_ctrl", "tc"] {
        let line = lines.iter().find(|line| line.starts_with(&["hook", hook])).unwrap();
        assert!(line[2] == "no" && line.last() == Some(&"bpffs"), "{run:#?}");
    }
    assert!(run.stdout.contains("mount -t bpf bpf /sys/fs/bpf"), "{run:#?}");
}

/// The program that the kernel runs to load a module, replaced by one that notes what is asked for, until this goes.
struct Requests {
    home: Home,
    before: String,
}

impl Requests {
    const PROGRAM: &str = "/proc/sys/kernel/modprobe";

    fn watch() -> Self {
        let home = Home::new();
        let log = home.path("log");
        let program = home.write("modprobe", &format!("#!/bin/sh\necho \"$@\" >>{}\n", log.display()));
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let before = fs::read_to_string(Self::PROGRAM).unwrap();
        fs::write(Self::PROGRAM, program.as_os_str().as_encoded_bytes()).unwrap();
        Self { home, before }
    }

    fn seen(&self) -> String {
        fs::read_to_string(self.home.path("log")).unwrap_or_default()
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        fs::write(Self::PROGRAM, &self.before).unwrap();
    }
}

#[test]
fn asking_for_capabilities_loads_no_module() {
    needs!(Root, Tool, Bpffs, Modules);
    let loaded = || {
        let text = fs::read_to_string("/proc/modules").unwrap();
        text.lines().map(|line| line.split(' ').next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let before = loaded();
    let requests = Requests::watch();
    requests.home.run(["status", "--capabilities"]).ok();
    assert_eq!(requests.seen(), "");
    assert_eq!(loaded(), before);
    // The test can fail: this is what asking for a socket does where SMC is not there.
    if !Need::Smc.is_met() {
        assert!(sys::stream_socket(sys::AF_SMC, 0).is_err());
        assert!(requests.seen().contains("net-pf-43"), "{}", requests.seen());
    }
}
