//! The container runtime interface, v1: the messages and the two traits every runtime implements.
//!
//! The kubelet knows a runtime only through [`RuntimeService`] and [`ImageService`]. The embedded runtime
//! implements them in process; [`grpc::Client`] implements them for a runtime behind a socket, and
//! [`grpc::Server`] offers any implementation on one. Calls a runtime does not offer answer
//! [`Code::Unimplemented`], as upstream's do.

mod error;
pub mod grpc;
mod kernel_files;
mod service;

#[allow(clippy::all, clippy::unwrap_used, missing_docs)]
pub mod v1 {
    //! The messages, generated from `proto/cri.proto`.
    include!(concat!(env!("OUT_DIR"), "/runtime.v1.rs"));
}

pub use error::{Code, Error, with_causes};
pub use kernel_files::{READONLY_PATHS, masked_paths};
pub use service::{ContainerEvents, ImageService, Result, RuntimeService};
