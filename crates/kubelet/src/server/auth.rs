//! Authentication and authorization of callers, as upstream's delegating authenticator and authorizer.

use crate::config::{Authorization, KubeletAccess};
use ferrite_client::{Attributes, DelegatedAccess, Lifetimes};
use ferrite_component::Denied;
use ferrite_pki::{ClientAuthorities, ClientCertificate};
use hyper::header::{AUTHORIZATION, HeaderMap, UPGRADE};
use hyper::{Method, StatusCode};
use k8s_openapi::api::authentication::v1::UserInfo;
use rustls::pki_types::CertificateDer;
use std::time::SystemTime;
use tokio::sync::Semaphore;
use x509_parser::prelude::{FromDer, X509Certificate};

const AUTHENTICATED: &str = "system:authenticated";
/// Questions about tokens that are under way at the same time: strangers must not flood the API server through us.
const TOKEN_QUESTIONS: usize = 16;

/// A caller whose certificate was verified.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Caller {
    user: UserInfo,
    certificate: ClientCertificate,
}

impl Caller {
    /// Verifies the certificates that a caller presented in the handshake, which proves no more than that the caller
    /// has the key. None when they prove no identity.
    pub(crate) fn of(
        presented: &[CertificateDer<'_>],
        authorities: &ClientAuthorities,
        now: SystemTime,
    ) -> Option<Self> {
        let certificate = authorities.verify(presented, now).ok()?;
        Some(Self { user: user_of(presented.first()?)?, certificate })
    }

    /// The caller's user, until the certificate expires.
    fn user(&self, now: SystemTime) -> Option<&UserInfo> {
        self.certificate.is_valid_at(now).then_some(&self.user)
    }
}

/// The subject of a certificate.
fn user_of(certificate: &CertificateDer<'_>) -> Option<UserInfo> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let subject = parsed.subject();
    let name = subject.iter_common_name().last()?.as_str().ok()?.to_string();
    let organizations = subject.iter_organization().filter_map(|o| o.as_str().ok()).map(str::to_string);
    let groups = organizations.chain([AUTHENTICATED.to_owned()]).collect();
    (!name.is_empty()).then(|| UserInfo { username: Some(name), groups: Some(groups), ..UserInfo::default() })
}

/// A refusal in upstream's words.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub status: StatusCode,
    pub message: String,
}

/// Authenticates and authorizes callers of the kubelet API.
pub(super) struct Gatekeeper {
    node: String,
    settings: KubeletAccess,
    reviews: DelegatedAccess,
    questions: Semaphore,
}

impl Gatekeeper {
    pub(super) fn new(node: &str, settings: KubeletAccess, client: kube::Client) -> Self {
        let lifetimes = Lifetimes {
            token: settings.token_ttl,
            allowed: settings.authorized_ttl,
            denied: settings.unauthorized_ttl,
        };
        let reviews = DelegatedAccess::new(client, settings.anonymous).with_lifetimes(lifetimes);
        Self { node: node.to_owned(), settings, reviews, questions: Semaphore::new(TOKEN_QUESTIONS) }
    }

    /// Fails unless the caller may do this.
    pub(super) async fn check(
        &self,
        caller: Option<&Caller>,
        headers: &HeaderMap,
        method: &Method,
        path: &str,
    ) -> Result<(), Refusal> {
        let user = self.authenticate(caller, headers).await.map_err(|denied| {
            if let Denied::Unavailable(error) = denied {
                tracing::warn!(%error, "cannot authenticate a caller of the kubelet API");
            }
            Refusal { status: StatusCode::UNAUTHORIZED, message: "Unauthorized".into() }
        })?;
        self.authorize(&user, verb(method, headers), path).await
    }

    /// As upstream's union: the certificate, then the token, then nobody.
    async fn authenticate(&self, caller: Option<&Caller>, headers: &HeaderMap) -> Result<UserInfo, Denied> {
        if let Some(user) = caller.and_then(|caller| caller.user(SystemTime::now())) {
            return Ok(user.clone());
        }
        let token = bearer(headers);
        if token.is_some() && !self.settings.webhook_tokens {
            return Err(Denied::Unauthenticated);
        }
        let _place = self.questions.acquire().await.map_err(|e| Denied::Unavailable(e.to_string()))?;
        self.reviews.authenticate(token).await
    }

    async fn authorize(&self, user: &UserInfo, verb: &str, path: &str) -> Result<(), Refusal> {
        if self.settings.authorization == Authorization::AlwaysAllow {
            return Ok(());
        }
        let subresources = subresources(path);
        let name = user.username.as_deref().unwrap_or_default();
        for subresource in subresources {
            let wanted = Attributes::Resource {
                verb: verb.to_owned(),
                resource: "nodes",
                subresource: (*subresource).to_owned(),
                name: self.node.clone(),
            };
            match self.reviews.authorize(user, wanted).await {
                Ok(()) => return Ok(()),
                Err(Denied::Forbidden(_) | Denied::Unauthenticated) => {}
                Err(Denied::Unavailable(error)) => {
                    tracing::warn!(%error, user = name, "cannot authorize a caller of the kubelet API");
                    let message = format!(
                        "Authorization error (user={name}, verb={verb}, resource=nodes, subresource={subresource})"
                    );
                    return Err(Refusal { status: StatusCode::INTERNAL_SERVER_ERROR, message });
                }
            }
        }
        let message = format!(
            "Forbidden (user={name}, verb={verb}, resource=nodes, subresource(s)=[{}])\n",
            subresources.join(" ")
        );
        Err(Refusal { status: StatusCode::FORBIDDEN, message })
    }
}

/// The bearer token of a request.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.trim().split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

/// The API's verb for a method. Methods without one can be allowed by a wildcard only. A stream into a container begins
/// with a GET where it is a WebSocket, and is no less than one that begins with a POST.
fn verb(method: &Method, headers: &HeaderMap) -> &'static str {
    match *method {
        Method::POST => "create",
        Method::GET if headers.contains_key(UPGRADE) => "create",
        Method::GET => "get",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "",
    }
}

/// The subresources of `nodes` any one of which opens a path; the finer ones stand first.
fn subresources(path: &str) -> &'static [&'static str] {
    const TABLE: &[(&str, &[&str])] = &[
        ("/pods", &["pods", "proxy"]),
        ("/healthz", &["healthz", "proxy"]),
        ("/configz", &["configz", "proxy"]),
        ("/runningpods", &["pods", "proxy"]),
        ("/stats", &["stats"]),
        ("/metrics", &["metrics"]),
        ("/logs", &["log"]),
        ("/checkpoint", &["checkpoint"]),
        ("/statusz", &["statusz"]),
        ("/flagz", &["configz"]),
    ];
    let beneath =
        |root: &str| path.strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    TABLE.iter().find(|(root, _)| beneath(root)).map_or(&["proxy"], |(_, subresources)| subresources)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn garbage_is_nobody() {
        assert_eq!(user_of(&CertificateDer::from(vec![0x30, 0x03, 1, 2, 3])), None);
    }

    #[test]
    fn paths_have_upstreams_subresources() {
        for (path, expected) in [
            ("/pods", "pods proxy"),
            ("/pods/", "pods proxy"),
            ("/podsx", "proxy"),
            ("/runningpods", "pods proxy"),
            ("/runningpods/", "pods proxy"),
            ("/healthz", "healthz proxy"),
            ("/healthz/syncloop", "healthz proxy"),
            ("/configz", "configz proxy"),
            ("/stats", "stats"),
            ("/stats/summary", "stats"),
            ("/metrics", "metrics"),
            ("/metrics/cadvisor", "metrics"),
            ("/logs/", "log"),
            ("/logs/x/y", "log"),
            ("/checkpoint/n/p/c", "checkpoint"),
            ("/statusz", "statusz"),
            ("/flagz", "configz"),
            ("/exec/n/p/c", "proxy"),
            ("/run/n/p/c", "proxy"),
            ("/containerLogs/n/p/c", "proxy"),
            ("/debug/pprof/", "proxy"),
            ("/", "proxy"),
            ("//metrics", "proxy"),
            ("", "proxy"),
        ] {
            assert_eq!(subresources(path).join(" "), expected, "{path}");
        }
    }

    #[test]
    fn methods_have_upstreams_verbs() {
        for (method, expected) in
            [(Method::GET, "get"), (Method::POST, "create"), (Method::HEAD, ""), (Method::OPTIONS, "")]
        {
            assert_eq!(verb(&method, &HeaderMap::new()), expected);
        }
        let stream = HeaderMap::from_iter([(UPGRADE, "websocket".parse().unwrap())]);
        assert_eq!(verb(&Method::GET, &stream), "create", "who may only read gets into no container");
    }

    #[test]
    fn tokens_are_found() {
        for (header, expected) in [
            ("Bearer abc", Some("abc")),
            ("bearer abc ", Some("abc")),
            ("Bearer ", None),
            ("Basic abc", None),
            ("abc", None),
        ] {
            let headers = HeaderMap::from_iter([(AUTHORIZATION, header.parse().unwrap())]);
            assert_eq!(bearer(&headers), expected, "{header}");
        }
        assert_eq!(bearer(&HeaderMap::new()), None);
    }
}
