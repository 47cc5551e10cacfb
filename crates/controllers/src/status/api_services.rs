//! Whether an APIService can be reached: local ones always, others through their Service.

use std::sync::Arc;

use ferrite_client::{Api, Informer, ObjectKey, WorkQueue, is_conflict, is_not_found};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::{
    APIService, APIServiceCondition as Condition, APIServiceStatus,
};
use kube::Client;
use kube::api::PostParams;

use crate::Context;
use crate::error::{During, SyncError};

const LOCAL: &str = "apiservice-status-local-available-controller";
const REMOTE: &str = "apiservice-status-remote-available-controller";
/// Index of APIServices by the Service behind them.
const BY_SERVICE: &str = "service";
const MANAGER: &str = "kube-apiserver";

pub(crate) fn start_local(context: &Context) {
    let apis: Informer<APIService> = context.informers.get();
    let client = context.client.clone();
    super::run(context.controller(LOCAL).reconciles(&apis), apis, move |api: Arc<APIService>| {
        let verdict = reference(&api).is_none().then_some(Verdict {
            available: true,
            reason: "Local",
            message: "Local APIServices are always available".to_owned(),
        });
        write(client.clone(), api, verdict)
    });
}

pub(crate) fn start_remote(context: &Context) {
    let apis: Informer<APIService> = context.informers.get();
    let services: Informer<Service> = context.informers.get();
    let slices: Informer<EndpointSlice> = context.informers.get();
    apis.add_index(BY_SERVICE, |api| {
        reference(api)
            .map(|(namespace, name, _)| ObjectKey::new(namespace, name).to_string())
            .into_iter()
            .collect()
    });
    let (by_service, by_slice) = (apis.clone(), apis.clone());
    let kit = context
        .controller(REMOTE)
        .reconciles(&apis)
        .watches(&services, move |change, queue| {
            let metadata = &change.object().metadata;
            wake(&by_service, queue, metadata.namespace.as_deref(), metadata.name.as_deref());
        })
        .watches(&slices, move |change, queue| {
            let metadata = &change.object().metadata;
            wake(&by_slice, queue, metadata.namespace.as_deref(), service_of(change.object()));
        });
    let client = context.client.clone();
    super::run(kit, apis, move |api: Arc<APIService>| {
        let verdict = reference(&api).map(|(namespace, name, port)| {
            let service = services.get(&ObjectKey::new(namespace, name));
            let slices = slices.list_in(namespace);
            let of_service: Vec<&EndpointSlice> =
                slices.iter().map(|s| &**s).filter(|slice| service_of(slice) == Some(name)).collect();
            judge(namespace, name, port, service.as_deref(), &of_service)
        });
        write(client.clone(), api, verdict)
    });
}

fn service_of(slice: &EndpointSlice) -> Option<&str> {
    slice.metadata.labels.as_ref()?.get("kubernetes.io/service-name").map(String::as_str)
}

fn wake(
    apis: &Informer<APIService>,
    queue: &WorkQueue<ObjectKey>,
    namespace: Option<&str>,
    name: Option<&str>,
) {
    let service = ObjectKey::new(namespace.unwrap_or_default(), name.unwrap_or_default()).to_string();
    for api in apis.by_index(BY_SERVICE, &service) {
        queue.add(ObjectKey::of(&*api));
    }
}

/// Namespace, name and port of the Service behind an APIService; none for one this server answers itself.
fn reference(api: &APIService) -> Option<(&str, &str, i32)> {
    let service = api.spec.as_ref()?.service.as_ref()?;
    Some((service.namespace.as_deref()?, service.name.as_deref()?, service.port.unwrap_or(443)))
}

#[derive(Debug, Clone, PartialEq)]
struct Verdict {
    available: bool,
    reason: &'static str,
    message: String,
}

fn judge(
    namespace: &str,
    name: &str,
    port: i32,
    service: Option<&Service>,
    slices: &[&EndpointSlice],
) -> Verdict {
    let missing = |reason, message: String| Verdict { available: false, reason, message };
    let at = format!("service/{name} in {namespace:?}");
    let Some(service) = service else {
        return missing("ServiceNotFound", format!("{at} is not present"));
    };
    let passed = Verdict { available: true, reason: "Passed", message: "all checks passed".to_owned() };
    let Some(spec) = service.spec.as_ref() else { return passed };
    if spec.type_.as_deref() != Some("ClusterIP") {
        return passed;
    }
    let Some(found) = spec.ports.iter().flatten().find(|p| p.port == port) else {
        return missing("ServicePortError", format!("{at} is not listening on port {port}"));
    };
    if slices.is_empty() {
        return missing("EndpointsNotFound", format!("cannot find endpointslices for {at}"));
    }
    let port_name = found.name.clone().unwrap_or_default();
    let serves = |slice: &&EndpointSlice| {
        let ready = slice.endpoints.iter().flatten().any(|endpoint| {
            !endpoint.addresses.is_empty()
                && endpoint.conditions.as_ref().and_then(|c| c.ready).unwrap_or(true)
        });
        let named = slice.ports.iter().flatten().any(|p| p.name.clone().unwrap_or_default() == port_name);
        ready && named
    };
    if !slices.iter().any(serves) {
        let why = format!("endpointslices for {at} have no addresses with port name {port_name:?}");
        return missing("MissingEndpoints", why);
    }
    passed
}

/// The status to write, if it is not there yet.
fn decide(api: &APIService, verdict: Verdict, now: Timestamp) -> Option<APIServiceStatus> {
    let status = if verdict.available { "True" } else { "False" };
    let mut conditions = api.status.as_ref().and_then(|s| s.conditions.clone()).unwrap_or_default();
    let mut new = Condition {
        type_: "Available".to_owned(),
        status: status.to_owned(),
        reason: Some(verdict.reason.to_owned()),
        message: Some(verdict.message),
        last_transition_time: Some(Time(now)),
    };
    match conditions.iter_mut().find(|c| c.type_ == new.type_) {
        Some(old) => {
            if old.status == new.status {
                new.last_transition_time.clone_from(&old.last_transition_time);
            }
            if *old == new {
                return None;
            }
            *old = new;
        }
        None => conditions.push(new),
    }
    Some(APIServiceStatus { conditions: Some(conditions) })
}

async fn write(client: Client, api: Arc<APIService>, verdict: Option<Verdict>) -> Result<(), SyncError> {
    let status = verdict.and_then(|verdict| decide(&api, verdict, Timestamp::now()));
    let (Some(status), Some(name)) = (status, &api.metadata.name) else { return Ok(()) };
    let new = APIService { status: Some(status), ..(*api).clone() };
    let params = PostParams { field_manager: Some(MANAGER.to_owned()), ..PostParams::default() };
    match Api::<APIService>::all(client).replace_status(name, &params, &new).await {
        // A newer state is on its way here.
        Err(error) if is_not_found(&error) || is_conflict(&error) => Ok(()),
        other => other.map(drop).during(|| format!("write the status of APIService {name}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn a_remote_api_needs_a_service_with_endpoints_on_its_port() {
        let service: Service = ferrite_json::from_value(json!({"metadata": {"name": "s"}, "spec":
            {"type": "ClusterIP", "ports": [{"name": "https", "port": 443}]}}))
        .expect("a service");
        let slice = |addresses: &[&str], port: &str| -> EndpointSlice {
            ferrite_json::from_value(json!({"metadata": {"name": "x"}, "addressType": "IPv4",
                "endpoints": [{"addresses": addresses}], "ports": [{"name": port, "port": 8443}]}))
            .expect("a slice")
        };
        let (full, other, empty) =
            (slice(&["10.0.0.1"], "https"), slice(&["10.0.0.1"], "http"), slice(&[], "https"));
        for (service, port, slices, reason) in [
            (None, 443, vec![], "ServiceNotFound"),
            (Some(&service), 8443, vec![], "ServicePortError"),
            (Some(&service), 443, vec![], "EndpointsNotFound"),
            (Some(&service), 443, vec![&other, &empty], "MissingEndpoints"),
            (Some(&service), 443, vec![&other, &full], "Passed"),
        ] {
            assert_eq!(judge("n", "s", port, service, &slices).reason, reason);
        }
        let verdict = judge("n", "s", 443, None, &[]);
        assert_eq!(verdict.message, "service/s in \"n\" is not present");
        let mut api = APIService::default();
        let now = Timestamp::UNIX_EPOCH;
        api.status = decide(&api, verdict.clone(), now);
        assert_eq!(decide(&api, verdict, now), None);
    }
}
