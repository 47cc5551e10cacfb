//! Shares of clients.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// Counts the slots of each client. The map has an entry for each client with a slot.
#[derive(Debug)]
pub struct PerClient {
    most: u32,
    held: Mutex<HashMap<IpAddr, u32>>,
}

/// One of a client's share; dropping it gives it back.
#[derive(Debug)]
pub struct Share {
    client: IpAddr,
    of: Arc<PerClient>,
}

impl PerClient {
    pub fn new(most: u32) -> Self {
        Self { most, held: Mutex::default() }
    }

    /// None if the client has its share already.
    pub fn take(self: &Arc<Self>, client: IpAddr) -> Option<Share> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let count = held.entry(client).or_default();
        if *count >= self.most {
            return None;
        }
        *count += 1;
        Some(Share { client, of: Arc::clone(self) })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut held = self.of.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = held.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_gets_back_what_it_gives_back() {
        let shares = Arc::new(PerClient::new(2));
        let (one, other): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let first = shares.take(one).unwrap();
        let _second = shares.take(one).unwrap();
        assert!(shares.take(one).is_none());
        assert!(shares.take(other).is_some());
        drop(first);
        assert!(shares.take(one).is_some());
        assert_eq!(shares.held.lock().unwrap().len(), 1);
    }
}
