//! Publishes the cluster's CA to every namespace, so that pods can verify the API server.

use std::collections::BTreeMap;
use std::time::Duration;

use ferrite_client::{Api, Informer, ListSelector, ObjectKey, is_already_exists, is_not_found};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::PostParams;

use crate::error::{During, SyncError, is_namespace_terminating};
use crate::{Context, namespace};

const NAME: &str = "root-ca-certificate-publisher-controller";
const CONFIG_MAP: &str = "kube-root-ca.crt";
const DESCRIPTION: &str = "Contains a CA bundle that can be used to verify the kube-apiserver when using internal \
     endpoints such as the internal service IP or kubernetes.default.svc. No other usage is guaranteed across \
     distributions of Kubernetes clusters.";

pub(crate) fn start(context: &Context) {
    let Some(bundle) = context.config.root_ca.clone() else { return };
    let namespaces: Informer<Namespace> = context.informers.get();
    let maps: Informer<ConfigMap> =
        context.informers.get_selected(ListSelector::fields(format!("metadata.name={CONFIG_MAP}")));
    let client = context.client.clone();
    context
        .controller(NAME)
        .reconciles(&namespaces)
        .watches(&maps, |change, queue| {
            queue.add(ObjectKey::cluster(change.object().metadata.namespace.clone().unwrap_or_default()));
        })
        .run(move |key| {
            let active = namespaces.get(&key).is_some_and(|namespace| namespace::is_active(&namespace));
            let current = maps.get(&ObjectKey::new(key.name.clone(), CONFIG_MAP));
            let step = if active { decide(current.as_deref(), &key.name, &bundle) } else { Step::Nothing };
            let client = client.clone();
            async move { act(client, &key.name, step).await }
        });
}

#[derive(Debug, PartialEq)]
enum Step {
    Nothing,
    Create(Box<ConfigMap>),
    Replace(Box<ConfigMap>),
}

fn decide(current: Option<&ConfigMap>, namespace: &str, bundle: &str) -> Step {
    let data = BTreeMap::from([("ca.crt".to_owned(), bundle.to_owned())]);
    let annotations = BTreeMap::from([("kubernetes.io/description".to_owned(), DESCRIPTION.to_owned())]);
    match current {
        None => Step::Create(Box::new(ConfigMap {
            metadata: ObjectMeta {
                name: Some(CONFIG_MAP.to_owned()),
                namespace: Some(namespace.to_owned()),
                annotations: Some(annotations),
                ..ObjectMeta::default()
            },
            data: Some(data),
            ..ConfigMap::default()
        })),
        Some(current) if current.data.as_ref() == Some(&data) => Step::Nothing,
        Some(current) => {
            let mut updated = current.clone();
            updated.data = Some(data);
            updated.metadata.annotations.get_or_insert_default().extend(annotations);
            Step::Replace(Box::new(updated))
        }
    }
}

async fn act(client: Client, namespace: &str, step: Step) -> Result<Option<Duration>, SyncError> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let result = match step {
        Step::Nothing => return Ok(None),
        Step::Create(map) => api.create(&PostParams::default(), &map).await,
        Step::Replace(map) => api.replace(CONFIG_MAP, &PostParams::default(), &map).await,
    };
    match result {
        Ok(_) => Ok(None),
        Err(e) if is_already_exists(&e) || is_not_found(&e) || is_namespace_terminating(&e) => Ok(None),
        Err(error) => Err(error).during(|| format!("publish {namespace}/{CONFIG_MAP}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundle_is_made_kept_and_restored() {
        let Step::Create(made) = decide(None, "ns", "PEM") else { panic!("not created") };
        assert_eq!(made.data.as_ref().unwrap()["ca.crt"], "PEM");
        assert_eq!(decide(Some(&made), "ns", "PEM"), Step::Nothing);
        let mut spoiled = *made;
        spoiled.data.as_mut().unwrap().insert("more".into(), String::new());
        let Step::Replace(restored) = decide(Some(&spoiled), "ns", "NEW") else { panic!("not restored") };
        assert_eq!(restored.data.unwrap(), BTreeMap::from([("ca.crt".to_owned(), "NEW".to_owned())]));
    }
}
