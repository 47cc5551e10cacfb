//! Clients of the API: informers, indexers, workqueues, expectations, events, leader election.
//!
//! A component is usually: a [`Scope`] that owns its tasks, [`Informers`] that keep a copy of the objects
//! it reads,
//! a [`WorkQueue`] of keys fed by [`Informer::subscribe`], and [`run_workers`] around a reconcile function.

mod api;
mod backoff;
mod controller;
mod credentials;
pub mod csi;
mod document;
mod events;
mod expectations;
mod fence;
mod informer;
mod informers;
mod key;
mod leader;
pub mod local_path;
mod measures;
mod object;
mod ownership;
mod page;
mod placement;
mod rate_limit;
mod request;
pub mod resource_claims;
mod reviews;
mod scan;
mod scope;
mod uid;
mod workers;
mod workqueue;

pub use api::{Api, List, path_segment};
pub use backoff::Backoff;
pub use controller::Controller;
pub use credentials::service_account_client;
pub use document::{read_document, write_document};
pub use events::{EventRecorder, EventType, Events, SeriesRecorder};
pub use expectations::Expectations;
pub use fence::Fence;
pub use informer::{Change, Informer, ListSelector, Old};
pub use informers::Informers;
pub use key::ObjectKey;
pub use leader::{LeaderConfig, LeaderElector, LeaderHealth, LeaderStuck, Term};
pub use object::{DecodeError, Object};
pub use ownership::{
    Claim, ClaimError, claim, claim_all, claim_all_with_finalizer, controller_of, controller_reference,
};
pub use placement::{matches_node, matches_term, tolerates};
pub use rate_limit::{RateLimit, RateLimiter};
pub use request::get_document;
pub use reviews::{Attributes, DelegatedAccess, Lifetimes};
pub use scope::Scope;
pub use uid::Uid;
pub use workers::run_workers;
pub use workqueue::{RateLimits, WorkQueue};

/// Returns true if the server said that the object (or its collection) does not exist.
pub fn is_not_found(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404)
}

/// Returns true if a write lost against another writer and should be retried from a fresh read.
pub fn is_conflict(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409 && status.reason != "AlreadyExists")
}

/// Returns true if a create failed because the name is taken.
pub fn is_already_exists(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 409 && status.reason == "AlreadyExists")
}

/// Returns true if a create was refused because its namespace is being deleted: retrying is pointless.
pub fn is_namespace_terminating(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let causes = status.details.as_ref().map(|details| details.causes.as_slice()).unwrap_or_default();
    status.code == 403 && causes.iter().any(|cause| cause.reason == "NamespaceTerminating")
}

/// The server's message if it answered with a `Status`, else the transport's error.
pub fn message_of(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => status.message.clone(),
        other => other.to_string(),
    }
}
