//! Tokens of service accounts: JSON web tokens signed with ES256.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ferrite_json::{Value, json};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair, UnparsedPublicKey,
};
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject;

/// Longer tokens are nobody's.
const MAX_TOKEN: usize = 16 << 10;

/// Why a key cannot sign tokens.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("the key of service accounts is not PEM")]
    Pem,
    #[error("the key of service accounts is not an ECDSA P-256 key: {0}")]
    Key(ring::error::KeyRejected),
}

/// Who tokens in secrets are from, whatever the cluster's issuer is called.
pub const LEGACY_ISSUER: &str = "kubernetes/serviceaccount";

/// Signs and verifies.
pub struct TokenSigner {
    key: EcdsaKeyPair,
    random: SystemRandom,
    /// Who tokens say that they are from.
    pub issuer: String,
    id: String,
}

impl TokenSigner {
    /// `pem` is an ECDSA P-256 key.
    pub fn new(pem: &str, issuer: &str) -> Result<Self, KeyError> {
        let der = PrivatePkcs8KeyDer::from_pem_slice(pem.as_bytes()).map_err(|_| KeyError::Pem)?;
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, der.secret_pkcs8_der(), &random)
            .map_err(KeyError::Key)?;
        let digest = ring::digest::digest(&ring::digest::SHA256, key.public_key().as_ref());
        let id = URL_SAFE_NO_PAD.encode(digest.as_ref());
        Ok(Self { key, random, issuer: issuer.to_owned(), id })
    }

    /// A token with these claims. None when the random source fails.
    pub fn sign(&self, claims: &Value) -> Option<String> {
        let header = json!({"alg": "ES256", "kid": self.id});
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let text = format!("{}.{}", encode(&header), encode(claims));
        let signature = self.key.sign(&self.random, text.as_bytes()).ok()?;
        Some(format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature.as_ref())))
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
        if header["alg"] != "ES256" {
            return None;
        }
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, self.key.public_key().as_ref())
            .verify(text.as_bytes(), &decode(signature)?)
            .ok()?;
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
            "id_token_signing_alg_values_supported": ["ES256"],
        })
    }

    /// `/openid/v1/jwks`
    pub fn keys(&self) -> Value {
        // An uncompressed point: a leading byte, then both coordinates.
        let point = self.key.public_key().as_ref();
        let (x, y) = point.get(1..).unwrap_or_default().split_at(point.len() / 2);
        json!({"keys": [{
            "use": "sig", "kty": "EC", "kid": self.id, "crv": "P-256", "alg": "ES256",
            "x": URL_SAFE_NO_PAD.encode(x), "y": URL_SAFE_NO_PAD.encode(y),
        }]})
    }
}

impl std::fmt::Debug for TokenSigner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not reach a log.
        f.debug_struct("TokenSigner").field("issuer", &self.issuer).finish_non_exhaustive()
    }
}
