//! The API's view of this node's drivers and volumes: the CSINode, the Node's labels and annotation,
//! `volumesInUse`.

use super::Csi;
use ferrite_client::{Api, Backoff, ObjectKey, is_already_exists, is_conflict, is_not_found, message_of};
use ferrite_csi::v1::NodeGetInfoResponse;
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::storage::v1::{CSINode, CSINodeDriver, CSINodeSpec, VolumeNodeResources};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{Patch, PatchParams, PostParams};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Annotation of a Node: the drivers' names for it, as JSON.
const NODE_IDS: &str = "csi.volume.kubernetes.io/nodeid";
/// Annotation of a CSINode: built-in plugins whose volumes a CSI driver mounts.
const MIGRATED: &str = "storage.alpha.kubernetes.io/migrated-plugins";
/// As upstream's kubelet lists them.
const MIGRATED_PLUGINS: &str = "kubernetes.io/aws-ebs,kubernetes.io/azure-disk,kubernetes.io/azure-file,kubernetes.io/cinder,kubernetes.io/gce-pd,kubernetes.io/portworx-volume,kubernetes.io/vsphere-volume";
/// Writes that others come before are tried so often.
const ATTEMPTS: usize = 10;

/// The facts of a driver are not in the API. Messages that a driver gets are upstream's.
#[derive(Debug, thiserror::Error)]
pub(super) enum NodeInfoError {
    #[error("{}", message_of(.0))]
    Api(#[from] kube::Error),
    #[error("error adding CSI driver node info: driverNodeID must not be empty")]
    NoNodeId,
    #[error("the {kind} {name:?} changes too often")]
    Conflicts { kind: &'static str, name: String },
    #[error("the Node {0:?} is not registered yet")]
    NotRegistered(String),
    #[error("failed to parse node's {NODE_IDS:?} annotation value ({text:?}) err={error}")]
    Annotation { text: String, error: ferrite_json::Error },
    #[error(
        "detected topology value collision: driver reported {key:?}:{value:?} but existing label is {key:?}:{had:?}"
    )]
    Topology { key: String, value: String, had: String },
}

impl Csi {
    /// Keeps the CSINode and `volumesInUse` until the kubelet ends.
    pub(crate) async fn report(self) {
        self.shared.node.synced().await;
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(60), 0.1);
        while let Err(problem) = self.change_drivers(|drivers| drivers).await {
            match problem {
                // At the first start of every node.
                NodeInfoError::NotRegistered(_) => tracing::debug!(%problem, "the CSINode has to wait"),
                _ => tracing::warn!(%problem, "could not make the CSINode; will try again"),
            }
            tokio::time::sleep(backoff.next_delay()).await;
        }
        let (mut seen, mut in_use) = (self.shared.node_seen.clone(), self.shared.in_use.subscribe());
        backoff.reset();
        loop {
            seen.mark_unchanged();
            let wanted = in_use.borrow_and_update().clone();
            let told = self.tell_in_use(&wanted).await;
            if let Err(problem) = &told {
                tracing::warn!(%problem, "could not report the volumes in use; will try again");
                tokio::time::sleep(backoff.next_delay()).await;
                continue;
            }
            backoff.reset();
            tokio::select! {
                changed = in_use.changed() => if changed.is_err() { return },
                changed = seen.changed() => if changed.is_err() { return },
            }
        }
    }

    async fn tell_in_use(&self, wanted: &BTreeSet<String>) -> Result<(), NodeInfoError> {
        let key = ObjectKey::cluster(&self.shared.node_name);
        let Some(node) = self.shared.node.get(&key) else { return Ok(()) };
        let told =
            node.status.as_ref().and_then(|status| status.volumes_in_use.as_deref()).unwrap_or_default();
        if told.len() == wanted.len() && told.iter().all(|name| wanted.contains(name)) {
            return Ok(());
        }
        let nodes = Api::<Node>::all(self.shared.client.clone());
        let patch = Patch::Merge(json!({"status": {"volumesInUse": wanted}}));
        let written = nodes.patch_status(&self.shared.node_name, &PatchParams::default(), &patch).await;
        match written {
            Err(e) if !is_not_found(&e) => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Publishes a driver's facts about this node. The error is for the driver.
    pub(super) async fn install(
        &self,
        driver: &str,
        info: &NodeGetInfoResponse,
    ) -> Result<(), NodeInfoError> {
        if info.node_id.is_empty() {
            return Err(NodeInfoError::NoNodeId);
        }
        let topology = info.accessible_topology.clone().unwrap_or_default().segments;
        self.change_node(|node| node_change(node, driver, Some(&info.node_id), &topology)).await?;
        let entry = CSINodeDriver {
            name: driver.to_owned(),
            node_id: info.node_id.clone(),
            topology_keys: (!topology.is_empty()).then(|| topology.keys().cloned().collect()),
            allocatable: limit(info.max_volumes_per_node)
                .map(|count| VolumeNodeResources { count: Some(count) }),
        };
        self.change_drivers(|mut drivers| {
            drivers.retain(|one| one.name != entry.name);
            drivers.push(entry.clone());
            drivers
        })
        .await
    }

    /// The driver is gone. A failure is logged: the driver registers again, or its entry stays until it does.
    pub(super) async fn uninstall(&self, driver: &str) {
        let removed = self
            .change_drivers(|mut drivers| {
                drivers.retain(|one| one.name != driver);
                drivers
            })
            .await;
        let none = BTreeMap::new();
        let forgotten = self.change_node(|node| node_change(node, driver, None, &none)).await;
        for problem in [removed.err(), forgotten.err()].into_iter().flatten() {
            tracing::warn!(driver, %problem, "could not write down that a CSI driver is gone");
        }
    }

    async fn change_node(
        &self,
        change: impl Fn(&Node) -> Result<Option<Value>, NodeInfoError>,
    ) -> Result<(), NodeInfoError> {
        let nodes = Api::<Node>::all(self.shared.client.clone());
        let name = &self.shared.node_name;
        for _ in 0..ATTEMPTS {
            let node = nodes.get(name).await?;
            let Some(mut patch) = change(&node)? else { return Ok(()) };
            patch["metadata"]["resourceVersion"] = json!(node.metadata.resource_version);
            match nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
                Ok(_) => return Ok(()),
                Err(e) if is_conflict(&e) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(NodeInfoError::Conflicts { kind: "Node", name: name.clone() })
    }

    /// Changes the drivers of the CSINode, which is made when it is missing.
    async fn change_drivers(
        &self,
        change: impl Fn(Vec<CSINodeDriver>) -> Vec<CSINodeDriver>,
    ) -> Result<(), NodeInfoError> {
        let objects = Api::<CSINode>::all(self.shared.client.clone());
        let name = &self.shared.node_name;
        for _ in 0..ATTEMPTS {
            let found = objects.get_opt(name).await?;
            let written = match found {
                Some(before) => {
                    let mut after = before.clone();
                    after.spec.drivers = change(before.spec.drivers.clone());
                    let annotations = after.metadata.annotations.get_or_insert_default();
                    annotations.insert(MIGRATED.to_owned(), MIGRATED_PLUGINS.to_owned());
                    if after == before {
                        return Ok(());
                    }
                    objects.replace(name, &PostParams::default(), &after).await
                }
                None => {
                    let node = self.shared.node.get(&ObjectKey::cluster(name));
                    let uid = node.and_then(|node| node.metadata.uid.clone());
                    let owner = uid.ok_or_else(|| NodeInfoError::NotRegistered(name.clone()))?;
                    let made = csi_node(name, owner, change(Vec::new()));
                    objects.create(&PostParams::default(), &made).await
                }
            };
            match written {
                Ok(_) => return Ok(()),
                Err(e) if is_conflict(&e) || is_already_exists(&e) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Err(NodeInfoError::Conflicts { kind: "CSINode", name: name.clone() })
    }
}

fn csi_node(name: &str, uid: String, drivers: Vec<CSINodeDriver>) -> CSINode {
    CSINode {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            annotations: Some([(MIGRATED.to_owned(), MIGRATED_PLUGINS.to_owned())].into()),
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".into(),
                kind: "Node".into(),
                name: name.to_owned(),
                uid,
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: CSINodeSpec { drivers },
    }
}

/// The number of volumes that the driver can have here; nothing for no limit. As upstream, larger ones are cut.
fn limit(count: i64) -> Option<i32> {
    (count > 0).then(|| i32::try_from(count).unwrap_or(i32::MAX))
}

/// The change to a Node: the driver's name for it, and its topology. `None` if the Node has all of it.
fn node_change(
    node: &Node,
    driver: &str,
    id: Option<&str>,
    topology: &BTreeMap<String, String>,
) -> Result<Option<Value>, NodeInfoError> {
    let text = node.metadata.annotations.as_ref().and_then(|all| all.get(NODE_IDS));
    let before: BTreeMap<String, String> = match text {
        None => BTreeMap::new(),
        Some(text) => ferrite_json::from_str(text)
            .map_err(|error| NodeInfoError::Annotation { text: text.clone(), error })?,
    };
    let mut after = before.clone();
    match id {
        Some(id) => after.insert(driver.to_owned(), id.to_owned()),
        None => after.remove(driver),
    };
    let labels = node.metadata.labels.as_ref();
    let mut added = BTreeMap::new();
    for (key, value) in topology {
        match labels.and_then(|labels| labels.get(key)) {
            Some(had) if had != value => {
                return Err(NodeInfoError::Topology {
                    key: key.clone(),
                    value: value.clone(),
                    had: had.clone(),
                });
            }
            Some(_) => {}
            None => {
                added.insert(key, value);
            }
        }
    }
    if before == after && added.is_empty() {
        return Ok(None);
    }
    let ids = if after.is_empty() { Value::Null } else { json!(json!(after).to_string()) };
    Ok(Some(json!({"metadata": {"annotations": {NODE_IDS: ids}, "labels": added}})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_name_the_node_and_place_it() {
        let node =
            |metadata: Value| -> Node { ferrite_json::from_value(json!({"metadata": metadata})).unwrap() };
        let zone = BTreeMap::from([("zone".to_owned(), "a".to_owned())]);
        let fresh = node_change(&node(json!({})), "d", Some("id"), &zone).unwrap().unwrap();
        assert_eq!(fresh["metadata"]["annotations"][NODE_IDS], r#"{"d":"id"}"#);
        assert_eq!(fresh["metadata"]["labels"]["zone"], "a");
        let had = node(json!({"labels": {"zone": "a"}, "annotations": {NODE_IDS: r#"{"d":"id"}"#}}));
        assert_eq!(node_change(&had, "d", Some("id"), &zone).unwrap(), None);
        let other = BTreeMap::from([("zone".to_owned(), "b".to_owned())]);
        assert!(node_change(&had, "d", Some("id"), &other).unwrap_err().to_string().contains("collision"));
        let gone = node_change(&had, "d", None, &BTreeMap::new()).unwrap().unwrap();
        assert_eq!(gone["metadata"]["annotations"][NODE_IDS], Value::Null);
        let odd = node(json!({"annotations": {NODE_IDS: "x"}}));
        assert!(node_change(&odd, "d", Some("id"), &zone).is_err());
    }

    #[test]
    fn limits_that_do_not_fit_are_cut() {
        for (count, expected) in [(0, None), (-1, None), (5, Some(5)), (i64::MAX, Some(i32::MAX))] {
            assert_eq!(limit(count), expected);
        }
    }
}
