//! `proxy`: HTTP to pods, services and nodes through the server.

mod html;
mod links;

use super::dial::{self, Place};
use super::{forwarding, kubelet};
use crate::call::Call;
use crate::http::{BoxError, Response};
use crate::registry::View;
use crate::traffic::TooManyConnections;
use ::http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header};
use ferrite_api::quota::amounts::list;
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use http_body_util::BodyExt;
use links::Links;
use rand::seq::IndexedRandom;
use std::net::IpAddr;

pub(crate) use html::rewrite_page;

pub(super) async fn handle(call: &mut Call) -> Result<Response, Status> {
    if call.resource.plural == "nodes" && !call.header(header::UPGRADE).is_empty() {
        // The kubelet trusts this server. A stream of its leads into containers, also if it begins with a GET.
        kubelet::require_create(call).await?;
    }
    let place = match &*call.resource.plural {
        "services" => service(call)?,
        "pods" => pod(call)?,
        _ => node(call)?,
    };
    let whole = call.parts.uri.path();
    let (prefix, path) = whole.split_at(prefix_length(whole, call.resource.is_namespaced()));
    let (prefix, path) = (prefix.to_owned(), path.to_owned());
    let upgrades = !call.header(header::UPGRADE).is_empty();
    if path.is_empty() && !upgrades && matches!(call.parts.method.as_str(), "GET" | "HEAD") {
        // As upstream: relative links only work below a slash.
        let query = call.parts.uri.query().map(|q| format!("?{q}")).unwrap_or_default();
        let mut answer = crate::http::text(301, "");
        let location = HeaderValue::from_str(&format!("{prefix}/{query}")).map_err(Status::internal)?;
        answer.headers_mut().insert(header::LOCATION, location);
        return Ok(answer);
    }
    let links = Links { prefix, far: place.host(), client: client_host(call) };
    forward(call, &place, links, if path.is_empty() { "/" } else { &path }).await
}

/// Length of the part of the path that names the object and `proxy`; the rest belongs to the far side.
fn prefix_length(path: &str, namespaced: bool) -> usize {
    // `/api/v1/nodes/name/proxy`, or with a namespace `/api/v1/namespaces/namespace/pods/name/proxy`.
    let parts = if namespaced { 7 } else { 5 };
    path.match_indices('/').nth(parts).map_or(path.len(), |(at, _)| at)
}

/// The host that the client thinks it speaks to.
fn client_host(call: &Call) -> String {
    match call.parts.headers.get(header::HOST).and_then(|h| h.to_str().ok()) {
        Some(host) => host.to_owned(),
        None => call.parts.uri.authority().map(ToString::to_string).unwrap_or_default(),
    }
}

async fn forward(call: &mut Call, place: &Place, links: Links, path: &str) -> Result<Response, Status> {
    let target = match call.parts.uri.query() {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    let body = call.body.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    let body = body.unwrap_or_else(|| crate::http::full(bytes::Bytes::new()));
    let mut request = Request::builder()
        .method(call.parts.method.clone())
        .uri(&target)
        .body(body)
        .map_err(|e| Status::bad_request(format!("cannot pass the request on: {e}")))?;
    let headers = request.headers_mut();
    forwarding::copy_request_headers(&call.parts.headers, headers);
    if !call.header(header::UPGRADE).is_empty() {
        dial::copy_upgrade_headers(&call.parts.headers, headers);
    }
    // As upstream: headers give the far side the host that the client asked, and the original path.
    for (name, value) in
        [(header::HOST, links.client.clone()), (FORWARDED_URI, format!("{}{path}", links.prefix))]
    {
        if let Some(value) = HeaderValue::from_str(&value).ok().filter(|v| !v.is_empty()) {
            headers.insert(name, value);
        }
    }
    forwarding::append_peer(&call.parts, headers);
    let account = call.parts.extensions.get();
    let response = dial::send(&call.server, account, place, request).await.map_err(|e| {
        if e.is::<TooManyConnections>() {
            return Status::too_many_requests(e.to_string());
        }
        let message = format!("error trying to reach service: {}", cause(place, &*e));
        Status::new(503, "ServiceUnavailable", message)
    })?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let headers = response.headers().clone();
        let mut answer = dial::join(&call.server, &mut call.parts, response)?;
        let said: HeaderMap = answer.headers().clone();
        for (name, value) in headers.iter().filter(|(name, _)| !forwarding::is_theirs(name.as_str())) {
            if !said.contains_key(name) {
                answer.headers_mut().append(name, value.clone());
            }
        }
        return Ok(answer);
    }
    let (mut parts, body) = response.into_parts();
    let body = body.map_err(|e| -> BoxError { e.into() });
    let redirect = parts.headers.get(header::LOCATION).and_then(|l| l.to_str().ok());
    let decoder = html::Decoder::of(&parts.headers);
    let body = match (redirect, decoder) {
        (Some(location), _) => {
            if let Some(location) = links.rewrite(location).and_then(|l| HeaderValue::from_str(&l).ok()) {
                parts.headers.insert(header::LOCATION, location);
            }
            body.boxed_unsync()
        }
        (None, Some(decoder)) => {
            for name in [header::CONTENT_LENGTH, header::CONTENT_ENCODING] {
                parts.headers.remove(name);
            }
            html::rewritten(body, decoder, links)
        }
        (None, None) => body.boxed_unsync(),
    };
    let mut answer = Response::new(body);
    *answer.status_mut() = parts.status;
    forwarding::copy_response_headers(&parts.headers, answer.headers_mut());
    Ok(answer)
}

const FORWARDED_URI: HeaderName = HeaderName::from_static("x-forwarded-uri");

/// The cause of an error, in upstream's words where people know them.
fn cause(place: &Place, error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    let what = match error.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
        Some(std::io::ErrorKind::ConnectionRefused) => "connect: connection refused",
        Some(std::io::ErrorKind::HostUnreachable) => "connect: no route to host",
        Some(std::io::ErrorKind::NetworkUnreachable) => "connect: network is unreachable",
        None if error.is::<dial::TimedOut>() => "i/o timeout",
        _ => return cause.to_string(),
    };
    format!("dial tcp {}: {what}", place.host())
}

/// A parsed name of the path: `name`, `name:port` or `scheme:name:port`.
#[derive(Debug, PartialEq, Eq)]
struct Name<'a> {
    https: bool,
    name: &'a str,
    port: &'a str,
}

impl<'a> Name<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let parts: Vec<&str> = text.split(':').collect();
        let (scheme, name, port) = match parts.as_slice() {
            [name] => ("", *name, ""),
            [name, port] => ("", *name, *port),
            [scheme, name, port] => (*scheme, *name, *port),
            _ => return None,
        };
        let known = matches!(scheme, "" | "http" | "https") && !name.is_empty();
        known.then_some(Self { https: scheme == "https", name, port })
    }

    fn tls(&self) -> Option<std::sync::Arc<rustls::ClientConfig>> {
        self.https.then(dial::unverified)
    }

    fn default_port(&self) -> u16 {
        if self.https { 443 } else { 80 }
    }
}

fn named<'a>(call: &'a Call, kind: &str) -> Result<Name<'a>, Status> {
    let text = call.name();
    Name::parse(text).ok_or_else(|| Status::bad_request(format!("invalid {kind} request {text:?}")))
}

/// The address that an object names, if a client may be sent there.
fn checked(address: Option<&str>) -> Result<IpAddr, Status> {
    let address = address.and_then(|a| a.parse().ok());
    let address: IpAddr = address.ok_or_else(|| Status::bad_request("address not allowed"))?;
    dial::check_address(address).map(|()| address)
}

fn pod(call: &Call) -> Result<Place, Status> {
    let name = named(call, "pod")?;
    let pod = call.server.registry.read(&call.resource, call.namespace(), name.name)?;
    let address = checked(pod["status"]["podIP"].as_str())?;
    let first = || {
        let containers = list(&pod["spec"], "containers").iter();
        containers.flat_map(|c| list(c, "ports")).find_map(|p| p["containerPort"].as_u64())
    };
    let port = match name.port {
        "" => first().and_then(|p| u16::try_from(p).ok()).unwrap_or_else(|| name.default_port()),
        given => given.parse().map_err(|_| Status::bad_request(format!("invalid port {given:?}")))?,
    };
    Ok(Place { address, port, tls: name.tls(), server_name: None, kubelet_of: None })
}

fn node(call: &Call) -> Result<Place, Status> {
    let name = named(call, "node")?;
    let (address, kubelet_port) = kubelet::endpoint(&call.server, name.name)?;
    let port = match name.port {
        "" => kubelet_port,
        given => given.parse().map_err(|_| Status::bad_request(format!("invalid port {given:?}")))?,
    };
    if port == kubelet_port {
        return kubelet::at_kubelet(&call.server, name.name, address, port);
    }
    Ok(Place { address, port, tls: name.tls(), server_name: None, kubelet_of: None })
}

fn service(call: &Call) -> Result<Place, Status> {
    let name = named(call, "service")?;
    let service = call.server.registry.read(&call.resource, call.namespace(), name.name)?;
    let view = call.server.registry.view();
    let slices = slices_of(&view, call.namespace(), name.name);
    // As upstream: a service of which nothing has taken notice yet is as good as none.
    if slices.is_empty() {
        return Err(Status::not_found("", "services", name.name));
    }
    let places = endpoints(&slices, &port_name(&service, name.port)?);
    let Some((address, port)) = places.choose(&mut rand::rng()) else {
        return Err(Status::unavailable(format!("no endpoints available for service {:?}", name.name)));
    };
    Ok(Place {
        address: checked(Some(address))?,
        port: *port,
        tls: name.tls(),
        server_name: None,
        kubelet_of: None,
    })
}

/// The EndpointSlices of a Service.
pub(crate) fn slices_of(view: &View, namespace: &str, service: &str) -> Vec<Value> {
    let slices = view.objects("discovery.k8s.io", "endpointslices", namespace);
    slices.filter(|slice| slice["metadata"]["labels"]["kubernetes.io/service-name"] == service).collect()
}

/// Where a port of a Service is served now: the addresses that are ready and that a client may be sent to.
pub(crate) fn endpoints_of(view: &View, namespace: &str, service: &str, port: u16) -> Vec<(IpAddr, u16)> {
    let Some(found) = view.get("", "services", namespace, service) else { return Vec::new() };
    let Ok(port) = port_name(&found, &port.to_string()) else { return Vec::new() };
    let all = endpoints(&slices_of(view, namespace, service), &port);
    all.into_iter().filter_map(|(address, port)| Some((checked(Some(&address)).ok()?, port))).collect()
}

/// The name of the port asked for, which may be by number. As upstream: without one, the port without a name.
fn port_name(service: &Value, asked: &str) -> Result<String, Status> {
    let Ok(number) = asked.parse::<u64>() else { return Ok(asked.to_owned()) };
    let port = list(&service["spec"], "ports").iter().find(|p| p["port"].as_u64() == Some(number));
    match port {
        Some(port) => Ok(port["name"].as_str().unwrap_or_default().to_owned()),
        None => Err(Status::unavailable(format!(
            "no service port {number} found for service {:?}",
            meta::name(service)
        ))),
    }
}

/// Addresses that are ready, with the port of the name.
fn endpoints(slices: &[Value], port: &str) -> Vec<(String, u16)> {
    let mut found = Vec::new();
    for slice in slices {
        let matches = |p: &&Value| p["name"].as_str().unwrap_or_default() == port;
        let number = list(slice, "ports").iter().find(matches).and_then(|p| p["port"].as_u64());
        let Some(number) = number.and_then(|n| u16::try_from(n).ok()) else { continue };
        let ready = |e: &&Value| e["conditions"]["ready"] != false;
        for endpoint in list(slice, "endpoints").iter().filter(ready) {
            if let Some(address) = list(endpoint, "addresses").first().and_then(Value::as_str) {
                found.push((address.to_owned(), number));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn names_carry_scheme_and_port() {
        let name = |https, name, port| Some(Name { https, name, port });
        for (text, expected) in [
            ("a", name(false, "a", "")),
            ("a:http", name(false, "a", "http")),
            ("https:a:443", name(true, "a", "443")),
            ("https:a:", name(true, "a", "")),
            (":a:80", name(false, "a", "80")),
            ("ftp:a:1", None),
            ("", None),
            ("a:b:c:d", None),
        ] {
            assert_eq!(Name::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn the_rest_of_the_path_is_the_far_sides() {
        for (path, namespaced, rest) in [
            ("/api/v1/nodes/n/proxy", false, ""),
            ("/api/v1/nodes/proxy/proxy/metrics", false, "/metrics"),
            ("/api/v1/namespaces/proxy/pods/proxy/proxy/", true, "/"),
            ("/api/v1/namespaces/a/services/b/proxy/c/proxy/d", true, "/c/proxy/d"),
        ] {
            assert_eq!(&path[prefix_length(path, namespaced)..], rest, "{path}");
        }
    }

    #[test]
    fn only_ready_endpoints_with_the_port_are_chosen() {
        let slices = [json!({
            "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 81}],
            "endpoints": [
                {"addresses": ["10.0.0.1"], "conditions": {"ready": true}},
                {"addresses": ["10.0.0.2"], "conditions": {"ready": false}},
                {"addresses": ["10.0.0.3"]},
            ],
        })];
        let expected = vec![("10.0.0.1".to_owned(), 81), ("10.0.0.3".to_owned(), 81)];
        assert_eq!(endpoints(&slices, "b"), expected);
        assert!(endpoints(&slices, "c").is_empty());
    }
}
