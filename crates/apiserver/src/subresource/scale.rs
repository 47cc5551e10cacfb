//! `scale`: the number of replicas of anything that has one.

use crate::call::{self, Call};
use crate::http::Response;
use crate::options::FieldValidation;
use crate::patch;
use crate::registry::precondition_failed;
use crate::request::Verb;
use crate::{encode, verbs};
use ::http::header;
use ferrite_api::codec::Decoded;
use ferrite_api::custom::ScalePaths;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::resource::Resource;
use ferrite_api::schema::Kind;
use ferrite_api::selector::LabelSelector;
use ferrite_api::{Gvk, Status, meta};
use ferrite_json::{Value, json};
use std::sync::{Mutex, PoisonError};

fn gvk() -> Gvk {
    Gvk::new("autoscaling", "v1", "Scale")
}

pub(super) async fn handle(call: &mut Call) -> Result<Response, Status> {
    match call.verb {
        Verb::Get => {
            let entry = call.server.registry.load(&call.resource, call.namespace(), call.name()).await?;
            let object = crate::registry::stored::decode(&call.resource, &entry)
                .ok_or_else(|| crate::registry::unreadable(&call.resource, call.name()))?;
            if let Some(paths) = scale_paths(&call.resource)
                && at(&object, &paths.spec_replicas).is_none()
            {
                let field = paths.spec_replicas.join(".");
                let why = format!("the spec replicas field \".{field}\" does not exist");
                return Err(Status::internal(why));
            }
            answer(call, &object)
        }
        Verb::Update => {
            let options = call.write_options()?;
            let scale = call.read_as(&gvk(), options.field_validation).await?;
            call.check_place(&scale)?;
            write(call, &move |_| Ok(scale.clone())).await
        }
        _ => {
            let kind = patch::Kind::of(call.header(header::CONTENT_TYPE))?;
            if kind == patch::Kind::Apply {
                return apply(call).await;
            }
            let validation = call.write_options()?.field_validation;
            let body = call.read_body().await?;
            call.audit_patch(&body);
            let document = patch::parse(kind, &body, validation);
            let type_ = call::type_of(&gvk())?;
            let (gvk, name) = (gvk(), call.name().to_owned());
            let found = Mutex::new(Vec::new());
            let change = |scale: &Value| {
                // A missing object is reported before the patch is parsed.
                let Decoded { value: document, strict: complaints } =
                    document.as_ref().map_err(Status::clone)?;
                let mut patched = kind.patched(type_, &gvk, scale, document)?;
                patched.strict.splice(0..0, complaints.iter().cloned());
                if validation == FieldValidation::Strict
                    && let Some(why) = patched.strict_error()
                {
                    return Err(kind.refuse_patched(type_, scale, document, why));
                }
                crate::registry::metadata::check_name(&patched.value, &name)?;
                *found.lock().unwrap_or_else(PoisonError::into_inner) =
                    patched.warnings().map(str::to_owned).collect();
                Ok(patched.value)
            };
            let answer = write(call, &change).await;
            if validation == FieldValidation::Warn {
                call.warnings.extend(found.into_inner().unwrap_or_else(PoisonError::into_inner));
            }
            answer
        }
    }
}

/// An applied scale is an applied `spec.replicas` of the object.
async fn apply(call: &mut Call) -> Result<Response, Status> {
    let options = call.write_options()?;
    let body = call.read_body().await?;
    call.audit_patch(&body);
    patch::check_applied_body(&body, &gvk())?;
    let decoded = call::decode(crate::negotiate::Format::Yaml, &body, &gvk())?;
    let scale = call.take_strict("Scale", decoded, options.field_validation)?;
    let mut config = json!({
        "apiVersion": call.resource.api_version(),
        "kind": call.resource.kind,
        "metadata": {"name": call.name()},
    });
    let usual = ["spec".to_owned(), "replicas".to_owned()];
    let path = scale_paths(&call.resource).map_or(&usual[..], |paths| &paths.spec_replicas);
    if let Some(replicas) = scale.pointer("/spec/replicas") {
        put(&mut config, path, replicas.clone());
    }
    let conversions = crate::managed::Conversions::new(&call.resource);
    let change = |old: &Value| {
        let mut new =
            crate::managed::apply(&call.resource, Some(old), &config, &options, Some("scale"), &conversions)?;
        // As upstream: replicas that nobody applies any more are none.
        if at(&new, path).is_none() {
            put(&mut new, path, 0.into());
        }
        crate::managed::forget_time(&mut new, "scale");
        Ok(new)
    };
    let update = crate::registry::Update {
        write: call.write(&options),
        name: call.name(),
        subresource: Some("scale"),
        change: &change,
        replaces: false,
        applied: Some(&conversions),
    };
    let result = call.server.registry.update(&update).await?;
    answer(call, &result.object(&call.resource))
}

/// Changes the object's replicas to those of its scale after `change`.
async fn write(
    call: &mut Call,
    change: &(dyn Fn(&Value) -> Result<Value, Status> + Send + Sync),
) -> Result<Response, Status> {
    let options = call.write_options()?;
    let resource = std::sync::Arc::clone(&call.resource);
    let patches = call.verb == Verb::Patch;
    let on_object = |old: &Value| {
        let scale = change(&scale_of(&resource, old))?;
        let (given, stored) = (meta::uid(&scale), meta::uid(old));
        if !given.is_empty() && given != stored {
            let (namespace, name) = (meta::namespace(old), meta::name(old));
            if patches {
                // As upstream: a patched scale is compared before the store is asked.
                let plural = format!("{}/scale", resource.plural);
                let why = format!(
                    "Precondition failed: UID in precondition: {given}, UID in object meta: {stored}"
                );
                return Err(Status::conflict(&resource.group, &plural, name, &why));
            }
            return Err(precondition_failed(&resource, namespace, name, "UID", given, stored));
        }
        let replicas = scale.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(0);
        if let Some(paths) = scale_paths(&resource) {
            let mut new = old.clone();
            put(&mut new, &paths.spec_replicas, replicas.into());
            let version = meta::str(&scale, "resourceVersion");
            if !version.is_empty() {
                meta::set_str(&mut new, "resourceVersion", version);
            }
            return Ok(new);
        }
        if replicas < 0 {
            let error = FieldError::invalid(
                &Path::new("spec").child("replicas"),
                replicas,
                "must be greater than or equal to 0",
            );
            return Err(Status::invalid("autoscaling", "Scale", meta::name(old), &[error]));
        }
        let mut new = old.clone();
        new["spec"]["replicas"] = replicas.into();
        meta::set_str(&mut new, "resourceVersion", meta::str(&scale, "resourceVersion"));
        Ok(new)
    };
    let result = verbs::modify(&call.server.registry, call, "scale", &options, &on_object).await?;
    answer(call, &result.object(&call.resource))
}

fn answer(call: &Call, object: &Value) -> Result<Response, Status> {
    let scale = match call.resource.custom {
        Some(_) => ferrite_api::kinds::custom_scale(),
        None => ferrite_api::kinds::scale(),
    };
    encode::object(
        200,
        &scale,
        &scale_of(&call.resource, object),
        call.representation,
        call.include_object()?,
    )
}

/// Where a custom kind keeps its replicas; none of a built-in one.
fn scale_paths(resource: &Resource) -> Option<&ScalePaths> {
    resource.custom.as_ref()?.version().scale.as_ref()
}

/// The value at the end of a path of names.
fn at<'v>(object: &'v Value, path: &[String]) -> Option<&'v Value> {
    path.iter().try_fold(object, |value, name| value.get(name.as_str()))
}

/// Puts a value at the end of a path of names.
fn put(object: &mut Value, path: &[String], value: Value) {
    let mut place = object;
    for name in path {
        if !place.is_object() {
            *place = json!({});
        }
        place = &mut place[name.as_str()];
    }
    *place = value;
}

/// Sets the replicas of an object to those of its scale.
pub(crate) fn set_replicas(resource: &Resource, object: &mut Value, scale: &Value) {
    let replicas = scale.pointer("/spec/replicas").and_then(Value::as_i64).unwrap_or(0);
    match scale_paths(resource) {
        Some(paths) => put(object, &paths.spec_replicas, replicas.into()),
        None => object["spec"]["replicas"] = replicas.into(),
    }
}

/// True if the selector of a kind is a map of labels, as that of the oldest kinds is.
fn selects_by_map(resource: &Resource) -> bool {
    let spec = resource.schema.and_then(|type_| type_.field("spec"));
    let selector = spec.and_then(|spec| match spec.kind {
        Kind::Struct(type_) => type_.field("selector"),
        _ => None,
    });
    selector.is_some_and(|selector| matches!(selector.kind, Kind::Map(_)))
}

/// The scale of an object.
pub(crate) fn scale_of(resource: &Resource, object: &Value) -> Value {
    let mut metadata = json!({});
    for key in ["name", "namespace", "uid", "resourceVersion", "creationTimestamp"] {
        let value = meta::str(object, key);
        if !value.is_empty() {
            metadata[key] = value.into();
        }
    }
    let number = |value: Option<&Value>| value.and_then(Value::as_i64).unwrap_or(0);
    if let Some(paths) = scale_paths(resource) {
        let mut status = json!({"replicas": number(at(object, &paths.status_replicas))});
        let selector = paths.label_selector.as_ref().and_then(|path| at(object, path));
        if let Some(selector) = selector.and_then(Value::as_str).filter(|selector| !selector.is_empty()) {
            status["selector"] = selector.into();
        }
        let mut spec = json!({});
        if let replicas @ 1.. = number(at(object, &paths.spec_replicas)) {
            spec["replicas"] = replicas.into();
        }
        return json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status});
    }
    let replicas = |pointer: &str| number(object.pointer(pointer));
    let mut status = json!({"replicas": replicas("/status/replicas")});
    let mut selector = object["spec"]["selector"].clone();
    if selects_by_map(resource) {
        selector = json!({"matchLabels": selector});
    }
    if let Ok(selector) = LabelSelector::from_value(&selector) {
        status["selector"] = selector.to_string().into();
    }
    let mut spec = json!({});
    if replicas("/spec/replicas") != 0 {
        spec["replicas"] = replicas("/spec/replicas").into();
    }
    json!({"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": status})
}
