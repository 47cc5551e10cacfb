//! Tokens of service accounts: JSON web tokens signed with ES256, or with RS256 where the key is an RSA key.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ferrite_json::{Value, json};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, ECDSA_P384_SHA384_FIXED, EcdsaKeyPair, KeyPair,
    RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_SHA256, RsaKeyPair, UnparsedPublicKey, VerificationAlgorithm,
};
use rustls_pki_types::pem::{PemObject, SectionKind};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, SubjectPublicKeyInfoDer};
use x509_parser::prelude::{FromDer, SubjectPublicKeyInfo, X509Certificate};

/// Longer tokens are nobody's.
const MAX_TOKEN: usize = 16 << 10;

/// Why a key cannot sign tokens.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("the key of service accounts is not PEM")]
    Pem,
    #[error(
        "the key of service accounts is neither an ECDSA P-256 key in PKCS #8 nor an RSA key of 2048 bits or more: {0}"
    )]
    Key(ring::error::KeyRejected),
    #[error(
        "the key of service accounts is an EC key in SEC 1; convert it with `openssl pkcs8 -topk8 -nodes`"
    )]
    Sec1,
    #[error("a key that verifies tokens is neither RSA nor ECDSA with P-256 or P-384")]
    Public,
    #[error("the file has no key that verifies tokens")]
    NoKey,
}

/// The issuer of tokens in secrets, whatever the cluster's issuer is.
pub const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";

enum SigningKey {
    Ecdsa(EcdsaKeyPair),
    Rsa(RsaKeyPair),
}

impl SigningKey {
    fn from_pem(pem: &str, random: &SystemRandom) -> Result<Self, KeyError> {
        Self::from_der(&PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| KeyError::Pem)?, random)
    }

    fn from_der(key: &PrivateKeyDer<'_>, random: &SystemRandom) -> Result<Self, KeyError> {
        match key {
            PrivateKeyDer::Pkcs8(key) => {
                let der = key.secret_pkcs8_der();
                EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der, random)
                    .map(Self::Ecdsa)
                    .or_else(|_| RsaKeyPair::from_pkcs8(der).map(Self::Rsa))
                    .map_err(KeyError::Key)
            }
            PrivateKeyDer::Pkcs1(key) => {
                RsaKeyPair::from_der(key.secret_pkcs1_der()).map(Self::Rsa).map_err(KeyError::Key)
            }
            PrivateKeyDer::Sec1(_) => Err(KeyError::Sec1),
            _ => Err(KeyError::Pem),
        }
    }

    fn public(&self) -> &[u8] {
        match self {
            Self::Ecdsa(key) => key.public_key().as_ref(),
            Self::Rsa(key) => key.public_key().as_ref(),
        }
    }

    fn sign(&self, random: &SystemRandom, text: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Ecdsa(key) => Some(key.sign(random, text).ok()?.as_ref().to_vec()),
            Self::Rsa(key) => {
                let mut signature = vec![0; key.public().modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, random, text, &mut signature).ok()?;
                Some(signature)
            }
        }
    }

    fn verifying(&self) -> VerifyingKey {
        let kind = match self {
            Self::Ecdsa(_) => KeyKind::P256,
            Self::Rsa(_) => KeyKind::Rsa,
        };
        VerifyingKey::new(kind, self.public())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyKind {
    P256,
    P384,
    Rsa,
}

impl KeyKind {
    /// The name of the algorithm in a token's header. A token with another one is refused, whatever its signature.
    fn algorithm(self) -> &'static str {
        match self {
            Self::P256 => "ES256",
            Self::P384 => "ES384",
            Self::Rsa => "RS256",
        }
    }

    fn verification(self) -> &'static dyn VerificationAlgorithm {
        match self {
            Self::P256 => &ECDSA_P256_SHA256_FIXED,
            Self::P384 => &ECDSA_P384_SHA384_FIXED,
            Self::Rsa => &RSA_PKCS1_2048_8192_SHA256,
        }
    }
}

/// A public key that tokens are verified with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifyingKey {
    kind: KeyKind,
    /// A point of an elliptic curve, or an RSA key as in PKCS #1.
    public: Vec<u8>,
    id: String,
}

impl VerifyingKey {
    fn new(kind: KeyKind, public: &[u8]) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, public);
        Self { kind, public: public.to_owned(), id: URL_SAFE_NO_PAD.encode(digest.as_ref()) }
    }

    /// All keys of a PEM file: public keys, private keys, and those of certificates.
    pub fn all_from_pem(pem: &str) -> Result<Vec<Self>, KeyError> {
        let random = SystemRandom::new();
        let mut keys = Vec::new();
        for section in <(SectionKind, Vec<u8>)>::pem_slice_iter(pem.as_bytes()) {
            let (kind, der) = section.map_err(|_| KeyError::Pem)?;
            let private = match kind {
                SectionKind::PublicKey => {
                    let der = SubjectPublicKeyInfoDer::from(der);
                    let (_, info) = SubjectPublicKeyInfo::from_der(&der).map_err(|_| KeyError::Public)?;
                    keys.push(Self::of_info(&info)?);
                    continue;
                }
                SectionKind::Certificate => {
                    let der = CertificateDer::from(der);
                    let (_, certificate) = X509Certificate::from_der(&der).map_err(|_| KeyError::Public)?;
                    keys.push(Self::of_info(certificate.public_key())?);
                    continue;
                }
                SectionKind::PrivateKey => PrivateKeyDer::Pkcs8(der.into()),
                SectionKind::RsaPrivateKey => PrivateKeyDer::Pkcs1(der.into()),
                SectionKind::EcPrivateKey => PrivateKeyDer::Sec1(der.into()),
                _ => continue,
            };
            keys.push(SigningKey::from_der(&private, &random)?.verifying());
        }
        if keys.is_empty() { Err(KeyError::NoKey) } else { Ok(keys) }
    }

    fn of_info(info: &SubjectPublicKeyInfo<'_>) -> Result<Self, KeyError> {
        let public = info.subject_public_key.data.as_ref();
        // The length of an uncompressed point determines its curve.
        let kind = match (info.algorithm.algorithm.to_id_string().as_str(), public.len()) {
            ("1.2.840.113549.1.1.1", _) => KeyKind::Rsa,
            ("1.2.840.10045.2.1", 65) => KeyKind::P256,
            ("1.2.840.10045.2.1", 97) => KeyKind::P384,
            _ => return Err(KeyError::Public),
        };
        Ok(Self::new(kind, public))
    }

    fn verifies(&self, algorithm: &Value, text: &[u8], signature: &[u8]) -> bool {
        *algorithm == self.kind.algorithm()
            && UnparsedPublicKey::new(self.kind.verification(), &self.public).verify(text, signature).is_ok()
    }

    /// The key as a JSON web key.
    fn web_key(&self) -> Option<Value> {
        let (id, algorithm) = (&self.id, self.kind.algorithm());
        if self.kind == KeyKind::Rsa {
            let (n, e) = rsa_parts(&self.public)?;
            return Some(json!({
                "use": "sig", "kty": "RSA", "kid": id, "alg": algorithm,
                "n": URL_SAFE_NO_PAD.encode(n), "e": URL_SAFE_NO_PAD.encode(e),
            }));
        }
        // An uncompressed point: a leading byte, then both coordinates.
        let (x, y) = self.public.get(1..).unwrap_or_default().split_at(self.public.len() / 2);
        let curve = if self.kind == KeyKind::P256 { "P-256" } else { "P-384" };
        Some(json!({
            "use": "sig", "kty": "EC", "kid": id, "crv": curve, "alg": algorithm,
            "x": URL_SAFE_NO_PAD.encode(x), "y": URL_SAFE_NO_PAD.encode(y),
        }))
    }
}

/// Modulus and exponent of an RSA key in PKCS #1, without leading zeros.
fn rsa_parts(public: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let (_, key) = x509_parser::public_key::RSAPublicKey::from_der(public).ok()?;
    let trimmed = |number: &[u8]| number.iter().copied().skip_while(|byte| *byte == 0).collect::<Vec<u8>>();
    Some((trimmed(key.modulus), trimmed(key.exponent)))
}

/// Signs tokens, and verifies those of all keys and issuers that are accepted.
pub struct TokenSigner {
    key: SigningKey,
    random: SystemRandom,
    /// The issuer in the tokens.
    pub issuer: String,
    /// Issuers of tokens that were signed earlier.
    other_issuers: Vec<String>,
    /// The signing key's own first.
    accepted: Vec<VerifyingKey>,
}

impl TokenSigner {
    /// `pem` is an ECDSA P-256 key in PKCS #8, or an RSA key in PKCS #8 or PKCS #1.
    pub fn new(pem: &str, issuer: &str) -> Result<Self, KeyError> {
        let random = SystemRandom::new();
        let key = SigningKey::from_pem(pem, &random)?;
        let accepted = vec![key.verifying()];
        Ok(Self { key, random, issuer: issuer.to_owned(), other_issuers: Vec::new(), accepted })
    }

    /// The same, and accepts tokens of other keys and issuers.
    pub fn accepting(mut self, keys: Vec<VerifyingKey>, issuers: Vec<String>) -> Self {
        self.accepted.extend(keys);
        let mut seen = std::collections::HashSet::new();
        self.accepted.retain(|key| seen.insert(key.id.clone()));
        self.other_issuers = issuers;
        self
    }

    /// A token with these claims. None when the random source fails.
    pub fn sign(&self, claims: &Value) -> Option<String> {
        let own = self.accepted.first()?;
        let header = json!({"alg": own.kind.algorithm(), "kid": own.id});
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", encode(&header), encode(claims));
        let signature = self.key.sign(&self.random, text.as_bytes())?;
        Some(format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// True if a token names one of our issuers, whoever signed it.
    pub fn claims_issuer(&self, token: &str) -> bool {
        let mut parts = token.split('.');
        let (Some(_), Some(claims), Some(_), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return false;
        };
        let claims = URL_SAFE_NO_PAD.decode(claims).ok();
        let claims: Option<Value> = claims.and_then(|claims| ferrite_json::from_slice(&claims).ok());
        let issuer = claims.as_ref().and_then(|claims| claims["iss"].as_str());
        token.len() <= MAX_TOKEN && issuer.is_some_and(|issuer| self.is_known(issuer))
    }

    fn is_known(&self, issuer: &str) -> bool {
        issuer == self.issuer || issuer == LEGACY_ISSUER || self.other_issuers.iter().any(|i| i == issuer)
    }

    /// The claims of a token that is signed with an accepted key. The caller checks the token's validity
    /// period.
    pub fn verify(&self, token: &str) -> Option<Value> {
        if token.len() > MAX_TOKEN {
            return None;
        }
        let (text, signature) = token.rsplit_once('.')?;
        let (header, claims) = text.split_once('.')?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).ok();
        let header: Value = ferrite_json::from_slice(&decode(header)?).ok()?;
        let signature = decode(signature)?;
        // A token names its key where it can; one of another name needs no attempt.
        let named = header["kid"].as_str().filter(|id| self.accepted.iter().any(|key| key.id == **id));
        let mut candidates = self.accepted.iter().filter(|key| named.is_none_or(|id| key.id == id));
        if !candidates.any(|key| key.verifies(&header["alg"], text.as_bytes(), &signature)) {
            return None;
        }
        let claims: Value = ferrite_json::from_slice(&decode(claims)?).ok()?;
        let issuer = claims["iss"].as_str()?;
        let known = self.is_known(issuer);
        known.then_some(claims)
    }

    /// `/.well-known/openid-configuration`
    pub fn configuration(&self, keys_url: &str) -> Value {
        let mut algorithms: Vec<&str> = self.accepted.iter().map(|key| key.kind.algorithm()).collect();
        algorithms.sort_unstable();
        algorithms.dedup();
        json!({
            "issuer": self.issuer,
            "jwks_uri": keys_url,
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": algorithms,
        })
    }

    /// `/openid/v1/jwks`
    pub fn keys(&self) -> Value {
        let keys: Vec<Value> = self.accepted.iter().filter_map(VerifyingKey::web_key).collect();
        json!({"keys": keys})
    }
}

impl std::fmt::Debug for TokenSigner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not reach a log.
        f.debug_struct("TokenSigner").field("issuer", &self.issuer).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    fn made_by_openssl(arguments: &[&str]) -> String {
        let output = Command::new("openssl").args(arguments).output().expect("openssl is installed");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn tokens_are_signed_and_verified_with_every_kind_of_key() {
        let claims = json!({"iss": "me", "sub": "somebody"});
        let ecdsa = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
        let keys = [
            (made_by_openssl(&ecdsa), "ES256", "EC"),
            (made_by_openssl(&["genrsa", "2048"]), "RS256", "RSA"),
            (made_by_openssl(&["genrsa", "-traditional", "2048"]), "RS256", "RSA"),
        ];
        let signers: Vec<_> = keys.iter().map(|(pem, ..)| TokenSigner::new(pem, "me").unwrap()).collect();
        for (signer, (_, algorithm, kind)) in signers.iter().zip(&keys) {
            let token = signer.sign(&claims).unwrap();
            assert_eq!(signer.verify(&token).as_ref(), Some(&claims), "{algorithm}");
            assert_eq!(
                signer.configuration("h")["id_token_signing_alg_values_supported"],
                json!([algorithm])
            );
            assert_eq!(signer.keys()["keys"][0]["kty"], **kind);
            // A token says by which algorithm it was signed; nothing but the key decides.
            let (_, rest) = token.split_once('.').unwrap();
            for forged in ["none", "HS256", "ES256", "RS256"].iter().filter(|name| *name != algorithm) {
                let header = URL_SAFE_NO_PAD.encode(json!({"alg": *forged}).to_string());
                assert_eq!(signer.verify(&format!("{header}.{rest}")), None, "{forged}");
            }
            let others = signers.iter().filter(|other| other.accepted != signer.accepted);
            assert!(others.map(|other| other.verify(&token)).all(|claims| claims.is_none()));
        }
        let sec1 = made_by_openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout"]);
        assert!(matches!(TokenSigner::new(&sec1, "me"), Err(KeyError::Sec1)));
        let small = made_by_openssl(&["genrsa", "1024"]);
        assert!(matches!(TokenSigner::new(&small, "me"), Err(KeyError::Key(_))));
        assert!(matches!(TokenSigner::new("x", "me"), Err(KeyError::Pem)));
    }

    #[test]
    fn tokens_of_other_keys_and_issuers_are_accepted_where_they_are_named() {
        let old = made_by_openssl(&["genrsa", "2048"]);
        let curve = ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"];
        let new = made_by_openssl(&curve);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("old.pem");
        std::fs::write(&file, &old).unwrap();
        let file = file.to_str().unwrap();
        let public = made_by_openssl(&["rsa", "-in", file, "-pubout"]);
        let certificate = made_by_openssl(&["req", "-x509", "-key", file, "-subj", "/CN=x", "-days", "1"]);
        let before = TokenSigner::new(&old, "old").unwrap();
        let token = before.sign(&json!({"iss": "old"})).unwrap();
        for pem in [&public, &certificate, &old] {
            let keys = VerifyingKey::all_from_pem(pem).unwrap();
            assert_eq!(keys, before.accepted, "{pem}");
            let signer = TokenSigner::new(&new, "new").unwrap();
            assert_eq!(signer.verify(&token), None);
            let signer = signer.accepting(keys.clone(), Vec::new());
            assert_eq!(signer.verify(&token), None, "the issuer is not known");
            let signer = signer.accepting(keys, vec!["old".into()]);
            assert_eq!(signer.verify(&token), Some(json!({"iss": "old"})));
            let own = signer.sign(&json!({"iss": "new"})).unwrap();
            assert!(signer.verify(&own).is_some() && before.verify(&own).is_none());
            let types: Vec<_> =
                signer.keys()["keys"].as_array().unwrap().iter().map(|key| key["kty"].clone()).collect();
            assert_eq!(types, [json!("EC"), json!("RSA")]);
        }
        let both = format!("{public}{new}");
        assert_eq!(VerifyingKey::all_from_pem(&both).unwrap().len(), 2);
        assert!(matches!(VerifyingKey::all_from_pem("nothing"), Err(KeyError::NoKey)));
    }
}
