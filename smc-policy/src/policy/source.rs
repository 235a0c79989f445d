//! One text of the language, read on its own: rules with their places, names not yet resolved.

use std::ops::Range;

use smc_policy_common::query::{Addr, Direction};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    address::AddrRange,
    config,
    diagnostic::{Code, Diagnostic},
    model::{Action, Directions, Place},
    moment::Moment,
    parse::{self, ParseError},
    reader::{At, Reader, number},
};

/// The language's version that this program reads.
const VERSION: i128 = 1;

pub(super) const FILE_KEYS: [&str; 5] = ["version", "default", "sets", "rule", "test"];
const DEFAULT_KEYS: [&str; 2] = ["outbound", "inbound"];
const RULE_KEYS: [&str; 12] = [
    "name",
    "action",
    "direction",
    "peers",
    "peers_file",
    "except",
    "local",
    "ports",
    "comment",
    "expires",
    "trust",
    "enabled",
];
const TEST_KEYS: [&str; 6] = ["peer", "port", "local", "direction", "expect", "rule"];

const ACTIONS: [(&str, Action); 2] = [("allow", Action::Allow), ("deny", Action::Deny)];
const DIRECTIONS: [(&str, Directions); 3] =
    [("outbound", Directions::Outbound), ("inbound", Directions::Inbound), ("both", Directions::Both)];
const DIRECTION: [(&str, Direction); 2] =
    [("outbound", Direction::Outbound), ("inbound", Direction::Inbound)];

/// An element of a list of addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Element {
    Range(AddrRange),
    Set(String),
}

/// A list of addresses as written.
pub(super) type List = At<Vec<At<Element>>>;

/// A list of ports as written.
pub(super) type Ports = At<Vec<At<(u16, u16)>>>;

#[derive(Debug)]
pub(super) struct RawSet {
    pub(super) name: At<String>,
    pub(super) list: List,
}

#[derive(Debug)]
pub(super) struct RawRule {
    pub(super) header: Place,
    /// Missing: reported.
    pub(super) name: Option<At<String>>,
    pub(super) action: Action,
    pub(super) direction: Directions,
    pub(super) peers: Option<List>,
    /// The file as written; empty: reported.
    pub(super) peers_file: Option<At<String>>,
    pub(super) except: Option<List>,
    pub(super) local: Option<List>,
    pub(super) ports: Option<Ports>,
    pub(super) comment: Option<String>,
    pub(super) expires: Option<At<Moment>>,
    pub(super) trust: bool,
    pub(super) enabled: bool,
}

#[derive(Debug)]
pub(super) struct RawTest {
    pub(super) header: Place,
    pub(super) peer: Addr,
    pub(super) port: Option<u16>,
    pub(super) local: Option<Addr>,
    pub(super) direction: Option<Direction>,
    pub(super) expect: At<Action>,
    pub(super) rule: Option<At<String>>,
}

/// One text, read.
#[derive(Debug, Default)]
pub(super) struct RawFile {
    /// The `[default]` header, and its values.
    pub(super) default: Option<(Place, Option<Action>, Option<Action>)>,
    pub(super) sets: Vec<RawSet>,
    pub(super) rules: Vec<RawRule>,
    pub(super) tests: Vec<RawTest>,
    /// The rules that tests name, of those that could not be read whole as well.
    pub(super) references: Vec<At<String>>,
    /// Some of the text is no TOML.
    pub(super) broken: bool,
    pub(super) found: Vec<Diagnostic>,
}

/// Reads one text.
pub(super) fn read(file: usize, text: &str) -> RawFile {
    let (mut reader, document) = Reader::parse(file, text);
    let table = document.get_ref();
    let mut raw = RawFile { broken: reader.is_broken(), ..RawFile::default() };
    if let Some(key) = config::only_keys_of(table, &config::FILE_KEYS) {
        let message = format!("a policy file has no key `{}`", key.get_ref());
        let place = reader.place(key.span());
        reader.report(
            Diagnostic::error(Code::UnknownKey, place, message)
                .help("this is a config.toml: it belongs beside policy.d, or is named with --config"),
        );
        raw.found = reader.found;
        return raw;
    }
    reader.only_or(table, &FILE_KEYS, "a policy file", |key| {
        config::FILE_KEYS.contains(&key).then(|| format!("`{key}` belongs in config.toml"))
    });
    version(&mut reader, table);
    if let Some((default, span)) = reader.table(table, "default") {
        reader.only(default, &DEFAULT_KEYS, "[default]");
        let outbound = reader.word(default, "outbound", &ACTIONS).map(|action| action.value);
        let inbound = reader.word(default, "inbound", &ACTIONS).map(|action| action.value);
        raw.default = Some((reader.place(span), outbound, inbound));
    }
    if let Some((sets, _)) = reader.table(table, "sets") {
        for (key, _) in sets.iter() {
            let name = reader.at(key.span(), key.get_ref().to_string());
            check_name(&mut reader, &name, "a set", set_name);
            let list = reader.elements(sets, key.get_ref());
            let list = list.map(|list| addresses(&mut reader, &name.value, list));
            // A set whose list cannot be read still exists: its users are not wrong.
            let list = list.unwrap_or_else(|| At { value: Vec::new(), place: name.place });
            raw.sets.push(RawSet { name, list });
        }
    }
    for (rule, span) in reader.tables(table, "rule") {
        raw.rules.push(read_rule(&mut reader, rule, span));
    }
    for (test, span) in reader.tables(table, "test") {
        let rule = reader.string(test, "rule");
        raw.references.extend(rule.clone());
        raw.tests.extend(read_test(&mut reader, test, span, rule));
    }
    raw.found = reader.found;
    raw
}

fn version(reader: &mut Reader, table: &DeTable<'_>) {
    let help = format!("begin the file with: version = {VERSION}");
    if table.get("version").is_none() {
        if !reader.is_broken() {
            let place = reader.place(0..0);
            reader.report(Diagnostic::error(Code::Version, place, "`version` is missing").help(help));
        }
    } else if let Some(version) = reader.integer(table, "version").filter(|version| version.value != VERSION)
    {
        let message = format!("version {} is not one this program reads", version.value);
        reader.report(Diagnostic::error(Code::Version, version.place, message).help(help));
    }
}

/// Lower-case letters, digits and hyphens.
fn rule_name(byte: u8) -> bool {
    byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'
}

/// What TOML takes as a key without quotes.
fn set_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_'
}

fn check_name(reader: &mut Reader, name: &At<String>, of: &str, allowed: fn(u8) -> bool) {
    if !name.value.is_empty() && name.value.bytes().all(allowed) {
        return;
    }
    let message = format!("the name of {of} cannot be \"{}\"", name.value.escape_debug());
    let finding = Diagnostic::error(Code::Name, name.place, message);
    let characters = if allowed(b'_') { "A-Z a-z 0-9 - _" } else { "a-z 0-9 -" };
    let lower = name.value.to_lowercase();
    let words = lower.split(|c: char| !(c.is_ascii() && allowed(c as u8))).filter(|word| !word.is_empty());
    let suggestion = words.collect::<Vec<_>>().join("-");
    reader.report(if suggestion.is_empty() {
        finding.help(format!("names are of {characters}"))
    } else {
        finding.help(format!("names are of {characters}: \"{suggestion}\""))
    });
}

fn parse_error(reader: &mut Reader, code: Code, place: Place, error: ParseError) {
    let finding = Diagnostic::error(code, place, error.message);
    reader.report(if error.help.is_empty() { finding } else { finding.help(error.help) });
}

fn addresses(reader: &mut Reader, key: &str, list: At<&[Spanned<DeValue<'_>>]>) -> List {
    let mut elements = Vec::with_capacity(list.value.len());
    for item in list.value {
        let Some(text) = item.get_ref().as_str() else {
            reader.element_type(key, item, "a string");
            continue;
        };
        if let Some(name) = text.strip_prefix('@') {
            elements.push(reader.at(item.span(), Element::Set(name.to_owned())));
            continue;
        }
        match parse::addresses(text) {
            Ok(range) => elements.push(reader.at(item.span(), Element::Range(range))),
            Err(error) => parse_error(reader, Code::Address, reader.place(item.span()), error),
        }
    }
    At { value: elements, place: list.place }
}

/// A rule's list; an empty one is refused, because it is easily taken for "every".
fn rule_list(reader: &mut Reader, rule: &DeTable<'_>, key: &str, every: &str) -> Option<List> {
    let list = reader.elements(rule, key)?;
    refuse_empty(reader, key, list.value.is_empty(), list.place, every);
    Some(addresses(reader, key, list))
}

fn refuse_empty(reader: &mut Reader, key: &str, empty: bool, place: Place, every: &str) {
    if empty {
        let finding = Diagnostic::error(Code::BadValue, place, format!("`{key}` is an empty list"));
        reader.report(finding.help(format!("leave `{key}` out {every}")));
    }
}

fn ports(reader: &mut Reader, rule: &DeTable<'_>) -> Option<Ports> {
    let list = reader.elements(rule, "ports")?;
    refuse_empty(reader, "ports", list.value.is_empty(), list.place, "to match every port");
    let mut ports = Vec::with_capacity(list.value.len());
    for item in list.value {
        let read = match item.get_ref() {
            DeValue::String(text) => parse::port_range(text),
            value => match (number(value), value) {
                (Some(number), _) => parse::port(number).map(|port| (port, port)),
                // Beyond 128 bits.
                (None, DeValue::Integer(integer)) => Err(parse::not_a_port(integer)),
                (None, _) => {
                    reader.element_type("ports", item, "a port or a range of ports as \"8000-8099\"");
                    continue;
                }
            },
        };
        match read {
            Ok(range) => ports.push(reader.at(item.span(), range)),
            Err(error) => parse_error(reader, Code::Port, reader.place(item.span()), error),
        }
    }
    Some(At { value: ports, place: list.place })
}

fn read_rule(reader: &mut Reader, rule: &DeTable<'_>, span: Range<usize>) -> RawRule {
    reader.only(rule, &RULE_KEYS, "a rule");
    let name = reader.string(rule, "name");
    match &name {
        Some(name) => check_name(reader, name, "a rule", rule_name),
        None if !rule.contains_key("name") => {
            reader.missing(
                span.clone(),
                "the rule has no `name`".to_owned(),
                "write name = \"what-it-is-for\"",
            );
        }
        None => {}
    }
    let action = reader.word(rule, "action", &ACTIONS);
    if !rule.contains_key("action") {
        let message = "the rule has no `action`".to_owned();
        reader.missing(span.clone(), message, "write action = \"allow\" or action = \"deny\"");
    }
    let direction = reader.word(rule, "direction", &DIRECTIONS);
    let peers = rule_list(reader, rule, "peers", "to match every peer");
    let peers_file = reader.string(rule, "peers_file");
    if let Some(file) = peers_file.as_ref().filter(|file| file.value.is_empty()) {
        let finding = Diagnostic::error(Code::BadValue, file.place, "`peers_file` is empty");
        reader.report(finding.help("name a file, or leave `peers_file` out to match every peer"));
    }
    let except = rule_list(reader, rule, "except", "if nothing is carved out");
    let local = rule_list(reader, rule, "local", "to match every local address");
    let ports = ports(reader, rule);
    let comment = reader.string(rule, "comment");
    let expires = expires(reader, rule);
    let trust = reader.boolean(rule, "trust");
    if let (Some(trust), Some(At { value: Action::Deny, .. })) = (&trust, &action)
        && trust.value
    {
        let message = "a rule that denies cannot `trust`";
        reader.report(
            Diagnostic::error(Code::Conflict, trust.place, message)
                .help("`trust` exempts peers of an allow rule from the quarantine"),
        );
    }
    let enabled = reader.boolean(rule, "enabled");
    RawRule {
        header: reader.place(span),
        name,
        // A rule without an action is refused: the value is never used.
        action: action.map_or(Action::Deny, |action| action.value),
        direction: direction.map_or(Directions::Both, |direction| direction.value),
        peers,
        peers_file,
        except,
        local,
        ports,
        expires,
        comment: comment.map(|comment| comment.value),
        trust: trust.is_some_and(|trust| trust.value),
        enabled: enabled.is_none_or(|enabled| enabled.value),
    }
}

fn expires(reader: &mut Reader, rule: &DeTable<'_>) -> Option<At<Moment>> {
    const FORM: &str = "written 2027-01-31T00:00:00Z, without quotes";
    let value = rule.get("expires")?;
    let DeValue::Datetime(written) = value.get_ref() else {
        reader.wrong_type("`expires`", value, "a date with time and offset", FORM.to_owned());
        return None;
    };
    let moment = Moment::parse(&written.to_string());
    if moment.is_none() {
        let (what, help) = if written.date.is_none() || written.time.is_none() {
            ("needs a date and a time", FORM.to_owned())
        } else if written.offset.is_none() {
            ("needs an offset from UTC: hosts differ in their time zones", format!("{written}Z is UTC"))
        } else {
            ("is no moment after 1970", FORM.to_owned())
        };
        let place = reader.place(value.span());
        reader.report(Diagnostic::error(Code::BadValue, place, format!("`expires` {what}")).help(help));
    }
    moment.map(|moment| reader.at(value.span(), moment))
}

/// The lists that a text's rules name; empty, if it cannot be read.
pub(super) fn lists_of(text: &str) -> Vec<String> {
    // Reading a large policy twice would cost as much again.
    if !text.contains("peers_file") {
        return Vec::new();
    }
    let (_, document) = Reader::parse(0, text);
    let rules = document.get_ref().get("rule").and_then(|rules| rules.get_ref().as_array());
    let rules = rules.into_iter().flat_map(|rules| rules.iter());
    let named = rules.filter_map(|rule| rule.get_ref().as_table()?.get("peers_file")?.get_ref().as_str());
    named.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn single(
    reader: &mut Reader,
    text: &At<String>,
    parsed: Result<(Addr, Option<u16>), ParseError>,
) -> Option<(Addr, Option<u16>)> {
    match parsed {
        Ok(endpoint) => Some(endpoint),
        Err(error) => {
            // A network, a range or a host name is told as such.
            let error = match parse::addresses(&text.value) {
                Ok(_) => ParseError {
                    message: format!("`{}` is more than one address", text.value),
                    help: "a test is one connection: write one address of it".to_owned(),
                },
                Err(other) if !text.value.contains(']') && text.value.matches(':').count() != 1 => other,
                Err(_) => error,
            };
            parse_error(reader, Code::Address, text.place, error);
            None
        }
    }
}

fn read_test(
    reader: &mut Reader,
    test: &DeTable<'_>,
    span: Range<usize>,
    rule: Option<At<String>>,
) -> Option<RawTest> {
    reader.only(test, &TEST_KEYS, "a test");
    let peer_text = reader.string(test, "peer");
    if !test.contains_key("peer") {
        reader.missing(span.clone(), "the test has no `peer`".to_owned(), "write peer = \"10.0.0.1\"");
    }
    let peer = peer_text.as_ref().and_then(|text| single(reader, text, parse::endpoint(&text.value)));
    let mut port = None;
    if let Some(number) = reader.integer(test, "port") {
        match parse::port(number.value) {
            Ok(read) => port = Some(read),
            Err(error) => parse_error(reader, Code::Port, number.place, error),
        }
        if let Some((_, Some(other))) = peer {
            let message = format!("the port is given twice: `peer` says {other} already");
            reader.report(
                Diagnostic::error(Code::Conflict, number.place, message).help("leave one of them out"),
            );
        }
    }
    let local_text = reader.string(test, "local");
    let local = local_text.as_ref().and_then(|text| {
        let parsed = parse::endpoint(&text.value).and_then(|(addr, port)| match port {
            None => Ok((addr, None)),
            Some(_) => Err(ParseError {
                message: "`local` has no port of its own".to_owned(),
                help: "the service port is `port`".to_owned(),
            }),
        });
        single(reader, text, parsed)
    });
    if let (Some((peer, _)), Some((local, _)), Some(text)) = (peer, local, &local_text)
        && peer.as_v4().is_some() != local.as_v4().is_some()
    {
        let message = "`peer` and `local` are of different address families";
        reader.report(Diagnostic::error(Code::Conflict, text.place, message));
    }
    let direction = reader.word(test, "direction", &DIRECTION);
    let expect = reader.word(test, "expect", &ACTIONS);
    if !test.contains_key("expect") {
        let message = "the test has no `expect`".to_owned();
        reader.missing(span.clone(), message, "write expect = \"allow\" or expect = \"deny\"");
    }
    let (peer, peer_port) = peer?;
    Some(RawTest {
        header: reader.place(span),
        peer,
        port: port.or(peer_port),
        local: local.map(|(addr, _)| addr),
        direction: direction.map(|direction| direction.value),
        expect: expect?,
        rule,
    })
}
