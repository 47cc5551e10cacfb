//! Requests to the kernel's routing part.

use tokio::sync::Mutex;

use crate::message::flag;
use crate::{Error, Message, Messages, Netns, Protocol, Socket};

/// A socket in one network namespace, for links, addresses, routes, rules, neighbours and queues.
///
/// Requests of several tasks take turns. Each runs on the calling thread while the kernel works on it.
#[derive(Debug)]
pub struct Connection {
    socket: Mutex<Socket>,
}

impl Connection {
    /// In the calling thread's network namespace.
    pub fn new() -> Result<Self, Error> {
        Self::open(None)
    }

    /// In another network namespace.
    pub fn new_in(netns: &Netns) -> Result<Self, Error> {
        Self::open(Some(netns))
    }

    fn open(netns: Option<&Netns>) -> Result<Self, Error> {
        Ok(Self { socket: Mutex::new(Socket::open(Protocol::Route, netns)?) })
    }

    /// Makes a request that is only acknowledged.
    pub(crate) async fn change(&self, name: &'static str, request: Messages) -> Result<(), Error> {
        self.ask(name, request, |_| None::<()>).await.map(drop)
    }

    pub(crate) async fn ask<T>(
        &self,
        name: &'static str,
        request: Messages,
        parse: fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        self.socket.lock().await.request(name, request, parse)
    }

    /// Lists everything of a kind. `fixed` is the empty fixed part of its messages.
    pub(crate) async fn list<T>(
        &self,
        name: &'static str,
        kind: u16,
        fixed: &[u8],
        parse: fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        let mut request = Messages::request(kind, flag::DUMP);
        request.push(fixed);
        self.ask(name, request, parse).await
    }
}
