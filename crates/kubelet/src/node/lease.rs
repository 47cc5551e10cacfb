//! The node's heartbeat: a Lease in `kube-node-lease`, renewed four times within its duration.

use crate::clock::Clock;
use ferrite_client::{Api, is_already_exists, is_conflict, is_not_found, message_of};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use kube::Client;
use kube::api::PostParams;
use std::time::Duration;

const NAMESPACE: &str = "kube-node-lease";

/// Renews the lease for as long as it runs.
pub(crate) async fn run(client: Client, node_name: String, duration: Duration, clock: Clock) {
    let leases = Api::<Lease>::namespaced(client.clone(), NAMESPACE);
    let nodes = Api::<Node>::all(client);
    let period = duration / 4;
    let mut held: Option<Lease> = None;
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let renewed =
            tokio::time::timeout(period, renew(&leases, &nodes, &node_name, duration, clock, held.take()))
                .await;
        match renewed {
            Ok(Ok(lease)) => held = Some(lease),
            Ok(Err(e)) => tracing::warn!(error = %message_of(&e), "could not renew the node's lease"),
            Err(_) => tracing::warn!("renewing the node's lease took too long"),
        }
    }
}

async fn renew(
    leases: &Api<Lease>,
    nodes: &Api<Node>,
    node_name: &str,
    duration: Duration,
    clock: Clock,
    held: Option<Lease>,
) -> kube::Result<Lease> {
    let params = PostParams::default();
    let mut held = held;
    // Twice: a copy that turned out stale is read again once.
    for _ in 0..2 {
        let known = match held.take() {
            Some(lease) => Some(lease),
            None => leases.get_opt(node_name).await?,
        };
        let result = match known {
            Some(mut lease) => {
                lease.spec = Some(spec(node_name, duration, clock));
                leases.replace(node_name, &params, &lease).await
            }
            None => {
                let owner = nodes.get_opt(node_name).await?.map(|node| OwnerReference {
                    api_version: "v1".into(),
                    kind: "Node".into(),
                    name: node_name.to_string(),
                    uid: node.metadata.uid.unwrap_or_default(),
                    ..OwnerReference::default()
                });
                let lease = Lease {
                    metadata: ObjectMeta {
                        name: Some(node_name.to_string()),
                        namespace: Some(NAMESPACE.into()),
                        owner_references: owner.map(|o| vec![o]),
                        ..ObjectMeta::default()
                    },
                    spec: Some(spec(node_name, duration, clock)),
                };
                leases.create(&params, &lease).await
            }
        };
        match result {
            Err(e) if is_conflict(&e) || is_not_found(&e) || is_already_exists(&e) => {}
            other => return other,
        }
    }
    leases.get(node_name).await
}

fn spec(node_name: &str, duration: Duration, clock: Clock) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(node_name.to_string()),
        lease_duration_seconds: Some(i32::try_from(duration.as_secs()).unwrap_or(40)),
        renew_time: Some(MicroTime(clock.now())),
        ..LeaseSpec::default()
    }
}
