//! Where calls go.

use super::credentials::{Credential, Credentials};
use super::{CallError, resolve, trust};
use crate::registry::View;
use base64::Engine;
use ferrite_json::Value;
use std::hash::{Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The port of a Service or URL that names none.
const HTTPS: u16 = 443;

/// The address of the other side.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Place {
    /// A host of a URL.
    Host {
        host: String,
        port: u16,
    },
    Service {
        namespace: String,
        name: String,
        port: u16,
    },
}

/// State shared by calls to one other side.
pub(super) struct Shared {
    place: Place,
    /// Host and port as the other side is addressed.
    pub authority: String,
    path: String,
    /// The name in the other side's certificate.
    pub server_name: rustls_pki_types::ServerName<'static>,
    pub tls: Arc<rustls::ClientConfig>,
    pub credentials: Credential,
    /// The room for its answers.
    pub share: Arc<tokio::sync::Semaphore>,
    /// Tells connections apart that must not be shared: another authority, or other credentials.
    identity: u64,
}

/// One other side, compiled from a `clientConfig`.
pub(crate) struct Destination {
    pub(super) shared: Arc<Shared>,
}

/// Why there is nowhere to call.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum DestinationError {
    #[error("webhook configuration must have either service or URL")]
    Nothing,
    #[error("Unparsable URL: {0}")]
    Url(String),
    #[error("unable to load root certificates: {0}")]
    Authority(String),
    #[error("{0}")]
    Credentials(String),
}

impl Destination {
    /// Of `clientConfig` of a webhook or a conversion.
    pub fn parse(config: &Value, credentials: &Credentials) -> Result<Self, DestinationError> {
        let (place, path) = match (&config["service"], config["url"].as_str()) {
            (Value::Null, Some(url)) => host_of(url)?,
            (Value::Null, None) => return Err(DestinationError::Nothing),
            (service, _) => service_of(service),
        };
        let bundle = match config["caBundle"].as_str() {
            None | Some("") => String::new(),
            Some(encoded) => {
                let decoded = base64::engine::general_purpose::STANDARD.decode(encoded);
                let bytes = decoded.map_err(|e| DestinationError::Authority(e.to_string()))?;
                String::from_utf8(bytes).map_err(|e| DestinationError::Authority(e.to_string()))?
            }
        };
        let (name, authority) = match &place {
            Place::Host { host, port: HTTPS } => (host.clone(), host_text(host)),
            Place::Host { host, port } => (host.clone(), format!("{}:{port}", host_text(host))),
            Place::Service { namespace, name, port } => {
                let host = format!("{name}.{namespace}.svc");
                (host.clone(), format!("{host}:{port}"))
            }
        };
        let port = match place {
            Place::Host { port, .. } | Place::Service { port, .. } => port,
        };
        let credential = credentials.of(&host_text(&name), port);
        let tls = trust::config(&bundle, &credential)?;
        let server_name = rustls_pki_types::ServerName::try_from(name.clone())
            .map_err(|_| DestinationError::Url(format!("{name:?} is no name of a server")))?;
        let mut hasher = std::hash::DefaultHasher::new();
        (&place, &bundle, &credential).hash(&mut hasher);
        let shared = Shared {
            identity: hasher.finish(),
            place,
            authority,
            path,
            server_name,
            tls: Arc::new(tls),
            credentials: credential,
            share: super::share(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The whole address, as errors name it.
    pub fn url(&self, query: &str) -> String {
        format!("https://{}{}", self.shared.authority, self.shared.target(query))
    }

    /// The addresses to try, in order: one of a Service's endpoints, or those of a host.
    pub(super) async fn addresses(&self, view: &View) -> Result<Vec<SocketAddr>, CallError> {
        match &self.shared.place {
            Place::Service { namespace, name, port } => {
                resolve::endpoint(view, namespace, name, *port).map(|address| vec![address])
            }
            Place::Host { host, port } => match host.parse::<IpAddr>() {
                Ok(address) => Ok(vec![SocketAddr::new(address, *port)]),
                Err(_) => {
                    let failed = |source| CallError::Lookup { host: host.clone(), source };
                    Ok(tokio::net::lookup_host((host.as_str(), *port)).await.map_err(failed)?.collect())
                }
            },
        }
    }
}

impl Shared {
    /// Path and query of a request.
    pub fn target(&self, query: &str) -> String {
        match query {
            "" => self.path.clone(),
            query => format!("{}?{query}", self.path),
        }
    }

    /// Returns true if it is found behind a Service.
    pub fn is_service(&self) -> bool {
        matches!(self.place, Place::Service { .. })
    }

    pub fn identity(&self) -> u64 {
        self.identity
    }
}

/// A host as an address in a URL has it.
fn host_text(host: &str) -> String {
    if host.contains(':') { format!("[{host}]") } else { host.to_owned() }
}

fn host_of(url: &str) -> Result<(Place, String), DestinationError> {
    let bad = |why: &str| DestinationError::Url(why.to_owned());
    let parsed: ::http::Uri = url.parse().map_err(|e: ::http::uri::InvalidUri| bad(&e.to_string()))?;
    if parsed.scheme_str() != Some("https") {
        return Err(bad("the scheme must be https"));
    }
    let host = parsed.host().filter(|host| !host.is_empty()).ok_or_else(|| bad("it has no host"))?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    let path = if parsed.path().is_empty() { "/" } else { parsed.path() };
    Ok((Place::Host { host, port: parsed.port_u16().unwrap_or(HTTPS) }, path.to_owned()))
}

fn service_of(service: &Value) -> (Place, String) {
    let text = |key: &str| service[key].as_str().unwrap_or_default().to_owned();
    let port = service["port"].as_u64().and_then(|port| u16::try_from(port).ok()).unwrap_or(HTTPS);
    let path = text("path");
    let path = if path.starts_with('/') { path } else { format!("/{path}") };
    (Place::Service { namespace: text("namespace"), name: text("name"), port }, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn urls_and_services_become_places() {
        let service =
            |name: &str, port: u16| Place::Service { namespace: "n".into(), name: name.into(), port };
        let host = |host: &str, port: u16| Place::Host { host: host.into(), port };
        let rows = [
            (json!({"url": "https://a.example/x"}), host("a.example", 443), "a.example", "/x"),
            (json!({"url": "https://127.0.0.1:8443"}), host("127.0.0.1", 8443), "127.0.0.1:8443", "/"),
            (json!({"url": "https://[::1]:8443/x"}), host("::1", 8443), "[::1]:8443", "/x"),
            (json!({"service": {"namespace": "n", "name": "s"}}), service("s", 443), "s.n.svc:443", "/"),
            (
                json!({"service": {"namespace": "n", "name": "s", "port": 8443, "path": "/p"}}),
                service("s", 8443),
                "s.n.svc:8443",
                "/p",
            ),
        ];
        for (config, place, authority, path) in rows {
            let parsed = Destination::parse(&config, &Credentials::default()).expect("a destination");
            let Shared { place: found, authority: named, path: to, .. } = &*parsed.shared;
            assert_eq!((found, named.as_str(), to.as_str()), (&place, authority, path), "{config}");
        }
        for bad in [
            json!({}),
            json!({"url": "http://a"}),
            json!({"url": "::"}),
            json!({"url": "https://a", "caBundle": "!"}),
            json!({"url": "https://a", "caBundle": "bm9uZQ=="}),
        ] {
            assert!(Destination::parse(&bad, &Credentials::default()).is_err(), "{bad}");
        }
    }

    #[test]
    fn connections_are_shared_only_where_everything_is_the_same() {
        let identity = |config: Value| {
            let parsed = Destination::parse(&config, &Credentials::default()).expect("a destination");
            parsed.shared.identity()
        };
        let one = identity(json!({"url": "https://a/x"}));
        assert_eq!(one, identity(json!({"url": "https://a/y"})));
        assert_ne!(one, identity(json!({"url": "https://b/x"})));
    }
}
