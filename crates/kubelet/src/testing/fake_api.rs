//! Just enough of an API server: objects by path, revisions, merge patches, watches.

use bytes::Bytes;
use ferrite_json::{Value, json};
use futures_util::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use kube::client::Body;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use tokio::sync::watch;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub resource: String,
    pub namespace: String,
    pub name: String,
}

struct Entry {
    revision: u64,
    kind: &'static str,
    key: Key,
    object: Value,
}

#[derive(Default)]
struct State {
    revision: u64,
    objects: BTreeMap<Key, Value>,
    log: Vec<Entry>,
    refuses_patches: bool,
    refused: usize,
}

#[derive(Clone)]
pub(crate) struct FakeApi {
    state: Arc<Mutex<State>>,
    changed: Arc<watch::Sender<u64>>,
}

type Answer = http::Response<UnsyncBoxBody<Bytes, Infallible>>;

struct Target {
    resource: String,
    namespace: String,
    name: Option<String>,
    sub: Option<String>,
}

impl Target {
    fn parse(path: &str) -> Self {
        let mut parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        parts.drain(..if parts[0] == "api" { 2 } else { 3 });
        let namespace = if parts[0] == "namespaces" && parts.len() > 2 {
            let namespace = parts[1].to_string();
            parts.drain(..2);
            namespace
        } else {
            String::new()
        };
        let text = |i: usize| parts.get(i).map(|s| s.to_string());
        Self { resource: parts[0].to_string(), namespace, name: text(1), sub: text(2) }
    }
}

impl FakeApi {
    pub(crate) fn new() -> Self {
        Self { state: Arc::default(), changed: Arc::new(watch::Sender::new(0)) }
    }

    pub(crate) fn client(&self) -> kube::Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.handle(request).await) }
        });
        kube::Client::new(service, "default")
    }

    fn write(&self, kind: &'static str, key: Key, mut object: Value) -> Value {
        let mut state = self.state.lock().unwrap();
        state.revision += 1;
        let revision = state.revision;
        object["metadata"]["resourceVersion"] = json!(revision.to_string());
        match kind {
            "DELETED" => drop(state.objects.remove(&key)),
            _ => drop(state.objects.insert(key.clone(), object.clone())),
        }
        state.log.push(Entry { revision, kind, key, object: object.clone() });
        drop(state);
        self.changed.send_replace(revision);
        object
    }

    pub(crate) fn put(&self, resource: &str, object: Value) -> Value {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_string();
        let key = Key { resource: resource.into(), namespace: text("namespace"), name: text("name") };
        let kind = if self.get(&key).is_some() { "MODIFIED" } else { "ADDED" };
        self.write(kind, key, object)
    }

    pub(crate) fn get(&self, key: &Key) -> Option<Value> {
        self.state.lock().unwrap().objects.get(key).cloned()
    }

    pub(crate) fn remove(&self, key: &Key) {
        if let Some(object) = self.get(key) {
            self.write("DELETED", key.clone(), object);
        }
    }

    pub(crate) fn list(&self, resource: &str) -> Vec<Value> {
        let state = self.state.lock().unwrap();
        state.objects.iter().filter(|(k, _)| k.resource == resource).map(|(_, v)| v.clone()).collect()
    }

    /// Patches fail until this is taken back.
    pub(crate) fn refuse_patches(&self, refuse: bool) {
        self.state.lock().unwrap().refuses_patches = refuse;
    }

    fn refuses(&self) -> bool {
        let mut state = self.state.lock().unwrap();
        state.refused += usize::from(state.refuses_patches);
        let revision = state.revision;
        let refuses = state.refuses_patches;
        drop(state);
        self.changed.send_replace(revision);
        refuses
    }

    /// Waits for that many more refused patches. The clock stands still while anybody has work to do, so whatever
    /// follows from earlier changes has happened then.
    pub(crate) async fn until_refused(&self, more: usize) {
        let seen = self.state.lock().unwrap().refused;
        self.until("patches are refused", |api| {
            (api.state.lock().unwrap().refused >= seen + more).then_some(())
        })
        .await;
    }

    /// Every state of an object so far, the last one first removed.
    pub(crate) fn history(&self, key: &Key) -> Vec<Value> {
        let state = self.state.lock().unwrap();
        state.log.iter().filter(|e| e.key == *key).map(|e| e.object.clone()).collect()
    }

    /// Waits until `found` finds something; fails after an hour of the paused clock.
    pub(crate) async fn until<T>(&self, what: &str, mut found: impl FnMut(&FakeApi) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        let wait = async {
            loop {
                if let Some(value) = found(self) {
                    return value;
                }
                changed.changed().await.unwrap();
            }
        };
        match tokio::time::timeout(std::time::Duration::from_secs(3600), wait).await {
            Ok(value) => value,
            Err(_) => panic!("waited in vain until {what}; pods: {:#?}", self.list("pods")),
        }
    }

    async fn handle(&self, request: http::Request<Body>) -> Answer {
        let (parts, body) = request.into_parts();
        let target = Target::parse(parts.uri.path());
        let body = body.collect().await.map(|b| b.to_bytes()).unwrap_or_default();
        let body: Value = ferrite_json::from_slice(&body).unwrap_or(Value::Null);
        let query: BTreeMap<String, String> = parts
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|p| p.split_once('='))
            .map(|(k, v)| (k.to_string(), v.replace("%3D", "=")))
            .collect();
        if let Some(answer) = self.review(&target.resource, &body) {
            return answer;
        }
        let Some(name) = target.name.clone() else {
            return match (parts.method.as_str(), query.contains_key("watch")) {
                ("GET", true) => self.watch(target, query),
                ("GET", false) => self.list_answer(&target, &query),
                _ => self.create(target, body),
            };
        };
        let key = Key { resource: target.resource, namespace: target.namespace, name };
        if target.sub.as_deref() == Some("token") {
            return failure(404, "NotFound", "the server could not find the requested resource");
        }
        let Some(current) = self.get(&key) else { return failure(404, "NotFound", "not found") };
        match parts.method.as_str() {
            "GET" => ok(current),
            "PATCH" if self.refuses() => failure(500, "InternalError", "patches are refused"),
            "DELETE" => {
                let uid = body["preconditions"]["uid"].as_str();
                if uid.is_some_and(|uid| current["metadata"]["uid"] != uid) {
                    return failure(409, "Conflict", "uid");
                }
                self.write("DELETED", key, current.clone());
                ok(current)
            }
            method => {
                let revision = body["metadata"]["resourceVersion"].as_str();
                if revision.is_some_and(|r| current["metadata"]["resourceVersion"] != r) {
                    return failure(409, "Conflict", "the object has been modified");
                }
                let mut next = current.clone();
                if method == "PATCH" {
                    merge(&mut next, &body)
                } else {
                    next = body
                }
                ok(self.write("MODIFIED", key, next))
            }
        }
    }

    /// Token `token-of-X` is user X's. User `kube-apiserver-kubelet-client` and the group `system:masters` may do
    /// everything, and user `may-S` may use subresource S of the node. Reviews are counted as objects `reviews`.
    fn review(&self, resource: &str, body: &Value) -> Option<Answer> {
        let status = match resource {
            "tokenreviews" => match body["spec"]["token"].as_str()?.strip_prefix("token-of-") {
                Some("nobody-knows") => return Some(failure(500, "InternalError", "no answer")),
                Some(user) => {
                    json!({"authenticated": true, "user": {"username": user, "groups": ["system:authenticated"]}})
                }
                None => json!({"authenticated": false}),
            },
            "subjectaccessreviews" => {
                let wanted = &body["spec"]["resourceAttributes"];
                let user = body["spec"]["user"].as_str().unwrap_or_default();
                if user == "unsure" {
                    return Some(failure(500, "InternalError", "no answer"));
                }
                let masters = body["spec"]["groups"].as_array()?.iter().any(|g| g == "system:masters");
                let own = user.strip_prefix("may-").is_some_and(|s| wanted["subresource"] == s);
                let node = wanted["resource"] == "nodes" && wanted["name"] == "node";
                json!({"allowed": node && (masters || own || user == "kube-apiserver-kubelet-client")})
            }
            _ => return None,
        };
        let name = format!("{}", self.list("reviews").len());
        self.put("reviews", json!({"metadata": {"name": name}, "resource": resource, "review": body}));
        let mut answer = body.clone();
        answer["status"] = status;
        Some(ok(answer))
    }

    fn create(&self, target: Target, mut object: Value) -> Answer {
        let name = match object["metadata"]["name"].as_str() {
            Some(name) => name.to_string(),
            None => format!(
                "{}{}",
                object["metadata"]["generateName"].as_str().unwrap_or("x"),
                rand::random::<u32>()
            ),
        };
        object["metadata"]["name"] = json!(name);
        if object["metadata"]["uid"].is_null() {
            object["metadata"]["uid"] = json!(format!("uid-{name}"));
        }
        let key = Key { resource: target.resource, namespace: target.namespace, name };
        if self.get(&key).is_some() {
            return failure(409, "AlreadyExists", "exists");
        }
        ok(self.write("ADDED", key, object))
    }

    fn list_answer(&self, target: &Target, query: &BTreeMap<String, String>) -> Answer {
        let state = self.state.lock().unwrap();
        let items: Vec<Value> = state
            .objects
            .iter()
            .filter(|(key, object)| selected(target, query, key, object))
            .map(|(_, object)| object.clone())
            .collect();
        ok(json!({"kind": "List", "apiVersion": "v1", "items": items,
                  "metadata": {"resourceVersion": state.revision.to_string()}}))
    }

    fn watch(&self, target: Target, query: BTreeMap<String, String>) -> Answer {
        let from: u64 = query.get("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or(0);
        let changed = self.changed.subscribe();
        let start = (self.clone(), changed, from, target, query);
        let frames = stream::unfold(start, |(api, mut changed, mut from, target, query)| async move {
            loop {
                changed.borrow_and_update();
                let mut lines = Vec::new();
                {
                    let state = api.state.lock().unwrap();
                    for entry in state.log.iter().filter(|e| e.revision > from) {
                        if selected(&target, &query, &entry.key, &entry.object) {
                            let event = json!({"type": entry.kind, "object": entry.object});
                            lines.extend_from_slice(event.to_string().as_bytes());
                            lines.push(b'\n');
                        }
                    }
                    from = state.revision;
                }
                if !lines.is_empty() {
                    let frame = Ok(Frame::data(Bytes::from(lines)));
                    return Some((frame, (api, changed, from, target, query)));
                }
                changed.changed().await.ok()?;
            }
        });
        http::Response::new(BodyExt::boxed_unsync(StreamBody::new(frames)))
    }
}

fn selected(target: &Target, query: &BTreeMap<String, String>, key: &Key, object: &Value) -> bool {
    let in_place =
        key.resource == target.resource && (target.namespace.is_empty() || key.namespace == target.namespace);
    let field = query.get("fieldSelector").and_then(|s| s.split_once('='));
    in_place
        && field.is_none_or(|(path, value)| match path {
            "metadata.name" => key.name == value,
            "spec.nodeName" => object["spec"]["nodeName"] == value,
            _ => true,
        })
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

fn ok(object: Value) -> Answer {
    http::Response::new(Full::new(Bytes::from(object.to_string())).boxed_unsync())
}

fn failure(code: u16, reason: &str, message: &str) -> Answer {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "code": code, "reason": reason, "message": message});
    let mut answer = ok(status);
    *answer.status_mut() = http::StatusCode::from_u16(code).unwrap();
    answer
}
