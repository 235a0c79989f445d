//! Writes classes and verdicts as the cells that `smc_policy_common::table` searches.

use smc_policy_common::table::{
    FLAG_LOCAL, H_LOCAL4, H_LOCAL6, H_MAGICS, H_PEER4, H_PEER6, H_PORT, H_VERDICT, HEADER, MAX_CELLS,
    MAX_SPAN32, MAX_SPAN128, SUB_INDEX, head, index32, pack,
};

use super::{CompileError, classes::Stretches};
use crate::policy::{ranges::Key, settings::Settings};

/// Most bits of an index on IPv4 addresses: 8 MiB.
const INDEX_BITS_V4: u32 = 20;
/// Most bits of an index on ports.
const INDEX_BITS_PORT: u32 = 10;
/// Most bits of the first index on IPv6 addresses.
const INDEX_BITS_V6: u32 = 16;
/// Most bits of a second index on IPv6 addresses.
const SUB_INDEX_BITS: u32 = 20;
/// An index of up to so many bits (512 KiB) has a bucket for each stretch.
const FINE_INDEX_BITS: u32 = 16;
/// Larger ones have up to so many bits less.
const COARSER_BITS: u32 = 2;
/// A second index is made where it saves this many steps of the search on average.
const WORTHWHILE_STEPS: usize = 2;

/// The cells, growing.
pub(super) struct Cells {
    cells: Vec<u64>,
}

/// The logarithm to base 2, rounded up.
fn log2(number: usize) -> u32 {
    number.next_power_of_two().trailing_zeros()
}

/// By how many bits an index of so many stretches is coarser than a bucket for each. While all of it fits the
/// second-level cache, a search costs its steps; beyond that it costs the cells that are not in the cache. Eight stretches
/// share a cache line, so a bucket of four seldom needs another one, and three quarters of the index are saved: about a
/// quarter of the time at 100,000 networks when others use the cache too.
fn coarser_by(stretches: usize) -> u32 {
    log2(stretches).saturating_sub(FINE_INDEX_BITS).min(COARSER_BITS)
}

/// Bits of an index of so many stretches.
fn index_bits(stretches: usize, most: u32) -> u32 {
    (log2(stretches) - coarser_by(stretches)).min(most)
}

/// For each of `buckets` buckets, from the stretch that holds its first key (`edge(bucket)`) to the first stretch that
/// begins after its last one.
fn spans<K: Key>(
    stretches: &Stretches<K>,
    buckets: u64,
    edge: impl Fn(u64) -> Option<K>,
    mut emit: impl FnMut(usize, usize),
) {
    let begins_at =
        |at: usize, key: Option<K>| stretches.get(at).is_some_and(|(start, _)| Some(*start) == key);
    let mut at = match edge(0) {
        Some(first) => stretches.partition_point(|(start, _)| *start < first),
        None => return,
    };
    for bucket in 0..buckets {
        let first = if begins_at(at, edge(bucket)) { at } else { at.saturating_sub(1) };
        let after = edge(bucket + 1);
        while stretches.get(at).is_some_and(|(start, _)| after.is_none_or(|after| *start < after)) {
            at += 1;
        }
        emit(first, at);
    }
}

impl Cells {
    pub(super) fn new(settings: &Settings, local: bool, capacity: usize) -> Self {
        let mut cells = Vec::with_capacity(capacity);
        cells.resize(HEADER as usize, 0);
        cells[0] = head(settings.flags() | if local { FLAG_LOCAL } else { 0 });
        for (cell, magic) in cells.iter_mut().skip(H_MAGICS as usize).zip(settings.magic_cells()) {
            *cell = magic;
        }
        Self { cells }
    }

    /// # Errors
    /// More cells than the kernel side takes.
    pub(super) fn finish(self) -> Result<Vec<u64>, CompileError> {
        if self.cells.len() > MAX_CELLS as usize {
            return Err(CompileError::TooManyCells { cells: self.cells.len() });
        }
        Ok(self.cells)
    }

    /// The number of the next cell. Past u32 the table is refused in the end anyway.
    fn next(&self) -> u32 {
        u32::try_from(self.cells.len()).unwrap_or(u32::MAX)
    }

    /// `[direction][local][peer][port]`.
    pub(super) fn verdicts(&mut self, verdicts: impl ExactSizeIterator<Item = u64>) {
        self.cells[H_VERDICT as usize] = pack(self.next(), verdicts.len() as u32 / 2);
        self.cells.extend(verdicts);
    }

    /// Peers: a class weighs `stride` verdicts.
    pub(super) fn peers(
        &mut self,
        v4: &Stretches<u32>,
        v6: &Stretches<u128>,
        stride: u32,
    ) -> Result<(), CompileError> {
        self.table32(H_PEER4, v4, 32, INDEX_BITS_V4, stride)?;
        self.table128(H_PEER6, v6, stride)
    }

    /// Local addresses: a class weighs `stride` verdicts.
    pub(super) fn locals(
        &mut self,
        v4: &Stretches<u32>,
        v6: &Stretches<u128>,
        stride: u32,
    ) -> Result<(), CompileError> {
        self.table32(H_LOCAL4, v4, 32, INDEX_BITS_V4, stride)?;
        self.table128(H_LOCAL6, v6, stride)
    }

    /// Service ports: a class weighs one verdict.
    pub(super) fn ports(&mut self, stretches: &Stretches<u16>) -> Result<(), CompileError> {
        let stretches = stretches.iter().map(|(start, class)| (u32::from(*start), *class)).collect();
        self.table32(H_PORT, &stretches, 16, INDEX_BITS_PORT, 1)
    }

    fn table32(
        &mut self,
        descriptor: u32,
        stretches: &Stretches<u32>,
        width: u32,
        most_bits: u32,
        stride: u32,
    ) -> Result<(), CompileError> {
        let bits = index_bits(stretches.len(), most_bits);
        let (buckets, shift) = (1u64 << bits, width - bits);
        self.cells[descriptor as usize] = index32(self.next(), shift);
        let base = self.cells.len() + buckets as usize;
        if base + stretches.len() > MAX_CELLS as usize {
            return Err(CompileError::TooManyCells { cells: base + stretches.len() });
        }
        let mut longest = 0;
        let edge = |bucket: u64| u32::try_from(bucket << shift).ok();
        spans(stretches, buckets, edge, |first, end| {
            longest = longest.max(end - first);
            self.cells.push(pack((base + first) as u32, (base + end) as u32));
        });
        if longest > MAX_SPAN32 as usize {
            return Err(CompileError::TooDense { stretches: longest });
        }
        self.cells.extend(stretches.iter().map(|(start, class)| pack(class * stride, *start)));
        Ok(())
    }

    fn table128(
        &mut self,
        descriptor: u32,
        stretches: &Stretches<u128>,
        stride: u32,
    ) -> Result<(), CompileError> {
        // Three cells a stretch and two index levels of about two cells a stretch.
        if stretches.len() > MAX_CELLS as usize / 8 {
            return Err(CompileError::TooManyCells { cells: stretches.len() * 8 });
        }
        // A shift of 64 cannot be expressed: at least two buckets.
        let bits = index_bits(stretches.len(), INDEX_BITS_V6).max(1);
        let (buckets, shift) = (1u64 << bits, 64 - bits);
        let index = self.cells.len();
        self.cells[descriptor as usize] = pack(index as u32, shift);
        let edge = |bucket: u64| (bucket < buckets).then(|| u128::from(bucket << shift) << 64);
        let mut level = Vec::with_capacity(buckets as usize);
        spans(stretches, buckets, edge, |first, end| level.push((first, end)));
        self.cells.extend(level.iter().map(|(first, end)| pack(*first as u32, *end as u32)));
        let mut longest = 0;
        for (bucket, (first, end)) in level.into_iter().enumerate() {
            match self.sub_index(stretches, bucket as u64, shift, end - first) {
                Some((cell, span)) => {
                    self.cells[index + bucket] = cell;
                    longest = longest.max(span);
                }
                None => longest = longest.max(end - first),
            }
        }
        if longest > MAX_SPAN128 as usize {
            return Err(CompileError::TooDense { stretches: longest });
        }
        let his = self.next();
        self.cells.extend(stretches.iter().map(|(start, _)| (*start >> 64) as u64));
        let los = self.next();
        self.cells.extend(stretches.iter().map(|(start, _)| *start as u64));
        self.cells[descriptor as usize + 1] = pack(his, los);
        self.cells[descriptor as usize + 2] = u64::from(self.next());
        let values = stretches.chunks(2).map(|pair| {
            let value = |at: usize| pair.get(at).map_or(0, |(_, class)| class * stride);
            pack(value(0), value(1))
        });
        self.cells.extend(values);
        Ok(())
    }

    /// A second index for the bucket, if it makes the search of its `held` stretches enough shorter: the cell that describes
    /// it, and its longest span. It takes the bits right below those of the first index.
    fn sub_index(
        &mut self,
        stretches: &Stretches<u128>,
        bucket: u64,
        shift: u32,
        held: usize,
    ) -> Option<(u64, usize)> {
        let bits = log2(held).saturating_sub(coarser_by(stretches.len())).min(SUB_INDEX_BITS).min(shift);
        if (bits as usize) < WORTHWHILE_STEPS {
            return None;
        }
        let (buckets, sub_shift) = (1u64 << bits, shift - bits);
        let base = bucket << shift;
        // Past the last bucket of all there is no edge.
        let edge = |sub: u64| base.checked_add(sub << sub_shift).map(|hi| u128::from(hi) << 64);
        let (mut level, mut longest, mut steps) = (Vec::with_capacity(buckets as usize), 0, 0);
        spans(stretches, buckets, edge, |first, end| {
            let span = end - first;
            longest = longest.max(span);
            steps += span * log2(span) as usize;
            level.push(pack(first as u32, end as u32));
        });
        if steps + held * WORTHWHILE_STEPS > held * log2(held) as usize {
            return None;
        }
        let cell = SUB_INDEX | u64::from(self.next()) | u64::from(sub_shift) << 32 | u64::from(bits) << 40;
        self.cells.extend(level);
        Some((cell, longest))
    }
}
