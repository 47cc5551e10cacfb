//! rustls configurations made from PEM.

use crate::authority::Identity;
use crate::clients::{ClientAuthorities, KeyPossession};
use crate::files::PkiError;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme, SupportedCipherSuite,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use std::sync::Arc;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// The TLS settings of a server: the handshake, and the authorities that client certificates are verified
/// against afterwards. Both travel together, because the handshake alone proves no identity.
#[derive(Debug, Clone)]
pub struct ServerTls {
    pub config: Arc<ServerConfig>,
    pub clients: Arc<ClientAuthorities>,
}

/// The choices of a server that are made in the handshake.
#[derive(Debug, Default)]
pub struct Handshake<'a> {
    /// As clients name them, the best first.
    pub protocols: &'a [&'a str],
    /// Identities for clients that ask for one of their names.
    pub by_name: Vec<NamedIdentity>,
    /// Refuses clients that know nothing newer than TLS 1.2.
    pub newest_only: bool,
    /// Names of cipher suites in IANA's words; the usual ones when empty. As in Go, those of TLS 1.3 are always on.
    pub cipher_suites: Vec<String>,
    /// Key exchanges by their numbers in TLS (RFC 8446, "NamedGroup"); the usual ones when empty.
    pub key_exchanges: Vec<u16>,
    /// The authorities of front proxies, whose certificates the caller verifies. The handshake asks for certificates
    /// of both: many clients show only one that is asked for.
    pub other_clients: Option<&'a str>,
}

/// An identity and the names that it is for: `*.example.com` is for all names one level below.
#[derive(Debug, Clone)]
pub struct NamedIdentity {
    pub identity: Identity,
    /// The certificate's own names when empty.
    pub names: Vec<String>,
}

/// Serves with `identity`. The handshake asks for a certificate of `client_ca` and accepts any whose key the client
/// has; the server then verifies it with [`ServerTls::clients`].
pub fn server_config(
    identity: &Identity,
    client_ca: &str,
    protocols: &[&str],
) -> Result<ServerTls, PkiError> {
    server_config_with(identity, client_ca, &Handshake { protocols, ..Handshake::default() })
}

/// The same, with all choices.
pub fn server_config_with(
    identity: &Identity,
    client_ca: &str,
    handshake: &Handshake<'_>,
) -> Result<ServerTls, PkiError> {
    let clients = Arc::new(ClientAuthorities::from_pem(client_ca)?);
    let mut hints = roots(client_ca)?.subjects();
    if let Some(other) = handshake.other_clients {
        hints.extend(roots(other)?.subjects());
    }
    let provider = with_suites(&handshake.cipher_suites)?;
    let provider = Arc::new(with_key_exchanges(provider, &handshake.key_exchanges)?);
    let versions: &[&rustls::SupportedProtocolVersion] =
        if handshake.newest_only { &[&rustls::version::TLS13] } else { rustls::ALL_VERSIONS };
    let certified = |identity: &Identity| -> Result<Arc<CertifiedKey>, PkiError> {
        let (chain, key) = parts(identity)?;
        Ok(Arc::new(CertifiedKey::from_der(chain, key, &provider)?))
    };
    let mut by_name = Vec::new();
    for named in &handshake.by_name {
        let certified = certified(&named.identity)?;
        let names = if named.names.is_empty() { names_of(&certified)? } else { named.names.clone() };
        by_name.extend(names.into_iter().map(|name| (name, Arc::clone(&certified))));
    }
    let resolver = ByName { usual: certified(identity)?, by_name };
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)?
        .with_client_cert_verifier(Arc::new(KeyPossession::new(hints)))
        .with_cert_resolver(Arc::new(resolver));
    keep_no_sessions(&mut config)?;
    config.alpn_protocols = handshake.protocols.iter().map(|p| p.as_bytes().to_vec()).collect();
    Ok(ServerTls { config: Arc::new(config), clients })
}

/// Has clients keep the state of their sessions, as encrypted tickets. A server that keeps it holds the certificates of
/// hundreds of clients that never come back.
fn keep_no_sessions(config: &mut ServerConfig) -> Result<(), PkiError> {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.ticketer = ring::Ticketer::new()?;
    config.send_tls13_tickets = 1;
    Ok(())
}

/// Only these suites of TLS 1.2, and all of TLS 1.3.
fn with_suites(names: &[String]) -> Result<CryptoProvider, PkiError> {
    let mut provider = ring::default_provider();
    if names.is_empty() {
        return Ok(provider);
    }
    // Go calls the newer suites by the names of IANA, rustls adds the version.
    let name_of = |suite: &SupportedCipherSuite| format!("{:?}", suite.suite()).replace("TLS13_", "TLS_");
    for name in names {
        let short = name.strip_suffix("_SHA256").filter(|n| n.contains("CHACHA20")).unwrap_or(name);
        let is_known = |suite: &SupportedCipherSuite| {
            let known = name_of(suite);
            known == *name || known.strip_suffix("_SHA256") == Some(short)
        };
        if !provider.cipher_suites.iter().any(is_known) {
            let known: Vec<String> = provider.cipher_suites.iter().map(name_of).collect();
            return Err(PkiError::CipherSuite { name: name.clone(), known: known.join(", ") });
        }
    }
    provider.cipher_suites.retain(|suite| {
        let known = name_of(suite);
        suite.tls13().is_some()
            || names.iter().any(|name| known == *name || known.strip_suffix("_SHA256") == Some(name))
    });
    Ok(provider)
}

/// Only these key exchanges.
fn with_key_exchanges(mut provider: CryptoProvider, numbers: &[u16]) -> Result<CryptoProvider, PkiError> {
    if numbers.is_empty() {
        return Ok(provider);
    }
    let known: Vec<u16> = provider.kx_groups.iter().map(|group| u16::from(group.name())).collect();
    if let Some(unknown) = numbers.iter().find(|number| !known.contains(number)) {
        let known: Vec<String> = known.iter().map(ToString::to_string).collect();
        return Err(PkiError::KeyExchange { number: *unknown, known: known.join(", ") });
    }
    provider.kx_groups.retain(|group| numbers.contains(&u16::from(group.name())));
    Ok(provider)
}

/// The names that a certificate is for.
fn names_of(certified: &CertifiedKey) -> Result<Vec<String>, PkiError> {
    let bad = || PkiError::Pem { what: "the certificate".into() };
    let leaf = certified.cert.first().ok_or_else(bad)?;
    let (_, leaf) = X509Certificate::from_der(leaf).map_err(|_| bad())?;
    let alternatives = leaf.subject_alternative_name().map_err(|_| bad())?;
    let names = alternatives.iter().flat_map(|names| &names.value.general_names);
    let names = names.filter_map(|name| match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        _ => None,
    });
    Ok(names.collect())
}

/// Chooses the identity by the name that a client asks for.
#[derive(Debug)]
struct ByName {
    usual: Arc<CertifiedKey>,
    by_name: Vec<(String, Arc<CertifiedKey>)>,
}

fn is_for(pattern: &str, name: &str) -> bool {
    match pattern.strip_prefix("*.") {
        Some(above) => name.split_once('.').is_some_and(|(_, rest)| rest.eq_ignore_ascii_case(above)),
        None => pattern.eq_ignore_ascii_case(name),
    }
}

impl ResolvesServerCert for ByName {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let asked = hello.server_name().unwrap_or_default();
        let exact = self.by_name.iter().find(|(pattern, _)| pattern.eq_ignore_ascii_case(asked));
        let found = exact.or_else(|| self.by_name.iter().find(|(pattern, _)| is_for(pattern, asked)));
        Some(Arc::clone(found.map_or(&self.usual, |(_, certified)| certified)))
    }
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
    keep_no_sessions(&mut config)?;
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

/// Trusts any server: for servers whose certificates nobody here can know, such as pods. The connection is
/// encrypted, but the other side is not authenticated.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suites_are_chosen_by_gos_names() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let all = with_suites(&[]).unwrap().cipher_suites.len();
        let one = with_suites(&names(&["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"])).unwrap().cipher_suites;
        let (newer, older): (Vec<SupportedCipherSuite>, Vec<SupportedCipherSuite>) =
            one.iter().copied().partition(|suite| suite.tls13().is_some());
        assert!(older.len() == 1 && newer.len() == 3 && all > 4, "{one:?}");
        let two = names(&["TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256", "TLS_AES_128_GCM_SHA256"]);
        assert!(with_suites(&two).is_ok());
        let error = with_suites(&names(&["TLS_RSA_WITH_RC4_128_SHA"])).unwrap_err().to_string();
        assert!(error.contains("TLS_RSA_WITH_RC4_128_SHA"), "{error}");
    }

    /// Completes a handshake in memory, and the exchange of a byte, after which the client has its ticket.
    fn connect(client: &Arc<ClientConfig>, server: &Arc<ServerConfig>) -> rustls::ServerConnection {
        let name = ServerName::try_from("localhost").unwrap();
        let mut client = rustls::ClientConnection::new(Arc::clone(client), name).unwrap();
        let mut server = rustls::ServerConnection::new(Arc::clone(server)).unwrap();
        for _ in 0..4 {
            let mut bytes = Vec::new();
            client.write_tls(&mut bytes).unwrap();
            server.read_tls(&mut bytes.as_slice()).unwrap();
            server.process_new_packets().unwrap();
            bytes.clear();
            server.write_tls(&mut bytes).unwrap();
            client.read_tls(&mut bytes.as_slice()).unwrap();
            client.process_new_packets().unwrap();
        }
        assert!(!server.is_handshaking());
        server
    }

    #[test]
    fn clients_resume_sessions_of_which_the_server_keeps_nothing() {
        let authority = crate::Authority::create("test").unwrap();
        let subject =
            crate::Subject { names: vec!["localhost".into()], ..crate::Subject::client("server", None) };
        let identity = authority.issue(&subject, crate::Purpose::Server).unwrap();
        let user = authority.issue(&crate::Subject::client("user", None), crate::Purpose::Client).unwrap();
        let server = server_config(&identity, authority.certificate(), &[]).unwrap().config;
        let client = Arc::new(client_config(authority.certificate(), Some(&user)).unwrap());
        let first = connect(&client, &server);
        assert_eq!(first.handshake_kind(), Some(rustls::HandshakeKind::Full));
        let second = connect(&client, &server);
        assert_eq!(second.handshake_kind(), Some(rustls::HandshakeKind::Resumed));
        assert_eq!(second.peer_certificates(), first.peer_certificates());
        assert!(first.peer_certificates().is_some() && !server.session_storage.can_cache());
    }

    #[test]
    fn patterns_are_for_one_level() {
        for (pattern, name, expected) in [
            ("a.example", "a.example", true),
            ("a.example", "A.Example", true),
            ("*.example", "a.example", true),
            ("*.example", "b.a.example", false),
            ("*.example", "example", false),
        ] {
            assert_eq!(is_for(pattern, name), expected, "{pattern} {name}");
        }
    }
}
