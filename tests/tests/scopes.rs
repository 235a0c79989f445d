//! In which network namespaces a policy holds: this one, named ones, all of them, containers included. In the lab's
//! machines only: a host's namespaces are not the tests' to change.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command};

use smc_policy::kernel::namespace::{self, NamespaceId};
use smc_policy_tests::lab::{is_smc, listen};
use smc_policy_tests::{
    Foreign, Hook, Kind, Lab, Need, command, exchange, foreign, hook, needs_hook, netns, ueid,
};

const DENY: &str = "version = 1\n[[rule]]\nname = \"no\"\naction = \"deny\"\npeers = [\"127.0.0.2\"]\n";

/// Something in a network namespace of its own, gone with this.
struct Container {
    id: NamespaceId,
    process: Option<Child>,
    name: Option<&'static str>,
}

impl Container {
    /// A process in a namespace without a name.
    fn nameless() -> Self {
        let process = netns::in_new_namespace(&[], || Command::new("sleep").arg("600").spawn().unwrap());
        let id = inode(&format!("/proc/{}/ns/net", process.id()));
        Self { id, process: Some(process), name: None }
    }

    /// A namespace mounted under /run/netns.
    fn named(name: &'static str) -> Self {
        command::output("ip", &["netns", "add", name]);
        let id = inode(&format!("/run/netns/{name}"));
        let container = Self { id, process: None, name: Some(name) };
        container.run(|| netns::set_loopback_up().unwrap());
        container
    }

    /// Runs `work` in it.
    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let (all, _) = namespace::all().unwrap();
        all.iter().find(|n| n.id == self.id).expect("found").run(work).unwrap()
    }

    fn is_denied(&self) -> bool {
        self.run(is_denied)
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
        if let Some(name) = self.name {
            let _ = command::run("ip", &["netns", "delete", name]);
        }
    }
}

fn inode(path: &str) -> NamespaceId {
    fs::metadata(path).unwrap().ino()
}

/// Whether the policy denies a connection within the calling thread's namespace.
fn is_denied() -> bool {
    let outcome = exchange(Kind::AfSmc, None, &listen(Kind::AfSmc, "127.0.0.2")).unwrap();
    assert_ne!(outcome.is_denied(), is_smc(&outcome), "{outcome}");
    outcome.is_denied()
}

/// A world in the machine's first namespace.
fn world() -> Lab {
    ueid::ensure().expect("a UEID");
    netns::set_loopback_up().expect("loopback up");
    let lab = Lab::default();
    lab.home.write("policy.toml", DENY);
    lab
}

/// Applies the policy in these namespaces.
fn apply(lab: &Lab, namespaces: &str) -> smc_policy_tests::Run {
    configure(lab, namespaces);
    lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()])
}

fn configure(lab: &Lab, namespaces: &str) {
    let hook = hook();
    lab.home.write("etc/config.toml", &format!("hook = \"{hook}\"\nnamespaces = {namespaces}\n"));
}

/// Nothing of the tool is in this namespace.
fn assert_clean() {
    if Need::HsCtrl.is_met() {
        assert_eq!(smc_policy_tests::lab::selected(), "");
    }
    for device in smc_policy::kernel::tc::devices().unwrap() {
        for side in smc_policy::kernel::tc::Side::ALL {
            let chain = smc_policy::kernel::tc::chain(&device, side).unwrap();
            assert!(chain.is_empty(), "{device:?} {side}: {chain:?}");
        }
    }
}

#[test]
fn only_this_namespace_unless_said_otherwise() {
    needs_hook!(LabKernel);
    let (lab, other) = (world(), Container::nameless());
    apply(&lab, "\"host\"").ok();
    assert!(is_denied() && !other.is_denied());
    // One that is created later neither.
    assert!(!Container::nameless().is_denied());
    lab.home.run(["status"]).ok();
    other.run(assert_clean);
    lab.home.run(["detach"]).ok();
    assert_clean();
}

#[test]
fn named_namespaces() {
    needs_hook!(LabKernel);
    let (lab, blue, green) = (world(), Container::named("blue"), Container::named("green"));
    apply(&lab, "[\"host\", \"blue\"]").ok();
    assert!(is_denied() && blue.is_denied() && !green.is_denied());
    lab.home.run(["status"]).ok();
    let status = lab.status();
    let found: Vec<_> = status["namespaces"].as_array().unwrap().iter().map(|n| &n["found"]).collect();
    assert!(found.iter().any(|f| *f == "/run/netns/blue"), "{status:#}");

    // Without this one, and with another.
    apply(&lab, "[\"green\"]").ok();
    assert!(!is_denied() && !blue.is_denied() && green.is_denied());
    assert_clean();
    blue.run(assert_clean);
    lab.home.run(["status"]).ok();

    // A name that there is none of: said, and the rest is covered.
    let run = apply(&lab, "[\"green\", \"red\"]").ok();
    assert!(run.stderr.contains("there is no network namespace red"), "{run:#?}");
    let status = lab.home.run(["status"]).expect_code(1);
    assert!(status.stdout.contains("red"), "{status:#?}");
    let red = Container::named("red");
    assert!(!red.is_denied());
    lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
    assert!(red.is_denied());
    lab.home.run(["status"]).ok();

    lab.home.run(["detach"]).ok();
    for container in [&blue, &green, &red] {
        assert!(!container.is_denied());
        container.run(assert_clean);
    }
    lab.assert_nothing_in_force();
}

#[test]
fn all_namespaces() {
    needs_hook!(LabKernel);
    let (lab, blue, nameless) = (world(), Container::named("blue"), Container::nameless());
    apply(&lab, "\"all\"").ok();
    assert!(is_denied() && blue.is_denied() && nameless.is_denied());
    lab.home.run(["status"]).ok();
    let later = Container::nameless();
    match hook() {
        // It takes over the first namespace's choice.
        Hook::HsCtrl => assert!(later.is_denied()),
        Hook::Tc => {
            assert!(!later.is_denied());
            let status = lab.home.run(["status"]).expect_code(1);
            let pid = later.process.as_ref().unwrap().id().to_string();
            assert!(status.stdout.contains("lo of the namespace of process") && status.stdout.contains(&pid));
        }
    }
    lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
    assert!(later.is_denied());
    lab.home.run(["status"]).ok();

    // Another policy is one store for all of them.
    lab.home.write("policy.toml", &DENY.replace("127.0.0.2", "127.0.0.9"));
    lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
    assert!(![&blue, &nameless, &later].iter().any(|c| c.is_denied()) && !is_denied());
    lab.home.write("policy.toml", DENY);
    lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();

    // Other programs everywhere, and still the same decisions.
    lab.pretend_other_version();
    lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
    assert!([&blue, &nameless, &later].iter().all(|c| c.is_denied()) && is_denied());
    assert_eq!(lab.instances().len(), 1);

    // Back to this one only: the others are as without the tool.
    apply(&lab, "\"host\"").ok();
    assert!(is_denied());
    for container in [&blue, &nameless, &later] {
        assert!(!container.is_denied());
        container.run(assert_clean);
    }
    assert!(!Container::nameless().is_denied());

    apply(&lab, "\"all\"").ok();
    assert!(nameless.is_denied());
    lab.home.run(["detach"]).ok();
    for container in [&blue, &nameless, &later] {
        assert!(!container.is_denied());
        container.run(assert_clean);
    }
    assert_clean();
    lab.assert_nothing_in_force();
}

/// A namespace that nothing finds goes on with what it had: that must change nothing.
#[test]
fn an_orphan_changes_nothing() {
    needs_hook!(LabKernel);
    let lab = world();
    // Kept by a descriptor alone.
    let hidden = {
        let container = Container::nameless();
        let (all, _) = namespace::all().unwrap();
        let hidden = all.into_iter().find(|n| n.id == container.id).unwrap();
        apply(&lab, "\"all\"").ok();
        assert!(container.is_denied());
        hidden
    };
    let (all, _) = namespace::all().unwrap();
    assert!(all.iter().all(|n| n.id != hidden.id), "{all:?}");
    assert!(hidden.run(is_denied).unwrap());
    if hook() == Hook::Tc && Need::Tcx.is_met() {
        // Its links are at hand: it is told of, and gets the next programs.
        let status = lab.home.run(["status"]).ok();
        assert!(
            status.stdout.contains(&format!("net:[{}] has the policy's programs", hidden.id)),
            "{status:#?}"
        );
        lab.pretend_other_version();
        lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
        assert!(hidden.run(is_denied).unwrap());
        lab.home.write("policy.toml", "version = 1\n");
        lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
        assert!(!hidden.run(is_denied).unwrap());
        lab.home.write("policy.toml", DENY);
        lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
        assert!(hidden.run(is_denied).unwrap());
    } else {
        // It goes on with what it had, and when that is replaced, with nothing.
        lab.pretend_other_version();
        lab.home.run(["apply".as_ref(), lab.home.path("policy.toml").as_os_str()]).ok();
        assert!(!hidden.run(is_denied).unwrap(), "an orphan denies");
    }
    lab.home.run(["detach"]).ok();
    assert!(!hidden.run(is_denied).unwrap(), "an orphan denies");
    assert!(!is_denied());
    if hook() == Hook::HsCtrl {
        // It holds the registration's map until somebody writes its sysctl.
        hidden.run(|| foreign::select("")).unwrap();
    }
    lab.assert_nothing_in_force();
}

#[test]
fn what_others_have_selected_in_their_namespaces_is_left_alone() {
    needs_hook!(LabKernel, HsCtrl);
    let (lab, theirs) = (world(), Container::nameless());
    let mut foreign = Foreign::register();
    theirs.run(|| foreign.select());
    let run = apply(&lab, "\"all\"").ok();
    match hook() {
        Hook::HsCtrl => {
            assert!(run.stderr.contains("smcpol_foreign") && run.stderr.contains("left alone"), "{run:#?}");
            assert!(is_denied() && !theirs.is_denied());
            let status = lab.home.run(["status"]).expect_code(1);
            assert!(status.stdout.contains("smcpol_foreign"), "{status:#?}");
        }
        // It decides beside theirs.
        Hook::Tc => {
            assert!(is_denied() && theirs.is_denied());
            lab.home.run(["status"]).ok();
        }
    }
    lab.home.run(["detach"]).ok();
    theirs.run(|| {
        assert_eq!(smc_policy_tests::lab::selected(), Foreign::NAME);
        foreign::select("");
    });
    foreign.unregister();
}
