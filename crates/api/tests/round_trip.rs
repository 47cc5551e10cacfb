//! Properties over objects generated from the schema itself.

use ferrite_api::codec::{json, normalise, normalise_for_storage, protobuf, yaml};
use ferrite_api::managed_fields::{Writer, apply, update};
use ferrite_api::schema::{self, Kind, Slot, TypeRef, Wire};
use ferrite_json::{Map, Value, json};
use proptest::prelude::*;

/// A small generator of numbers: shrinking a seed is of no use, so none is wanted.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn pick<'a>(&mut self, choices: &[&'a str]) -> &'a str {
        choices[self.roll(choices.len() as u64) as usize]
    }
}

fn on_the_wire(wire: &[Wire], index: usize) -> bool {
    wire.iter().any(|w| match &w.slot {
        Slot::Field(i) => usize::from(*i) == index,
        Slot::Inline(inner) => on_the_wire(inner, index),
    })
}

fn object(type_: TypeRef, dice: &mut Dice, depth: usize) -> Value {
    let mut map = Map::new();
    for (index, field) in type_.fields.iter().enumerate() {
        if !on_the_wire(type_.wire, index) || field.name == "managedFields" {
            continue;
        }
        let wanted = if depth > 4 { 0 } else { 40 / type_.fields.len().max(1) + 1 };
        if dice.roll(8) < wanted as u64 {
            map.insert(field.name, value(&field.kind, dice, depth + 1));
        }
    }
    Value::Object(map)
}

fn value(kind: &Kind, dice: &mut Dice, depth: usize) -> Value {
    match kind {
        Kind::String => dice.pick(&["", "a", "b", "é\n\"", "true", "10"]).into(),
        Kind::Bool => (dice.roll(2) == 1).into(),
        Kind::Int32 => [0, 1, -1, i32::MAX, i32::MIN][dice.roll(5) as usize].into(),
        Kind::Int64 => [0, 1, -1, i64::MAX, i64::MIN][dice.roll(5) as usize].into(),
        Kind::Double => [json!(0), json!(1.5), json!(-3)][dice.roll(3) as usize].clone(),
        Kind::Bytes => dice.pick(&["", "AA==", "//79"]).into(),
        Kind::Quantity => dice.pick(&["0", "1", "100m", "1Gi", "-2"]).into(),
        Kind::IntOrString => [json!(0), json!(-5), json!("50%"), json!("")][dice.roll(4) as usize].clone(),
        Kind::Time => dice.pick(&["2026-01-02T03:04:05Z", "1969-12-31T23:59:59Z"]).into(),
        Kind::MicroTime => dice.pick(&["2026-01-02T03:04:05.000006Z", "1969-12-31T23:59:59.500000Z"]).into(),
        Kind::Duration => dice.pick(&["0s", "1h2m3.5s", "-1.5ms"]).into(),
        Kind::Raw => [json!({"a": [1, null, "x"]}), json!("s"), json!(0)][dice.roll(3) as usize].clone(),
        Kind::Strings => json!(["x", ""]),
        Kind::Struct(type_) => object(type_, dice, depth),
        Kind::List(item) => (0..dice.roll(3)).map(|_| value(item, dice, depth)).collect(),
        Kind::Map(item) => {
            let keys = ["", "k", "x.example/y"];
            Value::Object(
                keys[..dice.roll(4) as usize].iter().map(|k| ((*k), value(item, dice, depth))).collect(),
            )
        }
        Kind::SchemaOrArray(type_) => match dice.roll(2) {
            0 => object(type_, dice, depth),
            _ => json!([object(type_, dice, depth)]),
        },
        Kind::SchemaOrBool(type_) => match dice.roll(3) {
            0 => object(type_, dice, depth),
            other => (other == 1).into(),
        },
        Kind::SchemaOrStrings(type_) => match dice.roll(2) {
            0 => object(type_, dice, depth),
            _ => json!(["p"]),
        },
    }
}

fn any_object(seed: u64) -> (TypeRef, Value) {
    let mut dice = Dice(seed | 1);
    // An event of a watch is a kind, but no object that says so.
    let kinds: Vec<_> = schema::kinds().filter(|(_, type_)| type_.field("kind").is_some()).collect();
    let ((group, version, kind), type_) = kinds[dice.roll(kinds.len() as u64) as usize];
    let mut object = object(type_, &mut dice, 0);
    let api_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    object["apiVersion"] = api_version.into();
    object["kind"] = kind.into();
    (type_, object)
}

/// Replaces a part of the value, or adds a member that no type has.
fn damage(value: &mut Value, dice: &mut Dice) {
    let below = match value {
        Value::Object(map) if dice.roll(12) == 0 => {
            map.insert("unheardOf", json!(1));
            return;
        }
        Value::Object(map) if !map.is_empty() && dice.roll(8) > 0 => {
            let position = dice.roll(map.len() as u64) as usize;
            map.values_mut().nth(position)
        }
        Value::Array(list) if !list.is_empty() && dice.roll(8) > 0 => {
            let position = dice.roll(list.len() as u64) as usize;
            list.get_mut(position)
        }
        _ => None,
    };
    match below {
        Some(below) => damage(below, dice),
        None => {
            let others = [
                json!(null),
                json!(1.0),
                json!(1.5),
                json!(5_000_000_000_i64),
                json!(u64::MAX),
                json!(true),
                json!("1000m"),
                json!(" 1"),
                json!("2026-01-02T03:04:05+01:00"),
                json!("2026-01-02T03:04:05.1Z"),
                json!("AB=="),
                json!(""),
                json!([]),
                json!({}),
                json!([null]),
                json!({"a": null}),
            ];
            *value = others[dice.roll(others.len() as u64) as usize].clone();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn generated_objects_obey_the_schema(seed: u64) {
        let (type_, object) = any_object(seed);
        let decoded = json::conform(type_, &object).expect("decodes");
        prop_assert_eq!(&decoded.strict, &Vec::<String>::new());
        prop_assert_eq!(&decoded.value, &object);
    }

    #[test]
    fn a_value_conforms_as_its_text_decodes(seed: u64) {
        let (type_, mut object) = any_object(seed);
        let mut dice = Dice(seed.rotate_left(32) | 1);
        for _ in 0..dice.roll(3) {
            damage(&mut object, &mut dice);
        }
        let decoded = json::decode(type_, object.to_string().as_bytes());
        prop_assert_eq!(&json::conform(type_, &object), &decoded);
        let mut in_place = object.clone();
        match (json::conform_in_place(type_, &mut in_place), decoded) {
            (Ok(strict), Ok(decoded)) => prop_assert_eq!((strict, in_place), (decoded.strict, decoded.value)),
            (Err(error), Err(expected)) => prop_assert_eq!((error, in_place), (expected, object)),
            (result, expected) => prop_assert!(false, "{:?} and {:?}", result, expected),
        }
    }

    #[test]
    fn normalising_twice_is_normalising_once(seed: u64) {
        let (type_, mut object) = any_object(seed);
        normalise(type_, &mut object);
        let mut again = object.clone();
        normalise(type_, &mut again);
        prop_assert_eq!(&again, &object);
        normalise_for_storage(type_, &mut object);
        normalise_for_storage(type_, &mut again);
        prop_assert_eq!(again, object);
    }

    #[test]
    fn protobuf_loses_nothing(seed: u64) {
        let (type_, mut object) = any_object(seed);
        let bytes = protobuf::encode(&object).expect("encodes");
        let mut decoded = protobuf::decode(&bytes).expect("decodes").expect("a known kind");
        normalise_for_storage(type_, &mut decoded);
        normalise_for_storage(type_, &mut object);
        prop_assert_eq!(&decoded, &object);
        // A normalised object has one encoding, whether or not it is normalised again on the way.
        let bytes = protobuf::encode(&object).expect("encodes again");
        let decoded = protobuf::decode(&bytes).expect("decodes again").expect("a known kind");
        prop_assert_eq!(protobuf::encode(&decoded).expect("encodes a third time"), bytes);
    }

    #[test]
    fn yaml_loses_nothing(seed: u64) {
        let (_, object) = any_object(seed);
        let text = yaml::encode(&object).expect("encodes");
        prop_assert_eq!(yaml::decode_any(text.as_bytes()).expect("decodes").value, object);
    }

    #[test]
    fn applying_twice_changes_nothing(seed: u64) {
        // An empty key that has a default names another element once the empty text is gone.
        let (type_, mut config) = any_object(seed);
        normalise(type_, &mut config);
        let now = "2026-01-01T00:00:00Z".parse().expect("a time");
        let api_version = config["apiVersion"].as_str().unwrap_or_default().to_owned();
        let writer = Writer {
            stored: None,
            others: None,
            type_: Some(type_), custom: None, api_version: &api_version, manager: "m", subresource: "", ignored: &[], now,
        };
        // Generated lists may hold two elements of the same key, which apply refuses.
        // A configuration that owns nothing leaves no trace, and the next apply takes the object for one from
        // before the first.
        if let Ok(first) = apply(&writer, None, &config, false)
            && first.object.pointer("/metadata/managedFields").is_some()
        {
            let second = apply(&writer, Some(&first.object), &config, false).expect("the same again");
            prop_assert_eq!(&second.object, &first.object);
            prop_assert!(!second.changed);
        }
    }

    #[test]
    fn makers_own_the_same_fields_whether_or_not_they_are_the_first(seed: u64) {
        let (type_, mut first) = any_object(seed);
        normalise(type_, &mut first);
        let now = "2026-01-01T00:00:00Z".parse().expect("a time");
        let api_version = first["apiVersion"].as_str().unwrap_or_default().to_owned();
        for ignored in [&[][..], &["status"], &["spec", "metadata.labels"]] {
            let writer = Writer {
                stored: None,
                others: None,
                type_: Some(type_), custom: None, api_version: &api_version, manager: "m", subresource: "", ignored, now,
            };
            // Where there is another manager all of them are compared.
            let mut second = first.clone();
            second["metadata"]["managedFields"] = json!([{
                "manager": "other", "operation": "Update", "apiVersion": api_version,
                "fieldsType": "FieldsV1", "fieldsV1": {"f:other": {}},
            }]);
            let mut first = first.clone();
            update(&writer, None, &mut first);
            update(&writer, None, &mut second);
            let entry = |object: &Value| {
                let entries = object.pointer("/metadata/managedFields").and_then(Value::as_array)?;
                entries.iter().find(|entry| entry["manager"] == "m").cloned()
            };
            prop_assert_eq!(entry(&first), entry(&second));
        }
    }

    #[test]
    fn damaged_protobuf_never_panics(seed: u64, at: prop::sample::Index, byte: u8) {
        let (type_, object) = any_object(seed);
        let mut bytes = protobuf::encode_message(type_, &object).expect("encodes");
        if !bytes.is_empty() {
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = protobuf::decode_message(type_, &bytes);
            let _ = protobuf::decode_message(type_, &bytes[..at]);
        }
    }
}
