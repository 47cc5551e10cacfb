//! A name for every request, the client's own or a new one, in the response's `Audit-Id` header.

use super::{Exchange, Facts, Refusal};
use crate::http::Response;
use ::http::{HeaderName, HeaderValue};

const AUDIT_ID: HeaderName = HeaderName::from_static("audit-id");

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let given = exchange.asked.parts.headers.get(&AUDIT_ID).cloned();
    exchange.facts.audit_id = given.or_else(new);
    Ok(())
}

pub(super) fn after(facts: &Facts, mut answer: Response) -> Response {
    if let Some(id) = &facts.audit_id {
        answer.headers_mut().insert(AUDIT_ID, id.clone());
    }
    answer
}

fn new() -> Option<HeaderValue> {
    let mut buffer = uuid::Uuid::encode_buffer();
    HeaderValue::from_str(crate::ids::random().hyphenated().encode_lower(&mut buffer)).ok()
}
