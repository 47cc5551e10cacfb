//! Counts the requests that are served at once: reading and writing ones apart, streams not at all. Limits them where
//! flow control is off.

use super::{Exchange, Refusal};
use crate::http::{self, Response};
use crate::metrics::RequestKind;
use crate::request::Verb;
use ::http::{HeaderValue, header};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Notify;

pub(super) fn before(exchange: &mut Exchange) -> Result<(), Refusal> {
    let facts = &mut exchange.facts;
    let privileged = exchange.asked.user.as_ref().is_some_and(|user| user.is_master());
    match facts.server.in_flight.enter(&facts.kind, privileged) {
        Ok(place) => {
            facts.place = place;
            Ok(())
        }
        Err(TooMany) => {
            facts.server.metrics.terminated(&facts.kind, 429);
            Err(Refusal::Response(too_many()))
        }
    }
}

/// As upstream: plain text, said before anything is known about the request.
pub(super) fn too_many() -> Response {
    let mut answer = http::text(429, "Too many requests, please try again later.\n");
    answer.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    answer.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    answer
}

/// No place is free.
#[derive(Debug)]
pub(crate) struct TooMany;

/// The number of requests being served, and its limit.
pub(crate) struct InFlight {
    reading: Lane,
    mutating: Lane,
    /// Rings when no request is in flight any more.
    idle: Notify,
}

struct Lane {
    running: AtomicUsize,
    limit: usize,
}

impl Lane {
    /// Zero is no limit.
    fn new(limit: usize) -> Self {
        Self { running: AtomicUsize::new(0), limit: if limit == 0 { usize::MAX } else { limit } }
    }

    fn running(&self) -> usize {
        self.running.load(Ordering::Acquire)
    }
}

/// The right of one request to be served, until it is dropped.
pub(crate) struct Place {
    in_flight: Arc<InFlight>,
    mutating: bool,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.in_flight.lane(self.mutating).running.fetch_sub(1, Ordering::AcqRel);
        if self.in_flight.count() == 0 {
            self.in_flight.idle.notify_waiters();
        }
    }
}

/// A writer that gave its place up while its body is on the way. It counts again from when this is dropped.
pub(crate) struct WaitingForBody<'a> {
    in_flight: &'a InFlight,
}

impl WaitingForBody<'_> {
    /// The body has arrived. False if too many other requests run by now.
    pub fn may_continue(self, privileged: bool) -> bool {
        let lane = &self.in_flight.mutating;
        privileged || lane.running() < lane.limit
    }
}

impl Drop for WaitingForBody<'_> {
    fn drop(&mut self) {
        self.in_flight.mutating.running.fetch_add(1, Ordering::AcqRel);
    }
}

impl InFlight {
    /// At most that many requests are served at once; zero is no limit.
    pub fn new(max_reading: usize, max_mutating: usize) -> Arc<Self> {
        Arc::new(Self {
            reading: Lane::new(max_reading),
            mutating: Lane::new(max_mutating),
            idle: Notify::new(),
        })
    }

    fn lane(&self, mutating: bool) -> &Lane {
        if mutating { &self.mutating } else { &self.reading }
    }

    /// Takes a request in. Streams need no place. As upstream, `privileged` requests are never refused.
    pub fn enter(self: &Arc<Self>, kind: &RequestKind, privileged: bool) -> Result<Option<Place>, TooMany> {
        if kind.is_long_running() {
            return Ok(None);
        }
        let lane = self.lane(kind.is_mutating());
        let before = lane.running.fetch_add(1, Ordering::AcqRel);
        let place = Place { in_flight: Arc::clone(self), mutating: kind.is_mutating() };
        if before < lane.limit || privileged { Ok(Some(place)) } else { Err(TooMany) }
    }

    /// Gives a writer's place up while its body is awaited; none for requests that have no such place.
    pub fn wait_for_body(&self, verb: Verb) -> Option<WaitingForBody<'_>> {
        let counted =
            matches!(verb, Verb::Create | Verb::Update | Verb::Patch | Verb::Delete | Verb::DeleteCollection);
        let running = &self.mutating.running;
        let left = counted.then(|| {
            running.fetch_update(Ordering::AcqRel, Ordering::Acquire, |running| running.checked_sub(1))
        });
        left?.ok().map(|_| WaitingForBody { in_flight: self })
    }

    pub fn reading(&self) -> usize {
        self.reading.running()
    }

    pub fn mutating(&self) -> usize {
        self.mutating.running()
    }

    fn count(&self) -> usize {
        self.reading() + self.mutating()
    }

    /// Waits until no request is in flight; streams do not count.
    pub async fn idle(&self) {
        loop {
            let rung = self.idle.notified();
            if self.count() == 0 {
                return;
            }
            rung.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::ResourceMap;
    use ferrite_api::kinds::built_in;

    fn create() -> RequestKind {
        RequestKind::sample("POST", "/api/v1/namespaces/a/pods", &ResourceMap::new(built_in()))
    }

    #[test]
    fn a_writer_that_waits_for_its_body_gives_its_place_up() {
        let all = InFlight::new(1, 1);
        let first = all.enter(&create(), false).expect("a place");
        assert!(all.enter(&create(), false).is_err(), "there is one place");
        assert!(all.wait_for_body(Verb::Get).is_none(), "readers have no such place");
        let waiting = all.wait_for_body(Verb::Create).expect("the place is given up");
        let second = all.enter(&create(), false).expect("the place of the first");
        assert!(!waiting.may_continue(false), "the second has it");
        assert_eq!(all.count(), 2, "the first counts until it has answered");
        drop(second);
        let waiting = all.wait_for_body(Verb::Update).expect("the place is given up");
        assert_eq!(all.count(), 0);
        assert!(waiting.may_continue(false));
        let waiting = all.wait_for_body(Verb::Patch).expect("the place is given up");
        let second = all.enter(&create(), false).expect("the place of the first");
        assert!(waiting.may_continue(true), "administrators are exempt");
        drop((first, second));
        assert_eq!(all.count(), 0);
        assert!(all.wait_for_body(Verb::Create).is_none(), "nobody has a place");
    }

    #[tokio::test]
    async fn too_many_at_once_are_turned_away() {
        let all = InFlight::new(1, 3);
        let read = RequestKind::sample("GET", "/api/v1/nodes", &ResourceMap::new(built_in()));
        let running: Vec<_> = (0..3).map(|_| all.enter(&create(), false).expect("room")).collect();
        assert!(all.enter(&create(), false).is_err());
        assert!(all.enter(&create(), true).is_ok(), "an administrator is never locked out");
        assert!(all.enter(&read, false).is_ok());
        let idle = all.idle();
        tokio::pin!(idle);
        assert!(futures_util::poll!(idle.as_mut()).is_pending());
        drop(running);
        idle.await;
        assert!(all.enter(&create(), false).is_ok());
    }
}
