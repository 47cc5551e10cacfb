//! rustls configurations made from PEM.

use crate::authority::Identity;
use crate::clients::{ClientAuthorities, KeyPossession};
use crate::files::PkiError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use std::sync::Arc;

/// How a server meets its clients: the handshake, and the authorities that their certificates are verified against
/// afterwards. Both travel together, because the handshake alone proves no identity.
#[derive(Debug, Clone)]
pub struct ServerTls {
    pub config: Arc<ServerConfig>,
    pub clients: Arc<ClientAuthorities>,
}

/// Serves with `identity`. The handshake asks for a certificate of `client_ca` and accepts any whose key the client
/// has; the server then verifies it with [`ServerTls::clients`].
pub fn server_config(
    identity: &Identity,
    client_ca: &str,
    protocols: &[&str],
) -> Result<ServerTls, PkiError> {
    server_config_with(identity, client_ca, None, protocols)
}

/// The same for a server that also knows certificates of another authority, and verifies those itself. The handshake
/// asks for certificates of both: many clients show only one that is asked for.
pub fn server_config_with(
    identity: &Identity,
    client_ca: &str,
    other_ca: Option<&str>,
    protocols: &[&str],
) -> Result<ServerTls, PkiError> {
    let clients = Arc::new(ClientAuthorities::from_pem(client_ca)?);
    let mut hints = roots(client_ca)?.subjects();
    if let Some(other) = other_ca {
        hints.extend(roots(other)?.subjects());
    }
    let verifier = Arc::new(KeyPossession::new(hints));
    Ok(ServerTls { config: Arc::new(serving(identity, verifier, protocols)?), clients })
}

/// Serves with `identity` and asks clients for no certificate.
pub fn anonymous_server_config(identity: &Identity, protocols: &[&str]) -> Result<ServerConfig, PkiError> {
    serving(identity, WebPkiClientVerifier::no_client_auth(), protocols)
}

/// Serves with `identity`, to clients that present a certificate of `client_ca` and to nobody else.
pub fn mutual_server_config(
    identity: &Identity,
    client_ca: &str,
    protocols: &[&str],
) -> Result<ServerConfig, PkiError> {
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(client_ca)?), provider);
    let verifier = verifier.build().map_err(|_| PkiError::Pem { what: "the client authority".into() })?;
    serving(identity, verifier, protocols)
}

fn serving(
    identity: &Identity,
    verifier: Arc<dyn ClientCertVerifier>,
    protocols: &[&str],
) -> Result<ServerConfig, PkiError> {
    let (chain, key) = parts(identity)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)?;
    config.alpn_protocols = protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
    Ok(config)
}

/// Trusts servers of `ca` and presents `identity`.
pub fn client_config(ca: &str, identity: Option<&Identity>) -> Result<ClientConfig, PkiError> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots(ca)?);
    presenting(builder, identity)
}

/// Trusts whoever answers: for servers whose certificates nobody here can know, such as pods. The connection is
/// private and nothing more.
pub fn unverified_client_config() -> Result<ClientConfig, PkiError> {
    unverified_client_config_as(None)
}

/// The same, and presents `identity`.
pub fn unverified_client_config_as(identity: Option<&Identity>) -> Result<ClientConfig, PkiError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyCertificate));
    presenting(builder, identity)
}

fn presenting(
    builder: rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>,
    identity: Option<&Identity>,
) -> Result<ClientConfig, PkiError> {
    Ok(match identity {
        Some(identity) => {
            let (chain, key) = parts(identity)?;
            builder.with_client_auth_cert(chain, key)?
        }
        None => builder.with_no_client_auth(),
    })
}

#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

fn roots(ca: &str) -> Result<RootCertStore, PkiError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        roots.add(certificate.map_err(|_| PkiError::Pem { what: "the authority".into() })?)?;
    }
    Ok(roots)
}

fn parts(identity: &Identity) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), PkiError> {
    let bad = |what: &str| PkiError::Pem { what: what.into() };
    let chain = CertificateDer::pem_slice_iter(identity.certificate.as_bytes())
        .collect::<Result<Vec<_>, _>>()
        .map_err(|_| bad("the certificate"))?;
    let key = PrivateKeyDer::from_pem_slice(identity.key.as_bytes()).map_err(|_| bad("the key"))?;
    Ok((chain, key))
}
