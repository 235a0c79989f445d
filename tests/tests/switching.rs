//! Policies that replace each other under load: every connection is judged wholly by one of two generations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use smc_policy_tests::connection::exchange_sized;
use smc_policy_tests::lab::{is_smc, listen};
use smc_policy_tests::{Kind, Lab, Listener, Rng, needs_hook, scaled};

/// Services whose verdicts tell policies apart. Each policy denies one of `own`, the others allow it: a decision by a
/// third policy, such as what an idle table still holds, shows. `always` and `never` have the same verdict in all
/// policies, by differently numbered rules: a decision mixed of two shows.
struct Services {
    own: [Listener; 3],
    always: Listener,
    never: Listener,
}

/// The policies that follow each other, in a circle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    A,
    B,
    C,
}

impl Policy {
    const fn of(index: usize) -> Self {
        [Self::A, Self::B, Self::C][index % 3]
    }
}

impl Services {
    fn open() -> Self {
        let service = || listen(Kind::AfSmc, "127.0.0.2");
        Self { own: [service(), service(), service()], always: service(), never: service() }
    }

    fn all(&self) -> [&Listener; 5] {
        let [a, b, c] = &self.own;
        [a, b, c, &self.always, &self.never]
    }

    /// Whether `policy` lets service `which` of [`Self::all`] negotiate.
    fn allows(which: usize, policy: Policy) -> bool {
        match which {
            0..3 => which != policy as usize,
            3 => true,
            _ => false,
        }
    }

    /// All verdicts under `policy`.
    fn verdicts(policy: Policy) -> [bool; 5] {
        [0, 1, 2, 3, 4].map(|which| Self::allows(which, policy))
    }

    /// A policy's text, with `extra` more networks that concern nobody here. Rules and classes are numbered differently
    /// in each.
    fn text(&self, policy: Policy, extra: usize) -> String {
        let [a, b, c, always, never] = self.all().map(Listener::port);
        let rule = |name: &str, action: &str, match_on: &str| {
            format!(
                "[[rule]]\nname = \"{name}\"\naction = \"{action}\"\ndirection = \"outbound\"\n{match_on}\n\n"
            )
        };
        let mut text = String::from("version = 1\n\n");
        if extra > 0 {
            let mut peers = String::from("peers = [");
            for number in 0..extra {
                let [_, a, b, c] = (number as u32 * 2).to_be_bytes();
                write!(peers, "\"10.{a}.{b}.{c}\", ").unwrap();
            }
            peers.push(']');
            text += &rule("bulk", "deny", &peers);
        }
        match policy {
            Policy::A => {
                text += &rule("a-never", "deny", &format!("ports = [{never}]"));
                text += &rule("a-own", "deny", &format!("ports = [{a}]"));
            }
            Policy::B => {
                text += "[default]\noutbound = \"deny\"\n\n";
                text += &rule("b-decoy", "deny", "peers = [\"192.0.2.0/24\"]\nports = [\"1-9\"]");
                text += &rule(
                    "b-allowed",
                    "allow",
                    &format!("peers = [\"127.0.0.0/24\"]\nports = [{a}, {c}, {always}]"),
                );
                text += &rule("b-own", "deny", &format!("ports = [{b}]"));
            }
            Policy::C => {
                text += &rule("c-always", "allow", &format!("ports = [{always}]"));
                text += &rule("c-elsewhere", "deny", "local = [\"127.200.0.0/16\"]");
                text += &rule("c-never", "deny", &format!("peers = [\"127.0.0.2\"]\nports = [{c}, {never}]"));
            }
        }
        text
    }
}

/// Applies A, B and C in turn while connections are made, `per_generation` of them before each apply, and checks each
/// against the generations that can have judged it. `extra` gives the bulk of each policy, `before_apply` is called before
/// each but the first. Returns how each came into force, in the words of `apply --json`.
fn alternate(
    generations: usize,
    per_generation: usize,
    extra: impl Fn(usize) -> usize + Sync,
    before_apply: impl Fn(&Lab, usize) + Sync,
) -> Vec<String> {
    let mut rng = Rng::from_environment("switching");
    Lab::run(|lab| {
        let services = Services::open();
        let files: Vec<PathBuf> = (0..generations)
            .map(|index| {
                let text = services.text(Policy::of(index), extra(index));
                lab.home.write(&format!("policy-{index}.toml"), &text)
            })
            .collect();
        let apply = |index: usize| {
            let run = lab.home.run(["apply".as_ref(), "--json".as_ref(), files[index].as_os_str()]).ok();
            run.json()["change"].as_str().unwrap().to_owned()
        };
        assert_eq!(apply(0), "first");
        let before = lab.generation();

        // Policies up to `started` may be in force, those before `finished` no more.
        let (started, finished) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let made = AtomicUsize::new(0);
        let over = AtomicBool::new(false);
        let mut during = 0;
        let changes = thread::scope(|scope| {
            let applier = scope.spawn(|| {
                let mut changes = Vec::new();
                for index in 1..generations {
                    while made.load(Ordering::SeqCst) < index * per_generation && !over.load(Ordering::SeqCst)
                    {
                        thread::sleep(Duration::from_millis(1));
                    }
                    before_apply(lab, index);
                    started.store(index, Ordering::SeqCst);
                    changes.push(apply(index));
                    finished.store(index, Ordering::SeqCst);
                }
                changes
            });
            // A failed check must not leave the other thread waiting.
            let stop = StopOnDrop(&over);
            while made.load(Ordering::SeqCst) < generations * per_generation || !applier.is_finished() {
                let which = rng.below(5) as usize;
                let oldest = finished.load(Ordering::SeqCst);
                let outcome = exchange_sized(Kind::AfSmc, None, services.all()[which], &[1, 100]).unwrap();
                let newest = started.load(Ordering::SeqCst);
                assert_ne!(is_smc(&outcome), outcome.is_denied(), "{outcome}");
                let possible = (oldest..=newest).map(Policy::of);
                let fits = possible.clone().any(|policy| Services::allows(which, policy) == is_smc(&outcome));
                assert!(
                    fits,
                    "service {which}, generations {oldest} to {newest} ({:?}): {outcome}",
                    possible.collect::<Vec<_>>()
                );
                during += usize::from(oldest != newest);
                made.fetch_add(1, Ordering::SeqCst);
            }
            drop(stop);
            applier.join().unwrap()
        });
        println!("{} connections, {during} of them during an apply", made.load(Ordering::SeqCst));
        assert_eq!(lab.generation(), before + generations as u64 - 1, "one generation each apply");
        changes
    })
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn every_connection_is_judged_by_one_generation() {
    needs_hook!();
    let changes = alternate(10, scaled(200), |_| 0, |_, _| ());
    assert!(changes.iter().all(|change| change == "switched"), "{changes:?}");
}

#[test]
fn also_across_outgrown_tables() {
    needs_hook!();
    // Small, larger than any table before, small again, larger still.
    let full = scaled(50_000);
    let extra = |index| match index {
        1 => full / 10,
        3 | 4 => full,
        _ => 0,
    };
    let changes = alternate(6, scaled(200), extra, |_, _| ());
    assert!(changes[0] == "replaced" && changes[2] == "replaced", "{changes:?}");
}

#[test]
fn also_across_a_version_change() {
    needs_hook!();
    // Every other apply finds programs of another version and replaces them.
    let before_apply = |lab: &Lab, index| {
        if index % 2 == 1 {
            lab.pretend_other_version();
        }
    };
    let changes = alternate(6, scaled(200), |_| 0, before_apply);
    assert_eq!(changes, ["replaced", "switched", "replaced", "switched", "replaced"]);
}

/// Two instances exist for a moment only, and what the old one counted is carried over.
#[test]
fn a_version_change_keeps_hits_and_leaves_nothing_behind() {
    needs_hook!();
    Lab::run(|lab| {
        let service = listen(Kind::AfSmc, "127.0.0.2");
        let policy = "version = 1\n[[rule]]\nname = \"kept\"\naction = \"deny\"\npeers = [\"127.0.0.2\"]\n";
        lab.apply(policy);
        exchange_sized(Kind::AfSmc, None, &service, &[1]).unwrap();
        let (old, hits) = (lab.instances(), lab.hits("kept"));
        assert!(hits > 0);
        lab.pretend_other_version();
        assert!(!lab.status()["ok"].as_bool().unwrap(), "status says that other programs are loaded");
        lab.apply(policy);
        let new = lab.instances();
        assert_eq!((old.len(), new.len()), (1, 1));
        assert_ne!(old, new);
        assert_eq!(lab.hits("kept"), hits);
        assert!(lab.status()["ok"].as_bool().unwrap());
    });
}

#[test]
fn applies_at_the_same_time_wait_for_each_other() {
    needs_hook!();
    Lab::run(|lab| {
        let services = Services::open();
        // Each file differs from the others: the same policy again would be no new generation.
        let file = |index: usize| {
            let text = format!("{}# number {index}\n", services.text(Policy::of(index), 0));
            lab.home.write(&format!("number-{index}.toml"), &text)
        };
        lab.home.run(["apply".as_ref(), file(0).as_os_str()]).ok();
        let before = lab.generation();
        let running: Vec<_> =
            (1..=6).map(|index| lab.home.start(["apply".as_ref(), file(index).as_os_str()])).collect();
        for one in running {
            one.wait().ok();
        }
        // One that finds its policy in force already switches nothing.
        assert!((before + 1..=before + 6).contains(&lab.generation()), "{before} -> {}", lab.generation());
        // Whoever came last, all of it is in force.
        let verdicts =
            services.all().map(|service| is_smc(&exchange_sized(Kind::AfSmc, None, service, &[1]).unwrap()));
        let known = [Policy::A, Policy::B, Policy::C].map(Services::verdicts);
        assert!(known.contains(&verdicts), "{verdicts:?}");
    });
}

#[test]
fn hits_survive_an_apply_that_keeps_the_rule() {
    needs_hook!();
    Lab::run(|lab| {
        let service = listen(Kind::AfSmc, "127.0.0.2");
        let rule = |name: &str, peer: &str| {
            format!(
                "[[rule]]\nname = \"{name}\"\naction = \"deny\"\ndirection = \"outbound\"\npeers = [\"{peer}\"]\n"
            )
        };
        let kept = rule("kept", "127.0.0.2");
        lab.apply(&format!("version = 1\n{kept}"));
        for _ in 0..3 {
            exchange_sized(Kind::AfSmc, None, &service, &[1]).unwrap();
        }
        assert_eq!(lab.hits("kept"), 3);
        // Another rule before it, and enough of them to move every number.
        let others: String = (0..40).map(|n| rule(&format!("other-{n}"), &format!("127.9.0.{n}"))).collect();
        lab.apply(&format!("version = 1\n{others}{kept}"));
        exchange_sized(Kind::AfSmc, None, &service, &[1]).unwrap();
        assert_eq!(lab.hits("kept"), 4);
        assert_eq!(lab.hits("other-0"), 0);
        lab.apply(&format!("version = 1\n{kept}"));
        assert_eq!(lab.hits("kept"), 4);
    });
}
