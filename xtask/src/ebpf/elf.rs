//! A look into a compiled object: just enough ELF to know that it is a BPF object of the wanted byte order with its
//! programs, BTF and licence. Own code because the loader's parser only takes objects of the host's byte order.

use std::fmt;

/// `e_machine` of BPF.
const EM_BPF: u16 = 247;
/// `e_type` of a relocatable object.
const ET_REL: u16 = 1;
/// `sh_type` of program text and other contents.
const SHT_PROGBITS: u32 = 1;
/// `sh_flags`: the section holds instructions.
const SHF_EXECINSTR: u64 = 4;

/// What an object contains.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    big_endian: bool,
    programs: Vec<String>,
    instructions: u64,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let order = if self.big_endian { "big" } else { "little" };
        let Self { programs, instructions, .. } = self;
        write!(f, "{order}-endian, {} program sections, {instructions} instructions", programs.len())
    }
}

/// Checks the header and the sections that the loader needs.
///
/// # Errors
/// A sentence about the first thing that is wrong.
pub(crate) fn check(bytes: &[u8], big_endian: bool) -> Result<Summary, String> {
    let elf = Elf { bytes, big_endian };
    let order = if big_endian { 2 } else { 1 };
    match bytes.get(..7) {
        Some([0x7f, b'E', b'L', b'F', 2, found, 1]) if *found == order => {}
        Some([0x7f, b'E', b'L', b'F', 2, _, 1]) => return Err("the byte order is wrong".into()),
        _ => return Err("not a 64-bit ELF file".into()),
    }
    if elf.u16(16)? != ET_REL || elf.u16(18)? != EM_BPF {
        return Err("not a relocatable BPF object".into());
    }
    let sections = elf.sections()?;
    for needed in [".BTF", ".BTF.ext", "license"] {
        let section = sections.iter().find(|section| section.name == needed);
        if section.is_none_or(|section| section.size == 0) {
            return Err(format!("section {needed} is missing or empty"));
        }
    }
    if let Some(btf) = sections.iter().find(|section| section.name == ".BTF")
        && elf.u16(btf.offset)? != 0xeb9f
    {
        return Err(".BTF has the wrong magic number".into());
    }
    let code: Vec<&Section> = sections
        .iter()
        .filter(|s| s.kind == SHT_PROGBITS && s.flags & SHF_EXECINSTR != 0 && s.size > 0)
        .collect();
    let programs: Vec<String> = code.iter().filter(|s| s.name != ".text").map(|s| s.name.clone()).collect();
    if programs.is_empty() {
        return Err("no program in it".into());
    }
    if let Some(odd) = code.iter().find(|s| s.size % 8 != 0) {
        return Err(format!("section {} is no whole number of instructions", odd.name));
    }
    Ok(Summary { big_endian, programs, instructions: code.iter().map(|s| s.size / 8).sum() })
}

struct Section {
    name: String,
    kind: u32,
    flags: u64,
    offset: u64,
    size: u64,
}

struct Elf<'a> {
    bytes: &'a [u8],
    big_endian: bool,
}

impl Elf<'_> {
    fn array<const N: usize>(&self, at: u64) -> Result<[u8; N], String> {
        let at = usize::try_from(at).map_err(|e| e.to_string())?;
        let slice = at.checked_add(N).and_then(|end| self.bytes.get(at..end));
        slice.and_then(|slice| slice.try_into().ok()).ok_or_else(|| "the file is cut short".to_owned())
    }

    fn u16(&self, at: u64) -> Result<u16, String> {
        let raw = self.array(at)?;
        Ok(if self.big_endian { u16::from_be_bytes(raw) } else { u16::from_le_bytes(raw) })
    }

    fn u32(&self, at: u64) -> Result<u32, String> {
        let raw = self.array(at)?;
        Ok(if self.big_endian { u32::from_be_bytes(raw) } else { u32::from_le_bytes(raw) })
    }

    fn u64(&self, at: u64) -> Result<u64, String> {
        let raw = self.array(at)?;
        Ok(if self.big_endian { u64::from_be_bytes(raw) } else { u64::from_le_bytes(raw) })
    }

    /// A NUL-terminated string.
    fn text(&self, at: u64) -> Result<String, String> {
        let tail =
            usize::try_from(at).ok().and_then(|at| self.bytes.get(at..)).ok_or("a name is out of range")?;
        let end = tail.iter().position(|&byte| byte == 0).ok_or("a name does not end")?;
        Ok(String::from_utf8_lossy(&tail[..end]).into_owned())
    }

    fn sections(&self) -> Result<Vec<Section>, String> {
        let table = self.u64(40)?;
        let (entry, count, names) = (self.u16(58)?, self.u16(60)?, self.u16(62)?);
        if entry != 64 {
            return Err("section headers of an unknown size".into());
        }
        let header =
            |index: u16| table.checked_add(u64::from(index) * 64).ok_or("a section header is out of range");
        let strings = self.u64(header(names)? + 24)?;
        (0..count)
            .map(|index| {
                let at = header(index)?;
                let section = Section {
                    name: self.text(strings.saturating_add(u64::from(self.u32(at)?)))?,
                    kind: self.u32(at + 4)?,
                    flags: self.u64(at + 8)?,
                    offset: self.u64(at + 24)?,
                    size: self.u64(at + 32)?,
                };
                let end = section.offset.saturating_add(section.size);
                // SHT_NOBITS (8) has a size but no bytes.
                if section.kind != 8 && end > self.bytes.len() as u64 {
                    return Err(format!("section {} is cut short", section.name));
                }
                Ok(section)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A minimal object: sections with names and contents, the last one the name table.
    fn object(big: bool, machine: u16, sections: &[(&str, u32, u64, &[u8])]) -> Vec<u8> {
        let put16 = |v: u16| if big { v.to_be_bytes() } else { v.to_le_bytes() };
        let put32 = |v: u32| if big { v.to_be_bytes() } else { v.to_le_bytes() };
        let put64 = |v: u64| if big { v.to_be_bytes() } else { v.to_le_bytes() };
        let mut names = vec![0u8];
        let mut body = vec![0u8; 64];
        let mut headers = vec![0u8; 64];
        let name_table: Vec<(&str, u32, u64, &[u8])> = vec![(".strtab", 3, 0, &[])];
        for (name, kind, flags, content) in sections.iter().chain(&name_table) {
            let name_at = names.len() as u32;
            names.extend(name.bytes().chain([0]));
            let content = if *kind == 3 { names.clone() } else { content.to_vec() };
            headers.extend(put32(name_at));
            headers.extend(put32(*kind));
            headers.extend(put64(*flags));
            headers.extend(put64(0));
            headers.extend(put64(body.len() as u64));
            headers.extend(put64(content.len() as u64));
            headers.extend([0; 24]);
            body.extend(content);
        }
        let count = sections.len() as u16 + 2;
        let table = body.len() as u64;
        body[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, if big { 2 } else { 1 }, 1]);
        body[16..18].copy_from_slice(&put16(ET_REL));
        body[18..20].copy_from_slice(&put16(machine));
        body[40..48].copy_from_slice(&put64(table));
        body[58..60].copy_from_slice(&put16(64));
        body[60..62].copy_from_slice(&put16(count));
        body[62..64].copy_from_slice(&put16(count - 1));
        body.extend(headers);
        body
    }

    fn good(big: bool) -> Vec<u8> {
        let btf: &[u8] = if big { &[0xeb, 0x9f] } else { &[0x9f, 0xeb] };
        object(
            big,
            EM_BPF,
            &[
                ("classifier", 1, 6, &[0; 16]),
                (".BTF", 1, 0, btf),
                (".BTF.ext", 1, 0, btf),
                ("license", 1, 3, b"GPL\0"),
            ],
        )
    }

    #[test]
    fn both_byte_orders_are_read() {
        for big in [false, true] {
            let summary = check(&good(big), big).unwrap();
            assert_eq!(
                (summary.programs.as_slice(), summary.instructions),
                (&["classifier".to_owned()][..], 2)
            );
            assert_eq!(check(&good(big), !big).unwrap_err(), "the byte order is wrong");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let code: (&str, u32, u64, &[u8]) = ("classifier", 1, 6, &[0; 8]);
        assert_eq!(
            check(&object(false, EM_BPF, &[code]), false).unwrap_err(),
            "section .BTF is missing or empty"
        );
        assert_eq!(check(&object(false, 62, &[code]), false).unwrap_err(), "not a relocatable BPF object");
        assert_eq!(check(b"#!/bin/sh", false).unwrap_err(), "not a 64-bit ELF file");
    }

    #[test]
    fn no_cut_or_changed_byte_makes_it_panic() {
        let whole = good(true);
        // The last fields of the last section header (link, info, alignment, entry size) are not looked at.
        for length in 0..whole.len() - 24 {
            assert!(check(&whole[..length], true).is_err(), "{length}");
        }
        for index in 0..whole.len() {
            let mut changed = whole.clone();
            changed[index] ^= 0xff;
            let _ = check(&changed, true);
        }
    }
}
