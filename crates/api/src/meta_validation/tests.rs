//! Names, labels and metadata, good and bad.

use super::*;
use ferrite_json::json;

fn texts(errors: FieldErrors) -> Vec<String> {
    errors.iter().map(ToString::to_string).collect()
}

#[test]
fn names() {
    let long = "a".repeat(64);
    for (check, name, good) in [
        (dns1123_label as fn(&str) -> Vec<String>, "a-1", true),
        (dns1123_label, "1a", true),
        (dns1123_label, "-a", false),
        (dns1123_label, "a.b", false),
        (dns1123_label, "A", false),
        (dns1123_label, "", false),
        (dns1123_label, &long, false),
        (dns1123_subdomain, "a.b-c.1", true),
        (dns1123_subdomain, &long, true),
        (dns1123_subdomain, "a..b", false),
        (dns1123_subdomain, "a.", false),
        (dns1035_label, "a1", true),
        (dns1035_label, "1a", false),
        (path_segment, "a:b", true),
        (path_segment, "a/b", false),
        (path_segment, "..", false),
        (qualified_name, "a", true),
        (qualified_name, "example.com/A_b.c", true),
        (qualified_name, "/a", false),
        (qualified_name, "a/", false),
        (qualified_name, "a/b/c", false),
        (qualified_name, "Bad/a", false),
        (label_value, "", true),
        (label_value, "A.b-c_1", true),
        (label_value, "a-", false),
        (label_value, &long, false),
        (config_map_key, ".a", true),
        (config_map_key, "..a", false),
        (config_map_key, "a/b", false),
        (port_name, "http-2", true),
        (port_name, "80", false),
        (port_name, "a--b", false),
        (port_name, "toolongportname1", false),
    ] {
        assert_eq!(check(name).is_empty(), good, "{name:?}: {:?}", check(name));
    }
}

#[test]
fn wording() {
    assert_eq!(
        dns1123_label("A"),
        [
            "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
        ]
    );
    assert_eq!(dns1123_subdomain(&"a".repeat(254)), ["must be no more than 253 characters"]);
    assert_eq!(qualified_name("/a"), ["prefix part must be non-empty"]);
}

#[test]
fn metadata_of_a_new_object() {
    let good = json!({"metadata": {"name": "a", "namespace": "n", "labels": {"x.example/y": "z"},
        "annotations": {"UPPER/x": "anything at all"}, "finalizers": ["x.example/f"],
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "u", "controller": true}]}});
    assert_eq!(texts(validate_metadata(&good, true, dns1123_subdomain)), [""; 0]);
    let rows: [(Value, &str); 9] = [
        // The prefix is checked without its last letter and the dash.
        (
            json!({"generateName": "A-", "name": ""}),
            "metadata.name: Required value: name or generateName is required",
        ),
        (json!({"name": ""}), "metadata.name: Required value: name or generateName is required"),
        (
            json!({"generateName": "a-", "name": ""}),
            "metadata.name: Required value: name or generateName is required",
        ),
        (json!({"namespace": ""}), "metadata.namespace: Required value"),
        (
            json!({"finalizers": ["orphan", "foregroundDeletion"]}),
            "metadata.finalizers: Invalid value: [\"orphan\",\"foregroundDeletion\"]: finalizer orphan and foregroundDeletion cannot be both set",
        ),
        (
            json!({"annotations": {"big": "x".repeat(ANNOTATIONS_MAX)}}),
            "metadata.annotations: Too long: may not be more than 262144 bytes",
        ),
        (
            json!({"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": ""}]}),
            "metadata.ownerReferences.uid: Invalid value: \"\": must not be empty",
        ),
        (
            json!({"ownerReferences": [{"apiVersion": "a/b/c", "kind": "Pod", "name": "p", "uid": "u"}]}),
            "metadata.ownerReferences.apiVersion: Invalid value: \"a/b/c\": version must not be empty",
        ),
        (
            json!({"ownerReferences": [{"uid": "u", "name": "a", "kind": "Event", "apiVersion": "v1"}]}),
            "metadata.ownerReferences: Invalid value: {\"apiVersion\":\"v1\",\"kind\":\"Event\",\"name\":\"a\",\"uid\":\"u\"}: /v1, Kind=Event is disallowed from being an owner",
        ),
    ];
    for (metadata, message) in rows {
        let mut object = json!({"metadata": {"name": "a", "namespace": "n"}});
        for (key, value) in metadata.as_object().unwrap() {
            object["metadata"][key] = value.clone();
        }
        assert_eq!(texts(validate_metadata(&object, true, dns1123_subdomain)), [message]);
    }
    // Only some kinds' own validation complains about these.
    let finalizers =
        json!({"metadata": {"name": "a", "namespace": "n", "finalizers": ["orphan", "bad", "a.example/b"]}});
    assert_eq!(texts(validate_metadata(&finalizers, true, dns1123_subdomain)), [""; 0]);
    assert_eq!(
        texts(unknown_finalizers(&finalizers)),
        [
            "metadata.finalizers[1]: Invalid value: \"bad\": name is neither a standard finalizer name nor is it fully qualified"
        ]
    );
    let cluster = json!({"metadata": {"name": "a", "namespace": "n"}});
    assert_eq!(
        texts(validate_metadata(&cluster, false, dns1123_subdomain)),
        ["metadata.namespace: Forbidden: not allowed on this type"]
    );
}

#[test]
fn metadata_of_an_update() {
    let old = json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "1",
        "creationTimestamp": "2026-01-01T00:00:00Z", "deletionTimestamp": "2026-01-01T00:00:01Z",
        "finalizers": ["x.example/f"]}});
    let change = |key: &str, value: Value| {
        let mut new = old.clone();
        new["metadata"][key] = value;
        restore_system_metadata(&mut new, &old);
        texts(validate_metadata_update(&new, &old))
    };
    let none: [&str; 0] = [];
    assert_eq!(change("labels", json!({"a": "b"})), none);
    assert_eq!(change("creationTimestamp", Value::Null), none);
    assert_eq!(change("deletionTimestamp", Value::Null), none);
    assert_eq!(change("uid", Value::Null), none);
    assert_eq!(change("finalizers", json!([])), none);
    assert_eq!(change("uid", "other".into()), ["metadata.uid: Invalid value: \"other\": field is immutable"]);
    assert_eq!(
        change("resourceVersion", "".into()),
        ["metadata.resourceVersion: Invalid value: \"\": must be specified for an update"]
    );
    assert_eq!(
        change("finalizers", json!(["x.example/f", "x.example/g"])),
        [
            "metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted, found new finalizers []string{\"x.example/g\"}"
        ]
    );
}

#[test]
fn many_controllers_are_told_once() {
    let owners: Vec<Value> = (0..5000)
        .map(|index| {
            json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": format!("u{index}"), "controller": true})
        })
        .collect();
    let object = json!({"metadata": {"name": "a", "namespace": "b", "ownerReferences": owners}});
    // Each error shows the whole list: as many errors would take gigabytes.
    assert_eq!(validate_metadata(&object, true, |_| Vec::new()).len(), 1);
}
