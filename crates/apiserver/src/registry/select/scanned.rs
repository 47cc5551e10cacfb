//! Selection by the text of a stored object: a list of few objects among many must not parse them all.

use super::super::stored;
use super::super::text::{member, place_of, text_in};
use ferrite_api::resource::Resource;
use ferrite_api::selector::{FieldTerm, LabelSelector, Labels};
use ferrite_json::scan;
use ferrite_store::FieldPlace;

/// Returns true if the selectors select the object. None if the text does not say it: the object has to be parsed.
pub(super) fn selects(
    labels: &LabelSelector,
    fields: &[FieldTerm],
    resource: &Resource,
    object: &[u8],
) -> Option<bool> {
    let metadata = &object[stored::metadata_at(object)?..];
    if !labels.is_empty() {
        let own = match member(metadata, b"labels")? {
            Some(text) => ScannedLabels::of(text)?,
            None => ScannedLabels(""),
        };
        if !labels.matches(&own) {
            return Some(false);
        }
    }
    for term in fields {
        let text = match term.field.as_str() {
            "metadata.name" => text_in(metadata, place_of(metadata, "name")?)?,
            "metadata.namespace" => text_in(metadata, place_of(metadata, "namespace")?)?,
            field => text_of(resource, object, field)?,
        };
        if (text == term.value.as_bytes()) != term.equal {
            return Some(false);
        }
    }
    Some(true)
}

/// The text of a field that is not of the metadata. None if the field is no text, or has another value when it is parsed.
pub(super) fn text_of<'a>(resource: &Resource, object: &'a [u8], field: &str) -> Option<&'a [u8]> {
    if !resource.strategy.text_fields().contains(&field) {
        return None;
    }
    match place_of(object, field)? {
        // An object that somebody else stored may lack a value that it has by default.
        FieldPlace::Absent => None,
        place => text_in(object, place),
    }
}

/// Labels as they are written: an object of strings without escapes, or nothing.
struct ScannedLabels<'a>(&'a str);

impl<'a> ScannedLabels<'a> {
    /// The labels at the beginning of the text. None if they are written in another way.
    fn of(text: &'a [u8]) -> Option<Self> {
        if text.first() == Some(&b'n') {
            return Some(Self(""));
        }
        let labels = Self(std::str::from_utf8(&text[..scan::value_end(text, 0)?]).ok()?);
        for pair in labels.pairs() {
            pair?;
        }
        Some(labels)
    }

    /// Each label with its value; one None instead of the first that cannot be read.
    fn pairs(&self) -> Pairs<'a> {
        let rest = self.0.strip_prefix('{').filter(|rest| *rest != "}");
        Pairs(rest.or((!self.0.is_empty() && self.0 != "{}").then_some("")))
    }
}

/// The text from the next label on.
struct Pairs<'a>(Option<&'a str>);

impl<'a> Iterator for Pairs<'a> {
    type Item = Option<(&'a str, &'a str)>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.0.take()?;
        Some(pair(rest).map(|(pair, rest)| {
            self.0 = rest;
            pair
        }))
    }
}

/// A label with its value, and the text from the next one on.
fn pair(text: &str) -> Option<((&str, &str), Option<&str>)> {
    let (key, rest) = plain(text)?;
    let (value, rest) = plain(rest.strip_prefix(':')?)?;
    let next = match rest {
        "}" => None,
        rest => Some(rest.strip_prefix(',')?),
    };
    Some(((key, value), next))
}

/// The string at the beginning, and the rest.
fn plain(text: &str) -> Option<(&str, &str)> {
    let (found, end) = scan::plain_string(text.as_bytes(), 0)?;
    Some((text.get(1..=found.len())?, text.get(end..)?))
}

impl Labels for ScannedLabels<'_> {
    fn label(&self, key: &str) -> Option<&str> {
        self.pairs().flatten().find(|(own, _)| *own == key).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type LabelPairs = [(&'static str, &'static str)];

    #[test]
    fn labels_are_read_where_they_stand() {
        let rows: [(&str, Option<&LabelPairs>); 12] = [
            ("{}", Some(&[])),
            ("null,", Some(&[])),
            (r#"{"a":"b"},"annotations":{"c":"d"}"#, Some(&[("a", "b")])),
            (r#"{"a":"b","c/d":""}}"#, Some(&[("a", "b"), ("c/d", "")])),
            (r#"{"a":"é","ü":"}"}"#, Some(&[("a", "é"), ("ü", "}")])),
            (r#"{"a":"\u0062"}"#, None),
            (r#"{"a" :"b"}"#, None),
            (r#"{"a":7}"#, None),
            (r#"{"a":"b",}"#, None),
            (r#"["a"]"#, None),
            (r#""a""#, None),
            (r#"{"a":"b""#, None),
        ];
        for (text, wanted) in rows {
            let labels = ScannedLabels::of(text.as_bytes());
            let found = labels.as_ref().map(|labels| labels.pairs().map(Option::unwrap).collect::<Vec<_>>());
            assert_eq!(found.as_deref(), wanted, "{text}");
            for (key, value) in wanted.into_iter().flatten() {
                assert_eq!(labels.as_ref().unwrap().label(key), Some(*value), "{text}");
            }
            assert_eq!(labels.as_ref().and_then(|labels| labels.label("annotations")), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_too_odd(bytes in proptest::collection::vec(any::<u8>(), 0..60), brace in any::<bool>()) {
            let text = [if brace { &b"{\""[..] } else { b"" }, &bytes].concat();
            if let Some(labels) = ScannedLabels::of(&text) {
                let _ = labels.label("a");
            }
        }
    }
}
