//! Limits the connections to the kubelet API, in number and time.
//!
//! A connection is a stranger's until a request on it was authorized. Strangers have few places and little
//! time; when their places are full, the peer with the most connections loses its oldest one. Nobody has to
//! wait for a stranger: the API server gets in however many idle connections others hold.

use ferrite_component::Places;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Strangers' connections at the same time.
pub(super) const MAX_STRANGERS: usize = 256;
/// Connections of callers that may use the API.
pub(super) const MAX_CALLERS: usize = 1024;

#[derive(Clone)]
pub(super) struct Gate {
    strangers: Places,
    callers: Arc<AtomicUsize>,
}

impl Default for Gate {
    fn default() -> Self {
        Self { strangers: Places::new(MAX_STRANGERS), callers: Arc::default() }
    }
}

/// A place among the strangers; dropping it gives it back.
pub(super) struct Stranger {
    gate: Gate,
    place: ferrite_component::Place,
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
        let evicted = stranger.place.eviction();
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
    /// Lets a connection in, at the cost of another stranger's if there are too many.
    pub(super) fn enter(&self, peer: IpAddr) -> Stranger {
        Stranger { gate: self.clone(), place: self.strangers.enter(peer) }
    }
}

impl Stranger {
    /// Ends when the place is given to somebody else.
    pub(super) async fn evicted(&self) {
        self.place.evicted().await;
    }

    /// Makes room among the strangers: the caller is authenticated. Nothing when too many such callers are
    /// here.
    pub(super) fn becomes_caller(self) -> Option<Caller> {
        let Self { gate, place } = self;
        drop(place);
        if gate.callers.fetch_add(1, Ordering::AcqRel) >= MAX_CALLERS {
            gate.callers.fetch_sub(1, Ordering::AcqRel);
            return None;
        }
        Some(Caller { gate })
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.gate.callers.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_come_and_go_and_callers_stay() {
        let gate = Gate::default();
        let counts = || (gate.strangers.taken(), gate.callers.load(Ordering::Acquire));
        let (flood, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let quiet = gate.enter(other);
        let held: Vec<Stranger> = (0..2 * MAX_STRANGERS).map(|_| gate.enter(flood)).collect();
        assert_eq!(counts(), (MAX_STRANGERS, 0));
        assert!(!quiet.place.eviction().is_cancelled(), "only the flood pays for itself");
        let caller = quiet.becomes_caller().unwrap();
        assert_eq!(counts(), (MAX_STRANGERS - 1, 1));
        drop(held);
        let callers: Vec<_> = (1..MAX_CALLERS).map(|_| gate.enter(flood).becomes_caller().unwrap()).collect();
        assert!(gate.enter(other).becomes_caller().is_none());
        drop((caller, callers));
        assert_eq!(counts(), (0, 0));
    }
}
