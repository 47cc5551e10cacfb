//! Default roles and rules of features that are off unless a gate turns them on.

use ferrite_api::meta;
use ferrite_component::FeatureGates;
use ferrite_json::{Value, json};

const BUNDLES: &str = "ClusterTrustBundle";
const POD_CERTIFICATES: &str = "PodCertificateRequest";
const MIGRATIONS: &str = "StorageVersionMigrator";
const GROUP: &str = "certificates.k8s.io";
const NODE: &str = "system:node";

/// Adds the rules of features that are on to a default role.
pub(super) fn add_rules(object: &mut Value, gates: &FeatureGates) {
    if object["kind"] != "ClusterRole" || meta::name(object) != NODE {
        return;
    }
    let rules = [
        (
            BUNDLES,
            json!({"verbs": ["get", "list", "watch"], "apiGroups": [GROUP], "resources": ["clustertrustbundles"]}),
        ),
        (
            POD_CERTIFICATES,
            json!({"verbs": ["create", "get", "list", "watch"], "apiGroups": [GROUP], "resources": ["podcertificaterequests"]}),
        ),
    ];
    let Some(held) = object["rules"].as_array_mut() else { return };
    held.extend(rules.into_iter().filter(|(gate, _)| gates.enabled(gate)).map(|(_, rule)| rule));
}

/// The default roles and bindings of features that are on.
pub(super) fn objects(gates: &FeatureGates) -> Vec<Value> {
    let mut objects = Vec::new();
    if gates.enabled(BUNDLES) {
        let name = "system:cluster-trust-bundle-discovery";
        let read = json!({"verbs": ["get", "list", "watch"], "apiGroups": [GROUP], "resources": ["clustertrustbundles"]});
        let accounts = json!({"kind": "Group", "apiGroup": "rbac.authorization.k8s.io", "name": "system:serviceaccounts"});
        objects.extend([role(name, json!([read])), binding(name, accounts)]);
        objects.extend(controller(
            "kube-apiserver-serving-clustertrustbundle-publisher",
            json!([
                {"verbs": ["attest"], "apiGroups": [GROUP], "resources": ["signers"],
                    "resourceNames": ["kubernetes.io/kube-apiserver-serving"]},
                {"verbs": ["create", "delete", "list", "update", "watch"], "apiGroups": [GROUP],
                    "resources": ["clustertrustbundles"]},
                {"verbs": ["create", "patch", "update"], "apiGroups": ["", "events.k8s.io"], "resources": ["events"]},
            ]),
        ));
    }
    if gates.enabled(POD_CERTIFICATES) {
        objects.extend(controller(
            "podcertificaterequestcleaner",
            json!([{"verbs": ["delete", "get", "list", "watch"], "apiGroups": [GROUP],
                "resources": ["podcertificaterequests"]}]),
        ));
    }
    if gates.enabled(MIGRATIONS) {
        // A patch of an object that is gone counts as a create; it fails by the object's UID.
        objects.extend(controller(
            "storage-version-migrator-controller",
            json!([
                {"verbs": ["create", "list", "patch"], "apiGroups": ["*"], "resources": ["*"]},
                {"verbs": ["get"], "apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions"]},
                {"verbs": ["patch"], "apiGroups": ["apiextensions.k8s.io"], "resources": ["customresourcedefinitions/status"]},
                {"verbs": ["update"], "apiGroups": ["storagemigration.k8s.io"], "resources": ["storageversionmigrations/status"]},
            ]),
        ));
    }
    objects
}

/// The role of a controller's service account, and its binding.
fn controller(account: &str, rules: Value) -> [Value; 2] {
    let name = format!("system:controller:{account}");
    let subject = json!({"kind": "ServiceAccount", "name": account, "namespace": "kube-system"});
    [role(&name, rules), binding(&name, subject)]
}

fn metadata(name: &str) -> Value {
    json!({
        "name": name,
        "labels": {"kubernetes.io/bootstrapping": "rbac-defaults"},
        "annotations": {"rbac.authorization.kubernetes.io/autoupdate": "true"},
    })
}

fn role(name: &str, rules: Value) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": metadata(name), "rules": rules})
}

fn binding(name: &str, subject: Value) -> Value {
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": metadata(name),
        "subjects": [subject],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name},
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_that_are_off_give_no_rights() {
        let role = || json!({"kind": "ClusterRole", "metadata": {"name": NODE}, "rules": []});
        for (gates, rules, names) in [
            ("", vec![], vec![]),
            (
                "ClusterTrustBundle=true",
                vec!["clustertrustbundles"],
                vec![
                    "system:cluster-trust-bundle-discovery",
                    "system:controller:kube-apiserver-serving-clustertrustbundle-publisher",
                ],
            ),
            (
                "PodCertificateRequest=true",
                vec!["podcertificaterequests"],
                vec!["system:controller:podcertificaterequestcleaner"],
            ),
            (
                "StorageVersionMigrator=true",
                vec![],
                vec!["system:controller:storage-version-migrator-controller"],
            ),
        ] {
            let gates = FeatureGates::parse(gates).unwrap();
            let mut node = role();
            add_rules(&mut node, &gates);
            let found: Vec<&str> = node["rules"]
                .as_array()
                .unwrap()
                .iter()
                .filter_map(|rule| rule["resources"][0].as_str())
                .collect();
            assert_eq!(found, rules);
            let objects = objects(&gates);
            let kinds = |kind: &str| -> Vec<&str> {
                objects.iter().filter(|object| object["kind"] == kind).map(meta::name).collect()
            };
            assert_eq!(kinds("ClusterRole"), names);
            assert_eq!(kinds("ClusterRoleBinding"), names);
        }
    }
}
