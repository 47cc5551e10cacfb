use super::*;
use crate::schema;
use ferrite_json::json;

fn pod(text: &str) -> Result<Decoded, DecodeError> {
    decode(schema::kind("", "v1", "Pod").expect("pods are known"), text.as_bytes())
}

#[test]
fn drops_and_reports_unknown_and_duplicate_fields_in_document_order() {
    let text = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"a","name":"b","labels":{"x":"1","x":"2"}},
        "spec":{"containers":[{"name":"c","junk":{"a":[1]}}],"bogus":1,"Hostname":"h"}}"#;
    let decoded = pod(text).expect("valid but for strictness");
    assert_eq!(
        decoded.strict,
        [
            "duplicate field \"metadata.name\"",
            "duplicate field \"metadata.labels.x\"",
            "unknown field \"spec.containers[0].junk\"",
            "unknown field \"spec.bogus\"",
            "unknown field \"spec.Hostname\"",
        ]
    );
    assert_eq!(
        decoded.value,
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b", "labels": {"x": "2"}},
            "spec": {"containers": [{"name": "c"}]}})
    );
}

#[test]
fn words_errors_as_upstream() {
    for (text, message) in [
        (r#"{"spec":"x"}"#, "json: cannot unmarshal string into Go struct field Pod.spec of type v1.PodSpec"),
        (
            r#"{"metadata":{"labels":[]}}"#,
            "json: cannot unmarshal array into Go struct field ObjectMeta.metadata.labels of type map[string]string",
        ),
        (
            r#"{"spec":{"containers":{"a":1}}}"#,
            "json: cannot unmarshal object into Go struct field PodSpec.spec.containers of type []v1.Container",
        ),
        (
            r#"{"spec":{"priority":1.5}}"#,
            "json: cannot unmarshal number 1.5 into Go struct field PodSpec.spec.priority of type int32",
        ),
        (
            r#"{"spec":{"priority":2147483648}}"#,
            "json: cannot unmarshal number 2147483648 into Go struct field PodSpec.spec.priority of type int32",
        ),
        (
            r#"{"metadata":{"annotations":{"a":1}}}"#,
            "json: cannot unmarshal number into Go struct field ObjectMeta.metadata.annotations of type string",
        ),
        (r#"{"spec":}"#, "invalid character '}' looking for beginning of value"),
        (r#"{"spec""#, "unexpected end of JSON input"),
        (r#"{"spec":nul1}"#, "invalid character '1' in literal null (expecting 'l')"),
        (r#"{"spec":nul"#, "invalid character ' ' in literal null (expecting 'l')"),
        (r#"{"spec":-"#, "invalid character ' ' in numeric literal"),
        (r#"{"spec":1."#, "invalid character ' ' after decimal point in numeric literal"),
        (r#"{"spec":1e"#, "invalid character ' ' in exponent of numeric literal"),
        (r#"{"spec":"\"#, "invalid character ' ' in string escape code"),
        (r#"{"spec":"\u00"#, "invalid character ' ' in \\u hexadecimal character escape"),
        (r#"{"spec":"x"#, "unexpected end of JSON input"),
        (r#"{} x"#, "invalid character 'x' after top-level value"),
        (
            r#"{"spec":{"overhead":{"cpu":"1x"}}}"#,
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        ),
        // A text that its type cannot read takes precedence over an earlier value of the wrong type, and
        // invalid JSON takes precedence over both.
        (
            r#"{"spec":{"priority":"x","overhead":{"cpu":"1x"},"hostname":1}}"#,
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'",
        ),
        (
            r#"{"spec":{"priority":"x","hostname":1}}"#,
            "json: cannot unmarshal string into Go struct field PodSpec.spec.priority of type int32",
        ),
        (r#"{"spec":{"overhead":{"cpu":"1x"}}} x"#, "invalid character 'x' after top-level value"),
    ] {
        assert_eq!(pod(text).expect_err(text).to_string(), message);
    }
}

#[test]
fn words_mismatches_of_merged_objects_as_upstream() {
    for (text, message) in [
        (r#"{"spec":[]}"#, "cannot restore struct from: slice"),
        (r#"{"spec":{"priority":"three"}}"#, "unrecognized type: int32"),
        (r#"{"metadata":{"labels":"x"}}"#, "cannot restore map from string"),
        (r#"{"spec":{"containers":1}}"#, "cannot restore slice from int64"),
    ] {
        assert_eq!(pod(text).expect_err(text).unstructured(), message);
    }
}

#[test]
fn null_is_absent_and_scalars_take_their_canonical_form() {
    let text = r#"{"metadata":{"creationTimestamp":"2026-01-02T03:04:05+01:00","labels":null},
        "spec":{"hostname":null,"overhead":{"cpu":1,"memory":" 1024Mi","x":"1500m"},
        "containers":[{"livenessProbe":{"httpGet":{"port":80}}},null]}}"#;
    assert_eq!(
        pod(text).expect("valid").value,
        json!({"metadata": {"creationTimestamp": "2026-01-02T02:04:05Z"},
            "spec": {"overhead": {"cpu": "1", "memory": "1Gi", "x": "1500m"},
                "containers": [{"livenessProbe": {"httpGet": {"port": 80}}}, {}]}})
    );
}

#[test]
fn decodes_escapes_as_go() {
    let decoded = decode_any(br#"["\u00e9\ud83d\ude00\ud800x\n\/"]"#).expect("valid");
    assert_eq!(decoded.value, json!(["é😀\u{fffd}x\n/"]));
    assert_eq!(decode_any(b"\"\xff\"").expect("lossy").value, json!("\u{fffd}"));
}

#[test]
fn bounds_depth() {
    let deep = "[".repeat(100_000);
    assert_eq!(decode_any(deep.as_bytes()), Err(DecodeError::TooDeep));
    let text = format!("{{\"bogus\":{deep}");
    assert_eq!(pod(&text), Err(DecodeError::TooDeep));
}

#[test]
fn reads_type_meta_of_anything() {
    assert_eq!(type_meta(br#"{"kind":"A","apiVersion":"b/c","x":[1]}"#), Ok(("b/c".into(), "A".into())));
    assert!(type_meta(b"[]").is_err());
    assert!(type_meta(br#"{"kind":1}"#).is_err());
}

proptest::proptest! {
    #[test]
    fn never_panics(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200)) {
        let _ = decode(schema::kind("", "v1", "Pod").expect("known"), &bytes);
    }

    #[test]
    fn never_panics_on_json_like_text(text in "[\\{\\}\\[\\]\",:a-z0-9\\\\.e+ -]{0,80}") {
        let _ = decode_any(text.as_bytes());
        let _ = pod(&text);
    }
}

/// Go's names of types: the declared ones, embedded structs on the way, and the names in errors of custom
/// decoders.
#[test]
fn type_errors_name_the_types_of_go() {
    for (api_version, kind, body, message) in [
        (
            "v1",
            "Service",
            r#"{"spec":{"type":5}}"#,
            "json: cannot unmarshal number into Go struct field ServiceSpec.spec.type of type v1.ServiceType",
        ),
        (
            "v1",
            "Pod",
            r#"{"spec":{"volumes":[{"configMap":{"name":5}}]}}"#,
            "json: cannot unmarshal number into Go struct field \
             ConfigMapVolumeSource.spec.volumes.VolumeSource.configMap.LocalObjectReference.name of type string",
        ),
        (
            "v1",
            "Pod",
            r#"{"spec":{"containers":[{"securityContext":{"capabilities":{"add":[5]}}}]}}"#,
            "json: cannot unmarshal number into Go struct field \
             Capabilities.spec.containers.securityContext.capabilities.add of type v1.Capability",
        ),
        (
            "v1",
            "Pod",
            r#"{"spec":{"containers":[{"resources":{"limits":"x"}}]}}"#,
            "json: cannot unmarshal string into Go struct field \
             ResourceRequirements.spec.containers.resources.limits of type v1.ResourceList",
        ),
        (
            "coordination.k8s.io/v1",
            "Lease",
            r#"{"spec":{"renewTime":5}}"#,
            "json: cannot unmarshal number into Go struct field LeaseSpec.spec.renewTime of type string",
        ),
        (
            "v1",
            "Service",
            r#"{"spec":{"ports":[{"targetPort":2147483648}]}}"#,
            "json: cannot unmarshal number 2147483648 into Go struct field \
             ServicePort.spec.ports.targetPort of type int32",
        ),
    ] {
        let type_ = crate::schema::of_api_version(api_version, kind).unwrap();
        let error = super::decode(type_, body.as_bytes()).unwrap_err();
        assert_eq!(error.to_string(), message);
    }
}
