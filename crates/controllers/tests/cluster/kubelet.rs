//! Stands in for the kubelets: pods with a node run and are ready at once, and end at once when asked to.
//!
//! Labels of a pod say what becomes of it: `stuck` never starts, `exit` ends with this code, and `fails` names the
//! completion indexes that end with 1 in spite of it, separated by dots. `keeps-room` runs on while a finalizer keeps it.

use std::sync::Arc;

use ferrite_client::{Api, Informer, Informers, ObjectKey, Scope, WorkQueue, run_workers};
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{DeleteParams, Patch, PatchParams};

fn label<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.labels.as_ref()?.get(name).map(String::as_str)
}

/// The code with which the pod ends by itself, if it does.
fn exit_code(pod: &Pod) -> Option<i32> {
    let code = label(pod, "exit")?.parse().ok()?;
    let index = label(pod, "batch.kubernetes.io/job-completion-index");
    let fails =
        label(pod, "fails").is_some_and(|fails| fails.split('.').any(|failing| index == Some(failing)));
    Some(if fails { 1 } else { code })
}

/// The status of a pod that has ended with this code.
fn ended(code: i32) -> Value {
    let now = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap();
    let phase = if code == 0 { "Succeeded" } else { "Failed" };
    json!({"status": {"phase": phase,
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": now}],
        "containerStatuses": [{"name": "c", "ready": false, "restartCount": 0, "image": "a", "imageID": "",
                               "state": {"terminated": {"exitCode": code, "finishedAt": now}}}]}})
}

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
                let Some(pod) =
                    pod.filter(|pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some()))
                else {
                    return Ok::<_, kube::Error>(None);
                };
                let gone = |error: kube::Error| {
                    if ferrite_client::is_not_found(&error) { Ok(None) } else { Err(error) }
                };
                let stuck = label(&pod, "stuck").is_some();
                let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
                let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
                let set = |status: Value| {
                    let (api, name) = (api.clone(), key.name.clone());
                    async move {
                        api.patch_status(&name, &PatchParams::default(), &Patch::Strategic(status))
                            .await
                            .map(|_| None)
                    }
                };
                if pod.metadata.deletion_timestamp.is_some() {
                    if label(&pod, "keeps-room").is_some() && pod.metadata.finalizers.is_some() {
                        return Ok(None);
                    }
                    // A pod that somebody waits for reports its end before it goes.
                    if !has_ended && pod.metadata.finalizers.is_some() {
                        return set(ended(137)).await.or_else(gone);
                    }
                    let now = DeleteParams::default().grace_period(0);
                    return api.delete(&key.name, &now).await.map(|_| None).or_else(gone);
                }
                if has_ended || stuck {
                    return Ok(None);
                }
                if phase == Some("Running") {
                    return match exit_code(&pod) {
                        Some(code) => set(ended(code)).await.or_else(gone),
                        None => Ok(None),
                    };
                }
                let ip = format!("10.1.{}.{}", address / 250, address % 250 + 1);
                let now = jiff::Timestamp::now().round(jiff::Unit::Second).unwrap();
                set(json!({"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
                    "startTime": now,
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": now}]}}))
                .await
            }
        })
        .await;
    });
}
