//! No proxy and no browser caches responses of the API, unless a handler says otherwise.

use super::Facts;
use crate::http::Response;
use ::http::{HeaderValue, header};

pub(super) fn after(_: &Facts, mut answer: Response) -> Response {
    let headers = answer.headers_mut();
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-cache, private"));
    answer
}
