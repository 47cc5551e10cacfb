//! Warnings about a valid specification: fields that are deprecated, do nothing, or hide others.

use super::annotations::{APP_ARMOR, SECCOMP_CONTAINER, SECCOMP_POD, app_armor_annotations, containers};
use super::scheduling::{PREFERRED, REQUIRED};
use crate::field::Path;
use crate::kinds::common::access::{int, list, map, object, present, strings, text};
use crate::kinds::common::check::ip_warning;
use crate::kinds::core::persistentvolumeclaim::claim_spec_warnings;
use crate::meta_validation::{dns1123_label, label_value};
use crate::quantity::Quantity;
use ferrite_json::{Map, Value};
use std::collections::{HashMap, HashSet};

/// Labels of nodes that are deprecated, and what a client is told about each.
const OLD_LABELS: &[(&str, &str)] = &[
    ("beta.kubernetes.io/arch", "deprecated since v1.14; use \"kubernetes.io/arch\" instead"),
    ("beta.kubernetes.io/os", "deprecated since v1.14; use \"kubernetes.io/os\" instead"),
    (
        "failure-domain.beta.kubernetes.io/region",
        "deprecated since v1.17; use \"topology.kubernetes.io/region\" instead",
    ),
    (
        "failure-domain.beta.kubernetes.io/zone",
        "deprecated since v1.17; use \"topology.kubernetes.io/zone\" instead",
    ),
    (
        "beta.kubernetes.io/instance-type",
        "deprecated since v1.17; use \"node.kubernetes.io/instance-type\" instead",
    ),
    ("app.kubernetes.io/created-by", "deprecated since v1.9"),
    (
        "scheduler.alpha.kubernetes.io/preferAvoidPods",
        "deprecated since v1.22; use Taints and Tolerations instead",
    ),
    ("node-role.kubernetes.io/master", "use \"node-role.kubernetes.io/control-plane\" instead"),
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

/// Annotations that do nothing any more.
const OLD_ANNOTATIONS: &[(&str, &str)] = &[
    (
        "scheduler.alpha.kubernetes.io/critical-pod",
        "non-functional in v1.16+; use the \"priorityClassName\" field instead",
    ),
    ("security.alpha.kubernetes.io/sysctls", "non-functional in v1.11+; use the \"sysctls\" field instead"),
    (
        "security.alpha.kubernetes.io/unsafe-sysctls",
        "non-functional in v1.11+; use the \"sysctls\" field instead",
    ),
];
const OLD_SECCOMP: &str = "non-functional in v1.27+; use the \"seccompProfile\" field instead";
const OLD_APP_ARMOR: &str = "deprecated since v1.30; use the \"appArmorProfile\" field instead";

/// Warnings about a pod that was made.
pub(super) fn pod_warnings(pod: &Value) -> Vec<String> {
    let (metadata, spec) = (&pod["metadata"], &pod["spec"]);
    let mut warnings = Vec::new();
    if spec["os"]["name"] != "windows" {
        let said = app_armor_annotations(metadata, spec).filter(|(_, _, same)| !same);
        warnings.extend(said.map(|(key, _, _)| format!("metadata.annotations[{key}]: {OLD_APP_ARMOR}")));
    }
    let problems = dns1123_label(crate::meta::name(pod));
    if !problems.is_empty() {
        warnings.push(format!(
            "metadata.name: this is used in the Pod's hostname, which can result in surprising behavior; a DNS label \
             is recommended: [{}]",
            problems.join(" ")
        ));
    }
    warnings.extend(warnings_of(pod, &Path::default()));
    warnings
}

/// Warnings about a template of pods.
pub fn warnings(template: &Value, path: &Path) -> Vec<String> {
    warnings_of(template, path)
}

fn warnings_of(pod: &Value, root: &Path) -> Vec<String> {
    let (metadata, spec, path) = (&pod["metadata"], &pod["spec"], &root.child("spec"));
    let is_template = *root != Path::default();
    let annotation_path = |key: &str| root.child("metadata").child("annotations").key(key);
    let has = |key: &str| present(&metadata["annotations"], key);
    let mut warnings = node_label_warnings(spec, path);
    for (index, constraint) in list(spec, "topologySpreadConstraints").iter().enumerate() {
        let path = path.child("topologySpreadConstraints").index(index);
        let key = text(constraint, "topologyKey");
        if let Some(why) = old_label(key) {
            warnings.push(format!("{}: {key} is {why}", path.child("topologyKey")));
        }
        if !present(constraint, "labelSelector") {
            warnings.push(format!("{}: {NULL_SELECTOR}", path.child("labelSelector")));
        }
    }
    for (key, why) in OLD_ANNOTATIONS.iter().filter(|(key, _)| has(key)) {
        warnings.push(format!("{}: {why}", annotation_path(key)));
    }
    for (index, volume) in list(spec, "volumes").iter().enumerate() {
        let path = path.child("volumes").index(index);
        for (kind, when) in OLD_VOLUMES {
            let key = if *kind == "storageOS" { "storageos" } else { kind };
            if *kind == "cephfs" {
                let claim = &volume["ephemeral"]["volumeClaimTemplate"];
                let path = path.child("ephemeral").child("volumeClaimTemplate").child("spec");
                warnings.extend(claim_spec_warnings(&claim["spec"], &path));
            }
            if present(volume, key) {
                warnings.push(format!("{}: {when}", path.child(kind)));
            }
        }
    }
    warnings.extend(super::overlaps::warnings(list(spec, "volumes")));
    warnings.extend(repetition_warnings(spec, path));
    for name in ["memory", "ephemeral-storage"] {
        warnings.extend(fractional(&spec["overhead"][name], &path.child("overhead").key(name)));
    }
    if object(&spec["securityContext"], "seccompProfile").is_none() && has(SECCOMP_POD) {
        warnings.push(format!("{}: {OLD_SECCOMP}", annotation_path(SECCOMP_POD)));
    }
    for (container, place) in containers(spec) {
        let context = &container["securityContext"];
        let seccomp = format!("{SECCOMP_CONTAINER}{}", text(container, "name"));
        if object(context, "seccompProfile").is_none() && has(&seccomp) {
            warnings.push(format!("{}: {OLD_SECCOMP}", annotation_path(&seccomp)));
        }
        let app_armor = format!("{APP_ARMOR}{}", text(container, "name"));
        let has_field = object(&spec["securityContext"], "appArmorProfile").is_some()
            || object(context, "appArmorProfile").is_some();
        if is_template && !has_field && has(&app_armor) {
            warnings.push(format!("{}: {OLD_APP_ARMOR}", annotation_path(&app_armor)));
        }
        warnings.extend(container_warnings(container, &place.under(path)));
    }
    warnings.extend(port_warnings(spec, path));
    if int(spec, "terminationGracePeriodSeconds") < 0 {
        warnings.push(format!(
            "{}: must be >= 0; negative values are invalid and will be treated as 1",
            path.child("terminationGracePeriodSeconds")
        ));
    }
    warnings.extend(affinity_warnings(&spec["affinity"], &path.child("affinity")));
    let servers = path.child("dnsConfig").child("nameservers");
    for (index, server) in strings(&spec["dnsConfig"], "nameservers").into_iter().enumerate() {
        warnings.extend(ip_warning(server, &servers.index(index)));
    }
    for (index, alias) in list(spec, "hostAliases").iter().enumerate() {
        let place = path.child("hostAliases").index(index).child("ip");
        warnings.extend(ip_warning(text(alias, "ip"), &place));
    }
    warnings
}

/// Terms that select no pod.
fn affinity_warnings(affinity: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for kind in ["podAffinity", "podAntiAffinity"] {
        let (affinity, path) = (&affinity[kind], path.child(kind));
        for (index, term) in list(affinity, REQUIRED).iter().enumerate() {
            if !present(term, "labelSelector") {
                let place = path.child(REQUIRED).index(index).child("labelSelector");
                warnings.push(format!("{place}: {NULL_SELECTOR}"));
            }
        }
        for (index, term) in list(affinity, PREFERRED).iter().enumerate() {
            if !present(&term["podAffinityTerm"], "labelSelector") {
                let place =
                    path.child(PREFERRED).index(index).child("podAffinityTerm").child("labelSelector");
                warnings.push(format!("{place}: {NULL_SELECTOR}"));
            }
        }
    }
    warnings
}

/// Bytes are not divided.
fn fractional(amount: &Value, place: &Path) -> Option<String> {
    let quantity = Quantity::parse(amount.as_str()?).ok()?;
    (!quantity.is_integer())
        .then(|| format!("{place}: fractional byte value {amount} is invalid, must be an integer"))
}

/// The warning about a label of nodes; none if it is not deprecated.
pub fn old_label(key: &str) -> Option<&'static str> {
    OLD_LABELS.iter().find(|(old, _)| *old == key).map(|(_, warning)| *warning)
}

fn node_label_warnings(spec: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for key in map(spec, "nodeSelector").into_iter().flat_map(Map::keys) {
        if let Some(why) = old_label(key) {
            warnings.push(format!("{}: {why}", path.child("nodeSelector").key(key)));
        }
    }
    // Values that no label has are refused where they are required.
    let mut terms = |term: &Value, preferred: bool, path: &Path| {
        for (index, expression) in list(term, "matchExpressions").iter().enumerate() {
            let path = path.child("matchExpressions").index(index);
            if let Some(why) = old_label(text(expression, "key")) {
                warnings.push(format!("{}: {} is {why}", path.child("key"), text(expression, "key")));
            }
            for (index, value) in strings(expression, "values").iter().enumerate().filter(|_| preferred) {
                let place = path.child("values").index(index);
                let problems = label_value(value).into_iter();
                warnings.extend(problems.map(|why| format!("{place}: {value} is invalid, {why}")));
            }
        }
    };
    let required = &spec["affinity"]["nodeAffinity"][REQUIRED];
    let required_path =
        path.child("affinity").child("nodeAffinity").child(REQUIRED).child("nodeSelectorTerms");
    for (index, term) in list(required, "nodeSelectorTerms").iter().enumerate() {
        terms(term, false, &required_path.index(index));
    }
    let preferred_path = path.child("affinity").child("nodeAffinity").child(PREFERRED);
    for (index, term) in list(&spec["affinity"]["nodeAffinity"], PREFERRED).iter().enumerate() {
        terms(&term["preference"], true, &preferred_path.index(index).child("preference"));
    }
    warnings
}

/// Entries of lists that stand twice, or have no name.
fn repetition_warnings(spec: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for (key, field, what) in [("hostAliases", "ip", "ip"), ("imagePullSecrets", "name", "name")] {
        let mut seen = HashSet::new();
        for (index, entry) in list(spec, key).iter().enumerate() {
            let value = text(entry, field);
            let first = seen.insert(value);
            if !first {
                let place = path.child(key).index(index).child(field);
                warnings.push(format!("{place}: duplicate {what} {value:?}"));
            }
        }
    }
    let secrets = list(spec, "imagePullSecrets").iter().enumerate();
    for (index, _) in secrets.filter(|(_, secret)| text(secret, "name").is_empty()) {
        let place = path.child("imagePullSecrets").index(index).child("name");
        warnings.push(format!("{place}: invalid empty name \"\""));
    }
    warnings
}

fn container_warnings(container: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for name in ["memory", "ephemeral-storage"] {
        for amounts in ["limits", "requests"] {
            let place = path.child("resources").child(amounts).key(name);
            warnings.extend(fractional(&container["resources"][amounts][name], &place));
        }
    }
    let variables = list(container, "env");
    // Few are compared with each other sooner than put into a set.
    const FEW: usize = 16;
    let mut names: HashSet<&str> = HashSet::new();
    for (index, variable) in variables.iter().enumerate() {
        let (name, value) = (text(variable, "name"), text(variable, "value"));
        let first = match variables.len() {
            0..=FEW => variables[..index].iter().all(|earlier| text(earlier, "name") != name),
            _ => names.insert(name),
        };
        if first {
            continue;
        }
        // A variable may be built upon the one it replaces.
        let reference = format!("$({name})");
        let builds = !present(variable, "valueFrom") && value.contains(&reference) && value != reference;
        if !builds {
            warnings.push(format!(
                "{}: hides previous definition of {name:?}, which may be dropped when using apply",
                path.child("env").index(index)
            ));
        }
    }
    warnings
}

/// A response has room for no more. Each port or file may be in the way of every other.
pub(super) const WARNINGS_MAX: usize = 4096;

/// Ports that stand twice, in whichever containers.
fn port_warnings(spec: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    // By port and protocol: only equal ones are compared.
    let mut earlier: HashMap<(i64, &str), Vec<(&Value, Path)>> = HashMap::new();
    for (container, place) in containers(spec) {
        for (index, port) in list(container, "ports").iter().enumerate() {
            let place = place.under(path).child("ports").index(index);
            let (address, number) = (text(port, "hostIP"), int(port, "hostPort"));
            if number == 0 && !address.is_empty() {
                warnings.push(format!(
                    "{place}: hostIP set without hostPort: {{Name:{} HostPort:0 ContainerPort:{} Protocol:{} HostIP:{address}}}",
                    text(port, "name"),
                    int(port, "containerPort"),
                    text(port, "protocol"),
                ));
            }
            let same = earlier.entry((int(port, "containerPort"), text(port, "protocol"))).or_default();
            for (other, other_place) in &*same {
                if warnings.len() >= WARNINGS_MAX {
                    return warnings;
                }
                let (other_address, other_number) = (text(other, "hostIP"), int(other, "hostPort"));
                let how = if address == other_address && number == other_number {
                    "duplicate"
                } else if number == 0 || other_number == 0 {
                    "overlapping"
                } else if number == other_number && address.is_empty() != other_address.is_empty() {
                    "dangerously ambiguous"
                } else {
                    continue;
                };
                warnings.push(format!("{place}: {how} port definition with {other_place}"));
            }
            same.push((port, place));
        }
    }
    warnings.extend(port_name_warnings(spec, path));
    warnings
}

/// Names of ports that stand twice, in whichever containers.
fn port_name_warnings(spec: &Value, path: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    let mut earlier: HashMap<&str, Path> = HashMap::new();
    for (container, place) in containers(spec) {
        for (index, port) in list(container, "ports").iter().enumerate() {
            let name = text(port, "name");
            let place = place.under(path).child("ports").index(index);
            match earlier.get(name) {
                _ if name.is_empty() => {}
                Some(other) => warnings.push(format!(
                    "{place}: duplicate port name {name:?} with {other}, services and probes that select ports by name \
                     will use {other}"
                )),
                None => {
                    earlier.insert(name, place);
                }
            }
        }
    }
    warnings
}
