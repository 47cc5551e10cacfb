//! An extension API server behind a Service: where it is, how it is trusted, and how it is asked.

use super::services::ServiceReference;
use crate::auth::User;
use crate::certificates::ActiveCertificates;
use crate::http::{Body, BoxError};
use crate::server::ApiServer;
use crate::subresource::{dial, endpoints_of};
use crate::traffic::{Account, TooManyConnections};
use ::http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use base64::Engine;
use ferrite_pki::{Identity, PkiError};
use hyper::body::Incoming;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use rand::seq::IndexedRandom;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock};

/// A server that another process runs.
pub(crate) struct Remote {
    /// Name of the APIService.
    pub name: String,
    pub service: ServiceReference,
    /// The APIService's own status says so.
    pub available: bool,
    trust: RwLock<Trust>,
}

/// The settings of connections, and the server's certificates of which they were made.
struct Trust {
    certificates: Arc<ActiveCertificates>,
    tls: Result<Arc<rustls::ClientConfig>, TrustError>,
}

/// The certificates of an APIService cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum TrustError {
    #[error("the caBundle of APIService {name} is not base64 of PEM certificates")]
    Bundle { name: String },
    #[error("TLS to the server of APIService {name} cannot be set up: {why}")]
    Tls { name: String, why: String },
}

/// Nothing of a Service can be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReachError {
    #[error("service {namespace}/{name} has no ready endpoint for port {port}")]
    NoEndpoint { namespace: String, name: String, port: u16 },
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error(transparent)]
    TooMany(TooManyConnections),
    #[error("cannot reach {at}: {source}")]
    Connect {
        at: String,
        #[source]
        source: BoxError,
    },
}

impl Remote {
    pub fn new(
        name: &str,
        service: ServiceReference,
        available: bool,
        certificates: Arc<ActiveCertificates>,
    ) -> Self {
        let tls = trust(name, &service, certificates.certificates.proxy_client.as_ref());
        let trust = RwLock::new(Trust { certificates, tls });
        Self { name: name.to_owned(), service, available, trust }
    }

    pub fn trust_error(&self) -> Option<TrustError> {
        self.trust.read().unwrap_or_else(PoisonError::into_inner).tls.as_ref().err().cloned()
    }

    /// The settings of connections, with the server's certificate of now.
    fn tls(&self, server: &ApiServer) -> Result<Arc<rustls::ClientConfig>, TrustError> {
        let now = server.certificates();
        {
            let known = self.trust.read().unwrap_or_else(PoisonError::into_inner);
            if Arc::ptr_eq(&known.certificates, &now) {
                return known.tls.clone();
            }
        }
        let tls = trust(&self.name, &self.service, now.certificates.proxy_client.as_ref());
        let anew = Trust { certificates: now, tls: tls.clone() };
        *self.trust.write().unwrap_or_else(PoisonError::into_inner) = anew;
        tls
    }

    /// The endpoints of the Service that are ready.
    pub fn places(&self, server: &ApiServer) -> Vec<(IpAddr, u16)> {
        let ServiceReference { namespace, name, port, .. } = &self.service;
        endpoints_of(&server.registry.view(), namespace, name, *port)
    }

    /// The error of a Service without an endpoint that is ready.
    pub fn no_endpoint(&self) -> ReachError {
        let ServiceReference { namespace, name, port, .. } = &self.service;
        ReachError::NoEndpoint { namespace: namespace.clone(), name: name.clone(), port: *port }
    }

    /// Sends a request to one of the Service's endpoints, over a connection that counts as `account`'s.
    pub async fn send(
        &self,
        server: &ApiServer,
        account: Option<&Account>,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, ReachError> {
        let place = self.places(server).choose(&mut rand::rng()).copied();
        self.send_to(server, account, place.ok_or_else(|| self.no_endpoint())?, request).await
    }

    /// As [`Self::send`], to one endpoint.
    pub async fn send_to(
        &self,
        server: &ApiServer,
        account: Option<&Account>,
        (address, endpoint_port): (IpAddr, u16),
        request: Request<Body>,
    ) -> Result<Response<Incoming>, ReachError> {
        let tls = self.tls(server)?;
        let ServiceReference { namespace, name, .. } = &self.service;
        let place = dial::Place {
            address,
            port: endpoint_port,
            tls: Some(tls),
            server_name: Some(format!("{name}.{namespace}.svc")),
            kubelet_of: None,
        };
        let sent = dial::send(server, account, &place, request).await;
        sent.map_err(|source| match source.downcast::<TooManyConnections>() {
            Ok(too_many) => ReachError::TooMany(*too_many),
            Err(source) => ReachError::Connect { at: format!("https://{}", place.host()), source },
        })
    }
}

fn trust(
    name: &str,
    service: &ServiceReference,
    identity: Option<&Identity>,
) -> Result<Arc<rustls::ClientConfig>, TrustError> {
    let failed = |error: PkiError| TrustError::Tls { name: name.to_owned(), why: error.to_string() };
    if service.skip_verify {
        return ferrite_pki::unverified_client_config_as(identity).map(Arc::new).map_err(failed);
    }
    let bundle = base64::engine::general_purpose::STANDARD.decode(&service.ca_bundle).ok();
    let bundle = bundle.and_then(|bytes| String::from_utf8(bytes).ok());
    let bundle = bundle.ok_or_else(|| TrustError::Bundle { name: name.to_owned() })?;
    ferrite_pki::client_config(&bundle, identity).map(Arc::new).map_err(failed)
}

/// Bytes that cannot stand in a header's name, and the sign that escapes them.
const ESCAPED: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'%')
    .add(b'(')
    .add(b')')
    .add(b',')
    .add(b'/')
    .add(b':')
    .add(b';')
    .add(b'<')
    .add(b'=')
    .add(b'>')
    .add(b'?')
    .add(b'@')
    .add(b'[')
    .add(b'\\')
    .add(b']')
    .add(b'{')
    .add(b'}');

/// Names the user of the request in upstream's headers, as bytes of UTF-8. A value with control characters, which no
/// header can carry, is left out: the far side then knows less of the user, never more.
pub(super) fn identify(headers: &mut HeaderMap, user: &User) {
    let mut add = |name: &str, value: &str| {
        let name = HeaderName::from_bytes(name.as_bytes());
        if let (Ok(name), Ok(value)) = (name, HeaderValue::from_bytes(value.as_bytes())) {
            headers.append(name, value);
        }
    };
    add("x-remote-user", &user.name);
    if !user.uid.is_empty() {
        add("x-remote-uid", &user.uid);
    }
    for group in &user.groups {
        add("x-remote-group", group);
    }
    for (key, values) in &user.extra {
        let name = format!("x-remote-extra-{}", utf8_percent_encode(key, ESCAPED)).to_lowercase();
        for value in values {
            add(&name, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificates::Certificates;

    #[test]
    fn users_are_named_in_headers() {
        let mut user = User::new("jane", ["dev"]);
        user.uid = "7".into();
        user.extra.insert("example.com/scopes".into(), vec!["a".into(), "b".into()]);
        let mut headers = HeaderMap::new();
        identify(&mut headers, &user);
        let all = |name: &str| -> Vec<&str> {
            headers.get_all(name).iter().map(|v| v.to_str().expect("text")).collect()
        };
        assert_eq!(all("x-remote-user"), ["jane"]);
        assert_eq!(all("x-remote-uid"), ["7"]);
        assert_eq!(all("x-remote-group"), ["dev", "system:authenticated"]);
        assert_eq!(all("x-remote-extra-example.com%2fscopes"), ["a", "b"]);
    }

    #[test]
    fn names_beyond_ascii_reach_the_far_side_and_control_characters_do_not() {
        let mut user = User::new("björn", ["größe", "a\nb"]);
        user.extra.insert("scopes".into(), vec!["ä".into()]);
        let mut headers = HeaderMap::new();
        identify(&mut headers, &user);
        let all = |name: &str| -> Vec<&[u8]> { headers.get_all(name).iter().map(|v| v.as_bytes()).collect() };
        assert_eq!(all("x-remote-user"), ["björn".as_bytes()]);
        assert_eq!(all("x-remote-group"), ["größe".as_bytes(), b"system:authenticated"]);
        assert_eq!(all("x-remote-extra-scopes"), ["ä".as_bytes()]);
    }

    #[test]
    fn a_bad_bundle_is_told() {
        for bundle in ["%", "bm90IHV0Zjg", "/////w=="] {
            let service = ServiceReference {
                namespace: "a".into(),
                name: "b".into(),
                port: 443,
                ca_bundle: bundle.into(),
                skip_verify: false,
            };
            let none = ActiveCertificates::new(Certificates::default()).expect("no certificates");
            let remote = Remote::new("v1.x", service, true, Arc::new(none));
            assert!(remote.trust_error().is_some(), "{bundle}");
        }
    }
}
