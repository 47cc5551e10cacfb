//! Stands in for the kubelets: pods with a node run and are ready at once, and end at once when asked to.

use std::sync::Arc;

use ferrite_client::{Api, Informer, Informers, ObjectKey, Scope, WorkQueue, run_workers};
use ferrite_json::json;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams};

pub fn start(client: &Client, informers: &Informers, scope: &Scope) {
    let pods: Informer<Pod> = informers.get();
    let queue = Arc::new(WorkQueue::new());
    let watching = queue.clone();
    pods.subscribe(move |change| watching.add(ObjectKey::of(&**change.object())));
    let client = client.clone();
    let inner = scope.clone();
    scope.spawn(async move {
        let addresses = std::sync::atomic::AtomicU32::new(1);
        run_workers("kubelet", queue, 4, inner, |key: ObjectKey| {
            let pod = pods.get(&key);
            let api: Api<Pod> = Api::namespaced(client.clone(), &key.namespace);
            let address = addresses.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            async move {
                let Some(pod) = pod.filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()))
                else {
                    return Ok::<_, kube::Error>(None);
                };
                let stuck = pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key("stuck"));
                let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
                if pod.metadata.deletion_timestamp.is_some() {
                    let now = DeleteParams::default().grace_period(0);
                    return api.delete(&key.name, &now).await.map(|_| None).or_else(|error| {
                        if ferrite_client::is_not_found(&error) { Ok(None) } else { Err(error) }
                    });
                }
                if phase == Some("Running") || stuck {
                    return Ok(None);
                }
                let ip = format!("10.1.{}.{}", address / 250, address % 250 + 1);
                let status = json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
                    "conditions": [{"type": "Ready", "status": "True",
                                    "lastTransitionTime": jiff::Timestamp::now().round(jiff::Unit::Second).unwrap()}]}});
                api.patch_status(&key.name, &PatchParams::default(), &Patch::Strategic(status)).await.map(|_| None)
            }
        })
        .await;
    });
}
