//! Clients that begin many requests, and neither finish them nor read what they asked for.

use crate::network::Network;
use crate::world::*;
use bytes::Bytes;
use ferrite_apiserver::{BoxError, Serving, User};
use ferrite_json::json;
use ferrite_pki::{Purpose, Subject};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::{Request, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

type Sender = SendRequest<UnsyncBoxBody<Bytes, BoxError>>;

const REVIEWS: &str = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
const MIB: usize = 1 << 20;
/// Longer than any of this takes.
const LIMIT: Duration = Duration::from_secs(60);

impl Network {
    /// A connection of a user, with windows of that many bytes for responses.
    async fn slow(&self, name: &str, window: u32) -> Sender {
        let subject = Subject::client(name, None);
        let identity = self.authority.issue(&subject, Purpose::Client).expect("a certificate");
        let mut tls =
            ferrite_pki::client_config(self.authority.certificate(), Some(&identity)).expect("a setting");
        tls.alpn_protocols = vec![b"h2".to_vec()];
        let stream = TcpStream::connect(self.address).await.expect("a connection");
        let server = "localhost".try_into().expect("a name");
        let stream = TlsConnector::from(Arc::new(tls)).connect(server, stream).await.expect("a handshake");
        let mut builder = http2::Builder::new(TokioExecutor::new());
        let (sender, connection) = builder
            .initial_stream_window_size(window)
            .handshake(TokioIo::new(stream))
            .await
            .expect("a handshake");
        // Ends with the connection, which the test ends.
        tokio::spawn(connection);
        sender
    }

    fn request(&self, method: &str, path: &str) -> http::request::Builder {
        let request = Request::builder().method(method).uri(format!("https://{}{path}", self.address));
        request.header("content-type", "application/json")
    }

    async fn status(&self, sender: &mut Sender, path: &str) -> StatusCode {
        let nothing = http_body_util::Empty::new().map_err(|never| match never {}).boxed_unsync();
        let request = self.request("GET", path).body(nothing).expect("a request");
        sender.send_request(request).await.expect("an answer").status()
    }
}

/// A body of that many bytes that never ends.
fn unfinished(size: usize) -> UnsyncBoxBody<Bytes, BoxError> {
    let start = futures_util::stream::iter([Ok(Frame::data(Bytes::from(vec![b' '; size])))]);
    StreamBody::new(start.chain(futures_util::stream::pending())).boxed_unsync()
}

#[tokio::test]
async fn bodies_that_never_end_hold_no_more_than_a_users_share() {
    let network = Network::serve(World::start_with(Serving::default()).await).await;
    let mut connections = Vec::new();
    let waiting = FuturesUnordered::new();
    // Together 232 MiB.
    for _ in 0..2 {
        let mut sender = network.slow("greedy", 1 << 20).await;
        for _ in 0..40 {
            let request = network.request("POST", REVIEWS).body(unfinished(2 * MIB + 900 * 1024));
            waiting.push(sender.send_request(request.expect("a request")));
        }
        connections.push(sender);
    }
    let refused = waiting.take(50).map(|answer| answer.map(|answer| answer.status()));
    let refused: Vec<_> =
        tokio::time::timeout(LIMIT, refused.collect()).await.expect("most are not waited for");
    for status in refused {
        assert_eq!(status.expect("an answer"), StatusCode::TOO_MANY_REQUESTS);
    }
    // Nobody else is affected.
    let mut other = network.slow("other", 1 << 20).await;
    assert_eq!(network.status(&mut other, "/version").await, StatusCode::OK);
    let review = json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
        "spec": {"nonResourceAttributes": {"path": "/version", "verb": "get"}}});
    let whole = http_body_util::Full::new(Bytes::from(review.to_string()));
    let request = network.request("POST", REVIEWS).body(whole.map_err(|never| match never {}).boxed_unsync());
    let answer = other.send_request(request.expect("a request")).await.expect("an answer");
    assert_eq!(answer.status(), StatusCode::CREATED);
}

#[tokio::test]
async fn responses_that_nobody_reads_hold_no_more_than_a_users_share() {
    let world = World::start_with(Serving::default()).await;
    assert_eq!(world.post(MAPS, &config_map("large", json!({"k": "x".repeat(MIB - 4096)}))).await.code, 201);
    let role = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "reader"},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]}]});
    let binding = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "reader"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reader"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "greedy"}]});
    for (kind, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
        let path = format!("/apis/rbac.authorization.k8s.io/v1/{kind}");
        assert_eq!(world.post(&path, &object).await.code, 201);
    }
    let network = Network::serve(world).await;
    let path = format!("{MAPS}/large");
    let mut held = Vec::new();
    let mut statuses = Vec::new();
    for _ in 0..3 {
        // A window of one byte: the server may begin to send, and gets no further.
        let mut sender = network.slow("greedy", 1).await;
        for _ in 0..60 {
            let nothing = http_body_util::Empty::new().map_err(|never| match never {}).boxed_unsync();
            let request = network.request("GET", &path).body(nothing).expect("a request");
            let answer = tokio::time::timeout(LIMIT, sender.send_request(request)).await.expect("in time");
            let answer = answer.expect("an answer");
            statuses.push(answer.status());
            held.push(answer);
        }
        held.shrink_to_fit();
        drop(sender);
    }
    let sent = statuses.iter().filter(|status| **status == StatusCode::OK).count();
    let refused = statuses.iter().filter(|status| **status == StatusCode::TOO_MANY_REQUESTS).count();
    assert!((60..=68).contains(&sent) && sent + refused == 180, "{sent} {refused}");
    let other = network.world.as_user(User::new("other", ["system:masters"]));
    assert_eq!(other.get(&path).await.code, 200);
    // A client that is gone holds nothing.
    drop(held);
    let again = async {
        loop {
            let mut sender = network.slow("greedy", 1 << 20).await;
            if network.status(&mut sender, &path).await == StatusCode::OK {
                return;
            }
        }
    };
    tokio::time::timeout(LIMIT, again).await.expect("the share is free again");
}
