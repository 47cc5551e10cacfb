//! Decides the provisioner's actions for a claim, a volume and a node.

use std::collections::BTreeSet;

use ferrite_client::local_path::{
    DIRECTORY, FINALIZER, MOST_NAMES, NODE, PROVISIONER, REMOVE, REMOVED, annotation as node_annotation,
    names,
};
use k8s_openapi::api::core::v1::{
    LocalVolumeSource, Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, ObjectReference,
    PersistentVolume, PersistentVolumeClaim, PersistentVolumeSpec, VolumeNodeAffinity,
};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::volume::objects::{
    PROVISIONED_BY, SELECTED_NODE, STORAGE_PROVISIONER, annotation, claim_class, name, reclaim_policy, uid,
    volume_name, volume_phase, waits_for_consumer,
};

const HOSTNAME: &str = "kubernetes.io/hostname";

/// Why a claim gets no volume.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "the class must have volumeBindingMode WaitForFirstConsumer: a local volume is made on its pod's node"
    )]
    Immediate,
    #[error("claims with a selector cannot be provisioned")]
    Selector,
    #[error("claims with a data source cannot be provisioned")]
    DataSource,
    #[error("only volumeMode Filesystem is supported")]
    Block,
    #[error("access mode {0} is not supported: a local volume is on one node; use ReadWriteOnce")]
    AccessMode(String),
    #[error("mount options of the class are not supported")]
    MountOptions,
    #[error("node {0} has no directory for local volumes")]
    NoDirectory(String),
}

/// The next step for a claim.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ClaimStep {
    Nothing,
    /// A pod of the claim was put on this node by somebody other than the scheduler.
    SelectNode(String),
    /// The node is gone: the scheduler must choose again.
    Deselect,
    Provision(Box<PersistentVolume>),
    Refuse(Refusal),
}

/// Decides about a claim. `node` is the selected node, `pod_node` the node of a pod that uses the claim.
pub(crate) fn claim_step(
    claim: &PersistentVolumeClaim,
    class: Option<&StorageClass>,
    node: Option<&Node>,
    pod_node: Option<&str>,
) -> ClaimStep {
    let Some(class) = class.filter(|class| class.provisioner == PROVISIONER) else {
        return ClaimStep::Nothing;
    };
    if !volume_name(claim).is_empty() || claim.metadata.deletion_timestamp.is_some() {
        return ClaimStep::Nothing;
    }
    let Some(selected) = annotation(&claim.metadata, SELECTED_NODE) else {
        return match pod_node {
            _ if !waits_for_consumer(class) => ClaimStep::Refuse(Refusal::Immediate),
            Some(node) => ClaimStep::SelectNode(node.to_owned()),
            None => ClaimStep::Nothing,
        };
    };
    // The binder hands the claim over when no volume that exists suits it.
    if annotation(&claim.metadata, STORAGE_PROVISIONER) != Some(PROVISIONER) {
        return ClaimStep::Nothing;
    }
    if let Err(refusal) = check(claim, class) {
        return ClaimStep::Refuse(refusal);
    }
    let Some(node) = node else { return ClaimStep::Deselect };
    match node_annotation(node, DIRECTORY) {
        Some(directory) if directory.starts_with('/') => {
            ClaimStep::Provision(Box::new(volume_for(claim, class, node, directory)))
        }
        _ => ClaimStep::Refuse(Refusal::NoDirectory(selected.to_owned())),
    }
}

fn check(claim: &PersistentVolumeClaim, class: &StorageClass) -> Result<(), Refusal> {
    let spec = claim.spec.clone().unwrap_or_default();
    if spec.selector.is_some() {
        return Err(Refusal::Selector);
    }
    if spec.data_source.is_some() || spec.data_source_ref.is_some() {
        return Err(Refusal::DataSource);
    }
    if spec.volume_mode.as_deref() == Some("Block") {
        return Err(Refusal::Block);
    }
    let modes = spec.access_modes.unwrap_or_default();
    if let Some(mode) = modes.iter().find(|m| !matches!(m.as_str(), "ReadWriteOnce" | "ReadWriteOncePod")) {
        return Err(Refusal::AccessMode(mode.clone()));
    }
    if class.mount_options.as_ref().is_some_and(|options| !options.is_empty()) {
        return Err(Refusal::MountOptions);
    }
    Ok(())
}

/// The volume of a claim: a directory of the node, reserved for the claim.
fn volume_for(
    claim: &PersistentVolumeClaim,
    class: &StorageClass,
    node: &Node,
    directory: &str,
) -> PersistentVolume {
    let spec = claim.spec.clone().unwrap_or_default();
    let volume = format!("pvc-{}", uid(&claim.metadata));
    let node_name = name(&node.metadata);
    let labels = node.metadata.labels.as_ref();
    let hostname = labels.and_then(|labels| labels.get(HOSTNAME)).map_or(node_name, String::as_str);
    PersistentVolume {
        metadata: ObjectMeta {
            name: Some(volume.clone()),
            annotations: Some(
                [(PROVISIONED_BY, PROVISIONER), (NODE, node_name)]
                    .map(|(key, value)| (key.to_owned(), value.to_owned()))
                    .into(),
            ),
            finalizers: Some(vec![FINALIZER.to_owned()]),
            ..ObjectMeta::default()
        },
        spec: Some(PersistentVolumeSpec {
            capacity: spec.resources.and_then(|resources| resources.requests),
            access_modes: spec.access_modes,
            claim_ref: Some(ObjectReference {
                api_version: Some("v1".into()),
                kind: Some("PersistentVolumeClaim".into()),
                namespace: claim.metadata.namespace.clone(),
                name: claim.metadata.name.clone(),
                uid: claim.metadata.uid.clone(),
                ..ObjectReference::default()
            }),
            persistent_volume_reclaim_policy: Some(
                class.reclaim_policy.clone().unwrap_or_else(|| "Delete".into()),
            ),
            storage_class_name: Some(claim_class(claim).to_owned()),
            volume_mode: Some("Filesystem".into()),
            local: Some(LocalVolumeSource {
                path: format!("{}/{volume}", directory.trim_end_matches('/')),
                fs_type: None,
            }),
            node_affinity: Some(VolumeNodeAffinity {
                required: Some(NodeSelector {
                    node_selector_terms: vec![NodeSelectorTerm {
                        match_expressions: Some(vec![NodeSelectorRequirement {
                            key: HOSTNAME.into(),
                            operator: "In".into(),
                            values: Some(vec![hostname.to_owned()]),
                        }]),
                        match_fields: None,
                    }],
                }),
            }),
            ..PersistentVolumeSpec::default()
        }),
        status: None,
    }
}

/// The next step for a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VolumeStep {
    Nothing,
    /// Deletes the object; the finalizer keeps it until its data is gone.
    Delete,
    /// Puts the volume on the list of the node that has the data.
    Ask {
        node: String,
    },
    /// Removes the finalizer, so that the object goes.
    Release,
}

/// Decides about a volume. `node` is the node of its annotation, as the API server has it now.
pub(crate) fn volume_step(volume: &PersistentVolume, node: Option<&Node>) -> VolumeStep {
    if annotation(&volume.metadata, PROVISIONED_BY) != Some(PROVISIONER) {
        return VolumeStep::Nothing;
    }
    let deletes = reclaim_policy(volume) == "Delete";
    if volume.metadata.deletion_timestamp.is_none() {
        return match volume_phase(volume) {
            "Released" if deletes => VolumeStep::Delete,
            _ => VolumeStep::Nothing,
        };
    }
    let held = volume.metadata.finalizers.iter().flatten().any(|finalizer| finalizer == FINALIZER);
    if !held || volume_phase(volume) == "Bound" {
        return VolumeStep::Nothing;
    }
    // An administrator who deletes a volume that is to be retained keeps the data. The data of a node that is gone went
    // with it.
    let (true, Some(node)) = (deletes, node) else { return VolumeStep::Release };
    let volume = name(&volume.metadata);
    if names(node, REMOVED).contains(volume) {
        return VolumeStep::Release;
    }
    let asked = names(node, REMOVE);
    match asked.contains(volume) || asked.len() >= MOST_NAMES {
        true => VolumeStep::Nothing,
        false => VolumeStep::Ask { node: name(&node.metadata).to_owned() },
    }
}

/// The node's list without volumes that no longer exist; none if it is right.
pub(crate) fn node_step(node: &Node, exists: impl Fn(&str) -> bool) -> Option<BTreeSet<String>> {
    let asked = names(node, REMOVE);
    let left: BTreeSet<String> = asked.iter().filter(|volume| exists(volume)).cloned().collect();
    (left != asked).then_some(left)
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
