//! The files of a container: `config.json` (the OCI description) and `bundle.json` (the source of its root
//! filesystem).

use std::io;
use std::path::{Path, PathBuf};

use oci_spec::runtime::Spec;
use serde::{Deserialize, Serialize};

pub const CONFIG: &str = "config.json";
pub const BUNDLE: &str = "bundle.json";

/// The parts of a container the OCI description does not cover.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Bundle {
    /// Image layers, the topmost first.
    pub lowers: Vec<PathBuf>,
    /// The container's own layer and overlayfs' scratch directory.
    pub upper: PathBuf,
    pub work: PathBuf,
    /// An empty directory; the root filesystem is mounted there in the container's mount namespace only.
    pub rootfs: PathBuf,
    /// Compiled seccomp programs, in the order in which they are installed.
    pub seccomp: Vec<PathBuf>,
    /// Images mounted somewhere in the container, in the order of their mounts.
    #[serde(default)]
    pub images: Vec<ImageVolume>,
}

/// An image whose files a container sees somewhere.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct ImageVolume {
    /// Its layers, the topmost first.
    pub lowers: Vec<PathBuf>,
    /// The directory or file of the image to show; empty shows all.
    pub sub_path: String,
}

impl Bundle {
    pub fn read(directory: &Path) -> io::Result<(Self, Spec)> {
        let read = |name: &str| {
            let path = directory.join(name);
            std::fs::read(&path)
                .map_err(|error| io::Error::new(error.kind(), format!("read {}: {error}", path.display())))
        };
        let bundle = serde_json::from_slice(&read(BUNDLE)?)?;
        let spec = serde_json::from_slice(&read(CONFIG)?)?;
        Ok((bundle, spec))
    }
}
