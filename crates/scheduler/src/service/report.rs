//! Writes to the API why a pod has no node, and where it is nominated to.

use std::sync::Arc;

use ferrite_client::{Api, EventType, is_conflict, is_not_found, message_of};
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use tracing::warn;

use super::Scheduler;
use crate::framework::Nomination;
use crate::snapshot::PodInfo;

/// An event's note is at most this long.
const LONGEST_NOTE: usize = 1024;

/// The message, cut to the size of an event.
fn note(message: &str) -> String {
    const SUFFIX: &str = " ...";
    if message.len() <= LONGEST_NOTE {
        return message.to_owned();
    }
    let mut end = LONGEST_NOTE - SUFFIX.len();
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}{SUFFIX}", &message[..end])
}

/// The PodScheduled condition to write, unless the pod has it already.
fn condition(current: &Pod, reason: &str, message: &str) -> Option<PodCondition> {
    let conditions = current.status.as_ref().and_then(|status| status.conditions.as_ref());
    let known = conditions.into_iter().flatten().find(|condition| condition.type_ == "PodScheduled");
    let known = known.filter(|known| known.status == "False");
    let is_same = known.is_some_and(|known| {
        known.reason.as_deref() == Some(reason) && known.message.as_deref() == Some(message)
    });
    if is_same {
        return None;
    }
    let since = known.and_then(|known| known.last_transition_time.clone());
    Some(PodCondition {
        type_: "PodScheduled".to_owned(),
        status: "False".to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()),
        last_transition_time: since.or_else(|| Some(Time(jiff::Timestamp::now()))),
        observed_generation: current.metadata.generation,
        ..PodCondition::default()
    })
}

/// The member `nominatedNodeName` to write, unless the pod has it already.
fn nominated_node_name(current: &Pod, nomination: &Nomination) -> Option<Value> {
    let known = current.status.as_ref().and_then(|status| status.nominated_node_name.as_deref());
    let known = known.filter(|name| !name.is_empty());
    match nomination {
        Nomination::Keep => None,
        Nomination::Clear => known.map(|_| Value::Null),
        Nomination::Node(node) => (known != Some(node)).then(|| json!(node)),
    }
}

impl Scheduler {
    fn record_failure(&self, pod: &PodInfo, message: &str) {
        if let Some((_, recorder)) = self.profile_of(pod) {
            let (about, kind) = (pod.reference(), EventType::Warning);
            recorder.event(&about, None, kind, "FailedScheduling", "Scheduling", note(message));
        }
    }

    /// Tells people that a pod gets no node because it is being deleted.
    pub(super) fn report_skipped(&self, pod: &PodInfo) {
        self.record_failure(pod, &format!("skip schedule deleting pod: {}", pod.key));
    }

    /// Tells people, and the pod's status, why it has no node yet.
    pub(super) async fn report(&self, pod: &PodInfo, reason: &str, message: &str, nomination: &Nomination) {
        self.record_failure(pod, message);
        let Some(current) = self.current(pod) else { return };
        let condition = condition(&current, reason, message);
        self.patch(pod, condition, nominated_node_name(&current, nomination)).await;
    }

    /// Writes only the nomination.
    pub(super) async fn write_nomination(&self, pod: &PodInfo, nomination: &Nomination) {
        let Some(current) = self.current(pod) else { return };
        self.patch(pod, None, nominated_node_name(&current, nomination)).await;
    }

    fn current(&self, pod: &PodInfo) -> Option<Arc<Pod>> {
        let current = self.pods.get(&pod.key)?;
        (current.metadata.uid.as_deref() == pod.uid.as_deref()).then_some(current)
    }

    async fn patch(&self, pod: &PodInfo, condition: Option<PodCondition>, nominated: Option<Value>) {
        if condition.is_none() && nominated.is_none() {
            return;
        }
        let mut status = json!({});
        if let Some(condition) = condition {
            status["conditions"] = json!([condition]);
        }
        if let Some(nominated) = nominated {
            status["nominatedNodeName"] = nominated;
        }
        let patch = json!({"metadata": {"uid": pod.uid}, "status": status});
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.key.namespace);
        if let Err(error) =
            api.patch_status_unread(&pod.key.name, &PatchParams::default(), &Patch::Strategic(patch)).await
            && !is_not_found(&error)
            && !is_conflict(&error)
        {
            warn!(pod = %pod.key, error = message_of(&error), "cannot write why the pod has no node");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_at_a_character() {
        assert_eq!(note("short"), "short");
        let long = note(&"é".repeat(600));
        assert!(long.len() <= LONGEST_NOTE && long.ends_with("é ..."), "{}", long.len());
    }
}
