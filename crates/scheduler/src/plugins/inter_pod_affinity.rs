//! Affinity and anti-affinity between pods.

use std::collections::HashMap;
use std::sync::Arc;

use ferrite_api::field::FieldError;
use k8s_openapi::api::core::v1::Namespace;
use serde::Deserialize;

use crate::columns::{ByShape, Column};
use crate::framework::{
    ClusterEvent, CycleState, Filter, Handle, Interest, MAX_SCORE, Made, Plugin, PluginArgs, PreFilter,
    PreFiltered, PreScore, Rejection, Score, Store,
};
use crate::snapshot::{AffinityTerm, Namespaces, NodeInfo, PodInfo, Snapshot};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase", default)]
struct Args {
    /// Weight of another pod's required affinity to this one, when nodes are scored.
    hard_pod_affinity_weight: i32,
    /// Preferences of present pods count for nothing unless the new pod has preferences itself.
    ignore_preferred_terms_of_existing_pods: bool,
}

impl Default for Args {
    fn default() -> Self {
        Self { hard_pod_affinity_weight: 1, ignore_preferred_terms_of_existing_pods: false }
    }
}

struct InterPodAffinity {
    args: Args,
    namespaces: Store<Namespace>,
}

pub(super) fn new(args: &PluginArgs, handle: &Handle) -> Made {
    let args = args.decode_valid(|args: &Args, path| {
        let weight = args.hard_pod_affinity_weight;
        let path = path.child("hardPodAffinityWeight");
        let is_valid = (0..=100).contains(&weight);
        if is_valid {
            vec![]
        } else {
            vec![FieldError::invalid(&path, weight, "not in valid range [0, 100]")]
        }
    })?;
    Ok(Arc::new(InterPodAffinity { args, namespaces: handle.store() }))
}

/// Sums per place, where a place is a topology key with a value.
#[derive(Clone, Default)]
struct Topology {
    keys: Vec<Places>,
    /// Places of keys that no pod had named when the nodes were counted.
    others: HashMap<(String, String), i64>,
    /// Places whose sum is not zero.
    in_use: usize,
}

/// The places of one key. A copy for a dry run shares the sums until it changes one.
#[derive(Clone)]
struct Places {
    key: String,
    column: Arc<Column>,
    sums: Arc<Vec<i64>>,
}

impl Topology {
    /// The number of a key, for [`add`](Self::add).
    fn key(&mut self, snapshot: &Snapshot, key: &str) -> usize {
        if let Some(known) = self.keys.iter().position(|places| places.key == key) {
            return known;
        }
        let column = snapshot.column(key);
        let sums = Arc::new(vec![0; column.size()]);
        self.keys.push(Places { key: key.to_owned(), column, sums });
        self.keys.len() - 1
    }

    /// Adds to the place of the node at a position.
    fn add(&mut self, key: usize, position: usize, amount: i64) {
        if let Some(value) = self.keys[key].column.at(position) {
            self.add_to(key, value, amount);
        }
    }

    fn add_to(&mut self, key: usize, value: usize, amount: i64) {
        let sum = &mut Arc::make_mut(&mut self.keys[key].sums)[value];
        let before = *sum;
        *sum += amount;
        let after = *sum;
        self.count_use(before, after);
    }

    fn count_use(&mut self, before: i64, after: i64) {
        match (before == 0, after == 0) {
            (true, false) => self.in_use += 1,
            (false, true) => self.in_use -= 1,
            _ => {}
        }
    }

    /// Adds to the place of a node, whose key may be new.
    fn change(&mut self, node: &NodeInfo, key: &str, amount: i64) {
        let Some(value) = node.labels().get(key) else { return };
        let known = self.keys.iter().position(|places| places.key == key);
        let place = known.and_then(|known| Some((known, self.keys[known].column.number_of(value)?)));
        if let Some((key, value)) = place {
            return self.add_to(key, value, amount);
        }
        let sum = self.others.entry((key.to_owned(), value.clone())).or_default();
        let before = *sum;
        *sum += amount;
        let after = *sum;
        self.count_use(before, after);
    }

    /// The sum at the node's place for one key.
    fn at(&self, node: &NodeInfo, key: &str) -> i64 {
        let Some(value) = node.labels().get(key) else { return 0 };
        let places = self.keys.iter().find(|places| places.key == key);
        let sum = places.and_then(|places| Some(places.sums[places.column.number_of(value)?]));
        let other = || self.others.get(&(key.to_owned(), value.clone())).copied();
        sum.or_else(|| if self.others.is_empty() { None } else { other() }).unwrap_or(0)
    }

    /// The sums at all the places that the node is in.
    fn all_at(&self, node: &NodeInfo) -> impl Iterator<Item = i64> {
        let known = self.keys.iter().filter_map(|places| {
            let value = node.labels().get(&places.key)?;
            Some(places.sums[places.column.number_of(value)?])
        });
        let is_in = |key: &String, value: &String| node.labels().get(key) == Some(value);
        let others = self.others.iter().filter(move |((key, value), _)| is_in(key, value));
        known.chain(others.map(|(_, sum)| *sum))
    }

    fn is_empty(&self) -> bool {
        self.in_use == 0
    }
}

#[derive(Clone, Default)]
struct Counts {
    /// Places where a present pod's required anti-affinity refuses the new pod.
    refused: Topology,
    /// Places with pods that match all of the new pod's required affinity.
    wanted: Topology,
    /// Places with pods that match some of the new pod's required anti-affinity.
    unwanted: Topology,
}

/// The counts that a present pod changes at its node: keys of the topologies of [`Counts`].
#[derive(Default)]
struct Effect {
    refused: Vec<usize>,
    wanted: Vec<usize>,
    unwanted: Vec<usize>,
}

impl Effect {
    fn new(
        counts: &mut Counts,
        pod: &PodInfo,
        present: &PodInfo,
        snapshot: &Snapshot,
        namespaces: &Namespaces<'_>,
    ) -> Self {
        let mut effect = Self::default();
        for term in &present.anti_affinity.required {
            if term.matches(pod, namespaces) {
                effect.refused.push(counts.refused.key(snapshot, &term.topology_key));
            }
        }
        if matches_all(&pod.affinity.required, present, namespaces) {
            for term in &pod.affinity.required {
                effect.wanted.push(counts.wanted.key(snapshot, &term.topology_key));
            }
        }
        for term in &pod.anti_affinity.required {
            if term.matches(present, namespaces) {
                effect.unwanted.push(counts.unwanted.key(snapshot, &term.topology_key));
            }
        }
        effect
    }
}

impl Counts {
    /// Counts `amount` more of `present`, which is on `node`.
    fn change(
        &mut self,
        pod: &PodInfo,
        present: &PodInfo,
        node: &NodeInfo,
        amount: i64,
        namespaces: &Namespaces<'_>,
    ) {
        for term in &present.anti_affinity.required {
            if term.matches(pod, namespaces) {
                self.refused.change(node, &term.topology_key, amount);
            }
        }
        if matches_all(&pod.affinity.required, present, namespaces) {
            for term in &pod.affinity.required {
                self.wanted.change(node, &term.topology_key, amount);
            }
        }
        for term in &pod.anti_affinity.required {
            if term.matches(present, namespaces) {
                self.unwanted.change(node, &term.topology_key, amount);
            }
        }
    }
}

impl InterPodAffinity {
    fn recount(&self, state: &mut CycleState, pod: &PodInfo, other: &PodInfo, node: &NodeInfo, amount: i64) {
        let namespaces = Namespaces::new(&self.namespaces);
        let matters = other.anti_affinity.required.iter().any(|term| term.matches(pod, &namespaces))
            || matches_all(&pod.affinity.required, other, &namespaces)
            || pod.anti_affinity.required.iter().any(|term| term.matches(other, &namespaces));
        if matters && let Some(counts) = state.get_mut::<Counts>() {
            counts.change(pod, other, node, amount, &namespaces);
        }
    }
}

#[derive(Clone)]
struct Scores(Topology);

fn matches_all(terms: &[AffinityTerm], pod: &PodInfo, namespaces: &Namespaces<'_>) -> bool {
    !terms.is_empty() && terms.iter().all(|term| term.matches(pod, namespaces))
}

impl Plugin for InterPodAffinity {
    fn name(&self) -> &'static str {
        "InterPodAffinity"
    }

    fn queueing_hint(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let wants = |other: &PodInfo| {
            let namespaces = Namespaces::new(&self.namespaces);
            pod.affinity.required.iter().any(|term| term.matches(other, &namespaces))
        };
        let avoids = |other: &PodInfo| {
            let namespaces = Namespaces::new(&self.namespaces);
            pod.anti_affinity.required.iter().any(|term| term.matches(other, &namespaces))
                || other.anti_affinity.required.iter().any(|term| term.matches(pod, &namespaces))
        };
        match event {
            ClusterEvent::AssignedPodAdded(other) => wants(other),
            ClusterEvent::AssignedPodDeleted(other) => avoids(other),
            // With its new labels it may be company, and with its old ones it may have been in the way.
            ClusterEvent::AssignedPodRelabelled { old, new } => wants(new) || avoids(old),
            ClusterEvent::NodeDeleted(_) => false,
            ClusterEvent::Object(changed) => changed.object::<Namespace>().is_some(),
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

impl PreFilter for InterPodAffinity {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
    ) -> Result<PreFiltered, Rejection> {
        let has_own = !pod.affinity.required.is_empty() || !pod.anti_affinity.required.is_empty();
        if !has_own && !snapshot.has_affinity {
            return Ok(PreFiltered::Skip);
        }
        let mut counts = Counts::default();
        let namespaces = Namespaces::new(&self.namespaces);
        let mut effects = ByShape::default();
        for (position, node) in snapshot.nodes().iter().enumerate() {
            for present in &node.pods {
                let new = || Effect::new(&mut counts, pod, present, snapshot, &namespaces);
                let effect: &Effect = effects.of(present, new);
                effect.refused.iter().for_each(|key| counts.refused.add(*key, position, 1));
                effect.wanted.iter().for_each(|key| counts.wanted.add(*key, position, 1));
                effect.unwanted.iter().for_each(|key| counts.unwanted.add(*key, position, 1));
            }
        }
        if !has_own && counts.refused.is_empty() {
            return Ok(PreFiltered::Skip);
        }
        state.put(counts);
        Ok(PreFiltered::Needed)
    }

    fn add_pod(&self, state: &mut CycleState, pod: &PodInfo, added: &PodInfo, node: &NodeInfo) {
        self.recount(state, pod, added, node, 1);
    }

    fn remove_pod(&self, state: &mut CycleState, pod: &PodInfo, removed: &PodInfo, node: &NodeInfo) {
        self.recount(state, pod, removed, node, -1);
    }
}

impl Filter for InterPodAffinity {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection> {
        let Some(counts) = state.get::<Counts>() else { return Ok(()) };
        let required = &pod.affinity.required;
        if !required.iter().all(|term| node.labels().contains_key(&term.topology_key)) {
            return Err(Rejection::unresolvable("node(s) didn't match pod affinity rules"));
        }
        if !required.iter().all(|term| counts.wanted.at(node, &term.topology_key) > 0) {
            // The first of a group that wants to be together may go anywhere, if it would itself be company.
            let first =
                counts.wanted.is_empty() && matches_all(required, pod, &Namespaces::new(&self.namespaces));
            if !first {
                return Err(Rejection::unresolvable("node(s) didn't match pod affinity rules"));
            }
        }
        if pod.anti_affinity.required.iter().any(|term| counts.unwanted.at(node, &term.topology_key) > 0) {
            return Err(Rejection::unschedulable("node(s) didn't match pod anti-affinity rules"));
        }
        if counts.refused.all_at(node).any(|count| count > 0) {
            return Err(Rejection::unschedulable("node(s) didn't satisfy existing pods anti-affinity rules"));
        }
        Ok(())
    }
}

impl PreScore for InterPodAffinity {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
        _feasible: &[Arc<NodeInfo>],
    ) -> Interest {
        let has_own = !pod.affinity.preferred.is_empty() || !pod.anti_affinity.preferred.is_empty();
        let ignores_others = self.args.ignore_preferred_terms_of_existing_pods && !has_own;
        if ignores_others || (!has_own && !snapshot.has_affinity) {
            return Interest::Skip;
        }
        let hard_weight = i64::from(self.args.hard_pod_affinity_weight);
        let mut scores = Topology::default();
        let namespaces = Namespaces::new(&self.namespaces);
        let mut effects = ByShape::default();
        for (position, node) in snapshot.nodes().iter().enumerate() {
            for present in &node.pods {
                let new = || {
                    let mut weights: Vec<(usize, i64)> = Vec::new();
                    let mut add = |term: &AffinityTerm, about: &PodInfo, weight: i64| {
                        if term.matches(about, &namespaces) {
                            weights.push((scores.key(snapshot, &term.topology_key), weight));
                        }
                    };
                    pod.affinity.preferred.iter().for_each(|term| add(term, present, term.weight));
                    pod.anti_affinity.preferred.iter().for_each(|term| add(term, present, -term.weight));
                    present.affinity.required.iter().for_each(|term| add(term, pod, hard_weight));
                    present.affinity.preferred.iter().for_each(|term| add(term, pod, term.weight));
                    present.anti_affinity.preferred.iter().for_each(|term| add(term, pod, -term.weight));
                    weights
                };
                effects.of(present, new).iter().for_each(|(key, weight)| scores.add(*key, position, *weight));
            }
        }
        if scores.is_empty() {
            return Interest::Skip;
        }
        state.put(Scores(scores));
        Interest::Needed
    }
}

impl Score for InterPodAffinity {
    fn score(&self, state: &CycleState, _pod: &PodInfo, node: &NodeInfo) -> i64 {
        let Some(Scores(scores)) = state.get::<Scores>() else { return 0 };
        scores.all_at(node).sum()
    }

    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _nodes: &[Arc<NodeInfo>], scores: &mut [i64]) {
        let most = scores.iter().max().copied().unwrap_or(0);
        let least = scores.iter().min().copied().unwrap_or(0);
        for score in scores {
            // As upstream, which rounds as its floating point numbers do: 29 of 100 is 28.
            let share = (*score - least) as f64 / (most - least) as f64;
            *score = if most == least { 0 } else { (MAX_SCORE as f64 * share) as i64 };
        }
    }
}

#[cfg(test)]
mod tests;
