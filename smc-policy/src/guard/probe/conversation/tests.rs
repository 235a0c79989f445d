use proptest::prelude::*;

use super::*;
use crate::guard::probe::clc::Reply;

const PORTS: Ports = Ports { syns: [1, 2, 3, 4, 5], negotiations: [6, 7] };
const SETTINGS: Settings = Settings { timeout: Duration::from_secs(3), negotiate: true };

/// What a peer does with the option block of a SYN: the block of its SYN-ACK, or nothing.
type Peer = fn(&[u8]) -> Option<Vec<u8>>;

fn begin(start: Instant) -> Conversation {
    let mut number = 0x1234_5678_u32;
    let random = move || {
        number = number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        number
    };
    Conversation::new("203.0.113.7:443".parse().unwrap(), PORTS, SETTINGS, start, random)
}

fn syn_ack(syn: &Segment, options: Vec<u8>) -> Segment {
    Segment {
        source_port: syn.destination_port,
        destination_port: syn.source_port,
        sequence: 9_000,
        acknowledgement: syn.sequence.wrapping_add(1),
        flags: flags::SYN | flags::ACK,
        options,
        ..Segment::default()
    }
}

/// Lets a conversation run to its end with a peer that answers pings and SYNs, and a CLC proposal with `stream`.
fn talk(peer: Peer, stream: Option<&[u8]>) -> (Observations, Duration, Vec<Segment>) {
    let start = Instant::now();
    let mut conversation = begin(start);
    let mut now = start;
    let mut sent = Vec::new();
    while let Some(due) = conversation.due() {
        now = now.max(due);
        let mut queue = conversation.act(now);
        while let Some(packet) = queue.pop() {
            let segment = match packet {
                Packet::Icmp(request) => {
                    let id = u16::from_be_bytes([request[4], request[5]]);
                    let reply = icmp::Message::EchoReply { id };
                    conversation.hear_icmp(now, "203.0.113.7".parse().unwrap(), &reply);
                    continue;
                }
                Packet::Tcp(segment) => segment,
            };
            if segment.is(flags::SYN)
                && let Some(options) = peer(&segment.options)
            {
                queue.extend(conversation.hear_tcp(now, &syn_ack(&segment, options)));
            }
            if !segment.payload.is_empty()
                && let Some(stream) = stream
            {
                let answer = Segment {
                    sequence: segment.acknowledgement,
                    acknowledgement: segment.sequence.wrapping_add(segment.payload.len() as u32),
                    flags: flags::ACK | if stream.is_empty() { flags::RST } else { flags::PSH },
                    payload: stream.to_vec(),
                    ..syn_ack(&segment, vec![])
                };
                queue.extend(conversation.hear_tcp(now, &answer));
            }
            sent.push(segment);
        }
    }
    (conversation.into_observations(), now - start, sent)
}

fn returned(seen: &Observations) -> Vec<Vec<&'static str>> {
    let of = |answer: &Option<Answer>| match answer {
        Some(Answer::SynAck { returned, .. }) => returned.names(),
        other => panic!("{other:?}"),
    };
    seen.answers.iter().map(of).collect()
}

#[test]
fn a_plain_peer_is_asked_five_times_and_reset_five_times() {
    let (seen, time, sent) = talk(|_| Some(vec![2, 4, 5, 0xb4]), None);
    assert_eq!(returned(&seen), vec![Vec::<&str>::new(); 5]);
    assert_eq!((seen.negotiations.len(), time, seen.ping), (0, Duration::ZERO, Some(Duration::ZERO)));
    let resets: Vec<u32> = sent.iter().filter(|s| s.is(flags::RST)).map(|s| s.sequence).collect();
    let syns: Vec<u32> =
        sent.iter().filter(|s| s.is(flags::SYN)).map(|s| s.sequence.wrapping_add(1)).collect();
    assert_eq!((sent.len(), resets), (10, syns));
}

#[test]
fn an_echoing_peer_gets_a_proposal_too() {
    let (seen, _, _) = talk(|block| Some(block.to_vec()), Some(b"HTTP/1.1 400 Bad Request\r\n"));
    let expected = [vec![], vec!["smc"], vec!["kind-253"], vec!["kind-254"], vec!["smc", "canary"]];
    assert_eq!(returned(&seen), expected);
    assert!(matches!(
        &seen.negotiations[..],
        [Outcome::Replied { reply: Reply::Foreign { bytes } }] if bytes.starts_with(b"HTTP")
    ));
}

#[test]
fn who_resets_gets_a_second_chance() {
    let (seen, time, _) = talk(|block| Some(block.to_vec()), Some(&[]));
    assert_eq!(seen.negotiations, [Outcome::Reset, Outcome::Reset]);
    assert_eq!(time, SECOND_TRY_AFTER);
}

#[test]
fn a_firewall_that_drops_unknown_options() {
    let peer = |block: &[u8]| (!block.contains(&254)).then(|| vec![2, 4, 5, 0xb4]);
    let (seen, time, sent) = talk(peer, None);
    let silent: Vec<Kind> =
        Kind::ALL.into_iter().filter(|kind| seen.answer(*kind) == Some(&Answer::Silence)).collect();
    assert_eq!(silent, [Kind::Smc, Kind::Unknown254, Kind::Canary]);
    assert_eq!(time, SETTINGS.timeout);
    assert_eq!(sent.iter().filter(|s| s.is(flags::SYN)).count(), 2 + 3 * 3);
}

#[test]
fn silence_costs_one_timeout_and_three_syns() {
    let (seen, time, sent) = talk(|_| None, None);
    assert_eq!(seen.answer(Kind::Plain), Some(&Answer::Silence));
    assert_eq!((seen.answer(Kind::Smc), time, sent.len()), (None, SETTINGS.timeout, 3));
}

#[test]
fn others_packets_are_no_answers() {
    let start = Instant::now();
    let mut conversation = begin(start);
    let mut packets = Vec::new();
    for _ in 0..2 {
        packets.extend(conversation.act(start));
    }
    let [Packet::Icmp(ping), Packet::Tcp(syn)] = &packets[..] else { panic!("{packets:?}") };
    let spoofed = Segment { acknowledgement: syn.sequence, ..syn_ack(syn, vec![]) };
    assert_eq!(conversation.hear_tcp(start, &spoofed), []);
    let reset = Segment { flags: flags::RST, ..syn_ack(syn, vec![]) };
    assert_eq!(conversation.hear_tcp(start, &reset), []);
    let id = u16::from_be_bytes([ping[4], ping[5]]);
    let message = icmp::Message::EchoReply { id };
    conversation.hear_icmp(start, "203.0.113.8".parse().unwrap(), &message);
    let elsewhere = icmp::Message::Unreachable {
        destination: "203.0.113.7".parse().unwrap(),
        source_port: PORTS.syns[0],
        destination_port: 444,
        why: "",
    };
    conversation.hear_icmp(start, "203.0.113.7".parse().unwrap(), &elsewhere);
    assert_eq!(conversation.into_observations(), Observations::default());
}

#[test]
fn what_cannot_be_sent_is_over() {
    let mut conversation = begin(Instant::now());
    conversation.fail("Network is unreachable");
    assert_eq!(conversation.due(), None);
    let seen = conversation.into_observations();
    assert!(matches!(seen.answer(Kind::Plain), Some(Answer::NotSent { error }) if error.contains("unreach")));
}

proptest! {
    #[test]
    fn no_segments_panic(
        segments in prop::collection::vec(
            (0_u16..10, any::<u8>(), any::<bool>(), prop::collection::vec(any::<u8>(), 0..40)),
            0..20,
        ),
    ) {
        let mut now = Instant::now();
        let mut conversation = begin(now);
        let isns = conversation.isns;
        for (port, flags, exact, options) in segments {
            if let Some(due) = conversation.due() {
                now = now.max(due);
                conversation.act(now);
            }
            let isn = isns.get(usize::from(port).wrapping_sub(1)).copied().unwrap_or_default();
            let segment = Segment {
                destination_port: port,
                acknowledgement: isn.wrapping_add(u32::from(exact)),
                flags,
                options,
                ..Segment::default()
            };
            conversation.hear_tcp(now, &segment);
        }
        let mut steps = 0;
        while let Some(due) = conversation.due() {
            conversation.act(now.max(due));
            steps += 1;
            prop_assert!(steps < 100);
        }
    }
}
