//! Why a sync did not reach its goal.

use ferrite_client::message_of;

/// A sync that must be tried again.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    #[error("cannot {action}: {}", message_of(error))]
    Api { action: String, error: kube::Error },
    #[error("{0}")]
    Other(String),
}

/// Says what was being done when the API refused.
pub(crate) trait During<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, SyncError>;
}

impl<T> During<T> for Result<T, kube::Error> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, SyncError> {
        self.map_err(|error| SyncError::Api { action: action(), error })
    }
}

/// Whether a create was refused because its namespace is being deleted: there is no point in trying again.
pub(crate) fn is_namespace_terminating(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    status.code == 403
        && status
            .details
            .as_ref()
            .is_some_and(|details| details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating"))
}
