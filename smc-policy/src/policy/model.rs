//! A checked policy: what the texts say once every name is resolved and every mistake excluded.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::{Serialize, Serializer};
use smc_policy_common::query::{Addr, Direction, Query};

use super::{address::AddrSet, moment::Moment, ranges::RangeSet};

/// May a connection negotiate SMC?
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// It may.
    Allow,
    /// It stays plain TCP.
    Deny,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        })
    }
}

/// The connections a rule speaks of, by who connects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Directions {
    /// Those this host opens.
    Outbound,
    /// Those this host accepts.
    Inbound,
    /// Both.
    Both,
}

impl Directions {
    /// Speaks of connections of this direction.
    pub fn contains(self, direction: Direction) -> bool {
        match self {
            Self::Both => true,
            Self::Outbound => direction == Direction::Outbound,
            Self::Inbound => direction == Direction::Inbound,
        }
    }
}

impl fmt::Display for Directions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Outbound => "outbound",
            Self::Inbound => "inbound",
            Self::Both => "both",
        })
    }
}

/// The word for a direction in the language and in every output.
pub fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Outbound => "outbound",
        Direction::Inbound => "inbound",
    }
}

pub(crate) fn serialize_direction<S: Serializer>(direction: &Direction, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(direction_name(*direction))
}

/// A stretch of one of the policy's texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Index of the file in [`Policy::files`] (and among the texts it was read from).
    pub file: usize,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
    /// Line of the first byte, from 1.
    pub line: usize,
}

/// What happens when no rule matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Defaults {
    /// To connections this host opens.
    pub outbound: Action,
    /// To connections this host accepts.
    pub inbound: Action,
}

impl Default for Defaults {
    /// Without a `[default]` everything may negotiate, as without this tool.
    fn default() -> Self {
        Self { outbound: Action::Allow, inbound: Action::Allow }
    }
}

impl Defaults {
    /// The default for connections of this direction.
    pub fn of(self, direction: Direction) -> Action {
        match direction {
            Direction::Outbound => self.outbound,
            Direction::Inbound => self.inbound,
        }
    }
}

/// One `[[rule]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its name, unique over all files.
    pub name: String,
    /// What it decides.
    pub action: Action,
    /// For which connections.
    pub direction: Directions,
    /// The listed peers, before `except`; `None`: every peer.
    pub listed: Option<Arc<AddrSet>>,
    /// What `except` carves out of them.
    pub except: Option<Arc<AddrSet>>,
    /// The peers it matches: listed and not carved out; `None`: every peer. Shared with `listed` or with another rule
    /// when equal.
    pub peers: Option<Arc<AddrSet>>,
    /// This host's addresses it matches; `None`: all.
    pub local: Option<Arc<AddrSet>>,
    /// The service ports it matches; `None`: all.
    pub ports: Option<RangeSet<u16>>,
    /// Why it exists.
    pub comment: Option<String>,
    /// From then on it matches nothing.
    pub expires: Option<Moment>,
    /// Whether that moment had passed when the policy was read.
    pub expired: bool,
    /// Exempt from the quarantine (allow rules only).
    pub trust: bool,
    /// A rule that is not enabled matches nothing.
    pub enabled: bool,
    /// Its `[[rule]]` line.
    pub place: Place,
}

impl Rule {
    /// Enabled and not expired: it may match.
    pub fn is_active(&self) -> bool {
        self.enabled && !self.expired
    }

    /// Whether it has expired since the policy was read: it still matches, until the policy is read again.
    pub fn is_overdue(&self, now: Moment) -> bool {
        self.is_active() && self.expires.is_some_and(|expires| expires <= now)
    }

    /// Does this rule decide `query` if no earlier one does?
    pub fn matches(&self, query: &Query) -> bool {
        self.is_active()
            && self.direction.contains(query.direction)
            && self.peers.as_ref().is_none_or(|peers| peers.contains(query.peer))
            && self.local.as_ref().is_none_or(|local| local.contains(query.local))
            && self.ports.as_ref().is_none_or(|ports| ports.contains(query.port))
    }
}

/// One `[[test]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Test {
    /// The other host.
    pub peer: Addr,
    /// The service port.
    pub port: Option<u16>,
    /// This host's address.
    pub local: Option<Addr>,
    /// Who connects.
    pub direction: Option<Direction>,
    /// The expected action.
    pub expect: Action,
    /// Name of the rule that must decide.
    pub rule: Option<String>,
    /// Its `[[test]]` line.
    pub place: Place,
    /// The value of `expect`.
    pub expect_place: Place,
    /// The value of `rule`, else that of `expect`.
    pub rule_place: Place,
}

/// A whole policy. Rules are in the order in which they are tried.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// The files it was read from, in order.
    pub files: Vec<PathBuf>,
    /// When no rule matches.
    pub defaults: Defaults,
    /// The rules; the first match wins.
    pub rules: Vec<Rule>,
    /// What it must decide.
    pub tests: Vec<Test>,
}

impl Policy {
    /// The file of a place.
    pub fn file(&self, place: Place) -> &Path {
        self.files.get(place.file).map_or(Path::new(""), PathBuf::as_path)
    }

    /// `file:line` of a rule.
    pub fn location(&self, rule: &Rule) -> String {
        format!("{}:{}", self.file(rule.place).display(), rule.place.line)
    }

    /// The rule of this name and its index.
    pub fn rule(&self, name: &str) -> Option<(usize, &Rule)> {
        self.rules.iter().enumerate().find(|(_, rule)| rule.name == name)
    }
}
