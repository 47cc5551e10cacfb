//! Certificates and authorities that may change while the server runs.

use crate::auth::{Client, FrontProxies, RefusedCertificate, RequestHeader, User};
use crate::bootstrap;
use crate::server::{ApiServer, Config};
use ::http::HeaderMap;
use ferrite_pki::{ClientCertificate, Identity, PkiError, ServerTls};
use rustls_pki_types::CertificateDer;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

/// The certificates and authorities of a server, but for those of the handshake.
#[derive(Debug, Clone, Default)]
pub struct Certificates {
    /// The server's client certificate for kubelets, and the authorities of theirs.
    pub kubelet_client: Option<Arc<rustls::ClientConfig>>,
    /// The authority of client certificates, as PEM: published for servers that check them too.
    pub client_ca: Option<String>,
    /// Front proxies that authenticate users for this server. Published, too.
    pub request_header: Option<RequestHeader>,
    /// The server's client certificate for extension API servers.
    pub proxy_client: Option<Identity>,
}

/// Certificates in use, with the parts that were made of them.
pub(crate) struct ActiveCertificates {
    pub certificates: Certificates,
    pub front_proxies: Option<Arc<FrontProxies>>,
}

impl ActiveCertificates {
    pub fn new(certificates: Certificates) -> Result<Self, PkiError> {
        let front_proxies = certificates.request_header.as_ref().map(FrontProxies::new).transpose()?;
        Ok(Self { certificates, front_proxies: front_proxies.map(Arc::new) })
    }

    pub fn of_config(config: &Config) -> Result<Self, PkiError> {
        Self::new(Certificates {
            kubelet_client: config.kubelet_client.clone(),
            client_ca: config.client_ca.clone(),
            request_header: config.request_header.clone(),
            proxy_client: config.proxy_client.clone(),
        })
    }
}

impl ApiServer {
    pub(crate) fn certificates(&self) -> Arc<ActiveCertificates> {
        Arc::clone(&self.certificates.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The certificates in use.
    pub fn current_certificates(&self) -> Certificates {
        self.certificates().certificates.clone()
    }

    /// Uses other certificates from now on, and publishes those that other servers read.
    pub async fn set_certificates(&self, certificates: Certificates) -> Result<(), PkiError> {
        let active = ActiveCertificates::new(certificates)?;
        *self.certificates.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(active);
        if let Err(error) = bootstrap::published(self).await {
            tracing::warn!(%error, "cannot publish how the server authenticates");
        }
        Ok(())
    }
}

/// The TLS settings of a server that serves. Clones share them.
#[derive(Debug, Clone)]
pub struct ServingTls(Arc<RwLock<Arc<ServerTls>>>);

impl From<ServerTls> for ServingTls {
    fn from(tls: ServerTls) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(tls))))
    }
}

impl ServingTls {
    pub fn current(&self) -> Arc<ServerTls> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Connections that begin from now on have these settings. Open ones stay, but the certificates of their clients are
    /// verified again.
    pub fn set(&self, tls: ServerTls) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tls);
    }
}

/// The result of verifying a client's certificates.
struct Verified {
    tls: Arc<ServerTls>,
    front_proxies: Option<Arc<FrontProxies>>,
    client: Client,
    /// The certificate of a front proxy, if it is one.
    proxy: Option<ClientCertificate>,
}

/// The certificates that the client of a connection presented. As upstream, each request is judged by the authorities of
/// its time: a client of an authority that is gone is unknown from the next request on.
pub(crate) struct PeerCertificates {
    presented: Vec<CertificateDer<'static>>,
    tls: ServingTls,
    verified: RwLock<Arc<Verified>>,
}

fn verify(
    presented: &[CertificateDer<'_>],
    tls: Arc<ServerTls>,
    proxies: Option<Arc<FrontProxies>>,
) -> Verified {
    let now = SystemTime::now();
    Verified {
        client: Client::of(presented, &tls.clients, now),
        proxy: proxies.as_ref().and_then(|proxies| proxies.verify(presented, now)),
        tls,
        front_proxies: proxies,
    }
}

impl PeerCertificates {
    pub fn new(server: &ApiServer, presented: &[CertificateDer<'_>], tls: ServingTls) -> Self {
        let presented: Vec<_> =
            presented.iter().map(|certificate| certificate.clone().into_owned()).collect();
        let verified = verify(&presented, tls.current(), server.certificates().front_proxies.clone());
        Self { presented, tls, verified: RwLock::new(Arc::new(verified)) }
    }

    /// The result for the authorities of now.
    fn verified(&self, server: &ApiServer) -> Arc<Verified> {
        let known = Arc::clone(&self.verified.read().unwrap_or_else(PoisonError::into_inner));
        if self.presented.is_empty() {
            return known;
        }
        let (tls, proxies) = (self.tls.current(), server.certificates().front_proxies.clone());
        let same_proxies = match (&known.front_proxies, &proxies) {
            (None, None) => true,
            (Some(before), Some(now)) => Arc::ptr_eq(before, now),
            _ => false,
        };
        if Arc::ptr_eq(&known.tls, &tls) && same_proxies {
            return known;
        }
        let anew = Arc::new(verify(&self.presented, tls, proxies));
        *self.verified.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&anew);
        anew
    }

    /// The user that the certificate names when the connection begins.
    pub fn name(&self, server: &ApiServer) -> Option<String> {
        match &self.verified(server).client {
            Client::Known { user, .. } => Some(user.name.clone()),
            _ => None,
        }
    }

    /// The user of a request. A front proxy's headers come first, as upstream.
    pub fn user(
        &self,
        server: &ApiServer,
        headers: &HeaderMap,
    ) -> Result<Option<Arc<User>>, RefusedCertificate> {
        let now = SystemTime::now();
        let verified = self.verified(server);
        if let Some(proxies) = &verified.front_proxies
            && verified.proxy.as_ref().is_some_and(|certificate| certificate.is_valid_at(now))
            && let Some(user) = proxies.user(headers).map_err(|_| RefusedCertificate)?
        {
            return Ok(Some(Arc::new(user)));
        }
        verified.client.user(now)
    }
}
