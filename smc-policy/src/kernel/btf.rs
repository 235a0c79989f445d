//! Reads the kernel's type information (BTF) as far as the loader needs it: structs by name, members by path. Pure:
//! bytes in, numbers out. Format: Documentation/bpf/btf.rst.
//!
//! A module's BTF is *split*: its type ids and string offsets go on from vmlinux's.

use std::collections::HashMap;

/// A type's number in its BTF.
pub type TypeId = u32;

/// Why something was not found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// Not a BTF of this machine's byte order, cut short, or of an unknown form.
    #[error("damaged type information (BTF) at byte {at}: {what}")]
    Damaged {
        /// Offset into the data.
        at: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// No struct of that name.
    #[error("the kernel has no struct {0}")]
    NoStruct(String),
    /// The struct has no such member.
    #[error("the kernel's struct {0} has no member {1}")]
    NoMember(String, String),
}

/// A member of a struct or union.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    /// Empty for an anonymous struct or union.
    pub name: &'a str,
    /// Its type.
    pub type_id: TypeId,
    /// Offset from the start of the struct, bits.
    pub bits: u32,
}

/// One BTF, with the one it goes on from.
#[derive(Debug)]
pub struct Btf<'a> {
    base: Option<&'a Btf<'a>>,
    data: Vec<u8>,
    /// Where each type of this BTF starts in `data`.
    types: Vec<usize>,
    /// Number of the first of them.
    first: TypeId,
    strings: std::ops::Range<usize>,
    structs: HashMap<String, TypeId>,
}

const MAGIC: u16 = 0xeb9f;
const KIND_INT: u32 = 1;
const KIND_POINTER: u32 = 2;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_TYPEDEF: u32 = 8;
const KIND_FUNC: u32 = 12;
const KIND_PROTOTYPE: u32 = 13;
/// Typedef, volatile, const, restrict, type tag: names or qualifies another type.
const TRANSPARENT: [u32; 5] = [8, 9, 10, 11, 18];
/// Longest chain of those, nesting of anonymous members: no kernel has more, and a damaged BTF may have loops.
const DEPTH: u32 = 32;

/// Bytes behind the 12 of every type (`btf_type`, include/uapi/linux/btf.h), by kind and vlen.
fn tail(kind: u32, vlen: usize) -> Option<usize> {
    Some(match kind {
        1 | 14 | 17 => 4,
        3 => 12,
        4 | 5 | 15 | 19 => 12 * vlen,
        6 | 13 => 8 * vlen,
        2 | 7..=12 | 16 | 18 => 0,
        _ => return None,
    })
}

impl<'a> Btf<'a> {
    /// Reads a whole BTF (vmlinux), or with `base` a module's.
    ///
    /// # Errors
    /// [`BtfError::Damaged`].
    pub fn parse(data: Vec<u8>, base: Option<&'a Self>) -> Result<Self, BtfError> {
        let damaged = |at, what| BtfError::Damaged { at, what };
        if data.get(..2) != Some(&MAGIC.to_ne_bytes()[..]) {
            return Err(damaged(0, "no BTF of this machine's byte order"));
        }
        let word = |at: usize| u32_at(&data, at).map(|v| v as usize).ok_or(damaged(at, "cut short"));
        let header = word(4)?;
        let range = |offset: usize, len: usize| -> Option<std::ops::Range<usize>> {
            let start = header.checked_add(offset)?;
            let end = start.checked_add(len)?;
            (end <= data.len()).then_some(start..end)
        };
        let types_range = range(word(8)?, word(12)?).ok_or(damaged(8, "types beyond the end"))?;
        let strings = range(word(16)?, word(20)?).ok_or(damaged(16, "strings beyond the end"))?;
        let mut types = Vec::new();
        let first = match base {
            Some(base) => base.next_id(),
            // Type 0 is void and has no record.
            None => 1,
        };
        let mut at = types_range.start;
        while at < types_range.end {
            types.push(at);
            let info = u32_at(&data, at + 4).ok_or(damaged(at, "cut short"))?;
            let tail = tail(info >> 24 & 0x1f, (info & 0xffff) as usize)
                .ok_or(damaged(at, "a kind of type this version does not know"))?;
            at += 12 + tail;
        }
        if at != types_range.end {
            return Err(damaged(at, "cut short"));
        }
        let mut btf = Self { base, data, types, first, strings, structs: HashMap::new() };
        let mut structs = HashMap::new();
        for id in btf.first..btf.next_id() {
            if btf.kind(id) == Some(KIND_STRUCT)
                && let Some(name) = btf.name(id).filter(|n| !n.is_empty())
            {
                structs.entry(name.to_owned()).or_insert(id);
            }
        }
        btf.structs = structs;
        Ok(btf)
    }

    fn next_id(&self) -> TypeId {
        self.first + self.types.len() as u32
    }

    /// The BTF that type `id` stands in, and where.
    fn record(&self, id: TypeId) -> Option<(&Btf<'a>, usize)> {
        if id < self.first {
            return self.base.and_then(|b| b.record(id));
        }
        self.types.get((id - self.first) as usize).map(|at| (self, *at))
    }

    fn word(&self, id: TypeId, offset: usize) -> Option<u32> {
        let (btf, at) = self.record(id)?;
        u32_at(&btf.data, at + offset)
    }

    fn kind(&self, id: TypeId) -> Option<u32> {
        self.word(id, 4).map(|info| info >> 24 & 0x1f)
    }

    fn string(&self, offset: u32) -> Option<&str> {
        let base_len = self.base.map_or(0, |b| b.strings_end());
        if offset < base_len {
            return self.base?.string(offset);
        }
        let strings = self.data.get(self.strings.clone())?;
        let rest = strings.get((offset - base_len) as usize..)?;
        let end = rest.iter().position(|b| *b == 0)?;
        std::str::from_utf8(&rest[..end]).ok()
    }

    fn strings_end(&self) -> u32 {
        self.base.map_or(0, |b| b.strings_end()) + self.strings.len() as u32
    }

    fn name(&self, id: TypeId) -> Option<&str> {
        let (btf, at) = self.record(id)?;
        btf.string(u32_at(&btf.data, at)?)
    }

    /// The struct called `name`: this BTF's own first, then the base's.
    ///
    /// # Errors
    /// [`BtfError::NoStruct`].
    pub fn structure(&self, name: &str) -> Result<TypeId, BtfError> {
        match (self.structs.get(name), self.base) {
            (Some(id), _) => Ok(*id),
            (None, Some(base)) => base.structure(name),
            (None, None) => Err(BtfError::NoStruct(name.to_owned())),
        }
    }

    /// The function called `name`, of this BTF only, not of the base.
    pub fn function(&self, name: &str) -> Option<TypeId> {
        self.find(KIND_FUNC, name)
    }

    /// The typedef called `name`, of this BTF only, not of the base.
    pub fn typedef(&self, name: &str) -> Option<TypeId> {
        self.find(KIND_TYPEDEF, name)
    }

    fn find(&self, kind: u32, name: &str) -> Option<TypeId> {
        (self.first..self.next_id()).find(|id| self.kind(*id) == Some(kind) && self.name(*id) == Some(name))
    }

    /// The types of the parameters of a function, or of what a pointer to functions points to; `None`: it is neither.
    pub fn parameters(&self, id: TypeId) -> Option<Vec<TypeId>> {
        let mut id = self.resolve(id);
        if matches!(self.kind(id), Some(KIND_FUNC | KIND_POINTER)) {
            id = self.resolve(self.word(id, 8)?);
        }
        let (btf, at) = self.record(id).filter(|_| self.kind(id) == Some(KIND_PROTOTYPE))?;
        let number = (u32_at(&btf.data, at + 4)? & 0xffff) as usize;
        (0..number).map(|i| u32_at(&btf.data, at + 12 + 8 * i + 4)).collect()
    }

    /// Whether the type is a pointer to the struct called `name`.
    pub fn is_pointer_to(&self, id: TypeId, name: &str) -> bool {
        let id = self.resolve(id);
        let to = self.word(id, 8).filter(|_| self.kind(id) == Some(KIND_POINTER)).map(|to| self.resolve(to));
        to.is_some_and(|to| self.kind(to) == Some(KIND_STRUCT) && self.name(to) == Some(name))
    }

    /// Whether the type is an integer of so many bytes.
    pub fn is_integer(&self, id: TypeId, bytes: u32) -> bool {
        let id = self.resolve(id);
        self.kind(id) == Some(KIND_INT) && self.word(id, 8) == Some(bytes)
    }

    /// Size of a struct or union, bytes.
    pub fn size(&self, id: TypeId) -> Option<u32> {
        matches!(self.kind(id)?, KIND_STRUCT | KIND_UNION).then(|| self.word(id, 8))?
    }

    /// Members of a struct or union in order; empty for other types.
    pub fn members(&self, id: TypeId) -> Vec<Member<'_>> {
        let Some((btf, at)) = self.record(id) else { return Vec::new() };
        let Some(info) = u32_at(&btf.data, at + 4) else { return Vec::new() };
        if !matches!(info >> 24 & 0x1f, KIND_STRUCT | KIND_UNION) {
            return Vec::new();
        }
        let bitfields = info >> 31 != 0;
        (0..(info & 0xffff) as usize)
            .map_while(|i| {
                let m = at + 12 + 12 * i;
                let offset = u32_at(&btf.data, m + 8)?;
                Some(Member {
                    name: btf.string(u32_at(&btf.data, m)?).unwrap_or_default(),
                    type_id: u32_at(&btf.data, m + 4)?,
                    // With kind_flag the top byte is a bitfield's width.
                    bits: if bitfields { offset & 0xff_ffff } else { offset },
                })
            })
            .collect()
    }

    /// The type behind typedefs and qualifiers.
    pub fn resolve(&self, mut id: TypeId) -> TypeId {
        for _ in 0..DEPTH {
            match self.kind(id) {
                Some(kind) if TRANSPARENT.contains(&kind) => match self.word(id, 8) {
                    Some(next) => id = next,
                    None => break,
                },
                _ => break,
            }
        }
        id
    }

    /// A member by name, also inside anonymous structs and unions: (bits from the start, type).
    fn member(&self, id: TypeId, name: &str, depth: u32) -> Option<(u32, TypeId)> {
        if depth == 0 {
            return None;
        }
        self.members(self.resolve(id)).into_iter().find_map(|m| {
            if m.name == name {
                Some((m.bits, m.type_id))
            } else if m.name.is_empty() {
                let (bits, found) = self.member(m.type_id, name, depth - 1)?;
                Some((m.bits.checked_add(bits)?, found))
            } else {
                None
            }
        })
    }

    /// Byte offset of a member given as a path, such as `tcp_sock` and `inet_conn.icsk_retransmits`. A bitfield's is
    /// that of its first byte.
    ///
    /// # Errors
    /// [`BtfError::NoStruct`], [`BtfError::NoMember`].
    pub fn offset(&self, structure: &str, path: &str) -> Result<u32, BtfError> {
        self.locate(structure, path).map(|(offset, _)| offset)
    }

    /// Byte offset of the low 32 bits of an integer member of 4 or 8 bytes: kernels change between the two.
    ///
    /// # Errors
    /// As [`Self::offset`]; `NoMember` too when it is no such integer.
    pub fn offset_of_low_word(&self, structure: &str, path: &str) -> Result<u32, BtfError> {
        let (offset, id) = self.locate(structure, path)?;
        let id = self.resolve(id);
        match (self.kind(id), self.word(id, 8)) {
            (Some(KIND_INT), Some(8)) if cfg!(target_endian = "big") => Ok(offset + 4),
            (Some(KIND_INT), Some(4 | 8)) => Ok(offset),
            _ => Err(BtfError::NoMember(structure.to_owned(), path.to_owned())),
        }
    }

    /// Byte offset of a member of one bit, and its mask in that byte.
    ///
    /// # Errors
    /// As [`Self::offset`].
    pub fn bit(&self, structure: &str, path: &str) -> Result<(u32, u8), BtfError> {
        let (bits, _) = self.locate_bits(structure, path)?;
        // Big-endian compilers count from the highest bit.
        let mask = if cfg!(target_endian = "big") { 0x80 >> (bits % 8) } else { 1 << (bits % 8) };
        Ok((bits / 8, mask))
    }

    fn locate(&self, structure: &str, path: &str) -> Result<(u32, TypeId), BtfError> {
        self.locate_bits(structure, path).map(|(bits, id)| (bits / 8, id))
    }

    fn locate_bits(&self, structure: &str, path: &str) -> Result<(u32, TypeId), BtfError> {
        let mut id = self.structure(structure)?;
        let mut bits = 0u32;
        for name in path.split('.') {
            let missing = || BtfError::NoMember(structure.to_owned(), path.to_owned());
            let (offset, next) = self.member(id, name, DEPTH).ok_or_else(missing)?;
            bits = bits.checked_add(offset).ok_or_else(missing)?;
            id = next;
        }
        Ok((bits, id))
    }
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    let bytes = data.get(at..at.checked_add(4)?)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Writes a BTF: what the tests read.
    #[derive(Default)]
    struct Writer {
        types: Vec<u8>,
        strings: Vec<u8>,
        string_base: u32,
    }

    impl Writer {
        fn new(string_base: u32) -> Self {
            let strings = if string_base == 0 { vec![0] } else { vec![] };
            Self { strings, string_base, types: vec![] }
        }
        fn text(&mut self, s: &str) -> u32 {
            if s.is_empty() {
                return 0;
            }
            let at = self.string_base + self.strings.len() as u32;
            self.strings.extend(s.as_bytes());
            self.strings.push(0);
            at
        }
        fn words(&mut self, words: &[u32]) {
            for w in words {
                self.types.extend(w.to_ne_bytes());
            }
        }
        fn int(&mut self, name: &str, size: u32) {
            let n = self.text(name);
            self.words(&[n, 1 << 24, size, size * 8]);
        }
        fn structure(&mut self, kind: u32, name: &str, size: u32, members: &[(&str, u32, u32)]) {
            let n = self.text(name);
            self.words(&[n, kind << 24 | members.len() as u32, size]);
            for (name, ty, bits) in members {
                let n = self.text(name);
                self.words(&[n, *ty, *bits]);
            }
        }
        fn typedef(&mut self, name: &str, to: u32) {
            let n = self.text(name);
            self.words(&[n, 8 << 24, to]);
        }
        fn function(&mut self, name: &str, prototype: u32) {
            let n = self.text(name);
            self.words(&[n, KIND_FUNC << 24, prototype]);
        }
        fn pointer(&mut self, to: u32) {
            self.words(&[0, KIND_POINTER << 24, to]);
        }
        fn prototype(&mut self, result: u32, parameters: &[u32]) {
            self.words(&[0, KIND_PROTOTYPE << 24 | parameters.len() as u32, result]);
            for parameter in parameters {
                self.words(&[0, *parameter]);
            }
        }
        fn bytes(&self) -> Vec<u8> {
            let mut out = Vec::new();
            out.extend(MAGIC.to_ne_bytes());
            out.extend([1, 0]);
            for w in [24, 0, self.types.len() as u32, self.types.len() as u32, self.strings.len() as u32] {
                out.extend(w.to_ne_bytes());
            }
            out.extend(&self.types);
            out.extend(&self.strings);
            out
        }
    }

    fn vmlinux() -> Vec<u8> {
        let mut w = Writer::new(0);
        w.int("int", 4); // 1
        w.structure(5, "", 8, &[("pair", 1, 0), ("both", 1, 0)]); // 2: anonymous union
        w.structure(4, "sock_common", 16, &[("", 2, 0), ("skc_num", 1, 64)]); // 3
        w.typedef("common_t", 3); // 4
        w.structure(4, "sock", 32, &[("__sk_common", 4, 64), ("tail", 1, 192)]); // 5
        w.bytes()
    }

    #[test]
    fn members_by_path() {
        let btf = Btf::parse(vmlinux(), None).unwrap();
        assert_eq!(btf.offset("sock_common", "skc_num"), Ok(8));
        assert_eq!(btf.offset("sock", "__sk_common.skc_num"), Ok(16));
        assert_eq!(btf.offset("sock", "__sk_common.both"), Ok(8), "through the anonymous union");
        assert_eq!(btf.offset("sock", "tail"), Ok(24));
        assert_eq!(btf.size(btf.structure("sock").unwrap()), Some(32));
        assert_eq!(btf.offset_of_low_word("sock", "tail"), Ok(24));
        assert!(btf.offset_of_low_word("sock", "__sk_common").is_err(), "a struct");
        assert_eq!(btf.offset("sock", "nope"), Err(BtfError::NoMember("sock".into(), "nope".into())));
        assert_eq!(btf.offset("nope", "x"), Err(BtfError::NoStruct("nope".into())));
    }

    #[test]
    fn a_module_goes_on_from_vmlinux() {
        let base = Btf::parse(vmlinux(), None).unwrap();
        let mut w = Writer::new(base.strings_end());
        w.structure(4, "value", 40, &[("common", 1, 0), ("data", 5, 64)]); // 6, refers to vmlinux's 5
        let module = Btf::parse(w.bytes(), Some(&base)).unwrap();
        assert_eq!(module.structure("value"), Ok(6));
        assert_eq!(module.offset("value", "data.tail"), Ok(32));
        assert_eq!(module.structure("sock"), Ok(5), "vmlinux's are found through the module");
    }

    #[test]
    fn functions_of_a_module_are_its_own() {
        let mut w = Writer::new(0);
        w.int("tcp_connect", 4); // 1: a type of that name is no function
        w.function("tcp_connect", 1); // 2
        let base = Btf::parse(w.bytes(), None).unwrap();
        let mut w = Writer::new(base.strings_end());
        w.function("smc_listen", 1); // 3
        let module = Btf::parse(w.bytes(), Some(&base)).unwrap();
        assert_eq!((base.function("tcp_connect"), base.function("smc_listen")), (Some(2), None));
        assert_eq!((module.function("smc_listen"), module.function("tcp_connect")), (Some(3), None));
    }

    #[test]
    fn what_functions_take() {
        let mut w = Writer::new(0);
        w.int("int", 4); // 1
        w.structure(4, "smc_sock", 4, &[("x", 1, 0)]); // 2
        let base = Btf::parse(w.bytes(), None).unwrap();
        let mut w = Writer::new(base.strings_end());
        w.pointer(2); // 3
        w.prototype(1, &[3, 1]); // 4
        w.function("smc_wait", 4); // 5
        w.pointer(4); // 6
        w.typedef("btf_trace_smc", 6); // 7
        let module = Btf::parse(w.bytes(), Some(&base)).unwrap();
        let function = module.function("smc_wait").unwrap();
        assert_eq!(module.parameters(function), Some(vec![3, 1]));
        let typedef = module.typedef("btf_trace_smc").unwrap();
        assert_eq!((typedef, module.parameters(typedef)), (7, Some(vec![3, 1])));
        assert_eq!((module.parameters(2), module.parameters(3), module.parameters(99)), (None, None, None));
        assert!(module.is_pointer_to(3, "smc_sock") && !module.is_pointer_to(3, "sock"));
        assert!(!module.is_pointer_to(2, "smc_sock") && !module.is_pointer_to(6, "smc_sock"));
        assert!(module.is_integer(1, 4) && !module.is_integer(1, 8) && !module.is_integer(3, 4));
        assert_eq!((module.typedef("smc_wait"), base.typedef("btf_trace_smc")), (None, None));
    }

    #[test]
    fn damage_is_named() {
        let good = vmlinux();
        assert_eq!(
            Btf::parse(vec![1, 2, 3], None).unwrap_err(),
            BtfError::Damaged { at: 0, what: "no BTF of this machine's byte order" }
        );
        for len in 2..good.len() {
            assert!(Btf::parse(good[..len].to_vec(), None).is_err(), "cut to {len} bytes");
        }
    }

    #[test]
    fn loops_end() {
        let mut w = Writer::new(0);
        w.typedef("a", 2); // 1
        w.typedef("b", 1); // 2
        w.structure(4, "s", 4, &[("", 4, 0), ("x", 1, 0)]); // 3
        w.structure(5, "", 4, &[("", 4, 0)]); // 4 contains itself
        let btf = Btf::parse(w.bytes(), None).unwrap();
        btf.resolve(1);
        assert_eq!(btf.offset("s", "x"), Ok(0));
        assert!(btf.offset("s", "y").is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(at in 0usize..200, byte: u8, cut in 0usize..400) {
            let mut data = vmlinux();
            if let Some(b) = data.get_mut(at) {
                *b = byte;
            }
            data.truncate(cut.max(2));
            if let Ok(btf) = Btf::parse(data, None) {
                let _ = btf.offset("sock", "__sk_common.skc_num");
                let _ = btf.offset("sock_common", "both");
                for id in 0..10 {
                    let _ = (btf.parameters(id), btf.is_pointer_to(id, "sock"), btf.is_integer(id, 4));
                }
            }
        }
    }
}
