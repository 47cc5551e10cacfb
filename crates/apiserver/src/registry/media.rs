//! The media type of stored objects: JSON, which readers copy from, or upstream's protobuf.
//!
//! Stands between the store and encryption at rest, so that an etcd may have protobuf and the replica in memory always
//! has JSON.

use super::stored;
use bytes::Bytes;
use ferrite_api::codec::protobuf;
use ferrite_json::Value;
use ferrite_store::{Key, Prepared, TransformError, Transformer};
use std::sync::Arc;

/// Reads objects of either form, and writes one of them.
#[derive(Debug)]
pub struct StorageMedia {
    /// Encryption at rest.
    inner: Arc<dyn Transformer>,
    writes_protobuf: bool,
}

impl StorageMedia {
    pub fn new(inner: Arc<dyn Transformer>, writes_protobuf: bool) -> Self {
        Self { inner, writes_protobuf }
    }
}

/// JSON of a value in protobuf. None: it is no protobuf, or of a kind that is not known here.
fn to_json(plain: &[u8]) -> Result<Option<Bytes>, TransformError> {
    if !plain.starts_with(protobuf::MAGIC) {
        return Ok(None);
    }
    let failed =
        |error: &dyn std::fmt::Display| TransformError(format!("the object is no protobuf: {error}"));
    let decoded = protobuf::decode(plain).map_err(|error| failed(&error))?;
    Ok(decoded.map(|mut object| {
        // The store's revision is the version: an object that says another one is not believed.
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("resourceVersion");
        }
        stored::encode_as_is(&object)
    }))
}

/// Protobuf of a value in JSON. None: its kind has none, as that of a custom resource.
fn to_protobuf(plain: &[u8]) -> Option<Bytes> {
    if plain.first() != Some(&b'{') {
        return None;
    }
    let object: Value = ferrite_json::from_slice(plain).ok()?;
    protobuf::encode(&object).ok().map(Bytes::from)
}

impl Transformer for StorageMedia {
    fn seal(&self, key: &Key, value: &Bytes) -> Result<Option<Bytes>, TransformError> {
        let encoded = if self.writes_protobuf { to_protobuf(value) } else { None };
        let sealed = self.inner.seal(key, encoded.as_ref().unwrap_or(value))?;
        Ok(sealed.or(encoded))
    }

    fn unseal(&self, key: &Key, stored: &Bytes) -> Result<Option<Bytes>, TransformError> {
        let opened = self.inner.unseal(key, stored)?;
        let json = to_json(opened.as_ref().unwrap_or(stored))?;
        Ok(json.or(opened))
    }

    fn prepare<'a>(&'a self, stored: Vec<(Key, Bytes)>) -> Prepared<'a> {
        self.inner.prepare(stored)
    }

    /// As upstream: an object that would be stored in another form is written anew, also when nothing changes.
    fn is_stale(&self, key: &Key, stored: &Bytes) -> bool {
        if self.inner.is_stale(key, stored) {
            return true;
        }
        let Ok(opened) = self.inner.unseal(key, stored) else { return false };
        let plain = opened.as_ref().unwrap_or(stored);
        match plain.starts_with(protobuf::MAGIC) {
            true => !self.writes_protobuf,
            false => self.writes_protobuf && to_protobuf(plain).is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    /// Stores values as they are.
    #[derive(Debug)]
    struct Plain;

    impl Transformer for Plain {
        fn seal(&self, _: &Key, _: &Bytes) -> Result<Option<Bytes>, TransformError> {
            Ok(None)
        }

        fn unseal(&self, _: &Key, _: &Bytes) -> Result<Option<Bytes>, TransformError> {
            Ok(None)
        }

        fn prepare<'a>(&'a self, _: Vec<(Key, Bytes)>) -> Prepared<'a> {
            Box::pin(std::future::ready(()))
        }

        fn is_stale(&self, _: &Key, _: &Bytes) -> bool {
            false
        }
    }

    fn media(writes_protobuf: bool) -> StorageMedia {
        StorageMedia::new(Arc::new(Plain), writes_protobuf)
    }

    #[test]
    fn either_form_is_read_and_one_is_written() {
        let key = Key::from("/registry/configmaps/default/a");
        let map = json!({"kind": "ConfigMap", "apiVersion": "v1",
            "metadata": {"name": "a", "namespace": "default"}, "data": {"k": "v"}});
        let text = stored::encode_as_is(&map);
        assert_eq!(media(false).seal(&key, &text), Ok(None));
        assert_eq!(media(false).unseal(&key, &text), Ok(None));
        let binary = media(true).seal(&key, &text).expect("sealed").expect("another form");
        assert!(binary.starts_with(b"k8s\0"));
        for writes in [false, true] {
            assert_eq!(media(writes).unseal(&key, &binary), Ok(Some(text.clone())));
            assert_eq!(media(writes).is_stale(&key, &binary), !writes);
            assert_eq!(media(writes).is_stale(&key, &text), writes);
        }
    }

    #[test]
    fn values_without_protobuf_stay_as_they_are() {
        let key = Key::from("/registry/example.com/tests/a");
        for value in [
            &br#"{"kind":"Test","apiVersion":"example.com/v1","metadata":{"name":"a"}}"#[..],
            b"",
            b"1",
            b"not json",
            b"{",
        ] {
            let value = Bytes::copy_from_slice(value);
            assert_eq!(media(true).seal(&key, &value), Ok(None));
            assert_eq!(media(true).unseal(&key, &value), Ok(None));
            assert!(!media(true).is_stale(&key, &value));
        }
        // A kind that is not known stays; damaged bytes are unreadable, not a panic.
        let unknown = Bytes::from(protobuf::wrap("example.com/v1", "Test", b"\x0a\x00"));
        assert_eq!(media(false).unseal(&key, &unknown), Ok(None));
        let good = protobuf::encode(&json!({"kind": "Pod", "apiVersion": "v1", "metadata": {"name": "a"}}))
            .expect("a pod");
        for length in 4..good.len() {
            let _ = media(false).unseal(&key, &Bytes::copy_from_slice(&good[..length]));
        }
        assert!(media(false).unseal(&key, &Bytes::from_static(b"k8s\0\xff\xff")).is_err());
    }

    #[test]
    fn the_version_of_a_stored_object_is_not_its_own() {
        let key = Key::from("/registry/configmaps/default/a");
        let map = json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "a", "resourceVersion": "7"}});
        let binary = Bytes::from(protobuf::encode(&map).expect("a map"));
        let read = media(false).unseal(&key, &binary).expect("readable").expect("JSON");
        assert_eq!(&read[..], br#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a"}}"#);
    }
}
