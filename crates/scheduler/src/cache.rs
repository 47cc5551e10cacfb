//! The nodes and the pods on them, including pods whose binding is still under way.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use ferrite_client::ObjectKey;
use ferrite_json::Text;
use k8s_openapi::api::core::v1::Node;

use crate::snapshot::{NodeInfo, PodInfo, Snapshot};

/// Nodes and assigned pods. A pod can be *assumed* on a node before the API confirms it, so that the next cycle
/// counts it; the watch then confirms it, or the binding fails and it is forgotten.
#[derive(Debug, Default)]
pub struct Cache {
    nodes: HashMap<String, Entry>,
    /// Where each pod is counted.
    placed: HashMap<ObjectKey, String>,
    assumed: HashSet<ObjectKey>,
    /// The number of counted pods that have pod affinity or anti-affinity of any kind.
    with_affinity: usize,
    /// The nodes that pods are nominated to; the pods themselves are in the entries of the nodes.
    nominated: HashMap<ObjectKey, Text>,
    /// Pods whose nomination changed since the last snapshot.
    renominated: HashSet<ObjectKey>,
    /// The number of nodes that have each image, by every name of it.
    images: Arc<HashMap<String, usize>>,
    /// Nodes changed since the last snapshot.
    dirty: HashSet<String>,
    /// The set of nodes, or the basis of their order, changed since the last snapshot.
    reordered: bool,
}

#[derive(Debug)]
struct Entry {
    info: Arc<NodeInfo>,
    /// False while only pods of the node are known, because they were seen before it or it is gone.
    exists: bool,
}

impl Entry {
    /// True if nothing is known of the node any more.
    fn is_unused(&self) -> bool {
        !self.exists && self.info.pods.is_empty() && self.info.nominated().is_empty()
    }
}

impl Cache {
    pub fn new() -> Self {
        Self::default()
    }

    fn entry(&mut self, name: &str) -> &mut NodeInfo {
        self.dirty.insert(name.to_owned());
        let entry = self.nodes.entry(name.to_owned()).or_insert_with(|| {
            let mut node = Node::default();
            node.metadata.name = Some(name.to_owned());
            Entry { info: Arc::new(NodeInfo::new(Arc::new(node))), exists: false }
        });
        Arc::make_mut(&mut entry.info)
    }

    pub fn set_node(&mut self, node: Arc<Node>) {
        let name = node.metadata.name.clone().unwrap_or_default();
        let before = self.nodes.get(&name).map(|entry| (entry.exists, entry.info.labels().clone()));
        let labels = node.metadata.labels.clone().unwrap_or_default();
        if let Some(old) = self.nodes.get(&name).map(|entry| entry.info.node.clone()) {
            if old.status.as_ref().map(|status| &status.images)
                != node.status.as_ref().map(|status| &status.images)
            {
                self.count_images(&old, false);
                self.count_images(&node, true);
            }
        } else {
            self.count_images(&node, true);
        }
        self.entry(&name).set_node(node);
        if let Some(entry) = self.nodes.get_mut(&name) {
            entry.exists = true;
        }
        if before.is_none_or(|(existed, before)| !existed || before != labels) {
            self.reordered = true;
        }
    }

    pub fn remove_node(&mut self, name: &str) {
        let Some(entry) = self.nodes.get_mut(name) else { return };
        entry.exists = false;
        let node = entry.info.node.clone();
        if entry.is_unused() {
            self.nodes.remove(name);
        } else if node.status.as_ref().is_some_and(|status| status.images.is_some()) {
            // Only its pods are known from now on.
            let mut bare = Node::clone(&node);
            bare.status = None;
            self.entry(name).set_node(Arc::new(bare));
        }
        self.count_images(&node, false);
        self.reordered = true;
    }

    fn count_images(&mut self, node: &Node, is_added: bool) {
        let images = node.status.as_ref().and_then(|status| status.images.as_deref()).unwrap_or_default();
        if images.is_empty() {
            return;
        }
        let counts = Arc::make_mut(&mut self.images);
        for name in images.iter().flat_map(|image| image.names.iter().flatten()) {
            if is_added {
                *counts.entry(name.clone()).or_default() += 1;
            } else if let Some(count) = counts.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    counts.remove(name);
                }
            }
        }
    }

    /// Counts `pod` on `node`: it was bound, confirmed or changed.
    pub fn set_pod(&mut self, pod: Arc<PodInfo>, node: &str) {
        self.take(&pod.key);
        self.assumed.remove(&pod.key);
        self.placed.insert(pod.key.clone(), node.to_owned());
        self.with_affinity += usize::from(pod.has_affinity());
        self.entry(node).add_pod(pod);
    }

    pub fn remove_pod(&mut self, key: &ObjectKey) {
        self.assumed.remove(key);
        self.take(key);
    }

    /// Counts `pod` on `node` although the API does not say so yet.
    pub fn assume(&mut self, pod: Arc<PodInfo>, node: &str) {
        let key = pod.key.clone();
        self.remove_nomination(&key);
        self.set_pod(pod, node);
        self.assumed.insert(key);
    }

    /// Takes back an assumption that did not come true; false if there is none. A pod that was confirmed meanwhile stays.
    pub fn forget(&mut self, key: &ObjectKey) -> bool {
        let was_assumed = self.assumed.remove(key);
        if was_assumed {
            self.take(key);
        }
        was_assumed
    }

    /// The pods that wait for room on the node.
    pub fn nominated_to(&self, node: &str) -> &[Arc<PodInfo>] {
        self.nodes.get(node).map(|entry| entry.info.nominated()).unwrap_or_default()
    }

    /// The node that the pod is nominated to.
    pub fn nomination_of(&self, key: &ObjectKey) -> Option<&Text> {
        self.nominated.get(key)
    }

    /// Nominates the pod to the node, and to no other any more.
    pub fn nominate(&mut self, pod: Arc<PodInfo>, node: &str) {
        let is_known =
            |known: &Arc<PodInfo>| known.key == pod.key && known.uid == pod.uid && !known.differs_from(&pod);
        if self.nomination_of(&pod.key).is_some_and(|before| before == node)
            && self.nominated_to(node).iter().any(is_known)
        {
            return;
        }
        self.remove_nomination(&pod.key);
        self.renominated.insert(pod.key.clone());
        self.nominated.insert(pod.key.clone(), node.into());
        self.entry(node).nominate(pod);
    }

    /// True if the pod was nominated.
    pub fn remove_nomination(&mut self, key: &ObjectKey) -> bool {
        let Some((key, node)) = self.nominated.remove_entry(key) else { return false };
        self.entry(&node).remove_nominated(&key);
        self.renominated.insert(key);
        self.forget_unused(&node);
        true
    }

    /// True if the pod is counted on a node.
    pub fn is_placed(&self, key: &ObjectKey) -> bool {
        self.placed.contains_key(key)
    }

    /// The pod as the API has confirmed it on its node; none while it is only assumed there.
    pub fn confirmed(&self, key: &ObjectKey) -> Option<&Arc<PodInfo>> {
        if self.assumed.contains(key) {
            return None;
        }
        let node = self.nodes.get(self.placed.get(key)?)?;
        node.info.pods.iter().find(|pod| pod.key == *key)
    }

    fn take(&mut self, key: &ObjectKey) {
        let Some(node) = self.placed.remove(key) else { return };
        if let Some(pod) = self.entry(&node).remove_pod(key) {
            self.with_affinity -= usize::from(pod.has_affinity());
        }
        self.forget_unused(&node);
    }

    fn forget_unused(&mut self, node: &str) {
        if self.nodes.get(node).is_some_and(Entry::is_unused) {
            self.nodes.remove(node);
        }
    }

    /// Brings `snapshot` up to date, touching only the changes since the last time.
    pub fn update(&mut self, snapshot: &mut Snapshot) {
        if self.reordered {
            let nodes = self.nodes.values().filter(|entry| entry.exists).map(|entry| entry.info.clone());
            snapshot.rebuild(nodes);
        } else {
            for name in &self.dirty {
                if let Some(entry) = self.nodes.get(name).filter(|entry| entry.exists) {
                    snapshot.replace(entry.info.clone());
                }
            }
        }
        snapshot.has_affinity = self.with_affinity > 0;
        for pod in self.renominated.drain() {
            match self.nominated.get(&pod) {
                Some(node) => drop(snapshot.nominated.insert(pod, node.clone())),
                None => drop(snapshot.nominated.remove(&pod)),
            }
        }
        snapshot.images = self.images.clone();
        self.reordered = false;
        self.dirty.clear();
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    fn pod(name: &str, cpu: &str) -> Arc<PodInfo> {
        let pod = ferrite_json::from_value(json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {
            "containers": [{"name": "c", "resources": {"requests": {"cpu": cpu}}}]}}));
        Arc::new(PodInfo::new(&pod.unwrap()))
    }

    fn node(name: &str, zone: &str) -> Arc<Node> {
        Arc::new(
            ferrite_json::from_value(
                json!({"metadata": {"name": name, "labels": {(crate::snapshot::ZONE): zone}}}),
            )
            .unwrap(),
        )
    }

    fn cpu(cache: &mut Cache, snapshot: &mut Snapshot, node: &str) -> Option<i64> {
        cache.update(snapshot);
        snapshot.get(node).map(|node| node.requested.milli_cpu)
    }

    #[test]
    fn assumed_pods_count_until_forgotten_or_confirmed() {
        let (mut cache, mut snapshot) = (Cache::new(), Snapshot::default());
        cache.set_node(node("a", "z"));
        cache.set_node(node("b", "z"));
        let (one, two) = (pod("one", "1"), pod("two", "2"));
        cache.assume(one.clone(), "a");
        assert_eq!(cpu(&mut cache, &mut snapshot, "a"), Some(1000));
        cache.forget(&one.key);
        assert_eq!(cpu(&mut cache, &mut snapshot, "a"), Some(0));
        cache.assume(two.clone(), "a");
        cache.set_pod(two.clone(), "b");
        assert_eq!(cpu(&mut cache, &mut snapshot, "a"), Some(0), "the API has the last word on where");
        cache.forget(&two.key);
        assert_eq!(cpu(&mut cache, &mut snapshot, "b"), Some(2000), "confirmed pods are not forgotten");
        cache.remove_pod(&two.key);
        assert_eq!(cpu(&mut cache, &mut snapshot, "b"), Some(0));
    }

    #[test]
    fn pods_seen_before_their_node_are_kept_and_a_removed_node_leaves_the_snapshot() {
        let (mut cache, mut snapshot) = (Cache::new(), Snapshot::default());
        let one = pod("one", "1");
        cache.set_pod(one.clone(), "a");
        assert_eq!(cpu(&mut cache, &mut snapshot, "a"), None);
        cache.set_node(node("a", "z"));
        assert_eq!(cpu(&mut cache, &mut snapshot, "a"), Some(1000));
        cache.remove_node("a");
        assert_eq!(cpu(&mut cache, &mut snapshot, "a"), None);
        cache.remove_pod(&one.key);
        assert!(cache.nodes.is_empty());
    }

    #[test]
    fn zones_take_turns() {
        let (mut cache, mut snapshot) = (Cache::new(), Snapshot::default());
        for (name, zone) in [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c")] {
            cache.set_node(node(name, zone));
        }
        cache.update(&mut snapshot);
        let order: Vec<_> = snapshot.nodes().iter().map(|node| node.name()).collect();
        assert_eq!(order, ["a1", "b1", "c1", "a2", "a3"]);
    }
}
