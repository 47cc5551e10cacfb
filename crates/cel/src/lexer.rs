//! From text to tokens.

use crate::source::Source;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Symbol(&'static str),
    True,
    False,
    Null,
    Float,
    Int,
    Uint,
    String,
    Bytes,
    Ident,
    EscapedIdent,
    End,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Token {
    pub kind: Kind,
    /// The place of the token, in code points.
    pub start: usize,
    pub end: usize,
}

/// Longest first: `<=` is not `<` and `=`.
const SYMBOLS: &[&str] = &[
    "==", "!=", "<=", ">=", "&&", "||", "<", ">", "[", "]", "{", "}", "(", ")", ".", ",", "-", "!", "?", ":",
    "+", "*", "/", "%",
];

/// Words that are tokens of their own; every other word is an identifier.
const WORDS: &[(&str, Kind)] =
    &[("in", Kind::Symbol("in")), ("true", Kind::True), ("false", Kind::False), ("null", Kind::Null)];

/// Text that is no token: its place and the text that upstream's message quotes.
pub(crate) struct Unrecognized {
    pub start: usize,
    pub end: usize,
}

/// The tokens of `source`, ended by [`Kind::End`], and the places that are none.
pub(crate) fn tokens(source: &Source) -> (Vec<Token>, Vec<Unrecognized>) {
    let mut lexer = Lexer { text: &source.text, at: 0 };
    let (mut tokens, mut unrecognized) = (Vec::new(), Vec::new());
    loop {
        lexer.skip_hidden();
        let start = lexer.at;
        if start >= lexer.text.len() {
            tokens.push(Token { kind: Kind::End, start, end: start });
            return (tokens, unrecognized);
        }
        match lexer.next() {
            Ok(kind) => tokens.push(Token { kind, start, end: lexer.at }),
            Err(end) => {
                let end = end.clamp(start + 1, lexer.text.len());
                unrecognized.push(Unrecognized { start, end });
                lexer.at = end;
            }
        }
    }
}

struct Lexer<'s> {
    text: &'s [char],
    at: usize,
}

impl Lexer<'_> {
    fn peek(&self, ahead: usize) -> Option<char> {
        self.text.get(self.at + ahead).copied()
    }

    fn starts_with(&self, ahead: usize, text: &str) -> bool {
        text.chars().enumerate().all(|(i, c)| self.peek(ahead + i) == Some(c))
    }

    fn skip_hidden(&mut self) {
        loop {
            match self.peek(0) {
                Some('\t' | ' ' | '\r' | '\n' | '\u{c}') => self.at += 1,
                Some('/') if self.peek(1) == Some('/') => {
                    while self.peek(0).is_some_and(|c| c != '\n') {
                        self.at += 1;
                    }
                }
                _ => return,
            }
        }
    }

    /// Reads one token. An error is the place where text that is no token ends.
    fn next(&mut self) -> Result<Kind, usize> {
        let Some(first) = self.peek(0) else { return Ok(Kind::End) };
        let (prefix, raw, bytes) = self.string_prefix();
        if let Some(quote @ ('"' | '\'')) = self.peek(prefix) {
            match self.string(prefix, quote, raw) {
                Ok(()) => return Ok(if bytes { Kind::Bytes } else { Kind::String }),
                Err(end) if prefix == 0 => return Err(end),
                // Letters before a text without an end are a name.
                Err(_) => {}
            }
        }
        if first.is_ascii_digit() || first == '.' && self.peek(1).is_some_and(|c| c.is_ascii_digit()) {
            return Ok(self.number());
        }
        if first.is_ascii_alphabetic() || first == '_' {
            let start = self.at;
            while self.peek(0).is_some_and(|c| c.is_ascii_alphanumeric() || c == '_') {
                self.at += 1;
            }
            let word: String = self.text[start..self.at].iter().collect();
            return Ok(WORDS.iter().find(|(text, _)| *text == word).map_or(Kind::Ident, |(_, kind)| *kind));
        }
        if first == '`' {
            let mut end = self.at + 1;
            while self
                .text
                .get(end)
                .is_some_and(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-' | '/' | ' '))
            {
                end += 1;
            }
            if end > self.at + 1 && self.text.get(end) == Some(&'`') {
                self.at = end + 1;
                return Ok(Kind::EscapedIdent);
            }
            return Err(end);
        }
        // The first half of a symbol is no token, and takes the character that is not its second half with it.
        let half = matches!(first, '=' | '&' | '|');
        let end = (self.at + 1 + usize::from(half)).min(self.text.len());
        let symbol = SYMBOLS.iter().find(|symbol| self.starts_with(0, symbol)).ok_or(end)?;
        self.at += symbol.len();
        Ok(Kind::Symbol(symbol))
    }

    /// The length of the letters before a quote, if these letters may stand there, and their meaning.
    fn string_prefix(&self) -> (usize, bool, bool) {
        let raw = |c: Option<char>| matches!(c, Some('r' | 'R'));
        let bytes = |c: Option<char>| matches!(c, Some('b' | 'B'));
        let quote = |c: Option<char>| matches!(c, Some('"' | '\''));
        match (self.peek(0), self.peek(1), self.peek(2)) {
            (a, b, c) if bytes(a) && raw(b) && quote(c) => (2, true, true),
            (a, b, _) if raw(a) && quote(b) => (1, true, false),
            (a, b, _) if bytes(a) && quote(b) => (1, false, true),
            _ => (0, false, false),
        }
    }

    fn string(&mut self, prefix: usize, quote: char, raw: bool) -> Result<(), usize> {
        let start = self.at;
        let long: String = [quote; 3].iter().collect();
        let triple = self.starts_with(prefix, &long);
        let mut at = start + prefix + if triple { 3 } else { 1 };
        loop {
            let Some(c) = self.text.get(at).copied() else {
                // An unfinished long string is an empty string and the start of another one.
                if triple {
                    self.at = start + prefix + 2;
                    return Ok(());
                }
                return Err(at);
            };
            let closes =
                if triple { (0..3).all(|i| self.text.get(at + i) == Some(&quote)) } else { c == quote };
            if closes {
                self.at = at + if triple { 3 } else { 1 };
                return Ok(());
            }
            if !triple && matches!(c, '\n' | '\r') {
                return Err(at);
            }
            at = if c == '\\' && !raw { self.escape(at)? } else { at + 1 };
        }
    }

    /// The end of the escape sequence at `at`, or the place of the character that does not belong to it.
    fn escape(&self, at: usize) -> Result<usize, usize> {
        let hex = |count: usize| {
            (0..count).try_for_each(|i| match self.text.get(at + 2 + i) {
                Some(c) if c.is_ascii_hexdigit() => Ok(()),
                _ => Err(at + 2 + i + 1),
            })?;
            Ok(at + 2 + count)
        };
        match self.text.get(at + 1) {
            Some('a' | 'b' | 'f' | 'n' | 'r' | 't' | 'v' | '"' | '\'' | '\\' | '?' | '`') => Ok(at + 2),
            Some('x' | 'X') => hex(2),
            Some('u') => hex(4),
            Some('U') => hex(8),
            Some('0'..='3') => {
                (2..4).try_for_each(|i| match self.text.get(at + i) {
                    Some('0'..='7') => Ok(()),
                    _ => Err(at + i + 1),
                })?;
                Ok(at + 4)
            }
            _ => Err(at + 2),
        }
    }

    fn number(&mut self) -> Kind {
        let digits = |lexer: &Self, mut ahead: usize| {
            while lexer.peek(ahead).is_some_and(|c| c.is_ascii_digit()) {
                ahead += 1;
            }
            ahead
        };
        let unsigned = |c: Option<char>| matches!(c, Some('u' | 'U'));
        if self.starts_with(0, "0x") && self.peek(2).is_some_and(|c| c.is_ascii_hexdigit()) {
            let mut end = 2;
            while self.peek(end).is_some_and(|c| c.is_ascii_hexdigit()) {
                end += 1;
            }
            let is_uint = unsigned(self.peek(end));
            self.at += end + usize::from(is_uint);
            return if is_uint { Kind::Uint } else { Kind::Int };
        }
        let mut end = digits(self, 0);
        if unsigned(self.peek(end)) && end > 0 {
            self.at += end + 1;
            return Kind::Uint;
        }
        let mut float = false;
        if self.peek(end) == Some('.') && self.peek(end + 1).is_some_and(|c| c.is_ascii_digit()) {
            end = digits(self, end + 1);
            float = true;
        }
        if matches!(self.peek(end), Some('e' | 'E')) {
            let sign = usize::from(matches!(self.peek(end + 1), Some('+' | '-')));
            if self.peek(end + 1 + sign).is_some_and(|c| c.is_ascii_digit()) {
                end = digits(self, end + 1 + sign);
                float = true;
            }
        }
        self.at += end;
        if float { Kind::Float } else { Kind::Int }
    }
}
