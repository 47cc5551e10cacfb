//! A watch as it goes over the wire: frames, one after another, until somebody has had enough.

use crate::call::Call;
use crate::encode::WatchEncoder;
use crate::http::{self, Piece, Response};
use crate::options::ListOptions;
use crate::registry::{Selectors, WatchEvent, WatchStream};
use crate::traffic::Account;
use ::http::{HeaderValue, header};
use bytes::Bytes;
use ferrite_api::Status;
use rand::RngExt;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::Sender;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;

const BOOKMARK_INTERVAL: Duration = Duration::from_secs(60);
/// As upstream: a watcher learns how far it got shortly before its time is over.
const LAST_BOOKMARK: Duration = Duration::from_secs(2);
/// Frames waiting for a slow client; a full channel stops the reading, and the history bounds the rest.
const BUFFER: usize = 16;
/// Pause of a watcher whose user has too much on the way.
const CROWDED: Duration = Duration::from_millis(100);
/// A client that takes nothing for so long is not there any more.
const STALLED: Duration = Duration::from_secs(60);

pub(crate) fn answer(call: &mut Call) -> Result<Response, Status> {
    let mut options = ListOptions::parse(&call.query, true)?;
    if let Some(name) = &call.target.name {
        // The old form: a watch of one object, by its path.
        let wanted = ferrite_api::selector::FieldSelector::parse(&options.field_selector).ok();
        if wanted.is_some_and(|selector| selector.exact("metadata.name").is_some_and(|other| other != name)) {
            return Err(Status::bad_request("fieldSelector metadata.name doesn't match requested name"));
        }
        options.field_selector = format!("metadata.name={name}");
    }
    let selectors = Selectors::parse(&call.resource, &options)?;
    let namespace = call.target.within();
    let made = Arc::clone(&call.server.metrics.watch_encodings);
    let resource = Arc::clone(&call.resource);
    let encoder = WatchEncoder::new(resource, call.representation, call.include_object()?, made)?;
    let content_type = encoder.content_type();
    let stream = match call.server.registry.watch(&call.resource, namespace, selectors, &options) {
        Ok(stream) => Ok(stream),
        // As upstream: the stream itself reports that a version is too old.
        Err(status) if status.code == 410 => Err(status),
        Err(status) => return Err(status),
    };
    let shortest = call.server.config.serving.min_request_timeout.as_secs().max(1);
    let seconds = options
        .timeout_seconds
        .filter(|s| *s > 0)
        .unwrap_or_else(|| rand::rng().random_range(shortest..2 * shortest));
    // A time beyond the clock's range counts as none.
    let deadline = Instant::now() + Duration::from_secs(seconds.min(u64::from(u32::MAX)));
    let stopping = call.server.stopping();
    let ended = call.server.registry.tables.ended(&call.resource);
    let server = Arc::clone(&call.server);
    let (sender, body) = http::pipe(BUFFER, 0, true);
    let account = call.parts.extensions.get().cloned();
    let mut watcher = Watcher { server, encoder, sender, account, deadline, bookmarks: options.bookmarks };
    call.server.spawn(async move {
        match stream {
            Err(status) => {
                let _ = watcher.send(&WatchEvent::Error(status)).await;
            }
            Ok(stream) => {
                tokio::select! {
                    () = watcher.run(stream) => {}
                    () = tokio::time::sleep_until(deadline) => {}
                    () = stopping.cancelled() => {}
                    () = end_of(ended) => {}
                }
            }
        }
    });
    let mut answer = ::http::Response::new(body);
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    Ok(match crate::websocket::is_requested(&call.parts.headers) {
        true => crate::websocket::watch(call, answer, content_type == http::JSON),
        false => answer,
    })
}

/// Ends with the definition of a custom kind: a client that begins anew sees its new state.
async fn end_of(ended: Option<tokio_util::sync::CancellationToken>) {
    match ended {
        Some(ended) => ended.cancelled().await,
        None => std::future::pending().await,
    }
}

struct Watcher {
    server: Arc<crate::server::ApiServer>,
    encoder: WatchEncoder,
    sender: Sender<Piece>,
    /// Where frames that wait for the client count.
    account: Option<Account>,
    deadline: Instant,
    bookmarks: bool,
}

impl Watcher {
    /// Writes events until the client is gone or the watch ends.
    async fn run(&mut self, mut stream: WatchStream) {
        let mut tick = next_bookmark(Instant::now(), self.deadline);
        loop {
            let event = tokio::select! {
                event = stream.next() => match event {
                    Some(event) => event,
                    None => return,
                },
                () = tokio::time::sleep_until(tick) => {
                    tick = next_bookmark(tick, self.deadline);
                    stream.tidy();
                    match stream.bookmark() {
                        Some(WatchEvent::Bookmark { .. }) if !self.bookmarks => continue,
                        Some(event) => event,
                        None => continue,
                    }
                }
                () = self.sender.closed() => return,
            };
            if self.send(&event).await.is_none() {
                return;
            }
        }
    }

    /// Sends an event. None if the client is gone, or reads so little that too much waits for it.
    async fn send(&mut self, event: &WatchEvent) -> Option<()> {
        let frame: Bytes = match event {
            WatchEvent::Initial(entry) => self.encoder.initial(entry),
            WatchEvent::Changed { type_, event } => self.encoder.changed(*type_, event),
            WatchEvent::Bookmark { revision, initial_events_end } => {
                self.encoder.bookmark(*revision, *initial_events_end)
            }
            WatchEvent::Error(status) => self.encoder.error(status),
        }
        .ok()?;
        self.server.metrics.watch_event(&self.encoder, frame.len());
        let piece = match &self.account {
            // A frame that other watchers have, too, costs nothing more.
            Some(account) if frame.is_unique() => self.counted(account, frame).await?,
            _ => Piece::Data(frame),
        };
        match self.sender.try_send(piece) {
            Ok(()) => Some(()),
            Err(TrySendError::Closed(_)) => None,
            Err(TrySendError::Full(frame)) => {
                tokio::time::timeout(STALLED, self.sender.send(frame)).await.ok()?.ok()
            }
        }
    }
}

impl Watcher {
    /// Counts a frame, and waits for its user's other frames to be sent if there are too many. None if that takes too
    /// long.
    async fn counted(&self, account: &Account, frame: Bytes) -> Option<Piece> {
        let limit = Instant::now() + STALLED;
        loop {
            if let Some(piece) = account.piece(frame.clone()) {
                return Some(piece);
            }
            tokio::select! {
                () = tokio::time::sleep(CROWDED) => {}
                () = self.sender.closed() => return None,
            }
            if Instant::now() >= limit {
                return None;
            }
        }
    }
}

/// The time of the next bookmark: once a minute, and shortly before the end.
fn next_bookmark(after: Instant, deadline: Instant) -> Instant {
    let regular = after + BOOKMARK_INTERVAL;
    match deadline.checked_sub(LAST_BOOKMARK) {
        Some(last) if last > after => regular.min(last),
        _ => regular,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bookmarks_come_every_minute_and_before_the_end() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        for (after, deadline, expected) in [(0, 300, 60), (0, 10, 8), (240, 300, 298), (298, 300, 358)] {
            assert_eq!(next_bookmark(at(after), at(deadline)), at(expected), "{after} {deadline}");
        }
    }
}
