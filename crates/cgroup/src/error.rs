//! Errors of control groups.

use std::io;
use std::path::PathBuf;

/// A control group could not be found, made or changed.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("no cgroup hierarchy is mounted; mount cgroup2 at /sys/fs/cgroup")]
    NotMounted,
    #[error("read /proc/self/mountinfo: {0}")]
    Mounts(io::Error),
    #[error("write {value:?} to {}: {source}", file.display())]
    Write { file: PathBuf, value: String, source: io::Error },
    #[error("cgroup controller {0} is not available")]
    NoController(&'static str),
    #[error("restrict devices: {0}")]
    Devices(io::Error),
}

impl CgroupError {
    /// True if the kernel does not have what was asked for: the controller, or a file of it.
    pub(crate) fn is_missing(&self) -> bool {
        match self {
            Self::NoController(_) => true,
            Self::Write { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Self::NotMounted | Self::Mounts(_) | Self::Devices(_) => false,
        }
    }
}

impl From<CgroupError> for io::Error {
    fn from(error: CgroupError) -> Self {
        let kind = match &error {
            CgroupError::NotMounted => io::ErrorKind::NotFound,
            CgroupError::NoController(_) => io::ErrorKind::Unsupported,
            CgroupError::Mounts(source)
            | CgroupError::Devices(source)
            | CgroupError::Write { source, .. } => source.kind(),
        };
        Self::new(kind, error)
    }
}
