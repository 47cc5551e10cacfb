//! A profile with its plugins made, and the loops over them that more than one caller needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferrite_component::metrics::Counter;

use super::{
    ClusterEvent, CycleState, Filter, Handle, Plugin, PluginArgs, PluginArgsError, PreFilter, PreFiltered,
    Registry, RejectedBy, Rejection,
};
use crate::measures;
use crate::profile::{ExtensionPoint, Profile};
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

/// The plugins of one profile, as each extension point runs them.
pub struct Framework {
    pub scheduler_name: String,
    /// Percentage of nodes to score; `None` leaves it to the configuration of all profiles.
    pub percentage_of_nodes_to_score: Option<usize>,
    plugins: Vec<Arc<dyn Plugin>>,
    points: BTreeMap<ExtensionPoint, Vec<Arc<dyn Plugin>>>,
    scores: Vec<(Arc<dyn Plugin>, i64)>,
    /// The evaluations of each plugin at the extension points that count them, in the order of the plugins there.
    evaluations: BTreeMap<ExtensionPoint, Vec<Arc<Counter>>>,
}

/// The extension points whose evaluations are counted.
const COUNTED: [ExtensionPoint; 4] =
    [ExtensionPoint::PreFilter, ExtensionPoint::Filter, ExtensionPoint::PreScore, ExtensionPoint::Score];

impl std::fmt::Debug for Framework {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.plugins.iter().map(|plugin| plugin.name()).collect();
        f.debug_struct("Framework").field("scheduler", &self.scheduler_name).field("plugins", &names).finish()
    }
}

/// A profile cannot be made into a framework.
#[derive(Debug, thiserror::Error)]
pub enum FrameworkError {
    #[error("profile {profile:?}: plugin {plugin:?} does not exist")]
    UnknownPlugin { profile: String, plugin: String },
    #[error("profile {profile:?}: plugin {plugin:?} does not extend {point}")]
    NoSuchPoint { profile: String, plugin: String, point: &'static str },
    #[error("profile {profile:?}: plugin {plugin:?} is registered twice for {point}")]
    Twice { profile: String, plugin: String, point: &'static str },
    #[error("profile {profile:?}: one queue sort plugin is needed, {count} are enabled")]
    QueueSort { profile: String, count: usize },
    #[error("profile {profile:?}: at least one bind plugin is needed")]
    NoBinder { profile: String },
    #[error("profile {profile:?}: plugin {plugin:?} scores with weight {weight}; a weight is at least 1")]
    Weight { profile: String, plugin: String, weight: i64 },
    #[error("profile {profile:?}: initializing plugin {plugin:?}")]
    Arguments {
        profile: String,
        plugin: String,
        #[source]
        source: PluginArgsError,
    },
}

impl Framework {
    /// Makes every plugin that the profile enables somewhere.
    pub fn new(profile: &Profile, registry: &Registry, handle: &Handle) -> Result<Self, FrameworkError> {
        let name = || profile.scheduler_name.clone();
        let mut made: BTreeMap<&str, Arc<dyn Plugin>> = BTreeMap::new();
        for plugin in profile.plugins.names() {
            let Some(factory) = registry.get(plugin) else {
                return Err(FrameworkError::UnknownPlugin { profile: name(), plugin: plugin.to_owned() });
            };
            let none = PluginArgs::default();
            let args = profile.args.get(plugin).unwrap_or(&none);
            let new = factory(args, handle).map_err(|source| FrameworkError::Arguments {
                profile: name(),
                plugin: plugin.to_owned(),
                source,
            })?;
            made.insert(plugin, new);
        }
        let mut points = BTreeMap::new();
        let mut scores = Vec::new();
        for point in ExtensionPoint::ALL {
            let has_point =
                |plugin: &str| made.get(plugin).is_some_and(|plugin| point.is_extended_by(&**plugin));
            let enabled = profile.plugins.at(*point, &has_point);
            let mut seen = BTreeSet::new();
            let mut list = Vec::new();
            for (plugin, weight) in enabled {
                let Some(made) = made.get(plugin).cloned() else { continue };
                if !point.is_extended_by(&*made) {
                    return Err(FrameworkError::NoSuchPoint {
                        profile: name(),
                        plugin: plugin.to_owned(),
                        point: point.name(),
                    });
                }
                if !seen.insert(plugin) {
                    return Err(FrameworkError::Twice {
                        profile: name(),
                        plugin: plugin.to_owned(),
                        point: point.name(),
                    });
                }
                if *point == ExtensionPoint::Score {
                    // As upstream: a weight of zero is a weight that was not given.
                    let weight = if weight == 0 { 1 } else { weight };
                    if weight < 0 {
                        return Err(FrameworkError::Weight {
                            profile: name(),
                            plugin: plugin.to_owned(),
                            weight,
                        });
                    }
                    scores.push((made.clone(), weight));
                }
                list.push(made);
            }
            points.insert(*point, list);
        }
        let count = |point| points.get(&point).map_or(0, Vec::len);
        if count(ExtensionPoint::QueueSort) != 1 {
            return Err(FrameworkError::QueueSort {
                profile: name(),
                count: count(ExtensionPoint::QueueSort),
            });
        }
        if count(ExtensionPoint::Bind) == 0 {
            return Err(FrameworkError::NoBinder { profile: name() });
        }
        let counters = |point: ExtensionPoint| {
            let plugins: &[Arc<dyn Plugin>] = points.get(&point).map(Vec::as_slice).unwrap_or_default();
            let counter = |plugin: &Arc<dyn Plugin>| {
                measures::evaluations(plugin.name(), point.name(), &profile.scheduler_name)
            };
            (point, plugins.iter().map(counter).collect())
        };
        Ok(Self {
            evaluations: COUNTED.map(counters).into_iter().collect(),
            scheduler_name: profile.scheduler_name.clone(),
            percentage_of_nodes_to_score: profile.percentage_of_nodes_to_score,
            plugins: made.into_values().collect(),
            points,
            scores,
        })
    }

    /// The plugins of an extension point, in their order.
    pub fn at(&self, point: ExtensionPoint) -> &[Arc<dyn Plugin>] {
        self.points.get(&point).map(Vec::as_slice).unwrap_or_default()
    }

    /// The plugins of an extension point that counts evaluations, each with its count.
    pub(crate) fn counted(
        &self,
        point: ExtensionPoint,
    ) -> impl Iterator<Item = (&Arc<dyn Plugin>, &Arc<Counter>)> {
        self.at(point).iter().zip(self.evaluations.get(&point).into_iter().flatten())
    }

    /// The plugins that score, with their weights.
    pub fn scores(&self) -> &[(Arc<dyn Plugin>, i64)] {
        &self.scores
    }

    /// True if `event` may help a pod that these plugins rejected. A rejection by anything that is no plugin of this
    /// profile, and a failure without a rejection, may be helped by every event.
    pub fn queueing_hint(&self, pod: &PodInfo, rejected_by: &[&'static str], event: &ClusterEvent) -> bool {
        rejected_by.is_empty()
            || rejected_by.iter().any(|name| {
                self.plugins
                    .iter()
                    .find(|plugin| plugin.name() == *name)
                    .is_none_or(|plugin| plugin.queueing_hint(pod, event))
            })
    }

    /// True if a plugin may take long to find a node for the pod.
    pub fn is_costly(&self, pod: &PodInfo) -> bool {
        self.at(ExtensionPoint::Filter).iter().any(|plugin| plugin.is_costly(pod))
    }

    /// Runs the PreEnqueue plugins; the first that rejects decides.
    pub fn pre_enqueue(&self, pod: &PodInfo) -> Result<(), RejectedBy> {
        let plugins = self.at(ExtensionPoint::PreEnqueue);
        plugins.iter().try_for_each(|plugin| match plugin.pre_enqueue() {
            Some(point) => {
                point.pre_enqueue(pod).map_err(|rejection| RejectedBy { plugin: plugin.name(), rejection })
            }
            None => Ok(()),
        })
    }

    /// Runs the PreFilter plugins, and gathers the filters that this pod needs.
    pub fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
    ) -> (PodFilters<'_>, Option<PreFilterFailure>) {
        let mut skipped = BTreeSet::new();
        let mut filters = PodFilters::default();
        let mut restricting = BTreeSet::new();
        let mut failure = None;
        for (plugin, evaluations) in self.counted(ExtensionPoint::PreFilter) {
            let Some(point) = plugin.pre_filter() else { continue };
            evaluations.increment();
            match point.pre_filter(state, pod, snapshot) {
                Ok(PreFiltered::Skip) => {
                    skipped.insert(plugin.name());
                    continue;
                }
                Ok(PreFiltered::Needed) => {}
                Ok(PreFiltered::Nodes(nodes)) => {
                    restricting.insert(plugin.name());
                    filters.nodes = Some(match filters.nodes.take() {
                        None => nodes,
                        Some(known) => known.intersection(&nodes).cloned().collect(),
                    });
                    if filters.nodes.as_ref().is_some_and(BTreeSet::is_empty) {
                        let names: Vec<_> = restricting.iter().copied().collect();
                        let reason = match names.as_slice() {
                            [only] => format!("node(s) didn't satisfy plugin {only}"),
                            all => {
                                format!("node(s) didn't satisfy plugin(s) [{}] simultaneously", all.join(" "))
                            }
                        };
                        let by =
                            RejectedBy { plugin: plugin.name(), rejection: Rejection::unresolvable(reason) };
                        return (filters, Some(PreFilterFailure { by, plugins: names }));
                    }
                }
                Err(rejection) => {
                    let is_resolvable = rejection.is_resolvable();
                    let by = RejectedBy { plugin: plugin.name(), rejection };
                    failure = Some(PreFilterFailure { by, plugins: vec![plugin.name()] });
                    // Preemption needs the state of all other plugins.
                    if !is_resolvable {
                        return (filters, failure);
                    }
                    continue;
                }
            }
            filters.pre_filters.push(point);
        }
        filters.restricting = restricting.into_iter().collect();
        for (plugin, evaluations) in self.counted(ExtensionPoint::Filter) {
            if let Some(point) = plugin.filter().filter(|_| !skipped.contains(plugin.name())) {
                filters.filters.push((plugin.name(), point));
                filters.runs.counters.push(Arc::clone(evaluations));
            }
        }
        filters.runs.by_length = (0..=filters.filters.len()).map(|_| AtomicU64::new(0)).collect();
        (filters, failure)
    }
}

/// A PreFilter plugin rejected the pod.
#[derive(Debug, Clone)]
pub struct PreFilterFailure {
    pub by: RejectedBy,
    /// The plugins whose events can help.
    pub plugins: Vec<&'static str>,
}

/// The filters that one pod needs, in their order.
#[derive(Default)]
pub struct PodFilters<'f> {
    filters: Vec<(&'static str, &'f dyn Filter)>,
    runs: Runs,
    pre_filters: Vec<&'f dyn PreFilter>,
    /// The nodes that PreFilter plugins left; `None` is all of them.
    pub nodes: Option<BTreeSet<String>>,
    /// The plugins that restricted the nodes.
    pub restricting: Vec<&'static str>,
}

/// The places of a pod's filters, in their order.
#[derive(Debug)]
pub(crate) struct Locality {
    /// Filters whose verdict depends on nothing but the shape of the pod and the node.
    pub(crate) local: Vec<usize>,
    pub(crate) others: Vec<usize>,
}

/// Runs over the filters of a pod. They are added to the counters at the end: one count for each node, not for each filter.
#[derive(Default)]
struct Runs {
    counters: Vec<Arc<Counter>>,
    /// By the number of filters that ran: all, or those up to the first that rejected the node.
    by_length: Vec<AtomicU64>,
}

impl Runs {
    fn count(&self, length: usize) {
        if let Some(runs) = self.by_length.get(length) {
            runs.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        let mut longer = 0;
        for (counter, runs) in self.counters.iter().zip(self.by_length.iter().skip(1)).rev() {
            longer += runs.load(Ordering::Relaxed);
            counter.add(longer);
        }
    }
}

impl std::fmt::Debug for PodFilters<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.filters.iter().map(|(name, _)| *name).collect();
        f.debug_struct("PodFilters").field("filters", &names).field("nodes", &self.nodes).finish()
    }
}

impl PodFilters<'_> {
    /// Puts `added` on the node, in the node and in the plugins' state.
    pub fn add_pod(&self, state: &mut CycleState, pod: &PodInfo, added: &Arc<PodInfo>, node: &mut NodeInfo) {
        node.add_pod(added.clone());
        for plugin in &self.pre_filters {
            plugin.add_pod(state, pod, added, node);
        }
    }

    /// Takes `removed` off the node, in the node and in the plugins' state.
    pub fn remove_pod(&self, state: &mut CycleState, pod: &PodInfo, removed: &PodInfo, node: &mut NodeInfo) {
        node.remove_pod(&removed.key);
        for plugin in &self.pre_filters {
            plugin.remove_pod(state, pod, removed, node);
        }
    }

    /// Runs the filters on the node as it is; the first rejection decides.
    pub fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), RejectedBy> {
        for (index, (plugin, filter)) in self.filters.iter().enumerate() {
            if let Err(rejection) = filter.filter(state, pod, node) {
                self.runs.count(index + 1);
                return Err(RejectedBy { plugin, rejection });
            }
        }
        self.runs.count(self.filters.len());
        Ok(())
    }

    /// True if the filters' verdict on a node depends on nothing but the shape of the pod and that node.
    pub fn are_local(&self, pod: &PodInfo) -> bool {
        self.filters.iter().all(|(_, filter)| filter.is_local(pod))
    }

    /// The filters, split by what their verdicts depend on.
    pub(crate) fn locality(&self, pod: &PodInfo) -> Locality {
        let places = 0..self.filters.len();
        let (local, others) = places.partition(|place| self.filters[*place].1.is_local(pod));
        Locality { local, others }
    }

    /// Runs the filters at these places on the node as it is; the first rejection decides. Filters that come after the
    /// plugin `before` are left out.
    pub(crate) fn filter_some(
        &self,
        places: &[usize],
        before: Option<&'static str>,
        state: &CycleState,
        pod: &PodInfo,
        node: &NodeInfo,
    ) -> Result<(), RejectedBy> {
        if places.is_empty() {
            return Ok(());
        }
        let end = before.and_then(|before| self.filters.iter().position(|(plugin, _)| *plugin == before));
        for place in places.iter().copied().filter(|place| end.is_none_or(|end| *place < end)) {
            let (plugin, filter) = self.filters[place];
            if let Some(counter) = self.runs.counters.get(place) {
                counter.increment();
            }
            filter.filter(state, pod, node).map_err(|rejection| RejectedBy { plugin, rejection })?;
        }
        Ok(())
    }

    /// Every filter's verdict on the node, not only the first.
    pub fn verdicts(
        &self,
        state: &CycleState,
        pod: &PodInfo,
        node: &NodeInfo,
    ) -> Vec<(&'static str, Result<(), Rejection>)> {
        self.filters.iter().map(|(plugin, filter)| (*plugin, filter.filter(state, pod, node))).collect()
    }

    /// Runs the filters with the pods of equal or higher priority that are nominated to the node counted on it, and again
    /// without them. Both must pass: with them, because resources and anti-affinity may not allow both; without them,
    /// because they may never arrive and pod affinity must not count on them.
    pub fn filter_with_nominated(
        &self,
        state: &CycleState,
        pod: &PodInfo,
        node: &NodeInfo,
    ) -> Result<(), RejectedBy> {
        if node.keeps_room_from(pod) {
            let nominated = node.nominated_before(pod).cloned().collect::<Vec<_>>();
            let mut state = state.clone();
            let mut node = node.clone();
            for other in &nominated {
                self.add_pod(&mut state, pod, other, &mut node);
            }
            self.filter(&state, pod, &node)?;
        }
        self.filter(state, pod, node)
    }
}
