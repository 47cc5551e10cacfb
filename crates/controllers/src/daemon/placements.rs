//! The verdicts on all nodes, kept for each DaemonSet.
//!
//! A sync needs the verdict on every node. Labels and taints change seldom and pods often, so that a sync must not
//! decode thousands of nodes: it reads verdicts, which changes of nodes keep current.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Node;

use super::placement::{Eligibility, Placement};

/// The verdict on each node, by name.
pub(super) type Verdicts = BTreeMap<Arc<str>, Placement>;

struct Kept {
    /// The generation of the set that the verdicts are for.
    generation: Option<i64>,
    verdicts: Arc<Verdicts>,
}

#[derive(Default)]
struct State {
    /// By the UID of the DaemonSet.
    sets: HashMap<String, Kept>,
    /// The number of changes of nodes so far.
    changes: u64,
}

#[derive(Default)]
pub(super) struct Placements {
    state: Mutex<State>,
}

fn uid(set: &DaemonSet) -> &str {
    set.metadata.uid.as_deref().unwrap_or_default()
}

pub(super) fn verdicts(set: &DaemonSet, nodes: &[Arc<Node>]) -> Verdicts {
    let eligibility = Eligibility::new(set);
    let named = nodes.iter().filter_map(|node| Some((node.metadata.name.as_deref()?, node)));
    named.map(|(name, node)| (name.into(), eligibility.of(node))).collect()
}

impl Placements {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The verdicts of `set`. `nodes` lists all nodes; it is called when the set is new or its specification changed.
    pub(super) fn of(&self, set: &DaemonSet, nodes: impl FnOnce() -> Vec<Arc<Node>>) -> Arc<Verdicts> {
        let generation = set.metadata.generation;
        let changes = {
            let state = self.lock();
            if let Some(kept) = state.sets.get(uid(set)).filter(|kept| kept.generation == generation) {
                return kept.verdicts.clone();
            }
            state.changes
        };
        let verdicts = Arc::new(verdicts(set, &nodes()));
        let mut state = self.lock();
        // A node that changed meanwhile may not be in the list; the next sync lists again.
        if state.changes == changes {
            state.sets.insert(uid(set).to_owned(), Kept { generation, verdicts: verdicts.clone() });
        }
        verdicts
    }

    /// Notes a node that came or changed.
    pub(super) fn node_changed(&self, node: &Node, sets: &[Arc<DaemonSet>]) {
        let Some(name) = node.metadata.name.as_deref() else { return };
        let mut state = self.lock();
        state.changes += 1;
        for set in sets {
            if let Some(kept) = state.sets.get_mut(uid(set))
                && kept.generation == set.metadata.generation
            {
                let placement = Eligibility::new(set).of(node);
                Arc::make_mut(&mut kept.verdicts).insert(name.into(), placement);
            }
        }
        // Verdicts of a generation that is no more cannot be kept current.
        let generations: HashMap<&str, Option<i64>> =
            sets.iter().map(|set| (uid(set), set.metadata.generation)).collect();
        state.sets.retain(|uid, kept| generations.get(uid.as_str()) == Some(&kept.generation));
    }

    /// Notes a node that is gone.
    pub(super) fn node_deleted(&self, name: &str) {
        let mut state = self.lock();
        state.changes += 1;
        for kept in state.sets.values_mut() {
            Arc::make_mut(&mut kept.verdicts).remove(name);
        }
    }

    pub(super) fn forget(&self, set: &DaemonSet) {
        self.lock().sets.remove(uid(set));
    }
}

#[cfg(test)]
mod tests {
    use ferrite_json::json;

    use super::*;

    fn set(generation: i64, label: &str) -> Arc<DaemonSet> {
        Arc::new(
            ferrite_json::from_value(json!({"metadata": {"uid": "u", "generation": generation},
                "spec": {"selector": {}, "template": {"spec": {"containers": [], "nodeSelector": {"l": label}}}}}))
            .unwrap(),
        )
    }

    fn node(name: &str, label: &str) -> Arc<Node> {
        Arc::new(
            ferrite_json::from_value(json!({"metadata": {"name": name, "labels": {"l": label}}})).unwrap(),
        )
    }

    fn never() -> Vec<Arc<Node>> {
        panic!("nodes are listed again")
    }

    #[test]
    fn verdicts_are_made_once_and_follow_the_nodes() {
        use Placement::{Leave, Run};
        let placements = Placements::default();
        let expect = |found: Arc<Verdicts>, expected: &[(&str, Placement)]| {
            let found: Vec<_> = found.iter().map(|(name, placement)| (&**name, *placement)).collect();
            assert_eq!(found, expected);
        };
        let first = set(1, "x");
        expect(placements.of(&first, || vec![node("a", "x"), node("b", "y")]), &[("a", Run), ("b", Leave)]);
        expect(placements.of(&first, never), &[("a", Run), ("b", Leave)]);
        placements.node_changed(&node("b", "x"), std::slice::from_ref(&first));
        placements.node_changed(&node("c", "y"), std::slice::from_ref(&first));
        placements.node_deleted("a");
        expect(placements.of(&first, never), &[("b", Run), ("c", Leave)]);

        let second = set(2, "y");
        expect(placements.of(&second, || vec![node("c", "y")]), &[("c", Run)]);
        placements.forget(&second);
        let listed_while_a_node_changed = || {
            placements.node_changed(&node("d", "y"), std::slice::from_ref(&second));
            vec![node("c", "y")]
        };
        expect(placements.of(&second, listed_while_a_node_changed), &[("c", Run)]);
        expect(placements.of(&second, || vec![node("c", "y"), node("d", "y")]), &[("c", Run), ("d", Run)]);
    }
}
