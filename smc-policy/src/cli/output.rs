//! Standard output and error: colour only on a terminal, a broken pipe is silent, JSON is one document.

use std::{
    env,
    io::{self, IsTerminal, Write},
};

use serde::Serialize;

use super::outcome::Failure;
use crate::policy::Record;

/// Version of every JSON document.
const JSON_VERSION: u32 = 1;

/// Where a verb prints.
#[derive(Debug)]
pub(super) struct Output {
    json: bool,
    colour_out: bool,
    colour_err: bool,
}

/// How a piece of text is to look on a terminal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Style {
    /// A good answer.
    Good,
    /// A bad answer.
    Bad,
    /// Worth a look.
    Note,
    /// A heading.
    Bold,
    /// Less important.
    Dim,
}

/// A document, or a line of a list that does not end, with its version.
#[derive(Serialize)]
pub(super) struct Document<'a, T> {
    version: u32,
    #[serde(flatten)]
    data: &'a T,
}

impl<'a, T> Document<'a, T> {
    pub(super) fn new(data: &'a T) -> Self {
        Self { version: JSON_VERSION, data }
    }
}

#[derive(Serialize)]
struct ErrorDocument<'a> {
    error: &'a str,
    exit: u8,
    findings: &'a [Record],
}

impl Output {
    pub(super) fn new(json: bool) -> Self {
        // https://no-color.org
        let wanted = env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
        Self {
            json,
            colour_out: wanted && io::stdout().is_terminal(),
            colour_err: wanted && io::stderr().is_terminal(),
        }
    }

    /// Is JSON asked for?
    pub(super) fn is_json(&self) -> bool {
        self.json
    }

    /// May standard error be coloured?
    pub(super) fn colour_err(&self) -> bool {
        self.colour_err
    }

    /// `text` in a style, if standard output is a terminal.
    pub(super) fn paint(&self, style: Style, text: &str) -> String {
        if self.colour_out { paint(style, text) } else { text.to_owned() }
    }

    /// Prints lines for people; nothing when JSON is asked for.
    pub(super) fn text(&mut self, text: &str) {
        if !self.json && !text.is_empty() {
            self.write(text.trim_end_matches('\n'));
        }
    }

    /// Prints the JSON document, if asked for.
    pub(super) fn json<T: Serialize>(&mut self, data: &T) {
        if self.json {
            match serde_json::to_string_pretty(&Document::new(data)) {
                Ok(text) => self.write(&text),
                Err(e) => self.note(&format!("cannot print JSON: {e}")),
            }
        }
    }

    /// Prints what is data in itself, whether JSON is asked for or not.
    pub(super) fn data(&mut self, text: &str) {
        self.write(text.trim_end_matches('\n'));
    }

    fn write(&mut self, text: &str) {
        // A reader that has seen enough (`| head`) is no error; what else can be said about a full disk has no place
        // to be said.
        let mut out = io::stdout().lock();
        let _ = writeln!(out, "{text}").and_then(|()| out.flush());
    }

    /// A word to people on standard error: a warning, that something is waited for.
    pub(super) fn note(&self, text: &str) {
        let _ = writeln!(io::stderr().lock(), "{text}");
    }

    /// A warning on standard error.
    pub(super) fn warn(&self, text: &str) {
        let word = if self.colour_err { paint(Style::Note, "warning") } else { "warning".to_owned() };
        self.note(&format!("{word}: {text}"));
    }

    /// The verb failed: one message, and the same as JSON where that was asked for.
    pub(super) fn fail(&mut self, failure: &Failure) {
        let word = if self.colour_err { paint(Style::Bad, "error") } else { "error".to_owned() };
        let Failure { exit, message, findings } = failure;
        self.note(&format!("{word}: {message}"));
        self.json(&ErrorDocument { error: message, exit: *exit as u8, findings });
    }
}

fn paint(style: Style, text: &str) -> String {
    let code = match style {
        Style::Good => "32",
        Style::Bad => "31;1",
        Style::Note => "33",
        Style::Bold => "1",
        Style::Dim => "2",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

/// Lines of aligned columns, two spaces apart. `right`: the columns that hold numbers.
pub(super) fn columns(rows: &[Vec<String>], right: &[usize]) -> String {
    let width =
        |column: usize| rows.iter().filter_map(|r| r.get(column)).map(|c| visible(c)).max().unwrap_or(0);
    let widths: Vec<usize> = (0..rows.iter().map(Vec::len).max().unwrap_or(0)).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let mut line = String::new();
        for (i, cell) in row.iter().enumerate() {
            let padding = " ".repeat(widths[i].saturating_sub(visible(cell)));
            if i > 0 {
                line.push_str("  ");
            }
            if right.contains(&i) {
                line.push_str(&padding);
                line.push_str(cell);
            } else {
                line.push_str(cell);
                line.push_str(&padding);
            }
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// Characters on the screen: colour codes take no room.
fn visible(cell: &str) -> usize {
    let mut count = 0;
    let mut chars = cell.chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            chars.by_ref().find(|c| *c == 'm');
        } else {
            count += 1;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_align() {
        let rows = [vec!["a".into(), "1".into(), "x".into()], vec!["long".into(), "100".into(), "y".into()]];
        assert_eq!(columns(&rows, &[1]), "a       1  x\nlong  100  y\n");
    }

    #[test]
    fn colour_takes_no_room() {
        assert_eq!(visible(&paint(Style::Bad, "deny")), 4);
    }
}
