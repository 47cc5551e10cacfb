//! From the store's words to etcd's, and the errors clients know.

use crate::proto::etcdserverpb::ResponseHeader;
use crate::proto::mvccpb::{Event, KeyValue, event::EventType};
use bytes::Bytes;
use ferrite_store::{Change, Entry, Key, LeaseId, Revision, StoreError};
use tonic::{Code, Status};

/// A cluster of one has fixed identifiers.
pub(crate) const CLUSTER_ID: u64 = 0x6665_7272_6974_6500;
pub(crate) const MEMBER_ID: u64 = 0x6665_7272_6974_6501;
pub(crate) const RAFT_TERM: u64 = 1;

pub(crate) fn header(revision: Revision) -> Option<ResponseHeader> {
    Some(ResponseHeader {
        cluster_id: CLUSTER_ID,
        member_id: MEMBER_ID,
        revision: signed(revision.0),
        raft_term: RAFT_TERM,
    })
}

pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// A revision of a request; zero or less means "none".
pub(crate) fn revision(number: i64) -> Option<Revision> {
    u64::try_from(number).ok().filter(|n| *n > 0).map(Revision)
}

pub(crate) fn key_value(key: &Key, entry: &Entry) -> KeyValue {
    KeyValue {
        key: Bytes::copy_from_slice(key.as_bytes()),
        create_revision: signed(entry.created.0),
        mod_revision: signed(entry.modified.0),
        version: signed(entry.version),
        value: entry.value.clone(),
        lease: entry.lease.0,
    }
}

pub(crate) fn event(change: &Change, with_previous: bool) -> Event {
    let previous = change.previous.as_ref().filter(|_| with_previous);
    let (kind, kv) = match &change.entry {
        Some(entry) => (EventType::Put, key_value(&change.key, entry)),
        // As upstream: a deletion carries the key and the revision it happened at, nothing else.
        None => (
            EventType::Delete,
            KeyValue {
                key: Bytes::copy_from_slice(change.key.as_bytes()),
                mod_revision: signed(change.revision.0),
                ..KeyValue::default()
            },
        ),
    };
    Event { r#type: kind.into(), kv: Some(kv), prev_kv: previous.map(|e| key_value(&change.key, e)) }
}

/// The keys a request speaks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Keys {
    One(Bytes),
    /// From the first, below the second where there is one.
    Range(Bytes, Option<Bytes>),
}

impl Keys {
    /// Upstream's convention: no end is one key, an end of one zero byte is no end.
    pub fn new(key: Bytes, range_end: Bytes) -> Self {
        match &*range_end {
            [] => Self::One(key),
            [0] => Self::Range(start(key), None),
            _ => Self::Range(start(key), Some(range_end)),
        }
    }

    pub fn contain(&self, key: &[u8]) -> bool {
        match self {
            Self::One(one) => one == key,
            Self::Range(start, end) => key >= &start[..] && end.as_ref().is_none_or(|end| key < &end[..]),
        }
    }

    /// The common prefix of all keys.
    pub fn common_prefix(&self) -> &[u8] {
        match self {
            Self::One(key) => key,
            Self::Range(_, None) => &[],
            Self::Range(start, Some(end)) => {
                let shared = start.iter().zip(end).take_while(|(a, b)| a == b).count();
                // `[a/, a0)` is exactly the prefix `a/`: the last byte of the end is one above.
                let is_prefix = end.len() == start.len()
                    && shared + 1 == end.len()
                    && end[shared].checked_sub(1) == Some(start[shared]);
                if is_prefix { start } else { &start[..shared] }
            }
        }
    }
}

/// The lowest key there can be is one zero byte, which stands for the beginning.
fn start(key: Bytes) -> Bytes {
    if *key == [0] { Bytes::new() } else { key }
}

fn status(code: Code, message: &str) -> Status {
    Status::new(code, format!("etcdserver: {message}"))
}

pub(crate) fn empty_key() -> Status {
    status(Code::InvalidArgument, "key is not provided")
}

pub(crate) fn key_not_found() -> Status {
    status(Code::InvalidArgument, "key not found")
}

pub(crate) fn value_provided() -> Status {
    status(Code::InvalidArgument, "value is provided")
}

pub(crate) fn lease_provided() -> Status {
    status(Code::InvalidArgument, "lease is provided")
}

pub(crate) fn too_many_ops() -> Status {
    status(Code::InvalidArgument, "too many operations in txn request")
}

pub(crate) fn duplicate_key() -> Status {
    status(Code::InvalidArgument, "duplicate key given in txn request")
}

pub(crate) fn compacted() -> Status {
    status(Code::OutOfRange, "mvcc: required revision has been compacted")
}

pub(crate) fn invalid_sort() -> Status {
    status(Code::InvalidArgument, "invalid sort option")
}

pub(crate) fn ttl_too_large() -> Status {
    status(Code::OutOfRange, "too large lease TTL")
}

/// Translates an error of the store to one that a client of etcd knows.
pub(crate) fn refused(error: &StoreError) -> Status {
    match error {
        StoreError::Compacted { .. } => compacted(),
        StoreError::Future { .. } => status(Code::OutOfRange, "mvcc: required revision is a future revision"),
        StoreError::NoSuchLease(_) => status(Code::NotFound, "requested lease not found"),
        StoreError::LeaseExists(_) => status(Code::FailedPrecondition, "lease already exists"),
        StoreError::TooLarge { .. } => status(Code::InvalidArgument, "request is too large"),
        StoreError::Write(_) => status(Code::ResourceExhausted, "mvcc: database space exceeded"),
        StoreError::Closed | StoreError::Failed(_) => status(Code::Unavailable, "server stopped"),
        StoreError::Unreachable(_) => status(Code::Unavailable, "no leader"),
        // The API stores values as its clients send them.
        StoreError::Transform(_) => status(Code::Internal, "value cannot be transformed"),
    }
}

/// An error inside a transaction: the store's, or the answer to the client.
#[derive(Debug)]
pub(crate) struct Refused(pub Status);

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        Self(refused(&error))
    }
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self(status)
    }
}

pub(crate) fn lease(id: i64) -> LeaseId {
    LeaseId(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_the_convention_of_the_end() {
        let keys = |key: &'static str, end: &'static str| Keys::new(Bytes::from(key), Bytes::from(end));
        // key, end, inside, outside, common prefix
        let rows = [
            ("a", "", vec!["a"], vec!["aa", "b", ""], "a"),
            ("a/", "a0", vec!["a/", "a/x"], vec!["a", "a0"], "a/"),
            ("a", "c", vec!["a", "bzz"], vec!["c", "A"], ""),
            ("ab", "ad", vec!["ab", "acc"], vec!["ad", "a"], "a"),
            ("b", "\0", vec!["b", "zz"], vec!["a"], ""),
            ("\0", "\0", vec!["\0", "a"], vec![], ""),
            ("a/b", "a/c", vec!["a/b", "a/bx"], vec!["a/c"], "a/b"),
        ];
        for (key, end, inside, outside, prefix) in rows {
            let keys = keys(key, end);
            inside.iter().for_each(|k| assert!(keys.contain(k.as_bytes()), "{k} in {key}..{end}"));
            outside.iter().for_each(|k| assert!(!keys.contain(k.as_bytes()), "{k} not in {key}..{end}"));
            assert_eq!(keys.common_prefix(), prefix.as_bytes(), "{key}..{end}");
        }
    }
}
