//! A path that swallows SYNs with TCP options that it does not know: a connection over it takes a second instead of
//! failing, as SYNs that are sent again go without the SMC option.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test code")]

use std::io::ErrorKind;
use std::time::Duration;

use smc_policy_tests::enforce::{Enforced, Hook};
use smc_policy_tests::world::only_at;
use smc_policy_tests::{Capture, Half, Kind, Lab, Routed, needs, ueid};

const PORT: u16 = 6001;
/// Everything is allowed; the counters show that there was a decision.
const POLICY: &str = "[[rule]]\nname = \"all\"\naction = \"allow\"\n";

#[test]
fn a_second_instead_of_a_failure() {
    needs!(Root, Netns, Tool, Bpffs, Smc, SmcDiag);
    ueid::ensure().unwrap();
    let world = Routed::new();
    world.router.nft(
        "table inet path { chain forward { type filter hook forward priority 0; tcp option 254 exists drop; }; }",
    );
    // Two or three SYNs, then connect(2) fails.
    world.client.sysctl("net.ipv4.tcp_syn_retries", "1");
    let families = [(Kind::AfSmc, Routed::SERVER[0]), (Kind::AfSmc6, Routed::SERVER[1])];
    let listeners = families.map(|(kind, ip)| (kind, world.server.listen(kind, ip, PORT)));
    let capture = world.client.run(|| Capture::begin("eth0"));
    // Whether each of the SYNs that the client has sent has the option.
    let syns = || {
        let all = capture.take();
        all.into_iter().filter(|seen| !seen.is_answer).map(|seen| seen.has_option).collect::<Vec<_>>()
    };
    let fails = |what: &str| {
        for (kind, listener) in &listeners {
            let connected = world.client.run(|| Half::connect(*kind, None, listener.address()));
            let failure = connected.expect_err("nobody answers");
            assert_eq!(failure.error.kind(), ErrorKind::TimedOut, "{what}: {failure}");
            let syns = syns();
            assert!(syns.len() > 1 && syns.iter().all(|has_option| *has_option), "{what}: {syns:?}");
        }
    };
    fails("no policy");

    let lab = Lab::default();
    let enforced = Enforced::nothing(&lab);
    let config = |retransmit: &str| format!("retransmit = \"{retransmit}\"\n{}", only_at(&[&world.client]));
    let mut relieved = 0;
    for hook in Hook::all() {
        enforced.change(POLICY, &config("plain"), hook);
        for (kind, listener) in &listeners {
            let outcome = world.exchange(*kind, listener.address(), listener);
            println!("{hook}: {outcome}");
            assert!(outcome.is_denied(), "{hook}: {outcome}");
            let time = outcome.connect_time;
            assert!(
                (Duration::from_millis(900)..Duration::from_secs(3)).contains(&time),
                "{hook}: {outcome}"
            );
            assert_eq!(syns(), [true, false], "{hook}");
        }
        relieved += listeners.len();
        assert_eq!(lab.status()["counters"]["plain_retransmissions"], relieved, "{hook}");
        enforced.change(POLICY, &config("keep"), hook);
        fails(&format!("{hook}, keep"));
        assert_eq!(lab.status()["counters"]["plain_retransmissions"], relieved, "{hook}, keep");
    }
}
