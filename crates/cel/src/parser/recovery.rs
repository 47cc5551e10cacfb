//! Syntax errors in the words of upstream's parser, which goes on behind a symbol that is missing or one that is too many.

use super::{Parsed, Parser, Stop, quote};
use crate::lexer::{Kind, Token};

pub(super) const EXPECTED_EXPRESSION: &str = "{'[', '{', '(', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, \
                                   NUM_UINT, STRING, BYTES, IDENTIFIER}";

pub(super) const EXPECTED_ARGUMENT: &str = "{'[', '{', '(', ')', '.', '-', '!', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, \
                                 NUM_UINT, STRING, BYTES, IDENTIFIER}";

pub(super) const EXPECTED_INDEX: &str = "{'[', '{', '(', '.', '-', '!', '?', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, STRING, BYTES, IDENTIFIER}";
pub(super) const EXPECTED_ELEMENT: &str = "{'[', ']', '{', '(', '.', ',', '-', '!', '?', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, STRING, BYTES, IDENTIFIER}";
pub(super) const EXPECTED_ENTRY: &str = "{'[', '{', '}', '(', '.', ',', '-', '!', '?', 'true', 'false', 'null', NUM_FLOAT, NUM_INT, NUM_UINT, STRING, BYTES, IDENTIFIER}";
pub(super) const EXPECTED_FIELD: &str = "{'}', ',', '?', IDENTIFIER, ESC_IDENTIFIER}";

/// True of the tokens with which an expression can begin.
pub(super) fn begins_expression(kind: Kind) -> bool {
    match kind {
        Kind::Symbol(symbol) => matches!(symbol, "[" | "{" | "(" | "." | "-" | "!"),
        Kind::End | Kind::EscapedIdent => false,
        _ => true,
    }
}

impl Parser<'_> {
    /// The colon of a conditional or an entry. As upstream: it is taken as read where an expression follows.
    pub(super) fn colon(&mut self) -> Parsed<Token> {
        if !self.is(":") && begins_expression(self.kind()) && self.next_kind() != Some(Kind::Symbol(":")) {
            let token = self.token();
            self.report(token.start, format!("Syntax error: missing ':' at '{}'", quote(&self.text(token))));
            return Ok(token);
        }
        self.expect(":")
    }

    /// The symbol that closes the innermost bracket. As upstream: it is taken as read where the text could go on.
    pub(super) fn close(&mut self) -> Parsed<()> {
        let Some(symbol) = self.closers.pop() else { return Err(Stop) };
        let goes_on = match self.closers.last() {
            Some(outer) => self.is(outer),
            None => self.kind() == Kind::End,
        };
        if !self.is(symbol) && goes_on {
            let token = self.token();
            let message = format!("Syntax error: missing '{symbol}' at '{}'", self.shown(token));
            self.report(token.start, message);
            return Ok(());
        }
        self.expect(symbol).map(|_| ())
    }

    /// Reports a token where the entries of a bracket must go on or end.
    pub(super) fn check_entries_end(&mut self, symbol: &'static str) -> Parsed<()> {
        if self.is(symbol) {
            return Ok(());
        }
        let expected = format!("{{'{symbol}', ','}}");
        let next = self.next_kind();
        let follows = next == Some(Kind::Symbol(symbol)) || next == Some(Kind::Symbol(","));
        Err(self.refuse(&expected, follows))
    }

    pub(super) fn next_kind(&self) -> Option<Kind> {
        self.tokens.get(self.at + 1).map(|token| token.kind)
    }

    pub(super) fn shown(&self, token: Token) -> String {
        if token.kind == Kind::End { "<EOF>".into() } else { quote(&self.text(token)) }
    }

    /// The text after a dot is no name. As upstream: a word that names a value is told apart from other tokens.
    pub(super) fn no_name(&mut self, dot: Token) -> Stop {
        let token = self.token();
        if matches!(token.kind, Kind::True | Kind::False | Kind::Null) {
            return self.unexpected("IDENTIFIER", Kind::Ident);
        }
        let end = if token.kind == Kind::End { dot.end } else { token.end };
        let text = quote(&self.source.slice(dot.start, end));
        self.report(token.start, format!("Syntax error: no viable alternative at input '{text}'"));
        Stop
    }

    pub(super) fn unexpected(&mut self, expected: &str, kind: Kind) -> Stop {
        self.refuse(expected, self.next_kind() == Some(kind))
    }

    /// Reports the token: as one too many if the next one fits.
    pub(super) fn refuse(&mut self, expected: &str, next_fits: bool) -> Stop {
        let token = self.token();
        let problem = if next_fits { "extraneous" } else { "mismatched" };
        let text = self.shown(token);
        self.report(token.start, format!("Syntax error: {problem} input '{text}' expecting {expected}"));
        Stop
    }

    pub(super) fn begins_entry(&self) -> bool {
        begins_expression(self.kind()) || self.is("?")
    }

    /// Reports a token with which a list or a map cannot begin; one that is too many is passed over.
    pub(super) fn check_entries_begin(&mut self, symbol: &'static str, expected: &str) -> Parsed<()> {
        if self.begins_entry() || self.is(symbol) || self.is(",") {
            return Ok(());
        }
        let next_fits = self.next_kind().is_some_and(begins_expression);
        let stop = self.refuse(expected, next_fits);
        if !next_fits {
            return Err(stop);
        }
        self.advance();
        Ok(())
    }
}
