//! Keeps tokens of service accounts in secrets, for users who ask for one that way.

use std::time::Duration;

use ferrite_client::{Api, Change, Informer, ListSelector, ObjectKey, is_conflict, is_not_found};
use ferrite_json::json;
use ferrite_pki::LEGACY_ISSUER;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Secret, ServiceAccount};
use kube::Client;
use kube::api::{DeleteParams, PostParams, Preconditions};

use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "serviceaccount-token-controller";
const KIND: &str = "kubernetes.io/service-account-token";
const ACCOUNT: &str = "kubernetes.io/service-account.name";
const ACCOUNT_UID: &str = "kubernetes.io/service-account.uid";

pub(crate) fn start(context: &Context) {
    let Some(signer) = context.config.tokens.clone() else { return };
    let bundle = context.config.root_ca.clone().unwrap_or_default();
    let secrets: Informer<Secret> =
        context.informers.get_selected(ListSelector::fields(format!("type={KIND}")));
    let accounts: Informer<ServiceAccount> = context.informers.get();
    let (client, known) = (context.client.clone(), secrets.clone());
    context
        .controller(NAME)
        .reconciles(&secrets)
        .watches(&accounts, move |change, queue| {
            if matches!(change, Change::Updated { .. }) {
                return;
            }
            let account = &change.object().metadata;
            for secret in known.list_in(account.namespace.as_deref().unwrap_or_default()) {
                if annotation(&secret, ACCOUNT) == account.name.as_deref().unwrap_or_default() {
                    queue.add(ObjectKey::of(&*secret));
                }
            }
        })
        .run(move |key| {
            let step = secrets.get(&key).map(|secret| {
                let account =
                    accounts.get(&ObjectKey::new(key.namespace.clone(), annotation(&secret, ACCOUNT)));
                decide(&secret, account.as_deref(), &bundle, &|claims| signer.sign(claims))
            });
            let client = client.clone();
            async move { act(&client, &key, step.unwrap_or(Step::Nothing)).await }
        });
}

fn annotation<'a>(secret: &'a Secret, key: &str) -> &'a str {
    secret.metadata.annotations.as_ref().and_then(|a| a.get(key)).map_or("", String::as_str)
}

#[derive(Debug, PartialEq)]
enum Step {
    Nothing,
    Fill(Box<Secret>),
    Delete(Preconditions),
}

/// Decides if a secret must be filled, or deleted with its account.
fn decide(
    secret: &Secret,
    account: Option<&ServiceAccount>,
    bundle: &str,
    sign: &dyn Fn(&ferrite_json::Value) -> Option<String>,
) -> Step {
    let name = annotation(secret, ACCOUNT);
    if secret.type_.as_deref() != Some(KIND)
        || name.is_empty()
        || secret.metadata.deletion_timestamp.is_some()
    {
        return Step::Nothing;
    }
    let wanted = annotation(secret, ACCOUNT_UID);
    let uid = account.and_then(|account| account.metadata.uid.as_deref()).unwrap_or_default();
    if account.is_none() || (!wanted.is_empty() && wanted != uid) {
        return Step::Delete(Preconditions {
            uid: secret.metadata.uid.clone(),
            resource_version: secret.metadata.resource_version.clone(),
        });
    }
    let namespace = secret.metadata.namespace.clone().unwrap_or_default();
    let data = secret.data.clone().unwrap_or_default();
    let mut filled = data.clone();
    filled.insert("ca.crt".into(), ByteString(bundle.into()));
    filled.insert("namespace".into(), ByteString(namespace.clone().into()));
    if filled.get("token").is_none_or(|token| token.0.is_empty()) {
        let claims = json!({
            "iss": LEGACY_ISSUER,
            "sub": format!("system:serviceaccount:{namespace}:{name}"),
            "kubernetes.io/serviceaccount/namespace": namespace,
            "kubernetes.io/serviceaccount/secret.name": secret.metadata.name,
            "kubernetes.io/serviceaccount/service-account.name": name,
            "kubernetes.io/serviceaccount/service-account.uid": uid,
        });
        let Some(token) = sign(&claims) else { return Step::Nothing };
        filled.insert("token".into(), ByteString(token.into()));
    }
    if filled == data && wanted == uid {
        return Step::Nothing;
    }
    let mut updated = secret.clone();
    updated.data = Some(filled);
    updated.metadata.annotations.get_or_insert_default().insert(ACCOUNT_UID.into(), uid.into());
    Step::Fill(Box::new(updated))
}

async fn act(client: &Client, key: &ObjectKey, step: Step) -> Result<Option<Duration>, SyncError> {
    let api: Api<Secret> = Api::namespaced(client.clone(), &key.namespace);
    let result = match step {
        Step::Nothing => return Ok(None),
        Step::Fill(secret) => api.replace(&key.name, &PostParams::default(), &secret).await.map(drop),
        Step::Delete(preconditions) => {
            let options = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            api.delete(&key.name, &options).await.map(drop)
        }
    };
    match result {
        Ok(()) => Ok(None),
        // A change of the object triggers another sync.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("keep the token in secret {key}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::Value;

    #[test]
    fn a_secret_is_filled_kept_and_goes_with_its_account() {
        let secret = |annotations: Value, data: Value| -> Secret {
            ferrite_json::from_value(json!({
                "metadata": {"name": "s", "namespace": "ns", "annotations": annotations}, "type": KIND, "data": data,
            }))
            .unwrap()
        };
        let account: ServiceAccount =
            ferrite_json::from_value(json!({"metadata": {"name": "a", "namespace": "ns", "uid": "u"}}))
                .unwrap();
        let sign = |claims: &Value| Some(format!("token for {}", claims["sub"].as_str().unwrap()));
        let fresh = secret(json!({ACCOUNT: "a"}), json!({}));
        let Step::Fill(filled) = decide(&fresh, Some(&account), "PEM", &sign) else {
            panic!("must be filled")
        };
        assert_eq!(filled.data.as_ref().unwrap()["token"].0, b"token for system:serviceaccount:ns:a");
        assert_eq!(annotation(&filled, ACCOUNT_UID), "u");
        assert_eq!(decide(&filled, Some(&account), "PEM", &sign), Step::Nothing);
        assert!(matches!(decide(&filled, None, "PEM", &sign), Step::Delete(_)));
        let other = secret(json!({ACCOUNT: "a", ACCOUNT_UID: "another"}), json!({}));
        assert!(matches!(decide(&other, Some(&account), "PEM", &sign), Step::Delete(_)));
        assert_eq!(decide(&secret(json!({}), json!({})), None, "PEM", &sign), Step::Nothing);
    }
}
