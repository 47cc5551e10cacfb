//! The elements of the table, their users, and their changes.

use std::collections::HashMap;

use ferrite_nft::{Element, Key, Value};

use crate::layout::PolicySet;
use crate::model::Name;

/// The users of an element.
#[derive(Debug)]
enum Claim {
    /// A member of a set, with its number of users.
    Member(usize),
    /// The value of a map: the first has it.
    Values(Vec<(Name, Value)>),
    /// Of the table itself.
    Shared(Value),
}

impl Claim {
    fn value(&self) -> Option<Value> {
        match self {
            Self::Member(uses) => (*uses > 0).then_some(Value::Member),
            Self::Values(owners) => owners.first().map(|(_, value)| value.clone()),
            Self::Shared(value) => Some(value.clone()),
        }
    }
}

type Place = (PolicySet, Key);

#[derive(Debug, Default)]
pub(super) struct Elements {
    claims: HashMap<Place, Claim>,
    /// The values that elements had before the changes since the last transaction.
    before: HashMap<Place, Option<Value>>,
}

impl Elements {
    pub(super) fn claim(&mut self, set: PolicySet, key: Key, owner: &Name, value: Value, first: bool) {
        let claim = self.note((set, key)).or_insert_with(|| match value {
            Value::Member => Claim::Member(0),
            _ => Claim::Values(Vec::new()),
        });
        match claim {
            Claim::Member(uses) => *uses += 1,
            Claim::Values(owners) if first => owners.insert(0, (owner.clone(), value)),
            Claim::Values(owners) => owners.push((owner.clone(), value)),
            Claim::Shared(_) => {}
        }
    }

    pub(super) fn withdraw(&mut self, set: PolicySet, key: Key, owner: &Name) {
        let place = (set, key);
        let std::collections::hash_map::Entry::Occupied(mut entry) = self.note(place) else { return };
        match entry.get_mut() {
            Claim::Member(uses) => *uses = uses.saturating_sub(1),
            Claim::Values(owners) => {
                if let Some(at) = owners.iter().position(|(known, _)| known == owner) {
                    owners.remove(at);
                }
            }
            Claim::Shared(_) => {}
        }
        if entry.get().value().is_none() {
            entry.remove();
        }
    }

    pub(super) fn claim_shared(&mut self, set: PolicySet, key: Key, value: Value) {
        self.note((set, key)).or_insert(Claim::Shared(value));
    }

    pub(super) fn withdraw_shared(&mut self, set: PolicySet, key: Key) {
        if let std::collections::hash_map::Entry::Occupied(entry) = self.note((set, key)) {
            entry.remove();
        }
    }

    /// Remembers the value before the change.
    fn note(&mut self, place: Place) -> std::collections::hash_map::Entry<'_, Place, Claim> {
        let entry = self.claims.entry(place);
        if !self.before.contains_key(entry.key()) {
            let value = match &entry {
                std::collections::hash_map::Entry::Occupied(known) => known.get().value(),
                std::collections::hash_map::Entry::Vacant(_) => None,
            };
            self.before.insert(entry.key().clone(), value);
        }
        entry
    }

    /// The elements to delete, and those to add after that.
    pub(super) fn take_changes(&mut self) -> (Vec<Element<PolicySet>>, Vec<Element<PolicySet>>) {
        let (mut delete, mut add) = (Vec::new(), Vec::new());
        for ((set, key), before) in self.before.drain() {
            let after = self.claims.get(&(set, key.clone())).and_then(Claim::value);
            if before == after {
                continue;
            }
            let element = |value| Element { set, key: key.clone(), value, comment: None };
            delete.extend(before.map(element));
            add.extend(after.map(element));
        }
        // Elements of one set go into one message.
        delete.sort_unstable_by(|a, b| (a.set, &a.key).cmp(&(b.set, &b.key)));
        add.sort_unstable_by(|a, b| (a.set, &a.key).cmp(&(b.set, &b.key)));
        (delete, add)
    }

    /// All elements there are. The changes are forgotten.
    pub(super) fn all(&mut self) -> Vec<Element<PolicySet>> {
        self.before.clear();
        let value = |((set, key), claim): (&Place, &Claim)| {
            Some(Element { set: *set, key: key.clone(), value: claim.value()?, comment: None })
        };
        let mut all: Vec<_> = self.claims.iter().filter_map(value).collect();
        all.sort_unstable_by(|a, b| (a.set, &a.key).cmp(&(b.set, &b.key)));
        all
    }
}
