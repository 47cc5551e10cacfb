//! What a client is told about a valid specification: fields that are deprecated, do nothing, or hide others.

use crate::field::Path;
use crate::kinds::access::{int, list, map, present, text};
use crate::quantity::Quantity;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Labels of nodes that have newer names, and since when.
const OLD_LABELS: &[(&str, &str, &str)] = &[
    ("beta.kubernetes.io/arch", "v1.14", "kubernetes.io/arch"),
    ("beta.kubernetes.io/os", "v1.14", "kubernetes.io/os"),
    ("failure-domain.beta.kubernetes.io/region", "v1.17", "topology.kubernetes.io/region"),
    ("failure-domain.beta.kubernetes.io/zone", "v1.17", "topology.kubernetes.io/zone"),
    ("beta.kubernetes.io/instance-type", "v1.17", "node.kubernetes.io/instance-type"),
];

/// Sources of volumes that are going or gone.
const OLD_VOLUMES: &[(&str, &str)] = &[
    ("photonPersistentDisk", "deprecated in v1.11, non-functional in v1.16+"),
    ("gitRepo", "deprecated in v1.11, and disabled by default in v1.33+"),
    ("scaleIO", "deprecated in v1.16, non-functional in v1.22+"),
    ("flocker", "deprecated in v1.22, non-functional in v1.25+"),
    ("storageOS", "deprecated in v1.22, non-functional in v1.25+"),
    ("quobyte", "deprecated in v1.22, non-functional in v1.25+"),
    ("glusterfs", "deprecated in v1.25, non-functional in v1.26+"),
    ("cephfs", "deprecated in v1.28, non-functional in v1.31+"),
    ("rbd", "deprecated in v1.28, non-functional in v1.31+"),
];

const NULL_SELECTOR: &str = "a null labelSelector results in matching no pod";

/// Warnings about a specification, of a pod or of a template.
pub fn warnings(spec: &Value, path: &Path) -> Vec<String> {
    let mut warnings = node_label_warnings(spec, path);
    for (index, constraint) in list(spec, "topologySpreadConstraints").iter().enumerate() {
        if !present(constraint, "labelSelector") {
            let place = path.child("topologySpreadConstraints").index(index).child("labelSelector");
            warnings.push(format!("{place}: {NULL_SELECTOR}"));
        }
    }
    warnings.extend(repetition_warnings(spec, path));
    for (index, volume) in list(spec, "volumes").iter().enumerate() {
        for (kind, when) in OLD_VOLUMES {
            let key = if *kind == "storageOS" { "storageos" } else { kind };
            if present(volume, key) {
                warnings.push(format!("{}: {when}", path.child("volumes").index(index).child(kind)));
            }
        }
    }
    for kind in ["initContainers", "containers"] {
        for (index, container) in list(spec, kind).iter().enumerate() {
            warnings.extend(container_warnings(container, &path.child(kind).index(index)));
        }
    }
    if int(spec, "terminationGracePeriodSeconds") < 0 {
        warnings.push(format!(
            "{}: must be >= 0; negative values are invalid and will be treated as 1",
            path.child("terminationGracePeriodSeconds")
        ));
    }
    warnings
}

fn old_label(key: &str) -> Option<String> {
    let (_, since, instead) = OLD_LABELS.iter().find(|(old, _, _)| *old == key)?;
    Some(format!("deprecated since {since}; use {instead:?} instead"))
}

fn node_label_warnings(spec: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for key in map(spec, "nodeSelector").into_iter().flat_map(Map::keys) {
        if let Some(why) = old_label(key) {
            warnings.push(format!("{}: {why}", path.child("nodeSelector").key(key)));
        }
    }
    let mut terms = |terms: &[&Value], path: &Path| {
        for (index, term) in terms.iter().enumerate() {
            for (expression_index, expression) in list(term, "matchExpressions").iter().enumerate() {
                if let Some(why) = old_label(text(expression, "key")) {
                    let place =
                        path.index(index).child("matchExpressions").index(expression_index).child("key");
                    warnings.push(format!("{place}: {} is {why}", text(expression, "key")));
                }
            }
        }
    };
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    let required = &spec["affinity"]["nodeAffinity"][REQUIRED];
    let required_path =
        path.child("affinity").child("nodeAffinity").child(REQUIRED).child("nodeSelectorTerms");
    terms(&list(required, "nodeSelectorTerms").iter().collect::<Vec<_>>(), &required_path);
    warnings
}

/// Entries of lists that stand twice, or have no name.
fn repetition_warnings(spec: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for (key, field, what) in [("hostAliases", "ip", "ip"), ("imagePullSecrets", "name", "name")] {
        let entries = list(spec, key);
        for (index, entry) in entries.iter().enumerate() {
            let value = text(entry, field);
            let place = path.child(key).index(index).child(field);
            if key == "imagePullSecrets" && value.is_empty() {
                warnings.push(format!("{place}: invalid empty name \"\""));
            } else if entries[..index].iter().any(|e| text(e, field) == value) {
                warnings.push(format!("{place}: duplicate {what} {value:?}"));
            }
        }
    }
    warnings
}

fn container_warnings(container: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for amounts in ["limits", "requests"] {
        for (name, amount) in map(&container["resources"], amounts).into_iter().flatten() {
            let fractional =
                amount.as_str().and_then(|a| Quantity::parse(a).ok()).is_some_and(|q| !q.is_integer());
            if matches!(name.as_str(), "memory" | "ephemeral-storage") && fractional {
                let place = path.child("resources").child(amounts).key(name);
                warnings
                    .push(format!("{place}: fractional byte value {amount} is invalid, must be an integer"));
            }
        }
    }
    let mut names: HashMap<&str, usize> = HashMap::new();
    for (index, variable) in list(container, "env").iter().enumerate() {
        let name = text(variable, "name");
        // A variable may be built upon the one it replaces.
        let refers = text(variable, "value").contains(&format!("$({name})"));
        if names.insert(name, index).is_some() && !refers {
            warnings.push(format!(
                "{}: hides previous definition of {name:?}, which may be dropped when using apply",
                path.child("env").index(index)
            ));
        }
    }
    for (index, port) in list(container, "ports").iter().enumerate() {
        let place = path.child("ports").index(index);
        if int(port, "hostPort") == 0 && !text(port, "hostIP").is_empty() {
            warnings.push(format!(
                "{place}: hostIP set without hostPort: {{Name:{} HostPort:0 ContainerPort:{} Protocol:{} HostIP:{}}}",
                text(port, "name"),
                int(port, "containerPort"),
                text(port, "protocol"),
                text(port, "hostIP"),
            ));
        }
        let same = |other: &Value| {
            ["containerPort", "hostPort"].iter().all(|key| int(other, key) == int(port, key))
                && ["protocol", "hostIP"].iter().all(|key| text(other, key) == text(port, key))
        };
        if let Some(first) = list(container, "ports")[..index].iter().position(same) {
            warnings.push(format!(
                "{place}: duplicate port definition with {}",
                path.child("ports").index(first)
            ));
        }
    }
    warnings
}
