//! Tokens and the keys that verify them: what can be seen without asking anybody. Pure.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ferrite_json::Value;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_2048_8192_SHA384,
    RSA_PKCS1_2048_8192_SHA512, RSA_PSS_2048_8192_SHA256, RSA_PSS_2048_8192_SHA384, RSA_PSS_2048_8192_SHA512,
    RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};

/// Longer tokens are nobody's.
const MAX_TOKEN: usize = 64 << 10;
/// A set with more keys is cut off.
const MAX_KEYS: usize = 256;
/// As upstream: the clock of an issuer may be ahead by this, in seconds.
const LEEWAY: f64 = 300.0;

/// A token, taken apart. Nothing of it is verified.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Token<'a> {
    /// The bytes that are signed.
    signed: &'a str,
    signature: Vec<u8>,
    pub algorithm: String,
    /// Empty where the token names no key.
    pub key_id: String,
    pub claims: Value,
}

impl<'a> Token<'a> {
    /// None if it is no JSON web token in compact form.
    pub fn parse(text: &'a str) -> Option<Self> {
        if text.len() > MAX_TOKEN {
            return None;
        }
        let (signed, signature) = text.rsplit_once('.')?;
        let (header, claims) = signed.split_once('.')?;
        let decode = |part: &str| URL_SAFE_NO_PAD.decode(part).ok();
        let header: Value = ferrite_json::from_slice(&decode(header)?).ok()?;
        let claims: Value = ferrite_json::from_slice(&decode(claims)?).ok()?;
        let text = |key: &str| header.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        // Extensions that must be understood, and none is.
        if header.get("crit").is_some() || !claims.is_object() {
            return None;
        }
        Some(Self {
            signed,
            signature: decode(signature)?,
            algorithm: text("alg"),
            key_id: text("kid"),
            claims,
        })
    }

    pub fn issuer(&self) -> &str {
        self.claims.get("iss").and_then(Value::as_str).unwrap_or_default()
    }

    fn audiences(&self) -> Vec<&str> {
        match self.claims.get("aud") {
            Some(Value::String(one)) => vec![one.as_str()],
            Some(Value::Array(list)) => list.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        }
    }

    /// Checks audience, times and algorithm; `now` in seconds since the epoch. Errors are upstream's.
    pub fn check(&self, audiences: &[String], algorithms: &[String], now: f64) -> Result<(), String> {
        let found = self.audiences();
        if !audiences.iter().any(|wanted| found.contains(&wanted.as_str())) {
            return Err(match audiences {
                [one] => format!("oidc: expected audience {one:?} got {found:?}"),
                many => format!("oidc: expected audience in {many:?} got {found:?}"),
            });
        }
        let time = |claim: &str| self.claims.get(claim).and_then(Value::as_f64);
        match time("exp") {
            Some(end) if end >= now => {}
            end => return Err(format!("oidc: token is expired (Token Expiry: {})", at(end.unwrap_or(0.0)))),
        }
        if let Some(begin) = time("nbf")
            && now + LEEWAY < begin
        {
            return Err(format!(
                "oidc: current time {} before the nbf (not before) time: {}",
                at(now),
                at(begin)
            ));
        }
        match algorithms.contains(&self.algorithm) {
            true => Ok(()),
            false => Err(format!(
                "oidc: id token signed with unsupported algorithm, expected {algorithms:?} got {:?}",
                short(&self.algorithm)
            )),
        }
    }

    /// True if one of the keys has signed it.
    pub fn is_signed_by(&self, keys: &[Key]) -> bool {
        let named = keys.iter().filter(|key| self.key_id.is_empty() || key.id == self.key_id);
        named.into_iter().any(|key| key.verifies(&self.algorithm, self.signed.as_bytes(), &self.signature))
    }
}

fn at(seconds: f64) -> String {
    #[allow(clippy::cast_possible_truncation, reason = "only shown")]
    let whole = seconds.clamp(-1e11, 1e11) as i64;
    jiff::Timestamp::from_second(whole).map_or_else(|_| whole.to_string(), |time| time.to_string())
}

fn short(text: &str) -> String {
    text.chars().take(32).collect()
}

/// A public key of an issuer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Key {
    id: String,
    material: Material,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Material {
    Rsa {
        n: Vec<u8>,
        e: Vec<u8>,
    },
    /// An uncompressed point.
    P256(Vec<u8>),
    P384(Vec<u8>),
}

impl Key {
    /// The keys of a JSON web key set that can verify. A key for encryption, of another kind or of another curve is passed over.
    pub fn set(document: &Value) -> Option<Vec<Self>> {
        let keys = document.get("keys")?.as_array()?;
        Some(keys.iter().take(MAX_KEYS).filter_map(Self::parse).collect())
    }

    fn parse(key: &Value) -> Option<Self> {
        let text = |name: &str| key.get(name).and_then(Value::as_str).unwrap_or_default();
        let bytes = |name: &str| URL_SAFE_NO_PAD.decode(text(name).trim_end_matches('=')).ok();
        if text("use") == "enc" {
            return None;
        }
        let point = |length: usize| {
            let (x, y) = (bytes("x")?, bytes("y")?);
            (x.len() == length && y.len() == length).then(|| [&[4][..], &x, &y].concat())
        };
        let material = match (text("kty"), text("crv")) {
            ("RSA", _) => {
                let trimmed = |name| Some(bytes(name)?.into_iter().skip_while(|byte| *byte == 0).collect());
                Material::Rsa { n: trimmed("n")?, e: trimmed("e")? }
            }
            ("EC", "P-256") => Material::P256(point(32)?),
            ("EC", "P-384") => Material::P384(point(48)?),
            // Among them "oct": a shared secret never verifies.
            _ => return None,
        };
        Some(Self { id: text("kid").to_owned(), material })
    }

    /// The algorithm must be one of the key's own kind: the header of a token is its author's.
    fn verifies(&self, algorithm: &str, signed: &[u8], signature: &[u8]) -> bool {
        let rsa: &RsaParameters = match algorithm {
            "RS256" => &RSA_PKCS1_2048_8192_SHA256,
            "RS384" => &RSA_PKCS1_2048_8192_SHA384,
            "RS512" => &RSA_PKCS1_2048_8192_SHA512,
            "PS256" => &RSA_PSS_2048_8192_SHA256,
            "PS384" => &RSA_PSS_2048_8192_SHA384,
            "PS512" => &RSA_PSS_2048_8192_SHA512,
            "ES256" | "ES384" => {
                let (curve, point): (&dyn VerificationAlgorithm, _) = match (&self.material, algorithm) {
                    (Material::P256(point), "ES256") => (&ECDSA_P256_SHA256_FIXED, point),
                    (Material::P384(point), "ES384") => (&ECDSA_P384_SHA384_FIXED, point),
                    _ => return false,
                };
                return UnparsedPublicKey::new(curve, point).verify(signed, signature).is_ok();
            }
            _ => return false,
        };
        match &self.material {
            Material::Rsa { n, e } => RsaPublicKeyComponents { n, e }.verify(rsa, signed, signature).is_ok(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn encoded(value: &Value) -> String {
        URL_SAFE_NO_PAD.encode(value.to_string())
    }

    #[test]
    fn audience_time_and_algorithm_are_checked() {
        let now = 1_000_000.0;
        let check = |claims: Value, algorithm: &str| {
            let text = format!("{}.{}.", encoded(&json!({"alg": algorithm})), encoded(&claims));
            let token = Token::parse(&text).expect("a token");
            token.check(&["us".to_owned()], &["RS256".to_owned()], now).err()
        };
        let good = |audience: Value, end: i64| json!({"aud": audience, "exp": end});
        assert_eq!(check(good(json!("us"), 1_000_001), "RS256"), None);
        assert_eq!(check(good(json!(["them", "us"]), 1_000_001), "RS256"), None);
        assert_eq!(check(json!({"aud": "us", "exp": 1_000_001, "nbf": 1_000_300}), "RS256"), None);
        let rows = [
            (good(json!("them"), 1_000_001), "RS256", "expected audience \"us\" got [\"them\"]"),
            (good(json!([]), 1_000_001), "RS256", "expected audience"),
            (json!({"exp": 1_000_001}), "RS256", "expected audience"),
            (good(json!("us"), 999_999), "RS256", "token is expired (Token Expiry: 1970-01-12T13:46:39Z)"),
            (json!({"aud": "us"}), "RS256", "token is expired"),
            (json!({"aud": "us", "exp": "soon"}), "RS256", "token is expired"),
            (json!({"aud": "us", "exp": 2_000_000, "nbf": 1_000_301}), "RS256", "before the nbf"),
            (
                good(json!("us"), 1_000_001),
                "none",
                "unsupported algorithm, expected [\"RS256\"] got \"none\"",
            ),
            (good(json!("us"), 1_000_001), "HS256", "unsupported algorithm"),
            (good(json!("us"), 1_000_001), "rs256", "unsupported algorithm"),
        ];
        for (claims, algorithm, expected) in rows {
            let error = check(claims.clone(), algorithm).unwrap_or_default();
            assert!(error.contains(expected), "{claims} {algorithm}: {error}");
        }
    }

    #[test]
    fn texts_that_are_no_tokens_are_refused() {
        let claims = encoded(&json!({}));
        let header = encoded(&json!({"alg": "RS256"}));
        let critical = encoded(&json!({"alg": "RS256", "crit": ["exp"]}));
        let list = encoded(&json!([]));
        for text in [
            String::new(),
            "a.b".to_owned(),
            "....".to_owned(),
            format!("{header}.{claims}"),
            format!("{header}.{claims}.!"),
            format!("{critical}.{claims}."),
            format!("{header}.{list}."),
            format!("{header}.{claims}.{}", "a".repeat(65 << 10)),
        ] {
            assert_eq!(Token::parse(&text), None, "{}", &text[..text.len().min(60)]);
        }
    }

    #[test]
    fn a_public_key_is_no_shared_secret() {
        // As an attacker signs who knows the public key alone.
        let n = URL_SAFE_NO_PAD.encode([200; 256]);
        let document =
            json!({"keys": [{"kty": "RSA", "kid": "k", "n": n, "e": "AQAB"}, {"kty": "oct", "k": "AAAA"}]});
        let keys = Key::set(&document).expect("a set");
        assert_eq!(keys.len(), 1, "shared secrets are passed over");
        let signed = format!("{}.{}", encoded(&json!({"alg": "HS256", "kid": "k"})), encoded(&json!({})));
        let secret = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &[200; 256]);
        let signature = URL_SAFE_NO_PAD.encode(ring::hmac::sign(&secret, signed.as_bytes()));
        let text = format!("{signed}.{signature}");
        assert!(!Token::parse(&text).expect("a token").is_signed_by(&keys));
        let unsigned = format!("{}.{}.", encoded(&json!({"alg": "none"})), encoded(&json!({})));
        assert!(!Token::parse(&unsigned).expect("a token").is_signed_by(&keys));
        assert_eq!(Key::set(&json!({"keys": {}})), None);
        for odd in [
            json!({"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA"}),
            json!({"kty": "EC", "crv": "P-521", "x": "AA", "y": "AA"}),
            json!({"kty": "RSA", "use": "enc", "n": "AA", "e": "AQAB"}),
            json!("text"),
        ] {
            assert_eq!(Key::set(&json!({"keys": [odd]})), Some(Vec::new()));
        }
    }
}
