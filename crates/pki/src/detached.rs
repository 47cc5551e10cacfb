//! Signatures apart from their payload: JSON web signatures in compact form.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ferrite_json::json;
use ring::hmac::{HMAC_SHA256, Key, sign};

/// Signs `content` with a secret that the reader has, too (HS256). The header names the key as `id`.
pub fn detached_signature(content: &str, id: &str, secret: &str) -> String {
    let header = URL_SAFE_NO_PAD.encode(json!({"alg": "HS256", "kid": id}).to_string());
    let payload = URL_SAFE_NO_PAD.encode(content);
    let key = Key::new(HMAC_SHA256, secret.as_bytes());
    let signature = sign(&key, format!("{header}.{payload}").as_bytes());
    format!("{header}..{}", URL_SAFE_NO_PAD.encode(signature))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_what_others_compute() {
        assert_eq!(
            detached_signature("text", "abcdef", "0123456789abcdef"),
            "eyJhbGciOiJIUzI1NiIsImtpZCI6ImFiY2RlZiJ9..v28Ea_KqmHOtFWksJ_4tbV6AFRNzMkrRUG_jsuLJz-4"
        );
    }
}
