//! Named formats: checks of names and of other texts.

use std::any::Any;
use std::sync::OnceLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use regex::Regex;

use super::{Entry, NO_MATCH, Url};
use crate::error::EvalError;
use crate::time;
use crate::value::{Opaque, Value};

type Result<'a> = std::result::Result<Value<'a>, EvalError>;

/// A format that texts can be checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NamedFormat {
    name: &'static str,
    display: &'static str,
    /// The size of the format's regular expression, from which the cost of a check is computed.
    pub regex_size: u64,
    problems: fn(&str) -> Vec<String>,
}

const FORMATS: &[NamedFormat] = &[
    format("dns1123Label", "DNS1123Label", 30, label),
    format("dns1123Subdomain", "DNS1123Subdomain", 60, subdomain),
    format("dns1035Label", "DNS1035Label", 30, old_label),
    format("qualifiedName", "QualifiedName", 60, qualified_name),
    format("dns1123LabelPrefix", "DNS1123LabelPrefix", 30, |text| label(&masked(text))),
    format("dns1123SubdomainPrefix", "DNS1123SubdomainPrefix", 60, |text| subdomain(&masked(text))),
    format("dns1035LabelPrefix", "DNS1035LabelPrefix", 30, |text| old_label(&masked(text))),
    format("labelValue", "LabelValue", 40, label_value),
    format("uri", "URI", 1103, |text| {
        Url::parse(text).err().map(|error| error.to_string()).into_iter().collect()
    }),
    format("uuid", "uuid", 70, |text| unless(is_uuid(text), "does not match the UUID format")),
    format("byte", "byte", 84, |text| unless(is_base64(text), "invalid base64")),
    format("date", "date", 71, |text| unless(time::parse_date(text).is_some(), "invalid date")),
    format("datetime", "datetime", 71, |text| unless(is_date_time(text), "invalid datetime")),
];

const fn format(
    name: &'static str,
    display: &'static str,
    regex_size: u64,
    problems: fn(&str) -> Vec<String>,
) -> NamedFormat {
    NamedFormat { name, display, regex_size, problems }
}

pub(super) const TABLE: &[Entry] = &[
    ("format.named", |_, args| match args {
        [Value::String(name)] => {
            let found = FORMATS.iter().find(|format| format.name == &**name);
            Ok(found.map_or(Value::NONE, |format| Value::some(Value::opaque(*format))))
        }
        _ => Err(NO_MATCH),
    }),
    ("validate", |_, args| validate(args)),
    ("format.dns1123Label", |_, _| constant("dns1123Label")),
    ("format.dns1123Subdomain", |_, _| constant("dns1123Subdomain")),
    ("format.dns1035Label", |_, _| constant("dns1035Label")),
    ("format.qualifiedName", |_, _| constant("qualifiedName")),
    ("format.dns1123LabelPrefix", |_, _| constant("dns1123LabelPrefix")),
    ("format.dns1123SubdomainPrefix", |_, _| constant("dns1123SubdomainPrefix")),
    ("format.dns1035LabelPrefix", |_, _| constant("dns1035LabelPrefix")),
    ("format.labelValue", |_, _| constant("labelValue")),
    ("format.uri", |_, _| constant("uri")),
    ("format.uuid", |_, _| constant("uuid")),
    ("format.byte", |_, _| constant("byte")),
    ("format.date", |_, _| constant("date")),
    ("format.datetime", |_, _| constant("datetime")),
];

fn constant<'a>(name: &str) -> Result<'a> {
    FORMATS.iter().find(|format| format.name == name).map(|format| Value::opaque(*format)).ok_or(NO_MATCH)
}

fn validate<'a>(args: &[Value<'a>]) -> Result<'a> {
    let [format, Value::String(text)] = args else { return Err(NO_MATCH) };
    let format = format.downcast::<NamedFormat>().ok_or(NO_MATCH)?;
    let problems = (format.problems)(text);
    if problems.is_empty() {
        return Ok(Value::NONE);
    }
    Ok(Value::some(Value::list(problems.into_iter().map(Value::from).collect())))
}

fn unless(valid: bool, problem: &str) -> Vec<String> {
    if valid { Vec::new() } else { vec![problem.to_owned()] }
}

/// The dash at the end of a prefix is followed by more: it counts as a letter.
fn masked(text: &str) -> String {
    match text.strip_suffix('-') {
        Some(rest) if !rest.is_empty() => {
            let mut chars = rest.chars();
            chars.next_back();
            format!("{}a", chars.as_str())
        }
        _ => text.to_owned(),
    }
}

const LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN: &str = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const OLD_LABEL: &str = "[a-z]([-a-z0-9]*[a-z0-9])?";
const LABEL_KEY: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const LABEL_VALUE: &str = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?";

fn is_match(pattern: &'static str, text: &str) -> bool {
    static COMPILED: OnceLock<Vec<(&'static str, Regex)>> = OnceLock::new();
    let compiled = COMPILED.get_or_init(|| {
        [LABEL, SUBDOMAIN, OLD_LABEL, LABEL_KEY, LABEL_VALUE]
            .into_iter()
            .filter_map(|pattern| Some((pattern, Regex::new(&format!("^(?:{pattern})$")).ok()?)))
            .collect()
    });
    compiled.iter().find(|(own, _)| *own == pattern).is_some_and(|(_, regex)| regex.is_match(text))
}

fn too_long(length: usize) -> String {
    format!("must be no more than {length} characters")
}

fn mismatch(rule: &str, pattern: &str, examples: &[&str]) -> String {
    let examples: Vec<String> = examples.iter().map(|example| format!("'{example}', ")).collect();
    format!("{rule} (e.g. {}regex used for validation is '{pattern}')", examples.join(" or "))
}

pub(super) fn label(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if text.len() > 63 {
        problems.push(too_long(63));
    }
    if !is_match(LABEL, text) {
        problems.push(if is_match(SUBDOMAIN, text) {
            "must not contain dots".to_owned()
        } else {
            let rule = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and \
                        must start and end with an alphanumeric character";
            mismatch(rule, LABEL, &["my-name", "123-abc"])
        });
    }
    problems
}

pub(super) fn subdomain(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if text.len() > 253 {
        problems.push(too_long(253));
    }
    if !is_match(SUBDOMAIN, text) {
        let rule = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
                    and must start and end with an alphanumeric character";
        problems.push(mismatch(rule, SUBDOMAIN, &["example.com"]));
    }
    problems
}

fn old_label(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if text.len() > 63 {
        problems.push(too_long(63));
    }
    if !is_match(OLD_LABEL, text) {
        let rule = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an \
                    alphabetic character, and end with an alphanumeric character";
        problems.push(mismatch(rule, OLD_LABEL, &["my-name", "abc-123"]));
    }
    problems
}

const KEY_RULE: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
                        alphanumeric character";
const KEY_EXAMPLES: &[&str] = &["MyName", "my.name", "123-abc"];

fn qualified_name(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let parts: Vec<&str> = text.split('/').collect();
    let name = match parts.as_slice() {
        [name] => *name,
        ["", name] => {
            problems.push("prefix part must be non-empty".to_owned());
            *name
        }
        [prefix, name] => {
            problems.extend(subdomain(prefix).into_iter().map(|problem| format!("prefix part {problem}")));
            *name
        }
        _ => {
            let rule = mismatch(KEY_RULE, LABEL_KEY, KEY_EXAMPLES);
            return vec![format!(
                "a valid label key {rule} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
    };
    if name.is_empty() {
        problems.push("name part must be non-empty".to_owned());
    } else if name.len() > 63 {
        problems.push(format!("name part {}", too_long(63)));
    }
    if !is_match(LABEL_KEY, name) {
        problems.push(format!("name part {}", mismatch(KEY_RULE, LABEL_KEY, KEY_EXAMPLES)));
    }
    problems
}

fn label_value(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if text.len() > 63 {
        problems.push(too_long(63));
    }
    if !is_match(LABEL_VALUE, text) {
        let rule = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', \
                    and must start and end with an alphanumeric character";
        problems.push(mismatch(rule, LABEL_VALUE, &["MyValue", "my_value", "12345"]));
    }
    problems
}

/// Hexadecimal digits in groups of 8, 4, 4, 4 and 12, with or without dashes between them.
fn is_uuid(text: &str) -> bool {
    let mut rest = text;
    for (at, length) in [8, 4, 4, 4, 12].into_iter().enumerate() {
        if at > 0 {
            rest = rest.strip_prefix('-').unwrap_or(rest);
        }
        match rest.split_at_checked(length) {
            Some((group, after)) if group.bytes().all(|b| b.is_ascii_hexdigit()) => rest = after,
            _ => return false,
        }
    }
    rest.is_empty()
}

fn is_base64(text: &str) -> bool {
    STANDARD.decode(text).is_ok()
}

/// A date, `T` and a time of day with a zone.
fn is_date_time(text: &str) -> bool {
    time::parse_timestamp(&text.to_uppercase()).is_some() && text.len() > 10
}

impl Opaque for NamedFormat {
    fn type_name(&self) -> &'static str {
        "kubernetes.NamedFormat"
    }

    fn equals(&self, other: &dyn Opaque) -> bool {
        other.as_any().downcast_ref::<Self>().is_some_and(|other| self.name == other.name)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn text(&self) -> String {
        self.display.to_owned()
    }
}
