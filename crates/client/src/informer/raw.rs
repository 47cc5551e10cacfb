//! Objects as an informer keeps them: JSON text and the few values that decide where it belongs.

use std::sync::Arc;

use ferrite_json::Text;

use crate::page::Head;
use crate::scan;
use crate::{DecodeError, ObjectKey, Uid};

/// An object that nobody has decoded yet.
#[derive(Debug, Clone)]
pub(super) struct RawObject {
    pub(super) key: Arc<ObjectKey>,
    pub(super) uid: Uid,
    pub(super) version: Text,
    /// The object without `metadata.managedFields`, which are often half of it and which no reader asks for.
    pub(super) json: Arc<[u8]>,
}

impl RawObject {
    pub(super) fn parse(text: &str) -> Result<Self, DecodeError> {
        Self::scan(text).map_or_else(|| Self::parse_any(text), Ok)
    }

    /// Reads JSON as API servers write it. None for all other.
    pub(super) fn scan(text: &str) -> Option<Self> {
        scan::head(text).map(|head| Self::from_head(text, &head))
    }

    fn from_head(text: &str, head: &scan::Head<'_>) -> Self {
        let json = match &head.managed_fields {
            Some(cut) => [&text.as_bytes()[..cut.start], &text.as_bytes()[cut.end..]].concat().into(),
            None => Arc::from(text.as_bytes()),
        };
        Self {
            key: Arc::new(ObjectKey::new(head.namespace, head.name)),
            uid: Uid::from(head.uid),
            version: head.resource_version.into(),
            json,
        }
    }

    /// Reads any JSON, also such as [`scan::head`] does not.
    fn parse_any(text: &str) -> Result<Self, DecodeError> {
        let head: Head<'_> = crate::object::decode_borrowed(text)?;
        let meta = head.metadata;
        let json = match meta.managed_fields {
            Some(fields) => without_member(text, "\"managedFields\"", fields.get()),
            None => Arc::from(text.as_bytes()),
        };
        Ok(Self {
            key: Arc::new(ObjectKey::new(meta.namespace.unwrap_or_default(), meta.name.unwrap_or_default())),
            uid: Uid::from(&*meta.uid.unwrap_or_default()),
            version: meta.resource_version.unwrap_or_default().into(),
            json,
        })
    }
}

/// `text` without the member `quoted_key`, whose value is the slice `value` of `text`.
fn without_member(text: &str, quoted_key: &str, value: &str) -> Arc<[u8]> {
    let whole = || Arc::from(text.as_bytes());
    let Some(start) = (value.as_ptr() as usize).checked_sub(text.as_ptr() as usize) else { return whole() };
    let end = start + value.len();
    let (Some(before), Some(after)) = (text.get(..start), text.get(end..)) else { return whole() };
    let Some(before) = before.trim_end().strip_suffix(':') else { return whole() };
    let Some(before) = before.trim_end().strip_suffix(quoted_key) else { return whole() };
    let (before, after) = match after.trim_start().strip_prefix(',') {
        Some(after) => (before, after),
        None => {
            let trimmed = before.trim_end();
            (trimmed.strip_suffix(',').unwrap_or(trimmed), after)
        }
    };
    [before.as_bytes(), after.as_bytes()].concat().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn managed_fields_are_cut_out_wherever_they_stand() {
        for (text, kept) in [
            (
                r#"{"metadata":{"name":"a","managedFields":[{"x":1}]},"b":1}"#,
                r#"{"metadata":{"name":"a"},"b":1}"#,
            ),
            (
                r#"{"metadata":{"managedFields" : [] , "name":"a"},"b":1}"#,
                r#"{"metadata":{ "name":"a"},"b":1}"#,
            ),
            (r#"{"metadata":{"managedFields":null}}"#, r#"{"metadata":{"managedFields":null}}"#),
            (r#"{"metadata":{"managedFields":[1]}}"#, r#"{"metadata":{}}"#),
            (
                r#"{"metadata":{"uid":"1","managedFields":[1],"name":"a"}}"#,
                r#"{"metadata":{"uid":"1","name":"a"}}"#,
            ),
        ] {
            let raw = RawObject::parse(text).unwrap();
            assert_eq!(std::str::from_utf8(&raw.json).unwrap(), kept, "{text}");
        }
    }

    fn parts(object: RawObject) -> (ObjectKey, Uid, Text, Vec<u8>) {
        ((*object.key).clone(), object.uid, object.version, object.json.to_vec())
    }

    proptest! {
        #[test]
        fn a_scanned_object_is_the_parsed_one(
            names in proptest::collection::vec("(name|namespace|uid|resourceVersion|managedFields|labels)", 0..6),
            values in proptest::collection::vec(
                prop_oneof!["\"[a-z\\\\n]{0,3}\"", "(null|7|\\[\\]|\\{\\}|\\[1,\\{\"a\":\"]\"\\}\\])"], 6),
            before in "(|\"kind\":\"Pod\",|\"a\":\\{\"metadata\":\\{\\}\\},| )",
            after in "(|,\"spec\":\\{\"x\":\\[1,\"}\"\\]\\}|,\"metadata\":\\{\\}|,|x)",
        ) {
            let members: Vec<_> = names.iter().zip(&values).map(|(name, value)| format!("\"{name}\":{value}")).collect();
            let text = format!("{{{before}\"metadata\":{{{}}}{after}}}", members.join(","));
            if let Some(head) = scan::head(&text)
                && let Ok(parsed) = RawObject::parse_any(&text)
            {
                prop_assert_eq!(parts(RawObject::from_head(&text, &head)), parts(parsed), "{}", text);
            }
            // The scanner does not look into values. A decoder does, and it refuses what is left.
            if RawObject::parse_any(&text).is_err() && let Some(head) = scan::head(&text) {
                let left = RawObject::from_head(&text, &head).json;
                let is_cut = head.managed_fields.is_some();
                prop_assert!(is_cut || serde_json::from_slice::<Head<'_>>(&left).is_err(), "{}", text);
            }
        }
    }

    #[test]
    fn odd_objects_are_refused_without_their_content() {
        for text in [r#"{"metadata":7}"#, r#"{"metadata":{"name":["hunter2"]}}"#, "{", r#"{"kind":"x"}"#] {
            let error = RawObject::parse(text).unwrap_err();
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
