//! Credentials from plugins: programs the node's administrator installs, which answer for the images they are
//! configured to match.
//!
//! `config` reads the configuration, `pattern` decides which images a plugin is asked about, `exec` runs
//! it,
//! `cache` keeps its answers. A plugin that fails costs its own credentials only: the pull goes on with the
//! others.

mod accounts;
mod cache;
mod config;
mod exec;
mod pattern;

pub use config::{ConfigError, Plugins};

pub(crate) use accounts::{Accounts, ApiAccounts};

use super::credentials::{Credential, Origin};
use super::pulled::Coordinates;
use crate::clock::{self, Clock};
use crate::pod::model::{self, PodId};
use accounts::AccountData;
use cache::{Cache, Scope};
use config::{CacheType, PluginConfig, TokenAttributes};
use exec::{Credentials, Request};
use ferrite_cri::v1::AuthConfig;
use k8s_openapi::api::core::v1::Pod;
use pattern::Pattern;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::OnceCell;

/// Every plugin, in the order of the configuration.
pub(crate) struct Providers {
    plugins: Vec<Provider>,
    accounts: Arc<dyn Accounts>,
}

/// Concurrent callers with the same request share one run of the plugin.
type Flights = Mutex<HashMap<Flight, Arc<OnceCell<Option<Credentials>>>>>;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Flight {
    image: String,
    scope: Scope,
}

struct Provider {
    config: PluginConfig,
    cache: Cache,
    flights: Flights,
    clock: Clock,
}

impl Providers {
    pub(crate) fn new(plugins: Plugins, accounts: Arc<dyn Accounts>, clock: Clock) -> Self {
        let provider =
            |config| Provider { config, cache: Cache::default(), flights: Flights::default(), clock };
        Self { plugins: plugins.0.into_iter().map(provider).collect(), accounts }
    }

    /// The credentials that the plugins have for a repository (an image's name without tag and digest): the most specific
    /// first, and of equals those of the plugin that is configured earlier.
    pub(crate) async fn lookup(&self, repository: &str, pod: &Pod) -> Vec<Credential> {
        let mut found: Vec<(String, Credential)> = Vec::new();
        for provider in &self.plugins {
            if !provider.config.match_images.iter().any(|pattern| pattern.matches(repository)) {
                continue;
            }
            let Some((credentials, origin)) = provider.provide(repository, pod, self.accounts.as_ref()).await
            else {
                continue;
            };
            for (key, entry) in credentials.iter() {
                if Pattern::parse(key).is_ok_and(|pattern| pattern.matches(repository)) {
                    let auth = AuthConfig {
                        username: entry.username.clone(),
                        password: entry.password.clone(),
                        ..AuthConfig::default()
                    };
                    found.push((key.clone(), Credential::new(auth, "", origin.clone())));
                }
            }
        }
        // As upstream's keyring: keys in reverse order put longer paths before shorter ones, and names
        // before patterns.
        found.sort_by(|(a, _), (b, _)| b.cmp(a));
        found.into_iter().map(|(_, auth)| auth).collect()
    }
}

impl Provider {
    /// The credentials that the plugin has for an image, and for whom.
    async fn provide(
        &self,
        image: &str,
        pod: &Pod,
        accounts: &dyn Accounts,
    ) -> Option<(Credentials, Origin)> {
        let (account, scope) = match &self.config.token {
            None => (None, Scope::Everybody),
            Some(token) => self.account(token, pod, accounts).await?,
        };
        let origin = match &scope {
            Scope::Everybody => Origin::Node,
            Scope::Account { namespace, name, uid, .. } => Origin::ServiceAccount(Coordinates {
                namespace: namespace.clone(),
                name: name.clone(),
                uid: uid.clone(),
            }),
        };
        if let Some(known) = self.cache.get(image, &scope, self.clock.now()) {
            return Some((known, origin));
        }
        let flight = Flight { image: image.to_owned(), scope: scope.clone() };
        let cell = self.flying().entry(flight.clone()).or_default().clone();
        let answer = cell.get_or_init(|| self.run(image, account, &scope)).await.clone();
        let mut flying = self.flying();
        if flying.get(&flight).is_some_and(|known| Arc::ptr_eq(known, &cell)) {
            flying.remove(&flight);
        }
        answer.map(|answer| (answer, origin))
    }

    fn flying(&self) -> std::sync::MutexGuard<'_, HashMap<Flight, Arc<OnceCell<Option<Credentials>>>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn run(&self, image: &str, account: Option<AccountData>, scope: &Scope) -> Option<Credentials> {
        // Another run may have finished since the cache was checked.
        if let Some(known) = self.cache.get(image, scope, self.clock.now()) {
            return Some(known);
        }
        let request = Request::new(&self.config.api_version, image, account);
        let response = match exec::run(&self.config, &request).await {
            Ok(response) => response,
            Err(error) => {
                let plugin = &self.config.name;
                tracing::error!(%plugin, image, %error, "Failed getting credential from external registry credential provider");
                return None;
            }
        };
        let lifetime = response.cache_duration.unwrap_or(self.config.default_cache_duration);
        let now = self.clock.now();
        if !lifetime.is_zero() {
            let key = response.cache_key_type.key(image);
            self.cache.add(key, scope.clone(), response.auth.clone(), clock::add(now, lifetime), now);
        }
        Some(response.auth)
    }

    /// The service account data for the plugin, and the scope of its response. `None` if the plugin is not
    /// for this pod.
    async fn account(
        &self,
        token: &TokenAttributes,
        pod: &Pod,
        accounts: &dyn Accounts,
    ) -> Option<(Option<AccountData>, Scope)> {
        let id = PodId::of(pod);
        let plugin = &self.config.name;
        let Some(name) = model::spec(pod).service_account_name.as_deref().filter(|name| !name.is_empty())
        else {
            // Static pods have none; a plugin may say that it can do without.
            return (!token.require_service_account).then_some((None, Scope::Everybody));
        };
        let (namespace, pod_name) = (&id.namespace, &id.name);
        let account = match accounts.account(namespace, name).await {
            Ok(account) => account,
            Err(error) => {
                tracing::error!(%plugin, namespace, name, %error, "Failed to get service account");
                return None;
            }
        };
        let known = account.metadata.annotations.unwrap_or_default();
        if token.required_annotations.iter().any(|key| !known.contains_key(key)) {
            // An annotation may be how a workload asks for this plugin: not an error.
            tracing::debug!(%plugin, namespace, name, "a required annotation of the service account is not found");
            return None;
        }
        let keys = token.required_annotations.iter().chain(&token.optional_annotations);
        let annotations: Vec<(String, String)> =
            keys.filter_map(|key| Some((key.clone(), known.get(key)?.clone()))).collect();
        let text = match accounts.token(pod, &token.audience, self.clock.now()).await {
            Ok(text) => text,
            Err(error) => {
                tracing::error!(%plugin, namespace, pod = pod_name, %error, "Error getting service account token");
                return None;
            }
        };
        let scope = Scope::Account {
            namespace: namespace.clone(),
            name: name.to_owned(),
            uid: account.metadata.uid.unwrap_or_default(),
            annotations: annotations.clone(),
            token: match token.cache_type {
                CacheType::ServiceAccount => None,
                CacheType::Token => Some(cache::token_digest(&text)),
            },
        };
        Some((Some(AccountData { token: text, annotations: annotations.into_iter().collect() }), scope))
    }
}

#[cfg(test)]
mod tests;
