//! The first beta of `resource.k8s.io`: requests were not in `exactly`, devices were in `basic`.

use super::{deviceclass, resourceclaim, resourceslice};
use crate::kinds::common::access::{list_mut, object_mut, present, remove};
use crate::kinds::common::converted::Converted;
use crate::resource::{Storage, Strategy};
use ferrite_json::{Map, Value, json};

/// Fields of a request that moved.
const OF_REQUEST: [&str; 7] =
    ["deviceClassName", "selectors", "allocationMode", "count", "adminAccess", "tolerations", "capacity"];

pub(in crate::kinds) const CLAIMS: Storage = storage("ResourceClaim", "resourceclaims", claim_to, claim_from);
pub(in crate::kinds) const TEMPLATES: Storage =
    storage("ResourceClaimTemplate", "resourceclaimtemplates", template_to, template_from);
pub(in crate::kinds) const SLICES: Storage = storage("ResourceSlice", "resourceslices", slice_to, slice_from);
pub(in crate::kinds) const CLASSES: Storage = storage("DeviceClass", "deviceclasses", plain_to, plain_from);

const fn storage(
    kind: &'static str,
    plural: &'static str,
    to_storage: fn(&mut Value),
    from_storage: fn(&mut Value),
) -> Storage {
    Storage { group: "resource.k8s.io", version: "v1", kind, plural, to_storage, from_storage }
}

fn converted<S: Strategy>(inner: S, storage: Storage) -> Converted<S> {
    Converted { inner, storage, default: |_| {}, hidden: &[] }
}

pub(in crate::kinds) fn claims() -> impl Strategy {
    converted(resourceclaim::ResourceClaims, CLAIMS)
}

pub(in crate::kinds) fn templates() -> impl Strategy {
    converted(resourceclaim::ResourceClaimTemplates, TEMPLATES)
}

pub(in crate::kinds) fn slices() -> impl Strategy {
    converted(resourceslice::ResourceSlices, SLICES)
}

pub(in crate::kinds) fn classes() -> impl Strategy {
    converted(deviceclass::DeviceClasses, CLASSES)
}

fn set_version(object: &mut Value, version: &str) {
    if object.is_object() {
        object["apiVersion"] = format!("resource.k8s.io/{version}").into();
    }
}

fn plain_to(object: &mut Value) {
    set_version(object, "v1");
}

fn plain_from(object: &mut Value) {
    set_version(object, "v1beta1");
}

fn claim_to(object: &mut Value) {
    plain_to(object);
    if let Some(spec) = object_mut(object, "spec") {
        requests_to(spec);
    }
}

fn claim_from(object: &mut Value) {
    plain_from(object);
    if let Some(spec) = object_mut(object, "spec") {
        requests_from(spec);
    }
}

fn template_to(object: &mut Value) {
    plain_to(object);
    if let Some(spec) = object_mut(object, "spec").and_then(|s| object_mut(s, "spec")) {
        requests_to(spec);
    }
}

fn template_from(object: &mut Value) {
    plain_from(object);
    if let Some(spec) = object_mut(object, "spec").and_then(|s| object_mut(s, "spec")) {
        requests_from(spec);
    }
}

fn requests_to(spec: &mut Value) {
    let Some(devices) = object_mut(spec, "devices") else { return };
    for request in list_mut(devices, "requests").filter(|r| r.is_object()) {
        let moved: Map =
            OF_REQUEST.iter().filter_map(|key| Some(((*key).to_owned(), remove(request, key)?))).collect();
        if !moved.is_empty() && !present(request, "exactly") {
            request["exactly"] = moved.into();
        }
    }
}

fn requests_from(spec: &mut Value) {
    let Some(devices) = object_mut(spec, "devices") else { return };
    for request in list_mut(devices, "requests") {
        if let Some(Value::Object(exactly)) = remove(request, "exactly")
            && let Some(request) = request.as_object_mut()
        {
            request.extend(exactly);
        }
    }
}

fn slice_to(object: &mut Value) {
    plain_to(object);
    let Some(spec) = object_mut(object, "spec") else { return };
    for device in list_mut(spec, "devices") {
        if let Some(Value::Object(basic)) = remove(device, "basic")
            && let Some(device) = device.as_object_mut()
        {
            device.extend(basic);
        }
    }
}

fn slice_from(object: &mut Value) {
    plain_from(object);
    let Some(spec) = object_mut(object, "spec") else { return };
    for device in list_mut(spec, "devices") {
        let name = remove(device, "name");
        let basic = std::mem::replace(device, json!({}));
        if let Some(name) = name {
            device["name"] = name;
        }
        device["basic"] = basic;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways() {
        let older = json!({"apiVersion": "resource.k8s.io/v1beta1",
            "spec": {"devices": {"requests": [{"name": "r", "deviceClassName": "c", "count": 1}]}}});
        let newer = json!({"apiVersion": "resource.k8s.io/v1",
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "c", "count": 1}}]}}});
        let mut object = older.clone();
        claim_to(&mut object);
        assert_eq!(object, newer);
        claim_from(&mut object);
        assert_eq!(object, older);

        let older = json!({"apiVersion": "resource.k8s.io/v1beta1",
            "spec": {"devices": [{"name": "d", "basic": {"attributes": {"a": {"int": 1}}}}]}});
        let mut object = older.clone();
        slice_to(&mut object);
        assert_eq!(object["spec"]["devices"][0], json!({"name": "d", "attributes": {"a": {"int": 1}}}));
        slice_from(&mut object);
        assert_eq!(object, older);
    }
}
