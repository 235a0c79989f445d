//! The decision tables: one array of 8-byte cells a generation, written by user space, searched by the programs.
//!
//! ```text
//! cell 0        magic, layout version, flags
//! cells 1..16   where each part begins (constants H_*)
//! then          peer, local and port tables (sorted disjoint intervals and their index), verdicts
//! ```
//! A decision is `verdict[direction][local class][peer class][port class]`. An interval's value is its class already
//! multiplied by the stride, so that the verdict's cell is a sum. All numbers are native-endian; cell numbers count
//! from the start of the array.

use crate::query::{Addr, Direction, Query};

/// Where cells are read from: a BPF array in the kernel, a slice in user space.
pub trait Cells {
    /// The cell's value, `None` beyond the end.
    fn cell(&self, index: u32) -> Option<u64>;

    /// [`search32`]; the programs override it with a function that the verifier follows once, not once a path.
    #[inline(always)]
    fn find32(&self, descriptor: u32, key: u32) -> Option<u32> {
        search32(self, descriptor, key)
    }

    /// [`search128`]; see [`Self::find32`].
    #[inline(always)]
    fn find128(&self, descriptor: u32, key: Addr) -> Option<u32> {
        search128(self, descriptor, key)
    }
}

impl Cells for [u64] {
    #[inline(always)]
    fn cell(&self, index: u32) -> Option<u64> {
        self.get(index as usize).copied()
    }
}

/// First half of cell 0 of a table that may be searched.
pub const MAGIC: u32 = 0x534d_4350;
/// Version of this layout; a program refuses (allows, counts) a table of another one.
pub const LAYOUT: u16 = 2;

/// Flag in cell 0: decide and count, but let every connection negotiate SMC.
pub const FLAG_OBSERVE: u16 = 1;
/// Flag in cell 0: some rule uses `local`, the local tables exist.
pub const FLAG_LOCAL: u16 = 2;
/// Flag in cell 0: a SYN that is sent again goes without the SMC option, allowed or not.
pub const FLAG_PLAIN_RETRANSMISSIONS: u16 = 4;
/// Flag in cell 0: SYNs that pass through this host are judged as well, as outbound (tc only).
pub const FLAG_FORWARDED: u16 = 8;
/// Flag in cell 0: allowed SYNs are marked, and answers that return the mark lose the SMC option.
pub const FLAG_CANARY: u16 = 16;
/// Flag in cell 0: answers that return the mark keep the SMC option; the peer enters the quarantine all the same.
pub const FLAG_LEARN_ONLY: u16 = 32;

/// IPv4 peers: an [`index32`] descriptor.
pub const H_PEER4: u32 = 1;
/// IPv6 peers: three cells, see [`search128`].
pub const H_PEER6: u32 = 2;
/// IPv4 local addresses: an [`index32`] descriptor.
pub const H_LOCAL4: u32 = 5;
/// IPv6 local addresses: three cells.
pub const H_LOCAL6: u32 = 6;
/// Service ports: an [`index32`] descriptor with keys of 16 bits.
pub const H_PORT: u32 = 9;
/// Verdicts: first cell in the low half, cells a direction in the high half.
pub const H_VERDICT: u32 = 10;
/// Further magics of the SMC option beside the standard one: [`EXTRA_MAGICS`] cells, each `pack(in a SYN, in a SYN-ACK)`;
/// 0: none.
pub const H_MAGICS: u32 = 11;
/// How many further magics there may be.
pub const EXTRA_MAGICS: usize = 3;
/// Cells of the header.
pub const HEADER: u32 = 16;

/// Most intervals that one index cell of a 32-bit table may span (the search loop is bounded: the verifier follows
/// every turn).
pub const MAX_SPAN32: u32 = 1 << 17;
/// Most intervals that one index cell of a 128-bit table may span.
pub const MAX_SPAN128: u32 = 1 << 22;
/// Cells a table may have at most: 1 GiB, far above a million networks.
pub const MAX_CELLS: u32 = 1 << 27;

/// Bit of a 128-bit table's index cell: it describes a second index level instead of a span.
pub const SUB_INDEX: u64 = 1 << 63;

/// What a table says about one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// May this connection negotiate SMC? (In observe mode: would it be allowed to?)
    pub allow: bool,
    /// The rule's `trust`: exempt from the quarantine.
    pub trust: bool,
    /// The table only observes.
    pub observe: bool,
    /// A SYN that is sent again goes without the option.
    pub plain_retransmissions: bool,
    /// Index of the deciding rule's counters.
    pub slot: u32,
}

const VERDICT_ALLOW: u64 = 1 << 32;
const VERDICT_TRUST: u64 = 1 << 33;

impl Verdict {
    /// The verdict's cell (without `observe` and `plain_retransmissions`, which are the table's).
    pub const fn to_cell(self) -> u64 {
        self.slot as u64
            | if self.allow { VERDICT_ALLOW } else { 0 }
            | if self.trust { VERDICT_TRUST } else { 0 }
    }

    /// The flags of its table, as far as a verdict shows them.
    #[inline(always)]
    pub const fn table_flags(self) -> u16 {
        (if self.observe { FLAG_OBSERVE } else { 0 })
            | if self.plain_retransmissions { FLAG_PLAIN_RETRANSMISSIONS } else { 0 }
    }

    /// Reads a verdict's cell.
    #[inline(always)]
    pub const fn from_cell(cell: u64, flags: u16) -> Self {
        Self {
            allow: cell & VERDICT_ALLOW != 0,
            trust: cell & VERDICT_TRUST != 0,
            observe: flags & FLAG_OBSERVE != 0,
            plain_retransmissions: flags & FLAG_PLAIN_RETRANSMISSIONS != 0,
            slot: cell as u32,
        }
    }
}

/// Two numbers in one cell.
#[inline(always)]
pub const fn pack(lo: u32, hi: u32) -> u64 {
    lo as u64 | (hi as u64) << 32
}

/// Cell 0 of a table with these flags.
pub const fn head(flags: u16) -> u64 {
    pack((LAYOUT as u32) | (flags as u32) << 16, MAGIC)
}

/// The descriptor of a 32-bit table, `pack(first index cell, shift)`: the index cell of `key` is number
/// `key >> shift`; it holds `pack(first, end)`, the interval cells to search. An interval cell is
/// `pack(value, start of the interval)`; the interval `first` begins at or before the bucket.
#[inline(always)]
pub const fn index32(first_index_cell: u32, shift: u32) -> u64 {
    pack(first_index_cell, shift)
}

/// The value of the interval of a 32-bit table that `key` lies in.
#[inline(always)]
pub fn search32<C: Cells + ?Sized>(cells: &C, descriptor: u32, key: u32) -> Option<u32> {
    let d = cells.cell(descriptor)?;
    // A shift of 32 (one bucket) must not be taken modulo 32.
    let bucket = (key as u64 >> (d >> 32 & 63)) as u32;
    let span = cells.cell((d as u32).wrapping_add(bucket))?;
    let (mut lo, mut hi) = (span as u32, (span >> 32) as u32);
    let mut turn = 0;
    while turn < 18 && lo.wrapping_add(1) < hi {
        let mid = lo.wrapping_add(hi.wrapping_sub(lo) >> 1);
        if (cells.cell(mid)? >> 32) as u32 <= key {
            lo = mid;
        } else {
            hi = mid;
        }
        turn += 1;
    }
    Some(cells.cell(lo)? as u32)
}

/// The value of the interval of a 128-bit table that `key` lies in.
///
/// Descriptor: cell 0 is `pack(first index cell, shift)` as for 32 bits, taken on the upper half of the key; cell 1 is
/// `pack(first cell of the upper halves, first cell of the lower halves)`; cell 2 the first cell of the values, two a
/// cell. Index cells hold interval *numbers*. An index cell with [`SUB_INDEX`] describes a second level instead:
/// its first cell in bits 0..32, shift in 32..38, number of bits in 40..46.
#[inline(always)]
pub fn search128<C: Cells + ?Sized>(cells: &C, descriptor: u32, key: Addr) -> Option<u32> {
    let d = cells.cell(descriptor)?;
    let parts = cells.cell(descriptor + 1)?;
    let values = cells.cell(descriptor + 2)? as u32;
    let (his, los) = (parts as u32, (parts >> 32) as u32);
    let bucket = (key.hi >> (d >> 32 & 63)) as u32;
    let mut span = cells.cell((d as u32).wrapping_add(bucket))?;
    if span & SUB_INDEX != 0 {
        let mask = (1u64 << (span >> 40 & 31)) - 1;
        let bucket = (key.hi >> (span >> 32 & 63) & mask) as u32;
        span = cells.cell((span as u32).wrapping_add(bucket))?;
    }
    let (mut lo, mut hi) = (span as u32, (span >> 32) as u32);
    let mut turn = 0;
    while turn < 23 && lo.wrapping_add(1) < hi {
        let mid = lo.wrapping_add(hi.wrapping_sub(lo) >> 1);
        let start = cells.cell(his.wrapping_add(mid))?;
        if start < key.hi || (start == key.hi && cells.cell(los.wrapping_add(mid))? <= key.lo) {
            lo = mid;
        } else {
            hi = mid;
        }
        turn += 1;
    }
    let pair = cells.cell(values.wrapping_add(lo >> 1))?;
    Some(if lo & 1 == 0 { pair as u32 } else { (pair >> 32) as u32 })
}

/// The table's flags (`FLAG_*`). `None`: there is no table, or one of another layout.
#[inline(always)]
pub fn flags<C: Cells + ?Sized>(cells: &C) -> Option<u16> {
    let head = cells.cell(0)?;
    if (head >> 32) as u32 != MAGIC || head as u16 != LAYOUT { None } else { Some((head >> 16) as u16) }
}

/// Judges `query`. `None`: there is no table, one of another layout, or a damaged one; the caller allows and counts.
#[inline(always)]
pub fn decide<C: Cells + ?Sized>(cells: &C, query: &Query) -> Option<Verdict> {
    let flags = flags(cells)?;
    let peer = match query.peer.as_v4() {
        Some(v4) => cells.find32(H_PEER4, v4)?,
        None => cells.find128(H_PEER6, query.peer)?,
    };
    let local = if flags & FLAG_LOCAL == 0 {
        0
    } else {
        match query.local.as_v4() {
            Some(v4) => cells.find32(H_LOCAL4, v4)?,
            None => cells.find128(H_LOCAL6, query.local)?,
        }
    };
    let port = cells.find32(H_PORT, query.port as u32)?;
    let verdicts = cells.cell(H_VERDICT)?;
    let mut index = (verdicts as u32).wrapping_add(peer).wrapping_add(local).wrapping_add(port);
    if matches!(query.direction, Direction::Inbound) {
        index = index.wrapping_add((verdicts >> 32) as u32);
    }
    Some(Verdict::from_cell(cells.cell(index)?, flags))
}
