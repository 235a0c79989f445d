//! Finds the SMC option, and our canary, in the TCP options of a SYN or SYN-ACK and overwrites them with NOPs.

use core::{ffi::c_void, mem::MaybeUninit};

use aya_ebpf::{
    bindings::__sk_buff,
    check_bounds_signed,
    helpers::{bpf_csum_diff, bpf_l4_csum_replace, bpf_loop, bpf_skb_load_bytes, bpf_skb_store_bytes},
};
use smc_policy_common::{
    table::{EXTRA_MAGICS, H_MAGICS},
    tcp_option::{
        AUTHENTICATION, CANARY_EXID, CANARY_LENGTH, CANARY_SHORT, END, EXPERIMENTAL, NOP, SMC_LENGTH,
        SMC_MAGIC,
    },
};

use crate::{decision::InForce, tc_packet::Syn};

/// Most bytes of options in a TCP header.
const MOST: u32 = 40;
/// As many as the index mask admits; those behind the options stay zero.
const BYTES: usize = 64;
const MASK: u32 = BYTES as u32 - 1;
const WORDS: usize = BYTES / 8;

/// A SYN's options, in which SMC options can be overwritten.
#[repr(C)]
pub struct Options {
    words: [u64; WORDS],
    /// Beside the standard one. Where there are fewer: that again.
    magics: [u32; EXTRA_MAGICS],
    length: u32,
    at: u32,
    /// [`FOUND`], [`SIGNED`], and the length of the canary met first; 0: there is none.
    seen: u32,
    /// The canary's nonce, if it has one.
    nonce: u32,
    /// Checksum of the words as they were, negated.
    sum_before: u32,
}

// No byte is padding: older verifiers want all of what a function is given to be written. And the stack is small.
const _: () = assert!(size_of::<Options>() == BYTES + 4 * (EXTRA_MAGICS + 5));

/// In [`Options::seen`]: an SMC option.
const FOUND: u32 = 1 << 8;
/// In [`Options::seen`]: TCP-AO.
const SIGNED: u32 = 1 << 9;
/// In [`Options::seen`]: the canary's length.
const CANARY: u32 = 0xff;

impl Options {
    /// None yet. Made in place, as the stack is small, and word by word: compiled to a call of memset, the verifier
    /// follows and the kernel runs a loop over bytes.
    #[inline(always)]
    pub fn empty(place: &mut MaybeUninit<Self>) -> &mut Self {
        let this = place.as_mut_ptr();
        // SAFETY: every field of the place is written, then it holds a value.
        unsafe {
            for i in 0..WORDS {
                (&raw mut (*this).words[i]).write_volatile(0);
            }
            for i in 0..EXTRA_MAGICS {
                (&raw mut (*this).magics[i]).write_volatile(SMC_MAGIC);
            }
            (&raw mut (*this).length).write_volatile(0);
            (&raw mut (*this).at).write_volatile(0);
            (&raw mut (*this).seen).write_volatile(0);
            (&raw mut (*this).nonce).write_volatile(0);
            (&raw mut (*this).sum_before).write_volatile(0);
            &mut *this
        }
    }

    /// Reads the options of `syn`. False: they cannot be read, or hold nothing that may be an SMC option.
    #[inline(always)]
    pub fn read(&mut self, skb: *mut __sk_buff, syn: &Syn) -> bool {
        let length = i64::from(syn.options);
        if !check_bounds_signed(length, 4, i64::from(MOST)) {
            return false;
        }
        // SAFETY: the array is larger than `length` can be; the helper checks the packet's bounds.
        let result = unsafe {
            bpf_skb_load_bytes(skb.cast(), syn.options_at(), self.words.as_mut_ptr().cast(), length as u32)
        };
        self.length = syn.options;
        // Most SYNs end here, before a walk through their options.
        result == 0 && self.words[..MOST as usize / 8].iter().any(|word| has_byte(*word, EXPERIMENTAL))
    }

    /// Overwrites every SMC option and every canary, and says whether there is an SMC option. `answer`: in a SYN-ACK.
    ///
    /// What follows a malformed option is not looked at: the kernel does not either (`tcp_parse_options`,
    /// net/ipv4/tcp_input.c), but it does take what stands before.
    #[inline(always)]
    pub fn blank(&mut self, table: InForce, answer: bool) -> bool {
        for extra in 0..EXTRA_MAGICS {
            match table.cell(H_MAGICS + extra as u32) {
                Some(0) | None => {}
                Some(pair) => {
                    self.magics[extra] = if answer { (pair >> 32) as u32 } else { pair as u32 };
                }
            }
        }
        // SAFETY: the words have the length given, a multiple of 4; nothing is added.
        self.sum_before = unsafe {
            bpf_csum_diff(self.words.as_mut_ptr().cast(), MOST, core::ptr::null_mut(), 0, 0) as u32
        };
        smcpol_walk(self);
        self.seen & FOUND != 0
    }

    /// Whether TCP-AO signs the options. (The older MD5 signature does not cover them: RFC 2385, 2.0.)
    #[inline(always)]
    pub fn is_signed(&self) -> bool {
        self.seen & SIGNED != 0
    }

    /// The canary, after [`Self::blank`].
    #[inline(always)]
    pub fn canary(&self) -> Canary {
        match (self.seen & CANARY) as u8 {
            0 => Canary::None,
            CANARY_SHORT => Canary::Short,
            _ => Canary::Long(self.nonce),
        }
    }

    /// Writes the blanked options into the packet and corrects its checksum. False: the kernel refused, nothing was
    /// changed.
    #[inline(always)]
    pub fn write(&mut self, skb: *mut __sk_buff, syn: &Syn) -> bool {
        let length = i64::from(syn.options);
        if !check_bounds_signed(length, 4, i64::from(MOST)) {
            return false;
        }
        // The words begin at an even distance from the checksummed part's start: the difference of their sums is that
        // of the packet's, wherever in them the option stands.
        // Flags 0 everywhere: the change of the options and that of the checksum field cancel out in a sum over the
        // whole packet (CHECKSUM_COMPLETE), and where the field holds the pseudo header's sum only
        // (CHECKSUM_PARTIAL) the helper leaves it alone.
        // SAFETY: the words have the length given, a multiple of 4; the helpers check the packet's bounds.
        unsafe {
            let words = self.words.as_mut_ptr();
            let difference = bpf_csum_diff(core::ptr::null_mut(), 0, words.cast(), MOST, self.sum_before);
            bpf_skb_store_bytes(skb, syn.options_at(), words.cast(), length as u32, 0) == 0
                // The store has made the headers writable as far as the options' end: this cannot fail any more.
                && bpf_l4_csum_replace(skb, syn.checksum_at(), 0, difference as u64, 0) == 0
        }
    }

    #[inline(always)]
    fn byte(&self, at: u32) -> u8 {
        // SAFETY: the mask keeps the index inside `words`. Volatile: the mask must stay, as the verifier knows no other
        // bound.
        unsafe { self.words.as_ptr().cast::<u8>().add((at & MASK) as usize).read_volatile() }
    }

    #[inline(always)]
    fn overwrite(&mut self, at: u32) {
        // SAFETY: as in `byte`.
        unsafe { self.words.as_mut_ptr().cast::<u8>().add((at & MASK) as usize).write_volatile(NOP) };
    }

    /// Looks at the option at `at` and moves on to the next. False: there is none.
    #[inline(always)]
    fn advance(&mut self) -> bool {
        let at = self.at;
        if at >= self.length {
            return false;
        }
        let kind = self.byte(at);
        if kind == END {
            return false;
        }
        if kind == NOP {
            self.at = at + 1;
            return true;
        }
        if at + 1 >= self.length {
            return false;
        }
        let length = u32::from(self.byte(at + 1));
        if length < 2 || at + length > self.length {
            return false;
        }
        if kind == AUTHENTICATION {
            self.seen |= SIGNED;
        }
        let is_ours = kind == EXPERIMENTAL && self.is_canary(at, length);
        if is_ours && self.seen & CANARY == 0 {
            // 4 or 8.
            self.seen |= length;
            if length == u32::from(CANARY_LENGTH) {
                self.nonce = self.word(at + 4);
            }
        }
        // As the kernel takes it (`smc_parse_options`, net/ipv4/tcp_input.c).
        let is_smc = kind == EXPERIMENTAL
            && length >= u32::from(SMC_LENGTH)
            && length % 2 == 0
            && self.is_magic(at + 2);
        if is_smc {
            self.seen |= FOUND;
        }
        if is_smc || is_ours {
            let mut i = 0;
            while i < MOST && i < length {
                self.overwrite(at + i);
                i += 1;
            }
        }
        self.at = at + length;
        true
    }

    #[inline(always)]
    fn word(&self, at: u32) -> u32 {
        u32::from_be_bytes([self.byte(at), self.byte(at + 1), self.byte(at + 2), self.byte(at + 3)])
    }

    #[inline(always)]
    fn is_canary(&self, at: u32, length: u32) -> bool {
        (length == u32::from(CANARY_LENGTH) || length == u32::from(CANARY_SHORT))
            && u16::from_be_bytes([self.byte(at + 2), self.byte(at + 3)]) == CANARY_EXID
    }

    #[inline(always)]
    fn is_magic(&self, at: u32) -> bool {
        let magic = self.word(at);
        let mut found = magic == SMC_MAGIC;
        for known in self.magics {
            found |= known == magic;
        }
        found
    }
}

/// The canary among a packet's options.
#[derive(Clone, Copy)]
pub enum Canary {
    /// There is none.
    None,
    /// The short one.
    Short,
    /// With this nonce.
    Long(u32),
}

/// What a turn of the walk gets: the helper takes nothing but a place on the stack.
struct Walk {
    options: *mut Options,
}

/// Walks through the options as a global function: the verifier follows it once for any options, wherever it is called.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn smcpol_walk(options: *mut Options) -> u64 {
    if options.is_null() {
        return 0;
    }
    let mut walk = Walk { options };
    // bpf_loop (Linux 5.17): the verifier follows the callback once, not once a turn and path.
    // SAFETY: the callback has the helper's signature and gets `walk`, which outlives the call.
    unsafe { bpf_loop(MOST, step as *const () as *mut c_void, (&raw mut walk).cast(), 0) as u64 }
}

/// One turn of the walk: 0 goes on, 1 stops.
#[inline(never)]
extern "C" fn step(_: u64, walk: *mut c_void) -> i64 {
    // SAFETY: bpf_loop hands over the pointer it was given, a Walk, whose options nothing else uses meanwhile.
    let options = unsafe { &mut *(*walk.cast::<Walk>()).options };
    i64::from(!options.advance())
}

/// Whether one of the word's bytes is `byte`.
#[inline(always)]
fn has_byte(word: u64, byte: u8) -> bool {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let zero_where_equal = word ^ (ONES * byte as u64);
    zero_where_equal.wrapping_sub(ONES) & !zero_where_equal & ONES << 7 != 0
}
