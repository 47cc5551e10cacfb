//! Keeps tokens of service accounts in secrets, for users who ask for one that way.

use std::sync::Arc;
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
            let secret = secrets.get(&key);
            let account = secret.as_ref().and_then(|secret| {
                accounts.get(&ObjectKey::new(key.namespace.clone(), annotation(secret, ACCOUNT)))
            });
            let (client, bundle, signer) = (client.clone(), bundle.clone(), Arc::clone(&signer));
            async move {
                let Some(secret) = secret else { return Ok(None) };
                sync(&client, &key, &secret, account.as_deref(), &|account| {
                    decide(&secret, account, &bundle, &|claims| signer.sign(claims))
                })
                .await
            }
        });
}

/// Does what `decide` says about the account that the watch shows. The watches of secrets and of accounts are not in step, so a
/// secret is only deleted if the server does not have its account either.
async fn sync(
    client: &Client,
    key: &ObjectKey,
    secret: &Secret,
    account: Option<&ServiceAccount>,
    decide: &(dyn Fn(Option<&ServiceAccount>) -> Step + Send + Sync),
) -> Result<Option<Duration>, SyncError> {
    let mut step = decide(account);
    if matches!(step, Step::Delete(_)) {
        let name = annotation(secret, ACCOUNT);
        let live: Api<ServiceAccount> = Api::namespaced(client.clone(), &key.namespace);
        let live = match live.get(name).await {
            Ok(account) => Some(account),
            Err(error) if is_not_found(&error) => None,
            Err(error) => {
                return Err(error).during(|| format!("read service account {}/{name}", key.namespace));
            }
        };
        step = decide(live.as_ref());
    }
    act(client, key, step).await
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
    use kube::client::Body;
    use std::convert::Infallible;
    use std::sync::Mutex;

    #[tokio::test]
    async fn an_account_that_the_watch_does_not_show_yet_keeps_its_secret() {
        let account = |uid: &str| {
            json!({"kind": "ServiceAccount", "apiVersion": "v1",
            "metadata": {"name": "a", "namespace": "ns", "uid": uid}})
        };
        for (case, live, expected) in [
            ("not shown yet", Some(account("u")), "PUT"),
            ("gone", None, "DELETE"),
            ("another one", Some(account("other")), "DELETE"),
        ] {
            let written: Arc<Mutex<Vec<String>>> = Arc::default();
            let noted = Arc::clone(&written);
            let service = tower::service_fn(move |request: http::Request<Body>| {
                let (noted, live) = (Arc::clone(&noted), live.clone());
                async move {
                    let (code, response) = match request.method().as_str() {
                        "GET" => match live {
                            Some(account) => (200, account),
                            None => (
                                404,
                                json!({"kind": "Status", "status": "Failure", "reason": "NotFound",
                                "message": "", "code": 404}),
                            ),
                        },
                        method => {
                            noted.lock().unwrap().push(method.to_owned());
                            (200, json!({"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "s"}}))
                        }
                    };
                    let bytes = ferrite_json::to_vec(&response).expect("a response");
                    let response = http::Response::builder().status(code).body(Body::from(bytes));
                    Ok::<_, Infallible>(response.expect("a response"))
                }
            });
            let client = Client::new(service, "default");
            let secret: Secret = ferrite_json::from_value(json!({"type": KIND, "metadata": {"name": "s",
                "namespace": "ns", "annotations": {ACCOUNT: "a", ACCOUNT_UID: "u"}}}))
            .unwrap();
            let step = |account: Option<&ServiceAccount>| {
                decide(&secret, account, "PEM", &|_| Some("token".to_owned()))
            };
            sync(&client, &ObjectKey::of(&secret), &secret, None, &step).await.unwrap();
            assert_eq!(*written.lock().unwrap(), [expected], "{case}");
        }
    }

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
