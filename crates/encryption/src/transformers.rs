//! The border of the store: every value goes through the providers of its resource.

use crate::config::{ConfigError, Configuration};
use crate::kms::Kms;
use crate::providers::{self, ENCRYPTED, Provider};
use crate::resources::{GroupResource, Places, StoredAt};
use bytes::Bytes;
use ferrite_component::FollowedFiles;
use ferrite_component::metrics::{Counter, Family, registry};
use ferrite_store::{Key, Prepared, TransformError, Transformer};
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, RwLock};
use tokio_util::sync::{CancellationToken, DropGuard};

/// A larger file is no configuration.
const MAX_FILE: u64 = 1 << 20;
/// Where keys of the store begin.
const OURS: &[u8] = b"/registry/";

/// Where the configuration is, and how keys are named.
#[derive(Debug, Clone, Default)]
pub struct EncryptionOptions {
    /// None: nothing is encrypted, and what is encrypted cannot be read.
    pub file: Option<PathBuf>,
    /// Follow changes of the file.
    pub reload: bool,
    /// Where in etcd the objects are: a part of what the ciphers authenticate.
    pub etcd_prefix: String,
}

/// A configuration, ready for use.
#[derive(Debug, Default)]
pub(crate) struct Active {
    resources: HashMap<GroupResource, Vec<Provider>>,
    pub kms: Vec<Arc<Kms>>,
    /// Ends the tasks that keep the services' seeds up to date.
    following: Option<DropGuard>,
}

/// Encryption at rest, as the configuration has it now.
#[derive(Debug)]
pub struct Encryption {
    options: EncryptionOptions,
    places: Places,
    active: RwLock<Arc<Active>>,
    /// Follows the file from before it was first read, so that no change is missed. Taken by the task that reloads.
    followed: Mutex<Option<FollowedFiles>>,
}

static OPERATIONS: LazyLock<Arc<Family<Counter>>> = LazyLock::new(|| {
    registry().counter(
        "apiserver_storage_transformation_operations_total",
        "Transformations of stored values, by resource, direction, prefix and status.",
        &["resource", "status", "transformation_type", "transformer_prefix"],
    )
});

fn count(resource: &GroupResource, direction: &str, stored: &[u8], failed: bool) {
    // `k8s:enc:aescbc:v1:` without the name of the key.
    let end = stored.iter().enumerate().filter(|(_, byte)| **byte == b':').nth(3).map_or(0, |(at, _)| at + 1);
    let prefix = match stored.starts_with(ENCRYPTED) {
        true => std::str::from_utf8(&stored[..end]).unwrap_or("unknown"),
        false => "identity",
    };
    let status = if failed { "Internal" } else { "OK" };
    OPERATIONS.with(&[&resource.to_string(), status, direction, prefix]).increment();
}

pub(crate) fn read(path: &Path, reload: bool) -> Result<Configuration, ConfigError> {
    let name = path.display().to_string();
    let mut text = Vec::new();
    let file = std::fs::File::open(path);
    let read = file.and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut text));
    read.map_err(|source| ConfigError::Read { path: name.clone(), source })?;
    if text.len() as u64 > MAX_FILE {
        return Err(ConfigError::TooLarge(name));
    }
    Configuration::parse(&name, &text, reload)
}

impl Active {
    /// `before` lends its services, so that a reload keeps the seeds of those that stay.
    pub fn new(configuration: &Configuration, before: Option<&Self>) -> Result<Self, ConfigError> {
        let mut active = Self::default();
        for rule in &configuration.resources {
            for resource in &rule.resources {
                let mut service = |settings: &crate::KmsSettings| {
                    let known = active.kms.iter().chain(before.iter().flat_map(|before| &before.kms));
                    let found = known.into_iter().find(|kms| kms.is_for(settings)).cloned();
                    let kms = match found {
                        Some(kms) => kms,
                        None => Arc::new(Kms::new(settings)?),
                    };
                    if !active.kms.iter().any(|known| Arc::ptr_eq(known, &kms)) {
                        active.kms.push(Arc::clone(&kms));
                    }
                    Ok(kms)
                };
                let made: Vec<Provider> = rule
                    .providers
                    .iter()
                    .map(|provider| Provider::new(provider, &mut service))
                    .collect::<Result<_, _>>()?;
                active.resources.entry(GroupResource::parse(resource)).or_default().extend(made);
            }
        }
        Ok(active)
    }

    /// Keeps the services' seeds up to date for as long as the configuration is used.
    pub fn follow_services(&mut self) {
        if self.kms.is_empty() {
            return;
        }
        let stop = CancellationToken::new();
        for kms in &self.kms {
            let (kms, stop) = (Arc::clone(kms), stop.clone());
            tokio::spawn(async move {
                tokio::select! {
                    () = kms.follow() => {}
                    () = stop.cancelled() => {}
                }
            });
        }
        self.following = Some(stop.drop_guard());
    }

    /// The providers of a resource: its own, those of its group, those of everything.
    fn of(&self, resource: &GroupResource) -> Option<&[Provider]> {
        if self.resources.is_empty() {
            return None;
        }
        let wild = |group: &str| GroupResource::new(group, "*");
        let found = self.resources.get(resource);
        let found = found.or_else(|| self.resources.get(&wild(&resource.group)));
        found.or_else(|| self.resources.get(&wild("*"))).map(Vec::as_slice)
    }
}

impl Encryption {
    /// Reads the configuration. `built_in` says where objects of built-in kinds lie.
    pub async fn open(
        options: EncryptionOptions,
        built_in: impl IntoIterator<Item = StoredAt>,
    ) -> Result<Arc<Self>, ConfigError> {
        let followed = match (&options.file, options.reload) {
            (Some(file), true) => Some(FollowedFiles::new(vec![file.clone()])),
            _ => None,
        };
        let mut active = match &options.file {
            Some(file) => Active::new(&read(file, options.reload)?, None)?,
            None => Active::default(),
        };
        // Asked once before anything is read or written; a service that is not there yet is asked again.
        for kms in &active.kms {
            if let Err(error) = kms.check().await {
                tracing::error!(error, "kms plugin failed health check probe");
            }
        }
        active.follow_services();
        Ok(Arc::new(Self {
            options,
            places: Places::new(built_in),
            active: RwLock::new(Arc::new(active)),
            followed: Mutex::new(followed),
        }))
    }

    pub(crate) fn active(&self) -> Arc<Active> {
        Arc::clone(&self.active.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn replace(&self, active: Active) {
        *self.active.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(active);
    }

    pub(crate) fn followed(&self) -> Option<FollowedFiles> {
        self.followed.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    pub(crate) fn options(&self) -> &EncryptionOptions {
        &self.options
    }

    /// True if `/healthz` has a check of key management services.
    pub fn has_services(&self) -> bool {
        !self.active().kms.is_empty() || (self.options.reload && self.options.file.is_some())
    }

    /// Asks the key management services for their state.
    pub async fn check(&self) -> Result<(), String> {
        let mut errors = Vec::new();
        for (index, kms) in self.active().kms.iter().enumerate() {
            if let Err(error) = kms.check().await {
                errors.push(format!("kms-provider-{index}: {error}"));
            }
        }
        if errors.is_empty() { Ok(()) } else { Err(errors.join(", ")) }
    }

    /// The key in etcd, which the ciphers authenticate: a value that was moved to another key is not read.
    fn context(&self, key: &Key) -> Vec<u8> {
        let prefix = self.options.etcd_prefix.trim_matches('/');
        match key.as_bytes().strip_prefix(OURS) {
            Some(rest) if prefix != "registry" => [b"/", prefix.as_bytes(), b"/", rest].concat(),
            _ => key.as_bytes().to_vec(),
        }
    }
}

impl Transformer for Encryption {
    fn seal(&self, key: &Key, value: &Bytes) -> Result<Option<Bytes>, TransformError> {
        let active = self.active();
        if active.resources.is_empty() {
            return Ok(None);
        }
        let Some(resource) = self.places.of(key.as_bytes()) else { return Ok(None) };
        let Some([first, ..]) = active.of(&resource) else { return Ok(None) };
        let sealed = first.seal(value, &self.context(key));
        count(
            &resource,
            "to_storage",
            sealed.as_ref().ok().and_then(Option::as_deref).unwrap_or_default(),
            sealed.is_err(),
        );
        Ok(sealed?.map(Bytes::from))
    }

    fn unseal(&self, key: &Key, stored: &Bytes) -> Result<Option<Bytes>, TransformError> {
        let encrypted = stored.starts_with(ENCRYPTED);
        let active = self.active();
        let resource = match active.resources.is_empty() && !encrypted {
            true => None,
            false => self.places.of(key.as_bytes()),
        };
        let Some((resource, providers)) = resource.and_then(|r| Some((r.clone(), active.of(&r)?))) else {
            return match encrypted {
                true => Err(TransformError("identity transformer tried to read encrypted data".into())),
                false => Ok(None),
            };
        };
        let opened = providers::open(providers, stored, &self.context(key));
        count(&resource, "from_storage", stored, opened.is_err());
        Ok(opened?.0.map(Bytes::from))
    }

    fn prepare<'a>(&'a self, stored: Vec<(Key, Bytes)>) -> Prepared<'a> {
        Box::pin(async move {
            for kms in &self.active().kms {
                let own: Vec<&[u8]> = stored.iter().map(|(_, value)| &value[..]).collect();
                kms.prepare(&own).await;
            }
        })
    }

    fn is_stale(&self, key: &Key, stored: &Bytes) -> bool {
        let active = self.active();
        if active.resources.is_empty() {
            return false;
        }
        let Some(resource) = self.places.of(key.as_bytes()) else { return false };
        let Some(providers) = active.of(&resource) else { return false };
        providers::open(providers, stored, &self.context(key)).is_ok_and(|(_, stale)| stale)
    }
}
