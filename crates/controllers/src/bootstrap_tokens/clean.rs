//! Removes tokens whose time is over.

use std::time::Duration;

use ferrite_client::{Api, Informer, ObjectKey, is_conflict, is_not_found};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{DeleteParams, Preconditions};

use super::{Validity, secrets, validity};
use crate::Context;
use crate::error::{During, SyncError};

const NAME: &str = "token-cleaner-controller";

pub(crate) fn start(context: &Context) {
    let secrets: Informer<Secret> = secrets(context);
    let client = context.client.clone();
    context.controller(NAME).reconciles(&secrets).run(move |key| {
        let known = secrets.get(&key);
        let client = client.clone();
        async move {
            let Some(secret) = known else { return Ok(None) };
            let now = Timestamp::now();
            match validity(&secret, now) {
                Validity::Unlimited => Ok(None),
                Validity::Until(end) => Ok(Duration::try_from(end.duration_since(now)).ok()),
                Validity::Ended => delete(client, &key, &secret).await,
            }
        }
    });
}

async fn delete(client: Client, key: &ObjectKey, secret: &Secret) -> Result<Option<Duration>, SyncError> {
    let api: Api<Secret> = Api::namespaced(client, &key.namespace);
    // A secret made anew with the same name is another token.
    let uid = secret.metadata.uid.clone();
    let params = DeleteParams::default().preconditions(Preconditions { uid, ..Preconditions::default() });
    match api.delete(&key.name, &params).await {
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(None),
        result => result.map(|()| None).during(|| format!("delete the token {key}")),
    }
}
