//! Pods that do not come from the API: manifests in a directory of the node, or behind a URL ("static pods").
//!
//! A source reads manifests (`manifest`) and gives the whole set to [`LocalPods`]; workers run them as they run pods of
//! the API, and keep their status there. `mirror` shows each in the API as a mirror pod.

mod directory;
mod manifest;
pub(crate) mod mirror;
mod url;

pub(crate) use directory::DirectorySource;
pub(crate) use url::{UrlError, UrlSource};

use ferrite_client::ObjectKey;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Where a static pod comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Source {
    File,
    Url,
}

impl Source {
    /// The value of the annotation `kubernetes.io/config.source`.
    fn name(self) -> &'static str {
        match self {
            Source::File => "file",
            Source::Url => "http",
        }
    }
}

#[derive(Default)]
struct State {
    /// The pods of each source, none before its first answer.
    sources: BTreeMap<Source, Option<Vec<Arc<Pod>>>>,
    /// By the pod's UID.
    statuses: BTreeMap<String, PodStatus>,
}

/// The static pods of the node and how they fare.
#[derive(Default)]
pub(crate) struct LocalPods {
    state: Mutex<State>,
    /// Counts changes of the wanted pods.
    wanted: watch::Sender<u64>,
    /// Counts changes of anything.
    changed: watch::Sender<u64>,
}

impl LocalPods {
    pub(crate) fn new(sources: impl IntoIterator<Item = Source>) -> Self {
        let sources = sources.into_iter().map(|source| (source, None)).collect();
        Self { state: Mutex::new(State { sources, ..State::default() }), ..Self::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Replaces the pods of a source. A pod that is there already stays the same object.
    pub(crate) fn set(&self, source: Source, pods: Vec<Pod>) {
        let mut state = self.lock();
        let before = state.sources.get(&source).cloned().flatten();
        let kept = |pod: &Pod| {
            before.iter().flatten().find(|old| old.metadata.uid == pod.metadata.uid).map(Arc::clone)
        };
        let after: Vec<Arc<Pod>> =
            pods.into_iter().map(|pod| kept(&pod).unwrap_or_else(|| Arc::new(pod))).collect();
        let uids = |pods: &[Arc<Pod>]| pods.iter().map(|p| p.metadata.uid.clone()).collect::<Vec<_>>();
        let same = before.as_deref().is_some_and(|before| uids(before) == uids(&after));
        state.sources.insert(source, Some(after));
        drop(state);
        if !same {
            self.wanted.send_modify(|count| *count += 1);
            self.changed.send_modify(|count| *count += 1);
        }
    }

    /// Waits until every source has answered once: before that nobody knows which pods are left over.
    pub(crate) async fn ready(&self) {
        let all_answered = || self.lock().sources.values().all(Option::is_some);
        let mut wanted = self.wanted.subscribe();
        while !all_answered() {
            if wanted.changed().await.is_err() {
                return;
            }
        }
    }

    pub(crate) fn wanted_changes(&self) -> watch::Receiver<u64> {
        self.wanted.subscribe()
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The pods that should run, with their status. Of several with one name the first one counts.
    pub(crate) fn list(&self) -> Vec<Arc<Pod>> {
        let state = self.lock();
        let mut names = BTreeSet::new();
        let pods = state.sources.values().flatten().flatten();
        let first =
            pods.filter(|pod| names.insert((pod.metadata.namespace.clone(), pod.metadata.name.clone())));
        first.map(|pod| shown(pod, &state.statuses)).collect()
    }

    pub(crate) fn get(&self, key: &ObjectKey) -> Option<Arc<Pod>> {
        let all = self.list();
        all.into_iter().find(|pod| {
            pod.metadata.namespace.as_deref() == Some(&*key.namespace)
                && pod.metadata.name.as_deref() == Some(&*key.name)
        })
    }

    /// The pod with the status it was last given.
    pub(crate) fn with_status(&self, pod: &Arc<Pod>) -> Arc<Pod> {
        shown(pod, &self.lock().statuses)
    }

    /// Publishes the status of a pod.
    pub(crate) fn publish(&self, uid: &str, status: PodStatus) {
        let changed = self.lock().statuses.insert(uid.to_owned(), status.clone()).as_ref() != Some(&status);
        if changed {
            self.changed.send_modify(|count| *count += 1);
        }
    }

    /// Nothing of the pod is left.
    pub(crate) fn forget(&self, uid: &str) {
        self.lock().statuses.remove(uid);
        self.changed.send_modify(|count| *count += 1);
    }
}

fn shown(pod: &Arc<Pod>, statuses: &BTreeMap<String, PodStatus>) -> Arc<Pod> {
    match pod.metadata.uid.as_ref().and_then(|uid| statuses.get(uid)) {
        Some(status) => Arc::new(Pod { status: Some(status.clone()), ..(**pod).clone() }),
        None => Arc::clone(pod),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

    fn pod(name: &str, uid: &str) -> Pod {
        let metadata = ObjectMeta {
            name: Some(name.into()),
            namespace: Some("default".into()),
            uid: Some(uid.into()),
            ..ObjectMeta::default()
        };
        Pod { metadata, ..Pod::default() }
    }

    #[tokio::test]
    async fn pods_come_from_every_source_and_keep_their_status() {
        let pods = LocalPods::new([Source::File, Source::Url]);
        let uids = || pods.list().iter().filter_map(|p| p.metadata.uid.clone()).collect::<Vec<_>>().join(" ");
        pods.set(Source::File, vec![pod("a", "1"), pod("b", "2"), pod("a", "3")]);
        assert_eq!(uids(), "1 2", "of two with one name the first counts");
        tokio::select! {
            biased;
            () = pods.ready() => panic!("a source has not answered"),
            () = std::future::ready(()) => {}
        }
        pods.set(Source::Url, vec![pod("a", "4"), pod("c", "5")]);
        pods.ready().await;
        assert_eq!(uids(), "1 2 5");
        let wanted = pods.wanted_changes();
        pods.publish("2", PodStatus { phase: Some("Running".into()), ..PodStatus::default() });
        pods.set(Source::File, vec![pod("a", "1"), pod("b", "2"), pod("a", "3")]);
        assert!(!wanted.has_changed().unwrap(), "nothing else is wanted");
        let found = pods.get(&ObjectKey::new("default", "b")).unwrap();
        assert_eq!(found.status.as_ref().unwrap().phase.as_deref(), Some("Running"));
        pods.set(Source::File, vec![]);
        assert!(wanted.has_changed().unwrap());
        assert_eq!(uids(), "4 5");
    }
}
