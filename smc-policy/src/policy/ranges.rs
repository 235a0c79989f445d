//! Sets of numbers as sorted, disjoint, non-adjacent inclusive ranges: ports, IPv4 and IPv6 addresses.

/// A number that ranges are made of.
pub trait Key: Copy + Ord + std::hash::Hash + std::fmt::Debug {
    /// The smallest value.
    const MIN: Self;
    /// The largest value.
    const MAX: Self;
    /// The next value, `None` after [`Key::MAX`].
    fn next(self) -> Option<Self>;
    /// The value before, `None` before [`Key::MIN`].
    fn previous(self) -> Option<Self>;
}

macro_rules! key {
    ($($number:ty),*) => {$(
        impl Key for $number {
            const MIN: Self = <$number>::MIN;
            const MAX: Self = <$number>::MAX;
            fn next(self) -> Option<Self> {
                self.checked_add(1)
            }
            fn previous(self) -> Option<Self> {
                self.checked_sub(1)
            }
        }
    )*};
}
key!(u16, u32, u128);

/// A set of numbers. Its ranges are sorted, disjoint and not adjacent, so that equal sets have equal ranges.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RangeSet<K> {
    ranges: Vec<(K, K)>,
}

impl<K> Default for RangeSet<K> {
    fn default() -> Self {
        Self { ranges: Vec::new() }
    }
}

impl<K: Key> RangeSet<K> {
    /// Every number.
    pub fn full() -> Self {
        Self { ranges: vec![(K::MIN, K::MAX)] }
    }

    /// The numbers in any of `ranges` (inclusive, in any order, overlapping or not; a reversed range holds nothing).
    pub fn new(mut ranges: Vec<(K, K)>) -> Self {
        ranges.retain(|(lo, hi)| lo <= hi);
        ranges.sort_unstable();
        ranges.dedup_by(|next, kept| {
            let joined = kept.1.next().is_none_or(|after| next.0 <= after);
            if joined {
                kept.1 = kept.1.max(next.1);
            }
            joined
        });
        Self { ranges }
    }

    /// The ranges, inclusive, sorted, disjoint and not adjacent.
    pub fn ranges(&self) -> &[(K, K)] {
        &self.ranges
    }

    /// Holds no number.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Holds every number.
    pub fn is_full(&self) -> bool {
        self.ranges == [(K::MIN, K::MAX)]
    }

    /// Holds `key`.
    pub fn contains(&self, key: K) -> bool {
        let after = self.ranges.partition_point(|(lo, _)| *lo <= key);
        after.checked_sub(1).is_some_and(|at| key <= self.ranges[at].1)
    }

    /// Holds every number from `lo` to `hi`.
    pub fn covers(&self, lo: K, hi: K) -> bool {
        let after = self.ranges.partition_point(|(start, _)| *start <= lo);
        after.checked_sub(1).is_some_and(|at| hi <= self.ranges[at].1)
    }

    /// Numbers of `self` that are not in `other`.
    pub fn minus(&self, other: &Self) -> Self {
        let mut ranges = Vec::with_capacity(self.ranges.len());
        let mut holes = other.ranges.iter().peekable();
        for &(lo, hi) in &self.ranges {
            let mut start = Some(lo);
            while holes.next_if(|hole| hole.1 < lo).is_some() {}
            while let (Some(from), Some(&&(hole_lo, hole_hi))) = (start, holes.peek()) {
                if hole_lo > hi {
                    break;
                }
                if let Some(before) = hole_lo.previous().filter(|before| from <= *before) {
                    ranges.push((from, before));
                }
                start = hole_hi.next().filter(|after| *after <= hi);
                if start.is_none() {
                    // The hole may reach into the next range as well: keep it.
                    break;
                }
                holes.next();
            }
            if let Some(from) = start {
                ranges.push((from, hi));
            }
        }
        Self { ranges }
    }

    /// Where membership changes, ascending: at every even place the set begins, at every odd place it ends (the place is
    /// the first number outside). A set that reaches [`Key::MAX`] has an odd number of boundaries.
    pub fn boundary(&self, index: usize) -> Option<K> {
        let (lo, hi) = self.ranges.get(index / 2)?;
        if index.is_multiple_of(2) { Some(*lo) } else { hi.next() }
    }
}

/// Cuts all numbers where any of `sets` begins or ends: within a stretch no set tells two numbers apart.
pub(super) fn stretches<'a, K: Key + 'a>(sets: impl Iterator<Item = &'a RangeSet<K>>) -> Vec<(K, K)> {
    let boundaries = |set: &'a RangeSet<K>| (0..).map_while(|index| set.boundary(index));
    let mut starts: Vec<K> = sets.flat_map(boundaries).chain([K::MIN]).collect();
    starts.sort_unstable();
    starts.dedup();
    let ends = starts.iter().skip(1).filter_map(|next| next.previous()).chain([K::MAX]);
    starts.iter().copied().zip(ends).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn small() -> impl Strategy<Value = Vec<(u16, u16)>> {
        let near_max = (0u16..24).prop_map(|n| u16::MAX - n);
        let edge = prop_oneof![0u16..24, near_max];
        prop::collection::vec((edge.clone(), edge), 0..6)
    }

    fn universe() -> impl Iterator<Item = u16> {
        (0..30).chain(u16::MAX - 30..=u16::MAX)
    }

    proptest! {
        #[test]
        fn new_holds_exactly_what_was_given_and_is_normal(ranges in small()) {
            let set = RangeSet::new(ranges.clone());
            for key in universe() {
                prop_assert_eq!(set.contains(key), ranges.iter().any(|(lo, hi)| (*lo..=*hi).contains(&key)));
            }
            for pair in set.ranges().windows(2) {
                prop_assert!(pair[0].1 + 1 < pair[1].0);
            }
        }

        #[test]
        fn minus_is_set_difference_and_normal(a in small(), b in small()) {
            let (a, b) = (RangeSet::new(a), RangeSet::new(b));
            let difference = a.minus(&b);
            for key in universe() {
                prop_assert_eq!(difference.contains(key), a.contains(key) && !b.contains(key));
            }
            prop_assert_eq!(RangeSet::new(difference.ranges().to_vec()), difference);
        }

        #[test]
        fn boundaries_toggle_membership(ranges in small()) {
            let set = RangeSet::new(ranges);
            for key in universe() {
                let passed = (0..).map_while(|i| set.boundary(i)).filter(|boundary| *boundary <= key).count();
                prop_assert_eq!(passed % 2 == 1, set.contains(key));
            }
        }
    }

    #[test]
    fn full_is_full() {
        assert!(RangeSet::<u32>::full().is_full());
        assert!(RangeSet::new(vec![(0u16, 9), (10, u16::MAX)]).is_full());
        assert!(RangeSet::<u16>::full().minus(&RangeSet::full()).is_empty());
    }
}
