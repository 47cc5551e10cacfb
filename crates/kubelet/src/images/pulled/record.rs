//! Records of pulls: their form, which is upstream's, and the decisions that are made with them.

use super::policy::VerificationPolicy;
use crate::images::credentials::{Credential, Origin};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

pub(super) const API_VERSION: &str = "kubelet.config.k8s.io/v1beta1";
/// As upstream: a record with more secrets is not made longer by pods that only compare.
const MOST_COMPARED: usize = 100;

/// A pull that has begun.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ImagePullIntent {
    pub kind: String,
    #[serde(rename = "apiVersion")]
    pub api_version: String,
    pub image: String,
}

/// An image that the kubelet pulled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ImagePulledRecord {
    pub kind: String,
    pub api_version: String,
    pub last_updated_time: Timestamp,
    pub image_ref: String,
    /// By the image's name in the pod without tag and digest. A name that is not there was pulled in a way that is
    /// not known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub credential_mapping: BTreeMap<String, ImagePullCredentials>,
}

/// The credentials that opened an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ImagePullCredentials {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_secrets: Vec<ImagePullSecret>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_service_accounts: Vec<Coordinates>,
    /// Every pod of the node can pull it: nothing was needed, or what the node knows was enough.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub node_pods_accessible: bool,
}

/// An object of a namespace, and not another one of the same name.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Coordinates {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct ImagePullSecret {
    #[serde(flatten)]
    pub secret: Coordinates,
    pub credential_hash: String,
}

/// The outcome of a look at the record of an image.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// The policy asks for nothing.
    PolicyAllows,
    /// Every pod of the node may use the image.
    Accessible,
    MustAuthenticate,
    /// It depends on the pod's credentials.
    Compare,
}

/// Decides as far as the pod's credentials are not needed for it. `pulled` says that there is a record or an intent.
pub(super) fn look(
    policy: &VerificationPolicy,
    image: &str,
    repository: &str,
    pulled: bool,
    record: Option<&ImagePulledRecord>,
) -> Look {
    if !policy.requires(image, pulled) {
        return Look::PolicyAllows;
    }
    let Some(known) = record.and_then(|record| record.credential_mapping.get(repository)) else {
        return Look::MustAuthenticate;
    };
    match known {
        known if known.node_pods_accessible => Look::Accessible,
        known if known.kubernetes_secrets.is_empty() && known.kubernetes_service_accounts.is_empty() => {
            Look::MustAuthenticate
        }
        _ => Look::Compare,
    }
}

/// Compares a pod's credentials with those that opened the image: the error is that none is among them. A secret that
/// is the same under another name, or has another content under the same name, is to be recorded.
pub(super) fn compare(
    known: &ImagePullCredentials,
    offered: &[Credential],
) -> Result<Option<ImagePullSecret>, NotAmongThem> {
    let room = known.kubernetes_secrets.len() < MOST_COMPARED;
    for credential in offered {
        match &credential.origin {
            Origin::Node => {}
            Origin::ServiceAccount(account) => {
                if known.kubernetes_service_accounts.contains(account) {
                    return Ok(None);
                }
            }
            Origin::Secret(secret) => {
                let hash = &credential.hash;
                for stored in &known.kubernetes_secrets {
                    let same_content = !stored.credential_hash.is_empty() && stored.credential_hash == *hash;
                    let same_secret = stored.secret == *secret;
                    if same_content || (same_secret && room) {
                        let new = ImagePullSecret { secret: secret.clone(), credential_hash: hash.clone() };
                        return Ok((room && !(same_content && same_secret)).then_some(new));
                    }
                }
            }
        }
    }
    Err(NotAmongThem)
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotAmongThem;

/// The credentials with which a successful pull allows the image to be used.
pub(super) fn opened_by(credential: Option<&Credential>) -> ImagePullCredentials {
    let mut opened = ImagePullCredentials::default();
    match credential.map(|used| (&used.origin, &used.hash)) {
        None | Some((Origin::Node, _)) => opened.node_pods_accessible = true,
        Some((Origin::Secret(secret), hash)) => opened
            .kubernetes_secrets
            .push(ImagePullSecret { secret: secret.clone(), credential_hash: hash.clone() }),
        Some((Origin::ServiceAccount(account), _)) => {
            opened.kubernetes_service_accounts.push(account.clone());
        }
    }
    opened
}

/// The record with what opened the image this time; none if nothing is new. `opened` is none where the circumstances
/// of the pull are not known: the record then says only that the image is no preloaded one.
pub(super) fn merged(
    record: Option<&ImagePulledRecord>,
    image_ref: &str,
    repository: &str,
    opened: Option<ImagePullCredentials>,
    now: Timestamp,
) -> Option<ImagePulledRecord> {
    let mut new = record.cloned().unwrap_or_else(|| ImagePulledRecord {
        kind: "ImagePulledRecord".into(),
        api_version: API_VERSION.into(),
        last_updated_time: now,
        image_ref: image_ref.to_owned(),
        credential_mapping: BTreeMap::new(),
    });
    if let Some(opened) = opened {
        let known = new.credential_mapping.entry(repository.to_owned()).or_default();
        if known.node_pods_accessible || opened.node_pods_accessible {
            *known = ImagePullCredentials { node_pods_accessible: true, ..Default::default() };
        } else {
            for secret in opened.kubernetes_secrets {
                known.kubernetes_secrets.retain(|old| old.secret != secret.secret);
                known.kubernetes_secrets.push(secret);
            }
            known.kubernetes_secrets.sort_by(|a, b| a.secret.cmp(&b.secret));
            known.kubernetes_service_accounts.extend(opened.kubernetes_service_accounts);
            known.kubernetes_service_accounts.sort();
            known.kubernetes_service_accounts.dedup();
        }
    }
    if record == Some(&new) {
        return None;
    }
    // The API writes whole seconds.
    new.last_updated_time = Timestamp::from_second(now.as_second()).unwrap_or(now);
    Some(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_cri::v1::AuthConfig;

    fn at(name: &str) -> Coordinates {
        Coordinates { namespace: "ns".into(), name: name.into(), uid: format!("uid-{name}") }
    }

    fn secret(name: &str, hash: &str) -> Credential {
        Credential { auth: AuthConfig::default(), origin: Origin::Secret(at(name)), hash: hash.into() }
    }

    fn account(name: &str) -> Credential {
        Credential { origin: Origin::ServiceAccount(at(name)), ..secret("", "") }
    }

    fn node() -> Credential {
        Credential { origin: Origin::Node, ..secret("", "h") }
    }

    fn record(opened: &[Option<Credential>]) -> Option<ImagePulledRecord> {
        let mut record = None;
        for opened in opened {
            let new =
                merged(record.as_ref(), "id", "r/x", Some(opened_by(opened.as_ref())), Timestamp::UNIX_EPOCH);
            record = new.or(record);
        }
        record
    }

    #[test]
    fn a_record_says_who_may_use_the_image() {
        let policy = VerificationPolicy::NeverVerifyPreloadedImages;
        let unknown = merged(None, "id", "r/x", None, Timestamp::UNIX_EPOCH);
        let empty = record(&[Some(secret("a", "h"))]).map(|mut r| {
            r.credential_mapping.insert("r/x".into(), ImagePullCredentials::default());
            r
        });
        for (record, repository, pulled, expected) in [
            (None, "r/x", false, Look::PolicyAllows),
            (None, "r/x", true, Look::MustAuthenticate),
            (unknown, "r/x", true, Look::MustAuthenticate),
            (empty, "r/x", true, Look::MustAuthenticate),
            (record(&[None]), "r/x", true, Look::Accessible),
            (record(&[Some(node())]), "r/x", true, Look::Accessible),
            (record(&[Some(secret("a", "h"))]), "r/x", true, Look::Compare),
            (record(&[Some(secret("a", "h"))]), "other/x", true, Look::MustAuthenticate),
            (record(&[Some(account("a"))]), "r/x", true, Look::Compare),
            (record(&[Some(secret("a", "h")), None]), "r/x", true, Look::Accessible),
            (record(&[None, Some(secret("a", "h"))]), "r/x", true, Look::Accessible),
        ] {
            assert_eq!(look(&policy, "r/x:1", repository, pulled, record.as_ref()), expected, "{record:?}");
        }
    }

    #[test]
    fn credentials_are_compared_by_content_and_by_name() {
        let known = |opened: &[Option<Credential>]| record(opened).unwrap().credential_mapping["r/x"].clone();
        let new = |name: &str, hash: &str| {
            Ok(Some(ImagePullSecret { secret: at(name), credential_hash: hash.into() }))
        };
        let one = known(&[Some(secret("a", "h"))]);
        let accounts = known(&[Some(account("a"))]);
        let broken = known(&[Some(secret("a", ""))]);
        for (known, offered, expected) in [
            (&one, vec![secret("a", "h")], Ok(None)),
            (&one, vec![secret("b", "h")], new("b", "h")),
            (&one, vec![secret("a", "changed")], new("a", "changed")),
            (&one, vec![secret("b", "other")], Err(NotAmongThem)),
            (&one, vec![secret("b", "other"), secret("c", "h")], new("c", "h")),
            (&one, vec![], Err(NotAmongThem)),
            (&one, vec![node()], Err(NotAmongThem)),
            (&one, vec![account("a")], Err(NotAmongThem)),
            (&accounts, vec![account("a")], Ok(None)),
            (&accounts, vec![account("b")], Err(NotAmongThem)),
            (&accounts, vec![secret("a", "h")], Err(NotAmongThem)),
            // A hash that could not be made is equal to none.
            (&broken, vec![secret("b", "")], Err(NotAmongThem)),
        ] {
            assert_eq!(compare(known, &offered), expected, "{known:?} {offered:?}");
        }
        let many: Vec<_> = (0..MOST_COMPARED).map(|n| Some(secret(&n.to_string(), "h"))).collect();
        let many = known(&many);
        assert_eq!(compare(&many, &[secret("new", "h")]), Ok(None), "the record is long enough");
        assert_eq!(compare(&many, &[secret("1", "changed")]), Err(NotAmongThem));
    }

    #[test]
    fn records_have_upstreams_form() {
        let record = record(&[Some(secret("b", "2")), Some(secret("a", "1")), Some(account("r"))]).unwrap();
        let text = ferrite_json::to_string(&record).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"kind":"ImagePulledRecord","apiVersion":"kubelet.config.k8s.io/v1beta1","#,
                r#""lastUpdatedTime":"1970-01-01T00:00:00Z","imageRef":"id","credentialMapping":{"r/x":{"kubernetesSecrets":["#,
                r#"{"namespace":"ns","name":"a","uid":"uid-a","credentialHash":"1"},"#,
                r#"{"namespace":"ns","name":"b","uid":"uid-b","credentialHash":"2"}],"#,
                r#""kubernetesServiceAccounts":[{"namespace":"ns","name":"r","uid":"uid-r"}]}}}"#
            )
        );
        let read: ImagePulledRecord = ferrite_json::from_str(&text).unwrap();
        assert_eq!(read, record);
        assert_eq!(
            merged(Some(&read), "id", "r/x", Some(opened_by(Some(&secret("a", "1")))), Timestamp::MAX),
            None
        );
        assert_eq!(merged(Some(&read), "id", "r/x", None, Timestamp::MAX), None);
    }
}
