//! Public keys of requests for certificates, and the proofs that the requester has the private key.

use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P384_SHA256_ASN1, ED25519, RSA_PSS_2048_8192_SHA256, UnparsedPublicKey,
    VerificationAlgorithm,
};
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;
use x509_parser::x509::SubjectPublicKeyInfo;

const OID_ED25519: &str = "1.3.101.112";
const OID_EC: &str = "1.2.840.10045.2.1";
const OID_RSA: &str = "1.2.840.113549.1.1.1";
/// The curves that Go knows, by their object identifiers.
const CURVES: [(&str, &str); 4] = [
    ("1.3.132.0.33", "P-224"),
    ("1.2.840.10045.3.1.7", "P-256"),
    ("1.3.132.0.34", "P-384"),
    ("1.3.132.0.35", "P-521"),
];

/// A public key. Two of them are equal if they are the same key, however it was encoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Key {
    Ed25519(Vec<u8>),
    Ecdsa {
        /// Go's name of the curve.
        curve: &'static str,
        point: Vec<u8>,
    },
    Rsa {
        modulus: Vec<u8>,
        exponent: Vec<u8>,
    },
    /// A key of a kind that is none of these.
    Other,
}

impl Key {
    /// Reads a key. None if it is broken.
    pub fn of(info: &SubjectPublicKeyInfo<'_>) -> Option<Self> {
        let bytes = info.subject_public_key.data.to_vec();
        match info.algorithm.algorithm.to_id_string().as_str() {
            OID_ED25519 => (bytes.len() == 32).then_some(Self::Ed25519(bytes)),
            OID_EC => {
                let named = info.algorithm.parameters.as_ref()?.as_oid().ok()?.to_id_string();
                let (_, curve) = CURVES.iter().find(|(oid, _)| *oid == named)?;
                // As Go: a point is uncompressed.
                (bytes.first() == Some(&4)).then_some(Self::Ecdsa { curve, point: bytes })
            }
            OID_RSA => match info.parsed().ok()? {
                PublicKey::RSA(key) => {
                    let number = |bytes: &[u8]| bytes.iter().copied().skip_while(|byte| *byte == 0).collect();
                    Some(Self::Rsa { modulus: number(key.modulus), exponent: number(key.exponent) })
                }
                _ => None,
            },
            _ => Some(Self::Other),
        }
    }

    /// Reads the DER of a `SubjectPublicKeyInfo`.
    pub fn parse(der: &[u8]) -> Option<Self> {
        let (rest, info) = SubjectPublicKeyInfo::from_der(der).ok()?;
        Self::of(&info).filter(|_| rest.is_empty())
    }

    /// Bits of the modulus in whole bytes; zero if it is no RSA key.
    pub fn modulus_bits(&self) -> usize {
        match self {
            Self::Rsa { modulus, .. } => modulus.len() * 8,
            _ => 0,
        }
    }

    /// True if the signature of the message is this key's: with SHA-256, and PSS if it is an RSA key.
    pub fn verifies(&self, der: &[u8], message: &[u8], signature: &[u8]) -> bool {
        let check = |algorithm: &'static dyn VerificationAlgorithm, key: &[u8]| {
            UnparsedPublicKey::new(algorithm, key).verify(message, signature).is_ok()
        };
        match self {
            Self::Ed25519(key) => check(&ED25519, key),
            Self::Ecdsa { curve: "P-256", point } => check(&ECDSA_P256_SHA256_ASN1, point),
            Self::Ecdsa { curve: "P-384", point } => check(&ECDSA_P384_SHA256_ASN1, point),
            Self::Rsa { .. } => SubjectPublicKeyInfo::from_der(der)
                .is_ok_and(|(_, info)| check(&RSA_PSS_2048_8192_SHA256, &info.subject_public_key.data)),
            Self::Ecdsa { .. } | Self::Other => false,
        }
    }
}

/// The key of a PKCS#10 request in DER, and true if the request is signed with it. None if it is no request.
pub(super) fn of_request(der: &[u8]) -> Option<(Key, bool)> {
    let (rest, request) = X509CertificationRequest::from_der(der).ok()?;
    let key = Key::of(&request.certification_request_info.subject_pki)?;
    rest.is_empty().then(|| (key, request.verify_signature().is_ok()))
}
