//! A server with one namespace, and requests to it.

use base64::Engine;
use bytes::Bytes;
use ferrite_apiserver::{
    AdmissionPlugins, ApiServer, AuditConfig, AuditLog, AuditPolicy, Body, BoxError, Config, InProcessClient,
    JwtAuthentication, RequestHeader, Response, Serving, User,
};
use ferrite_json::{Value, json};
use ferrite_store::Store;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use std::sync::Arc;
use tower::Service;

pub struct World {
    server: Arc<ApiServer>,
    client: InProcessClient,
}

/// An answer read to its end.
pub struct Reply {
    pub code: u16,
    pub headers: HeaderMap,
    pub bytes: Bytes,
}

impl Reply {
    pub fn json(&self) -> Value {
        ferrite_json::from_slice(&self.bytes).unwrap_or(Value::Null)
    }

    pub fn at(&self, pointer: &str) -> Value {
        self.json().pointer(pointer).cloned().unwrap_or(Value::Null)
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
    }
}

impl World {
    pub async fn start() -> Self {
        Self::start_with(Serving::default()).await
    }

    pub async fn start_with(serving: Serving) -> Self {
        let world = Self::start_on(Store::memory(), serving).await;
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        assert_eq!(world.post("/api/v1/namespaces/default/serviceaccounts", &account).await.code, 201);
        world
    }

    /// A server with more admission plugins than usual.
    pub async fn start_admitting(plugins: &[&str]) -> Self {
        Self::start_configured(plugins, json!({})).await
    }

    /// The same, with configurations by the plugins' names.
    pub async fn start_configured(plugins: &[&str], configurations: Value) -> Self {
        let enable = plugins.iter().map(|name| (*name).to_owned()).collect();
        let configurations = configurations
            .as_object()
            .expect("a map")
            .iter()
            .map(|(k, v)| (k.to_string(), v.clone()))
            .collect();
        let admission = AdmissionPlugins { enable, configurations, ..AdmissionPlugins::default() };
        let config = Config { admission, ..Self::config() };
        let world = Self::start_as(Store::memory(), config).await;
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        assert_eq!(world.post("/api/v1/namespaces/default/serviceaccounts", &account).await.code, 201);
        world
    }

    /// A server with other settings than usual.
    pub async fn start_as_told(change: impl FnOnce(Config) -> Config) -> Self {
        Self::start_as(Store::memory(), change(Self::config())).await
    }

    /// A server whose Services have addresses of these ranges.
    pub async fn start_ranges(ranges: &[&str]) -> Self {
        let service_ranges = ranges.iter().map(|r| ferrite_api::Cidr::parse(r).expect("a range")).collect();
        Self::start_as(Store::memory(), Config { service_ranges, ..Self::config() }).await
    }

    /// A server that believes foreign issuers.
    pub async fn start_believing(jwt: JwtAuthentication) -> Self {
        Self::start_as(Store::memory(), Config { jwt, ..Self::config() }).await
    }

    /// Sends a request with a bearer token alone.
    pub async fn with_token(&self, token: &str, path: &str, body: &Value) -> Reply {
        let bearer = format!("Bearer {token}");
        let request = Request::builder().method("POST").uri(path).header("authorization", bearer);
        let body = Full::new(Bytes::from(body.to_string())).map_err(Into::into).boxed_unsync();
        let request = request.header("content-type", "application/json").body(body).expect("a request");
        Self::whole(Arc::clone(&self.server).handle(None, request).await).await
    }

    /// The code of an answer to somebody without credentials.
    pub async fn without_credentials(&self, path: &str) -> u16 {
        let body = Full::new(Bytes::new()).map_err(Into::into).boxed_unsync();
        let request = Request::builder().uri(path).body(body).expect("a request");
        Self::whole(Arc::clone(&self.server).handle(None, request).await).await.code
    }

    /// A server behind front proxies.
    pub async fn start_behind(proxies: RequestHeader) -> Self {
        let client_ca = Some("the authority of clients".to_owned());
        let config = Config { request_header: Some(proxies), client_ca, ..Self::config() };
        Self::start_as(Store::memory(), config).await
    }

    /// A server that audits by `rules` into a log.
    pub async fn start_audited(rules: &str, log: AuditLog) -> Self {
        let policy = format!("apiVersion: audit.k8s.io/v1\nkind: Policy\n{rules}");
        let policy = AuditPolicy::parse(policy.as_bytes()).expect("a policy");
        let audit = Some(AuditConfig { policy, log: Some(log), webhook: None });
        let world = Self::start_as(Store::memory(), Config { audit, ..Self::config() }).await;
        let account = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}});
        assert_eq!(world.post("/api/v1/namespaces/default/serviceaccounts", &account).await.code, 201);
        world
    }

    fn config() -> Config {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).expect("a key");
        Config {
            service_account_key: Some(key.serialize_pem()),
            bootstrap_tokens: true,
            ..Config::new("192.0.2.1:6443".parse().expect("an address"))
        }
    }

    /// One of several servers on a store.
    pub async fn share(store: &Arc<Store>) -> Self {
        Self::start_shared(Arc::clone(store), Self::config()).await
    }

    async fn start_as(store: Store, config: Config) -> Self {
        Self::start_shared(Arc::new(store), config).await
    }

    async fn start_shared(store: Arc<Store>, config: Config) -> Self {
        let server = ApiServer::start(store, config).await.expect("the server starts");
        let client = server.in_process_client(User::new("admin", ["system:masters"]));
        Self { server, client }
    }

    /// A certificate request, as the API wants it.
    pub fn certificate_request(&self) -> String {
        let key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::new(Vec::new()).expect("parameters");
        let pem = params.serialize_request(&key).and_then(|r| r.pem()).expect("a request");
        base64::engine::general_purpose::STANDARD.encode(pem)
    }

    /// A server on a store of one's own, with only its own objects.
    pub async fn start_on(store: Store, serving: Serving) -> Self {
        Self::start_as(store, Config { serving, ..Self::config() }).await
    }

    pub fn server(&self) -> Arc<ApiServer> {
        Arc::clone(&self.server)
    }

    /// The same server, for somebody else.
    pub fn as_user(&self, user: User) -> Self {
        Self { server: Arc::clone(&self.server), client: self.server.in_process_client(user) }
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
        let mut request = Request::builder().method(method).uri(path).header("user-agent", "tester/1");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body))).expect("a request");
        Self::whole(self.client.clone().call(request).await.expect("an answer")).await
    }

    async fn whole(answer: Response) -> Reply {
        let (parts, body) = answer.into_parts();
        let bytes = body.collect().await.expect("a body").to_bytes();
        Reply { code: parts.status.as_u16(), headers: parts.headers, bytes }
    }

    /// The version the store is at.
    pub async fn version(&self) -> String {
        self.get(MAPS).await.at("/metadata/resourceVersion").as_str().expect("a version").to_owned()
    }

    /// The answer to a GET, not read yet.
    pub async fn open(&self, path: &str) -> Response {
        let request = Request::get(path).body(Full::new(Bytes::new())).expect("a request");
        self.client.clone().call(request).await.expect("an answer")
    }

    /// Sends a request with a body of one's own.
    pub async fn begin(&self, method: &str, path: &str, body: Body) -> Reply {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request.body(body).expect("a request");
        Self::whole(self.client.clone().call(request).await.expect("an answer")).await
    }

    /// A body whose sender never gets to its end.
    pub fn endless_body() -> Body {
        let never = futures_util::stream::pending::<Result<http_body::Frame<Bytes>, BoxError>>();
        http_body_util::StreamBody::new(never).boxed_unsync()
    }

    pub async fn stop(&self) {
        self.server.shutdown().await;
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], b"").await
    }

    pub async fn post(&self, path: &str, object: &Value) -> Reply {
        self.send("POST", path, &[("content-type", "application/json")], object.to_string().as_bytes()).await
    }

    pub async fn put(&self, path: &str, object: &Value) -> Reply {
        self.send("PUT", path, &[("content-type", "application/json")], object.to_string().as_bytes()).await
    }

    pub async fn patch(&self, kind: &str, path: &str, patch: &Value) -> Reply {
        let content_type = match kind {
            "apply" => "application/apply-patch+yaml".to_owned(),
            kind => format!("application/{kind}-patch+json"),
        };
        self.send("PATCH", path, &[("content-type", &content_type)], patch.to_string().as_bytes()).await
    }

    pub async fn delete(&self, path: &str) -> Reply {
        self.send("DELETE", path, &[], b"").await
    }
}

pub const MAPS: &str = "/api/v1/namespaces/default/configmaps";
pub const PODS: &str = "/api/v1/namespaces/default/pods";

pub fn config_map(name: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {"t": "x"}}, "data": data})
}

pub fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"nodeName": "n", "containers": [{"name": "c", "image": "img"}]},
    })
}
