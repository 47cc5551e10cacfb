//! Bootstrap tokens: a secret in `kube-system` that lets a new node in.

use super::User;
use crate::registry::View;
use base64::Engine;
use ferrite_json::Value;
use jiff::Timestamp;
use ring::digest::{SHA256, digest};

const ID: usize = 6;
const SECRET: usize = 16;

/// The user of a token `abcdef.0123456789abcdef`, if there is such a token and its time is not over.
pub(crate) fn user_of(view: &View, token: &str, now: Timestamp) -> Option<User> {
    let (id, secret) = split(token)?;
    let stored = view.get("", "secrets", "kube-system", &format!("bootstrap-token-{id}"))?;
    from_secret(&stored, id, secret, now)
}

fn split(token: &str) -> Option<(&str, &str)> {
    let (id, secret) = token.split_once('.')?;
    let plain = |text: &str| text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    (id.len() == ID && secret.len() == SECRET && plain(id) && plain(secret)).then_some((id, secret))
}

fn from_secret(stored: &Value, id: &str, secret: &str, now: Timestamp) -> Option<User> {
    let data = |key: &str| {
        let bytes = base64::engine::general_purpose::STANDARD.decode(stored["data"][key].as_str()?).ok()?;
        String::from_utf8(bytes).ok()
    };
    if stored["type"] != "bootstrap.kubernetes.io/token" || ferrite_api::meta::is_deleting(stored) {
        return None;
    }
    // Digests are compared, because then the time of the comparison reveals nothing about the secret.
    let hash = |text: &str| digest(&SHA256, text.as_bytes());
    if hash(&data("token-secret")?).as_ref() != hash(secret).as_ref() {
        return None;
    }
    if data("token-id").as_deref() != Some(id)
        || data("usage-bootstrap-authentication").as_deref() != Some("true")
    {
        return None;
    }
    if let Some(expiration) = data("expiration")
        && expiration.parse::<Timestamp>().map_or(true, |at| at <= now)
    {
        return None;
    }
    let extra = data("auth-extra-groups").unwrap_or_default();
    let extra: Vec<&str> = extra.split(',').map(str::trim).filter(|g| !g.is_empty()).collect();
    // As upstream: groups outside of its own namespace make the whole token void.
    if extra.iter().any(|group| !group.starts_with("system:bootstrappers:")) {
        return None;
    }
    let groups = std::iter::once("system:bootstrappers").chain(extra);
    Some(User::new(format!("system:bootstrap:{id}"), groups))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_token_is_its_secret_in_time() {
        let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
        let stored = |extra: &[(&str, &str)]| {
            let mut secret = json!({
                "type": "bootstrap.kubernetes.io/token",
                "data": {
                    "token-id": encode("abcdef"), "token-secret": encode("0123456789abcdef"),
                    "usage-bootstrap-authentication": encode("true"),
                },
            });
            for (key, value) in extra {
                secret["data"][*key] = encode(value).into();
            }
            secret
        };
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let user = |secret: &Value, given: &str| from_secret(secret, "abcdef", given, now);
        let good = user(&stored(&[("auth-extra-groups", "system:bootstrappers:x")]), "0123456789abcdef");
        let good = good.unwrap();
        assert_eq!(good.name, "system:bootstrap:abcdef");
        assert_eq!(good.groups, ["system:bootstrappers", "system:bootstrappers:x", "system:authenticated"]);
        assert!(user(&stored(&[]), "0123456789abcdeX").is_none());
        assert!(user(&stored(&[("expiration", "2025-01-01T00:00:00Z")]), "0123456789abcdef").is_none());
        assert!(user(&stored(&[("usage-bootstrap-authentication", "false")]), "0123456789abcdef").is_none());
        assert!(user(&stored(&[("auth-extra-groups", "system:masters")]), "0123456789abcdef").is_none());
        assert_eq!(split("abcdef.0123456789abcdef"), Some(("abcdef", "0123456789abcdef")));
        assert_eq!(split("abcdef.short"), None);
    }
}
