//! A profile with its plugins made, and the loops over them that more than one caller needs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{
    ClusterEvent, CycleState, Filter, Handle, Plugin, PluginArgs, PluginArgsError, PreFilter, PreFiltered,
    Registry, RejectedBy, Rejection,
};
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
}

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
        Ok(Self {
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
        for plugin in self.at(ExtensionPoint::PreFilter) {
            let Some(point) = plugin.pre_filter() else { continue };
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
        filters.filters = self
            .at(ExtensionPoint::Filter)
            .iter()
            .filter(|plugin| !skipped.contains(plugin.name()))
            .filter_map(|plugin| Some((plugin.name(), plugin.filter()?)))
            .collect();
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
    pre_filters: Vec<&'f dyn PreFilter>,
    /// The nodes that PreFilter plugins left; `None` is all of them.
    pub nodes: Option<BTreeSet<String>>,
    /// The plugins that restricted the nodes.
    pub restricting: Vec<&'static str>,
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
        self.filters.iter().try_for_each(|(plugin, filter)| {
            filter.filter(state, pod, node).map_err(|rejection| RejectedBy { plugin, rejection })
        })
    }

    /// True if the filters' verdict on a node depends on nothing but the shape of the pod and that node.
    pub fn are_local(&self, pod: &PodInfo) -> bool {
        self.filters.iter().all(|(_, filter)| filter.is_local(pod))
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
        let nominated = node.nominated();
        let counts = |other: &&Arc<PodInfo>| other.key != pod.key && other.priority >= pod.priority;
        if nominated.iter().any(|other| counts(&other)) {
            let mut state = state.clone();
            let mut node = node.clone();
            for other in nominated.iter().filter(counts) {
                self.add_pod(&mut state, pod, other, &mut node);
            }
            self.filter(&state, pod, &node)?;
        }
        self.filter(state, pod, node)
    }
}
