//! A connection that is completed only to see whether the peer speaks SMC: handshake with the SMC option, CLC proposal,
//! the first bytes that come back, reset.
//!
//! Pure: time and segments come in, segments go out. The kernel must not answer for the local port.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::{
    clc::{self, Reply},
    options,
    segment::{Segment, flags},
};

/// How long the peer's first bytes are waited for. An SMC client waits 6 s (`CLC_WAIT_TIME`, net/smc/smc_clc.h); who
/// has not answered by then has failed its connect(2), whatever the reason.
pub const PATIENCE: Duration = Duration::from_millis(6_500);
/// Transmissions of a segment that is not answered.
const TRANSMISSIONS: u8 = 3;
/// Longer than every CLC message's part that is looked at.
const ENOUGH: usize = 64;

/// When something that is sent several times is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeated {
    since: Instant,
    sent: u8,
    limit: Duration,
}

/// What is to be done when it is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Send it.
    Send,
    /// There was no answer in time.
    Expired,
}

impl Repeated {
    /// To be sent from `since` on: at once, after a quarter and after half of `limit`; expires `limit` after it was sent
    /// first.
    pub const fn new(since: Instant, limit: Duration) -> Self {
        Self { since, sent: 0, limit }
    }

    /// When something is to be done next.
    pub fn at(&self) -> Instant {
        self.since
            + match self.sent {
                0 => Duration::ZERO,
                1 => self.limit / 4,
                2 => self.limit / 2,
                _ => self.limit,
            }
    }

    /// What, if it is time.
    pub fn act(&mut self, now: Instant) -> Option<Due> {
        if now < self.at() {
            return None;
        }
        if self.sent >= TRANSMISSIONS {
            return Some(Due::Expired);
        }
        if self.sent == 0 {
            self.since = now;
        }
        self.sent += 1;
        Some(Due::Send)
    }

    /// Since it was sent first.
    pub fn elapsed(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.since)
    }

    /// It was sent at least once.
    pub const fn has_begun(&self) -> bool {
        self.sent > 0
    }
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum Outcome {
    /// The peer's stream began with this.
    Replied {
        /// What it is.
        reply: Reply,
    },
    /// The peer took the proposal and said nothing.
    Silent,
    /// The peer reset the connection.
    Reset,
    /// The peer closed the connection without a word.
    Closed,
    /// It came to no handshake with the SMC option, although one was answered so before.
    NoHandshake,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// The SYN is out.
    Handshake,
    /// The proposal is out; the next byte expected, and what has come.
    Waiting { next: u32, stream: Vec<u8> },
    /// Over.
    Done(Outcome),
}

/// The connection.
#[derive(Clone, Debug)]
pub struct Negotiation {
    port: u16,
    peer_port: u16,
    isn: u32,
    mss: u16,
    repeated: Repeated,
    /// The highest acknowledgement seen.
    acknowledged: u32,
    state: State,
}

impl Negotiation {
    /// From local port `port`, beginning at `start` with sequence number `isn`; `limit`: for an answer to the SYN.
    pub fn new(port: u16, peer_port: u16, mss: u16, isn: u32, start: Instant, limit: Duration) -> Self {
        Self {
            port,
            peer_port,
            isn,
            mss,
            repeated: Repeated::new(start, limit),
            acknowledged: isn.wrapping_add(1),
            state: State::Handshake,
        }
    }

    /// The local port.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// How it ended, if it did.
    pub const fn outcome(&self) -> Option<&Outcome> {
        match &self.state {
            State::Done(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// When it wants to act next.
    pub fn due(&self) -> Option<Instant> {
        (self.outcome().is_none()).then(|| self.repeated.at())
    }

    /// What is to be sent now.
    pub fn act(&mut self, now: Instant) -> Vec<Segment> {
        if self.outcome().is_some() {
            return Vec::new();
        }
        match (self.repeated.act(now), &self.state) {
            (Some(Due::Send), State::Handshake) => vec![Segment {
                sequence: self.isn,
                flags: flags::SYN,
                options: options::for_negotiating(self.mss),
                ..self.segment()
            }],
            (Some(Due::Send), State::Waiting { next, .. }) => vec![self.proposal(*next)],
            (Some(Due::Expired), State::Handshake) => {
                self.state = State::Done(Outcome::NoHandshake);
                Vec::new()
            }
            (Some(Due::Expired), State::Waiting { .. }) => self.end(Outcome::Silent),
            _ => Vec::new(),
        }
    }

    /// Takes a segment that came to the local port from the peer, and returns what is to be answered at once.
    pub fn hear(&mut self, now: Instant, segment: &Segment) -> Vec<Segment> {
        let is_ack = segment.flags & flags::ACK != 0;
        let is_reset = segment.flags & flags::RST != 0;
        let is_ours = is_ack && segment.acknowledgement.wrapping_sub(self.isn.wrapping_add(1)) <= self.sent();
        match self.state {
            State::Handshake if is_reset && is_ours => {
                self.state = State::Done(Outcome::NoHandshake);
                Vec::new()
            }
            State::Handshake if segment.is(flags::SYN | flags::ACK) && is_ours => {
                if !options::has_smc(&segment.options) {
                    self.state = State::Done(Outcome::NoHandshake);
                    return vec![segment.reset()];
                }
                let next = segment.sequence.wrapping_add(1);
                self.state = State::Waiting { next, stream: Vec::new() };
                self.repeated = Repeated::new(now, PATIENCE);
                self.act(now)
            }
            State::Handshake => Vec::new(),
            State::Waiting { .. } => self.hear_stream(segment, is_ours, is_reset),
            // Whatever the peer still says, it has not taken the reset.
            State::Done(_) if is_ours && !is_reset => vec![segment.reset()],
            State::Done(_) => Vec::new(),
        }
    }

    fn hear_stream(&mut self, segment: &Segment, is_ours: bool, is_reset: bool) -> Vec<Segment> {
        let State::Waiting { next, stream } = &mut self.state else { return Vec::new() };
        if is_reset {
            // One that is not where the next byte is expected may be anybody's (RFC 5961).
            if segment.sequence == *next {
                self.state = State::Done(Outcome::Reset);
            }
            return Vec::new();
        }
        if !is_ours {
            return Vec::new();
        }
        if segment.acknowledgement.wrapping_sub(self.acknowledged) < 1 << 31 {
            self.acknowledged = segment.acknowledgement;
        }
        if segment.is(flags::SYN | flags::ACK) {
            // The acknowledgement was lost; the proposal is one too and comes again by itself.
            return Vec::new();
        }
        // Bytes that have come already are skipped; what is further on comes again in order.
        let skipped = next.wrapping_sub(segment.sequence) as usize;
        let Some(new) = segment.payload.get(skipped..) else { return Vec::new() };
        let room = ENOUGH.saturating_sub(stream.len());
        stream.extend(new.iter().take(room));
        *next = next.wrapping_add(new.len() as u32);
        let is_all = segment.flags & flags::FIN != 0 || stream.len() >= ENOUGH;
        if let Some(reply) = clc::judge(stream, is_all) {
            return self.end(Outcome::Replied { reply });
        }
        if is_all {
            return self.end(Outcome::Closed);
        }
        if new.is_empty() {
            return Vec::new();
        }
        let next = *next;
        vec![Segment {
            sequence: self.isn.wrapping_add(1).wrapping_add(self.sent()),
            acknowledgement: next,
            flags: flags::ACK,
            ..self.segment()
        }]
    }

    /// Ends it: a reset where the peer expects the next byte, and one after the proposal if the peer has not said that it
    /// has it.
    fn end(&mut self, outcome: Outcome) -> Vec<Segment> {
        self.state = State::Done(outcome);
        let last = self.isn.wrapping_add(1).wrapping_add(self.sent());
        let mut places = vec![self.acknowledged];
        places.extend((last != self.acknowledged).then_some(last));
        places
            .into_iter()
            .map(|sequence| Segment { sequence, flags: flags::RST, window: 0, ..self.segment() })
            .collect()
    }

    /// Bytes of the stream that may have been sent.
    fn sent(&self) -> u32 {
        match self.state {
            State::Handshake => 0,
            _ => clc::proposal().len() as u32,
        }
    }

    fn proposal(&self, next: u32) -> Segment {
        Segment {
            sequence: self.isn.wrapping_add(1),
            acknowledgement: next,
            flags: flags::ACK | flags::PSH,
            payload: clc::proposal(),
            ..self.segment()
        }
    }

    fn segment(&self) -> Segment {
        Segment {
            source_port: self.port,
            destination_port: self.peer_port,
            window: u16::MAX,
            ..Segment::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(3);
    const SMC: [u8; 8] = [1, 1, 254, 6, 0xe2, 0xd4, 0xc3, 0xd9];

    fn from_peer(sequence: u32, acknowledgement: u32, flags: u8) -> Segment {
        Segment {
            source_port: 443,
            destination_port: 50_000,
            sequence,
            acknowledgement,
            flags: flags | flags::ACK,
            ..Segment::default()
        }
    }

    /// A connection of sequence number 100 whose peer has answered with 1000.
    fn established() -> (Negotiation, Instant) {
        let start = Instant::now();
        let mut negotiation = Negotiation::new(50_000, 443, 1460, 100, start, LIMIT);
        let syn = negotiation.act(start).remove(0);
        assert!(syn.is(flags::SYN) && syn.sequence == 100 && options::has_smc(&syn.options));
        let syn_ack = Segment { options: SMC.to_vec(), ..from_peer(1000, 101, flags::SYN) };
        let proposal = negotiation.hear(start, &syn_ack).remove(0);
        assert_eq!((proposal.sequence, proposal.acknowledgement), (101, 1001));
        assert_eq!(proposal.payload, clc::proposal());
        (negotiation, start)
    }

    fn resets(segments: &[Segment]) -> Vec<u32> {
        assert!(segments.iter().all(|segment| segment.is(flags::RST)), "{segments:?}");
        segments.iter().map(|segment| segment.sequence).collect()
    }

    #[test]
    fn a_decline_proves_smc() {
        let (mut negotiation, now) = established();
        assert_eq!(negotiation.hear(now, &from_peer(1001, 153, 0)), []);
        let mut decline = vec![0xe2, 0xd4, 0xc3, 0xd9, 4, 0, 28, 0x10];
        decline.extend([0; 8]);
        decline.extend([3, 7, 0, 0, 0, 0, 0, 0, 0xe2, 0xd4, 0xc3, 0xd9]);
        let answer = negotiation.hear(now, &Segment { payload: decline, ..from_peer(1001, 153, flags::PSH) });
        assert_eq!(resets(&answer), [153]);
        let reply = Reply::Decline { diagnosis: Some(0x0307_0000) };
        assert_eq!(negotiation.outcome(), Some(&Outcome::Replied { reply }));
        assert_eq!(negotiation.due(), None);
    }

    #[test]
    fn a_banner_that_crosses_the_proposal() {
        let (mut negotiation, now) = established();
        let banner = Segment { payload: b"SSH-2.0-x\r\n".to_vec(), ..from_peer(1001, 101, flags::PSH) };
        // The peer may have the proposal or not: a reset for either case.
        assert_eq!(resets(&negotiation.hear(now, &banner)), [101, 153]);
        assert!(matches!(negotiation.outcome(), Some(Outcome::Replied { reply: Reply::Foreign { .. } })));
        // It has, and says so.
        assert_eq!(resets(&negotiation.hear(now, &from_peer(1012, 153, 0))), [153]);
        assert_eq!(negotiation.hear(now, &from_peer(1012, 153, flags::RST)), []);
    }

    #[test]
    fn a_stream_in_pieces() {
        let (mut negotiation, now) = established();
        let piece = |at: u32, bytes: &[u8]| Segment { payload: bytes.to_vec(), ..from_peer(at, 153, 0) };
        let answer = negotiation.hear(now, &piece(1001, &[0xe2, 0xd4]));
        assert_eq!((answer[0].acknowledgement, answer[0].flags), (1003, flags::ACK));
        assert_eq!(negotiation.hear(now, &piece(1009, &[1, 2])), [], "a gap");
        let answer = negotiation.hear(now, &piece(1001, &[0xe2, 0xd4, 0xc3, 0xd9, 2, 0, 68, 0x10]));
        assert_eq!(resets(&answer), [153]);
        assert_eq!(negotiation.outcome(), Some(&Outcome::Replied { reply: Reply::Accept }));
    }

    #[test]
    fn silence_is_waited_for_as_long_as_a_client_does() {
        let (mut negotiation, start) = established();
        let mut proposals = 0;
        let (ends, now) = loop {
            let now = negotiation.due().unwrap();
            let sent = negotiation.act(now);
            if negotiation.outcome().is_some() {
                break (sent, now);
            }
            proposals += sent.len();
        };
        assert_eq!((resets(&ends), proposals), (vec![101, 153], 2));
        assert_eq!((negotiation.outcome(), now - start), (Some(&Outcome::Silent), PATIENCE));
    }

    #[test]
    fn ends() {
        let (mut negotiation, now) = established();
        assert_eq!(negotiation.hear(now, &from_peer(1002, 153, flags::RST)), []);
        assert_eq!(negotiation.outcome(), None, "a reset at a wrong place");
        assert_eq!(negotiation.hear(now, &from_peer(1001, 153, flags::RST)), []);
        assert_eq!(negotiation.outcome(), Some(&Outcome::Reset));

        let (mut negotiation, now) = established();
        assert_eq!(resets(&negotiation.hear(now, &from_peer(1001, 153, flags::FIN))), [153]);
        assert_eq!(negotiation.outcome(), Some(&Outcome::Closed));

        let start = Instant::now();
        let mut negotiation = Negotiation::new(50_000, 443, 1460, u32::MAX, start, LIMIT);
        negotiation.act(start);
        assert_eq!(negotiation.hear(start, &from_peer(5, 7, flags::SYN)), [], "somebody else's");
        assert_eq!(resets(&negotiation.hear(start, &from_peer(5, 0, flags::SYN))), [0], "no SMC option");
        assert_eq!(negotiation.outcome(), Some(&Outcome::NoHandshake));
    }

    #[test]
    fn transmissions() {
        let start = Instant::now();
        let mut repeated = Repeated::new(start, LIMIT);
        let mut seen = Vec::new();
        for millisecond in 0..4_000 {
            let now = start + Duration::from_millis(millisecond);
            match repeated.act(now) {
                Some(Due::Send) => seen.push(millisecond),
                Some(Due::Expired) => {
                    seen.push(millisecond);
                    break;
                }
                None => {}
            }
        }
        assert_eq!(seen, [0, 750, 1_500, 3_000]);
    }

    proptest! {
        /// Whatever comes in, whenever: no panic, nothing but resets after the end, and an end.
        #[test]
        fn no_segments_panic(
            segments in prop::collection::vec(
                (0_u32..8, 0_u32..60, any::<u8>(), prop::collection::vec(any::<u8>(), 0..80), any::<bool>()),
                0..12,
            ),
        ) {
            let (mut negotiation, mut now) = established();
            for (at, acknowledged, flags, payload, wait) in segments {
                let options = SMC.to_vec();
                let segment = from_peer(1001 + at, 100 + acknowledged, flags);
                negotiation.hear(now, &Segment { payload, options, ..segment });
                if wait && let Some(due) = negotiation.due() {
                    now = due;
                    negotiation.act(now);
                }
                let is_over = negotiation.outcome().is_some();
                prop_assert_eq!(negotiation.due().is_none(), is_over);
            }
            for _ in 0..5 {
                if let Some(due) = negotiation.due() {
                    negotiation.act(due);
                }
            }
            prop_assert!(negotiation.outcome().is_some());
        }
    }
}
