//! Limits of the proxy in total, and of each client.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bounds of time and number. Memory follows from them: a connection has buffers of a fixed size, and bodies stream.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections of clients.
    pub connections: usize,
    /// Those of one client, an IPv4 address or a /64 of IPv6, and its requests that are being answered: a connection
    /// carries many.
    pub each_client: usize,
    /// Requests that are being answered.
    pub requests: usize,
    /// A handshake of TLS.
    pub handshake: Duration,
    /// The whole head of a request, and the time between two requests of a connection.
    pub head: Duration,
    /// The next piece of a request's body.
    pub request_body: Duration,
    /// A connection to an endpoint.
    pub connect: Duration,
    /// The head of an answer.
    pub response: Duration,
    /// The next piece of an answer's body.
    pub response_body: Duration,
    /// Time limit for a client that does not read.
    pub write: Duration,
    /// A WebSocket on which nothing is said.
    pub tunnel: Duration,
    /// A connection to an endpoint that nobody uses.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self::with_descriptors(usize::MAX)
    }
}

impl Limits {
    /// A request needs two descriptors, and the process has other uses for them.
    pub fn with_descriptors(count: usize) -> Self {
        let connections = (count / 8).clamp(64, 8192);
        Self {
            connections,
            each_client: connections / 4,
            requests: connections,
            handshake: Duration::from_secs(10),
            head: Duration::from_secs(30),
            request_body: Duration::from_secs(60),
            connect: Duration::from_secs(5),
            response: Duration::from_secs(60),
            response_body: Duration::from_secs(600),
            write: Duration::from_secs(60),
            tunnel: Duration::from_secs(3600),
            idle: Duration::from_secs(30),
        }
    }
}

/// The open connections and their requests, counted.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    clients: Mutex<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    all: Usage,
    each: HashMap<IpAddr, Usage>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Usage {
    connections: usize,
    requests: usize,
}

impl Counted {
    /// Changes the figures of a client and of all.
    fn change(&mut self, client: IpAddr, change: impl Fn(&mut Usage)) {
        change(&mut self.all);
        let own = self.each.entry(client).or_default();
        change(own);
        if *own == Usage::default() {
            self.each.remove(&client);
        }
    }

    fn of(&self, client: IpAddr) -> Usage {
        self.each.get(&client).copied().unwrap_or_default()
    }
}

/// A connection's place, until dropped.
#[derive(Debug)]
pub(crate) struct Slot {
    connections: Arc<Connections>,
    client: IpAddr,
}

/// A request's place, until dropped.
#[derive(Debug)]
pub(crate) struct RequestPlace {
    connections: Arc<Connections>,
    client: IpAddr,
}

impl Connections {
    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection; None if there are too many, of all or of this client.
    pub fn admit(self: &Arc<Self>, address: IpAddr, limits: &Limits) -> Option<Slot> {
        let client = client_of(address);
        let mut counted = self.lock();
        let held = counted.of(client).connections;
        if counted.all.connections >= limits.connections || held >= limits.each_client {
            return None;
        }
        counted.change(client, |usage| usage.connections += 1);
        Some(Slot { connections: Arc::clone(self), client })
    }
}

impl Slot {
    /// A place for a request; None if there are too many, of all or of this client.
    pub fn request(&self, limits: &Limits) -> Option<RequestPlace> {
        let mut counted = self.connections.lock();
        let held = counted.of(self.client).requests;
        if counted.all.requests >= limits.requests || held >= limits.each_client {
            return None;
        }
        counted.change(self.client, |usage| usage.requests += 1);
        Some(RequestPlace { connections: Arc::clone(&self.connections), client: self.client })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.lock().change(self.client, |usage| usage.connections -= 1);
    }
}

impl Drop for RequestPlace {
    fn drop(&mut self) {
        self.connections.lock().change(self.client, |usage| usage.requests -= 1);
    }
}

/// The client that an address counts as. A client with one address of a /64 has all of it.
fn client_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::from((u128::from(v6) >> 64 << 64).to_be_bytes()),
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_cannot_take_every_place() {
        let connections = Arc::new(Connections::default());
        let limits = Limits { connections: 3, each_client: 2, ..Limits::default() };
        let admit = |address: &str| connections.admit(address.parse().unwrap(), &limits);
        let first = admit("10.0.0.1");
        let second = admit("::ffff:10.0.0.1");
        assert!(first.is_some() && second.is_some());
        assert!(admit("10.0.0.1").is_none(), "its own places are taken");
        let other = admit("10.0.0.2");
        assert!(other.is_some());
        assert!(admit("10.0.0.3").is_none(), "all places are taken");
        drop((first, second));
        let (six, same) = (admit("2001:db8::1"), admit("2001:db8::2"));
        assert!(six.is_some() && same.is_some());
        drop((other, same, six));
        assert_eq!(connections.lock().all, Usage::default());
        assert!(connections.lock().each.is_empty());
    }

    #[test]
    fn a_client_with_one_connection_cannot_have_every_request() {
        let connections = Arc::new(Connections::default());
        let limits = Limits { connections: 9, each_client: 2, requests: 3, ..Limits::default() };
        let slot = |address: &str| connections.admit(address.parse().unwrap(), &limits).unwrap();
        let (one, same, other, third) =
            (slot("10.0.0.1"), slot("10.0.0.1"), slot("10.0.0.2"), slot("10.0.0.3"));
        let held = [one.request(&limits).unwrap(), same.request(&limits).unwrap()];
        assert!(one.request(&limits).is_none(), "its share is used up");
        let last = other.request(&limits);
        assert!(last.is_some() && third.request(&limits).is_none(), "all places are taken");
        // A request may outlive its connection.
        drop((one, same));
        assert_eq!(connections.lock().of("10.0.0.1".parse().unwrap()).requests, 2);
        drop((held, last, other, third));
        assert!(connections.lock().each.is_empty());
    }
}
