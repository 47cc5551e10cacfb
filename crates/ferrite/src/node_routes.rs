//! Routes to the pods of other nodes follow the Node objects.

use crate::apiserver::BoxError;
use ferrite_client::{Api, Backoff, Informer, ListSelector, Scope};
use ferrite_network::{Changes, Cidr, Peer, Router, RouterConfig};
use k8s_openapi::api::core::v1::Node;
use std::net::{IpAddr, Ipv4Addr};
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
    let cluster = config.cluster_cidr;
    let router = Router::open(config).await?;
    let changes = Changes::watch(cluster)?;
    let nodes = Informer::start_slim(Api::all(client), ListSelector::everything(), scope, slim);
    let wake = Arc::new(Notify::new());
    let woken = Arc::clone(&wake);
    nodes.subscribe(move |_| woken.notify_one());
    scope.spawn(watch_kernel(changes, Arc::clone(&wake)));
    scope.spawn(follow(own.to_owned(), router, nodes, wake));
    Ok(())
}

/// Wakes the router when somebody else changes links, addresses or our routes.
async fn watch_kernel(mut changes: Changes, wake: Arc<Notify>) {
    while changes.next().await.is_ok() {
        wake.notify_one();
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

/// The other nodes that have pods, the oldest first.
fn peers(own: &str, nodes: &[Arc<Node>]) -> Vec<Peer> {
    let mut peers: Vec<_> = nodes
        .iter()
        .filter_map(|node| {
            let name = node.metadata.name.as_deref().filter(|name| *name != own)?;
            let (pod_cidr, address) = (pod_cidr(node)?, internal_address(node)?);
            let age = (node.metadata.creation_timestamp.as_ref().map(|time| time.0), name.to_owned());
            Some((age, Peer { name: name.to_owned(), address, pod_cidr }))
        })
        .collect();
    peers.sort_by(|(a, _), (b, _)| a.cmp(b));
    peers.into_iter().map(|(_, peer)| peer).collect()
}

/// The first range of IPv4 that the node has.
pub fn pod_cidr(node: &Node) -> Option<Cidr> {
    let spec = node.spec.as_ref()?;
    let all = spec.pod_cidrs.as_deref().unwrap_or_default();
    all.iter().chain(spec.pod_cidr.as_ref()).find_map(|text| text.parse().ok())
}

fn internal_address(node: &Node) -> Option<Ipv4Addr> {
    let addresses = node.status.as_ref()?.addresses.as_deref()?;
    let internal = addresses.iter().filter(|address| address.type_ == "InternalIP");
    internal.filter_map(|address| address.address.parse::<IpAddr>().ok()).find_map(|address| match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    })
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
            .map(|peer| format!("{} {} {}", peer.name, peer.address, peer.pod_cidr))
            .collect();
        assert_eq!(found, ["old 192.0.2.2 10.244.1.0/24", "young 192.0.2.3 10.244.2.0/24"]);
    }
}
