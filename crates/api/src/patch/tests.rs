use super::*;
use crate::codec::MAX_DEPTH;
use crate::schema;
use ferrite_json::json;

fn strategic(kind: (&str, &str, &str), mut target: Value, patch: Value) -> Result<Value, PatchError> {
    let type_ = schema::kind(kind.0, kind.1, kind.2).expect("known");
    strategic_merge(type_, &mut target, &patch).map(|()| target)
}

fn pod_spec(target: Value, patch: Value) -> Result<Value, PatchError> {
    strategic(("", "v1", "Pod"), json!({"spec": target}), json!({"spec": patch})).map(|v| v["spec"].clone())
}

#[test]
fn merge_patch_follows_the_rfc() {
    for (target, patch, expected) in [
        (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
        (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
        (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
        (json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]})),
        (json!({"a": "c"}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
        (json!([1]), json!({"a": 1}), json!({"a": 1})),
        (json!({"a": 1}), json!("x"), json!("x")),
    ] {
        let mut value = target;
        merge_patch(&mut value, &patch);
        assert_eq!(value, expected);
    }
}

#[test]
fn json_patch_applies_operations() {
    let base = json!({"a": {"b": 1}, "l": [1, 2, 3], "x/y~z": 0});
    for (patch, expected) in [
        (json!([{"op": "add", "path": "/a/c", "value": 2}]), Ok(json!({"b": 1, "c": 2}))),
        (json!([{"op": "remove", "path": "/a/b"}]), Ok(json!({}))),
        (json!([{"op": "replace", "path": "/a/b", "value": 7}]), Ok(json!({"b": 7}))),
        (json!([{"op": "move", "from": "/l/0", "path": "/a/m"}]), Ok(json!({"b": 1, "m": 1}))),
        (json!([{"op": "copy", "from": "/l/-1", "path": "/a/m"}]), Ok(json!({"b": 1, "m": 3}))),
        (json!([{"op": "copy", "from": "/x~1y~0z", "path": "/a/m"}]), Ok(json!({"b": 1, "m": 0}))),
        (json!([{"op": "test", "path": "/a/b", "value": 1.0}]), Err(PatchError::Rejected)),
        (json!([{"op": "test", "path": "/q/b", "value": null}]), Err(PatchError::Rejected)),
        (json!([{"op": "replace", "path": "/a/q", "value": 7}]), Ok(json!({"b": 1, "q": 7}))),
        (json!([{"op": "copy", "from": "/a/q", "path": "/a/m"}]), Ok(json!({"b": 1, "m": null}))),
        (json!([{"op": "add", "path": "ignored/z", "value": 1}]), Ok(json!({"b": 1}))),
        (json!([{"op": "replace", "path": "", "value": {"a": 5}}]), Ok(json!(5))),
        (json!([{"op": "replace", "path": "", "value": 5}]), Err(PatchError::Rejected)),
        (json!([{"op": "add", "path": "", "value": {"a": 5}}]), Err(PatchError::Rejected)),
        (json!([{"op": "copy", "from": "", "path": "/a/m"}]), Err(PatchError::Rejected)),
        (json!([{"op": "replace", "path": "/l/-", "value": 1}]), Err(PatchError::Rejected)),
        (json!([null]), Err(PatchError::Rejected)),
        (json!([{"op": "test", "path": "/a/q", "value": null}]), Ok(json!({"b": 1}))),
        (json!([{"op": "test", "path": "/a/b", "value": 2}]), Err(PatchError::Rejected)),
        (json!([{"op": "add", "path": "/q/c", "value": 2}]), Err(PatchError::Rejected)),
        (json!([{"op": "remove", "path": "/q"}]), Err(PatchError::Rejected)),
        (json!([{"op": "frob", "path": "/a"}]), Err(PatchError::Rejected)),
        (json!([{"op": "add", "value": 1}]), Err(PatchError::Rejected)),
        (json!([{"op": "add", "path": "/l/9", "value": 1}]), Err(PatchError::Rejected)),
    ] {
        let mut value = base.clone();
        let outcome = json_patch(&mut value, &patch).map(|()| value["a"].clone());
        assert_eq!(outcome, expected, "{patch}");
    }
    let mut value = base;
    json_patch(
        &mut value,
        &json!([{"op": "add", "path": "/l/1", "value": 9}, {"op": "add", "path": "/l/-", "value": 4}]),
    )
    .expect("applies");
    assert_eq!(value["l"], json!([1, 9, 2, 3, 4]));
    let many = Value::Array(vec![json!({"op": "test", "path": "/a/b", "value": 1}); MAX_OPERATIONS + 1]);
    let refused = json_patch(&mut value, &many).expect_err("too many");
    assert_eq!(refused, PatchError::TooManyOperations(MAX_OPERATIONS + 1));
    assert_eq!(
        refused.to_string(),
        "Request entity too large: The allowed maximum operations in a JSON patch is 10000, got 10001"
    );
}

#[test]
fn strategic_merges_lists_by_key() {
    let containers = json!([{"name": "a", "image": "1", "args": ["x"], "env": [{"name": "E", "value": "1"}]},
        {"name": "b", "image": "2"}]);
    let spec = || json!({"containers": containers});
    for (patch, expected) in [
        (
            json!([{"name": "b", "image": "3"}]),
            json!([{"name": "a", "image": "1", "args": ["x"], "env": [{"name": "E", "value": "1"}]}, {"name": "b", "image": "3"}]),
        ),
        (
            json!([{"name": "c", "image": "4"}]),
            json!([{"name": "c", "image": "4"}, {"name": "a", "image": "1", "args": ["x"], "env": [{"name": "E", "value": "1"}]}, {"name": "b", "image": "2"}]),
        ),
        (json!([{"name": "a", "$patch": "delete"}]), json!([{"name": "b", "image": "2"}])),
        (json!([{"$patch": "replace"}, {"name": "z"}]), json!([{"name": "z"}])),
        (
            json!([{"name": "a", "args": ["y"], "env": [{"name": "E", "$patch": "delete"}, {"name": "F", "value": "2"}]}, {"name": "b", "$patch": "delete"}]),
            json!([{"name": "a", "image": "1", "args": ["y"], "env": [{"name": "F", "value": "2"}]}]),
        ),
    ] {
        assert_eq!(
            pod_spec(spec(), json!({"containers": patch})).map(|s| s["containers"].clone()),
            Ok(expected)
        );
    }
}

#[test]
fn strategic_directives_that_make_no_sense_are_refused_in_upstreams_words() {
    let spec = || json!({"containers": [{"name": "a"}, {"name": "b"}]});
    for (patch, code, message) in [
        (
            json!({"containers": [{"$patch": "delete"}]}),
            500,
            "map: map[$patch:delete] does not contain declared merge key: name",
        ),
        (
            json!({"containers": ["x"]}),
            500,
            "list element types are not identical: [[map[name:a] map[name:b]] [x]]",
        ),
        (
            json!({"$setElementOrder/containers": "a"}),
            500,
            "expected a []interface {}, but received a string",
        ),
        (json!({"$setElementOrder/containers": ["a"]}), 500, "value for key 0 is not a map"),
        (
            json!({"$setElementOrder/containers": [{"x": "b"}]}),
            500,
            "map: map[x:b] does not contain declared merge key: name",
        ),
        (
            json!({"$setElementOrder/bogus": [{"name": "b"}]}),
            500,
            "unable to find api field in struct PodSpec for the json field \"bogus\"",
        ),
        (json!({"$retainKeys": "k"}), 400, "invalid patch format of retainKeys"),
    ] {
        let refused = pod_spec(spec(), patch.clone()).expect_err("refused");
        assert_eq!((refused.code(), refused.to_string().as_str()), (code, message), "{patch}");
    }
    // A list without a key to merge by is replaced as it is: a directive in it is a field that is not known.
    let terms = |term: Value| json!({"topologySelectorTerms": [], "tolerations": [term]});
    let patch = json!({"tolerations": [{"$patch": "delete", "key": "b"}]});
    let replaced = pod_spec(terms(json!({"key": "a"})), patch).expect("patched");
    assert_eq!(replaced["tolerations"][0]["key"], "b");
    // Where there is nothing to merge with, a map with a directive is left out whole.
    let patch = json!({"nodeSelector": {"$patch": "replace", "a": "b"}});
    assert_eq!(pod_spec(spec(), patch), Ok(spec()));
}

#[test]
fn strategic_directives_on_maps_and_orders() {
    let deployment = ("apps", "v1", "Deployment");
    let strategy = json!({"spec": {"strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1}}}});
    assert_eq!(
        strategic(
            deployment,
            strategy.clone(),
            json!({"spec": {"strategy": {"$retainKeys": ["type"], "type": "Recreate"}}})
        ),
        Ok(json!({"spec": {"strategy": {"type": "Recreate"}}}))
    );
    assert_eq!(
        strategic(
            deployment,
            strategy,
            json!({"spec": {"strategy": {"$patch": "replace", "type": "Recreate"}}})
        ),
        Ok(json!({"spec": {"strategy": {"type": "Recreate"}}}))
    );
    let spec = json!({"containers": [{"name": "a"}, {"name": "b"}]});
    assert_eq!(
        pod_spec(spec.clone(), json!({"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]})),
        Ok(json!({"containers": [{"name": "b"}, {"name": "a"}]}))
    );
    assert_eq!(
        pod_spec(
            spec,
            json!({"$setElementOrder/containers": [{"name": "a"}, {"name": "c"}, {"name": "b"}], "containers": [{"name": "c"}]})
        ),
        Ok(json!({"containers": [{"name": "a"}, {"name": "c"}, {"name": "b"}]}))
    );
    let finalizers = |patch: Value| {
        strategic(
            ("", "v1", "ConfigMap"),
            json!({"metadata": {"finalizers": ["a", "b"]}}),
            json!({"metadata": patch}),
        )
        .map(|v| v["metadata"]["finalizers"].clone())
    };
    assert_eq!(finalizers(json!({"finalizers": ["c"]})), Ok(json!(["c", "a", "b"])));
    assert_eq!(finalizers(json!({"$deleteFromPrimitiveList/finalizers": ["a"]})), Ok(json!(["b"])));
    assert_eq!(
        finalizers(json!({"$setElementOrder/finalizers": ["c", "b"], "finalizers": ["c"]})),
        Ok(json!(["c", "a", "b"]))
    );
}

#[test]
fn strategic_errors_are_worded_as_upstream() {
    let spec = json!({"containers": [{"name": "c", "image": "i"}]});
    for (patch, message) in [
        (
            json!({"containers": [{"name": "c", "$patch": "frob"}]}),
            "unknown patch type: frob in map: map[$patch:frob name:c]",
        ),
        (
            json!({"$setElementOrder/containers": [{"name": "c"}], "containers": [{"name": "zz", "image": "jj"}]}),
            "The order in patch list:\n[map[image:jj name:zz]]\n doesn't match $setElementOrder list:\n[map[name:c]]\n",
        ),
        (
            json!({"containers": [{"image": "x"}]}),
            "map: map[image:x] does not contain declared merge key: name",
        ),
        (json!({"$retainKeys": ["a"], "hostname": "h"}), "invalid patch format of retainKeys"),
    ] {
        assert_eq!(pod_spec(spec.clone(), patch).map_err(|e| e.to_string()), Err(message.to_owned()));
    }
}

#[test]
fn strategic_adds_without_directives_and_nulls() {
    assert_eq!(
        pod_spec(
            json!({}),
            json!({"volumes": [{"name": "v", "$retainKeys": ["name"], "emptyDir": null}, {"$patch": "delete", "name": "x"}],
            "$setElementOrder/volumes": [{"name": "v"}], "hostname": null})
        ),
        // As upstream: a directive of a new element is a field that the type does not know, and warned of as such.
        Ok(json!({"volumes": [{"name": "v", "$retainKeys": ["name"]}]}))
    );
}

/// `levels` objects within each other, all under `a`.
fn nested(levels: usize) -> Value {
    (0..levels).fold(json!(1), |inner, _| json!({"a": inner}))
}

#[test]
fn no_operation_nests_a_document_too_deeply() {
    // Each copy of the whole into its innermost place doubles the depth.
    let mut paths = Vec::new();
    let mut depth = 2;
    for _ in 0..13 {
        paths.push(json!({"op": "copy", "from": "/a", "path": "/a".repeat(depth)}));
        depth = 2 * depth - 1;
    }
    assert_eq!(json_patch(&mut nested(2), &Value::Array(paths)), Err(PatchError::TooDeep));
    let half = MAX_DEPTH / 2;
    let into = |op: &str| json!([{"op": op, "from": "/b", "path": "/a".repeat(half), "value": nested(half)}]);
    for op in ["add", "replace", "copy", "move"] {
        let target = |below: usize| json!({"a": nested(half)["a"], "b": nested(below)});
        let mut fits = target(MAX_DEPTH - half);
        assert_eq!(json_patch(&mut fits, &into(op)), Ok(()), "{op}");
        assert!(fits.count_within(MAX_DEPTH).is_some(), "{op}");
        if matches!(op, "copy" | "move") {
            let mut deeper = target(MAX_DEPTH - half + 1);
            assert_eq!(json_patch(&mut deeper, &into(op)), Err(PatchError::TooDeep), "{op}");
        }
    }
}

#[test]
fn copies_and_moves_of_one_patch_are_bounded() {
    let target = json!({"a": "x".repeat(MAX_COPIED / 4), "l": []});
    let copy = json!({"op": "copy", "from": "/a", "path": "/l/-"});
    let many = Value::Array(vec![copy; 10]);
    let refused = json_patch(&mut target.clone(), &many).expect_err("it copies too much");
    assert!(matches!(refused, PatchError::CopiesTooMuch(_)), "{refused}");
    assert_eq!(refused.code(), 413);
    let mut wide = json!({"a": vec![0; 100_000], "b": 1});
    let there = json!({"op": "move", "from": "/a", "path": "/c"});
    let back = json!({"op": "move", "from": "/c", "path": "/a"});
    let moves: Vec<Value> = std::iter::repeat_n([there, back], 500).flatten().collect();
    assert_eq!(json_patch(&mut wide, &Value::Array(moves)), Err(PatchError::TooMuchWork));
}

mod bounded {
    use super::*;
    use proptest::prelude::*;

    fn pointer() -> impl Strategy<Value = String> {
        proptest::collection::vec(prop_oneof!["a", "b", "0", "-"], 0..60)
            .prop_map(|tokens| tokens.iter().fold(String::new(), |path, token| path + "/" + token))
    }

    fn operation() -> impl Strategy<Value = Value> {
        let op = prop_oneof!["add", "replace", "copy", "move", "test"];
        (op, pointer(), pointer(), 0..60_usize).prop_map(
            |(op, path, from, levels)| json!({"op": op, "path": path, "from": from, "value": nested(levels)}),
        )
    }

    proptest! {
        #[test]
        fn patches_keep_documents_shallow(levels in 1..60_usize, operations in proptest::collection::vec(operation(), 0..20)) {
            let mut target = nested(levels);
            // Operations one by one, so that one that does not fit does not hide those behind it.
            for operation in operations {
                let _ = json_patch(&mut target, &json!([operation]));
                prop_assert!(target.count_within(MAX_DEPTH).is_some());
            }
            let type_ = schema::kind("apps", "v1", "ControllerRevision").expect("known");
            let mut merged = target.clone();
            merge_patch(&mut merged, &nested(MAX_DEPTH));
            prop_assert!(merged.count_within(MAX_DEPTH).is_some());
            let _ = strategic_merge(type_, &mut target, &nested(MAX_DEPTH));
            prop_assert!(target.count_within(MAX_DEPTH).is_some());
        }
    }
}

#[test]
fn many_insertions_into_a_long_list_are_too_much_work() {
    let mut target = json!({"x": vec![0; 100_000]});
    let patch = Value::Array(vec![json!({"op": "add", "path": "/x/0", "value": 1}); 5_000]);
    assert!(matches!(json_patch(&mut target, &patch), Err(PatchError::TooMuchWork)));
    let mut target = json!({"x": vec![0; 100_000]});
    let patch = Value::Array(vec![json!({"op": "add", "path": "/x/-", "value": 1}); 5_000]);
    json_patch(&mut target, &patch).expect("at the end nothing moves");
}

#[test]
fn long_lists_are_merged_without_searching_them() {
    let element = |i: usize| json!({"name": format!("c{i}"), "image": "i"});
    let list: Vec<Value> = (0..20_000).map(element).collect();
    let merged = pod_spec(json!({"containers": list}), json!({"containers": list})).expect("merged");
    assert_eq!(merged["containers"], Value::Array(list));
}

#[test]
fn a_patch_of_the_server_itself_tells_why_it_does_not_apply() {
    let document = || json!({"a": {"b": 1}, "l": [1, 2]});
    let rows = [
        (
            json!({"op": "add", "path": "/q/c", "value": 1}),
            "add operation does not apply: doc is missing path: \"/q/c\": missing value",
        ),
        (
            json!({"op": "add", "path": "/l/x", "value": 1}),
            "error in add for path: '/l/x': value was not a proper array index: 'x': strconv.Atoi: parsing \"x\": invalid syntax",
        ),
        (
            json!({"op": "add", "path": "/l/9", "value": 1}),
            "error in add for path: '/l/9': Unable to access invalid index: 9: invalid index referenced",
        ),
        (
            json!({"op": "remove", "path": "/a/x"}),
            "error in remove for path: '/a/x': Unable to remove nonexistent key: x: missing value",
        ),
        (
            json!({"op": "remove", "path": "/q/x"}),
            "remove operation does not apply: doc is missing path: \"/q/x\": missing value",
        ),
        (
            json!({"op": "remove", "path": "/l/2"}),
            "error in remove for path: '/l/2': Unable to access invalid index: 2: invalid index referenced",
        ),
        (
            json!({"op": "replace", "path": "/l/2", "value": 1}),
            "replace operation does not apply: doc is missing key: /l/2: missing value",
        ),
        (
            json!({"op": "replace", "path": "/q/2", "value": 1}),
            "replace operation does not apply: doc is missing path: /q/2: missing value",
        ),
        (
            json!({"op": "move", "from": "/q/2", "path": "/a/c"}),
            "move operation does not apply: doc is missing from path: /q/2: missing value",
        ),
        (
            json!({"op": "move", "from": "/a/b", "path": "/q/c"}),
            "move operation does not apply: doc is missing destination path: /q/c: missing value",
        ),
        (
            json!({"op": "copy", "from": "/q/2", "path": "/a/c"}),
            "copy operation does not apply: doc is missing from path: /q/2: missing value",
        ),
        (
            json!({"op": "test", "path": "/q/2", "value": 1}),
            "test operation does not apply: is missing path: /q/2: missing value",
        ),
        (json!({"op": "bogus", "path": "/q"}), "Unexpected kind: bogus"),
    ];
    for (operation, expected) in rows {
        let found = json_patch_explained(&mut document(), &json!([operation])).unwrap_err();
        assert_eq!(found.to_string(), expected);
        assert_eq!(json_patch(&mut document(), &json!([operation])), Err(PatchError::Rejected));
    }
    let test = |value: i64| json!([{"op": "test", "path": "/a/b", "value": value}]);
    assert_eq!(json_patch_explained(&mut document(), &test(1)), Ok(true));
    assert_eq!(json_patch_explained(&mut document(), &test(2)), Ok(false));
}

#[test]
fn strategic_numbers_are_cut_to_their_fields() {
    let deployment = |patch: Value| {
        strategic(("apps", "v1", "Deployment"), json!({"spec": {"replicas": 1}}), json!({"spec": patch}))
            .map(|v| v["spec"].clone())
    };
    for (patch, expected) in [
        (json!({"replicas": 3_000_000_000_i64}), json!({"replicas": -1_294_967_296})),
        (json!({"replicas": -3_000_000_000_i64}), json!({"replicas": 1_294_967_296})),
        (json!({"replicas": 4.0}), json!({"replicas": 4})),
        (json!({"replicas": 1.5}), json!({"replicas": 1.5})),
    ] {
        assert_eq!(deployment(patch), Ok(expected));
    }
    let seconds =
        strategic(("", "v1", "Pod"), json!({}), json!({"spec": {"terminationGracePeriodSeconds": 1e20}}));
    assert_eq!(seconds, Ok(json!({"spec": {"terminationGracePeriodSeconds": i64::MIN}})));
}

#[test]
fn strategic_patches_do_not_reach_into_raw_values() {
    let revision = |patch: Value| {
        let target = json!({"data": {"a": 1, "spec": {"x": 1}}});
        strategic(("apps", "v1", "ControllerRevision"), target, json!({"data": patch}))
    };
    assert_eq!(revision(json!({"a": 2})).unwrap()["data"]["a"], 2);
    assert_eq!(
        revision(json!({"spec": {"x": 2}})).unwrap_err().to_string(),
        "unable to find api field in struct RawExtension for the json field \"spec\""
    );
}

#[test]
fn numbers_are_printed_as_go_does() {
    for (number, expected) in [
        (1000.0, "1000"),
        (2e6, "2e+06"),
        (1.5, "1.5"),
        (1e20, "1e+20"),
        (1e-5, "1e-05"),
        (123_456_789.5, "1.234567895e+08"),
    ] {
        assert_eq!(go_format(&json!(number)), expected);
    }
}
