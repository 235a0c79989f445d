//! Connections all the time while policies and hooks change: each must be judged by a policy that was in force.

use std::panic::resume_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use crate::connection::{Kind, exchange_sized};
use crate::lab::is_smc;
use crate::{Rng, Services, eventually};

/// Which policies may be in force, by their numbers ([`Services`]).
#[derive(Debug)]
pub struct Traffic<'a> {
    services: &'a Services,
    /// One connection at a time: two to the same listener would be taken for each other.
    connecting: Mutex<()>,
    /// In their order.
    policies: Mutex<Vec<u64>>,
    /// Index of the oldest that may be in force.
    oldest: AtomicUsize,
    /// Connections made.
    made: AtomicUsize,
}

impl<'a> Traffic<'a> {
    /// Connects to random services as long as `body` runs, beginning with policy `number` in force. A connection that is
    /// neither what the policy before it nor what one until its end says fails the test.
    ///
    /// # Panics
    /// When a connection fails or is judged wrongly, and as `body` does.
    pub fn run<T>(services: &'a Services, number: u64, mut rng: Rng, body: impl FnOnce(&Self) -> T) -> T {
        let traffic = Self {
            services,
            connecting: Mutex::new(()),
            policies: Mutex::new(vec![number]),
            oldest: AtomicUsize::new(0),
            made: AtomicUsize::new(0),
        };
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let connecting = scope.spawn(|| {
                while !over.load(Ordering::SeqCst) {
                    traffic.connect(rng.below(4) as usize);
                    // The machine has two processors, and the changes need one.
                    thread::sleep(Duration::from_millis(2));
                }
            });
            let stop = StopOnDrop(&over);
            let result = body(&traffic);
            drop(stop);
            connecting.join().unwrap_or_else(|panic| resume_unwind(panic));
            println!("{} connections", traffic.made.load(Ordering::SeqCst));
            result
        })
    }

    fn connect(&self, which: usize) {
        let _alone = self.connecting.lock().expect("alone");
        let oldest = self.oldest.load(Ordering::SeqCst);
        let outcome = exchange_sized(Kind::AfSmc, None, &self.services.0[which], &[1, 100])
            .unwrap_or_else(|failure| panic!("service {which}: {failure}"));
        let possible: Vec<u64> = self.policies.lock().expect("the policies")[oldest..].to_vec();
        assert_ne!(is_smc(&outcome), outcome.is_denied(), "{outcome}");
        let fits = possible.iter().any(|policy| (policy >> which & 1 == 1) == outcome.is_denied());
        assert!(fits, "service {which}, of policies {possible:?}: {outcome}");
        self.made.fetch_add(1, Ordering::SeqCst);
    }

    /// `change` puts policy `number` in force.
    ///
    /// # Panics
    /// As `change` does.
    pub fn change<T>(&self, number: u64, change: impl FnOnce() -> T) -> T {
        self.attempt(number, change, || number)
    }

    /// `attempt` may put policy `number` in force, or leave the one that is; `result` says which.
    ///
    /// # Panics
    /// As they do.
    pub fn attempt<T>(&self, number: u64, attempt: impl FnOnce() -> T, result: impl FnOnce() -> u64) -> T {
        self.policies.lock().expect("the policies").push(number);
        let done = attempt();
        let now = result();
        let mut policies = self.policies.lock().expect("the policies");
        policies.push(now);
        self.oldest.store(policies.len() - 1, Ordering::SeqCst);
        done
    }

    /// The number of the policy that the kernel enforces now.
    ///
    /// # Panics
    /// As [`Services::enforced`].
    #[must_use]
    pub fn enforced(&self) -> u64 {
        let _alone = self.connecting.lock().expect("alone");
        self.services.enforced()
    }

    /// Waits for that many more connections.
    ///
    /// # Panics
    /// When they do not come.
    pub fn wait(&self, more: usize) {
        let end = self.made.load(Ordering::SeqCst) + more;
        eventually("more connections", || self.made.load(Ordering::SeqCst) >= end);
    }
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
