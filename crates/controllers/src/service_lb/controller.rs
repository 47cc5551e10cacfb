//! The part of the load balancer that acts.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_client::{
    Api, Change, Controller, EventRecorder, EventType, Informer, ObjectKey, WorkQueue, is_not_found,
};
use ferrite_json::json;
use k8s_openapi::api::core::v1::{LoadBalancerIngress, Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::Client;
use kube::api::{Patch, PatchParams};

use super::decide::{
    FINALIZER, Wanted, current, has_finalizer, ingress, is_local, node_addresses, ports, serves, wanted,
};
use super::ports::{Port, PortTaken, Ports, reserved};
use crate::error::{During, SyncError};
use crate::{Context, Identity};

const NAME: &str = "service-lb-controller";
/// Upstream's account for load balancers: it may write the status of Services.
const ACCOUNT: &str = "service-controller";

/// Index of Services of type LoadBalancer.
const BALANCED: &str = "load balancer";
/// Index of Services by the node ports that they have, as `TCP/30080`.
const BY_NODE_PORT: &str = "node port";
/// Index of Services by their own addresses.
const BY_CLUSTER_IP: &str = "cluster address";
/// Index of EndpointSlices by their Service.
const BY_SERVICE: &str = "load-balanced service";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

struct Balancer {
    client: Client,
    services: Informer<Service>,
    nodes: Informer<Node>,
    slices: Informer<EndpointSlice>,
    /// None before the first reconcile, which reads the present owners.
    ports: Mutex<Option<Ports>>,
    queue: Arc<WorkQueue<ObjectKey>>,
    recorder: EventRecorder,
}

/// Starts the load balancer.
pub fn start(context: &Context) {
    let context = context.acting_as(Identity::ServiceAccount(ACCOUNT));
    // One worker: a port is given to one Service after the other.
    let kit = Controller::new(NAME, 1, &context.scope);
    let balancer = Arc::new(Balancer {
        client: context.client.clone(),
        services: context.informers.get(),
        nodes: context.informers.get(),
        slices: context.informers.get(),
        ports: Mutex::default(),
        queue: kit.queue().clone(),
        recorder: context.events.recorder(ACCOUNT, None),
    });
    balancer.services.add_index(BALANCED, |service| {
        let balanced = service.spec.as_ref().is_some_and(|s| s.type_.as_deref() == Some("LoadBalancer"));
        balanced.then(String::new).into_iter().collect()
    });
    balancer.services.add_index(BY_NODE_PORT, node_ports);
    balancer.services.add_index(BY_CLUSTER_IP, cluster_addresses);
    balancer.slices.add_index(BY_SERVICE, service_index);
    let (of_slices, of_nodes) = (balancer.clone(), balancer.clone());
    kit.reconciles(&balancer.services)
        .watches(&balancer.slices, move |change, queue| {
            let key = service_of(change.object());
            let is_local =
                |key: &ObjectKey| of_slices.services.get(key).is_some_and(|service| is_local(&service));
            if let Some(key) = key.filter(is_local) {
                queue.add(key);
            }
        })
        .watches(&balancer.nodes, move |change, _| {
            let changed = match change {
                Change::Updated { old, new } => {
                    serves(old) != serves(new) || node_addresses(old) != node_addresses(new)
                }
                Change::Added(_) | Change::Deleted(_) => true,
            };
            if changed {
                of_nodes.wake_all();
            }
        })
        .run_with(balancer.clone(), |balancer, key| async move {
            balancer.sync(&key).await.map(|()| None::<Duration>)
        });
}

fn node_ports(service: &Service) -> Vec<String> {
    let Some(spec) = &service.spec else { return Vec::new() };
    let ports = spec.ports.iter().flatten().filter_map(|port| {
        let number = port.node_port.filter(|number| *number != 0)?;
        Some(Port { protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()), number })
    });
    let health = spec.health_check_node_port.filter(|number| *number != 0);
    let health = health.map(|number| Port { protocol: "TCP".into(), number });
    ports.chain(health).map(|port| port.to_string()).collect()
}

fn cluster_addresses(service: &Service) -> Vec<String> {
    service.spec.as_ref().and_then(|spec| spec.cluster_ips.clone()).unwrap_or_default()
}

fn service_of(slice: &EndpointSlice) -> Option<ObjectKey> {
    let service = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    Some(ObjectKey::new(slice.metadata.namespace.as_deref().unwrap_or_default(), service.as_str()))
}

fn service_index(slice: &EndpointSlice) -> Vec<String> {
    service_of(slice).map(|key| key.to_string()).into_iter().collect()
}

impl Balancer {
    fn wake_all(&self) {
        for service in self.services.by_index(BALANCED, "") {
            self.queue.add(ObjectKey::of(&*service));
        }
    }

    fn ports(&self) -> MutexGuard<'_, Option<Ports>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the Service's ports; another Service may wait for them.
    fn release(&self, key: &ObjectKey) {
        if self.ports().as_mut().is_some_and(|ports| ports.release(key)) {
            self.wake_all();
        }
    }

    async fn sync(&self, key: &ObjectKey) -> Result<(), SyncError> {
        let Some(service) = self.services.get(key) else {
            self.release(key);
            return Ok(());
        };
        match wanted(&service) {
            Wanted::Nothing => {
                self.release(key);
                Ok(())
            }
            Wanted::Cleanup => {
                self.event(&service, "DeletingLoadBalancer", "Deleting load balancer");
                self.write(key, &service, &[], false).await?;
                self.event(&service, "DeletedLoadBalancer", "Deleted load balancer");
                self.release(key);
                Ok(())
            }
            Wanted::LoadBalancer => self.balance(key, &service).await,
        }
    }

    async fn balance(&self, key: &ObjectKey, service: &Service) -> Result<(), SyncError> {
        let had = current(service);
        if let Err(taken) = self.claim(key, service) {
            let message = format!("Error syncing load balancer: failed to ensure load balancer: {taken}");
            self.recorder.event_for(service, EventType::Warning, "SyncLoadBalancerFailed", message);
            if !had.is_empty() {
                self.write(key, service, &[], has_finalizer(service)).await?;
                self.wake_all();
            }
            // A Service that gives a port back wakes the others.
            return Ok(());
        }
        let slices = self.slices.by_index(BY_SERVICE, &key.to_string());
        let is_taken =
            |address: IpAddr| !self.services.by_index(BY_CLUSTER_IP, &address.to_string()).is_empty();
        let ingress = ingress(service, &self.nodes.list(), &slices, is_taken);
        if had == ingress && has_finalizer(service) {
            return Ok(());
        }
        if ingress.is_empty() {
            let message = "There are no available nodes for LoadBalancer";
            self.recorder.event_for(service, EventType::Warning, "UnAvailableLoadBalancer", message);
        } else if had.is_empty() {
            self.event(service, "EnsuringLoadBalancer", "Ensuring load balancer");
        }
        self.write(key, service, &ingress, true).await?;
        match (had.is_empty(), ingress.is_empty()) {
            (true, false) => self.event(service, "EnsuredLoadBalancer", "Ensured load balancer"),
            (false, _) => self.event(service, "UpdatedLoadBalancer", "Updated load balancer with new hosts"),
            (true, true) => {}
        }
        Ok(())
    }

    fn event(&self, service: &Service, reason: &str, message: &str) {
        self.recorder.event_for(service, EventType::Normal, reason, message);
    }

    /// Takes the ports of the Service, if nobody else has them.
    fn claim(&self, key: &ObjectKey, service: &Service) -> Result<(), PortTaken> {
        let wanted = ports(service);
        for port in &wanted {
            if let Some(taken) = reserved(port).or_else(|| self.of_cluster(port)) {
                self.release(key);
                return Err(taken);
            }
            let owners = self.services.by_index(BY_NODE_PORT, &port.to_string());
            if let Some(owner) = owners.first() {
                let taken = PortTaken::NodePort { port: port.clone(), holder: ObjectKey::of(&**owner) };
                self.release(key);
                return Err(taken);
            }
        }
        let mut held = self.ports();
        held.get_or_insert_with(|| self.holders()).claim(key, &wanted)
    }

    /// The use that this cluster's API server and kubelets have for a port.
    fn of_cluster(&self, port: &Port) -> Option<PortTaken> {
        if port.protocol != "TCP" {
            return None;
        }
        let api_server = self.slices.by_index(BY_SERVICE, "default/kubernetes");
        let mut numbers =
            api_server.iter().flat_map(|slice| slice.ports.iter().flatten()).filter_map(|p| p.port);
        if numbers.any(|number| number == port.number) {
            return Some(PortTaken::Node { port: port.clone(), user: "the API server" });
        }
        let nodes = self.nodes.list();
        let mut kubelets = nodes.iter().filter_map(|node| {
            node.status.as_ref()?.daemon_endpoints.as_ref()?.kubelet_endpoint.as_ref().map(|e| e.port)
        });
        let is_kubelets = kubelets.any(|number| number == port.number);
        is_kubelets.then(|| PortTaken::Node { port: port.clone(), user: "kubelets" })
    }

    /// The ports of the Services that have addresses when this process starts. The oldest Service wins a conflict.
    fn holders(&self) -> Ports {
        let mut services = self.services.by_index(BALANCED, "");
        services.retain(|service| wanted(service) == Wanted::LoadBalancer && !current(service).is_empty());
        services.sort_by_key(|service| service.metadata.creation_timestamp.as_ref().map(|time| time.0));
        let mut held = Ports::default();
        for service in services {
            // A Service that loses gets its error when it is synced itself.
            let _ = held.claim(&ObjectKey::of(&*service), &ports(&service));
        }
        held
    }

    /// Writes the addresses, and the finalizer or its absence. The patch names the version that was read: a finalizer
    /// that somebody added since is not lost.
    async fn write(
        &self,
        key: &ObjectKey,
        service: &Service,
        ingress: &[LoadBalancerIngress],
        finalizer: bool,
    ) -> Result<(), SyncError> {
        let mut finalizers = service.metadata.finalizers.clone().unwrap_or_default();
        finalizers.retain(|other| other != FINALIZER);
        if finalizer {
            finalizers.push(FINALIZER.into());
        }
        let ingress = (!ingress.is_empty()).then_some(ingress);
        let patch = json!({
            "metadata": {"finalizers": finalizers, "resourceVersion": service.metadata.resource_version},
            "status": {"loadBalancer": {"ingress": ingress}},
        });
        let api: Api<Service> = Api::namespaced(self.client.clone(), &key.namespace);
        match api.patch_status(&key.name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(error) if is_not_found(&error) => Ok(()),
            result => result.map(drop).during(|| format!("update load balancer status of Service {key}")),
        }
    }
}
