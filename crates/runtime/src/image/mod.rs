//! Images: references, blobs, unpacked layers, archives, registries.
//!
//! [`ImageStore`] is the entry point. Beneath it, in the order an image meets them: [`mod@reference`] normalises the
//! name, [`pull`] (over [`registry`], by way of [`arriving`]) or [`archive`] brings the bytes into [`content`],
//! [`layer`] unpacks them with [`extract`] into directories that overlayfs uses as lower layers, and [`index`]
//! remembers which name means which image. [`cri`] speaks the kubelet's messages.

mod archive;
mod arriving;
mod builtin;
mod content;
pub mod cri;
mod digest;
mod error;
mod export;
mod extract;
mod index;
mod layer;
mod platform;
mod pull;
mod reference;
mod registries;
mod registry;
mod service;
mod store;
pub(crate) mod tar_reader;

pub use builtin::{Builtin, TOOLS};
pub use digest::{Digest, chain_ids};
pub use error::ImageError;
pub use export::ImageView;
pub use extract::Limits;
pub use platform::Platform;
pub use pull::{Auth, Progress, ProgressEvent, RegistryConfig};
pub use reference::Reference;
pub use registries::HostSettings;
pub use store::{Collected, ImageRecord, ImageStore, Usage};
