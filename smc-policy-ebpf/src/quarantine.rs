//! The quarantine: looks peers up, and learns them. Its maps are shared by all instances and generations.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    helpers::bpf_ktime_get_boot_ns,
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray},
};
use smc_policy_common::{
    canary::Opening,
    echoed::{ADDRESSES, Echoed},
    event::{Event, WANTS_GUARD},
    quarantine::{
        COMMANDED_ENTRIES, Cause, ECHO_SPAN, Entry, FLAG_COMMANDED, FLAG_LEARNED, FLAGS, Key,
        LEARNED_ENTRIES, Learned, next_span,
    },
    query::{Addr, Direction, Query},
    tcp_option::{CANARY_EXID, CANARY_LENGTH, CANARY_SHORT, EXPERIMENTAL},
};

use crate::{events, maps};

/// What programs learned.
#[map(name = "smcpol_learned")]
static LEARNED: LruHashMap<Key, Entry> = LruHashMap::with_max_entries(LEARNED_ENTRIES, 0);

/// What was decided by command. Takes memory for what is in it only.
#[map(name = "smcpol_entries")]
static COMMANDED: HashMap<Key, Entry> = HashMap::with_max_entries(COMMANDED_ENTRIES, BPF_F_NO_PREALLOC);

/// What may be in the two: while they are empty, a decision does not look into them.
#[map(name = "smcpol_qflags")]
static FLAG: Array<u64> = Array::with_max_entries(FLAGS, 0);

/// How much was learned.
#[map(name = "smcpol_qcount")]
static COUNT: PerCpuArray<Learned> = PerCpuArray::with_max_entries(1, 0);

/// At which ports an address echoed lately.
#[map(name = "smcpol_ports")]
static ECHOED: LruHashMap<Addr, Echoed> = LruHashMap::with_max_entries(ADDRESSES, 0);

/// Whether the peer of a connection is in quarantine.
#[inline(always)]
pub fn holds(query: &Query) -> bool {
    let (learned, commanded) = (is_used(FLAG_LEARNED), is_used(FLAG_COMMANDED));
    if !learned && !commanded {
        return false;
    }
    let how = u64::from(query.port)
        | (query.direction as u64) << 16
        | u64::from(learned) << 17
        | u64::from(commanded) << 18;
    smcpol_holds(query.peer.hi, query.peer.lo, how) != 0
}

#[inline(always)]
fn is_used(element: u32) -> bool {
    match FLAG.get_ptr(element) {
        // SAFETY: an element of the map, 8 bytes and aligned; others may store to it at any time.
        Some(flag) => unsafe { flag.read_volatile() != 0 },
        None => false,
    }
}

/// The look-up as a global function, as `smcpol_judge` is one. `how`: the port, the direction in bit 16, then which of the
/// two maps may have something.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_holds(peer_hi: u64, peer_lo: u64, how: u64) -> u64 {
    let direction = if how >> 16 & 1 == 0 { Direction::Outbound } else { Direction::Inbound };
    // SAFETY: takes no argument.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    let mut key = Key::new(Addr { hi: peer_hi, lo: peer_lo }, how as u16);
    // Only whole addresses are in quarantine both ways: the service port of an inbound connection is ours.
    if matches!(direction, Direction::Inbound) {
        key.port = 0;
    }
    for _ in 0..2 {
        // SAFETY: the entry is read at once; an entry that is written meanwhile is the old or the new one, or for a
        // moment parts of both, which differ in times only.
        let found = unsafe {
            how >> 17 & 1 != 0 && LEARNED.get(&key).is_some_and(|entry| entry.holds(direction, now))
                || how >> 18 & 1 != 0 && COMMANDED.get(&key).is_some_and(|entry| entry.holds(direction, now))
        };
        if found {
            return 1;
        }
        if key.port == 0 {
            break;
        }
        key.port = 0;
    }
    0
}

/// Puts the peer of a connection into quarantine for having returned our canary: the service, and the whole address when
/// this is one service too many.
#[inline(always)]
pub fn learn(opening: &Opening, cause: Cause, nonce: u32) {
    let Opening { peer, peer_port, .. } = *opening;
    let short = matches!(cause, Cause::ShortEcho);
    let length = if short { CANARY_SHORT } else { CANARY_LENGTH };
    let ([exid_0, exid_1], [a, b, c, d]) = (CANARY_EXID.to_be_bytes(), nonce.to_be_bytes());
    let option = [EXPERIMENTAL, length, exid_0, exid_1, a, b, c, d];
    let echo = Held {
        cause,
        directions: Entry::OUTBOUND,
        span: PROOF,
        evidence: u64::from_be_bytes(option),
        evidence_length: length,
    };
    echo.hold(&Key::new(peer, peer_port));
    if smcpol_echoes(peer.hi, peer.lo, peer_port.into()) != 0 {
        echo.hold(&Key::new(peer, 0));
    }
}

/// Takes note of an echo at a port. Whether the address echoes at so many that it does at all of them.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_echoes(peer_hi: u64, peer_lo: u64, port: u64) -> u64 {
    let peer = Addr { hi: peer_hi, lo: peer_lo };
    // SAFETY: takes no argument.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    match ECHOED.get_ptr_mut(&peer) {
        // SAFETY: an element of the map, not null. Two CPUs that note the same address at once may lose one of the two.
        Some(echoed) => unsafe { (*echoed).note(port as u16, now).into() },
        None => {
            let mut echoed = Echoed::default();
            echoed.note(port as u16, now);
            let _ = ECHOED.insert(&peer, &echoed, 0);
            0
        }
    }
}

/// The peer reset a connection whose SYN-ACK was blanked, before it had sent anything: perhaps it is a genuine SMC server
/// behind something that echoes options, and got data where it expected a handshake.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_reset(peer_hi: u64, peer_lo: u64, local_hi: u64, local_lo: u64, ports: u64) -> u64 {
    let peer = Addr { hi: peer_hi, lo: peer_lo };
    let (peer_port, local_port) = (ports as u16, (ports >> 16) as u16);
    maps::count(|stat| &mut stat.reset_blanked, true);
    let mut key = Key::new(peer, peer_port);
    let mut cause = 0;
    for _ in 0..2 {
        if let Some(entry) = LEARNED.get_ptr_mut(&key) {
            // SAFETY: an element of the map, not null; a count that is lost to another CPU is no harm.
            unsafe {
                (*entry).resets = (*entry).resets.saturating_add(1);
                cause = (*entry).cause;
            }
        }
        key.port = 0;
    }
    if events::are_wanted(WANTS_GUARD) {
        let local = Addr { hi: local_hi, lo: local_lo };
        events::reset(&Opening { peer, local, peer_port, local_port, sequence: 0 }, cause);
    }
    0
}

/// The learned entry of exactly this key, whether it holds or not.
#[inline(always)]
pub fn learned(key: &Key) -> Option<&'static Entry> {
    // SAFETY: an element of the map, not null; one that is written meanwhile is the old or the new one, or for a moment parts
    // of both.
    LEARNED.get_ptr(key).map(|entry| unsafe { &*entry })
}

/// Counts a cause of an entry that holds already.
#[inline(always)]
pub fn met_again(key: &Key, now: u64) {
    if let Some(entry) = LEARNED.get_ptr_mut(key) {
        // SAFETY: an element of the map, not null. Two CPUs at once may cost a count.
        unsafe {
            (*entry).last_seen = now;
            (*entry).count = (*entry).count.wrapping_add(1);
        }
    }
}

/// What an entry is to say.
pub struct Held {
    /// Why.
    pub cause: Cause,
    /// [`Entry::OUTBOUND`], [`Entry::INBOUND`].
    pub directions: u8,
    /// Seconds from now, or [`PROOF`].
    pub span: u32,
    /// What the peer sent, big-endian.
    pub evidence: u64,
    /// How many bytes of that there are, 0 to 8.
    pub evidence_length: u8,
}

/// As a span: an hour, more if the peer was in quarantine before ([`next_span`]).
pub const PROOF: u32 = 0;

impl Held {
    /// Makes it, or makes the one that is there say it.
    #[inline(always)]
    pub fn hold(&self, key: &Key) {
        let Self { cause, directions, span, evidence, evidence_length } = *self;
        let how = u64::from(key.port as u16)
            | (cause as u64) << 16
            | u64::from(directions) << 24
            | u64::from(evidence_length) << 28
            | u64::from(span) << 32;
        smcpol_hold(key.peer.hi, key.peer.lo, how, evidence);
    }
}

/// As a global function: what it keeps at hand takes no room in the callers' frames. `how`: the port, from bit 16 on the
/// cause, 24 the directions, 28 the length of the evidence, 32 the span.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_hold(peer_hi: u64, peer_lo: u64, how: u64, evidence: u64) -> u64 {
    let key = Key::new(Addr { hi: peer_hi, lo: peer_lo }, how as u16);
    let (cause, directions, span) = ((how >> 16) as u8, (how >> 24 & 15) as u8, (how >> 32) as u32);
    let evidence_length = (how >> 28 & 15) as u8;
    // SAFETY: takes no argument.
    let now = unsafe { bpf_ktime_get_boot_ns() };
    let span = match (span, learned(&key)) {
        (PROOF, Some(entry)) => next_span(entry, now, ECHO_SPAN),
        (PROOF, None) => ECHO_SPAN,
        (span, _) => span,
    };
    let until = now.wrapping_add(u64::from(span) * 1_000_000_000);
    let Some(count) = COUNT.get_ptr_mut(0) else { return 0 };
    match LEARNED.get_ptr_mut(&key) {
        Some(entry) => {
            // SAFETY: elements of the maps, not null. Two CPUs that learn the same at once may cost a count; the times
            // that they write are the same but for moments.
            unsafe {
                (*entry).span = span;
                (*entry).until = until;
                (*entry).last_seen = now;
                (*entry).count = (*entry).count.wrapping_add(1);
                (*entry).cause = cause;
                (*entry).directions |= directions;
                (*entry).evidence_length = evidence_length;
                // Word by word (it begins at a multiple of 8): an array in between would not fit the stack, 512 bytes with the
                // callers' frames.
                let words = (&raw mut (*entry).evidence).cast::<u64>();
                words.write(evidence.to_be());
                words.add(1).write(0);
                (*count).renewed += 1;
            }
            if events::are_wanted(WANTS_GUARD) {
                events::smcpol_entered(&key, entry, Event::RENEWED.into());
            }
        }
        None => {
            let [a, b, c, d, e, f, g, h] = evidence.to_be_bytes();
            let entry = Entry {
                until,
                first_seen: now,
                last_seen: now,
                count: 1,
                span,
                cause,
                directions,
                evidence_length,
                resets: 0,
                reserved: [0; 4],
                evidence: [a, b, c, d, e, f, g, h, 0, 0, 0, 0, 0, 0, 0, 0],
            };
            let inserted = LEARNED.insert(&key, &entry, 0).is_ok();
            // SAFETY: as above.
            unsafe {
                (*count).inserted += u64::from(inserted);
                (*count).refused += u64::from(!inserted);
            }
            if inserted && events::are_wanted(WANTS_GUARD) {
                events::smcpol_entered(&key, &entry, 0);
            }
        }
    }
    // After the entry: whoever sees the flag finds it.
    if let Some(flag) = FLAG.get_ptr_mut(FLAG_LEARNED) {
        // SAFETY: an element of the map, 8 bytes and aligned; others may store to it at any time.
        unsafe { flag.write_volatile(1) };
    }
    0
}
