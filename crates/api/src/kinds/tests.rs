use super::*;

#[test]
fn every_row_is_complete() {
    for resource in built_in() {
        assert!(
            !resource.kind.is_empty() && resource.plural.starts_with(&resource.singular[..3]),
            "{resource:?}"
        );
        assert!(resource.verbs.is_sorted(), "{resource:?}");
        assert!(resource.subresources.is_sorted_by_key(|s| s.name), "{resource:?}");
        let now = "2026-01-01T00:00:00Z".parse().unwrap();
        let mut object = serde_json::json!({"metadata": {"name": "x"}});
        resource.strategy.default(&mut object);
        let once = object.clone();
        resource.strategy.default(&mut object);
        assert_eq!(object, once, "defaulting {resource:?} twice");
        let (columns, cells) = (resource.strategy.columns(), resource.strategy.cells(&object, now));
        assert_eq!(columns.len(), cells.len(), "{resource:?}");
        for field in resource.strategy.selectable_fields() {
            resource.strategy.selectable_value(&object, field);
        }
    }
}
