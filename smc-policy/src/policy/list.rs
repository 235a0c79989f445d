//! A `peers_file`: one address, network or range a line, `#` begins a comment.

use super::{
    address::{AddrRange, AddrSet},
    diagnostic::{Code, Diagnostic},
    model::Place,
    parse::{self, ParseError},
};

/// So many wrong lines of a list are told.
const MOST: usize = 20;

/// One entry and where it stands.
type Entry<K> = (K, K, u32);

/// A list, read.
#[derive(Debug, Default)]
pub(super) struct List {
    v4: Vec<Entry<u32>>,
    v6: Vec<Entry<u128>>,
    /// Wrong lines.
    pub(super) found: Vec<Diagnostic>,
}

/// Reads the list that is file number `file`.
pub(super) fn read(file: usize, text: &str) -> List {
    let mut list = List::default();
    let (mut start, mut wrong) = (0, 0);
    // Editors of some systems put it there.
    let body = text.strip_prefix('\u{feff}').unwrap_or(text);
    let skipped = text.len() - body.len();
    for (number, line) in body.split('\n').enumerate() {
        let entry = line.split_once('#').map_or(line, |(before, _)| before).trim();
        if !entry.is_empty() {
            match parse::addresses(entry) {
                Ok(AddrRange::V4(lo, hi)) => list.v4.push((lo, hi, number as u32)),
                Ok(AddrRange::V6(lo, hi)) => list.v6.push((lo, hi, number as u32)),
                Err(error) => {
                    wrong += 1;
                    if wrong <= MOST {
                        let from = skipped + start + (line.len() - line.trim_start().len());
                        let place = Place { file, start: from, end: from + entry.len(), line: number + 1 };
                        list.found.push(wrong_entry(place, entry, error));
                    }
                }
            }
        }
        start += line.len() + 1;
    }
    if let (Some(last), true) = (list.found.last_mut(), wrong > MOST) {
        last.help = Some(format!("{} more wrong lines in this list", wrong - MOST));
    }
    list
}

fn wrong_entry(place: Place, entry: &str, error: ParseError) -> Diagnostic {
    let finding = Diagnostic::error(Code::Address, place, error.message);
    if entry.starts_with('@') {
        finding.help("a list has addresses, networks and ranges only: name the set in the rule's `peers`")
    } else if entry.split_whitespace().nth(1).is_some() || entry.contains([',', ';']) {
        finding.help("one address, network or range a line; a comment begins with #")
    } else if error.help.is_empty() {
        finding
    } else {
        finding.help(error.help)
    }
}

impl List {
    /// The addresses. Second: how many entries others cover, and the first such line (from 1).
    pub(super) fn addresses(mut self) -> (AddrSet, Option<(usize, usize)>) {
        let (a, b) = (covered(&mut self.v4), covered(&mut self.v6));
        let bounds4 = self.v4.into_iter().map(|(lo, hi, _)| (lo, hi)).collect();
        let bounds6 = self.v6.into_iter().map(|(lo, hi, _)| (lo, hi)).collect();
        let first = [a.1, b.1].into_iter().flatten().min();
        (AddrSet::new(bounds4, bounds6), first.map(|line| (a.0 + b.0, line as usize + 1)))
    }
}

/// Sorts; how many are within another one, and the first line of those (from 0). Of equals the later line counts.
fn covered<K: Copy + Ord>(entries: &mut [Entry<K>]) -> (usize, Option<u32>) {
    entries.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(b.1.cmp(&a.1)).then(a.2.cmp(&b.2)));
    let (mut number, mut first, mut end) = (0, None::<u32>, None::<K>);
    for (_, last, line) in entries.iter() {
        if end.is_some_and(|end| *last <= end) {
            number += 1;
            first = Some(first.map_or(*line, |first| first.min(*line)));
        } else {
            end = Some(*last);
        }
    }
    (number, first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::{SourceFile, arbitrary, render};

    fn said(text: &str) -> String {
        let file = SourceFile::list("lists/cdn.txt", text);
        render(&read(0, text).found, &[file], false)
    }

    #[test]
    fn comments_empty_lines_and_every_form() {
        let text = "\u{feff}# the CDN\r\n\r\n192.0.2.1 # one\r\n  10.0.0.0/8\n2001:db8::1-2001:db8::f\n#\n::ffff:1.2.3.4";
        let list = read(3, text);
        assert!(list.found.is_empty(), "{:?}", list.found);
        let (addresses, covered) = list.addresses();
        let ranges: Vec<_> = addresses.ranges().map(|range| range.to_string()).collect();
        assert_eq!(ranges, ["1.2.3.4", "10.0.0.0/8", "192.0.2.1", "2001:db8::1-2001:db8::f"]);
        assert_eq!(covered, None);
        assert!(read(0, "").addresses().0.is_empty());
    }

    #[test]
    fn wrong_lines_are_named() {
        let text = "192.0.2.1\n\t10.0.0.1/8 # net\nexample.com\n@vpc\n192.0.2.1, 192.0.2.2\n";
        insta::assert_snapshot!(said(text), @r"
        error[address]: 10.0.0.1/8 has host bits set
         --> lists/cdn.txt:2:2
          |
        2 |     10.0.0.1/8 # net
          |     ^^^^^^^^^^
          |
          = help: did you mean 10.0.0.0/8? a single address is written 10.0.0.1

        error[address]: `example.com` is a host name
         --> lists/cdn.txt:3:1
          |
        3 | example.com
          | ^^^^^^^^^^^
          |
          = help: a policy must not depend on DNS: write its addresses, or a list of them under [sets]

        error[address]: `@vpc` is not an address, a network or a range
         --> lists/cdn.txt:4:1
          |
        4 | @vpc
          | ^^^^
          |
          = help: a list has addresses, networks and ranges only: name the set in the rule's `peers`

        error[address]: `192.0.2.1, 192.0.2.2` is not an address, a network or a range
         --> lists/cdn.txt:5:1
          |
        5 | 192.0.2.1, 192.0.2.2
          | ^^^^^^^^^^^^^^^^^^^^
          |
          = help: one address, network or range a line; a comment begins with #
        ");
    }

    #[test]
    fn a_thousand_wrong_lines_are_not_all_told() {
        let list = read(0, &"x\n".repeat(1000));
        assert_eq!(list.found.len(), MOST);
        assert_eq!(list.found[MOST - 1].help.as_deref(), Some("980 more wrong lines in this list"));
    }

    #[test]
    fn entries_within_others_are_counted() {
        let covered = |text| read(0, text).addresses().1;
        assert_eq!(covered("10.0.0.0/8\n10.1.0.0/16\n::1\n10.0.0.0/8\n"), Some((2, 2)));
        assert_eq!(covered("10.1.0.0/16\n10.0.0.0/8\n::1\n::1\n"), Some((2, 1)));
        assert_eq!(covered("10.0.0.0/9\n10.128.0.0/9"), None);
    }

    proptest! {
        /// Any text: no panic, and places lie within it.
        #[test]
        fn places_lie_within_the_text(text in "[0-9a-f:./# \n\r\té@x-]{0,80}") {
            let list = read(0, &text);
            for finding in &list.found {
                prop_assert!(text.get(finding.place.start..finding.place.end).is_some(), "{finding:?}");
            }
        }

        /// A list is what its lines are.
        #[test]
        fn a_list_is_the_union_of_its_lines(seed: u64) {
            let mut random = arbitrary::Random::new(seed);
            let lines: Vec<String> = (0..20).map(|_| arbitrary::element(&mut random)).collect();
            let list = read(0, &lines.join("\n"));
            prop_assert!(list.found.is_empty());
            let (addresses, _) = list.addresses();
            let (mut v4, mut v6) = (Vec::new(), Vec::new());
            for line in &lines {
                match parse::addresses(line).unwrap() {
                    AddrRange::V4(lo, hi) => v4.push((lo, hi)),
                    AddrRange::V6(lo, hi) => v6.push((lo, hi)),
                }
            }
            prop_assert_eq!(addresses, AddrSet::new(v4, v6));
        }
    }
}
