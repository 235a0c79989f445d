//! Random numbers that a printed seed brings back.

use std::time::{SystemTime, UNIX_EPOCH};

/// A small generator (SplitMix64); not for secrets.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// From `SMC_POLICY_SEED`, otherwise from the clock; prints the seed with `what` it is for.
    #[must_use]
    pub fn from_environment(what: &str) -> Self {
        let seed = match std::env::var("SMC_POLICY_SEED") {
            Ok(text) => text.parse().expect("SMC_POLICY_SEED is a decimal number"),
            Err(_) => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos() as u64,
        };
        println!("{what}: SMC_POLICY_SEED={seed}");
        Self(seed)
    }

    /// From a fixed seed.
    #[must_use]
    pub const fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// Another generator, for another thread.
    #[must_use]
    pub fn branch(&mut self) -> Self {
        Self(self.number())
    }

    /// A number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound
    }

    /// `length` bytes.
    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        for chunk in bytes.chunks_mut(8) {
            let number = self.number().to_le_bytes();
            chunk.copy_from_slice(&number[..chunk.len()]);
        }
        bytes
    }
}
