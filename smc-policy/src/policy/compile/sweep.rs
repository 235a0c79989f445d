//! Walks along one axis (peers, local addresses or ports) and tells, stretch by stretch, which rules match there.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, binary_heap::PeekMut},
    hash::{BuildHasherDefault, Hasher},
};

use crate::policy::ranges::{Key, RangeSet};

/// Words of a set of `rules` bits.
pub(super) fn words(bits: usize) -> usize {
    bits.div_ceil(64)
}

/// The set bits, ascending.
pub(super) fn ones(bits: &[u64]) -> impl Iterator<Item = usize> + '_ {
    bits.iter().enumerate().flat_map(|(at, word)| {
        let mut word = *word;
        std::iter::from_fn(move || {
            let bit = word.trailing_zeros();
            word &= word.wrapping_sub(1);
            (bit < 64).then_some(at * 64 + bit as usize)
        })
    })
}

/// The rules that match at a stretch of the axis.
#[derive(Clone, Debug)]
pub(super) struct Members {
    /// One bit a rule.
    pub(super) rules: Vec<u64>,
    /// Depends on `rules` only; kept up to date without going through them.
    hash: u64,
}

/// The sets that rules use on one axis, and by which rules each is used.
#[derive(Debug)]
pub(super) struct Axis<'a, K> {
    /// Distinct sets.
    pub(super) sets: Vec<&'a RangeSet<K>>,
    /// For each set the rules that use it.
    pub(super) users: &'a [Vec<usize>],
    /// Rules that match everywhere.
    pub(super) always: &'a [u64],
}

impl<K: Key> Axis<'_, K> {
    /// Most stretches that [`Self::sweep`] can come to.
    pub(super) fn stretches(&self) -> usize {
        self.sets.iter().map(|set| 2 * set.ranges().len()).sum::<usize>() + 1
    }

    /// Calls `visit(first, last, rules)` for stretches that together make up the whole axis, ascending. No set begins or
    /// ends within one.
    pub(super) fn sweep<E>(&self, mut visit: impl FnMut(K, K, &Members) -> Result<(), E>) -> Result<(), E> {
        let mut members = Members { rules: self.always.to_vec(), hash: 0 };
        let mut passed = vec![0; self.sets.len()];
        let boundaries = self.sets.iter().enumerate();
        let boundaries = boundaries.filter_map(|(set, ranges)| Some(Reverse((ranges.boundary(0)?, set))));
        let mut next: BinaryHeap<_> = boundaries.collect();
        let mut start = K::MIN;
        while let Some(mut top) = next.peek_mut() {
            let Reverse((boundary, set)) = *top;
            if let Some(last) = boundary.previous().filter(|last| start <= *last) {
                visit(start, last, &members)?;
                start = boundary;
            }
            for rule in &self.users[set] {
                members.rules[rule / 64] ^= 1 << (rule % 64);
            }
            members.hash ^= spread(set as u64 + 1);
            passed[set] += 1;
            match self.sets[set].boundary(passed[set]) {
                Some(boundary) => *top = Reverse((boundary, set)),
                None => {
                    PeekMut::pop(top);
                }
            }
        }
        visit(start, K::MAX, &members)
    }
}

/// A fixed pseudo-random number for each number (the finaliser of splitmix64).
fn spread(number: u64) -> u64 {
    let mut x = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Numbers distinct [`Members`] from 0.
#[derive(Debug)]
pub(super) struct States {
    width: usize,
    first: HashMap<u64, u32, BuildHasherDefault<Same>>,
    /// The next state with the same hash.
    next: Vec<Option<u32>>,
    bits: Vec<u64>,
}

impl States {
    /// For members of so many rules.
    pub(super) fn new(rules: usize) -> Self {
        Self { width: words(rules).max(1), first: HashMap::default(), next: Vec::new(), bits: Vec::new() }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.next.len()
    }

    /// Words in use.
    pub(super) fn size(&self) -> usize {
        self.bits.len()
    }

    /// The rules of a state.
    pub(super) fn rules(&self, state: u32) -> &[u64] {
        let start = state as usize * self.width;
        &self.bits[start..start + self.width]
    }

    /// The number of these members.
    pub(super) fn number(&mut self, members: &Members) -> u32 {
        let first = self.first.get(&members.hash).copied();
        let mut at = first;
        while let Some(state) = at {
            if self.rules(state)[..members.rules.len()] == members.rules {
                return state;
            }
            at = self.next[state as usize];
        }
        let state = self.next.len() as u32;
        self.bits.extend_from_slice(&members.rules);
        self.bits.resize(self.next.len() * self.width + self.width, 0);
        self.next.push(first);
        self.first.insert(members.hash, state);
        state
    }
}

/// The key is a hash already.
#[derive(Debug, Default)]
struct Same(u64);

impl Hasher for Same {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = number;
    }
}
