//! CustomResourceDefinitions as upstream stores them: in `apiextensions.k8s.io/v1beta1`, which it does not serve any more.

use ferrite_json::{Map, Value, json};

pub(super) const OLD_VERSION: &str = "apiextensions.k8s.io/v1beta1";
pub(super) const KIND: &str = "CustomResourceDefinition";

/// Members of the old spec that apply to all versions, and their names in a version of `v1`.
const SHARED: [(&str, &str); 4] = [
    ("subresources", "subresources"),
    ("validation", "schema"),
    ("additionalPrinterColumns", "additionalPrinterColumns"),
    ("selectableFields", "selectableFields"),
];

/// The same definition in `apiextensions.k8s.io/v1`.
pub(super) fn to_v1(mut object: Value) -> Value {
    object["apiVersion"] = "apiextensions.k8s.io/v1".into();
    let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) else { return object };
    let name = spec.remove("version");
    let mut versions = match spec.remove("versions") {
        Some(Value::Array(versions)) if !versions.is_empty() => versions,
        _ => name.into_iter().map(|name| json!({"name": name, "served": true, "storage": true})).collect(),
    };
    for (old, new) in SHARED {
        let Some(shared) = spec.remove(old) else { continue };
        for version in versions.iter_mut().filter_map(Value::as_object_mut) {
            version.insert(new, shared.clone());
        }
    }
    versions.iter_mut().for_each(rename_paths);
    spec.insert("versions", versions.into());
    if let Some(conversion) = spec.get_mut("conversion").and_then(Value::as_object_mut) {
        nest_webhook(conversion);
    }
    if spec.get("preserveUnknownFields").is_some_and(|preserve| *preserve == false) {
        spec.remove("preserveUnknownFields");
    }
    object
}

fn rename_paths(version: &mut Value) {
    let columns = version.get_mut("additionalPrinterColumns").and_then(Value::as_array_mut);
    for column in columns.into_iter().flatten().filter_map(Value::as_object_mut) {
        if let Some(path) = column.remove("JSONPath") {
            column.insert("jsonPath", path);
        }
    }
}

/// The old version has the members of `webhook` beside the strategy.
fn nest_webhook(conversion: &mut Map) {
    let mut webhook = Map::new();
    for (old, new) in
        [("webhookClientConfig", "clientConfig"), ("conversionReviewVersions", "conversionReviewVersions")]
    {
        if let Some(value) = conversion.remove(old) {
            webhook.insert(new, value);
        }
    }
    if !webhook.is_empty() {
        conversion.insert("webhook", webhook.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_members_go_to_every_version() {
        let old = json!({
            "kind": KIND, "apiVersion": OLD_VERSION, "metadata": {"name": "cats.example.com"},
            "spec": {
                "group": "example.com", "version": "v1", "preserveUnknownFields": false,
                "validation": {"openAPIV3Schema": {"type": "object"}},
                "subresources": {"status": {}},
                "additionalPrinterColumns": [{"name": "a", "type": "string", "JSONPath": ".a"}],
                "versions": [{"name": "v1", "served": true, "storage": true}, {"name": "v2", "served": true, "storage": false}],
                "conversion": {"strategy": "Webhook", "conversionReviewVersions": ["v1"], "webhookClientConfig": {"url": "https://a"}},
            },
        });
        let shared = json!({
            "schema": {"openAPIV3Schema": {"type": "object"}}, "subresources": {"status": {}},
            "additionalPrinterColumns": [{"name": "a", "type": "string", "jsonPath": ".a"}],
        });
        let version = |name: &str, storage: bool| {
            let mut version = json!({"name": name, "served": true, "storage": storage});
            version.as_object_mut().expect("a map").extend(shared.as_object().expect("a map").clone());
            version
        };
        assert_eq!(
            to_v1(old),
            json!({
                "kind": KIND, "apiVersion": "apiextensions.k8s.io/v1", "metadata": {"name": "cats.example.com"},
                "spec": {
                    "group": "example.com",
                    "versions": [version("v1", true), version("v2", false)],
                    "conversion": {"strategy": "Webhook", "webhook": {"conversionReviewVersions": ["v1"], "clientConfig": {"url": "https://a"}}},
                },
            })
        );
    }

    #[test]
    fn the_oldest_definitions_have_one_version() {
        let old = json!({"kind": KIND, "apiVersion": OLD_VERSION, "spec": {"version": "v1", "conversion": {"strategy": "None"}, "preserveUnknownFields": true}});
        let new = to_v1(old);
        assert_eq!(new["spec"]["versions"], json!([{"name": "v1", "served": true, "storage": true}]));
        assert_eq!(new["spec"]["conversion"], json!({"strategy": "None"}));
        assert_eq!(new["spec"]["preserveUnknownFields"], true);
        assert_eq!(to_v1(json!({"spec": 7}))["spec"], 7);
    }
}
