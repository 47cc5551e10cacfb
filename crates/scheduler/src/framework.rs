//! What a plugin can do, at which point of a pod's way to a node, and how plugins are put together.

use std::any::{Any, TypeId};
use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::Node;

use crate::plugins::PLUGINS;
use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

pub const MAX_SCORE: i64 = 100;

/// Why a node does not do.
pub type Reason = Cow<'static, str>;

/// A plugin's word against a node or a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rejection {
    /// Removing other pods could change it.
    Unschedulable(Vec<Reason>),
    /// Removing other pods cannot change it, so preemption need not look.
    Unresolvable(Vec<Reason>),
}

impl Rejection {
    pub fn unschedulable(reason: impl Into<Reason>) -> Self {
        Self::Unschedulable(vec![reason.into()])
    }

    pub fn unresolvable(reason: impl Into<Reason>) -> Self {
        Self::Unresolvable(vec![reason.into()])
    }

    pub fn reasons(&self) -> &[Reason] {
        match self {
            Self::Unschedulable(reasons) | Self::Unresolvable(reasons) => reasons,
        }
    }
}

/// What plugins remember between extension points of one cycle, by type.
#[derive(Default)]
pub struct CycleState {
    entries: Vec<(TypeId, Box<dyn Any + Send + Sync>)>,
}

impl std::fmt::Debug for CycleState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CycleState").field("entries", &self.entries.len()).finish()
    }
}

impl CycleState {
    pub fn put<T: Any + Send + Sync>(&mut self, value: T) {
        let id = TypeId::of::<T>();
        match self.entries.iter_mut().find(|(known, _)| *known == id) {
            Some((_, held)) => *held = Box::new(value),
            None => self.entries.push((id, Box::new(value))),
        }
    }

    pub fn get<T: Any + Send + Sync>(&self) -> Option<&T> {
        let id = TypeId::of::<T>();
        self.entries.iter().find(|(known, _)| *known == id).and_then(|(_, held)| held.downcast_ref())
    }
}

/// Whether a plugin's later steps are needed for this pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    Needed,
    Skip,
}

/// Looks at the pod once, before any node, and may refuse it outright.
pub trait PreFilter {
    fn pre_filter(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
    ) -> Result<Interest, Rejection>;
}

/// Says whether a node does.
pub trait Filter {
    fn filter(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> Result<(), Rejection>;
}

/// Called when no node does; may say what would help. Returns text for people.
pub trait PostFilter {
    fn post_filter(
        &self,
        pod: &PodInfo,
        snapshot: &Snapshot,
        rejections: &[(usize, Rejection)],
    ) -> Option<String>;
}

/// Looks at the nodes that do, once, before they are scored.
pub trait PreScore {
    fn pre_score(
        &self,
        state: &mut CycleState,
        pod: &PodInfo,
        snapshot: &Snapshot,
        feasible: &[Arc<NodeInfo>],
    ) -> Interest;
}

/// Says how well a node does, from 0 to [`MAX_SCORE`] after `normalize`.
pub trait Score {
    fn score(&self, state: &CycleState, pod: &PodInfo, node: &NodeInfo) -> i64;

    fn normalize(&self, _state: &CycleState, _pod: &PodInfo, _nodes: &[Arc<NodeInfo>], _scores: &mut [i64]) {}
}

/// Is told that a pod is about to go to a node, and if it then does not.
pub trait Reserve {
    fn reserve(&self, state: &mut CycleState, pod: &PodInfo, node: &str) -> Result<(), String>;
    fn unreserve(&self, state: &mut CycleState, pod: &PodInfo, node: &str);
}

/// A verdict just before binding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Permission {
    Approved,
    Denied(String),
    /// Ask again within this time, then deny.
    Wait(Duration),
}

/// Has the last word before binding.
pub trait Permit {
    fn permit(&self, state: &mut CycleState, pod: &PodInfo, node: &str) -> Permission;
}

/// Does what must be done before the pod may be bound, such as attaching a volume.
pub trait PreBind: Send + Sync {
    fn pre_bind<'a>(&'a self, pod: &'a PodInfo, node: &'a str) -> BoxFuture<'a, Result<(), String>>;
}

/// Tells the API on which node the pod is. The first plugin that takes the pod does it.
pub trait Bind: Send + Sync {
    /// `None` leaves the pod to the next plugin.
    fn bind<'a>(&'a self, pod: &'a PodInfo, node: &'a str) -> BoxFuture<'a, Option<Result<(), String>>>;
}

/// Something that happened in the cluster and may make a pod schedulable.
#[derive(Debug, Clone)]
pub enum ClusterEvent {
    NodeAdded(Arc<Node>),
    NodeUpdated {
        old: Arc<Node>,
        new: Arc<Node>,
    },
    /// A pod took its place on a node, or changed its labels there.
    AssignedPodAdded(Arc<PodInfo>),
    AssignedPodDeleted(Arc<PodInfo>),
    /// The waiting pod itself was changed.
    PodUpdated,
    /// Anything else; cheap to treat as possibly helpful.
    Other,
}

/// One plugin: its name, and the extension points it takes part in.
pub trait Plugin: Send + Sync {
    fn name(&self) -> &'static str;

    /// Whether `event` may make a pod fit that this plugin rejected. When in doubt it may.
    fn may_help(&self, pod: &PodInfo, event: &ClusterEvent) -> bool {
        let _ = (pod, event);
        true
    }

    fn pre_filter(&self) -> Option<&dyn PreFilter> {
        None
    }
    fn filter(&self) -> Option<&dyn Filter> {
        None
    }
    fn post_filter(&self) -> Option<&dyn PostFilter> {
        None
    }
    fn pre_score(&self) -> Option<&dyn PreScore> {
        None
    }
    fn score(&self) -> Option<&dyn Score> {
        None
    }
    fn reserve(&self) -> Option<&dyn Reserve> {
        None
    }
    fn permit(&self) -> Option<&dyn Permit> {
        None
    }
    fn pre_bind(&self) -> Option<&dyn PreBind> {
        None
    }
    fn bind(&self) -> Option<&dyn Bind> {
        None
    }
}

/// A row of the plugin table.
pub struct PluginEntry {
    pub name: &'static str,
    /// Weight of its score in the default profile.
    pub weight: i64,
    pub new: fn() -> Arc<dyn Plugin>,
}

/// Which plugins serve the pods that name this scheduler, in order, and how much their scores weigh.
#[derive(Debug, Clone)]
pub struct Profile {
    pub scheduler_name: String,
    pub plugins: Vec<(&'static str, i64)>,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            scheduler_name: "default-scheduler".to_owned(),
            plugins: PLUGINS.iter().map(|entry| (entry.name, entry.weight)).collect(),
        }
    }
}

/// A profile with its plugins made.
pub struct Framework {
    pub scheduler_name: String,
    pub plugins: Vec<(Arc<dyn Plugin>, i64)>,
}

impl std::fmt::Debug for Framework {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.plugins.iter().map(|(plugin, _)| plugin.name()).collect();
        f.debug_struct("Framework").field("scheduler", &self.scheduler_name).field("plugins", &names).finish()
    }
}

/// A profile names a plugin that is not in the table.
#[derive(Debug, thiserror::Error)]
#[error("profile {profile:?} names plugin {plugin:?}, which does not exist")]
pub struct UnknownPluginError {
    pub profile: String,
    pub plugin: String,
}

impl Framework {
    pub fn new(profile: &Profile) -> Result<Self, UnknownPluginError> {
        let plugins = profile
            .plugins
            .iter()
            .map(|(name, weight)| {
                let entry = PLUGINS.iter().find(|entry| entry.name == *name).ok_or_else(|| {
                    UnknownPluginError { profile: profile.scheduler_name.clone(), plugin: (*name).to_owned() }
                })?;
                Ok(((entry.new)(), *weight))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { scheduler_name: profile.scheduler_name.clone(), plugins })
    }

    /// Whether `event` may help a pod that these plugins rejected; one that none rejected may always be helped.
    pub fn may_help(&self, pod: &PodInfo, rejected_by: &[&'static str], event: &ClusterEvent) -> bool {
        rejected_by.is_empty()
            || self
                .plugins
                .iter()
                .filter(|(plugin, _)| rejected_by.contains(&plugin.name()))
                .any(|(plugin, _)| plugin.may_help(pod, event))
    }
}
