//! Objects as an informer keeps them: JSON text and the few values that decide where it belongs.

use std::sync::Arc;

use ferrite_json::Text;

use crate::page::Head;
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

    #[test]
    fn odd_objects_are_refused_without_their_content() {
        for text in [r#"{"metadata":7}"#, r#"{"metadata":{"name":["hunter2"]}}"#, "{", r#"{"kind":"x"}"#] {
            let error = RawObject::parse(text).unwrap_err();
            assert!(!error.to_string().contains("hunter2"), "{error}");
        }
    }
}
