//! Makes room for a pod by removing pods of lower priority.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_api::field::{FieldError, Path};
use futures_util::future::BoxFuture;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use serde::Deserialize;

use crate::cycle::histogram;
use crate::extender::preempt_all;
use crate::framework::{
    ClusterEvent, FailedSearch, Handle, Nomination, Plugin, PluginArgs, PluginArgsError, PluginError,
    PostFilter, PostFiltered, Reason, Store,
};
use crate::memory::Memory;
use crate::preemption::{Budget, Trial, Wanted, candidates_wanted, dry_run, select_candidate};
use crate::snapshot::PodInfo;

const NAME: &str = "DefaultPreemption";

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Args {
    min_candidate_nodes_percentage: i32,
    min_candidate_nodes_absolute: i32,
}

impl Default for Args {
    fn default() -> Self {
        Self { min_candidate_nodes_percentage: 10, min_candidate_nodes_absolute: 100 }
    }
}

impl Args {
    fn validate(&self, path: &Path) -> Vec<FieldError> {
        let (percentage, absolute) = (self.min_candidate_nodes_percentage, self.min_candidate_nodes_absolute);
        let percentage_path = path.child("minCandidateNodesPercentage");
        let absolute_path = path.child("minCandidateNodesAbsolute");
        let mut errors = Vec::new();
        if !(0..=100).contains(&percentage) {
            errors.push(FieldError::invalid(&percentage_path, percentage, "not in valid range [0, 100]"));
        }
        if absolute < 0 {
            errors.push(FieldError::invalid(&absolute_path, absolute, "not in valid range [0, inf)"));
        }
        if percentage == 0 && absolute == 0 {
            let problem = |other: &str| format!("cannot be zero at the same time as {other}");
            let other = problem("minCandidateNodesAbsolute");
            errors.push(FieldError::invalid(&percentage_path, percentage, other));
            let other = problem("minCandidateNodesPercentage");
            errors.push(FieldError::invalid(&absolute_path, absolute, other));
        }
        errors
    }

    fn wanted(self, nodes: usize) -> usize {
        let number = |value: i32| usize::try_from(value).unwrap_or(0);
        candidates_wanted(
            nodes,
            number(self.min_candidate_nodes_percentage),
            number(self.min_candidate_nodes_absolute),
        )
    }
}

struct DefaultPreemption {
    args: Args,
    budgets: Store<PodDisruptionBudget>,
    trials: Mutex<Memory<Trial>>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Result<Arc<dyn Plugin>, PluginArgsError> {
    let args = args.decode_valid(Args::validate)?;
    Ok(Arc::new(DefaultPreemption { args, budgets: handle.store(), trials: Mutex::default() }))
}

impl Plugin for DefaultPreemption {
    fn name(&self) -> &'static str {
        NAME
    }

    /// The plugins that rejected the pod decide: preemption itself rejects none.
    fn queueing_hint(&self, _pod: &PodInfo, _event: &ClusterEvent) -> bool {
        false
    }

    fn post_filter(&self) -> Option<&dyn PostFilter> {
        Some(self)
    }
}

/// The reason why the pod may not preempt others, if there is one.
fn ineligible(search: FailedSearch<'_>) -> Option<&'static str> {
    let FailedSearch { pod, snapshot, diagnosis, .. } = search;
    if pod.placement.preemption_policy.as_deref() == Some("Never") {
        return Some("not eligible due to preemptionPolicy=Never.");
    }
    let position = snapshot.nominated_position(pod)?;
    // A node that removing pods cannot make fit is none to wait for.
    if diagnosis.get(position).is_some_and(|rejection| !rejection.is_resolvable()) {
        return None;
    }
    let leaves = |present: &Arc<PodInfo>| present.priority < pod.priority && present.is_preempted();
    let is_leaving = snapshot.nodes()[position].pods.iter().any(leaves);
    is_leaving.then_some("not eligible due to a terminating pod on the nominated node.")
}

impl DefaultPreemption {
    async fn preempt(&self, search: FailedSearch<'_>) -> Result<PostFiltered, PluginError> {
        let message = |text: &str| format!("preemption: {text}");
        if let Some(reason) = ineligible(search) {
            return Ok(PostFiltered { message: message(reason), ..PostFiltered::default() });
        }
        let count = search.snapshot.nodes().len();
        let positions = search.diagnosis.resolvable(count);
        let budgets: Vec<Budget> = if positions.is_empty() {
            Vec::new()
        } else {
            self.budgets.list().iter().filter_map(|pdb| Budget::new(pdb)).collect()
        };
        // A random start spreads preemption over a cluster that is not searched completely.
        let offset = if positions.is_empty() { 0 } else { rand::random_range(0..positions.len()) };
        let enough = self.args.wanted(positions.len());
        // Extenders may take candidates away.
        let wanted = if search.extenders.is_empty() { Wanted::Best } else { Wanted::All };
        let (candidates, rejections) = {
            let mut trials = self.trials.lock().unwrap_or_else(PoisonError::into_inner);
            dry_run(search, &positions, &budgets, offset, enough, wanted, &mut trials)
        };
        if candidates.is_empty() {
            let mut reasons: BTreeMap<Reason, usize> = BTreeMap::new();
            for reason in rejections.iter().flat_map(|rejection| rejection.reasons()) {
                *reasons.entry(reason.clone()).or_default() += 1;
            }
            if rejections.len() < count {
                let not_helpful = Reason::from("Preemption is not helpful for scheduling");
                *reasons.entry(not_helpful).or_default() += count - rejections.len();
            }
            let text = format!("0/{count} nodes are available:{}", histogram(&reasons));
            return Ok(PostFiltered {
                nomination: Nomination::Clear,
                message: message(&text),
                ..PostFiltered::default()
            });
        }
        let candidates = preempt_all(search.extenders, search.pod, candidates, search.snapshot)
            .await
            .map_err(|error| PluginError::new("PostFilter", NAME, message(&error.to_string())))?;
        match select_candidate(candidates) {
            Some(best) => Ok(PostFiltered {
                nomination: Nomination::Node(best.node.clone()),
                victims: best.victims.clone(),
                ..PostFiltered::default()
            }),
            None => Ok(PostFiltered {
                message: message("no candidate node for preemption"),
                ..PostFiltered::default()
            }),
        }
    }
}

impl PostFilter for DefaultPreemption {
    fn post_filter<'a>(
        &'a self,
        search: FailedSearch<'a>,
    ) -> BoxFuture<'a, Result<PostFiltered, PluginError>> {
        crate::measures::preemption_attempt();
        Box::pin(self.preempt(search))
    }
}
