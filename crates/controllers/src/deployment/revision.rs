//! Which ReplicaSet carries the present template, and how a new one is made.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet, ReplicaSetSpec};
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::rollback::ROLLBACK_TO;
use super::{DESIRED_REPLICAS, MAX_REPLICAS, REVISION, REVISION_HISTORY, TEMPLATE_HASH, annotation};
use crate::hash::template_hash;
use ferrite_client::controller_reference;

/// Annotations that belong to one of the two objects and are not copied from the Deployment to its ReplicaSets.
pub(super) const NOT_COPIED: &[&str] = &[
    "kubectl.kubernetes.io/last-applied-configuration",
    REVISION,
    REVISION_HISTORY,
    DESIRED_REPLICAS,
    MAX_REPLICAS,
    ROLLBACK_TO,
];
/// Longest name of an object.
const LONGEST_NAME: usize = 253;
/// Longest value of the revision history annotation.
const HISTORY_LENGTH: usize = 2000;

pub(super) fn by_creation(a: &ReplicaSet, b: &ReplicaSet) -> Ordering {
    let created = |set: &ReplicaSet| set.metadata.creation_timestamp.as_ref().map(|time| time.0);
    created(a).cmp(&created(b)).then_with(|| a.metadata.name.cmp(&b.metadata.name))
}

pub(super) fn revision_of(set: &ReplicaSet) -> i64 {
    annotation(&set.metadata, REVISION).and_then(|revision| revision.parse().ok()).unwrap_or(0)
}

/// The position of the ReplicaSet whose template is the Deployment's. If several are, the oldest, so that every
/// sync chooses the same.
pub(super) fn find_new(deployment: &Deployment, sets: &[ReplicaSet]) -> Option<usize> {
    let template = &deployment.spec.as_ref()?.template;
    let wanted = without_hash(template);
    (0..sets.len())
        .filter(|index| {
            let template = sets[*index].spec.as_ref().and_then(|spec| spec.template.as_ref());
            template.is_some_and(|template| without_hash(template) == wanted)
        })
        .min_by(|a, b| by_creation(&sets[*a], &sets[*b]))
}

pub(super) fn same_template(deployment: &Deployment, set: &ReplicaSet) -> bool {
    find_new(deployment, std::slice::from_ref(set)).is_some()
}

pub(super) fn without_hash(template: &PodTemplateSpec) -> PodTemplateSpec {
    let mut template = template.clone();
    let meta = template.metadata.get_or_insert_default();
    if let Some(labels) = &mut meta.labels {
        labels.remove(TEMPLATE_HASH);
    }
    // Absent and empty mean the same and may differ between two writers.
    meta.labels = meta.labels.take().filter(|labels| !labels.is_empty());
    meta.annotations = meta.annotations.take().filter(|annotations| !annotations.is_empty());
    template
}

/// The ReplicaSet that starts to carry the Deployment's template, with `replicas` still to be decided.
pub(super) fn new_set(deployment: &Deployment, revision: i64) -> ReplicaSet {
    let spec = deployment.spec.clone().unwrap_or_default();
    let collisions = deployment.status.as_ref().and_then(|status| status.collision_count);
    let hash = template_hash(&spec.template, collisions);
    let mut template = spec.template;
    let labels = template.metadata.get_or_insert_default().labels.get_or_insert_default();
    labels.insert(TEMPLATE_HASH.to_owned(), hash.clone());
    let labels = labels.clone();
    let mut selector = spec.selector;
    selector.match_labels.get_or_insert_default().insert(TEMPLATE_HASH.to_owned(), hash.clone());
    let mut set = ReplicaSet {
        metadata: ObjectMeta {
            name: Some(set_name(deployment.metadata.name.as_deref().unwrap_or_default(), &hash)),
            namespace: deployment.metadata.namespace.clone(),
            labels: Some(labels),
            owner_references: Some(vec![controller_reference(deployment)]),
            ..ObjectMeta::default()
        },
        spec: Some(ReplicaSetSpec {
            replicas: Some(0),
            min_ready_seconds: spec.min_ready_seconds,
            selector,
            template: Some(template),
        }),
        status: None,
    };
    annotate_new(deployment, &mut set, revision);
    set
}

/// A ReplicaSet's name: a long name of the Deployment is cut off, so that the hash has room.
fn set_name(deployment: &str, hash: &str) -> String {
    let room = LONGEST_NAME.saturating_sub(1 + hash.len());
    // Names are ASCII.
    let kept = deployment.get(..room).unwrap_or(deployment);
    format!("{kept}-{hash}")
}

/// Brings the annotations of the new ReplicaSet up to date; whether anything changed. A set that carried the
/// template before (a roll-back) gets the new revision and remembers the old ones.
pub(super) fn annotate_new(deployment: &Deployment, set: &mut ReplicaSet, revision: i64) -> bool {
    let annotations = set.metadata.annotations.get_or_insert_default();
    let mut changed = false;
    for (key, value) in deployment.metadata.annotations.iter().flatten() {
        if !NOT_COPIED.contains(&key.as_str()) && annotations.get(key) != Some(value) {
            annotations.insert(key.clone(), value.clone());
            changed = true;
        }
    }
    let previous = annotations.get(REVISION).cloned();
    let previous_number: i64 = previous.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0);
    if previous_number < revision {
        annotations.insert(REVISION.to_owned(), revision.to_string());
        if let Some(previous) = previous.filter(|previous| !previous.is_empty()) {
            remember(annotations, previous);
        }
        changed = true;
    }
    changed
}

fn remember(annotations: &mut BTreeMap<String, String>, revision: String) {
    let history = annotations.entry(REVISION_HISTORY.to_owned()).or_default();
    if history.is_empty() {
        *history = revision;
        return;
    }
    if history.split(',').any(|known| known == revision) {
        return;
    }
    while history.len() + 1 + revision.len() > HISTORY_LENGTH {
        let Some((_, rest)) = history.split_once(',') else {
            *history = revision;
            return;
        };
        *history = rest.to_owned();
    }
    history.push(',');
    history.push_str(&revision);
}

/// Notes on a ReplicaSet how large the Deployment wants to be and may become; whether that changed.
pub(super) fn annotate_sizes(set: &mut ReplicaSet, desired: i32, max: i32) -> bool {
    let annotations = set.metadata.annotations.get_or_insert_default();
    let mut changed = false;
    for (key, value) in [(DESIRED_REPLICAS, desired), (MAX_REPLICAS, max)] {
        let value = value.to_string();
        if annotations.get(key) != Some(&value) {
            annotations.insert(key.to_owned(), value);
            changed = true;
        }
    }
    changed
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;
    use crate::hash::SAFE;

    fn deployment(image: &str) -> Deployment {
        ferrite_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "ns", "uid": "d",
                         "annotations": {"note": "x", REVISION: "7", "kubectl.kubernetes.io/last-applied-configuration": "y"}},
            "spec": {"selector": {"matchLabels": {"app": "web"}},
                     "template": {"metadata": {"labels": {"app": "web"}},
                                  "spec": {"containers": [{"name": "c", "image": image}]}}}
        }))
        .unwrap()
    }

    #[test]
    fn a_new_set_carries_the_template_the_hash_and_the_revision() {
        let deployment = deployment("a:1");
        let set = new_set(&deployment, 3);
        let name = set.metadata.name.clone().unwrap();
        let hash = name.strip_prefix("web-").unwrap();
        assert!(hash.bytes().all(|byte| SAFE.contains(&byte)), "{hash}");
        let spec = set.spec.as_ref().unwrap();
        assert_eq!(spec.selector.match_labels.as_ref().unwrap()[TEMPLATE_HASH], hash);
        assert_eq!(set.metadata.labels.as_ref().unwrap()[TEMPLATE_HASH], hash);
        assert_eq!(
            spec.template.as_ref().unwrap().metadata.as_ref().unwrap().labels.as_ref().unwrap()["app"],
            "web"
        );
        let annotations = set.metadata.annotations.as_ref().unwrap();
        assert_eq!(annotations.get("note").map(String::as_str), Some("x"));
        assert_eq!(annotations.get(REVISION).map(String::as_str), Some("3"));
        assert_eq!(annotations.len(), 2);
        assert!(same_template(&deployment, &set));
        assert!(!same_template(&self::deployment("a:2"), &set));
    }

    #[test]
    fn the_name_of_a_set_has_room_for_the_hash() {
        for (length, kept) in [(3, 3), (242, 242), (243, 242), (253, 242)] {
            let name = "n".repeat(length);
            assert_eq!(set_name(&name, "0123456789"), format!("{}-0123456789", "n".repeat(kept)));
        }
    }

    #[test]
    fn the_hash_depends_on_template_and_collisions_only() {
        let template = |image| deployment(image).spec.unwrap().template;
        let hash = template_hash(&template("a:1"), None);
        assert_eq!(hash, template_hash(&template("a:1"), None));
        assert_ne!(hash, template_hash(&template("a:2"), None));
        assert_ne!(hash, template_hash(&template("a:1"), Some(1)));
    }

    #[test]
    fn the_oldest_of_equal_sets_is_the_new_one() {
        let deployment = deployment("a:1");
        let at = |second: i64| {
            let mut set = new_set(&deployment, 1);
            set.metadata.creation_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(
                jiff::Timestamp::from_second(second).unwrap(),
            ));
            set
        };
        assert_eq!(find_new(&deployment, &[at(9), at(5), at(7)]), Some(1));
        assert_eq!(find_new(&deployment, &[new_set(&self::deployment("b"), 1)]), None);
    }

    #[test]
    fn a_set_used_again_gets_the_new_revision_and_keeps_its_history() {
        let deployment = deployment("a:1");
        let mut set = new_set(&deployment, 1);
        assert!(!annotate_new(&deployment, &mut set, 1), "already so");
        assert!(annotate_new(&deployment, &mut set, 3));
        assert!(annotate_new(&deployment, &mut set, 5));
        assert_eq!(annotation(&set.metadata, REVISION), Some("5"));
        assert_eq!(annotation(&set.metadata, REVISION_HISTORY), Some("1,3"));
        assert!(annotate_sizes(&mut set, 3, 4));
        assert!(!annotate_sizes(&mut set, 3, 4));
    }
}
