//! Keeps the replica up to date: list everything once, then watch, and list again only when etcd has
//! forgotten the changes in between.

use super::members::{Members, Repeat};
use super::{Layout, kv, translate};
use crate::proto::etcdserverpb::watch_client::WatchClient;
use crate::proto::etcdserverpb::watch_request::RequestUnion;
use crate::proto::etcdserverpb::{RangeRequest, WatchCreateRequest, WatchRequest};
use crate::proto::mvccpb::Event;
use crate::proto::mvccpb::event::EventType;
use bytes::Bytes;
use ferrite_store::{Entry, Feed, Key, Revision};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tonic::{Request, Status};

/// Keys asked for at once.
const PAGE: i64 = 2000;
/// Before a member is asked again after a failure.
const PAUSE: Duration = Duration::from_millis(100);

/// The progress of the replica.
#[derive(Debug, Clone, Default)]
pub(super) struct Progress {
    pub listed: bool,
    pub problem: String,
}

/// Why a watch ended.
enum End {
    /// The cluster is at an earlier revision than the replica: it was restored from a backup.
    WentBack,
    /// The revision it would go on from is gone.
    Compacted,
    /// The member cannot go on; another may.
    Lost(String),
}

/// Runs until it is dropped.
pub(super) async fn run(
    members: Arc<Members>,
    layout: Layout,
    feed: Feed,
    progress: watch::Sender<Progress>,
) {
    loop {
        match list(&members, &layout).await {
            Ok((entries, revision)) => {
                feed.prepare(entries.iter().map(|(key, entry)| (key, entry))).await;
                feed.reset(entries, revision);
                progress.send_modify(|p| p.listed = true);
            }
            Err(status) => {
                tracing::warn!(error = status.message(), "etcd could not be listed");
                progress.send_modify(|p| p.problem = status.message().to_owned());
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        }
        loop {
            let (at, _) = members.current();
            match follow(&members, &layout, &feed).await {
                End::Compacted => {
                    tracing::warn!(
                        revision = feed.revision().0,
                        "etcd has compacted what the replica has not seen; listing again"
                    );
                    break;
                }
                End::WentBack => {
                    tracing::warn!(
                        revision = feed.revision().0,
                        "etcd is at an earlier revision than it was; listing again"
                    );
                    break;
                }
                End::Lost(problem) => {
                    tracing::warn!(%problem, "the watch on etcd was interrupted; going on from the same revision");
                    members.next(at);
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }
}

/// Everything that is ours, at one revision.
async fn list(members: &Members, layout: &Layout) -> Result<(Vec<(Key, Arc<Entry>)>, Revision), Status> {
    let mut entries = Vec::new();
    let end = prefix_end(&layout.theirs);
    let mut request = RangeRequest {
        key: if layout.theirs.is_empty() { Bytes::from_static(&[0]) } else { layout.theirs.clone().into() },
        range_end: end,
        limit: PAGE,
        ..RangeRequest::default()
    };
    let mut revision = Revision(0);
    loop {
        let call = |channel| {
            let request = request.clone();
            async move { kv(channel).range(request).await }
        };
        let response = members.call(Repeat::Always, call).await?.into_inner();
        if request.revision == 0 {
            // The pages that follow are of the same revision.
            revision = translate::at(response.header);
            request.revision = i64::try_from(revision.0).unwrap_or(i64::MAX);
        }
        let last = response.kvs.last().map(|kv| kv.key.clone());
        for kv in response.kvs {
            if let Some(key) = layout.local(&kv.key) {
                entries.push((key, translate::entry(kv)));
            }
        }
        match last {
            Some(last) if response.more => request.key = [&last[..], &[0]].concat().into(),
            _ => return Ok((entries, revision)),
        }
    }
}

/// The revision of the cluster, with everything that was acknowledged before the call.
pub(super) async fn revision(members: &Members) -> Result<Revision, Status> {
    // Linearizable: the leader confirms that it still is one. The key does not have to exist.
    let request =
        RangeRequest { key: Bytes::from_static(b"\0"), count_only: true, ..RangeRequest::default() };
    let call = |channel| {
        let request = request.clone();
        async move { kv(channel).range(request).await }
    };
    Ok(translate::at(members.call(Repeat::Always, call).await?.into_inner().header))
}

/// The first key behind all that begin with `prefix`, as etcd wants it: one zero byte when there is none.
fn prefix_end(prefix: &[u8]) -> Bytes {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end.into();
        }
    }
    Bytes::from_static(&[0])
}

/// Watches every key from where the replica is.
async fn follow(members: &Members, layout: &Layout, feed: &Feed) -> End {
    let lost = |status: Status| End::Lost(status.message().to_owned());
    // A watch from a revision that is yet to come would wait for it in silence.
    match revision(members).await {
        Ok(at) if at < feed.revision() => return End::WentBack,
        Ok(_) => {}
        Err(status) => return lost(status),
    }
    let (_, channel) = members.current();
    let create = WatchCreateRequest {
        key: Bytes::from_static(&[0]),
        range_end: Bytes::from_static(&[0]),
        start_revision: i64::try_from(feed.revision().0 + 1).unwrap_or(i64::MAX),
        fragment: true,
        ..WatchCreateRequest::default()
    };
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let requests = tokio_stream::StreamExt::chain(tokio_stream::once(create), tokio_stream::pending());
    let mut request = Request::new(requests);
    // A member that has lost its leader ends the watch instead of keeping silent.
    request.metadata_mut().insert("hasleader", tonic::metadata::MetadataValue::from_static("true"));
    let mut client = WatchClient::new(channel).max_decoding_message_size(usize::MAX);
    let mut stream = match client.watch(request).await {
        Ok(stream) => stream.into_inner(),
        Err(status) => return lost(status),
    };
    let mut unfinished: Vec<Event> = Vec::new();
    loop {
        let response = match stream.message().await {
            Ok(Some(response)) => response,
            Ok(None) => return End::Lost("the stream ended".into()),
            Err(status) => return lost(status),
        };
        if response.compact_revision != 0 {
            return End::Compacted;
        }
        if response.canceled {
            return End::Lost(response.cancel_reason);
        }
        unfinished.extend(response.events);
        if !response.fragment && !unfinished.is_empty() {
            apply(layout, feed, std::mem::take(&mut unfinished)).await;
        }
    }
}

async fn apply(layout: &Layout, feed: &Feed, events: Vec<Event>) {
    let mut revision = Revision(0);
    let mut batch = Vec::with_capacity(events.len());
    for event in events {
        let deleted = event.r#type == i32::from(EventType::Delete);
        let Some(kv) = event.kv else { continue };
        let at = Revision(u64::try_from(kv.mod_revision).unwrap_or(0));
        // The events' own revisions count, not the header's: it may be ahead of the events sent so far.
        revision = revision.max(at);
        if let Some(key) = layout.local(&kv.key) {
            batch.push((at, key, (!deleted).then(|| translate::entry(kv))));
        }
    }
    feed.prepare(batch.iter().filter_map(|(_, key, entry)| Some((key, entry.as_ref()?)))).await;
    feed.apply(batch, revision);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_prefix() {
        let rows: [(&[u8], &[u8]); 5] =
            [(b"/a/", b"/a0"), (b"", b"\0"), (b"a\xff", b"b"), (b"\xff\xff", b"\0"), (b"z", b"{")];
        for (prefix, expected) in rows {
            assert_eq!(prefix_end(prefix), expected);
        }
    }
}
