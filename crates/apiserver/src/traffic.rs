//! Bytes of requests and responses that are on the way, and connections to others, counted for each user.
//!
//! The client alone decides how fast its request arrives and its response leaves, and one connection carries many of
//! both. Such a request holds no seat of flow control, so its memory is limited here. The same is true of a stream to a
//! kubelet, a pod or another server, which takes a descriptor. A user beyond a limit is refused; others are not affected.

use crate::auth::User;
use crate::connections::ConnectionLimits;
use crate::http::{Body, BoxError, Piece};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt;
use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limits {
    /// Bytes of all users together.
    total: usize,
    /// Bytes of one user.
    share: usize,
    /// A user has so many bytes even if others have used up the total.
    reserve: usize,
    /// Connections to others, for all users together.
    connections: usize,
    /// Connections to others for one user.
    each_user: usize,
}

impl Limits {
    fn new(clients: ConnectionLimits) -> Self {
        // Clients have half of the descriptors; the store and all other parts of the process need some, too.
        let connections = clients.total / 2;
        let each_user = (connections / 8).max(1);
        Self { total: 512 << 20, share: 64 << 20, reserve: 1 << 20, connections, each_user }
    }
}

/// Smaller responses are not counted.
const SMALL: u64 = 16 << 10;
/// Size of a response that is made while it is sent: the piece that waits, and the one after it.
const STREAMED: usize = 384 << 10;
/// A complete response leaves in parts of this size. HTTP/2 buffers a part as soon as the client takes one byte of it.
const PART: usize = 128 << 10;

/// Everything that is on the way.
#[derive(Debug)]
pub(crate) struct Traffic {
    limits: Limits,
    /// Bytes of all users.
    total: AtomicUsize,
    users: Mutex<HashMap<Arc<str>, Usage>>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Usage {
    bytes: usize,
    connections: usize,
}

/// A user whose bytes are counted.
#[derive(Debug, Clone)]
pub(crate) struct Account {
    traffic: Arc<Traffic>,
    name: Arc<str>,
}

/// Bytes of one request or response, until dropped.
#[derive(Debug)]
pub(crate) struct Held {
    account: Account,
    bytes: usize,
}

/// A connection to another server on behalf of a user, until dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    account: Account,
}

/// A user has too many connections to others.
#[derive(Debug, thiserror::Error)]
#[error("too many connections of this user are open; close some or try again later")]
pub(crate) struct TooManyConnections;

/// The name that a user's bytes are counted under. A namespace's service accounts count together: whoever can make
/// one can make many.
fn account_name(user: &User) -> &str {
    let account = user.name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    account
        .map_or(&user.name, |(namespace, _)| &user.name[.."system:serviceaccount:".len() + namespace.len()])
}

impl Traffic {
    /// Limits for a server whose clients have these.
    pub fn new(clients: ConnectionLimits) -> Self {
        Self { limits: Limits::new(clients), total: AtomicUsize::new(0), users: Mutex::default() }
    }

    /// The account of a user. None for administrators, who are never refused.
    pub fn account(self: &Arc<Self>, user: &User) -> Option<Account> {
        (!user.is_master()).then(|| Account { traffic: Arc::clone(self), name: account_name(user).into() })
    }

    fn users(&self) -> MutexGuard<'_, HashMap<Arc<str>, Usage>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a user that has `held` bytes may have `more`.
    fn fits(&self, held: usize, more: usize) -> bool {
        let Limits { total, share, reserve, .. } = self.limits;
        let wanted = held.saturating_add(more);
        let all = self.total.load(Ordering::Relaxed).saturating_add(more);
        wanted <= reserve || wanted <= share && all <= total
    }

    /// Changes the figures of a user; one without any is forgotten.
    fn change(users: &mut HashMap<Arc<str>, Usage>, name: &Arc<str>, change: impl FnOnce(&mut Usage)) {
        let usage = users.entry(Arc::clone(name)).or_default();
        change(usage);
        if *usage == Usage::default() {
            users.remove(name);
        }
    }
}

impl Account {
    /// The name that everything of the user counts under.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns true unless the user has used up its share already.
    pub fn is_open(&self) -> bool {
        // Nobody has more than all have together.
        if self.traffic.total.load(Ordering::Relaxed) <= self.traffic.limits.reserve {
            return true;
        }
        let held = self.traffic.users().get(&self.name).map_or(0, |usage| usage.bytes);
        self.traffic.fits(held, 1)
    }

    /// Counts `bytes` without asking.
    fn hold(&self, bytes: usize) -> Held {
        let mut held = Held { account: self.clone(), bytes: 0 };
        held.count(&mut self.traffic.users(), bytes);
        held
    }

    /// Counts a connection to another server.
    pub fn connect(&self) -> Result<Connection, TooManyConnections> {
        let mut users = self.traffic.users();
        let own = users.get(&self.name).map_or(0, |usage| usage.connections);
        let Limits { connections, each_user, .. } = self.traffic.limits;
        if own >= each_user || users.values().map(|usage| usage.connections).sum::<usize>() >= connections {
            return Err(TooManyConnections);
        }
        Traffic::change(&mut users, &self.name, |usage| usage.connections += 1);
        Ok(Connection { account: self.clone() })
    }

    /// Counts bytes. None if the user has too many on the way.
    pub fn take(&self, bytes: usize) -> Option<Held> {
        let mut held = Held { account: self.clone(), bytes: 0 };
        held.grow(bytes).then_some(held)
    }

    /// Counts data of a stream. None if the user has too much on the way.
    pub fn piece(&self, bytes: Bytes) -> Option<Piece> {
        match bytes.len() as u64 {
            0..SMALL => Some(Piece::Data(bytes)),
            _ => self.take(bytes.len()).map(|held| Piece::Counted(bytes, held)),
        }
    }

    /// Counts a response until it has been sent. `streams` is true for one without an end of its own.
    pub fn response(&self, body: Body, streams: bool) -> Body {
        let hint = http_body::Body::size_hint(&body);
        match hint.exact() {
            Some(length) if length < SMALL => body,
            Some(length) => {
                let held = self.hold(usize::try_from(length).unwrap_or(usize::MAX));
                Paced { body, rest: Bytes::new(), _held: held }.boxed_unsync()
            }
            None if streams => body,
            None => crate::http::held(body, self.hold(STREAMED)),
        }
    }
}

impl Held {
    fn count(&mut self, users: &mut HashMap<Arc<str>, Usage>, bytes: usize) {
        Traffic::change(users, &self.account.name, |usage| usage.bytes += bytes);
        self.account.traffic.total.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
    }

    /// Counts more bytes. False if the user has too many on the way.
    pub fn grow(&mut self, bytes: usize) -> bool {
        let traffic = Arc::clone(&self.account.traffic);
        let mut users = traffic.users();
        let held = users.get(&self.account.name).map_or(0, |usage| usage.bytes);
        let fits = traffic.fits(held, bytes);
        if fits {
            self.count(&mut users, bytes);
        }
        fits
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let traffic = &self.account.traffic;
        traffic.total.fetch_sub(self.bytes, Ordering::Relaxed);
        Traffic::change(&mut traffic.users(), &self.account.name, |usage| usage.bytes -= self.bytes);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut users = self.account.traffic.users();
        Traffic::change(&mut users, &self.account.name, |usage| usage.connections -= 1);
    }
}

/// A complete body that leaves in parts.
struct Paced {
    body: Body,
    rest: Bytes,
    _held: Held,
}

impl http_body::Body for Paced {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        while this.rest.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return Poll::Ready(other),
            }
        }
        let part = this.rest.split_to(this.rest.len().min(PART));
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (inner, rest) = (self.body.size_hint(), self.rest.len() as u64);
        let mut hint = SizeHint::new();
        hint.set_lower(inner.lower().saturating_add(rest));
        if let Some(upper) = inner.upper().and_then(|upper| upper.checked_add(rest)) {
            hint.set_upper(upper);
        }
        hint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::full;

    fn traffic() -> Arc<Traffic> {
        let limits = Limits { total: 100, share: 60, reserve: 10, connections: 5, each_user: 3 };
        Arc::new(Traffic { limits, ..Traffic::new(ConnectionLimits::default()) })
    }

    fn account(traffic: &Arc<Traffic>, name: &str) -> Account {
        traffic.account(&User::new(name, ["group"])).expect("an account")
    }

    #[test]
    fn a_user_is_refused_beyond_its_share_and_others_are_not() {
        let traffic = traffic();
        let (greedy, other) = (account(&traffic, "greedy"), account(&traffic, "other"));
        let mut first = greedy.take(50).expect("room");
        assert!(first.grow(10) && !first.grow(1));
        assert!(greedy.take(1).is_none() && !greedy.is_open());
        let mut second = other.take(40).expect("room");
        assert!(!second.grow(1), "the total is used up");
        let third = account(&traffic, "third");
        assert!(third.is_open() && third.take(10).is_some(), "everybody has a reserve");
        assert!(third.take(11).is_none());
        drop(first);
        assert!(greedy.is_open() && second.grow(20) && !second.grow(1));
        drop(second);
        assert_eq!((traffic.total.load(Ordering::Relaxed), traffic.users().len()), (0, 0));
    }

    #[test]
    fn a_user_has_few_connections_to_others_and_all_have_a_limit() {
        let traffic = traffic();
        let connect = |name: &str| account(&traffic, name).connect().ok();
        let first: Vec<_> = (0..3).map(|_| connect("a").expect("room")).collect();
        assert!(connect("a").is_none());
        let _second: Vec<_> = (0..2).map(|_| connect("b").expect("room")).collect();
        assert!(connect("b").is_none() && connect("c").is_none(), "no more than five for all");
        drop(first);
        assert!(connect("a").is_some() && connect("c").is_some());
        assert_eq!(traffic.users().len(), 1, "a user without connections is forgotten");
    }

    #[test]
    fn service_accounts_of_a_namespace_count_together_and_administrators_do_not_count() {
        let traffic = traffic();
        let name = |user: &User| traffic.account(user).map(|account| account.name.to_string());
        for (user, expected) in [
            (User::service_account("a", "x", ""), Some("system:serviceaccount:a")),
            (User::service_account("a", "y", ""), Some("system:serviceaccount:a")),
            (User::new("jane", ["dev"]), Some("jane")),
            (User::new("system:serviceaccount:", ["dev"]), Some("system:serviceaccount:")),
            (User::anonymous(), Some("system:anonymous")),
            (User::new("admin", ["system:masters"]), None),
        ] {
            assert_eq!(name(&user).as_deref(), expected);
        }
    }

    #[tokio::test]
    async fn frames_of_a_stream_count_until_they_are_sent() {
        let traffic = Arc::new(Traffic::new(ConnectionLimits::default()));
        let account = account(&traffic, "watcher");
        let (sender, mut body) = crate::http::pipe(16, 0, true);
        let frame = Bytes::from(vec![b'x'; PART + 1]);
        let sent = (0..1000).map_while(|_| sender.try_send(account.piece(frame.clone())?).ok()).count();
        assert_eq!(sent, 16);
        let mut held: Vec<_> = (0..1000).map_while(|_| account.piece(frame.clone())).collect();
        assert!((400..512).contains(&held.len()), "a user has no more than its share");
        assert!(account.piece(Bytes::from_static(b"small")).is_some());
        held.clear();
        drop(sender);
        let total = || traffic.total.load(Ordering::Relaxed);
        for left in (1..=16).rev() {
            let sent = body.frame().await.expect("a frame").expect("no error");
            assert!(sent.into_data().is_ok_and(|data| data == frame), "an event stays whole");
            assert_eq!(total(), left * frame.len(), "it counts until the next one is asked for");
        }
        assert!(body.frame().await.is_none() && total() == 0);
    }

    #[tokio::test]
    async fn a_response_counts_until_it_has_been_sent() {
        let traffic = Arc::new(Traffic::new(ConnectionLimits::default()));
        let account = account(&traffic, "reader");
        let held = || traffic.total.load(Ordering::Relaxed);
        let text: Vec<u8> = (0..PART * 2 + 7).map(|n| n as u8).collect();
        let mut body = account.response(full(text.clone()), false);
        assert_eq!(http_body::Body::size_hint(&body).exact(), Some(text.len() as u64));
        let mut sent = Vec::new();
        while let Some(frame) = body.frame().await {
            let data = frame.expect("a frame").into_data().expect("data");
            assert!(data.len() <= PART && held() == text.len());
            sent.extend_from_slice(&data);
            let left = (text.len() - sent.len()) as u64;
            assert_eq!(http_body::Body::size_hint(&body).exact(), Some(left));
        }
        assert!(http_body::Body::is_end_stream(&body) && sent == text);
        drop(body);
        assert_eq!(held(), 0);
        drop(account.response(full(vec![0; 100]), false));
        let (_sender, piped) = crate::http::pipe(1, 0, false);
        let piped = account.response(piped, false);
        assert_eq!(held(), STREAMED);
        drop(piped);
        assert_eq!(held(), 0);
    }
}
