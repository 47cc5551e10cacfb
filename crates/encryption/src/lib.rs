//! Encryption at rest: upstream's EncryptionConfiguration, its providers, and the border of the store at which values are
//! encrypted and decrypted.
//!
//! The stored forms are upstream's byte for byte (`k8s:enc:aescbc:v1:key1:` …), with the key in etcd as authenticated
//! data, so that each side reads what the other wrote. No message of this crate holds a key or a part of a value.

mod cipher;
mod config;
mod kms;
mod providers;
mod reload;
mod resources;
mod transformers;

pub use config::{ConfigError, Configuration, KmsSettings};
pub use resources::{GroupResource, StoredAt};
pub use transformers::{Encryption, EncryptionOptions};
