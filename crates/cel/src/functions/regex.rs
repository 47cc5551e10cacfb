//! Regular expressions, in the syntax of Go.
//!
//! The crate `regex` has the same guarantees as Go's package: no backtracking, time linear in the text. Its syntax differs
//! in details; [`translate`] rewrites a pattern so that it has Go's meaning.

use ::regex::{Regex, RegexBuilder};

use super::{Entry, Memory, NO_MATCH};
use crate::error::{EvalError, err};
use crate::value::Value;

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

/// Bytes that a compiled pattern may take.
const SIZE_LIMIT: usize = 4 * 1024 * 1024;
/// The most repetitions that Go takes.
const MAX_REPEAT: u32 = 1000;
/// Levels of groups that Go takes.
const NEST_LIMIT: u32 = 250;

pub(super) const TABLE: &[Entry] = &[
    ("matches", |memory, args| with_pattern(memory, args, apply_matches)),
    ("find", |memory, args| illegal(with_pattern(memory, args, apply_find))),
    ("findAll", |memory, args| illegal(with_pattern(memory, args, apply_find_all))),
];

/// A function with its pattern compiled.
type Apply = for<'a> fn(&Regex, &mut Memory, &[Value<'a>]) -> Result<'a>;

/// A call whose pattern is a literal: it is compiled once.
pub(crate) struct Literal {
    regex: Regex,
    apply: Apply,
}

impl Literal {
    /// Compiles the pattern of a call of `name`; `None` if the function has none.
    pub fn compile(name: &str, pattern: Option<&Value<'_>>) -> Option<std::result::Result<Self, EvalError>> {
        let apply: Apply = match name {
            "matches" => apply_matches,
            "find" => apply_find,
            "findAll" => apply_find_all,
            _ => return None,
        };
        let Some(Value::String(pattern)) = pattern else { return None };
        Some(compile(pattern).map(|regex| Self { regex, apply }))
    }

    pub fn call<'a>(&self, memory: &mut Memory, args: &[Value<'a>]) -> Result<'a> {
        (self.apply)(&self.regex, memory, args)
    }
}

/// An error of a pattern, as the functions of Kubernetes report it.
fn illegal(result: Result<'_>) -> Result<'_> {
    result.map_err(|error| match error.to_string().starts_with("error parsing regexp") {
        true => err!("Illegal regex: {error}"),
        false => error,
    })
}

/// Compiles the pattern, or takes that of the last call.
fn with_pattern<'a>(memory: &mut Memory, args: &[Value<'a>], apply: Apply) -> Result<'a> {
    let Some(Value::String(pattern)) = args.get(1) else { return Err(NO_MATCH) };
    let kept = memory.pattern.take().filter(|(own, _)| **own == **pattern);
    let (text, regex) = match kept {
        Some(kept) => kept,
        None => (pattern.to_string(), compile(pattern)?),
    };
    let result = apply(&regex, memory, args);
    memory.pattern = Some((text, regex));
    result
}

fn apply_matches<'a>(regex: &Regex, _: &mut Memory, args: &[Value<'a>]) -> Result<'a> {
    match args {
        [Value::String(text), Value::String(_)] => Ok(Value::Bool(regex.is_match(text))),
        _ => Err(NO_MATCH),
    }
}

fn apply_find<'a>(regex: &Regex, _: &mut Memory, args: &[Value<'a>]) -> Result<'a> {
    match args {
        [Value::String(text), Value::String(_)] => {
            Ok(Value::string(regex.find(text).map_or("", |found| found.as_str())))
        }
        _ => Err(NO_MATCH),
    }
}

fn apply_find_all<'a>(regex: &Regex, memory: &mut Memory, args: &[Value<'a>]) -> Result<'a> {
    let (text, count) = match args {
        [Value::String(text), Value::String(_)] => (text, -1),
        [Value::String(text), Value::String(_), Value::Int(count)] => (text, *count),
        _ => return Err(NO_MATCH),
    };
    let limit = usize::try_from(count).unwrap_or(usize::MAX);
    let mut found = Vec::new();
    for item in regex.find_iter(text).take(limit) {
        memory.take_values(1)?;
        memory.take(item.len())?;
        found.push(Value::string(item.as_str()));
    }
    Ok(Value::list(found))
}

/// Compiles a pattern in Go's syntax.
pub(crate) fn compile(pattern: &str) -> std::result::Result<Regex, EvalError> {
    let failed = |message: String| err!("error parsing regexp: {message}");
    let translated = translate(pattern).map_err(failed)?;
    RegexBuilder::new(&translated).size_limit(SIZE_LIMIT).nest_limit(NEST_LIMIT).build().map_err(|error| {
        let text = error.to_string();
        let reason = text.lines().last().unwrap_or_default().trim_start_matches("error: ");
        failed(format!("{reason}: `{pattern}`"))
    })
}

/// Rewrites a pattern of Go's syntax in that of the crate. Errors have Go's texts.
fn translate(pattern: &str) -> std::result::Result<String, String> {
    let chars: Vec<char> = pattern.chars().collect();
    let text = |from: usize, to: usize| chars[from..to.min(chars.len())].iter().collect::<String>();
    let mut out = String::with_capacity(pattern.len() + 16);
    let mut groups = 0_usize;
    // Is there something before this place that can be repeated, and was it repeated already?
    let (mut repeatable, mut repeated) = (false, None::<usize>);
    let mut at = 0;
    while at < chars.len() {
        let start = at;
        let mut is_repeat = false;
        match chars[at] {
            '\\' => at = escape(&chars, at, &mut out)?,
            '[' => at = class(&chars, at, &mut out)?,
            '(' => {
                groups += 1;
                at = group(&chars, at, &mut out)?;
                (repeatable, repeated) = (false, None);
                if out.ends_with(')') {
                    // Flags for the rest of the group: (?i)
                    groups -= 1;
                }
                continue;
            }
            ')' => {
                groups = groups.checked_sub(1).ok_or_else(|| format!("unexpected ): `{pattern}`"))?;
                out.push(')');
                at += 1;
            }
            '|' | '^' => {
                out.push(chars[at]);
                at += 1;
                repeatable = chars[start] == '^';
                repeated = None;
                continue;
            }
            '*' | '+' | '?' => {
                is_repeat = true;
                at += 1;
            }
            '{' => match repeat(&chars, at) {
                Some((end, least, most)) => {
                    if least > MAX_REPEAT || most.is_some_and(|most| most > MAX_REPEAT || most < least) {
                        return Err(format!("invalid repeat count: `{}`", text(start, end)));
                    }
                    is_repeat = true;
                    at = end;
                }
                None => {
                    out.push_str("\\{");
                    at += 1;
                }
            },
            c => {
                out.push(c);
                at += 1;
            }
        }
        if !is_repeat {
            (repeatable, repeated) = (true, None);
            continue;
        }
        if chars.get(at) == Some(&'?') {
            at += 1;
        }
        if let Some(before) = repeated {
            return Err(format!("invalid nested repetition operator: `{}`", text(before, at)));
        }
        if !repeatable {
            return Err(format!("missing argument to repetition operator: `{}`", text(start, at)));
        }
        out.push_str(&text(start, at));
        repeated = Some(start);
    }
    if groups > 0 {
        return Err(format!("missing closing ): `{pattern}`"));
    }
    Ok(out)
}

/// `{n}`, `{n,}`, `{n,m}`: its end and its bounds. Anything else is text.
fn repeat(chars: &[char], at: usize) -> Option<(usize, u32, Option<u32>)> {
    let end = at + chars[at..].iter().take(16).position(|c| *c == '}')?;
    let body: String = chars[at + 1..end].iter().collect();
    let number = |text: &str| {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        digits.then(|| text.parse().unwrap_or(u32::MAX))
    };
    let (least, most) = match body.split_once(',') {
        None => {
            let exact = number(&body)?;
            (exact, Some(exact))
        }
        Some((least, "")) => (number(least)?, None),
        Some((least, most)) => (number(least)?, Some(number(most)?)),
    };
    Some((end + 1, least, most))
}

/// The start of a group: only the forms that Go has.
fn group(chars: &[char], at: usize, out: &mut String) -> std::result::Result<usize, String> {
    if chars.get(at + 1) != Some(&'?') {
        out.push('(');
        return Ok(at + 1);
    }
    let unsupported = |end: usize| {
        let text: String = chars[at..end.min(chars.len())].iter().collect();
        Err(format!("invalid or unsupported Perl syntax: `{text}`"))
    };
    let mut end = at + 2;
    if chars.get(end) == Some(&'P') || chars.get(end) == Some(&'<') {
        let open = if chars[end] == 'P' { end + 1 } else { end };
        let is_name = chars.get(open) == Some(&'<')
            && chars.get(open + 1).is_some_and(|c| c.is_ascii_alphanumeric() || *c == '_');
        if !is_name {
            return unsupported(open + 2);
        }
        let Some(length) = chars[open..].iter().position(|c| *c == '>') else {
            return unsupported(chars.len());
        };
        out.push_str("(?P");
        out.extend(&chars[open..=open + length]);
        return Ok(open + length + 1);
    }
    while let Some(c) = chars.get(end) {
        match c {
            'i' | 'm' | 's' | 'U' | '-' => end += 1,
            ':' | ')' => {
                out.extend(&chars[at..=end]);
                return Ok(end + 1);
            }
            _ => return unsupported(end + 1),
        }
    }
    Err(format!("missing closing ): `{}`", chars.iter().collect::<String>()))
}

/// Classes of characters of an escape, as ranges within brackets.
fn perl_class(c: char) -> Option<(&'static str, bool)> {
    Some(match c {
        'd' => ("0-9", false),
        'D' => ("0-9", true),
        'w' => ("0-9A-Za-z_", false),
        'W' => ("0-9A-Za-z_", true),
        's' => ("\\t\\n\\x0C\\r ", false),
        'S' => ("\\t\\n\\x0C\\r ", true),
        _ => return None,
    })
}

/// An escape outside brackets.
fn escape(chars: &[char], at: usize, out: &mut String) -> std::result::Result<usize, String> {
    let Some(c) = chars.get(at + 1).copied() else {
        return Err("trailing backslash at end of expression: ``".into());
    };
    if let Some((ranges, negated)) = perl_class(c) {
        out.push_str(if negated { "[^" } else { "[" });
        out.push_str(ranges);
        out.push(']');
        return Ok(at + 2);
    }
    match c {
        'b' => out.push_str("(?-u:\\b)"),
        // Within (?-u), a boundary that is none may split a character: the crate refuses it for strings.
        'B' => out.push_str("\\B"),
        'A' | 'z' => out.extend(['\\', c]),
        'Q' => {
            let mut end = at + 2;
            while end < chars.len() && !(chars[end] == '\\' && chars.get(end + 1) == Some(&'E')) {
                out.push_str(&::regex::escape(&chars[end].to_string()));
                end += 1;
            }
            return Ok((end + 2).min(chars.len()));
        }
        _ => return escaped_character(chars, at, out),
    }
    Ok(at + 2)
}

/// An escape that stands for one character or for a class of Unicode.
fn escaped_character(chars: &[char], at: usize, out: &mut String) -> std::result::Result<usize, String> {
    let invalid = |end: usize| {
        let text: String = chars[at..end.min(chars.len())].iter().collect();
        format!("invalid escape sequence: `{text}`")
    };
    let Some(c) = chars.get(at + 1).copied() else {
        return Err("trailing backslash at end of expression: ``".into());
    };
    let literal = |code: u32, out: &mut String| {
        let c = char::from_u32(code)?;
        out.push_str(&format!("\\x{{{:X}}}", c as u32));
        Some(())
    };
    match c {
        'a' | 'f' | 't' | 'n' | 'r' | 'v' => {
            out.extend(['\\', c]);
            Ok(at + 2)
        }
        'p' | 'P' => {
            let end = match chars.get(at + 2) {
                Some('{') => {
                    at + 3 + chars[at + 2..].iter().position(|c| *c == '}').ok_or_else(|| invalid(at + 3))?
                        - 1
                }
                Some(_) => at + 2,
                None => return Err(invalid(at + 2)),
            };
            out.extend(&chars[at..=end]);
            Ok(end + 1)
        }
        'x' => {
            let (digits, end): (String, usize) = if chars.get(at + 2) == Some(&'{') {
                let length = chars[at + 3..].iter().position(|c| *c == '}').ok_or_else(|| invalid(at + 3))?;
                (chars[at + 3..at + 3 + length].iter().collect(), at + 4 + length)
            } else {
                (chars.iter().skip(at + 2).take(2).collect(), at + 4)
            };
            let code = u32::from_str_radix(&digits, 16).map_err(|_| invalid(end))?;
            literal(code, out).ok_or_else(|| invalid(end))?;
            Ok(end)
        }
        '0'..='7' if c == '0' || chars.get(at + 2).is_some_and(|next| ('0'..='7').contains(next)) => {
            let digits: String =
                chars.iter().skip(at + 1).take(3).take_while(|c| ('0'..='7').contains(*c)).collect();
            let code = u32::from_str_radix(&digits, 8).map_err(|_| invalid(at + 2))?;
            literal(code, out).ok_or_else(|| invalid(at + 2))?;
            Ok(at + 1 + digits.len())
        }
        c if c.is_ascii() && !c.is_ascii_alphanumeric() => {
            literal(c as u32, out).ok_or_else(|| invalid(at + 2))?;
            Ok(at + 2)
        }
        _ => Err(invalid(at + 2)),
    }
}

/// A class in brackets.
fn class(chars: &[char], at: usize, out: &mut String) -> std::result::Result<usize, String> {
    let missing = || format!("missing closing ]: `{}`", chars[at..].iter().collect::<String>());
    out.push('[');
    let mut end = at + 1;
    if chars.get(end) == Some(&'^') {
        out.push('^');
        end += 1;
    }
    let first = end;
    loop {
        let c = chars.get(end).copied().ok_or_else(missing)?;
        match c {
            ']' if end > first => {
                out.push(']');
                return Ok(end + 1);
            }
            '[' if chars.get(end + 1) == Some(&':') => {
                let rest: String = chars[end..].iter().collect();
                match rest.find(":]") {
                    Some(length) => {
                        out.push_str(&rest[..length + 2]);
                        end += rest[..length + 2].chars().count();
                    }
                    None => {
                        out.push_str("\\[");
                        end += 1;
                    }
                }
            }
            '\\' => match chars.get(end + 1).and_then(|c| perl_class(*c)) {
                Some((ranges, false)) => {
                    out.push_str(ranges);
                    end += 2;
                }
                Some((ranges, true)) => {
                    out.push_str("[^");
                    out.push_str(ranges);
                    out.push(']');
                    end += 2;
                }
                None => end = escaped_character(chars, end, out)?,
            },
            '-' => {
                // Between two characters it makes a range, at the edges it is itself.
                let edge = end == first || matches!(chars.get(end + 1), Some(']') | None);
                out.push_str(if edge { "\\-" } else { "-" });
                end += 1;
            }
            '[' | ']' | '&' | '~' | '^' => {
                out.extend(['\\', c]);
                end += 1;
            }
            c => {
                out.push(c);
                end += 1;
            }
        }
    }
}
