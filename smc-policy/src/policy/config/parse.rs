//! Reads the text of config.toml, as strictly as a policy: all that is wrong at once, each with its place and what to write
//! instead.

use std::{borrow::Cow, collections::HashMap, ops::Range, path::PathBuf};

use smc_policy_common::{table::EXTRA_MAGICS, tcp_option::SMC_MAGIC};
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    Config, Guard, HookChoice, Interfaces, Namespaces, OnEcho,
    cgroup::{is_in, no_cgroup, plain},
    pattern::{covers, impossible, plain_character, quoted},
};
use crate::policy::{
    diagnostic::{self, Code, Diagnostic},
    model::Place,
    reader::{At, Reader, number},
    settings::Magic,
    source,
};

/// The keys of the file.
pub(in crate::policy) const FILE_KEYS: [&str; 10] = [
    "hook",
    "mode",
    "guard",
    "on_echo",
    "cgroups",
    "retransmit",
    "forwarded",
    "namespaces",
    "interfaces",
    "magic",
];
const INTERFACES_KEYS: [&str; 2] = ["include", "exclude"];
const MAGIC_KEYS: [&str; 2] = ["syn", "syn_ack"];

const HOOKS: [(&str, HookChoice); 3] =
    [("auto", HookChoice::Auto), ("hs_ctrl", HookChoice::HsCtrl), ("tc", HookChoice::Tc)];
const GUARDS: [(&str, Guard); 3] = [("canary", Guard::Canary), ("learn", Guard::Learn), ("off", Guard::Off)];
const ON_ECHO: [(&str, OnEcho); 2] = [("blank", OnEcho::Blank), ("learn-only", OnEcho::LearnOnly)];
/// Whether it is to observe.
const MODES: [(&str, bool); 2] = [("enforce", false), ("observe", true)];
/// Whether retransmissions are plain.
const RETRANSMIT: [(&str, bool); 2] = [("plain", true), ("keep", false)];

/// The longest name of a file, which a namespace's name is (`NAME_MAX`, include/uapi/linux/limits.h).
const FILE_NAME: usize = 255;
/// So many patterns of a list are compared with each other: it takes the square of it.
const MOST_COMPARED: usize = 256;

/// A config.toml that can be used, and what is odd about it.
#[derive(Clone, Debug)]
pub struct Parsed {
    /// What it says.
    pub config: Config,
    /// Lints; all of them warnings.
    pub warnings: Vec<Diagnostic>,
}

/// Reads the text of a config.toml. Every key may be left out: an empty text is [`Config::default`].
///
/// `file`: the number in [`Place::file`] of the findings, the text's place in the list they are printed with.
///
/// # Errors
/// Everything that is wrong with it, in the order of the text.
pub fn parse(file: usize, text: &str) -> Result<Parsed, Vec<Diagnostic>> {
    let (mut reader, document) = Reader::parse(file, text);
    let table = document.get_ref();
    if let Some(key) = only_keys_of(table, &source::FILE_KEYS) {
        let message = format!("a config file has no key `{}`", key.get_ref());
        let place = reader.place(key.span());
        reader.report(
            Diagnostic::error(Code::UnknownKey, place, message)
                .help("this is a policy: it belongs in policy.d, or is named without --config"),
        );
        return Err(reader.found);
    }
    reader.only_or(table, &FILE_KEYS, "a config file", belongs);
    let hook = reader.word(table, "hook", &HOOKS);
    let observe = reader.word(table, "mode", &MODES);
    let guard_at = reader.word(table, "guard", &GUARDS);
    let guard = guard_at.as_ref().map_or(Guard::default(), |guard| guard.value);
    let on_echo = reader.word(table, "on_echo", &ON_ECHO);
    let cgroups = cgroups(&mut reader, table);
    let plain = reader.word(table, "retransmit", &RETRANSMIT);
    let forwarded = reader.boolean(table, "forwarded");
    let namespaces = namespaces(&mut reader, table);
    let mut warnings = Vec::new();
    let interfaces = interfaces(&mut reader, table, &mut warnings);
    let magics = magics(&mut reader, table);
    if let Some(hook) = hook.as_ref().filter(|hook| hook.value == HookChoice::HsCtrl) {
        // The canary has programs at devices with either hook.
        let only_tc = guard != Guard::Canary;
        let used = [
            ("interfaces", only_tc && interfaces != Interfaces::default()),
            ("forwarded", forwarded.as_ref().is_some_and(|forwarded| forwarded.value)),
            ("magic", only_tc && !magics.is_empty()),
        ];
        let used = used.into_iter().filter(|(_, used)| *used);
        warnings.extend(used.filter_map(|(key, _)| table.get_key_value(key)).map(|(key, _)| {
            let message = format!("only tc uses `{}`", key.get_ref());
            Diagnostic::warning(Code::UnusedSetting, reader.place(key.span()), message)
                .related(hook.place, "this hook does not")
        }));
    }
    if let Some(guard) = guard_at.filter(|guard| guard.value != Guard::Canary) {
        let used = ["on_echo", "cgroups"].into_iter().filter_map(|key| table.get_key_value(key));
        warnings.extend(used.map(|(key, _)| {
            let message = format!("only the canary uses `{}`", key.get_ref());
            Diagnostic::warning(Code::UnusedSetting, reader.place(key.span()), message)
                .related(guard.place, "there is none")
        }));
    }
    let defaults = Config::default();
    let config = Config {
        hook: hook.map_or(defaults.hook, |hook| hook.value),
        observe: observe.map_or(defaults.observe, |observe| observe.value),
        interfaces,
        namespaces: namespaces.unwrap_or_default(),
        plain_retransmissions: plain.map_or(defaults.plain_retransmissions, |plain| plain.value),
        forwarded: forwarded.map_or(defaults.forwarded, |forwarded| forwarded.value),
        magics,
        guard,
        on_echo: on_echo.map_or(defaults.on_echo, |on_echo| on_echo.value),
        cgroups: cgroups.into_iter().map(PathBuf::from).collect(),
    };
    let mut found = reader.found;
    if found.is_empty() {
        diagnostic::sort(&mut warnings);
        Ok(Parsed { config, warnings })
    } else {
        diagnostic::sort(&mut found);
        Err(found)
    }
}

/// The first key, if all of them are of `keys`: then it is the other kind of file.
pub(in crate::policy) fn only_keys_of<'t, 'i>(
    table: &'t DeTable<'i>,
    keys: &[&str],
) -> Option<&'t Spanned<Cow<'i, str>>> {
    let all = table.iter().all(|(key, _)| keys.contains(&key.get_ref().as_ref()));
    let first = table.iter().map(|(key, _)| key).min_by_key(|key| key.span().start);
    first.filter(|_| all)
}

/// Where a key belongs that stands outside of every table.
fn belongs(key: &str) -> Option<String> {
    if key == "version" {
        Some("it needs no version: leave it out".to_owned())
    } else if source::FILE_KEYS.contains(&key) {
        Some(format!("`{key}` belongs in a policy file"))
    } else if INTERFACES_KEYS.contains(&key) {
        Some(format!("`{key}` belongs under [interfaces]"))
    } else if MAGIC_KEYS.contains(&key) {
        Some(format!("`{key}` belongs under [[magic]]"))
    } else {
        None
    }
}

/// Where a key belongs that stands in a table: one of the file after a header is the table's.
fn belongs_above(key: &str) -> Option<String> {
    let of_file = FILE_KEYS.contains(&key);
    of_file.then(|| format!("`{key}` is of the whole file: write it above the first [header]"))
}

// Namespaces.

fn namespaces(reader: &mut Reader, table: &DeTable<'_>) -> Option<Namespaces> {
    const WANTED: &str = "\"host\", \"all\" or a list of names";
    let value = table.get("namespaces")?;
    match value.get_ref() {
        DeValue::String(text) => match text.as_ref() {
            "host" => Some(Namespaces::Host),
            "all" => Some(Namespaces::All),
            name => {
                let message = format!("`namespaces` is {WANTED}, not \"{}\"", name.escape_debug());
                let help = format!("a list is written namespaces = [{}]", quoted([mounted(name)]));
                let place = reader.place(value.span());
                reader.report(Diagnostic::error(Code::BadValue, place, message).help(help));
                None
            }
        },
        DeValue::Array(list) if list.is_empty() => {
            let place = reader.place(value.span());
            reader.report(
                Diagnostic::error(Code::BadValue, place, "`namespaces` is an empty list")
                    .help("leave `namespaces` out to stay in the namespace that the tool runs in"),
            );
            None
        }
        DeValue::Array(list) => Some(named(reader, list)),
        _ => {
            let help = "its names are those of `ip netns list`".to_owned();
            reader.wrong_type("`namespaces`", value, WANTED, help);
            None
        }
    }
}

/// A list of namespaces; what is no name is reported and left out.
fn named(reader: &mut Reader, list: &[Spanned<DeValue<'_>>]) -> Namespaces {
    let mut names: Vec<String> = Vec::new();
    let mut first: HashMap<&str, Place> = HashMap::new();
    for item in list {
        let Some(name) = item.get_ref().as_str() else {
            reader.element_type("namespaces", item, "a string");
            continue;
        };
        let place = reader.place(item.span());
        if let Some(first) = first.get(name) {
            let message = format!("the namespace `{}` is listed already", name.escape_debug());
            reader.report(
                Diagnostic::error(Code::Duplicate, place, message)
                    .related(*first, "the first time")
                    .help("leave one of them out"),
            );
            continue;
        }
        first.insert(name, place);
        if let Some((message, help)) = no_namespace(name) {
            reader.report(Diagnostic::error(Code::Name, place, message).help(help));
        } else {
            names.push(name.to_owned());
        }
    }
    if names == ["host"] { Namespaces::Host } else { Namespaces::Named(names) }
}

/// What is wrong with the name of a namespace, and what to write instead.
fn no_namespace(name: &str) -> Option<(String, String)> {
    let rule = "a name as `ip netns list` shows it: a file in /run/netns";
    let cannot = || format!("the name of a namespace cannot be \"{}\"", name.escape_debug());
    if name == "all" {
        Some((
            "\"all\" does not stand in a list".to_owned(),
            "for every namespace write namespaces = \"all\"".to_owned(),
        ))
    } else if is_file_name(name) {
        None
    } else if is_file_name(mounted(name)) {
        Some((cannot(), format!("names have no folder: {}", quoted([mounted(name)]))))
    } else if name.len() > FILE_NAME {
        let message = format!("the name of a namespace is longer than {FILE_NAME} bytes");
        Some((message, format!("it has {}; {rule}", name.len())))
    } else {
        Some((cannot(), rule.to_owned()))
    }
}

fn is_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && name.len() <= FILE_NAME && !name.contains(['/', '\0'])
}

/// The name of a namespace that is given with its folder.
fn mounted(name: &str) -> &str {
    ["/run/netns/", "/var/run/netns/"].iter().find_map(|folder| name.strip_prefix(folder)).unwrap_or(name)
}

// Cgroups.

/// The cgroups; those that are none are reported and left out.
fn cgroups(reader: &mut Reader, table: &DeTable<'_>) -> Vec<String> {
    let Some(list) = reader.elements(table, "cgroups") else { return Vec::new() };
    if list.value.is_empty() {
        let finding = Diagnostic::error(Code::BadValue, list.place, "`cgroups` is an empty list");
        reader.report(
            finding.help("leave `cgroups` out to mark the SYNs of all processes, or write guard = \"off\""),
        );
    }
    let mut cgroups: Vec<At<String>> = Vec::new();
    for item in list.value {
        let Some(path) = item.get_ref().as_str() else {
            reader.element_type("cgroups", item, "a string");
            continue;
        };
        let place = reader.place(item.span());
        if let Some((message, help)) = no_cgroup(path) {
            reader.report(Diagnostic::error(Code::Name, place, message).help(help));
            continue;
        }
        let path = plain(path);
        // A program at both would mark the same SYN twice.
        if let Some(other) = cgroups.iter().find(|o| is_in(&path, &o.value) || is_in(&o.value, &path)) {
            let (message, which) = if other.value == path {
                ("this cgroup is listed already", "the first time")
            } else if is_in(&path, &other.value) {
                ("this cgroup is part of another one in the list", "of this one")
            } else {
                ("another cgroup in the list is part of this one", "this one")
            };
            reader.report(
                Diagnostic::error(Code::Duplicate, place, message)
                    .related(other.place, which)
                    .help("a cgroup stands for all below it: leave the inner one out"),
            );
            continue;
        }
        cgroups.push(At { value: path, place });
    }
    cgroups.into_iter().map(|cgroup| cgroup.value).collect()
}

// Devices.

fn interfaces(reader: &mut Reader, table: &DeTable<'_>, warnings: &mut Vec<Diagnostic>) -> Interfaces {
    let Some(value) = table.get("interfaces") else { return Interfaces::default() };
    let Some(interfaces) = value.get_ref().as_table() else {
        let names: Vec<&str> = match value.get_ref() {
            DeValue::String(name) => vec![name],
            DeValue::Array(list) => list.iter().filter_map(|item| item.get_ref().as_str()).collect(),
            _ => Vec::new(),
        };
        let is_headers = value.get_ref().as_array().is_some_and(|list| {
            !list.is_empty() && list.iter().all(|item| item.get_ref().as_table().is_some())
        });
        let help = if is_headers {
            "write [interfaces], in single brackets, once".to_owned()
        } else {
            let names = if names.is_empty() { quoted(["eth*"]) } else { quoted(names) };
            format!("write [interfaces] on a line of its own, and below it include = [{names}]")
        };
        reader.wrong_type("`interfaces`", value, "a table", help);
        return Interfaces::default();
    };
    reader.only_or(interfaces, &INTERFACES_KEYS, "[interfaces]", belongs_above);
    let include = patterns(reader, interfaces, "include", warnings);
    let exclude = patterns(reader, interfaces, "exclude", warnings);
    if let Some(place) = include.as_ref().filter(|include| include.empty).map(|include| include.place) {
        reader.report(
            Diagnostic::error(Code::BadValue, place, "`include` is an empty list")
                .help("leave `include` out for every device with an address"),
        );
    }
    let [include, exclude] =
        [include, exclude].map(|list| list.map(|list| list.patterns).unwrap_or_default());
    never_included(&include, &exclude, warnings);
    let texts = |list: Vec<At<String>>| list.into_iter().map(|pattern| pattern.value).collect();
    Interfaces { include: texts(include), exclude: texts(exclude) }
}

/// A list of patterns; those that are none are reported and left out.
struct Patterns {
    patterns: Vec<At<String>>,
    place: Place,
    /// Nothing is written there.
    empty: bool,
}

fn patterns(
    reader: &mut Reader,
    table: &DeTable<'_>,
    key: &str,
    warnings: &mut Vec<Diagnostic>,
) -> Option<Patterns> {
    let list = reader.elements(table, key)?;
    let mut patterns: Vec<At<String>> = Vec::with_capacity(list.value.len());
    for item in list.value {
        let Some(text) = item.get_ref().as_str() else {
            reader.element_type(key, item, "a string");
            continue;
        };
        let place = reader.place(item.span());
        if let Some((message, help)) = impossible(text) {
            reader.report(Diagnostic::error(Code::Name, place, message).help(help));
            continue;
        }
        if let Some((character, help)) = plain_character(text) {
            let message = format!("`{character}` stands for itself in a pattern");
            warnings.push(Diagnostic::warning(Code::PlainCharacter, place, message).help(help));
        }
        patterns.push(At { value: text.to_owned(), place });
    }
    repeated(&patterns, warnings);
    Some(Patterns { patterns, place: list.place, empty: list.value.is_empty() })
}

/// Patterns that another one of the same list covers.
fn repeated(patterns: &[At<String>], warnings: &mut Vec<Diagnostic>) {
    let patterns = &patterns[..patterns.len().min(MOST_COMPARED)];
    for (at, pattern) in patterns.iter().enumerate() {
        // Of two that are equal the first one counts.
        let by = patterns.iter().enumerate().find(|(other_at, other)| {
            covers(&other.value, &pattern.value)
                && (*other_at < at || (*other_at > at && !covers(&pattern.value, &other.value)))
        });
        let Some((_, other)) = by else { continue };
        let message = if other.value == pattern.value {
            format!("`{}` is listed already", pattern.value.escape_debug())
        } else {
            format!("`{}` is part of `{}`", pattern.value.escape_debug(), other.value.escape_debug())
        };
        warnings.push(
            Diagnostic::warning(Code::DuplicatePatterns, pattern.place, message)
                .related(other.place, "this one covers it")
                .help("leave it out"),
        );
    }
}

/// Patterns whose devices are all excluded.
fn never_included(include: &[At<String>], exclude: &[At<String>], warnings: &mut Vec<Diagnostic>) {
    for pattern in include.iter().take(MOST_COMPARED) {
        let covered = |out: &&At<String>| covers(&out.value, &pattern.value);
        if let Some(out) = exclude.iter().take(MOST_COMPARED).find(covered) {
            let message = format!("`{}` never gets programs", pattern.value.escape_debug());
            warnings.push(
                Diagnostic::warning(Code::NeverMatches, pattern.place, message)
                    .related(out.place, "excludes it")
                    .help("`exclude` goes before `include`"),
            );
        }
    }
}

// Magics.

fn magics(reader: &mut Reader, table: &DeTable<'_>) -> Vec<Magic> {
    let mut magics: Vec<At<Magic>> = Vec::new();
    for (at, (table, span)) in reader.tables(table, "magic").into_iter().enumerate() {
        if at == EXTRA_MAGICS {
            let message = format!("there are more than {EXTRA_MAGICS} further magics");
            let place = reader.place(span);
            reader.report(
                Diagnostic::error(Code::TooLarge, place, message)
                    .help("the kernel's tables have no room for more: leave this one out"),
            );
            break;
        }
        let Some(magic) = magic(reader, table, span) else { continue };
        if magic.value == (Magic { syn: SMC_MAGIC, syn_ack: SMC_MAGIC }) {
            let message = format!("{SMC_MAGIC:08x} is the standard magic, which is known");
            reader.report(
                Diagnostic::error(Code::Duplicate, magic.place, message)
                    .help("leave this [[magic]] out, or give the `syn_ack` that differs"),
            );
        } else if let Some(first) = magics.iter().find(|first| first.value == magic.value) {
            reader.report(
                Diagnostic::error(Code::Duplicate, magic.place, "this magic is given already")
                    .related(first.place, "the first time")
                    .help("leave one of them out"),
            );
        } else {
            magics.push(magic);
        }
    }
    magics.into_iter().map(|magic| magic.value).collect()
}

fn magic(reader: &mut Reader, table: &DeTable<'_>, span: Range<usize>) -> Option<At<Magic>> {
    reader.only_or(table, &MAGIC_KEYS, "[[magic]]", belongs_above);
    if !table.contains_key("syn") {
        let help = format!("write syn = \"{SMC_MAGIC:08x}\", with the digits of the SYN's option");
        reader.missing(span, "the magic has no `syn`".to_owned(), &help);
    }
    let syn = digits(reader, table, "syn");
    let syn_ack = digits(reader, table, "syn_ack");
    let syn = syn?;
    if syn_ack.is_none() && table.contains_key("syn_ack") {
        return None;
    }
    Some(At {
        value: Magic { syn: syn.value, syn_ack: syn_ack.map_or(syn.value, |at| at.value) },
        place: syn.place,
    })
}

/// A magic of 8 hex digits.
fn digits(reader: &mut Reader, table: &DeTable<'_>, key: &str) -> Option<At<u32>> {
    let value = table.get(key)?;
    let Some(text) = value.get_ref().as_str() else {
        // A number whose digits are given, or one that was meant as digits.
        let digits = match value.get_ref() {
            DeValue::Integer(integer) if integer.radix() == 16 => number(value.get_ref())
                .and_then(|number| u32::try_from(number).ok())
                .map(|number| format!("{number:08x}")),
            DeValue::Integer(integer) => Some(integer.as_str().to_owned()),
            _ => None,
        };
        let digits = digits.and_then(|digits| hex(&digits)).unwrap_or(SMC_MAGIC);
        let help = format!("write {key} = \"{digits:08x}\"");
        reader.wrong_type(&format!("`{key}`"), value, "a string of 8 hex digits", help);
        return None;
    };
    let place = reader.place(value.span());
    let Some(magic) = hex(text) else {
        let message = format!("`{}` is not 8 hex digits", text.escape_debug());
        let plain = text.replace("0x", "").replace([' ', ':', '-', '_', '.', ','], "");
        let help = match hex(&plain) {
            Some(magic) => format!("write {key} = \"{magic:08x}\""),
            None => "the four bytes of the option after kind and length".to_owned(),
        };
        reader.report(Diagnostic::error(Code::BadValue, place, message).help(help));
        return None;
    };
    if magic == 0 {
        reader.report(
            Diagnostic::error(Code::BadValue, place, "a magic cannot be 0")
                .help("the four bytes of the option after kind and length"),
        );
        return None;
    }
    Some(At { value: magic, place })
}

fn hex(text: &str) -> Option<u32> {
    let digits = text.len() == 8 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    digits.then(|| u32::from_str_radix(text, 16).ok())?
}

#[cfg(test)]
mod tests;
