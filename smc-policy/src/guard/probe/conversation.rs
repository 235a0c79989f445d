//! All that is asked of one target, and what came back.
//!
//! Pure: time, packets and random numbers come in, packets go out. An ordinary SYN goes first, beside an ICMP echo request;
//! only who accepts it is sent the others, and only who returns the SMC option a CLC proposal.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use super::{
    icmp,
    negotiation::{Due, Negotiation, Outcome, Repeated},
    options::{Kind, Marks, Returned},
    segment::{Segment, flags, mss},
};

/// How a peer that resets or closes is given a second chance: a server that is just being restarted does so once.
const SECOND_TRY_AFTER: Duration = Duration::from_secs(1);

/// How to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How long an answer to a SYN or an echo request is waited for.
    pub timeout: Duration,
    /// Whether a peer that returns the SMC option is sent a CLC proposal.
    pub negotiate: bool,
}

/// Ports of this host that nobody else uses meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// For the SYNs, by [`Kind::index`]: the kernel resets what comes to them, or keeps silent.
    pub syns: [u16; Kind::ALL.len()],
    /// For negotiating: the kernel keeps silent.
    pub negotiations: [u16; 2],
}

impl Ports {
    /// All of them.
    pub fn all(&self) -> impl Iterator<Item = u16> {
        self.syns.into_iter().chain(self.negotiations)
    }
}

/// How a SYN was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// By a SYN-ACK.
    SynAck {
        /// What it returns.
        returned: Returned,
        /// Time since the first transmission.
        after: Duration,
    },
    /// By a reset.
    Reset {
        /// Time since the first transmission.
        after: Duration,
    },
    /// By ICMP.
    Unreachable {
        /// Why.
        why: &'static str,
    },
    /// Not at all.
    Silence,
    /// It could not be sent.
    NotSent {
        /// Why not.
        error: String,
    },
}

/// What became of one target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observations {
    /// Time to the answer to an ICMP echo request; `None`: there was none.
    pub ping: Option<Duration>,
    /// Answers by [`Kind::index`]; `None`: not asked.
    pub answers: [Option<Answer>; Kind::ALL.len()],
    /// Ends of the connections on which a CLC proposal was sent.
    pub negotiations: Vec<Outcome>,
}

impl Observations {
    /// The answer to a SYN of this kind.
    pub const fn answer(&self, kind: Kind) -> Option<&Answer> {
        self.answers[kind.index()].as_ref()
    }
}

/// A packet to the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Packet {
    /// A TCP segment.
    Tcp(Segment),
    /// An ICMP message.
    Icmp(Vec<u8>),
}

#[derive(Debug)]
struct Asked {
    kind: Kind,
    isn: u32,
    repeated: Repeated,
}

/// The conversation with one target.
#[derive(Debug)]
pub struct Conversation {
    target: SocketAddr,
    ports: Ports,
    settings: Settings,
    marks: Marks,
    ping_id: u16,
    /// `None`: answered, or not waited for any longer.
    ping: Option<Repeated>,
    asked: Vec<Asked>,
    negotiation: Option<Negotiation>,
    isns: [u32; Kind::ALL.len() + 2],
    seen: Observations,
}

impl Conversation {
    /// With `target`, from `start` on.
    pub fn new(
        target: SocketAddr,
        ports: Ports,
        settings: Settings,
        start: Instant,
        mut random: impl FnMut() -> u32,
    ) -> Self {
        let mut bytes = [0; Marks::RANDOM_BYTES];
        for chunk in bytes.chunks_mut(4) {
            chunk.copy_from_slice(&random().to_be_bytes());
        }
        let mut this = Self {
            target,
            ports,
            settings,
            marks: Marks::new(bytes),
            ping_id: random() as u16,
            ping: Some(Repeated::new(start, settings.timeout)),
            asked: Vec::new(),
            negotiation: None,
            isns: std::array::from_fn(|_| random()),
            seen: Observations::default(),
        };
        this.ask(Kind::Plain, start);
        this
    }

    /// The target.
    pub const fn target(&self) -> SocketAddr {
        self.target
    }

    /// What is known, once [`Self::due`] is `None`.
    pub fn into_observations(self) -> Observations {
        self.seen
    }

    /// When it wants to act next; `None`: it is over.
    pub fn due(&self) -> Option<Instant> {
        let unanswered = self.asked.iter().filter(|asked| self.seen.answer(asked.kind).is_none());
        let times = unanswered.map(|asked| asked.repeated.at());
        let negotiation = self.negotiation.as_ref().and_then(Negotiation::due);
        times.chain(self.ping.map(|ping| ping.at())).chain(negotiation).min()
    }

    /// What is to be sent now: at most one packet that is not a reset.
    pub fn act(&mut self, now: Instant) -> Vec<Packet> {
        if let Some(ping) = &mut self.ping {
            match ping.act(now) {
                Some(Due::Send) => {
                    return vec![Packet::Icmp(icmp::echo_request(self.target.is_ipv4(), self.ping_id, 1))];
                }
                Some(Due::Expired) => self.ping = None,
                None => {}
            }
        }
        for at in 0..self.asked.len() {
            let Asked { kind, isn, repeated } = &mut self.asked[at];
            let (kind, isn) = (*kind, *isn);
            if self.seen.answers[kind.index()].is_some() {
                continue;
            }
            match repeated.act(now) {
                Some(Due::Send) => return vec![Packet::Tcp(self.syn(kind, isn))],
                Some(Due::Expired) => self.answered(kind, Answer::Silence, now),
                None => {}
            }
        }
        let sent = self.negotiation.as_mut().map(|n| n.act(now)).unwrap_or_default();
        self.after_negotiation(now);
        sent.into_iter().map(Packet::Tcp).collect()
    }

    /// Takes a segment from the target, and returns what is to be answered at once.
    pub fn hear_tcp(&mut self, now: Instant, segment: &Segment) -> Vec<Packet> {
        let Some(kind) =
            Kind::ALL.into_iter().find(|kind| self.ports.syns[kind.index()] == segment.destination_port)
        else {
            return self.hear_negotiation(now, segment);
        };
        let Some(asked) = self.asked.iter().find(|asked| asked.kind == kind) else { return Vec::new() };
        let after = asked.repeated.elapsed(now);
        if !asked.repeated.has_begun() || segment.acknowledgement != asked.isn.wrapping_add(1) {
            return Vec::new();
        }
        if segment.is(flags::SYN | flags::ACK) {
            let returned = self.marks.returned(&segment.options);
            self.answered(kind, Answer::SynAck { returned, after }, now);
            // To repeated ones too: the first reset may be lost.
            return vec![Packet::Tcp(segment.reset())];
        }
        if segment.is(flags::RST | flags::ACK) {
            self.answered(kind, Answer::Reset { after }, now);
        }
        Vec::new()
    }

    /// Takes an ICMP message about the target or from it.
    pub fn hear_icmp(&mut self, now: Instant, from: IpAddr, message: &icmp::Message) {
        match message {
            icmp::Message::EchoReply { id } => {
                if let Some(ping) = self.ping
                    && *id == self.ping_id
                    && from == self.target.ip()
                    && ping.has_begun()
                {
                    self.seen.ping = Some(ping.elapsed(now));
                    self.ping = None;
                }
            }
            icmp::Message::Unreachable { destination, source_port, destination_port, why } => {
                let kind = Kind::ALL.into_iter().find(|kind| self.ports.syns[kind.index()] == *source_port);
                if let Some(kind) = kind
                    && (*destination, *destination_port) == (self.target.ip(), self.target.port())
                    && self.asked.iter().any(|asked| asked.kind == kind && asked.repeated.has_begun())
                {
                    self.answered(kind, Answer::Unreachable { why }, now);
                }
            }
        }
    }

    /// A packet could not be sent: what is not answered yet never will be.
    pub fn fail(&mut self, error: &str) {
        self.ping = None;
        for asked in &self.asked {
            let answer = &mut self.seen.answers[asked.kind.index()];
            answer.get_or_insert_with(|| Answer::NotSent { error: error.to_owned() });
        }
        if self.negotiation.take().is_some() {
            self.seen.negotiations.push(Outcome::NoHandshake);
        }
    }

    fn ask(&mut self, kind: Kind, now: Instant) {
        let isn = self.isns[kind.index()];
        self.asked.push(Asked { kind, isn, repeated: Repeated::new(now, self.settings.timeout) });
    }

    fn answered(&mut self, kind: Kind, answer: Answer, now: Instant) {
        let place = &mut self.seen.answers[kind.index()];
        if place.is_some() {
            return;
        }
        let accepted = matches!(answer, Answer::SynAck { .. });
        *place = Some(answer);
        if kind == Kind::Plain {
            if accepted {
                Kind::ALL
                    .into_iter()
                    .filter(|kind| *kind != Kind::Plain)
                    .for_each(|kind| self.ask(kind, now));
            }
        } else if self.settings.negotiate
            && Kind::ALL.iter().all(|kind| self.seen.answer(*kind).is_some())
            && self
                .seen
                .answers
                .iter()
                .any(|answer| matches!(answer, Some(Answer::SynAck { returned, .. }) if returned.smc))
        {
            self.negotiate(now);
        }
    }

    fn negotiate(&mut self, start: Instant) {
        let nth = self.seen.negotiations.len();
        let (Some(port), Some(isn)) =
            (self.ports.negotiations.get(nth), self.isns.get(Kind::ALL.len() + nth))
        else {
            return;
        };
        let (peer_port, mss) = (self.target.port(), mss(self.target));
        self.negotiation = Some(Negotiation::new(*port, peer_port, mss, *isn, start, self.settings.timeout));
    }

    fn hear_negotiation(&mut self, now: Instant, segment: &Segment) -> Vec<Packet> {
        let Some(negotiation) =
            self.negotiation.as_mut().filter(|one| one.port() == segment.destination_port)
        else {
            // One that is over: the peer has not taken the reset.
            return unwanted(&self.ports, segment).into_iter().map(Packet::Tcp).collect();
        };
        let answer = negotiation.hear(now, segment);
        self.after_negotiation(now);
        answer.into_iter().map(Packet::Tcp).collect()
    }

    /// Notes the end of a connection, and begins the second one if it tells.
    fn after_negotiation(&mut self, now: Instant) {
        let begun = self.seen.negotiations.len();
        let Some(outcome) = self.negotiation.as_ref().and_then(|one| one.outcome()) else { return };
        let Some(nth) = self
            .negotiation
            .as_ref()
            .and_then(|one| self.ports.negotiations.iter().position(|port| *port == one.port()))
        else {
            return;
        };
        if nth < begun {
            return;
        }
        self.seen.negotiations.push(outcome.clone());
        if matches!(outcome, Outcome::Reset | Outcome::Closed) {
            self.negotiate(now + SECOND_TRY_AFTER);
        }
    }

    fn syn(&self, kind: Kind, isn: u32) -> Segment {
        Segment {
            source_port: self.ports.syns[kind.index()],
            destination_port: self.target.port(),
            sequence: isn,
            flags: flags::SYN,
            window: 64_240,
            options: self.marks.options(kind, mss(self.target)),
            ..Segment::default()
        }
    }
}

/// The reset for a segment of a connection that is over, if the kernel does not send one by itself.
pub fn unwanted(ports: &Ports, segment: &Segment) -> Option<Segment> {
    let is_alive = segment.flags & flags::ACK != 0 && segment.flags & flags::RST == 0;
    (is_alive && ports.negotiations.contains(&segment.destination_port)).then(|| segment.reset())
}

#[cfg(test)]
mod tests;
