//! Carries out the decisions of [`super::decide`].

use std::sync::Arc;
use std::time::Duration;

use ferrite_client::{
    Api, Change, EventRecorder, EventType, Expectations, Informer, ObjectKey, is_not_found,
};
use k8s_openapi::api::core::v1::{Endpoints, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::{DeleteParams, PostParams};

use super::decide::{self, MANAGED_BY, MANAGER, Plan, SERVICE_NAME};
use crate::Context;
use crate::error::{During, SyncError, is_namespace_terminating};

const NAME: &str = "endpointslice-mirroring-controller";
/// Index of mirrored slices by `namespace/service`.
const BY_ENDPOINTS: &str = "mirrored";
/// Label of Endpoints that are not mirrored.
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
/// Annotation of Endpoints that serve as a lock.
const LOCK: &str = "control-plane.alpha.kubernetes.io/leader";

struct MirrorController {
    client: Client,
    services: Informer<Service>,
    endpoints: Informer<Endpoints>,
    slices: Informer<EndpointSlice>,
    /// Slices made and not yet seen: until then another sync would make them again.
    expectations: Expectations,
    /// Addresses of one subset at most.
    capacity: usize,
    recorder: EventRecorder,
}

fn mirrored(slice: &EndpointSlice) -> Option<ObjectKey> {
    let labels = slice.metadata.labels.as_ref()?;
    if labels.get(MANAGED_BY).map(String::as_str) != Some(MANAGER) {
        return None;
    }
    Some(ObjectKey::new(slice.metadata.namespace.as_deref()?, labels.get(SERVICE_NAME)?.as_str()))
}

fn is_mirrored(endpoints: &Endpoints) -> bool {
    let skips = endpoints.metadata.labels.as_ref().and_then(|labels| labels.get(SKIP));
    let lock = endpoints.metadata.annotations.as_ref().is_some_and(|held| held.contains_key(LOCK));
    skips.is_none_or(|skips| skips != "true") && !lock
}

pub(crate) fn start(context: &Context) {
    let controller = Arc::new(MirrorController {
        client: context.client.clone(),
        services: context.informers.get(),
        endpoints: context.informers.get(),
        slices: context.informers.get(),
        expectations: Expectations::new(),
        capacity: context.config.mirrored_endpoints_per_subset.max(1),
        recorder: context.events.recorder("endpoint-slice-mirroring-controller", None),
    });
    controller
        .slices
        .add_index(BY_ENDPOINTS, |slice| mirrored(slice).map(|key| key.to_string()).into_iter().collect());
    let observer = controller.clone();
    context
        .controller(NAME)
        .watches(&controller.slices, move |change, queue| {
            if let Change::Updated { old, .. } = change
                && let Some(key) = mirrored(old)
            {
                queue.add(key);
            }
            let Some(key) = mirrored(change.object()) else { return };
            if let Change::Added(_) = change {
                observer.expectations.creation_observed(&key);
            }
            queue.add(key);
        })
        .reconciles(&controller.endpoints)
        .watches(&controller.services, |change, queue| {
            let selects =
                |service: &Service| service.spec.as_ref().is_some_and(|spec| spec.selector.is_some());
            let concerned = match change {
                Change::Updated { old, new } => selects(old) != selects(new),
                Change::Added(service) | Change::Deleted(service) => !selects(service),
            };
            if concerned {
                queue.add(ObjectKey::of(&**change.object()));
            }
        })
        .run_with(controller.clone(), |controller, key| async move { controller.sync(key).await });
}

impl MirrorController {
    async fn sync(&self, key: ObjectKey) -> Result<Option<Duration>, SyncError> {
        if !self.expectations.satisfied(&key) {
            return Ok(None);
        }
        let existing = self.slices.by_index(BY_ENDPOINTS, &key.to_string());
        // A Service with a selector has slices of its pods.
        let service = self.services.get(&key);
        let by_hand =
            service.is_some_and(|service| service.spec.as_ref().is_some_and(|spec| spec.selector.is_none()));
        let Some(endpoints) = self.endpoints.get(&key).filter(|endpoints| by_hand && is_mirrored(endpoints))
        else {
            let delete = existing.iter().filter_map(|slice| slice.metadata.name.clone()).collect();
            self.act(&key, Plan { delete, ..Plan::default() }).await?;
            self.expectations.forget(&key);
            return Ok(None);
        };
        let mut plan = decide::plan(&endpoints, &existing, self.capacity);
        if plan.invalid > 0 {
            let message =
                format!("Skipped {} invalid IP addresses when mirroring to EndpointSlices", plan.invalid);
            self.recorder.event_for(&*endpoints, EventType::Warning, "InvalidIPAddress", message);
        }
        if plan.skipped > plan.invalid {
            let message = format!(
                "A max of {} addresses can be mirrored to EndpointSlices per Endpoints subset. {} addresses were \
                 skipped",
                self.capacity, plan.skipped
            );
            self.recorder.event_for(&*endpoints, EventType::Warning, "TooManyAddressesToMirror", message);
        }
        if endpoints.metadata.deletion_timestamp.is_some() {
            plan.create.clear();
        }
        self.act(&key, plan).await.map(|()| None)
    }

    async fn act(&self, key: &ObjectKey, plan: Plan) -> Result<(), SyncError> {
        let api: Api<EndpointSlice> = Api::namespaced(self.client.clone(), &key.namespace);
        if !plan.create.is_empty() {
            self.expectations.expect_creations(key, plan.create.len());
        }
        let mut failure = None;
        for slice in &plan.create {
            if let Err(error) = api.create(&PostParams::default(), slice).await {
                self.expectations.creation_observed(key);
                if !is_namespace_terminating(&error) {
                    failure
                        .get_or_insert(SyncError::Api { action: format!("mirror endpoints {key}"), error });
                }
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        for slice in &plan.update {
            let name = slice.metadata.name.as_deref().unwrap_or_default();
            api.replace(name, &PostParams::default(), slice)
                .await
                .during(|| format!("update slice {name}"))?;
        }
        for name in &plan.delete {
            match api.delete(name, &DeleteParams::default()).await {
                Err(error) if !is_not_found(&error) => {
                    return Err(error).during(|| format!("delete slice {name}"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
