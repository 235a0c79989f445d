//! SIGKILL at random moments.

use std::thread;
use std::time::{Duration, Instant};

use crate::{Lab, Rng};

/// Kills commands after a random part of the time that they take uninterrupted.
#[derive(Debug)]
pub struct Killer {
    /// Chooses the moments.
    pub rng: Rng,
    /// The time that they take.
    pub usual: Duration,
}

impl Killer {
    /// Whether it was killed in time. Empty arguments are left out.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn kill<const N: usize>(&mut self, lab: &Lab, arguments: [&str; N]) -> bool {
        let share = self.rng.below(1200) as u32;
        let start = Instant::now();
        let running = lab.home.start(arguments.iter().filter(|word| !word.is_empty()));
        let wait = self.usual * share / 1000;
        thread::sleep(wait.saturating_sub(start.elapsed()));
        running.kill().code().is_none()
    }
}
