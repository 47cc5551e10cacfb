//! Limits what the pods of one namespace take of the kubelet's connections.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Places of each namespace.
#[derive(Debug, Clone)]
pub(super) struct Shares {
    each: usize,
    taken: Arc<Mutex<HashMap<String, usize>>>,
}

/// One place, until dropped.
#[derive(Debug)]
pub(super) struct Share {
    shares: Shares,
    namespace: String,
}

impl Shares {
    pub(super) fn new(each: usize) -> Self {
        Self { each, taken: Arc::default() }
    }

    /// A place for a request about a namespace's pod. None when the namespace has too many.
    pub(super) fn enter(&self, namespace: &str) -> Option<Share> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let count = taken.entry(namespace.to_owned()).or_default();
        if *count >= self.each {
            return None;
        }
        *count += 1;
        Some(Share { shares: self.clone(), namespace: namespace.to_owned() })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut taken = self.shares.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = taken.get_mut(&self.namespace) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.namespace);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_its_share_and_no_more() {
        let shares = Shares::new(2);
        let mut held: Vec<_> = (0..2).map(|_| shares.enter("a").unwrap()).collect();
        assert!(shares.enter("a").is_none());
        assert!(shares.enter("b").is_some());
        held.pop();
        held.push(shares.enter("a").expect("a place that was given back"));
        drop(held);
        assert!(shares.taken.lock().unwrap().is_empty());
    }
}
