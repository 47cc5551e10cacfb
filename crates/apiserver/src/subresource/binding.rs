//! `pods/binding`: the scheduler's decision.

use crate::admission::{Attributes, Operation};
use crate::call::Call;
use crate::encode;
use crate::http::Response;
use crate::options::WriteOptions;
use crate::registry::{Update, Write, precondition_failed};
use crate::verbs;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::{Gvk, Status, meta};
use ferrite_json::{Value, json};

pub(super) async fn handle(call: &mut Call) -> Result<Response, Status> {
    let options = call.write_options()?;
    let binding = call.read_as(&Gvk::new("", "v1", "Binding"), options.field_validation).await?;
    call.check_namespace(&binding)?;
    let name = call.name().to_owned();
    bind(call, &name, &binding, &options).await
}

/// `POST …/bindings`: the binding names the pod.
pub(crate) async fn create(call: &Call, binding: &Value, options: &WriteOptions) -> Result<Response, Status> {
    call.check_namespace(binding)?;
    let name = meta::name(binding).to_owned();
    // As upstream: this form ignores the UID.
    let mut binding = binding.clone();
    meta::metadata_mut(&mut binding).remove("uid");
    bind(call, &name, &binding, options).await
}

async fn bind(call: &Call, name: &str, binding: &Value, options: &WriteOptions) -> Result<Response, Status> {
    let mut admitted = binding.clone();
    let registry = &call.server.registry;
    let pods = registry.table.find("", "v1", "pods").ok_or_else(Status::no_such_path)?;
    let attributes = Attributes {
        operation: Operation::Create,
        resource: pods,
        subresource: Some("binding"),
        namespace: call.namespace(),
        name,
        unnamed: false,
        user: &call.user,
        old: None,
        options,
        rbac: &registry.rbac,
    };
    let view = registry.view();
    // As upstream: admission comes before the name and the target are checked.
    registry.admission.mutate(&view, &attributes, &mut admitted).await?;
    if meta::name(binding) != name {
        return Err(Status::bad_request("name in URL does not match name in Binding object"));
    }
    let target = &binding["target"];
    let node = target["name"].as_str().unwrap_or_default();
    let path = Path::new("target");
    let mut errors = Vec::new();
    if !matches!(target["kind"].as_str().unwrap_or_default(), "" | "Node") {
        errors.push(FieldError::not_supported(
            &path.child("kind"),
            target["kind"].clone(),
            &["Node", "<empty>"],
        ));
    }
    if node.is_empty() {
        errors.push(FieldError::required(&path.child("name"), ""));
    }
    if !errors.is_empty() {
        // As upstream: bindings have no strategy of their own, and their faults are bare errors.
        return Err(Status::bare(&errors));
    }
    registry.admission.validate(&view, &attributes, Some(&admitted)).await?;
    drop(view);
    let labels = meta::labels(&admitted);
    let (uid, version) = (meta::uid(binding), meta::str(binding, "resourceVersion"));
    let annotations = binding.pointer("/metadata/annotations").and_then(Value::as_object);
    let change = |pod: &Value| {
        let conflict = |why: String| Status::conflict("", "pods/binding", name, &why);
        let stored =
            [("UID", uid, meta::uid(pod)), ("ResourceVersion", version, meta::str(pod, "resourceVersion"))];
        for (what, given, stored) in stored {
            if !given.is_empty() && given != stored {
                return Err(precondition_failed(pods, call.namespace(), name, what, given, stored));
            }
        }
        if meta::is_deleting(pod) {
            return Err(conflict(format!("pod {name} is being deleted, cannot be assigned to a host")));
        }
        let gates = pod.pointer("/spec/schedulingGates").and_then(Value::as_array);
        if gates.is_some_and(|g| !g.is_empty()) {
            return Err(conflict(format!("pod {name} has non-empty .spec.schedulingGates")));
        }
        let assigned = pod.pointer("/spec/nodeName").and_then(Value::as_str).unwrap_or_default();
        if !assigned.is_empty() {
            return Err(conflict(format!("pod {name} is already assigned to node {assigned:?}")));
        }
        let mut bound = pod.clone();
        bound["spec"]["nodeName"] = node.into();
        if let Some(annotations) = annotations {
            let kept = meta::metadata_mut(&mut bound).entry("annotations").or_insert_with(|| json!({}));
            if let Some(kept) = kept.as_object_mut() {
                kept.extend(annotations.clone());
            }
        }
        if let Some(labels) = labels {
            let kept = meta::metadata_mut(&mut bound).entry("labels").or_insert_with(|| json!({}));
            for (key, value) in labels {
                // As upstream: a binding adds labels and changes none.
                if let Some(kept) = kept.as_object_mut() {
                    kept.entry(key.as_str()).or_insert_with(|| value.clone());
                }
            }
        }
        set_scheduled(&mut bound);
        // Nobody checked the version: the swap itself decides which write wins.
        meta::metadata_mut(&mut bound).remove("resourceVersion");
        Ok(bound)
    };
    // As upstream: admission sees the binding, not the pod that it changes.
    let within = WriteOptions { within: true, ..options.clone() };
    let update = Update {
        write: Write {
            resource: pods,
            namespace: call.namespace(),
            requested: call.name(),
            user: &call.user,
            options: &within,
            copied: false,
        },
        name,
        subresource: Some("binding"),
        change: &change,
        replaces: false,
        applied: None,
    };
    call.server.registry.update(&update).await?;
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    encode::value(201, &status, call.representation)
}

fn set_scheduled(pod: &mut Value) {
    let condition = json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": verbs::now()});
    let status = &mut pod["status"];
    if !status.is_object() {
        *status = json!({});
    }
    // As upstream: a pod that has its node is nominated to none.
    if let Some(status) = status.as_object_mut() {
        status.remove("nominatedNodeName");
    }
    let conditions = &mut status["conditions"];
    match conditions.as_array_mut() {
        None => *conditions = json!([condition]),
        Some(list) => {
            list.retain(|c| c["type"] != "PodScheduled");
            list.push(condition);
        }
    }
}
