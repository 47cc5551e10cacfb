//! JSON text as a list of places: its values are found and walked without being made.
//!
//! A transcoder that goes through an object once needs no maps, no copies of strings and no allocation for each object: the
//! list is used again for the next one.

use crate::scan::{string_end, value_end};
use std::borrow::Cow;

/// As deep as values are read anywhere.
const MAX_DEPTH: usize = 127;

/// The places of a text's values, in the order of the text.
#[derive(Debug, Default)]
pub struct Tape {
    slots: Vec<Slot>,
}

/// One value or key. Members of an object are a key and a value each.
#[derive(Debug, Clone, Copy)]
struct Slot {
    /// The text of the value, quotes and brackets included.
    start: u32,
    end: u32,
    /// The first slot behind the value and all within it.
    next: u32,
    kind: NodeKind,
}

/// The kind of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeKind {
    Null,
    Bool,
    Number,
    String,
    List,
    Object,
    /// A value whose text was passed over.
    Opaque,
}

/// A value in a text.
#[derive(Debug, Clone, Copy)]
pub struct Node<'t> {
    text: &'t str,
    slots: &'t [Slot],
    at: u32,
}

impl Tape {
    /// Reads text without spaces, as this crate writes it. Values of members of the name `opaque`, if there is one, are passed over. `None` if
    /// the text has another form or is nested too deeply.
    pub fn read<'t>(&'t mut self, text: &'t str, opaque: Option<&str>) -> Option<Node<'t>> {
        u32::try_from(text.len()).ok()?;
        self.slots.clear();
        let mut reader = Reader {
            text: text.as_bytes(),
            at: 0,
            opaque: opaque.map(str::as_bytes),
            slots: &mut self.slots,
        };
        reader.value(MAX_DEPTH)?;
        (reader.at == text.len()).then_some(Node { text, slots: &self.slots, at: 0 })
    }
}

struct Reader<'a> {
    text: &'a [u8],
    at: usize,
    opaque: Option<&'a [u8]>,
    slots: &'a mut Vec<Slot>,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn pass(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    /// Opens a slot at the present place; [`Self::close`] completes it.
    fn open(&mut self, kind: NodeKind) -> usize {
        // The text is shorter than four gigabytes, and has more bytes than slots.
        self.slots.push(Slot { start: self.at as u32, end: 0, next: 0, kind });
        self.slots.len() - 1
    }

    fn close(&mut self, slot: usize) {
        let next = self.slots.len() as u32;
        let slot = &mut self.slots[slot];
        (slot.end, slot.next) = (self.at as u32, next);
    }

    fn leaf(&mut self, kind: NodeKind, end: usize) {
        let slot = self.open(kind);
        self.at = end;
        self.close(slot);
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        match self.peek()? {
            b'"' => self.leaf(NodeKind::String, string_end(self.text, self.at)?),
            b'{' => self.object(depth.checked_sub(1)?)?,
            b'[' => self.list(depth.checked_sub(1)?)?,
            b't' => self.word("true", NodeKind::Bool)?,
            b'f' => self.word("false", NodeKind::Bool)?,
            b'n' => self.word("null", NodeKind::Null)?,
            b'-' | b'0'..=b'9' => {
                let rest = &self.text[self.at..];
                let length = rest.iter().position(|byte| matches!(byte, b',' | b'}' | b']'));
                self.leaf(NodeKind::Number, self.at + length.unwrap_or(rest.len()));
            }
            _ => return None,
        }
        Some(())
    }

    fn word(&mut self, word: &str, kind: NodeKind) -> Option<()> {
        self.text[self.at..].starts_with(word.as_bytes()).then(|| self.leaf(kind, self.at + word.len()))
    }

    fn object(&mut self, depth: usize) -> Option<()> {
        let slot = self.open(NodeKind::Object);
        self.at += 1;
        if !self.pass(b'}') {
            loop {
                let key = self.at;
                self.leaf(NodeKind::String, string_end(self.text, key)?);
                let is_opaque = self.opaque == Some(&self.text[key + 1..self.at - 1]);
                self.pass(b':').then_some(())?;
                match is_opaque {
                    true => self.leaf(NodeKind::Opaque, value_end(self.text, self.at)?),
                    false => self.value(depth)?,
                }
                if self.pass(b'}') {
                    break;
                }
                self.pass(b',').then_some(())?;
            }
        }
        self.close(slot);
        Some(())
    }

    fn list(&mut self, depth: usize) -> Option<()> {
        let slot = self.open(NodeKind::List);
        self.at += 1;
        if !self.pass(b']') {
            loop {
                self.value(depth)?;
                if self.pass(b']') {
                    break;
                }
                self.pass(b',').then_some(())?;
            }
        }
        self.close(slot);
        Some(())
    }
}

impl<'t> Node<'t> {
    fn slot(self) -> Slot {
        self.slots[self.at as usize]
    }

    pub fn kind(self) -> NodeKind {
        self.slot().kind
    }

    /// The value's own text.
    pub fn raw(self) -> &'t str {
        let slot = self.slot();
        &self.text[slot.start as usize..slot.end as usize]
    }

    /// The place among the values of the text, for [`Self::at`].
    pub fn place(self) -> u32 {
        self.at
    }

    /// Another value of the same text.
    pub fn at(self, place: u32) -> Self {
        Self { at: place, ..self }
    }

    /// A string. `None` for another value, and for escapes that mean nothing.
    pub fn text(self) -> Option<Cow<'t, str>> {
        let raw = self.raw();
        let inner = raw.strip_prefix('"')?.strip_suffix('"')?;
        match inner.contains('\\') {
            false => Some(Cow::Borrowed(inner)),
            true => serde_json::from_str(raw).ok().map(Cow::Owned),
        }
    }

    /// The items of a list; of another value none.
    pub fn items(self) -> impl Iterator<Item = Node<'t>> {
        self.within(NodeKind::List)
    }

    /// The keys and values of an object; of another value none.
    pub fn members(self) -> impl Iterator<Item = (Node<'t>, Node<'t>)> {
        let mut slots = self.within(NodeKind::Object);
        std::iter::from_fn(move || Some((slots.next()?, slots.next()?)))
    }

    fn within(self, kind: NodeKind) -> impl Iterator<Item = Node<'t>> {
        let slot = self.slot();
        let (mut at, end) = match slot.kind == kind {
            true => (self.at + 1, slot.next),
            false => (0, 0),
        };
        std::iter::from_fn(move || {
            let node = (at < end).then_some(Self { at, ..self })?;
            at = node.slot().next;
            Some(node)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Map, Value, json};
    use proptest::prelude::*;

    /// The value that is at a node.
    fn value_of(node: Node<'_>) -> Value {
        match node.kind() {
            NodeKind::List => node.items().map(value_of).collect::<Vec<_>>().into(),
            NodeKind::Object => {
                let mut map = Map::new();
                for (key, value) in node.members() {
                    map.insert(&*key.text().expect("a key is a string"), value_of(value));
                }
                Value::Object(map)
            }
            NodeKind::String => node.text().expect("a string").into_owned().into(),
            _ => crate::from_slice(node.raw().as_bytes()).expect("a value"),
        }
    }

    #[test]
    fn walks_what_a_parser_reads() {
        let mut tape = Tape::default();
        for text in [
            r#"{"a":{"b":[1,-2.5,"x\"y",true,false,null,{},[]]},"c":"é\n"}"#,
            "[]",
            "{}",
            "7",
            "\"\"",
            r#"{"":[1],"a":{"":{}}}"#,
            r#"{"k:{\"name\":\"c\"}":{".":{}}}"#,
        ] {
            let expected: Value = crate::from_slice(text.as_bytes()).unwrap();
            assert_eq!(value_of(tape.read(text, None).expect(text)), expected, "{text}");
        }
    }

    #[test]
    fn other_texts_are_not_read() {
        let deep = "[".repeat(128) + &"]".repeat(128);
        let mut tape = Tape::default();
        for text in [
            "",
            " {}",
            "{} ",
            "{\"a\" :1}",
            "{\"a\"}",
            "{\"a\":}",
            "[1,]",
            "[",
            "{",
            "\"a",
            "nul",
            "{}x",
            &deep,
        ] {
            assert!(tape.read(text, None).is_none(), "{text}");
        }
        assert!(tape.read(&deep[1..255], None).is_some());
    }

    #[test]
    fn opaque_members_are_passed_over() {
        let mut tape = Tape::default();
        let text = r#"{"a":{"fieldsV1":{"f:x":[{}]}},"b":2}"#;
        let root = tape.read(text, Some("fieldsV1")).unwrap();
        let (_, a) = root.members().next().unwrap();
        let (key, opaque) = a.members().next().unwrap();
        assert_eq!((key.text().as_deref(), opaque.kind()), (Some("fieldsV1"), NodeKind::Opaque));
        assert_eq!(opaque.raw(), r#"{"f:x":[{}]}"#);
        assert_eq!(root.members().count(), 2);
        assert_eq!(root.at(opaque.place()).raw(), opaque.raw());
    }

    proptest! {
        #[test]
        fn walks_what_is_written(
            numbers in prop::collection::vec(any::<i64>(), 0..4),
            texts in prop::collection::btree_map("[a-z\"\\\\\\n é]{0,30}", "\\PC{0,40}", 0..6),
        ) {
            let value = json!({"numbers": numbers, "texts": texts, "list": [[], {}, [texts]]});
            let text = value.to_string();
            prop_assert_eq!(value_of(Tape::default().read(&text, None).unwrap()), value);
        }

        #[test]
        fn damaged_text_does_no_harm(text in "[\\[\\]{}\",:a0-]{0,40}") {
            if let Some(node) = Tape::default().read(&text, Some("a")) {
                let _ = (node.text(), node.items().count(), node.members().count());
            }
        }
    }
}
