use ferrite_json::{Value, json};

use super::*;

/// A volume of 5Gi, ReadWriteOnce, of no class, Available, with changes to its parts.
fn volume(name: &str, changes: Value) -> Arc<PersistentVolume> {
    let mut whole = json!({
        "metadata": {"name": name},
        "spec": {"capacity": {"storage": "5Gi"}, "accessModes": ["ReadWriteOnce"]},
        "status": {"phase": "Available"},
    });
    merge(&mut whole, changes);
    Arc::new(ferrite_json::from_value(whole).unwrap())
}

/// A claim `ns/c` of 2Gi, ReadWriteOnce, of no class, with changes to its specification.
fn claim(spec: Value) -> PersistentVolumeClaim {
    let mut whole = json!({
        "metadata": {"name": "c", "namespace": "ns", "uid": "u"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}},
    });
    merge(&mut whole, json!({"spec": spec}));
    ferrite_json::from_value(whole).unwrap()
}

fn merge(into: &mut Value, changes: Value) {
    match (into, changes) {
        (Value::Object(into), Value::Object(changes)) => {
            for (key, change) in changes {
                let old = into.get(&*key).cloned().unwrap_or(Value::Null);
                let mut new = old;
                merge(&mut new, change);
                into.insert(&*key, new);
            }
        }
        (into, changes) => *into = changes,
    }
}

fn reserved(uid: &str) -> Value {
    json!({"spec": {"claimRef": {"namespace": "ns", "name": "c", "uid": uid}}})
}

#[test]
fn the_smallest_volume_that_suits() {
    let none = json!({});
    let size = |size: &str| json!({"spec": {"capacity": {"storage": size}}});
    let modes = |modes: &[&str]| json!({"spec": {"accessModes": modes}});
    for (what, wanted, volumes, delayed, expected) in [
        ("nothing there", none.clone(), vec![], false, None),
        ("one that suits", none.clone(), vec![volume("a", none.clone())], false, Some("a")),
        ("too small", none.clone(), vec![volume("a", size("1Gi"))], false, None),
        ("exactly so large", none.clone(), vec![volume("a", size("2Gi"))], false, Some("a")),
        (
            "the smallest of three",
            none.clone(),
            vec![volume("a", size("9Gi")), volume("b", size("3Gi")), volume("c", size("4Gi"))],
            false,
            Some("b"),
        ),
        (
            "fewer modes before a smaller size",
            none.clone(),
            vec![volume("a", modes(&["ReadWriteOnce", "ReadOnlyMany"])), volume("b", size("9Gi"))],
            false,
            Some("b"),
        ),
        (
            "a mode that is missing",
            modes(&["ReadWriteMany"])["spec"].clone(),
            vec![volume("a", none.clone())],
            false,
            None,
        ),
        ("another class", json!({"storageClassName": "fast"}), vec![volume("a", none.clone())], false, None),
        (
            "its class",
            json!({"storageClassName": "fast"}),
            vec![volume("a", json!({"spec": {"storageClassName": "fast"}}))],
            false,
            Some("a"),
        ),
        (
            "the class in the old annotation",
            json!({"storageClassName": "fast"}),
            vec![volume(
                "a",
                json!({"metadata": {"annotations": {"volume.beta.kubernetes.io/storage-class": "fast"}}}),
            )],
            false,
            Some("a"),
        ),
        (
            "no class is asked for",
            none.clone(),
            vec![volume("a", json!({"spec": {"storageClassName": "fast"}}))],
            false,
            None,
        ),
        (
            "a selector that does not match",
            json!({"selector": {"matchLabels": {"disk": "ssd"}}}),
            vec![volume("a", json!({"metadata": {"labels": {"disk": "hdd"}}}))],
            false,
            None,
        ),
        (
            "a selector that matches",
            json!({"selector": {"matchLabels": {"disk": "ssd"}}}),
            vec![volume("a", none.clone()), volume("b", json!({"metadata": {"labels": {"disk": "ssd"}}}))],
            false,
            Some("b"),
        ),
        ("a raw device", json!({"volumeMode": "Block"}), vec![volume("a", none.clone())], false, None),
        (
            "a raw device that is there",
            json!({"volumeMode": "Block"}),
            vec![volume("a", json!({"spec": {"volumeMode": "Block"}}))],
            false,
            Some("a"),
        ),
        (
            "another class of attributes",
            json!({"volumeAttributesClassName": "gold"}),
            vec![volume("a", none.clone())],
            false,
            None,
        ),
        (
            "not Available yet",
            none.clone(),
            vec![volume("a", json!({"status": {"phase": "Pending"}}))],
            false,
            None,
        ),
        (
            "being deleted",
            none.clone(),
            vec![volume("a", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}))],
            false,
            None,
        ),
        (
            "another claim's",
            none.clone(),
            vec![volume("a", json!({"spec": {"claimRef": {"namespace": "ns", "name": "other"}}}))],
            false,
            None,
        ),
        (
            "an older claim of the same name",
            none.clone(),
            vec![volume("a", reserved("another"))],
            false,
            None,
        ),
        (
            "reserved before smaller",
            none.clone(),
            vec![volume("a", size("2Gi")), volume("b", reserved(""))],
            false,
            Some("b"),
        ),
        (
            "reserved and of another class and phase",
            json!({"storageClassName": "fast"}),
            vec![volume("b", json!({"spec": reserved("")["spec"], "status": {"phase": "Released"}}))],
            false,
            Some("b"),
        ),
        ("the scheduler chooses among free ones", none.clone(), vec![volume("a", none.clone())], true, None),
        (
            "reserved ones are not for the scheduler",
            none.clone(),
            vec![volume("a", reserved("u"))],
            true,
            Some("a"),
        ),
    ] {
        let found = find(&claim(wanted), &volumes, delayed);
        assert_eq!(found.and_then(|v| v.metadata.name.clone()).as_deref(), expected, "{what}");
    }
}

#[test]
fn a_volume_that_is_asked_for_by_name_must_suit() {
    for (what, wanted, changes, expected) in [
        ("suits", json!({}), json!({}), Ok(())),
        (
            "going",
            json!({}),
            json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
            Err(Mismatch::Deleting("a".into())),
        ),
        ("small", json!({}), json!({"spec": {"capacity": {"storage": "1Gi"}}}), Err(Mismatch::TooSmall)),
        ("class", json!({"storageClassName": "x"}), json!({}), Err(Mismatch::Class)),
        ("attributes", json!({"volumeAttributesClassName": "x"}), json!({}), Err(Mismatch::AttributesClass)),
        ("mode", json!({"volumeMode": "Block"}), json!({}), Err(Mismatch::Mode)),
        ("access", json!({"accessModes": ["ReadWriteMany"]}), json!({}), Err(Mismatch::AccessModes)),
    ] {
        assert_eq!(check(&volume("a", changes), &claim(wanted)), expected, "{what}");
    }
}
