//! The container storage interface (CSI), v1, as a node speaks it, and the registration of plugins with a kubelet.
//!
//! A driver is a program of somebody else behind a socket. It may hang, lie or restart at any time: every call opens
//! its own connection, without blocking, and has a time limit.

mod client;
mod error;
mod plugin;
mod server;

#[allow(clippy::all, clippy::unwrap_used, missing_docs)]
pub mod v1 {
    //! The messages of the interface, generated from `proto/csi.proto`.
    include!(concat!(env!("OUT_DIR"), "/csi.v1.rs"));
}

#[allow(clippy::all, clippy::unwrap_used, missing_docs)]
pub mod registration {
    //! The messages of registration, generated from `proto/registration.proto`.
    include!(concat!(env!("OUT_DIR"), "/pluginregistration.rs"));
}

pub use client::{Driver, NodeCapabilities, Registrar, within};
pub use error::CallError;
pub use plugin::RegisteredPlugin;
pub use server::serve;
