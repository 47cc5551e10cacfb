//! `namespaces/finalize`: letting go of a namespace.

use crate::call::Call;
use crate::encode;
use crate::http::Response;
use crate::registry::Update;
use ferrite_api::Status;
use ferrite_api::field::Path;
use ferrite_api::meta_validation::validate_finalizer_name;
use ferrite_json::Value;

pub(super) async fn handle(call: &mut Call) -> Result<Response, Status> {
    let options = call.write_options()?;
    let given = call.read_object(options.field_validation).await?;
    call.check_place(&given)?;
    let path = Path::new("spec").child("finalizers");
    let finalizers = given.pointer("/spec/finalizers").and_then(Value::as_array).into_iter().flatten();
    let errors: Vec<_> = finalizers
        .filter_map(Value::as_str)
        .enumerate()
        .flat_map(|(index, name)| validate_finalizer_name(name, &path.index(index)))
        .collect();
    if !errors.is_empty() {
        return Err(Status::invalid("", "Namespace", call.name(), &errors));
    }
    // As upstream: everything but the status is written.
    let change = |old: &Value| {
        let mut new = given.clone();
        new["status"] = old["status"].clone();
        Ok(new)
    };
    let update = Update {
        write: call.write(&options),
        name: call.name(),
        subresource: Some("finalize"),
        change: &change,
        replaces: true,
        applied: None,
    };
    let result = call.server.registry.update(&update).await?;
    encode::written(200, &call.resource, &result, call.representation, call.include_object()?)
}
