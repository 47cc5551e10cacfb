//! Tokens of JSON, with the complaints in Go's wording.

use super::Fault;
use crate::codec::DecodeError;
use ferrite_json::Number;
use std::borrow::Cow;

pub(super) struct Lexer<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// The type of the next value, by its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

impl Shape {
    /// Go's name for it in type errors.
    pub(super) fn go_name(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool => "bool",
            Self::Number => "number",
            Self::String => "string",
            Self::Array => "array",
            Self::Object => "object",
        }
    }
}

impl<'a> Lexer<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    fn skip_space(&mut self) {
        while matches!(self.bytes.get(self.at), Some(b' ' | b'\t' | b'\r' | b'\n')) {
            self.at += 1;
        }
    }

    /// The next byte that is not white space, left in place.
    pub(super) fn peek(&mut self) -> Result<u8, Fault> {
        self.skip_space();
        self.bytes.get(self.at).copied().ok_or_else(unexpected_end)
    }

    pub(super) fn advance(&mut self) {
        self.at += 1;
    }

    pub(super) fn unexpected(&self, context: &str) -> Fault {
        match self.bytes.get(self.at) {
            Some(&byte) => invalid(byte, context),
            None => unexpected_end(),
        }
    }

    /// As [`Self::unexpected`] inside of a literal. As upstream: a text that ends there is read as if a space followed.
    fn unexpected_inside(&self, context: &str) -> Fault {
        invalid(self.bytes.get(self.at).copied().unwrap_or(b' '), context)
    }

    pub(super) fn shape(&mut self) -> Result<Shape, Fault> {
        Ok(match self.peek()? {
            b'n' => Shape::Null,
            b't' | b'f' => Shape::Bool,
            b'-' | b'0'..=b'9' => Shape::Number,
            b'"' => Shape::String,
            b'[' => Shape::Array,
            b'{' => Shape::Object,
            _ => return Err(self.unexpected("looking for beginning of value")),
        })
    }

    /// Nothing but white space may follow the value.
    pub(super) fn end(&mut self) -> Result<(), Fault> {
        self.skip_space();
        if self.at == self.bytes.len() { Ok(()) } else { Err(self.unexpected("after top-level value")) }
    }

    fn literal(&mut self, word: &'static str) -> Result<(), Fault> {
        for expected in word.bytes() {
            if self.bytes.get(self.at) != Some(&expected) {
                let context = format!("in literal {word} (expecting {})", quote(expected));
                return Err(self.unexpected_inside(&context));
            }
            self.at += 1;
        }
        Ok(())
    }

    pub(super) fn null(&mut self) -> Result<(), Fault> {
        self.literal("null")
    }

    pub(super) fn bool(&mut self) -> Result<bool, Fault> {
        if self.peek()? == b't' {
            self.literal("true").map(|()| true)
        } else {
            self.literal("false").map(|()| false)
        }
    }

    /// The text of a number, checked against JSON's grammar.
    pub(super) fn number(&mut self) -> Result<&'a str, Fault> {
        let start = self.at;
        if self.bytes.get(self.at) == Some(&b'-') {
            self.at += 1;
        }
        match self.bytes.get(self.at) {
            Some(b'0') => self.at += 1,
            Some(b'1'..=b'9') => self.digits(),
            _ => return Err(self.unexpected_inside("in numeric literal")),
        }
        if self.bytes.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.some_digits("after decimal point in numeric literal")?;
        }
        if matches!(self.bytes.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.bytes.get(self.at), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.some_digits("in exponent of numeric literal")?;
        }
        let text = self.bytes.get(start..self.at).unwrap_or_default();
        Ok(std::str::from_utf8(text).unwrap_or_default())
    }

    fn digits(&mut self) {
        while matches!(self.bytes.get(self.at), Some(b'0'..=b'9')) {
            self.at += 1;
        }
    }

    fn some_digits(&mut self, context: &str) -> Result<(), Fault> {
        let start = self.at;
        self.digits();
        if self.at == start { Err(self.unexpected_inside(context)) } else { Ok(()) }
    }

    /// A string; bytes that are not UTF-8 become the replacement character, as in Go. It is copied only if
    /// it differs from the input.
    pub(super) fn string(&mut self) -> Result<Cow<'a, str>, Fault> {
        self.at += 1;
        let mut text = self.plain();
        loop {
            match self.bytes.get(self.at) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => {
                    self.at += 1;
                    let escaped = self.escape()?;
                    text.to_mut().push(escaped);
                    text += self.plain();
                }
                _ => return Err(self.unexpected("in string literal")),
            }
        }
    }

    /// The rest of a string up to its end, the next escape or the next forbidden character.
    fn plain(&mut self) -> Cow<'a, str> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let length = rest.iter().position(|b| matches!(b, b'"' | b'\\' | 0..0x20)).unwrap_or(rest.len());
        self.at += length;
        let plain = &rest[..length];
        std::str::from_utf8(plain).map_or_else(|_| String::from_utf8_lossy(plain), Cow::Borrowed)
    }

    /// Passes over a string without building it.
    pub(super) fn skip_string(&mut self) -> Result<(), Fault> {
        self.at += 1;
        loop {
            match self.bytes.get(self.at) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => {
                    self.at += 1;
                    self.escape()?;
                }
                Some(0..0x20) | None => return Err(self.unexpected("in string literal")),
                Some(_) => self.at += 1,
            }
        }
    }

    fn escape(&mut self) -> Result<char, Fault> {
        let byte = self.bytes.get(self.at).copied().unwrap_or(b' ');
        let plain = match byte {
            b'"' | b'\\' | b'/' => byte as char,
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                self.at += 1;
                let high = self.hex4()?;
                return Ok(self.join_surrogates(high));
            }
            _ => return Err(self.unexpected_inside("in string escape code")),
        };
        self.at += 1;
        Ok(plain)
    }

    fn hex4(&mut self) -> Result<u32, Fault> {
        let mut value = 0;
        for _ in 0..4 {
            let digit = self.bytes.get(self.at).and_then(|b| (*b as char).to_digit(16));
            match digit {
                Some(digit) => value = value * 16 + digit,
                None => return Err(self.unexpected_inside("in \\u hexadecimal character escape")),
            }
            self.at += 1;
        }
        Ok(value)
    }

    /// A lone surrogate becomes the replacement character, as in Go.
    fn join_surrogates(&mut self, high: u32) -> char {
        if !(0xD800..0xDC00).contains(&high) {
            return char::from_u32(high).unwrap_or(char::REPLACEMENT_CHARACTER);
        }
        let rest = self.bytes.get(self.at..self.at + 6).unwrap_or_default();
        let low = match rest {
            [b'\\', b'u', hex @ ..] => {
                std::str::from_utf8(hex).ok().and_then(|hex| u32::from_str_radix(hex, 16).ok())
            }
            _ => None,
        };
        match low {
            Some(low @ 0xDC00..=0xDFFF) => {
                self.at += 6;
                let code = 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00);
                char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
            _ => char::REPLACEMENT_CHARACTER,
        }
    }
}

/// A number as a JSON value. Whole numbers stay integers; `None` when it is beyond a double.
pub(super) fn number_value(text: &str) -> Option<Number> {
    if let Ok(number) = text.parse::<i64>() {
        return Some(number.into());
    }
    if let Ok(number) = text.parse::<u64>() {
        return Some(number.into());
    }
    Number::from_f64(text.parse().ok()?)
}

fn unexpected_end() -> Fault {
    DecodeError::Syntax("unexpected end of JSON input".into()).into()
}

fn invalid(byte: u8, context: &str) -> Fault {
    DecodeError::Syntax(format!("invalid character {} {context}", quote(byte))).into()
}

/// A byte as Go's decoder quotes it.
fn quote(byte: u8) -> String {
    match byte {
        b'\'' => r"'\''".into(),
        b'"' => "'\"'".into(),
        b'\\' => r"'\\'".into(),
        b'\n' => r"'\n'".into(),
        b'\r' => r"'\r'".into(),
        b'\t' => r"'\t'".into(),
        0x07 => r"'\a'".into(),
        0x08 => r"'\b'".into(),
        0x0b => r"'\v'".into(),
        0x0c => r"'\f'".into(),
        0..0x20 | 0x7f => format!("'\\x{byte:02x}'"),
        0x80..=0xa0 | 0xad => format!("'\\u{byte:04x}'"),
        _ => format!("'{}'", byte as char),
    }
}
