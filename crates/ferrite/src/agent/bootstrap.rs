//! The way a node joins: it finds the authority, proves the token, and has its keys certified.
//!
//! Keys are made here and never leave the node. Signed certificates are kept, so that a restart needs no
//! token. When more than two thirds of a certificate's time are over, the node asks for a new one with the
//! old one, at the start and while it runs.

use super::tunnel::client_tls;
use crate::apiserver::BoxError;
use crate::certificates::{API_CLIENT, KUBELET_CLIENT, KUBELET_SERVING, WantedCertificate, until_rotation};
use crate::joining::token::JoinToken;
use crate::joining::{DISCOVERY, DISCOVERY_NAMESPACE, DNS_USER, PROXY_USER};
use crate::kubeconfig::{self, Access};
use ferrite_client::{Backoff, Scope};
use ferrite_json::{Value, json};
use ferrite_network::Addresses;
use ferrite_pki::{Identity, NodePki, ServerTls, Subject};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use kube::config::{KubeConfigOptions, Kubeconfig};
use rustls::pki_types::ServerName;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::sync::watch;

/// The answer of a stranger is not read further.
const MOST_DISCOVERY: usize = 1 << 20;
const DISCOVERY_TIME: Duration = Duration::from_secs(10);

/// Why a node cannot join; trying again would not help.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error("the node has not joined yet: give --token, which `ferrite token create` prints on the server")]
    NoToken,
    #[error("{server} is not the cluster of the token: its authority has another key")]
    OtherAuthority { server: String },
    #[error("{0:?} is not like https://192.0.2.1:6443")]
    Url(String),
}

/// A node that is a member. Clients stay the same when their certificates are replaced.
pub struct Member {
    /// Acts as the node.
    pub kubelet: kube::Client,
    /// The same for connections that are no client's.
    pub node_tls: watch::Receiver<Arc<rustls::ClientConfig>>,
    /// For the kubelet's own port, now and as it changes.
    pub serving: watch::Receiver<Option<ServerTls>>,
    pub proxy: kube::Client,
    pub dns: kube::Client,
}

/// The node that wants to join, and the servers to ask.
pub struct Joining<'a> {
    /// The servers, for messages.
    pub server: &'a str,
    /// Where they are reached.
    pub url: &'a str,
    pub token: Option<&'a JoinToken>,
    pub node: &'a str,
    pub addresses: Addresses,
    pub pki: &'a Path,
}

impl Joining<'_> {
    /// Joins, or finds that it has. A server that does not answer is asked again until it does. Certificates are
    /// replaced in time, for as long as the scope lasts.
    pub async fn join(&self, scope: &Scope) -> Result<Member, BoxError> {
        let pki = Arc::new(NodePki::open(self.pki)?);
        let ca = self.authority(&pki).await?;
        let subject = Subject::client(&format!("system:node:{}", self.node), Some("system:nodes"));
        let wanted = WantedCertificate {
            name: "kubelet-client",
            subject: subject.clone(),
            signer: KUBELET_CLIENT,
            usage: "client auth",
        };
        let first = match pki.load("kubelet-client", &subject)? {
            Some(identity) => identity,
            None => {
                // A node that is a member asks as itself; only a stranger needs a token.
                let credential = match (pki.load_valid("kubelet-client", &subject)?, self.token) {
                    (Some(identity), _) => Credential::Certificate(identity),
                    (None, Some(token)) => Credential::Token(token.bearer()),
                    (None, None) => return Err(JoinError::NoToken.into()),
                };
                let asking = client(self.url, &ca, &credential).await?;
                obtain(&wanted, &asking, &pki, scope).await?
            }
        };
        let renewal = Renewal { url: self.url.to_owned(), ca: ca.clone(), pki: Arc::clone(&pki) };
        let (node_tls_changed, node_tls) = watch::channel(client_tls(&renewal.ca, &first)?);
        let kubelet = renewal.client(wanted, first, None, Some(node_tls_changed), scope).await?;
        let serving = WantedCertificate {
            name: "kubelet",
            subject: Subject {
                common_name: format!("system:node:{}", self.node),
                organization: Some("system:nodes".into()),
                names: std::iter::once(self.node.to_owned())
                    .chain(self.addresses.iter().map(ToString::to_string))
                    .collect(),
            },
            signer: KUBELET_SERVING,
            usage: "server auth",
        };
        let part = |name, user| WantedCertificate {
            name,
            subject: Subject::client(user, None),
            signer: API_CLIENT,
            usage: "client auth",
        };
        let (proxy, dns) = (part("kube-proxy", PROXY_USER), part("dns", DNS_USER));
        let identities = tokio::try_join!(
            find(&serving, &kubelet, &pki, scope),
            find(&proxy, &kubelet, &pki, scope),
            find(&dns, &kubelet, &pki, scope),
        )?;
        Ok(Member {
            node_tls,
            serving: renewal.serving(serving, identities.0, kubelet.clone(), scope)?,
            proxy: renewal.client(proxy, identities.1, Some(&kubelet), None, scope).await?,
            dns: renewal.client(dns, identities.2, Some(&kubelet), None, scope).await?,
            kubelet,
        })
    }

    /// The authority's certificate: the one kept, or the server's if it is the token's.
    async fn authority(&self, pki: &NodePki) -> Result<String, BoxError> {
        let kept = pki.ca()?;
        let Some(token) = self.token else { return kept.ok_or_else(|| JoinError::NoToken.into()) };
        let pinned = |ca: &str| ferrite_pki::pinned_authority(ca, &token.ca_hash);
        if let Some(ca) = kept.as_deref().and_then(pinned) {
            return Ok(ca);
        }
        let target = Target::parse(self.url)?;
        let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(5), 0.2);
        let ca = loop {
            match tokio::time::timeout(DISCOVERY_TIME, discover(&target)).await {
                Ok(Ok(ca)) => break ca,
                Ok(Err(error)) => tracing::warn!(%error, server = self.server, "no answer; will try again"),
                Err(_) => tracing::warn!(server = self.server, "no answer in time; will try again"),
            }
            tokio::time::sleep(backoff.next_delay()).await;
        };
        let Some(ca) = pinned(&ca) else {
            return Err(JoinError::OtherAuthority { server: self.server.to_owned() }.into());
        };
        pki.save_ca(&ca)?;
        Ok(ca)
    }
}

/// Replaces certificates while the node runs.
struct Renewal {
    url: String,
    ca: String,
    pki: Arc<NodePki>,
}

/// Between two requests for the same certificate, however short its life is: the cluster must not be flooded.
const LEAST_WAIT: Duration = Duration::from_secs(10);

impl Renewal {
    /// A client that shows the newest certificate. New ones are asked for as `asking`, or as the client itself, and go to
    /// `tls`, too.
    async fn client(
        &self,
        wanted: WantedCertificate,
        first: Identity,
        asking: Option<&kube::Client>,
        tls: Option<watch::Sender<Arc<rustls::ClientConfig>>>,
        scope: &Scope,
    ) -> Result<kube::Client, BoxError> {
        let certificate = first.certificate.clone();
        let (swap, current) =
            watch::channel(client(&self.url, &self.ca, &Credential::Certificate(first)).await?);
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let client = current.borrow().clone();
            async move { client.send(request).await }
        });
        let stable = kube::Client::new(service, "default");
        let asking = asking.unwrap_or(&stable).clone();
        let (url, ca) = (self.url.clone(), self.ca.clone());
        let take = move |identity: Identity| {
            let (url, ca, swap, tls) = (url.clone(), ca.clone(), swap.clone(), tls.clone());
            async move {
                if let Some(tls) = tls {
                    tls.send_replace(client_tls(&ca, &identity)?);
                }
                swap.send_replace(client(&url, &ca, &Credential::Certificate(identity)).await?);
                Ok::<_, BoxError>(())
            }
        };
        scope.spawn(renew(wanted, certificate, asking, Arc::clone(&self.pki), scope.clone(), take));
        Ok(stable)
    }

    /// The settings of a port that shows the newest certificate.
    fn serving(
        &self,
        wanted: WantedCertificate,
        first: Identity,
        asking: kube::Client,
        scope: &Scope,
    ) -> Result<watch::Receiver<Option<ServerTls>>, BoxError> {
        let ca = self.ca.clone();
        let settings = move |identity: &Identity| ferrite_pki::server_config(identity, &ca, &["http/1.1"]);
        let (swap, current) = watch::channel(Some(settings(&first)?));
        let take = move |identity: Identity| {
            let made = settings(&identity).map(|tls| drop(swap.send_replace(Some(tls))));
            std::future::ready(made.map_err(BoxError::from))
        };
        let certificate = first.certificate;
        scope.spawn(renew(wanted, certificate, asking, Arc::clone(&self.pki), scope.clone(), take));
        Ok(current)
    }
}

/// Asks for the next certificate in time, again and again, and hands it to `take`.
async fn renew<F>(
    wanted: WantedCertificate,
    mut certificate: String,
    asking: kube::Client,
    pki: Arc<NodePki>,
    scope: Scope,
    take: impl Fn(Identity) -> F,
) where
    F: Future<Output = Result<(), BoxError>>,
{
    let mut backoff = Backoff::new(Duration::from_secs(2), Duration::from_secs(300), 0.2);
    loop {
        let now = jiff::Timestamp::now().as_second();
        let wait = until_rotation(&certificate, now, rand::random()).unwrap_or_default();
        tokio::time::sleep(wait.max(LEAST_WAIT)).await;
        let renewed: Result<String, BoxError> = async {
            let identity = obtain(&wanted, &asking, &pki, &scope).await?;
            let certificate = identity.certificate.clone();
            take(identity).await?;
            Ok(certificate)
        }
        .await;
        match renewed {
            Ok(next) => {
                tracing::info!(certificate = wanted.name, "a certificate was replaced");
                certificate = next;
                backoff.reset();
            }
            Err(error) => {
                tracing::warn!(%error, certificate = wanted.name, "cannot replace a certificate; will try again");
                tokio::time::sleep(backoff.next_delay()).await;
            }
        }
    }
}

/// The certificate that is kept, else a new one.
async fn find(
    wanted: &WantedCertificate,
    client: &kube::Client,
    pki: &NodePki,
    scope: &Scope,
) -> Result<Identity, BoxError> {
    match pki.load(wanted.name, &wanted.subject)? {
        Some(identity) => Ok(identity),
        None => obtain(wanted, client, pki, scope).await,
    }
}

async fn obtain(
    wanted: &WantedCertificate,
    client: &kube::Client,
    pki: &NodePki,
    scope: &Scope,
) -> Result<Identity, BoxError> {
    let identity = wanted.obtain(client, scope).await?;
    pki.save(wanted.name, &identity)?;
    Ok(identity)
}

/// Where an API server is.
pub struct Target {
    pub host: String,
    pub port: u16,
}

impl Target {
    pub fn parse(url: &str) -> Result<Self, JoinError> {
        let bad = || JoinError::Url(url.to_owned());
        let uri: http::Uri = url.parse().map_err(|_| bad())?;
        let host = uri.host().map(|host| host.trim_matches(['[', ']']).to_owned()).filter(|h| !h.is_empty());
        let plain = matches!(uri.path(), "" | "/") && uri.query().is_none();
        match host {
            Some(host) if uri.scheme_str() == Some("https") && plain => {
                Ok(Self { host, port: uri.port_u16().unwrap_or(443) })
            }
            _ => Err(bad()),
        }
    }
}

/// Asks a server, whoever it is, for the authority that it claims. The request contains no secret, and the
/// response proves nothing before it is compared with the token.
pub async fn discover(target: &Target) -> Result<String, BoxError> {
    let stream = TcpStream::connect((target.host.as_str(), target.port)).await?;
    let tls = tokio_rustls::TlsConnector::from(Arc::new(ferrite_pki::unverified_client_config()?));
    let stream = tls.connect(ServerName::try_from(target.host.clone())?, stream).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let path = format!("/api/v1/namespaces/{DISCOVERY_NAMESPACE}/configmaps/{DISCOVERY}");
    let request = http::Request::get(path).header("host", &target.host).body(Full::<Bytes>::default())?;
    let answer = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MOST_DISCOVERY).collect().await?.to_bytes();
        match status.is_success() {
            true => authority_of(&body).ok_or_else(|| BoxError::from("the server publishes no authority")),
            false => Err(format!("the server publishes no authority ({status})").into()),
        }
    };
    tokio::select! {
        answer = answer => answer,
        broken = connection => Err(format!("the connection broke: {broken:?}").into()),
    }
}

fn authority_of(body: &[u8]) -> Option<String> {
    let map: Value = ferrite_json::from_slice(body).ok()?;
    let config: Value = serde_saphyr::from_str(map["data"]["kubeconfig"].as_str()?).ok()?;
    let encoded = config["clusters"][0]["cluster"]["certificate-authority-data"].as_str()?;
    use base64::Engine;
    String::from_utf8(base64::engine::general_purpose::STANDARD.decode(encoded).ok()?).ok()
}

/// The authentication of a client.
pub enum Credential {
    Token(String),
    Certificate(Identity),
}

pub async fn client(server: &str, ca: &str, credential: &Credential) -> Result<kube::Client, BoxError> {
    let (certificate, key) = match credential {
        Credential::Token(_) => ("", ""),
        Credential::Certificate(identity) => (identity.certificate.as_str(), identity.key.as_str()),
    };
    let mut config = kubeconfig::standalone("ferrite", &Access { server, ca, certificate, key });
    if let Credential::Token(token) = credential {
        config["users"][0]["user"] = json!({"token": token});
    }
    let config: Kubeconfig = ferrite_json::from_value(config)?;
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await?;
    Ok(kube::Client::try_from(config)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers() {
        for (url, want) in [
            ("https://192.0.2.1:6443", Some(("192.0.2.1", 6443))),
            ("https://192.0.2.1", Some(("192.0.2.1", 443))),
            ("https://[2001:db8::1]:6443/", Some(("2001:db8::1", 6443))),
            ("https://server.example:6443", Some(("server.example", 6443))),
            ("http://192.0.2.1:6443", None),
            ("https://192.0.2.1/path", None),
            ("192.0.2.1:6443", None),
            ("", None),
        ] {
            let target = Target::parse(url).ok();
            assert_eq!(target.as_ref().map(|t| (t.host.as_str(), t.port)), want, "{url}");
        }
    }

    #[tokio::test]
    async fn an_authority_beside_the_tokens_is_not_trusted() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let [ours, attacker] = [0, 1].map(|at| ferrite_pki::ClusterPki::open(dirs[at].path()).unwrap());
        let token = JoinToken::new(ours.ca()).unwrap();
        let node = NodePki::open(dirs[2].path()).unwrap();
        node.save_ca(&[ours.ca(), attacker.ca()].concat()).unwrap();
        let joining = Joining {
            server: "https://192.0.2.1:6443",
            url: "https://192.0.2.1:6443",
            token: Some(&token),
            node: "n",
            addresses: "192.0.2.2".parse().unwrap(),
            pki: dirs[2].path(),
        };
        let trusted = joining.authority(&node).await.unwrap();
        assert_eq!(Some(trusted), ferrite_pki::pinned_authority(ours.ca(), &token.ca_hash));
    }

    #[test]
    fn authorities_are_found_in_what_servers_publish() {
        let ca = "-----BEGIN CERTIFICATE-----\n";
        use base64::Engine;
        let encoded = base64::engine::general_purpose::STANDARD.encode(ca);
        let config = json!({"clusters": [{"cluster": {"certificate-authority-data": encoded}}]}).to_string();
        let body = json!({"data": {"kubeconfig": config}}).to_string();
        assert_eq!(authority_of(body.as_bytes()).as_deref(), Some(ca));
        for bad in ["", "{}", r#"{"data":{"kubeconfig":"["}}"#, r#"{"data":{"kubeconfig":"clusters: []"}}"#] {
            assert_eq!(authority_of(bad.as_bytes()), None, "{bad}");
        }
    }
}
