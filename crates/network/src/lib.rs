//! Pod network: bridge, address management, routes.
//!
//! A container runtime knows this crate only through [`PodNetwork`]: it makes a network namespace for a
//! sandbox and asks for it to be attached.
use std::net::IpAddr;
use std::path::Path;

use async_trait::async_trait;
/// The pod a sandbox belongs to: what a network implementation may show in messages and records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// What a sandbox got from the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The pod's addresses, the primary one first. Never empty.
    pub ips: Vec<IpAddr>,
}

/// Connects sandboxes to the pod network.
#[async_trait]
pub trait PodNetwork: Send + Sync {
    /// Gives the network namespace at `netns` its interfaces, addresses and routes.
    ///
    /// Repeating it for the same sandbox, also after a crash in the middle of an earlier call, completes
    /// the work and answers with the same addresses.
    async fn attach(&self, sandbox: &str, netns: &Path, pod: &PodRef) -> Result<Attachment, NetworkError>;

    /// Takes back what [`attach`](Self::attach) gave. Succeeds for a sandbox that was never attached and
    /// when the namespace is gone already.
    async fn detach(&self, sandbox: &str, netns: &Path) -> Result<(), NetworkError>;

    /// Whether pods can be attached now; the text says why not, for the node's `NetworkReady` condition.
    fn ready(&self) -> Result<(), String>;
}

/// Why the network could not be made, joined, left or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The configuration cannot work.
    #[error("network configuration: {0}")]
    Config(String),
}
