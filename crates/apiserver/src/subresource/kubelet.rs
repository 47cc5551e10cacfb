//! `log`, `exec`, `attach`, `portforward`: streams that the pod's kubelet serves.
//!
//! The server finds the node, checks the request and passes bytes on. An upgraded connection is joined end to
//! end, so the protocol spoken on it is a matter between the client and the node.

use super::dial::{self, Place};
use crate::auth::{self, Action};
use crate::call::Call;
use crate::http::{BoxError, Response};
use crate::request::Verb;
use crate::server::ApiServer;
use crate::traffic::{Account, TooManyConnections};
use crate::websocket;
use ::http::{HeaderValue, Method, Request, StatusCode, header};
use bytes::Bytes;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::{Status, meta};
use ferrite_json::Value;
use http_body_util::{BodyExt, Empty};
use std::net::IpAddr;
use std::sync::Arc;

/// Options of a log that the kubelet takes under the same names.
const LOG_OPTIONS: [&str; 8] =
    ["follow", "previous", "sinceSeconds", "sinceTime", "timestamps", "tailLines", "limitBytes", "stream"];

fn encode<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

/// Lower bounds of a log's options, and how upstream words them.
const LOG_BOUNDS: [(&str, i64, &str); 3] = [
    ("tailLines", 0, "must be greater than or equal to 0"),
    ("limitBytes", 1, "must be greater than 0"),
    ("sinceSeconds", 1, "must be greater than 0"),
];

fn check_log_options(call: &Call) -> Result<(), Status> {
    if let Some(since) = call.query.get("sinceTime").filter(|since| !since.is_empty()) {
        ferrite_api::codec::check_time(since).map_err(|e| Status::bad_request(e.to_string()))?;
    }
    let mut errors = Vec::new();
    let twice = call.query.get("sinceSeconds").is_some() && call.query.get("sinceTime").is_some();
    for (option, least, why) in LOG_BOUNDS {
        if let Some(value) =
            call.query.integer(option)?.filter(|v| *v < least && !(twice && option == "sinceSeconds"))
        {
            errors.push(FieldError::invalid(&Path::new(option), value, why));
        }
    }
    // As upstream without its gate for split streams.
    if call.query.get("stream").is_some() {
        errors.push(FieldError::forbidden(&Path::new("stream"), "may not be specified"));
    }
    if twice {
        // As upstream: this one belongs to no field, and its path is empty brackets.
        let why = "at most one of `sinceTime` or `sinceSeconds` may be specified";
        errors.push(FieldError::forbidden(&Path::new("[]"), why));
    }
    match errors.as_slice() {
        [] => Ok(()),
        errors => Err(Status::invalid("", "PodLogOptions", call.name(), errors)),
    }
}

pub(super) async fn log(call: &mut Call) -> Result<Response, Status> {
    check_log_options(call)?;
    let pod = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    let container = container(call, &pod)?;
    let follow = call.query.flag("follow");
    let query = encode(LOG_OPTIONS.iter().filter_map(|key| Some((*key, call.query.get(key)?))));
    if pod.pointer("/spec/nodeName").and_then(Value::as_str).unwrap_or_default().is_empty() {
        // As upstream: a pod that is nowhere has said nothing yet.
        let mut nothing = crate::http::text(204, "");
        nothing.headers_mut().remove(header::CONTENT_TYPE);
        return Ok(nothing);
    }
    let path = format!("/containerLogs/{}/{}/{container}?{query}", call.namespace(), call.name());
    let request = request(Method::GET, &path)?;
    let response = send(call, &pod, request).await.map_err(|status| match status.code {
        // As upstream: the error of a log request names only pods.
        404 => Status::not_found("", "pods", host(&pod).unwrap_or_default()),
        _ => status,
    })?;
    let status = response.status();
    if !status.is_success() {
        return Err(relay_error(response).await);
    }
    let (parts, body) = response.into_parts();
    let mut answer = Response::new(body.map_err(|e| -> BoxError { e.into() }).boxed_unsync());
    let plain = HeaderValue::from_static("text/plain");
    let content_type = parts.headers.get(header::CONTENT_TYPE).cloned().unwrap_or(plain);
    answer.headers_mut().insert(header::CONTENT_TYPE, content_type);
    tracing::debug!(pod = call.name(), follow, "streaming a log");
    Ok(match websocket::is_requested(&call.parts.headers) {
        true => websocket::log(call, answer),
        false => answer,
    })
}

/// The names under which the kubelet knows the options of exec and attach.
const STREAM_OPTIONS: [(&str, &str); 4] =
    [("stdin", "input"), ("stdout", "output"), ("stderr", "error"), ("tty", "tty")];

pub(super) async fn exec(call: &mut Call) -> Result<Response, Status> {
    stream(call, "exec").await
}

pub(super) async fn attach(call: &mut Call) -> Result<Response, Status> {
    stream(call, "attach").await
}

/// Requires the verb `create`. As upstream: a WebSocket begins with a GET, which asks for no more than
/// `get`, but every way into a container requires `create`.
pub(super) async fn require_create(call: &Call) -> Result<(), Status> {
    if call.verb == Verb::Create {
        return Ok(());
    }
    let registry = &call.server.registry;
    let action = Action::on(&call.target, Verb::Create.as_str());
    let decide = || auth::decide(&registry.rbac, &registry.view(), &call.user, &action);
    match auth::settled(&registry.rbac, decide).await {
        decision if decision.allowed => Ok(()),
        decision => Err(Status::forbidden("", &call.resource.plural, call.name(), &decision.reason)),
    }
}

async fn stream(call: &mut Call, what: &str) -> Result<Response, Status> {
    require_create(call).await?;
    let pod = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    let container = container(call, &pod)?;
    check_host(call, &pod)?;
    if what == "exec" && call.query.all("command").next().is_none() {
        return Err(Status::bad_request("you must specify at least 1 command for the container"));
    }
    let wanted = || STREAM_OPTIONS.iter().filter(|(ours, _)| call.query.flag(ours));
    if !wanted().any(|(ours, _)| *ours != "tty") {
        return Err(Status::bad_request("you must specify at least one of stdin, stdout, stderr"));
    }
    let commands = call.query.all("command").map(|command| ("command", command));
    let query = encode(wanted().map(|(_, theirs)| (*theirs, "1")).chain(commands));
    let path = format!("/{what}/{}/{}/{container}?{query}", call.namespace(), call.name());
    upgrade(call, &pod, &path).await
}

pub(super) async fn port_forward(call: &mut Call) -> Result<Response, Status> {
    require_create(call).await?;
    // As upstream: one parameter may list several ports.
    let ports: Vec<String> =
        call.query.all("ports").flat_map(|ports| ports.split(',')).map(str::to_owned).collect();
    if let Some(port) = ports.iter().find(|port| port.parse::<u16>().is_err()) {
        let digits = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
        let why = if digits { "value out of range" } else { "invalid syntax" };
        let why = format!("cannot convert to []int32: strconv.ParseUint: parsing {port:?}: {why}");
        return Err(Status::bad_request(why));
    }
    let pod = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    check_host(call, &pod)?;
    let query = encode(ports.iter().map(|port| ("port", port.as_str())));
    let path = format!("/portForward/{}/{}?{query}", call.namespace(), call.name());
    upgrade(call, &pod, &path).await
}

/// The container asked for, or the only one.
fn container(call: &Call, pod: &Value) -> Result<String, Status> {
    let names = |list: &str| -> Vec<String> {
        pod.pointer(list)
            .and_then(Value::as_array)
            .map(Vec::as_slice)
            .unwrap_or_default()
            .iter()
            .filter_map(|c| c["name"].as_str().map(str::to_owned))
            .collect()
    };
    let containers = names("/spec/containers");
    let init = names("/spec/initContainers");
    let ephemeral = names("/spec/ephemeralContainers");
    let pod_name = meta::name(pod);
    let wanted = call.query.get("container").unwrap_or_default();
    if !wanted.is_empty() {
        if containers.iter().chain(&init).chain(&ephemeral).any(|n| n == wanted) {
            return Ok(wanted.to_owned());
        }
        return Err(Status::bad_request(format!("container {wanted} is not valid for pod {pod_name}")));
    }
    let annotated = pod
        .pointer("/metadata/annotations/kubectl.kubernetes.io~1default-container")
        .and_then(Value::as_str)
        .filter(|n| containers.iter().any(|c| c == n));
    match (annotated, containers.as_slice()) {
        (Some(name), _) => Ok(name.to_owned()),
        (None, [only]) => Ok(only.clone()),
        _ => {
            let mut text = format!(
                "a container name must be specified for pod {pod_name}, choose one of: [{}]",
                containers.join(" ")
            );
            if !init.is_empty() {
                text.push_str(&format!(" or one of the init containers: [{}]", init.join(" ")));
            }
            Err(Status::bad_request(text))
        }
    }
}

fn request(method: Method, path: &str) -> Result<Request<Empty<Bytes>>, Status> {
    Request::builder()
        .method(method)
        .uri(path)
        .body(Empty::new())
        .map_err(|e| Status::bad_request(format!("cannot ask the kubelet: {e}")))
}

async fn upgrade(call: &mut Call, pod: &Value, path: &str) -> Result<Response, Status> {
    if call.header(header::UPGRADE).is_empty() {
        return Err(Status::bad_request("Upgrade request required"));
    }
    let mut request = request(call.parts.method.clone(), path)?;
    dial::copy_upgrade_headers(&call.parts.headers, request.headers_mut());
    let response = send(call, pod, request).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(relay_error(response).await);
    }
    dial::join(&call.server, &mut call.parts, response)
}

/// The kubelet's error as a Status.
async fn relay_error(response: ::http::Response<hyper::body::Incoming>) -> Status {
    const LIMIT: usize = 64 << 10;
    let code = response.status().as_u16();
    let body = response.into_body().map_err(|e| -> BoxError { e.into() }).boxed_unsync();
    let text = match crate::http::read(body, LIMIT, |_| true).await {
        Ok(bytes) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        Err(_) => String::new(),
    };
    match code {
        400 => Status::bad_request(text),
        404 => Status::new(404, "NotFound", text),
        429 => Status::too_many_requests(text),
        503 => Status::unavailable(text),
        _ => Status::internal(format!("error from the kubelet ({code}): {text}")),
    }
}

/// The node a pod runs on.
fn host(pod: &Value) -> Result<&str, Status> {
    let node = pod.pointer("/spec/nodeName").and_then(Value::as_str).filter(|name| !name.is_empty());
    node.ok_or_else(|| Status::bad_request(format!("pod {} does not have a host assigned", meta::name(pod))))
}

/// Refuses a pod whose node is not there. As upstream: before anything else about the stream is looked at, and in words
/// about pods.
fn check_host(call: &Call, pod: &Value) -> Result<(), Status> {
    let node = host(pod)?;
    let found = call.server.registry.view().get("", "nodes", "", node);
    found.map(drop).ok_or_else(|| Status::not_found("", "pods", node))
}

/// The credentials that the server shows to kubelets.
fn tls(server: &ApiServer) -> Result<Arc<rustls::ClientConfig>, Status> {
    let tls = server.certificates().certificates.kubelet_client.clone();
    tls.ok_or_else(|| Status::internal("this server has no certificate for kubelets"))
}

/// Sends a request to the kubelet of the pod's node.
async fn send(
    call: &Call,
    pod: &Value,
    request: Request<Empty<Bytes>>,
) -> Result<::http::Response<hyper::body::Incoming>, Status> {
    let node = host(pod)?;
    send_to(&call.server, call.parts.extensions.get(), node, request).await
}

/// The kubelet of a node as the far side of a request.
pub(super) fn at_kubelet(
    server: &ApiServer,
    node: &str,
    address: IpAddr,
    port: u16,
) -> Result<Place, Status> {
    Ok(Place { address, port, tls: Some(tls(server)?), server_name: None, kubelet_of: Some(node.to_owned()) })
}

/// Sends a request to the kubelet of a node.
async fn send_to(
    server: &ApiServer,
    account: Option<&Account>,
    node: &str,
    request: Request<Empty<Bytes>>,
) -> Result<::http::Response<hyper::body::Incoming>, Status> {
    let (address, port) = endpoint(server, node)?;
    let place = at_kubelet(server, node, address, port)?;
    dial::send(server, account, &place, request).await.map_err(|e| match e.is::<TooManyConnections>() {
        true => Status::too_many_requests(e.to_string()),
        false => {
            Status::internal(format!("cannot reach the kubelet of node {node} at {address}:{port}: {e}"))
        }
    })
}

/// Reads a document of a node's kubelet, of at most `limit` bytes.
pub(crate) async fn read(server: &ApiServer, node: &str, path: &str, limit: usize) -> Result<Bytes, Status> {
    let request = Request::get(path)
        .body(Empty::new())
        .map_err(|e| Status::bad_request(format!("cannot ask the kubelet: {e}")))?;
    let response = send_to(server, None, node, request).await?;
    let code = response.status();
    if !code.is_success() {
        return Err(Status::internal(format!("the kubelet of node {node} answers {path} with {code}")));
    }
    let body = http_body_util::Limited::new(response.into_body(), limit).collect().await;
    let body = body.map_err(|e| Status::internal(format!("cannot read {path} of node {node}: {e}")))?;
    Ok(body.to_bytes())
}

pub(super) fn endpoint(server: &ApiServer, name: &str) -> Result<(IpAddr, u16), Status> {
    let view = server.registry.view();
    let node = view.get("", "nodes", "", name).ok_or_else(|| Status::not_found("", "nodes", name))?;
    let listed = node.pointer("/status/addresses").and_then(Value::as_array);
    let of_type = |wanted: &String| {
        let found = listed?.iter().find(|address| address["type"] == wanted.as_str())?;
        found["address"].as_str()?.parse::<IpAddr>().ok()
    };
    let address = server.config.kubelet_addresses.iter().find_map(of_type);
    let address = address.ok_or_else(|| {
        let types = server.config.kubelet_addresses.join(", ");
        Status::internal(format!("node {name} has no address of the types {types} yet"))
    })?;
    dial::check_address(address)?;
    if dial::is_service(server, address) {
        return Err(Status::bad_request(dial::NotAllowed.to_string()));
    }
    let port = node
        .pointer("/status/daemonEndpoints/kubeletEndpoint/Port")
        .and_then(Value::as_u64)
        .and_then(|p| u16::try_from(p).ok())
        .filter(|port| *port != 0)
        .unwrap_or(10250);
    Ok((address, port))
}
