//! A TOML text as typed values: every getter reports what is wrong and goes on.

use std::{collections::BTreeMap, ops::Range};

use toml::{
    Spanned,
    de::{DeTable, DeValue, Error},
};

use super::{
    diagnostic::{Code, Diagnostic, Lines},
    model::Place,
};

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(super) struct At<T> {
    pub(super) value: T,
    pub(super) place: Place,
}

/// Reads one text; collects what is wrong with it.
pub(super) struct Reader {
    file: usize,
    lines: Lines,
    /// Where the text is no TOML: what was recovered there is not judged a second time.
    broken: Vec<Range<usize>>,
    /// The findings so far.
    pub(super) found: Vec<Diagnostic>,
}

impl Reader {
    /// Parses the text; syntax errors are recorded, the rest of the text is there.
    pub(super) fn parse(file: usize, text: &str) -> (Self, Spanned<DeTable<'_>>) {
        let (table, errors) = DeTable::parse_recoverable(text);
        let mut reader = Self { file, lines: Lines::new(text), broken: Vec::new(), found: Vec::new() };
        reader.syntax(&table, errors, text.len());
        (reader, table)
    }

    /// Records syntax errors, one a line: the ones after it on a line follow from the first. An array that is never
    /// closed swallows the rest of the text, so it is the only error there, and stands where the array begins.
    fn syntax(&mut self, table: &Spanned<DeTable<'_>>, errors: Vec<Error>, length: usize) {
        let mut unclosed = None;
        if let Some(error) = errors.iter().find(|error| error.message().starts_with("unclosed ")) {
            let end = error.span().map_or(length, |span| span.start);
            unclosed = table.get_ref().iter().find_map(|(_, value)| unclosed_at(value, end));
        }
        let mut by_line = BTreeMap::new();
        for error in errors {
            let span = error.span().unwrap_or(0..0);
            let span = span.start.min(length)..span.end.clamp(span.start.min(length), length);
            if unclosed.is_some_and(|start| span.start >= start) {
                continue;
            }
            let line = self.lines.line(span.start);
            let first = by_line.entry(line).or_insert_with(|| (span.clone(), error.message().to_owned()));
            if span.start < first.0.start {
                *first = (span, error.message().to_owned());
            }
        }
        for (span, message) in by_line.into_values() {
            self.broken.push(span.clone());
            self.found.push(Diagnostic::error(Code::Syntax, self.place(span), message));
        }
        if let Some(start) = unclosed {
            self.broken.push(start..length);
            let place = self.place(start..start + 1);
            self.found.push(
                Diagnostic::error(Code::Syntax, place, "this bracket is never closed")
                    .help("every `[` needs its `]`, every `{` its `}`"),
            );
        }
    }

    /// Some of the text is no TOML: something may seem to be missing only because it could not be read.
    pub(super) fn is_broken(&self) -> bool {
        !self.broken.is_empty()
    }

    pub(super) fn place(&self, span: Range<usize>) -> Place {
        Place { file: self.file, start: span.start, end: span.end, line: self.lines.line(span.start) }
    }

    pub(super) fn at<T>(&self, span: Range<usize>, value: T) -> At<T> {
        At { value, place: self.place(span) }
    }

    /// Records a finding, unless the text there is no TOML anyway.
    pub(super) fn report(&mut self, finding: Diagnostic) {
        let (start, end) = (finding.place.start, finding.place.end);
        if !self.broken.iter().any(|broken| start <= broken.end && broken.start <= end) {
            self.found.push(finding);
        }
    }

    /// Reports every key of `table` that is not one of `known`.
    pub(super) fn only(&mut self, table: &DeTable<'_>, known: &[&str], of: &str) {
        self.only_or(table, known, of, |_| None);
    }

    /// As [`Self::only`]; `elsewhere` says where a key belongs that is known, but not here.
    pub(super) fn only_or(
        &mut self,
        table: &DeTable<'_>,
        known: &[&str],
        of: &str,
        elsewhere: impl Fn(&str) -> Option<String>,
    ) {
        for (key, _) in table.iter() {
            if !known.contains(&key.get_ref().as_ref()) {
                let message = format!("{of} has no key `{}`", key.get_ref().escape_debug());
                let finding = Diagnostic::error(Code::UnknownKey, self.place(key.span()), message);
                let near = || nearest(key.get_ref(), known.iter().copied());
                self.report(match elsewhere(key.get_ref()) {
                    Some(help) => finding.help(help),
                    None => match near() {
                        Some(near) => finding.help(format!("did you mean `{near}`?")),
                        None => finding.help(format!("its keys are {}", known.join(", "))),
                    },
                });
            }
        }
    }

    pub(super) fn wrong_type(
        &mut self,
        subject: &str,
        value: &Spanned<DeValue<'_>>,
        wanted: &str,
        help: String,
    ) {
        let found = match value.get_ref() {
            DeValue::String(_) => "a string",
            DeValue::Integer(_) => "an integer",
            DeValue::Float(_) => "a float",
            DeValue::Boolean(_) => "a boolean",
            DeValue::Datetime(_) => "a date",
            DeValue::Array(_) => "an array",
            DeValue::Table(_) => "a table",
        };
        let message = format!("{subject} is {wanted}, not {found}");
        let finding = Diagnostic::error(Code::WrongType, self.place(value.span()), message);
        self.report(if help.is_empty() { finding } else { finding.help(help) });
    }

    pub(super) fn table<'t, 'i>(
        &mut self,
        parent: &'t DeTable<'i>,
        key: &str,
    ) -> Option<(&'t DeTable<'i>, Range<usize>)> {
        let value = parent.get(key)?;
        let table = value.get_ref().as_table();
        if table.is_none() {
            self.wrong_type(
                &format!("`{key}`"),
                value,
                "a table",
                format!("write [{key}] on a line of its own"),
            );
        }
        Some((table?, value.span()))
    }

    /// The tables of `[[key]]`.
    pub(super) fn tables<'t, 'i>(
        &mut self,
        parent: &'t DeTable<'i>,
        key: &str,
    ) -> Vec<(&'t DeTable<'i>, Range<usize>)> {
        let Some(value) = parent.get(key) else { return Vec::new() };
        let help = format!("write [[{key}]], in double brackets, before each one");
        let Some(array) = value.get_ref().as_array() else {
            self.wrong_type(&format!("`{key}`"), value, "a list of tables", help);
            return Vec::new();
        };
        let mut tables = Vec::with_capacity(array.len());
        for item in array.iter() {
            match item.get_ref().as_table() {
                Some(table) => tables.push((table, item.span())),
                None => self.wrong_type(&format!("`{key}`"), item, "a list of tables", help.clone()),
            }
        }
        tables
    }

    /// Reports a missing key at the table's header.
    pub(super) fn missing(&mut self, header: Range<usize>, message: String, help: &str) {
        if !self.is_broken() {
            self.report(Diagnostic::error(Code::MissingKey, self.place(header), message).help(help));
        }
    }

    pub(super) fn string(&mut self, table: &DeTable<'_>, key: &str) -> Option<At<String>> {
        let value = table.get(key)?;
        match value.get_ref().as_str() {
            Some(text) => Some(self.at(value.span(), text.to_owned())),
            None => {
                self.wrong_type(&format!("`{key}`"), value, "a string", String::new());
                None
            }
        }
    }

    pub(super) fn boolean(&mut self, table: &DeTable<'_>, key: &str) -> Option<At<bool>> {
        let value = table.get(key)?;
        match value.get_ref().as_bool() {
            Some(boolean) => Some(self.at(value.span(), boolean)),
            None => {
                let help = if value.get_ref().is_str() { "without quotes" } else { "" };
                self.wrong_type(&format!("`{key}`"), value, "true or false", help.to_owned());
                None
            }
        }
    }

    pub(super) fn integer(&mut self, table: &DeTable<'_>, key: &str) -> Option<At<i128>> {
        let value = table.get(key)?;
        match number(value.get_ref()) {
            Some(number) => Some(self.at(value.span(), number)),
            None => {
                self.wrong_type(&format!("`{key}`"), value, "a number", String::new());
                None
            }
        }
    }

    /// A string out of a few words.
    pub(super) fn word<T: Copy>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        words: &[(&str, T)],
    ) -> Option<At<T>> {
        let value = table.get(key)?;
        let all: Vec<String> = words.iter().map(|(word, _)| format!("\"{word}\"")).collect();
        let all = all.join(" or ");
        let Some(text) = value.get_ref().as_str() else {
            self.wrong_type(&format!("`{key}`"), value, &all, String::new());
            return None;
        };
        if let Some((_, known)) = words.iter().find(|(word, _)| *word == text) {
            return Some(self.at(value.span(), *known));
        }
        let message = format!("`{key}` is {all}, not \"{}\"", text.escape_debug());
        let finding = Diagnostic::error(Code::BadValue, self.place(value.span()), message);
        self.report(match nearest(text, words.iter().map(|(word, _)| *word)) {
            Some(near) => finding.help(format!("did you mean \"{near}\"?")),
            None => finding,
        });
        None
    }

    /// The elements of an array that is not empty.
    pub(super) fn elements<'t, 'i>(
        &mut self,
        table: &'t DeTable<'i>,
        key: &str,
    ) -> Option<At<&'t [Spanned<DeValue<'i>>]>> {
        let value = table.get(key)?;
        let Some(array) = value.get_ref().as_array() else {
            let help = match value.get_ref() {
                DeValue::String(text) => format!("write {key} = [\"{}\"]", text.escape_debug()),
                DeValue::Integer(number) => format!("write {key} = [{number}]"),
                _ => String::new(),
            };
            self.wrong_type(&format!("`{key}`"), value, "a list", help);
            return None;
        };
        Some(self.at(value.span(), array))
    }

    pub(super) fn element_type(&mut self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        self.wrong_type(&format!("an element of `{key}`"), value, wanted, String::new());
    }
}

/// Where the outermost array or inline table begins that reaches to `end` without being closed.
fn unclosed_at(value: &Spanned<DeValue<'_>>, end: usize) -> Option<usize> {
    match value.get_ref() {
        DeValue::Array(array) => {
            // An array of tables spans its header only.
            if value.span().end == end && !array.iter().any(|item| item.span().start == value.span().start) {
                return Some(value.span().start);
            }
            array.iter().find_map(|item| unclosed_at(item, end))
        }
        DeValue::Table(table) => table.iter().find_map(|(_, value)| unclosed_at(value, end)),
        _ => None,
    }
}

/// A TOML integer; `None` for another type or beyond 128 bits.
pub(super) fn number(value: &DeValue<'_>) -> Option<i128> {
    let integer = value.as_integer()?;
    i128::from_str_radix(integer.as_str(), integer.radix()).ok()
}

/// The known word that `text` is most likely a misspelling of.
pub(super) fn nearest<'a>(text: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // A distance between long texts takes the product of their lengths.
    if text.len() > 64 {
        return None;
    }
    let text = text.to_lowercase();
    let scored = known.map(|word| (strsim::damerau_levenshtein(&text, &word.to_lowercase()), word));
    let (distance, word) = scored.min()?;
    (distance <= 1.max(text.chars().count().max(word.chars().count()) / 3)).then_some(word)
}
