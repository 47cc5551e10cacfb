//! Errors of images, with the distinctions that the kubelet makes.

use std::io;
use std::path::{Path, PathBuf};

use super::Digest;

/// Why an image operation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The text is not an image reference.
    #[error("invalid image reference {reference:?}: {why}")]
    BadReference { reference: String, why: &'static str },
    /// Neither the store nor the registry has it.
    #[error("image {0} not found")]
    NotFound(String),
    /// The registry refused the credentials or their absence.
    #[error("pull access denied for {reference}: the registry says {message}")]
    Unauthorized { reference: String, message: String },
    /// The registry did not answer.
    #[error("registry of {reference} cannot be reached: {message}")]
    Unreachable { reference: String, message: String },
    /// The registry answered, but not as registries do.
    #[error("registry of {reference}: {message}")]
    Registry { reference: String, message: String },
    /// Images under this name come with the program and are on no registry.
    #[error("image {0} is built in and never pulled, and this version does not have it")]
    BuiltIn(String),
    /// The index of a multi-platform image has nothing for this machine.
    #[error("image {reference} has no variant for {platform}; it offers {offered}")]
    NoPlatform { reference: String, platform: String, offered: String },
    /// Content does not match its digest.
    #[error("{what} is corrupt: expected {expected}, got {actual}")]
    Corrupt { what: String, expected: Digest, actual: Digest },
    /// A manifest, configuration, archive or layer breaks the rules.
    #[error("{what}: {why}")]
    Invalid { what: String, why: String },
    /// A layer tried to write outside of itself or to confuse overlayfs.
    #[error("layer entry {entry:?} refused: {why}")]
    Hostile { entry: String, why: &'static str },
    /// Content is larger than the configured limits allow.
    #[error("{what} is over the limit of {limit}")]
    Limit { what: &'static str, limit: u64 },
    /// A format this store does not know.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// A container uses the image.
    #[error("image {0} is in use by a container")]
    InUse(String),
    /// The image came with the program and stays.
    #[error("image {0} is pinned")]
    Pinned(String),
    /// Another process has the store open.
    #[error("image store {} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// The store's own files.
    #[error("{what} {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Work on another thread ended early.
    #[error("image work was interrupted: {0}")]
    Interrupted(String),
}

impl ImageError {
    pub(crate) fn io(what: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, path: path.as_ref().to_owned(), source }
    }

    pub(crate) fn invalid(what: impl Into<String>, why: impl ToString) -> Self {
        Self::Invalid { what: what.into(), why: why.to_string() }
    }

    /// An error that travelled through `io::Error` (readers can return nothing else), or `self`.
    pub(crate) fn unwrap_io(self) -> Self {
        match self {
            Self::Io { what, path, source } => match source.downcast::<Self>() {
                Ok(inner) => inner,
                Err(source) => Self::Io { what, path, source },
            },
            other => other,
        }
    }
}

impl From<ImageError> for io::Error {
    fn from(error: ImageError) -> Self {
        io::Error::other(error)
    }
}
