//! The proxy to pods, services and nodes, with somebody at the far side.

use crate::clients::{object, with_kube_rs};
use crate::world::*;
use ferrite_json::{Value, json};
use ferrite_pki::{Authority, Purpose, Subject};
use futures_util::{SinkExt, StreamExt};
use http::{Request, Response, StatusCode, header};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::{Api, PostParams};
use kube::runtime::wait::{await_condition, conditions};
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Message, Role};

/// Returns the request, except for a few paths.
async fn answer(mut request: Request<Incoming>) -> http::Result<Response<Full<Bytes>>> {
    let host = request.headers()[header::HOST].to_str().unwrap().to_owned();
    let made = Response::builder();
    match request.uri().path() {
        "/redirect" => made.status(302).header("location", "/next?a=b").body(Full::default()),
        "/elsewhere" => made.status(302).header("location", "http://example.com/x").body(Full::default()),
        "/back" => made.status(302).header("location", format!("https://{host}/x")).body(Full::default()),
        "/page" => made
            .header("content-type", "text/html; charset=utf-8")
            .header("access-control-allow-origin", "*")
            .header("x-told", "yes")
            .body(r#"<a href="/next">/next</a><script>a = '<a href="/x">'</script>"#.into()),
        "/teapot" => made.status(418).body("short and stout".into()),
        "/socket" => {
            let key = request.headers()[header::SEC_WEBSOCKET_KEY].clone();
            // The client wants one of those it knows.
            let protocols = request.headers()[header::SEC_WEBSOCKET_PROTOCOL].to_str().unwrap().to_owned();
            let upgrade = hyper::upgrade::on(&mut request);
            tokio::spawn(async move {
                let raw = TokioIo::new(upgrade.await.unwrap());
                let mut socket = WebSocketStream::from_raw_socket(raw, Role::Server, None).await;
                while let Some(Ok(Message::Text(text))) = socket.next().await {
                    socket.send(Message::text(format!("heard {text}"))).await.unwrap();
                }
            });
            made.status(StatusCode::SWITCHING_PROTOCOLS)
                .header("connection", "Upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-accept", derive_accept_key(key.as_bytes()))
                .header("sec-websocket-protocol", protocols.split(',').next().unwrap_or_default().trim())
                .body(Full::default())
        }
        _ => {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let headers: Value =
                parts.headers.iter().map(|(n, v)| (n.to_string(), json!(v.to_str().unwrap()))).collect();
            let told = json!({
                "method": parts.method.as_str(), "target": parts.uri.to_string(), "headers": headers,
                "body": String::from_utf8_lossy(&body),
            });
            made.body(told.to_string().into())
        }
    }
}

/// Serves on a port of all addresses, over TLS if there is a configuration for it, until the set is dropped.
async fn serve(servers: &mut JoinSet<()>, tls: Option<Arc<rustls::ServerConfig>>) -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    servers.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let tls = tls.clone();
            connections.spawn(async move {
                let server = hyper::server::conn::http1::Builder::new();
                let service = hyper::service::service_fn(answer);
                // A client that speaks something else is none of our business.
                let _ = match tls {
                    None => server.serve_connection(TokioIo::new(stream), service).with_upgrades().await,
                    Some(tls) => match tokio_rustls::TlsAcceptor::from(tls).accept(stream).await {
                        Ok(stream) => {
                            server.serve_connection(TokioIo::new(stream), service).with_upgrades().await
                        }
                        Err(_) => Ok(()),
                    },
                };
            });
        }
    });
    port
}

fn tls() -> Arc<rustls::ServerConfig> {
    let authority = Authority::create("test").unwrap();
    let subject =
        Subject { common_name: "far".into(), organization: None, names: vec!["localhost".to_owned()] };
    let identity = authority.issue(&subject, Purpose::Server).unwrap();
    ferrite_pki::server_config(&identity, authority.certificate(), &["http/1.1"]).unwrap().config
}

struct Proxy {
    client: Client,
}

impl Proxy {
    async fn send(&self, method: &str, path: &str, body: &'static str) -> (u16, http::HeaderMap, String) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("x-asked", "yes")
            .header("accept", "text/html");
        let answer = self.client.send(request.body(body.as_bytes().to_vec().into()).unwrap()).await.unwrap();
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        (parts.status.as_u16(), parts.headers, String::from_utf8(body.to_vec()).unwrap())
    }

    async fn get(&self, path: &str) -> (u16, http::HeaderMap, String) {
        self.send("GET", path, "").await
    }
}

#[test]
fn the_proxy() {
    let world = World::start();
    let kubeconfig = world.path("kubeconfig");
    with_kube_rs(&world, |client| async move {
        let mut servers = JoinSet::new();
        let (plain, secure) = (serve(&mut servers, None).await, serve(&mut servers, Some(tls())).await);
        objects(client.clone(), plain, secure).await;
        let proxy = Proxy { client };
        let namespace = "/api/v1/namespaces/default";
        for base in [
            format!("{namespace}/services/far:web"),
            format!("{namespace}/services/far:80"),
            format!("{namespace}/services/http:far:web"),
            format!("{namespace}/services/https:far:tls"),
            format!("{namespace}/services/https:far:443"),
            format!("{namespace}/pods/host:{plain}"),
            format!("{namespace}/pods/https:host:{secure}"),
            format!("/api/v1/nodes/node:{plain}"),
        ] {
            let prefix = format!("{base}/proxy");
            passes(&proxy, &prefix).await;
            rewrites(&proxy, &prefix).await;
        }
        socket(&proxy.client, &format!("{namespace}/services/far:web/proxy/socket")).await;
        socket(&proxy.client, &format!("{namespace}/pods/https:host:{secure}/proxy/socket")).await;
        refuses(&proxy, namespace).await;
        let path = format!("{namespace}/services/https:far:tls/proxy/a?b=c");
        let mut kubectl = tokio::process::Command::new("kubectl");
        kubectl.env("KUBECONFIG", kubeconfig).args(["get", "--raw", &path]);
        let output = kubectl.output().await.unwrap();
        let told: Value = ferrite_json::from_slice(&output.stdout).expect("the far side's answer");
        assert_eq!(told["target"], "/a?b=c");
    });
    // The kubelet's own port needs the server's certificate, which the proxy shows it.
    assert_eq!(world.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/healthz"]), "ok");
}

/// A service with the node itself behind it, and a pod in the node's network.
async fn objects(client: Client, plain: u16, secure: u16) {
    let node = Api::<Node>::all(client.clone()).get("node").await.unwrap();
    let addresses = node.status.unwrap().addresses.unwrap();
    let address = &addresses.iter().find(|a| a.type_ == "InternalIP").unwrap().address;
    let post = PostParams::default();
    let ports = [("web", 80, plain), ("tls", 443, secure), ("shut", 9, 9)];
    let service: Service = object(json!({
        "metadata": {"name": "far"},
        "spec": {
            "ports": ports.iter().map(|(n, p, _)| json!({"name": n, "port": p})).collect::<Vec<_>>(),
        },
    }));
    Api::default_namespaced(client.clone()).create(&post, &service).await.unwrap();
    let slice: EndpointSlice = object(json!({
        "metadata": {"name": "far", "labels": {"kubernetes.io/service-name": "far"}},
        "addressType": "IPv4", "endpoints": [{"addresses": [address]}],
        "ports": ports.iter().map(|(n, _, p)| json!({"name": n, "port": p})).collect::<Vec<_>>(),
    }));
    Api::default_namespaced(client.clone()).create(&post, &slice).await.unwrap();
    let pods: Api<Pod> = Api::default_namespaced(client);
    let pod = object(json!({
        "metadata": {"name": "host"},
        "spec": {
            "hostNetwork": true, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "c", "image": TOOLS, "args": ["sleep"]}],
        },
    }));
    pods.create(&post, &pod).await.unwrap();
    await_condition(pods, "host", conditions::is_pod_running()).await.unwrap();
}

/// Methods, headers, queries and bodies get through; the user's identity does not.
async fn passes(proxy: &Proxy, prefix: &str) {
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
        let body = if method == "GET" { "" } else { "content" };
        let (code, _, told) = proxy.send(method, &format!("{prefix}/a%2Fb/c?d=e%20f&g"), body).await;
        assert_eq!(code, 200, "{method} {prefix}: {told}");
        let told: Value = ferrite_json::from_str(&told).unwrap();
        assert_eq!(told["method"], method, "{prefix}");
        assert_eq!(told["target"], "/a%2Fb/c?d=e%20f&g", "{prefix}");
        assert_eq!(told["body"], body, "{method} {prefix}");
        let headers = &told["headers"];
        assert_eq!(headers["x-asked"], "yes");
        assert_eq!(headers["x-forwarded-uri"], format!("{prefix}/a%2Fb/c"));
        assert_eq!(headers["x-forwarded-for"], "127.0.0.1");
        assert!(headers["authorization"].is_null(), "{headers}");
    }
    let (code, headers, body) = proxy.send("HEAD", &format!("{prefix}/teapot"), "").await;
    assert_eq!((code, body.as_str()), (418, ""));
    assert_eq!(headers[header::CONTENT_LENGTH], "15", "{prefix}");
    let (code, _, body) = proxy.get(&format!("{prefix}/teapot")).await;
    assert_eq!((code, body.as_str()), (418, "short and stout"));
}

/// Links of the far side lead through the proxy.
async fn rewrites(proxy: &Proxy, prefix: &str) {
    for (path, location) in [
        ("", format!("{prefix}/")),
        ("?q=1", format!("{prefix}/?q=1")),
        ("/redirect", format!("{prefix}/next?a=b")),
        ("/elsewhere", "http://example.com/x".to_owned()),
    ] {
        let (code, headers, _) = proxy.get(&format!("{prefix}{path}")).await;
        assert!(matches!(code, 301 | 302), "{prefix}{path}: {code}");
        assert_eq!(headers[header::LOCATION], location, "{prefix}{path}");
    }
    let (_, headers, _) = proxy.get(&format!("{prefix}/back")).await;
    let back = headers[header::LOCATION].to_str().unwrap();
    assert!(back.starts_with("https://") && back.ends_with(&format!("{prefix}/x")), "{back}");
    let (code, headers, page) = proxy.get(&format!("{prefix}/page")).await;
    assert_eq!(code, 200, "{page}");
    assert_eq!(page, format!(r#"<a href="{prefix}/next">/next</a><script>a = '<a href="/x">'</script>"#));
    assert_eq!(headers["x-told"], "yes");
    assert!(!headers.contains_key("access-control-allow-origin"));
}

async fn socket(client: &Client, path: &str) {
    let mut socket =
        client.connect(Request::get(path).body(Vec::new()).unwrap()).await.unwrap().into_stream();
    for text in ["one", "two"] {
        socket.send(Message::text(text)).await.unwrap();
        let heard = socket.next().await.unwrap().unwrap();
        assert_eq!(heard, Message::text(format!("heard {text}")), "{path}");
    }
}

async fn refuses(proxy: &Proxy, namespace: &str) {
    for (path, code, reason, message) in [
        ("services/far:shut", 503, "ServiceUnavailable", "error trying to reach service: dial tcp "),
        ("services/https:far:web", 503, "ServiceUnavailable", "error trying to reach service: "),
        ("services/far:81", 503, "ServiceUnavailable", "no service port 81 found for service \"far\""),
        ("services/far", 503, "ServiceUnavailable", "no endpoints available for service \"far\""),
        ("services/none:web", 404, "NotFound", "services \"none\" not found"),
        ("pods/host:9", 503, "ServiceUnavailable", "connect: connection refused"),
        ("pods/none", 404, "NotFound", "pods \"none\" not found"),
    ] {
        let (told, _, body) = proxy.get(&format!("{namespace}/{path}/proxy/")).await;
        let status: Value = ferrite_json::from_str(&body).unwrap();
        assert_eq!((told, &status["reason"]), (code, &json!(reason)), "{path}: {body}");
        assert!(status["message"].as_str().unwrap().contains(message), "{path}: {body}");
    }
}
