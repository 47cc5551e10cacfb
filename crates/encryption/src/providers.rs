//! The providers of a resource in their order: the first writes, all read.

use crate::cipher::{Cipher, CipherError};
use crate::config::{ConfigError, Keys, ProviderRule};
use crate::kms::Kms;
use ferrite_store::TransformError;
use std::sync::Arc;

/// Every encrypted value begins like this.
pub(crate) const ENCRYPTED: &[u8] = b"k8s:enc:";
const AESCBC: &str = "k8s:enc:aescbc:v1:";
const AESGCM: &str = "k8s:enc:aesgcm:v1:";
const SECRETBOX: &str = "k8s:enc:secretbox:v1:";

/// A value that was read. None: as it is stored.
type Opened = (Option<Vec<u8>>, Stale);

/// True if the value would be stored otherwise now.
pub(crate) type Stale = bool;

#[derive(Debug)]
pub(crate) enum Provider {
    Identity,
    Keys(LocalKeys),
    Kms(Arc<Kms>),
}

/// Keys of one cipher, each with its name.
#[derive(Debug)]
pub(crate) struct LocalKeys {
    prefix: &'static str,
    /// As upstream's messages name the cipher.
    family: &'static str,
    keys: Vec<(String, Cipher)>,
}

impl LocalKeys {
    fn new(
        prefix: &'static str,
        family: &'static str,
        given: &Keys,
        make: fn(&[u8]) -> Result<Cipher, CipherError>,
    ) -> Result<Self, ConfigError> {
        let key = |key: &crate::config::NamedKey| {
            let cipher = make(&key.secret.bytes().unwrap_or_default()).map_err(|error| {
                ConfigError::Invalid(format!(
                    "error while creating cipher for named key {}: {error}",
                    key.name
                ))
            })?;
            Ok((format!("{}:", key.name), cipher))
        };
        Ok(Self { prefix, family, keys: given.keys.iter().map(key).collect::<Result<_, _>>()? })
    }

    /// Reads what follows the prefix.
    fn open(&self, rest: &[u8], context: &[u8]) -> Result<(Vec<u8>, Stale), TransformError> {
        let mut errors = Vec::new();
        for (index, (name, cipher)) in self.keys.iter().enumerate() {
            let Some(body) = rest.strip_prefix(name.as_bytes()) else { continue };
            match cipher.open(body, context) {
                Ok(value) => return Ok((value, index != 0)),
                Err(error) => errors.push(error.to_string()),
            }
        }
        let none = || format!("no matching key was found for the provided {} transformer", self.family);
        Err(TransformError(reduce(errors).unwrap_or_else(none)))
    }
}

/// Several errors as upstream joins them.
fn reduce(mut errors: Vec<String>) -> Option<String> {
    match errors.len() {
        0 => None,
        1 => errors.pop(),
        _ => {
            errors.dedup();
            Some(if errors.len() == 1 { errors.remove(0) } else { format!("[{}]", errors.join(", ")) })
        }
    }
}

impl Provider {
    /// `kms` finds or makes the client of a service.
    pub fn new(
        rule: &ProviderRule,
        kms: &mut impl FnMut(&crate::KmsSettings) -> Result<Arc<Kms>, ConfigError>,
    ) -> Result<Self, ConfigError> {
        Ok(match rule {
            ProviderRule { aescbc: Some(keys), .. } => {
                Self::Keys(LocalKeys::new(AESCBC, "AES", keys, Cipher::cbc)?)
            }
            ProviderRule { aesgcm: Some(keys), .. } => {
                Self::Keys(LocalKeys::new(AESGCM, "AES", keys, Cipher::gcm)?)
            }
            ProviderRule { secretbox: Some(keys), .. } => {
                Self::Keys(LocalKeys::new(SECRETBOX, "Secretbox", keys, Cipher::secretbox)?)
            }
            ProviderRule { kms: Some(settings), .. } => Self::Kms(kms(settings)?),
            _ => Self::Identity,
        })
    }

    /// The stored form of a value. None: as it is.
    pub fn seal(&self, value: &[u8], context: &[u8]) -> Result<Option<Vec<u8>>, TransformError> {
        match self {
            Self::Identity => Ok(None),
            Self::Keys(local) => {
                let (name, cipher) =
                    local.keys.first().ok_or_else(|| TransformError("the provider has no keys".into()))?;
                let mut out = Vec::with_capacity(local.prefix.len() + name.len() + value.len() + 64);
                out.extend_from_slice(local.prefix.as_bytes());
                out.extend_from_slice(name.as_bytes());
                cipher.seal(value, context, &mut out).map_err(|error| TransformError(error.to_string()))?;
                Ok(Some(out))
            }
            Self::Kms(kms) => kms.seal(value, context).map(Some),
        }
    }
}

/// Reads a value with the providers of its resource. As upstream: a failure of one leaves the others to be tried, because
/// several may have the same prefix.
pub(crate) fn open(providers: &[Provider], stored: &[u8], context: &[u8]) -> Result<Opened, TransformError> {
    let mut errors = Vec::new();
    for (index, provider) in providers.iter().enumerate() {
        let read = match provider {
            Provider::Identity if stored.starts_with(ENCRYPTED) => continue,
            Provider::Identity => return Ok((None, index != 0)),
            Provider::Keys(local) => match stored.strip_prefix(local.prefix.as_bytes()) {
                Some(rest) => local.open(rest, context),
                None => continue,
            },
            Provider::Kms(kms) => match stored.strip_prefix(kms.prefix()) {
                Some(rest) => kms.open(rest, context),
                None => continue,
            },
        };
        match read {
            Ok((value, stale)) => return Ok((Some(value), stale || index != 0)),
            Err(TransformError(error)) => errors.push(error),
        }
    }
    Err(TransformError(reduce(errors).unwrap_or_else(|| "no matching prefix found".to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Configuration;

    const CONTEXT: &[u8] = b"/registry/secrets/default/a";

    fn providers(list: &str) -> Vec<Provider> {
        let text = format!(
            "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources: [{{resources: [secrets], providers: [{list}]}}]"
        );
        let configuration = Configuration::parse("f", text.as_bytes(), false).unwrap();
        let rules = &configuration.resources[0].providers;
        rules.iter().map(|rule| Provider::new(rule, &mut |_| unreachable!()).unwrap()).collect()
    }

    fn key(name: &str, letter: char) -> String {
        use base64::Engine as _;
        let secret: String = std::iter::repeat_n(letter, 32).collect();
        format!("{{name: {name}, secret: {}}}", base64::engine::general_purpose::STANDARD.encode(secret))
    }

    #[test]
    fn the_first_writes_and_all_read() {
        let (one, two) = (key("key1", 'a'), key("key2", 'b'));
        let old = providers(&format!("{{aescbc: {{keys: [{one}]}}}}, {{identity: {{}}}}"));
        let stored = old[0].seal(b"{}", CONTEXT).unwrap().unwrap();
        assert!(stored.starts_with(b"k8s:enc:aescbc:v1:key1:"));
        let plain = (Some(b"{}".to_vec()), false);
        let rows = [
            // (providers, the result of reading what `key1` wrote, what is not encrypted)
            (
                format!("{{aescbc: {{keys: [{one}]}}}}, {{identity: {{}}}}"),
                Ok(plain.clone()),
                Ok((None, true)),
            ),
            (
                format!("{{aescbc: {{keys: [{two}, {one}]}}}}"),
                Ok((plain.0.clone(), true)),
                Err("no matching prefix found"),
            ),
            (
                format!("{{aesgcm: {{keys: [{two}]}}}}, {{aescbc: {{keys: [{one}]}}}}"),
                Ok((plain.0.clone(), true)),
                Err("no matching prefix found"),
            ),
            (
                // The same cipher twice: a failure of the first does not hide the second.
                format!("{{aescbc: {{keys: [{two}]}}}}, {{aescbc: {{keys: [{one}]}}}}"),
                Ok((plain.0.clone(), true)),
                Err("no matching prefix found"),
            ),
            (
                format!("{{identity: {{}}}}, {{aescbc: {{keys: [{one}]}}}}"),
                Ok((plain.0.clone(), true)),
                Ok((None, false)),
            ),
            ("{identity: {}}".to_owned(), Err("no matching prefix found"), Ok((None, false))),
            (
                format!("{{aescbc: {{keys: [{two}]}}}}"),
                Err("no matching key was found for the provided AES transformer"),
                Err("no matching prefix found"),
            ),
            (
                format!("{{secretbox: {{keys: [{one}]}}}}"),
                Err("no matching prefix found"),
                Err("no matching prefix found"),
            ),
        ];
        for (list, encrypted, unencrypted) in rows {
            let providers = providers(&list);
            let read = |stored: &[u8]| open(&providers, stored, CONTEXT).map_err(|error| error.0);
            assert_eq!(read(&stored), encrypted.map_err(str::to_owned), "{list}");
            assert_eq!(read(b"{}"), unencrypted.map_err(str::to_owned), "{list}");
        }
    }

    #[test]
    fn prefixes_are_upstreams() {
        for (provider, prefix) in [
            ("aescbc", "k8s:enc:aescbc:v1:k:"),
            ("aesgcm", "k8s:enc:aesgcm:v1:k:"),
            ("secretbox", "k8s:enc:secretbox:v1:k:"),
        ] {
            let providers = providers(&format!("{{{provider}: {{keys: [{}]}}}}", key("k", 'x')));
            let stored = providers[0].seal(b"{}", CONTEXT).unwrap().unwrap();
            assert!(stored.starts_with(prefix.as_bytes()), "{provider}");
        }
        assert_eq!(providers("{identity: {}}")[0].seal(b"{}", CONTEXT), Ok(None));
    }
}
