//! The network namespaces that a mount table (/proc/PID/mountinfo) holds. Pure.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use super::NamespaceId;

/// A mounted network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    pub(super) id: NamespaceId,
    /// Where, as the processes that see this table name it.
    pub(super) at: PathBuf,
}

/// Those of a whole table, in its order. A namespace stands there as often as it is mounted.
pub(super) fn namespaces(table: &[u8]) -> Vec<Mounted> {
    table.split(|b| *b == b'\n').filter_map(namespace).collect()
}

/// One line (Documentation/filesystems/proc.rst, 3.5): `36 35 0:4 net:[4026532245] /run/netns/blue rw,nosuid - nsfs nsfs
/// rw`, with any number of fields before the hyphen. A hyphen can be no other field, and spaces in paths are written as
/// `\040`.
fn namespace(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|b| *b == b' ').skip(3);
    let root = fields.next()?;
    // The usual table has no such line at all: this first.
    let id = link(root)?;
    let at = fields.next()?;
    fields.find(|f| *f == b"-")?;
    (fields.next()? == b"nsfs").then(|| Mounted { id, at: unescaped(at) })
}

/// What a link in /proc/PID/ns or the root of a mount of nsfs says: `net:[4026532245]`.
pub(super) fn link(text: &[u8]) -> Option<NamespaceId> {
    let digits = text.strip_prefix(b"net:[")?.strip_suffix(b"]")?;
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| std::str::from_utf8(digits).ok()?.parse().ok())?
}

/// Undoes `\ooo`, three octal digits (`mangle_path`, fs/seq_file.c).
fn unescaped(text: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((byte, after)) = rest.split_first() {
        match after {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] if *byte == b'\\' => {
                out.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = after;
            }
            _ => {
                out.push(*byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(out).into()
}

/// Is it where `ip netns` keeps namespaces under names?
pub(super) fn is_named(at: &Path) -> bool {
    at.parent() == Some(Path::new(super::NAMES))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn mounted_namespaces_of_a_table() {
        let table = b"22 27 0:21 / /proc rw,relatime - proc proc rw\n\
            350 26 0:4 net:[4026532245] /run/netns/blue rw shared:9 master:2 - nsfs nsfs rw\n\
            351 26 0:4 mnt:[4026532246] /run/snapd/ns/x.mnt rw - nsfs nsfs rw\n\
            352 26 0:4 net:[4026532247] /run/a\\040b\\134c\\011 rw - nsfs nsfs rw\n\
            353 26 8:1 net:[4026532248] /tmp/a-file-of-that-name rw - ext4 /dev/sda1 rw\n\
            354 26 0:4 net:[4026532249";
        let found = |id, at: &str| Mounted { id, at: at.into() };
        assert_eq!(
            namespaces(table),
            [found(4_026_532_245, "/run/netns/blue"), found(4_026_532_247, "/run/a b\\c\t")]
        );
        assert!(is_named(Path::new("/run/netns/blue")));
        assert!(!is_named(Path::new("/run/netns/a/b")));
        assert!(!is_named(Path::new("/run/docker/netns/1a2b")));
    }

    #[test]
    fn links() {
        assert_eq!(link(b"net:[4026531840]"), Some(4_026_531_840));
        for bad in
            ["mnt:[4026531840]", "net:[]", "net:[+1]", "net:[1", "net:[99999999999999999999]", "/x", ""]
        {
            assert_eq!(link(bad.as_bytes()), None, "{bad}");
        }
    }

    #[test]
    fn half_an_escape_is_none() {
        for text in ["a\\", "\\04", "\\400", "\\0x0", "\\\\"] {
            assert_eq!(unescaped(text.as_bytes()), PathBuf::from(text));
        }
    }

    proptest! {
        #[test]
        fn any_path_is_read_back(path in "[^\0\n/]{1,20}") {
            let mut written = b"1 2 0:4 net:[7] /".to_vec();
            for byte in path.bytes() {
                match byte {
                    b' ' | b'\t' | b'\\' => written.extend(format!("\\{byte:03o}").bytes()),
                    _ => written.push(byte),
                }
            }
            written.extend(b" rw - nsfs nsfs rw\n");
            let at = PathBuf::from(format!("/{path}"));
            prop_assert_eq!(namespaces(&written), [Mounted { id: 7, at }]);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes: Vec<u8>) {
            let _ = namespaces(&bytes);
            let _ = namespace(&bytes);
        }
    }
}
