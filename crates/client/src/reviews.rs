//! Delegated authentication and authorization: the API server identifies a caller and decides about its
//! rights.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ferrite_component::{Access, Denied};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Client;
use kube::api::PostParams;
use tokio::time::Instant;

use crate::{Api, message_of};

/// Lifetimes of cached verdicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetimes {
    /// Of a token, known or unknown.
    pub token: Duration,
    pub allowed: Duration,
    pub denied: Duration,
}

impl Default for Lifetimes {
    /// Upstream's times of components: ten seconds each. A kubelet has others.
    fn default() -> Self {
        let kept = Duration::from_secs(10);
        Self { token: kept, allowed: kept, denied: kept }
    }
}

/// Most cached verdicts. A client that invents more callers only makes the cache forget sooner.
const MOST: usize = 1024;

/// The SHA-256 of a verdict's subject. Neither tokens nor long lists of groups are kept.
type Key = [u8; 32];

fn key_of(bytes: &[u8]) -> Key {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    let mut key = Key::default();
    key.copy_from_slice(digest.as_ref());
    key
}

/// A bounded memory of verdicts.
struct Verdicts<V>(Mutex<HashMap<Key, (Instant, V)>>);

impl<V: Clone> Verdicts<V> {
    fn new() -> Self {
        Self(Mutex::default())
    }

    fn get(&self, key: &Key) -> Option<V> {
        let verdicts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        verdicts.get(key).filter(|(until, _)| *until > Instant::now()).map(|(_, verdict)| verdict.clone())
    }

    fn put(&self, key: Key, kept: Duration, verdict: V) {
        let mut verdicts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if verdicts.len() >= MOST {
            verdicts.retain(|_, (until, _)| *until > now);
        }
        if verdicts.len() >= MOST {
            verdicts.clear();
        }
        verdicts.insert(key, (now + kept, verdict));
    }
}

/// An action that a caller asks for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Attributes {
    /// A path that belongs to no resource.
    Path { verb: String, path: String },
    /// A resource of the core group, such as `nodes/proxy`.
    Resource { verb: String, resource: &'static str, subresource: String, name: String },
}

/// Asks the API server with TokenReview and SubjectAccessReview, and remembers its verdicts for a short time.
pub struct DelegatedAccess {
    client: Client,
    users: Verdicts<Option<UserInfo>>,
    permissions: Verdicts<Result<(), String>>,
    lifetimes: Lifetimes,
    /// Callers without a token are `system:anonymous`, and not refused at once.
    anonymous: bool,
}

impl std::fmt::Debug for DelegatedAccess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DelegatedAccess").field("anonymous", &self.anonymous).finish_non_exhaustive()
    }
}

impl DelegatedAccess {
    /// `client` needs the rights of upstream's role `system:auth-delegator`.
    pub fn new(client: Client, anonymous: bool) -> Self {
        let lifetimes = Lifetimes::default();
        Self { client, users: Verdicts::new(), permissions: Verdicts::new(), lifetimes, anonymous }
    }

    #[must_use]
    pub fn with_lifetimes(self, lifetimes: Lifetimes) -> Self {
        Self { lifetimes, ..self }
    }

    /// The user whose token it is.
    pub async fn authenticate(&self, token: Option<&str>) -> Result<UserInfo, Denied> {
        let Some(token) = token else {
            if !self.anonymous {
                return Err(Denied::Unauthenticated);
            }
            return Ok(UserInfo {
                username: Some("system:anonymous".to_owned()),
                groups: Some(vec!["system:unauthenticated".to_owned()]),
                ..UserInfo::default()
            });
        };
        let key = key_of(token.as_bytes());
        if let Some(known) = self.users.get(&key) {
            return known.ok_or(Denied::Unauthenticated);
        }
        let review = TokenReview {
            spec: TokenReviewSpec { token: token.to_owned(), ..TokenReviewSpec::default() },
            ..TokenReview::default()
        };
        let api: Api<TokenReview> = Api::all(self.client.clone());
        let answer = api
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| Denied::Unavailable(message_of(&error)))?;
        let status = answer.status.unwrap_or_default();
        let user = status.user.filter(|_| status.authenticated == Some(true));
        self.users.put(key, self.lifetimes.token, user.clone());
        user.ok_or(Denied::Unauthenticated)
    }

    /// Fails unless the server allows `user` the action.
    pub async fn authorize(&self, user: &UserInfo, wanted: Attributes) -> Result<(), Denied> {
        let (mut resource, mut path_attributes) = (None, None);
        match &wanted {
            Attributes::Path { verb, path } => {
                path_attributes =
                    Some(NonResourceAttributes { verb: Some(verb.clone()), path: Some(path.clone()) });
            }
            Attributes::Resource { verb, resource: plural, subresource, name } => {
                resource = Some(ResourceAttributes {
                    verb: Some(verb.clone()),
                    version: Some("v1".to_owned()),
                    resource: Some((*plural).to_owned()),
                    subresource: Some(subresource.clone()),
                    name: Some(name.clone()),
                    ..ResourceAttributes::default()
                });
            }
        }
        let spec = SubjectAccessReviewSpec {
            user: user.username.clone(),
            groups: user.groups.clone(),
            uid: user.uid.clone(),
            extra: user.extra.clone(),
            non_resource_attributes: path_attributes,
            resource_attributes: resource,
        };
        // Everything that the server decides by, as upstream.
        let text = ferrite_json::to_vec(&spec).map_err(|error| Denied::Unavailable(error.to_string()))?;
        let key = key_of(&text);
        if let Some(known) = self.permissions.get(&key) {
            return known.map_err(Denied::Forbidden);
        }
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let api: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let answer = api
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| Denied::Unavailable(message_of(&error)))?;
        let (verdict, kept) = match answer.status.is_some_and(|status| status.allowed) {
            true => (Ok(()), self.lifetimes.allowed),
            false => {
                let name = user.username.as_deref().unwrap_or_default();
                (Err(forbidden(name, &wanted)), self.lifetimes.denied)
            }
        };
        self.permissions.put(key, kept, verdict.clone());
        verdict.map_err(Denied::Forbidden)
    }
}

/// Upstream's words.
fn forbidden(user: &str, wanted: &Attributes) -> String {
    match wanted {
        Attributes::Path { verb, path } => {
            format!("forbidden: User {user:?} cannot {verb} path {path:?}")
        }
        Attributes::Resource { verb, resource, subresource, name } => {
            format!(
                "Forbidden (user={user}, verb={verb}, resource={resource}, subresource(s)=[{subresource}]), name={name}"
            )
        }
    }
}

impl Access for DelegatedAccess {
    fn check<'a>(
        &'a self,
        token: Option<&'a str>,
        verb: &'a str,
        path: &'a str,
    ) -> Pin<Box<dyn Future<Output = Result<(), Denied>> + Send + 'a>> {
        Box::pin(async move {
            let user = self.authenticate(token).await?;
            self.authorize(&user, Attributes::Path { verb: verb.to_owned(), path: path.to_owned() }).await
        })
    }
}
