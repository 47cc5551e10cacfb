//! Envelope encryption with a key management service, version 2.
//!
//! The service encrypts a seed of this server; each value has a key that is derived from the seed. A write therefore needs no
//! call. A read needs one for each seed that is not known yet, and [`Kms::prepare`] makes it before the value is read.

mod client;
mod proto;
#[cfg(test)]
mod tests;

use crate::KmsSettings;
use crate::cipher::{Gcm, Seed, random};
use crate::config::ConfigError;
use crate::providers::Stale;
use client::Client;
use ferrite_store::TransformError;
use prost::Message;
use proto::{AES_GCM_KEY, DecryptRequest, EncryptedObject, HKDF_SEED, StatusResponse, check_key_id};
use ring::digest::{SHA256, digest};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// The service is asked for its state this often while it is well, as upstream.
const WELL: Duration = Duration::from_secs(60);
/// And this often while it is not.
const ILL: Duration = Duration::from_secs(10);
/// Writes go on for so long after the service was last well.
const WRITES: Duration = Duration::from_secs(180);
/// Health checks do not ask the service more often than this.
const CHECKED: Duration = Duration::from_secs(20);
const CHECKED_ILL: Duration = Duration::from_secs(3);
/// A service that has just failed to decrypt is not asked again for this long: the feed of a remote store waits for it.
const PAUSE: Duration = Duration::from_secs(3);
/// Seeds that are remembered. When there are more, it begins anew: values in memory do not need them again.
const SEEDS: usize = 4096;

/// A key that the service has decrypted.
#[derive(Debug)]
enum DataKey {
    Seed(Seed),
    Key(KeyOfData),
}

struct KeyOfData(Gcm);

impl std::fmt::Debug for KeyOfData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeyOfData([REDACTED])")
    }
}

impl DataKey {
    fn new(type_: i32, bytes: &[u8]) -> Result<Self, TransformError> {
        let failed = |error: crate::cipher::CipherError| TransformError(error.to_string());
        match type_ {
            AES_GCM_KEY => Gcm::new(bytes).map(|key| Self::Key(KeyOfData(key))).map_err(failed),
            _ => Seed::new(bytes).map(Self::Seed).map_err(failed),
        }
    }

    fn open(&self, stored: &[u8], context: &[u8]) -> Result<Vec<u8>, TransformError> {
        let opened = match self {
            Self::Seed(seed) => seed.open(stored, context),
            Self::Key(KeyOfData(key)) => key.open(stored, context),
        };
        opened.map_err(|error| TransformError(error.to_string()))
    }
}

/// The key that new values are written with.
#[derive(Debug, Clone)]
struct Writing {
    seed: Arc<DataKey>,
    /// Everything but the data.
    envelope: EncryptedObject,
    /// Writes are refused afterwards.
    until: Instant,
}

/// The last look at the service.
#[derive(Debug, Clone)]
struct Checked {
    at: Instant,
    result: Result<(), String>,
}

/// A key management service.
#[derive(Debug)]
pub(crate) struct Kms {
    name: String,
    prefix: Vec<u8>,
    settings: KmsSettings,
    client: Client,
    writing: RwLock<Option<Writing>>,
    /// Data keys by [`seed_of`].
    known: Mutex<HashMap<Vec<u8>, Arc<DataKey>>>,
    checked: tokio::sync::Mutex<Option<Checked>>,
    /// The version that the service first said.
    version: Mutex<Option<String>>,
    failed: Mutex<Option<Instant>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Identifies the data key of an object.
fn seed_of(object: &EncryptedObject) -> Vec<u8> {
    EncryptedObject { encrypted_data: Vec::new(), ..object.clone() }.encode_to_vec()
}

/// Key identifiers may tell something about the service's owner: messages have their hash.
fn hash(key_id: &str) -> String {
    if key_id.is_empty() {
        return String::new();
    }
    let hex: String =
        digest(&SHA256, key_id.as_bytes()).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

impl Kms {
    pub fn new(settings: &KmsSettings) -> Result<Self, ConfigError> {
        let timeout = settings.call_timeout().unwrap_or(Duration::from_secs(3));
        Ok(Self {
            name: settings.name.clone(),
            prefix: format!("k8s:enc:kms:v2:{}:", settings.name).into_bytes(),
            client: Client::new(&settings.name, &settings.endpoint, timeout)?,
            settings: settings.clone(),
            writing: RwLock::default(),
            known: Mutex::default(),
            checked: tokio::sync::Mutex::default(),
            version: Mutex::default(),
            failed: Mutex::default(),
        })
    }

    pub fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    pub fn is_for(&self, settings: &KmsSettings) -> bool {
        self.settings == *settings
    }

    fn writing(&self) -> Option<Writing> {
        self.writing.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn remember(&self, seed: Vec<u8>, key: Arc<DataKey>) {
        let mut known = lock(&self.known);
        if known.len() >= SEEDS {
            known.clear();
        }
        known.insert(seed, key);
    }

    /// Encrypts with the present seed. Makes no call.
    pub fn seal(&self, value: &[u8], context: &[u8]) -> Result<Vec<u8>, TransformError> {
        let Some(writing) = self.writing() else {
            let why = format!(
                "KMS provider {} has not been well since the start: nothing can be encrypted",
                self.name
            );
            return Err(TransformError(why));
        };
        if Instant::now() > writing.until {
            return Err(TransformError(format!(
                "encryptedDEKSource with keyID hash {:?} expired: KMS provider {} is not well",
                hash(&writing.envelope.key_id),
                self.name
            )));
        }
        let DataKey::Seed(seed) = &*writing.seed else {
            return Err(TransformError("the data key is for reading only".into()));
        };
        let encrypted_data = seed.seal(value, context).map_err(|error| TransformError(error.to_string()))?;
        let object = EncryptedObject { encrypted_data, ..writing.envelope };
        let mut out = Vec::with_capacity(self.prefix.len() + object.encoded_len());
        out.extend_from_slice(&self.prefix);
        object.encode(&mut out).map_err(|error| TransformError(error.to_string()))?;
        Ok(out)
    }

    fn decoded(rest: &[u8]) -> Result<EncryptedObject, TransformError> {
        let object = EncryptedObject::decode(rest).map_err(|error| TransformError(error.to_string()))?;
        object.check().map_err(TransformError)?;
        Ok(object)
    }

    /// Decrypts what follows the prefix, if its data key is known.
    pub fn open(&self, rest: &[u8], context: &[u8]) -> Result<(Vec<u8>, Stale), TransformError> {
        let object = Self::decoded(rest)?;
        let key = lock(&self.known).get(&seed_of(&object)).cloned();
        let key = key.ok_or_else(|| {
            TransformError(format!(
                "failed to decrypt DEK, error: KMS provider {} has not answered",
                self.name
            ))
        })?;
        let value = key.open(&object.encrypted_data, context)?;
        Ok((value, self.is_stale(&object)))
    }

    fn is_stale(&self, object: &EncryptedObject) -> Stale {
        object.encrypted_dek_source_type != HKDF_SEED
            || self.writing().is_none_or(|writing| writing.envelope.key_id != object.key_id)
    }

    /// Has the data keys of stored values decrypted that are not known yet.
    pub async fn prepare(&self, stored: &[&[u8]]) {
        let objects =
            stored.iter().filter_map(|stored| Self::decoded(stored.strip_prefix(&self.prefix[..])?).ok());
        let mut wanted: HashMap<Vec<u8>, EncryptedObject> =
            objects.map(|object| (seed_of(&object), object)).collect();
        {
            let known = lock(&self.known);
            wanted.retain(|seed, _| !known.contains_key(seed));
        }
        for (seed, object) in wanted {
            if lock(&self.failed).is_some_and(|at| at.elapsed() < PAUSE) {
                return;
            }
            let request = DecryptRequest {
                ciphertext: object.encrypted_dek_source.clone(),
                uid: String::new(),
                key_id: object.key_id.clone(),
                annotations: object.annotations.clone(),
            };
            let decrypted = self.client.decrypt(request).await;
            let key = match decrypted {
                Ok(answer) => DataKey::new(object.encrypted_dek_source_type, &answer.plaintext),
                Err(error) => {
                    // An answer, even a refusal, is no reason to leave the next seed alone.
                    if !matches!(error, client::CallError::Refused { code, .. } if code != tonic::Code::Unavailable)
                    {
                        *lock(&self.failed) = Some(Instant::now());
                    }
                    Err(TransformError(error.to_string()))
                }
            };
            match key {
                Ok(key) => self.remember(seed, Arc::new(key)),
                Err(error) => {
                    tracing::warn!(provider = self.name, %error, "a data key could not be decrypted");
                }
            }
        }
    }

    /// Asks the service for its state, unless it was asked a moment ago.
    pub async fn check(&self) -> Result<(), String> {
        let mut checked = self.checked.lock().await;
        if let Some(Checked { at, result }) = &*checked {
            let valid = if result.is_ok() { CHECKED } else { CHECKED_ILL };
            if at.elapsed() < valid {
                return result.clone();
            }
        }
        let result = self.probe().await;
        *checked = Some(Checked { at: Instant::now(), result: result.clone() });
        result
    }

    async fn probe(&self) -> Result<(), String> {
        let began = Instant::now();
        let status = self.client.status().await.map_err(|error| {
            format!(
                "failed to perform status section of the healthz check for KMS Provider {}, error: {error}",
                self.name
            )
        })?;
        let mut errors = self.complaints(&status);
        if check_key_id(&status.key_id).is_ok()
            && let Err(error) = self.rotate(&status.key_id, began).await
        {
            errors.push(error);
        }
        match errors.as_slice() {
            [] => Ok(()),
            errors => {
                Err(format!("kmsv2 Provider {} is not healthy, error: {}", self.name, errors.join(", ")))
            }
        }
    }

    fn complaints(&self, status: &StatusResponse) -> Vec<String> {
        let mut errors = Vec::new();
        let short = |text: &str| text.chars().take(256).collect::<String>();
        if status.healthz != "ok" {
            errors.push(format!("got unexpected healthz status: {}", short(&status.healthz)));
        }
        if matches!(status.version.as_str(), "v2" | "v2beta1") {
            let mut first = lock(&self.version);
            let first = first.get_or_insert_with(|| status.version.clone());
            if *first != status.version {
                errors.push(format!(
                    "KMSv2 API version should not change after the initial status response version {first}, got {}",
                    status.version
                ));
            }
        } else {
            errors.push(format!("expected KMSv2 API version v2, got {}", short(&status.version)));
        }
        if let Err(error) = check_key_id(&status.key_id) {
            errors.push(format!("got invalid KMSv2 KeyID hash {:?}: {error}", hash(&status.key_id)));
        }
        errors
    }

    /// Makes a new seed if the service has another key now; else the present one may be used for longer.
    async fn rotate(&self, key_id: &str, began: Instant) -> Result<(), String> {
        let until = began + WRITES;
        if let Some(mut writing) = self.writing()
            && writing.envelope.key_id == key_id
        {
            writing.until = until;
            *self.writing.write().unwrap_or_else(PoisonError::into_inner) = Some(writing);
            return Ok(());
        }
        let seed = random::<32>().map_err(|error| error.to_string())?;
        let answer = self.client.encrypt(seed.to_vec()).await;
        let answer =
            answer.map_err(|error| format!("failed to rotate DEK: failed to encrypt DEK, error: {error}"))?;
        let mut envelope = EncryptedObject {
            // Any, to be checked with.
            encrypted_data: vec![0],
            key_id: answer.key_id,
            encrypted_dek_source: answer.ciphertext,
            annotations: answer.annotations,
            encrypted_dek_source_type: HKDF_SEED,
        };
        envelope.check().map_err(|error| format!("failed to rotate DEK: {error}"))?;
        if envelope.key_id != key_id {
            return Err(format!(
                "failed to rotate DEK: statusKeyIDHash={:?}, encryptKeyIDHash={:?}",
                hash(key_id),
                hash(&envelope.key_id)
            ));
        }
        envelope.encrypted_data = Vec::new();
        let key = Arc::new(DataKey::new(HKDF_SEED, &seed).map_err(|error| error.0)?);
        self.remember(seed_of(&envelope), Arc::clone(&key));
        *self.writing.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Writing { seed: key, envelope, until });
        tracing::info!(provider = self.name, key = hash(key_id), "a new seed encrypts what is written");
        Ok(())
    }

    /// Keeps the seed up to date until it is dropped.
    pub async fn follow(&self) {
        let mut last = Ok(());
        loop {
            let now = self.check().await;
            match (&last, &now) {
                (_, Err(error)) if last != now => {
                    tracing::error!(provider = self.name, error, "kms plugin failed health check probe");
                }
                (Err(_), Ok(())) => tracing::info!(provider = self.name, "the KMS plugin is well again"),
                _ => {}
            }
            tokio::time::sleep(if now.is_ok() { WELL } else { ILL }).await;
            last = now;
        }
    }
}
