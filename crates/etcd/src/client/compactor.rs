//! Compacts old revisions of the cluster as upstream's API servers do. In each round one of the servers
//! does it; the version of a key outside every prefix shows which one.

use super::members::{Members, Repeat};
use super::{kv, translate};
use crate::proto::etcdserverpb::compare::{CompareResult, CompareTarget, TargetUnion};
use crate::proto::etcdserverpb::request_op::Request;
use crate::proto::etcdserverpb::response_op::Response;
use crate::proto::etcdserverpb::{
    CompactionRequest, Compare, PutRequest, RangeRequest, RequestOp, TxnRequest, TxnResponse,
};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tonic::{Code, Status};

/// Where upstream keeps it.
const KEY: &[u8] = b"compact_rev_key";

/// One server's knowledge: the version of the key, and the revision at the last check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Known {
    version: i64,
    revision: i64,
}

/// Runs until it is dropped.
pub(super) async fn run(members: Arc<Members>, every: Duration) {
    let mut known = Known::default();
    loop {
        tokio::time::sleep(every).await;
        match round(&members, known).await {
            Ok(next) => known = next,
            Err(status) => tracing::warn!(error = status.message(), "etcd could not be compacted"),
        }
    }
}

/// Claims the round and compacts the revision of the last one, or learns that another server did.
async fn round(members: &Members, known: Known) -> Result<Known, Status> {
    let request = claim(known);
    let call = |channel| {
        let request = request.clone();
        async move { kv(channel).txn(request).await }
    };
    let response = members.call(Repeat::IfNotSent, call).await?.into_inner();
    let (next, mine) = learn(known, &response);
    if mine && known.revision > 0 {
        let request = CompactionRequest { revision: known.revision, physical: false };
        let call = |channel| async move { kv(channel).compact(request).await };
        match members.call(Repeat::Always, call).await {
            // Somebody was faster.
            Err(status) if status.code() == Code::OutOfRange => {}
            other => drop(other?),
        }
    }
    Ok(next)
}

fn claim(known: Known) -> TxnRequest {
    let key = Bytes::from_static(KEY);
    let op = |request| vec![RequestOp { request: Some(request) }];
    TxnRequest {
        compare: vec![Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Version.into(),
            key: key.clone(),
            target_union: Some(TargetUnion::Version(known.version)),
            range_end: Bytes::new(),
        }],
        success: op(Request::RequestPut(PutRequest {
            key: key.clone(),
            value: known.revision.to_string().into(),
            ..PutRequest::default()
        })),
        failure: op(Request::RequestRange(RangeRequest { key, ..RangeRequest::default() })),
    }
}

/// The knowledge after the response, and true if this server won the round.
fn learn(known: Known, response: &TxnResponse) -> (Known, bool) {
    let revision = i64::try_from(translate::at(response.header).0).unwrap_or(i64::MAX);
    if response.succeeded {
        return (Known { version: known.version + 1, revision }, true);
    }
    let version = match response.responses.first().and_then(|r| r.response.as_ref()) {
        Some(Response::ResponseRange(range)) => range.kvs.first().map_or(0, |kv| kv.version),
        _ => 0,
    };
    (Known { version, revision }, false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::etcdserverpb::{RangeResponse, ResponseHeader, ResponseOp};
    use crate::proto::mvccpb::KeyValue;

    #[test]
    fn a_round_is_claimed_by_one() {
        let header = Some(ResponseHeader { revision: 50, ..ResponseHeader::default() });
        let known = Known { version: 3, revision: 20 };
        let won = TxnResponse { header, succeeded: true, responses: Vec::new() };
        assert_eq!(learn(known, &won), (Known { version: 4, revision: 50 }, true));
        let kvs = vec![KeyValue { version: 9, ..KeyValue::default() }];
        let range = Response::ResponseRange(RangeResponse { kvs, ..RangeResponse::default() });
        let lost =
            TxnResponse { header, succeeded: false, responses: vec![ResponseOp { response: Some(range) }] };
        assert_eq!(learn(known, &lost), (Known { version: 9, revision: 50 }, false));
    }
}
