//! Carries out the decisions of [`super::decide`].

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Change, EventRecorder, EventType, Expectations, Informer, ObjectKey, is_not_found, message_of,
};
use k8s_openapi::api::core::v1::{Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::{DeleteParams, PostParams};

use super::decide::{self, MANAGED_BY, MANAGER, SERVICE_NAME};
use super::measures::{self, Totals};
use super::topology::{self, Topology};
use crate::Context;
use crate::endpoints::addresses::is_managed;
use crate::endpoints::watch;
use crate::error::{During, SyncError, is_namespace_terminating};

const NAME: &str = "endpointslice-controller";
/// Index of slices by `namespace/service`, for those this controller keeps.
const BY_SERVICE: &str = "service";

struct SliceController {
    client: Client,
    services: Informer<Service>,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    slices: Informer<EndpointSlice>,
    /// Slices made and not yet seen: until then another sync would make them again.
    expectations: Expectations,
    /// Endpoints in one slice at most.
    capacity: usize,
    recorder: EventRecorder,
    topology: Topology,
    totals: Totals,
}

/// An event about a Service: its type, reason and message.
type ServiceEvent = (EventType, &'static str, String);

fn service_of(slice: &EndpointSlice) -> Option<ObjectKey> {
    let labels = slice.metadata.labels.as_ref()?;
    if labels.get(MANAGED_BY).map(String::as_str) != Some(MANAGER) {
        return None;
    }
    let service = labels.get(SERVICE_NAME)?.clone();
    Some(ObjectKey::new(slice.metadata.namespace.clone().unwrap_or_default(), service))
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(SliceController {
        client: context.client.clone(),
        services: context.informers.get(),
        pods: context.informers.get(),
        nodes: context.informers.get(),
        slices: context.informers.get(),
        expectations: Expectations::new(),
        capacity: context.config.endpoints_per_slice.max(1),
        recorder: context.events.recorder("endpoint-slice-controller", None),
        topology: Topology::default(),
        totals: Totals::new(),
    });
    controller
        .slices
        .add_index(BY_SERVICE, |slice| service_of(slice).map(|key| key.to_string()).into_iter().collect());
    let observer = controller.clone();
    let kit = context.controller(NAME).watches(&controller.slices, move |change, queue| {
        let Some(key) = service_of(change.object()) else { return };
        if let Change::Added(_) = change {
            observer.expectations.creation_observed(&key);
        }
        queue.add(key);
    });
    let by_node = controller.clone();
    watch::services_and_pods(kit, &controller.services, &controller.pods)
        .watches(&controller.nodes, move |change, queue| {
            let is_other = match change {
                Change::Added(_) | Change::Deleted(_) => true,
                Change::Updated { old, new } => topology::differs(old, new),
            };
            if is_other {
                by_node.topology.changed(|| by_node.ratios()).into_iter().for_each(|key| queue.add(key));
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

const DISABLED: &str = "TopologyAwareHintsDisabled";

impl SliceController {
    fn ratios(&self) -> Option<topology::Zones<f64>> {
        let nodes = self.nodes.list();
        topology::ratios(nodes.iter().map(|node| &**node))
    }

    /// Upstream's events about the hints of a Service, whose memory is brought up to date.
    fn note_hints(&self, key: &ObjectKey, service: &Service, plan: &decide::Plan) -> Vec<ServiceEvent> {
        let event = |kind, reason, what: &dyn Display, family: &str| {
            (kind, reason, format!("{what}, addressType: {family}"))
        };
        let mut events = Vec::new();
        for (family, hinted) in &plan.hinted {
            match hinted {
                Ok(zones) => {
                    if self.topology.set_hints(key, family, zones.clone()) {
                        let what = "Topology Aware Hints has been enabled";
                        events.push(event(EventType::Normal, "TopologyAwareHintsEnabled", &what, family));
                    }
                }
                Err(refusal) => {
                    self.topology.remove_hints(key, family);
                    events.push(event(EventType::Warning, DISABLED, refusal, family));
                }
            }
        }
        if !topology::is_auto(service) {
            for family in decide::families(service) {
                if self.topology.remove_hints(key, family) {
                    let what = "Topology Aware Hints has been disabled";
                    events.push(event(EventType::Warning, DISABLED, &what, family));
                }
            }
        }
        events
    }

    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        let Some(service) = self.services.get(&key) else {
            // Its slices are its dependents: the garbage collector removes them.
            self.expectations.forget(&key);
            self.topology.forget(&key);
            self.totals.forget(&key);
            return Ok(None);
        };
        if !is_managed(&service) || service.metadata.deletion_timestamp.is_some() {
            return Ok(None);
        }
        if !self.expectations.satisfied(&key) {
            return Ok(None);
        }
        let pods = watch::selected(&service, &self.pods);
        let existing = self.slices.by_index(BY_SERVICE, &key.to_string());
        let zone_of =
            |node: &str| self.nodes.get(&ObjectKey::cluster(node)).and_then(|node| decide::zone(&node));
        let ratios = match topology::is_auto(&service) {
            true => self.topology.ratios(|| self.ratios()),
            false => None,
        };
        let plan = decide::plan(&service, &pods, zone_of, &existing, self.capacity, ratios.as_ref());
        let events = self.note_hints(&key, &service, &plan);
        let numbers = measures::numbers(&service, &existing, &plan, self.capacity);
        let result = self.act(&key, &plan).await;
        self.totals.synced(&key, &plan, numbers, result.is_ok());
        for (kind, reason, message) in events {
            self.recorder.event_for(&*service, kind, reason, message);
        }
        if let Err(error) = &result {
            let message = format!("Error updating Endpoint Slices for Service {key}: {error}");
            self.recorder.event_for(&*service, EventType::Warning, "FailedToUpdateEndpointSlices", message);
        }
        result.map(|()| None)
    }

    async fn act(&self, key: &ObjectKey, plan: &decide::Plan) -> Result<(), SyncError> {
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &key.namespace);
        if !plan.create.is_empty() {
            self.expectations.expect_creations(key, plan.create.len());
        }
        let mut first = None;
        for slice in &plan.create {
            if let Err(error) = api.create(&PostParams::default(), slice).await {
                self.expectations.creation_observed(key);
                if !is_namespace_terminating(&error) {
                    first.get_or_insert(SyncError::Other(format!(
                        "cannot create a slice: {}",
                        message_of(&error)
                    )));
                }
            }
        }
        if let Some(error) = first {
            return Err(error);
        }
        for slice in &plan.update {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            api.replace(name, &PostParams::default(), slice)
                .await
                .during(|| format!("update slice {name}"))?;
        }
        for name in &plan.delete {
            match api.delete(name, &DeleteParams::default()).await {
                Ok(_) => {}
                Err(error) if is_not_found(&error) => {}
                Err(error) => return Err(error).during(|| format!("delete slice {name}")),
            }
        }
        Ok(())
    }
}
