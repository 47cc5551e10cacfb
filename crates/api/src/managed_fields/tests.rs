use super::*;
use crate::codec::normalise;
use crate::{meta, schema};
use ferrite_json::json;

const T0: &str = "2026-01-01T00:00:00Z";
const T1: &str = "2026-01-01T00:00:01Z";

fn writer<'a>(kind: (&str, &str, &str), manager: &'a str, api_version: &'a str, now: &str) -> Writer<'a> {
    Writer {
        type_: schema::kind(kind.0, kind.1, kind.2),
        custom: None,
        api_version,
        stored: None,
        others: None,
        manager,
        subresource: "",
        ignored: &[],
        now: now.parse().expect("a time"),
    }
}

fn config_map(manager: &str, now: &str) -> Writer<'static> {
    let manager: &'static str = manager.to_owned().leak();
    writer(("", "v1", "ConfigMap"), manager, "v1", now)
}

fn entry(manager: &str, operation: &str, time: &str, fields: Value) -> Value {
    json!({"manager": manager, "operation": operation, "apiVersion": "v1", "time": time,
        "fieldsType": "FieldsV1", "fieldsV1": fields})
}

fn managed(object: &Value) -> &Value {
    &object["metadata"]["managedFields"]
}

fn cm(data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data})
}

#[test]
fn fields_v1_round_trips() {
    let fields = json!({"f:metadata": {"f:labels": {".": {}, "f:a": {}}},
        "f:spec": {"f:ports": {"k:{\"port\":80,\"protocol\":\"TCP\"}": {".": {}, "f:port": {}}},
            "f:finalizers": {"v:\"x\"": {}}, "f:list": {"i:0": {}}}});
    let set = FieldSet::from_fields_v1(&fields).expect("a set");
    assert_eq!(set.to_fields_v1(), fields);
    assert_eq!(
        set.paths(),
        [
            ".metadata.labels",
            ".metadata.labels.a",
            ".spec.finalizers[=\"x\"]",
            ".spec.list[0]",
            ".spec.ports[port=80,protocol=\"TCP\"]",
            ".spec.ports[port=80,protocol=\"TCP\"].port",
        ]
    );
    assert_eq!(FieldSet::from_fields_v1(&json!({"xspec": {}})), None);
    // As upstream: elements of an unknown kind are left out, with all that is below.
    let known = FieldSet::from_fields_v1(&json!({"f:a": {"z:b": {"f:c": {}}, "f:d": {}}, "x:spec": 1}))
        .expect("a set");
    assert_eq!(known.paths(), [".a.d"]);
    assert_eq!(FieldSet::from_fields_v1(&json!({"k:nonsense": {}})), None);
}

#[test]
fn a_create_owns_what_differs_from_a_blank_object() {
    let w = writer(("apps", "v1", "Deployment"), "m", "apps/v1", T0);
    let mut new = json!({"apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "d", "uid": "u", "labels": {"a": "b"}},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"a": "b"}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [
                {"name": "c", "image": "i", "args": ["x"], "ports": [{"containerPort": 80, "protocol": "TCP"}]}],
                "securityContext": {}}}}});
    normalise(w.type_.expect("known"), &mut new);
    update(&w, None, &mut new);
    assert_eq!(
        managed(&new)[0]["fieldsV1"],
        json!({"f:metadata": {"f:labels": {".": {}, "f:a": {}}},
            "f:spec": {"f:replicas": {}, "f:selector": {},
                "f:strategy": {"f:rollingUpdate": {".": {}, "f:maxSurge": {}}, "f:type": {}},
                "f:template": {"f:metadata": {"f:labels": {".": {}, "f:a": {}}},
                    "f:spec": {"f:securityContext": {}, "f:containers": {"k:{\"name\":\"c\"}": {".": {},
                        "f:args": {}, "f:image": {}, "f:name": {}, "f:resources": {},
                        "f:ports": {".": {}, "k:{\"containerPort\":80,\"protocol\":\"TCP\"}":
                            {".": {}, "f:containerPort": {}, "f:protocol": {}}}}}}}}})
    );
}

#[test]
fn an_update_takes_what_it_changes_and_only_then_the_time() {
    let mut first = cm(json!({"x": "1", "y": "1"}));
    update(&config_map("m1", T0), None, &mut first);
    let mut second = first.clone();
    update(&config_map("m2", T1), Some(&first), &mut second);
    assert_eq!(second, first, "nothing changed, nobody new");

    second["data"]["x"] = "2".into();
    update(&config_map("m2", T1), Some(&first), &mut second);
    assert_eq!(
        *managed(&second),
        json!([
            entry("m1", "Update", T0, json!({"f:data": {".": {}, "f:y": {}}})),
            entry("m2", "Update", T1, json!({"f:data": {"f:x": {}}}))
        ])
    );

    let mut third = second.clone();
    third["data"].as_object_mut().expect("a map").remove("x");
    update(&config_map("m3", T1), Some(&second), &mut third);
    assert_eq!(*managed(&third), json!([entry("m1", "Update", T0, json!({"f:data": {".": {}, "f:y": {}}}))]));

    let mut reset = third.clone();
    reset["metadata"]["managedFields"] = json!([{}]);
    update(&config_map("m1", T1), Some(&third), &mut reset);
    assert_eq!(reset.pointer("/metadata/managedFields"), None);
}

/// The outcome of an update that reads all entries.
fn update_in_full(writer: &Writer<'_>, live: &Value, new: &Value) -> Value {
    let mut new = new.clone();
    let mut managers = Managers::decode(live);
    record_update(writer, Node::root(writer), live, &new, &mut managers);
    managers.cap();
    managers.encode(&mut new);
    new
}

#[test]
fn entries_that_a_write_does_not_concern_are_kept_as_if_they_had_been_read() {
    let pod = |image: &str, conditions: Value| {
        json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "a", "labels": {"a": "b"}, "managedFields": [
                entry("creator", "Update", T0, json!({"f:metadata": {"f:labels": {".": {}, "f:a": {}}},
                    "f:spec": {"f:containers": {"k:{\"name\":\"c\"}": {".": {}, "f:image": {}, "f:name": {}}}}})),
                entry("applier", "Apply", T0, json!({"f:spec": {"f:nodeName": {}}})),
                entry("agent", "Update", T0, json!({"f:status": {"f:conditions":
                    {".": {}, "k:{\"type\":\"Ready\"}": {".": {}, "f:status": {}, "f:type": {}}}}})),
                entry("m", "Update", T0, json!({"f:status": {"f:phase": {}}})),
                entry("nobody", "Update", T0, json!({})),
            ]},
            "spec": {"nodeName": "n", "containers": [{"name": "c", "image": image}]},
            "status": {"phase": "Running", "conditions": conditions}})
    };
    let live = pod("i", json!([{"type": "Ready", "status": "True"}]));
    let twice = json!([{"type": "Ready", "status": "True"}, {"status": "False"}]);
    let mut moved = pod("i", json!([]));
    moved["spec"]["nodeName"] = json!("other");
    let mut bare = pod("k", json!([{"type": "Ready", "status": "True"}]));
    meta::metadata_mut(&mut bare).remove("managedFields");
    for new in [
        live.clone(),
        pod("j", json!([{"type": "Ready", "status": "True"}])),
        pod("i", json!([{"type": "Ready", "status": "False"}])),
        pod("j", json!([{"type": "Ready", "status": "True"}, {"type": "Mine", "status": "True"}])),
        pod("i", twice),
        moved,
        bare,
    ] {
        for subresource in ["", "status"] {
            let w = Writer { subresource, ..writer(("", "v1", "Pod"), "m", "v1", T1) };
            let mut updated = new.clone();
            update(&w, Some(&live), &mut updated);
            assert_eq!(managed(&updated), managed(&update_in_full(&w, &live, &new)), "{subresource} {new}");
        }
    }
}

#[test]
fn ignored_fields_are_not_recorded() {
    let mut w = writer(("", "v1", "Pod"), "kubelet", "v1", T0);
    w.subresource = "status";
    w.ignored = &["spec", "metadata.labels"];
    let mut old =
        json!({"metadata": {"name": "p"}, "spec": {"containers": null, "nodeName": "n"}, "status": {}});
    update(&writer(("", "v1", "Pod"), "creator", "v1", T0), None, &mut old);
    let mut new = json!({"metadata": {"name": "p", "labels": {"a": "b"}}, "spec": {"containers": null, "hostname": "h"},
        "status": {"phase": "Running"}});
    update(&w, Some(&old), &mut new);
    let entries = managed(&new).as_array().expect("entries");
    let kubelet = entries.iter().find(|e| e["manager"] == "kubelet").expect("the writer is recorded");
    assert_eq!(kubelet["fieldsV1"], json!({"f:status": {"f:phase": {}}}));
    assert_eq!(kubelet["subresource"], "status");
}

#[test]
fn apply_conflicts_unless_forced_and_removes_by_omission() {
    let made = apply(&config_map("m1", T0), None, &cm(json!({"x": "1", "y": "1"})), false).expect("new");
    assert_eq!(
        *managed(&made.object),
        json!([entry("m1", "Apply", T0, json!({"f:data": {"f:x": {}, "f:y": {}}}))])
    );

    let wanted = cm(json!({"x": "2"}));
    let refused = apply(&config_map("m2", T1), Some(&made.object), &wanted, false).expect_err("owned by m1");
    assert_eq!(refused.to_string(), "Apply failed with 1 conflict: conflict with \"m1\": .data.x");

    let forced = apply(&config_map("m2", T1), Some(&made.object), &wanted, true).expect("forced").object;
    assert_eq!(forced["data"], json!({"x": "2", "y": "1"}));
    assert_eq!(
        *managed(&forced),
        json!([
            entry("m1", "Apply", T0, json!({"f:data": {"f:y": {}}})),
            entry("m2", "Apply", T1, json!({"f:data": {"f:x": {}}}))
        ])
    );

    let omitted =
        apply(&config_map("m1", T1), Some(&forced), &cm(json!({"z": "3"})), false).expect("own").object;
    assert_eq!(omitted["data"], json!({"x": "2", "z": "3"}));
    let gone = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    let gone = apply(&config_map("m1", T1), Some(&omitted), &gone, false).expect("own").object;
    assert_eq!(gone["data"], json!({"x": "2"}));
    assert_eq!(*managed(&gone), json!([entry("m2", "Apply", T1, json!({"f:data": {"f:x": {}}}))]));
}

#[test]
fn apply_against_updaters_names_their_version_and_agreeing_shares() {
    let mut live = cm(json!({"x": "1"}));
    update(&config_map("ed", T0), None, &mut live);
    let refused = apply(&config_map("m", T1), Some(&live), &cm(json!({"x": "2"})), false).expect_err("owned");
    assert_eq!(refused.to_string(), "Apply failed with 1 conflict: conflict with \"ed\" using v1: .data.x");
    let agreed =
        apply(&config_map("m", T1), Some(&live), &cm(json!({"x": "1"})), false).expect("the same value");
    assert!(!agreed.changed);
    assert_eq!(managed(&agreed.object).as_array().map(Vec::len), Some(2));

    let unmanaged = cm(json!({"x": "1"}));
    let refused =
        apply(&config_map("m", T1), Some(&unmanaged), &cm(json!({"x": "2"})), false).expect_err("owned");
    assert_eq!(
        refused.to_string(),
        "Apply failed with 1 conflict: conflict with \"before-first-apply\" using v1: .data.x"
    );
    // As upstream: who applies to a part finds an owner of that part.
    let part = Writer { subresource: "status", ..config_map("m", T1) };
    let applied =
        apply(&part, Some(&unmanaged), &cm(json!({"x": "1"})), false).expect("the same value").object;
    let entries = managed(&applied).as_array().expect("entries");
    assert!(entries.iter().all(|entry| entry["subresource"] == "status"), "{entries:?}");
}

#[test]
fn apply_merges_keyed_lists_element_by_element() {
    let w = |manager, now| writer(("apps", "v1", "Deployment"), manager, "apps/v1", now);
    let object = |containers: Value| {
        json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "d"},
        "spec": {"template": {"spec": {"containers": containers}}}})
    };
    let live = apply(
        &w("m1", T0),
        None,
        &object(json!([{"name": "a", "image": "1"}, {"name": "b", "image": "1"}])),
        false,
    )
    .expect("new")
    .object;
    let both = apply(
        &w("m2", T1),
        Some(&live),
        &object(json!([{"name": "c", "image": "2"}, {"name": "b", "tty": true}])),
        false,
    )
    .expect("no conflict")
    .object;
    let names = |object: &Value| -> Vec<String> {
        let list = object["spec"]["template"]["spec"]["containers"].as_array().cloned().unwrap_or_default();
        list.iter().map(|c| c["name"].as_str().unwrap_or_default().to_owned()).collect()
    };
    assert_eq!(names(&both), ["a", "c", "b"]);
    let fewer = apply(&w("m1", T1), Some(&both), &object(json!([{"name": "a", "image": "1"}])), false)
        .expect("own")
        .object;
    assert_eq!(names(&fewer), ["a", "c", "b"], "b is still owned by m2");
    assert_eq!(fewer["spec"]["template"]["spec"]["containers"][2].get("image"), None);
    let refused = apply(
        &w("m2", T1),
        Some(&fewer),
        &object(json!([{"name": "a", "image": "9"}, {"name": "a", "image": "9"}])),
        false,
    );
    assert_eq!(
        refused.expect_err("duplicates").to_string(),
        "failed to create typed patch object (/d; apps/v1, Kind=Deployment): \
         .spec.template.spec.containers: duplicate entries for key [name=\"a\"]"
    );
}

#[test]
fn an_element_without_its_keys_is_refused_with_their_names() {
    let object = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "s"}, "spec": {"ports": [{"name": "x"}]}});
    let kind = crate::schema::of(&crate::Gvk::new("", "v1", "Service")).expect("known");
    // Ports have a default protocol, and so are never without a key.
    assert!(validate(kind, &object, "v1").is_ok());
    let schema =
        crate::custom::Schema::compile(&json!({"type": "object", "properties": {"l": {"type": "array",
        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k", "j"], "items": {"type": "object",
        "properties": {"k": {"type": "string"}, "j": {"type": "string"}, "v": {"type": "integer"}}}}}}));
    let object = json!({"apiVersion": "x.y/v1", "kind": "Wid", "metadata": {"name": "w"}, "l": [{"v": 1}]});
    assert_eq!(
        validate_custom(&schema, &object, "x.y/v1").expect_err("no keys").to_string(),
        "failed to create typed patch object (/w; x.y/v1, Kind=Wid): .l: element 0: associative list with keys has an \
         element that omits all key fields [\"k\" \"j\"] (and doesn't have default values for any key fields)"
    );
}

#[test]
fn apply_refuses_what_the_schema_does_not_know() {
    let mut config = cm(json!({}));
    config["bogus"] = 1.into();
    let refused = apply(&config_map("m", T0), None, &config, false).expect_err("unknown field");
    assert_eq!(
        refused.to_string(),
        "failed to create typed patch object (/a; /v1, Kind=ConfigMap): .bogus: field not declared in schema"
    );
    let refused = apply(&config_map("m", T0), None, &cm(json!({"a": 1})), false).expect_err("wrong type");
    assert_eq!(
        refused.to_string(),
        "failed to create typed patch object (/a; /v1, Kind=ConfigMap): .data.a: expected string, got \
         &value.valueUnstructured{Value:1}"
    );
    let refused = apply(&config_map("m", T0), None, &cm(json!({"a": {"b": [1, "c"]}})), false);
    assert!(
        refused.expect_err("wrong type").to_string().ends_with(
            "expected string, got &value.valueUnstructured{Value:map[string]interface {}{\"b\":[]interface {}{1, \"c\"}}}"
        )
    );
    let mut config = cm(json!({}));
    config["metadata"]["managedFields"] = json!([{"manager": "x"}]);
    assert_eq!(apply(&config_map("m", T0), None, &config, false), Err(ApplyError::ManagedFieldsGiven));
}

#[test]
fn the_oldest_of_many_updaters_are_merged() {
    let mut object = cm(json!({}));
    for n in 0..12 {
        let live = object.clone();
        object["data"][format!("k{n:02}")] = "v".into();
        let now = format!("2026-01-01T00:00:{n:02}Z");
        let live = (n > 0).then_some(&live);
        update(&config_map(&format!("u{n:02}"), &now), live, &mut object);
    }
    let entries = managed(&object).as_array().expect("entries");
    assert_eq!(entries.len(), 10);
    assert_eq!(entries[0]["manager"], "ancient-changes");
    assert_eq!(entries[0]["fieldsV1"], json!({"f:data": {".": {}, "f:k00": {}, "f:k01": {}, "f:k02": {}}}));
}

#[test]
fn objects_without_a_schema_are_granular() {
    let w = Writer { type_: None, ..config_map("m", T0) };
    let mut new =
        json!({"metadata": {"name": "x", "labels": {"a": "b"}}, "spec": {"list": [1, 2], "map": {"k": "v"}}});
    update(&w, None, &mut new);
    assert_eq!(
        managed(&new)[0]["fieldsV1"],
        json!({"f:metadata": {"f:labels": {".": {}, "f:a": {}}},
            "f:spec": {".": {}, "f:list": {}, "f:map": {".": {}, "f:k": {}}}})
    );
}

#[test]
fn an_empty_list_forgets_all_managers() {
    let mut stored = cm(json!({"k": "v"}));
    update(&config_map("a", T0), None, &mut stored);
    assert_eq!(managed(&stored).as_array().map(Vec::len), Some(1));
    for (given, forgets) in
        [(json!([]), true), (json!([{}]), true), (json!(null), false), (json!([{"operation": "No"}]), false)]
    {
        let mut new = cm(json!({"k": "w"}));
        new["metadata"]["managedFields"] = given.clone();
        update(&config_map("b", T1), Some(&stored), &mut new);
        assert_eq!(managed(&new).is_null(), forgets, "{given}");
    }
}

#[test]
fn a_scale_takes_the_replicas_from_others() {
    let deployment = |replicas: i64, entries: Value| json!({"metadata": {"name": "d", "managedFields": entries}, "spec": {"replicas": replicas, "paused": true}});
    let both = json!({"f:spec": {"f:paused": {}, "f:replicas": {}}});
    let paused = json!({"f:spec": {"f:paused": {}}});
    let entry =
        |manager: &str, operation: &str, time: Option<&str>, subresource: Option<&str>, fields: &Value| {
            let mut entry = json!({"manager": manager, "operation": operation, "apiVersion": "apps/v1",
            "fieldsType": "FieldsV1", "fieldsV1": fields});
            for (key, text) in [("time", time), ("subresource", subresource)] {
                if let Some(text) = text {
                    entry[key] = text.into();
                }
            }
            entry
        };
    let replicas = json!({"f:spec": {"f:replicas": {}}});
    let written = |live: &Value, count: i64| {
        let mut new = live.clone();
        new["spec"]["replicas"] = count.into();
        let mut writer = writer(("apps", "v1", "Deployment"), "scaler", "apps/v1", T1);
        writer.subresource = "scale";
        update_scale(&writer, live, &mut new);
        managed(&new).clone()
    };
    let updated = deployment(1, json!([entry("kubectl", "Update", Some(T0), None, &both)]));
    let left = entry("kubectl", "Update", Some(T0), None, &paused);
    let taken = entry("scaler", "Update", None, Some("scale"), &replicas);
    assert_eq!(written(&updated, 3), json!([taken, left]));
    assert_eq!(written(&updated, 0), json!([left]), "nobody owns what is not there");
    let apart = entry("kubectl", "Update", None, None, &replicas);
    assert_eq!(written(&updated, 1), json!([apart, left]), "the same number");

    let applied = deployment(1, json!([entry("kubectl", "Apply", Some(T0), None, &both)]));
    assert_eq!(written(&applied, 1), *managed(&applied), "an applier keeps what nobody changes");
    let left = entry("kubectl", "Apply", Some(T0), None, &paused);
    assert_eq!(written(&applied, 3), json!([left, taken]));
    let nobody = deployment(1, json!([entry("kubectl", "Update", Some(T0), None, &paused)]));
    assert_eq!(written(&nobody, 3), *managed(&nobody), "replicas that nobody owns stay so");
}

#[test]
fn nobody_tracks_an_object_whose_lists_have_elements_without_keys() {
    let account = |manager| writer(("", "v1", "ServiceAccount"), manager, "v1", T0);
    let mut new = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"},
        "secrets": [{"name": "s"}, {}]});
    update(&account("m"), None, &mut new);
    assert_eq!(managed(&new), &Value::Null);
    let old = new.clone();
    new["metadata"]["labels"] = json!({"a": "b"});
    update(&account("m"), Some(&old), &mut new);
    assert_eq!(managed(&new), &Value::Null);
}

#[test]
fn elements_that_stood_twice_come_anew_when_one_is_left() {
    let pod = |manager| writer(("", "v1", "Pod"), manager, "v1", T0);
    let with = |env: Value| {
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"},
            "spec": {"containers": [{"name": "c", "env": env}]}})
    };
    let mut old = with(json!([{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]));
    update(&pod("m"), None, &mut old);
    let mut new = with(json!([{"name": "A", "value": "1"}]));
    new["metadata"] = old["metadata"].clone();
    update(&pod("n"), Some(&old), &mut new);
    let entries = managed(&new).as_array().expect("entries");
    let of_n = entries.iter().find(|entry| entry["manager"] == "n").expect("an entry of n");
    let env = of_n.pointer("/fieldsV1/f:spec/f:containers/k:{\"name\":\"c\"}/f:env/k:{\"name\":\"A\"}");
    assert_eq!(env, Some(&json!({".": {}, "f:name": {}, "f:value": {}})));
}

#[test]
fn an_applied_value_is_compared_as_it_was_written() {
    let claim = |manager| writer(("", "v1", "PersistentVolumeClaim"), manager, "v1", T0);
    let with = |size: &str| {
        json!({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "a"},
            "spec": {"resources": {"requests": {"storage": size}}}})
    };
    let mut live = with("1536Mi");
    update(&claim("m"), None, &mut live);
    let refused = apply(&claim("n"), Some(&live), &with("1.5Gi"), false).unwrap_err();
    assert!(matches!(refused, ApplyError::Conflicts(conflicts) if conflicts.len() == 1));
    assert!(apply(&claim("n"), Some(&live), &with("1536Mi"), false).is_ok());
}

/// A request's body has room for sets of this size, whose elements are not in the order of the set.
#[test]
fn large_sets_are_read_in_time() {
    const ELEMENTS: u32 = 300_000;
    let begun = std::time::Instant::now();
    let fields = (0..ELEMENTS).map(|index| (format!("i:{index}"), json!({})));
    let all = FieldSet::from_fields_v1(&Value::Object(fields.collect())).expect("a set");
    let is_even = |at: &usize| at.is_multiple_of(2);
    let half = |even: bool| FieldSet {
        entries: all
            .entries
            .iter()
            .enumerate()
            .filter(|(at, _)| is_even(at) == even)
            .map(|(_, e)| e.clone())
            .collect(),
    };
    assert_eq!(half(true).union(half(false)), all);
    assert_eq!(all.clone().difference(&half(true)), half(false));
    // A set that moves its elements for each one that comes or goes takes minutes.
    let took = begun.elapsed();
    assert!(took < std::time::Duration::from_secs(30), "{took:?}");
}
