//! The local-path provisioner as a part of a cluster: its rights, its StorageClass, its controller.

use crate::apiserver::{BoxError, LocalApi};
use crate::dns::ensure;
use ferrite_client::local_path::{CLASS, PROVISIONER};
use ferrite_client::{Api, message_of};
use ferrite_controllers::{Context, local_path};
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::api::storage::v1::StorageClass;

const NAMESPACE: &str = "kube-system";
const ROLE: &str = "ferrite:local-path-provisioner";

/// Makes the provisioner's account and class, and starts it. Later changes by the user stay.
pub async fn start(api: &LocalApi, context: &Context) -> Result<(), BoxError> {
    let client = api.client("system:apiserver", &["system:masters"]);
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), NAMESPACE);
    let roles = Api::<ClusterRole>::all(client.clone());
    let bindings = Api::<ClusterRoleBinding>::all(client.clone());
    let classes = Api::<StorageClass>::all(client.clone());
    let written = tokio::try_join!(
        ensure(&accounts, json!({"metadata": {"name": local_path::ACCOUNT, "namespace": NAMESPACE}})),
        ensure(&roles, role()),
        ensure(&bindings, binding()),
        ensure(&classes, class()),
    );
    written.map_err(|e| format!("cannot set up local volumes: {}", message_of(&e)))?;
    local_path::start(context);
    Ok(())
}

/// The provisioner's write rights, and no more. It reads through the controllers' informers.
fn role() -> Value {
    json!({
        "metadata": {"name": ROLE},
        "rules": [
            {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["get", "create", "update", "delete"]},
            {"apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["get", "update"]},
            {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]},
        ],
    })
}

fn binding() -> Value {
    json!({
        "metadata": {"name": ROLE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": local_path::ACCOUNT, "namespace": NAMESPACE}],
    })
}

fn class() -> Value {
    json!({
        "metadata": {
            "name": CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    })
}
