//! Spreads matching pods over zones, hosts or any other labelled domain.

use std::collections::HashMap;
use std::sync::Arc;

use kube::core::{Expression, Selector, SelectorExt};

use super::node_affinity::matches_required;
use super::taint_toleration::tolerates;
use crate::framework::{
    ClusterEvent, CycleState, Filter, Interest, MAX_SCORE, Plugin, PreFilter, PreFiltered, PreScore,
    Rejection, Score,
};
use crate::snapshot::{HOSTNAME, NodeInfo, PodInfo, Snapshot, ZONE};

pub(super) struct PodTopologySpread;

#[derive(Clone)]
struct Constraint {
    key: String,
    max_skew: i64,
    min_domains: usize,
    selector: Selector,
    honour_affinity: bool,
    honour_taints: bool,
}

impl Constraint {
    fn counts(&self, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let counted = node.pods.iter().filter(|present| {
            present.key.namespace == pod.key.namespace
                && !present.is_terminating()
                && self.selector.matches(present.labels())
        });
        i64::try_from(counted.count()).unwrap_or(i64::MAX)
    }

    /// Whether pods on the node count, by the constraint's policies.
    fn includes(&self, pod: &PodInfo, node: &NodeInfo) -> bool {
        (!self.honour_affinity || matches_required(pod, &node.node))
            && (!self.honour_taints
                || node
                    .node
                    .spec
                    .iter()
                    .flat_map(|spec| spec.taints.iter().flatten())
                    .all(|taint| taint.effect == "PreferNoSchedule" || tolerates(pod.tolerations(), taint)))
    }
}

fn constraints(pod: &PodInfo, when: &str) -> Vec<Constraint> {
    pod.placement
        .topology_spread_constraints
        .iter()
        .filter(|constraint| constraint.when_unsatisfiable == when)
        .filter_map(|constraint| {
            let mut selector: Selector = constraint.label_selector.clone()?.try_into().ok()?;
            for key in constraint.match_label_keys.iter().flatten() {
                if let Some(value) = pod.labels().get(key) {
                    selector.extend([Expression::Equal(key.clone(), value.clone())]);
                }
            }
            Some(Constraint {
                key: constraint.topology_key.clone(),
                max_skew: constraint.max_skew.into(),
                min_domains: usize::try_from(constraint.min_domains.unwrap_or(1)).unwrap_or(1),
                selector,
                honour_affinity: constraint.node_affinity_policy.as_deref() != Some("Ignore"),
                honour_taints: constraint.node_taints_policy.as_deref() == Some("Honor"),
            })
        })
        .collect()
}

/// What upstream spreads by when a pod has no constraints of its own: hosts, and less strictly zones.
fn default_constraints(pod: &PodInfo) -> Vec<Constraint> {
    let has_own = !pod.placement.topology_spread_constraints.is_empty();
    let Some(selector) = pod.siblings.as_ref().filter(|_| !has_own) else { return Vec::new() };
    let constraint = |key: &str, max_skew| Constraint {
        key: key.to_owned(),
        max_skew,
        min_domains: 1,
        selector: selector.clone(),
        honour_affinity: true,
        honour_taints: false,
    };
    vec![constraint(HOSTNAME, 3), constraint(ZONE, 5)]
}

/// Matching pods per value of the topology label.
type Domains = HashMap<String, i64>;

#[derive(Clone)]
struct Required(Vec<(Constraint, Domains)>);

#[derive(Clone)]
struct Preferred(Vec<(Constraint, Domains, f64)>);

impl Plugin for PodTopologySpread {
    fn name(&self) -> &'static str {
        "PodTopologySpread"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        match event {
            ClusterEvent::AssignedPodAdded(other) | ClusterEvent::AssignedPodDeleted(other) => {
                other.key.namespace == pod.key.namespace
                    && constraints(pod, "DoNotSchedule").iter().any(|c| c.selector.matches(other.labels()))
            }
            _ => true,
        }
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        Some(self)
    }

    fn filter(&self) -> Option<&dyn Filter> {
        Some(self)
    }

    fn pre_score(&self) -> Option<&dyn PreScore> {
        Some(self)
    }

    fn score(&self) -> Option<&dyn Score> {
        Some(self)
    }
}

/// Counts one matching pod more or less on a node that counts.
fn recount(state: &mut CycleState, pod: &PodInfo, other: &PodInfo, node: &NodeInfo, change: i64) {
    let Some(Required(counted)) = state.get::<Required>() else { return };
    let is_counted = other.key.namespace == pod.key.namespace
        && !other.is_terminating()
        && counted.iter().all(|(constraint, _)| node.labels().contains_key(&constraint.key));
    if !is_counted {
        return;
    }
    let Some(Required(counted)) = state.get_mut::<Required>() else { return };
    for (constraint, domains) in counted {
        if constraint.includes(pod, node)
            && constraint.selector.matches(other.labels())
            && let Some(count) = node.labels().get(&constraint.key).and_then(|value| domains.get_mut(value))
        {
            *count += change;
        }
    }
}

impl PreFilter for PodTopologySpread {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection> {
        let constraints = constraints(pod, "DoNotSchedule");
        if constraints.is_empty() {
            return Ok(PreFiltered::Skip);
        }
        let keys: Vec<String> = constraints.iter().map(|constraint| constraint.key.clone()).collect();
        let mut counted: Vec<_> =
            constraints.into_iter().map(|constraint| (constraint, Domains::new())).collect();
        for node in snapshot.nodes() {
            // A node outside one of the topologies is outside all of them.
            if !keys.iter().all(|key| node.labels().contains_key(key)) {
                continue;
            }
            for (constraint, domains) in &mut counted {
                if constraint.includes(pod, node) {
                    let value = node.labels()[&constraint.key].clone();
                    *domains.entry(value).or_default() += constraint.counts(pod, node);
                }
            }
        }
        state.put(Required(counted));
        Ok(PreFiltered::Needed)
    }

    fn add_pod(&self, state: &mut CycleState, pod: &PodInfo, added: &PodInfo, node: &NodeInfo) {
        recount(state, pod, added, node, 1);
    }

    fn remove_pod(&self, state: &mut CycleState, pod: &PodInfo, removed: &PodInfo, node: &NodeInfo) {
        recount(state, pod, removed, node, -1);
    }
}

impl Filter for PodTopologySpread {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(Required(counted)) = state.get::<Required>() else { return Ok(()) };
        for (constraint, domains) in counted {
            let Some(value) = node.labels().get(&constraint.key) else {
                return Err(Rejection::unresolvable(
                    "node(s) didn't match pod topology spread constraints (missing required label)",
                ));
            };
            let least = if domains.len() < constraint.min_domains {
                0
            } else {
                domains.values().min().copied().unwrap_or(0)
            };
            let own = i64::from(constraint.selector.matches(pod.labels()));
            let present = domains.get(value).copied().unwrap_or(0);
            if present + own - least > constraint.max_skew {
                return Err(Rejection::unschedulable("node(s) didn't match pod topology spread constraints"));
            }
        }
        Ok(())
    }
}

impl PreScore for PodTopologySpread {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
        feasible: &[Arc<NodeInfo>],
    ) -> Interest {
        let mut constraints = constraints(pod, "ScheduleAnyway");
        constraints.extend(default_constraints(pod));
        if constraints.is_empty() {
            return Interest::Skip;
        }
        let mut counted = Vec::new();
        for constraint in constraints {
            let mut domains: Domains = feasible
                .iter()
                .filter_map(|node| node.labels().get(&constraint.key))
                .map(|value| (value.clone(), 0))
                .collect();
            if domains.is_empty() {
                continue;
            }
            for node in snapshot.nodes() {
                if let Some(count) =
                    node.labels().get(&constraint.key).and_then(|value| domains.get_mut(value))
                    && constraint.includes(pod, node)
                {
                    *count += constraint.counts(pod, node);
                }
            }
            // Few large domains must not outweigh many small ones.
            let weight = ((domains.len() + 2) as f64).ln();
            counted.push((constraint, domains, weight));
        }
        if counted.is_empty() {
            return Interest::Skip;
        }
        state.put(Preferred(counted));
        Interest::Needed
    }
}

impl Score for PodTopologySpread {
    fn score(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(Preferred(counted)) = state.get::<Preferred>() else { return 0 };
        let mut score = 0.0;
        for (constraint, domains, weight) in counted {
            if let Some(count) = node.labels().get(&constraint.key).and_then(|value| domains.get(value)) {
                score += *count as f64 * weight + (constraint.max_skew - 1) as f64;
            }
        }
        score.round() as i64
    }

    /// Fewer is better.
    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _nodes: &[Arc<NodeInfo>], scores: &mut [i64]) {
        let most = scores.iter().max().copied().unwrap_or(0);
        let least = scores.iter().min().copied().unwrap_or(0);
        for score in scores {
            *score = if most == 0 { MAX_SCORE } else { MAX_SCORE * (most + least - *score) / most };
        }
    }
}
