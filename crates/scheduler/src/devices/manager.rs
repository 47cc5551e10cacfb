//! The devices of the cluster and the claims on them, as far as the API shows them and beyond: allocations that are
//! being written count already.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ferrite_client::resource_claims::allocation;
use ferrite_client::{Change, ObjectKey};
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use tokio::sync::watch;

use super::allocator::{Allocated, Inventory, Slice};
use super::classes::Classes;
use super::selectors::CompiledSelectors;
use crate::framework::Store;

/// A claim whose allocation the API does not show yet.
#[derive(Debug, Clone)]
enum Ahead {
    /// A pod is on its way to a node with these devices.
    Pending(Arc<AllocationResult>),
    /// These devices are being written. Only the task that writes them knows the outcome.
    Writing(Arc<AllocationResult>),
    /// The allocation was written; the informer has not seen it.
    Written(Arc<ResourceClaim>),
}

#[derive(Debug, Default)]
struct State {
    inventory: Arc<Inventory>,
    classes: Classes,
    /// Claims that have devices, by UID.
    allocated: HashMap<String, Arc<AllocationResult>>,
    /// Claims that are ahead of the informer, by UID.
    ahead: HashMap<String, Ahead>,
}

/// The state of dynamic resource allocation, shared by all profiles.
#[derive(Debug)]
pub(crate) struct Devices {
    claims: Store<ResourceClaim>,
    state: Mutex<State>,
    pub(crate) selectors: CompiledSelectors,
    /// Counts changes of claims, to wake those who wait for a condition of a device.
    changes: watch::Sender<u64>,
}

fn uid_of(claim: &ResourceClaim) -> &str {
    claim.metadata.uid.as_deref().unwrap_or_default()
}

/// True if the informer's claim is at least as new as the one that was written.
fn has_caught_up(seen: &ResourceClaim, written: &ResourceClaim) -> bool {
    let version = |claim: &ResourceClaim| {
        claim.metadata.resource_version.as_deref().and_then(|version| version.parse::<u64>().ok())
    };
    match (version(seen), version(written)) {
        (Some(seen), Some(written)) => seen >= written,
        _ => true,
    }
}

impl Devices {
    pub(crate) fn new(claims: Store<ResourceClaim>) -> Self {
        let (state, selectors) = (Mutex::default(), CompiledSelectors::default());
        Self { claims, state, selectors, changes: watch::Sender::new(0) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn claim_changed(&self, change: &Change<ResourceClaim>) {
        let claim = change.object();
        let uid = uid_of(claim);
        let mut state = self.state();
        match (change, allocation(claim)) {
            (Change::Deleted(_), _) => {
                state.allocated.remove(uid);
                // A pending allocation belongs to the pod that is being bound, which takes it back when that fails.
                if matches!(state.ahead.get(uid), Some(Ahead::Written(_))) {
                    state.ahead.remove(uid);
                }
            }
            (_, allocation) => {
                if let Some(Ahead::Written(written)) = state.ahead.get(uid)
                    && has_caught_up(claim, written)
                {
                    state.ahead.remove(uid);
                }
                match allocation {
                    Some(allocation) => {
                        state.allocated.insert(uid.to_owned(), Arc::new(allocation.clone()));
                    }
                    None => {
                        state.allocated.remove(uid);
                    }
                }
            }
        }
        drop(state);
        self.changes.send_modify(|count| *count += 1);
    }

    pub(crate) fn slice_changed(&self, change: &Change<ResourceSlice>) {
        let slice = change.object();
        let read = (!matches!(change, Change::Deleted(_))).then(|| Slice::new(slice.clone()));
        let mut state = self.state();
        let inventory = Arc::make_mut(&mut state.inventory);
        match read {
            Some(slice) => inventory.insert(slice),
            None => inventory.remove(slice.metadata.name.as_deref().unwrap_or_default()),
        }
    }

    pub(crate) fn class_changed(&self, change: &Change<DeviceClass>) {
        let class = change.object();
        let mut state = self.state();
        match change {
            Change::Deleted(_) => state.classes.remove(class.metadata.name.as_deref().unwrap_or_default()),
            _ => state.classes.set(class.clone()),
        }
    }

    /// The claim, as it was last written or seen.
    pub(crate) fn claim(&self, key: &ObjectKey) -> Option<Arc<ResourceClaim>> {
        let seen = self.claims.get(key)?;
        match self.state().ahead.get(uid_of(&seen)) {
            Some(Ahead::Written(written)) if !has_caught_up(&seen, written) => Some(written.clone()),
            _ => Some(seen),
        }
    }

    /// All claims of the namespace, as the informer has them.
    pub(crate) fn claims_in(&self, namespace: &str) -> Vec<Arc<ResourceClaim>> {
        self.claims.list_in(namespace)
    }

    pub(crate) fn class(&self, name: &str) -> Option<Arc<DeviceClass>> {
        self.state().classes.get(name)
    }

    /// The class that provides an extended resource.
    pub(crate) fn class_behind(&self, resource: &str) -> Option<Arc<DeviceClass>> {
        self.state().classes.behind(resource)
    }

    /// All devices, and those that claims have or are about to get.
    pub(crate) fn snapshot(&self) -> (Arc<Inventory>, Allocated) {
        let state = self.state();
        let mut allocated = Allocated::default();
        for (uid, allocation) in &state.allocated {
            if !state.ahead.contains_key(uid) {
                allocated.add(allocation);
            }
        }
        for ahead in state.ahead.values() {
            match ahead {
                Ahead::Pending(devices) | Ahead::Writing(devices) => allocated.add(devices),
                Ahead::Written(claim) => {
                    if let Some(devices) = allocation(claim) {
                        allocated.add(devices);
                    }
                }
            }
        }
        (state.inventory.clone(), allocated)
    }

    /// True while a pod is on its way to a node with devices for the claim.
    pub(crate) fn is_pending(&self, uid: &str) -> bool {
        matches!(self.state().ahead.get(uid), Some(Ahead::Pending(_) | Ahead::Writing(_)))
    }

    /// Devices are taken for the claim from now on.
    pub(crate) fn set_pending(&self, uid: &str, devices: Arc<AllocationResult>) {
        self.state().ahead.insert(uid.to_owned(), Ahead::Pending(devices));
    }

    /// The devices of a pending allocation are free again.
    pub(crate) fn remove_pending(&self, uid: &str) {
        let mut state = self.state();
        if matches!(state.ahead.get(uid), Some(Ahead::Pending(_))) {
            state.ahead.remove(uid);
        }
    }

    /// A pending allocation is being written: nobody but the writer ends it.
    pub(crate) fn begin_write(&self, uid: &str) {
        let mut state = self.state();
        if let Some(Ahead::Pending(devices)) = state.ahead.get(uid) {
            let devices = devices.clone();
            state.ahead.insert(uid.to_owned(), Ahead::Writing(devices));
        }
    }

    /// Writing the allocation failed.
    pub(crate) fn end_write(&self, uid: &str) {
        let mut state = self.state();
        if matches!(state.ahead.get(uid), Some(Ahead::Writing(_))) {
            state.ahead.remove(uid);
        }
    }

    /// The claim was written like this. It counts until the informer has seen it.
    pub(crate) fn written(&self, claim: Arc<ResourceClaim>) {
        let key = ObjectKey::of(&*claim);
        let uid = uid_of(&claim).to_owned();
        let mut state = self.state();
        state.ahead.insert(uid.clone(), Ahead::Written(claim.clone()));
        // The informer may have been faster.
        if self.claims.get(&key).is_some_and(|seen| uid_of(&seen) == uid && has_caught_up(&seen, &claim)) {
            state.ahead.remove(&uid);
        }
    }

    /// Wakes at each change of a claim.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
