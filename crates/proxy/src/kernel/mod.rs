//! One table in the kernel, through netlink. The calls block for as long as the kernel works on them.

mod monitor;
mod socket;
mod wire;

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use self::socket::{Socket, attribute, attributes};
use self::wire::Messages;
use crate::diff::Transaction;
use crate::layout::SetName;
use crate::model::IpFamily;

pub use monitor::{Change, Monitor};

/// Why the table could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    #[error("open a netlink socket{}", netns.as_ref().map(|path| format!(" in {}", path.display())).unwrap_or_default())]
    Open {
        netns: Option<PathBuf>,
        #[source]
        source: io::Error,
    },
    #[error("{what} nftables table {table}")]
    Table {
        what: &'static str,
        table: String,
        #[source]
        source: io::Error,
    },
}

impl KernelError {
    /// The error number of the kernel.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Open { source, .. } | Self::Table { source, .. } => source.raw_os_error(),
        }
    }
}

/// The generations of the ruleset that our own transactions made. A [`Monitor`] tells from it which changes are
/// somebody else's.
#[derive(Debug, Clone, Default)]
pub struct OwnGenerations(Arc<Mutex<HashSet<u32>>>);

impl OwnGenerations {
    fn insert(&self, generation: u32) {
        /// A monitor asks soon or, when notices are lost, never.
        const KEPT: u32 = 1024;
        let mut own = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        own.insert(generation);
        if own.len() > 2 * KEPT as usize {
            own.retain(|known| generation.wrapping_sub(*known) < KEPT);
        }
    }

    /// Whether the generation was ours; it is asked once.
    fn take(&self, generation: u32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&generation)
    }
}

/// A client that session affinity remembers, as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RememberedClient {
    key: Vec<u8>,
    endpoint: Vec<u8>,
    milliseconds: u64,
}

/// The table of one family.
pub struct Table {
    socket: Socket,
    family: IpFamily,
    name: String,
    sequence: u32,
    own: OwnGenerations,
    /// The kernel's number for the table that we made; another number is another table.
    handle: Option<u64>,
    /// A generation that turned out to be somebody else's was taken for ours: its changes went unnoticed.
    missed: bool,
}

/// How often a transaction is tried again because somebody else changed the ruleset in between.
const ATTEMPTS: usize = 16;
/// The ruleset is at another generation than the transaction says.
const RESTART: i32 = 85;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

impl Table {
    /// Opens a socket in the network namespace at `netns`, else in that of the calling thread. Nothing is made yet.
    pub fn open(
        family: IpFamily,
        name: &str,
        netns: Option<&Path>,
        own: OwnGenerations,
    ) -> Result<Self, KernelError> {
        let socket = Socket::open(netns)
            .map_err(|source| KernelError::Open { netns: netns.map(Path::to_owned), source })?;
        Ok(Self { socket, family, name: name.to_owned(), sequence: 1, own, handle: None, missed: false })
    }

    pub fn family(&self) -> IpFamily {
        self.family
    }

    /// Makes all changes of the transaction, or none.
    pub fn apply(
        &mut self,
        transaction: &Transaction,
        clients: &[RememberedClient],
    ) -> Result<(), KernelError> {
        let clients = if transaction.rebuild { clients } else { &[] };
        self.commit(|messages| {
            messages.transaction(transaction);
            for client in clients {
                messages.expiring_element(
                    SetName::Affinity,
                    &client.key,
                    &client.endpoint,
                    client.milliseconds,
                );
            }
        })
        .map_err(self.failed("change"))?;
        if transaction.rebuild {
            self.handle = self.find().map_err(self.failed("read"))?;
        }
        Ok(())
    }

    /// Whether somebody else may have changed the table without the monitor's knowledge. It is asked once.
    pub fn take_missed(&mut self) -> bool {
        std::mem::take(&mut self.missed)
    }

    /// Deletes chains that no element refers to any more.
    pub fn delete_chains(&mut self, names: &[String]) -> Result<(), KernelError> {
        self.commit(|messages| {
            messages.begin();
            names.iter().for_each(|name| messages.delete_chain(name));
        })
        .map_err(self.failed("delete chains of"))
    }

    /// Deletes the table; succeeds if there is none.
    pub fn remove(&mut self) -> Result<(), KernelError> {
        self.handle = None;
        self.commit(|messages| {
            messages.begin();
            messages.new_table();
            messages.delete_table();
        })
        .map_err(self.failed("delete"))
    }

    /// Whether there is a table of this name, whoever made it.
    pub fn exists(&mut self) -> Result<bool, KernelError> {
        Ok(self.find().map_err(self.failed("read"))?.is_some())
    }

    /// Whether the table that we made is still there.
    pub fn is_ours(&mut self) -> Result<bool, KernelError> {
        let found = self.find().map_err(self.failed("read"))?;
        Ok(found.is_some() && found == self.handle)
    }

    /// The clients that session affinity remembers; none if there is no table.
    pub fn remembered_clients(&mut self) -> Result<Vec<RememberedClient>, KernelError> {
        let mut clients = Vec::new();
        let mut messages = self.messages();
        messages.get_elements(SetName::Affinity);
        let result = self.request(&messages, |body| {
            for (_, element) in attribute(body, 3).into_iter().flat_map(attributes) {
                clients.extend(remembered(element));
            }
        });
        match result {
            Ok(()) => Ok(clients),
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOENT) => Ok(Vec::new()),
            Err(error) => Err(self.failed("read")(error)),
        }
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> KernelError + use<> {
        let table = self.name.clone();
        move |source| KernelError::Table { what, table, source }
    }

    fn messages(&self) -> Messages {
        Messages::new(self.family, &self.name, self.sequence)
    }

    fn find(&mut self) -> io::Result<Option<u64>> {
        let mut handle = None;
        let mut messages = self.messages();
        messages.get_table();
        let result = self.request(&messages, |body| {
            handle = attribute(body, 4).and_then(|data| Some(u64::from_be_bytes(data.try_into().ok()?)));
        });
        match result {
            Ok(()) => Ok(handle),
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends one question and reads its answers.
    fn request(&mut self, messages: &Messages, mut each: impl FnMut(&[u8])) -> io::Result<()> {
        let asked = self.sequence;
        self.sequence = messages.next_sequence();
        self.socket.drain();
        self.socket.send(&messages.bytes)?;
        self.socket.receive(|reply| match reply.kind {
            _ if reply.sequence != asked => Ok(false),
            NLMSG_ERROR => error_of(reply.body).map_or(Ok(true), Err),
            NLMSG_DONE => Ok(true),
            _ => {
                each(reply.body.get(4..).unwrap_or_default());
                Ok(false)
            }
        })
    }

    fn generation(&mut self) -> io::Result<u32> {
        let mut generation = None;
        let mut messages = self.messages();
        messages.get_generation();
        self.request(&messages, |body| generation = generation_of(body))?;
        generation.ok_or_else(|| io::Error::other("the kernel does not say the generation of its ruleset"))
    }

    /// Commits at a known generation, so that the next one is known to be ours.
    fn commit(&mut self, fill: impl Fn(&mut Messages)) -> io::Result<()> {
        let mut result = Ok(());
        for _ in 0..ATTEMPTS {
            let generation = self.generation()?;
            let mut messages = self.messages();
            messages.expect_generation(generation);
            fill(&mut messages);
            messages.acknowledge_last();
            messages.end();
            let next = match generation.wrapping_add(1) {
                0 => 1,
                next => next,
            };
            self.own.insert(next);
            result = self.send_batch(&messages);
            match &result {
                Err(error) => {
                    self.missed |= !self.own.take(next);
                    if error.raw_os_error() != Some(RESTART) {
                        return result;
                    }
                }
                Ok(()) => return result,
            }
        }
        result
    }

    fn send_batch(&mut self, messages: &Messages) -> io::Result<()> {
        let first = self.sequence;
        self.sequence = messages.next_sequence();
        // The end is not answered; the message before it is the last that is.
        let last = messages.next_sequence().wrapping_sub(2);
        self.socket.drain();
        self.socket.send(&messages.bytes)?;
        self.socket.receive(|reply| {
            let ours = reply.sequence.wrapping_sub(first) <= last.wrapping_sub(first);
            if !ours || reply.kind != NLMSG_ERROR {
                return Ok(false);
            }
            match error_of(reply.body) {
                Some(error) => Err(error),
                None => Ok(reply.sequence == last),
            }
        })
    }
}

fn error_of(body: &[u8]) -> Option<io::Error> {
    let code = body.get(..4).and_then(|bytes| bytes.try_into().ok()).map_or(0, i32::from_ne_bytes);
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

fn generation_of(body: &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(attribute(body, 1)?.try_into().ok()?))
}

fn remembered(element: &[u8]) -> Option<RememberedClient> {
    let key = attribute(attribute(element, 1)?, 1)?.to_vec();
    let endpoint = attribute(attribute(element, 2)?, 1)?.to_vec();
    let milliseconds = u64::from_be_bytes(attribute(element, 5)?.try_into().ok()?);
    Some(RememberedClient { key, endpoint, milliseconds: milliseconds.max(1) })
}
