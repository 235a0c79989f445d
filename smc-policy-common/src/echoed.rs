//! When does who echoes at some ports echo at all of them?

/// So many ports of one address make an entry for the address.
pub const PORTS: usize = 3;
/// They count for so long, ns: a day.
pub const WINDOW: u64 = 24 * 3600 * 1_000_000_000;
/// Addresses that are remembered; the least recently used go.
pub const ADDRESSES: u32 = 8192;

/// The ports at which an address echoed last. A value of the map `smcpol_ports`, whose key is the address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Echoed {
    /// When, ns since boot; 0: never.
    at: [u64; PORTS],
    /// At which port, host order.
    ports: [u16; 4],
}

impl Echoed {
    /// Takes note of an echo. Whether it makes [`PORTS`] of them within [`WINDOW`].
    #[inline(always)]
    pub fn note(&mut self, port: u16, now: u64) -> bool {
        let now = if now == 0 { 1 } else { now };
        let Self { at: [a, b, c], ports: [p, q, r, _] } = self;
        // Without an index that is not a constant, for the verifier.
        if *a != 0 && *p == port {
            *a = now;
        } else if *b != 0 && *q == port {
            *b = now;
        } else if *c != 0 && *r == port {
            *c = now;
        } else if *a <= *b && *a <= *c {
            (*a, *p) = (now, port);
        } else if *b <= *c {
            (*b, *q) = (now, port);
        } else {
            (*c, *r) = (now, port);
        }
        let counts = |at: u64| at != 0 && now.wrapping_sub(at) < WINDOW;
        counts(*a) && counts(*b) && counts(*c)
    }
}

const _: () = assert!(size_of::<Echoed>() == 32);

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    const HOUR: u64 = 3600 * 1_000_000_000;

    #[test]
    fn the_third_port_within_a_day_makes_it_whole() {
        let mut echoed = Echoed::default();
        assert!(!echoed.note(443, 1));
        assert!(!echoed.note(443, 2));
        assert!(!echoed.note(80, HOUR));
        assert!(!echoed.note(80, 2 * HOUR));
        assert!(echoed.note(22, 23 * HOUR));
        assert!(echoed.note(22, 23 * HOUR + 1), "still");
    }

    #[test]
    fn ports_that_are_a_day_apart_do_not() {
        let mut echoed = Echoed::default();
        let noted: [bool; 4] = core::array::from_fn(|i| echoed.note(i as u16 + 1, 1 + i as u64 * 12 * HOUR));
        assert_eq!(noted, [false; 4]);
        assert!(!echoed.note(9, 3 * 24 * HOUR));
    }

    proptest! {
        /// As a list of all echoes says.
        #[test]
        fn as_all_that_was_seen_says(steps in prop::collection::vec((0u16..5, 0u64..14), 1..60)) {
            let (mut echoed, mut last, mut now) = (Echoed::default(), HashMap::new(), 5);
            for (port, hours) in steps {
                now += hours * HOUR + 1;
                last.insert(port, now);
                let within = last.values().filter(|at| now - **at < WINDOW).count();
                prop_assert_eq!(echoed.note(port, now), within >= PORTS, "{:?}", echoed);
            }
        }
    }
}
