//! Asks the tables in force, by a test run of the program `smcpol_query`.

use std::os::fd::{AsFd, OwnedFd};

use smc_policy_common::query::{PACKET_HEADER, PACKET_QUERIES, Query, WireAnswer, WireQuery};

use super::{
    error::{Doing, KernelError},
    sys,
};

/// What the kernel decided for one query; `None`: no usable table.
pub type Answer = Option<(bool, u32)>;

/// The loaded program.
#[derive(Debug)]
pub struct QueryProgram(pub OwnedFd);

impl QueryProgram {
    /// The kernel's answers, in order: (may it negotiate, counter slot of who decided). Counts nothing. All answers of
    /// one packet need not be of one generation: an apply may come between two of them.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn ask(&self, queries: &[Query]) -> Result<Vec<Answer>, KernelError> {
        let mut answers = Vec::with_capacity(queries.len());
        for batch in queries.chunks(PACKET_QUERIES) {
            let mut packet = pack(batch);
            sys::test_run(self.0.as_fd(), &mut packet, 1).doing(|| "ask the kernel for a decision".into())?;
            for wire in unpack(&packet) {
                match WireAnswer(wire.meta).verdict() {
                    Some(answer) => answers.push(answer),
                    None => {
                        return Err(KernelError::Object("its program smcpol_query left a query open".into()));
                    }
                }
            }
        }
        Ok(answers)
    }

    /// Mean duration of one run over a packet of up to [`PACKET_QUERIES`] queries, ns.
    ///
    /// # Errors
    /// [`KernelError::Io`].
    pub fn time(&self, queries: &[Query], repeat: u32) -> Result<u32, KernelError> {
        let mut packet = pack(&queries[..queries.len().min(PACKET_QUERIES)]);
        let run = sys::test_run(self.0.as_fd(), &mut packet, repeat).doing(|| "time a decision".into())?;
        Ok(run.nanoseconds)
    }
}

fn pack(queries: &[Query]) -> Vec<u8> {
    let mut packet = vec![0u8; PACKET_HEADER];
    for query in queries {
        let WireQuery { peer, local, meta } = WireQuery::new(query);
        for word in [peer.hi, peer.lo, local.hi, local.lo, meta] {
            packet.extend(word.to_ne_bytes());
        }
    }
    packet
}

fn unpack(packet: &[u8]) -> impl Iterator<Item = WireQuery> + '_ {
    packet[PACKET_HEADER..].chunks_exact(size_of::<WireQuery>()).map(|bytes| {
        let word = |i: usize| {
            let mut w = [0; 8];
            w.copy_from_slice(&bytes[i * 8..i * 8 + 8]);
            u64::from_ne_bytes(w)
        };
        WireQuery {
            peer: smc_policy_common::query::Addr { hi: word(0), lo: word(1) },
            local: smc_policy_common::query::Addr { hi: word(2), lo: word(3) },
            meta: word(4),
        }
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smc_policy_common::query::{Addr, Direction};

    use super::*;

    proptest! {
        #[test]
        fn a_packet_holds_its_queries(ports in prop::collection::vec((any::<u16>(), any::<bool>(), any::<u128>()), 0..64)) {
            let queries: Vec<_> = ports.iter().map(|(port, inbound, addr)| Query {
                peer: Addr::v6(*addr),
                local: Addr::v4(*addr as u32),
                port: *port,
                direction: if *inbound { Direction::Inbound } else { Direction::Outbound },
            }).collect();
            let packet = pack(&queries);
            prop_assert!(packet.len() >= 14, "a test run wants an Ethernet header");
            let back: Vec<_> = unpack(&packet).map(|w| w.query()).collect();
            prop_assert_eq!(back, queries);
        }
    }
}
