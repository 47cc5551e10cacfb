//! Events of the cluster that may make a waiting pod schedulable.

use std::any::Any;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;

use crate::snapshot::PodInfo;

/// Something happened in the cluster. A plugin's queueing hint decides if it may help a pod.
#[derive(Debug, Clone)]
pub enum ClusterEvent {
    NodeAdded(Arc<Node>),
    NodeUpdated {
        old: Arc<Node>,
        new: Arc<Node>,
    },
    NodeDeleted(Arc<Node>),
    /// A pod took its place on a node.
    AssignedPodAdded(Arc<PodInfo>),
    /// A pod that has its place changed its labels.
    AssignedPodRelabelled {
        old: Arc<PodInfo>,
        new: Arc<PodInfo>,
    },
    AssignedPodDeleted(Arc<PodInfo>),
    /// The waiting pod itself was changed.
    PodUpdated,
    /// An object that a plugin reads through [`Handle::store`](super::Handle::store) changed.
    Object(ObjectEvent),
    /// Anything else; cheap to treat as possibly helpful.
    Other,
}

impl ClusterEvent {
    /// The name of the event in metrics.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::NodeAdded(_) => "NodeAdd",
            Self::NodeUpdated { .. } => "NodeUpdate",
            Self::NodeDeleted(_) => "NodeDelete",
            Self::AssignedPodAdded(_) => "AssignedPodAdd",
            Self::AssignedPodRelabelled { .. } => "AssignedPodUpdate",
            Self::AssignedPodDeleted(_) => "AssignedPodDelete",
            Self::PodUpdated => "PodUpdate",
            Self::Object(event) => match event.action {
                Action::Added => "ObjectAdd",
                Action::Updated => "ObjectUpdate",
                Action::Deleted => "ObjectDelete",
            },
            Self::Other => "Other",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Added,
    Updated,
    Deleted,
}

/// A change of an object of any kind.
#[derive(Debug, Clone)]
pub struct ObjectEvent {
    pub action: Action,
    object: Arc<dyn Any + Send + Sync>,
    old: Option<Arc<dyn Any + Send + Sync>>,
}

impl ObjectEvent {
    pub fn new<K: Any + Send + Sync>(
        action: Action,
        object: Arc<K>,
        old: Option<Arc<dyn Any + Send + Sync>>,
    ) -> Self {
        Self { action, object, old }
    }

    /// The object, if it is a `K`.
    pub fn object<K: Any>(&self) -> Option<&K> {
        (*self.object).downcast_ref()
    }

    /// The object before an update, if it is a `K`.
    pub fn old<K: Any>(&self) -> Option<&K> {
        self.old.as_deref().and_then(|old| old.downcast_ref())
    }
}
