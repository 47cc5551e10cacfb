//! Waiting until a controller has attached a volume to this node.

use super::ledger::VolumeId;
use super::{Csi, CsiError};
use ferrite_client::csi::{attachment_name, unique_name};
use ferrite_client::{Api, ObjectKey, message_of};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::VolumeAttachment;
use std::collections::BTreeMap;
use std::time::Duration;

/// As upstream: after this a pod says that it waits, and goes on waiting.
const PATIENCE: Duration = Duration::from_secs(120);

impl Csi {
    /// Waits for the attachment. Returns the publish context of the driver's controller.
    pub(super) async fn attached(&self, id: &VolumeId) -> Result<BTreeMap<String, String>, CsiError> {
        let mut seen = self.shared.node_seen.clone();
        let name = unique_name(&id.driver, &id.handle);
        let key = ObjectKey::cluster(&self.shared.node_name);
        let attached = async {
            loop {
                seen.mark_unchanged();
                if self.shared.node.get(&key).is_some_and(|node| is_attached(&node, &name)) {
                    return;
                }
                if seen.changed().await.is_err() {
                    // The kubelet ends.
                    std::future::pending::<()>().await;
                }
            }
        };
        if tokio::time::timeout(PATIENCE, attached).await.is_err() {
            self.refresh_after_refusal(id).await;
            return Err(CsiError::AttachTimeout { driver: id.driver.clone(), handle: id.handle.clone() });
        }
        let attachment = attachment_name(&id.handle, &id.driver, &self.shared.node_name);
        let attachments = Api::<VolumeAttachment>::all(self.shared.client.clone());
        let object = attachments.get(&attachment).await.map_err(|e| CsiError::NotAttached {
            handle: id.handle.clone(),
            attachment: attachment.clone(),
            problem: message_of(&e),
        })?;
        publish_context(&object).map_err(|problem| CsiError::NotAttached {
            handle: id.handle.clone(),
            attachment,
            problem,
        })
    }
}

/// Returns true if the controller reports the volume as attached, and knows that this node uses it: from
/// then on it detaches the volume only when the node has stopped using it.
fn is_attached(node: &Node, name: &str) -> bool {
    let Some(status) = &node.status else { return false };
    status.volumes_in_use.iter().flatten().any(|used| used == name)
        && status.volumes_attached.iter().flatten().any(|attached| attached.name == name)
}

fn publish_context(attachment: &VolumeAttachment) -> Result<BTreeMap<String, String>, String> {
    if attachment.metadata.deletion_timestamp.is_some() {
        return Err("volume attachment is being deleted".into());
    }
    match &attachment.status {
        Some(status) if status.attached => Ok(status.attachment_metadata.clone().unwrap_or_default()),
        status => {
            let error = status.as_ref().and_then(|status| status.attach_error.as_ref());
            Err(error.and_then(|error| error.message.clone()).unwrap_or_else(|| "not attached yet".into()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    #[test]
    fn a_volume_is_attached_when_the_node_says_so_and_is_known_to_use_it() {
        let node = |used: Value, attached: Value| -> Node {
            ferrite_json::from_value(json!({"metadata": {}, "status": {
                "volumesInUse": used, "volumesAttached": attached}}))
            .unwrap()
        };
        let attached = json!([{"name": "v", "devicePath": ""}]);
        assert!(is_attached(&node(json!(["v"]), attached.clone()), "v"));
        assert!(!is_attached(&node(json!([]), attached.clone()), "v"));
        assert!(!is_attached(&node(json!(["v"]), json!([])), "v"));
        assert!(!is_attached(&node(json!(["v"]), attached), "w"));
    }

    #[test]
    fn the_attachment_must_be_whole() {
        let attachment = |metadata: Value, status: Value| -> VolumeAttachment {
            ferrite_json::from_value(json!({"metadata": metadata, "status": status, "spec": {
                "attacher": "d", "nodeName": "n", "source": {}}}))
            .unwrap()
        };
        let of = |metadata, status| publish_context(&attachment(metadata, status));
        let done = json!({"attached": true, "attachmentMetadata": {"device": "sdb"}});
        assert_eq!(of(json!({}), done.clone()), Ok([("device".to_owned(), "sdb".to_owned())].into()));
        assert!(of(json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}), done).is_err());
        assert!(of(json!({}), json!({"attached": false})).is_err());
        let refused = json!({"attached": false, "attachError": {"message": "no room"}});
        assert_eq!(of(json!({}), refused), Err("no room".to_owned()));
    }
}
