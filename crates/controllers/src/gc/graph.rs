//! The graph of owners by UID, as far as the watches have reported it.
//!
//! A dependent may lie about the kind, the namespace and the name of its owner. So an owner that was looked for and not
//! found is absent at the coordinates where it was looked for, and nowhere else.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};

use ferrite_json::Text;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// Owners known to be gone that are remembered; asking the server again for each dependent would be slow.
const REMEMBERED_ABSENT: usize = 500;

pub(super) type Uid = String;

/// Where an object is found.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Identity {
    pub(super) api_version: Text,
    pub(super) kind: Text,
    /// Empty for cluster-scoped objects.
    pub(super) namespace: Text,
    pub(super) name: Text,
    pub(super) uid: Uid,
}

impl Identity {
    /// The owner that a reference of an object in `namespace` names.
    pub(super) fn of_owner(reference: &OwnerReference, namespace: &str) -> Self {
        Self {
            api_version: reference.api_version.as_str().into(),
            kind: reference.kind.as_str().into(),
            namespace: namespace.into(),
            name: reference.name.as_str().into(),
            uid: reference.uid.clone(),
        }
    }

    /// Returns true if the reference has these coordinates. It has no namespace of its own.
    fn is_named_by(&self, reference: &OwnerReference) -> bool {
        self.uid == reference.uid
            && self.name.as_str() == reference.name
            && self.kind.as_str() == reference.kind
            && self.api_version.as_str() == reference.api_version
    }

    /// Returns true if an object in `namespace` can have this owner.
    fn is_reachable_from(&self, namespace: &str) -> bool {
        self.namespace.is_empty() || self.namespace.as_str() == namespace
    }

    /// Returns true if `reference`, of an object in `namespace`, is right about this owner.
    pub(super) fn matches(&self, reference: &OwnerReference, namespace: &str) -> bool {
        self.is_reachable_from(namespace) && self.is_named_by(reference)
    }
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
#[derive(Debug, Default, PartialEq)]
pub(super) struct Work {
    pub(super) delete: Vec<Uid>,
    pub(super) orphan: Vec<Uid>,
    /// Objects that name an owner of another namespace, with the owner's UID and their reference.
    pub(super) invalid: Vec<(Identity, OwnerReference)>,
}

/// The result of a search for an owner that was not found.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Absence {
    pub(super) work: Work,
    /// The dependents of a placeholder disagree about its coordinates: it has others now, to be verified later.
    pub(super) has_alternative: bool,
}

#[derive(Debug, Default)]
pub(super) struct Graph {
    nodes: HashMap<Uid, Node>,
    absent: HashSet<Identity>,
    absent_order: VecDeque<Identity>,
}

impl Graph {
    pub(super) fn get(&self, uid: &str) -> Option<&Node> {
        self.nodes.get(uid)
    }

    pub(super) fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// Returns true if the owner of an object in `namespace` is known to be gone.
    pub(super) fn is_absent(&self, reference: &OwnerReference, namespace: &str) -> bool {
        if self.absent.is_empty() {
            return false;
        }
        let mut owner = Identity::of_owner(reference, "");
        self.absent.contains(&owner) || {
            owner.namespace = namespace.into();
            self.absent.contains(&owner)
        }
    }

    /// Notes that there is no such object. A cluster-scoped one has no namespace.
    pub(super) fn note_absent(&mut self, identity: &Identity) {
        if self.absent.insert(identity.clone()) {
            self.absent_order.push_back(identity.clone());
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
        if self.absent.remove(&seen.identity) {
            self.absent_order.retain(|absent| *absent != seen.identity);
        }
        self.correct(&seen.identity, &mut work);
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
                self.drop_placeholder(&reference.uid);
            }
            // The owner may be free to go now.
            if blocked && now.is_none_or(|owner| owner.block_owner_deletion != Some(true)) {
                work.delete.push(reference.uid.clone());
            }
        }
        let mut is_suspect = false;
        for reference in &seen.owners {
            let is_new = !previous.iter().any(|known| has_same_coordinates(known, reference));
            if is_new && let Some(owner) = self.nodes.get(&reference.uid) {
                if owner.observed && !owner.identity.is_reachable_from(&seen.identity.namespace) {
                    work.invalid.push((seen.identity.clone(), reference.clone()));
                }
                // A placeholder without a namespace stands for a cluster-scoped object, or for one that a cluster-scoped
                // dependent cannot have.
                is_suspect |= !owner.identity.matches(reference, &seen.identity.namespace)
                    || (!owner.observed && owner.identity.namespace != seen.identity.namespace);
            }
            self.owner(reference, &seen.identity, &mut work).dependents.insert(uid.clone());
        }
        if is_suspect {
            work.delete.push(uid.clone());
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
        if let Some(node) = self.nodes.get(&uid)
            && node.owners.iter().any(|owner| {
                self.is_absent(owner, &node.identity.namespace)
                    || self.nodes.get(&owner.uid).is_some_and(|owner| owner.deleting_dependents)
            })
        {
            work.delete.push(uid);
        }
        work
    }

    /// A watch reports an object that was a placeholder so far: the dependents that were wrong about it are verified.
    fn correct(&mut self, identity: &Identity, work: &mut Work) {
        let Some(node) = self.nodes.get(&identity.uid).filter(|node| !node.observed) else { return };
        for dependent in node.dependents.iter().filter_map(|uid| self.nodes.get(uid)) {
            let wrong = dependent.owners.iter().find(|reference| {
                reference.uid == identity.uid && !identity.matches(reference, &dependent.identity.namespace)
            });
            let Some(reference) = wrong else { continue };
            if !identity.is_reachable_from(&dependent.identity.namespace) {
                work.invalid.push((dependent.identity.clone(), reference.clone()));
            }
            work.delete.push(dependent.identity.uid.clone());
        }
    }

    /// Forgets a placeholder that nobody names any more.
    fn drop_placeholder(&mut self, uid: &str) {
        if self.nodes.get(uid).is_some_and(|node| !node.observed && node.dependents.is_empty()) {
            self.nodes.remove(uid);
        }
    }

    /// There is no object with these coordinates. That of the same UID with other ones may exist.
    pub(super) fn not_found(&mut self, identity: &Identity) -> Absence {
        let Some(node) = self.nodes.get(&identity.uid) else { return Absence::default() };
        let named = |uid: &Uid, is_right: bool| {
            self.nodes.get(uid).is_some_and(|dependent| {
                dependent.owners.iter().any(|reference| {
                    reference.uid == identity.uid
                        && identity.matches(reference, &dependent.identity.namespace) == is_right
                })
            })
        };
        let right: Vec<Uid> = node.dependents.iter().filter(|uid| named(uid, true)).cloned().collect();
        let alternative = match node.observed {
            // Watches have reported it elsewhere.
            true if node.identity != *identity => None,
            true => return Absence { work: self.gone(&identity.uid), has_alternative: false },
            false => match self.alternative(node, identity) {
                Some(other) => Some(other),
                None => return Absence { work: self.gone(&identity.uid), has_alternative: false },
            },
        };
        let has_moved = node.identity == *identity;
        if !right.is_empty() {
            self.note_absent(identity);
        }
        let has_alternative = has_moved && alternative.is_some();
        if let (true, Some(other), Some(node)) = (has_moved, alternative, self.nodes.get_mut(&identity.uid)) {
            node.identity = other;
        }
        Absence { work: Work { delete: right, ..Work::default() }, has_alternative }
    }

    /// Other coordinates that a dependent gives for a placeholder: the next ones in order, so that all get their turn.
    fn alternative(&self, node: &Node, absent: &Identity) -> Option<Identity> {
        let others: BTreeSet<Identity> = node
            .dependents
            .iter()
            .filter_map(|uid| self.nodes.get(uid))
            .flat_map(|dependent| dependent.owners.iter().map(|owner| (owner, &dependent.identity.namespace)))
            .filter(|(owner, namespace)| owner.uid == absent.uid && !absent.matches(owner, namespace))
            .map(|(owner, namespace)| {
                let is_cluster_scoped = absent.namespace.is_empty()
                    && absent.api_version.as_str() == owner.api_version
                    && absent.kind.as_str() == owner.kind;
                Identity::of_owner(owner, if is_cluster_scoped { "" } else { namespace })
            })
            .collect();
        others.range(absent.clone()..).next().or_else(|| others.first()).cloned()
    }

    /// An object is gone.
    pub(super) fn gone(&mut self, uid: &str) -> Work {
        let mut work = Work::default();
        let Some(node) = self.nodes.remove(uid) else { return work };
        if !node.dependents.is_empty() {
            self.note_absent(&node.identity);
            work.delete.extend(node.dependents);
        }
        for reference in node.owners {
            let Some(owner) = self.nodes.get_mut(&reference.uid) else { continue };
            owner.dependents.remove(uid);
            if owner.deleting_dependents {
                work.delete.push(reference.uid);
            } else {
                self.drop_placeholder(&reference.uid);
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
                identity: Identity::of_owner(reference, &dependent.namespace),
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

fn has_same_coordinates(a: &OwnerReference, b: &OwnerReference) -> bool {
    (&a.uid, &a.name, &a.kind, &a.api_version) == (&b.uid, &b.name, &b.kind, &b.api_version)
}

#[cfg(test)]
#[path = "graph_tests.rs"]
mod tests;
