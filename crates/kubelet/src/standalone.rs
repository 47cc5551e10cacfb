//! A kubelet without an API server.
//!
//! Its parts stay clients: they talk to a service in this process that has no objects and drops all writes.

use bytes::Bytes;
use ferrite_json::{Value, json};
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use kube::client::Body;
use std::convert::Infallible;

/// The client of a kubelet that has no API server.
pub fn client() -> kube::Client {
    kube::Client::new(
        tower::service_fn(|request| async { Ok::<_, Infallible>(answer(request).await) }),
        "default",
    )
}

async fn answer(request: http::Request<Body>) -> http::Response<UnsyncBoxBody<Bytes, Infallible>> {
    let (parts, body) = request.into_parts();
    let query = parts.uri.query().unwrap_or_default();
    if query.split('&').any(|pair| matches!(pair, "watch=true" | "watch=1" | "watch")) {
        let nothing = stream::pending::<Result<Frame<Bytes>, Infallible>>();
        return http::Response::new(BodyExt::boxed_unsync(StreamBody::new(nothing)));
    }
    if parts.method == http::Method::GET && is_collection(parts.uri.path()) {
        let list =
            json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []});
        return with(http::StatusCode::OK, &list);
    }
    if parts.method == http::Method::POST {
        let sent = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
        let sent: Value = ferrite_json::from_slice(&sent).unwrap_or_default();
        return with(http::StatusCode::CREATED, &sent);
    }
    let message = "the kubelet runs without an API server";
    with(
        http::StatusCode::NOT_FOUND,
        &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404, "message": message}),
    )
}

fn with(status: http::StatusCode, body: &Value) -> http::Response<UnsyncBoxBody<Bytes, Infallible>> {
    let mut answer = http::Response::new(Full::new(Bytes::from(body.to_string())).boxed_unsync());
    *answer.status_mut() = status;
    answer
}

/// `/api/v1/pods` and `/apis/GROUP/VERSION/namespaces/NAMESPACE/leases` name collections.
fn is_collection(path: &str) -> bool {
    let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
    let rest = parts.get(if parts.first() == Some(&"api") { 2 } else { 3 }..).unwrap_or_default();
    match rest {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest.len() == 1,
        rest => rest.len() == 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn collections() {
        for (path, expected) in [
            ("/api/v1/pods", true),
            ("/api/v1/namespaces", true),
            ("/api/v1/namespaces/default", false),
            ("/api/v1/namespaces/default/pods", true),
            ("/api/v1/namespaces/default/pods/web", false),
            ("/apis/coordination.k8s.io/v1/namespaces/x/leases", true),
            ("/apis/coordination.k8s.io/v1/namespaces/x/leases/y", false),
            ("/api/v1/nodes/n", false),
            ("/", false),
        ] {
            assert_eq!(is_collection(path), expected, "{path}");
        }
    }
}
