//! All pods of the node, wherever they come from.

use crate::sources::LocalPods;
use crate::sources::mirror::is_mirror;
use ferrite_client::{Informer, ObjectKey};
use k8s_openapi::api::core::v1::Pod;
use std::sync::Arc;

/// Pods that the API has bound to this node, and static pods.
pub(crate) struct PodTable {
    api: Informer<Pod>,
    local: Arc<LocalPods>,
}

impl PodTable {
    pub(crate) fn new(api: Informer<Pod>, local: Arc<LocalPods>) -> Self {
        Self { api, local }
    }

    /// Pods of the API, among them mirrors of static pods.
    pub(crate) fn api(&self) -> &Informer<Pod> {
        &self.api
    }

    pub(crate) fn local(&self) -> &Arc<LocalPods> {
        &self.local
    }

    /// The mirror pods: the static pods as the API shows them.
    pub(crate) fn mirrors(&self) -> Vec<Arc<Pod>> {
        self.api.list().into_iter().filter(|pod| is_mirror(pod)).collect()
    }

    /// Pods of the API that should run here.
    pub(crate) fn remote(&self) -> Vec<Arc<Pod>> {
        self.api.list().into_iter().filter(|pod| !is_mirror(pod)).collect()
    }

    /// Every pod that should run here.
    pub(crate) fn list(&self) -> Vec<Arc<Pod>> {
        let mut pods = self.local.list();
        pods.extend(self.remote());
        pods
    }

    pub(crate) fn get(&self, key: &ObjectKey) -> Option<Arc<Pod>> {
        self.local.get(key).or_else(|| self.api.get(key).filter(|pod| !is_mirror(pod)))
    }
}
