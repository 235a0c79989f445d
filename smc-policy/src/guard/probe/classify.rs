//! From what came back to what the peer is.

use std::fmt;

use serde::Serialize;

use super::{
    clc::Reply,
    conversation::{Answer, Observations},
    negotiation::Outcome,
    options::{Kind, Returned},
};

/// What a peer is to an SMC client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Returns options that it cannot know, the SMC option among them; or returns the SMC option and does not speak SMC.
    Echoes,
    /// Speaks SMC.
    Smc,
    /// Returns the SMC option and no other; whether it speaks SMC was not found out.
    Unclear,
    /// Accepts SYNs with the SMC option as plain TCP.
    Ignores,
    /// Accepts ordinary SYNs, but not those with options that are unknown.
    Drops,
    /// Accepts SYNs with the SMC option, but then without the ordinary options that it uses otherwise.
    Strips,
    /// Nobody listens there.
    Closed,
    /// Ordinary SYNs are not answered.
    NoAnswer,
    /// SYNs could not be sent.
    NotSent,
}

impl Class {
    /// In a few words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Echoes => "echoes options",
            Self::Smc => "genuine SMC",
            Self::Unclear => "answers with the SMC option",
            Self::Ignores => "plain TCP",
            Self::Drops => "drops SYNs with unknown options",
            Self::Strips => "strips options",
            Self::Closed => "closed",
            Self::NoAnswer => "no answer",
            Self::NotSent => "not sent",
        }
    }

    /// What it means for SMC.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Echoes => "looks like an SMC peer and is none: SMC connections to it fail",
            Self::Smc => "SMC can be negotiated",
            Self::Unclear => "whether it speaks SMC is known only by negotiating",
            Self::Ignores => "takes no part in SMC; connections are plain TCP",
            Self::Drops => {
                "an SMC connection to it costs a second while a policy is in force (retransmit), and fails without one"
            }
            Self::Strips => "SMC connections to it are plain TCP and lose ordinary options too",
            Self::Closed => "nobody listens on this port",
            Self::NoAnswer => "nothing can be said about SMC",
            Self::NotSent => "nothing can be said about SMC",
        }
    }

    /// Whether SMC had better not be offered to it.
    pub const fn is_to_be_denied(self) -> bool {
        matches!(self, Self::Echoes | Self::Drops | Self::Strips)
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

/// What a peer is, and what else is to be said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is.
    pub class: Class,
    /// Evidence and consequences, a sentence each.
    pub notes: Vec<String>,
}

/// Judges what was seen.
pub fn classify(seen: &Observations) -> Finding {
    let plain = match seen.answer(Kind::Plain) {
        Some(Answer::SynAck { returned, .. }) => returned,
        Some(Answer::Reset { .. }) => return Finding { class: Class::Closed, notes: vec![] },
        Some(Answer::Unreachable { why }) => {
            return Finding { class: Class::NoAnswer, notes: vec![format!("ICMP says: {why}")] };
        }
        Some(Answer::NotSent { error }) => {
            return Finding { class: Class::NotSent, notes: vec![error.clone()] };
        }
        Some(Answer::Silence) | None => return Finding { class: Class::NoAnswer, notes: vec![] },
    };
    let mut notes = Vec::new();
    let accepted = || seen.answers.iter().filter_map(returned);
    let is_echo = accepted().any(Returned::is_echo);
    let lost: Vec<Kind> = Kind::ALL
        .into_iter()
        .filter(|kind| seen.answer(*kind).is_some_and(|answer| !matches!(answer, Answer::SynAck { .. })))
        .collect();
    let class = if accepted().any(|returned| returned.smc) {
        match (is_echo, speaks_smc(&seen.negotiations)) {
            (true, speaks) => {
                if speaks == Some(true) {
                    notes.push(BEHIND.to_owned());
                }
                Class::Echoes
            }
            (false, Some(true)) => Class::Smc,
            (false, Some(false)) => {
                notes.push("returns the SMC option only, and does not speak SMC".to_owned());
                Class::Echoes
            }
            (false, None) => Class::Unclear,
        }
    } else if lost.iter().any(|kind| matches!(kind, Kind::Smc | Kind::Canary)) {
        Class::Drops
    } else if strips(plain, seen) {
        Class::Strips
    } else {
        Class::Ignores
    };
    if is_echo && class != Class::Echoes {
        notes.push("returns unknown options, but not the SMC option: without consequence for SMC".to_owned());
    }
    notes.extend(consequence(class, &seen.negotiations));
    notes.extend(unanswered(seen, &lost));
    if plain.smc {
        notes.push("returns the SMC option even to a SYN without it".to_owned());
    }
    Finding { class, notes }
}

/// The hazard of blanking: the first connection is reset, because one end negotiates and the other does not.
const BEHIND: &str =
    "a genuine SMC server is behind something that echoes: with the option kept out both ends use plain TCP";

fn returned(answer: &Option<Answer>) -> Option<&Returned> {
    match answer {
        Some(Answer::SynAck { returned, .. }) => Some(returned),
        _ => None,
    }
}

/// Whether the negotiations prove that the peer speaks SMC, or that it does not.
fn speaks_smc(negotiations: &[Outcome]) -> Option<bool> {
    // A restarted server resets once.
    let mut ends = 0;
    for outcome in negotiations {
        match outcome {
            Outcome::Replied { reply: Reply::Accept | Reply::Decline { .. } } => return Some(true),
            Outcome::Replied { reply: Reply::Foreign { .. } } | Outcome::Silent => return Some(false),
            Outcome::Reset | Outcome::Closed => ends += 1,
            Outcome::NoHandshake => {}
        }
    }
    (ends >= 2).then_some(false)
}

/// The ordinary options that the peer uses are gone as soon as there is an unknown one.
fn strips(plain: &Returned, seen: &Observations) -> bool {
    let mut with_unknown =
        Kind::ALL.into_iter().skip(1).filter_map(|kind| returned(&seen.answers[kind.index()])).peekable();
    with_unknown.peek().is_some()
        && with_unknown.all(|returned| plain.ordinary.difference(&returned.ordinary).next().is_some())
}

/// What an SMC client runs into.
fn consequence(class: Class, negotiations: &[Outcome]) -> Option<String> {
    if class != Class::Echoes {
        return None;
    }
    let what = match negotiations.last()? {
        Outcome::Replied { reply: Reply::Foreign { bytes } } => {
            let text: String = bytes.iter().take(16).map(|byte| printable(*byte)).collect();
            return Some(format!(
                "an SMC client's connect() fails at once (EPROTO): the answer to its CLC proposal begins \"{text}\""
            ));
        }
        Outcome::Silent => "hangs for 6 s and fails (ETIMEDOUT): its CLC proposal is not answered",
        Outcome::Reset => "fails at once (ECONNRESET): its CLC proposal is answered by a reset",
        Outcome::Closed => "fails at once (ECONNRESET): the connection is closed on its CLC proposal",
        Outcome::Replied { .. } | Outcome::NoHandshake => return None,
    };
    Some(format!("an SMC client's connect() {what}"))
}

fn printable(byte: u8) -> char {
    let character = char::from(byte);
    if character.is_ascii_graphic() || character == ' ' { character } else { '.' }
}

/// Which SYNs got no SYN-ACK although the ordinary one did.
fn unanswered(seen: &Observations, lost: &[Kind]) -> Vec<String> {
    let line = |kind: &Kind| {
        let how = match seen.answer(*kind)? {
            Answer::Silence => "is not answered".to_owned(),
            Answer::Reset { .. } => "is answered by a reset".to_owned(),
            Answer::Unreachable { why } => format!("is not delivered ({why})"),
            Answer::NotSent { error } => format!("could not be sent ({error})"),
            Answer::SynAck { .. } => return None,
        };
        Some(format!("a SYN with {kind} {how}"))
    };
    lost.iter().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const AFTER: Duration = Duration::from_millis(1);

    fn syn_ack(names: &[&str]) -> Answer {
        let has = |name| names.contains(&name);
        let returned = Returned {
            smc: has("smc"),
            unknown_253: has("253"),
            unknown_254: has("254"),
            canary: has("canary"),
            ordinary: if has("bare") { [2].into() } else { [2, 3, 4, 8].into() },
            bytes: vec![],
        };
        Answer::SynAck { returned, after: AFTER }
    }

    fn seen(answers: [Answer; 5], negotiations: &[Outcome]) -> Observations {
        Observations { ping: Some(AFTER), answers: answers.map(Some), negotiations: negotiations.to_vec() }
    }

    fn replied(reply: Reply) -> Outcome {
        Outcome::Replied { reply }
    }

    /// Answers to: ordinary SYN, SMC option, kind 253, kind 254, canary.
    #[test]
    fn classes() {
        let a = syn_ack;
        let none = || Answer::Silence;
        let reset = || Answer::Reset { after: AFTER };
        let only_smc = || [a(&[]), a(&["smc"]), a(&[]), a(&[]), a(&["smc"])];
        let block = || [a(&[]), a(&["smc"]), a(&["253"]), a(&["254"]), a(&["smc", "canary"])];
        let decline = || replied(Reply::Decline { diagnosis: Some(0x0307_0000) });
        let http = || replied(Reply::Foreign { bytes: b"HTTP/1.1 400".to_vec() });
        let table = [
            ("ignores", [a(&[]), a(&[]), a(&[]), a(&[]), a(&[])], vec![], Class::Ignores),
            ("genuine, declines", only_smc(), vec![decline()], Class::Smc),
            ("genuine, accepts", only_smc(), vec![replied(Reply::Accept)], Class::Smc),
            ("genuine, was restarted", only_smc(), vec![Outcome::Reset, decline()], Class::Smc),
            ("not negotiated", only_smc(), vec![], Class::Unclear),
            ("reset once", only_smc(), vec![Outcome::Reset, Outcome::NoHandshake], Class::Unclear),
            ("no second handshake", only_smc(), vec![Outcome::NoHandshake], Class::Unclear),
            ("only the SMC option, HTTP", only_smc(), vec![http()], Class::Echoes),
            ("only the SMC option, silent", only_smc(), vec![Outcome::Silent], Class::Echoes),
            ("only the SMC option, resets", only_smc(), vec![Outcome::Reset; 2], Class::Echoes),
            ("only the SMC option, closes", only_smc(), vec![Outcome::Closed, Outcome::Reset], Class::Echoes),
            ("whole option block", block(), vec![Outcome::Silent], Class::Echoes),
            ("whole option block, not negotiated", block(), vec![], Class::Echoes),
            ("in front of a genuine one", block(), vec![decline()], Class::Echoes),
            (
                "only kind 254",
                [a(&[]), a(&["smc"]), a(&[]), a(&["254"]), a(&["smc", "canary"])],
                vec![http()],
                Class::Echoes,
            ),
            ("only kind 253", [a(&[]), a(&[]), a(&["253"]), a(&[]), a(&[])], vec![], Class::Ignores),
            ("only known options", [a(&["bare"]), a(&[]), a(&[]), a(&[]), a(&[])], vec![], Class::Ignores),
            ("drops kind 254", [a(&[]), none(), a(&[]), none(), none()], vec![], Class::Drops),
            ("drops what is unknown", [a(&[]), none(), none(), none(), none()], vec![], Class::Drops),
            ("resets them", [a(&[]), reset(), a(&[]), reset(), reset()], vec![], Class::Drops),
            (
                "drops what no SMC client sends",
                [a(&[]), a(&[]), none(), a(&[]), a(&[])],
                vec![],
                Class::Ignores,
            ),
            ("drops the canary", [a(&[]), a(&[]), a(&[]), a(&[]), none()], vec![], Class::Drops),
            (
                "genuine, unknown ones dropped",
                [a(&[]), a(&["smc"]), none(), none(), none()],
                vec![decline()],
                Class::Smc,
            ),
            (
                "strips",
                [a(&[]), a(&["bare"]), a(&["bare"]), a(&["bare"]), a(&["bare"])],
                vec![],
                Class::Strips,
            ),
            ("closed", [reset(), none(), none(), none(), none()], vec![], Class::Closed),
            ("no answer", [none(), none(), none(), none(), none()], vec![], Class::NoAnswer),
        ];
        for (name, answers, negotiations, class) in table {
            let finding = classify(&seen(answers, &negotiations));
            assert_eq!(finding.class, class, "{name}: {:?}", finding.notes);
        }
        let unreachable = Answer::Unreachable { why: "prohibited by a firewall" };
        let answers = [Some(unreachable), None, None, None, None];
        let finding = classify(&Observations { answers, ..Observations::default() });
        assert_eq!((finding.class, finding.notes.len()), (Class::NoAnswer, 1));
        assert_eq!(classify(&Observations::default()).class, Class::NoAnswer);
    }

    #[test]
    fn notes() {
        let a = syn_ack;
        let block = || [a(&[]), a(&["smc"]), a(&["253"]), a(&["254"]), a(&["smc", "canary"])];
        let notes = |answers, outcome: Outcome| classify(&seen(answers, &[outcome])).notes.join("\n");
        insta::assert_snapshot!(
            notes(block(), replied(Reply::Foreign { bytes: b"HTTP/1.1 400\r\n".to_vec() })),
            @r#"an SMC client's connect() fails at once (EPROTO): the answer to its CLC proposal begins "HTTP/1.1 400..""#
        );
        insta::assert_snapshot!(
            notes(block(), Outcome::Silent),
            @"an SMC client's connect() hangs for 6 s and fails (ETIMEDOUT): its CLC proposal is not answered"
        );
        insta::assert_snapshot!(
            notes(block(), replied(Reply::Accept)),
            @"a genuine SMC server is behind something that echoes: with the option kept out both ends use plain TCP"
        );
        let firewall = [a(&[]), Answer::Silence, a(&[]), Answer::Reset { after: AFTER }, a(&["253"])];
        insta::assert_snapshot!(classify(&seen(firewall, &[])).notes.join("\n"), @"
        returns unknown options, but not the SMC option: without consequence for SMC
        a SYN with the SMC option is not answered
        a SYN with an unknown option (kind 254) is answered by a reset
        ");
        insta::assert_snapshot!(
            notes([a(&["smc"]), a(&["smc"]), a(&[]), a(&[]), a(&["smc"])], Outcome::Reset),
            @"returns the SMC option even to a SYN without it"
        );
    }

    proptest! {
        /// Whoever returns what nobody can know together with the SMC option is never taken for genuine.
        #[test]
        fn an_echo_is_never_genuine(
            flags in prop::collection::vec(any::<[bool; 4]>(), 5),
            declines in any::<bool>(),
        ) {
            let answers = std::array::from_fn(|i| {
                let [smc, unknown_253, unknown_254, canary] = flags[i];
                let returned = Returned { smc, unknown_253, unknown_254, canary, ..Returned::default() };
                Answer::SynAck { returned, after: AFTER }
            });
            let negotiations = if declines { vec![replied(Reply::Accept)] } else { vec![] };
            let finding = classify(&seen(answers, &negotiations));
            let smc = flags.iter().any(|flags| flags[0]);
            let echo = flags.iter().any(|flags| flags[1] || flags[2] || flags[3]);
            let expected = match (smc, echo) {
                (true, true) => Class::Echoes,
                (true, false) if declines => Class::Smc,
                (true, false) => Class::Unclear,
                _ => Class::Ignores,
            };
            prop_assert_eq!(finding.class, expected);
        }
    }
}
