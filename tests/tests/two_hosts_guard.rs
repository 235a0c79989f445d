//! Two hosts that speak SMC-R keep doing so with the echo guard on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use smc_policy::kernel::guard::{Quarantine, Store};
use smc_policy_common::quarantine::Entry;
use smc_policy_tests::connection::Failure;
use smc_policy_tests::enforce::{Enforced, Hook};
use smc_policy_tests::joined::{Joined, Role};
use smc_policy_tests::{Half, Kind, Lab, Listener, Transport, eventually, needs};

const PORT: u16 = 6003;
const ALLOW: &str = "[[rule]]\nname = \"all\"\naction = \"allow\"\n";

/// Connections whose data may be lost: on machines that get no processor for a while, the software RDMA device gives up.
const MAY_BREAK: usize = 3;

/// So often a server is restarted.
const RESTARTS: usize = 20;

/// This host's end of one connection: what carries it, and whether a byte went each way.
fn once(joined: &mut Joined, listener: Option<&Listener>, to: SocketAddr) -> (Transport, bool) {
    joined.step("another");
    let met = || {
        let half = match listener {
            Some(listener) => listener.accept(&AtomicBool::new(false))?,
            None => Half::connect(Kind::AfSmc, None, to)?,
        };
        let transport = half.judge()?.transport;
        let works = match listener {
            Some(_) => half.answer(&[1]),
            None => half.ask(&[1]),
        };
        Ok((transport, works.is_ok()))
    };
    met().unwrap_or_else(|failure: Failure| panic!("{to}: {failure}"))
}

#[test]
fn smc_r_is_kept_through_a_hundred_connections() {
    needs!(Root, Peer, Tool, Bpffs, Smc, SmcDiag);
    let mut joined = Joined::meet("smc_r_is_kept_through_a_hundred_connections");
    joined.set_up_smc_r(PORT);
    let to = SocketAddr::new(Role::Server.addresses()[0], PORT);
    let listener = (joined.role == Role::Server).then(|| Listener::bind(Kind::AfSmc, to));
    let lab = Lab::default();
    let enforced = Enforced::nothing(&lab);
    let hooks = Hook::all();
    let each = 100_usize.div_ceil(hooks.len());
    let mut broken = 0;
    for hook in hooks {
        // At both ends: the server's programs see the marks too.
        enforced.change(ALLOW, "", hook);
        joined.step("in force");
        let counter = |name: &str| lab.status()["counters"][name].as_u64().expect("a counter");
        let before = counter("marked");
        for nth in 0..each {
            let (transport, works) = once(&mut joined, listener.as_ref(), to);
            let other: String = joined.swap(transport);
            assert_eq!((transport, &other[..]), (Transport::SmcR, "SMC-R"), "{hook}, connection {nth}");
            broken += usize::from(!works);
        }
        println!("{hook}: {each} connections, all SMC-R; so far {broken} broke later");
        // A SYN that was lost is marked again.
        let marked = counter("marked") - before;
        let expected = if joined.role == Role::Client { each as u64..=2 * each as u64 } else { 0..=0 };
        assert!(expected.contains(&marked), "{hook}: {marked} marked");
        assert_eq!((counter("echoes"), counter("unproven")), (0, 0));
        let quarantine = Quarantine::open(&lab.pins()).unwrap().expect("a quarantine");
        assert_eq!(quarantine.list(Store::Learned).unwrap(), []);
        joined.step("judged");
    }
    assert!(broken <= MAY_BREAK, "{broken} connections broke");
}

/// Serves until `is_over`, then goes at once with all its connections.
fn serve(address: SocketAddr, is_over: &AtomicBool) {
    let listener = Listener::bind(Kind::AfSmc, address);
    let mut open = Vec::new();
    while let Ok(half) = listener.accept(is_over) {
        open.push(half);
        if open.len() > 20 {
            open.clear();
        }
    }
}

/// A genuine server is restarted again and again while clients connect. No entry holds longer than a minute, and when it has
/// ended, connections are SMC-R as before. (That a minute is enough is waited for in guard_learner.rs, with --full.)
#[test]
fn a_restarted_server_gets_smc_r_again() {
    needs!(Root, Peer, Tool, Bpffs, Smc, SmcDiag);
    let mut joined = Joined::meet("a_restarted_server_gets_smc_r_again");
    joined.set_up_smc_r(PORT);
    let to = SocketAddr::new(Role::Server.addresses()[0], PORT);
    let lab = Lab::default();
    let enforced = Enforced::nothing(&lab);
    for hook in Hook::all() {
        enforced.change(ALLOW, "", hook);
        joined.step("in force");
        // It is known to speak SMC, as a server is that restarts.
        assert!(joined.connect(Kind::AfSmc, to.ip(), PORT).is_smc_r());
        match joined.role {
            Role::Server => {
                for _ in 0..RESTARTS {
                    let is_over = AtomicBool::new(false);
                    thread::scope(|scope| {
                        scope.spawn(|| serve(to, &is_over));
                        joined.step("it goes");
                        is_over.store(true, Ordering::Release);
                    });
                }
            }
            Role::Client => {
                let (no_more, failed, succeeded) =
                    (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
                thread::scope(|scope| {
                    for _ in 0..4 {
                        scope.spawn(|| {
                            while !no_more.load(Ordering::Acquire) {
                                match Half::connect(Kind::AfSmc, None, to) {
                                    Ok(_) => succeeded.fetch_add(1, Ordering::Relaxed),
                                    Err(_) => failed.fetch_add(1, Ordering::Relaxed),
                                };
                            }
                        });
                    }
                    for _ in 0..RESTARTS {
                        let before = succeeded.load(Ordering::Relaxed);
                        eventually("it serves", || succeeded.load(Ordering::Relaxed) >= before + 3);
                        joined.step("it goes");
                    }
                    no_more.store(true, Ordering::Release);
                });
                println!("{hook}: {failed:?} of the storm's connections failed, {succeeded:?} did not");
            }
        }
        joined.step("the storm is over");
        let quarantine = Quarantine::open(&lab.pins()).unwrap().expect("a quarantine");
        let entries = quarantine.list(Store::Learned).unwrap();
        println!("{hook}, {:?}: {entries:?}, {:#}", joined.role, lab.status()["counters"]);
        for (key, entry) in entries {
            assert!(entry.span <= 60, "{key:?}: {entry:?}");
            quarantine.put(Store::Learned, key, &Entry { until: entry.last_seen, ..entry }).unwrap();
        }
        joined.step("what was learned has ended");
        let met = joined.connect(Kind::AfSmc, to.ip(), PORT);
        assert!(met.is_smc_r(), "{hook}: {met}");
        joined.step("judged");
    }
}
