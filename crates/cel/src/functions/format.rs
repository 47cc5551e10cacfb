//! `format`: text with clauses such as `%s` and `%.2f`, as version 2 of upstream's strings extension prints them.

use super::number::group;
use super::{Entry, Memory, NO_MATCH};
use crate::ast::Id;
use crate::error::{EvalError, err};
use crate::value::{Map, Value};

/// Digits after the point that a clause may ask for.
const MAX_PRECISION: usize = 1000;
const DEFAULT_PRECISION: usize = 6;
/// Levels of lists and maps that are printed.
const MAX_DEPTH: usize = 100;

pub(super) const TABLE: &[Entry] = &[("format", format)];

/// A clause of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Clause {
    String,
    Decimal,
    Fixed(Option<usize>),
    Scientific(Option<usize>),
    Binary,
    Hex { upper: bool },
    Octal,
}

/// A format that cannot be filled.
#[derive(Debug)]
pub(crate) struct FormatError {
    pub message: String,
    /// The argument that does not fit its clause.
    pub argument: Option<Id>,
}

impl Clause {
    /// The error of an argument of a type that the clause does not take.
    pub(crate) fn mismatch(self, type_name: &str) -> String {
        let rule = match self {
            Self::String => {
                "string clause can only be used on strings, bools, bytes, ints, doubles, maps, lists, types, \
                 durations, and timestamps"
            }
            Self::Decimal => "decimal clause can only be used on integers",
            Self::Fixed(_) => "fixed-point clause can only be used on doubles",
            Self::Scientific(_) => "scientific clause can only be used on doubles",
            Self::Binary => "only integers and bools can be formatted as binary",
            Self::Hex { .. } => "only integers, byte buffers, and strings can be formatted as hex",
            Self::Octal => "octal clause can only be used on integers",
        };
        format!("{rule}, was given {type_name}")
    }
}

type Fill<'f> = dyn FnMut(Clause, usize, &mut String) -> Result<(), (String, Option<Id>)> + 'f;

/// Reads `format` and lets `fill` write each of `count` arguments.
pub(crate) fn check(format: &str, count: usize, fill: &mut Fill<'_>) -> Result<(String, usize), FormatError> {
    let plain = |message: String| FormatError { message, argument: None };
    let mut out = String::with_capacity(format.len());
    let mut rest = format;
    let mut index = 0;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(after) = rest.strip_prefix('%') {
            out.push('%');
            rest = after;
            continue;
        }
        if index >= count {
            return Err(plain(format!("index {index} out of range")));
        }
        if rest.is_empty() {
            return Err(plain("unexpected end of string".into()));
        }
        let (clause, after) =
            clause(rest).map_err(|error| plain(format!("could not parse formatting clause: {error}")))?;
        fill(clause, index, &mut out).map_err(|(message, argument)| FormatError {
            message: format!("error during formatting: {message}"),
            argument,
        })?;
        rest = after;
        index += 1;
    }
    out.push_str(rest);
    Ok((out, index))
}

fn clause(text: &str) -> Result<(Clause, &str), String> {
    let (precision, rest) = match text.strip_prefix('.') {
        None => (None, text),
        Some(digits) => {
            let end = digits
                .find(|c: char| !c.is_ascii_digit())
                .ok_or("error while parsing precision: could not find end of precision specifier")?;
            let number = &digits[..end];
            let precision: usize = number.parse().map_err(|_| {
                format!(
                    "error while parsing precision: error while converting precision to integer: strconv.Atoi: \
                     parsing {number:?}: invalid syntax"
                )
            })?;
            if precision > MAX_PRECISION {
                return Err(format!(
                    "error while parsing precision: {precision} is more than {MAX_PRECISION}"
                ));
            }
            (Some(precision), &digits[end..])
        }
    };
    let mut chars = rest.chars();
    let clause = match chars.next() {
        Some('s') => Clause::String,
        Some('d') => Clause::Decimal,
        Some('f') => Clause::Fixed(precision),
        Some('e') => Clause::Scientific(precision),
        Some('b') => Clause::Binary,
        Some(c @ ('x' | 'X')) => Clause::Hex { upper: c == 'X' },
        Some('o') => Clause::Octal,
        Some(c) => return Err(format!("unrecognized formatting clause \"{c}\"")),
        None => return Err("unexpected end of string".into()),
    };
    Ok((clause, chars.as_str()))
}

fn format<'a>(memory: &mut Memory, args: &mut [Value<'a>]) -> Result<Value<'a>, EvalError> {
    let [Value::String(format), Value::List(list)] = &*args else { return Err(NO_MATCH) };
    let mut exhausted = None;
    let filled = check(format, list.len(), &mut |clause, index, out| {
        let value = list.get(index).unwrap_or(Value::Null);
        let text =
            write(clause, &value, memory).ok_or_else(|| (clause.mismatch(&value.type_name()), None))?;
        let text = text.map_err(|error| {
            let message = error.to_string();
            if error.is_fatal() {
                exhausted = Some(error);
            }
            (message, None)
        })?;
        out.push_str(&text);
        Ok(())
    });
    match (filled, exhausted) {
        (_, Some(error)) => Err(error),
        (Ok((text, _)), None) => {
            memory.take(text.len())?;
            Ok(Value::from(text))
        }
        (Err(error), None) => Err(err!("{}", error.message)),
    }
}

/// The text of a value in a clause; `None` if the clause does not take it.
fn write(clause: Clause, value: &Value<'_>, memory: &mut Memory) -> Option<Result<String, EvalError>> {
    Some(Ok(match (clause, value) {
        (Clause::String, value) => return string(value, MAX_DEPTH, memory),
        (Clause::Decimal, Value::Int(value)) => value.to_string(),
        (Clause::Decimal, Value::Uint(value)) => value.to_string(),
        (Clause::Fixed(precision), value) => fixed(double(value)?, precision.unwrap_or(DEFAULT_PRECISION)),
        (Clause::Scientific(width), value) => {
            let text = scientific(double(value)?);
            // As upstream: the number after the point is the width.
            let width = width.unwrap_or(DEFAULT_PRECISION);
            format!("{}{text}", " ".repeat(width.saturating_sub(text.chars().count())))
        }
        (Clause::Binary, Value::Int(value)) => signed(*value, |value| format!("{value:b}")),
        (Clause::Binary, Value::Uint(value)) => format!("{value:b}"),
        (Clause::Binary, Value::Bool(value)) => u8::from(*value).to_string(),
        (Clause::Octal, Value::Int(value)) => signed(*value, |value| format!("{value:o}")),
        (Clause::Octal, Value::Uint(value)) => format!("{value:o}"),
        (Clause::Hex { upper }, value) => {
            let hex = match value {
                Value::Int(value) => signed(*value, |value| format!("{value:x}")),
                Value::Uint(value) => format!("{value:x}"),
                Value::String(text) => text.bytes().map(|byte| format!("{byte:02x}")).collect(),
                Value::Bytes(bytes) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
                _ => return None,
            };
            if upper { hex.to_uppercase() } else { hex }
        }
        _ => return None,
    }))
}

fn signed(value: i64, digits: fn(u64) -> String) -> String {
    let sign = if value < 0 { "-" } else { "" };
    format!("{sign}{}", digits(value.unsigned_abs()))
}

/// Doubles, and the strings that name doubles without digits.
fn double(value: &Value<'_>) -> Option<f64> {
    match value {
        Value::Double(value) => Some(*value),
        Value::String(text) => match &**text {
            "NaN" => Some(f64::NAN),
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
        _ => None,
    }
}

fn without_digits(value: f64) -> Option<&'static str> {
    if value.is_nan() {
        return Some("NaN");
    }
    value.is_infinite().then_some(if value > 0.0 { "\u{221e}" } else { "-\u{221e}" })
}

fn fixed(value: f64, precision: usize) -> String {
    if let Some(text) = without_digits(value) {
        return text.to_owned();
    }
    let text = format!("{value:.precision$}");
    let (sign, digits) = text.strip_prefix('-').map_or(("", text.as_str()), |digits| ("-", digits));
    match digits.split_once('.') {
        Some((whole, fraction)) => format!("{sign}{}.{fraction}", group(whole)),
        None => format!("{sign}{}", group(digits)),
    }
}

fn scientific(value: f64) -> String {
    if let Some(text) = without_digits(value) {
        return text.to_owned();
    }
    let text = format!("{value:.6e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, digits) = exponent.strip_prefix('-').map_or(("", exponent), |digits| ("\u{207b}", digits));
    let superscript = |digit: char| match digit {
        '1' => '\u{b9}',
        '2' => '\u{b2}',
        '3' => '\u{b3}',
        digit => char::from_u32(0x2070 + digit.to_digit(10).unwrap_or(0)).unwrap_or(digit),
    };
    let exponent: String = format!("{digits:0>2}").chars().map(superscript).collect();
    format!("{mantissa}\u{d7}10{sign}{exponent}")
}

/// The text of a value. Its memory is taken as the text grows: a list can hold one long string many times.
fn string(value: &Value<'_>, levels: usize, memory: &mut Memory) -> Option<Result<String, EvalError>> {
    let text = match value {
        Value::Null => Ok("null".to_owned()),
        Value::Bool(value) => Ok(value.to_string()),
        Value::String(text) => memory.take(text.len()).map(|()| text.to_string()),
        Value::Bytes(bytes) => memory.take(bytes.len()).and_then(|()| match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(EvalError::text("could not convert argument to string")),
        }),
        Value::Type(of) => Ok(of.runtime_name().to_owned()),
        Value::Int(_) | Value::Uint(_) | Value::Double(_) | Value::Timestamp(_) | Value::Duration(_) => {
            Ok(super::display(value))
        }
        Value::List(list) => list
            .iter()
            .map(|item| member(&item, levels, memory))
            .collect::<Result<Vec<String>, EvalError>>()
            .map(|items| format!("[{}]", items.join(", "))),
        Value::Map(map) => pairs(map, levels, memory).map(|pairs| format!("{{{}}}", pairs.join(", "))),
        _ => return None,
    };
    Some(text)
}

/// The entries of a map in the order of their keys' texts.
fn pairs(map: &Map<'_>, levels: usize, memory: &mut Memory) -> Result<Vec<String>, EvalError> {
    let mut pairs = Vec::new();
    for (key, value) in map.entries() {
        if !matches!(key, Value::String(_) | Value::Bool(_) | Value::Int(_) | Value::Uint(_)) {
            return Err(err!("no formatting function for map key of type {}", key.type_name()));
        }
        pairs.push((member(&key, levels, memory)?, member(&value, levels, memory)?));
    }
    pairs.sort();
    Ok(pairs.into_iter().map(|(key, value)| format!("{key}:{value}")).collect())
}

/// A value within a list or a map.
fn member(value: &Value<'_>, levels: usize, memory: &mut Memory) -> Result<String, EvalError> {
    let Some(levels) = levels.checked_sub(1) else {
        return Err(EvalError::text("value is nested too deeply"));
    };
    memory.take(16)?;
    match value {
        Value::String(text) => memory.take(2 * text.len()).map(|()| format!("{:?}", &**text)),
        Value::Bytes(bytes) => {
            memory.take(2 * bytes.len()).map(|()| format!("b{:?}", String::from_utf8_lossy(bytes)))
        }
        Value::Timestamp(time) => Ok(format!("timestamp(\"{time}\")")),
        Value::Duration(duration) => Ok(format!("duration(\"{duration}\")")),
        Value::Double(value) if !value.is_finite() => {
            let name = if value.is_nan() {
                "NaN"
            } else if *value > 0.0 {
                "+Inf"
            } else {
                "-Inf"
            };
            Ok(format!("{name:?}"))
        }
        Value::Double(value) => Ok(format!("{value:.6}")),
        other => string(other, levels, memory)
            .unwrap_or_else(|| Err(err!("no formatting function for {}", other.type_name()))),
    }
}
