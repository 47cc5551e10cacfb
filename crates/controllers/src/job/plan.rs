//! The pods that a Job creates and deletes.

use std::cmp::{Ordering, Reverse};
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::controller_reference;
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource, ObjectFieldSelector, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::assess::{Assessment, index_failures, next_index_failures};
use super::backoff::{self, finished_at};
use super::{COMPLETION_INDEX, FINALIZER, INDEX_FAILURES, INDEX_IGNORED_FAILURES, completion_index};
use crate::pods::{is_finished, is_ready, is_terminating, node_name, phase, ready_since};

/// Pods created or deleted in one sync at most.
pub(super) const BURST: usize = 500;
const INDEX_VARIABLE: &str = "JOB_COMPLETION_INDEX";
/// The longest prefix that leaves room for a generated suffix in a name of 63 characters.
const PREFIX_MAX: usize = 58;

/// What to do about the number of pods.
#[derive(Debug)]
pub(super) enum Plan {
    Nothing,
    /// Failed pods are replaced after this time.
    Wait(Duration),
    Delete(Vec<Arc<Pod>>),
    Create {
        /// One for each pod; none for a pod of a Job without indexes.
        indexes: Vec<Option<usize>>,
        /// Whether more pods are needed than one sync creates.
        more: bool,
    },
}

pub(super) fn plan(assessment: &Assessment<'_>, now: Timestamp) -> Plan {
    let rules = &assessment.rules;
    let active = assessment.active.len();
    if rules.suspended {
        return match active {
            0 => Plan::Nothing,
            _ => Plan::Delete(assessment.active.clone()),
        };
    }
    let parallelism = usize::try_from(rules.parallelism).unwrap_or(0);
    let wanted = match rules.completions {
        // After the first success, nothing is started and nothing is stopped.
        None if assessment.succeeded > 0 => active,
        None => parallelism,
        Some(completions) => {
            usize::try_from(completions.saturating_sub(assessment.succeeded)).unwrap_or(0).min(parallelism)
        }
    };
    let mut victims = victims(assessment, active.saturating_sub(wanted));
    if !victims.is_empty() {
        victims.truncate(BURST);
        return Plan::Delete(victims);
    }
    let held = if rules.only_replaces_failed { assessment.terminating } else { 0 };
    let missing = wanted.saturating_sub(held + active);
    if missing == 0 {
        return Plan::Nothing;
    }
    if rules.spec.backoff_limit_per_index.is_none() {
        let delay = assessment.backoff.remaining(now);
        if !delay.is_zero() {
            return Plan::Wait(delay);
        }
    }
    let count = missing.min(BURST);
    let more = missing > count;
    if !rules.indexed {
        return Plan::Create { indexes: vec![None; count], more };
    }
    match ready_indexes(assessment, count, now) {
        Ok(indexes) if indexes.is_empty() => Plan::Nothing,
        Ok(indexes) => Plan::Create { indexes: indexes.into_iter().map(Some).collect(), more },
        Err(delay) => Plan::Wait(delay),
    }
}

/// The first indexes that need a pod and do not wait; if all wait, the time until the first does not.
fn ready_indexes(assessment: &Assessment<'_>, count: usize, now: Timestamp) -> Result<Vec<usize>, Duration> {
    let rules = &assessment.rules;
    let mut taken =
        assessment.succeeded_indexes.with(assessment.active.iter().filter_map(|pod| completion_index(pod)));
    if rules.only_replaces_failed {
        let terminating = assessment.pods.iter().filter(|pod| is_terminating(pod) && !is_finished(pod));
        taken = taken.with(terminating.filter_map(|pod| completion_index(pod)));
    }
    if let Some(failed) = &assessment.failed_indexes {
        taken = taken.merge(failed);
    }
    let missing = taken.missing(count, rules.index_count());
    if rules.spec.backoff_limit_per_index.is_none() {
        return Ok(missing);
    }
    let delay = |index: &usize| {
        assessment.to_be_replaced.get(index).map_or(Duration::ZERO, |pod| {
            backoff::remaining(index_failures(pod).saturating_add(1), finished_at(pod), now)
        })
    };
    let shortest = missing.iter().map(delay).min().unwrap_or_default();
    let ready: Vec<usize> = missing.into_iter().filter(|index| delay(index).is_zero()).collect();
    if ready.is_empty() && !shortest.is_zero() { Err(shortest) } else { Ok(ready) }
}

/// The active pods to delete: those of no index or of an index that has another pod, and as many as are too many.
fn victims(assessment: &Assessment<'_>, at_least: usize) -> Vec<Arc<Pod>> {
    let mut rest = assessment.active.clone();
    if at_least > 0 || assessment.rules.indexed {
        rest.sort_by(|a, b| deletion_order(a, b));
    }
    let mut victims = Vec::new();
    if assessment.rules.indexed {
        // Of each index the pod stays that comes last in the order.
        let mut kept = std::collections::HashSet::new();
        rest.reverse();
        rest.retain(|pod| {
            let keeps = assessment.rules.index_of(pod).is_some_and(|index| kept.insert(index));
            if !keeps {
                victims.push(pod.clone());
            }
            keeps
        });
        rest.reverse();
    }
    let more = at_least.saturating_sub(victims.len());
    victims.extend(rest.into_iter().take(more));
    victims
}

/// `Less` if `a` should go before `b`: unassigned, pending, not ready, shorter ready, restarted more often, younger.
fn deletion_order(a: &Pod, b: &Pod) -> Ordering {
    let phase_rank = |pod: &Pod| match phase(pod) {
        "Pending" => 0,
        "Unknown" => 1,
        _ => 2,
    };
    // A pod without the time goes first.
    let latest_first = |time: Option<Timestamp>| (time.is_some(), Reverse(time));
    let restarts = |pod: &Pod| {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        statuses.map(|status| status.restart_count).max().unwrap_or(0)
    };
    let created = |pod: &Pod| pod.metadata.creation_timestamp.as_ref().map(|time| time.0);
    node_name(a)
        .is_some()
        .cmp(&node_name(b).is_some())
        .then_with(|| phase_rank(a).cmp(&phase_rank(b)))
        .then_with(|| is_ready(a).cmp(&is_ready(b)))
        .then_with(|| match is_ready(a) {
            true => latest_first(ready_since(a)).cmp(&latest_first(ready_since(b))),
            false => Ordering::Equal,
        })
        .then_with(|| restarts(b).cmp(&restarts(a)))
        .then_with(|| latest_first(created(a)).cmp(&latest_first(created(b))))
}

/// The pod that every pod of the Job is made from.
pub(super) fn template_pod(job: &Job, assessment: &Assessment<'_>) -> Pod {
    let template = assessment.rules.spec.template.clone();
    let meta = template.metadata.unwrap_or_default();
    let mut finalizers = meta.finalizers.unwrap_or_default();
    if !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
        finalizers.push(FINALIZER.to_owned());
    }
    let mut spec = template.spec.unwrap_or_default();
    if assessment.rules.indexed {
        spec.init_containers.iter_mut().flatten().chain(&mut spec.containers).for_each(add_index_variable);
    }
    Pod {
        metadata: ObjectMeta {
            generate_name: Some(format!("{}-", job.metadata.name.as_deref().unwrap_or_default())),
            namespace: job.metadata.namespace.clone(),
            labels: meta.labels,
            annotations: meta.annotations,
            finalizers: Some(finalizers),
            owner_references: Some(vec![controller_reference(job)]),
            ..ObjectMeta::default()
        },
        spec: Some(spec),
        status: None,
    }
}

fn add_index_variable(container: &mut Container) {
    let variables = container.env.get_or_insert_default();
    if variables.iter().any(|variable| variable.name == INDEX_VARIABLE) {
        return;
    }
    let field = ObjectFieldSelector {
        api_version: None,
        field_path: format!("metadata.labels['{COMPLETION_INDEX}']"),
    };
    variables.push(EnvVar {
        name: INDEX_VARIABLE.to_owned(),
        value: None,
        value_from: Some(EnvVarSource { field_ref: Some(field), ..EnvVarSource::default() }),
    });
}

/// The pod of one index, from [`template_pod`].
pub(super) fn indexed_pod(job: &Job, assessment: &Assessment<'_>, template: &Pod, index: usize) -> Pod {
    let mut pod = template.clone();
    let name = job.metadata.name.as_deref().unwrap_or_default();
    pod.metadata.generate_name = Some(generate_name(name, index));
    let annotations = pod.metadata.annotations.get_or_insert_default();
    annotations.insert(COMPLETION_INDEX.to_owned(), index.to_string());
    if assessment.rules.spec.backoff_limit_per_index.is_some() {
        let replaced = assessment.to_be_replaced.get(&index).map(|pod| &**pod);
        let (counted, ignored) = next_index_failures(&assessment.rules, replaced);
        annotations.insert(INDEX_FAILURES.to_owned(), counted.to_string());
        if ignored > 0 {
            annotations.insert(INDEX_IGNORED_FAILURES.to_owned(), ignored.to_string());
        }
    }
    pod.metadata.labels.get_or_insert_default().insert(COMPLETION_INDEX.to_owned(), index.to_string());
    pod.spec.get_or_insert_default().hostname = Some(format!("{name}-{index}"));
    pod
}

fn generate_name(job: &str, index: usize) -> String {
    let suffix = format!("-{index}-");
    let room = PREFIX_MAX.saturating_sub(suffix.len());
    // Names are ASCII.
    format!("{}{suffix}", job.get(..room).unwrap_or(job))
}

#[cfg(test)]
mod tests {
    #[test]
    fn long_names_are_cut_before_the_index() {
        assert_eq!(super::generate_name("pi", 7), "pi-7-");
        let long = "x".repeat(63);
        let prefix = super::generate_name(&long, 123);
        assert_eq!((prefix.len(), prefix.ends_with("x-123-")), (58, true));
    }
}
