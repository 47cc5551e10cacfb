use super::*;
use crate::codec::{json, normalise};
use crate::schema;
use ferrite_json::json;

#[test]
fn writes_the_bytes_go_writes() {
    let service =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"k": "v"}});
    let type_ = schema::kind("", "v1", "ConfigMap").expect("known");
    let message = encode_message(type_, &service).expect("encodes");
    let metadata = b"\x0a\x01a\x12\x00\x1a\x00\x22\x00\x2a\x00\x32\x00\x38\x00\x42\x00";
    let mut expected = vec![0x0a, metadata.len() as u8];
    expected.extend(metadata);
    expected.extend(b"\x12\x06\x0a\x01k\x12\x01v");
    assert_eq!(message, expected);
    let enveloped = encode(&service).expect("encodes");
    let mut expected_envelope = b"k8s\0\x0a\x0f\x0a\x02v1\x12\x09ConfigMap\x12".to_vec();
    expected_envelope.push(expected.len() as u8);
    expected_envelope.extend(&expected);
    expected_envelope.extend(b"\x1a\x00\x22\x00");
    assert_eq!(enveloped, expected_envelope);
    assert_eq!(decode(&enveloped).expect("decodes"), Some(service));
}

#[test]
fn round_trips_inlined_structs_and_special_scalars() {
    let pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "p", "creationTimestamp": "2026-01-02T03:04:05Z",
            "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {}}}]},
        "spec": {"volumes": [{"name": "v", "configMap": {"name": "c", "defaultMode": 0}}],
            "terminationGracePeriodSeconds": 0, "overhead": {"cpu": "1m"},
            "containers": [{"name": "c", "resources": {},
                "livenessProbe": {"httpGet": {"port": "web"}, "initialDelaySeconds": 3},
                "readinessProbe": {"tcpSocket": {"port": 80}}}],
            "ephemeralContainers": [{"name": "e", "resources": {}, "targetContainerName": "c", "tty": true}]},
        "status": {}});
    let mut decoded = decode(&encode(&pod).expect("encodes")).expect("decodes").expect("known");
    let mut expected = pod;
    for value in [&mut decoded, &mut expected] {
        normalise(schema::kind("", "v1", "Pod").expect("known"), value);
    }
    assert_eq!(decoded, expected);
}

#[test]
fn fields_of_managers_are_known_by_their_place() {
    let schema =
        json!({"properties": {"fieldsV1": {"type": "object"}, "a": {"enum": [1, {"fieldsV1": [2]}]}}});
    let type_ = schema::named("apiextensions.v1.JSONSchemaProps").expect("known");
    let message = encode_message(type_, &schema).expect("encodes");
    assert_eq!(decode_message(type_, &message), Ok(schema));
    for annotations in [json!({"fieldsV1": "x"}), json!({"fieldsV1": "", "g": "\"\n"})] {
        let map = json!({"metadata": {"annotations": annotations, "managedFields": [{"fieldsV1": null}, {"fieldsV1": {"f:a": {}}}]}});
        let type_ = schema::kind("", "v1", "ConfigMap").expect("known");
        let read = decode_message(type_, &encode_message(type_, &map).expect("encodes")).expect("decodes");
        assert_eq!(read["metadata"]["annotations"], map["metadata"]["annotations"]);
        let fields = json!([null, {"f:a": {}}]);
        let read = |at: usize| read["metadata"]["managedFields"][at]["fieldsV1"].clone();
        assert_eq!(json!([read(0), read(1)]), fields);
    }
}

#[test]
fn values_of_another_shape_are_refused() {
    let type_ = schema::kind("", "v1", "Pod").expect("known");
    for (pod, message) in [
        (
            json!({"spec": {"nodeName": 1}}),
            "core.v1.PodSpec.nodeName: the value does not have the type of the field",
        ),
        (
            json!({"spec": {"priority": "1"}}),
            "core.v1.PodSpec.priority: the value does not have the type of the field",
        ),
        (
            json!({"spec": {"priority": 1.5}}),
            "core.v1.PodSpec.priority: the value does not have the type of the field",
        ),
        (
            json!({"spec": {"containers": {}}}),
            "core.v1.PodSpec.containers: the value does not have the type of the field",
        ),
        (json!([]), "the object is not a JSON object"),
    ] {
        assert_eq!(encode_message(type_, &pod).expect_err("refused").to_string(), message);
    }
}

#[test]
fn refuses_hostile_messages() {
    let type_ = schema::kind("", "v1", "Pod").expect("known");
    for (bytes, message) in [
        (&b"\x0a\xff\xff\xff\xff\x0f"[..], "unexpected EOF"),
        (b"\x0a", "unexpected EOF"),
        (b"\x08\x01", "proto: wrong wireType = 0 for field metadata"),
        (b"\x00\x01", "proto: illegal tag"),
        (b"\x0b", "proto: illegal wireType"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "proto: integer overflow"),
    ] {
        assert_eq!(decode_message(type_, bytes).expect_err("refused").to_string(), message);
    }
    assert_eq!(open(b"{}"), Err(crate::codec::DecodeError::NoEnvelope));
    let skipped = decode_message(type_, b"\xfa\x3f\x03abc\xf8\x3f\x01").expect("unknown tags are skipped");
    assert_eq!(skipped, json!({}));
}

#[test]
fn bounds_the_depth_of_recursive_types() {
    let type_ = schema::named("apiextensions.v1.JSONSchemaProps").expect("known");
    // Field `not`, tag 28, within itself.
    let mut message = Vec::new();
    for _ in 0..2000 {
        let mut outer = vec![0xe2, 0x01];
        let mut length = message.len();
        while length > 0x7f {
            outer.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        outer.push(length as u8);
        outer.extend(&message);
        message = outer;
    }
    assert_eq!(decode_message(type_, &message), Err(crate::codec::DecodeError::TooDeep));
}

#[test]
fn watch_events_carry_the_enveloped_object() {
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    let event = encode_watch_event("ADDED", &encode(&object).expect("encodes"));
    let type_ = schema::kind("", "v1", "WatchEvent").expect("known");
    assert_eq!(decode_message(type_, &event), Ok(json!({"type": "ADDED", "object": object})));
    assert_eq!(frame(b"abc").expect("short"), b"\0\0\0\x03abc");
}

proptest::proptest! {
    #[test]
    fn never_panics(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
        for kind in ["Pod", "Service", "Event", "NodeList"] {
            let type_ = schema::kind("", "v1", kind).expect("known");
            if let Ok(value) = decode_message(type_, &bytes) {
                let _ = json::conform(type_, &value);
                let _ = encode_message(type_, &value);
            }
        }
        let mut enveloped = MAGIC.to_vec();
        enveloped.extend(&bytes);
        let _ = decode(&enveloped);
    }
}

#[test]
fn raw_json_and_maps_count_as_levels() {
    use crate::codec::{DecodeError, MAX_DEPTH};
    let type_ = schema::kind("apps", "v1", "ControllerRevision").expect("known");
    let written = |levels: usize| {
        let data = (0..levels).fold(json!(1), |inner, _| json!([inner]));
        encode_message(type_, &json!({"data": data})).expect("encodes")
    };
    assert!(decode_message(type_, &written(MAX_DEPTH - 1)).is_ok());
    assert_eq!(decode_message(type_, &written(MAX_DEPTH)), Err(DecodeError::TooDeep));
    // A schema within a map of schemas is two levels of JSON and one message.
    let type_ = schema::named("apiextensions.v1.JSONSchemaProps").expect("known");
    let schema = (0..MAX_DEPTH).fold(json!({}), |inner, _| json!({"properties": {"a": inner}}));
    if let Ok(message) = encode_message(type_, &schema) {
        assert_eq!(decode_message(type_, &message), Err(DecodeError::TooDeep));
    }
}
