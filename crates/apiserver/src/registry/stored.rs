//! The stored form of an object.
//!
//! The value is JSON that begins `{"kind":"Pod","apiVersion":"v1","metadata":{`, so that an answer is made by
//! copying: the resource version (known only once the store has numbered the change) goes in right behind that
//! beginning, and items of a list leave kind and apiVersion out, as upstream's do.

use bytes::{BufMut, Bytes, BytesMut};
use ferrite_api::resource::Resource;
use ferrite_json::{Map, Value};
use ferrite_store::{Entry, Key, Revision};
use std::borrow::Cow;
use std::sync::{Arc, LazyLock};

/// `pods`, or wherever else upstream puts them.
fn path(resource: &Resource) -> Cow<'_, str> {
    if resource.custom.is_some() {
        return Cow::Owned(format!("{}/{}", resource.group, resource.plural));
    }
    let plural = resource.storage.map_or(&*resource.plural, |storage| storage.plural);
    Cow::Borrowed(resource.hooks.storage_prefix.unwrap_or(plural))
}

/// Where the objects of built-in kinds lie below `/registry/`, with group and resource.
pub fn places() -> Vec<(String, String, String)> {
    let kinds = ferrite_api::kinds::built_in();
    let place = |row: &Resource| (path(row).into_owned(), row.group.to_string(), row.plural.to_string());
    kinds.iter().map(place).collect()
}

/// `/registry/pods/`, under which all objects of the resource lie.
pub(crate) fn prefix(resource: &Resource) -> String {
    ["/registry/", &path(resource), "/"].concat()
}

/// `/registry/pods/<namespace>/`, or all of them without a namespace.
pub(crate) fn prefix_in(resource: &Resource, namespace: Option<&str>) -> String {
    match namespace {
        Some(namespace) if resource.is_namespaced() => {
            ["/registry/", &path(resource), "/", namespace, "/"].concat()
        }
        _ => prefix(resource),
    }
}

pub(crate) fn key(resource: &Resource, namespace: &str, name: &str) -> Key {
    let path = &*path(resource);
    Key::from(&match resource.is_namespaced() {
        true => ["/registry/", path, "/", namespace, "/", name].concat(),
        false => ["/registry/", path, "/", name].concat(),
    })
}

pub(super) fn head(resource: &Resource) -> String {
    let stored_as = resource.storage_gvk();
    format!(r#"{{"kind":"{}","apiVersion":"{}","metadata":{{"#, stored_as.kind, stored_as.api_version())
}

/// Only the value's own beginning is replaced; this is where it ends.
const METADATA: &str = r#"{"metadata":{"#;

/// Most objects are shorter.
const USUAL: usize = 4 << 10;

/// An object as it is stored: without resource version.
pub(crate) struct Encoded {
    pub value: Bytes,
    /// Where the version stands among the metadata of an answer, whose members are in order. None when the rest of
    /// the value is not in an answer's order.
    version_at: Option<usize>,
}

/// Encodes the object for storage when the caller returns no response body.
pub(crate) fn encode(resource: &Resource, object: &Value) -> Bytes {
    encode_for_answer(resource, object).value
}

pub(crate) fn encode_for_answer(resource: &Resource, object: &Value) -> Encoded {
    let mut out = Vec::with_capacity(USUAL);
    out.extend_from_slice(head(resource).as_bytes());
    let empty = Map::new();
    let mut converted = None;
    if !resource.is_written_as_served() {
        resource.to_storage(converted.insert(object.clone()));
    }
    let object = converted.as_ref().unwrap_or(object);
    let object = object.as_object().unwrap_or(&empty);
    let metadata = object.get("metadata").and_then(Value::as_object).unwrap_or(&empty);
    let mut first = true;
    let mut version_at = None;
    for (key, value) in metadata.iter().filter(|(k, _)| *k != "resourceVersion") {
        let comma = usize::from(!first);
        if version_at.is_none() && key.as_str() > "resourceVersion" {
            version_at = Some(out.len() + comma);
        }
        put_member(&mut out, key, value, &mut first);
    }
    out.push(b'}');
    first = false;
    let rest = || object.iter().filter(|(k, _)| !matches!(k.as_str(), "kind" | "apiVersion" | "metadata"));
    for (key, value) in rest() {
        put_member(&mut out, key, value, &mut first);
    }
    out.push(b'}');
    if !resource.is_written_as_served() || rest().any(|(key, _)| key.as_str() < "metadata") {
        version_at = None;
    }
    // Copied, because it stays: without the room it was written in.
    Encoded { value: Bytes::copy_from_slice(&out), version_at }
}

/// The value of an object in the version that it says it is of.
pub(crate) fn encode_as_is(object: &Value) -> Bytes {
    let text = |key: &str| object[key].as_str().unwrap_or_default();
    let mut out = Vec::with_capacity(USUAL);
    out.push(b'{');
    let mut first = true;
    for key in ["kind", "apiVersion"] {
        put_member(&mut out, key, &text(key).into(), &mut first);
    }
    put_member(&mut out, "metadata", &object["metadata"], &mut first);
    let rest = object.as_object().into_iter().flat_map(Map::iter);
    for (key, value) in rest.filter(|(k, _)| !matches!(k.as_str(), "kind" | "apiVersion" | "metadata")) {
        put_member(&mut out, key, value, &mut first);
    }
    out.push(b'}');
    Bytes::copy_from_slice(&out)
}

impl Encoded {
    /// Of an object that is stored in another version than it is answered in.
    pub fn in_other_version(self) -> Self {
        Self { version_at: None, ..self }
    }
}

/// An object that was written, or would have been.
pub(crate) struct Written {
    /// None if it was dropped early: then the stored form has it.
    object: Option<Arc<Value>>,
    stored: Option<(Encoded, Revision)>,
}

impl Written {
    /// An object that was stored as `encoded` with a revision, which it has.
    pub fn stored(object: Option<Arc<Value>>, encoded: Encoded, revision: Revision) -> Self {
        Self { object, stored: Some((encoded, revision)) }
    }

    /// As upstream: an object of a custom kind is answered as its next reader gets it.
    pub fn reread(mut self, resource: &Resource) -> Self {
        let Some(custom) = resource.custom.as_ref().filter(|custom| !custom.reads_as_written()) else {
            return self;
        };
        match &mut self.stored {
            Some((encoded, _)) => {
                encoded.version_at = None;
                self.object = None;
            }
            None => {
                if let Some(object) = &mut self.object {
                    let object = Arc::make_mut(object);
                    custom.to_storage(object);
                    custom.from_storage(object);
                }
            }
        }
        self
    }

    /// The object itself.
    pub fn object(&self, resource: &Resource) -> Cow<'_, Value> {
        match (&self.object, &self.stored) {
            (Some(object), _) => Cow::Borrowed(object),
            (None, Some((encoded, revision))) => {
                Cow::Owned(decode_value(resource, &encoded.value, *revision).unwrap_or_default())
            }
            (None, None) => Cow::Owned(Value::Null),
        }
    }

    /// The object as JSON, if copying is enough to make it.
    pub fn json(&self, resource: &Resource) -> Option<Bytes> {
        let (Encoded { value, version_at }, revision) = self.stored.as_ref()?;
        let (before, after) = (value.get(beginning(resource)..(*version_at)?)?, value.get((*version_at)?..)?);
        let mut out = BytesMut::with_capacity(value.len() + 48);
        let start = format!(
            r#"{{"apiVersion":"{}","kind":"{}","metadata":{{"#,
            resource.api_version(),
            resource.kind
        );
        out.put_slice(start.as_bytes());
        out.put_slice(before);
        put_version(*revision, &mut out);
        out.put_u8(b',');
        out.put_slice(after);
        Some(out.freeze())
    }
}

/// An object that is not stored, or was before.
impl From<Arc<Value>> for Written {
    fn from(object: Arc<Value>) -> Self {
        Self { object: Some(object), stored: None }
    }
}

impl From<Value> for Written {
    fn from(object: Value) -> Self {
        Arc::new(object).into()
    }
}

fn put_member(out: &mut Vec<u8>, key: &str, value: &Value, first: &mut bool) {
    if !std::mem::take(first) {
        out.push(b',');
    }
    ferrite_json::write_text(key, out);
    out.push(b':');
    value.write_to(out);
}

/// The object with its resource version. None if the value is not in the format of [`encode`].
pub(crate) fn decode(resource: &Resource, entry: &Entry) -> Option<Value> {
    decode_value(resource, entry.plain(), entry.modified)
}

/// As [`decode`], without the field managers, which take most of the time where nobody asks for them.
pub(crate) fn decode_without_managers(resource: &Resource, entry: &Entry) -> Option<Value> {
    let mut object = ferrite_json::from_compact_without(entry.plain(), "managedFields").ok()?;
    resource.from_storage(&mut object);
    set_version(&mut object, entry.modified);
    Some(object)
}

fn decode_value(resource: &Resource, value: &[u8], revision: Revision) -> Option<Value> {
    let mut object = ferrite_json::from_compact(value).ok()?;
    resource.from_storage(&mut object);
    set_version(&mut object, revision);
    Some(object)
}

pub(crate) fn set_version(object: &mut Value, revision: Revision) {
    ferrite_api::meta::set_str(object, "resourceVersion", &revision.to_string());
}

/// Appends the whole object with its resource version.
pub(crate) fn put_object(entry: &Entry, out: &mut BytesMut) {
    let value = entry.plain();
    let (beginning, rest) = value.split_at(metadata_at(value).unwrap_or_default());
    out.reserve(value.len() + 48);
    out.put_slice(beginning);
    put_versioned(entry.modified, rest.get(1..).unwrap_or_default(), out);
}

/// Length of the beginning that all stored objects of a resource share.
pub(crate) fn beginning(resource: &Resource) -> usize {
    head(resource).len()
}

/// Appends the object as an item of a list: without kind and apiVersion, which are in its [`beginning`].
pub(crate) fn put_item(beginning: usize, entry: &Entry, out: &mut BytesMut) {
    put(METADATA, beginning, entry, out);
}

fn put(beginning: &str, skip: usize, entry: &Entry, out: &mut BytesMut) {
    let rest = entry.plain().get(skip..).unwrap_or_default();
    out.reserve(beginning.len() + rest.len() + 48);
    // The brace that opens the metadata is written with the version.
    out.put_slice(&beginning.as_bytes()[..beginning.len() - 1]);
    put_versioned(entry.modified, rest, out);
}

/// The metadata of a stored value, braces included, found without parsing the rest. None when there is none.
pub(crate) fn metadata(value: &[u8]) -> Option<&[u8]> {
    let start = metadata_at(value)?;
    let mut depth = 0usize;
    let mut in_string = false;
    let mut escaped = false;
    for (at, byte) in value[start..].iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => depth += 1,
            b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return value.get(start..=start + at);
                }
            }
            _ => {}
        }
    }
    None
}

/// Where the metadata's brace is. The beginning is ours: kind and apiVersion come first and hold nothing that looks
/// like the mark.
pub(super) fn metadata_at(value: &[u8]) -> Option<usize> {
    const MARK: &[u8] = b"\"metadata\":{";
    static FINDER: LazyLock<memchr::memmem::Finder<'static>> =
        LazyLock::new(|| memchr::memmem::Finder::new(MARK));
    let head = value.get(..MAX_HEAD).unwrap_or(value);
    FINDER.find(head).map(|at| at + MARK.len() - 1)
}

/// Kind and apiVersion of a stored object, with the brace that opens its metadata. Empty if it has none.
pub(super) fn beginning_of(value: &[u8]) -> &[u8] {
    metadata_at(value).and_then(|at| value.get(..=at)).unwrap_or_default()
}

/// Kind and apiVersion are shorter than this.
const MAX_HEAD: usize = 1024;

/// Appends the object's metadata with its resource version.
pub(crate) fn put_metadata(entry: &Entry, out: &mut BytesMut) {
    let metadata = metadata(entry.plain()).unwrap_or(b"{}");
    put_versioned(entry.modified, &metadata[1..], out);
}

/// Appends `{"resourceVersion":"7",` and the rest of the metadata after its brace.
fn put_versioned(revision: Revision, rest: &[u8], out: &mut BytesMut) {
    out.reserve(rest.len() + 48);
    out.put_u8(b'{');
    put_version(revision, out);
    if rest.first() != Some(&b'}') {
        out.put_u8(b',');
    }
    out.put_slice(rest);
}

/// Appends `"resourceVersion":"7"`.
fn put_version(revision: Revision, out: &mut BytesMut) {
    out.put_slice(b"\"resourceVersion\":\"");
    out.put_slice(revision.to_string().as_bytes());
    out.put_u8(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_api::resource::Strategy;
    use ferrite_json::json;

    struct Plain;
    impl Strategy for Plain {}

    #[test]
    fn what_was_written_is_answered_by_copying() {
        let pods = pods();
        for (rest, copied) in [
            (json!({}), true),
            (json!({"spec": {"a": "\"\u{1}é"}, "status": null}), true),
            (json!({"data": {"a": "b"}}), false),
        ] {
            let mut object = json!({"kind": "Pod", "apiVersion": "v1", "metadata": {
                "annotations": {"uid": "resourceVersion"}, "name": "a", "resourceVersion": "3", "uid": "u",
            }});
            object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            let encoded = encode_for_answer(&pods, &object);
            let again = encode_for_answer(&pods, &object);
            set_version(&mut object, Revision(7));
            let written = Written::stored(Some(Arc::new(object)), encoded, Revision(7));
            let whole = ferrite_json::to_vec(&*written.object(&pods)).unwrap();
            // A write that dropped its object reads it from the stored form.
            let let_go = Written::stored(None, again, Revision(7));
            assert_eq!(let_go.object(&pods), written.object(&pods), "{rest}");
            assert_eq!(written.json(&pods).is_some(), copied, "{rest}");
            assert!(written.json(&pods).is_none_or(|json| json == whole), "{rest}");
        }
    }

    fn pods() -> Resource {
        super::super::fixture::pods(Plain)
    }

    #[test]
    fn answers_are_made_by_copying() {
        let object = json!({
            "apiVersion": "v1", "kind": "Pod", "action": "sorts before apiVersion",
            "metadata": {"name": "web", "resourceVersion": "3", "labels": {"a": "b\\}\""}},
            "spec": {"nodeName": "\"quoted\""},
        });
        let value = encode(&pods(), &object);
        let entry = Entry {
            value,
            created: Revision(1),
            modified: Revision(7),
            version: 1,
            lease: ferrite_store::LeaseId::NONE,
            plain: ferrite_store::Plain::default(),
        };
        let mut expected = object.clone();
        expected["metadata"]["resourceVersion"] = "7".into();
        assert_eq!(decode(&pods(), &entry), Some(expected.clone()));
        let mut out = BytesMut::new();
        put_object(&entry, &mut out);
        assert_eq!(ferrite_json::from_slice::<Value>(&out).unwrap(), expected);
        let mut metadata = BytesMut::new();
        put_metadata(&entry, &mut metadata);
        assert_eq!(ferrite_json::from_slice::<Value>(&metadata).unwrap(), expected["metadata"]);
        let mut item = BytesMut::new();
        put_item(beginning(&pods()), &entry, &mut item);
        expected.as_object_mut().unwrap().retain(|k, _| k != "kind" && k != "apiVersion");
        assert_eq!(ferrite_json::from_slice::<Value>(&item).unwrap(), expected);
    }

    #[test]
    fn keys_are_laid_out_as_upstream_lays_them_out() {
        let kinds = ferrite_api::kinds::built_in();
        for (group, plural, namespace, expected) in [
            ("", "pods", "default", "/registry/pods/default/x"),
            ("", "services", "default", "/registry/services/specs/default/x"),
            ("", "endpoints", "default", "/registry/services/endpoints/default/x"),
            ("", "nodes", "", "/registry/minions/x"),
            ("", "replicationcontrollers", "default", "/registry/controllers/default/x"),
            ("events.k8s.io", "events", "default", "/registry/events/default/x"),
            ("networking.k8s.io", "ingresses", "default", "/registry/ingress/default/x"),
            (
                "apiextensions.k8s.io",
                "customresourcedefinitions",
                "",
                "/registry/apiextensions.k8s.io/customresourcedefinitions/x",
            ),
            ("apiregistration.k8s.io", "apiservices", "", "/registry/apiregistration.k8s.io/apiservices/x"),
        ] {
            let resource = kinds.iter().find(|r| r.group == group && r.plural == plural).unwrap();
            assert_eq!(key(resource, namespace, "x"), Key::from(expected), "{group} {plural}");
        }
    }
}
