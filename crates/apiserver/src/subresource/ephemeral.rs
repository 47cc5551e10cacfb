//! `pods/ephemeralcontainers`: containers added to a running pod, never removed.

use crate::call::Call;
use crate::http::Answer;
use crate::request::Verb;
use crate::{encode, patch, verbs};
use ferrite_api::Status;

pub(super) async fn handle(call: &mut Call) -> Result<Answer, Status> {
    match call.verb {
        Verb::Get => {
            let entry = call.server.registry.get(&call.resource, call.namespace(), call.name())?;
            encode::entry(&call.resource, &entry, call.representation, call.include_object()?)
        }
        Verb::Patch => patch::handle(call, Some("ephemeralcontainers")).await,
        _ => verbs::update(call, Some("ephemeralcontainers")).await,
    }
}
