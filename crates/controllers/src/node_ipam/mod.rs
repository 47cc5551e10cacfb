//! Gives each node the ranges of its pods' addresses.

mod pool;

pub use pool::{NodeCidrs, NodeCidrsError};

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ferrite_api::Cidr;
use ferrite_client::{Api, EventRecorder, EventType, Informer, ObjectKey, WorkQueue, is_not_found};
use ferrite_json::json;
use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::Client;
use kube::api::{Patch, PatchParams};

use crate::Context;
use crate::error::{During, SyncError};
use pool::Pool;

const NAME: &str = "node-ipam-controller";

/// Does nothing without ranges to give.
pub(crate) fn start(context: &Context) {
    let Some(cidrs) = context.config.node_cidrs.clone() else { return };
    let kit = context.controller(NAME);
    let nodes: Informer<Node> = context.informers.get();
    let ipam = Arc::new(Ipam {
        cidrs,
        pool: Mutex::default(),
        nodes: nodes.clone(),
        queue: kit.queue().clone(),
        client: context.client.clone(),
        recorder: context.events.recorder("cidrAllocator", None),
    });
    kit.reconciles(&nodes).run_with(ipam, |ipam, key| async move { ipam.sync(&key.name).await });
}

struct Ipam {
    cidrs: NodeCidrs,
    /// Filled by the first sync, when all nodes are known: their ranges are occupied before any allocation.
    pool: Mutex<Option<Pool>>,
    nodes: Informer<Node>,
    queue: Arc<WorkQueue<ObjectKey>>,
    client: Client,
    recorder: EventRecorder,
}

impl Ipam {
    async fn sync(&self, name: &str) -> Result<Option<Duration>, SyncError> {
        match self.decide(name) {
            Step::Nothing => Ok(None),
            Step::Wake(waiting) => {
                waiting.iter().for_each(|node| self.queue.add(ObjectKey::cluster(node)));
                Ok(None)
            }
            Step::Refuse(range) => {
                let node = ObjectReference {
                    kind: Some("Node".into()),
                    name: Some(name.to_owned()),
                    uid: Some(name.to_owned()),
                    ..ObjectReference::default()
                };
                let message = format!("Node {name} status is now: CIDRNotAvailable");
                self.recorder.event(&node, EventType::Normal, "CIDRNotAvailable", message);
                Err(SyncError::Other(format!("no pod CIDR is left in {range} for node {name}")))
            }
            Step::Give(cidrs) => give(&self.client, name, &cidrs).await,
        }
    }

    fn decide(&self, name: &str) -> Step {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let pool = pool.get_or_insert_with(|| {
            let mut pool = Pool::new(&self.cidrs);
            for node in self.nodes.list() {
                let (name, cidrs) = (node.metadata.name.as_deref().unwrap_or_default(), pod_cidrs(&node));
                if !cidrs.is_empty() {
                    pool.occupy(name, &cidrs);
                }
            }
            pool
        });
        let Some(node) = self.nodes.get(&ObjectKey::cluster(name)) else {
            return Step::Wake(pool.release(name));
        };
        let cidrs = pod_cidrs(&node);
        if !cidrs.is_empty() {
            pool.occupy(name, &cidrs);
            return Step::Nothing;
        }
        match pool.assign(name) {
            Ok(cidrs) => Step::Give(cidrs),
            Err(exhausted) => Step::Refuse(exhausted.0),
        }
    }
}

enum Step {
    Nothing,
    Wake(Vec<String>),
    Refuse(Cidr),
    Give(Vec<Cidr>),
}

/// The ranges that a node has already. An invalid text occupies nothing.
fn pod_cidrs(node: &Node) -> Vec<Cidr> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let all = spec.pod_cidrs.as_deref().unwrap_or_default();
    let mut texts: Vec<&str> = all.iter().map(String::as_str).collect();
    if texts.is_empty() {
        texts.extend(spec.pod_cidr.as_deref().filter(|text| !text.is_empty()));
    }
    texts.into_iter().filter_map(Cidr::parse).map(Cidr::masked).collect()
}

async fn give(client: &Client, name: &str, cidrs: &[Cidr]) -> Result<Option<Duration>, SyncError> {
    let texts: Vec<String> = cidrs.iter().map(ToString::to_string).collect();
    let patch = json!({"spec": {"podCIDR": texts.first(), "podCIDRs": texts}});
    let api: Api<Node> = Api::all(client.clone());
    match api.patch(name, &PatchParams::default(), &Patch::Strategic(patch)).await {
        Ok(_) => Ok(None),
        // The deletion wakes us again and releases the node's new range.
        Err(error) if is_not_found(&error) => Ok(None),
        Err(error) => Err(error).during(|| format!("give node {name} the pod CIDR {}", texts.join(","))),
    }
}
