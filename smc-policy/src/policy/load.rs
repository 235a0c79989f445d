//! From texts to a checked policy: names are resolved over all files, sets become ranges.

use std::{
    collections::HashMap,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use super::{
    address::{AddrRange, AddrSet},
    diagnostic::{self, Code, Diagnostic, SourceFile, SourceKind},
    lint, list,
    model::{Defaults, Place, Policy, Rule, Test},
    moment::Moment,
    ranges::RangeSet,
    reader::{At, nearest},
    source::{self, Element, List, RawFile, RawRule, RawSet, RawTest},
};

/// A policy that can be used, and what is odd about it.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The policy.
    pub policy: Policy,
    /// Lints; all of them warnings.
    pub warnings: Vec<Diagnostic>,
}

/// The `peers_file`s that the rules of these policy files name, each once, in their order.
pub fn lists(files: &[SourceFile]) -> Vec<PathBuf> {
    let mut lists: Vec<PathBuf> = Vec::new();
    for file in files.iter().filter(|file| file.kind == SourceKind::Policy) {
        for name in source::lists_of(&file.text) {
            let path = list_path(&file.path, &name);
            if !lists.contains(&path) {
                lists.push(path);
            }
        }
    }
    lists
}

/// Where a `peers_file` is: relative to the file that names it.
fn list_path(policy: &Path, name: &str) -> PathBuf {
    let path = policy.parent().unwrap_or(Path::new("")).join(name);
    // `./list` is the same file as `list`.
    let plain: PathBuf = path.components().filter(|part| *part != Component::CurDir).collect();
    // `.` itself: no file, and to be named in the error.
    if plain.as_os_str().is_empty() { path } else { plain }
}

/// Reads a policy as it is at the moment `now`. `files`: the policy files in the order of [`super::folder::files`] (none is
/// fine: everything is allowed), and the [`lists`] that they name.
///
/// # Errors
/// Everything that is wrong in any of the files, in the order of the files.
pub fn load(files: &[SourceFile], now: Moment) -> Result<Loaded, Vec<Diagnostic>> {
    // An empty one in the place of a list: places count all files.
    let mut raw: Vec<RawFile> = files
        .iter()
        .enumerate()
        .map(|(file, source)| match source.kind {
            SourceKind::Policy => source::read(file, &source.text),
            SourceKind::List | SourceKind::Unread => RawFile::default(),
        })
        .collect();
    let mut found: Vec<Diagnostic> =
        raw.iter_mut().flat_map(|file| std::mem::take(&mut file.found)).collect();
    let lists = Lists::new(files, &raw, &mut found);
    let defaults = defaults(&raw, &mut found);
    let mut sets = Sets::new(&raw, &mut found);
    sets.resolve(&mut found);
    let mut resolver = Resolver { sets, lists, now, found };
    let mut rules: Vec<Rule> = Vec::new();
    let mut named: HashMap<&str, Place> = HashMap::new();
    for rule in raw.iter().flat_map(|file| &file.rules) {
        if let Some(name) = &rule.name {
            match named.get(name.value.as_str()) {
                Some(first) => resolver.found.push(
                    Diagnostic::error(
                        Code::Duplicate,
                        name.place,
                        format!("a rule named `{}` exists already", name.value.escape_debug()),
                    )
                    .related(*first, "the first one")
                    .help("hits are counted by name: names are unique over all files"),
                ),
                None => {
                    named.insert(&name.value, name.place);
                }
            }
        }
        let file = files.get(rule.header.file).map_or(Path::new(""), |file| file.path.as_path());
        rules.push(resolver.rule(file, rule));
    }
    let broken = raw.iter().any(|file| file.broken);
    for name in raw.iter().flat_map(|file| &file.references) {
        if broken || named.contains_key(name.value.as_str()) {
            continue;
        }
        let message = format!("there is no rule `{}`", name.value.escape_debug());
        let finding = Diagnostic::error(Code::Reference, name.place, message);
        let near = nearest(&name.value, named.keys().copied());
        resolver.found.push(match near {
            Some(near) => finding.help(format!("did you mean `{near}`?")),
            None => finding,
        });
    }
    let tests = raw.iter().flat_map(|file| &file.tests).map(read_test).collect();
    let Resolver { sets, lists, mut found, .. } = resolver;
    if !found.is_empty() {
        diagnostic::sort(&mut found);
        return Err(found);
    }
    let policy =
        Policy { files: files.iter().map(|file| file.path.clone()).collect(), defaults, rules, tests };
    let mut warnings = lint::lint(&policy, &raw, &sets);
    warnings.extend(lists.warnings);
    diagnostic::sort(&mut warnings);
    Ok(Loaded { policy, warnings })
}

fn defaults(raw: &[RawFile], found: &mut Vec<Diagnostic>) -> Defaults {
    let mut defaults = Defaults::default();
    let mut first: Option<Place> = None;
    for (place, outbound, inbound) in raw.iter().filter_map(|file| file.default) {
        match first {
            Some(first) => found.push(
                Diagnostic::error(Code::Duplicate, place, "[default] is given a second time")
                    .related(first, "the first one")
                    .help("give it once over all files: both `outbound` and `inbound` may stand there"),
            ),
            None => {
                first = Some(place);
                defaults.outbound = outbound.unwrap_or(defaults.outbound);
                defaults.inbound = inbound.unwrap_or(defaults.inbound);
            }
        }
    }
    defaults
}

fn read_test(test: &RawTest) -> Test {
    Test {
        peer: test.peer,
        port: test.port,
        local: test.local,
        direction: test.direction,
        expect: test.expect.value,
        rule: test.rule.as_ref().map(|rule| rule.value.clone()),
        place: test.header,
        expect_place: test.expect.place,
        rule_place: test.rule.as_ref().map_or(test.expect.place, |rule| rule.place),
    }
}

/// A set's addresses, once resolved.
#[derive(Clone, Debug)]
enum Resolved {
    /// Not looked at yet.
    No,
    /// Its own elements are being resolved.
    Open,
    Yes(Arc<AddrSet>),
}

/// The named sets of all files.
pub(super) struct Sets<'a> {
    by_name: HashMap<&'a str, usize>,
    sets: Vec<(&'a RawSet, Resolved)>,
    /// Some text could not be read: a set that is missing may stand there.
    broken: bool,
}

impl<'a> Sets<'a> {
    fn new(raw: &'a [RawFile], found: &mut Vec<Diagnostic>) -> Self {
        let broken = raw.iter().any(|file| file.broken);
        let mut sets = Self { by_name: HashMap::new(), sets: Vec::new(), broken };
        for set in raw.iter().flat_map(|file| &file.sets) {
            match sets.by_name.get(set.name.value.as_str()) {
                Some(first) => found.push(
                    Diagnostic::error(
                        Code::Duplicate,
                        set.name.place,
                        format!("a set named `{}` exists already", set.name.value.escape_debug()),
                    )
                    .related(sets.sets[*first].0.name.place, "the first one")
                    .help("a set's name may be given once over all files"),
                ),
                None => {
                    sets.by_name.insert(&set.name.value, sets.sets.len());
                    sets.sets.push((set, Resolved::No));
                }
            }
        }
        sets
    }

    /// The names and places of all sets with their addresses.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&'a RawSet, &AddrSet)> {
        self.sets.iter().filter_map(|(set, resolved)| match resolved {
            Resolved::Yes(addresses) => Some((*set, &**addresses)),
            _ => None,
        })
    }

    /// The addresses of a set.
    pub(super) fn get(&self, name: &str) -> Option<&Arc<AddrSet>> {
        match &self.sets[*self.by_name.get(name)?].1 {
            Resolved::Yes(addresses) => Some(addresses),
            _ => None,
        }
    }

    /// The elements of a set.
    pub(super) fn list(&self, name: &str) -> Option<&'a List> {
        Some(&self.sets[*self.by_name.get(name)?].0.list)
    }

    /// Resolves every set. Sets may name sets, but not in a circle. No recursion: a chain may be long.
    fn resolve(&mut self, found: &mut Vec<Diagnostic>) {
        for start in 0..self.sets.len() {
            let mut path: Vec<(usize, usize)> = Vec::new();
            if matches!(self.sets[start].1, Resolved::No) {
                self.sets[start].1 = Resolved::Open;
                path.push((start, 0));
            }
            while let Some((set, next)) = path.last_mut() {
                let (set, elements) = (*set, &self.sets[*set].0.list.value);
                let Some(element) = elements.get(*next) else {
                    self.sets[set].1 = Resolved::Yes(self.union(&self.sets[set].0.list));
                    path.pop();
                    continue;
                };
                *next += 1;
                let Element::Set(name) = &element.value else { continue };
                match self.by_name.get(name.as_str()).map(|inner| (*inner, &self.sets[*inner].1)) {
                    None => self.unknown(name, element.place, found),
                    Some((inner, Resolved::No)) => {
                        self.sets[inner].1 = Resolved::Open;
                        path.push((inner, 0));
                    }
                    Some((inner, Resolved::Open)) => {
                        let circle = path.iter().map(|(set, _)| *set).skip_while(|set| *set != inner);
                        let names: Vec<&str> =
                            circle.chain([inner]).map(|set| self.sets[set].0.name.value.as_str()).collect();
                        let message = format!("the set `{name}` contains itself: {}", names.join(" -> "));
                        found.push(Diagnostic::error(Code::Reference, element.place, message));
                    }
                    Some((_, Resolved::Yes(_))) => {}
                }
            }
        }
    }

    fn unknown(&self, name: &str, place: Place, found: &mut Vec<Diagnostic>) {
        if self.broken {
            return;
        }
        let finding =
            Diagnostic::error(Code::Reference, place, format!("there is no set `{}`", name.escape_debug()));
        found.push(match nearest(name, self.by_name.keys().copied()) {
            Some(near) => finding.help(format!("did you mean \"@{near}\"?")),
            None => finding.help("sets are defined under [sets], in any of the files"),
        });
    }

    /// All addresses of a list; a list that is one set only shares it.
    fn union(&self, list: &List) -> Arc<AddrSet> {
        let shared = |element: &At<Element>| match &element.value {
            Element::Set(name) => self.get(name).cloned(),
            Element::Range(_) => None,
        };
        if let [only] = list.value.as_slice()
            && let Some(set) = shared(only)
        {
            return set;
        }
        let (mut v4, mut v6) = (Vec::new(), Vec::new());
        for element in &list.value {
            match &element.value {
                Element::Range(AddrRange::V4(lo, hi)) => v4.push((*lo, *hi)),
                Element::Range(AddrRange::V6(lo, hi)) => v6.push((*lo, *hi)),
                Element::Set(name) => {
                    if let Some(set) = self.get(name) {
                        v4.extend_from_slice(set.v4().ranges());
                        v6.extend_from_slice(set.v6().ranges());
                    }
                }
            }
        }
        Arc::new(AddrSet::new(v4, v6))
    }
}

/// The lists that rules name.
struct Lists {
    by_path: HashMap<PathBuf, Arc<AddrSet>>,
    warnings: Vec<Diagnostic>,
}

impl Lists {
    /// Reads them; what is wrong with them is told once, by whoever names them first.
    fn new(files: &[SourceFile], raw: &[RawFile], found: &mut Vec<Diagnostic>) -> Self {
        let mut lists = Self { by_path: HashMap::new(), warnings: Vec::new() };
        for rule in raw.iter().flat_map(|file| &file.rules) {
            let Some(name) = rule.peers_file.as_ref().filter(|name| !name.value.is_empty()) else { continue };
            let policy = files.get(name.place.file).map_or(Path::new(""), |file| file.path.as_path());
            let path = list_path(policy, &name.value);
            if lists.by_path.contains_key(&path) {
                continue;
            }
            let of_path =
                |(_, file): &(usize, &SourceFile)| file.kind != SourceKind::Policy && file.path == path;
            let unreadable = |why: &str| {
                Diagnostic::error(Code::Unreadable, name.place, format!("{}: {why}", path.display()))
                    .help("`peers_file` is relative to the folder of the policy file")
            };
            let addresses = match files.iter().enumerate().find(of_path) {
                Some((index, file)) if file.kind == SourceKind::List => lists.read(index, file, name, found),
                Some((_, file)) => {
                    found.push(unreadable(&file.text));
                    AddrSet::default()
                }
                None => {
                    found.push(unreadable("was not read"));
                    AddrSet::default()
                }
            };
            lists.by_path.insert(path, Arc::new(addresses));
        }
        lists
    }

    fn read(
        &mut self,
        index: usize,
        file: &SourceFile,
        name: &At<String>,
        found: &mut Vec<Diagnostic>,
    ) -> AddrSet {
        let mut list = list::read(index, &file.text);
        let is_right = list.found.is_empty();
        found.append(&mut list.found);
        let (addresses, covered) = list.addresses();
        if is_right && addresses.is_empty() {
            let message = format!("{} lists no address", file.path.display());
            self.warnings.push(
                Diagnostic::warning(Code::EmptySet, name.place, message)
                    .help("a rule whose peers are this list matches nothing"),
            );
        }
        if let Some((number, line)) = covered {
            let (entries, are) = if number == 1 { ("entry", "is") } else { ("entries", "are") };
            let message = format!(
                "{}: {number} {entries} {are} part of others in the list, line {line} first",
                file.path.display()
            );
            self.warnings.push(Diagnostic::warning(Code::DuplicatePeers, name.place, message));
        }
        addresses
    }
}

struct Resolver<'a> {
    sets: Sets<'a>,
    lists: Lists,
    now: Moment,
    found: Vec<Diagnostic>,
}

impl Resolver<'_> {
    fn list(&mut self, list: Option<&List>) -> Option<Arc<AddrSet>> {
        let list = list?;
        for element in &list.value {
            if let Element::Set(name) = &element.value
                && !self.sets.by_name.contains_key(name.as_str())
            {
                self.sets.unknown(name, element.place, &mut self.found);
            }
        }
        Some(self.sets.union(list))
    }

    /// The peers that a rule lists itself and in a file.
    fn listed(&mut self, file: &Path, rule: &RawRule) -> Option<Arc<AddrSet>> {
        let own = self.list(rule.peers.as_ref());
        let name = rule.peers_file.as_ref().filter(|name| !name.value.is_empty());
        let list = name.and_then(|name| self.lists.by_path.get(&list_path(file, &name.value)).cloned());
        match (own, list) {
            (Some(own), Some(list)) => Some(Arc::new(own.plus(&list))),
            (own, list) => own.or(list),
        }
    }

    fn rule(&mut self, file: &Path, rule: &RawRule) -> Rule {
        let listed = self.listed(file, rule);
        let except = self.list(rule.except.as_ref());
        let local = self.list(rule.local.as_ref());
        let peers = match &except {
            None => listed.clone(),
            Some(except) => Some(match &listed {
                Some(listed) => Arc::new(listed.minus(except)),
                None => Arc::new(AddrSet::full().minus(except)),
            }),
        };
        let ports =
            rule.ports.as_ref().map(|ports| RangeSet::new(ports.value.iter().map(|at| at.value).collect()));
        Rule {
            name: rule.name.as_ref().map(|name| name.value.clone()).unwrap_or_default(),
            action: rule.action,
            direction: rule.direction,
            listed,
            except,
            peers,
            local,
            ports,
            comment: rule.comment.clone(),
            expires: rule.expires.as_ref().map(|expires| expires.value),
            expired: rule.expires.as_ref().is_some_and(|expires| expires.value <= self.now),
            trust: rule.trust,
            enabled: rule.enabled,
            place: rule.header,
        }
    }
}

#[cfg(test)]
mod tests;
