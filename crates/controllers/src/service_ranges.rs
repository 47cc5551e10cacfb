//! ServiceCIDRs: sets their Ready condition, and removes the finalizer when nobody holds an address any
//! more.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ferrite_api::Cidr;
use ferrite_client::{Api, EventType, Informer, ObjectKey, WorkQueue, is_not_found};
use ferrite_json::json;
use k8s_openapi::api::networking::v1::{IPAddress, ServiceCIDR};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Patch, PatchParams, PostParams};

use crate::Context;
use crate::error::{During, SyncError};
use crate::storage_protection::settled;

const NAME: &str = "service-cidr-controller";
const FINALIZER: &str = "networking.k8s.io/service-cidr-finalizer";
const READY: &str = "Kubernetes Service CIDR is ready";
const NOT_SAID: &str = "The ServiceCIDR Status can not be set to Ready=True";
const IN_USE: &str =
    "There are still IPAddresses referencing the ServiceCIDR, please remove them or create a new ServiceCIDR";

/// The action for a range.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    /// It must not go before it is known that its addresses are free.
    Hold,
    SayReady,
    SayInUse,
    /// Servers may still give addresses out for so long.
    Wait(Duration),
    Release,
}

fn name(range: &ServiceCIDR) -> &str {
    range.metadata.name.as_deref().unwrap_or_default()
}

fn cidrs(range: &ServiceCIDR) -> impl Iterator<Item = Cidr> {
    let listed = range.spec.as_ref().and_then(|s| s.cidrs.as_deref()).unwrap_or_default();
    listed.iter().filter_map(|text| Cidr::parse(text))
}

/// Returns true if the Ready condition has this status.
fn says(range: &ServiceCIDR, status: &str) -> bool {
    let conditions = range.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|c| c.type_ == "Ready" && c.status == status)
}

/// Returns true if addresses would be left without a range if this one were deleted.
fn leaves_orphans(range: &ServiceCIDR, all: &[Arc<ServiceCIDR>], held: &[IpAddr]) -> bool {
    let others: Vec<Cidr> =
        all.iter().filter(|other| name(other) != name(range)).flat_map(|r| cidrs(r)).collect();
    if cidrs(range).all(|own| others.iter().any(|other| other.contains(own))) {
        return false;
    }
    let own: Vec<Cidr> = cidrs(range).collect();
    let within = |ranges: &[Cidr], address: IpAddr| ranges.iter().any(|range| range.contains_host(address));
    held.iter().any(|address| within(&own, *address) && !within(&others, *address))
}

fn decide(
    range: &ServiceCIDR,
    all: &[Arc<ServiceCIDR>],
    held: &[IpAddr],
    grace: Duration,
    now: Timestamp,
) -> Step {
    let is_held = range.metadata.finalizers.iter().flatten().any(|f| f == FINALIZER);
    let Some(deleted) = &range.metadata.deletion_timestamp else {
        return match (is_held, says(range, "True")) {
            (false, _) => Step::Hold,
            (true, false) => Step::SayReady,
            (true, true) => Step::Nothing,
        };
    };
    if leaves_orphans(range, all, held) {
        return if says(range, "False") { Step::Nothing } else { Step::SayInUse };
    }
    let since = Duration::try_from(now.duration_since(deleted.0)).unwrap_or_default();
    match grace.checked_sub(since) {
        Some(left) if !left.is_zero() => Step::Wait(left),
        _ if is_held => Step::Release,
        _ => Step::Nothing,
    }
}

/// The addresses that Services hold.
fn held(addresses: &Informer<IPAddress>) -> Vec<IpAddr> {
    let of_services = |address: &IPAddress| {
        let manager = address.metadata.labels.as_ref()?.get("ipaddress.kubernetes.io/managed-by")?;
        (manager == "ipallocator.k8s.io").then_some(())?;
        address.metadata.name.as_deref()?.parse().ok()
    };
    addresses.list().iter().filter_map(|address| of_services(address)).collect()
}

pub(crate) fn start(context: &Context) {
    let ranges: Informer<ServiceCIDR> = context.informers.get();
    let addresses: Informer<IPAddress> = context.informers.get();
    let (client, grace) = (context.client.clone(), context.config.service_range_grace);
    let recorder = context.events.recorder(NAME, None);
    let (all, also) = (ranges.clone(), ranges.clone());
    context
        .controller(NAME)
        // A range that comes may cover another that wants to go, and one that goes may leave the last for an address.
        .watches(&ranges, move |change, queue| {
            queue.add(ObjectKey::cluster(name(change.object())));
            add_leaving(&all, queue);
        })
        .watches(&addresses, move |_, queue| add_leaving(&also, queue))
        .run(move |key| {
            let range = ranges.get(&key);
            let step = range
                .as_ref()
                .map(|range| decide(range, &ranges.list(), &held(&addresses), grace, Timestamp::now()));
            let (client, recorder) = (client.clone(), recorder.clone());
            async move {
                match (range, step) {
                    (Some(range), Some(step)) => {
                        let says_ready = step == Step::SayReady;
                        let result = act(client, &range, step).await;
                        if says_ready && result.is_err() {
                            recorder.event_for(
                                &*range,
                                EventType::Warning,
                                "KubernetesServiceCIDRError",
                                NOT_SAID,
                            );
                        }
                        result
                    }
                    _ => Ok(None),
                }
            }
        });
}

/// Looks again at the ranges that are being deleted.
fn add_leaving(ranges: &Informer<ServiceCIDR>, queue: &WorkQueue<ObjectKey>) {
    for range in ranges.list().iter().filter(|r| r.metadata.deletion_timestamp.is_some()) {
        queue.add(ObjectKey::cluster(name(range)));
    }
}

async fn act(client: Client, range: &ServiceCIDR, step: Step) -> Result<Option<Duration>, SyncError> {
    let api: Api<ServiceCIDR> = Api::all(client);
    let (status, reason, message) = match step {
        Step::Nothing => return Ok(None),
        Step::Wait(left) => return Ok(Some(left)),
        Step::Hold | Step::Release => {
            let mut range = range.clone();
            let finalizers = range.metadata.finalizers.get_or_insert_default();
            finalizers.retain(|f| f != FINALIZER);
            if step == Step::Hold {
                finalizers.push(FINALIZER.to_owned());
            }
            let key = ObjectKey::cluster(name(&range));
            return settled(api.replace(name(&range), &PostParams::default(), &range).await, &key);
        }
        Step::SayReady => ("True", "", READY),
        Step::SayInUse => ("False", "Terminating", IN_USE),
    };
    let patch = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": name(range)},
        "status": {"conditions": [{
            "type": "Ready",
            "status": status,
            "reason": reason,
            "message": message,
            "lastTransitionTime": Timestamp::now().round(k8s_openapi::jiff::Unit::Second).unwrap_or_default().to_string(),
        }]},
    });
    match api.patch_status(name(range), &PatchParams::apply(NAME).force(), &Patch::Apply(patch)).await {
        Err(error) if is_not_found(&error) => Ok(None),
        other => other.map(|_| None).during(|| format!("write the status of ServiceCIDR {}", name(range))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Context};
    use ferrite_client::Scope;
    use ferrite_json::Value;
    use kube::client::Body;
    use std::convert::Infallible;

    #[tokio::test(start_paused = true)]
    async fn a_status_that_cannot_be_written_is_an_event() {
        let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let sender = sender.clone();
            async move {
                let (path, method) = (request.uri().path().to_owned(), request.method().clone());
                if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
                    return std::future::pending().await;
                }
                let of_range = range("r", &["10.1.0.0/24"], None, true, None);
                let items = if path.ends_with("/servicecidrs") { json!([*of_range]) } else { json!([]) };
                let (code, answer) = match method.as_str() {
                    "GET" => (
                        200,
                        json!({"kind": "List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}),
                    ),
                    "PATCH" => {
                        (500, json!({"kind": "Status", "status": "Failure", "message": "no", "code": 500}))
                    }
                    _ => {
                        let body = request.into_body().collect_bytes().await.expect("a body");
                        let event: Value = ferrite_json::from_slice(&body).expect("an event");
                        let _ = sender.send(event["reason"].as_str().unwrap_or_default().to_owned());
                        (201, event)
                    }
                };
                let bytes = ferrite_json::to_vec(&answer).expect("an answer");
                let response = http::Response::builder().status(code).body(Body::from(bytes));
                Ok::<_, Infallible>(response.expect("a response"))
            }
        });
        let client = Client::new(service, "default");
        let scope = Scope::new();
        start(&Context::new(Arc::new(move |_| client.clone()), scope.clone(), Config::default()));
        assert_eq!(events.recv().await.as_deref(), Some("KubernetesServiceCIDRError"));
        scope.cancel();
    }

    fn range(
        name: &str,
        cidrs: &[&str],
        deleted: Option<&str>,
        held: bool,
        ready: Option<&str>,
    ) -> Arc<ServiceCIDR> {
        let finalizers = if held { json!([FINALIZER]) } else { Value::Null };
        let conditions: Vec<Value> = ready
            .iter()
            .map(|status| {
                json!({"type": "Ready", "status": status, "reason": "", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"})
            })
            .collect();
        let value = json!({
            "metadata": {"name": name, "deletionTimestamp": deleted, "finalizers": finalizers},
            "spec": {"cidrs": cidrs},
            "status": {"conditions": conditions},
        });
        Arc::new(ferrite_json::from_value(value).unwrap())
    }

    #[test]
    fn a_range_goes_when_no_address_is_left_behind() {
        let now: Timestamp = "2026-01-01T00:01:00Z".parse().unwrap();
        let before = Some("2026-01-01T00:00:00Z");
        let just_now = Some("2026-01-01T00:00:57Z");
        let grace = Duration::from_secs(10);
        let a = |deleted, held, ready| range("a", &["10.1.0.0/24", "fd00::/112"], deleted, held, ready);
        let wide = || range("wide", &["10.0.0.0/8", "fd00::/108"], None, true, Some("True"));
        let half = || range("half", &["10.1.0.0/25"], None, true, Some("True"));
        for (range, others, held, expected) in [
            (a(None, false, None), vec![], &[][..], Step::Hold),
            (a(None, true, None), vec![], &[], Step::SayReady),
            (a(None, true, Some("False")), vec![], &[], Step::SayReady),
            (a(None, true, Some("True")), vec![], &[], Step::Nothing),
            (a(before, true, Some("True")), vec![], &["10.1.0.9"], Step::SayInUse),
            (a(before, true, Some("False")), vec![], &["10.1.0.9"], Step::Nothing),
            (a(before, true, Some("True")), vec![], &["10.2.0.9"], Step::Release),
            (a(before, true, Some("True")), vec![], &["fd00::9"], Step::SayInUse),
            (a(before, true, Some("False")), vec![wide()], &["10.1.0.9", "fd00::9"], Step::Release),
            (a(before, true, Some("True")), vec![half()], &["10.1.0.9"], Step::Release),
            (a(before, true, Some("True")), vec![half()], &["10.1.0.200"], Step::SayInUse),
            (a(just_now, true, Some("True")), vec![], &[], Step::Wait(Duration::from_secs(7))),
            (a(before, false, Some("True")), vec![], &[], Step::Nothing),
        ] {
            let held: Vec<IpAddr> = held.iter().map(|a| a.parse().unwrap()).collect();
            let all: Vec<_> = others.into_iter().chain([range.clone()]).collect();
            assert_eq!(decide(&range, &all, &held, grace, now), expected, "{range:?} {held:?}");
        }
    }
}
