//! The end of a pod: stop it, report, clean up, and let the API server delete it.

use super::ending;
use super::kill::Hooks;
use super::model;
use super::worker::{Desired, SyncError, Worker};
use ferrite_client::{Api, Backoff, is_conflict, is_not_found, message_of};
use ferrite_cri::v1::{RemoveContainerRequest, RemovePodSandboxRequest};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, Preconditions};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Worker {
    /// Ends the pod. Each step can be repeated: whatever was interrupted is simply done again.
    pub(super) async fn terminate(&mut self, desired: &Desired) -> Result<(), SyncError> {
        let context = self.context.clone();
        if let Desired::Present(pod) = desired {
            let runtime = self.observe().await?;
            self.probes.recall(pod, &runtime);
        }
        self.probes.keep_readiness();
        self.kill_all(desired).await?;
        self.probes.stop();
        let runtime = self.observe().await?;
        if let Desired::Present(pod) = desired {
            self.publish(pod, &runtime, true, true);
        }
        self.release().await?;
        self.weigh_burstable().await;
        if let Desired::Present(_) = desired {
            // The last status is on record before the pod may disappear.
            self.until_gone_or(self.writer.flushed()).await;
        }
        for instance in &runtime.instances {
            let request = RemoveContainerRequest { container_id: instance.id.clone() };
            ignore_missing(context.runtime.remove_container(request).await)?;
            context.log_links.remove(&self.id, &instance.name, &instance.id).await;
        }
        for sandbox in &runtime.sandboxes {
            let request = RemovePodSandboxRequest { pod_sandbox_id: sandbox.id.clone() };
            ignore_missing(context.runtime.remove_pod_sandbox(request).await)?;
        }
        context.volumes.tear_down(&self.id.uid).await.map_err(SyncError::CleanUp)?;
        context.userns.release(&self.id.uid);
        if let Desired::Present(_) = desired {
            self.delete_from_api().await;
        }
        let logs = context.log_dir.join(self.id.log_directory());
        if let Err(e) = remove_logs(logs).await {
            tracing::warn!(pod = %self.id, error = %e, "could not remove the pod's logs; the next start tries again");
        }
        Ok(())
    }

    /// Gives back whatever the pod holds of the node. The API need not know of the pod's end yet: other pods wait for
    /// the room.
    pub(super) async fn release(&self) -> Result<(), SyncError> {
        let (context, uid) = (&self.context, &self.id.uid);
        context.volumes.free(uid).await.map_err(SyncError::CleanUp)?;
        context.claims.unprepare(uid).await.map_err(SyncError::Unprepare)?;
        context.resources.release(uid).await;
        context.cgroups.remove(uid).await.map_err(SyncError::Cgroup)?;
        context.resizes.remove(uid);
        context.resizes.allocate(uid, None);
        context.retry_resizes();
        self.released.store(true, Ordering::Release);
        Ok(())
    }

    /// Stops everything; a shorter grace period that arrives meanwhile takes effect at once. The readiness of the
    /// containers that still run is published as it changes.
    pub(super) async fn kill_all(&mut self, desired: &Desired) -> Result<(), SyncError> {
        let (context, local) = (self.context.clone(), self.local);
        let mut current = desired.clone();
        let mut hooks = Hooks::Run;
        loop {
            let limit = ending::limit(&current, self.ordered.borrow().as_ref(), local);
            let pod: Arc<Pod> = current.pod().clone();
            let runtime = self.observe().await?;
            let mut kill = Box::pin(context.kill_pod(&pod, &runtime, limit, hooks));
            let mut signal = self.end_signal();
            let mut seen = self.probes.results();
            loop {
                let wake = self.wake.clone();
                tokio::select! {
                    killed = &mut kill => return Ok(killed?),
                    sooner = signal.sooner(limit, local) => {
                        current = sooner.ok_or(SyncError::Interrupted)?;
                        hooks = Hooks::Skip;
                        break;
                    }
                    () = wake.notified() => {}
                }
                // A runtime that does not answer now is asked again at the end.
                let Ok(now) = self.observe().await else { continue };
                self.probes.keep_running(&now);
                let results = self.probes.results();
                if results != seen && matches!(current, Desired::Present(_)) {
                    seen = results;
                    self.publish(&pod, &now, true, false);
                }
            }
        }
    }

    pub(super) async fn until_gone_or(&self, other: impl Future<Output = ()>) {
        let mut desired = self.desired.clone();
        tokio::select! {
            () = other => {}
            _ = desired.wait_for(|d| matches!(d, Desired::Gone(_))) => {}
        }
    }

    /// Deletes the pod with no grace left, so that its name is free. Another pod of that name is left alone.
    async fn delete_from_api(&self) {
        let api = Api::<Pod>::namespaced(self.context.client.clone(), &self.id.namespace);
        let preconditions = Preconditions { uid: Some(self.id.uid.clone()), resource_version: None };
        let params = DeleteParams::default().grace_period(0).preconditions(preconditions);
        let mut backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10), 0.2);
        let delete = async {
            loop {
                match api.delete(&self.id.name, &params).await {
                    Ok(_) => return,
                    Err(e) if is_not_found(&e) || is_conflict(&e) => return,
                    Err(e) => {
                        tracing::warn!(pod = %self.id, error = %message_of(&e), "could not delete the pod; will try again");
                        tokio::time::sleep(backoff.next_delay()).await;
                    }
                }
            }
        };
        self.until_gone_or(delete).await;
    }
}

/// Removes a pod's log directory. A pod with a hostPath volume may have put anything there.
pub(super) async fn remove_logs(path: std::path::PathBuf) -> std::io::Result<()> {
    let removed = tokio::task::spawn_blocking(move || ferrite_hostfs::remove_tree(&path)).await;
    removed.unwrap_or_else(|e| Err(std::io::Error::other(e)))
}

fn ignore_missing<T>(result: ferrite_cri::Result<T>) -> Result<(), SyncError> {
    match result {
        Err(e) if !e.is_not_found() => Err(e.into()),
        _ => Ok(()),
    }
}

/// A pod of which only the runtime knows: enough to stop it.
pub(crate) fn from_labels(namespace: &str, name: &str, uid: &str, grace: Option<i64>) -> Pod {
    let mut pod = Pod::default();
    pod.metadata.namespace = Some(namespace.to_string());
    pod.metadata.name = Some(name.to_string());
    pod.metadata.uid = Some(uid.to_string());
    pod.spec = Some(k8s_openapi::api::core::v1::PodSpec {
        termination_grace_period_seconds: grace,
        ..model::spec(&pod).clone()
    });
    pod
}
