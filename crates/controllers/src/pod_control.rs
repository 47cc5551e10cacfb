//! Creates and deletes the pods of an owner, and reports both as events of the owner, as upstream's RealPodControl.

use ferrite_client::{
    Api, EventRecorder, EventType, controller_reference, is_namespace_terminating, is_not_found, message_of,
};
use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::{Pod, PodTemplateSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::api::{DeleteParams, PostParams, Preconditions};

/// A pod of `owner` with a generated name.
pub(crate) fn pod_from_template<O: Resource<DynamicType = ()>>(owner: &O, template: PodTemplateSpec) -> Pod {
    let meta = template.metadata.unwrap_or_default();
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", owner.meta().name.as_deref().unwrap_or_default())),
            namespace: owner.meta().namespace.clone(),
            labels: meta.labels,
            annotations: meta.annotations,
            finalizers: meta.finalizers,
            owner_references: Some(vec![controller_reference(owner)]),
            ..ObjectMeta::default()
        },
        spec: template.spec,
        status: None,
    }
}

/// Sizes of the batches in which `count` pods are created: doubling, so that a create that always fails (a quota, a
/// webhook) costs few calls.
pub(crate) fn slow_start(count: usize) -> impl Iterator<Item = usize> {
    let mut left = count;
    let mut size = 1;
    std::iter::from_fn(move || {
        let batch = size.min(left);
        left -= batch;
        size *= 2;
        (batch > 0).then_some(batch)
    })
}

/// Writes of one sync that are under way at once. The server serves 200 of all clients and turns further ones away.
const WRITES_AT_ONCE: usize = 50;

/// Runs `writes`, a bounded number at a time, and returns their results in order.
pub(crate) async fn in_parallel<F: Future>(writes: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    // Collected, because a lazy iterator would have to be sent between threads with all that it borrows.
    let writes: Vec<F> = writes.into_iter().collect();
    stream::iter(writes).buffered(WRITES_AT_ONCE).collect().await
}

/// Creates `pod`, which is not an error to report if its namespace is being deleted.
pub(crate) async fn create<O: Resource<DynamicType = ()>>(
    api: &Api<Pod>,
    recorder: &EventRecorder,
    owner: &O,
    pod: &Pod,
) -> Result<(), kube::Error> {
    match api.create(&PostParams::default(), pod).await {
        Ok(created) => {
            let message = format!("Created pod: {}", created.metadata.name.unwrap_or_default());
            recorder.event_for(owner, EventType::Normal, "SuccessfulCreate", message);
            Ok(())
        }
        Err(error) => {
            if !is_namespace_terminating(&error) {
                let message = format!("Error creating: {}", message_of(&error));
                recorder.event_for(owner, EventType::Warning, "FailedCreate", message);
            }
            Err(error)
        }
    }
}

/// Deletes this pod and no successor of the same name. A pod that is gone already is reported as not found, without an
/// event.
pub(crate) async fn delete<O: Resource<DynamicType = ()>>(
    api: &Api<Pod>,
    recorder: &EventRecorder,
    owner: &O,
    pod: &Pod,
) -> Result<(), kube::Error> {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let same = Preconditions { uid: pod.metadata.uid.clone(), resource_version: None };
    match api.delete(name, &DeleteParams::default().preconditions(same)).await {
        Ok(()) => {
            let message = format!("Deleted pod: {name}");
            recorder.event_for(owner, EventType::Normal, "SuccessfulDelete", message);
            Ok(())
        }
        Err(error) => {
            if !is_not_found(&error) {
                let message = format!("Error deleting: {}", message_of(&error));
                recorder.event_for(owner, EventType::Warning, "FailedDelete", message);
            }
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_double() {
        assert_eq!(slow_start(10).collect::<Vec<_>>(), [1, 2, 4, 3]);
        assert_eq!(slow_start(0).count(), 0);
    }
}
