//! Limits the data of one client that waits for its readers.
//!
//! A client has many streams on one connection, and frames may be large. Whoever reads nothing in the pod could otherwise
//! make the node keep the number of streams times the length of their queues times the size of a frame.

use std::ops::Deref;
use std::sync::Arc;

use hyper::body::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of a connection that wait at most: more than the largest frame or message, so that each fits.
const WAITING: usize = 2 << 20;
/// The cost of a piece beside its bytes.
const OVERHEAD: usize = 256;

/// The limit of one connection.
#[derive(Debug, Clone)]
pub struct Budget(Arc<Semaphore>);

/// Data that counts until it is dropped.
#[derive(Debug)]
pub struct Piece {
    bytes: Bytes,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Default for Budget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(WAITING)))
    }
}

impl Budget {
    /// Waits until the data fits.
    pub async fn take(&self, bytes: Bytes) -> Piece {
        let size = u32::try_from(bytes.len().saturating_add(OVERHEAD).min(WAITING)).unwrap_or(u32::MAX);
        // The semaphore is never closed.
        let permit = Arc::clone(&self.0).acquire_many_owned(size).await.ok();
        Piece { bytes, _permit: permit }
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn data_waits_until_earlier_data_is_read() {
        let budget = Budget::default();
        let take = |size: usize| budget.take(Bytes::from(vec![0; size])).now_or_never();
        let whole = take(4 << 20).expect("a piece that is too large fits alone");
        assert!(take(1).is_none());
        drop(whole);
        let pieces: Vec<_> = (0..100).map_while(|_| take(1 << 20)).collect();
        assert_eq!(pieces.len(), 1);
        drop(pieces);
        let small = (0..1 << 20).map_while(|_| take(0)).collect::<Vec<_>>();
        assert_eq!(small.len(), WAITING / OVERHEAD, "empty pieces cost something, too");
    }
}
