//! Findings about a policy: typed, tied to a stretch of a text, printed like a compiler does or as data.

use std::{fmt, ops::Range, path::PathBuf};

use annotate_snippets::{Annotation, AnnotationKind, Level, Renderer, Snippet};
use serde::{Deserialize, Serialize};

use super::model::Place;

/// What a file is to a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SourceKind {
    /// A TOML text with rules.
    #[default]
    Policy,
    /// A `peers_file`: a list of addresses that a rule names.
    List,
    /// A `peers_file` that could not be read; its text says why.
    Unread,
}

/// A file's text and where it came from. The policy core reads no files itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Where it came from. A `peers_file` is found by it, and it stands in messages.
    pub path: PathBuf,
    /// Its whole text.
    pub text: String,
    /// What it is.
    pub kind: SourceKind,
}

impl SourceFile {
    /// A policy file.
    pub fn policy(path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        Self { path: path.into(), text: text.into(), kind: SourceKind::Policy }
    }

    /// A `peers_file`.
    pub fn list(path: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        Self { path: path.into(), text: text.into(), kind: SourceKind::List }
    }
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The policy is not usable.
    Error,
    /// It is usable but probably not what was meant.
    Warning,
}

/// What kind of finding; the words are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The text is no TOML.
    Syntax,
    /// A key the language does not have.
    UnknownKey,
    /// A required key is missing.
    MissingKey,
    /// A value of another type than the key takes.
    WrongType,
    /// A value of the right type that means nothing here.
    BadValue,
    /// `version` is not one this program reads.
    Version,
    /// An address, network or range that cannot be read.
    Address,
    /// A port or port range that cannot be read.
    Port,
    /// A name of characters that names may not have.
    Name,
    /// Defined a second time.
    Duplicate,
    /// Refers to something that does not exist, or to itself.
    Reference,
    /// Two keys that exclude each other.
    Conflict,
    /// Lint: the rule, or the pattern of devices, can never match.
    NeverMatches,
    /// Lint: peers listed twice in one rule.
    DuplicatePeers,
    /// Lint: ports listed twice in one rule.
    DuplicatePorts,
    /// Lint: a set without addresses.
    EmptySet,
    /// Lint: a set no rule uses.
    UnusedSet,
    /// Lint: `except` carves out nothing.
    UselessExcept,
    /// A `peers_file` that cannot be read.
    Unreadable,
    /// Lint: a rule whose `expires` has passed.
    Expired,
    /// Lint: a test names a rule that is not enabled.
    DisabledRule,
    /// Lint: a pattern of devices that others of its list cover.
    DuplicatePatterns,
    /// Lint: a character that stands for itself in a pattern, but is a wildcard elsewhere or part of no name.
    PlainCharacter,
    /// Lint: a setting that the hook asked for does not use.
    UnusedSetting,
    /// A `[[test]]` whose expectation does not hold.
    TestFailed,
    /// A `[[test]]` that must say more: the answer depends on what it leaves out.
    TestAmbiguous,
    /// The policy is too large for the kernel's tables.
    TooLarge,
}

impl Code {
    /// The stable word for it, as in `error[unknown-key]`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Syntax => "syntax",
            Self::UnknownKey => "unknown-key",
            Self::MissingKey => "missing-key",
            Self::WrongType => "wrong-type",
            Self::BadValue => "bad-value",
            Self::Version => "version",
            Self::Address => "address",
            Self::Port => "port",
            Self::Name => "name",
            Self::Duplicate => "duplicate",
            Self::Reference => "reference",
            Self::Conflict => "conflict",
            Self::NeverMatches => "never-matches",
            Self::DuplicatePeers => "duplicate-peers",
            Self::DuplicatePorts => "duplicate-ports",
            Self::EmptySet => "empty-set",
            Self::UnusedSet => "unused-set",
            Self::UselessExcept => "useless-except",
            Self::Unreadable => "unreadable",
            Self::Expired => "expired",
            Self::DisabledRule => "disabled-rule",
            Self::DuplicatePatterns => "duplicate-patterns",
            Self::PlainCharacter => "plain-character",
            Self::UnusedSetting => "unused-setting",
            Self::TestFailed => "test-failed",
            Self::TestAmbiguous => "test-ambiguous",
            Self::TooLarge => "too-large",
        }
    }

    /// A lint: the policy can be used as it is, unless the caller is strict.
    pub fn is_lint(self) -> bool {
        matches!(
            self,
            Self::NeverMatches
                | Self::DuplicatePeers
                | Self::DuplicatePorts
                | Self::EmptySet
                | Self::UnusedSet
                | Self::UselessExcept
                | Self::Expired
                | Self::DisabledRule
                | Self::DuplicatePatterns
                | Self::PlainCharacter
                | Self::UnusedSetting
        )
    }

    /// A test that failed, rather than a policy that cannot be read.
    pub fn is_test(self) -> bool {
        matches!(self, Self::TestFailed | Self::TestAmbiguous)
    }
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// How bad it is.
    pub severity: Severity,
    /// What kind of finding.
    pub code: Code,
    /// Where.
    pub place: Place,
    /// What is wrong, one line.
    pub message: String,
    /// What to write beside the underlined text.
    pub label: Option<String>,
    /// Other places that belong to it, with a word on each.
    pub related: Vec<(Place, String)>,
    /// What to write instead, or why.
    pub help: Option<String>,
}

impl Diagnostic {
    /// An error.
    pub fn error(code: Code, place: Place, message: impl Into<String>) -> Self {
        Self {
            severity: Severity::Error,
            code,
            place,
            message: message.into(),
            label: None,
            related: Vec::new(),
            help: None,
        }
    }

    /// A lint.
    pub fn warning(code: Code, place: Place, message: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(code, place, message) }
    }

    /// With words beside the underlined text.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// With what to write instead.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// With another place that belongs to it.
    #[must_use]
    pub fn related(mut self, place: Place, label: impl Into<String>) -> Self {
        self.related.push((place, label.into()));
        self
    }

    /// The finding as data. `files` are the texts that were read.
    pub fn record(&self, files: &[SourceFile]) -> Record {
        let file = files.get(self.place.file);
        Record {
            file: file.map(|file| file.path.clone()).unwrap_or_default(),
            line: self.place.line,
            column: file.map_or(1, |file| column(&file.text, self.place.start)),
            severity: self.severity,
            code: self.code,
            message: self.message.clone(),
            label: self.label.clone(),
            help: self.help.clone(),
        }
    }
}

/// A finding as data, for `--json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Record {
    /// The file.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: usize,
    /// The character in the line, from 1.
    pub column: usize,
    /// How bad it is.
    pub severity: Severity,
    /// What kind of finding.
    pub code: Code,
    /// What is wrong.
    pub message: String,
    /// What stands beside the underlined text.
    pub label: Option<String>,
    /// What to write instead.
    pub help: Option<String>,
}

/// `file:line:column: severity: message`, without the text.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
        };
        let Self { line, column, message, .. } = self;
        write!(f, "{}:{line}:{column}: {severity}: {message}", self.file.display())
    }
}

/// Finds the line of a byte without reading the text again.
#[derive(Debug)]
pub(crate) struct Lines {
    starts: Vec<usize>,
}

impl Lines {
    pub(crate) fn new(text: &str) -> Self {
        let ends = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
        Self { starts: std::iter::once(0).chain(ends.map(|(at, _)| at + 1)).collect() }
    }

    /// The line of byte `at`, from 1.
    pub(crate) fn line(&self, at: usize) -> usize {
        self.starts.partition_point(|start| *start <= at)
    }

    /// Where line `line` (from 1) begins.
    fn start(&self, line: usize) -> Option<usize> {
        self.starts.get(line.checked_sub(1)?).copied()
    }
}

fn column(text: &str, at: usize) -> usize {
    let at = text.floor_char_boundary(at);
    let start = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
    text[start..at].chars().count() + 1
}

/// Puts findings in the order of the files.
pub fn sort(diagnostics: &mut [Diagnostic]) {
    diagnostics.sort_by_key(|diagnostic| (diagnostic.place.file, diagnostic.place.start));
}

/// Prints findings as a compiler does: the line, the text underlined, what to write instead.
pub fn render(diagnostics: &[Diagnostic], files: &[SourceFile], colour: bool) -> String {
    let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
    let lines: Vec<Lines> = files.iter().map(|file| Lines::new(&file.text)).collect();
    let mut out = String::new();
    for diagnostic in diagnostics {
        let level = match diagnostic.severity {
            Severity::Error => Level::ERROR,
            Severity::Warning => Level::WARNING,
        };
        let mut group = level
            .primary_title(diagnostic.message.as_str())
            .id(diagnostic.code.word())
            .elements(snippets(diagnostic, files, &lines));
        if let Some(help) = &diagnostic.help {
            group = group.element(Level::HELP.message(help.as_str()));
        }
        out.push_str(&renderer.render(&[group]));
        out.push_str("\n\n");
    }
    out.truncate(out.trim_end().len());
    out
}

/// Places of one file this near to each other are shown in one snippet; the lines between are left out there.
const ONE_SNIPPET: usize = 1 << 16;

/// The places with their lines. Only these lines are given to the renderer, which would otherwise go through the whole
/// text for every finding.
fn snippets<'a>(
    diagnostic: &'a Diagnostic,
    files: &'a [SourceFile],
    lines: &[Lines],
) -> Vec<Snippet<'a, Annotation<'a>>> {
    let mut places = vec![(diagnostic.place, AnnotationKind::Primary, diagnostic.label.as_deref())];
    for (place, label) in &diagnostic.related {
        places.push((*place, AnnotationKind::Context, Some(label.as_str())));
    }
    let mut snippets: Vec<Excerpt<'_>> = Vec::new();
    for (place, kind, label) in places {
        let (Some(file), Some(lines)) = (files.get(place.file), lines.get(place.file)) else { continue };
        let start = file.text.floor_char_boundary(place.start);
        // Several lines underlined show nothing: the first one names the place.
        let line = lines.line(start);
        let line_start = lines.start(line).unwrap_or(0);
        let next = lines.start(line + 1).unwrap_or(file.text.len());
        let line_end = line_start + file.text[line_start..next].trim_end_matches(['\r', '\n']).len();
        let start = start.min(line_end);
        let end = file.text.ceil_char_boundary(place.end).clamp(start, line_end);
        let near = |known: &&mut Excerpt<'_>| {
            known.file == place.file && known.end.max(line_end) - known.start.min(line_start) < ONE_SNIPPET
        };
        match snippets.iter_mut().find(near) {
            Some(known) => {
                known.start = known.start.min(line_start);
                known.end = known.end.max(line_end);
                known.marks.push((start..end, kind, label));
            }
            None => snippets.push(Excerpt {
                file: place.file,
                start: line_start,
                end: line_end,
                marks: vec![(start..end, kind, label)],
            }),
        }
    }
    let shown = snippets.into_iter().map(|excerpt| {
        let file = &files[excerpt.file];
        let marks = excerpt.marks.into_iter().map(|(span, kind, label)| {
            kind.span(span.start - excerpt.start..span.end - excerpt.start).label(label)
        });
        Snippet::source(&file.text[excerpt.start..excerpt.end])
            .path(file.path.to_string_lossy())
            .line_start(lines[excerpt.file].line(excerpt.start))
            .annotations(marks)
    });
    shown.collect()
}

/// Whole lines of a file and what is marked there.
struct Excerpt<'a> {
    file: usize,
    start: usize,
    end: usize,
    marks: Vec<(Range<usize>, AnnotationKind, Option<&'a str>)>,
}
