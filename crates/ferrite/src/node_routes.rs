//! Routes to the pods of other nodes follow the Node objects.

use crate::apiserver::BoxError;
use ferrite_client::{Api, Backoff, Change, Informer, ListSelector, Scope};
use ferrite_network::{Changes, Cidr, Cidrs, IpFamily, Peer, Router, RouterConfig};
use k8s_openapi::api::core::v1::Node;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Keeps the routes of the node `own` until the scope ends. The client lists and watches nodes.
pub async fn start(
    own: &str,
    config: RouterConfig,
    client: kube::Client,
    scope: &Scope,
) -> Result<(), BoxError> {
    let changes = Changes::watch(config.cluster_cidrs, &config.bridge)?;
    let router = Router::open(config).await?;
    let nodes = Informer::start_slim(Api::all(client), ListSelector::everything(), scope, slim);
    let wake = Arc::new(Notify::new());
    let woken = Arc::clone(&wake);
    nodes.subscribe(move |change| {
        if moves_routes(change) {
            woken.notify_one();
        }
    });
    scope.spawn(watch_kernel(changes, Arc::clone(&wake)));
    scope.spawn(follow(own.to_owned(), router, nodes, wake));
    Ok(())
}

/// Wakes the router when somebody else changes links, addresses, our routes, or rules that packets of pods meet.
async fn watch_kernel(mut changes: Changes, wake: Arc<Notify>) {
    while changes.next().await.is_ok() {
        wake.notify_one();
    }
}

/// False for the heartbeats of nodes, which are most of their changes: routes are compared with all that the kernel has.
fn moves_routes(change: &Change<Node>) -> bool {
    match change {
        Change::Added(_) | Change::Deleted(_) => true,
        Change::Updated { old, new } => Place::of(old) != Place::of(new),
    }
}

async fn follow(own: String, mut router: Router, nodes: Informer<Node>, wake: Arc<Notify>) {
    // Without all nodes, routes of those not yet known would be taken for those of nodes that are gone.
    nodes.synced().await;
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30), 0.2);
    loop {
        match router.apply(&peers(&own, &nodes.list())).await {
            Ok(()) => {
                backoff.reset();
                wake.notified().await;
            }
            Err(error) => {
                tracing::warn!(error = crate::chain(&error), "cannot set routes to the pods of other nodes");
                tokio::select! {
                    () = tokio::time::sleep(backoff.next_delay()) => {}
                    () = wake.notified() => {}
                }
            }
        }
    }
}

/// The facts about a node on which routes depend.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    created: Option<jiff::Timestamp>,
    addresses: Vec<IpAddr>,
    pod_cidrs: Vec<Cidr>,
}

impl Place {
    fn of(node: &Node) -> Self {
        Self {
            created: node.metadata.creation_timestamp.as_ref().map(|time| time.0),
            addresses: internal_addresses(node),
            pod_cidrs: pod_cidrs(node),
        }
    }
}

/// The other nodes that have pods, the oldest first.
fn peers(own: &str, nodes: &[Arc<Node>]) -> Vec<Peer> {
    let mut peers: Vec<_> = nodes
        .iter()
        .filter_map(|node| {
            let name = node.metadata.name.as_deref().filter(|name| *name != own)?;
            let Place { created, addresses, pod_cidrs } = Place::of(node);
            if pod_cidrs.is_empty() || addresses.is_empty() {
                return None;
            }
            Some(((created, name.to_owned()), Peer { name: name.to_owned(), addresses, pod_cidrs }))
        })
        .collect();
    peers.sort_by(|(a, _), (b, _)| a.cmp(b));
    peers.into_iter().map(|(_, peer)| peer).collect()
}

/// The ranges that the node says it has.
fn pod_cidrs(node: &Node) -> Vec<Cidr> {
    let Some(spec) = &node.spec else { return Vec::new() };
    let all = spec.pod_cidrs.as_deref().unwrap_or_default();
    let first = spec.pod_cidr.iter().filter(|_| all.is_empty());
    all.iter().chain(first).filter_map(|text| text.parse().ok()).collect()
}

/// The node's first range of a family.
pub fn pod_cidr(node: &Node, family: IpFamily) -> Option<Cidr> {
    pod_cidrs(node).into_iter().find(|range| range.family() == family)
}

/// The node's ranges of the families of all pods, in their order; none until it has all of them.
pub fn pod_cidrs_of(node: &Node, cluster: Cidrs) -> Option<Cidrs> {
    cluster.try_map(|all| pod_cidr(node, all.family()))
}

fn internal_addresses(node: &Node) -> Vec<IpAddr> {
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let internal = addresses.iter().filter(|address| address.type_ == "InternalIP");
    internal.filter_map(|address| address.address.parse().ok()).collect()
}

/// Routes need names, ranges and addresses.
fn slim(node: &mut Node) {
    node.metadata.managed_fields = None;
    node.metadata.annotations = None;
    node.metadata.labels = None;
    if let Some(status) = &mut node.status {
        let addresses = status.addresses.take();
        *status = Default::default();
        status.addresses = addresses;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn heartbeats_leave_routes_alone() {
        let node = |address: &str, ready: &str| -> Arc<Node> {
            let mut node = ferrite_json::from_value(json!({"metadata": {"name": "a"},
                "spec": {"podCIDRs": ["10.244.1.0/24"]}, "status": {
                    "addresses": [{"type": "InternalIP", "address": address}],
                    "conditions": [{"type": "Ready", "status": ready, "lastHeartbeatTime": "2026-01-01T00:00:00Z"}]}}))
            .unwrap();
            slim(&mut node);
            Arc::new(node)
        };
        let update = |new: Arc<Node>| Change::Updated { old: node("192.0.2.1", "True").into(), new };
        assert!(!moves_routes(&update(node("192.0.2.1", "False"))));
        assert!(moves_routes(&update(node("192.0.2.2", "True"))));
        assert!(moves_routes(&Change::Added(node("192.0.2.1", "True"))));
        assert!(moves_routes(&Change::Deleted(node("192.0.2.1", "True"))));
    }

    #[test]
    fn peers_are_sorted_by_the_age_of_their_objects() {
        let node = |name: &str, made: &str, cidrs: &[&str], address: &str| -> Arc<Node> {
            let mut node: Node = ferrite_json::from_value(json!({
                "metadata": {"name": name, "creationTimestamp": made},
                "spec": {"podCIDR": cidrs.first(), "podCIDRs": cidrs},
                "status": {"addresses": [
                    {"type": "Hostname", "address": name},
                    {"type": "InternalIP", "address": "2001:db8::1"},
                    {"type": "InternalIP", "address": address},
                ], "images": [{"names": ["x"]}]},
            }))
            .unwrap();
            slim(&mut node);
            Arc::new(node)
        };
        let nodes = [
            node("young", "2026-01-02T00:00:00Z", &["fd00::/64", "10.244.2.0/24"], "192.0.2.3"),
            node("own", "2026-01-01T00:00:00Z", &["10.244.0.0/24"], "192.0.2.1"),
            node("old", "2026-01-01T00:00:00Z", &["10.244.1.0/24"], "192.0.2.2"),
            node("empty", "2026-01-01T00:00:00Z", &[], "192.0.2.4"),
            node("bad", "2026-01-01T00:00:00Z", &["10.244.3.1/24"], "192.0.2.5"),
            node("lost", "2026-01-01T00:00:00Z", &["10.244.4.0/24"], "somewhere"),
        ];
        let found: Vec<String> = peers("own", &nodes)
            .into_iter()
            .map(|peer| format!("{} {:?} {}", peer.name, peer.addresses, peer.pod_cidrs.len()))
            .collect();
        let want =
            ["lost [2001:db8::1] 1", "old [2001:db8::1, 192.0.2.2] 1", "young [2001:db8::1, 192.0.2.3] 2"];
        assert_eq!(found, want);
        let both = "10.244.0.0/16,fd00::/56".parse().unwrap();
        assert_eq!(pod_cidrs_of(&nodes[0], both).unwrap().to_string(), "10.244.2.0/24,fd00::/64");
        assert_eq!(pod_cidrs_of(&nodes[2], both), None, "not all of them yet");
    }
}
