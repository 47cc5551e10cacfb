//! An issuer of tokens: its discovery document and its keys, fetched when they are needed and kept.

use super::config::JwtSettings;
use super::token::{Key, Token};
use crate::auth::User;
use crate::outbound::{Credentials, Destination, Fetch, Outbound, until};
use crate::registry::View;
use base64::Engine;
use ferrite_json::{Value, json};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The time limit for fetching a document.
const PATIENCE: Duration = Duration::from_secs(30);
/// Discovery is tried again after this, as upstream.
pub(super) const AGAIN: Duration = Duration::from_secs(10);
/// Keys are not fetched more often than this, whatever tokens name: their authors are strangers.
const PACE: Duration = Duration::from_secs(1);
const MAX_DOCUMENT: usize = 1 << 20;
const WELL_KNOWN: &str = "/.well-known/openid-configuration";

/// Why an issuer's documents cannot be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum FetchError {
    #[error("Get {url:?}: {why}")]
    Call { url: String, why: String },
    #[error("{code} of {url}")]
    Code { url: String, code: u16 },
    #[error("oidc: failed to decode provider discovery object: {0}")]
    Decode(&'static str),
    #[error(
        "oidc: issuer did not match the issuer returned by provider, expected {expected:?} got {found:?}"
    )]
    Issuer { expected: String, found: String },
    #[error("provider did not return JWKS URL")]
    NoKeys,
}

/// An issuer, and what is known of it.
pub(super) struct IssuerState {
    settings: Arc<JwtSettings>,
    /// Where the keys are; none before discovery.
    keys_at: RwLock<Option<Arc<Destination>>>,
    keys: RwLock<Arc<Vec<Key>>>,
    /// One fetch at a time; the others wait for it. Holds when the last began.
    fetching: tokio::sync::Mutex<Option<Instant>>,
    health: Mutex<Result<(), String>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl IssuerState {
    pub fn new(settings: Arc<JwtSettings>) -> Self {
        let url = &settings.issuer.url;
        let health = Err(format!("oidc: authenticator for issuer {url:?} is not initialized"));
        Self {
            settings,
            keys_at: RwLock::default(),
            keys: RwLock::default(),
            fetching: tokio::sync::Mutex::default(),
            health: Mutex::new(health),
        }
    }

    pub fn url(&self) -> &str {
        &self.settings.issuer.url
    }

    pub fn health(&self) -> Result<(), String> {
        lock(&self.health).clone()
    }

    fn destination(&self, url: &str) -> Result<Destination, FetchError> {
        let authority = self.settings.issuer.certificate_authority.trim();
        let bundle = base64::engine::general_purpose::STANDARD.encode(authority);
        let parsed = Destination::parse(&json!({"url": url, "caBundle": bundle}), &Credentials::default());
        parsed.map_err(|error| FetchError::Call { url: url.to_owned(), why: error.to_string() })
    }

    async fn fetch(&self, outbound: &Outbound, view: &View, to: &Destination) -> Result<Value, FetchError> {
        let url = to.url("");
        let fetch = Fetch { destination: to, deadline: until(PATIENCE), limit: MAX_DOCUMENT };
        let answer = outbound.get(view, fetch).await;
        let answer = answer.map_err(|why| FetchError::Call { url: url.clone(), why: why.to_string() })?;
        if answer.code != 200 {
            return Err(FetchError::Code { url, code: answer.code });
        }
        ferrite_json::from_slice(&answer.body).map_err(|_| FetchError::Decode("it is not JSON"))
    }

    /// Finds the issuer's keys.
    pub async fn discover(&self, outbound: &Outbound, view: &View) -> Result<(), FetchError> {
        let issuer = &self.settings.issuer;
        let url = match issuer.discovery_url.as_str() {
            "" => format!("{}{WELL_KNOWN}", issuer.url.trim_end_matches('/')),
            other => other.to_owned(),
        };
        let result = self.discover_at(outbound, view, &url).await;
        *lock(&self.health) = result.clone().map_err(|error| error.to_string());
        result
    }

    async fn discover_at(&self, outbound: &Outbound, view: &View, url: &str) -> Result<(), FetchError> {
        let document = self.fetch(outbound, view, &self.destination(url)?).await?;
        let text = |key: &str| document.get(key).and_then(Value::as_str).unwrap_or_default();
        if text("issuer") != self.url() {
            let found = text("issuer").chars().take(256).collect();
            return Err(FetchError::Issuer { expected: self.url().to_owned(), found });
        }
        if text("jwks_uri").is_empty() {
            return Err(FetchError::NoKeys);
        }
        let keys_at = Arc::new(self.destination(text("jwks_uri"))?);
        *self.keys_at.write().unwrap_or_else(PoisonError::into_inner) = Some(keys_at);
        Ok(())
    }

    fn keys(&self) -> Arc<Vec<Key>> {
        Arc::clone(&self.keys.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Fetches the keys, unless somebody has just done so.
    async fn refresh(&self, outbound: &Outbound, view: &View, from: &Destination) -> Result<(), FetchError> {
        let asked = Instant::now();
        let mut last = self.fetching.lock().await;
        if last.is_some_and(|last| last > asked || last.elapsed() < PACE) {
            return Ok(());
        }
        *last = Some(Instant::now());
        let document = self.fetch(outbound, view, from).await?;
        let keys = Key::set(&document).ok_or(FetchError::Decode("it is no set of keys"))?;
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(keys);
        Ok(())
    }

    /// The user of a token of this issuer. Asks the issuer only if no known key has signed the token. Errors are upstream's.
    pub async fn authenticate(
        &self,
        outbound: &Outbound,
        view: &View,
        token: &Token<'_>,
        now: f64,
    ) -> Result<User, String> {
        let keys_at = self.keys_at.read().unwrap_or_else(PoisonError::into_inner).clone();
        let keys_at = keys_at.ok_or("oidc: authenticator not initialized")?;
        let failed = |why: String| format!("oidc: verify token: {why}");
        let checked = token.check(&self.settings.issuer.audiences, &self.settings.algorithms, now);
        checked.map_err(failed)?;
        if !token.is_signed_by(&self.keys()) {
            let refreshed = self.refresh(outbound, view, &keys_at).await;
            refreshed.map_err(|why| failed(format!("failed to verify signature: fetching keys {why}")))?;
            if !token.is_signed_by(&self.keys()) {
                return Err(failed(
                    "failed to verify signature: failed to verify id token signature".to_owned(),
                ));
            }
        }
        self.settings.mapper.user(&token.claims)
    }
}
