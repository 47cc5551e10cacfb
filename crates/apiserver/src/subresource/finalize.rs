//! `namespaces/finalize`: letting go of a namespace.

use crate::call::Call;
use crate::http::Answer;
use crate::{encode, verbs};
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};

pub(super) async fn handle(call: &mut Call) -> Result<Answer, Status> {
    let options = call.write_options()?;
    let given = call.read_object(options.field_validation).await?;
    call.check_place(&given)?;
    let version = meta::str(&given, "resourceVersion").to_owned();
    let change = |old: &Value| {
        let mut new = old.clone();
        if !new["spec"].is_object() {
            new["spec"] = json!({});
        }
        new["spec"]["finalizers"] = given.pointer("/spec/finalizers").cloned().unwrap_or_else(|| json!([]));
        meta::set_str(&mut new, "resourceVersion", &version);
        Ok(new)
    };
    let result = verbs::modify(&call.server.registry, call, "finalize", &options, &change).await?;
    encode::written(200, &call.resource, &result, call.representation, call.include_object()?)
}
