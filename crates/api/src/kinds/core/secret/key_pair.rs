//! Checks that a certificate and a private key belong together, in the words of Go's `tls.X509KeyPair`.

use crate::pem;
use ring::signature::{Ed25519KeyPair, KeyPair};
use std::borrow::Cow;
use thiserror::Error;
use x509_parser::certificate::X509Certificate;
use x509_parser::der_parser::ber::BerObjectContent;
use x509_parser::der_parser::der::{DerObject, parse_der};
use x509_parser::prelude::FromDer;
use x509_parser::public_key::PublicKey;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(super) enum KeyPairError {
    #[error("tls: failed to find any PEM data in {0} input")]
    NoPem(&'static str),
    #[error(
        "tls: failed to find certificate PEM data in certificate input, but did find a private key; PEM inputs may \
         have been switched"
    )]
    Switched,
    #[error(
        "tls: failed to find \"CERTIFICATE\" PEM block in certificate input after skipping PEM blocks of the following \
         types: [{0}]"
    )]
    NoCertificate(String),
    #[error("tls: found a certificate rather than a key in the PEM for the private key")]
    CertificateForKey,
    #[error(
        "tls: failed to find PEM block with type ending in \"PRIVATE KEY\" in key input after skipping PEM blocks of the \
         following types: [{0}]"
    )]
    NoKey(String),
    #[error("x509: malformed certificate")]
    Certificate,
    #[error("tls: failed to parse private key")]
    Key,
    #[error("tls: found unknown private key type in PKCS#8 wrapping")]
    UnknownKey,
    #[error("tls: unknown public key algorithm")]
    UnknownAlgorithm,
    #[error("tls: private key type does not match public key type")]
    Types,
    #[error("tls: private key does not match public key")]
    Mismatch,
}

/// The public part of a key.
#[derive(Debug, PartialEq, Eq)]
enum Public<'a> {
    Rsa {
        modulus: Cow<'a, [u8]>,
        exponent: Cow<'a, [u8]>,
    },
    /// The point, where the private key has it.
    Ecdsa(Option<Cow<'a, [u8]>>),
    Ed25519(Cow<'a, [u8]>),
}

/// Checks a certificate chain and a key, both as PEM.
pub(super) fn check(certificate: &[u8], key: &[u8]) -> Result<(), KeyPairError> {
    let blocks = pem::blocks(certificate);
    let Some(leaf) = blocks.iter().find(|block| block.kind == "CERTIFICATE") else {
        return Err(match blocks.as_slice() {
            [] => KeyPairError::NoPem("certificate"),
            [one] if one.kind.ends_with("PRIVATE KEY") => KeyPairError::Switched,
            skipped => KeyPairError::NoCertificate(kinds(skipped)),
        });
    };
    let blocks = pem::blocks(key);
    let is_key = |kind: &str| kind == "PRIVATE KEY" || kind.ends_with(" PRIVATE KEY");
    let Some(key) = blocks.iter().find(|block| is_key(&block.kind)) else {
        return Err(match blocks.as_slice() {
            [] => KeyPairError::NoPem("key"),
            [one] if one.kind == "CERTIFICATE" => KeyPairError::CertificateForKey,
            skipped => KeyPairError::NoKey(kinds(skipped)),
        });
    };
    let (rest, leaf) = X509Certificate::from_der(&leaf.content).map_err(|_| KeyPairError::Certificate)?;
    if !rest.is_empty() {
        return Err(KeyPairError::Certificate);
    }
    let public = of_certificate(&leaf);
    let private = of_key(&key.content)?;
    match (public.ok_or(KeyPairError::UnknownAlgorithm)?, private) {
        (Public::Ecdsa(_), Public::Ecdsa(None)) => Ok(()),
        (public, private) if public == private => Ok(()),
        (public, private) if std::mem::discriminant(&public) == std::mem::discriminant(&private) => {
            Err(KeyPairError::Mismatch)
        }
        _ => Err(KeyPairError::Types),
    }
}

fn kinds(blocks: &[pem::Block]) -> String {
    blocks.iter().map(|block| block.kind.as_str()).collect::<Vec<_>>().join(" ")
}

fn of_certificate<'a>(certificate: &'a X509Certificate<'_>) -> Option<Public<'a>> {
    const ED25519: &str = "1.3.101.112";
    let key = certificate.public_key();
    if key.algorithm.algorithm.to_id_string() == ED25519 {
        return Some(Public::Ed25519(Cow::Borrowed(&key.subject_public_key.data)));
    }
    Some(match key.parsed().ok()? {
        PublicKey::RSA(rsa) => {
            let own = |number: &[u8]| Cow::Owned(positive(number).to_vec());
            Public::Rsa { modulus: own(rsa.modulus), exponent: own(rsa.exponent) }
        }
        PublicKey::EC(_) => Public::Ecdsa(Some(Cow::Borrowed(&key.subject_public_key.data))),
        _ => return None,
    })
}

/// A number without its leading zeros.
fn positive(number: &[u8]) -> &[u8] {
    let zeros = number.iter().take_while(|byte| **byte == 0).count();
    number.get(zeros..).unwrap_or_default()
}

/// The public part of a private key in PKCS#1, PKCS#8 or SEC 1.
fn of_key(der: &[u8]) -> Result<Public<'_>, KeyPairError> {
    const RSA: &str = "1.2.840.113549.1.1.1";
    const EC: &str = "1.2.840.10045.2.1";
    const ED25519: &str = "1.3.101.112";
    let parts = sequence(der).ok_or(KeyPairError::Key)?;
    if let Some(public) = of_pkcs1(&parts).or_else(|| of_sec1(&parts)) {
        return Ok(public);
    }
    let [_, algorithm, key, ..] = parts.as_slice() else { return Err(KeyPairError::Key) };
    let algorithm = algorithm.as_sequence().ok().and_then(|parts| parts.first()?.as_oid_val().ok());
    let (Some(algorithm), Ok(key)) = (algorithm, key.as_slice()) else { return Err(KeyPairError::Key) };
    let inner = || sequence(key).ok_or(KeyPairError::Key);
    match algorithm.to_id_string().as_str() {
        RSA => of_pkcs1(&inner()?).ok_or(KeyPairError::Key),
        EC => of_sec1(&inner()?).ok_or(KeyPairError::Key),
        ED25519 => {
            let seed =
                parse_der(key).ok().and_then(|(_, seed)| seed.as_slice().ok()).ok_or(KeyPairError::Key)?;
            let pair = Ed25519KeyPair::from_seed_unchecked(seed).map_err(|_| KeyPairError::Key)?;
            Ok(Public::Ed25519(Cow::Owned(pair.public_key().as_ref().to_vec())))
        }
        _ => Err(KeyPairError::UnknownKey),
    }
}

fn sequence(der: &[u8]) -> Option<Vec<DerObject<'_>>> {
    let (rest, object) = parse_der(der).ok()?;
    match object.content {
        BerObjectContent::Sequence(parts) if rest.is_empty() => Some(parts),
        _ => None,
    }
}

fn of_pkcs1<'a>(parts: &[DerObject<'a>]) -> Option<Public<'a>> {
    const PARTS: usize = 9;
    let number = |object: &DerObject<'a>| match object.content {
        BerObjectContent::Integer(bytes) => Some(Cow::Borrowed(positive(bytes))),
        _ => None,
    };
    match parts {
        [_, modulus, exponent, ..] if parts.len() >= PARTS => {
            Some(Public::Rsa { modulus: number(modulus)?, exponent: number(exponent)? })
        }
        _ => None,
    }
}

fn of_sec1<'a>(parts: &[DerObject<'a>]) -> Option<Public<'a>> {
    const PUBLIC: u32 = 1;
    let [_, secret, rest @ ..] = parts else { return None };
    if !matches!(secret.content, BerObjectContent::OctetString(_)) {
        return None;
    }
    let tagged = rest.iter().find(|part| part.header.raw_tag().is_some() && part.header.tag().0 == PUBLIC);
    let point = tagged.and_then(|part| part.as_slice().ok()).and_then(|inner| {
        match parse_der(inner).ok()?.1.content {
            BerObjectContent::BitString(_, bits) => Some(Cow::Borrowed(bits.data)),
            _ => None,
        }
    });
    Some(Public::Ecdsa(point))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A key and its self-signed certificate, as openssl makes them.
    fn pair(kind: &[&str]) -> (Vec<u8>, Vec<u8>) {
        let directory = tempfile::tempdir().unwrap();
        let [key, certificate] = ["key", "crt"].map(|name| directory.path().join(name));
        let made = Command::new("openssl")
            .args(["req", "-x509", "-nodes", "-subj", "/CN=x", "-newkey"])
            .args(kind)
            .arg("-keyout")
            .arg(&key)
            .arg("-out")
            .arg(&certificate)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        (std::fs::read(key).unwrap(), std::fs::read(certificate).unwrap())
    }

    #[test]
    fn pairs_are_told_apart_as_upstream_does() {
        let (rsa, rsa_certificate) = pair(&["rsa:2048"]);
        let (other, _) = pair(&["rsa:2048"]);
        let (ec, ec_certificate) = pair(&["ec", "-pkeyopt", "ec_paramgen_curve:P-256"]);
        let (ed, ed_certificate) = pair(&["ed25519"]);
        let garbage =
            |kind: &str| format!("-----BEGIN {kind}-----\nYWJj\n-----END {kind}-----\n").into_bytes();
        type Row<'a> = (&'a [u8], &'a [u8], Result<(), KeyPairError>);
        let rows: [Row<'_>; 14] = [
            (&rsa_certificate, &rsa, Ok(())),
            (&ec_certificate, &ec, Ok(())),
            (&ed_certificate, &ed, Ok(())),
            (&rsa_certificate, &other, Err(KeyPairError::Mismatch)),
            (&rsa_certificate, &ec, Err(KeyPairError::Types)),
            (&ed_certificate, &rsa, Err(KeyPairError::Types)),
            (b"", b"", Err(KeyPairError::NoPem("certificate"))),
            (&rsa_certificate, b"x", Err(KeyPairError::NoPem("key"))),
            (&rsa, &rsa_certificate, Err(KeyPairError::Switched)),
            (&rsa_certificate, &rsa_certificate, Err(KeyPairError::CertificateForKey)),
            (&garbage("X"), &rsa, Err(KeyPairError::NoCertificate("X".into()))),
            (&rsa_certificate, &garbage("X"), Err(KeyPairError::NoKey("X".into()))),
            (&garbage("CERTIFICATE"), &rsa, Err(KeyPairError::Certificate)),
            (&rsa_certificate, &garbage("PRIVATE KEY"), Err(KeyPairError::Key)),
        ];
        for (row, (certificate, key, expected)) in rows.into_iter().enumerate() {
            assert_eq!(check(certificate, key), expected, "row {row}");
        }
    }
}
