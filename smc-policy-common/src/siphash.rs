//! SipHash-2-4 (Aumasson and Bernstein, 2012) of messages of whole 64-bit words.

/// The hash of the words as little-endian bytes, under the key (its first and last eight bytes as little-endian numbers).
#[inline(always)]
pub fn siphash24<const N: usize>(key: [u64; 2], words: [u64; N]) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    for word in words {
        compress(&mut v, word);
    }
    // The last block: no bytes are left, its highest byte is the length.
    compress(&mut v, ((N as u64 * 8) & 0xff) << 56);
    v[2] ^= 0xff;
    for _ in 0..4 {
        round(&mut v);
    }
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

#[inline(always)]
fn compress(v: &mut [u64; 4], word: u64) {
    v[3] ^= word;
    round(v);
    round(v);
    v[0] ^= word;
}

#[inline(always)]
fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].wrapping_add(v[3]);
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].wrapping_add(v[1]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
#[allow(
    deprecated,
    reason = "the standard library's SipHash-2-4 is the other implementation to compare with"
)]
mod tests {
    extern crate std;

    use core::hash::{Hasher, SipHasher};

    use super::*;

    /// The reference implementation's key, bytes 0 to 15, and messages, bytes 0, 1, 2 and so on.
    #[test]
    fn the_reference_vectors() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash24(key, []), 0x726f_db47_dd0e_0e31);
        assert_eq!(siphash24(key, [key[0]]), 0x93f5_f579_9a93_2462);
        assert_eq!(siphash24(key, key), 0x3f2a_cc7f_57c2_9bdb);
    }

    #[test]
    fn another_implementation_says_the_same() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state ^ state >> 29
        };
        for _ in 0..1000 {
            let (key, words) = ([next(), next()], [next(), next(), next(), next(), next()]);
            let mut other = SipHasher::new_with_keys(key[0], key[1]);
            for word in words {
                other.write(&word.to_le_bytes());
            }
            assert_eq!(siphash24(key, words), other.finish());
        }
    }
}
