//! The embedded container runtime: images, layers, sandboxes, containers, supervisor, streams.
//!
//! [`Runtime`] implements CRI for the kubelet. It keeps records and decides; the work next to the kernel
//! is done by one [`supervisor`] process per pod sandbox, which outlives the runtime. On start the runtime
//! finds its sandboxes on disk and takes up where it left off.

mod cgroup;
mod config;
pub mod descriptors;
#[doc(hidden)]
pub mod fuzzing;
pub mod image;
pub mod rootfs;
mod service;
mod spec;
pub mod standalone;
mod streaming;
pub mod supervisor;
mod sys;

pub use config::{Adjust, Config, Extras, JoinIpc, installed_handlers};
pub use rootfs::{ImageConfigView, Images, Rootfs, RootfsError};
pub use service::{OpenError, Runtime, destroy};
