//! Limits the connections to the kubelet API, in number and time.
//!
//! A connection is a stranger's until a request on it was authorized. Strangers have few places and little
//! time; when their places are full, the peer with the most connections loses its oldest one. Nobody has to
//! wait for a stranger: the API server gets in however many idle connections others hold.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Strangers' connections at the same time.
pub(super) const MAX_STRANGERS: usize = 256;
/// Connections of callers that may use the API.
const MAX_CALLERS: usize = 1024;

#[derive(Default)]
struct Strangers {
    next: u64,
    /// By age.
    open: BTreeMap<u64, (IpAddr, CancellationToken)>,
    callers: usize,
}

#[derive(Clone, Default)]
pub(super) struct Gate {
    state: Arc<Mutex<Strangers>>,
}

/// A place among the strangers; dropping it gives it back.
pub(super) struct Stranger {
    gate: Gate,
    id: u64,
    evicted: CancellationToken,
}

/// A place among the callers; dropping it gives it back.
pub(super) struct Caller {
    gate: Gate,
}

/// The place of one connection, which its first authorized request makes a caller's.
pub(super) struct Place {
    held: Mutex<Held>,
    evicted: CancellationToken,
    promoted: CancellationToken,
}

enum Held {
    Stranger(Stranger),
    Caller {
        _place: Caller,
    },
    /// A caller, and there were too many.
    Refused,
}

impl Place {
    pub(super) fn new(stranger: Stranger) -> Self {
        let evicted = stranger.evicted.clone();
        Self { held: Mutex::new(Held::Stranger(stranger)), evicted, promoted: CancellationToken::new() }
    }

    /// The connection has shown that it may use the API. False when too many such connections are open.
    pub(super) fn promote(&self) -> bool {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Held::Stranger(_) = &*held
            && let Held::Stranger(stranger) = std::mem::replace(&mut *held, Held::Refused)
            && let Some(caller) = stranger.becomes_caller()
        {
            *held = Held::Caller { _place: caller };
            self.promoted.cancel();
        }
        matches!(*held, Held::Caller { .. })
    }

    /// Ends when the connection has to: a stranger's place was taken, or its time is over.
    pub(super) async fn lost(&self, limit: Duration) {
        tokio::select! {
            () = self.promoted.cancelled() => std::future::pending().await,
            () = self.evicted.cancelled() => {}
            () = tokio::time::sleep(limit) => {}
        }
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, Strangers> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a connection in, at the cost of another stranger's if there are too many.
    pub(super) fn enter(&self, peer: IpAddr) -> Stranger {
        let mut state = self.lock();
        if state.open.len() >= MAX_STRANGERS
            && let Some((_, evicted)) = victim(&state.open).and_then(|id| state.open.remove(&id))
        {
            evicted.cancel();
        }
        let (id, evicted) = (state.next, CancellationToken::new());
        state.next += 1;
        state.open.insert(id, (network(peer), evicted.clone()));
        Stranger { gate: self.clone(), id, evicted }
    }
}

impl Stranger {
    /// Ends when the place is given to somebody else.
    pub(super) async fn evicted(&self) {
        self.evicted.cancelled().await;
    }

    /// Makes room among the strangers: the caller is authenticated. Nothing when too many such callers are
    /// here.
    pub(super) fn becomes_caller(self) -> Option<Caller> {
        let gate = self.gate.clone();
        drop(self);
        let mut state = gate.lock();
        if state.callers >= MAX_CALLERS {
            return None;
        }
        state.callers += 1;
        drop(state);
        Some(Caller { gate })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.gate.lock().open.remove(&self.id);
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.callers = state.callers.saturating_sub(1);
    }
}

/// One machine has a whole network of IPv6 addresses to itself.
fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(std::net::Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
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
    fn strangers_come_and_go_and_callers_stay() {
        let gate = Gate::default();
        let counts = || {
            let state = gate.lock();
            (state.open.len(), state.callers)
        };
        let (flood, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let quiet = gate.enter(other);
        let held: Vec<Stranger> = (0..2 * MAX_STRANGERS).map(|_| gate.enter(flood)).collect();
        assert_eq!(counts(), (MAX_STRANGERS, 0));
        assert!(!quiet.evicted.is_cancelled(), "only the flood pays for itself");
        assert_eq!(held.iter().filter(|s| s.evicted.is_cancelled()).count(), MAX_STRANGERS + 1);
        let caller = quiet.becomes_caller().unwrap();
        assert_eq!(counts(), (MAX_STRANGERS - 1, 1));
        drop(held);
        drop(caller);
        assert_eq!(counts(), (0, 0));
    }

    #[test]
    fn a_network_of_ipv6_is_one_peer() {
        let same = |a: &str, b: &str| network(a.parse().unwrap()) == network(b.parse().unwrap());
        assert!(same("fd00:1::1", "fd00:1::2"));
        assert!(!same("fd00:1::1", "fd00:1:0:1::1"));
        assert!(same("::ffff:10.0.0.1", "10.0.0.1"));
    }
}
