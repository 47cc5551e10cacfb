use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// An operation on a map.
#[derive(Debug, Clone)]
enum Step {
    Insert(String, i64),
    Remove(String),
    Entry(String, i64),
    Keep(i64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // More keys than fit into the vector, some of them too long to lie in the value itself.
    let key = || "[a-d]{1,4}|[ab]{24,26}";
    let step = prop_oneof![
        6 => (key(), any::<i64>()).prop_map(|(key, value)| Step::Insert(key, value)),
        2 => key().prop_map(Step::Remove),
        2 => (key(), any::<i64>()).prop_map(|(key, value)| Step::Entry(key, value)),
        1 => (1..5i64).prop_map(Step::Keep),
    ];
    prop::collection::vec(step, 0..400)
}

proptest! {
    #[test]
    fn a_map_does_what_a_tree_does(steps in steps()) {
        let (mut map, mut model) = (Map::new(), BTreeMap::new());
        for step in steps {
            match step {
                Step::Insert(key, value) => {
                    let before = map.insert(key.as_str(), value.into());
                    prop_assert_eq!(before, model.insert(key, value).map(Value::from));
                }
                Step::Remove(key) => {
                    prop_assert_eq!(map.remove(&key), model.remove(&key).map(Value::from));
                }
                Step::Entry(key, value) => {
                    let there = map.entry(key.as_str()).or_insert(value.into());
                    prop_assert_eq!(&*there, *model.entry(key).or_insert(value));
                }
                Step::Keep(modulus) => {
                    map.retain(|_, value| value.as_i64().is_some_and(|v| v % 5 != modulus));
                    model.retain(|_, value| *value % 5 != modulus);
                }
            }
            prop_assert_eq!(map.len(), model.len());
        }
        for (key, value) in &model {
            prop_assert_eq!(&map[key], *value);
        }
        let made: Map = model.iter().rev().map(|(key, value)| (key.as_str(), Value::from(*value))).collect();
        prop_assert_eq!(&made, &map);
        prop_assert!(map.keys().eq(model.keys().map(String::as_str)));
        prop_assert!(map.iter().rev().map(|(key, _)| key.as_str()).eq(model.keys().rev().map(String::as_str)));
        prop_assert!(map.into_iter().map(|(key, value)| (key, value.as_i64().unwrap())).eq(model.into_iter().map(|(key, value)| (Text::from(key), value))));
    }

    #[test]
    fn text_comes_back_as_it_was(value in value()) {
        let theirs: serde_json::Value = from_str(&value.to_string()).unwrap();
        prop_assert_eq!(value.to_string(), theirs.to_string());
        let mut written = Vec::new();
        value.write_to(&mut written);
        prop_assert_eq!(written, value.to_string().into_bytes());
        prop_assert_eq!(&from_str::<Value>(&value.to_string()).unwrap(), &value);
        prop_assert_eq!(&to_value(&value).unwrap(), &value);
        prop_assert_eq!(&to_value(theirs).unwrap(), &value);
        prop_assert_eq!(&from_value::<Value>(value.clone()).unwrap(), &value);
    }
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1e9..1e9f64).prop_map(Value::from),
        ".{0,40}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 200, 90, |below| {
        prop_oneof![
            prop::collection::vec(below.clone(), 0..8).prop_map(Value::from),
            prop::collection::btree_map(".{0,30}", below, 0..80)
                .prop_map(|members| members.into_iter().collect::<Value>()),
        ]
    })
}

#[test]
fn of_two_members_with_one_key_the_later_counts() {
    let text = r#"{"b":1,"a":2,"b":3}"#;
    assert_eq!(from_str::<Value>(text).unwrap().to_string(), r#"{"a":2,"b":3}"#);
    assert_eq!(json!({"b": 1, "a": 2, "b": 3}).to_string(), r#"{"a":2,"b":3}"#);
}

#[test]
fn literals() {
    let (name, key) = ("web", String::from("key"));
    let value = json!({
        "null": null, name: true, (key.as_str()): [1, null, [], {}, -2.5, name.len()], "nested": {"list": [[name], {"a": "b"},]},
    });
    let text =
        r#"{"key":[1,null,[],{},-2.5,3],"nested":{"list":[["web"],{"a":"b"}]},"null":null,"web":true}"#;
    assert_eq!(value.to_string(), text);
    assert_eq!((json!(null), json!([]), json!({})), (Value::Null, Value::Array(vec![]), Map::new().into()));
    assert_eq!(json!(Some(name)), "web");
}

#[test]
fn looking_into_values() {
    let mut value = json!({"a": {"b/c": [10, {"~": "x"}]}});
    assert_eq!(value["a"]["b/c"][0], 10);
    assert_eq!(value["a"]["nothing"]["there"], Value::Null);
    assert_eq!(value["a"]["b/c"][7], Value::Null);
    assert_eq!(value.pointer("/a/b~1c/1/~0").and_then(Value::as_str), Some("x"));
    for nowhere in ["a", "/a/b~1c/01", "/a/b~1c/+1", "/a/b~1c/2", "/a/b~1c/0/x"] {
        assert_eq!(value.pointer(nowhere), None, "{nowhere}");
    }
    *value.pointer_mut("/a/b~1c/0").unwrap() = json!(11);
    value["made"]["on the way"] = json!(true);
    assert_eq!(value, json!({"a": {"b/c": [11, {"~": "x"}]}, "made": {"on the way": true}}));
    assert_eq!(value["made"].take(), json!({"on the way": true}));
    assert!(value["made"].is_null());
}

#[test]
fn numbers_keep_their_kind() {
    assert_ne!(json!(1), json!(1.0));
    assert_eq!(json!(u64::MAX).as_u64(), Some(u64::MAX));
    assert_eq!(json!(u64::MAX).as_i64(), None);
    assert_eq!(json!(f64::NAN), Value::Null);
}

#[test]
fn a_value_is_four_words() {
    assert_eq!(size_of::<Value>(), 4 * size_of::<usize>());
    assert_eq!(size_of::<Map>(), 3 * size_of::<usize>());
}

/// Everything that types are made of.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Everything {
    number: u16,
    negative: i8,
    real: f32,
    letter: char,
    nothing: Option<bool>,
    something: Option<String>,
    unit: (),
    pair: (i64, String),
    wrapped: Wrapped,
    variants: Vec<Variants>,
    by_number: BTreeMap<i32, bool>,
    by_variant: BTreeMap<Plain, u8>,
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
struct Wrapped(Vec<u8>);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
enum Plain {
    One,
}

#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
enum Variants {
    Unit,
    One(i32),
    Two(i32, String),
    Named { field: bool },
}

#[test]
fn other_types_become_what_their_text_would() {
    let everything = Everything {
        number: 7,
        negative: -7,
        real: 0.5,
        letter: 'ß',
        nothing: None,
        something: Some("a text that does not lie in the value itself".into()),
        unit: (),
        pair: (i64::MIN, "x".into()),
        wrapped: Wrapped(vec![1, 2]),
        variants: vec![
            Variants::Unit,
            Variants::One(1),
            Variants::Two(2, "two".into()),
            Variants::Named { field: true },
        ],
        by_number: [(-1, true), (10, false)].into(),
        by_variant: [(Plain::One, 1)].into(),
    };
    let value = to_value(&everything).unwrap();
    assert_eq!(value, from_str::<Value>(&to_string(&everything).unwrap()).unwrap());
    let again: BTreeMap<String, Value> = from_value(value.clone()).unwrap();
    assert_eq!(again.len(), 12);
    assert_eq!(from_value::<Wrapped>(value["wrapped"].clone()).unwrap(), everything.wrapped);
    assert_eq!(from_value::<Vec<Variants>>(value["variants"].clone()).unwrap(), everything.variants);
    assert!(to_value(BTreeMap::from([((1, 2), 3)])).is_err());
    assert!(from_value::<Variants>(json!({"One": 1, "Two": 2})).is_err());
    assert!(from_value::<(u8, u8)>(json!([1, 2, 3])).is_err());
    assert!(from_value::<u8>(json!(256)).is_err());
}

#[test]
fn bytes_that_are_no_text_are_refused_where_they_stand() {
    #[derive(serde::Deserialize, Debug)]
    struct Named {
        name: String,
    }
    let read: Named = from_slice("{\"name\":\"é\",\"other\":1}".as_bytes()).unwrap();
    assert_eq!(read.name, "é");
    for (bytes, column) in
        [(&b"{\"name\":\"\xff\"}"[..], 10), (b"{\"name\":\"a\",\"b\":\"\xc3\"}", 18), (b"\xff", 1)]
    {
        let error = from_slice::<Named>(bytes).unwrap_err();
        assert!(error.is_syntax(), "{error}");
        assert_eq!(error.column(), column, "{error}");
    }
}
