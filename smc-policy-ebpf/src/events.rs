//! Tells whoever reads what happens, through a ring buffer. While nobody does, that costs one load and a comparison.

use aya_ebpf::{
    bindings::BPF_F_MMAPABLE,
    helpers::{bpf_get_prandom_u32, bpf_ktime_get_boot_ns},
    macros::map,
    maps::{Array, PerCpuArray, RingBuf},
};
use smc_policy_common::{
    canary::Opening,
    event::{Event, KINDS, Kind, READER, RING_BYTES, Reader, Told, UNTIL, VERSION, WANTS},
    quarantine::{Entry, Key},
    query::Addr,
    tcp_option::{CANARY_EXID, CANARY_LENGTH, CANARY_SHORT, EXPERIMENTAL},
};

use crate::maps;

/// The ring; shared by all instances, as the two others.
#[map(name = "smcpol_events")]
static EVENTS: RingBuf = RingBuf::with_byte_size(RING_BYTES, 0);

/// Who reads; user space maps it into memory.
#[map(name = "smcpol_reader")]
static WHO: Array<u64> = Array::with_max_entries(READER, BPF_F_MMAPABLE);

/// How many events there were.
#[map(name = "smcpol_told")]
static TOLD: PerCpuArray<Told> = PerCpuArray::with_max_entries(1, 0);

#[inline(always)]
fn element(index: u32) -> u64 {
    match WHO.get_ptr(index) {
        // SAFETY: an element of the map, 8 bytes and aligned; user space may store to it at any time.
        Some(p) => unsafe { p.read_volatile() },
        None => 0,
    }
}

/// Does somebody want to hear of this (`WANTS_*`)?
#[inline(always)]
pub fn are_wanted(what: u64) -> bool {
    element(UNTIL) != 0 && element(WANTS) & what != 0
}

/// As [`are_wanted`], of one decision in as many as the reader asked for.
#[inline(always)]
fn are_sampled() -> bool {
    let one_in = (element(WANTS) >> 32) as u32;
    // SAFETY: takes no argument.
    one_in <= 1 || unsafe { bpf_get_prandom_u32() } % one_in == 0
}

/// Writes an event; `fill` writes what is not zero.
#[inline(always)]
fn tell(kind: Kind, fill: impl FnOnce(*mut Event)) {
    // SAFETY: takes no argument.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    let Some(told) = TOLD.get_ptr_mut(0) else { return };
    // SAFETY: this CPU's own element of a per-CPU array, not null. A program of the same CPU that interrupts this one may
    // cost a count, never more.
    let count = |counters: fn(&mut Told) -> &mut [u64; KINDS]| unsafe {
        counters(&mut *told)[kind as usize] += 1;
    };
    match Reader::at(element(UNTIL), now) {
        Reader::None => return,
        Reader::Slow => return count(|told| &mut told.lost),
        Reader::Here => {}
    }
    let Some(mut entry) = EVENTS.reserve::<Event>(0) else {
        return count(|told| &mut told.lost);
    };
    let event = entry.as_mut_ptr();
    // Word by word: compiled to a call of memset, the kernel runs a loop over bytes.
    for word in 0..Event::BYTES / 8 {
        // SAFETY: inside the entry, which is aligned to 8 bytes.
        unsafe { event.cast::<u64>().add(word).write_volatile(0) };
    }
    // SAFETY: fields of the entry.
    unsafe {
        (&raw mut (*event).version).write(VERSION);
        (&raw mut (*event).kind).write(kind as u8);
        (&raw mut (*event).at).write(now);
    }
    fill(event);
    entry.submit(0);
    count(|told| &mut told.written);
}

/// Of `word` in [`smcpol_decided`], whose lower half begins as a query's `meta`: the table of the odd generations.
pub const ODD_AT: u32 = 17;
/// Of `word`: [`Event::ALLOWED`].
pub const ALLOWED_AT: u32 = 18;
/// Of `word`: [`Event::OBSERVED`].
pub const OBSERVED_AT: u32 = 19;
/// Of `word`: [`Event::QUARANTINED`].
pub const QUARANTINED_AT: u32 = 20;
/// Of `word`: somebody wants to hear of it.
pub const TELLS: u64 = 1 << 21;
/// Of `word`: port and direction.
pub const QUERY: u64 = 0x1_ffff;
/// Of `word`: where the slot begins.
pub const SLOT_AT: u32 = 32;

/// A connection was judged, and somebody wants to hear of it. As a global function: the verifier follows it once, and what
/// it keeps at hand takes no room in the callers' frames.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_decided(peer_hi: u64, peer_lo: u64, local_hi: u64, local_lo: u64, word: u64) -> u64 {
    if !are_sampled() {
        return 0;
    }
    // An apply may have come in between, one generation further.
    let now = maps::generation();
    let generation = if now & 1 == word >> ODD_AT & 1 { now } else { now.wrapping_sub(1) };
    tell(Kind::Decision, |event| {
        // SAFETY: fields of the entry.
        unsafe {
            let flag = |at: u32, flag: u8| if word >> at & 1 == 0 { 0 } else { flag };
            let flags = flag(16, Event::INBOUND)
                | flag(ALLOWED_AT, Event::ALLOWED)
                | flag(OBSERVED_AT, Event::OBSERVED)
                | flag(QUARANTINED_AT, Event::QUARANTINED);
            (&raw mut (*event).flags).write(flags);
            (&raw mut (*event).slot).write((word >> SLOT_AT) as u32);
            (&raw mut (*event).generation).write(generation);
            (&raw mut (*event).peer).write(Addr { hi: peer_hi, lo: peer_lo });
            (&raw mut (*event).local).write(Addr { hi: local_hi, lo: local_lo });
            (&raw mut (*event).port).write(word as u16);
        }
    });
    0
}

/// Of `how` in [`smcpol_echoed`]: the canary was the short one.
pub const SHORT: u64 = 1 << 32;
/// Of `how`: the answer was left as it is.
pub const LEFT: u64 = 1 << 33;

/// A SYN-ACK returned our canary. `how`: the nonce, [`SHORT`], [`LEFT`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_echoed(opening: *const Opening, how: u64) -> u64 {
    if opening.is_null() {
        return 0;
    }
    let short = how & SHORT != 0;
    tell(Kind::Echo, |event| {
        // SAFETY: fields of the entry; the opening is not null.
        unsafe {
            write_opening(event, &*opening);
            (&raw mut (*event).flags).write(if how & LEFT != 0 { Event::KEPT } else { 0 });
            let length = if short { CANARY_SHORT } else { CANARY_LENGTH };
            let ([a, b], [c, d, e, f]) = (CANARY_EXID.to_be_bytes(), (how as u32).to_be_bytes());
            (&raw mut (*event).evidence_length).write(length);
            let first = u64::from_ne_bytes([EXPERIMENTAL, length, a, b, c, d, e, f]);
            (&raw mut (*event).evidence).cast::<u64>().write(first);
        }
    });
    0
}

/// # Safety
/// `event` is an entry of the ring.
#[inline(always)]
unsafe fn write_opening(event: *mut Event, opening: &Opening) {
    // SAFETY: as the caller says.
    unsafe {
        (&raw mut (*event).peer).write(opening.peer);
        (&raw mut (*event).local).write(opening.local);
        (&raw mut (*event).port).write(opening.peer_port);
        (&raw mut (*event).local_port).write(opening.local_port);
    }
}

/// A peer entered the quarantine, or was met again: `flags` of the event.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_entered(key: *const Key, entry: *const Entry, flags: u64) -> u64 {
    if key.is_null() || entry.is_null() {
        return 0;
    }
    tell(Kind::Quarantine, |event| {
        // SAFETY: fields of the entry; key and entry are not null.
        unsafe {
            (&raw mut (*event).flags).write(flags as u8);
            (&raw mut (*event).peer).write((*key).peer);
            (&raw mut (*event).port).write((*key).port as u16);
            (&raw mut (*event).cause).write((*entry).cause);
            (&raw mut (*event).until).write((*entry).until);
            (&raw mut (*event).count).write((*entry).count);
            (&raw mut (*event).span).write((*entry).span);
            (&raw mut (*event).evidence_length).write((*entry).evidence_length);
            let evidence = (&raw const (*entry).evidence).cast::<u64>();
            let place = (&raw mut (*event).evidence).cast::<u64>();
            place.write(evidence.read());
            place.add(1).write(evidence.add(1).read());
        }
    });
    0
}

/// The peer reset a connection whose SYN-ACK was blanked.
#[inline(always)]
pub fn reset(opening: &Opening, cause: u8) {
    tell(Kind::Reset, |event| {
        // SAFETY: a field of the entry.
        unsafe {
            write_opening(event, opening);
            (&raw mut (*event).cause).write(cause);
        }
    });
}
