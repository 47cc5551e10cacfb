//! `proxy`: HTTP to pods, services and nodes through the server.

use super::dial::{self, Place};
use super::kubelet;
use crate::call::Call;
use crate::http::{Answer, BoxError};
use ::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use ferrite_api::quota::amounts::list;
use ferrite_api::{Status, meta};
use http_body_util::BodyExt;
use rand::seq::IndexedRandom;
use serde_json::Value;
use std::net::IpAddr;

pub(super) async fn handle(call: &mut Call) -> Result<Answer, Status> {
    let prefix = prefix(call.parts.uri.path());
    let whole = call.parts.uri.path();
    let path = whole.get(prefix.len()..).unwrap_or_default().to_owned();
    let place = match &*call.resource.plural {
        "services" => service(call)?,
        "pods" => pod(call)?,
        _ => node(call)?,
    };
    if path.is_empty() && matches!(call.parts.method.as_str(), "GET" | "HEAD") {
        // As upstream: relative links only work below a slash.
        let query = call.parts.uri.query().map(|q| format!("?{q}")).unwrap_or_default();
        let mut answer = crate::http::text(301, "");
        let location = HeaderValue::from_str(&format!("{prefix}/{query}")).map_err(Status::internal)?;
        answer.headers_mut().insert(header::LOCATION, location);
        return Ok(answer);
    }
    let path = if path.is_empty() { "/".to_owned() } else { path };
    forward(call, &place, &prefix, &path).await
}

/// Everything up to and with `proxy`.
fn prefix(path: &str) -> String {
    let end = path.find("/proxy/").map(|at| at + "/proxy".len());
    path[..end.unwrap_or(path.len())].to_owned()
}

async fn forward(call: &mut Call, place: &Place, prefix: &str, path: &str) -> Result<Answer, Status> {
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
    let upgrades = !call.header(header::UPGRADE).is_empty();
    copy_headers(&call.parts.headers, request.headers_mut());
    if upgrades {
        dial::copy_upgrade_headers(&call.parts.headers, request.headers_mut());
    }
    let response = dial::send(call, place, request).await.map_err(|e| {
        let message = format!("error trying to reach service: {}", root_cause(&*e));
        Status::new(503, "ServiceUnavailable", message)
    })?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        return dial::join(call, response);
    }
    let (mut parts, body) = response.into_parts();
    let mut answer = Response::new(body.map_err(|e| -> BoxError { e.into() }).boxed_unsync());
    *answer.status_mut() = parts.status;
    if let Some(location) = parts.headers.get(header::LOCATION).and_then(|l| l.to_str().ok())
        && let Some(rewritten) = rewrite(location, place, prefix).and_then(|l| HeaderValue::from_str(&l).ok())
    {
        parts.headers.insert(header::LOCATION, rewritten);
    }
    copy_headers(&parts.headers, answer.headers_mut());
    Ok(answer)
}

fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

/// Headers about the connection, and those that tell who the user is, end here.
fn copy_headers(from: &HeaderMap, to: &mut HeaderMap) {
    const OURS: [&str; 10] = [
        "connection",
        "keep-alive",
        "proxy-connection",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "authorization",
        "host",
        "content-length",
    ];
    for (name, value) in from {
        if !OURS.contains(&name.as_str()) && !name.as_str().starts_with("impersonate-") {
            to.append(name.clone(), value.clone());
        }
    }
}

/// A redirect within the far side becomes one within the proxy.
fn rewrite(location: &str, place: &Place, prefix: &str) -> Option<String> {
    if location.starts_with('/') && !location.starts_with("//") {
        return Some(format!("{prefix}{location}"));
    }
    let (_, rest) = location.split_once("://")?;
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let (host, port) = host.rsplit_once(':').unwrap_or((host, ""));
    let same = host.trim_matches(['[', ']']).parse::<IpAddr>().ok() == Some(place.address)
        && (port.is_empty() || port == place.port.to_string());
    same.then(|| format!("{prefix}{path}"))
}

/// What a name in the path means: `name`, `name:port` or `scheme:name:port`.
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

/// Addresses of this machine and of everybody are no place to be sent to.
fn checked(address: Option<&str>) -> Result<IpAddr, Status> {
    let address: Option<IpAddr> = address.and_then(|a| a.parse().ok());
    let usable = |ip: &IpAddr| {
        let local = match ip {
            IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
            IpAddr::V6(v6) => v6.is_unicast_link_local(),
        };
        !ip.is_loopback() && !ip.is_unspecified() && !ip.is_multicast() && !local
    };
    address.filter(usable).ok_or_else(|| Status::bad_request("address not allowed"))
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
    Ok(Place { address, port, tls: name.tls() })
}

fn node(call: &Call) -> Result<Place, Status> {
    let name = named(call, "node")?;
    let (address, kubelet_port) = kubelet::endpoint(call, name.name)?;
    let port = match name.port {
        "" => kubelet_port,
        given => given.parse().map_err(|_| Status::bad_request(format!("invalid port {given:?}")))?,
    };
    if port == kubelet_port {
        return Ok(Place { address, port, tls: Some(kubelet::tls(call)?) });
    }
    Ok(Place { address: checked(Some(&address.to_string()))?, port, tls: name.tls() })
}

fn service(call: &Call) -> Result<Place, Status> {
    let name = named(call, "service")?;
    let service = call.server.registry.read(&call.resource, call.namespace(), name.name)?;
    let view = call.server.registry.view();
    let slices: Vec<Value> = view
        .objects("discovery.k8s.io", "endpointslices", call.namespace())
        .filter(|slice| slice["metadata"]["labels"]["kubernetes.io/service-name"] == name.name)
        .collect();
    // As upstream: a service of which nothing has taken notice yet is as good as none.
    if slices.is_empty() {
        return Err(Status::not_found("", "services", name.name));
    }
    let wanted = port_name(&service, name.port)?;
    let places = endpoints(&slices, wanted.as_deref());
    let Some((address, port)) = places.choose(&mut rand::rng()) else {
        return Err(Status::unavailable(format!("no endpoints available for service {:?}", name.name)));
    };
    Ok(Place { address: checked(Some(address))?, port: *port, tls: name.tls() })
}

/// The name of the port asked for, which may be by number. None when any will do.
fn port_name(service: &Value, asked: &str) -> Result<Option<String>, Status> {
    if asked.is_empty() {
        return Ok(None);
    }
    let Ok(number) = asked.parse::<u64>() else { return Ok(Some(asked.to_owned())) };
    let port = list(&service["spec"], "ports").iter().find(|p| p["port"].as_u64() == Some(number));
    match port {
        Some(port) => Ok(Some(port["name"].as_str().unwrap_or_default().to_owned())),
        None => Err(Status::unavailable(format!(
            "no service port {number} found for service {:?}",
            meta::name(service)
        ))),
    }
}

/// Addresses that are ready, with the port of the name.
fn endpoints(slices: &[Value], port: Option<&str>) -> Vec<(String, u16)> {
    let mut found = Vec::new();
    for slice in slices {
        let matches = |p: &&Value| port.is_none_or(|name| p["name"].as_str().unwrap_or_default() == name);
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
    use serde_json::json;

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
    fn redirects_stay_inside() {
        let place = Place { address: "10.0.0.1".parse().unwrap(), port: 8080, tls: None };
        for (location, expected) in [
            ("/x", Some("/p/x")),
            ("http://10.0.0.1:8080/x", Some("/p/x")),
            ("http://example.com/x", None),
            ("x", None),
        ] {
            assert_eq!(rewrite(location, &place, "/p").as_deref(), expected, "{location}");
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
        assert_eq!(endpoints(&slices, Some("b")), expected);
        assert!(endpoints(&slices, Some("c")).is_empty());
    }

    #[test]
    fn nobody_is_sent_to_the_server_itself() {
        for address in ["127.0.0.1", "::1", "0.0.0.0", "169.254.1.1", "224.0.0.1", "nonsense"] {
            assert!(checked(Some(address)).is_err(), "{address}");
        }
        assert!(checked(Some("10.0.0.1")).is_ok());
    }
}
