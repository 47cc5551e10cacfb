//! Places for connections of which nobody knows yet whose they are.
//!
//! A new connection always gets in. When there are too many, the peer with the most connections loses its oldest one: a
//! flood pays for itself, and nobody else is kept out.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// A number of places.
#[derive(Debug, Clone)]
pub struct Places {
    most: usize,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    /// By age.
    open: BTreeMap<u64, (IpAddr, CancellationToken)>,
}

/// The place of one connection; dropping it gives it back.
#[derive(Debug)]
pub struct Place {
    places: Places,
    id: u64,
    evicted: CancellationToken,
}

impl Places {
    pub fn new(most: usize) -> Self {
        Self { most, state: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection in, at the cost of another one if there are too many.
    pub fn enter(&self, peer: IpAddr) -> Place {
        let mut state = self.lock();
        if state.open.len() >= self.most
            && let Some((_, evicted)) = victim(&state.open).and_then(|id| state.open.remove(&id))
        {
            evicted.cancel();
        }
        let (id, evicted) = (state.next, CancellationToken::new());
        state.next += 1;
        state.open.insert(id, (network(peer), evicted.clone()));
        Place { places: self.clone(), id, evicted }
    }

    /// The number of places that are taken.
    pub fn taken(&self) -> usize {
        self.lock().open.len()
    }
}

impl Place {
    /// Ends when the place is given to somebody else.
    pub async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Is cancelled when the place is given to somebody else.
    pub fn eviction(&self) -> CancellationToken {
        self.evicted.clone()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().open.remove(&self.id);
    }
}

/// One machine has a whole network of IPv6 addresses to itself.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

/// The oldest connection of the peer that has most.
fn victim<T>(open: &BTreeMap<u64, (IpAddr, T)>) -> Option<u64> {
    let mut counts: HashMap<IpAddr, (usize, u64)> = HashMap::new();
    for (id, (peer, _)) in open {
        counts.entry(*peer).or_insert((0, *id)).0 += 1;
    }
    counts.into_values().max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest))).map(|(_, id)| id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peer_with_most_connections_loses_its_oldest() {
        let peers = |list: &[u8]| -> BTreeMap<u64, (IpAddr, ())> {
            let address = |n: u8| network(IpAddr::from([10, 0, 0, n]));
            list.iter().enumerate().map(|(id, n)| (id as u64, (address(*n), ()))).collect()
        };
        for (list, expected) in [
            (&[][..], None),
            (&[1], Some(0)),
            (&[1, 2, 2], Some(1)),
            (&[1, 2, 1, 2], Some(0)),
            (&[3, 1, 2, 2, 2, 1], Some(2)),
        ] {
            assert_eq!(victim(&peers(list)), expected, "{list:?}");
        }
    }

    #[test]
    fn a_flood_pays_for_itself() {
        let places = Places::new(16);
        let quiet = places.enter(IpAddr::from([10, 0, 0, 2]));
        let flood: Vec<Place> = (0..32).map(|_| places.enter(IpAddr::from([10, 0, 0, 1]))).collect();
        assert_eq!(places.taken(), 16);
        assert!(!quiet.evicted.is_cancelled());
        assert_eq!(flood.iter().filter(|place| place.evicted.is_cancelled()).count(), 17);
        drop((flood, quiet));
        assert_eq!(places.taken(), 0);
    }

    #[test]
    fn a_network_of_ipv6_is_one_peer() {
        let same = |a: &str, b: &str| network(a.parse().unwrap()) == network(b.parse().unwrap());
        assert!(same("fd00:1::1", "fd00:1::2"));
        assert!(!same("fd00:1::1", "fd00:1:0:1::1"));
        assert!(same("::ffff:10.0.0.1", "10.0.0.1"));
    }
}
