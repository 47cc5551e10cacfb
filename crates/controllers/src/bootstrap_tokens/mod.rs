//! Bootstrap tokens, with which new nodes find and trust the cluster: signatures of the published data, and
//! the removal of expired tokens.

mod clean;
mod sign;

use ferrite_client::{Informer, ListSelector};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;

use crate::Context;

pub(crate) use clean::start as start_cleaning;
pub(crate) use sign::start as start_signing;

const NAMESPACE: &str = "kube-system";
const KIND: &str = "bootstrap.kubernetes.io/token";
const NAME_PREFIX: &str = "bootstrap-token-";
const ID_LENGTH: usize = 6;

/// The secrets of all bootstrap tokens.
fn secrets(context: &Context) -> Informer<Secret> {
    context
        .informers
        .get_selected(ListSelector::fields(format!("metadata.namespace={NAMESPACE},type={KIND}")))
}

/// A member of the secret's data, if it is text and not empty.
fn data<'a>(secret: &'a Secret, key: &str) -> Option<&'a str> {
    let bytes = &secret.data.as_ref()?.get(key)?.0;
    std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Validity {
    Unlimited,
    Until(Timestamp),
    /// Over, or its end cannot be read.
    Ended,
}

fn validity(secret: &Secret, now: Timestamp) -> Validity {
    let Some(expiration) = data(secret, "expiration") else { return Validity::Unlimited };
    match expiration.parse::<Timestamp>() {
        Ok(end) if end > now => Validity::Until(end),
        _ => Validity::Ended,
    }
}

/// Identifier and secret of a token that may sign, if this is one.
fn signing_token(secret: &Secret, now: Timestamp) -> Option<(&str, &str)> {
    let id = secret.metadata.name.as_deref()?.strip_prefix(NAME_PREFIX)?;
    let is_plain = id.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    let may_sign = secret.type_.as_deref() == Some(KIND)
        && id.len() == ID_LENGTH
        && is_plain
        && data(secret, "token-id") == Some(id)
        && data(secret, "usage-bootstrap-signing") == Some("true")
        && validity(secret, now) != Validity::Ended;
    if !may_sign {
        return None;
    }
    Some((id, data(secret, "token-secret")?))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::ByteString;

    use super::*;

    pub(super) fn token(name: &str, data: &[(&str, &str)]) -> Secret {
        let mut all = BTreeMap::from([
            ("token-id".to_owned(), "abcdef"),
            ("token-secret".to_owned(), "0123456789abcdef"),
            ("usage-bootstrap-signing".to_owned(), "true"),
        ]);
        all.extend(data.iter().map(|(key, value)| ((*key).to_owned(), *value)));
        let mut secret = Secret { type_: Some(KIND.to_owned()), ..Secret::default() };
        secret.metadata.name = Some(name.to_owned());
        secret.data = Some(all.into_iter().map(|(key, value)| (key, ByteString(value.into()))).collect());
        secret
    }

    #[test]
    fn only_whole_tokens_in_time_sign() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        for (what, name, data, may) in [
            ("plain", "bootstrap-token-abcdef", &[][..], true),
            ("later", "bootstrap-token-abcdef", &[("expiration", "2026-01-01T00:00:01Z")], true),
            ("ended", "bootstrap-token-abcdef", &[("expiration", "2026-01-01T00:00:00Z")], false),
            ("unreadable", "bootstrap-token-abcdef", &[("expiration", "soon")], false),
            ("another name", "bootstrap-token-abcdeg", &[], false),
            ("no such name", "token-abcdef", &[], false),
            ("a long name", "bootstrap-token-abcdefg", &[("token-id", "abcdefg")], false),
            ("capitals", "bootstrap-token-ABCDEF", &[("token-id", "ABCDEF")], false),
            ("no secret", "bootstrap-token-abcdef", &[("token-secret", "")], false),
            ("not for signing", "bootstrap-token-abcdef", &[("usage-bootstrap-signing", "1")], false),
        ] {
            let secret = token(name, data);
            assert_eq!(signing_token(&secret, now).is_some(), may, "{what}");
        }
    }
}
