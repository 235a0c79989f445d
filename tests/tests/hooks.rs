//! Which hook enforces the policy: chosen, told, and returned to.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use serde_json::Value;
use smc_policy_tests::lab::{assert_denied, assert_smc, listen};
use smc_policy_tests::{Hook, Kind, Lab, Run, Services, needs, needs_hook};

const OLD: u64 = 0b0101;
const NEW: u64 = 0b1010;

/// `apply` with these options of policy `number`.
fn apply(lab: &Lab, services: &Services, options: &[&str], number: u64) -> Run {
    let file = services.file(lab, number);
    let fixed = ["apply", "--json"];
    lab.home.run(fixed.iter().chain(options).chain([&file.as_str()]))
}

fn configure(lab: &Lab, text: &str) {
    lab.home.write("etc/config.toml", text);
}

#[track_caller]
fn assert_in_force(lab: &Lab, services: &Services, number: u64, hook: Hook) {
    assert_eq!((services.enforced(), services.explained(lab)), (number, number));
    lab.assert_enforced_by(hook);
}

/// The findings of `status`, which there must be.
#[track_caller]
fn findings(lab: &Lab) -> String {
    let run = lab.home.run(["status", "--json"]).expect_code(1);
    let json = run.json();
    assert_eq!(json["ok"], false, "{json:#}");
    let findings = json["findings"].as_array().unwrap();
    findings.iter().map(|f| format!("{}\n", f.as_str().unwrap())).collect()
}

#[test]
fn hooks_are_chosen_by_config_and_option() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        let mut number = OLD;
        for (config, options, hook) in [
            ("", &[][..], Hook::HsCtrl),
            ("", &["--hook", "tc"], Hook::Tc),
            ("hook = \"tc\"\n", &[], Hook::Tc),
            ("hook = \"tc\"\n", &["--hook", "auto"], Hook::HsCtrl),
        ] {
            configure(lab, config);
            let json = apply(lab, &services, options, number).ok().json();
            assert_eq!(
                (&json["hook"], &json["why_tc"]),
                (&hook.to_string().into(), &Value::Null),
                "{json:#}"
            );
            assert_in_force(lab, &services, number, hook);
            number ^= 0b1111;
        }
        // Those that are there already are left as they are.
        let json = apply(lab, &services, &["--hook", "auto"], number ^ 0b1111).ok().json();
        assert_eq!((&json["change"], &json["attached"]), (&"none".into(), &Value::Array(vec![])), "{json:#}");
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

#[test]
fn hooks_that_the_kernel_does_not_have_are_named() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag, NoHsCtrl);
    Lab::run(|lab| {
        let services = Services::open();
        let refused = apply(lab, &services, &["--hook", "hs_ctrl"], OLD);
        refused.refused(3, &["smc_hs_ctrl", "Linux 6.19", "CONFIG_SMC_HS_CTRL_BPF"]);
        configure(lab, "hook = \"hs_ctrl\"\n");
        apply(lab, &services, &[], OLD).refused(3, &["Linux 6.19"]);
        assert_eq!(services.enforced(), 0);
        lab.assert_nothing_in_force();

        configure(lab, "");
        let json = apply(lab, &services, &[], OLD).ok().json();
        assert_eq!(json["hook"], "tc", "{json:#}");
        assert!(json["why_tc"].as_str().unwrap().contains("not its hook smc_hs_ctrl"), "{json:#}");
        assert_in_force(lab, &services, OLD, Hook::Tc);
        let run = lab.home.run(["apply", &services.file(lab, NEW)]).ok();
        assert!(run.stdout.contains("hook tc") && run.stdout.contains("tc, because"), "{run:#?}");
        // What is in force is not touched by an apply that cannot be.
        apply(lab, &services, &["--hook", "hs_ctrl"], OLD).refused(3, &["Linux 6.19"]);
        assert_in_force(lab, &services, NEW, Hook::Tc);
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

#[test]
fn hooks_without_smc_are_named() {
    needs!(Root, Tool, Netns, Bpffs, NoSmc);
    Lab::run_without_smc_d(|lab| {
        let file = lab.home.write("policy.toml", "version = 1\n[default]\noutbound = \"deny\"\n");
        let apply = |options: &[&str]| {
            let fixed = ["apply", "--json", file.to_str().unwrap()];
            lab.home.run(fixed.iter().chain(options))
        };
        let says = ["SMC is not there", "modprobe smc", "/etc/modules-load.d"];
        apply(&["--hook", "hs_ctrl"]).refused(3, &says);
        lab.assert_nothing_in_force();
        let json = apply(&[]).ok().json();
        assert_eq!((json["hook"].as_str(), &json["live_denied"]), (Some("tc"), &Value::Array(vec![])));
        assert!(json["why_tc"].as_str().unwrap().contains("SMC is not there"), "{json:#}");
        lab.assert_enforced_by(Hook::Tc);
        lab.home.run(["detach"]).ok();
        lab.assert_nothing_in_force();
    });
}

#[test]
fn hooks_keep_the_counters_of_each_other() {
    needs_hook!();
    Lab::run(|lab| {
        let service = listen(Kind::AfSmc, "127.0.0.2");
        let rule = format!(
            "[[rule]]\nname = \"kept\"\naction = \"deny\"\ndirection = \"outbound\"\nports = [{}]\n",
            service.port()
        );
        let mut decided = 0;
        for (round, hook) in [Hook::Tc, Hook::HsCtrl, Hook::Tc].into_iter().enumerate() {
            // The last time together with a replacement of the programs.
            if round == 2 {
                lab.pretend_other_version();
            }
            let file = lab.home.write("policy.toml", &format!("version = 1\n# round {round}\n{rule}"));
            lab.home.run(["apply", "--hook", &hook.to_string(), file.to_str().unwrap()]).ok();
            assert_eq!(lab.hits("kept"), round as u64, "{hook}");
            assert_denied(Kind::AfSmc, None, &service);
            assert_eq!(lab.hits("kept"), round as u64 + 1, "{hook}");
            let decisions = lab.status()["counters"]["decisions"].as_u64().unwrap();
            assert!(decisions > decided, "{hook}: {decided} -> {decisions}");
            decided = decisions;
        }
    });
}

#[test]
fn hooks_settings_that_changed_are_told() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        // What the command line said is no difference.
        configure(lab, "mode = \"enforce\"\n");
        apply(lab, &services, &["--hook", "tc", "--mode", "observe"], OLD).ok();
        let status = lab.home.run(["status", "--json"]).ok().json();
        assert_eq!((&status["hook"], &status["mode"]), (&"tc".into(), &"observe".into()), "{status:#}");
        let lo = &status["namespaces"][0]["devices"][0];
        assert_eq!((&lo["name"], &lo["attached"]), (&"lo".into(), &"tcx".into()), "{status:#}");
        configure(lab, "mode = \"observe\"\nhook = \"hs_ctrl\"\n");
        lab.home.run(["status"]).ok();
        // What config.toml says of other things is.
        configure(lab, "retransmit = \"keep\"\n");
        let found = findings(lab);
        assert!(found.contains("config.toml differs"), "{found}");
        // The command that is named is the one that was given.
        let file = services.file(lab, OLD);
        let command = format!("`smc-policy apply --hook tc --mode observe {file}`");
        assert!(found.contains(&command), "{found}");
        apply(lab, &services, &["--hook", "tc", "--mode", "observe"], OLD).ok();
        lab.assert_enforced_by(Hook::Tc);
        // Given once more without an option, it is config.toml's choice, which may change.
        configure(lab, "retransmit = \"keep\"\nhook = \"tc\"\nmode = \"observe\"\n");
        let json = apply(lab, &services, &[], OLD).ok().json();
        assert_eq!(json["change"], "none", "{json:#}");
        lab.assert_enforced_by(Hook::Tc);
        configure(lab, "retransmit = \"keep\"\nmode = \"observe\"\n");
        assert!(findings(lab).contains("config.toml differs"));
        configure(lab, "hook = \"tcp\"\n");
        let found = findings(lab);
        assert!(found.contains("cannot be compared") && found.contains("smc-policy check"), "{found}");
        apply(lab, &services, &[], NEW).refused(2, &["config.toml:1:8"]);
        configure(lab, "");
        apply(lab, &services, &[], NEW).ok();
        assert_in_force(lab, &services, NEW, Hook::HsCtrl);
    });
}

#[test]
fn hooks_return_with_the_policy_before() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        apply(lab, &services, &[], OLD).ok();
        apply(lab, &services, &["--hook", "tc"], NEW).ok();
        lab.home.run(["rollback"]).ok();
        assert_in_force(lab, &services, OLD, Hook::HsCtrl);
        lab.home.run(["rollback"]).ok();
        assert_in_force(lab, &services, NEW, Hook::Tc);
        // Nobody confirms.
        let file = services.file(lab, OLD);
        let run = lab.home.run(["apply", "--hook", "hs_ctrl", "--confirm", "1s", &file]).expect_code(1);
        assert!(run.stderr.contains("Not confirmed"), "{run:#?}");
        assert_in_force(lab, &services, NEW, Hook::Tc);
        // The policy is the same, and only how it is enforced is on trial.
        configure(lab, "hook = \"hs_ctrl\"\nmode = \"observe\"\n");
        let file = services.file(lab, NEW);
        let run = lab.home.run(["apply", "--confirm", "1s", &file]).expect_code(1);
        assert!(run.stderr.contains("Not confirmed"), "{run:#?}");
        assert_eq!((services.enforced(), lab.status()["mode"].as_str()), (NEW, Some("enforce")));
        // What config.toml says is not what is in force.
        assert!(findings(lab).contains("config.toml differs"));
        configure(lab, "");
        lab.assert_enforced_by(Hook::Tc);
    });
}

/// A listener that answers no SYN for a while: one connection fills its queue.
fn connect_to_one_who_is_silent_first() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    smc_policy_tests::sys::listen(&silent, 0).unwrap();
    let _filling = std::net::TcpStream::connect(address).unwrap();
    let socket = Kind::AfSmc.open().unwrap();
    std::thread::scope(|scope| {
        let connect = scope.spawn(|| smc_policy_tests::sys::connect(&socket, address));
        // SYNs at 0 and 1 seconds.
        std::thread::sleep(std::time::Duration::from_millis(500));
        silent.accept().unwrap();
        connect.join().unwrap().expect("connects when answered");
    });
}

#[test]
fn hooks_take_their_settings_from_config() {
    needs!(Root, Tool, Netns, Bpffs, Smc, SmcDiag);
    Lab::run(|lab| {
        for hook in Hook::all() {
            let hook_name = hook.to_string();
            let apply = |text: &str| {
                let path = lab.home.write("policy.toml", text);
                lab.home.run(["apply", "--hook", &hook_name, path.to_str().unwrap()]).ok();
            };
            let count = |name: &str| lab.status()["counters"][name].as_u64().unwrap();
            apply("version = 1\n");
            for (word, grows) in [("plain", true), ("keep", false)] {
                configure(lab, &format!("retransmit = \"{word}\"\n"));
                apply("version = 1\n");
                let before = count("plain_retransmissions");
                connect_to_one_who_is_silent_first();
                assert_eq!(count("plain_retransmissions") > before, grows, "{hook}: {word}");
            }
            let service = listen(Kind::AfSmc, "127.0.0.2");
            let deny = "version = 1\n[[rule]]\nname = \"no\"\naction = \"deny\"\npeers = [\"127.0.0.2\"]\n";
            configure(lab, "mode = \"observe\"\n");
            apply(deny);
            assert_smc(Kind::AfSmc, None, &service);
            let observed = count("observed_denies");
            assert!(observed > 0 && lab.hits("no") > 0, "{hook}");
            assert_eq!(lab.status()["mode"], "observe");
            configure(lab, "mode = \"enforce\"\n");
            apply(deny);
            assert_denied(Kind::AfSmc, None, &service);
            assert_eq!(count("observed_denies"), observed, "{hook}");
            lab.assert_enforced_by(hook);
        }
    });
}
