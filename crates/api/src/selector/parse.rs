//! The string form of label selectors.

use super::label::{Operator, Requirement};
use crate::field::{FieldError, FieldErrors, Path};
use crate::meta_validation::qualified_name;
use thiserror::Error;

/// Why a label selector cannot be read, in the words the API answers with.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SelectorError {
    #[error("unable to parse requirement: {0}")]
    Parse(Box<SelectorError>),
    #[error("{0}")]
    Syntax(String),
    #[error("{}", aggregate(.0))]
    Requirement(FieldErrors),
    #[error("{0:?} is not a valid label selector operator")]
    Operator(String),
}

fn aggregate(errors: &FieldErrors) -> String {
    match errors.as_slice() {
        [one] => one.to_string(),
        many => format!("[{}]", many.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Close,
    Comma,
    Not,
    DoubleEquals,
    Equals,
    Greater,
    In,
    Less,
    NotEquals,
    NotIn,
    Open,
    Identifier,
    End,
}

struct Parser<'a> {
    tokens: Vec<(Token, &'a str)>,
    at: usize,
}

pub(super) fn requirements(text: &str) -> Result<Vec<Requirement>, SelectorError> {
    Parser { tokens: tokens(text), at: 0 }.parse()
}

fn is_special(c: char) -> bool {
    matches!(c, '=' | '!' | '(' | ')' | ',' | '>' | '<')
}

fn tokens(text: &str) -> Vec<(Token, &str)> {
    let mut tokens = Vec::new();
    let mut rest = text;
    loop {
        rest = rest.trim_start_matches([' ', '\t', '\r', '\n']);
        let Some(first) = rest.chars().next() else { break };
        let length = if is_special(first) {
            // `==` and `!=` are the only operators of two characters.
            if matches!(rest.get(..2), Some("==" | "!=")) { 2 } else { 1 }
        } else {
            rest.find(|c| is_special(c) || matches!(c, ' ' | '\t' | '\r' | '\n')).unwrap_or(rest.len())
        };
        let (literal, after) = rest.split_at(length);
        let token = match literal {
            ")" => Token::Close,
            "," => Token::Comma,
            "!" => Token::Not,
            "==" => Token::DoubleEquals,
            "=" => Token::Equals,
            ">" => Token::Greater,
            "in" => Token::In,
            "<" => Token::Less,
            "!=" => Token::NotEquals,
            "notin" => Token::NotIn,
            "(" => Token::Open,
            _ => Token::Identifier,
        };
        tokens.push((token, literal));
        rest = after;
    }
    tokens
}

impl<'a> Parser<'a> {
    fn peek_operator(&self) -> (Token, &'a str) {
        self.tokens.get(self.at).copied().unwrap_or((Token::End, ""))
    }

    /// The next token where a key or a value is expected: there `in` and `notin` are ordinary words.
    fn peek(&self) -> (Token, &'a str) {
        match self.peek_operator() {
            (Token::In | Token::NotIn, literal) => (Token::Identifier, literal),
            other => other,
        }
    }

    fn next(&mut self) -> (Token, &'a str) {
        let token = self.peek();
        self.at += 1;
        token
    }

    fn parse(mut self) -> Result<Vec<Requirement>, SelectorError> {
        let mut requirements = Vec::new();
        loop {
            match self.peek() {
                (Token::Identifier | Token::Not, _) => {
                    let requirement = self.requirement().map_err(|e| SelectorError::Parse(Box::new(e)))?;
                    requirements.push(requirement);
                    match self.next() {
                        (Token::End, _) => return Ok(requirements),
                        (Token::Comma, _) => {
                            let (token, literal) = self.peek();
                            if !matches!(token, Token::Identifier | Token::Not) {
                                return Err(unexpected(literal, "identifier after ','"));
                            }
                        }
                        (_, literal) => return Err(unexpected(literal, "',' or 'end of string'")),
                    }
                }
                (Token::End, _) => return Ok(requirements),
                (_, literal) => return Err(unexpected(literal, "!, identifier, or 'end of string'")),
            }
        }
    }

    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        let mut negated = false;
        let (mut token, mut key) = self.next();
        if token == Token::Not {
            negated = true;
            (token, key) = self.next();
        }
        if token != Token::Identifier {
            return Err(unexpected(key, "identifier"));
        }
        let problems = qualified_name(key);
        if !problems.is_empty() {
            let error = FieldError::invalid(&Path::default(), key, problems.join("; "));
            return Err(SelectorError::Requirement(vec![error]));
        }
        if negated {
            return Requirement::new(key, Operator::DoesNotExist, Vec::new());
        }
        if matches!(self.peek().0, Token::End | Token::Comma) {
            return Requirement::new(key, Operator::Exists, Vec::new());
        }
        let operator = self.operator()?;
        let values = match operator {
            Operator::In | Operator::NotIn => self.values()?,
            _ => vec![self.exact_value()?.to_owned()],
        };
        Requirement::new(key, operator, values)
    }

    fn operator(&mut self) -> Result<Operator, SelectorError> {
        let (token, literal) = self.peek_operator();
        self.at += 1;
        match token {
            Token::In => Ok(Operator::In),
            Token::NotIn => Ok(Operator::NotIn),
            Token::Equals => Ok(Operator::Equals),
            Token::DoubleEquals => Ok(Operator::DoubleEquals),
            Token::NotEquals => Ok(Operator::NotEquals),
            Token::Greater => Ok(Operator::GreaterThan),
            Token::Less => Ok(Operator::LessThan),
            _ => Err(unexpected(literal, "in, notin, =, ==, !=, gt, lt")),
        }
    }

    fn values(&mut self) -> Result<Vec<String>, SelectorError> {
        let (token, literal) = self.next();
        if token != Token::Open {
            return Err(SelectorError::Syntax(format!("found '{literal}' expected: '('")));
        }
        match self.peek() {
            (Token::Identifier | Token::Comma, _) => {
                let values = self.value_list()?;
                self.next();
                Ok(values)
            }
            // As upstream: nothing between parentheses is the empty value.
            (Token::Close, _) => {
                self.next();
                Ok(vec![String::new()])
            }
            (_, literal) => Err(unexpected(literal, "',', ')' or identifier")),
        }
    }

    /// Values up to the closing parenthesis; between commas nothing stands for the empty value.
    fn value_list(&mut self) -> Result<Vec<String>, SelectorError> {
        let mut values: Vec<String> = Vec::new();
        loop {
            match self.next() {
                (Token::Identifier, literal) => {
                    values.push(literal.to_owned());
                    match self.peek() {
                        (Token::Comma, _) => {}
                        (Token::Close, _) => return Ok(values),
                        (_, literal) => return Err(unexpected(literal, "',' or ')'")),
                    }
                }
                (Token::Comma, _) => {
                    if values.is_empty() {
                        values.push(String::new());
                    }
                    match self.peek().0 {
                        Token::Close => {
                            values.push(String::new());
                            return Ok(values);
                        }
                        Token::Comma => {
                            self.next();
                            values.push(String::new());
                        }
                        _ => {}
                    }
                }
                (_, literal) => return Err(unexpected(literal, "',', or identifier")),
            }
        }
    }

    fn exact_value(&mut self) -> Result<&'a str, SelectorError> {
        if matches!(self.peek().0, Token::End | Token::Comma) {
            return Ok("");
        }
        match self.next() {
            (Token::Identifier, literal) => Ok(literal),
            (_, literal) => Err(unexpected(literal, "identifier")),
        }
    }
}

fn unexpected(found: &str, expected: &str) -> SelectorError {
    SelectorError::Syntax(format!("found '{found}', expected: {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn errors_say_what_was_expected() {
        for (input, message) in [
            ("a===b", "unable to parse requirement: found '=', expected: identifier"),
            ("a,", "found '', expected: identifier after ','"),
            (",a", "found ',', expected: !, identifier, or 'end of string'"),
            ("a b", "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt"),
            ("a=b c", "found 'c', expected: ',' or 'end of string'"),
            ("a in", "unable to parse requirement: found '' expected: '('"),
            ("a in (b", "unable to parse requirement: found '', expected: ',' or ')'"),
            ("!", "unable to parse requirement: found '', expected: identifier"),
            (
                "a>x",
                "unable to parse requirement: values[0]: Invalid value: \"x\": for 'Gt', 'Lt' operators, the value must be an integer",
            ),
            (
                "-a",
                "unable to parse requirement: <nil>: Invalid value: \"-a\": name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')",
            ),
        ] {
            assert_eq!(requirements(input).unwrap_err().to_string(), message, "{input}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[a-c!=<>(), \\PC]{0,24}") {
            let _ = requirements(&text);
        }
    }
}
