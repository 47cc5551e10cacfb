//! `log`, `exec`, `attach`, `portforward`: streams that the pod's kubelet serves.
//!
//! The server finds the node, checks the request and passes bytes on. An upgraded connection is joined end to
//! end, so the protocol spoken on it is a matter between the client and the node.

use crate::call::Call;
use crate::http::{Answer, BoxError};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use bytes::Bytes;
use ferrite_api::field::{FieldError, Path};
use ferrite_api::{Status, meta};
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls_pki_types::ServerName;
use serde_json::Value;
use std::net::IpAddr;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

/// Options of a log that the kubelet takes under the same names.
const LOG_OPTIONS: [&str; 8] =
    ["follow", "previous", "sinceSeconds", "sinceTime", "timestamps", "tailLines", "limitBytes", "stream"];

fn encode<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish()
}

const DIAL_TIMEOUT: Duration = Duration::from_secs(10);

/// Lower bounds of a log's options, and how upstream words them.
const LOG_BOUNDS: [(&str, i64, &str); 3] = [
    ("tailLines", 0, "must be greater than or equal to 0"),
    ("limitBytes", 1, "must be greater than 0"),
    ("sinceSeconds", 1, "must be greater than 0"),
];

fn check_log_options(call: &Call) -> Result<(), Status> {
    let mut errors = Vec::new();
    for (option, least, why) in LOG_BOUNDS {
        if let Some(value) = call.query.integer(option)?.filter(|v| *v < least) {
            errors.push(FieldError::invalid(&Path::new(option), value, why));
        }
    }
    match errors.as_slice() {
        [] => Ok(()),
        errors => Err(Status::invalid("", "PodLogOptions", call.name(), errors)),
    }
}

pub(super) async fn log(call: &mut Call) -> Result<Answer, Status> {
    let pod = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    check_log_options(call)?;
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
    let response = send(call, &pod, request).await?;
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
    Ok(answer)
}

/// The names under which the kubelet knows the options of exec and attach.
const STREAM_OPTIONS: [(&str, &str); 4] =
    [("stdin", "input"), ("stdout", "output"), ("stderr", "error"), ("tty", "tty")];

pub(super) async fn exec(call: &mut Call) -> Result<Answer, Status> {
    if call.query.all("command").next().is_none() {
        return Err(Status::bad_request("you must specify at least 1 command for the container"));
    }
    stream(call, "exec").await
}

pub(super) async fn attach(call: &mut Call) -> Result<Answer, Status> {
    stream(call, "attach").await
}

async fn stream(call: &mut Call, what: &str) -> Result<Answer, Status> {
    let pod = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    let container = container(call, &pod)?;
    let wanted = || STREAM_OPTIONS.iter().filter(|(ours, _)| call.query.flag(ours));
    if !wanted().any(|(ours, _)| *ours != "tty") {
        return Err(Status::bad_request("you must specify at least one of stdin, stdout, stderr"));
    }
    let commands = call.query.all("command").map(|command| ("command", command));
    let query = encode(wanted().map(|(_, theirs)| (*theirs, "1")).chain(commands));
    let path = format!("/{what}/{}/{}/{container}?{query}", call.namespace(), call.name());
    upgrade(call, &pod, &path).await
}

pub(super) async fn port_forward(call: &mut Call) -> Result<Answer, Status> {
    let pod = call.server.registry.read(&call.resource, call.namespace(), call.name())?;
    let query = encode(call.query.all("ports").map(|port| ("port", port)));
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

/// Headers that make an upgrade; everything else stays between the client and us.
fn is_upgrade_header(name: &HeaderName) -> bool {
    let name = name.as_str();
    name == "connection"
        || name == "upgrade"
        || name.starts_with("sec-websocket-")
        || name.starts_with("x-stream-protocol-version")
        || name == "x-accepted-stream-protocol-versions"
}

fn copy_upgrade_headers(from: &HeaderMap, to: &mut HeaderMap) {
    for (name, value) in from {
        if is_upgrade_header(name) {
            to.append(name.clone(), value.clone());
        }
    }
}

async fn upgrade(call: &mut Call, pod: &Value, path: &str) -> Result<Answer, Status> {
    if call.header(header::UPGRADE).is_empty() {
        return Err(Status::bad_request("Upgrade request required"));
    }
    let mut request = request(call.parts.method.clone(), path)?;
    copy_upgrade_headers(&call.parts.headers, request.headers_mut());
    let client_side = call.parts.extensions.remove::<hyper::upgrade::OnUpgrade>();
    let mut response = send(call, pod, request).await?;
    if response.status() != StatusCode::SWITCHING_PROTOCOLS {
        return Err(relay_error(response).await);
    }
    let Some(client_side) = client_side else {
        return Err(Status::bad_request("this connection cannot be upgraded; use HTTP/1.1"));
    };
    let node_side = hyper::upgrade::on(&mut response);
    let stopping = call.server.stopping();
    call.server.spawn(async move {
        let (Ok(client), Ok(node)) = tokio::join!(client_side, node_side) else { return };
        let (mut client, mut node) = (TokioIo::new(client), TokioIo::new(node));
        tokio::select! {
            // Either side may simply go away.
            _ = tokio::io::copy_bidirectional(&mut client, &mut node) => {}
            () = stopping.cancelled() => {}
        }
    });
    let mut answer = Response::new(crate::http::full(Bytes::new()));
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    copy_upgrade_headers(response.headers(), answer.headers_mut());
    Ok(answer)
}

/// What the kubelet complained about, as a Status.
async fn relay_error(response: Response<hyper::body::Incoming>) -> Status {
    const LIMIT: usize = 64 << 10;
    let code = response.status().as_u16();
    let body = response.into_body().map_err(|e| -> BoxError { e.into() }).boxed_unsync();
    let text = match crate::http::read(body, LIMIT).await {
        Ok(bytes) => String::from_utf8_lossy(&bytes).trim().to_owned(),
        Err(_) => String::new(),
    };
    match code {
        400 => Status::bad_request(text),
        404 => Status::new(404, "NotFound", text),
        _ => Status::internal(format!("error from the kubelet ({code}): {text}")),
    }
}

/// Sends a request to the kubelet of the pod's node.
async fn send(
    call: &Call,
    pod: &Value,
    mut request: Request<Empty<Bytes>>,
) -> Result<Response<hyper::body::Incoming>, Status> {
    let node = pod.pointer("/spec/nodeName").and_then(Value::as_str).unwrap_or_default();
    if node.is_empty() {
        return Err(Status::bad_request(format!("pod {} does not have a host assigned", meta::name(pod))));
    }
    let (address, port) = endpoint(call, node)?;
    let tls = call
        .server
        .config
        .kubelet_client
        .clone()
        .ok_or_else(|| Status::internal("this server has no certificate for kubelets"))?;
    let host = HeaderValue::from_str(&format!("{address}:{port}")).map_err(Status::internal)?;
    request.headers_mut().insert(header::HOST, host);
    let unreachable = |e: BoxError| {
        Status::internal(format!("cannot reach the kubelet of node {node} at {address}:{port}: {e}"))
    };
    let connect = async {
        let tcp = TcpStream::connect((address, port)).await?;
        tcp.set_nodelay(true)?;
        let tls = TlsConnector::from(tls).connect(ServerName::IpAddress(address.into()), tcp).await?;
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await?;
        Ok::<_, BoxError>((sender, connection))
    };
    let (mut sender, connection) = tokio::time::timeout(DIAL_TIMEOUT, connect)
        .await
        .map_err(|_| unreachable("timed out".into()))?
        .map_err(unreachable)?;
    call.server.spawn(async move {
        // An error shows up on the response as well.
        let _ = connection.with_upgrades().await;
    });
    sender.send_request(request).await.map_err(|e| unreachable(e.into()))
}

fn endpoint(call: &Call, name: &str) -> Result<(IpAddr, u16), Status> {
    let view = call.server.registry.view();
    let node = view.get("", "nodes", "", name).ok_or_else(|| Status::not_found("", "nodes", name))?;
    let address = node
        .pointer("/status/addresses")
        .and_then(Value::as_array)
        .and_then(|list| list.iter().find(|a| a["type"] == "InternalIP"))
        .and_then(|a| a["address"].as_str()?.parse().ok())
        .ok_or_else(|| Status::internal(format!("node {name} has no internal address yet")))?;
    let port = node
        .pointer("/status/daemonEndpoints/kubeletEndpoint/Port")
        .and_then(Value::as_u64)
        .and_then(|p| u16::try_from(p).ok())
        .unwrap_or(10250);
    Ok((address, port))
}
