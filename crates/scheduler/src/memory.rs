//! Results for nodes that pods of one shape have in common: the second such pod asks no plugin about a node that has not
//! changed since the first one did.

use std::collections::VecDeque;
use std::sync::Arc;

use ferrite_json::Text;

use crate::snapshot::{PodInfo, PodShape};

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
        self.find(pod, None)
    }

    /// The results for pods like `pod` in its namespace.
    pub fn of_namespaced(&mut self, pod: &PodInfo) -> &mut Remembered<T> {
        self.find(pod, Some(&pod.key.namespace))
    }

    fn find(&mut self, pod: &PodInfo, namespace: Option<&Text>) -> &mut Remembered<T> {
        let shape = pod.shape();
        let is_known =
            |known: &Remembered<T>| Arc::ptr_eq(&known.shape, shape) && known.namespace.as_ref() == namespace;
        match self.shapes.iter().position(is_known) {
            Some(0) => {}
            Some(place) => {
                if let Some(known) = self.shapes.remove(place) {
                    self.shapes.push_front(known);
                }
            }
            None => {
                self.shapes.truncate(SHAPES - 1);
                let namespace = namespace.cloned();
                self.shapes.push_front(Remembered { shape: shape.clone(), namespace, results: Vec::new() });
            }
        }
        &mut self.shapes[0]
    }
}

/// The results for one shape.
#[derive(Debug)]
pub struct Remembered<T> {
    shape: Arc<PodShape>,
    /// The namespace of the pods, for results that depend on it.
    namespace: Option<Text>,
    /// By position in the snapshot, with the generation of the node that the result is for.
    results: Vec<Option<(u64, T)>>,
}

impl<T> Remembered<T> {
    /// The result for the node at `position`, which has this generation; none if the node has changed or another one stands
    /// there.
    pub fn get(&self, position: usize, generation: u64) -> Option<&T> {
        match self.results.get(position) {
            Some(Some((known, result))) if *known == generation => Some(result),
            _ => None,
        }
    }

    pub fn set(&mut self, position: usize, generation: u64, result: T) {
        *self.place(position) = Some((generation, result));
    }

    /// As [`get`](Self::get). A result that is missing is made.
    pub fn get_or_insert_with(&mut self, position: usize, generation: u64, make: impl FnOnce() -> T) -> &T {
        let place = self.place(position);
        if place.as_ref().is_some_and(|(known, _)| *known != generation) {
            *place = None;
        }
        &place.get_or_insert_with(|| (generation, make())).1
    }

    fn place(&mut self, position: usize) -> &mut Option<(u64, T)> {
        if self.results.len() <= position {
            self.results.resize_with(position + 1, || None);
        }
        &mut self.results[position]
    }
}

#[cfg(test)]
mod property_tests;

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;
    use crate::snapshot::NodeInfo;

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
        memory.of(&one).set(3, node.generation(), "fits");
        let equal = PodInfo::clone(&one);
        assert_eq!(memory.of(&equal).get(3, node.generation()), Some(&"fits"));
        assert_eq!(memory.of(&other).get(3, node.generation()), None, "another shape");
        assert_eq!(
            memory.of_namespaced(&one).get(3, node.generation()),
            None,
            "results of a namespace are apart"
        );
        assert_eq!(memory.of(&one).get(2, node.generation()), None, "another position");
        assert_eq!(
            memory.of(&one).get(3, node.clone().generation()),
            Some(&"fits"),
            "a copy is the same node"
        );
        node.add_pod(other.clone());
        assert_eq!(memory.of(&one).get(3, node.generation()), None, "a pod came");
        memory.of(&one).set(3, node.generation(), "full");
        node.remove_pod(&other.key);
        assert_eq!(memory.of(&one).get(3, node.generation()), None, "the pod went");
        memory.of(&one).set(3, node.generation(), "fits");
        node.nominate(other.clone());
        assert_eq!(memory.of(&one).get(3, node.generation()), None, "room is kept for a pod");
    }

    #[test]
    fn the_shape_used_longest_ago_is_forgotten() {
        let (mut memory, node) = (Memory::default(), node("a"));
        let pods: Vec<_> = (0..=SHAPES).map(|number| pod(&number.to_string())).collect();
        for pod in &pods[..SHAPES] {
            memory.of(pod).set(0, node.generation(), ());
        }
        memory.of(&pods[0]);
        memory.of(&pods[SHAPES]).set(0, node.generation(), ());
        assert_eq!(memory.of(&pods[0]).get(0, node.generation()), Some(&()));
        assert_eq!(memory.of(&pods[1]).get(0, node.generation()), None);
    }
}
