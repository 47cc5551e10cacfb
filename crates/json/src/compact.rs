//! Reads values from JSON as the store has it: written by this crate, without spaces.
//!
//! The text is gone through once, and members and items are collected on two stacks, so that a map or a list is allocated
//! once and in its final size. `serde_json` reads the rare tokens (escapes, fractions, negative numbers), and all text that
//! has spaces or is no JSON: its errors are the errors.

use crate::scan::{plain_string, string_end, value_end};
use crate::{Error, Map, Text, Value};

/// As deep as `serde_json` goes.
const MAX_DEPTH: usize = 127;
/// Whole numbers with so many digits fit into 64 bits.
const SAFE_DIGITS: usize = 18;

/// The value that the text is. The same as [`from_slice`](crate::from_slice), faster where the text has no spaces.
pub fn from_compact(bytes: &[u8]) -> Result<Value, Error> {
    read(bytes, None)
}

/// As [`from_compact`], but lists of this name that are members of the value's own members may be left out: their text is
/// passed over where it has no spaces.
pub fn from_compact_without(bytes: &[u8], lists: &str) -> Result<Value, Error> {
    read(bytes, Some(lists))
}

fn read(bytes: &[u8], left_out: Option<&str>) -> Result<Value, Error> {
    let read = std::str::from_utf8(bytes).ok().and_then(|text| {
        let mut reader = Reader { text, left_out, at: 0, members: Vec::new(), items: Vec::new() };
        let value = reader.value(MAX_DEPTH)?;
        (reader.at == text.len()).then_some(value)
    });
    read.map_or_else(|| crate::from_slice(bytes), Ok)
}

/// Of an object within the outermost one, whatever may follow below.
const SECOND_LEVEL: usize = MAX_DEPTH - 2;

struct Reader<'a> {
    text: &'a str,
    /// The name of lists on the second level that are left out.
    left_out: Option<&'a str>,
    at: usize,
    /// Of all objects that are not at their end yet.
    members: Vec<(Text, Value)>,
    /// Of all lists that are not at their end yet.
    items: Vec<Value>,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// True if this byte comes next, which is then passed.
    fn pass(&mut self, byte: u8) -> bool {
        let is_next = self.peek() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn word(&mut self, word: &str, value: Value) -> Option<Value> {
        let rest = self.text.get(self.at..)?;
        rest.starts_with(word).then(|| self.at += word.len())?;
        Some(value)
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        match self.peek()? {
            b'"' => self.string().map(Value::String),
            b'{' => self.object(depth.checked_sub(1)?),
            b'[' => self.list(depth.checked_sub(1)?),
            b't' => self.word("true", Value::Bool(true)),
            b'f' => self.word("false", Value::Bool(false)),
            b'n' => self.word("null", Value::Null),
            b'-' | b'0'..=b'9' => self.number(),
            _ => None,
        }
    }

    fn object(&mut self, depth: usize) -> Option<Value> {
        self.at += 1;
        let first = self.members.len();
        if !self.pass(b'}') {
            loop {
                let name = self.string()?;
                self.pass(b':').then_some(())?;
                if depth == SECOND_LEVEL && self.left_out == Some(&*name) && self.peek() == Some(b'[') {
                    self.at = value_end(self.text.as_bytes(), self.at)?;
                } else {
                    let value = self.value(depth)?;
                    self.members.push((name, value));
                }
                if self.pass(b'}') {
                    break;
                }
                self.pass(b',').then_some(())?;
            }
        }
        Some(Value::Object(Map::from_members(self.members.drain(first..).collect())))
    }

    fn list(&mut self, depth: usize) -> Option<Value> {
        self.at += 1;
        let first = self.items.len();
        if !self.pass(b']') {
            loop {
                let value = self.value(depth)?;
                self.items.push(value);
                if self.pass(b']') {
                    break;
                }
                self.pass(b',').then_some(())?;
            }
        }
        Some(Value::Array(self.items.drain(first..).collect()))
    }

    fn string(&mut self) -> Option<Text> {
        let bytes = self.text.as_bytes();
        if let Some((plain, end)) = plain_string(bytes, self.at) {
            // Control characters are written as escapes.
            if plain.iter().any(|byte| *byte < 0x20) {
                return None;
            }
            let text = self.text.get(self.at + 1..end - 1)?;
            self.at = end;
            return Some(Text::new(text));
        }
        let end = string_end(bytes, self.at)?;
        let text = serde_json::from_str(self.text.get(self.at..end)?).ok()?;
        self.at = end;
        Some(text)
    }

    fn number(&mut self) -> Option<Value> {
        let rest = self.text.get(self.at..)?;
        let is_part = |byte: &u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
        let length = rest.bytes().position(|byte| !is_part(&byte)).unwrap_or(rest.len());
        let text = &rest[..length];
        let is_whole = length <= SAFE_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
        let value = match is_whole && (length == 1 || !text.starts_with('0')) {
            true => Value::from(text.bytes().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'))),
            false => serde_json::from_str(text).ok()?,
        };
        self.at += length;
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn agrees(text: &str) -> Result<(), TestCaseError> {
        let (ours, theirs) = (from_compact(text.as_bytes()), serde_json::from_str::<Value>(text));
        match (ours, theirs) {
            (Ok(ours), Ok(theirs)) => prop_assert_eq!(ours, theirs, "{}", text),
            (Err(ours), Err(theirs)) => prop_assert_eq!(ours.to_string(), theirs.to_string(), "{}", text),
            (ours, theirs) => prop_assert!(false, "{text}: {ours:?} {theirs:?}"),
        }
        Ok(())
    }

    #[test]
    fn lists_of_the_second_level_are_left_out() {
        let text = r#"{"a":[1],"metadata":{"a":[{"b":["]"]}],"b":{"a":[2]},"c":1},"data":{"a":"x"}}"#;
        let read: Value = crate::from_slice(text.as_bytes()).unwrap();
        let mut expected = read.clone();
        expected["metadata"].as_object_mut().unwrap().remove("a");
        assert_eq!(from_compact_without(text.as_bytes(), "a").unwrap(), expected);
        assert_eq!(from_compact(text.as_bytes()).unwrap(), read);
        assert_eq!(from_compact(br#"{"m":{"":[1]}}"#).unwrap().to_string(), r#"{"m":{"":[1]}}"#);
        assert_eq!(
            from_compact_without(br#"{"m":{"a":[1],"b":[2]}}"#, "b").unwrap().to_string(),
            r#"{"m":{"a":[1]}}"#
        );
    }

    #[test]
    fn reads_what_serde_json_reads() {
        let deep = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
        let deep_objects = |levels: usize| format!("{}1{}", "{\"a\":".repeat(levels), "}".repeat(levels));
        for text in [
            r#"{"metadata":{"name":"a","labels":{}},"spec":{"replicas":3,"list":["x",null,true,false]}}"#,
            r#"{"b":1,"a":2,"b":3}"#,
            r#"{"k:{\"name\":\"c\"}":{".":{}},"\u00e9\n":"\ud83d\ude00"}"#,
            r#"[0,7,-1,1.5,1e3,-0,00,18446744073709551615,18446744073709551616,999999999999999999]"#,
            "[0,7,-1,-0,1.5,1e3,18446744073709551615,9223372036854775808,-9223372036854775808]",
            " {\"a\": 1 }",
            "{\"a\":1} ",
            "{\"a\":1}x",
            "{\"a\":\"\u{1}\"}",
            "{\"a\":\"\\q\"}",
            "{\"a\"}",
            "{\"a\":1,}",
            "[1,]",
            "[1 ,2]",
            "{",
            "\"a",
            "nul",
            "1-2",
            "",
            deep(127).as_str(),
            deep(128).as_str(),
            deep_objects(127).as_str(),
            deep_objects(128).as_str(),
        ] {
            agrees(text).expect(text);
        }
        assert!(from_compact(b"\"\xff\"").is_err());
    }

    proptest! {
        #[test]
        fn reads_what_is_written(
            numbers in prop::collection::vec(any::<i64>(), 0..4),
            texts in prop::collection::btree_map("[a-z\"\\\\\\n é]{0,30}", "\\PC{0,40}", 0..6),
            fraction in any::<f64>(),
        ) {
            let value = crate::json!({"numbers": numbers, "texts": texts, "f": fraction, "list": [[], {}, [texts]]});
            agrees(&value.to_string())?;
        }

        #[test]
        fn damaged_text_is_refused_alike(at in 0usize..60, byte in 0x20u8..0x7f) {
            let mut text = br#"{"a":[1,"b\"",{"c":null}],"d":true,"e":-12,"f":1.5,"g":"\u0041"}"#.to_vec();
            text[at] = byte;
            agrees(std::str::from_utf8(&text).expect("ASCII"))?;
        }
    }
}
