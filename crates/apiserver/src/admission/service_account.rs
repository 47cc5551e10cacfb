//! Every pod runs as a service account that exists, and gets a token of it.

use super::{Attributes, Plugin};
use crate::auth::node::references;
use crate::registry::{View, metadata};
use ferrite_api::Status;
use ferrite_api::meta_validation::path_segment;
use ferrite_api::quota::amounts::list;
use ferrite_json::{Map, Value, json};

pub(super) struct ServiceAccount;

const TOKEN_PATH: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// Annotation of accounts whose pods may use only the secrets that the account lists.
const ENFORCED: &str = "kubernetes.io/enforce-mountable-secrets";
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
        spec.insert("serviceAccount", name.clone().into());
        spec.insert("serviceAccountName", name.clone().into());
        let Some(account) = view.get("", "serviceaccounts", attributes.namespace, &name) else {
            let problems = path_segment(&name);
            let why = match problems.is_empty() {
                true => format!("serviceaccount {name:?} not found"),
                // As upstream: such a name is not even asked for.
                false => format!("invalid resource name {name:?}: [{}]", problems.join(" ")),
            };
            let why = format!("error looking up service account {}/{name}: {why}", attributes.namespace);
            return Err(Status::forbidden("", "pods", attributes.name, &why));
        };
        let wants = |o: &Map| o.get("automountServiceAccountToken").and_then(Value::as_bool);
        if wants(spec).or_else(|| account.as_object().and_then(wants)).unwrap_or(true) {
            mount_token(spec);
        }
        let pulls = account.get("imagePullSecrets").and_then(Value::as_array).filter(|s| !s.is_empty());
        if let Some(secrets) = pulls
            && spec.get("imagePullSecrets").and_then(Value::as_array).is_none_or(Vec::is_empty)
        {
            spec.insert("imagePullSecrets", secrets.clone().into());
        }
        Ok(())
    }

    fn validate(
        &self,
        view: &View,
        attributes: &Attributes<'_>,
        object: Option<&Value>,
    ) -> Result<(), Status> {
        let debugs = attributes.is_sub("", "pods", Some("ephemeralcontainers"));
        let Some(pod) = object.filter(|_| attributes.creates("pods") || debugs) else { return Ok(()) };
        let spec = &pod["spec"];
        if is_mirror(pod) && !debugs {
            return refused_mirror(spec).map_or(Ok(()), |why| Err(attributes.forbid(why)));
        }
        let name = spec["serviceAccountName"].as_str().unwrap_or_default();
        let account = view.get("", "serviceaccounts", attributes.namespace, name);
        let Some(account) = account.filter(|a| a["metadata"]["annotations"][ENFORCED] == "true") else {
            return Ok(());
        };
        foreign_secret(spec, &account, debugs).map_or(Ok(()), |why| Err(attributes.forbid(why)))
    }
}

/// Mirrors show pods that the API cannot change: they must not need anything from it.
fn refused_mirror(spec: &Value) -> Option<&'static str> {
    if spec["serviceAccountName"].as_str().is_some_and(|name| !name.is_empty()) {
        return Some("a mirror pod may not reference service accounts");
    }
    let mut secrets = false;
    references(spec, "secrets", &mut |_| secrets = true);
    if secrets {
        return Some("a mirror pod may not reference secrets");
    }
    let sources = list(spec, "volumes").iter().flat_map(|volume| list(&volume["projected"], "sources"));
    sources
        .into_iter()
        .any(|source| source["serviceAccountToken"].is_object())
        .then_some("a mirror pod may not use service account token volume projections")
}

/// The reason why a pod may not use a secret, if its account lists the allowed ones. With `debugs`, only
/// containers that are added to a pod are checked.
fn foreign_secret(spec: &Value, account: &Value, debugs: bool) -> Option<String> {
    let named = |key: &str| -> Vec<&str> {
        list(account, key).iter().filter_map(|reference| reference["name"].as_str()).collect()
    };
    let (secrets, pulls) = (named("secrets"), named("imagePullSecrets"));
    let who = account["metadata"]["name"].as_str().unwrap_or_default();
    let refuse = |what: String, kind: &str| {
        Some(format!("{what} is not allowed because service account {who} does not reference that {kind}"))
    };
    let is_foreign = |name: &&str| !secrets.contains(name);
    let kinds: &[(&str, &str)] = match debugs {
        true => &[("ephemeralContainers", "ephemeral container")],
        false => &[("initContainers", "init container"), ("containers", "container")],
    };
    if !debugs {
        let mut volumes = list(spec, "volumes").iter().filter_map(|v| v["secret"]["secretName"].as_str());
        if let Some(name) = volumes.find(is_foreign) {
            return refuse(format!("volume with secret.secretName={name:?}"), "secret");
        }
    }
    for (key, kind) in kinds {
        for container in list(spec, key) {
            let of = container["name"].as_str().unwrap_or_default();
            for variable in list(container, "env") {
                let name = variable["valueFrom"]["secretKeyRef"]["name"].as_str();
                if let Some(name) = name.filter(is_foreign) {
                    let variable = variable["name"].as_str().unwrap_or_default();
                    let what =
                        format!("{kind} {of} with envVar {variable} referencing secret.secretName={name:?}");
                    return refuse(what, "secret");
                }
            }
            let mut sources =
                list(container, "envFrom").iter().filter_map(|s| s["secretRef"]["name"].as_str());
            if let Some(name) = sources.find(is_foreign) {
                return refuse(
                    format!("{kind} {of} with envFrom referencing secret.secretName={name:?}"),
                    "secret",
                );
            }
        }
    }
    if debugs {
        return None;
    }
    let mut given = list(spec, "imagePullSecrets").iter().filter_map(|s| s["name"].as_str()).enumerate();
    let (index, name) = given.find(|(_, name)| !pulls.contains(name))?;
    refuse(format!("imagePullSecrets[{index}].name={name:?}"), "imagePullSecret")
}

fn is_mirror(pod: &Value) -> bool {
    pod.pointer("/metadata/annotations").and_then(Value::as_object).is_some_and(|a| a.contains_key(MIRROR))
}

/// Mounts a token into every container that has nothing else at its place.
fn mount_token(spec: &mut Map) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mirrors_need_nothing_of_the_api() {
        for (spec, why) in [
            (json!({"containers": []}), None),
            (json!({"serviceAccountName": "a"}), Some("a mirror pod may not reference service accounts")),
            (json!({"imagePullSecrets": [{"name": "p"}]}), Some("a mirror pod may not reference secrets")),
            (
                json!({"volumes": [{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}),
                Some("a mirror pod may not use service account token volume projections"),
            ),
        ] {
            assert_eq!(refused_mirror(&spec), why, "{spec}");
        }
    }

    #[test]
    fn only_listed_secrets_are_used() {
        let account = json!({"metadata": {"name": "sa"}, "secrets": [{"name": "own"}], "imagePullSecrets": [{"name": "pull"}]});
        let env = |name: &str| json!([{"name": "c", "env": [{"name": "E", "valueFrom": {"secretKeyRef": {"name": name, "key": "k"}}}]}]);
        for (spec, debugs, why) in [
            (json!({"containers": env("own"), "imagePullSecrets": [{"name": "pull"}]}), false, None),
            (
                json!({"volumes": [{"name": "v", "secret": {"secretName": "x"}}]}),
                false,
                Some(
                    "volume with secret.secretName=\"x\" is not allowed because service account sa does not reference that secret",
                ),
            ),
            (
                json!({"initContainers": env("x")}),
                false,
                Some(
                    "init container c with envVar E referencing secret.secretName=\"x\" is not allowed because service account sa does not reference that secret",
                ),
            ),
            (
                json!({"containers": [{"name": "c", "envFrom": [{"secretRef": {"name": "x"}}]}]}),
                false,
                Some(
                    "container c with envFrom referencing secret.secretName=\"x\" is not allowed because service account sa does not reference that secret",
                ),
            ),
            (
                json!({"imagePullSecrets": [{"name": "pull"}, {"name": "own"}]}),
                false,
                Some(
                    "imagePullSecrets[1].name=\"own\" is not allowed because service account sa does not reference that imagePullSecret",
                ),
            ),
            (
                json!({"ephemeralContainers": env("x"), "containers": env("x")}),
                true,
                Some(
                    "ephemeral container c with envVar E referencing secret.secretName=\"x\" is not allowed because service account sa does not reference that secret",
                ),
            ),
        ] {
            assert_eq!(foreign_secret(&spec, &account, debugs).as_deref(), why, "{spec}");
        }
    }
}
