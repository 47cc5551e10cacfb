//! The loop that keeps an informer's copy equal to the server's.

use std::pin::pin;
use std::time::Duration;

use futures_util::StreamExt;
use kube::api::{ListParams, WatchEvent, WatchParams};
use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};

use super::{Informer, ListSelector};
use crate::{Backoff, Object, message_of};

const PAGE: u32 = 500;
/// The server ends a watch after about this long; a random part keeps the watches of a process apart.
const WATCH_SECONDS: std::ops::Range<u32> = 200..290;
/// How much later than promised the server may end a watch before the connection is taken for dead.
const WATCH_GRACE: Duration = Duration::from_secs(30);
/// A watch that ends sooner and without an event is treated as a failure, or a broken server would be asked
/// again without pause.
const SHORT_WATCH: Duration = Duration::from_secs(1);

pub(super) async fn run<K: Object>(api: kube::Api<K>, selector: ListSelector, informer: Informer<K>) {
    let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
    let mut backoff = Backoff::new(Duration::from_millis(800), Duration::from_secs(30), 1.0);
    let mut failing = false;
    loop {
        let mut version = match list(&api, &selector).await {
            Ok((objects, version)) => {
                debug!(kind, count = objects.len(), %version, "listed");
                informer.replace(objects);
                failing = false;
                version
            }
            Err(error) => {
                // Once per series: a kind the server does not serve fails for ever.
                if std::mem::replace(&mut failing, true) {
                    debug!(kind, error = message_of(&error), "still cannot list");
                } else {
                    warn!(kind, error = message_of(&error), "cannot list, will keep trying");
                }
                tokio::time::sleep(backoff.next_delay()).await;
                continue;
            }
        };
        loop {
            let end = watch(&api, &selector, &informer, &mut version, &mut backoff).await;
            debug!(kind, %version, ?end, "watch ended");
            match end {
                WatchEnd::Finished => {}
                WatchEnd::Failed => tokio::time::sleep(backoff.next_delay()).await,
                WatchEnd::Gone => break,
                WatchEnd::Unusable => {
                    tokio::time::sleep(backoff.next_delay()).await;
                    break;
                }
            }
        }
    }
}

/// All pages. If the list's revision is compacted between two pages it is read again in one piece, as client-go's
/// pager does: a collection that is slower to read than to compact would otherwise never arrive.
async fn list<K: Object>(
    api: &kube::Api<K>,
    selector: &ListSelector,
) -> Result<(Vec<K>, String), kube::Error> {
    let mut params = ListParams {
        label_selector: selector.labels.clone(),
        field_selector: selector.fields.clone(),
        limit: Some(PAGE),
        ..ListParams::default()
    };
    let mut objects = Vec::new();
    loop {
        let page = match api.list(&params).await {
            Err(kube::Error::Api(status)) if status.code == 410 && params.continue_token.is_some() => {
                objects.clear();
                params.continue_token = None;
                params.limit = None;
                continue;
            }
            page => page?,
        };
        objects.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params.continue_token = Some(token),
            None => return Ok((objects, page.metadata.resource_version.unwrap_or_default())),
        }
    }
}

#[derive(Debug)]
enum WatchEnd {
    /// The server or the connection ended it: go on from the last revision at once.
    Finished,
    /// Go on from the last revision, later.
    Failed,
    /// The revision is no longer there: list again.
    Gone,
    /// The stream cannot be understood or the server refuses it: list again, later.
    Unusable,
}

async fn watch<K: Object>(
    api: &kube::Api<K>,
    selector: &ListSelector,
    informer: &Informer<K>,
    version: &mut String,
    backoff: &mut Backoff,
) -> WatchEnd {
    let seconds = rand::random_range(WATCH_SECONDS);
    let params = WatchParams {
        label_selector: selector.labels.clone(),
        field_selector: selector.fields.clone(),
        timeout: Some(seconds),
        ..WatchParams::default()
    };
    let begun = Instant::now();
    let deadline = begun + Duration::from_secs(seconds.into()) + WATCH_GRACE;
    let stream = match timeout_at(deadline, api.watch(&params, version)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return end_of(&error),
        Err(_) => return WatchEnd::Failed,
    };
    let mut stream = pin!(stream);
    let mut received = false;
    // A stream that goes silent past the deadline is a connection that died without a word.
    while let Ok(Some(event)) = timeout_at(deadline, stream.next()).await {
        match event {
            Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                advance(version, &object);
                informer.apply(object);
            }
            Ok(WatchEvent::Deleted(object)) => {
                advance(version, &object);
                informer.remove(object);
            }
            Ok(WatchEvent::Bookmark(bookmark)) => *version = bookmark.metadata.resource_version,
            Ok(WatchEvent::Error(status)) => return end_of(&kube::Error::Api(status)),
            Err(error) => return end_of(&error),
        }
        received = true;
        backoff.reset();
    }
    if received || begun.elapsed() >= SHORT_WATCH { WatchEnd::Finished } else { WatchEnd::Failed }
}

fn advance<K: Object>(version: &mut String, object: &K) {
    if let Some(seen) = object.meta().resource_version.as_deref().filter(|seen| !seen.is_empty()) {
        seen.clone_into(version);
    }
}

fn end_of(error: &kube::Error) -> WatchEnd {
    match error {
        // A compacted revision answers 410 as a response, or 200 with an ERROR event that holds the 410.
        kube::Error::Api(status) if status.code == 410 || status.reason == "Expired" => WatchEnd::Gone,
        kube::Error::Api(status) if status.code == 429 || status.code >= 500 => WatchEnd::Failed,
        kube::Error::Api(_) | kube::Error::SerdeError(_) => {
            warn!(error = message_of(error), "watch refused");
            WatchEnd::Unusable
        }
        _ => WatchEnd::Failed,
    }
}
