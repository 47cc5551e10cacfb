//! The messages of the key management service, version 2, and the stored form of values that are encrypted with it.

use std::collections::BTreeMap;

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct StatusRequest {}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct StatusResponse {
    #[prost(string, tag = "1")]
    pub version: String,
    #[prost(string, tag = "2")]
    pub healthz: String,
    #[prost(string, tag = "3")]
    pub key_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct DecryptRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub ciphertext: Vec<u8>,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub key_id: String,
    #[prost(btree_map = "string, bytes", tag = "4")]
    pub annotations: BTreeMap<String, Vec<u8>>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct DecryptResponse {
    #[prost(bytes = "vec", tag = "1")]
    pub plaintext: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EncryptRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub plaintext: Vec<u8>,
    #[prost(string, tag = "2")]
    pub uid: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EncryptResponse {
    #[prost(bytes = "vec", tag = "1")]
    pub ciphertext: Vec<u8>,
    #[prost(string, tag = "2")]
    pub key_id: String,
    #[prost(btree_map = "string, bytes", tag = "3")]
    pub annotations: BTreeMap<String, Vec<u8>>,
}

/// The message that is stored behind the prefix.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EncryptedObject {
    #[prost(bytes = "vec", tag = "1")]
    pub encrypted_data: Vec<u8>,
    #[prost(string, tag = "2")]
    pub key_id: String,
    #[prost(bytes = "vec", tag = "3")]
    pub encrypted_dek_source: Vec<u8>,
    #[prost(btree_map = "string, bytes", tag = "4")]
    pub annotations: BTreeMap<String, Vec<u8>>,
    #[prost(int32, tag = "5")]
    pub encrypted_dek_source_type: i32,
}

/// The decrypted source is the key of the data itself.
pub(crate) const AES_GCM_KEY: i32 = 0;
/// The decrypted source is a seed, from which the key of each value is derived.
pub(crate) const HKDF_SEED: i32 = 1;

const MAX_ANNOTATIONS: usize = 32 << 10;
const MAX_KEY_ID: usize = 1 << 10;
const MAX_SOURCE: usize = 1 << 10;

/// Checks a key's identifier, with upstream's words.
pub(crate) fn check_key_id(key_id: &str) -> Result<(), String> {
    match key_id.len() {
        0 => Err("keyID is empty".to_owned()),
        size if size > MAX_KEY_ID => {
            Err(format!("keyID is {size} bytes, which exceeds the max size of {MAX_KEY_ID}"))
        }
        _ => Ok(()),
    }
}

impl EncryptedObject {
    /// Checks what came from the store or from the service, with upstream's words.
    pub fn check(&self) -> Result<(), String> {
        if !matches!(self.encrypted_dek_source_type, AES_GCM_KEY | HKDF_SEED) {
            return Err(format!("unknown encryptedDEKSourceType: {}", self.encrypted_dek_source_type));
        }
        if self.encrypted_data.is_empty() {
            return Err("encrypted data is empty".to_owned());
        }
        let source = match self.encrypted_dek_source.len() {
            0 => Err("encrypted DEK source is empty".to_owned()),
            size if size > MAX_SOURCE => Err(format!(
                "encrypted DEK source is {size} bytes, which exceeds the max size of {MAX_SOURCE}"
            )),
            _ => Ok(()),
        };
        source.map_err(|why| format!("failed to validate encrypted DEK source: {why}"))?;
        check_key_id(&self.key_id).map_err(|why| format!("failed to validate key id: {why}"))?;
        let fail = |why: String| format!("failed to validate annotations: {why}");
        let mut size = 0;
        for (key, value) in &self.annotations {
            size += key.len() + value.len();
            let qualified =
                key.contains('.') && ferrite_api::meta_validation::dns1123_subdomain(key).is_empty();
            if !qualified {
                return Err(fail(format!(
                    "annotations: Invalid value: {key:?}: should be a domain with at least two segments separated by dots"
                )));
            }
        }
        match size > MAX_ANNOTATIONS {
            true => Err(fail(format!(
                "total size of annotations is {size}, which exceeds the max size of {MAX_ANNOTATIONS}"
            ))),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_service_says_is_checked() {
        let good = EncryptedObject {
            encrypted_data: vec![1],
            key_id: "1".into(),
            encrypted_dek_source: vec![1],
            annotations: BTreeMap::from([("a.example".to_owned(), vec![1])]),
            encrypted_dek_source_type: HKDF_SEED,
        };
        assert_eq!(good.check(), Ok(()));
        let changed = |change: fn(&mut EncryptedObject)| {
            let mut object = good.clone();
            change(&mut object);
            object.check().unwrap_err()
        };
        let rows = [
            (changed(|o| o.encrypted_data.clear()), "encrypted data is empty"),
            (changed(|o| o.key_id.clear()), "failed to validate key id: keyID is empty"),
            (changed(|o| o.key_id = "k".repeat(1025)), "keyID is 1025 bytes"),
            (changed(|o| o.encrypted_dek_source.clear()), "encrypted DEK source is empty"),
            (changed(|o| o.encrypted_dek_source = vec![0; 1025]), "exceeds the max size of 1024"),
            (changed(|o| o.encrypted_dek_source_type = 2), "unknown encryptedDEKSourceType: 2"),
            (
                changed(|o| drop(o.annotations.insert("plain".into(), vec![]))),
                "failed to validate annotations",
            ),
            (
                changed(|o| drop(o.annotations.insert("b.c".into(), vec![0; 33 << 10]))),
                "total size of annotations",
            ),
        ];
        for (error, expected) in rows {
            assert!(error.contains(expected), "{error}");
        }
    }
}
