//! What `probe` prints for people.

use super::milliseconds;
use crate::{
    cli::{
        output::{Output, Style, columns},
        quarantine::Recorded,
        words::{count, duration},
    },
    guard::probe::{
        Answer, Class, Remedy, Report, Target, clc::Reply, negotiation::Outcome, options::Kind,
        remedy::remedy,
    },
};

/// A row for each target; then what is to be said and done about those that need it, or all (`details`).
pub(super) fn text(
    reports: &[Report],
    skipped: &[String],
    recorded: Option<&Recorded>,
    details: bool,
    out: &Output,
) -> String {
    let rows: Vec<Vec<String>> = reports.iter().map(|report| row(report, out)).collect();
    let mut text = columns(&rows, &[]);
    for report in reports {
        let block = block(report, details);
        if !block.is_empty() {
            text.push_str(&format!("\n{}\n{block}", out.paint(Style::Bold, &shown(&report.target))));
        }
    }
    if !skipped.is_empty() {
        text.push_str("\nAllowed by the policy and not probed:\n");
        skipped.iter().for_each(|what| text.push_str(&format!("  {what}\n")));
    }
    if let Some(recorded) = recorded {
        text.push_str(&format!("\nQuarantine:\n{}", done(reports, recorded)));
    }
    if reports.len() > 1 {
        let echoes = reports.iter().filter(|report| report.finding.class == Class::Echoes).count();
        let verb = if echoes == 1 { "echoes" } else { "echo" };
        text.push_str(&format!("\n{} probed, {echoes} {verb}.\n", count(reports.len(), "target")));
    }
    text
}

/// What was done about each.
fn done(reports: &[Report], recorded: &Recorded) -> String {
    let rows: Vec<Vec<String>> = (reports.iter().zip(&recorded.entries))
        .map(|(report, entry)| {
            let what = match entry {
                Some(entry) => {
                    let left = duration(entry.until.saturating_sub(recorded.now));
                    format!("recorded: no SMC with it for {left}")
                }
                None => format!("nothing to record: {}", report.finding.class.words()),
            };
            vec![format!("  {}", shown(&report.target)), what]
        })
        .collect();
    let mut text = columns(&rows, &[]);
    if recorded.source == "file" && recorded.entries.iter().any(Option::is_some) {
        text.push_str(
            "  No policy is in force: this is saved, and holds from the next `smc-policy apply` on.\n",
        );
    }
    text
}

fn row(report: &Report, out: &Output) -> Vec<String> {
    let Report { target, seen, finding } = report;
    let style = match finding.class {
        Class::Echoes => Style::Bad,
        Class::Drops | Class::Strips | Class::Unclear => Style::Note,
        Class::Smc | Class::Ignores => Style::Good,
        Class::Closed | Class::NoAnswer | Class::NotSent => Style::Dim,
    };
    let ping = seen.ping.map_or("no ping".to_owned(), |time| format!("ping {:.1} ms", milliseconds(time)));
    vec![shown(target), ping, out.paint(style, finding.class.words())]
}

fn shown(target: &Target) -> String {
    match &target.name {
        Some(name) => format!("{name} {}", target.address),
        None => target.address.to_string(),
    }
}

/// What stands below the table about one target.
fn block(report: &Report, details: bool) -> String {
    let Report { target, seen, finding } = report;
    let class = finding.class;
    let mut text = String::new();
    let remedy = remedy(target.address, finding);
    if !details && remedy.is_none() && finding.notes.is_empty() && class != Class::Unclear {
        return text;
    }
    let mut line = |words: &str| text.push_str(&format!("  {words}\n"));
    line(&format!("{}: {}", class.words(), class.meaning()));
    finding.notes.iter().for_each(|note| line(note));
    if details {
        let asked = Kind::ALL.into_iter().filter_map(|kind| Some((kind, seen.answer(kind)?)));
        asked.for_each(|(kind, answer)| line(&format!("SYN with {kind}: {}", answered(answer))));
        seen.negotiations.iter().for_each(|outcome| line(&format!("CLC proposal: {}", ended(outcome))));
    }
    if let Some(Remedy::Rule { toml }) = remedy {
        line("to keep SMC away from it, put this rule before those that allow it, and `smc-policy apply`:");
        toml.lines().for_each(|rule| line(&format!("  {rule}")));
    }
    if class == Class::Echoes {
        line(&format!(
            "or for an hour, and longer if it repeats: `smc-policy quarantine add {} --cause probe`",
            target.address
        ));
    }
    text
}

fn answered(answer: &Answer) -> String {
    match answer {
        Answer::SynAck { returned, after } => {
            let names = returned.names();
            let with = if names.is_empty() { String::new() } else { format!(" with {}", names.join(", ")) };
            format!("SYN-ACK{with}, {:.1} ms", milliseconds(*after))
        }
        Answer::Reset { after } => format!("reset, {:.1} ms", milliseconds(*after)),
        Answer::Unreachable { why } => (*why).to_owned(),
        Answer::Silence => "no answer".to_owned(),
        Answer::NotSent { error } => error.clone(),
    }
}

fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Replied { reply: Reply::Accept } => "CLC accept".to_owned(),
        Outcome::Replied { reply: Reply::Decline { diagnosis: Some(code) } } => {
            format!("CLC decline {code:#010x}")
        }
        Outcome::Replied { reply: Reply::Decline { diagnosis: None } } => "CLC decline".to_owned(),
        Outcome::Replied { reply: Reply::Foreign { bytes } } => {
            format!("{} that are no CLC message", count(bytes.len(), "byte"))
        }
        Outcome::Silent => "no answer".to_owned(),
        Outcome::Reset => "reset".to_owned(),
        Outcome::Closed => "closed".to_owned(),
        Outcome::NoHandshake => "no handshake with the SMC option".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        cli::probe::document::Document,
        guard::{
            probe::{Observations, classify, options::Returned},
            recheck::recorded,
        },
    };

    /// Answers to the five SYNs by what they return; `None`: silence.
    fn report(address: &str, returned: [Option<&str>; 5], negotiations: Vec<Outcome>) -> Report {
        let after = Duration::from_micros(1_234);
        let answer = |names: Option<&str>| match names {
            None => Answer::Silence,
            Some(names) => {
                let has = |name| names.split(' ').any(|one| one == name);
                let returned = Returned {
                    smc: has("smc"),
                    unknown_253: has("253"),
                    unknown_254: has("254"),
                    canary: has("canary"),
                    ordinary: [2].into(),
                    bytes: vec![],
                };
                Answer::SynAck { returned, after }
            }
        };
        let seen =
            Observations { ping: Some(after), answers: returned.map(|r| Some(answer(r))), negotiations };
        let target = Target { address: address.parse().unwrap(), name: None };
        Report { finding: classify(&seen), target, seen }
    }

    fn reports() -> [Report; 3] {
        let reply = Reply::Decline { diagnosis: Some(0x0307_0000) };
        let block = [Some(""), Some("smc"), Some("253"), Some("254"), Some("smc canary")];
        let mut dark = report("192.0.2.1:22", [None; 5], vec![]);
        dark.seen.ping = None;
        dark.target.name = Some("dark.example".into());
        [
            report("203.0.113.7:443", block, vec![Outcome::Silent]),
            report(
                "[2001:db8::7]:443",
                [Some(""), Some("smc"), Some(""), Some(""), None],
                vec![Outcome::Replied { reply }],
            ),
            dark,
        ]
    }

    #[test]
    fn what_people_read() {
        let out = Output::new(false);
        let skipped = ["rule lab: every peer".to_owned()];
        insta::assert_snapshot!(text(&reports(), &skipped, None, false, &out), @r#"
        203.0.113.7:443            ping 1.2 ms  echoes options
        [2001:db8::7]:443          ping 1.2 ms  genuine SMC
        dark.example 192.0.2.1:22  no ping      no answer

        203.0.113.7:443
          echoes options: looks like an SMC peer and is none: SMC connections to it fail
          an SMC client's connect() hangs for 6 s and fails (ETIMEDOUT): its CLC proposal is not answered
          to keep SMC away from it, put this rule before those that allow it, and `smc-policy apply`:
            [[rule]]
            name = "probe-203-0-113-7-443"
            action = "deny"
            direction = "outbound"
            peers = ["203.0.113.7"]
            ports = [443]
            comment = "echoes options: found by smc-policy probe"
          or for an hour, and longer if it repeats: `smc-policy quarantine add 203.0.113.7:443 --cause probe`

        [2001:db8::7]:443
          genuine SMC: SMC can be negotiated
          a SYN with the SMC option and the canary is not answered

        Allowed by the policy and not probed:
          rule lab: every peer

        3 targets probed, 1 echoes.
        "#);
        insta::assert_snapshot!(text(&reports()[1..2], &[], None, true, &out), @"
        [2001:db8::7]:443  ping 1.2 ms  genuine SMC

        [2001:db8::7]:443
          genuine SMC: SMC can be negotiated
          a SYN with the SMC option and the canary is not answered
          SYN with ordinary options: SYN-ACK, 1.2 ms
          SYN with the SMC option: SYN-ACK with smc, 1.2 ms
          SYN with an unknown option (kind 253): SYN-ACK, 1.2 ms
          SYN with an unknown option (kind 254): SYN-ACK, 1.2 ms
          SYN with the SMC option and the canary: no answer
          CLC proposal: CLC decline 0x03070000
        ");
    }

    #[test]
    fn what_was_recorded() {
        let reports = reports();
        let entries = reports.iter().map(|report| recorded(report, None, 1000)).collect();
        let recorded = Recorded { source: "file", now: 1000, entries };
        insta::assert_snapshot!(done(&reports, &recorded), @r"
        203.0.113.7:443            recorded: no SMC with it for 1 h
        [2001:db8::7]:443          nothing to record: genuine SMC
        dark.example 192.0.2.1:22  nothing to record: no answer
        No policy is in force: this is saved, and holds from the next `smc-policy apply` on.
        ");
        let document = serde_json::to_value(Document::new(&reports, &[], Some(&recorded))).unwrap();
        let of = |at: usize| document["targets"][at]["quarantine"].to_string();
        insta::assert_snapshot!([of(0), of(1)].join("\n"), @r#"
        {"entry":{"cause":"probe","count":1,"direction":"outbound","first_seen":1000,"last_seen":1000,"peer":"203.0.113.7","port":443,"span":3600,"store":"commanded","until":4600},"expires_in":3600,"recorded":true,"source":"file"}
        {"entry":null,"expires_in":null,"recorded":false,"source":"file"}
        "#);
    }

    #[test]
    fn what_programs_read() {
        let reports = reports();
        let document = serde_json::to_string_pretty(&Document::new(&reports[..1], &[], None)).unwrap();
        insta::assert_snapshot!(document, @r#"
        {
          "echoes": 1,
          "targets": [
            {
              "address": "203.0.113.7",
              "port": 443,
              "name": null,
              "class": "echoes",
              "meaning": "looks like an SMC peer and is none: SMC connections to it fail",
              "notes": [
                "an SMC client's connect() hangs for 6 s and fails (ETIMEDOUT): its CLC proposal is not answered"
              ],
              "ping_milliseconds": 1.234,
              "syns": [
                {
                  "options": "plain",
                  "answer": "syn-ack",
                  "returned": [],
                  "milliseconds": 1.234,
                  "why": null
                },
                {
                  "options": "smc",
                  "answer": "syn-ack",
                  "returned": [
                    "smc"
                  ],
                  "milliseconds": 1.234,
                  "why": null
                },
                {
                  "options": "kind-253",
                  "answer": "syn-ack",
                  "returned": [
                    "kind-253"
                  ],
                  "milliseconds": 1.234,
                  "why": null
                },
                {
                  "options": "kind-254",
                  "answer": "syn-ack",
                  "returned": [
                    "kind-254"
                  ],
                  "milliseconds": 1.234,
                  "why": null
                },
                {
                  "options": "canary",
                  "answer": "syn-ack",
                  "returned": [
                    "smc",
                    "canary"
                  ],
                  "milliseconds": 1.234,
                  "why": null
                }
              ],
              "negotiations": [
                {
                  "outcome": "silent"
                }
              ],
              "remedy": {
                "kind": "rule",
                "toml": "[[rule]]\nname = \"probe-203-0-113-7-443\"\naction = \"deny\"\ndirection = \"outbound\"\npeers = [\"203.0.113.7\"]\nports = [443]\ncomment = \"echoes options: found by smc-policy probe\"\n"
              },
              "quarantine": null
            }
          ],
          "skipped": []
        }
        "#);
        let other = serde_json::to_value(Document::new(&reports[1..], &[], None)).unwrap();
        let targets = &other["targets"];
        assert_eq!(targets[0]["negotiations"][0]["reply"]["diagnosis"], "0x03070000");
        assert_eq!(targets[0]["syns"][4]["answer"], "none");
        assert_eq!(
            (&targets[1]["name"], &targets[1]["class"]),
            (&"dark.example".into(), &"no-answer".into())
        );
        assert!(targets[1]["ping_milliseconds"].is_null() && targets[1]["remedy"].is_null());
    }
}
