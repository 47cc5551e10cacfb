//! The media type of stored objects: JSON, which readers copy from, or upstream's protobuf.
//!
//! Stands between the store and encryption at rest, so that an etcd may have protobuf and the replica in memory always
//! has JSON.

mod definition;

use super::stored;
use bytes::Bytes;
use ferrite_api::codec::protobuf;
use ferrite_api::resource::Resource;
use ferrite_json::Value;
use ferrite_store::{Key, Prepared, TransformError, Transformer};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock};

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

/// The built-in kinds, as they are stored.
struct Kinds {
    /// Beginnings of stored objects of these kinds.
    heads: HashSet<Vec<u8>>,
    /// All versions, by group and kind.
    rows: HashMap<(String, String), Vec<Resource>>,
}

static KINDS: LazyLock<Kinds> = LazyLock::new(|| {
    let mut kinds = Kinds { heads: HashSet::new(), rows: HashMap::new() };
    for row in ferrite_api::kinds::built_in() {
        kinds.heads.insert(stored::head(&row).into_bytes());
        kinds.rows.entry((row.group.to_string(), row.kind.to_string())).or_default().push(row);
    }
    kinds
});

/// The form in which readers expect a value. None: it has that form, or is nothing that they read.
fn to_read(plain: &[u8]) -> Result<Option<Bytes>, TransformError> {
    if plain.starts_with(protobuf::MAGIC) {
        let failed = |error: &dyn std::fmt::Display| {
            TransformError(format!("the object cannot be read as protobuf: {error}"))
        };
        let decoded = protobuf::decode(plain).map_err(|error| failed(&error))?;
        return decoded.map_or(Ok(None), as_stored);
    }
    if plain.first() != Some(&b'{') || KINDS.heads.contains(stored::beginning_of(plain)) {
        return Ok(None);
    }
    // An object of another version than this server's, or whose members are in another order.
    match ferrite_json::from_slice(plain) {
        Ok(object) => as_stored(object),
        Err(_) => Ok(None),
    }
}

/// An object of a built-in kind in the version and the form that this server stores. As upstream, an object that comes
/// from the store gets defaults. None: the kind is another.
fn as_stored(mut object: Value) -> Result<Option<Bytes>, TransformError> {
    let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
    let (mut api_version, kind) = (text("apiVersion"), text("kind"));
    if api_version == definition::OLD_VERSION && kind == definition::KIND {
        object = definition::to_v1(object);
        api_version = "apiextensions.k8s.io/v1".to_owned();
    }
    let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
    let Some(rows) = KINDS.rows.get(&(group.to_owned(), kind.clone())) else { return Ok(None) };
    let Some(row) = rows.iter().find(|row| row.version == version) else {
        return Err(TransformError(format!(
            "the object is a {kind} of {api_version}, a version that is not known"
        )));
    };
    let unlabelled = object.pointer("/metadata/labels").is_none();
    row.strategy.default(&mut object);
    if unlabelled {
        row.strategy.complete_default_labels(&mut object);
    }
    super::normalise(row, &mut object);
    Ok(Some(stored::encode(row, &object)))
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
        let read = to_read(opened.as_ref().unwrap_or(stored))?;
        Ok(read.or(opened))
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

    #[test]
    fn objects_of_upstream_get_this_servers_form() {
        let key = Key::from("/registry/x");
        let read = |object: &Value| {
            let binary = Bytes::from(protobuf::encode(object).expect("protobuf"));
            let json = media(false).unseal(&key, &binary).expect("readable").expect("JSON");
            ferrite_json::from_slice::<Value>(&json).expect("JSON")
        };
        // Members that JSON always has, and defaults that upstream sets when it reads.
        let set = read(&json!({"kind": "DaemonSet", "apiVersion": "apps/v1", "metadata": {"name": "a"}}));
        assert_eq!(set["status"]["numberReady"], 0);
        let claim =
            read(&json!({"kind": "PersistentVolumeClaim", "apiVersion": "v1", "metadata": {"name": "a"}}));
        assert_eq!(claim["status"]["phase"], "Pending");

        // A version that upstream stores and does not serve, an order of members of one's own, and versions that nobody knows.
        let unseal = |text: &'static str| media(false).unseal(&key, &Bytes::from_static(text.as_bytes()));
        let old = r#"{"kind":"CustomResourceDefinition","apiVersion":"apiextensions.k8s.io/v1beta1","metadata":{"name":"a"},"spec":{"version":"v1","group":"g","names":{}}}"#;
        let read = unseal(old).expect("readable").expect("another form");
        let start =
            r#"{"kind":"CustomResourceDefinition","apiVersion":"apiextensions.k8s.io/v1","metadata":{"#;
        assert!(read.starts_with(start.as_bytes()), "{}", String::from_utf8_lossy(&read));
        let other = r#"{"metadata":{"name":"a"},"data":{"k":"v"},"apiVersion":"v1","kind":"ConfigMap"}"#;
        let read = unseal(other).expect("readable").expect("another form");
        assert_eq!(
            &read[..],
            br#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a"},"data":{"k":"v"}}"#
        );
        let unknown = r#"{"kind":"Deployment","apiVersion":"apps/v1beta1","metadata":{"name":"a"}}"#;
        let error = unseal(unknown).expect_err("an unknown version").to_string();
        assert_eq!(error, "the object is a Deployment of apps/v1beta1, a version that is not known");
    }
}
