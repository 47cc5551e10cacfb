//! Whom this server believes at the other end.

use super::credentials::Credential;
use super::destination::DestinationError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::ring;
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use std::sync::Arc;

/// Trusts the authorities of a bundle, or those of the system where there is none.
pub(super) fn config(bundle: &str, credential: &Credential) -> Result<ClientConfig, DestinationError> {
    let bad = |why: &dyn std::fmt::Display| DestinationError::Authority(why.to_string());
    let mut roots = RootCertStore::empty();
    let mut known = Vec::new();
    let system;
    let text = match bundle.trim().is_empty() {
        false => bundle,
        true => {
            let file = ferrite_pki::system_authorities();
            system = file.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
            &system
        }
    };
    for certificate in CertificateDer::pem_slice_iter(text.as_bytes()) {
        let Ok(certificate) = certificate else { continue };
        // As upstream: unreadable certificates in a bundle are skipped, as long as one is readable.
        if roots.add(certificate.clone()).is_ok() && !bundle.is_empty() {
            known.push(certificate);
        }
    }
    if !bundle.trim().is_empty() && known.is_empty() {
        return Err(bad(&"the bundle has no certificate"));
    }
    let provider = Arc::new(ring::default_provider());
    if roots.is_empty() {
        return Err(bad(&"this system trusts no authority, and there is no bundle"));
    }
    let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider));
    let verifier = Arc::new(Bundle { inner: inner.build().map_err(|e| bad(&e))?, known });
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| bad(&e))?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let refuse = |why: &dyn std::fmt::Display| DestinationError::Credentials(why.to_string());
    let mut config = match &credential.identity {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>();
            let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(|e| refuse(&e))?;
            builder.with_client_auth_cert(chain.map_err(|e| refuse(&e))?, key).map_err(|e| refuse(&e))?
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

/// Trusts a bundle as Go does: also a certificate of an authority that serves by itself, if it is in the bundle.
#[derive(Debug)]
struct Bundle {
    inner: Arc<WebPkiServerVerifier>,
    known: Vec<CertificateDer<'static>>,
}

impl ServerCertVerifier for Bundle {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let verified =
            self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        let Err(error) = verified else { return verified };
        let itself = self.known.iter().any(|known| **known == **end_entity);
        if !itself || !matches!(error, rustls::Error::InvalidCertificate(CertificateError::Other(_))) {
            return Err(error);
        }
        verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
        check_time(end_entity, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

fn check_time(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<(), rustls::Error> {
    let bad = |error| Err(rustls::Error::InvalidCertificate(error));
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else {
        return bad(CertificateError::BadEncoding);
    };
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    let validity = parsed.validity();
    match () {
        () if now < validity.not_before.timestamp() => bad(CertificateError::NotValidYet),
        () if now > validity.not_after.timestamp() => bad(CertificateError::Expired),
        () => Ok(()),
    }
}
