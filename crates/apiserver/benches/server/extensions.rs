//! Extensions of the API: definitions, their objects, webhooks, policies.

use crate::client::{Client, Turn, run as run_clients};
use crate::process::Server;
use crate::report::{less_is_better, more_is_better};
use base64::Engine;
use bytes::Bytes;
use ferrite_json::{Value, json};
use ferrite_pki::{Authority, Purpose, Subject};
use futures_util::StreamExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

const DEFINITIONS: usize = 1000;
const CLIENTS: usize = 64;
const CONNECTIONS: usize = 16;
/// Requests of one client whose median counts.
const ROUNDS: usize = 2000;
const PATIENCE: Duration = Duration::from_secs(600);
const DEFINITION_PATH: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";
const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";
const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// The figures of one server.
#[derive(Default)]
struct Figures {
    served: f64,
    discovery: f64,
    each: f64,
    idle: f64,
    creates: f64,
    create_cost: f64,
    webhook: f64,
    policy: f64,
}

pub async fn run() {
    let servers = crate::servers().await;
    let mut seen = Vec::new();
    for server in &servers {
        seen.push(measure(server).await);
    }
    let of = |figure: fn(&Figures) -> f64| seen.iter().map(figure).collect::<Vec<f64>>();
    more_is_better("creates of custom objects, 64 clients (/s)", &of(|f| f.creates));
    less_is_better("the same (µs of processor)", &of(|f| f.create_cost));
    less_is_better("a validating webhook adds to a create, beyond its own time (µs)", &of(|f| f.webhook));
    less_is_better("a policy of three expressions adds to a create (µs)", &of(|f| f.policy));
    less_is_better("1,000 definitions: created to all served (ms)", &of(|f| f.served));
    less_is_better("aggregated discovery after one more definition (ms)", &of(|f| f.discovery));
    less_is_better("memory for each definition, idle (KiB)", &of(|f| f.each));
    less_is_better("server with 1,000 definitions, idle, PSS (KiB)", &of(|f| f.idle));
}

async fn measure(server: &Server) -> Figures {
    let client = server.client().await;
    let mut figures = Figures::default();
    define(&client, 0).await;
    until_served(&client, 0).await;
    let done =
        run_clients(server, CONNECTIONS, CLIENTS / CONNECTIONS, |client: Client, turn: Turn| async move {
            let name = format!("w-{}-{}", turn.worker, turn.number);
            let (code, _) = client.whole("POST", &objects(0), object(0, &name).to_string()).await;
            assert_eq!(code, 201);
        })
        .await;
    (figures.creates, figures.create_cost) = (done.per_second(), done.microseconds_of_processor());
    let plain = median_create(&client).await;
    figures.webhook = with_webhook(&client).await - plain;
    let plain = median_create(&client).await;
    figures.policy = with_policy(&client).await - plain;

    settle().await;
    let before = server.pss();
    let began = Instant::now();
    let numbers = 1..=DEFINITIONS;
    futures_util::stream::iter(numbers.clone())
        .for_each_concurrent(CLIENTS, |number| define(&client, number))
        .await;
    futures_util::stream::iter(numbers)
        .for_each_concurrent(CLIENTS, |number| until_served(&client, number))
        .await;
    figures.served = began.elapsed().as_secs_f64() * 1e3;
    settle().await;
    figures.idle = server.pss() as f64;
    figures.each = (figures.idle - before as f64) / DEFINITIONS as f64;
    define(&client, DEFINITIONS + 1).await;
    until_served(&client, DEFINITIONS + 1).await;
    let began = Instant::now();
    let answer = client.accept(AGGREGATED, "/apis").await;
    figures.discovery = began.elapsed().as_secs_f64() * 1e3;
    assert!(answer.contains(&format!("g{}.bench.example", DEFINITIONS + 1)));
    figures
}

/// Nothing is asked of the server for a while: what it only needed for the work goes.
async fn settle() {
    tokio::time::sleep(Duration::from_secs(20)).await;
}

fn group(number: usize) -> String {
    format!("g{number}.bench.example")
}

fn objects(number: usize) -> String {
    format!("/apis/{}/v1/namespaces/default/widgets", group(number))
}

/// A definition as generators write them: a spec and a status with conditions, described field by field.
fn definition(number: usize) -> Value {
    let text = |what: &str| json!({"type": "string", "description": format!("The {what} of the widget.")});
    let condition = json!({"type": "object", "required": ["type", "status", "lastTransitionTime", "reason", "message"],
        "properties": {"type": {"type": "string", "maxLength": 316}, "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "lastTransitionTime": {"type": "string", "format": "date-time"}, "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
            "reason": {"type": "string", "minLength": 1, "maxLength": 1024}, "message": {"type": "string", "maxLength": 32768}}});
    let spec = json!({"type": "object", "required": ["size"], "properties": {
        "size": {"type": "integer", "minimum": 1, "maximum": 100}, "color": text("color"), "owner": text("owner"),
        "replicas": {"type": "integer", "default": 1}, "paused": {"type": "boolean"},
        "ports": {"type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"], "items":
            {"type": "object", "required": ["name"], "properties": {"name": text("port"), "port": {"type": "integer"}}}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "limit": {"x-kubernetes-int-or-string": true}}});
    let status = json!({"type": "object", "properties": {"phase": text("phase"), "replicas": {"type": "integer"},
        "conditions": {"type": "array", "items": condition, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}}});
    let schema = json!({"openAPIV3Schema": {"type": "object", "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"},
        "metadata": {"type": "object"}, "spec": spec, "status": status}}});
    json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("widgets.{}", group(number))},
        "spec": {"group": group(number), "scope": "Namespaced",
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": schema, "subresources": {"status": {}},
                "additionalPrinterColumns": [{"name": "Size", "type": "integer", "jsonPath": ".spec.size"}]}]}})
}

fn object(number: usize, name: &str) -> Value {
    json!({"apiVersion": format!("{}/v1", group(number)), "kind": "Widget",
        "metadata": {"name": name, "labels": {"app": "bench", "tier": "backend"}},
        "spec": {"size": 3, "color": "green", "owner": "somebody", "limit": "50%",
            "ports": [{"name": "http", "port": 8080}, {"name": "metrics", "port": 9090}],
            "labels": {"a": "a value of some length", "b": "another value of some length"}}})
}

async fn define(client: &Client, number: usize) {
    let (code, _) = client.whole("POST", DEFINITION_PATH, definition(number).to_string()).await;
    assert_eq!(code, 201);
}

/// Established, and its objects can be listed.
async fn until_served(client: &Client, number: usize) {
    let began = Instant::now();
    let path = format!("{DEFINITION_PATH}/widgets.{}", group(number));
    loop {
        let text = client.text(&path).await;
        let value: Value = ferrite_json::from_str(&text).unwrap();
        let conditions = value["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let is_established = conditions.iter().any(|c| c["type"] == "Established" && c["status"] == "True");
        if is_established && client.whole("GET", &objects(number), "").await.0 == 200 {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{text}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The median of one client's creates that are not stored, in microseconds.
async fn median_create(client: &Client) -> f64 {
    let mut times = Vec::with_capacity(ROUNDS);
    for number in 0..ROUNDS {
        let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": format!("m-{number}")},
            "data": {"key": "a value of some length", "other": "another value of some length"}});
        let began = Instant::now();
        let (code, _) = client.whole("POST", &format!("{CONFIG_MAPS}?dryRun=All"), map.to_string()).await;
        times.push(began.elapsed());
        assert_eq!(code, 201);
    }
    times.sort();
    times[ROUNDS / 2].as_secs_f64() * 1e6
}

async fn with_policy(client: &Client) -> f64 {
    let rules = json!({"resourceRules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}]});
    let expressions = [
        "object.metadata.name.startsWith('m-')",
        "has(object.data) && size(object.data) < 10",
        "object.data.all(key, key != 'forbidden')",
    ];
    let validations: Vec<Value> = expressions.iter().map(|text| json!({"expression": text})).collect();
    let policy = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": {"name": "bench"},
        "spec": {"matchConstraints": rules, "validations": validations}});
    let binding = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": "bench"},
        "spec": {"policyName": "bench", "validationActions": ["Deny"]}});
    make(client, "validatingadmissionpolicies", &policy).await;
    make(client, "validatingadmissionpolicybindings", &binding).await;
    // Upstream's server takes a moment to notice.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let refused = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m-x"}, "data": {"forbidden": "yes"}});
    let (code, _) = client.whole("POST", &format!("{CONFIG_MAPS}?dryRun=All"), refused.to_string()).await;
    assert_eq!(code, 422, "the policy does not act");
    let median = median_create(client).await;
    remove(client, "validatingadmissionpolicybindings").await;
    remove(client, "validatingadmissionpolicies").await;
    median
}

/// The median with a webhook, less the time that the webhook itself took.
async fn with_webhook(client: &Client) -> f64 {
    let hook = Hook::start().await;
    let configuration = json!({"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration", "metadata": {"name": "bench"},
        "webhooks": [{"name": "bench.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"], "clientConfig": hook.config,
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}]}]});
    make(client, "validatingwebhookconfigurations", &configuration).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let median = median_create(client).await;
    remove(client, "validatingwebhookconfigurations").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let calls = hook.calls.load(Ordering::Relaxed);
    assert!(calls >= ROUNDS as u64, "the webhook was called {calls} times");
    median - hook.busy.load(Ordering::Relaxed) as f64 / calls as f64 / 1e3
}

async fn make(client: &Client, plural: &str, object: &Value) {
    let (code, _) = client.whole("POST", &format!("{ADMISSION}/{plural}"), object.to_string()).await;
    assert_eq!(code, 201, "{plural}");
}

async fn remove(client: &Client, plural: &str) {
    let (code, _) = client.whole("DELETE", &format!("{ADMISSION}/{plural}/bench"), "").await;
    assert_eq!(code, 200, "{plural}");
}

/// A webhook on loopback that allows everything, and counts its calls and the nanoseconds that they took.
struct Hook {
    config: Value,
    calls: Arc<AtomicU64>,
    busy: Arc<AtomicU64>,
    _tasks: JoinSet<()>,
}

impl Hook {
    async fn start() -> Self {
        let authority = Authority::create("hooks").unwrap();
        let subject = Subject { names: vec!["127.0.0.1".into()], ..Subject::client("hook", None) };
        let identity = authority.issue(&subject, Purpose::Server).unwrap();
        let tls = ferrite_pki::anonymous_server_config(&identity, &["h2", "http/1.1"]).unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bundle = base64::engine::general_purpose::STANDARD.encode(authority.certificate());
        let config =
            json!({"url": format!("https://{}/", listener.local_addr().unwrap()), "caBundle": bundle});
        let (calls, busy): (Arc<AtomicU64>, Arc<AtomicU64>) = Default::default();
        let counters = (Arc::clone(&calls), Arc::clone(&busy));
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut serving = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, counters) = (acceptor.clone(), counters.clone());
                serving.spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = service_fn(move |request| allow(request, counters.clone()));
                    let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { config, calls, busy, _tasks: tasks }
    }
}

async fn allow(
    request: Request<Incoming>,
    (calls, busy): (Arc<AtomicU64>, Arc<AtomicU64>),
) -> Result<Response<Full<Bytes>>, Infallible> {
    let began = Instant::now();
    let body = request.into_body().collect().await.unwrap().to_bytes();
    let review: Value = ferrite_json::from_slice(&body).unwrap();
    let answer = json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "response": {"uid": review["request"]["uid"], "allowed": true}});
    calls.fetch_add(1, Ordering::Relaxed);
    busy.fetch_add(u64::try_from(began.elapsed().as_nanos()).unwrap(), Ordering::Relaxed);
    let response = Response::builder().header("content-type", "application/json");
    Ok(response.body(Full::new(answer.to_string().into())).unwrap())
}
