//! Responses of a plugin, kept for the time that it sets and for the accounts that they were given for.

use super::exec::Credentials;
use jiff::Timestamp;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Key of an answer that is good for every image.
const GLOBAL: &str = "global";

/// The scope in which a response may be reused, in the plugin's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
pub(super) enum CacheKeyType {
    Image,
    Registry,
    Global,
}

impl CacheKeyType {
    pub(super) fn key(self, image: &str) -> String {
        match self {
            CacheKeyType::Image => image.to_owned(),
            CacheKeyType::Registry => registry(image).to_owned(),
            CacheKeyType::Global => GLOBAL.to_owned(),
        }
    }
}

/// Whose pods an answer may be used for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) enum Scope {
    Everybody,
    Account {
        namespace: String,
        name: String,
        uid: String,
        /// The annotations that the plugin got.
        annotations: Vec<(String, String)>,
        /// The digest of the token, when the answer is as good as that only.
        token: Option<[u8; 32]>,
    },
}

pub(super) fn token_digest(token: &str) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, token.as_bytes());
    let mut out = [0; 32];
    out.copy_from_slice(digest.as_ref());
    out
}

/// Host and port of an image's name.
fn registry(image: &str) -> &str {
    image.split('/').next().unwrap_or(image)
}

struct Entry {
    credentials: Credentials,
    expires: Timestamp,
}

#[derive(Default)]
pub(super) struct Cache(Mutex<HashMap<(String, Scope), Entry>>);

impl Cache {
    /// The most specific answer that is still good.
    pub(super) fn get(&self, image: &str, scope: &Scope, now: Timestamp) -> Option<Credentials> {
        let entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let find = |key: &str| {
            let entry = entries.get(&(key.to_owned(), scope.clone()))?;
            (now <= entry.expires).then(|| entry.credentials.clone())
        };
        [image, registry(image), GLOBAL].into_iter().find_map(find)
    }

    pub(super) fn add(
        &self,
        key: String,
        scope: Scope,
        credentials: Credentials,
        expires: Timestamp,
        now: Timestamp,
    ) {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Nobody may ever ask for an old one again.
        entries.retain(|_, entry| now <= entry.expires);
        entries.insert((key, scope), Entry { credentials, expires });
    }
}
