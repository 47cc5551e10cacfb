//! Failures between fork and exec: text for a person, sent over the status socket.

use std::fmt;

/// A failed step and its cause.
#[derive(Debug)]
pub struct SetupError(String);

impl SetupError {
    pub fn plain(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for SetupError {}

/// Adds the attempted action to an error.
pub trait Context<T> {
    fn context(self, what: &str) -> Result<T, SetupError>;
    fn with(self, what: impl FnOnce() -> String) -> Result<T, SetupError>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn context(self, what: &str) -> Result<T, SetupError> {
        self.map_err(|error| SetupError(format!("{what}: {error}")))
    }

    fn with(self, what: impl FnOnce() -> String) -> Result<T, SetupError> {
        self.map_err(|error| SetupError(format!("{}: {error}", what())))
    }
}
