//! Range, Put, DeleteRange, Txn, Compact.

use super::Service;
use super::convert::{
    Keys, Refused, compacted, duplicate_key, empty_key, header, invalid_sort, key_not_found, key_value,
    lease, lease_provided, refused, revision, signed, too_many_ops, value_provided,
};
use crate::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::proto::etcdserverpb::kv_server::Kv;
use crate::proto::etcdserverpb::range_request::{SortOrder, SortTarget};
use crate::proto::etcdserverpb::request_op::Request as Op;
use crate::proto::etcdserverpb::response_op::Response as Answer;
use crate::proto::etcdserverpb::{
    CompactionRequest, CompactionResponse, Compare, DeleteRangeRequest, DeleteRangeResponse, PutRequest,
    PutResponse, RangeRequest, RangeResponse, RequestOp, ResponseOp, TxnRequest, TxnResponse,
};
use bytes::Bytes;
use ferrite_store::{Draft, Entry, Key, LeaseId, Snapshot, Store};
use std::cmp::Ordering;
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// As upstream's default.
const MAX_OPS: usize = 128;
/// Transactions inside transactions.
const MAX_DEPTH: usize = 16;

#[tonic::async_trait]
impl Kv for Service {
    async fn range(&self, request: Request<RangeRequest>) -> Result<Response<RangeResponse>, Status> {
        let request = request.into_inner();
        check_range(&request)?;
        let now = self.store.latest().await.map_err(|e| refused(&e))?;
        Ok(Response::new(range(&self.store, &now, request)?))
    }

    async fn put(&self, request: Request<PutRequest>) -> Result<Response<PutResponse>, Status> {
        let request = request.into_inner();
        check_put(&request)?;
        let size = request.key.len() + request.value.len();
        let made = self.store.transact(size, |draft| put(draft, request)).await;
        let (mut response, at): (PutResponse, _) = made.map_err(|Refused(s)| s)?;
        response.header = header(at);
        Ok(Response::new(response))
    }

    async fn delete_range(
        &self,
        request: Request<DeleteRangeRequest>,
    ) -> Result<Response<DeleteRangeResponse>, Status> {
        let request = request.into_inner();
        if request.key.is_empty() {
            return Err(empty_key());
        }
        let made = self.store.transact(0, |draft| Ok(delete(draft, request))).await;
        let (mut response, at) = made.map_err(|Refused(s)| s)?;
        response.header = header(at);
        Ok(Response::new(response))
    }

    async fn txn(&self, request: Request<TxnRequest>) -> Result<Response<TxnResponse>, Status> {
        let request = request.into_inner();
        check_txn(&request)?;
        let size = txn_size(&request);
        let make = |draft: &mut Draft| {
            let mut path = VecDeque::new();
            choose(draft, &request, &mut path);
            txn(&self.store, draft, request, &mut path)
        };
        let made = self.store.transact(size, make).await;
        let (mut response, at) = made.map_err(|Refused(s)| s)?;
        response.header = header(at);
        Ok(Response::new(response))
    }

    async fn compact(
        &self,
        request: Request<CompactionRequest>,
    ) -> Result<Response<CompactionResponse>, Status> {
        let wanted = revision(request.into_inner().revision).unwrap_or_default();
        let usage = self.store.usage();
        if wanted <= usage.compacted {
            return Err(compacted());
        }
        self.store.compact(wanted).map_err(|e| refused(&e))?;
        Ok(Response::new(CompactionResponse { header: header(usage.revision) }))
    }
}

fn check_range(request: &RangeRequest) -> Result<(), Status> {
    if request.key.is_empty() {
        return Err(empty_key());
    }
    let known =
        SortOrder::try_from(request.sort_order).is_ok() && SortTarget::try_from(request.sort_target).is_ok();
    if known { Ok(()) } else { Err(invalid_sort()) }
}

fn check_put(request: &PutRequest) -> Result<(), Status> {
    if request.key.is_empty() {
        return Err(empty_key());
    }
    if request.ignore_value && !request.value.is_empty() {
        return Err(value_provided());
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(lease_provided());
    }
    Ok(())
}

/// Checks a transaction before it begins. No branch may write a key twice.
fn check_txn(request: &TxnRequest) -> Result<(), Status> {
    check_shape(request, 0)?;
    for ops in [&request.success, &request.failure] {
        let mut written = Written::default();
        check_ops(ops, 0, &mut written)?;
    }
    Ok(())
}

fn check_shape(request: &TxnRequest, depth: usize) -> Result<(), Status> {
    let longest = request.compare.len().max(request.success.len()).max(request.failure.len());
    if longest > MAX_OPS || depth > MAX_DEPTH {
        return Err(too_many_ops());
    }
    if request.compare.iter().any(|c| c.key.is_empty()) {
        return Err(empty_key());
    }
    Ok(())
}

/// The keys a branch writes.
#[derive(Default, Clone)]
struct Written {
    puts: HashSet<Bytes>,
    deletes: Vec<Keys>,
}

fn check_ops(ops: &[RequestOp], depth: usize, written: &mut Written) -> Result<(), Status> {
    for op in ops {
        match &op.request {
            Some(Op::RequestRange(range)) => check_range(range)?,
            Some(Op::RequestPut(put)) => {
                check_put(put)?;
                if written.deletes.iter().any(|d| d.contain(&put.key))
                    || !written.puts.insert(put.key.clone())
                {
                    return Err(duplicate_key());
                }
            }
            Some(Op::RequestDeleteRange(delete)) => {
                if delete.key.is_empty() {
                    return Err(empty_key());
                }
                let keys = Keys::new(delete.key.clone(), delete.range_end.clone());
                if written.puts.iter().any(|key| keys.contain(key)) {
                    return Err(duplicate_key());
                }
                written.deletes.push(keys);
            }
            Some(Op::RequestTxn(inner)) => {
                // Its branches are checked once, together with the surrounding operations.
                check_shape(inner, depth + 1)?;
                // Only one of the two happens, but each together with the surrounding operations.
                let mut all = written.clone();
                for ops in [&inner.success, &inner.failure] {
                    let mut branch = written.clone();
                    check_ops(ops, depth + 1, &mut branch)?;
                    all.puts.extend(branch.puts);
                    all.deletes.extend(branch.deletes);
                }
                *written = all;
            }
            None => {}
        }
    }
    Ok(())
}

fn txn_size(request: &TxnRequest) -> usize {
    let of = |ops: &[RequestOp]| -> usize {
        ops.iter()
            .map(|op| match &op.request {
                Some(Op::RequestPut(put)) => put.key.len() + put.value.len(),
                Some(Op::RequestTxn(inner)) => txn_size(inner),
                _ => 0,
            })
            .sum()
    };
    of(&request.success).max(of(&request.failure))
}

fn select<'a>(
    snapshot: &'a Snapshot,
    keys: &'a Keys,
) -> Box<dyn Iterator<Item = (Key, &'a Arc<Entry>)> + 'a> {
    match keys {
        Keys::One(key) => Box::new(snapshot.get(key).map(|e| (Key::from(key), e)).into_iter()),
        Keys::Range(start, end) => {
            Box::new(snapshot.between(start, end.as_deref()).map(|(k, e)| (k.clone(), e)))
        }
    }
}

/// Answers a range from `now`, or from the past the request asks for.
fn range(store: &Store, now: &Snapshot, request: RangeRequest) -> Result<RangeResponse, Status> {
    let past = match revision(request.revision) {
        Some(wanted) if wanted != now.revision() => Some(store.snapshot_at(wanted).map_err(|e| refused(&e))?),
        _ => None,
    };
    let snapshot = past.as_ref().unwrap_or(now);
    let keys = Keys::new(request.key.clone(), request.range_end.clone());
    let mut response = RangeResponse { header: header(now.revision()), ..RangeResponse::default() };
    if request.count_only {
        response.count = signed(select(snapshot, &keys).count() as u64);
        return Ok(response);
    }
    let target = SortTarget::try_from(request.sort_target).unwrap_or(SortTarget::Key);
    let order = SortOrder::try_from(request.sort_order).unwrap_or(SortOrder::None);
    let limit = usize::try_from(request.limit).ok().filter(|l| *l > 0);
    let within =
        |at: u64, min: i64, max: i64| (min == 0 || signed(at) >= min) && (max == 0 || signed(at) <= max);
    let mut count = 0u64;
    let mut found: Vec<(Key, &Arc<Entry>)> = Vec::new();
    let in_key_order = target == SortTarget::Key && order != SortOrder::Descend;
    for (key, entry) in select(snapshot, &keys) {
        count += 1;
        let wanted = within(entry.modified.0, request.min_mod_revision, request.max_mod_revision)
            && within(entry.created.0, request.min_create_revision, request.max_create_revision);
        // One more than asked for shows that there are more.
        let full = in_key_order && limit.is_some_and(|l| found.len() > l);
        if wanted && !full {
            found.push((key, entry));
        }
    }
    if !in_key_order {
        let compare = |a: &(Key, &Arc<Entry>), b: &(Key, &Arc<Entry>)| match target {
            SortTarget::Key => a.0.cmp(&b.0),
            SortTarget::Version => a.1.version.cmp(&b.1.version),
            SortTarget::Create => a.1.created.cmp(&b.1.created),
            SortTarget::Mod => a.1.modified.cmp(&b.1.modified),
            SortTarget::Value => a.1.value.cmp(&b.1.value),
        };
        // As upstream: a target without an order means ascending.
        match order {
            SortOrder::Descend => found.sort_by(|a, b| compare(b, a)),
            SortOrder::Ascend | SortOrder::None => found.sort_by(compare),
        }
    }
    response.more = limit.is_some_and(|l| found.len() > l);
    found.truncate(limit.unwrap_or(usize::MAX));
    response.count = signed(count);
    response.kvs = found
        .iter()
        .map(|(key, entry)| {
            let mut kv = key_value(key, entry);
            if request.keys_only {
                kv.value = Bytes::new();
            }
            kv
        })
        .collect();
    Ok(response)
}

fn put(draft: &mut Draft, request: PutRequest) -> Result<PutResponse, Refused> {
    let key = Key::from(&request.key);
    let previous = draft.get(&request.key).cloned();
    let (mut value, mut lease) = (request.value, lease(request.lease));
    if request.ignore_value || request.ignore_lease {
        let previous = previous.as_ref().ok_or_else(key_not_found)?;
        if request.ignore_value {
            value = previous.value.clone();
        }
        if request.ignore_lease {
            lease = previous.lease;
        }
    }
    draft.put(key.clone(), &value, lease)?;
    let prev_kv = previous.filter(|_| request.prev_kv).map(|e| key_value(&key, &e));
    Ok(PutResponse { header: header(draft.revision()), prev_kv })
}

fn delete(draft: &mut Draft, request: DeleteRangeRequest) -> DeleteRangeResponse {
    let keys = Keys::new(request.key, request.range_end);
    let found: Vec<Key> = select(&draft.snapshot(), &keys).map(|(k, _)| k).collect();
    let mut response = DeleteRangeResponse { deleted: signed(found.len() as u64), ..Default::default() };
    for key in found {
        if let Some(previous) = draft.delete(&key)
            && request.prev_kv
        {
            response.prev_kvs.push(key_value(&key, &previous));
        }
    }
    response.header = header(draft.revision());
    response
}

/// Which branches are taken, in the order in which they are met: as upstream, conditions of inner transactions too
/// are about the state before anything was written.
fn choose(draft: &Draft, request: &TxnRequest, path: &mut VecDeque<bool>) {
    let succeeded = request.compare.iter().all(|c| holds(draft, c));
    path.push_back(succeeded);
    let ops = if succeeded { &request.success } else { &request.failure };
    for op in ops {
        if let Some(Op::RequestTxn(inner)) = &op.request {
            choose(draft, inner, path);
        }
    }
}

fn txn(
    store: &Store,
    draft: &mut Draft,
    request: TxnRequest,
    path: &mut VecDeque<bool>,
) -> Result<TxnResponse, Refused> {
    let succeeded = path.pop_front().unwrap_or(false);
    let ops = if succeeded { request.success } else { request.failure };
    let mut responses = Vec::with_capacity(ops.len());
    for op in ops {
        let answer = match op.request {
            Some(Op::RequestRange(r)) => Answer::ResponseRange(range(store, &draft.snapshot(), r)?),
            Some(Op::RequestPut(r)) => Answer::ResponsePut(put(draft, r)?),
            Some(Op::RequestDeleteRange(r)) => Answer::ResponseDeleteRange(delete(draft, r)),
            Some(Op::RequestTxn(r)) => Answer::ResponseTxn(txn(store, draft, r, path)?),
            None => continue,
        };
        responses.push(ResponseOp { response: Some(answer) });
    }
    Ok(TxnResponse { header: header(draft.revision()), succeeded, responses })
}

/// Returns true if a condition holds for every key in its range. A missing key has zeros, and a condition
/// on its value does not hold, as upstream.
fn holds(draft: &Draft, compare: &Compare) -> bool {
    let keys = Keys::new(compare.key.clone(), compare.range_end.clone());
    match &keys {
        Keys::One(key) => holds_for(draft.get(key).map(|e| &**e), compare),
        Keys::Range(start, end) => {
            let mut found = draft.range(start, end.as_deref()).peekable();
            if found.peek().is_none() {
                return holds_for(None, compare);
            }
            found.all(|(_, e)| holds_for(Some(e), compare))
        }
    }
}

fn holds_for(entry: Option<&Entry>, compare: &Compare) -> bool {
    let Ok(target) = CompareTarget::try_from(compare.target) else { return false };
    let number = |have: u64, want: i64| signed(have).cmp(&want);
    let ordering = match (target, &compare.target_union) {
        (CompareTarget::Value, union) => {
            let Some(entry) = entry else { return false };
            let empty = Bytes::new();
            let want = if let Some(TargetUnion::Value(value)) = union { value } else { &empty };
            entry.value.cmp(want)
        }
        (CompareTarget::Version, union) => {
            let want = if let Some(TargetUnion::Version(v)) = union { *v } else { 0 };
            number(entry.map_or(0, |e| e.version), want)
        }
        (CompareTarget::Create, union) => {
            let want = if let Some(TargetUnion::CreateRevision(v)) = union { *v } else { 0 };
            number(entry.map_or(0, |e| e.created.0), want)
        }
        (CompareTarget::Mod, union) => {
            let want = if let Some(TargetUnion::ModRevision(v)) = union { *v } else { 0 };
            number(entry.map_or(0, |e| e.modified.0), want)
        }
        (CompareTarget::Lease, union) => {
            let want = if let Some(TargetUnion::Lease(v)) = union { *v } else { 0 };
            entry.map_or(LeaseId::NONE, |e| e.lease).0.cmp(&want)
        }
    };
    match CompareResult::try_from(compare.result) {
        Ok(CompareResult::Equal) => ordering == Ordering::Equal,
        Ok(CompareResult::Greater) => ordering == Ordering::Greater,
        Ok(CompareResult::Less) => ordering == Ordering::Less,
        Ok(CompareResult::NotEqual) => ordering != Ordering::Equal,
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(request: Op) -> RequestOp {
        RequestOp { request: Some(request) }
    }

    fn put_op(key: &str, value: &str) -> RequestOp {
        op(Op::RequestPut(PutRequest {
            key: Bytes::copy_from_slice(key.as_bytes()),
            value: Bytes::copy_from_slice(value.as_bytes()),
            ..PutRequest::default()
        }))
    }

    /// Writes `then` or `otherwise`, depending on whether `key` exists.
    fn if_exists(key: &str, then: Vec<RequestOp>, otherwise: Vec<RequestOp>) -> TxnRequest {
        let compare = Compare {
            result: CompareResult::Greater.into(),
            target: CompareTarget::Version.into(),
            key: Bytes::copy_from_slice(key.as_bytes()),
            target_union: Some(TargetUnion::Version(0)),
            range_end: Bytes::new(),
        };
        TxnRequest { compare: vec![compare], success: then, failure: otherwise }
    }

    #[tokio::test]
    async fn inner_conditions_are_about_the_state_before() {
        let service = Service::new(Arc::new(Store::memory()), None, Vec::new());
        let inner = if_exists("a", vec![put_op("b", "there")], vec![put_op("b", "not there")]);
        let outer = if_exists("none", vec![], vec![put_op("a", "1"), op(Op::RequestTxn(inner))]);
        let made = service.txn(Request::new(outer)).await.unwrap().into_inner();
        assert!(!made.succeeded);
        let value = service.store.snapshot().get(b"b").unwrap().value.clone();
        assert_eq!(value, "not there", "as upstream: the write before it does not count");
    }

    #[tokio::test]
    async fn transactions_inside_transactions_are_checked_as_one() {
        let service = Service::new(Arc::new(Store::memory()), None, Vec::new());
        let nested = |depth: usize, leaf: RequestOp| {
            (0..depth)
                .fold(leaf, |inner, _| op(Op::RequestTxn(if_exists("x", vec![inner.clone()], vec![inner]))))
        };
        let txn = |ops| service.txn(Request::new(if_exists("x", vec![], ops)));
        assert!(txn(vec![nested(8, put_op("k", "1"))]).await.is_ok());
        let twice = txn(vec![put_op("k", "1"), nested(8, put_op("k", "2"))]).await.unwrap_err();
        assert_eq!(twice.message(), duplicate_key().message());
        // As deep as it may get, with two branches each: each branch is checked once, not again and again.
        let deep = (0..MAX_DEPTH + 1)
            .fold(put_op("k", "1"), |inner, _| op(Op::RequestTxn(if_exists("x", vec![inner], vec![]))));
        assert_eq!(txn(vec![deep]).await.unwrap_err().message(), too_many_ops().message());
        let wide = txn(vec![nested(14, put_op("k", "1"))]).await;
        assert!(wide.is_ok(), "{wide:?}");
    }
}
