//! Pods that wait: for a cycle (*active*), for their back-off to pass (*backoff*), or for something to change in the
//! cluster (*unschedulable*). Time and hints are arguments; waiting is the caller's.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use ferrite_client::ObjectKey;
use tokio::time::Instant;

use crate::framework::ClusterEvent;
use crate::snapshot::PodInfo;

const INITIAL_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// A pod that nothing woke for this long is tried again, in case a hint was wrong.
const LONGEST_WAIT: Duration = Duration::from_secs(5 * 60);
/// Events remembered for pods in flight; a pod that was in flight for more is tried again.
const REMEMBERED_EVENTS: usize = 4096;
/// Named as the rejecting plugin of pods that hold themselves back.
pub const SCHEDULING_GATES: &str = "SchedulingGates";

/// Decides whether an event may help a pod these plugins rejected.
pub type Hint<'a> = &'a dyn Fn(&PodInfo, &[&'static str], &ClusterEvent) -> bool;

/// A pod taken from the queue, to be given back by [`Queue::done`] or [`Queue::give_back`].
#[derive(Debug)]
pub struct Popped {
    pub pod: Arc<PodInfo>,
    pub attempts: u32,
    /// When it first entered the queue.
    pub since: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Active((Reverse<i32>, Instant, u64)),
    Backoff((Instant, u64)),
    /// With the time at which it is tried again whatever happens.
    Unschedulable((Instant, u64)),
}

#[derive(Debug)]
struct Waiting {
    pod: Arc<PodInfo>,
    attempts: u32,
    since: Instant,
    /// End of its back-off.
    ready_at: Instant,
    rejected_by: Vec<&'static str>,
    place: Place,
}

#[derive(Debug)]
struct InFlight {
    /// Events with at least this number happened while it was in flight.
    from: u64,
    /// The newest version, if it changed meanwhile.
    latest: Option<Arc<PodInfo>>,
    deleted: bool,
}

#[derive(Debug, Default)]
pub struct Queue {
    waiting: HashMap<ObjectKey, Waiting>,
    active: BTreeMap<(Reverse<i32>, Instant, u64), ObjectKey>,
    backoff: BTreeMap<(Instant, u64), ObjectKey>,
    unschedulable: BTreeMap<(Instant, u64), ObjectKey>,
    in_flight: HashMap<ObjectKey, InFlight>,
    events: VecDeque<(u64, ClusterEvent)>,
    next_event: u64,
    sequence: u64,
}

fn backoff(attempts: u32) -> Duration {
    let doublings = attempts.saturating_sub(1).min(16);
    INITIAL_BACKOFF.saturating_mul(1 << doublings).min(MAX_BACKOFF)
}

impl Queue {
    pub fn new() -> Self {
        Self::default()
    }

    /// How many pods are (active, backing off, unschedulable).
    pub fn lengths(&self) -> (usize, usize, usize) {
        (self.active.len(), self.backoff.len(), self.unschedulable.len())
    }

    /// A pending pod was seen for the first time, or changed.
    pub fn set(&mut self, pod: Arc<PodInfo>, now: Instant) {
        let key = pod.key.clone();
        if let Some(flying) = self.in_flight.get_mut(&key) {
            flying.latest = Some(pod);
            return;
        }
        let Some(known) = self.waiting.get_mut(&key) else {
            let gated = pod.placement.is_gated;
            let waiting = Waiting {
                pod,
                attempts: 0,
                since: now,
                ready_at: now,
                rejected_by: if gated { vec![SCHEDULING_GATES] } else { Vec::new() },
                place: Place::Unschedulable((now, 0)),
            };
            if gated {
                self.park(waiting, now)
            } else {
                self.enqueue(waiting, now)
            }
            return;
        };
        let changed = pod.differs_from(&known.pod);
        known.pod = pod;
        if changed && let Some(mut waiting) = self.take(&key) {
            if waiting.pod.placement.is_gated {
                waiting.rejected_by = vec![SCHEDULING_GATES];
                self.park(waiting, now);
            } else {
                self.enqueue(waiting, now);
            }
        }
    }

    /// The pod is gone, or has a node.
    pub fn remove(&mut self, key: &ObjectKey) {
        if let Some(flying) = self.in_flight.get_mut(key) {
            flying.deleted = true;
        }
        self.take(key);
    }

    /// The pod whose turn it is: highest priority, then longest waiting.
    pub fn pop(&mut self, now: Instant) -> Option<Popped> {
        self.promote(now);
        let (_, key) = self.active.pop_first()?;
        let waiting = self.waiting.remove(&key)?;
        let flying = InFlight { from: self.next_event, latest: None, deleted: false };
        self.in_flight.insert(key, flying);
        Some(Popped { pod: waiting.pod, attempts: waiting.attempts + 1, since: waiting.since })
    }

    /// When [`pop`](Queue::pop) could next have a pod without anything being added.
    pub fn next_due(&self) -> Option<Instant> {
        let backoff = self.backoff.first_key_value().map(|((at, _), _)| *at);
        let unschedulable = self.unschedulable.first_key_value().map(|((at, _), _)| *at);
        backoff.into_iter().chain(unschedulable).min()
    }

    /// The pod was bound, or is of no interest any more.
    pub fn done(&mut self, key: &ObjectKey) {
        self.in_flight.remove(key);
        self.forget_events();
    }

    /// No node was found, or binding failed. It waits for an event that helps, unless one came already while it was
    /// in flight, or nobody in particular rejected it (`rejected_by` is empty): then only for its back-off.
    pub fn give_back(
        &mut self,
        popped: Popped,
        rejected_by: Vec<&'static str>,
        now: Instant,
        hint: Hint<'_>,
    ) {
        let key = popped.pod.key.clone();
        let Some(flying) = self.in_flight.remove(&key) else { return };
        if !flying.deleted {
            let changed = flying.latest.as_ref().is_some_and(|latest| latest.differs_from(&popped.pod));
            let forgot = self.events.front().map_or(self.next_event, |(number, _)| *number) > flying.from;
            let helped = rejected_by.is_empty()
                || changed
                || forgot
                || self
                    .events
                    .iter()
                    .filter(|(number, _)| *number >= flying.from)
                    .any(|(_, event)| hint(&popped.pod, &rejected_by, event));
            let waiting = Waiting {
                pod: flying.latest.unwrap_or(popped.pod),
                attempts: popped.attempts,
                since: popped.since,
                ready_at: now + backoff(popped.attempts),
                rejected_by,
                place: Place::Unschedulable((now, 0)),
            };
            if helped { self.enqueue(waiting, now) } else { self.park(waiting, now) }
        }
        self.forget_events();
    }

    /// Something happened in the cluster: pods it may help leave the unschedulable part.
    pub fn on_event(&mut self, event: ClusterEvent, now: Instant, hint: Hint<'_>) {
        let helped: Vec<ObjectKey> = self
            .unschedulable
            .values()
            .filter(|key| {
                self.waiting.get(*key).is_some_and(|waiting| hint(&waiting.pod, &waiting.rejected_by, &event))
            })
            .cloned()
            .collect();
        for key in helped {
            if let Some(waiting) = self.take(&key) {
                self.enqueue(waiting, now);
            }
        }
        if !self.in_flight.is_empty() {
            if self.events.len() == REMEMBERED_EVENTS {
                self.events.pop_front();
            }
            self.events.push_back((self.next_event, event));
        }
        self.next_event += 1;
    }

    fn forget_events(&mut self) {
        match self.in_flight.values().map(|flying| flying.from).min() {
            None => self.events.clear(),
            Some(oldest) => {
                while self.events.front().is_some_and(|(number, _)| *number < oldest) {
                    self.events.pop_front();
                }
            }
        }
    }

    /// To the active part, or to the backoff part until it may.
    fn enqueue(&mut self, mut waiting: Waiting, now: Instant) {
        self.sequence += 1;
        let key = waiting.pod.key.clone();
        if waiting.ready_at > now {
            let at = (waiting.ready_at, self.sequence);
            waiting.place = Place::Backoff(at);
            self.backoff.insert(at, key.clone());
        } else {
            let at = (Reverse(waiting.pod.priority), waiting.since, self.sequence);
            waiting.place = Place::Active(at);
            self.active.insert(at, key.clone());
        }
        self.waiting.insert(key, waiting);
    }

    fn park(&mut self, mut waiting: Waiting, now: Instant) {
        self.sequence += 1;
        let at = (now + LONGEST_WAIT, self.sequence);
        waiting.place = Place::Unschedulable(at);
        let key = waiting.pod.key.clone();
        self.unschedulable.insert(at, key.clone());
        self.waiting.insert(key, waiting);
    }

    fn take(&mut self, key: &ObjectKey) -> Option<Waiting> {
        let waiting = self.waiting.remove(key)?;
        match waiting.place {
            Place::Active(at) => self.active.remove(&at),
            Place::Backoff(at) => self.backoff.remove(&at),
            Place::Unschedulable(at) => self.unschedulable.remove(&at),
        };
        Some(waiting)
    }

    fn promote(&mut self, now: Instant) {
        let due = |part: &BTreeMap<(Instant, u64), ObjectKey>| -> Vec<ObjectKey> {
            part.iter().take_while(|((at, _), _)| *at <= now).map(|(_, key)| key.clone()).collect()
        };
        for key in due(&self.backoff).into_iter().chain(due(&self.unschedulable)) {
            if let Some(waiting) = self.take(&key) {
                if waiting.pod.placement.is_gated {
                    self.park(waiting, now);
                } else {
                    self.enqueue(waiting, now);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    fn pod(name: &str, priority: i32, gates: &[&str]) -> Arc<PodInfo> {
        let gates: Vec<_> = gates.iter().map(|name| json!({"name": name})).collect();
        let pod = ferrite_json::from_value(json!({"metadata": {"name": name, "namespace": "ns"},
            "spec": {"containers": [], "priority": priority, "schedulingGates": gates}}));
        Arc::new(PodInfo::new(&pod.unwrap()))
    }

    fn never(_: &PodInfo, _: &[&'static str], _: &ClusterEvent) -> bool {
        false
    }

    fn always(_: &PodInfo, rejected_by: &[&'static str], _: &ClusterEvent) -> bool {
        rejected_by != [SCHEDULING_GATES]
    }

    fn pop(queue: &mut Queue, now: Instant) -> Option<String> {
        queue.pop(now).map(|popped| popped.pod.key.name.to_string())
    }

    #[test]
    fn priority_then_age() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        for (name, priority, second) in [("old", 0, 0), ("young", 0, 1), ("high", 5, 2)] {
            queue.set(pod(name, priority, &[]), now + Duration::from_secs(second));
        }
        let later = now + Duration::from_secs(9);
        let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue, later)).collect();
        assert_eq!(order, ["high", "old", "young"]);
    }

    #[test]
    fn a_rejected_pod_waits_for_a_helpful_event_and_its_back_off() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["NodeResourcesFit"], now, &never);
        assert_eq!(queue.lengths(), (0, 0, 1));
        queue.on_event(ClusterEvent::Other, now, &never);
        assert_eq!(queue.lengths(), (0, 0, 1));
        queue.on_event(ClusterEvent::Other, now, &always);
        assert_eq!(queue.lengths(), (0, 1, 0), "its back-off of one second runs");
        assert_eq!(queue.next_due(), Some(now + Duration::from_secs(1)));
        assert_eq!(pop(&mut queue, now), None);
        assert_eq!(pop(&mut queue, now + Duration::from_secs(1)).as_deref(), Some("a"));
    }

    #[test]
    fn events_during_the_cycle_are_not_missed() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.on_event(ClusterEvent::Other, now, &always);
        queue.give_back(popped, vec!["NodeResourcesFit"], now, &always);
        assert_eq!(queue.lengths(), (0, 1, 0));
        assert!(queue.events.is_empty(), "nothing is in flight any more");
    }

    #[test]
    fn back_off_doubles_to_ten_seconds() {
        let seconds: Vec<_> = (1..7).map(|attempts| backoff(attempts).as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 10, 10]);
    }

    #[test]
    fn forgotten_pods_are_tried_again_after_a_while() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.give_back(popped, vec!["X"], now, &never);
        assert_eq!(pop(&mut queue, now + LONGEST_WAIT).as_deref(), Some("a"));
    }

    #[test]
    fn gates_hold_a_pod_until_they_are_gone() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        queue.set(pod("a", 0, &["g"]), now);
        queue.on_event(ClusterEvent::Other, now, &always);
        assert_eq!(pop(&mut queue, now + LONGEST_WAIT), None);
        queue.set(pod("a", 0, &[]), now);
        assert_eq!(pop(&mut queue, now).as_deref(), Some("a"));
    }

    #[test]
    fn changes_and_deletions_reach_pods_in_every_part() {
        let (mut queue, now) = (Queue::new(), Instant::now());
        queue.set(pod("a", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.set(pod("a", 7, &[]), now);
        queue.give_back(popped, vec!["X"], now, &never);
        assert_eq!(queue.lengths(), (0, 1, 0), "it changed while in flight");
        queue.remove(&ObjectKey::new("ns", "a"));
        assert_eq!(queue.lengths(), (0, 0, 0));

        queue.set(pod("b", 0, &[]), now);
        let popped = queue.pop(now).unwrap();
        queue.remove(&popped.pod.key.clone());
        queue.give_back(popped, vec!["X"], now, &never);
        assert_eq!(queue.lengths(), (0, 0, 0), "deleted while in flight");
    }
}
