//! `check` on config.toml: what it says of a right one, and what of a wrong one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use smc_policy_tests::needs;
use smc_policy_tests::tool::Home;

const POLICY: &str = "version = 1\n[[rule]]\nname = \"web\"\naction = \"deny\"\nports = [443]\n";

fn home() -> Home {
    let home = Home::new();
    home.write("etc/policy.d/web.toml", POLICY);
    home
}

#[test]
fn without_a_config_check_is_about_the_policy() {
    needs!(Tool);
    let home = home();
    assert_eq!(home.run(["check"]).ok().stdout, "ok: 1 rule in 1 file, 0 tests passed\n");
    let document = home.run(["check", "--json"]).ok().json();
    assert!(document["config"].is_null() && document["ok"] == true, "{document:#}");
}

#[test]
fn a_config_is_checked_with_the_installed_policy() {
    needs!(Tool);
    let home = home();
    let path = home.write("etc/config.toml", "hook = \"tc\"\nmode = \"observe\"\n");
    assert_eq!(
        home.run(["check"]).ok().stdout,
        "ok: 1 rule in 1 file, 0 tests passed; config.toml: hook tc, mode observe\n"
    );
    let document = home.run(["check", "--json"]).ok().json();
    let config = &document["config"];
    assert_eq!(config["file"], path.to_str().unwrap(), "{document:#}");
    assert_eq!((config["hook"].as_str(), config["mode"].as_str()), (Some("tc"), Some("observe")));
    assert_eq!((&document["files"], &document["rules"]), (&1.into(), &1.into()), "{document:#}");
    // An empty one is as none, and is said to be there.
    home.write("etc/config.toml", "");
    assert!(home.run(["check"]).ok().stdout.ends_with("; config.toml: hook auto, mode enforce\n"));
}

#[test]
fn errors_of_config_and_policy_are_told_together() {
    needs!(Tool);
    let home = home();
    home.write("etc/config.toml", "hook = \"tcp\"\nforwarded = 1\n");
    let says = ["config.toml:1:8", "did you mean \"tc\"?", "config.toml:2:13"];
    let run = home.run(["check"]).refused(2, &says);
    assert_eq!(run.stdout, "");
    home.write("etc/policy.d/web.toml", &POLICY.replace("443", "0"));
    home.run(["check"]).refused(2, &[&says[..], &["web.toml:5:10", "0 is not a port"]].concat());
    let document = home.run(["check", "--json"]).expect_code(2).json();
    let findings = document["findings"].as_array().unwrap();
    let files: Vec<&str> = findings.iter().map(|finding| finding["file"].as_str().unwrap()).collect();
    assert!(files[0].ends_with("web.toml") && files[1].ends_with("config.toml"), "{document:#}");
    assert!(document["ok"] == false && document["config"].is_null() && findings.len() == 3, "{document:#}");
    // Without any policy file its findings are told all the same.
    std::fs::remove_file(home.path("etc/policy.d/web.toml")).unwrap();
    home.run(["check"]).refused(2, &[&says[..], &["no policy"]].concat());
    let document = home.run(["check", "--json"]).expect_code(2).json();
    assert_eq!(document["findings"].as_array().unwrap().len(), 2, "{document:#}");
}

#[test]
fn the_file_that_is_given_takes_the_place_of_the_installed_one() {
    needs!(Tool);
    let home = home();
    home.write("etc/config.toml", "hook = \"tcp\"\n");
    let other = home.write("other.toml", "hook = \"hs_ctrl\"\n");
    let given = |arguments: &[&str]| {
        let fixed = ["check", "--config", other.to_str().unwrap()];
        home.run(fixed.iter().chain(arguments))
    };
    let line = "ok: 1 rule in 1 file, 0 tests passed; other.toml: hook hs_ctrl, mode enforce\n";
    assert_eq!(given(&[]).ok().stdout, line);
    let policy = home.write("elsewhere/web.toml", POLICY);
    assert_eq!(given(&[policy.to_str().unwrap()]).ok().stdout, line);
    // Files that are named are not judged by the installed config.
    home.run(["check".as_ref(), policy.as_os_str()]).ok();
    home.run(["check"]).refused(2, &["config.toml:1:8"]);
    home.run(["check", "--config", "not-there.toml"]).refused(2, &["not-there.toml: no such file"]);
}

#[test]
fn warnings_fail_a_strict_check() {
    needs!(Tool);
    let home = home();
    home.write("etc/config.toml", "hook = \"hs_ctrl\"\nforwarded = true\n");
    let run = home.run(["check"]).ok();
    assert!(run.stderr.contains("warning[unused-setting]: only tc uses `forwarded`"), "{run:#?}");
    assert!(run.stdout.starts_with("ok: "), "{run:#?}");
    let run = home.run(["check", "--strict"]).refused(1, &["unused-setting"]);
    assert_eq!(run.stdout, "");
    let document = home.run(["check", "--strict", "--json"]).expect_code(1).json();
    assert_eq!(document["findings"][0]["code"], "unused-setting", "{document:#}");
}

#[test]
fn a_config_named_as_a_policy_is_recognised() {
    needs!(Tool);
    let home = home();
    let config = home.write("etc/config.toml", "hook = \"tc\"\n");
    home.run(["check".as_ref(), config.as_os_str()]).refused(2, &["config.toml:1:1", "--config"]);
    let policy = home.path("etc/policy.d/web.toml");
    home.run(["check".as_ref(), "--config".as_ref(), policy.as_os_str()]).refused(2, &["this is a policy"]);
}
