//! The return to an earlier revision, which clients of the removed API group ask for with an annotation.

use ferrite_client::EventType;
use k8s_openapi::api::apps::v1::{Deployment, ReplicaSet};

use super::annotation;
use super::revision::{NOT_COPIED, revision_of, same_template, without_hash};

pub(super) const ROLLBACK_TO: &str = "deprecated.deployment.rollback.to";

/// The result of a request to roll back. The annotation goes in any case.
#[derive(Debug, PartialEq)]
pub(super) struct Rollback {
    pub(super) deployment: Deployment,
    pub(super) event: (EventType, &'static str, String),
}

/// The revision that the Deployment asks for; 0 is the last one. As upstream: a value that is no number asks for nothing.
pub(super) fn wanted(deployment: &Deployment) -> Option<i64> {
    annotation(&deployment.metadata, ROLLBACK_TO)?.parse().ok()
}

/// Decides about the request, if there is one. `sets` are all ReplicaSets with their present revisions.
pub(super) fn decide(deployment: &Deployment, sets: &[ReplicaSet]) -> Option<Rollback> {
    let wanted = wanted(deployment)?;
    let mut answered = deployment.clone();
    if let Some(annotations) = &mut answered.metadata.annotations {
        annotations.remove(ROLLBACK_TO);
    }
    let warning = |reason, message: String| (EventType::Warning, reason, message);
    let revision = match wanted {
        0 => last_revision(sets),
        revision => Some(revision),
    };
    let name = deployment.metadata.name.as_deref().unwrap_or_default();
    let target = revision.and_then(|revision| sets.iter().find(|set| revision_of(set) == revision));
    let event = match (revision, target) {
        (None, _) => {
            warning("DeploymentRollbackRevisionNotFound", "Unable to find last revision.".to_owned())
        }
        (Some(_), None) => warning(
            "DeploymentRollbackRevisionNotFound",
            "Unable to find the revision to rollback to.".to_owned(),
        ),
        (Some(_), Some(set)) if same_template(deployment, set) => warning(
            "DeploymentRollbackTemplateUnchanged",
            format!("The rollback revision contains the same template as current deployment {name:?}"),
        ),
        (Some(revision), Some(set)) => {
            roll_back(&mut answered, set);
            let message = format!("Rolled back deployment {name:?} to revision {revision}");
            (EventType::Normal, "DeploymentRollback", message)
        }
    };
    Some(Rollback { deployment: answered, event })
}

/// The second highest revision.
fn last_revision(sets: &[ReplicaSet]) -> Option<i64> {
    let mut revisions: Vec<i64> = sets.iter().map(revision_of).filter(|revision| *revision > 0).collect();
    revisions.sort_unstable();
    revisions.dedup();
    revisions.iter().rev().nth(1).copied()
}

/// Gives the Deployment the template and the annotations of the ReplicaSet.
fn roll_back(deployment: &mut Deployment, set: &ReplicaSet) {
    let template = set.spec.as_ref().and_then(|spec| spec.template.as_ref()).map(without_hash);
    if let (Some(spec), Some(template)) = (&mut deployment.spec, template) {
        spec.template = template;
    }
    let is_own = |key: &str| NOT_COPIED.contains(&key);
    let annotations = deployment.metadata.annotations.get_or_insert_default();
    annotations.retain(|key, _| is_own(key));
    for (key, value) in set.metadata.annotations.iter().flatten().filter(|(key, _)| !is_own(key)) {
        annotations.insert(key.clone(), value.clone());
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn set(revision: &str, image: &str) -> ReplicaSet {
        ferrite_json::from_value(json!({
            "metadata": {"name": image, "annotations": {"deployment.kubernetes.io/revision": revision, "note": image}},
            "spec": {"selector": {}, "template": {"metadata": {"labels": {"app": "web", "pod-template-hash": "x"}},
                "spec": {"containers": [{"name": "c", "image": image}]}}},
        }))
        .unwrap()
    }

    fn deployment(to: Value) -> Deployment {
        ferrite_json::from_value(json!({
            "metadata": {"name": "web", "annotations": {ROLLBACK_TO: to, "note": "now", "other": "x",
                "deployment.kubernetes.io/revision": "3"}},
            "spec": {"selector": {}, "template": {"metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [{"name": "c", "image": "three"}]}}},
        }))
        .unwrap()
    }

    fn image(deployment: &Deployment) -> Option<&str> {
        let template = &deployment.spec.as_ref()?.template;
        template.spec.as_ref()?.containers.first()?.image.as_deref()
    }

    #[test]
    fn a_deployment_goes_back_to_the_revision_that_is_asked_for() {
        let all = [set("1", "one"), set("2", "two"), set("3", "three")];
        let done = |revision| format!("Rolled back deployment \"web\" to revision {revision}");
        for (to, sets, expected, reason, message) in [
            ("1", &all[..], "one", "DeploymentRollback", done(1)),
            ("0", &all[..], "two", "DeploymentRollback", done(2)),
            (
                "0",
                &all[2..],
                "three",
                "DeploymentRollbackRevisionNotFound",
                "Unable to find last revision.".into(),
            ),
            (
                "9",
                &all[..],
                "three",
                "DeploymentRollbackRevisionNotFound",
                "Unable to find the revision to rollback to.".into(),
            ),
            (
                "3",
                &all[..],
                "three",
                "DeploymentRollbackTemplateUnchanged",
                "The rollback revision contains the same template as current deployment \"web\"".into(),
            ),
        ] {
            let rollback = decide(&deployment(json!(to)), sets).unwrap();
            assert_eq!((rollback.event.1, &*rollback.event.2), (reason, &*message), "{to}");
            let after = rollback.deployment;
            assert_eq!(image(&after), Some(expected), "{to}");
            assert_eq!(annotation(&after.metadata, ROLLBACK_TO), None);
            assert_eq!(annotation(&after.metadata, "deployment.kubernetes.io/revision"), Some("3"));
            let is_done = reason == "DeploymentRollback";
            assert_eq!(annotation(&after.metadata, "note"), Some(if is_done { expected } else { "now" }));
            assert_eq!(annotation(&after.metadata, "other").is_none(), is_done);
            let labels = after.spec.unwrap().template.metadata.unwrap().labels.unwrap();
            assert_eq!(labels.into_keys().collect::<Vec<_>>(), ["app"]);
        }
        for to in [json!("x"), json!("")] {
            assert_eq!(decide(&deployment(to), &all), None);
        }
    }
}
