//! The loop that keeps an informer's copy equal to the server's. It moves text and does not depend on the kind.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use kube::Client;
use kube::api::{ListParams, WatchParams};
use kube::client::Body;
use kube::core::{Request, Status};
use memchr::memchr;
use tokio::time::{Instant, timeout_at};
use tracing::{debug, warn};

use super::ListSelector;
use super::raw::RawObject;
use crate::api::list_request;
use crate::page::{Event, Head, Page};
use crate::request::{invalid, open, send};
use crate::scan;
use crate::{Backoff, message_of};

const PAGE: u32 = 500;
/// The server ends a watch after about this long; a random part keeps the watches of a process apart.
const WATCH_SECONDS: std::ops::Range<u32> = 200..290;
/// Extra time that the server has to end a watch before the client drops the connection.
const WATCH_GRACE: Duration = Duration::from_secs(30);
/// A watch that ends sooner and without an event is treated as a failure, or a broken server would be asked
/// again without pause.
const SHORT_WATCH: Duration = Duration::from_secs(1);
/// A watch without an event for so long is quiet: nobody needs decoded objects at hand.
const QUIET: Duration = Duration::from_secs(5);
/// A watch event longer than this ends the watch: no object is that large.
const MAX_EVENT: usize = 64 << 20;

/// Receives the server's objects and changes.
pub(super) trait Sink: Send + Sync {
    /// Records that `object` exists as it is.
    fn apply(&self, object: RawObject);
    /// Records that `object` is gone.
    fn remove(&self, object: RawObject);
    /// Records that exactly `objects` exist.
    fn replace(&self, objects: Vec<RawObject>);
    /// The watch is quiet.
    fn idle(&self);
}

/// The collection that is listed and watched.
pub(super) struct Source {
    pub(super) client: Client,
    pub(super) request: Request,
    pub(super) selector: ListSelector,
    pub(super) kind: &'static str,
    pub(super) metadata_only: bool,
}

pub(super) async fn run(source: Source, sink: Arc<dyn Sink>) {
    let kind = source.kind;
    let mut backoff = Backoff::new(Duration::from_millis(800), Duration::from_secs(30), 1.0);
    let mut failing = false;
    loop {
        let mut version = match source.list().await {
            Ok((objects, version)) => {
                debug!(kind, count = objects.len(), %version, "listed");
                sink.replace(objects);
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
            let end = source.watch(&*sink, &mut version, &mut backoff).await;
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

impl Source {
    /// All pages. If the list's revision is compacted between two pages it is read again in one piece, as client-go's
    /// pager does: a collection that is slower to read than to compact would otherwise never arrive.
    async fn list(&self) -> Result<(Vec<RawObject>, String), kube::Error> {
        let mut params = ListParams {
            label_selector: self.selector.labels.clone(),
            field_selector: self.selector.fields.clone(),
            limit: Some(PAGE),
            ..ListParams::default()
        };
        let mut objects = Vec::new();
        loop {
            let request = list_request(&self.request, self.metadata_only, &params)?;
            let body = match send(&self.client, request).await {
                Err(kube::Error::Api(status)) if status.code == 410 && params.continue_token.is_some() => {
                    objects.clear();
                    params.continue_token = None;
                    params.limit = None;
                    continue;
                }
                body => body?,
            };
            let page = Page::parse(&body)?;
            objects.extend(page.items.iter().filter_map(|item| self.parse(item.get())));
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => return Ok((objects, page.metadata.resource_version.unwrap_or_default())),
            }
        }
    }

    /// An object without readable metadata is reported and left out: it must not hide the others.
    fn parse(&self, text: &str) -> Option<RawObject> {
        RawObject::parse(text)
            .inspect_err(
                |error| warn!(kind = self.kind, %error, "left out an object without readable metadata"),
            )
            .ok()
    }

    async fn watch(&self, sink: &dyn Sink, version: &mut String, backoff: &mut Backoff) -> WatchEnd {
        let seconds = rand::random_range(WATCH_SECONDS);
        let params = WatchParams {
            label_selector: self.selector.labels.clone(),
            field_selector: self.selector.fields.clone(),
            timeout: Some(seconds),
            ..WatchParams::default()
        };
        let begun = Instant::now();
        let deadline = begun + Duration::from_secs(seconds.into()) + WATCH_GRACE;
        let request = if self.metadata_only {
            self.request.watch_metadata(&params, version)
        } else {
            self.request.watch(&params, version)
        };
        let request = match request {
            Ok(request) => request,
            Err(error) => return end_of(&invalid(error)),
        };
        let mut frames = match timeout_at(deadline, open(&self.client, request)).await {
            Ok(Ok(body)) => Frames::new(body),
            Ok(Err(error)) => return end_of(&error),
            Err(_) => return WatchEnd::Failed,
        };
        let mut received = false;
        let mut quiet = false;
        // A stream that goes silent past the deadline is a connection that died without a word.
        loop {
            let until = if quiet { deadline } else { deadline.min(Instant::now() + QUIET) };
            let frame = match timeout_at(until, frames.next()).await {
                Ok(Some(Ok(frame))) => frame,
                Ok(Some(Err(end))) => return end,
                Ok(None) => break,
                Err(_) if until < deadline => {
                    quiet = true;
                    sink.idle();
                    continue;
                }
                Err(_) => break,
            };
            quiet = false;
            if let Err(end) = self.receive(sink, &frame, version) {
                return end;
            }
            received = true;
            backoff.reset();
        }
        if received || begun.elapsed() >= SHORT_WATCH { WatchEnd::Finished } else { WatchEnd::Failed }
    }

    fn receive(&self, sink: &dyn Sink, frame: &[u8], version: &mut String) -> Result<(), WatchEnd> {
        let text = std::str::from_utf8(frame).unwrap_or_default();
        // The usual case: the event is written as API servers write them.
        if let Some((kind @ ("ADDED" | "MODIFIED" | "DELETED"), object)) = scan::event(text)
            && let Some(object) = RawObject::scan(object)
        {
            take(sink, kind, object, version);
            return Ok(());
        }
        let event = Event::parse(text).ok_or_else(|| {
            warn!(kind = self.kind, "the server sent a watch event that is none");
            WatchEnd::Unusable
        })?;
        let text = event.object;
        match &*event.kind {
            kind @ ("ADDED" | "MODIFIED" | "DELETED") => {
                let Some(object) = self.parse(text) else { return Ok(()) };
                take(sink, kind, object, version);
            }
            "BOOKMARK" => {
                if let Ok(head) = serde_json::from_str::<Head<'_>>(text)
                    && let Some(seen) = head.metadata.resource_version
                {
                    *version = seen.into_owned();
                }
            }
            "ERROR" => {
                let status = serde_json::from_str::<Status>(text).map_err(|_| WatchEnd::Unusable)?;
                return Err(end_of(&kube::Error::Api(Box::new(status))));
            }
            // A later version of the API may report more than we know.
            other => debug!(kind = self.kind, event = other, "unknown watch event"),
        }
        Ok(())
    }
}

/// Hands the object of an event on, and remembers its version.
fn take(sink: &dyn Sink, kind: &str, object: RawObject, version: &mut String) {
    if !object.version.is_empty() {
        object.version.as_str().clone_into(version);
    }
    if kind == "DELETED" { sink.remove(object) } else { sink.apply(object) }
}

/// A watch's body cut into its lines.
struct Frames {
    body: Body,
    buffer: BytesMut,
    /// Length of the part of the buffer that contains no end of line.
    searched: usize,
}

impl Frames {
    fn new(body: Body) -> Self {
        Self { body, buffer: BytesMut::new(), searched: 0 }
    }

    /// The next line that is not empty, or nothing at the end of the body.
    async fn next(&mut self) -> Option<Result<Bytes, WatchEnd>> {
        loop {
            if let Some(at) = memchr(b'\n', &self.buffer[self.searched..]) {
                let line = self.buffer.split_to(self.searched + at);
                self.buffer.advance(1);
                self.searched = 0;
                if line.iter().all(u8::is_ascii_whitespace) {
                    continue;
                }
                return Some(Ok(line.freeze()));
            }
            self.searched = self.buffer.len();
            if self.buffer.len() > MAX_EVENT {
                return Some(Err(WatchEnd::Unusable));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    let Ok(mut data) = frame.into_data() else { continue };
                    // The usual case: a piece of the body is one line, and is not copied.
                    let is_line = || memchr(b'\n', &data).is_some_and(|at| at + 1 == data.len());
                    if self.buffer.is_empty() && is_line() {
                        data.truncate(data.len() - 1);
                        if !data.iter().all(u8::is_ascii_whitespace) {
                            self.searched = 0;
                            return Some(Ok(data));
                        }
                    } else {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                // The connection broke: the complete events before it count.
                Some(Err(_)) | None if self.buffer.iter().all(u8::is_ascii_whitespace) => return None,
                // The last line needs no end of line.
                Some(Err(_)) => return None,
                None => {
                    self.searched = 0;
                    return Some(Ok(std::mem::take(&mut self.buffer).freeze()));
                }
            }
        }
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
