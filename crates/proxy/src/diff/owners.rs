//! The elements that service ports claim, and the service port that has each.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;

use crate::layout::{Key, SetName};

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

/// A service port that claims an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Claimant {
    /// Of the service port.
    pub id: u64,
    pub class: Option<ClassNumber>,
}

/// The claimants of all elements. Two Services with one external address are a mistake of their owners; the second
/// gets the address when the first gives it up.
#[derive(Debug, Default)]
pub(super) struct Owners {
    sets: BTreeMap<SetName, HashMap<Key, Claimant>>,
    /// Those that came later, in their order. Most tables have none.
    waiting: BTreeMap<(SetName, Key), Vec<Claimant>>,
}

impl Owners {
    /// Returns the service port that has the element already.
    pub(super) fn claim(&mut self, claim: &HeldClaim, id: u64) -> Result<(), u64> {
        let claimant = Claimant { id, class: claim.class };
        match self.sets.entry(claim.set).or_default().entry(claim.key.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(claimant);
                Ok(())
            }
            Entry::Occupied(entry) => {
                let owner = entry.get().id;
                self.waiting.entry((claim.set, claim.key.clone())).or_default().push(claimant);
                Err(owner)
            }
        }
    }

    /// Returns the next owner if the service port had the element.
    pub(super) fn release(&mut self, claim: &HeldClaim, id: u64) -> Option<Released> {
        let claimant = Claimant { id, class: claim.class };
        let owners = self.sets.get_mut(&claim.set)?;
        let owner = owners.get_mut(&claim.key)?;
        let place = (claim.set, claim.key.clone());
        let waiting = self.waiting.get_mut(&place);
        if *owner != claimant {
            let waiting = waiting?;
            waiting.remove(waiting.iter().position(|other| *other == claimant)?);
            if waiting.is_empty() {
                self.waiting.remove(&place);
            }
            return None;
        }
        let Some(waiting) = waiting else {
            owners.remove(&claim.key);
            return Some(Released { next: None });
        };
        // A list that waits has somebody in it.
        let next = waiting.remove(0);
        *owner = next;
        if waiting.is_empty() {
            self.waiting.remove(&place);
        }
        Some(Released { next: Some(next) })
    }

    /// All elements, those of one set as neighbours.
    pub(super) fn iter(&self) -> impl Iterator<Item = (SetName, &Key, Claimant)> {
        self.sets.iter().flat_map(|(set, owners)| owners.iter().map(|(key, claimant)| (*set, key, *claimant)))
    }

    pub(super) fn len(&self) -> usize {
        self.sets.values().map(HashMap::len).sum()
    }
}

/// An element that its owner gave up.
pub(super) struct Released {
    /// The one that has it now.
    pub next: Option<Claimant>,
}
