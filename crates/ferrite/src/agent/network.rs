//! A pod network that comes to be when the node has been given a range.

use async_trait::async_trait;
use ferrite_network::{Attachment, Bridge, NetworkError, PodNetwork, PodRef};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Refuses pods until there is a bridge. The node is not Ready for as long.
#[derive(Default)]
pub struct LateNetwork {
    bridge: OnceLock<Arc<Bridge>>,
}

const MISSING: &str = "the node has no pod CIDR yet";

impl LateNetwork {
    /// The bridge is there. The first one stays.
    pub fn set(&self, bridge: Arc<Bridge>) {
        let _ = self.bridge.set(bridge);
    }

    fn get(&self) -> Result<&Arc<Bridge>, NetworkError> {
        self.bridge.get().ok_or_else(|| NetworkError::Config(MISSING.into()))
    }
}

#[async_trait]
impl PodNetwork for LateNetwork {
    async fn attach(&self, sandbox: &str, netns: &Path, pod: &PodRef) -> Result<Attachment, NetworkError> {
        self.get()?.attach(sandbox, netns, pod).await
    }

    async fn detach(&self, sandbox: &str, netns: &Path) -> Result<(), NetworkError> {
        self.get()?.detach(sandbox, netns).await
    }

    fn ready(&self) -> Result<(), ferrite_network::NotReady> {
        match self.bridge.get() {
            Some(bridge) => bridge.ready(),
            None => Err(ferrite_network::NotReady(MISSING.into())),
        }
    }
}
