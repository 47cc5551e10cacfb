//! A custom metrics adapter that answers 10 for every metric of every object: the smallest server that a
//! HorizontalPodAutoscaler can scale by.
//!
//! ```console
//! $ cargo run -p ferrite-metrics --example constant_adapter -- --kubeconfig admin.kubeconfig --listen 0.0.0.0:9997
//! ```
//! The end-to-end test `autoscaling` registers it with a Service and an APIService.

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use ferrite_client::read_document;
use ferrite_json::{Value, json};
use ferrite_pki::{Authority, Purpose, Subject};
use http::{Request, Response, StatusCode, Uri, header};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const API_VERSION: &str = "custom.metrics.k8s.io/v1beta1";
/// The value of every metric.
const VALUE: &str = "10";
/// The most that a list of pods may take.
const LARGEST: usize = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let mut listen: SocketAddr = "127.0.0.1:9997".parse()?;
    let mut kubeconfig = None;
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{flag} needs a value"))?;
        match flag.as_str() {
            "--listen" => listen = value.parse()?,
            "--kubeconfig" => kubeconfig = Some(Kubeconfig::read_from(value)?),
            _ => return Err(format!("unknown flag {flag}: there are --listen and --kubeconfig").into()),
        }
    }
    let kubeconfig = kubeconfig.ok_or("--kubeconfig FILE is needed: pods are looked up there")?;
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve(listen, kubeconfig))
}

async fn serve(listen: SocketAddr, kubeconfig: Kubeconfig) -> Result<(), Box<dyn Error>> {
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    let client = Client::try_from(config)?;
    let subject = Subject {
        common_name: "constant-adapter".into(),
        organization: None,
        names: vec!["localhost".to_owned()],
    };
    // The APIService says insecureSkipTLSVerify: nobody needs to know this authority.
    let identity = Authority::create("constant-adapter")?.issue(&subject, Purpose::Server)?;
    let tls = ferrite_pki::anonymous_server_config(&identity, &["http/1.1"])?;
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    let listener = TcpListener::bind(listen).await?;
    println!("serving at {}", listener.local_addr()?);
    let mut connections = JoinSet::new();
    loop {
        let (stream, _) = listener.accept().await?;
        while connections.try_join_next().is_some() {}
        let (acceptor, client) = (acceptor.clone(), client.clone());
        connections.spawn(async move {
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service = hyper::service::service_fn(|request: Request<Incoming>| {
                let client = client.clone();
                async move { Ok::<_, Infallible>(respond(answer(&client, request.uri()).await)) }
            });
            // A client that goes away early is none of our business.
            let http = hyper::server::conn::http1::Builder::new();
            let _ = http.serve_connection(TokioIo::new(stream), service).await;
        });
    }
}

fn respond(answer: Option<Value>) -> Response<Full<Bytes>> {
    let code = if answer.is_some() { StatusCode::OK } else { StatusCode::NOT_FOUND };
    let missing = || json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404});
    let body = answer.unwrap_or_else(missing).to_string();
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}

/// The questions of the API: which metrics there are, and the values for one object or for the pods of a selector.
async fn answer(client: &Client, uri: &Uri) -> Option<Value> {
    let rest = uri.path().strip_prefix("/apis/custom.metrics.k8s.io/v1beta1")?;
    if rest.is_empty() {
        // The list feeds discovery only: metrics that are not in it are answered, too.
        return Some(json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": API_VERSION,
            "resources": [{"name": "pods/requests_per_second", "singularName": "", "namespaced": true,
                "kind": "MetricValueList", "verbs": ["get"]}]}));
    }
    let segments: Vec<&str> = rest.trim_start_matches('/').split('/').collect();
    let ["namespaces", namespace, resource, name, metric] = segments.as_slice() else { return None };
    let names = match *name {
        "*" | "%2A" => pods(client, namespace, uri.query().unwrap_or_default()).await?,
        name => vec![name.to_owned()],
    };
    let kind = if *resource == "pods" { "Pod" } else { resource };
    let now = jiff::Timestamp::now().to_string();
    let value = |name: &String| {
        json!({"describedObject": {"kind": kind, "namespace": namespace, "name": name, "apiVersion": "v1"},
            "metricName": metric, "timestamp": now, "value": VALUE})
    };
    let items: Vec<Value> = names.iter().map(value).collect();
    Some(json!({"kind": "MetricValueList", "apiVersion": API_VERSION, "metadata": {}, "items": items}))
}

/// The names of the pods that the selector of a request selects.
async fn pods(client: &Client, namespace: &str, query: &str) -> Option<Vec<String>> {
    let selector = query.split('&').find(|parameter| parameter.starts_with("labelSelector="))?;
    let path = format!("/api/v1/namespaces/{namespace}/pods?{selector}");
    let list = read_document(client, &path, "application/json", LARGEST).await.ok()?;
    let name = |pod: &Value| pod["metadata"]["name"].as_str().map(str::to_owned);
    list["items"].as_array()?.iter().map(name).collect()
}
