use super::*;

#[test]
fn finds_kinds_lists_and_common_options() {
    for (group, version, kind_name, type_name) in [
        ("", "v1", "Pod", "core.v1.Pod"),
        ("", "v1", "PodList", "core.v1.PodList"),
        ("apps", "v1", "Deployment", "apps.v1.Deployment"),
        ("apps", "v1", "DeleteOptions", "meta.v1.DeleteOptions"),
        ("policy", "v1", "Eviction", "policy.v1.Eviction"),
        ("meta.k8s.io", "v1", "PartialObjectMetadataList", "meta.v1.PartialObjectMetadataList"),
    ] {
        assert_eq!(kind(group, version, kind_name).map(|t| t.name), Some(type_name), "{kind_name}");
    }
    assert_eq!(kind("apps", "v1", "Nothing"), None);
}
