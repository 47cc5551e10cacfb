use std::time::Duration;

use ferrite_client::{LeaderConfig, LeaderElector, Scope};
use k8s_openapi::api::coordination::v1::Lease;
use tokio::sync::mpsc;

use crate::support::Cluster;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_candidate_leads_and_hands_over_when_it_stops() {
    let cluster = Cluster::start(&[]).await;
    let (sender, mut leaders) = mpsc::channel(4);
    let candidate = |identity: &'static str| {
        let config = LeaderConfig {
            retry_period: Duration::from_millis(50),
            ..LeaderConfig::new("kube-system", "test", identity)
        };
        let mut elector = LeaderElector::new(cluster.client.clone(), config);
        let scope = Scope::new();
        let (own, sender) = (scope.clone(), sender.clone());
        scope.spawn_graceful(async move {
            elector.run(&own, move |_| sender.try_send(identity).unwrap()).await;
        });
        scope
    };
    let first = candidate("first");
    assert_eq!(leaders.recv().await, Some("first"));
    let second = candidate("second");
    first.shutdown().await;
    // Released, so nobody waits for the lease to run out.
    let next = tokio::time::timeout(Duration::from_secs(10), leaders.recv()).await.unwrap();
    assert_eq!(next, Some("second"));
    let lease = cluster.api::<Lease>("kube-system").get("test").await.unwrap().spec.unwrap();
    assert_eq!(lease.holder_identity.as_deref(), Some("second"));
    assert_eq!(lease.lease_transitions, Some(1));
    second.shutdown().await;
    cluster.stop().await;
}
