//! A request as webhooks and the expressions of admission see it.

use super::{Attributes, Operation};
use crate::auth::User;
use ferrite_api::resource::Resource;
use ferrite_api::{Gvk, Gvr};
use ferrite_json::{Map, Value, json};

/// The kind of the object as one matched as `matched` sees it.
pub(crate) fn matched_kind(attributes: &Attributes<'_>, matched: &Resource) -> Gvk {
    let own = attributes.kind();
    if own == attributes.resource.gvk() { matched.gvk() } else { own }
}

/// The fields of an AdmissionRequest but for its UID and objects.
pub(crate) fn request(attributes: &Attributes<'_>, matched: &Resource) -> Map {
    let kind = |gvk: &Gvk| json!({"group": gvk.group, "version": gvk.version, "kind": gvk.kind});
    let resource = |gvr: &Gvr| json!({"group": gvr.group, "version": gvr.version, "resource": gvr.resource});
    let mut request = Map::new();
    request.insert("kind", kind(&matched_kind(attributes, matched)));
    request.insert("resource", resource(&matched.gvr()));
    request.insert("requestKind", kind(&attributes.kind()));
    request.insert("requestResource", resource(&attributes.resource.gvr()));
    if let Some(subresource) = attributes.subresource {
        request.insert("subResource", subresource.into());
        request.insert("requestSubResource", subresource.into());
    }
    for (key, text) in [("name", attributes.given_name()), ("namespace", attributes.given_namespace())] {
        if !text.is_empty() {
            request.insert(key, text.into());
        }
    }
    request.insert("operation", attributes.operation.name().into());
    request.insert("userInfo", user_info(attributes.user));
    request.insert("dryRun", attributes.options.dry_run.into());
    request.insert("options", options(attributes));
    request
}

fn user_info(user: &User) -> Value {
    let mut info = Map::new();
    for (key, text) in [("username", &user.name), ("uid", &user.uid)] {
        if !text.is_empty() {
            info.insert(key, text.as_str().into());
        }
    }
    if !user.groups.is_empty() {
        info.insert("groups", json!(user.groups));
    }
    if !user.extra.is_empty() {
        info.insert("extra", json!(user.extra));
    }
    info.into()
}

fn options(attributes: &Attributes<'_>) -> Value {
    let kind = match attributes.operation {
        Operation::Create => "CreateOptions",
        Operation::Update => "UpdateOptions",
        Operation::Delete => "DeleteOptions",
        Operation::Connect => return Value::Null,
    };
    attributes.options.as_sent(kind)
}
