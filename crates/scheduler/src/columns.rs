//! Questions about all nodes and all pods, answered without asking each of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::snapshot::{NodeInfo, PodInfo};

/// Labels whose values are kept at a time. Pods name few; whoever names many pays for them.
const MOST_COLUMNS: usize = 32;
const NONE: u32 = u32::MAX;

/// The values of one label on all nodes, as small numbers.
#[derive(Debug)]
pub struct Column {
    by_position: Vec<u32>,
    values: HashMap<String, u32>,
}

impl Column {
    fn new(nodes: &[Arc<NodeInfo>], key: &str) -> Self {
        let mut values: HashMap<String, u32> = HashMap::new();
        let by_position = nodes.iter().map(|node| {
            let Some(value) = node.labels().get(key) else { return NONE };
            if let Some(known) = values.get(value) {
                return *known;
            }
            let next = u32::try_from(values.len()).unwrap_or(NONE);
            values.insert(value.clone(), next);
            next
        });
        Self { by_position: by_position.collect(), values }
    }

    /// The value's number on the node at a position; none if the node has no such label.
    pub fn at(&self, position: usize) -> Option<usize> {
        self.by_position.get(position).filter(|value| **value != NONE).map(|value| *value as usize)
    }

    /// The number of a value that some node has.
    pub fn number_of(&self, value: &str) -> Option<usize> {
        self.values.get(value).map(|value| *value as usize)
    }

    /// The number of values: each value's number is below it.
    pub fn size(&self) -> usize {
        self.values.len()
    }

    pub fn values(&self) -> impl Iterator<Item = (&str, usize)> {
        self.values.iter().map(|(value, number)| (value.as_str(), *number as usize))
    }
}

/// The columns that were asked for, for as long as no label changes.
#[derive(Debug, Default)]
pub struct Columns(Mutex<HashMap<String, Arc<Column>>>);

impl Clone for Columns {
    fn clone(&self) -> Self {
        Self(Mutex::new(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()))
    }
}

impl Columns {
    pub fn get(&self, nodes: &[Arc<NodeInfo>], key: &str) -> Arc<Column> {
        let mut columns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(column) = columns.get(key) {
            return column.clone();
        }
        if columns.len() >= MOST_COLUMNS {
            columns.clear();
        }
        let column = Arc::new(Column::new(nodes, key));
        columns.insert(key.to_owned(), column.clone());
        column
    }

    pub fn forget(&mut self) {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Answers that depend on a pod's shape and namespace alone: each is found once, however many pods are alike.
pub struct ByShape<'a, T> {
    numbers: HashMap<(usize, &'a str), usize>,
    answers: Vec<T>,
    /// Pods of one template often follow each other.
    last: Option<(usize, &'a str, usize)>,
}

impl<T> Default for ByShape<'_, T> {
    fn default() -> Self {
        Self { numbers: HashMap::new(), answers: Vec::new(), last: None }
    }
}

impl<'a, T> ByShape<'a, T> {
    pub fn of(&mut self, pod: &'a PodInfo, answer: impl FnOnce() -> T) -> &T {
        let (shape, namespace) = (pod.shape_number(), pod.key.namespace.as_str());
        let number = match self.last {
            Some((last, in_namespace, number)) if last == shape && in_namespace == namespace => number,
            _ => match self.numbers.get(&(shape, namespace)) {
                Some(number) => *number,
                None => {
                    self.answers.push(answer());
                    self.numbers.insert((shape, namespace), self.answers.len() - 1);
                    self.answers.len() - 1
                }
            },
        };
        self.last = Some((shape, namespace, number));
        &self.answers[number]
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;
    use crate::snapshot::{Shapes, Snapshot};

    fn node(name: &str, zone: Option<&str>) -> Arc<NodeInfo> {
        let mut node = json!({"metadata": {"name": name, "labels": {}}});
        if let Some(zone) = zone {
            node["metadata"]["labels"]["zone"] = json!(zone);
        }
        Arc::new(NodeInfo::new(Arc::new(ferrite_json::from_value(node).unwrap())))
    }

    #[test]
    fn a_column_follows_the_labels() {
        let mut snapshot = Snapshot::new([node("a", Some("x")), node("b", None), node("c", Some("y"))]);
        let values = |snapshot: &Snapshot| -> Vec<Option<String>> {
            let column = snapshot.column("zone");
            let name = |number| {
                column.values().find(|(_, known)| *known == number).map(|(value, _)| value.to_owned())
            };
            (0..snapshot.nodes().len()).map(|position| column.at(position).and_then(name)).collect()
        };
        let text = |values: [Option<&str>; 3]| values.map(|value| value.map(str::to_owned)).to_vec();
        assert_eq!(values(&snapshot), text([Some("x"), None, Some("y")]));
        snapshot.replace(node("b", Some("x")));
        assert_eq!(values(&snapshot), text([Some("x"), Some("x"), Some("y")]));
        assert_eq!(snapshot.column("zone").size(), 2);
        assert_eq!(snapshot.column("zone").number_of("z"), None);
        snapshot.rebuild([node("c", Some("y"))]);
        assert_eq!(values(&snapshot), [Some("y".to_owned())]);
        // Many labels make the first ones be forgotten; answers stay right.
        for label in 0..2 * MOST_COLUMNS {
            assert_eq!(snapshot.column(&format!("label-{label}")).at(0), None);
        }
        assert_eq!(values(&snapshot), [Some("y".to_owned())]);
    }

    #[test]
    fn pods_of_a_template_are_asked_about_once_in_each_namespace() {
        let mut shapes = Shapes::default();
        let mut pod = |name: &str, namespace: &str, app: &str, node: Option<&str>| {
            shapes.pod(
                &ferrite_json::from_value(json!({
                    "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
                    "spec": {"containers": [], "nodeName": node}}))
                .unwrap(),
            )
        };
        let pods = [
            pod("a", "one", "web", None),
            // Bound pods are like those that wait.
            pod("b", "one", "web", Some("node-1")),
            pod("c", "one", "web", Some("node-2")),
            pod("d", "two", "web", None),
            pod("e", "one", "other", None),
            pod("f", "one", "web", None),
        ];
        let mut answers = ByShape::default();
        let mut asked = 0;
        let of: Vec<usize> = pods
            .iter()
            .map(|pod| {
                *answers.of(pod, || {
                    asked += 1;
                    asked
                })
            })
            .collect();
        assert_eq!(of, [1, 1, 1, 2, 3, 1]);
    }
}
