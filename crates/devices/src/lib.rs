//! Devices on a node: device plugins v1beta1, drivers of dynamic resources v1 and v1beta1, and the pod resources API v1.
//!
//! A plugin is a program of somebody else behind a socket. It may hang, lie or restart at any time: every call has a
//! time limit, every answer a largest size, and a link in place of a socket is not followed.

mod client;
mod driver;

#[allow(clippy::all, clippy::unwrap_used, missing_docs)]
pub mod deviceplugin {
    //! The messages of device plugins, generated from `proto/deviceplugin.proto`.
    include!(concat!(env!("OUT_DIR"), "/v1beta1.rs"));
}

#[allow(clippy::all, clippy::unwrap_used, missing_docs)]
pub mod dra {
    //! The messages of drivers of dynamic resources, generated from `proto/dra.proto`.
    include!(concat!(env!("OUT_DIR"), "/k8s.io.kubelet.pkg.apis.dra.v1.rs"));
}

#[allow(clippy::all, clippy::unwrap_used, missing_docs)]
pub mod dra_health {
    //! The messages of the health of their devices, generated from `proto/dra_health.proto`.
    include!(concat!(env!("OUT_DIR"), "/v1alpha1.rs"));
}

#[allow(clippy::all, clippy::unwrap_used, missing_docs)]
pub mod podresources {
    //! The messages of the pod resources API, generated from `proto/podresources.proto`.
    include!(concat!(env!("OUT_DIR"), "/v1.rs"));
}

pub use client::{DevicePlugin, DeviceUpdates};
pub use driver::{DraPlugin, DraVersion, HealthUpdates};
pub use ferrite_csi::{CallError, serve};
pub use prost::DecodeError;
pub use tonic::{Request, Response, Status, async_trait};

/// The protobuf form of a message.
pub fn encode(message: &impl prost::Message) -> Vec<u8> {
    message.encode_to_vec()
}

/// The message of a protobuf form.
pub fn decode<M: prost::Message + Default>(bytes: &[u8]) -> Result<M, prost::DecodeError> {
    M::decode(bytes)
}
