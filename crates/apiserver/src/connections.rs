//! Which connections may stay open, and which has to go when there are too many.
//!
//! A connection costs a descriptor and memory from the moment it is accepted, long before its user is
//! known. So that strangers cannot lock out everybody else, a new connection always gets in: it takes the
//! place of the oldest connection without an authenticated user. A connection with one is kept, up to a
//! share for each user.

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
    users: HashMap<Arc<str>, usize>,
    /// All that belong to somebody.
    known: usize,
}

impl Table {
    fn evict_oldest(&mut self) -> bool {
        let oldest = self.strangers.pop_first();
        oldest.inspect(|(_, evicted)| evicted.cancel()).is_some()
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

    /// A place for a new connection. None when every place belongs to a user.
    pub fn admit(self: &Arc<Self>) -> Option<Slot> {
        let mut table = self.table();
        let full = table.strangers.len() >= self.limits.strangers
            || table.strangers.len() + table.known >= self.limits.total;
        if full && !table.evict_oldest() {
            return None;
        }
        table.next += 1;
        let (id, evicted) = (table.next, CancellationToken::new());
        table.strangers.insert(id, evicted.clone());
        Some(Slot { connections: Arc::clone(self), id, evicted, user: Mutex::default() })
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
        let held = table.users.get(user).copied().unwrap_or(0);
        if held >= self.connections.limits.each_user || table.strangers.remove(&self.id).is_none() {
            return;
        }
        let user: Arc<str> = user.into();
        table.known += 1;
        table.users.insert(Arc::clone(&user), held + 1);
        *own = Some(user);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let own = self.user.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut table = self.connections.table();
        table.strangers.remove(&self.id);
        let Some(user) = own else { return };
        table.known -= 1;
        if let Some(held) = table.users.get_mut(&user) {
            *held -= 1;
            if *held == 0 {
                table.users.remove(&user);
            }
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
        let slots: Vec<Slot> = (0..5).map(|_| connections.admit().unwrap()).collect();
        assert_eq!(slots.iter().map(is_gone).collect::<Vec<_>>(), [true, true, false, false, false]);
    }

    #[test]
    fn who_is_known_stays() {
        let connections = connections();
        let known = connections.admit().unwrap();
        known.belongs_to("a");
        let strangers: Vec<Slot> = (0..5).map(|_| connections.admit().unwrap()).collect();
        assert!(!is_gone(&known));
        assert_eq!(strangers.iter().filter(|slot| !is_gone(slot)).count(), 3);
        drop(strangers);
        let others: Vec<Slot> = ["a", "b", "b"]
            .iter()
            .map(|user| {
                let slot = connections.admit().unwrap();
                slot.belongs_to(user);
                slot
            })
            .collect();
        assert!(connections.admit().is_none(), "every place belongs to a user");
        drop(others);
        assert!(connections.admit().is_some());
    }

    #[test]
    fn one_user_cannot_take_every_place() {
        let connections = connections();
        let greedy: Vec<Slot> = (0..10)
            .map(|_| {
                let slot = connections.admit().unwrap();
                slot.belongs_to("greedy");
                slot
            })
            .collect();
        let other = connections.admit().unwrap();
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
