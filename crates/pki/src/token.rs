//! Tokens of service accounts: JSON web tokens signed with ES256, or with RS256 where the key is an RSA key.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ferrite_json::{Value, json};
use ring::rand::SystemRandom;
use ring::rsa::PublicKeyComponents;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair,
    RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_SHA256, RsaKeyPair, UnparsedPublicKey,
};
use rustls_pki_types::PrivateKeyDer;
use rustls_pki_types::pem::PemObject;

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
}

/// Who tokens in secrets are from, whatever the cluster's issuer is called.
pub const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";

enum SigningKey {
    Ecdsa(EcdsaKeyPair),
    Rsa(RsaKeyPair),
}

impl SigningKey {
    fn from_pem(pem: &str, random: &SystemRandom) -> Result<Self, KeyError> {
        match PrivateKeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| KeyError::Pem)? {
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

    /// The name of the algorithm in a token's header. A token with another one is refused, whatever its signature.
    fn algorithm(&self) -> &'static str {
        match self {
            Self::Ecdsa(_) => "ES256",
            Self::Rsa(_) => "RS256",
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

    fn verifies(&self, text: &[u8], signature: &[u8]) -> bool {
        match self {
            Self::Ecdsa(_) => {
                UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.public()).verify(text, signature)
            }
            Self::Rsa(_) => {
                UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, self.public()).verify(text, signature)
            }
        }
        .is_ok()
    }

    /// The public key as a JSON web key with this id.
    fn web_key(&self, id: &str) -> Value {
        match self {
            Self::Ecdsa(_) => {
                // An uncompressed point: a leading byte, then both coordinates.
                let point = self.public();
                let (x, y) = point.get(1..).unwrap_or_default().split_at(point.len() / 2);
                json!({
                    "use": "sig", "kty": "EC", "kid": id, "crv": "P-256", "alg": "ES256",
                    "x": URL_SAFE_NO_PAD.encode(x), "y": URL_SAFE_NO_PAD.encode(y),
                })
            }
            Self::Rsa(key) => {
                let parts = PublicKeyComponents::<Vec<u8>>::from(key.public());
                json!({
                    "use": "sig", "kty": "RSA", "kid": id, "alg": "RS256",
                    "n": URL_SAFE_NO_PAD.encode(parts.n), "e": URL_SAFE_NO_PAD.encode(parts.e),
                })
            }
        }
    }
}

/// Signs and verifies.
pub struct TokenSigner {
    key: SigningKey,
    random: SystemRandom,
    /// Who tokens say that they are from.
    pub issuer: String,
    id: String,
}

impl TokenSigner {
    /// `pem` is an ECDSA P-256 key in PKCS #8, or an RSA key in PKCS #8 or PKCS #1.
    pub fn new(pem: &str, issuer: &str) -> Result<Self, KeyError> {
        let random = SystemRandom::new();
        let key = SigningKey::from_pem(pem, &random)?;
        let digest = ring::digest::digest(&ring::digest::SHA256, key.public());
        let id = URL_SAFE_NO_PAD.encode(digest.as_ref());
        Ok(Self { key, random, issuer: issuer.to_owned(), id })
    }

    /// A token with these claims. None when the random source fails.
    pub fn sign(&self, claims: &Value) -> Option<String> {
        let header = json!({"alg": self.key.algorithm(), "kid": self.id});
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", encode(&header), encode(claims));
        let signature = self.key.sign(&self.random, text.as_bytes())?;
        Some(format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature)))
    }

    /// The claims of a token that we signed. Whether its time is now is for the caller to see.
    pub fn verify(&self, token: &str) -> Option<Value> {
        if token.len() > MAX_TOKEN {
            return None;
        }
        let (text, signature) = token.rsplit_once('.')?;
        let (header, claims) = text.split_once('.')?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).ok();
        let header: Value = ferrite_json::from_slice(&decode(header)?).ok()?;
        if header["alg"] != self.key.algorithm() || !self.key.verifies(text.as_bytes(), &decode(signature)?) {
            return None;
        }
        let claims: Value = ferrite_json::from_slice(&decode(claims)?).ok()?;
        let ours = claims["iss"] == self.issuer.as_str() || claims["iss"] == LEGACY_ISSUER;
        ours.then_some(claims)
    }

    /// `/.well-known/openid-configuration`
    pub fn configuration(&self, address: &str) -> Value {
        json!({
            "issuer": self.issuer,
            "jwks_uri": format!("https://{address}/openid/v1/jwks"),
            "response_types_supported": ["id_token"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": [self.key.algorithm()],
        })
    }

    /// `/openid/v1/jwks`
    pub fn keys(&self) -> Value {
        json!({"keys": [self.key.web_key(&self.id)]})
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
            let others = signers.iter().filter(|other| other.id != signer.id);
            assert!(others.map(|other| other.verify(&token)).all(|claims| claims.is_none()));
        }
        let sec1 = made_by_openssl(&["ecparam", "-name", "prime256v1", "-genkey", "-noout"]);
        assert!(matches!(TokenSigner::new(&sec1, "me"), Err(KeyError::Sec1)));
        let small = made_by_openssl(&["genrsa", "1024"]);
        assert!(matches!(TokenSigner::new(&small, "me"), Err(KeyError::Key(_))));
        assert!(matches!(TokenSigner::new("x", "me"), Err(KeyError::Pem)));
    }
}
