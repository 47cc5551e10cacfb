//! The guard of a network, which may start after the network.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use crate::{NetworkError, NotReady, PodGuard, PodRef};

const MISSING: &str = "network policies are not enforced on this node yet";

/// The place of a guard.
#[derive(Default)]
pub(crate) struct GuardSlot {
    guard: OnceLock<Arc<dyn PodGuard>>,
    is_required: AtomicBool,
}

impl GuardSlot {
    /// Refuses pods until there is a guard.
    pub(crate) fn require(&self) {
        self.is_required.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_required(&self) -> bool {
        self.is_required.load(Ordering::SeqCst)
    }

    /// The first guard stays.
    pub(crate) fn set(&self, guard: Arc<dyn PodGuard>) {
        let _ = self.guard.set(guard);
    }

    /// Refuses a pod that nobody would cover.
    pub(crate) fn check(&self, pod: &PodRef) -> Result<(), NetworkError> {
        match self.ready() {
            Ok(()) => Ok(()),
            Err(NotReady(what)) => {
                Err(NetworkError::Guard { pod: format!("{}/{}", pod.namespace, pod.name), what })
            }
        }
    }

    pub(crate) fn ready(&self) -> Result<(), NotReady> {
        match self.is_required() && self.guard.get().is_none() {
            true => Err(NotReady(MISSING.into())),
            false => Ok(()),
        }
    }

    pub(crate) async fn cover(
        &self,
        sandbox: &str,
        pod: &PodRef,
        addresses: &[IpAddr],
    ) -> Result<(), NetworkError> {
        self.check(pod)?;
        match self.guard.get() {
            Some(guard) => guard.cover(sandbox, pod, addresses).await,
            None => Ok(()),
        }
    }

    pub(crate) async fn uncover(&self, sandbox: &str) {
        if let Some(guard) = self.guard.get() {
            guard.uncover(sandbox).await;
        }
    }
}
