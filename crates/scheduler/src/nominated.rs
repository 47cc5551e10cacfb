//! Pods that are to run on a node as soon as there is room: other pods are being deleted there for them.

use std::collections::HashMap;
use std::sync::Arc;

use ferrite_client::ObjectKey;

use crate::snapshot::PodInfo;

/// The nominated pods, by node and by pod.
#[derive(Debug, Clone, Default)]
pub struct Nominated {
    by_node: HashMap<String, Vec<Arc<PodInfo>>>,
    by_pod: HashMap<ObjectKey, String>,
}

impl Nominated {
    /// Nominates the pod to the node, and to no other any more.
    pub fn set(&mut self, pod: Arc<PodInfo>, node: &str) {
        self.remove(&pod.key);
        self.by_pod.insert(pod.key.clone(), node.to_owned());
        self.by_node.entry(node.to_owned()).or_default().push(pod);
    }

    /// True if the pod was nominated.
    pub fn remove(&mut self, key: &ObjectKey) -> bool {
        let Some(node) = self.by_pod.remove(key) else { return false };
        if let Some(pods) = self.by_node.get_mut(&node) {
            pods.retain(|pod| pod.key != *key);
            if pods.is_empty() {
                self.by_node.remove(&node);
            }
        }
        true
    }

    /// The pods nominated to the node.
    pub fn at(&self, node: &str) -> &[Arc<PodInfo>] {
        // The usual case costs no hash.
        if self.by_node.is_empty() {
            return &[];
        }
        self.by_node.get(node).map(Vec::as_slice).unwrap_or_default()
    }

    /// The node that the pod is nominated to.
    pub fn node_of(&self, key: &ObjectKey) -> Option<&str> {
        self.by_pod.get(key).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    #[test]
    fn a_pod_is_nominated_to_one_node_at_most() {
        let pod = ferrite_json::from_value(json!({"metadata": {"name": "a", "namespace": "ns"}}));
        let pod = Arc::new(PodInfo::new(&pod.unwrap()));
        let mut nominated = Nominated::default();
        nominated.set(pod.clone(), "one");
        nominated.set(pod.clone(), "two");
        assert!(nominated.at("one").is_empty());
        assert_eq!(nominated.at("two").len(), 1);
        assert_eq!(nominated.node_of(&pod.key), Some("two"));
        assert!(nominated.remove(&pod.key));
        assert!(!nominated.remove(&pod.key));
        assert!(nominated.at("two").is_empty());
    }
}
