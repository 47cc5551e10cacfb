//! The headers that a request takes along when the server passes it on, and those of the response on the way back.

use crate::serve::Peer;
use ::http::request::Parts;
use ::http::{HeaderMap, HeaderName, HeaderValue};

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// Copies headers of a request that the far side may see. The user's credentials stay here.
pub(crate) fn copy_request_headers(from: &HeaderMap, to: &mut HeaderMap) {
    copy_headers(from, to, is_ours);
}

/// Copies headers of the far side's response that the client may see.
pub(crate) fn copy_response_headers(from: &HeaderMap, to: &mut HeaderMap) {
    copy_headers(from, to, is_theirs);
}

/// Adds the client's address to the proxies that the request has passed.
pub(crate) fn append_peer(parts: &Parts, headers: &mut HeaderMap) {
    let Some(Peer(peer)) = parts.extensions.get() else { return };
    let before = headers.get(FORWARDED_FOR).and_then(|v| v.to_str().ok());
    let path = before.map_or_else(|| peer.to_string(), |before| format!("{before}, {peer}"));
    if let Ok(value) = HeaderValue::from_str(&path) {
        headers.insert(FORWARDED_FOR, value);
    }
}

/// Headers about one connection, which end here.
fn is_hop(name: &str) -> bool {
    matches!(
        name,
        "connection" | "keep-alive" | "proxy-connection" | "transfer-encoding" | "te" | "trailer" | "upgrade"
    )
}

/// Headers of a request that are not passed on: credentials stay here, and lengths are made anew.
fn is_ours(name: &str) -> bool {
    is_hop(name)
        || matches!(name, "authorization" | "host" | "content-length")
        || name.starts_with("impersonate-")
}

/// Headers of a response that are not passed on: this server decides who may read it elsewhere.
pub(crate) fn is_theirs(name: &str) -> bool {
    is_hop(name)
        || matches!(
            name,
            "access-control-allow-credentials"
                | "access-control-allow-headers"
                | "access-control-allow-methods"
                | "access-control-allow-origin"
        )
}

fn copy_headers(from: &HeaderMap, to: &mut HeaderMap, stays: fn(&str) -> bool) {
    for (name, value) in from.iter().filter(|(name, _)| !stays(name.as_str())) {
        to.append(name.clone(), value.clone());
    }
}
