//! The identity of a pod of a StatefulSet: its ordinal, name, labels and claims.

use ferrite_client::controller_reference;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{
    PersistentVolumeClaim, PersistentVolumeClaimVolumeSource, Pod, PodTemplateSpec, Volume,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::name;
use crate::history::HASH;

const POD_NAME: &str = "statefulset.kubernetes.io/pod-name";
const POD_INDEX: &str = "apps.kubernetes.io/pod-index";

pub(super) fn pod_name(set: &StatefulSet, ordinal: i32) -> String {
    format!("{}-{ordinal}", name(set))
}

/// The ordinal of a pod of `set`, from its name; none if the set gives no pod such a name.
pub(super) fn ordinal(set: &StatefulSet, pod: &Pod) -> Option<i32> {
    let (parent, digits) = pod.metadata.name.as_deref()?.rsplit_once('-')?;
    let ordinal = digits.parse().ok().filter(|ordinal: &i32| *ordinal >= 0)?;
    (parent == name(set) && digits == ordinal.to_string()).then_some(ordinal)
}

/// The name of the revision that the pod was made from.
pub(super) fn revision(pod: &Pod) -> &str {
    pod.metadata.labels.as_ref().and_then(|labels| labels.get(HASH)).map_or("", String::as_str)
}

fn claim_templates(set: &StatefulSet) -> &[PersistentVolumeClaim] {
    set.spec.as_ref().and_then(|spec| spec.volume_claim_templates.as_deref()).unwrap_or_default()
}

fn claim_name(set: &StatefulSet, template: &str, ordinal: i32) -> String {
    format!("{template}-{}-{ordinal}", name(set))
}

/// The names of the claims of one pod, each with the name of its template, which is the name of the pod's volume.
pub(super) fn claim_names(set: &StatefulSet, ordinal: i32) -> impl Iterator<Item = (&str, String)> {
    claim_templates(set).iter().map(move |template| {
        let template = template.metadata.name.as_deref().unwrap_or_default();
        (template, claim_name(set, template, ordinal))
    })
}

/// The claims of one pod as they are created.
pub(super) fn claims(set: &StatefulSet, ordinal: i32) -> Vec<PersistentVolumeClaim> {
    let selected = set.spec.as_ref().and_then(|spec| spec.selector.match_labels.as_ref());
    let made = claim_templates(set).iter().map(|template| {
        let mut claim = template.clone();
        let name = claim_name(set, claim.metadata.name.as_deref().unwrap_or_default(), ordinal);
        claim.metadata.name = Some(name);
        claim.metadata.namespace = set.metadata.namespace.clone();
        let labels = claim.metadata.labels.get_or_insert_default();
        labels.extend(selected.into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
        claim
    });
    made.collect()
}

/// Returns true if name and labels are those of a pod of the set.
pub(super) fn identity_matches(set: &StatefulSet, pod: &Pod) -> bool {
    ordinal(set, pod).is_some()
        && pod.metadata.namespace == set.metadata.namespace
        && pod.metadata.labels.as_ref().and_then(|labels| labels.get(POD_NAME)) == pod.metadata.name.as_ref()
}

/// Gives the pod the labels of its identity.
pub(super) fn update_identity(set: &StatefulSet, pod: &mut Pod, ordinal: i32) {
    let name = pod_name(set, ordinal);
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(POD_NAME.to_owned(), name.clone());
    labels.insert(POD_INDEX.to_owned(), ordinal.to_string());
    pod.metadata.name = Some(name);
    pod.metadata.namespace = set.metadata.namespace.clone();
}

/// Returns true if the pod mounts its claim for each template of the set.
pub(super) fn storage_matches(set: &StatefulSet, pod: &Pod, ordinal: i32) -> bool {
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
    claim_names(set, ordinal).all(|(template, claim)| {
        let volume = volumes.iter().find(|volume| volume.name == template);
        let source = volume.and_then(|volume| volume.persistent_volume_claim.as_ref());
        source.is_some_and(|source| source.claim_name == claim)
    })
}

/// Gives the pod a volume for each template of the set, in place of volumes of the same names.
pub(super) fn update_storage(set: &StatefulSet, pod: &mut Pod, ordinal: i32) {
    let spec = pod.spec.get_or_insert_default();
    let mut volumes: Vec<Volume> = Vec::new();
    for (template, claim) in claim_names(set, ordinal) {
        if volumes.iter().any(|volume| volume.name == template) {
            continue;
        }
        volumes.push(Volume {
            name: template.to_owned(),
            persistent_volume_claim: Some(PersistentVolumeClaimVolumeSource {
                claim_name: claim,
                read_only: None,
            }),
            ..Volume::default()
        });
    }
    let held = spec.volumes.take().unwrap_or_default();
    let others: Vec<_> =
        held.into_iter().filter(|held| volumes.iter().all(|volume| volume.name != held.name)).collect();
    volumes.extend(others);
    spec.volumes = (!volumes.is_empty()).then_some(volumes);
}

/// The pod of this ordinal, made from the template of a revision.
pub(super) fn new_pod(set: &StatefulSet, template: &PodTemplateSpec, revision: &str, ordinal: i32) -> Pod {
    let meta = template.metadata.clone().unwrap_or_default();
    let mut pod = Pod {
        metadata: ObjectMeta {
            labels: meta.labels,
            annotations: meta.annotations,
            finalizers: meta.finalizers,
            owner_references: Some(vec![controller_reference(set)]),
            ..ObjectMeta::default()
        },
        spec: template.spec.clone(),
        status: None,
    };
    update_identity(set, &mut pod, ordinal);
    pod.metadata.labels.get_or_insert_default().insert(HASH.to_owned(), revision.to_owned());
    let spec = pod.spec.get_or_insert_default();
    spec.hostname = pod.metadata.name.clone();
    let service = set.spec.as_ref().and_then(|spec| spec.service_name.clone());
    spec.subdomain = service.filter(|service| !service.is_empty());
    update_storage(set, &mut pod, ordinal);
    pod
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn set(spec: Value) -> StatefulSet {
        let mut whole = json!({"selector": {"matchLabels": {"app": "web"}}, "serviceName": "svc",
            "template": {"metadata": {"labels": {"app": "web"}, "annotations": {"a": "b"}},
                "spec": {"containers": [], "volumes": [{"name": "data", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]}}});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        ferrite_json::from_value(
            json!({"metadata": {"name": "web", "namespace": "ns", "uid": "u"}, "spec": whole}),
        )
        .unwrap()
    }

    fn named(name: &str) -> Pod {
        ferrite_json::from_value(json!({"metadata": {"name": name}})).unwrap()
    }

    #[test]
    fn ordinals() {
        let set = set(json!({}));
        for (name, expected) in [
            ("web-0", Some(0)),
            ("web-12", Some(12)),
            ("web-01", None),
            ("web", None),
            ("web-", None),
            ("web-x", None),
            ("web-99999999999", None),
            ("other-1", None),
            ("web-1-2", None),
        ] {
            assert_eq!(ordinal(&set, &named(name)), expected, "{name}");
        }
    }

    #[test]
    fn a_pod_has_its_identity_and_claims() {
        let set = set(json!({"volumeClaimTemplates": [
            {"metadata": {"name": "data", "labels": {"tier": "x"}}, "spec": {"accessModes": ["ReadWriteOnce"]}}]}));
        let template = set.spec.as_ref().unwrap().template.clone();
        let pod = new_pod(&set, &template, "web-abc", 3);
        assert_eq!(pod.metadata.name.as_deref(), Some("web-3"));
        assert_eq!(pod.metadata.namespace.as_deref(), Some("ns"));
        assert_eq!(pod.metadata.annotations.as_ref().unwrap()["a"], "b");
        assert_eq!(
            ferrite_json::to_value(pod.metadata.labels.as_ref().unwrap()).unwrap(),
            json!({"app": "web", "controller-revision-hash": "web-abc", "apps.kubernetes.io/pod-index": "3",
                   "statefulset.kubernetes.io/pod-name": "web-3"})
        );
        let spec = ferrite_json::to_value(pod.spec.as_ref().unwrap()).unwrap();
        assert_eq!(spec["hostname"], "web-3");
        assert_eq!(spec["subdomain"], "svc");
        assert_eq!(
            spec["volumes"],
            json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data-web-3"}},
                   {"name": "tmp", "emptyDir": {}}])
        );
        assert!(identity_matches(&set, &pod) && storage_matches(&set, &pod, 3));
        assert!(!storage_matches(&set, &pod, 2), "another's claim");

        let claims = claims(&set, 3);
        let claim = ferrite_json::to_value(&claims[0]).unwrap();
        assert_eq!(
            claim["metadata"],
            json!({"name": "data-web-3", "namespace": "ns", "labels": {"app": "web", "tier": "x"}})
        );
        assert_eq!(claim["spec"]["accessModes"], json!(["ReadWriteOnce"]));
    }

    #[test]
    fn an_adopted_pod_gets_its_labels() {
        let set = set(json!({}));
        let mut pod = named("web-1");
        pod.metadata.namespace = Some("ns".to_owned());
        assert!(!identity_matches(&set, &pod));
        update_identity(&set, &mut pod, 1);
        assert!(identity_matches(&set, &pod));
    }
}
