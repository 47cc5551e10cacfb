//! `pods/eviction`: a delete that may be refused.

use crate::call::Call;
use crate::encode;
use crate::http::Answer;
use crate::options::{DeleteOptions, Query, WriteOptions};
use ferrite_api::{Gvk, Status};
use serde_json::json;

pub(super) async fn handle(call: &mut Call) -> Result<Answer, Status> {
    let options = call.write_options()?;
    let eviction = call.read_as(&Gvk::new("policy", "v1", "Eviction"), options.field_validation).await?;
    let delete = DeleteOptions::parse(&Query::default(), eviction.get("deleteOptions"))?;
    let dry_run = options.dry_run || delete.dry_run;
    let delete = DeleteOptions { dry_run, ..delete };
    let write_options = WriteOptions { dry_run, ..WriteOptions::default() };
    let name = call.name().to_owned();
    call.server.registry.delete(&call.write(&write_options), &name, &delete).await?;
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    encode::value(201, &status, call.representation)
}
