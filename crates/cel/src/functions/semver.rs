//! Semantic versions.

use std::any::Any;
use std::cmp::Ordering;
use std::fmt;

use super::{Entry, NO_MATCH, Quantity};
use crate::error::{EvalError, err};
use crate::value::{Opaque, Value};

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

/// A version: `1.2.3-alpha.1+build`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Semver {
    numbers: [u64; 3],
    prerelease: Vec<Part>,
    build: Vec<String>,
}

/// A part of the name of a version before a release.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Number(u64),
    Text(String),
}

pub(super) const TABLE: &[Entry] = &[
    ("semver", |_, args| parse_args(args)?.map(Value::opaque)),
    ("isSemver", |_, args| Ok(Value::Bool(parse_args(args)?.is_ok()))),
    ("major", |_, args| number(args, 0)),
    ("minor", |_, args| number(args, 1)),
    ("patch", |_, args| number(args, 2)),
    ("compareTo", |_, args| Ok(Value::Int(order(args)? as i64))),
    ("isGreaterThan", |_, args| Ok(Value::Bool(order(args)?.is_gt()))),
    ("isLessThan", |_, args| Ok(Value::Bool(order(args)?.is_lt()))),
];

fn parse_args(args: &[Value<'_>]) -> std::result::Result<std::result::Result<Semver, EvalError>, EvalError> {
    match args {
        [Value::String(text)] => Ok(Semver::parse(text)),
        [Value::String(text), Value::Bool(false)] => Ok(Semver::parse(text)),
        [Value::String(text), Value::Bool(true)] => Ok(normalize(text).and_then(|text| Semver::parse(&text))),
        _ => Err(NO_MATCH),
    }
}

/// The order of two versions or of two quantities.
fn order(args: &[Value<'_>]) -> std::result::Result<Ordering, EvalError> {
    let [a, b] = args else { return Err(NO_MATCH) };
    if let (Some(a), Some(b)) = (a.downcast::<Semver>(), b.downcast::<Semver>()) {
        return Ok(a.compare(b));
    }
    match (a.downcast::<Quantity>(), b.downcast::<Quantity>()) {
        (Some(a), Some(b)) => Ok(a.cmp(b)),
        _ => Err(NO_MATCH),
    }
}

fn number<'a>(args: &[Value<'a>], at: usize) -> Result<'a> {
    let [value] = args else { return Err(NO_MATCH) };
    let version = value.downcast::<Semver>().ok_or(NO_MATCH)?;
    Ok(Value::Int(version.numbers[at] as i64))
}

/// The version without a leading `v`, with all three numbers and none that begins with a zero.
fn normalize(text: &str) -> std::result::Result<String, EvalError> {
    let text = text.strip_prefix('v').unwrap_or(text);
    let mut parts: Vec<String> = text.splitn(3, '.').map(str::to_owned).collect();
    for part in &mut parts {
        if part.len() > 1 {
            let trimmed = part.trim_start_matches('0');
            *part = match trimmed.as_bytes().first() {
                Some(b'0'..=b'9') => trimmed.to_owned(),
                _ => format!("0{trimmed}"),
            };
        }
    }
    if parts.len() < 3 {
        if parts.last().is_some_and(|last| last.contains(['+', '-'])) {
            return Err(EvalError::text("short version cannot contain PreRelease/Build meta data"));
        }
        parts.resize(3, "0".to_owned());
    }
    Ok(parts.join("."))
}

fn numeric(text: &str, capital: &str, name: &str) -> std::result::Result<u64, EvalError> {
    if !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(err!("Invalid character(s) found in {name} number {text:?}"));
    }
    if text.len() > 1 && text.starts_with('0') {
        return Err(err!("{capital} number must not contain leading zeroes {text:?}"));
    }
    text.parse().map_err(|_| match text.is_empty() {
        true => err!("strconv.ParseUint: parsing \"\": invalid syntax"),
        false => err!("strconv.ParseUint: parsing {text:?}: value out of range"),
    })
}

impl Semver {
    pub fn parse(text: &str) -> std::result::Result<Self, EvalError> {
        if text.is_empty() {
            return Err(EvalError::text("Version string empty"));
        }
        let parts: Vec<&str> = text.splitn(3, '.').collect();
        let [major, minor, rest] = parts.as_slice() else {
            return Err(EvalError::text("No Major.Minor.Patch elements found"));
        };
        let major = numeric(major, "Major", "major")?;
        let minor = numeric(minor, "Minor", "minor")?;
        let (rest, build) = rest.split_once('+').map_or((*rest, None), |(rest, build)| (rest, Some(build)));
        let (patch, prerelease) =
            rest.split_once('-').map_or((rest, None), |(patch, pre)| (patch, Some(pre)));
        let patch = numeric(patch, "Patch", "patch")?;
        let allowed = |part: &str| part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        let prerelease = prerelease
            .into_iter()
            .flat_map(|names| names.split('.'))
            .map(|part| {
                if part.is_empty() {
                    return Err(EvalError::text("Prerelease is empty"));
                }
                if part.bytes().all(|b| b.is_ascii_digit()) {
                    if part.len() > 1 && part.starts_with('0') {
                        let message = "Numeric PreRelease version must not contain leading zeroes";
                        return Err(err!("{message} {part:?}"));
                    }
                    return part.parse().map(Part::Number).map_err(|_| err!("invalid number {part:?}"));
                }
                if !allowed(part) {
                    return Err(err!("Invalid character(s) found in prerelease {part:?}"));
                }
                Ok(Part::Text(part.to_owned()))
            })
            .collect::<std::result::Result<_, _>>()?;
        let build = build
            .into_iter()
            .flat_map(|names| names.split('.'))
            .map(|part| match part {
                "" => Err(EvalError::text("Build meta data is empty")),
                part if !allowed(part) => Err(err!("Invalid character(s) found in build meta data {part:?}")),
                part => Ok(part.to_owned()),
            })
            .collect::<std::result::Result<_, _>>()?;
        Ok(Self { numbers: [major, minor, patch], prerelease, build })
    }

    /// The order of versions; builds do not count.
    fn compare(&self, other: &Self) -> Ordering {
        self.numbers.cmp(&other.numbers).then_with(|| {
            match (self.prerelease.is_empty(), other.prerelease.is_empty()) {
                (true, true) => Ordering::Equal,
                (true, false) => Ordering::Greater,
                (false, true) => Ordering::Less,
                (false, false) => self.prerelease.cmp(&other.prerelease),
            }
        })
    }
}

impl fmt::Display for Semver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.numbers;
        write!(f, "{major}.{minor}.{patch}")?;
        for (at, part) in self.prerelease.iter().enumerate() {
            f.write_str(if at == 0 { "-" } else { "." })?;
            match part {
                Part::Number(number) => write!(f, "{number}")?,
                Part::Text(text) => f.write_str(text)?,
            }
        }
        for (at, part) in self.build.iter().enumerate() {
            write!(f, "{}{part}", if at == 0 { "+" } else { "." })?;
        }
        Ok(())
    }
}

impl Opaque for Semver {
    fn type_name(&self) -> &'static str {
        "kubernetes.Semver"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>().is_some_and(|other| self.compare(other).is_eq())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.to_string()
    }
}
