//! The elements that service ports claim, and the service port that has each frontend.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;

use crate::layout::{Frontend, Key, Rank, SetName};

/// The number of a class.
pub(super) type ClassNumber = NonZeroU32;

/// An element that a service port claims.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct HeldClaim {
    pub key: Key,
    /// None for a member of a set.
    pub class: Option<ClassNumber>,
    pub set: SetName,
}

/// The service port whose element is in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claimant {
    /// Of the service port.
    pub id: u64,
    pub class: Option<ClassNumber>,
}

/// A service port that wants a frontend. Ordered by rank.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Contender {
    rank: Rank,
    id: u64,
}

/// The contenders of one frontend.
#[derive(Debug)]
struct Contenders {
    owner: Contender,
    /// Those without it, in the order in which they get it. Most frontends have none.
    others: Vec<Contender>,
}

/// The elements of the table, and the owners of frontends.
///
/// A Service may name an address of another one as an external address. The frontend then belongs to the contender of
/// the best rank, whatever happens to the endpoints of either and in whatever order they came.
#[derive(Debug, Default)]
pub(super) struct Owners {
    sets: BTreeMap<SetName, HashMap<Key, Claimant>>,
    /// Further service ports that need an element of a shared set.
    sharing: BTreeMap<(SetName, Key), Vec<u64>>,
    frontends: HashMap<Key, Contenders>,
}

impl Owners {
    /// The service port that has a frontend.
    pub(super) fn owner(&self, frontend: &Key) -> Option<u64> {
        self.frontends.get(frontend).map(|contenders| contenders.owner.id)
    }

    /// Returns true if claims of `id` on the element have an effect.
    pub(super) fn is_effective(&self, claim: &HeldClaim, id: u64) -> bool {
        claim.set.frontend(&claim.key).is_none_or(|frontend| self.owner(&frontend) == Some(id))
    }

    pub(super) fn enter(&mut self, frontend: &Frontend, id: u64) {
        let contender = Contender { rank: frontend.rank.clone(), id };
        match self.frontends.entry(frontend.key.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(Contenders { owner: contender, others: Vec::new() });
            }
            Entry::Occupied(mut entry) => {
                let Contenders { owner, others } = entry.get_mut();
                let later = match contender < *owner {
                    true => std::mem::replace(owner, contender),
                    false => contender,
                };
                others.insert(others.partition_point(|other| *other < later), later);
            }
        }
    }

    pub(super) fn leave(&mut self, frontend: &Frontend, id: u64) {
        let Entry::Occupied(mut entry) = self.frontends.entry(frontend.key.clone()) else { return };
        let Contenders { owner, others } = entry.get_mut();
        if owner.id != id {
            let gone = Contender { rank: frontend.rank.clone(), id };
            if let Ok(at) = others.binary_search(&gone) {
                others.remove(at);
            }
        } else if others.is_empty() {
            entry.remove();
        } else {
            *owner = others.remove(0);
        }
    }

    /// Puts an element into the table. Returns false if another service port needs the same one and has put it there.
    pub(super) fn claim(&mut self, claim: &HeldClaim, id: u64) -> bool {
        let claimant = Claimant { id, class: claim.class };
        match self.sets.entry(claim.set).or_default().entry(claim.key.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(claimant);
                true
            }
            Entry::Occupied(_) => {
                self.sharing.entry((claim.set, claim.key.clone())).or_default().push(id);
                false
            }
        }
    }

    /// Takes an element out of the table. Returns false if another service port needs it.
    pub(super) fn release(&mut self, claim: &HeldClaim, id: u64) -> bool {
        let Some(elements) = self.sets.get_mut(&claim.set) else { return false };
        let Some(element) = elements.get_mut(&claim.key) else { return false };
        let place = (claim.set, claim.key.clone());
        let Some(sharing) = self.sharing.get_mut(&place) else {
            return element.id == id && elements.remove(&claim.key).is_some();
        };
        if element.id == id {
            // Elements of shared sets have no value that could differ.
            element.id = sharing.swap_remove(0);
        } else if let Some(at) = sharing.iter().position(|other| *other == id) {
            sharing.swap_remove(at);
        }
        if sharing.is_empty() {
            self.sharing.remove(&place);
        }
        false
    }

    /// All elements, those of one set as neighbours.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SetName, &Key, Claimant)> {
        self.sets.iter().flat_map(|(set, owners)| owners.iter().map(|(key, claimant)| (*set, key, *claimant)))
    }

    pub(super) fn len(&self) -> usize {
        self.sets.values().map(HashMap::len).sum()
    }
}
