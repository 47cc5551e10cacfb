//! Spreads matching pods over zones, hosts or any other labelled domain.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation;
use k8s_openapi::api::core::v1::{Node, TopologySpreadConstraint};
use kube::core::{Expression, Selector, SelectorExt};
use serde::Deserialize;

use super::node_affinity::matches_required;
use super::taint_toleration::tolerates;
use crate::columns::{ByShape, Column};
use crate::framework::{
    ClusterEvent, CycleState, Filter, Handle, Interest, MAX_SCORE, Made, Plugin, PluginArgs, PreFilter,
    PreFiltered, PreScore, Rejection, Score,
};
use crate::memory::Memory;
use crate::snapshot::{HOSTNAME, NodeInfo, PodInfo, Snapshot, ZONE};

const HARD: &str = "DoNotSchedule";
const SOFT: &str = "ScheduleAnyway";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Args {
    /// Constraints of pods that have none. Their selector is made from the pod's Services and owner.
    default_constraints: Vec<TopologySpreadConstraint>,
    defaulting_type: String,
}

impl Default for Args {
    fn default() -> Self {
        Self { default_constraints: Vec::new(), defaulting_type: "System".to_owned() }
    }
}

impl Args {
    fn validate(&self, path: &Path) -> Vec<FieldError> {
        let mut errors = Vec::new();
        let kind = self.defaulting_type.as_str();
        if !matches!(kind, "System" | "List") {
            errors.push(FieldError::not_supported(&path.child("defaultingType"), kind, &["System", "List"]));
        }
        if kind == "System" && !self.default_constraints.is_empty() {
            let problem = "when .defaultConstraints are not empty";
            errors.push(FieldError::invalid(&path.child("defaultingType"), kind, problem));
        }
        for (index, constraint) in self.default_constraints.iter().enumerate() {
            let path = path.child("defaultConstraints").index(index);
            if constraint.max_skew <= 0 {
                let problem = "not in valid range (0, inf)";
                errors.push(FieldError::invalid(&path.child("maxSkew"), constraint.max_skew, problem));
            }
            let (key, key_path) = (constraint.topology_key.as_str(), path.child("topologyKey"));
            if key.is_empty() {
                errors.push(FieldError::required(&key_path, "can not be empty"));
            } else {
                let problems = meta_validation::qualified_name(key).into_iter();
                errors.extend(problems.map(|problem| FieldError::invalid(&key_path, key, problem)));
            }
            let (when, when_path) = (constraint.when_unsatisfiable.as_str(), path.child("whenUnsatisfiable"));
            match when {
                HARD | SOFT => {}
                "" => errors.push(FieldError::required(&when_path, "can not be empty")),
                _ => errors.push(FieldError::not_supported(&when_path, when, &[HARD, SOFT])),
            }
            if constraint.label_selector.is_some() {
                let problem = "constraint must not define a selector, as they deduced for each pod";
                errors.push(FieldError::forbidden(&path.child("labelSelector"), problem));
            }
            let is_same = |other: &TopologySpreadConstraint| {
                (&other.topology_key, &other.when_unsatisfiable)
                    == (&constraint.topology_key, &constraint.when_unsatisfiable)
            };
            if self.default_constraints[..index].iter().any(is_same) {
                errors.push(FieldError::duplicate(&path, format!("{{{key}, {when}}}")));
            }
        }
        errors
    }
}

struct PodTopologySpread {
    /// For pods without constraints of their own.
    defaults: Vec<TopologySpreadConstraint>,
    /// The defaults are the system's: nodes outside some of the topologies count, too.
    is_system_defaulted: bool,
    /// The counts of pods on nodes that have not changed since.
    counts: Mutex<Memory<Counts>>,
}

/// Constraints of a pod whose counts are remembered. Pods have one or two.
const REMEMBERED: usize = 4;

/// The matching pods on one node, for each constraint of a pod; none where the node does not count.
type Counts = [Option<u32>; REMEMBERED];

pub(super) fn new(args: &PluginArgs, _: &Handle) -> Made {
    let args = args.decode_valid(Args::validate)?;
    let is_system_defaulted = args.defaulting_type == "System";
    let system = |key: &str, max_skew| TopologySpreadConstraint {
        topology_key: key.to_owned(),
        max_skew,
        when_unsatisfiable: SOFT.to_owned(),
        ..TopologySpreadConstraint::default()
    };
    let defaults = if is_system_defaulted {
        vec![system(HOSTNAME, 3), system(ZONE, 5)]
    } else {
        args.default_constraints
    };
    Ok(Arc::new(PodTopologySpread { defaults, is_system_defaulted, counts: Mutex::default() }))
}

struct Constraint {
    key: String,
    max_skew: i64,
    min_domains: usize,
    selector: Selector,
    honour_affinity: bool,
    honour_taints: bool,
}

impl Constraint {
    fn new(constraint: &TopologySpreadConstraint, selector: Selector) -> Self {
        Self {
            key: constraint.topology_key.clone(),
            max_skew: constraint.max_skew.into(),
            min_domains: usize::try_from(constraint.min_domains.unwrap_or(1)).unwrap_or(1),
            selector,
            honour_affinity: constraint.node_affinity_policy.as_deref() != Some("Ignore"),
            honour_taints: constraint.node_taints_policy.as_deref() == Some("Honor"),
        }
    }

    fn matches(&self, pod: &PodInfo, other: &PodInfo) -> bool {
        other.key.namespace == pod.key.namespace
            && !other.is_terminating()
            && self.selector.matches(other.labels())
    }

    /// True if the constraint counts pods like `other` that are not being deleted. As upstream: a selector that selects
    /// everything counts nothing.
    fn is_about(&self, pod: &PodInfo, other: &PodInfo) -> bool {
        other.key.namespace == pod.key.namespace
            && !self.selector.selects_all()
            && self.selector.matches(other.labels())
    }

    /// Matching pods on the node. As upstream: a selector that selects everything counts nothing.
    fn counts(&self, pod: &PodInfo, node: &NodeInfo) -> i64 {
        if self.selector.selects_all() {
            return 0;
        }
        let counted = node.pods.iter().filter(|present| self.matches(pod, present)).count();
        i64::try_from(counted).unwrap_or(i64::MAX)
    }

    /// True if pods on the node count, by the constraint's policies.
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

/// Selects no pod: no value is in an empty list.
fn nothing() -> Selector {
    [Expression::In(String::new(), Default::default())].into_iter().collect()
}

impl PodTopologySpread {
    /// The pod's constraints, or the defaults if it has none at all.
    fn constraints(&self, pod: &PodInfo, when: &str) -> Vec<Constraint> {
        let own = &pod.placement.topology_spread_constraints;
        if own.is_empty() {
            let Some(siblings) = &pod.siblings else { return Vec::new() };
            let defaults = self.defaults.iter().filter(|constraint| constraint.when_unsatisfiable == when);
            return defaults.map(|constraint| Constraint::new(constraint, siblings.clone())).collect();
        }
        let own = own.iter().filter(|constraint| constraint.when_unsatisfiable == when);
        own.map(|constraint| {
            let selector = constraint.label_selector.clone();
            let mut selector = selector.and_then(|s| s.try_into().ok()).unwrap_or_else(nothing);
            for key in constraint.match_label_keys.iter().flatten() {
                if let Some(value) = pod.labels().get(key) {
                    selector.extend([Expression::Equal(key.clone(), value.clone())]);
                }
            }
            Constraint::new(constraint, selector)
        })
        .collect()
    }
}

/// Matching pods per value of the topology label. Changes for a dry run lie beside the shared counts, so that a copy for
/// each node of a large cluster stays cheap.
#[derive(Clone)]
struct Counted {
    constraint: Arc<Constraint>,
    /// One if the constraint counts the pod itself.
    own: i64,
    domains: Arc<HashMap<String, i64>>,
    changes: Vec<(String, i64)>,
    /// Number of domains with each count; the first is the least.
    histogram: BTreeMap<i64, usize>,
}

impl Counted {
    fn new(constraint: Constraint, domains: HashMap<String, i64>, pod: &PodInfo) -> Self {
        let mut histogram = BTreeMap::new();
        for count in domains.values() {
            *histogram.entry(*count).or_default() += 1;
        }
        let own = i64::from(constraint.selector.matches(pod.labels()));
        let (constraint, domains) = (Arc::new(constraint), Arc::new(domains));
        Self { constraint, own, domains, changes: Vec::new(), histogram }
    }

    fn get(&self, value: &str) -> Option<i64> {
        let base = self.domains.get(value)?;
        let change = self.changes.iter().find(|(changed, _)| changed == value);
        Some(base + change.map_or(0, |(_, change)| *change))
    }

    fn change(&mut self, value: &str, by: i64) {
        let Some(count) = self.get(value) else { return };
        if let Some(domains) = self.histogram.get_mut(&count) {
            *domains -= 1;
            if *domains == 0 {
                self.histogram.remove(&count);
            }
        }
        *self.histogram.entry(count + by).or_default() += 1;
        match self.changes.iter_mut().find(|(changed, _)| changed == value) {
            Some((_, change)) => *change += by,
            None => self.changes.push((value.to_owned(), by)),
        }
    }

    /// The least count of a domain; zero while there are fewer domains than the constraint wants.
    fn least(&self) -> i64 {
        if self.domains.len() < self.constraint.min_domains {
            return 0;
        }
        self.histogram.first_key_value().map_or(0, |(count, _)| *count)
    }
}

#[derive(Clone)]
struct Required(Vec<Counted>);

/// A soft constraint with the counts of its domains, and the weight of a pod in them. Hosts have no counts here: they are
/// counted when they are scored.
struct Preference {
    constraint: Constraint,
    domains: HashMap<String, i64>,
    weight: f64,
}

#[derive(Clone)]
struct Preferred {
    preferences: Arc<Vec<Preference>>,
    /// A node without all the topologies scores nothing.
    needs_all: bool,
}

/// The pods on a node that the constraint of that index counts.
fn counts_of<'a>(
    node: &'a NodeInfo,
    index: usize,
    constraints: &[Constraint],
    pod: &PodInfo,
    counted: &mut ByShape<'a, Vec<bool>>,
) -> i64 {
    let is_about =
        |other: &PodInfo| constraints.iter().map(|c| c.is_about(pod, other)).collect::<Vec<bool>>();
    let counts = node
        .pods
        .iter()
        .filter(|present| !present.is_terminating() && counted.of(present, || is_about(present))[index]);
    i64::try_from(counts.count()).unwrap_or(i64::MAX)
}

fn has_all<'a>(node: &NodeInfo, mut constraints: impl Iterator<Item = &'a Constraint>) -> bool {
    constraints.all(|constraint| node.labels().contains_key(&constraint.key))
}

impl Plugin for PodTopologySpread {
    fn name(&self) -> &'static str {
        "PodTopologySpread"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let concerns = |other: &PodInfo| {
            other.key.namespace == pod.key.namespace
                && self.constraints(pod, HARD).iter().any(|c| c.selector.matches(other.labels()))
        };
        let counts = |constraint: &Constraint, other: &PodInfo| constraint.selector.matches(other.labels());
        let is_within = |node: &Node| {
            let labels = node.metadata.labels.as_ref();
            let has = |key: &String| labels.is_some_and(|labels| labels.contains_key(key));
            self.constraints(pod, HARD).iter().all(|constraint| has(&constraint.key))
        };
        match event {
            ClusterEvent::AssignedPodAdded(other) | ClusterEvent::AssignedPodDeleted(other) => {
                concerns(other)
            }
            ClusterEvent::AssignedPodRelabelled { old, new } => {
                new.key.namespace == pod.key.namespace
                    && self.constraints(pod, HARD).iter().any(|c| counts(c, old) != counts(c, new))
            }
            // The domain with the fewest pods may be gone.
            ClusterEvent::NodeAdded(node) | ClusterEvent::NodeDeleted(node) => is_within(node),
            ClusterEvent::Object(_) => false,
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
    let matters = |counted: &Counted| {
        let constraint = &counted.constraint;
        !constraint.selector.selects_all() && constraint.matches(pod, other) && constraint.includes(pod, node)
    };
    let is_within = has_all(node, counted.iter().map(|counted| &*counted.constraint));
    if !is_within || !counted.iter().any(matters) {
        return;
    }
    let Some(Required(counted)) = state.get_mut::<Required>() else { return };
    for counted in counted.iter_mut().filter(|counted| matters(counted)) {
        if let Some(value) = node.labels().get(&counted.constraint.key) {
            counted.change(value, change);
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
        let constraints = self.constraints(pod, HARD);
        if constraints.is_empty() {
            return Ok(PreFiltered::Skip);
        }
        let columns: Vec<Arc<Column>> = constraints.iter().map(|c| snapshot.column(&c.key)).collect();
        let mut domains: Vec<Vec<Option<i64>>> =
            columns.iter().map(|column| vec![None; column.size()]).collect();
        let mut counted = ByShape::default();
        let mut count = |index: usize, constraint: &Constraint, node| {
            constraint.includes(pod, node).then(|| counts_of(node, index, &constraints, pod, &mut counted))
        };
        // Constraints of the pod itself are a part of its shape; defaults select by its siblings.
        let is_shaped = !pod.placement.topology_spread_constraints.is_empty();
        let mut memory = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let mut remembered =
            (is_shaped && constraints.len() <= REMEMBERED).then(|| memory.of_namespaced(pod));
        for (position, node) in snapshot.nodes().iter().enumerate() {
            // A node outside one of the topologies is outside all of them.
            if columns.iter().any(|column| column.at(position).is_none()) {
                continue;
            }
            let mut add = |index: usize, count: Option<i64>| {
                if let (Some(count), Some(value)) = (count, columns[index].at(position)) {
                    *domains[index][value].get_or_insert(0) += count;
                }
            };
            let Some(remembered) = &mut remembered else {
                for (index, constraint) in constraints.iter().enumerate() {
                    add(index, count(index, constraint, node));
                }
                continue;
            };
            let generation = snapshot.generation(position);
            let counts = match remembered.get(position, generation) {
                Some(counts) => *counts,
                None => {
                    let mut counts = Counts::default();
                    for (index, constraint) in constraints.iter().enumerate() {
                        let count = count(index, constraint, node);
                        counts[index] = count.map(|count| u32::try_from(count).unwrap_or(u32::MAX));
                    }
                    remembered.set(position, generation, counts);
                    counts
                }
            };
            for (index, count) in counts.iter().enumerate().take(constraints.len()) {
                add(index, count.map(i64::from));
            }
        }
        drop(memory);
        let counted = constraints.into_iter().zip(columns.iter().zip(domains));
        let counted = counted.map(|(constraint, (column, counts))| {
            let domains =
                column.values().filter_map(|(value, number)| Some((value.to_owned(), counts[number]?)));
            Counted::new(constraint, domains.collect(), pod)
        });
        state.put(Required(counted.collect()));
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
    fn filter(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(Required(all)) = state.get::<Required>() else { return Ok(()) };
        for counted in all {
            let constraint = &counted.constraint;
            let Some(value) = node.labels().get(&constraint.key) else {
                return Err(Rejection::unresolvable(
                    "node(s) didn't match pod topology spread constraints (missing required label)",
                ));
            };
            if counted.get(value).unwrap_or(0) + counted.own - counted.least() > constraint.max_skew {
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
        let constraints = self.constraints(pod, SOFT);
        if constraints.is_empty() {
            return Interest::Skip;
        }
        let has_own = !pod.placement.topology_spread_constraints.is_empty();
        let needs_all = has_own || !self.is_system_defaulted;
        let counts = |node: &NodeInfo| !needs_all || has_all(node, constraints.iter());
        let counting = feasible.iter().filter(|node| counts(node)).count();
        let mut all_domains: Vec<HashMap<String, i64>> = vec![HashMap::new(); constraints.len()];
        // As upstream: the nodes without the label are a domain of their own. It has a part in the weight of the others.
        let mut unlabelled = vec![false; constraints.len()];
        let mut counted = ByShape::default();
        for (index, (constraint, domains)) in constraints.iter().zip(&mut all_domains).enumerate() {
            if constraint.key == HOSTNAME {
                continue;
            }
            let column = snapshot.column(&constraint.key);
            let mut sums: Vec<Option<i64>> = vec![None; column.size()];
            for node in feasible.iter().filter(|node| counts(node)) {
                let value = node.labels().get(&constraint.key);
                match value.and_then(|value| column.number_of(value)) {
                    Some(value) => sums[value] = Some(0),
                    None => unlabelled[index] = true,
                }
            }
            for (position, node) in snapshot.nodes().iter().enumerate() {
                if let Some(sum) = column.at(position).and_then(|value| sums[value].as_mut())
                    && counts(node)
                    && constraint.includes(pod, node)
                {
                    *sum += counts_of(node, index, &constraints, pod, &mut counted);
                }
            }
            let sums = column.values().filter_map(|(value, number)| Some((value.to_owned(), sums[number]?)));
            *domains = sums.collect();
        }
        let domains = all_domains.into_iter().zip(unlabelled);
        let preferences = constraints.into_iter().zip(domains).map(|(constraint, (domains, unlabelled))| {
            let size = domains.len() + usize::from(unlabelled);
            let size = if constraint.key == HOSTNAME { counting } else { size };
            // Few large domains must not outweigh many small ones.
            Preference { constraint, domains, weight: ((size + 2) as f64).ln() }
        });
        state.put(Preferred { preferences: Arc::new(preferences.collect()), needs_all });
        Interest::Needed
    }
}

impl Preferred {
    fn ignores(&self, node: &NodeInfo) -> bool {
        self.needs_all && !has_all(node, self.preferences.iter().map(|preference| &preference.constraint))
    }
}

impl Score for PodTopologySpread {
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(preferred) = state.get::<Preferred>() else { return 0 };
        if preferred.ignores(node) {
            return 0;
        }
        let mut score = 0.0;
        for Preference { constraint, domains, weight } in preferred.preferences.iter() {
            let Some(value) = node.labels().get(&constraint.key) else { continue };
            let count = if constraint.key == HOSTNAME {
                constraint.counts(pod, node)
            } else {
                domains.get(value).copied().unwrap_or(0)
            };
            score += count as f64 * weight + (constraint.max_skew - 1) as f64;
        }
        score.round() as i64
    }

    /// Fewer is better.
    fn normalize(&self, state: &CycleState, _pod: &PodInfo, nodes: &[Arc<NodeInfo>], scores: &mut [i64]) {
        let Some(preferred) = state.get::<Preferred>() else { return };
        let ignored: Vec<bool> = nodes.iter().map(|node| preferred.ignores(node)).collect();
        let valid = || scores.iter().zip(&ignored).filter(|(_, ignored)| !**ignored).map(|(score, _)| *score);
        let (most, least) = (valid().max().unwrap_or(0), valid().min().unwrap_or(0));
        for (score, ignored) in scores.iter_mut().zip(&ignored) {
            *score = match (ignored, most) {
                (true, _) => 0,
                (false, 0) => MAX_SCORE,
                (false, most) => MAX_SCORE * (most + least - *score) / most,
            };
        }
    }
}

#[cfg(test)]
mod tests;
