//! Harness of the integration tests: real SMC sockets, private network namespaces and the real binary.
//!
//! Tests are ordinary `#[test]` functions in `tests/`. They run as root inside the lab's kernels, one at a time
//! (`--test-threads=1`), and on any other machine as far as it goes: each names with [`needs!`] what it cannot do
//! without, and what is missing is reported by name.
//!
//! | variable | meaning |
//! |---|---|
//! | `SMC_POLICY_BIN` | the binary under test; default: `smc-policy` beside the test's own target directory |
//! | `SMC_POLICY_SKIPS` | file to which `TEST: needs X` is appended for every test that did not run |
//! | `SMC_POLICY_KERNEL` | name of the lab kernel, for messages |
//! | `SMC_POLICY_ROLE` | what this host is to the other one, for tests of two hosts ([`joined`]) |
//! | `SMC_POLICY_HOOK` | `tc`: policies are enforced by tc programs, where the test does not say by what; default: `hs_ctrl` |
//! | `SMC_POLICY_RUN_AS` | name under which this run of the test binary is reported |
//! | `SMC_POLICY_FULL` | `1`: the large numbers instead of a tenth |
//! | `SMC_POLICY_SEED` | seed of everything random; default: the clock. Always printed |
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "all of this crate is test code: a panic is how a test fails"
)]

use std::thread;
use std::time::{Duration, Instant};

pub mod attaching;
pub mod capture;
pub mod clc;
pub mod command;
pub mod connection;
pub mod counting;
pub mod echo_peer;
pub mod enforce;
pub mod foreign;
pub mod half;
pub mod joined;
pub mod killer;
pub mod lab;
pub mod meeting;
pub mod middlebox;
pub mod mounts;
pub mod needs;
pub mod netns;
pub mod packet;
pub mod relay;
pub mod rng;
pub mod services;
pub mod sock_ops;
pub mod sys;
pub mod tcp_counters;
pub mod tool;
pub mod traffic;
pub mod trap;
pub mod tun_peer;
pub mod ueid;
pub mod world;

pub use capture::Capture;
pub use connection::{Half, Kind, Listener, Outcome, Pair, Transport, exchange};
pub use counting::Counting;
pub use enforce::Hook;
pub use foreign::Foreign;
pub use killer::Killer;
pub use lab::Lab;
pub use mounts::Mount;
pub use needs::Need;
pub use rng::Rng;
pub use services::Services;
pub use sock_ops::SockOps;
pub use tool::{Home, Run, Running};
pub use traffic::Traffic;
pub use trap::Trap;
pub use world::{Host, Routed};

/// What the tests of this run enforce policies by: `SMC_POLICY_HOOK`, else smc_hs_ctrl.
#[must_use]
pub fn hook() -> Hook {
    if std::env::var("SMC_POLICY_HOOK").is_ok_and(|value| value == "tc") { Hook::Tc } else { Hook::HsCtrl }
}

/// Waits until `is_so`.
///
/// # Panics
/// When it takes longer than a minute, with `what` was waited for.
#[track_caller]
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "waited in vain: {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Whether the large numbers were asked for (`SMC_POLICY_FULL=1`).
#[must_use]
pub fn is_full() -> bool {
    std::env::var("SMC_POLICY_FULL").is_ok_and(|value| value == "1")
}

/// `full`, or a tenth of it (at least 1) without `SMC_POLICY_FULL=1`.
#[must_use]
pub fn scaled(full: usize) -> usize {
    if is_full() { full } else { (full / 10).max(1) }
}
