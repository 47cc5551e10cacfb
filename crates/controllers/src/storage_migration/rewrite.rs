//! Has the server write every object of a resource anew.

use ferrite_client::{Api, is_conflict, message_of};
use ferrite_json::json;
use kube::Client;
use kube::api::{DynamicObject, ListParams, Patch, PatchParams};
use kube::core::{ObjectMeta, PartialObjectMeta};

use super::NAME;
use crate::discovery::Served;
use crate::error::{During, SyncError};

/// Objects of one page of a list.
const PAGE: u32 = 500;

type Metadata = PartialObjectMeta<DynamicObject>;

pub(super) enum Outcome {
    Done,
    /// The server will never take the write of an object.
    Refused(String),
}

/// The version that the store has now, as every list has it.
pub(super) async fn current_version(client: &Client, served: &Served) -> Result<String, SyncError> {
    let api: Api<Metadata> = Api::all_with(client.clone(), &served.resource);
    let list = api.list(&ListParams::default().limit(1)).await;
    let list = list.during(|| format!("read the latest version of {}", served.resource.plural))?;
    Ok(list.metadata.resource_version.unwrap_or_default())
}

/// Applies nothing to each object that was last written at version `until` or before: the server stores it again in
/// its present form. Errors that may pass end the walk; the next one passes over all that was written.
pub(super) async fn rewrite(client: &Client, served: &Served, until: &str) -> Result<Outcome, SyncError> {
    let Ok(until) = until.parse::<u64>() else {
        return Ok(Outcome::Refused(format!("invalid resource version {until:?}")));
    };
    let all: Api<Metadata> = Api::all_with(client.clone(), &served.resource);
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let list = all.list(&page).await.during(|| format!("list {}", served.resource.plural))?;
        for object in &list.items {
            let metadata = &object.metadata;
            let version =
                metadata.resource_version.as_deref().and_then(|version| version.parse::<u64>().ok());
            if version.is_some_and(|version| version > until) {
                continue;
            }
            if let Some(why) = touch(client, served, metadata).await? {
                return Ok(Outcome::Refused(why));
            }
        }
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(Outcome::Done),
        }
    }
}

/// The reason if the server refuses the write for good.
async fn touch(client: &Client, served: &Served, metadata: &ObjectMeta) -> Result<Option<String>, SyncError> {
    let name = metadata.name.clone().unwrap_or_default();
    let api: Api<DynamicObject> = match metadata.namespace.as_deref() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &served.resource),
        None => Api::all_with(client.clone(), &served.resource),
    };
    // With UID and version, an object that was deleted is not created, and one that was made anew is left alone.
    let nothing = json!({
        "apiVersion": served.resource.api_version, "kind": served.resource.kind,
        "metadata": {"uid": metadata.uid, "resourceVersion": metadata.resource_version},
    });
    match api.patch_unread(&name, &PatchParams::apply(NAME), &Patch::Apply(nothing)).await {
        Ok(()) => Ok(None),
        // Somebody else wrote or deleted it: it is not old any more.
        Err(error) if is_conflict(&error) => Ok(None),
        Err(error) if may_pass(&error) => Err(error).during(|| format!("migrate {name}")),
        Err(error) => Ok(Some(message_of(&error))),
    }
}

/// True for errors of the connection and for those of a server that is busy or ends.
fn may_pass(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => matches!(status.code, 408 | 429 | 500 | 503 | 504),
        _ => true,
    }
}
