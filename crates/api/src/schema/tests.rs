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

#[test]
fn finds_every_field_and_no_other() {
    for type_ in types() {
        for field in type_.fields {
            assert_eq!(type_.field(field.name).map(|f| f.name), Some(field.name), "{}", type_.name);
            for other in [&field.name[1..], &format!("{}s", field.name), &field.name.to_uppercase()] {
                let known = type_.fields.iter().any(|f| f.name == other);
                assert_eq!(type_.field(other).is_some(), known, "{other} of {}", type_.name);
            }
        }
        let absent = |field: &&Field| matches!(field.presence, Presence::Always | Presence::Nullable);
        assert!(type_.written().map(|f| f.name).eq(type_.fields.iter().filter(absent).map(|f| f.name)));
        assert_eq!(type_.field("").map(|f| f.name), None);
    }
}
