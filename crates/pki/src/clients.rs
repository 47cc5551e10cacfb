//! Client certificates: the handshake proves that the client has the key, and the authenticator verifies the chain.
//!
//! The rules are those of upstream's verification: a certificate of version 1 is accepted, a chain may pass through
//! intermediates that the client sends, and every certificate of the chain must be in its time and may be used for
//! client authentication. webpki refuses certificates of version 1, so the chain is built here.

use crate::der;
use crate::files::PkiError;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, SubjectPublicKeyInfoDer, UnixTime};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use x509_parser::der_parser::oid::Oid;
use x509_parser::extensions::ParsedExtension;
use x509_parser::oid_registry::{
    OID_X509_EXT_AUTHORITY_KEY_IDENTIFIER, OID_X509_EXT_BASIC_CONSTRAINTS, OID_X509_EXT_CERTIFICATE_POLICIES,
    OID_X509_EXT_CRL_DISTRIBUTION_POINTS, OID_X509_EXT_EXTENDED_KEY_USAGE, OID_X509_EXT_KEY_USAGE,
    OID_X509_EXT_NAME_CONSTRAINTS, OID_X509_EXT_SUBJECT_ALT_NAME, OID_X509_EXT_SUBJECT_KEY_IDENTIFIER,
};
use x509_parser::prelude::{FromDer, X509Certificate, X509Version};

/// The signatures verified for one client before it is refused.
const MAX_SIGNATURES: usize = 32;
/// The longest chain, with the client's certificate and the authority's.
const MAX_CHAIN: usize = 10;
/// The certificates that a client may send. More make the search for a chain expensive and nothing else.
const MAX_CERTIFICATES: usize = 16;

/// Extensions that a certificate may mark as critical: those that are acted on here or that concern no client.
const KNOWN_EXTENSIONS: [Oid<'static>; 9] = [
    OID_X509_EXT_AUTHORITY_KEY_IDENTIFIER,
    OID_X509_EXT_BASIC_CONSTRAINTS,
    OID_X509_EXT_CERTIFICATE_POLICIES,
    OID_X509_EXT_CRL_DISTRIBUTION_POINTS,
    OID_X509_EXT_EXTENDED_KEY_USAGE,
    OID_X509_EXT_KEY_USAGE,
    OID_X509_EXT_NAME_CONSTRAINTS,
    OID_X509_EXT_SUBJECT_ALT_NAME,
    OID_X509_EXT_SUBJECT_KEY_IDENTIFIER,
];

/// Why a client certificate proves no identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ClientCertificateError {
    #[error("the certificate is malformed")]
    Malformed,
    #[error("the certificate has expired or is not yet valid")]
    OutOfTime,
    #[error("the certificate has a critical extension that is not understood")]
    CriticalExtension,
    #[error("the certificate may not be used for client authentication")]
    Usage,
    #[error("the certificate is signed by an unknown authority")]
    UnknownAuthority,
    #[error("the certificate needs too many signatures to be verified")]
    TooComplex,
}

/// A client certificate that was verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClientCertificate {
    /// The end of the first certificate of the chain that expires.
    not_after: SystemTime,
}

impl ClientCertificate {
    /// Returns true if the chain is still valid. A connection may outlive the certificate it was opened
    /// with.
    pub fn is_valid_at(&self, now: SystemTime) -> bool {
        now <= self.not_after
    }

    /// The time until the chain expires; zero once it has.
    pub fn remaining(&self, now: SystemTime) -> Duration {
        self.not_after.duration_since(now).unwrap_or_default()
    }
}

/// The authorities whose client certificates are accepted.
#[derive(Debug)]
pub struct ClientAuthorities {
    roots: Vec<CertificateDer<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ClientAuthorities {
    pub fn from_pem(pem: &str) -> Result<Self, PkiError> {
        let bad = || PkiError::Pem { what: "the client authority".into() };
        let roots = CertificateDer::pem_slice_iter(pem.as_bytes())
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| bad())?;
        if roots.is_empty() || roots.iter().any(|root| Parsed::new(root).is_err()) {
            return Err(bad());
        }
        Ok(Self { roots, algorithms: ring::default_provider().signature_verification_algorithms })
    }

    /// Verifies the certificate that a client presented, with the intermediates that followed it.
    pub fn verify(
        &self,
        presented: &[CertificateDer<'_>],
        now: SystemTime,
    ) -> Result<ClientCertificate, ClientCertificateError> {
        if presented.len() > MAX_CERTIFICATES {
            return Err(ClientCertificateError::TooComplex);
        }
        // An intermediate that cannot be read fails the whole chain, as upstream.
        let presented = presented.iter().map(|c| Parsed::new(c)).collect::<Result<Vec<_>, _>>()?;
        let roots = self.roots.iter().map(|c| Parsed::new(c)).collect::<Result<Vec<_>, _>>()?;
        let (leaf, intermediates) = presented.split_first().ok_or(ClientCertificateError::Malformed)?;
        let now = now.duration_since(UNIX_EPOCH).map_err(|_| ClientCertificateError::OutOfTime)?;
        let now = i64::try_from(now.as_secs()).map_err(|_| ClientCertificateError::OutOfTime)?;
        leaf.check(now)?;
        let mut search = Search {
            roots: &roots,
            intermediates,
            algorithms: &self.algorithms,
            now,
            signatures: 0,
            best: ClientCertificateError::UnknownAuthority,
        };
        let not_after = search.chain(&mut vec![leaf])?;
        let not_after = u64::try_from(not_after).map_err(|_| ClientCertificateError::OutOfTime)?;
        let not_after = UNIX_EPOCH.checked_add(Duration::from_secs(not_after));
        Ok(ClientCertificate { not_after: not_after.ok_or(ClientCertificateError::OutOfTime)? })
    }
}

/// The search for a chain from the client's certificate to an authority.
struct Search<'a> {
    roots: &'a [Parsed<'a>],
    intermediates: &'a [Parsed<'a>],
    algorithms: &'a WebPkiSupportedAlgorithms,
    now: i64,
    signatures: usize,
    /// Why the chain that came furthest was refused.
    best: ClientCertificateError,
}

impl<'a> Search<'a> {
    /// Extends the chain until an authority ends it. Returns the earliest expiry in it. The depth
    /// is bounded by [`MAX_CHAIN`] and the work by [`MAX_SIGNATURES`].
    fn chain(&mut self, chain: &mut Vec<&'a Parsed<'a>>) -> Result<i64, ClientCertificateError> {
        let Some(last) = chain.last().copied() else { return Err(self.best) };
        if chain.len() == 1 && self.roots.iter().any(|root| root.der == last.der) {
            return ends(chain).inspect_err(|error| self.best = *error);
        }
        if chain.len() == MAX_CHAIN {
            return Err(self.best);
        }
        let (roots, intermediates) = (self.roots, self.intermediates);
        let candidates = roots.iter().map(|c| (c, true)).chain(intermediates.iter().map(|c| (c, false)));
        for (issuer, is_root) in candidates {
            if issuer.certificate.subject().as_raw() != last.certificate.issuer().as_raw()
                || chain.iter().any(|link| link.is_same_entity(issuer))
            {
                continue;
            }
            self.signatures += 1;
            if self.signatures > MAX_SIGNATURES {
                return Err(ClientCertificateError::TooComplex);
            }
            if !issuer.may_sign(is_root)
                || !verified(self.algorithms, issuer.spki(), last.algorithm, last.signed(), last.signature())
            {
                continue;
            }
            if let Err(error) = issuer.check(self.now).and_then(|()| issuer.constrains(chain)) {
                self.best = error;
                continue;
            }
            chain.push(issuer);
            let found = match is_root {
                true => ends(chain).inspect_err(|error| self.best = *error),
                false => self.chain(chain),
            };
            match found {
                Ok(_) | Err(ClientCertificateError::TooComplex) => return found,
                Err(_) => chain.pop(),
            };
        }
        Err(self.best)
    }
}

/// Checks that a whole chain is for clients, and returns its expiry.
fn ends(chain: &[&Parsed<'_>]) -> Result<i64, ClientCertificateError> {
    if !chain.iter().all(|link| link.is_for_clients()) {
        return Err(ClientCertificateError::Usage);
    }
    let ends = chain.iter().map(|link| link.certificate.validity().not_after.timestamp());
    ends.min().ok_or(ClientCertificateError::Malformed)
}

/// A certificate and the parts of it that the parser does not keep as they are encoded.
struct Parsed<'a> {
    der: &'a [u8],
    certificate: X509Certificate<'a>,
    /// The content of the signature's AlgorithmIdentifier.
    algorithm: &'a [u8],
    says: Statements,
}

/// The extensions of a certificate that matter for clients.
#[derive(Default)]
struct Statements {
    /// True if it is an authority, and the number of intermediates allowed below it.
    constraints: Option<(bool, Option<u32>)>,
    /// True if its key may sign certificates.
    signs: Option<bool>,
    /// True if it is for client authentication.
    client: Option<bool>,
    constrains_names: bool,
    has_names: bool,
    /// It has a critical extension that is not understood.
    critical: bool,
}

impl Statements {
    fn of(certificate: &X509Certificate<'_>) -> Result<Self, ClientCertificateError> {
        let malformed = |_| ClientCertificateError::Malformed;
        let mut says = Self::default();
        // An extension that occurs twice is an error of the map.
        for (oid, extension) in certificate.tbs_certificate.extensions_map().map_err(malformed)? {
            says.critical |= extension.critical && !KNOWN_EXTENSIONS.contains(&oid);
            match extension.parsed_extension() {
                ParsedExtension::ParseError { .. } => return Err(ClientCertificateError::Malformed),
                ParsedExtension::BasicConstraints(basic) => {
                    says.constraints = Some((basic.ca, basic.path_len_constraint));
                }
                ParsedExtension::KeyUsage(usage) => says.signs = Some(usage.key_cert_sign()),
                ParsedExtension::ExtendedKeyUsage(usage) => {
                    says.client = Some(usage.any || usage.client_auth);
                }
                ParsedExtension::NameConstraints(_) => says.constrains_names = true,
                ParsedExtension::SubjectAlternativeName(_) => says.has_names = true,
                _ => {}
            }
        }
        Ok(says)
    }
}

impl<'a> Parsed<'a> {
    fn new(der: &'a [u8]) -> Result<Self, ClientCertificateError> {
        let malformed = ClientCertificateError::Malformed;
        let (rest, certificate) = X509Certificate::from_der(der).map_err(|_| malformed)?;
        let (_, content, _) = der::first(der).ok_or(malformed)?;
        let (_, _, after) = der::first(content).ok_or(malformed)?;
        let (_, algorithm, _) = der::first(after).ok_or(malformed)?;
        let has_extensions = !certificate.extensions().is_empty();
        if !rest.is_empty()
            || certificate.signature_algorithm != certificate.tbs_certificate.signature
            || certificate.signature_value.unused_bits != 0
            || (has_extensions && certificate.version() != X509Version::V3)
        {
            return Err(malformed);
        }
        let says = Statements::of(&certificate)?;
        Ok(Self { der, certificate, algorithm, says })
    }

    fn spki(&self) -> &[u8] {
        self.certificate.public_key().raw
    }

    fn signed(&self) -> &[u8] {
        self.certificate.tbs_certificate.as_ref()
    }

    fn signature(&self) -> &[u8] {
        &self.certificate.signature_value.data
    }

    /// Checks all that needs no other certificate.
    fn check(&self, now: i64) -> Result<(), ClientCertificateError> {
        let validity = self.certificate.validity();
        match () {
            () if self.says.critical => Err(ClientCertificateError::CriticalExtension),
            () if now < validity.not_before.timestamp() || now > validity.not_after.timestamp() => {
                Err(ClientCertificateError::OutOfTime)
            }
            () => Ok(()),
        }
    }

    /// Returns true if this certificate may sign others. An authority that the server trusts may be of
    /// version 1; an intermediate must say that it is an authority.
    fn may_sign(&self, is_root: bool) -> bool {
        let old_root = is_root && self.certificate.version() != X509Version::V3;
        let is_authority = match self.says.constraints {
            Some((is_authority, _)) => is_authority,
            None => old_root,
        };
        is_authority && self.says.signs != Some(false)
    }

    /// Checks this issuer's constraints on the chain below it: its length, and its names. Constraints on
    /// names are not evaluated: they refuse every certificate below that has such names.
    fn constrains(&self, below: &[&Parsed<'_>]) -> Result<(), ClientCertificateError> {
        let intermediates = below.len().saturating_sub(1);
        let longest = self.says.constraints.and_then(|(_, longest)| longest);
        let too_long = longest.is_some_and(|longest| intermediates > longest as usize);
        if too_long || (self.says.constrains_names && below.iter().any(|link| link.says.has_names)) {
            return Err(ClientCertificateError::UnknownAuthority);
        }
        Ok(())
    }

    fn is_for_clients(&self) -> bool {
        self.says.client != Some(false)
    }

    /// Returns true if both have the same subject and the same key: a chain with both would go in circles.
    fn is_same_entity(&self, other: &Parsed<'_>) -> bool {
        self.certificate.subject().as_raw() == other.certificate.subject().as_raw()
            && self.spki() == other.spki()
    }
}

/// Returns true if a key of `spki` made the signature with the algorithm of that identifier.
fn verified(
    algorithms: &WebPkiSupportedAlgorithms,
    spki: &[u8],
    signature_algorithm: &[u8],
    message: &[u8],
    signature: &[u8],
) -> bool {
    let Some((key_algorithm, key)) = key(spki) else { return false };
    algorithms
        .all
        .iter()
        .filter(|a| *a.public_key_alg_id() == *key_algorithm && *a.signature_alg_id() == *signature_algorithm)
        .any(|a| a.verify_signature(key, message, signature).is_ok())
}

/// The content of the AlgorithmIdentifier of a SubjectPublicKeyInfo, and the key's bytes.
fn key(spki: &[u8]) -> Option<(&[u8], &[u8])> {
    let (_, content, _) = der::first(spki)?;
    let (_, algorithm, rest) = der::first(content)?;
    let (_, bits, _) = der::first(rest)?;
    // The first byte counts the unused bits: none in a key.
    Some((algorithm, bits.strip_prefix(&[0])?))
}

/// The client verifier of a handshake: the client has the key of the certificate that it presents. The chain is
/// verified by the authenticator, so that a refusal is an answer and not a broken connection.
#[derive(Debug)]
pub(crate) struct KeyPossession {
    hints: Vec<DistinguishedName>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl KeyPossession {
    pub(crate) fn new(hints: Vec<DistinguishedName>) -> Self {
        Self { hints, algorithms: ring::default_provider().signature_verification_algorithms }
    }
}

fn bad_encoding() -> Error {
    Error::InvalidCertificate(CertificateError::BadEncoding)
}

impl ClientCertVerifier for KeyPossession {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.hints
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        X509Certificate::from_der(end_entity).map_err(|_| bad_encoding())?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let (_, certificate) = X509Certificate::from_der(certificate).map_err(|_| bad_encoding())?;
        let (key_algorithm, key) = key(certificate.public_key().raw).ok_or_else(bad_encoding)?;
        let usable = self.algorithms.mapping.iter().filter(|(scheme, _)| *scheme == signature.scheme);
        let mut usable = usable.flat_map(|(_, list)| list.iter());
        match usable.any(|a| {
            *a.public_key_alg_id() == *key_algorithm
                && a.verify_signature(key, message, signature.signature()).is_ok()
        }) {
            true => Ok(HandshakeSignatureValid::assertion()),
            false => Err(Error::InvalidCertificate(CertificateError::BadSignature)),
        }
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let (_, certificate) = X509Certificate::from_der(certificate).map_err(|_| bad_encoding())?;
        let key = SubjectPublicKeyInfoDer::from(certificate.public_key().raw);
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests;
