//! The runtime's view of images: the command to run and the directories that make the root.

use std::path::PathBuf;

/// The parts of an image's configuration a container takes over where its own says nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageConfigView {
    /// The image's identity (`sha256:…` of its configuration).
    pub id: String,
    /// A name with digest by which the image can be found again; the id where there is none.
    pub reference: String,
    pub env: Vec<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub working_dir: String,
    /// `user[:group]`, by name or number; empty is root.
    pub user: String,
    /// Name or number; empty is SIGTERM.
    pub stop_signal: String,
}

/// Why an image could not be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RootfsError {
    #[error("image {0:?} not found")]
    NotFound(String),
    #[error("image {image:?}: {message}")]
    Broken { image: String, message: String },
}

/// Local images as root filesystems. Calls may read files but never the network.
pub trait Rootfs: Send + Sync {
    /// Finds an image by name, digest or id.
    fn image(&self, reference_or_id: &str) -> Result<ImageConfigView, RootfsError>;

    /// The image's layers as directories, the topmost first. They are never written to.
    fn lower_dirs(&self, id: &str) -> Result<Vec<PathBuf>, RootfsError>;
}

/// A store of images: root filesystems for the runtime, [`ferrite_cri::ImageService`] for the kubelet.
pub trait Images: Rootfs + ferrite_cri::ImageService {}

impl<T: Rootfs + ferrite_cri::ImageService> Images for T {}
