//! Seats a request at its priority level, lets it wait in a queue, or refuses it.

use super::{Asked, Exchange, Facts, Refusal, Wait};
use crate::flowcontrol::{Admission, Digest, FlowControl, Queued, Reading, Schema, Seat};
use crate::http::Response;
use crate::request::Route;
use ::http::{HeaderName, HeaderValue, header};
use futures_util::FutureExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

const LEVEL: HeaderName = HeaderName::from_static("x-kubernetes-pf-prioritylevel-uid");
const SCHEMA: HeaderName = HeaderName::from_static("x-kubernetes-pf-flowschema-uid");
/// The longest that a request waits for a seat.
const LONGEST: Duration = Duration::from_secs(60);

/// Marks requests of components in this process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InProcess;

pub(super) fn before(exchange: &mut Exchange) -> Result<Option<Wait<'_>>, Refusal> {
    let (facts, asked) = (&mut exchange.facts, &mut exchange.asked);
    let Some(flow) = facts.server.flow_control.clone() else { return Ok(None) };
    // As upstream: of streams, only watches count, and only until they begin.
    if facts.kind.is_long_running() && !facts.kind.is_watch() {
        return Ok(None);
    }
    let Some(user) = asked.user.clone() else { return Ok(None) };
    let method = asked.parts.method.as_str().to_ascii_lowercase();
    let digest = Digest::new(&asked.route, asked.verb, &method, asked.parts.uri.path());
    let Some(schema) = flow.classify(&user, &digest) else { return Ok(None) };
    let reading = match (facts.kind.resource(), asked.verb) {
        (Some(resource), Some(verb)) => {
            Some(Reading { resource, verb, name: name_of(&asked.route), query: &asked.query })
        }
        _ => None,
    };
    let patient = asked.parts.extensions.get::<InProcess>().is_some();
    let snapshot = || facts.server.registry.store.snapshot();
    let admission = flow.admit(&schema, &user, &digest, reading.as_ref(), patient, snapshot);
    facts.flow_schema = Some(Arc::clone(&schema));
    match admission {
        Admission::Seated(seat) => {
            take(facts, asked, seat);
            Ok(None)
        }
        Admission::Queued(queued) => Ok(Some(wait(exchange, queued, flow, schema).boxed())),
        Admission::Refused => Err(refused(facts, &flow, &schema)),
    }
}

fn name_of(route: &Route) -> Option<&str> {
    match route {
        Route::Resource(target) => target.name.as_deref(),
        _ => None,
    }
}

fn take(facts: &mut Facts, asked: &mut Asked, seat: Seat) {
    let seat = Arc::new(seat);
    if facts.kind.is_mutating() {
        asked.seat = Some(Arc::clone(&seat));
    }
    facts.seat = Some(seat);
}

/// Waits for a seat during a quarter of the time that the request has.
async fn wait(
    exchange: &mut Exchange,
    queued: Queued,
    flow: Arc<FlowControl>,
    schema: Arc<Schema>,
) -> Result<(), Refusal> {
    let (facts, asked) = (&mut exchange.facts, &mut exchange.asked);
    let allotted = match facts.kind.is_long_running() {
        true => facts.server.config.serving.request_timeout,
        false => facts.deadline.saturating_duration_since(facts.started),
    };
    let deadline: Instant = facts.started + (allotted / 4).min(LONGEST);
    match queued.seat(deadline).await {
        Ok(seat) => {
            take(facts, asked, seat);
            Ok(())
        }
        Err(_) => Err(refused(facts, &flow, &schema)),
    }
}

fn refused(facts: &Facts, flow: &FlowControl, schema: &Schema) -> Refusal {
    facts.server.metrics.terminated(&facts.kind, 429);
    let mut response = super::in_flight::too_many();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(flow.retry_after(schema)));
    Refusal::Response(response)
}

/// Names schema and level by their UIDs, as upstream: names would reveal to strangers how they are ranked.
pub(super) fn after(facts: &Facts, mut response: Response) -> Response {
    if let Some(schema) = &facts.flow_schema {
        response.headers_mut().insert(LEVEL, schema.level.uid.clone());
        response.headers_mut().insert(SCHEMA, schema.uid.clone());
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::User;
    use crate::server::{ApiServer, Config};
    use ::http::Request;
    use ferrite_json::{Value, json};
    use ferrite_store::Store;
    use http_body_util::Full;
    use tower::Service;

    async fn send(
        server: &Arc<ApiServer>,
        user: &str,
        group: &str,
        path: &str,
        body: Option<Value>,
    ) -> Response {
        let bytes = body.as_ref().map_or_else(String::new, Value::to_string);
        let request = Request::builder()
            .method(if body.is_some() { "POST" } else { "GET" })
            .uri(path)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(bytes::Bytes::from(bytes)))
            .expect("a request");
        server.in_process_client(User::new(user, [group])).call(request).await.expect("a response")
    }

    fn level() -> Value {
        let limited = json!({
            "nominalConcurrencyShares": 0, "lendablePercent": 0, "borrowingLimitPercent": 0,
            "limitResponse": {"type": "Reject"},
        });
        json!({
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "PriorityLevelConfiguration",
            "metadata": {"name": "narrow"}, "spec": {"type": "Limited", "limited": limited},
        })
    }

    fn schema() -> Value {
        let rule = json!({
            "subjects": [{"kind": "User", "user": {"name": "u"}}],
            "nonResourceRules": [{"verbs": ["*"], "nonResourceURLs": ["*"]}],
        });
        json!({
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1", "kind": "FlowSchema",
            "metadata": {"name": "narrow"},
            "spec": {"priorityLevelConfiguration": {"name": "narrow"}, "matchingPrecedence": 2, "rules": [rule]},
        })
    }

    fn header_of(response: &Response, name: &HeaderName) -> String {
        response.headers().get(name).and_then(|v| v.to_str().ok()).unwrap_or_default().to_owned()
    }

    #[tokio::test]
    async fn requests_get_the_seats_of_their_level() {
        let config = Config::new("192.0.2.1:6443".parse().expect("an address"));
        let server = ApiServer::start(Arc::new(Store::memory()), config).await.expect("a server");
        let flow = server.flow_control.clone().expect("flow control is on");
        let response = send(&server, "u", "g", "/version", None).await;
        assert_eq!(response.status(), 200);
        let usual = header_of(&response, &LEVEL);
        assert_eq!(usual.len(), 36, "the UID of a level: {usual}");
        let base = "/apis/flowcontrol.apiserver.k8s.io/v1";
        for (plural, body) in [("prioritylevelconfigurations", level()), ("flowschemas", schema())] {
            let response =
                send(&server, "admin", "system:masters", &format!("{base}/{plural}"), Some(body)).await;
            assert_eq!(response.status(), 201, "{plural}");
        }
        // The configuration is read by another task.
        let mut response = send(&server, "u", "g", "/version", None).await;
        for _ in 0..1000 {
            if header_of(&response, &LEVEL) != usual {
                break;
            }
            tokio::task::yield_now().await;
            response = send(&server, "u", "g", "/version", None).await;
        }
        assert_ne!(header_of(&response, &LEVEL), usual);
        assert_eq!(response.status(), 200, "one is served even where there is no seat");
        // While another is served, there is no seat.
        let user = User::new("u", ["g"]);
        let route = crate::request::route("/version");
        let digest = Digest::new(&route, None, "get", "/version");
        let found = flow.classify(&user, &digest).expect("a schema");
        let snapshot = || server.registry.store.snapshot();
        let held = flow.admit(&found, &user, &digest, None, false, snapshot);
        assert!(matches!(held, Admission::Seated(_)));
        let response = send(&server, "u", "g", "/version", None).await;
        assert_eq!(
            (response.status().as_u16(), header_of(&response, &header::RETRY_AFTER)),
            (429, "1".to_owned())
        );
        assert_eq!(send(&server, "v", "g", "/version", None).await.status(), 200, "others are not concerned");
        let dumped = send(
            &server,
            "admin",
            "system:masters",
            "/debug/api_priority_and_fairness/dump_priority_levels",
            None,
        );
        assert_eq!(dumped.await.status(), 200);
        drop(held);
        assert_eq!(send(&server, "u", "g", "/version", None).await.status(), 200);
        server.shutdown().await;
    }
}
