//! An extension API server behind an APIService: its resources look like the cluster's own.

use crate::clients::{object, with_kube_rs};
use crate::world::*;
use base64::Engine;
use ferrite_json::{Value, json};
use ferrite_pki::{Authority, Purpose, Subject};
use futures_util::{StreamExt, TryStreamExt};
use http::{Request, Response, header};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::{Api, DynamicObject, PostParams, WatchEvent, WatchParams};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const GROUP: &str = "wardle.example";
const VERSION: &str = "v1alpha1";

/// The objects of the extension server, and the users that have asked for them.
#[derive(Default)]
struct Extension {
    flunders: Mutex<Vec<Value>>,
    users: Mutex<Vec<String>>,
}

type Answer = Response<BoxBody<Bytes, Infallible>>;

fn reply(code: u16, value: &Value) -> Answer {
    let body = Full::new(Bytes::from(value.to_string())).boxed();
    let made = Response::builder().status(code).header(header::CONTENT_TYPE, "application/json");
    made.body(body).unwrap()
}

impl Extension {
    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let (parts, body) = request.into_parts();
        let user = parts.headers.get("x-remote-user").map(|u| u.to_str().unwrap().to_owned());
        self.users.lock().unwrap().push(user.unwrap_or_default());
        let resource = format!("/apis/{GROUP}/{VERSION}/namespaces/default/flunders");
        let api_version = format!("{GROUP}/{VERSION}");
        match (parts.method.as_str(), parts.uri.path()) {
            ("GET", path) if path == format!("/apis/{GROUP}/{VERSION}") => reply(
                200,
                &json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": [
                    {"name": "flunders", "singularName": "flunder", "namespaced": true, "kind": "Flunder",
                     "verbs": ["create", "get", "list", "watch"]},
                ]}),
            ),
            ("POST", path) if path == resource => {
                let body = body.collect().await.unwrap().to_bytes();
                let mut flunder: Value = ferrite_json::from_slice(&body).unwrap();
                flunder["metadata"]["uid"] = "1".into();
                self.flunders.lock().unwrap().push(flunder.clone());
                reply(201, &flunder)
            }
            ("GET", path) if path == resource && parts.uri.query().unwrap_or_default().contains("watch") => {
                let flunders = self.flunders.lock().unwrap().clone();
                let events = flunders.into_iter().map(|flunder| {
                    let line = json!({"type": "ADDED", "object": flunder}).to_string() + "\n";
                    Ok::<_, Infallible>(Frame::data(Bytes::from(line)))
                });
                // The stream stays open, as a watch does.
                let body = StreamBody::new(
                    futures_util::stream::iter(events).chain(futures_util::stream::pending()),
                );
                Response::new(BodyExt::boxed(body))
            }
            ("GET", path) if path == resource => {
                let items = self.flunders.lock().unwrap().clone();
                reply(
                    200,
                    &json!({"kind": "FlunderList", "apiVersion": api_version, "metadata": {}, "items": items}),
                )
            }
            _ => reply(404, &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404})),
        }
    }
}

/// Serves to front proxies of the cluster and to nobody else, until the set is dropped.
async fn serve(servers: &mut JoinSet<()>, extension: &Arc<Extension>, client: &Client) -> (u16, String) {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "kube-system");
    let published = maps.get("extension-apiserver-authentication").await.unwrap().data.unwrap();
    assert_eq!(published["requestheader-allowed-names"], r#"["front-proxy-client"]"#);
    let authority = Authority::create("wardle").unwrap();
    let subject = Subject {
        common_name: "wardle".into(),
        organization: None,
        names: vec!["wardle.default.svc".to_owned()],
    };
    let identity = authority.issue(&subject, Purpose::Server).unwrap();
    let proxies = &published["requestheader-client-ca-file"];
    let tls = ferrite_pki::mutual_server_config(&identity, proxies, &["http/1.1"]).unwrap();
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
    let extension = Arc::clone(extension);
    servers.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, extension) = (acceptor.clone(), Arc::clone(&extension));
            connections.spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let service = hyper::service::service_fn(|request| {
                    let extension = Arc::clone(&extension);
                    async move { Ok::<_, Infallible>(extension.answer(request).await) }
                });
                // A client that goes away early is none of our business.
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    (port, authority.certificate().to_owned())
}

/// A Service with the extension server behind it, and its APIService.
async fn register(client: &Client, port: u16, authority: &str) {
    let node = Api::<Node>::all(client.clone()).get("node").await.unwrap();
    let addresses = node.status.unwrap().addresses.unwrap();
    let address = &addresses.iter().find(|a| a.type_ == "InternalIP").unwrap().address;
    let post = PostParams::default();
    let service: Service =
        object(json!({"metadata": {"name": "wardle"}, "spec": {"ports": [{"name": "https", "port": 443}]}}));
    Api::default_namespaced(client.clone()).create(&post, &service).await.unwrap();
    let slice: EndpointSlice = object(json!({
        "metadata": {"name": "wardle", "labels": {"kubernetes.io/service-name": "wardle"}},
        "addressType": "IPv4", "endpoints": [{"addresses": [address]}],
        "ports": [{"name": "https", "port": port}],
    }));
    Api::default_namespaced(client.clone()).create(&post, &slice).await.unwrap();
    let bundle = base64::engine::general_purpose::STANDARD.encode(authority);
    let api: DynamicObject = object(json!({
        "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
        "metadata": {"name": format!("{VERSION}.{GROUP}")},
        "spec": {
            "group": GROUP, "version": VERSION, "groupPriorityMinimum": 2000, "versionPriority": 200,
            "caBundle": bundle, "service": {"namespace": "default", "name": "wardle", "port": 443},
        },
    }));
    apiservices(client).create(&post, &api).await.unwrap();
}

fn dynamic(group: &str, version: &str, kind: &str, plural: &str) -> kube::api::ApiResource {
    kube::api::ApiResource {
        group: group.into(),
        version: version.into(),
        api_version: format!("{group}/{version}"),
        kind: kind.into(),
        plural: plural.into(),
    }
}

fn apiservices(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &dynamic("apiregistration.k8s.io", "v1", "APIService", "apiservices"))
}

#[test]
fn an_extension_api_server_is_part_of_the_api() {
    let world = World::start();
    let kubeconfig = world.path("kubeconfig");
    with_kube_rs(&world, |client| async move {
        let kubectl = async |arguments: &[&str]| {
            let mut command = tokio::process::Command::new("kubectl");
            let output = command.env("KUBECONFIG", &kubeconfig).args(arguments).output().await.unwrap();
            let said = [&output.stdout[..], &output.stderr[..]].concat();
            String::from_utf8(said).unwrap()
        };
        // Every group of the server itself has an APIService that is available.
        let wait = ["wait", "--for=condition=Available", "--timeout=60s"];
        kubectl(&[&wait[..], &["apiservice/v1.apps", "apiservice/v1."]].concat()).await;
        assert!(kubectl(&["get", "apiservice", "v1.apps"]).await.contains("Local"));

        let extension = Arc::new(Extension::default());
        let mut servers = JoinSet::new();
        let (port, authority) = serve(&mut servers, &extension, &client).await;
        register(&client, port, &authority).await;
        let name = format!("apiservice/{VERSION}.{GROUP}");
        let said = kubectl(&[&wait[..], &[&name]].concat()).await;
        assert!(said.contains("condition met"), "{said}");

        // Discovery in both forms, and a person's commands.
        let listed = kubectl(&["api-resources", "--api-group", GROUP]).await;
        assert!(listed.contains("flunders"), "{listed}");
        let groups: Value = ferrite_json::from_str(&kubectl(&["get", "--raw", "/apis"]).await).unwrap();
        let names: Vec<&str> =
            groups["groups"].as_array().unwrap().iter().filter_map(|g| g["name"].as_str()).collect();
        let place = |group: &str| names.iter().position(|name| *name == group).unwrap();
        assert!(place(GROUP) > place("storage.k8s.io"), "after the built-in groups: {names:?}");
        assert!(place(GROUP) < place("metrics.k8s.io"), "before groups of a lower rank: {names:?}");
        let flunders: Api<DynamicObject> =
            Api::default_namespaced_with(client.clone(), &dynamic(GROUP, VERSION, "Flunder", "flunders"));
        let flunder: DynamicObject = object(json!({
            "apiVersion": format!("{GROUP}/{VERSION}"), "kind": "Flunder", "metadata": {"name": "first"},
        }));
        flunders.create(&PostParams::default(), &flunder).await.unwrap();
        assert!(kubectl(&["get", "flunders"]).await.contains("first"));
        let asked = extension.users.lock().unwrap().clone();
        assert!(asked.iter().any(|user| user == "kubernetes-admin"), "{asked:?}");
        assert!(asked.iter().any(|user| user == "system:kube-aggregator"), "{asked:?}");

        // A watch is passed on while it is open.
        let watch = flunders.watch(&WatchParams::default(), "0").await.unwrap();
        let mut watch = std::pin::pin!(watch);
        let event = watch.try_next().await.unwrap();
        assert!(matches!(&event, Some(WatchEvent::Added(f)) if f.metadata.name.as_deref() == Some("first")));

        // The cluster's own authorization comes first.
        let denied = kubectl(&["get", "flunders", "--as", "nobody"]).await;
        assert!(denied.contains("Forbidden") || denied.contains("forbidden"), "{denied}");

        // A server that is gone is said to be gone, and nothing else is.
        servers.shutdown().await;
        let unavailable = ["wait", "--for=condition=Available=False", &name, "--timeout=90s"];
        assert!(kubectl(&unavailable).await.contains("condition met"));
        let raw = kubectl(&["get", "--raw", &format!("/apis/{GROUP}/{VERSION}")]).await;
        assert!(raw.contains("unable to handle the request"), "{raw}");
        assert!(kubectl(&["get", "nodes"]).await.contains("Ready"));
        let stale: Value = aggregated(&client).await;
        let items = stale["items"].as_array().unwrap();
        let item = items.iter().find(|item| item["metadata"]["name"] == GROUP).unwrap();
        assert_eq!(item["versions"][0]["freshness"], "Stale");
        kubectl(&["delete", &name]).await;
        let listed = kubectl(&["get", "--raw", "/apis"]).await;
        assert!(!listed.contains(GROUP), "{listed}");
    });
}

async fn aggregated(client: &Client) -> Value {
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let request = Request::get("/apis").header(header::ACCEPT, accept).body(Vec::new()).unwrap();
    ferrite_json::from_str(&client.request_text(request).await.unwrap()).unwrap()
}
