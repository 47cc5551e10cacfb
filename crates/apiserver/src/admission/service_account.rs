//! Every pod runs as a service account that exists, and gets a token of it.

use super::{Attributes, Plugin};
use crate::registry::{View, metadata};
use ferrite_api::Status;
use serde_json::{Map, Value, json};

pub(super) struct ServiceAccount;

const TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const MIRROR: &str = "kubernetes.io/config.mirror";
/// A little more than an hour: the kubelet refreshes at 80 %, so that a token lives an hour at least.
const TOKEN_SECONDS: i64 = 3607;

impl Plugin for ServiceAccount {
    fn name(&self) -> &'static str {
        "ServiceAccount"
    }

    fn mutate(&self, view: &View, attributes: &Attributes<'_>, object: &mut Value) -> Result<(), Status> {
        if !attributes.creates("pods") || is_mirror(object) {
            return Ok(());
        }
        let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return Ok(()) };
        let given = ["serviceAccountName", "serviceAccount"]
            .into_iter()
            .find_map(|k| spec.get(k).and_then(Value::as_str).filter(|s| !s.is_empty()));
        let name = given.unwrap_or("default").to_owned();
        spec.insert("serviceAccount".into(), name.clone().into());
        spec.insert("serviceAccountName".into(), name.clone().into());
        let Some(account) = view.get("", "serviceaccounts", attributes.namespace, &name) else {
            return Err(Status::forbidden(
                "",
                "pods",
                attributes.name,
                &format!(
                    "error looking up service account {}/{name}: serviceaccount {name:?} not found",
                    attributes.namespace
                ),
            ));
        };
        let wants = |o: &Map<String, Value>| o.get("automountServiceAccountToken").and_then(Value::as_bool);
        if wants(spec).or_else(|| account.as_object().and_then(wants)).unwrap_or(true) {
            mount_token(spec);
        }
        let pulls = account.get("imagePullSecrets").and_then(Value::as_array).filter(|s| !s.is_empty());
        if let Some(secrets) = pulls
            && spec.get("imagePullSecrets").and_then(Value::as_array).is_none_or(Vec::is_empty)
        {
            spec.insert("imagePullSecrets".into(), secrets.clone().into());
        }
        Ok(())
    }
}

fn is_mirror(pod: &Value) -> bool {
    pod.pointer("/metadata/annotations").and_then(Value::as_object).is_some_and(|a| a.contains_key(MIRROR))
}

/// Mounts a token into every container that has nothing else at its place.
fn mount_token(spec: &mut Map<String, Value>) {
    let volume = metadata::generate_name("kube-api-access-");
    let mut mounted = false;
    for containers in ["initContainers", "containers"] {
        for container in spec.get_mut(containers).and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(container) = container.as_object_mut() else { continue };
            let mounts = container.entry("volumeMounts").or_insert_with(|| json!([]));
            let Some(mounts) = mounts.as_array_mut() else { continue };
            if !mounts.iter().any(|m| m["mountPath"] == TOKEN_PATH) {
                mounts.push(json!({"name": volume, "readOnly": true, "mountPath": TOKEN_PATH}));
                mounted = true;
            }
        }
    }
    if !mounted {
        return;
    }
    let projected = json!({
        "name": volume,
        "projected": {
            "defaultMode": 0o644,
            "sources": [
                {"serviceAccountToken": {"expirationSeconds": TOKEN_SECONDS, "path": "token"}},
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {"downwardAPI": {"items": [{
                    "path": "namespace",
                    "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"},
                }]}},
            ],
        },
    });
    if let Some(volumes) = spec.entry("volumes").or_insert_with(|| json!([])).as_array_mut() {
        volumes.push(projected);
    }
}
