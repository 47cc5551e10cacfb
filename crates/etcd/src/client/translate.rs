//! Between the store's transactions and etcd's. Pure.

use crate::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::proto::etcdserverpb::request_op::Request;
use crate::proto::etcdserverpb::response_op::Response;
use crate::proto::etcdserverpb::{
    self as pb, DeleteRangeRequest, PutRequest, RangeRequest, RequestOp, ResponseHeader, TxnRequest,
    TxnResponse,
};
use crate::proto::mvccpb::KeyValue;
use bytes::Bytes;
use ferrite_store::{Compare, Entry, Key, LeaseId, Op, Outcome, Plain, Revision, StoreError, Txn};
use std::sync::Arc;
use tonic::{Code, Status};

/// Which keys of the cluster are the store's. A key `<ours>x` of the store is `<theirs>x` in etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    pub ours: Vec<u8>,
    pub theirs: Vec<u8>,
}

impl Default for Layout {
    /// As everybody has it.
    fn default() -> Self {
        Self { ours: b"/registry/".to_vec(), theirs: b"/registry/".to_vec() }
    }
}

impl Layout {
    fn remote(&self, key: &Key) -> Result<Bytes, StoreError> {
        let rest = key.as_bytes().strip_prefix(&self.ours[..]).ok_or_else(|| {
            let prefix = String::from_utf8_lossy(&self.ours);
            StoreError::Write(format!("the key {key:?} is not below {prefix:?} and has no place in etcd"))
        })?;
        Ok([&self.theirs[..], rest].concat().into())
    }

    /// None for a key that is not ours.
    pub(super) fn local(&self, key: &[u8]) -> Option<Key> {
        let rest = key.strip_prefix(&self.theirs[..])?;
        Some(if self.ours == self.theirs {
            Key::from(key)
        } else {
            Key::from(&[&self.ours[..], rest].concat())
        })
    }
}

pub(super) fn entry(kv: KeyValue) -> Arc<Entry> {
    let number = |n: i64| u64::try_from(n).unwrap_or(0);
    Arc::new(Entry {
        // A copy of its own: the message it came in holds many.
        value: Bytes::copy_from_slice(&kv.value),
        created: Revision(number(kv.create_revision)),
        modified: Revision(number(kv.mod_revision)),
        version: number(kv.version),
        lease: LeaseId(kv.lease),
        plain: Plain::default(),
    })
}

pub(super) fn at(header: Option<ResponseHeader>) -> Revision {
    Revision(header.and_then(|h| u64::try_from(h.revision).ok()).unwrap_or(0))
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn request(layout: &Layout, txn: &Txn) -> Result<TxnRequest, StoreError> {
    let mut request = TxnRequest::default();
    for compare in &txn.compares {
        let key = layout.remote(compare.key())?;
        let (target, result, union) = match compare {
            Compare::Absent(_) => {
                (CompareTarget::Create, CompareResult::Equal, TargetUnion::CreateRevision(0))
            }
            Compare::Present(_) => {
                (CompareTarget::Create, CompareResult::Greater, TargetUnion::CreateRevision(0))
            }
            Compare::ModifiedAt(_, r) => {
                (CompareTarget::Mod, CompareResult::Equal, TargetUnion::ModRevision(signed(r.0)))
            }
            Compare::CreatedAt(_, r) => {
                (CompareTarget::Create, CompareResult::Equal, TargetUnion::CreateRevision(signed(r.0)))
            }
            Compare::VersionIs(_, v) => {
                (CompareTarget::Version, CompareResult::Equal, TargetUnion::Version(signed(*v)))
            }
            Compare::ValueIs(_, v) => {
                (CompareTarget::Value, CompareResult::Equal, TargetUnion::Value(v.clone()))
            }
        };
        request.compare.push(pb::Compare {
            result: result.into(),
            target: target.into(),
            key: key.clone(),
            target_union: Some(union),
            range_end: Bytes::new(),
        });
        // Reads the current entries in case a condition fails.
        let read = RangeRequest { key, ..RangeRequest::default() };
        request.failure.push(RequestOp { request: Some(Request::RequestRange(read)) });
    }
    for op in &txn.ops {
        let key = layout.remote(op.key())?;
        let op = match op {
            Op::Put { value, lease, .. } => Request::RequestPut(PutRequest {
                key,
                value: value.clone(),
                lease: lease.0,
                ..PutRequest::default()
            }),
            Op::Delete { .. } => {
                Request::RequestDeleteRange(DeleteRangeRequest { key, ..Default::default() })
            }
        };
        request.success.push(RequestOp { request: Some(op) });
    }
    Ok(request)
}

pub(super) fn outcome(layout: &Layout, txn: &Txn, response: TxnResponse) -> Result<Outcome, StoreError> {
    let revision = at(response.header);
    if response.succeeded {
        return Ok(Outcome::Committed { revision });
    }
    let found = response.responses.into_iter().map(|r| match r.response {
        Some(Response::ResponseRange(range)) => range.kvs.into_iter().next(),
        _ => None,
    });
    for (compare, kv) in txn.compares.iter().zip(found) {
        let current = kv.filter(|kv| layout.local(&kv.key).as_ref() == Some(compare.key())).map(entry);
        if !compare.holds(current.as_deref()) {
            return Ok(Outcome::Conflict { revision, current });
        }
    }
    Err(StoreError::Failed("etcd refused a transaction whose conditions all hold".into()))
}

/// Translates a member's refusal to the caller's error.
pub(super) fn refused(status: &Status, txn: &Txn) -> StoreError {
    let message = status.message();
    let lease = txn.ops.iter().find_map(|op| match op {
        Op::Put { lease, .. } if *lease != LeaseId::NONE => Some(*lease),
        _ => None,
    });
    match (status.code(), lease) {
        (Code::NotFound, Some(lease)) if message.contains("lease not found") => {
            StoreError::NoSuchLease(lease)
        }
        (Code::InvalidArgument | Code::ResourceExhausted, _)
            if message.contains("too large") || message.contains("larger than max") =>
        {
            let size = txn.ops.iter().map(size).sum();
            // etcd's default limit.
            StoreError::TooLarge { size, limit: 1 << 20 | 1 << 19 }
        }
        (Code::ResourceExhausted, _) => StoreError::Write(format!(
            "etcd is full ({message}): compact and defragment it, then `etcdctl alarm disarm`"
        )),
        (Code::Unavailable | Code::DeadlineExceeded | Code::Unknown | Code::Cancelled, _) => {
            StoreError::Unreachable(message.to_owned())
        }
        _ => StoreError::Write(message.to_owned()),
    }
}

fn size(op: &Op) -> usize {
    match op {
        Op::Put { key, value, .. } => key.as_bytes().len() + value.len(),
        Op::Delete { key } => key.as_bytes().len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_moved_between_the_two_layouts() {
        let layout = Layout { ours: b"/registry/".to_vec(), theirs: b"/other/".to_vec() };
        assert_eq!(layout.remote(&Key::from("/registry/pods/a")).unwrap(), "/other/pods/a");
        assert_eq!(layout.local(b"/other/pods/a"), Some(Key::from("/registry/pods/a")));
        assert_eq!(layout.local(b"compact_rev_key"), None);
        assert!(matches!(layout.remote(&Key::from("elsewhere")), Err(StoreError::Write(_))));
        assert_eq!(Layout::default().local(b"/registry/x"), Some(Key::from("/registry/x")));
    }

    #[test]
    fn refusals_keep_their_meaning() {
        let leased =
            Txn::default().then(Op::Put { key: Key::from("k"), value: Bytes::from("v"), lease: LeaseId(7) });
        let rows = [
            (Code::NotFound, "etcdserver: requested lease not found", "lease 7 does not exist"),
            (Code::InvalidArgument, "etcdserver: request is too large", "the transaction has 2 bytes"),
            (
                Code::ResourceExhausted,
                "trying to send message larger than max (3 vs. 2)",
                "the transaction has 2 bytes",
            ),
            (
                Code::ResourceExhausted,
                "etcdserver: mvcc: database space exceeded",
                "the change could not be written: etcd is full",
            ),
            (
                Code::Unavailable,
                "etcdserver: leader changed",
                "the store cannot be reached: etcdserver: leader changed",
            ),
            (Code::PermissionDenied, "etcdserver: permission denied", "the change could not be written"),
        ];
        for (code, message, expected) in rows {
            let error = refused(&Status::new(code, message), &leased).to_string();
            assert!(error.starts_with(expected), "{message}: {error}");
        }
    }
}
