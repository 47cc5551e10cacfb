//! The graph of owners by UID, as far as the watches have reported it.

use std::collections::{HashMap, HashSet, VecDeque};

use ferrite_json::Text;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// Owners known to be gone that are remembered; asking the server again for each dependent would be slow.
const REMEMBERED_ABSENT: usize = 500;

pub(super) type Uid = String;

/// Where an object is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    pub(super) api_version: Text,
    pub(super) kind: Text,
    /// Empty for cluster-scoped objects.
    pub(super) namespace: Text,
    pub(super) name: Text,
    pub(super) uid: Uid,
}

#[derive(Debug, Clone)]
pub(super) struct Node {
    pub(super) identity: Identity,
    pub(super) owners: Vec<OwnerReference>,
    pub(super) dependents: HashSet<Uid>,
    pub(super) deleting: bool,
    /// It waits, by the foreground finalizer, for dependents that block it.
    pub(super) deleting_dependents: bool,
    orphaning: bool,
    /// A watch reported it; otherwise only a dependent named it, and it may not exist.
    pub(super) observed: bool,
}

/// An object as a watch reported it.
#[derive(Debug, Clone)]
pub(super) struct Observation {
    pub(super) identity: Identity,
    pub(super) owners: Vec<OwnerReference>,
    pub(super) deleting: bool,
    pub(super) foreground: bool,
    pub(super) orphan: bool,
}

/// Objects to process after a change.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) delete: Vec<Uid>,
    pub(super) orphan: Vec<Uid>,
}

#[derive(Debug, Default)]
pub(super) struct Graph {
    nodes: HashMap<Uid, Node>,
    absent: HashSet<Uid>,
    absent_order: VecDeque<Uid>,
}

impl Graph {
    pub(super) fn get(&self, uid: &str) -> Option<&Node> {
        self.nodes.get(uid)
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    pub(super) fn is_absent(&self, uid: &str) -> bool {
        self.absent.contains(uid)
    }

    pub(super) fn note_absent(&mut self, uid: &str) {
        if self.absent.insert(uid.to_owned()) {
            self.absent_order.push_back(uid.to_owned());
            if self.absent_order.len() > REMEMBERED_ABSENT
                && let Some(oldest) = self.absent_order.pop_front()
            {
                self.absent.remove(&oldest);
            }
        }
    }

    /// The dependents that hold back `owner`.
    pub(super) fn blocking(&self, owner: &Node) -> Vec<&Node> {
        owner
            .dependents
            .iter()
            .filter_map(|uid| self.nodes.get(uid))
            .filter(|node| {
                node.owners.iter().any(|reference| {
                    reference.uid == owner.identity.uid && reference.block_owner_deletion == Some(true)
                })
            })
            .collect()
    }

    /// Records that an object exists. Even one seen for the first time may already be in deletion.
    pub(super) fn present(&mut self, seen: Observation) -> Work {
        let mut work = Work::default();
        let uid = seen.identity.uid.clone();
        self.absent.remove(&uid);
        let (previous, known) = match self.nodes.get(&uid) {
            Some(node) => (node.owners.clone(), Some((node.deleting_dependents, node.orphaning))),
            None => (Vec::new(), None),
        };
        for reference in &previous {
            let now = seen.owners.iter().find(|owner| owner.uid == reference.uid);
            let blocked = reference.block_owner_deletion == Some(true);
            if now.is_none()
                && let Some(owner) = self.nodes.get_mut(&reference.uid)
            {
                owner.dependents.remove(&uid);
            }
            // The owner may be free to go now.
            if blocked && now.is_none_or(|owner| owner.block_owner_deletion != Some(true)) {
                work.delete.push(reference.uid.clone());
            }
        }
        for reference in &seen.owners {
            self.owner(reference, &seen.identity, &mut work).dependents.insert(uid.clone());
        }
        let deleting_dependents = seen.deleting && seen.foreground;
        let orphaning = seen.deleting && seen.orphan;
        let node = self.nodes.entry(uid.clone()).or_insert_with(|| Node {
            identity: seen.identity.clone(),
            owners: Vec::new(),
            dependents: HashSet::new(),
            deleting: false,
            deleting_dependents: false,
            orphaning: false,
            observed: true,
        });
        node.identity = seen.identity;
        node.owners = seen.owners;
        node.deleting = seen.deleting;
        node.deleting_dependents = deleting_dependents;
        node.orphaning = orphaning;
        node.observed = true;
        let (was_waiting, was_orphaning) = known.unwrap_or((false, false));
        if orphaning && !was_orphaning {
            work.orphan.push(uid.clone());
        }
        if deleting_dependents && !was_waiting {
            work.delete.extend(node.dependents.iter().cloned());
            work.delete.push(uid.clone());
        }
        // An owner that is gone already, or waits for this one, decides about it.
        let decided: Vec<_> = node.owners.iter().map(|owner| owner.uid.clone()).collect();
        if decided.iter().any(|owner| {
            self.absent.contains(owner)
                || self.nodes.get(owner).is_some_and(|owner| owner.deleting_dependents)
        }) {
            work.delete.push(uid);
        }
        work
    }

    /// An object is gone.
    pub(super) fn gone(&mut self, uid: &str) -> Work {
        let mut work = Work::default();
        let Some(node) = self.nodes.remove(uid) else { return work };
        if !node.dependents.is_empty() {
            self.note_absent(uid);
            work.delete.extend(node.dependents);
        }
        for reference in node.owners {
            let Some(owner) = self.nodes.get_mut(&reference.uid) else { continue };
            owner.dependents.remove(uid);
            if owner.deleting_dependents {
                work.delete.push(reference.uid);
            } else if !owner.observed && owner.dependents.is_empty() {
                self.nodes.remove(&reference.uid);
            }
        }
        work
    }

    /// The owner that a reference names. If no watch has reported it yet, a placeholder is added, to be
    /// verified.
    fn owner(&mut self, reference: &OwnerReference, dependent: &Identity, work: &mut Work) -> &mut Node {
        self.nodes.entry(reference.uid.clone()).or_insert_with(|| {
            work.delete.push(reference.uid.clone());
            Node {
                identity: Identity {
                    api_version: reference.api_version.as_str().into(),
                    kind: reference.kind.as_str().into(),
                    namespace: dependent.namespace.clone(),
                    name: reference.name.as_str().into(),
                    uid: reference.uid.clone(),
                },
                owners: Vec::new(),
                dependents: HashSet::new(),
                deleting: false,
                deleting_dependents: false,
                orphaning: false,
                observed: false,
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(uid: &str, owners: &[(&str, bool)]) -> Observation {
        Observation {
            identity: Identity {
                api_version: "v1".into(),
                kind: "Pod".into(),
                namespace: "ns".into(),
                name: uid.into(),
                uid: uid.into(),
            },
            owners: owners
                .iter()
                .map(|(uid, block)| OwnerReference {
                    uid: (*uid).into(),
                    block_owner_deletion: Some(*block),
                    ..OwnerReference::default()
                })
                .collect(),
            deleting: false,
            foreground: false,
            orphan: false,
        }
    }

    fn sorted(mut uids: Vec<Uid>) -> Vec<Uid> {
        uids.sort();
        uids
    }

    #[test]
    fn an_owner_nobody_saw_is_verified_and_its_absence_wakes_dependents() {
        let mut graph = Graph::default();
        assert_eq!(graph.present(seen("pod", &[("rs", true)])).delete, ["rs"]);
        assert!(!graph.get("rs").unwrap().observed);
        assert_eq!(graph.gone("rs").delete, ["pod"]);
        assert!(graph.is_absent("rs"));
        assert_eq!(graph.present(seen("late", &[("rs", true)])).delete, ["rs", "late"]);
    }

    #[test]
    fn a_known_owner_that_goes_wakes_its_dependents() {
        let mut graph = Graph::default();
        graph.present(seen("rs", &[]));
        assert_eq!(graph.present(seen("a", &[("rs", true)])), Work::default());
        graph.present(seen("b", &[("rs", false)]));
        assert_eq!(sorted(graph.gone("rs").delete), ["a", "b"]);
    }

    #[test]
    fn foreground_deletion_wakes_dependents_and_then_the_owner() {
        let mut graph = Graph::default();
        graph.present(seen("rs", &[]));
        graph.present(seen("a", &[("rs", true)]));
        graph.present(seen("b", &[("rs", false)]));
        let deleting = Observation { deleting: true, foreground: true, ..seen("rs", &[]) };
        assert_eq!(sorted(graph.present(deleting.clone()).delete), ["a", "b", "rs"]);
        assert_eq!(graph.present(deleting), Work::default(), "only once");
        assert_eq!(graph.blocking(graph.get("rs").unwrap()).len(), 1);
        assert_eq!(graph.gone("a").delete, ["rs"]);
        assert!(graph.blocking(graph.get("rs").unwrap()).is_empty());
    }

    #[test]
    fn orphaning_is_asked_for_once_and_letting_go_frees_the_owner() {
        let mut graph = Graph::default();
        graph.present(seen("rs", &[]));
        graph.present(seen("a", &[("rs", true)]));
        let orphaning = Observation { deleting: true, orphan: true, ..seen("rs", &[]) };
        assert_eq!(graph.present(orphaning.clone()).orphan, ["rs"]);
        assert!(graph.present(orphaning).orphan.is_empty());
        assert_eq!(graph.present(seen("a", &[])).delete, ["rs"], "a blocking reference went away");
        assert!(graph.get("rs").unwrap().dependents.is_empty());
    }

    #[test]
    fn memory_of_absent_owners_is_bounded() {
        let mut graph = Graph::default();
        (0..2 * REMEMBERED_ABSENT).for_each(|n| graph.note_absent(&n.to_string()));
        assert_eq!(graph.absent.len(), REMEMBERED_ABSENT);
        assert!(graph.is_absent(&(2 * REMEMBERED_ABSENT - 1).to_string()));
    }
}
