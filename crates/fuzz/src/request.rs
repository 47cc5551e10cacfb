//! Whole requests: paths, percent-encodings, options, continue tokens, content types, bodies.

use crate::Target;
use bytes::Bytes;
use ferrite_apiserver::{ApiServer, Config, InProcessClient, User};
use ferrite_store::Store;
use http::Request;
use http_body_util::{BodyExt, Full};
use std::sync::{Arc, OnceLock};
use tokio::runtime::{Builder, Runtime};
use tower::Service;

struct Server {
    runtime: Runtime,
    client: InProcessClient,
}

/// Bodies of watches have no end; this much of an answer is read.
const READ: usize = 4;

fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let config = Config::new("192.0.2.1:6443".parse().expect("an address"));
        let server =
            runtime.block_on(ApiServer::start(Arc::new(Store::memory()), config)).expect("the server starts");
        let client = server.in_process_client(User::new("fuzzer", ["system:masters"]));
        Server { runtime, client }
    })
}

/// `METHOD target`, a content type on the second line, then the body.
fn parse(bytes: &[u8]) -> Option<Request<Full<Bytes>>> {
    let mut parts = bytes.splitn(3, |byte| *byte == b'\n');
    let first = std::str::from_utf8(parts.next()?).ok()?;
    let content_type = parts.next()?;
    let body = Bytes::copy_from_slice(parts.next().unwrap_or_default());
    let (method, target) = first.split_once(' ')?;
    Request::builder()
        .method(method)
        .uri(target)
        .header("content-type", content_type)
        .header("accept", content_type)
        .body(Full::new(body))
        .ok()
}

pub const REQUEST: Target = Target {
    name: "request",
    run: |bytes| {
        let Some(request) = parse(bytes) else { return };
        let server = server();
        server.runtime.block_on(async {
            let watch = request.uri().query().is_some_and(|query| query.contains("watch"));
            let answer = server.client.clone().call(request).await.expect("an answer");
            assert!(answer.status().as_u16() < 600);
            let refused = answer.status().is_client_error() || answer.status().is_server_error();
            let mut body = answer.into_body();
            if watch && !refused {
                return;
            }
            for _ in 0..READ {
                if body.frame().await.is_none() {
                    break;
                }
            }
        });
    },
};
