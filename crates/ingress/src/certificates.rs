//! Certificates of Secrets, and which one a connection gets.

use crate::table::Tables;
use ferrite_pki::{Authority, Purpose, Subject};
use k8s_openapi::api::core::v1::Secret;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use std::sync::Arc;

/// Why a Secret holds no certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    #[error("it is of type {0:?} and not kubernetes.io/tls")]
    Type(String),
    #[error("it has no {0}")]
    Missing(&'static str),
    #[error("{0} is no PEM")]
    Pem(&'static str),
    #[error("certificate and key do not serve: {0}")]
    Unusable(#[from] rustls::Error),
}

/// Why the proxy cannot serve TLS at all.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot make the certificate for hosts that have none")]
    SelfMade(#[from] ferrite_pki::PkiError),
    #[error("the certificate for hosts that have none does not serve")]
    Certificate(#[from] CertificateError),
    #[error("TLS cannot be configured")]
    Config(#[from] rustls::Error),
}

/// A longer chain is a mistake, or meant to cost memory.
const MAX_CHAIN: usize = 16;

/// Reads `tls.crt` and `tls.key`.
pub fn certified(secret: &Secret) -> Result<CertifiedKey, CertificateError> {
    let type_ = secret.type_.as_deref().unwrap_or_default();
    if type_ != "kubernetes.io/tls" {
        return Err(CertificateError::Type(type_.to_owned()));
    }
    let data = |name: &'static str| {
        let found = secret.data.as_ref().and_then(|data| data.get(name)).filter(|bytes| !bytes.0.is_empty());
        found.map(|bytes| bytes.0.as_slice()).ok_or(CertificateError::Missing(name))
    };
    key_pair(data("tls.crt")?, data("tls.key")?)
}

fn key_pair(certificate: &[u8], key: &[u8]) -> Result<CertifiedKey, CertificateError> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(certificate)
        .take(MAX_CHAIN)
        .collect::<Result<_, _>>()
        .map_err(|_| CertificateError::Pem("tls.crt"))?;
    if chain.is_empty() {
        return Err(CertificateError::Pem("tls.crt"));
    }
    let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| CertificateError::Pem("tls.key"))?;
    Ok(CertifiedKey::from_der(chain, key, &ring::default_provider())?)
}

/// A certificate for hosts that have none. Nobody trusts it; it only lets the client see that.
pub fn self_made() -> Result<CertifiedKey, TlsError> {
    let authority = Authority::create("Ferrite ingress: no certificate is configured for this host")?;
    let subject = Subject {
        common_name: "ingress.invalid".into(),
        organization: None,
        names: vec!["ingress.invalid".into()],
    };
    let identity = authority.issue(&subject, Purpose::Server)?;
    Ok(key_pair(identity.certificate.as_bytes(), identity.key.as_bytes())?)
}

/// Chooses by the name in the client's greeting.
#[derive(Debug)]
struct ByName {
    tables: Arc<Tables>,
    fallback: Arc<CertifiedKey>,
}

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let host = hello.server_name().unwrap_or_default().trim_end_matches('.').to_ascii_lowercase();
        let found = self.tables.current().and_then(|table| table.certificate(&host));
        Some(found.unwrap_or_else(|| Arc::clone(&self.fallback)))
    }
}

/// TLS with the certificates of the table, for HTTP/2 and HTTP/1.1.
pub(crate) fn server_config(tables: Arc<Tables>) -> Result<Arc<ServerConfig>, TlsError> {
    let resolver = ByName { tables, fallback: Arc::new(self_made()?) };
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
