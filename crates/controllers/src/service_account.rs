//! Gives every namespace the ServiceAccount `default`.

use std::time::Duration;

use ferrite_client::{Api, Change, Informer, ObjectKey, is_already_exists};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Client;
use kube::api::PostParams;

use crate::error::{During, SyncError, is_namespace_terminating};
use crate::{Context, namespace};

const NAME: &str = "serviceaccount-controller";
const DEFAULT: &str = "default";

pub(crate) fn start(context: &Context) {
    let namespaces: Informer<Namespace> = context.informers.get();
    let accounts: Informer<ServiceAccount> = context.informers.get();
    let client = context.client.clone();
    context
        .controller(NAME)
        .reconciles(&namespaces)
        .watches(&accounts, |change, queue| {
            if let Change::Deleted(account) = change {
                queue.add(ObjectKey::cluster(account.metadata.namespace.clone().unwrap_or_default()));
            }
        })
        .run(move |key| {
            let wanted = namespaces.get(&key).is_some_and(|namespace| namespace::is_active(&namespace))
                && accounts.get(&ObjectKey::new(key.name.clone(), DEFAULT)).is_none();
            let client = client.clone();
            async move { if wanted { create(client, &key.name).await } else { Ok(None) } }
        });
}

async fn create(client: Client, namespace: &str) -> Result<Option<Duration>, SyncError> {
    let account = ServiceAccount {
        metadata: ObjectMeta {
            name: Some(DEFAULT.to_owned()),
            namespace: Some(namespace.to_owned()),
            ..ObjectMeta::default()
        },
        ..ServiceAccount::default()
    };
    match Api::namespaced(client, namespace).create(&PostParams::default(), &account).await {
        Ok(_) => Ok(None),
        Err(error) if is_already_exists(&error) || is_namespace_terminating(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("create service account {namespace}/{DEFAULT}")),
    }
}
