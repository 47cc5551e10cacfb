//! Resizes that wait for room, in upstream's order: those that ask for no more come first, then by the pod's priority, its
//! class, and the time since which they wait.

use super::model::{self, QosClass};
use super::resize;
use crate::container::resources::pod_resources;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A pod that was woken and does not take its turn for so long does not hold up others.
const TURN: Duration = Duration::from_secs(10);

#[derive(Debug, Clone)]
struct Pending {
    /// With the resources that it asks for.
    pod: Arc<Pod>,
    increases: bool,
    since: Timestamp,
    woken: Option<Timestamp>,
}

type Rank = (bool, Reverse<i32>, bool, Timestamp);

impl Pending {
    fn rank(&self) -> Rank {
        let priority = model::spec(&self.pod).priority.unwrap_or(0);
        let guaranteed = model::qos_class(&self.pod) == QosClass::Guaranteed;
        (self.increases, Reverse(priority), !guaranteed, self.since)
    }
}

/// The pods of the node whose resizes wait, and the resources that were allocated by resizes: the API shows them later.
#[derive(Debug, Default)]
pub(crate) struct PendingResizes {
    pods: Mutex<HashMap<String, Pending>>,
    allocated: Mutex<HashMap<String, Arc<Pod>>>,
    /// One pod at a time looks for room and takes it.
    turn: Mutex<()>,
}

impl PendingResizes {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Pending>> {
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// While this is held, no other pod takes room.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocations(&self) -> MutexGuard<'_, HashMap<String, Arc<Pod>>> {
        self.allocated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pod has these resources from now on. Returns the pod that was noted before.
    pub(super) fn allocate(&self, uid: &str, pod: Option<Arc<Pod>>) -> Option<Arc<Pod>> {
        match pod {
            Some(pod) => self.allocations().insert(uid.to_owned(), pod),
            None => self.allocations().remove(uid),
        }
    }

    /// A pod of the API with the resources that are allocated to it.
    pub(super) fn allocated<'a>(&self, pod: &'a Pod) -> Cow<'a, Pod> {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        match self.allocations().get(uid) {
            Some(allocated) => Cow::Owned((**allocated).clone()),
            None => resize::allocated_by_status(pod),
        }
    }

    /// Notes that a pod waits for other resources than are allocated to it.
    pub(super) fn add(&self, uid: &str, pod: &Arc<Pod>, allocated: &Pod, now: Timestamp) {
        let (wants, has) = (pod_resources(pod), pod_resources(allocated));
        let increases = wants.cpu_request > has.cpu_request || wants.memory_request > has.memory_request;
        let mut pods = self.lock();
        match pods.get_mut(uid) {
            Some(known) => (known.pod, known.increases) = (pod.clone(), increases),
            None => {
                let pending = Pending { pod: pod.clone(), increases, since: now, woken: None };
                pods.insert(uid.to_owned(), pending);
            }
        }
    }

    /// The pod waits no longer. Returns true if it did.
    pub(super) fn remove(&self, uid: &str) -> bool {
        self.lock().remove(uid).is_some()
    }

    /// UIDs of the pods that wait, the first in turn first.
    pub(super) fn in_order(&self) -> Vec<String> {
        let pods = self.lock();
        let mut all: Vec<(Rank, &String)> = pods.iter().map(|(uid, pending)| (pending.rank(), uid)).collect();
        all.sort();
        all.into_iter().map(|(_, uid)| uid.clone()).collect()
    }

    /// The pod that is to be resized before this one: it comes first, fits, and takes its turn.
    pub(super) fn before(&self, uid: &str, now: Timestamp, fits: impl Fn(&Pod) -> bool) -> Option<String> {
        let ahead: Vec<String> = self.in_order().into_iter().take_while(|other| other != uid).collect();
        for other in ahead {
            let Some(pending) = self.lock().get(&other).cloned() else { continue };
            let late = pending.woken.is_some_and(|at| crate::clock::since(at, now) > TURN);
            if late || !fits(&pending.pod) {
                continue;
            }
            if let Some(pending) = self.lock().get_mut(&other) {
                pending.woken.get_or_insert(now);
            }
            return Some(other);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn pod(name: &str, priority: i32, resources: Value) -> Arc<Pod> {
        let pod = json!({"metadata": {"name": name, "uid": name}, "spec": {"priority": priority,
            "containers": [{"name": "c", "resources": resources}]}});
        Arc::new(ferrite_json::from_value(pod).unwrap())
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    #[test]
    fn the_order_of_upstream() {
        let all = json!({"requests": {"cpu": "2", "memory": "1"}, "limits": {"cpu": "2", "memory": "1"}});
        let some = json!({"requests": {"cpu": "2"}});
        let small = pod("x", 0, json!({"requests": {"cpu": "1"}}));
        let large = pod("x", 0, json!({"requests": {"cpu": "3"}}));
        let pending = PendingResizes::default();
        pending.add("late", &pod("late", 0, some.clone()), &small, at(20));
        pending.add("early", &pod("early", 0, some.clone()), &small, at(10));
        pending.add("guaranteed", &pod("guaranteed", 0, all), &small, at(30));
        pending.add("important", &pod("important", 5, some.clone()), &small, at(40));
        pending.add("smaller", &pod("smaller", -5, some.clone()), &large, at(50));
        pending.add("early", &pod("early", 0, some), &small, at(60));
        assert_eq!(pending.in_order(), ["smaller", "important", "guaranteed", "early", "late"]);
        // The first one of those before it that fits goes first, for a while.
        let fits = |pod: &Pod| pod.metadata.name.as_deref() == Some("guaranteed");
        assert_eq!(pending.before("late", at(100), fits).as_deref(), Some("guaranteed"));
        assert_eq!(pending.before("late", at(105), fits).as_deref(), Some("guaranteed"));
        assert_eq!(pending.before("late", at(200), fits), None, "it did not take its turn");
        assert_eq!(pending.before("smaller", at(100), |_| true), None);
        assert!(pending.remove("smaller") && !pending.remove("smaller"));
        assert_eq!(pending.before("important", at(100), |_| true), None);
    }
}
