//! The store everything stands on: one global revision, compare-and-swap transactions, watches, durability.
//!
//! The model is etcd's. Every committed transaction that changes something gets the next [`Revision`]; every
//! key knows the revision that created it, the one that last changed it, and how often it changed.
//!
//! ```text
//!  commit ──► head (compare, apply, number) ──► backend (one fdatasync for many) ──► replica ──► readers, watches
//! ```
//!
//! Readers see only what is durable. They hold a [`Snapshot`]: a structurally shared map that costs nothing
//! to take and never blocks the writer. A [`Watch`] owns no buffer: it is a position in the replica's bounded
//! history, so a slow reader costs nothing and is ended with a reason once history has moved past it.

mod batch_window;
mod entry;
mod head;
mod history;
mod index;
mod leases;
mod log;
mod pace;
mod remote;
mod replica;
mod shared;
mod store;
mod subscribers;
mod transform;
mod txn;
pub mod upkeep;
mod watch;
mod writer;

pub use entry::{Entry, FieldPlace, Key, Lease, LeaseId, Plain, Revision};
pub use head::Draft;
pub use history::{Change, HistoryLimits};
pub use index::IndexedField;
pub use leases::LeaseState;
pub use log::{CorruptError, LogOptions};
pub use remote::{Answer, Feed, Remote};
pub use replica::Snapshot;
pub use store::{MAX_TXN, OpenError, Store, StoreError, Usage, now_seconds};
pub use subscribers::{ReadField, Trigger};
pub use transform::{Prepared, TransformError, Transformer};
pub use txn::{Compare, Durability, Op, Outcome, Txn};
pub use watch::{Watch, WatchEnd};
