//! Signs the ConfigMap `kube-public/cluster-info` with every token that may sign. A new node reads it without
//! credentials and trusts the CA in it because its own token signed it.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_client::{Api, Informer, ListSelector, ObjectKey, is_conflict, is_not_found};
use ferrite_pki::detached_signature;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::Client;
use kube::api::PostParams;

use super::{Validity, secrets, signing_token, validity};
use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "bootstrap-signer-controller";
const MAP_NAMESPACE: &str = "kube-public";
const MAP_NAME: &str = "cluster-info";
const SIGNED_KEY: &str = "kubeconfig";
const SIGNATURE_PREFIX: &str = "jws-kubeconfig-";

pub(crate) fn start(context: &Context) {
    let secrets: Informer<Secret> = secrets(context);
    let selector = format!("metadata.namespace={MAP_NAMESPACE},metadata.name={MAP_NAME}");
    let maps: Informer<ConfigMap> = context.informers.get_selected(ListSelector::fields(selector));
    let client = context.client.clone();
    context
        .controller(NAME)
        .reconciles(&maps)
        .watches(&secrets, |_, queue| queue.add(ObjectKey::new(MAP_NAMESPACE, MAP_NAME)))
        .run(move |key| {
            let now = Timestamp::now();
            let secrets = secrets.list();
            let signed = maps.get(&key).and_then(|map| {
                let data = sign(map.data.as_ref()?, secrets.iter().map(|secret| &**secret), now)?;
                Some(ConfigMap { data: Some(data), ..(*map).clone() })
            });
            // A signature goes when its token's time is over, even if nobody removes the token.
            let ends = secrets.iter().filter_map(|secret| match validity(secret, now) {
                Validity::Until(end) => Duration::try_from(end.duration_since(now)).ok(),
                _ => None,
            });
            let next = ends.min();
            let client = client.clone();
            async move {
                if let Some(map) = signed {
                    write(client, &map).await?;
                }
                Ok::<_, SyncError>(next)
            }
        });
}

async fn write(client: Client, map: &ConfigMap) -> Result<(), SyncError> {
    let api: Api<ConfigMap> = Api::namespaced(client, MAP_NAMESPACE);
    match api.replace(MAP_NAME, &PostParams::default(), map).await {
        // Another version wakes this controller again.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
        result => result.map(drop).during(|| format!("sign {MAP_NAMESPACE}/{MAP_NAME}")),
    }
}

/// The data with one signature for each token that may sign. None if it has them already, or if there is nothing to sign.
fn sign<'a>(
    data: &BTreeMap<String, String>,
    secrets: impl Iterator<Item = &'a Secret>,
    now: Timestamp,
) -> Option<BTreeMap<String, String>> {
    let content = data.get(SIGNED_KEY)?;
    let mut signed = data.clone();
    signed.retain(|key, _| !key.starts_with(SIGNATURE_PREFIX));
    for (id, secret) in secrets.filter_map(|secret| signing_token(secret, now)) {
        signed.insert(format!("{SIGNATURE_PREFIX}{id}"), detached_signature(content, id, secret));
    }
    (signed != *data).then_some(signed)
}

#[cfg(test)]
mod tests {
    use super::super::tests::token;
    use super::*;

    #[test]
    fn signatures_follow_the_tokens() {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let plain = BTreeMap::from([("kubeconfig".to_owned(), "text".to_owned())]);
        let token = token("bootstrap-token-abcdef", &[]);
        let signed = sign(&plain, std::iter::once(&token), now).unwrap();
        assert_eq!(
            signed.keys().map(String::as_str).collect::<Vec<_>>(),
            ["jws-kubeconfig-abcdef", "kubeconfig"]
        );
        assert_eq!(sign(&signed, std::iter::once(&token), now), None, "nothing to do");
        assert_eq!(sign(&signed, std::iter::empty(), now), Some(plain.clone()), "the token is gone");
        let mut other = signed.clone();
        other.insert("kubeconfig".into(), "other".into());
        let again = sign(&other, std::iter::once(&token), now).unwrap();
        assert_ne!(again["jws-kubeconfig-abcdef"], signed["jws-kubeconfig-abcdef"]);
        assert_eq!(sign(&BTreeMap::new(), std::iter::once(&token), now), None, "nothing to sign");
    }
}
