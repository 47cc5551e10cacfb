//! The headers of a request and of its answer, as they go on.

use http::header::{CONNECTION, CONTENT_LENGTH, EXPECT, HOST, TE, TRANSFER_ENCODING, UPGRADE, VIA};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri, Version};
use std::net::SocketAddr;

/// The name with which the proxy marks forwarded requests, so that it notices its own.
const OWN_NAME: &str = "1.1 ferrite-ingress";

/// Headers that concern one connection only (RFC 9110, 7.6.1), with those that never were of use beyond it.
const HOP_BY_HOP: [HeaderName; 4] = [CONNECTION, TE, TRANSFER_ENCODING, UPGRADE];
const HOP_BY_HOP_NAMES: [&str; 4] =
    ["keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"];

/// Why a request is refused before it is routed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadRequest {
    #[error("the request names no host, or several")]
    Host,
    #[error("the request has no path")]
    Target,
    #[error("the method CONNECT is not served")]
    Connect,
    #[error("the request came back to the proxy that forwarded it")]
    Loop,
}

/// The client's end of a request.
#[derive(Debug, Clone, Copy)]
pub struct Origin {
    pub client: SocketAddr,
    /// The port that the client connected to.
    pub port: u16,
    pub tls: bool,
}

/// The host that a request is for, in lower case and without its port; empty for a request of HTTP/1.0 that names none.
pub fn host_of<B>(request: &Request<B>) -> Result<String, BadRequest> {
    if request.method() == Method::CONNECT {
        return Err(BadRequest::Connect);
    }
    if !request.uri().path().starts_with('/') {
        return Err(BadRequest::Target);
    }
    let mut named = request.headers().get_all(HOST).iter();
    let header = match (named.next(), named.next()) {
        (_, Some(_)) => return Err(BadRequest::Host),
        (header, None) => header.map(|value| value.to_str().map_err(|_| BadRequest::Host)).transpose()?,
    };
    // The authority of the target counts before the header (RFC 9112, 3.2.2); two that differ are refused, because
    // the server behind may see the other one.
    let host = match (request.uri().authority(), header) {
        (Some(authority), Some(header)) if !authority.as_str().eq_ignore_ascii_case(header) => {
            return Err(BadRequest::Host);
        }
        (Some(authority), _) => authority.as_str(),
        (None, Some(header)) => header,
        (None, None) if request.version() < Version::HTTP_11 => "",
        (None, None) => return Err(BadRequest::Host),
    };
    if host.is_empty() {
        return Ok(String::new());
    }
    let authority: http::uri::Authority = host.parse().map_err(|_| BadRequest::Host)?;
    if authority.as_str().contains('@') {
        return Err(BadRequest::Host);
    }
    Ok(authority.host().trim_end_matches('.').to_ascii_lowercase())
}

/// Returns true if the client asks for a WebSocket. The proxy switches to no other protocol: `h2c` would
/// let a client speak to the server behind it without our checks.
pub fn wants_websocket(headers: &HeaderMap, method: &Method, version: Version) -> bool {
    let websocket =
        headers.get(UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"));
    websocket
        && method == Method::GET
        && version == Version::HTTP_11
        && tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"))
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    headers
        .get_all(name)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|text| text.split(','))
        .map(str::trim)
}

/// Removes the headers of one connection: the fixed ones and those that `Connection` names.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = tokens(headers, &CONNECTION)
        .filter_map(|token| HeaderName::from_bytes(token.as_bytes()).ok())
        // Nobody may remove the host or the length of a request.
        .filter(|name| ![HOST, CONTENT_LENGTH].contains(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
    for name in HOP_BY_HOP_NAMES {
        headers.remove(name);
    }
}

/// The headers with which a request goes on. The client's own account of where it comes from is dropped: anybody
/// can write it.
pub fn forwarded(
    headers: &mut HeaderMap,
    uri: &Uri,
    origin: Origin,
    websocket: bool,
) -> Result<(), BadRequest> {
    if tokens(headers, &VIA).any(|hop| hop.eq_ignore_ascii_case(OWN_NAME)) {
        return Err(BadRequest::Loop);
    }
    let trailers = tokens(headers, &TE).any(|token| token.eq_ignore_ascii_case("trailers"));
    strip_hop_by_hop(headers);
    headers.remove(EXPECT);
    // The body says its length itself; a header could say another.
    headers.remove(CONTENT_LENGTH);
    let told: Vec<HeaderName> = headers
        .keys()
        .filter(|name| {
            // Servers that expose headers as variables do not distinguish a dash from an underscore.
            let name = name.as_str().replace('_', "-");
            name.starts_with("x-forwarded") || matches!(name.as_str(), "forwarded" | "x-real-ip")
        })
        .cloned()
        .collect();
    for name in told {
        headers.remove(name);
    }
    if let Some(authority) = uri.authority()
        && let Ok(value) = HeaderValue::from_str(authority.as_str())
    {
        headers.insert(HOST, value);
    }
    let host = headers.get(HOST).cloned();
    let client = origin.client.ip().to_canonical().to_string();
    let scheme = if origin.tls { "https" } else { "http" };
    for (name, value) in [
        ("x-forwarded-for", client.as_str()),
        ("x-real-ip", client.as_str()),
        ("x-forwarded-proto", scheme),
        ("x-forwarded-scheme", scheme),
        ("x-forwarded-port", &origin.port.to_string()),
    ] {
        if let Ok(value) = HeaderValue::from_str(value) {
            headers.insert(name, value);
        }
    }
    if let Some(host) = host {
        headers.insert("x-forwarded-host", host);
    }
    headers.append(VIA, HeaderValue::from_static(OWN_NAME));
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
    if websocket {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    }
    Ok(())
}

/// The headers with which an answer goes back.
pub fn answered(headers: &mut HeaderMap, websocket: bool) {
    let chunked = headers.contains_key(TRANSFER_ENCODING);
    strip_hop_by_hop(headers);
    if chunked {
        // A length beside chunks is a lie or a trap.
        headers.remove(CONTENT_LENGTH);
    }
    if websocket {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
    }
}

#[cfg(test)]
mod tests;
