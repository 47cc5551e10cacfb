//! Searches for a node that may take long. They run on threads of their own beside the order of cycles, few at a time and
//! one for each namespace: pods that need no such search go on being scheduled.

use std::collections::HashMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use ferrite_component::steps::Timer;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{Failure, Scheduler, record_cycle};
use crate::cycle::{self, Placement, ScheduleError, Search};
use crate::framework::PluginError;
use crate::queue::Popped;
use crate::snapshot::{PodInfo, Snapshot};

/// Searches that run at once.
pub(super) const SEARCHES: usize = 2;
/// Searches for one pod in one attempt: other pods may take the room that a search found.
const TRIES: u32 = 3;
/// The time in which the account of a namespace is halved.
const HALF_LIFE: Duration = Duration::from_secs(60);
/// Accounts below this are forgotten.
const FORGOTTEN: Duration = Duration::from_millis(10);

/// The time that the searches of a namespace have taken.
#[derive(Debug, Clone, Copy)]
struct Account {
    used: Duration,
    at: Instant,
}

impl Account {
    /// The time that still counts: half of it after each half-life.
    fn left(self, now: Instant) -> Duration {
        let halvings = now.saturating_duration_since(self.at).as_secs_f64() / HALF_LIFE.as_secs_f64();
        self.used.mul_f64(0.5f64.powf(halvings))
    }
}

/// The pods that wait for a search, and the namespaces that have one.
#[derive(Debug, Default)]
pub(super) struct Aside {
    /// In the order in which the queue gave them.
    waiting: Vec<Popped>,
    busy: Vec<String>,
    accounts: HashMap<String, Account>,
}

impl Aside {
    pub(super) fn push(&mut self, popped: Popped) {
        self.waiting.push(popped);
    }

    /// The pod whose search begins, until [`end`](Self::end). A namespace whose searches took whole seconds comes after the
    /// others; then priority decides, as in the queue.
    fn begin(&mut self, now: Instant) -> Option<Popped> {
        let used =
            |namespace: &str| self.accounts.get(namespace).map_or(0, |account| account.left(now).as_secs());
        let free = |popped: &Popped| !self.busy.iter().any(|busy| *busy == *popped.pod.key.namespace);
        let order =
            |popped: &Popped| (used(&popped.pod.key.namespace), std::cmp::Reverse(popped.pod.priority));
        let ready = self.waiting.iter().enumerate().filter(|(_, popped)| free(popped));
        let (position, _) = ready.min_by_key(|(position, popped)| (order(popped), *position))?;
        let popped = self.waiting.remove(position);
        self.busy.push(popped.pod.key.namespace.to_string());
        Some(popped)
    }

    fn end(&mut self, namespace: &str, took: Duration, now: Instant) {
        self.busy.retain(|busy| busy != namespace);
        let used = self.accounts.get(namespace).map_or(Duration::ZERO, |account| account.left(now));
        self.accounts.insert(namespace.to_owned(), Account { used: used.saturating_add(took), at: now });
        self.accounts.retain(|_, account| account.left(now) >= FORGOTTEN);
    }
}

/// The end of one search.
enum Outcome {
    Done,
    /// The room that was found has gone.
    Again(Popped),
}

impl Scheduler {
    pub(super) fn aside(&self) -> MutexGuard<'_, Aside> {
        self.aside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if the search for a node may take long.
    pub(super) fn is_costly(&self, pod: &PodInfo) -> bool {
        self.profile_of(pod).is_some_and(|(framework, _)| framework.is_costly(pod))
    }

    pub(super) fn set_aside(&self, popped: Popped) {
        self.aside().push(popped);
        self.wake_aside.notify_waiters();
    }

    /// Searches for nodes, one pod after the other.
    pub(super) async fn search_aside(self: Arc<Self>) {
        loop {
            let mut popped = self.next_aside().await;
            let namespace = popped.pod.key.namespace.to_string();
            let started = Instant::now();
            for attempt in 1..=TRIES {
                match self.try_aside(popped, attempt == TRIES).await {
                    Outcome::Done => break,
                    Outcome::Again(again) => popped = again,
                }
            }
            self.aside().end(&namespace, started.elapsed(), Instant::now());
            self.wake_aside.notify_waiters();
        }
    }

    async fn next_aside(&self) -> Popped {
        loop {
            let woken = self.wake_aside.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            let begun = self.aside().begin(Instant::now());
            if let Some(popped) = begun {
                return popped;
            }
            woken.await;
        }
    }

    async fn try_aside(self: &Arc<Self>, popped: Popped, is_last: bool) -> Outcome {
        let key = popped.pod.key.clone();
        if self.is_gone(&key) || self.cache().is_placed(&key) {
            self.done(&key);
            return Outcome::Done;
        }
        let snapshot = {
            let mut order = self.order.lock().await;
            self.cache().update(&mut order.snapshot);
            order.snapshot.clone()
        };
        let siblings = self.siblings_of(&popped.pod);
        let pod = Arc::new(PodInfo::clone(&popped.pod).with_siblings(siblings));
        let timer = Timer::start();
        let result = self.clone().search_on_thread(pod.clone(), snapshot).await;
        let popped = Popped { pod, ..popped };
        record_cycle(timer, &popped, &result);
        let Ok(permit) = self.bindings.clone().acquire_owned().await else { return Outcome::Done };
        let mut placement = match result {
            Ok(placement) => placement,
            Err(ScheduleError::Unschedulable(error)) => {
                self.fail(popped, Failure::Rejected(error), permit);
                return Outcome::Done;
            }
            Err(ScheduleError::Plugin(error)) => {
                self.fail(popped, error.into(), permit);
                return Outcome::Done;
            }
        };
        // Other cycles went on meanwhile. From here on none does until the pod counts on its node.
        let mut order = self.order.lock().await;
        if self.is_gone(&key) || self.cache().is_placed(&key) {
            self.done(&key);
            return Outcome::Done;
        }
        self.cache().update(&mut order.snapshot);
        let Some((framework, _)) = self.profile_of(&popped.pod) else {
            self.done(&key);
            return Outcome::Done;
        };
        match cycle::confirm(framework, &order.snapshot, &popped.pod, &mut placement) {
            Ok(()) => {
                self.place(popped, placement, permit);
                Outcome::Done
            }
            Err(by) if is_last => {
                let problem = format!("node {}: {} since its search began", placement.node, by.rejection);
                self.fail(popped, Failure::Error(problem), permit);
                Outcome::Done
            }
            Err(_) => Outcome::Again(popped),
        }
    }

    async fn search_on_thread(
        self: Arc<Self>,
        pod: Arc<PodInfo>,
        snapshot: Snapshot,
    ) -> Result<Placement, ScheduleError> {
        let mut search = {
            let Search { start, percentage, .. } = self.order.lock().await.search;
            Search { start, percentage, ..Search::default() }
        };
        let runtime = Handle::current();
        let searched = tokio::task::spawn_blocking(move || {
            let Some((framework, _)) = self.profile_of(&pod) else {
                return Err(PluginError::new("Filter", "", "the profile is gone").into());
            };
            let pick = |candidates: usize| rand::random_range(0..candidates.max(1));
            let schedule = cycle::schedule(framework, &snapshot, &self.extenders, &pod, &mut search, pick);
            runtime.block_on(schedule)
        });
        searched.await.unwrap_or_else(|error| Err(PluginError::new("Filter", "", error).into()))
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;
    use crate::queue::Failures;

    fn popped(namespace: &str, name: &str, priority: i32) -> Popped {
        let pod = json!({"metadata": {"name": name, "namespace": namespace},
            "spec": {"priority": priority, "containers": [{"name": "c"}]}});
        let pod = Arc::new(PodInfo::new(&ferrite_json::from_value(pod).unwrap()));
        Popped {
            pod,
            attempts: 1,
            failures: Failures::default(),
            since: Instant::now(),
            started: Instant::now(),
        }
    }

    fn begin(aside: &mut Aside, now: Instant) -> Option<String> {
        aside.begin(now).map(|popped| popped.pod.key.to_string())
    }

    #[test]
    fn a_namespace_has_one_search_and_the_one_that_used_least_comes_first() {
        let (mut aside, now) = (Aside::default(), Instant::now());
        for (namespace, name, priority) in
            [("a", "1", 0), ("a", "2", 9), ("b", "1", 0), ("a", "3", 9), ("c", "1", 5)]
        {
            aside.push(popped(namespace, name, priority));
        }
        assert_eq!(begin(&mut aside, now).as_deref(), Some("a/2"), "priority decides among equals");
        assert_eq!(begin(&mut aside, now).as_deref(), Some("c/1"), "the next of a namespace waits");
        aside.end("a", Duration::from_secs(9), now);
        assert_eq!(
            begin(&mut aside, now).as_deref(),
            Some("b/1"),
            "a namespace that took seconds comes last"
        );
        assert_eq!(begin(&mut aside, now).as_deref(), Some("a/3"));
        assert_eq!(begin(&mut aside, now), None, "one search for each namespace");
        aside.end("a", Duration::ZERO, now);
        assert_eq!(begin(&mut aside, now).as_deref(), Some("a/1"));
    }

    #[test]
    fn time_is_forgiven() {
        let (mut aside, now) = (Aside::default(), Instant::now());
        aside.end("a", Duration::from_secs(8), now);
        aside.push(popped("a", "1", 9));
        aside.push(popped("b", "1", 0));
        let later = now + HALF_LIFE * 4;
        assert_eq!(begin(&mut aside, later).as_deref(), Some("a/1"));
        aside.end("b", Duration::ZERO, now + HALF_LIFE * 20);
        assert!(aside.accounts.is_empty());
    }
}
