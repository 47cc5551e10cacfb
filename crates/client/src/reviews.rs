//! Delegated authentication and authorization: the API server says who a caller is and what it may do.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
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

/// Upstream's times: a token and a permission are believed for ten seconds, a refusal as long.
const KEPT: Duration = Duration::from_secs(10);
/// Verdicts that are remembered. Whoever makes up more callers only makes the server forget sooner.
const MOST: usize = 1024;

/// A bounded memory of verdicts.
struct Verdicts<K, V>(Mutex<HashMap<K, (Instant, V)>>);

impl<K: Eq + Hash, V: Clone> Verdicts<K, V> {
    fn new() -> Self {
        Self(Mutex::default())
    }

    fn get(&self, key: &K) -> Option<V> {
        let verdicts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        verdicts.get(key).filter(|(until, _)| *until > Instant::now()).map(|(_, verdict)| verdict.clone())
    }

    fn put(&self, key: K, verdict: V) {
        let mut verdicts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if verdicts.len() >= MOST {
            verdicts.retain(|_, (until, _)| *until > now);
        }
        if verdicts.len() >= MOST {
            verdicts.clear();
        }
        verdicts.insert(key, (now + KEPT, verdict));
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
    users: Verdicts<String, Option<UserInfo>>,
    permissions: Verdicts<(String, Vec<String>, Attributes), Result<(), String>>,
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
        Self { client, users: Verdicts::new(), permissions: Verdicts::new(), anonymous }
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
        if let Some(known) = self.users.get(&token.to_owned()) {
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
        self.users.put(token.to_owned(), user.clone());
        user.ok_or(Denied::Unauthenticated)
    }

    /// Fails unless the server allows `user` the action.
    pub async fn authorize(&self, user: &UserInfo, wanted: Attributes) -> Result<(), Denied> {
        let name = user.username.clone().unwrap_or_default();
        let groups = user.groups.clone().unwrap_or_default();
        let key = (name, groups, wanted);
        if let Some(known) = self.permissions.get(&key) {
            return known.map_err(Denied::Forbidden);
        }
        let (mut resource, mut path_attributes) = (None, None);
        match &key.2 {
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
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(key.0.clone()),
                groups: Some(key.1.clone()),
                uid: user.uid.clone(),
                extra: user.extra.clone(),
                non_resource_attributes: path_attributes,
                resource_attributes: resource,
            },
            ..SubjectAccessReview::default()
        };
        let api: Api<SubjectAccessReview> = Api::all(self.client.clone());
        let answer = api
            .create(&PostParams::default(), &review)
            .await
            .map_err(|error| Denied::Unavailable(message_of(&error)))?;
        let verdict = match answer.status.is_some_and(|status| status.allowed) {
            true => Ok(()),
            false => Err(forbidden(&key.0, &key.2)),
        };
        self.permissions.put(key, verdict.clone());
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
