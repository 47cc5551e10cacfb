use super::*;
use crate::field::Path;
use crate::managed_fields::{self, Writer};
use ferrite_json::{Value, json};
use proptest::prelude::*;

fn schema(openapi: Value) -> Schema {
    Schema::compile(&openapi)
}

#[test]
fn unknown_fields_go_unless_they_are_preserved() {
    let rows = [
        (json!({"type": "object"}), json!({"spec": {"a": 1}}), json!({}), vec!["spec"]),
        (
            json!({"type": "object", "properties": {"spec": {"type": "object",
                "properties": {"a": {"type": "integer"}, "l": {"type": "array", "items": {"type": "object"}}}}}}),
            json!({"kind": "K", "metadata": {"x": 1}, "spec": {"a": 1, "b": 2, "l": [{"c": 1}]}}),
            json!({"kind": "K", "metadata": {"x": 1}, "spec": {"a": 1, "l": [{}]}}),
            vec!["spec.b", "spec.l[0].c"],
        ),
        (
            json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties":
                {"p": {"type": "object", "properties": {"a": {"type": "string"}}}}}),
            json!({"q": {"r": 1}, "p": {"a": "x", "b": 1}}),
            json!({"q": {"r": 1}, "p": {"a": "x"}}),
            vec!["p.b"],
        ),
        (
            json!({"type": "object", "properties": {"m": {"type": "object",
                "additionalProperties": {"type": "object", "properties": {"a": {"type": "string"}}}}}}),
            json!({"m": {"k": {"a": "x", "z": 1}}}),
            json!({"m": {"k": {"a": "x"}}}),
            vec!["m.k.z"],
        ),
        (
            json!({"type": "object", "properties": {"e": {"type": "object",
                "x-kubernetes-embedded-resource": true, "properties": {"spec": {"type": "object"}}}}}),
            json!({"e": {"kind": "K", "apiVersion": "v1", "metadata": {"name": "x"}, "spec": {}, "other": 1}}),
            json!({"e": {"kind": "K", "apiVersion": "v1", "metadata": {"name": "x"}, "spec": {}}}),
            vec!["e.other"],
        ),
    ];
    for (openapi, mut object, pruned, unknown) in rows {
        assert_eq!(prune::prune(&mut object, &schema(openapi.clone())), unknown, "{openapi}");
        assert_eq!(object, pruned, "{openapi}");
    }
}

#[test]
fn defaults_are_filled_where_something_is_missing() {
    let schema = schema(
        json!({"type": "object", "properties": {"spec": {"type": "object", "default": {}, "properties": {
            "a": {"type": "string", "default": "A"},
            "n": {"type": "string", "nullable": true, "default": "d"},
            "nn": {"type": "string"},
            "l": {"type": "array", "items": {"type": "object", "properties": {"p": {"type": "string", "default": "TCP"}}}},
        }}}}),
    );
    for (given, filled) in [
        (json!({}), json!({"spec": {"a": "A", "n": "d"}})),
        (json!({"spec": {"a": null, "n": null, "nn": null}}), json!({"spec": {"a": "A", "n": null}})),
        (
            json!({"spec": {"a": "B", "n": "x", "l": [{}, {"p": "UDP"}]}}),
            json!({"spec": {"a": "B", "n": "x", "l": [{"p": "TCP"}, {"p": "UDP"}]}}),
        ),
    ] {
        let mut object = given.clone();
        default::drop_nulls(&mut object, &schema);
        default::fill(&mut object, &schema);
        assert_eq!(object, filled, "{given}");
        default::fill(&mut object, &schema);
        assert_eq!(object, filled, "{given}, twice");
    }
}

#[test]
fn values_are_held_to_their_schema() {
    let rows = [
        (
            json!({"type": "string"}),
            json!(1),
            r#"v: Invalid value: "integer": v in body must be of type string: "integer""#,
        ),
        (
            json!({"type": "integer"}),
            json!(1.5),
            r#"v: Invalid value: "number": v in body must be of type integer: "number"; <nil>: Invalid value: "": Checked value must be of type integer (default format) in v"#,
        ),
        (json!({"type": "integer"}), json!(2.0), ""),
        (json!({"type": "number"}), json!(2), ""),
        (
            json!({"type": "string"}),
            json!(null),
            r#"v: Invalid value: "null": v in body must be of type string: "null""#,
        ),
        (json!({"type": "string", "nullable": true}), json!(null), ""),
        (
            json!({"x-kubernetes-int-or-string": true}),
            json!(true),
            r#"v: Invalid value: "boolean": v in body must be of type integer,string: "boolean""#,
        ),
        (
            json!({"type": "string", "enum": ["a", "b"]}),
            json!("c"),
            r#"v: Unsupported value: "c": supported values: "a", "b""#,
        ),
        (
            json!({"type": "integer", "minimum": 3}),
            json!(2),
            "v: Invalid value: 2: v in body should be greater than or equal to 3",
        ),
        (
            json!({"type": "integer", "maximum": 3, "exclusiveMaximum": true}),
            json!(3),
            "v: Invalid value: 3: v in body should be less than 3",
        ),
        (
            json!({"type": "integer", "multipleOf": 2}),
            json!(3),
            "v: Invalid value: 3: v in body should be a multiple of 2",
        ),
        (json!({"type": "string", "maxLength": 1}), json!("ab"), "v: Too long: may not be more than 1 bytes"),
        (
            json!({"type": "string", "minLength": 3}),
            json!("ab"),
            r#"v: Invalid value: "ab": v in body should be at least 3 chars long"#,
        ),
        (
            json!({"type": "string", "pattern": "^a$"}),
            json!("b"),
            r#"v: Invalid value: "b": v in body should match '^a$'"#,
        ),
        (
            json!({"type": "string", "format": "ipv4"}),
            json!("b"),
            r#"v: Invalid value: "b": v in body must be of type ipv4: "b""#,
        ),
        (json!({"type": "string", "format": "of-nobody"}), json!("b"), ""),
        (
            json!({"type": "integer", "format": "int32"}),
            json!(1.5),
            r#"v: Invalid value: "float64": v in body must be of type int32: "float64"; <nil>: Invalid value: "": Checked value must be of type integer with format int32 in v"#,
        ),
        (
            json!({"type": "string", "format": "date"}),
            json!(3),
            r#"v: Invalid value: "int64": v in body must be of type date: "int64""#,
        ),
        (
            json!({"type": "string", "format": "date"}),
            json!(true),
            r#"v: Invalid value: "": v in body must be of type date: """#,
        ),
        (
            json!({"type": "integer", "format": "int64"}),
            json!(u64::MAX),
            r#"v: Invalid value: "float64": v in body must be of type int64: "float64"; <nil>: Invalid value: "": Checked value must be of type integer with format int64 in v"#,
        ),
        (
            json!({"type": "number", "format": "float"}),
            json!(1e39),
            r#"<nil>: Invalid value: "": Checked value must be of type number with format float in v"#,
        ),
        (json!({"type": "number", "format": "float"}), json!(3e38), ""),
        (json!({"type": "string", "format": "date"}), json!([]), ""),
        (
            json!({"type": "boolean", "format": "odd"}),
            json!(5),
            r#"v: Invalid value: "integer": v in body must be of type boolean: "integer""#,
        ),
        (
            json!({"type": "integer"}),
            json!(1e30),
            r#"v: Invalid value: "number": v in body must be of type integer: "number"; <nil>: Invalid value: "": Checked value must be of type integer (default format) in v"#,
        ),
        (
            json!({"type": "array", "items": {"type": "string"}, "minItems": 1}),
            json!([]),
            "v: Invalid value: 0: v in body should have at least 1 items",
        ),
        (
            json!({"type": "array", "items": {"type": "string"}, "maxItems": 1}),
            json!(["a", "b"]),
            "v: Too many: 2: must have at most 1 item",
        ),
        (
            json!({"type": "array", "items": {"type": "string"}}),
            json!([1]),
            r#"v[0]: Invalid value: "integer": v[0] in body must be of type string: "integer""#,
        ),
        (json!({"type": "object", "required": ["x"]}), json!({}), "v.x: Required value"),
        (
            json!({"type": "object", "minProperties": 1}),
            json!({}),
            "v: Invalid value: 0: v in body should have at least 1 properties",
        ),
        (
            json!({"type": "object", "additionalProperties": {"type": "string"}}),
            json!({"k": 1}),
            r#"v.k: Invalid value: "integer": v.k in body must be of type string: "integer""#,
        ),
        (
            json!({"type": "integer", "oneOf": [{"minimum": 1}, {"minimum": 2}]}),
            json!(3),
            r#"<nil>: Invalid value: "": "v" must validate one and only one schema (oneOf). Found 2 valid alternatives"#,
        ),
        (
            json!({"type": "integer", "not": {"minimum": 1}}),
            json!(3),
            r#"<nil>: Invalid value: "": "v" must not validate the schema (not)"#,
        ),
    ];
    for (openapi, value, told) in rows {
        let whole = json!({"type": "object", "properties": {"v": openapi}});
        let errors = validate::value(&json!({"v": value}), None, &schema(whole), &Path::default());
        let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
        assert_eq!(errors.join("; "), told, "{openapi} {value}");
    }
}

#[test]
fn what_did_not_change_is_not_complained_about() {
    let schema = schema(json!({"type": "object", "properties": {
        "a": {"type": "string", "maxLength": 1}, "b": {"type": "string", "maxLength": 1},
        "l": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"], "items": {
            "type": "object", "properties": {"k": {"type": "string"}, "v": {"type": "string", "maxLength": 1}}}},
    }}));
    let old = json!({"a": "long", "b": "x", "l": [{"k": "1", "v": "long"}]});
    let new = json!({"a": "long", "b": "too long", "l": [{"k": "2"}, {"k": "1", "v": "long"}]});
    let errors = validate::value(&new, Some(&old), &schema, &Path::default());
    assert_eq!(errors.iter().map(|e| e.path.to_string()).collect::<Vec<_>>(), ["b"]);
}

#[test]
fn sets_and_keys_are_unique() {
    let schema = schema(json!({"type": "object", "properties": {
        "s": {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
        "m": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
            "items": {"type": "object", "properties": {"k": {"type": "string"}}}},
    }}));
    let object = json!({"s": ["x", "x", "x"], "m": [{"k": "a"}, {"k": "a"}]});
    let errors = validate::list_types(&object, &schema, &Path::default());
    let told: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert_eq!(told, [r#"m[1]: Duplicate value: {"k":"a"}"#, r#"s[1]: Duplicate value: "x""#]);
}

fn problems(openapi: &Value) -> Vec<String> {
    let errors = spec::validate_schema(openapi, &Path::new("s"), false, false);
    errors.iter().map(ToString::to_string).collect()
}

#[test]
fn schemas_have_rules() {
    let of = |spec: Value| json!({"type": "object", "properties": {"a": spec}});
    let rows = [
        (json!({"type": "string"}), vec![r#"s.type: Invalid value: "string": must be object at the root"#]),
        (
            of(json!({})),
            vec!["s.properties[a].type: Required value: must not be empty for specified object fields"],
        ),
        (of(json!({"type": "array"})), vec!["s.properties[a].items: Required value: must be specified"]),
        (
            of(json!({"type": "bogus"})),
            vec![
                r#"s.properties[a].type: Unsupported value: "bogus": supported values: "array", "boolean", "integer", "number", "object", "string""#,
            ],
        ),
        (
            of(json!({"type": "string", "pattern": "("})),
            vec![
                "s.properties[a].pattern: Invalid value: \"(\": must be a valid regular expression, but isn't: error parsing regexp: missing closing ): `(`",
            ],
        ),
        (of(json!({"type": "object", "anyOf": [{"properties": {"z": {"minLength": 1}}}]})), vec![]),
        (
            of(json!({"type": "string", "default": 1})),
            vec![
                r#"s.properties[a].default: Invalid value: "integer":  in body must be of type string: "integer""#,
            ],
        ),
        (
            of(json!({"type": "object", "default": {"x": 1}})),
            vec![r#"s.properties[a].default: Invalid value: {"x":1}: must not have unknown fields"#],
        ),
        (
            of(json!({"type": "array", "items": {"type": "object"}, "x-kubernetes-list-type": "map"})),
            vec![
                "s.properties[a].x-kubernetes-list-map-keys: Required value: must not be empty if x-kubernetes-list-type is map",
            ],
        ),
        (of(json!({"type": "integer", "x-kubernetes-validations": [{"rule": "self > 1"}]})), vec![]),
        (
            json!({"type": "object", "properties": {"metadata": {"type": "object", "properties": {"labels": {"type": "object"}}}}}),
            vec![
                "s.properties[metadata]: Forbidden: must not specify anything other than name and generateName, but metadata is implicitly specified",
            ],
        ),
        (
            json!({"type": "object", "anyOf": [{"properties": {"z": {"minLength": 1}}}]}),
            vec!["s.properties[z]: Required value: because it is defined in s.anyOf[0].properties[z]"],
        ),
    ];
    for (openapi, told) in rows {
        assert_eq!(problems(&openapi), told, "{openapi}");
    }
}

/// Schemas that would cost a server that trusts them dearly.
#[test]
fn hostile_schemas_are_refused_or_cheap() {
    let mut deep = json!({"type": "string"});
    for _ in 0..40 {
        deep = json!({"type": "object", "properties": {"a": deep}, "x-kubernetes-validations": [{"rule": "true"}]});
    }
    problems(&deep);
    let wide: Value =
        (0..2000).map(|n| (format!("f{n}"), json!({"type": "string", "enum": ["a"]}))).collect();
    assert_eq!(problems(&json!({"type": "object", "properties": wide})), Vec::<String>::new());
    let large = json!({"type": "object", "properties": {"a": {"type": "string", "pattern": "((a{1000}){1000}){1000}"}}});
    assert_eq!(problems(&large).len(), 1);
    // A pattern that would make a backtracking matcher hang.
    let slow = Pattern::new("^(a+)+$");
    assert!(!slow.is_match(&format!("{}b", "a".repeat(10_000))));
}

/// A ConfigMap's fields as a custom kind has them: granular maps of strings.
fn like_config_map() -> Schema {
    let map = json!({"type": "object", "additionalProperties": {"type": "string"}});
    schema(json!({"type": "object", "properties": {
        "data": map, "binaryData": map, "immutable": {"type": "boolean"}}}))
}

fn data() -> impl Strategy<Value = Value> {
    proptest::collection::btree_map("[a-c]", "[x-z]", 1..4).prop_map(|map| {
        map.into_iter().map(|(k, v)| (k, Value::from(v))).collect::<ferrite_json::Map>().into()
    })
}

proptest! {
    #[test]
    fn pruning_twice_is_pruning_once(spec in any_value(4)) {
        let schema = schema(json!({"type": "object", "properties": {
            "a": {"type": "object", "properties": {"b": {"type": "string"}}},
            "b": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                "properties": {"a": {"type": "object", "properties": {"c": {"type": "string"}}}}},
            "c": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
        }}));
        let mut once = spec;
        prune::prune(&mut once, &schema);
        let mut twice = once.clone();
        prop_assert_eq!(prune::prune(&mut twice, &schema), Vec::<String>::new());
        prop_assert_eq!(twice, once);
    }

    /// Server-side apply is the same whether a schema is a built-in type's or a definition's.
    #[test]
    fn apply_is_the_same_as_for_a_built_in_kind(first in data(), second in data(), third in data()) {
        let custom = like_config_map();
        let writer = |manager: &'static str, is_custom: bool| Writer {
            type_: if is_custom { None } else { crate::schema::kind("", "v1", "ConfigMap") },
            custom: is_custom.then_some(&custom),
            api_version: "v1",
            stored: None,
            others: None,
            manager,
            subresource: "",
            ignored: &[],
            now: jiff::Timestamp::UNIX_EPOCH,
        };
        let config = |data: &Value| json!({"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "x"}, "data": data});
        let run = |is_custom: bool| {
            let mut live = None;
            let mut said = Vec::new();
            for (manager, data) in [("a", &first), ("b", &second), ("a", &third)] {
                match managed_fields::apply(&writer(manager, is_custom), live.as_ref(), &config(data), false) {
                    Ok(applied) => {
                        let mut object = applied.object;
                        if object["data"].is_null() || object["data"] == json!({}) {
                            object.as_object_mut().map(|map| map.remove("data"));
                        }
                        live = Some(object);
                    }
                    Err(error) => said.push(error.to_string()),
                }
            }
            (live, said)
        };
        prop_assert_eq!(run(true), run(false));
    }
}

fn any_value(depth: u32) -> impl Strategy<Value = Value> {
    let leaf =
        prop_oneof![Just(Value::Null), "[a-c]".prop_map(Value::from), any::<i8>().prop_map(Value::from)];
    leaf.prop_recursive(depth, 32, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map("[a-c]", inner, 0..4)
                .prop_map(|map| map.into_iter().collect::<ferrite_json::Map>().into()),
        ]
    })
}
