//! Patterns of device names.

/// The longest name of a device (`IFNAMSIZ` counts the zero at its end, include/uapi/linux/if.h).
const LONGEST: usize = 15;

/// `*` is any number of bytes, `?` is one.
pub(super) fn matches(pattern: &str, name: &str) -> bool {
    matches_by(pattern.as_bytes(), name.as_bytes(), |_| true)
}

/// Does every name that `inner` matches match `outer` too? False where that takes more than comparing byte by byte.
pub(super) fn covers(outer: &str, inner: &str) -> bool {
    // A `*` of the inner one may be no byte or many: only a `*` covers it.
    matches_by(outer.as_bytes(), inner.as_bytes(), |byte| byte != b'*')
}

/// `one`: which bytes a `?` matches. On a mismatch only the last `*` takes a byte more: whatever an earlier one could
/// take, the last one can too.
fn matches_by(pattern: &[u8], name: &[u8], one: impl Fn(u8) -> bool) -> bool {
    let (mut p, mut n) = (0, 0);
    // Where the pattern goes on after the last `*`, and how far that one reaches.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                p += 1;
                star = Some((p, n));
            }
            Some(byte) if *byte == name[n] || (*byte == b'?' && one(name[n])) => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((after, taken)) = &mut star else { return false };
                *taken += 1;
                (p, n) = (*after, *taken);
            }
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// What is wrong with a pattern, and what to write instead. The names that devices can have: `dev_valid_name`,
/// net/core/dev.c.
pub(super) fn impossible(text: &str) -> Option<(String, String)> {
    let cannot = || format!("no device can be named \"{}\"", text.escape_debug());
    // As the kernel's isspace (lib/ctype.c), which takes the byte 0xa0 for a space.
    let is_space = |byte: u8| matches!(byte, b'\t'..=b'\r' | b' ' | 0xa0);
    if text.is_empty() {
        Some(("the pattern is empty".to_owned(), "\"*\" is every device".to_owned()))
    } else if text.bytes().any(is_space) {
        let names: Vec<&str> =
            text.split(|c: char| c == ',' || c.is_whitespace()).filter(|n| !n.is_empty()).collect();
        // What is left as it is has a byte of another character that the kernel takes for a space.
        let good = |name: &&str| *name != text && impossible(name).is_none();
        let good = !names.is_empty() && names.iter().all(good);
        let help = match names.len() {
            1 if good => format!("without spaces: {}", quoted(names)),
            _ if good => format!("one name an element: {}", quoted(names)),
            _ => "a name as `ip link` shows it".to_owned(),
        };
        Some((cannot(), help))
    } else if let Some((device, alias)) = text.split_once(':')
        && alias.bytes().all(|byte| byte.is_ascii_digit())
        && impossible(device).is_none()
    {
        Some((cannot(), format!("what looks like a second device is an address of {}", quoted([device]))))
    } else if text.contains(['/', ':', '\0']) {
        Some((cannot(), "a name as `ip link` shows it: without / and :".to_owned()))
    } else if matches!(text, "." | "..") {
        Some((cannot(), "a name as `ip link` shows it".to_owned()))
    } else if text.len() > LONGEST {
        let message = format!("`{}` is longer than the name of a device can be", text.escape_debug());
        Some((message, format!("at most {LONGEST} bytes; \"*\" is any number of characters")))
    } else {
        None
    }
}

/// A character that is hardly meant as itself, and what to write instead.
pub(super) fn plain_character(text: &str) -> Option<(char, String)> {
    if let Some((device, _)) = text.split_once('@').filter(|(device, _)| !device.is_empty()) {
        return Some((
            '@',
            format!("`ip link` shows where a device leads to: its name is {}", quoted([device])),
        ));
    }
    let names: Vec<&str> = text.split(',').filter(|name| !name.is_empty()).collect();
    if names.len() > 1 && !text.contains(['{', '[']) {
        return Some((',', format!("one name an element: {}", quoted(names))));
    }
    let help = "only * (any number of characters) and ? (one) are wildcards".to_owned();
    text.chars().find(|c| "[]{}()!^$|\\,+".contains(*c)).map(|c| (c, help))
}

/// `"a", "b"`, as in a list of TOML.
pub(super) fn quoted<S: AsRef<str>>(texts: impl IntoIterator<Item = S>) -> String {
    let quoted = texts.into_iter().map(|text| format!("\"{}\"", text.as_ref().escape_debug()));
    quoted.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The meaning, as simple as it can be.
    fn plainly(pattern: &[u8], name: &[u8]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some((b'*', rest)) => (0..=name.len()).any(|skip| plainly(rest, &name[skip..])),
            Some((b'?', rest)) => !name.is_empty() && plainly(rest, &name[1..]),
            Some((byte, rest)) => name.first() == Some(byte) && plainly(rest, &name[1..]),
        }
    }

    #[test]
    fn what_matches() {
        for (pattern, name) in [
            ("*", ""),
            ("*", "lo"),
            ("eth*", "eth"),
            ("*.100", "bond0.100"),
            ("?o", "lo"),
            ("a*b*c", "abbcbc"),
        ] {
            assert!(matches(pattern, name), "{pattern} {name}");
        }
        for (pattern, name) in [("?", ""), ("eth?", "eth"), ("eth0", "eth01"), ("*a", "ab"), ("", "a")] {
            assert!(!matches(pattern, name), "{pattern} {name}");
        }
    }

    #[test]
    fn many_stars_take_no_longer() {
        // Trying what each star may take would not come to an end.
        assert!(!matches(&"*a".repeat(10_000), &format!("{}b", "a".repeat(10_000))));
    }

    #[test]
    fn what_covers() {
        for (outer, inner) in
            [("*", "eth?"), ("eth*", "eth0"), ("eth?", "eth?"), ("e*0", "e*1*0"), ("**", "*")]
        {
            assert!(covers(outer, inner), "{outer} {inner}");
        }
        for (outer, inner) in [("eth?", "eth*"), ("eth0", "eth?"), ("?*", "*"), ("eth*", "*")] {
            assert!(!covers(outer, inner), "{outer} {inner}");
        }
    }

    proptest! {
        #[test]
        fn a_match_is_what_it_means(pattern in "[ab*?]{0,8}", name in "[ab]{0,8}") {
            prop_assert_eq!(matches(&pattern, &name), plainly(pattern.as_bytes(), name.as_bytes()));
        }

        #[test]
        fn what_is_covered_matches_nothing_more(
            outer in "[ab*?]{0,5}",
            inner in "[ab*?]{0,5}",
            names in proptest::collection::vec("[ab]{0,6}", 20),
        ) {
            if covers(&outer, &inner) {
                for name in names {
                    prop_assert!(!matches(&inner, &name) || matches(&outer, &name), "{}", name);
                }
            }
        }
    }
}
