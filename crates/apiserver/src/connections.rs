//! Which connections may stay open, and which has to go when there are too many.
//!
//! A connection costs a descriptor and memory from the moment it is accepted, long before its user is
//! known. So that strangers cannot lock out everybody else, a new connection always gets in: it takes the
//! place of the oldest connection without an authenticated user. A connection with one is kept, up to a
//! share for each user. When every place belongs to a user, the one with the most connections loses its oldest: several
//! users of one person lock nobody out either.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

/// Limits for the number of connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// All of them.
    pub total: usize,
    /// Most connections without an authenticated user.
    pub strangers: usize,
    /// Those of one user that are sure of their place.
    pub each_user: usize,
}

impl ConnectionLimits {
    /// More are of no use to anybody: 5,000 nodes have about three each.
    const MOST: usize = 30_000;
    const MOST_STRANGERS: usize = 2_000;

    /// Leaves half of the process's descriptors to the store, to streams and to everything else.
    pub fn with_descriptors(count: usize) -> Self {
        let total = (count / 2).clamp(16, Self::MOST);
        Self { total, strangers: (total / 2).min(Self::MOST_STRANGERS), each_user: total / 4 }
    }
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self::with_descriptors(usize::MAX)
    }
}

/// The connections that are open.
#[derive(Debug)]
pub(crate) struct Connections {
    limits: ConnectionLimits,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// By age.
    strangers: BTreeMap<u64, CancellationToken>,
    /// By age.
    users: HashMap<Arc<str>, BTreeMap<u64, CancellationToken>>,
    /// All that belong to somebody.
    known: usize,
}

impl Table {
    fn evict_oldest(&mut self) -> bool {
        let oldest = self.strangers.pop_first();
        oldest.inspect(|(_, evicted)| evicted.cancel()).is_some()
    }

    /// Evicts the oldest connection of the user that has most.
    fn evict_of_largest(&mut self) {
        let largest = self.users.iter().max_by_key(|(_, held)| held.len());
        let Some((user, id)) =
            largest.and_then(|(user, held)| Some((Arc::clone(user), *held.keys().next()?)))
        else {
            return;
        };
        if let Some(evicted) = self.leave(&user, id) {
            evicted.cancel();
        }
    }

    /// Takes a connection from its user.
    fn leave(&mut self, user: &Arc<str>, id: u64) -> Option<CancellationToken> {
        let held = self.users.get_mut(user)?;
        let token = held.remove(&id)?;
        if held.is_empty() {
            self.users.remove(user);
        }
        self.known -= 1;
        Some(token)
    }
}

/// A connection's place, until dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    connections: Arc<Connections>,
    id: u64,
    evicted: CancellationToken,
    user: Mutex<Option<Arc<str>>>,
}

impl Connections {
    pub fn new(limits: ConnectionLimits) -> Arc<Self> {
        Arc::new(Self { limits, table: Mutex::default() })
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a new connection.
    pub fn admit(self: &Arc<Self>) -> Slot {
        let mut table = self.table();
        let full = table.strangers.len() >= self.limits.strangers
            || table.strangers.len() + table.known >= self.limits.total;
        if full && !table.evict_oldest() {
            table.evict_of_largest();
        }
        table.next += 1;
        let (id, evicted) = (table.next, CancellationToken::new());
        table.strangers.insert(id, evicted.clone());
        Slot { connections: Arc::clone(self), id, evicted, user: Mutex::default() }
    }
}

impl Slot {
    /// Ends when the connection has to make room for another.
    pub fn evicted(&self) -> CancellationToken {
        self.evicted.clone()
    }

    /// The connection belongs to `user`. Beyond the user's share it stays one that has to make room.
    pub fn belongs_to(&self, user: &str) {
        let mut own = self.user.lock().unwrap_or_else(PoisonError::into_inner);
        if own.is_some() {
            return;
        }
        let mut table = self.connections.table();
        let held = table.users.get(user).map_or(0, BTreeMap::len);
        if held >= self.connections.limits.each_user {
            return;
        }
        let Some(token) = table.strangers.remove(&self.id) else { return };
        let user: Arc<str> = user.into();
        table.known += 1;
        table.users.entry(Arc::clone(&user)).or_default().insert(self.id, token);
        *own = Some(user);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let own = self.user.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut table = self.connections.table();
        table.strangers.remove(&self.id);
        if let Some(user) = own {
            table.leave(&user, self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connections() -> Arc<Connections> {
        Connections::new(ConnectionLimits { total: 4, strangers: 3, each_user: 2 })
    }

    fn is_gone(slot: &Slot) -> bool {
        slot.evicted().is_cancelled()
    }

    #[test]
    fn a_newcomer_takes_the_place_of_the_oldest_stranger() {
        let connections = connections();
        let slots: Vec<Slot> = (0..5).map(|_| connections.admit()).collect();
        assert_eq!(slots.iter().map(is_gone).collect::<Vec<_>>(), [true, true, false, false, false]);
    }

    #[test]
    fn who_is_known_stays() {
        let connections = connections();
        let known = connections.admit();
        known.belongs_to("a");
        let strangers: Vec<Slot> = (0..5).map(|_| connections.admit()).collect();
        assert!(!is_gone(&known));
        assert_eq!(strangers.iter().filter(|slot| !is_gone(slot)).count(), 3);
        drop(strangers);
        let others: Vec<Slot> = ["a", "b", "b"]
            .iter()
            .map(|user| {
                let slot = connections.admit();
                slot.belongs_to(user);
                slot
            })
            .collect();
        // Every place belongs to a user. A newcomer gets in at the cost of one that has most.
        let newcomer = connections.admit();
        assert!(!is_gone(&newcomer));
        let gone: Vec<bool> = [&known].into_iter().chain(&others).map(is_gone).collect();
        assert_eq!(gone.iter().filter(|gone| **gone).count(), 1, "{gone:?}");
        newcomer.belongs_to("c");
        let another = connections.admit();
        assert!(!is_gone(&newcomer) && !is_gone(&another), "c has fewer than the others");
        drop((known, others, newcomer, another));
        assert_eq!(connections.table().known, 0);
    }

    #[test]
    fn one_user_cannot_take_every_place() {
        let connections = connections();
        let greedy: Vec<Slot> = (0..10)
            .map(|_| {
                let slot = connections.admit();
                slot.belongs_to("greedy");
                slot
            })
            .collect();
        let other = connections.admit();
        other.belongs_to("other");
        assert!(!is_gone(&other));
        assert_eq!(greedy.iter().filter(|slot| !is_gone(slot)).count(), 3);
        drop((greedy, other));
        let table = connections.table();
        assert_eq!((table.known, table.strangers.len(), table.users.len()), (0, 0, 0));
    }

    #[test]
    fn limits_leave_descriptors_to_others() {
        for (descriptors, total, strangers) in
            [(1024, 512, 256), (1_048_576, 30_000, 2_000), (20, 16, 8), (8_192, 4_096, 2_000)]
        {
            let limits = ConnectionLimits::with_descriptors(descriptors);
            assert_eq!((limits.total, limits.strangers), (total, strangers));
        }
    }
}
