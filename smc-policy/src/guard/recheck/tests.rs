use std::time::Duration;

use super::*;
use crate::guard::probe::{Finding, Target};

const NOW: u64 = 10_000;

fn report(address: &str, class: Class) -> Report {
    let target = Target { address: address.parse().unwrap(), name: None };
    Report { target, seen: Observations::default(), finding: Finding { class, notes: vec![] } }
}

fn learned(port: u16, cause: Cause) -> Record {
    let record = Record::commanded("192.0.2.1".parse().unwrap(), port, cause, None, None, NOW - 100);
    Record { store: Store::Learned, ..record }
}

fn commanded(port: u16, cause: Cause) -> Record {
    Record { store: Store::Commanded, ..learned(port, cause) }
}

fn after(record: &Record, classes: &[Class]) -> String {
    let reports: Vec<Report> = classes
        .iter()
        .zip(443..)
        .map(|(class, port): (_, u16)| report(&format!("192.0.2.1:{port}"), *class))
        .collect();
    match follows(record, &reports.iter().collect::<Vec<_>>()) {
        Follows::Lift => "lift".into(),
        Follows::Confirm => "confirm".into(),
        Follows::Keep(why) => why,
    }
}

#[test]
fn what_follows_from_each_finding() {
    let all = [
        Class::Echoes,
        Class::Smc,
        Class::Unclear,
        Class::Ignores,
        Class::Drops,
        Class::Strips,
        Class::Closed,
        Class::NoAnswer,
        Class::NotSent,
    ];
    let lines = |record: &Record| all.map(|class| format!("{class}: {}", after(record, &[class]))).join("\n");
    insta::assert_snapshot!(lines(&learned(443, Cause::Echo)), @r"
    echoes options: confirm
    genuine SMC: lift
    answers with the SMC option: answers with the SMC option, but did not say whether it speaks SMC; try again
    plain TCP: lift
    drops SYNs with unknown options: drops SYNs with the SMC option: those without get through at once
    strips options: gives up ordinary options when a SYN has the SMC option
    closed: nobody listens there now
    no answer: does not answer
    not sent: cannot be reached from here
    ");
    // The cause makes no difference for what programs learned or a probe found.
    for cause in [Cause::ShortEcho, Cause::NoClc, Cause::Silence, Cause::Reset] {
        assert_eq!(lines(&learned(443, cause)), lines(&learned(443, Cause::Echo)));
    }
    assert_eq!(lines(&commanded(443, Cause::Probe)), lines(&learned(443, Cause::Echo)));
    insta::assert_snapshot!(after(&commanded(443, Cause::Operator), &[Class::Echoes]), @"still echoes options; an operator's entry ends when its operator said");
    assert_eq!(after(&commanded(443, Cause::Operator), &[Class::Ignores]), "lift");
}

#[test]
fn an_address_is_clean_when_all_of_its_services_are() {
    let whole = learned(0, Cause::Echo);
    assert_eq!(after(&whole, &[Class::Ignores, Class::Smc]), "lift");
    assert_eq!(after(&whole, &[Class::Ignores, Class::NoAnswer]), "port 444: does not answer");
    assert_eq!(after(&whole, &[Class::Closed, Class::Echoes]), "confirm");
    assert_eq!(after(&whole, &[]), "was not probed");
}

#[test]
fn what_happens_during_the_probe_counts() {
    let before = learned(443, Cause::Silence);
    let again = Record { count: 2, ..before.clone() };
    let kept = |why: &str| Follows::Keep(why.into());
    assert_eq!(reconsidered(Follows::Lift, &before, Some(&before)), Follows::Lift);
    assert_eq!(reconsidered(Follows::Lift, &before, Some(&again)), kept("was met again meanwhile"));
    assert_eq!(reconsidered(Follows::Confirm, &before, Some(&again)), Follows::Confirm);
    for follows in [Follows::Lift, Follows::Confirm] {
        assert_eq!(reconsidered(follows, &before, None), kept("was taken out meanwhile"));
    }
    assert_eq!(reconsidered(kept("does not answer"), &before, None), kept("does not answer"));
}

#[test]
fn which_entries_are_meant() {
    let ip = "192.0.2.1".parse().unwrap();
    let other = Record { peer: "192.0.2.2".parse().unwrap(), ..learned(443, Cause::Echo) };
    let records = [learned(443, Cause::Echo), learned(80, Cause::Echo), learned(0, Cause::Echo), other];
    let meant = |named: &[(IpAddr, Option<u16>)]| {
        let wanted = Wanted { named: named.to_vec(), operators: false };
        records.each_ref().map(|record| wanted.means(record))
    };
    assert_eq!(meant(&[]), [true; 4]);
    assert_eq!(meant(&[(ip, None)]), [true, true, true, false]);
    assert_eq!(meant(&[(ip, Some(443))]), [true, false, true, false]);
}

#[test]
fn which_services_are_probed() {
    let all = [learned(443, Cause::Echo), learned(80, Cause::Echo), learned(0, Cause::Echo)];
    let everybody = Wanted::default();
    let services = |wanted: &Wanted, record: &Record, all: &[Record]| {
        let services = wanted.services(record, all)?;
        Ok::<_, String>(services.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
    };
    assert_eq!(services(&everybody, &all[0], &all).unwrap(), "192.0.2.1:443");
    assert_eq!(services(&everybody, &all[2], &all).unwrap(), "192.0.2.1:80 192.0.2.1:443");
    insta::assert_snapshot!(services(&everybody, &all[2], &all[2..]).unwrap_err(), @"about all services, and none is known: name one (`smc-policy quarantine recheck 192.0.2.1:443`)");
    let named = Wanted { named: vec![(all[0].peer, Some(8443))], operators: false };
    assert_eq!(services(&named, &all[2], &all[2..]).unwrap(), "192.0.2.1:8443");
    assert_eq!(services(&named, &all[2], &all).unwrap(), "192.0.2.1:80 192.0.2.1:443 192.0.2.1:8443");
    let operators = commanded(443, Cause::Operator);
    insta::assert_snapshot!(services(&everybody, &operators, &[]).unwrap_err(), @"an operator's: name it, or say --all");
    let with_operators = Wanted { operators: true, ..Wanted::default() };
    assert_eq!(services(&with_operators, &operators, &[]).unwrap(), "192.0.2.1:443");
    let by_name = Wanted { named: vec![(operators.peer, None)], operators: false };
    assert_eq!(services(&by_name, &operators, &[]).unwrap(), "192.0.2.1:443");
    assert_eq!(services(&everybody, &commanded(443, Cause::Probe), &[]).unwrap(), "192.0.2.1:443");
    insta::assert_snapshot!(services(&with_operators, &learned(0, Cause::RdmaPath), &all).unwrap_err(), @"is about RDMA, which a probe does not test: `smc-policy quarantine remove` lifts it");
}

fn echoing() -> Report {
    let mut report = report("192.0.2.1:443", Class::Echoes);
    let returned = Returned {
        smc: true,
        canary: true,
        bytes: [&[254, 8, b'S', b'P', 1, 2, 3, 4, 254, 6][..], &[0xe2, 0xd4, 0xc3, 0xd9]].concat(),
        ..Returned::default()
    };
    report.seen.answers[Kind::Canary.index()] =
        Some(Answer::SynAck { returned, after: Duration::from_millis(1) });
    report
}

#[test]
fn a_suspicion_that_is_confirmed_holds_for_an_hour() {
    let suspicion = Record { span: 60, until: NOW + 10, ..learned(443, Cause::Silence) };
    let report = echoing();
    let now = confirmed(&suspicion, &[&report], NOW);
    assert_eq!((now.cause, now.span, now.until), (Cause::Probe, 3600, NOW + 3600));
    assert_eq!((now.count, now.last_seen, now.store), (2, NOW, Store::Learned));
    assert_eq!(now.evidence[..4], [254, 8, b'S', b'P']);
    // What was a certainty keeps its cause, evidence and longer span.
    let certain = Record { span: 7200, until: NOW + 7000, evidence: vec![1], ..learned(443, Cause::Echo) };
    let now = confirmed(&certain, &[&report], NOW);
    assert_eq!((now.cause, now.span, now.until, now.evidence), (Cause::Echo, 7200, NOW + 7200, vec![1]));
    let late = Record { until: NOW + 9000, ..certain };
    assert_eq!(confirmed(&late, &[&report], NOW).until, NOW + 9000, "never shorter");
}

#[test]
fn what_echoes_is_recorded_by_command() {
    let report = echoing();
    let first = recorded(&report, None, NOW).unwrap();
    assert_eq!((first.store, first.cause, first.port), (Store::Commanded, Cause::Probe, 443));
    assert_eq!((first.span, first.until, first.count), (3600, NOW + 3600, 1));
    assert_eq!(first.evidence.len(), 14);
    let again = recorded(&report, Some(&first), first.until).unwrap();
    assert_eq!((again.span, again.count, again.first_seen), (7200, 2, NOW), "it ended, and echoes still");
    let operators = Record { until: NOW + 60, span: 60, ..commanded(443, Cause::Operator) };
    let kept = recorded(&report, Some(&operators), NOW).unwrap();
    assert_eq!((kept.cause, kept.until), (Cause::Operator, NOW + 3600));
    for class in [Class::Smc, Class::Ignores, Class::Unclear, Class::Drops, Class::NoAnswer] {
        assert_eq!(recorded(&self::report("192.0.2.1:443", class), None, NOW), None, "{class}");
    }
}

#[test]
fn evidence_is_what_tells_most() {
    let mut report = report("192.0.2.1:443", Class::Echoes);
    let only_smc = Returned { smc: true, bytes: vec![254, 6, 0xe2, 0xd4, 0xc3, 0xd9], ..Returned::default() };
    let after = Duration::from_millis(1);
    report.seen.answers[Kind::Smc.index()] = Some(Answer::SynAck { returned: only_smc, after });
    assert_eq!(evidence(&report.seen), [254, 6, 0xe2, 0xd4, 0xc3, 0xd9]);
    let bytes = b"HTTP/1.1 400 Bad Request".to_vec();
    report.seen.negotiations = vec![Outcome::Reset, Outcome::Replied { reply: Reply::Foreign { bytes } }];
    assert_eq!(evidence(&report.seen), b"HTTP/1.1 400 Bad");
    assert_eq!(evidence(&Observations::default()), [0; 0]);
}
