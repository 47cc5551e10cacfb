//! Refuses malformed paths, before the client is authenticated.

use super::{Exchange, Refusal};
use crate::http;
use crate::request::Route;
use ::http::{HeaderValue, header};

/// As upstream: a path that names no resource where one must stand is a failure of the server.
pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    if exchange.asked.route != Route::Incomplete {
        return Ok(());
    }
    let path = exchange.facts.uri.path();
    let why = "failed to create RequestInfo: unable to determine kind and namespace from url,";
    let mut answer = http::text(500, format!("Internal Server Error: {path:?}: {why} {path}\n"));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    Err(Refusal::Response(answer))
}
