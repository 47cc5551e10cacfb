//! Pod network: bridge, address management, routes.
//!
//! A container runtime knows this crate only through [`PodNetwork`]: it makes a network namespace for a
//! sandbox and asks for it to be attached. [`Bridge`] is the built-in implementation for one node.

mod addresses;
mod bandwidth;
mod bridge;
mod cidr;
pub mod cni;
mod families;
mod forwarding;
mod guard;
mod host_ports;
mod ipam;
mod node;
mod overlap;
mod port_filter;
mod routes;
mod rules;
mod segment;
mod state;
#[cfg(feature = "testing")]
pub mod testing;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use async_trait::async_trait;

pub use bandwidth::{Bandwidth, BandwidthError};
pub use bridge::{Bridge, BridgeConfig, Isolation, Port};
pub use cidr::{Cidr, CidrError};
pub use families::{Addresses, Cidrs, FamiliesError, OfFamily, PerFamily};
pub use ferrite_nft::IpFamily;
pub use host_ports::{HostPort, PortProtocol, published_ports};
pub use node::{machine_addresses, node_address, node_addresses};
pub use routes::{
    Changes, Encapsulation, Peer, Router, RouterConfig, VXLAN_OVERHEAD, VXLAN_OVERHEAD_IPV6, pod_mtu,
    pod_mtu_in,
};
pub use rules::policy_table;
pub use segment::{Segment, remove_port, set_port};

/// The pod of a sandbox, and its requests to the network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The pod comes from a file or URL of the node. The API server may not know it.
    pub is_static: bool,
    /// Ports of the node that lead to the pod.
    pub host_ports: Vec<HostPort>,
    pub bandwidth: Bandwidth,
}

/// The result of attaching a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attachment {
    /// The pod's addresses, the primary one first. Never empty.
    pub ips: Vec<IpAddr>,
}

/// Decides about the packets of pods: it knows of every pod before the pod has a link.
#[async_trait]
pub trait PodGuard: Send + Sync {
    /// Returns when the packets of a new pod will be judged. A failure keeps the pod from the network.
    async fn cover(&self, sandbox: &str, pod: &PodRef, addresses: &[IpAddr]) -> Result<(), NetworkError>;

    /// The pod has no link any more.
    async fn uncover(&self, sandbox: &str);
}

/// Connects sandboxes to the pod network.
#[async_trait]
pub trait PodNetwork: Send + Sync {
    /// Gives the network namespace at `netns` its interfaces, addresses and routes.
    ///
    /// Repeating it for the same sandbox, also after a crash in the middle of an earlier call, completes
    /// the work and answers with the same addresses.
    async fn attach(&self, sandbox: &str, netns: &Path, pod: &PodRef) -> Result<Attachment, NetworkError>;

    /// Undoes [`attach`](Self::attach). Succeeds for a sandbox that was never attached and when the
    /// namespace is gone already.
    async fn detach(&self, sandbox: &str, netns: &Path) -> Result<(), NetworkError>;

    /// Checks that pods can be attached now; the error text says why not, for the node's `NetworkReady`
    /// condition.
    fn ready(&self) -> Result<(), NotReady>;
}

/// Why no pod can be attached now, with all causes: the message of the node's `NetworkReady` condition.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct NotReady(pub String);

/// Why the network could not be made, joined, left or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NetworkError {
    /// The kernel refused a change of links, addresses, routes or rules.
    #[error("{what}")]
    Netlink {
        what: String,
        #[source]
        source: Box<ferrite_netlink::Error>,
    },
    /// The kernel refused rules, or did not show them.
    #[error("{what}")]
    Rules {
        what: &'static str,
        #[source]
        source: Box<ferrite_nft::KernelError>,
    },
    /// A network of plugins failed.
    #[error(transparent)]
    Cni(Box<cni::CniError>),
    /// The guard of the network did not take a pod.
    #[error("cover pod {pod} with network policies: {what}")]
    Guard { pod: String, what: String },
    /// A file of the network's state could not be read or written.
    #[error("network state {}: {what}", path.display())]
    State {
        path: PathBuf,
        what: &'static str,
        #[source]
        source: std::io::Error,
    },
    /// Another process works on the same state directory.
    #[error("network state {} is in use by another process", .0.display())]
    Locked(PathBuf),
    /// Every address of the node's range is taken.
    #[error(
        "no free address in {range}: all {capacity} are in use; remove pods or give the node a larger pod CIDR"
    )]
    Exhausted { range: String, capacity: u128 },
    /// Some of several failed; the others are done.
    #[error("{what}: {} failed, the first one is", failed.len())]
    Several {
        what: &'static str,
        /// At least one.
        #[source]
        first: Box<NetworkError>,
        /// The parts that failed, with the reasons.
        failed: Vec<String>,
    },
    /// The configuration cannot work.
    #[error("network configuration: {0}")]
    Config(String),
    /// A sandbox identifier that cannot name a reservation.
    #[error("{0:?} is not a sandbox id: 1 to 128 letters, digits, '-', '_' or '.' are allowed")]
    BadSandbox(String),
    /// The pod's network namespace could not be opened.
    #[error("network namespace {}", path.display())]
    Netns {
        path: PathBuf,
        #[source]
        source: Box<ferrite_netlink::Error>,
    },
    /// Something else already uses a name this network needs.
    #[error("{0}")]
    Conflict(String),
    /// [`Bridge::remove`] has run; the network is gone.
    #[error("the pod network {0} has been removed")]
    Removed(String),
}

/// Collects the failures of independent steps.
pub(crate) struct Failures {
    what: &'static str,
    first: Option<NetworkError>,
    failed: Vec<String>,
}

impl Failures {
    pub(crate) fn new(what: &'static str) -> Self {
        Self { what, first: None, failed: Vec::new() }
    }

    /// Notes the end of one step; a failure is logged.
    pub(crate) fn note(&mut self, step: &str, result: Result<(), NetworkError>) {
        let Err(error) = result else { return };
        let causes = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        let text = causes.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        tracing::warn!(step, error = text, "cannot {}", self.what);
        self.failed.push(format!("{step}: {text}"));
        self.first.get_or_insert(error);
    }

    pub(crate) fn result(self) -> Result<(), NetworkError> {
        match self.first {
            None => Ok(()),
            Some(first) => {
                Err(NetworkError::Several { what: self.what, first: Box::new(first), failed: self.failed })
            }
        }
    }
}

impl NetworkError {
    pub(crate) fn netlink(what: impl Into<String>) -> impl FnOnce(ferrite_netlink::Error) -> Self {
        let what = what.into();
        move |source| Self::Netlink { what, source: Box::new(source) }
    }
}
