//! Values as text, the short way: most strings need no escapes, and are copied as they are.

use crate::{Map, Number, Value};

impl Value {
    /// Appends the value as JSON, as [`crate::to_vec`] writes it.
    pub fn write_to(&self, out: &mut Vec<u8>) {
        match self {
            Self::Null => out.extend_from_slice(b"null"),
            Self::Bool(true) => out.extend_from_slice(b"true"),
            Self::Bool(false) => out.extend_from_slice(b"false"),
            Self::Number(number) => write_number(number, out),
            Self::String(text) => write_text(text, out),
            Self::Array(items) => {
                let mut before = b'[';
                for item in items {
                    out.push(std::mem::replace(&mut before, b','));
                    item.write_to(out);
                }
                close(before, b"[]", out);
            }
            Self::Object(map) => write_map(map, out),
        }
    }
}

fn write_map(map: &Map, out: &mut Vec<u8>) {
    let mut before = b'{';
    for (key, value) in map {
        out.push(std::mem::replace(&mut before, b','));
        write_text(key, out);
        out.push(b':');
        value.write_to(out);
    }
    close(before, b"{}", out);
}

/// `before` is the opening bracket still if there was nothing between the two.
fn close(before: u8, brackets: &[u8; 2], out: &mut Vec<u8>) {
    match before == brackets[0] {
        true => out.extend_from_slice(brackets),
        false => out.push(brackets[1]),
    }
}

fn write_number(number: &Number, out: &mut Vec<u8>) {
    // Writing to a vector does not fail.
    let _ = crate::to_writer(out, number);
}

/// Appends a text as a JSON string.
pub fn write_text(text: &str, out: &mut Vec<u8>) {
    // Looked at as a whole, not up to the first: that takes a few instructions for many bytes.
    let special = |byte: &u8| *byte < 0x20 || *byte == b'"' || *byte == b'\\';
    if text.as_bytes().iter().fold(false, |found, byte| found | special(byte)) {
        let _ = crate::to_writer(out, text);
        return;
    }
    out.reserve(text.len() + 2);
    out.push(b'"');
    out.extend_from_slice(text.as_bytes());
    out.push(b'"');
}
