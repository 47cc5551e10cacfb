//! Results for nodes that pods of one shape have in common: the second such pod asks no plugin about a node that has not
//! changed since the first one did.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::snapshot::{NodeInfo, PodInfo, PodShape};

/// Shapes that are remembered; the one that was used longest ago gives way.
const SHAPES: usize = 8;

/// Results by shape of pod and position of node. Only results that depend on the shape and on the node alone belong here
/// ([`PodFilters::are_local`](crate::framework::PodFilters::are_local)).
#[derive(Debug)]
pub struct Memory<T> {
    /// The shape that was used last comes first.
    shapes: VecDeque<Remembered<T>>,
}

impl<T> Default for Memory<T> {
    fn default() -> Self {
        Self { shapes: VecDeque::new() }
    }
}

impl<T> Memory<T> {
    /// The results for pods like `pod`.
    pub fn of(&mut self, pod: &PodInfo) -> &mut Remembered<T> {
        let shape = pod.shape();
        match self.shapes.iter().position(|known| Arc::ptr_eq(&known.shape, shape)) {
            Some(0) => {}
            Some(place) => {
                if let Some(known) = self.shapes.remove(place) {
                    self.shapes.push_front(known);
                }
            }
            None => {
                self.shapes.truncate(SHAPES - 1);
                self.shapes.push_front(Remembered { shape: shape.clone(), results: Vec::new() });
            }
        }
        &mut self.shapes[0]
    }
}

/// The results for one shape.
#[derive(Debug)]
pub struct Remembered<T> {
    shape: Arc<PodShape>,
    /// By position in the snapshot, with the generation of the node that the result is for.
    results: Vec<Option<(u64, T)>>,
}

impl<T> Remembered<T> {
    /// The result for the node at `position`, unless the node has changed or another one stands there.
    pub fn get(&self, position: usize, node: &NodeInfo) -> Option<&T> {
        match self.results.get(position) {
            Some(Some((generation, result))) if *generation == node.generation() => Some(result),
            _ => None,
        }
    }

    pub fn set(&mut self, position: usize, node: &NodeInfo, result: T) {
        if self.results.len() <= position {
            self.results.resize_with(position + 1, || None);
        }
        self.results[position] = Some((node.generation(), result));
    }
}

#[cfg(test)]
mod property_tests;

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    fn pod(name: &str) -> Arc<PodInfo> {
        let pod = json!({"metadata": {"name": name, "namespace": "ns"}, "spec": {"containers": []}});
        Arc::new(PodInfo::new(&ferrite_json::from_value(pod).unwrap()))
    }

    fn node(name: &str) -> NodeInfo {
        let node = ferrite_json::from_value(json!({"metadata": {"name": name}}));
        NodeInfo::new(Arc::new(node.unwrap()))
    }

    #[test]
    fn a_result_holds_for_one_shape_and_for_a_node_that_has_not_changed() {
        let (mut memory, one, other, mut node) = (Memory::default(), pod("one"), pod("other"), node("a"));
        memory.of(&one).set(3, &node, "fits");
        let equal = PodInfo::clone(&one);
        assert_eq!(memory.of(&equal).get(3, &node), Some(&"fits"));
        assert_eq!(memory.of(&other).get(3, &node), None, "another shape");
        assert_eq!(memory.of(&one).get(2, &node), None, "another position");
        assert_eq!(memory.of(&one).get(3, &node.clone()), Some(&"fits"), "a copy is the same node");
        node.add_pod(other.clone());
        assert_eq!(memory.of(&one).get(3, &node), None, "a pod came");
        memory.of(&one).set(3, &node, "full");
        node.remove_pod(&other.key);
        assert_eq!(memory.of(&one).get(3, &node), None, "the pod went");
        memory.of(&one).set(3, &node, "fits");
        node.nominate(other.clone());
        assert_eq!(memory.of(&one).get(3, &node), None, "room is kept for a pod");
    }

    #[test]
    fn the_shape_used_longest_ago_is_forgotten() {
        let (mut memory, node) = (Memory::default(), node("a"));
        let pods: Vec<_> = (0..=SHAPES).map(|number| pod(&number.to_string())).collect();
        for pod in &pods[..SHAPES] {
            memory.of(pod).set(0, &node, ());
        }
        memory.of(&pods[0]);
        memory.of(&pods[SHAPES]).set(0, &node, ());
        assert_eq!(memory.of(&pods[0]).get(0, &node), Some(&()));
        assert_eq!(memory.of(&pods[1]).get(0, &node), None);
    }
}
