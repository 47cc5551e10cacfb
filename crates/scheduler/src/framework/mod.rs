//! The framework: the points of a pod's way to a node at which plugins act, and the way plugins are put together.
//!
//! [`points`] has the extension points as traits, [`registry`] the plugins that can be named, [`runtime`] a profile with
//! its plugins made, [`waiting`] the pods that a Permit plugin delays.

mod events;
mod points;
mod registry;
mod runtime;
mod state;
mod status;
mod waiting;

pub use events::{Action, ClusterEvent, ObjectEvent};
pub use points::{
    Bind, Diagnosis, FailedSearch, Filter, Interest, Nomination, Permission, Permit, Plugin, PostBind,
    PostFilter, PostFiltered, PreBind, PreEnqueue, PreFilter, PreFiltered, PreScore, QueueSort, Remedy,
    Reserve, Score, SortKey, Victims,
};
pub use registry::{
    Factory, Handle, Made, PluginArgs, PluginArgsError, PluginEntry, Registry, RegistryError, Store,
};
pub use runtime::{Framework, FrameworkError, PodFilters, PreFilterFailure};
pub use state::CycleState;
pub(crate) use status::EXTENDER;
pub use status::{PluginError, Reason, RejectedBy, Rejection};
pub use waiting::{PermitOutcome, WaitingPod, WaitingPods};

/// The best score that a plugin can give.
pub const MAX_SCORE: i64 = 100;
