//! Why a sync did not reach its goal.

pub(crate) use ferrite_client::is_namespace_terminating;
use ferrite_client::{ClaimError, message_of};

/// A sync that must be tried again.
#[derive(Debug, thiserror::Error)]
pub enum SyncError {
    #[error("cannot {action}: {}", message_of(error))]
    Api { action: String, error: kube::Error },
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error("{0}")]
    Other(String),
}

/// Adds the attempted action to an error of the API.
pub(crate) trait During<T> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, SyncError>;
}

impl<T> During<T> for Result<T, kube::Error> {
    fn during(self, action: impl FnOnce() -> String) -> Result<T, SyncError> {
        self.map_err(|error| SyncError::Api { action: action(), error })
    }
}
