//! Formats of the API: documents, patches, selectors, quantities.

use crate::Target;
use ferrite_api::codec::{MAX_DEPTH, json, protobuf, yaml};
use ferrite_api::managed_fields::{self, Writer};
use ferrite_api::patch::{json_patch, merge_patch, strategic_merge};
use ferrite_api::quantity::Quantity;
use ferrite_api::schema::{self, TypeRef};
use ferrite_api::selector::{FieldSelector, LabelSelector};
use ferrite_json::Value;
use jiff::Timestamp;

/// Kinds whose schemas hold every shape there is: inlined structs, maps, int-or-string, times, raw JSON,
/// recursion.
fn types() -> impl Iterator<Item = TypeRef> {
    let kinds = [
        ("", "v1", "Pod"),
        ("", "v1", "Service"),
        ("", "v1", "Event"),
        ("", "v1", "PodList"),
        ("apps", "v1", "ControllerRevision"),
        ("apiextensions.k8s.io", "v1", "CustomResourceDefinition"),
    ];
    kinds.into_iter().filter_map(|(group, version, kind)| schema::kind(group, version, kind))
}

/// Levels that managedFields may have beyond the object they mirror.
const MANAGED: usize = 8;

/// Every value that input can make is shallow enough to be cloned, compared, written and dropped by recursion.
fn assert_bounded(value: &Value) {
    // The decoders allow an empty container at their last level.
    assert!(value.count_within(MAX_DEPTH + 1).is_some(), "a value is nested too deeply");
}

pub const JSON: Target = Target {
    name: "json",
    run: |bytes| {
        let _ = json::type_meta(bytes);
        let _ = json::decode_any(bytes);
        for type_ in types() {
            let Ok(decoded) = json::decode(type_, bytes) else { continue };
            let again =
                json::decode(type_, decoded.value.to_string().as_bytes()).expect("what we wrote reads");
            assert_eq!(again.value, decoded.value, "JSON reads differently the second time");
            assert_bounded(&decoded.value);
        }
    },
};

pub const YAML: Target = Target {
    name: "yaml",
    run: |bytes| {
        if let Ok(decoded) = yaml::decode_any(bytes) {
            assert_bounded(&decoded.value);
        }
        for type_ in types() {
            let _ = yaml::decode(type_, bytes);
        }
    },
};

pub const PROTOBUF: Target = Target {
    name: "protobuf",
    run: |bytes| {
        let _ = protobuf::decode(bytes);
        for type_ in types() {
            let Ok(value) = protobuf::decode_message(type_, bytes) else { continue };
            assert_bounded(&value);
            let Ok(written) = protobuf::encode_message(type_, &value) else { continue };
            let again = protobuf::decode_message(type_, &written).expect("what we wrote reads");
            let twice = protobuf::encode_message(type_, &again).expect("what we read writes");
            assert_eq!(twice, written, "protobuf reads differently the second time");
        }
    },
};

/// A document and a patch, with a zero byte between them.
fn document_and_patch(bytes: &[u8]) -> Option<(Value, Value)> {
    let at = bytes.iter().position(|byte| *byte == 0)?;
    let document = json::decode_any(&bytes[..at]).ok()?.value;
    Some((document, json::decode_any(&bytes[at + 1..]).ok()?.value))
}

pub const PATCH: Target = Target {
    name: "patch",
    run: |bytes| {
        let Some((document, patch)) = document_and_patch(bytes) else { return };
        let mut patched = document.clone();
        let _ = json_patch(&mut patched, &patch);
        assert_bounded(&patched);
        for type_ in types() {
            let mut patched = document.clone();
            let _ = strategic_merge(type_, &mut patched, &patch);
            assert_bounded(&patched);
        }
        let mut merged = document;
        merge_patch(&mut merged, &patch);
        assert_bounded(&merged);
        let once = merged.clone();
        merge_patch(&mut merged, &patch);
        assert_eq!(merged, once, "a merge patch changes something the second time");
    },
};

pub const APPLY: Target = Target {
    name: "apply",
    run: |bytes| {
        let Some((live, config)) = document_and_patch(bytes) else { return };
        for type_ in types() {
            let (Ok(live), Ok(config)) = (json::conform(type_, &live), json::conform(type_, &config)) else {
                continue;
            };
            let writer = Writer {
                type_: Some(type_),
                custom: None,
                api_version: "v1",
                stored: None,
                others: None,
                manager: "fuzzer",
                subresource: "",
                ignored: &[],
                now: Timestamp::UNIX_EPOCH,
            };
            for live in [None, Some(&live.value)] {
                let bounded = |value: &Value| value.count_within(MAX_DEPTH + MANAGED).is_some();
                if let Ok(applied) = managed_fields::apply(&writer, live, &config.value, true) {
                    assert!(bounded(&applied.object), "apply nests too deeply");
                }
                let mut updated = config.value.clone();
                managed_fields::update(&writer, live, &mut updated);
                assert!(bounded(&updated), "managedFields are nested too deeply");
            }
        }
    },
};

pub const SELECTOR: Target = Target {
    name: "selector",
    run: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        if let Ok(selector) = LabelSelector::parse(text) {
            let again = LabelSelector::parse(&selector.to_string()).expect("what we wrote reads");
            assert_eq!(again.to_string(), selector.to_string());
        }
        if let Ok(selector) = FieldSelector::parse(text) {
            // As upstream, terms are sorted as they were written, `==` and all: only the second writing is stable.
            let again = FieldSelector::parse(&selector.to_string()).expect("what we wrote reads");
            let twice = FieldSelector::parse(&again.to_string()).expect("what we wrote reads");
            assert_eq!(twice.to_string(), again.to_string());
        }
    },
};

pub const QUANTITY: Target = Target {
    name: "quantity",
    run: |bytes| {
        let Ok(text) = std::str::from_utf8(bytes) else { return };
        let Ok(quantity) = Quantity::parse(text) else { return };
        let canonical = quantity.to_string();
        let again = Quantity::parse(&canonical).expect("a canonical form is a quantity");
        assert_eq!(again.to_string(), canonical, "the canonical form of {text} is not stable");
        let _ = (again.value(), again.milli_value());
    },
};
