//! One table in the kernel, through netlink. The calls block for as long as the kernel works on them.

mod monitor;
mod ruleset;
mod wire;

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use ferrite_netlink::{Attributes, ERROR, Error, Netns, Protocol, Socket, refusal};

use self::wire::{ElementChange, ElementList, Messages};
use crate::{Element, IpFamily, SetId, Transaction};

pub use monitor::{Change, Monitor};
pub use ruleset::{BaseChain, Batch, ChainEntry, RuleEntry, Ruleset, TableEntry};

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

/// The generations of the ruleset that our own transactions made. A [`Monitor`] uses it to find changes by
/// others.
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

    /// Returns true if we made the generation, and forgets it.
    fn take(&self, generation: u32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&generation)
    }
}

/// An element that a rule added to a set, as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpiringElement<S> {
    pub set: S,
    key: Vec<u8>,
    value: Vec<u8>,
    milliseconds: u64,
}

/// Takes elements one by one.
pub type TakeElement<'a, S> = &'a mut dyn FnMut(Element<S>);

/// The elements of a large table. They go from the owner's data into messages one by one: a list of them would be the
/// table's largest copy.
pub struct MoreElements<'a, S> {
    /// The number of elements, or an estimate.
    pub count: usize,
    /// Calls its argument with every element. Neighbours should be of one set, because they share a message. None may
    /// refer to a chain.
    pub each: &'a dyn Fn(TakeElement<'_, S>),
    /// Elements that rules had added to the table that was there before.
    pub expiring: &'a [ExpiringElement<S>],
}

/// The table of one family.
pub struct Table {
    socket: Socket,
    family: IpFamily,
    name: String,
    /// For people who list the table.
    purpose: &'static str,
    own: OwnGenerations,
    /// The kernel's number for the table that we made; another number is another table.
    handle: Option<u64>,
    /// A generation that turned out to be somebody else's was taken for ours: its changes went unnoticed.
    missed: bool,
}

/// Elements of one commit while a table is made that does not exist. The kernel has four megabytes of notices then.
const STAGE_ELEMENTS: usize = 1024;
/// Attempts of a transaction while others change the ruleset in between.
const ATTEMPTS: usize = 16;
/// The ruleset is at another generation than the transaction says.
const RESTART: i32 = 85;

impl Table {
    /// Opens a socket in the network namespace at `netns`, else in that of the calling thread. Nothing is made yet.
    pub fn open(
        family: IpFamily,
        name: &str,
        netns: Option<&Path>,
        own: OwnGenerations,
    ) -> Result<Self, KernelError> {
        let open = || {
            let netns = netns.map(Netns::from_path).transpose()?;
            Socket::open(Protocol::Netfilter, netns.as_ref())
        };
        let socket = open()
            .map_err(|error| KernelError::Open { netns: netns.map(Path::to_owned), source: error.into() })?;
        Ok(Self { socket, family, name: name.to_owned(), purpose: "", own, handle: None, missed: false })
    }

    /// The table's comment, for people who list it.
    #[must_use]
    pub fn for_purpose(self, purpose: &'static str) -> Self {
        Self { purpose, ..self }
    }

    pub fn family(&self) -> IpFamily {
        self.family
    }

    /// Makes all changes of the transaction, or none.
    pub fn apply<S: SetId>(&mut self, transaction: &Transaction<S>) -> Result<(), KernelError> {
        self.apply_with(transaction, &MoreElements { count: 0, each: &|_| {}, expiring: &[] })
    }

    /// Makes all changes of the transaction, or none, and adds elements that the transaction does not list.
    pub fn apply_with<S: SetId>(
        &mut self,
        transaction: &Transaction<S>,
        more: &MoreElements<'_, S>,
    ) -> Result<(), KernelError> {
        // A table without hooks does nothing, so it can be filled in parts. One that is there is replaced at once.
        if transaction.rebuild
            && more.count > STAGE_ELEMENTS
            && self.find().map_err(self.failed("read"))?.is_none()
        {
            // A failure means that somebody interfered. The whole is then made at once, whatever is there.
            if self.make_in_stages(transaction, more).is_ok() {
                return Ok(());
            }
        }
        let purpose = self.purpose;
        self.commit(|messages| {
            messages.reserve_elements(transaction.add.len() + more.count);
            messages.transaction(purpose, transaction);
            let mut list = ElementList::new(messages, ElementChange::Add);
            (more.each)(&mut |element| list.push(&element));
            more.expiring.iter().for_each(|element| list.push_expiring(element));
            list.finish();
        })
        .map_err(self.failed("change"))?;
        if transaction.rebuild {
            self.handle = self.find().map_err(self.failed("read"))?;
        }
        Ok(())
    }

    /// Makes a table that does not exist in several commits. The chains come last, so that the table takes effect at
    /// once.
    ///
    /// Of every new element the kernel writes a notice, each in a page of its own, and keeps them until the commit is
    /// over. Those of a large table would be hundreds of megabytes; a part of them is the same few megabytes again and
    /// again.
    fn make_in_stages<S: SetId>(
        &mut self,
        transaction: &Transaction<S>,
        more: &MoreElements<'_, S>,
    ) -> io::Result<()> {
        let purpose = self.purpose;
        self.commit(|messages| {
            messages.begin();
            messages.table_that_is_new(purpose);
            messages.all_sets::<S>();
        })?;
        let mut stage: Vec<Element<S>> = Vec::with_capacity(STAGE_ELEMENTS);
        let mut result = Ok(());
        (more.each)(&mut |element| {
            stage.push(element);
            if stage.len() == STAGE_ELEMENTS {
                result = std::mem::replace(&mut result, Ok(())).and_then(|()| self.add(&stage));
                stage.clear();
            }
        });
        result?;
        self.add(&stage)?;
        drop(stage);
        self.commit(|messages| {
            messages.begin();
            messages.chains_and_elements(transaction);
            let mut list = ElementList::new(messages, ElementChange::Add);
            more.expiring.iter().for_each(|element| list.push_expiring(element));
            list.finish();
        })?;
        self.handle = self.find()?;
        Ok(())
    }

    fn add<S: SetId>(&mut self, elements: &[Element<S>]) -> io::Result<()> {
        if elements.is_empty() {
            return Ok(());
        }
        self.commit(|messages| {
            messages.reserve_elements(elements.len());
            messages.begin();
            messages.elements(ElementChange::Add, elements);
        })
    }

    /// Returns true if somebody else may have changed the table unnoticed by the monitor, and resets the
    /// mark.
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
            messages.new_table("");
            messages.delete_table();
        })
        .map_err(self.failed("delete"))
    }

    /// Returns true if a table of this name exists, whoever made it.
    pub fn exists(&mut self) -> Result<bool, KernelError> {
        Ok(self.find().map_err(self.failed("read"))?.is_some())
    }

    /// Returns true if the table that we made still exists.
    pub fn is_ours(&mut self) -> Result<bool, KernelError> {
        let found = self.find().map_err(self.failed("read"))?;
        Ok(found.is_some() && found == self.handle)
    }

    /// The elements that rules added to a set; none if there is no table.
    pub fn expiring_elements<S: SetId>(&mut self, set: S) -> Result<Vec<ExpiringElement<S>>, KernelError> {
        self.elements_as(set, |element| expiring(set, element))
    }

    /// Key and value of all elements of a set, as bytes; none if there is no table. Ranges come as their ends.
    pub fn elements<S: SetId>(&mut self, set: S) -> Result<Vec<RawElement>, KernelError> {
        self.elements_as(set, raw)
    }

    fn elements_as<S: SetId, T>(
        &mut self,
        set: S,
        parse: impl Fn(Attributes<'_>) -> Option<T>,
    ) -> Result<Vec<T>, KernelError> {
        let mut messages = self.messages();
        messages.get_elements(set);
        let listed = self.request(messages, |message| {
            let list = message.nested(3)?;
            Some(list.iter().filter_map(|(_, element)| parse(Attributes::new(element))).collect::<Vec<_>>())
        });
        match listed {
            Ok(parts) => Ok(parts.into_iter().flatten().collect()),
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOENT) => Ok(Vec::new()),
            Err(error) => Err(self.failed("read")(error)),
        }
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(io::Error) -> KernelError + use<> {
        let table = self.name.clone();
        move |source| KernelError::Table { what, table, source }
    }

    fn messages(&self) -> Messages {
        Messages::new(self.family.into(), &self.name, self.socket.sequence())
    }

    fn find(&mut self) -> io::Result<Option<u64>> {
        let mut messages = self.messages();
        messages.get_table();
        let handle = |table: Attributes<'_>| Some(u64::from_be_bytes(table.get(4)?.try_into().ok()?));
        match self.request(messages, handle) {
            Ok(found) => Ok(found.into_iter().next()),
            Err(error) if error.raw_os_error() == Some(nix::libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends one question and reads its answers.
    fn request<T>(
        &mut self,
        messages: Messages,
        parse: impl Fn(Attributes<'_>) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let answers = self
            .socket
            .request("read nftables", messages.into_all(), |message| parse(message.attributes(FIXED)))?;
        Ok(answers)
    }

    fn generation(&mut self) -> io::Result<u32> {
        let mut messages = self.messages();
        messages.get_generation();
        let found = self.request(messages, generation_of)?.into_iter().next();
        found.ok_or_else(|| io::Error::other("the kernel does not say the generation of its ruleset"))
    }

    /// Commits at a known generation, so that the next one is known to be ours.
    fn commit(&mut self, fill: impl Fn(&mut Messages)) -> io::Result<()> {
        let mut result = Ok(());
        for _ in 0..ATTEMPTS {
            let generation = self.generation()?;
            let first = self.socket.sequence();
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
            result = send_batch(&mut self.socket, first, messages.all()).map_err(io::Error::from);
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
}

/// Sends a transaction and waits until the kernel has made its changes, or refuses them.
fn send_batch(socket: &mut Socket, first: u32, messages: &ferrite_netlink::Messages) -> Result<(), Error> {
    const REQUEST: &str = "change nftables";
    let failed = |error| Error::Io { what: REQUEST.into(), error };
    // The end is not answered; the message before it is the last that is.
    let last = messages.next_sequence().wrapping_sub(2);
    socket.send(messages).map_err(failed)?;
    let mut refused = None;
    let received = socket.receive(|reply| {
        let ours = reply.sequence.wrapping_sub(first) <= last.wrapping_sub(first);
        if !ours || reply.kind != ERROR {
            return Ok(false);
        }
        refused = refusal(&reply);
        match &refused {
            // Answers to other messages of the transaction may follow.
            Some((errno, _)) => Err(io::Error::from_raw_os_error(*errno)),
            None => Ok(reply.sequence == last),
        }
    });
    match refused {
        Some((errno, explanation)) => Err(Error::Refused { request: REQUEST, errno, explanation }),
        None => received.map_err(failed),
    }
}

/// The length of `nfgenmsg`.
const FIXED: usize = 4;

fn generation_of(message: Attributes<'_>) -> Option<u32> {
    message.network_number(1)
}

fn expiring<S>(set: S, element: Attributes<'_>) -> Option<ExpiringElement<S>> {
    let key = element.nested(1)?.get(1)?.to_vec();
    let value = element.nested(2)?.get(1)?.to_vec();
    let milliseconds = u64::from_be_bytes(element.get(5)?.try_into().ok()?);
    Some(ExpiringElement { set, key, value, milliseconds: milliseconds.max(1) })
}

/// An element as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawElement {
    pub key: Vec<u8>,
    /// The last key of a range.
    pub last: Option<Vec<u8>>,
    /// The value of a map; empty for a set.
    pub value: Vec<u8>,
    /// The chain of a map to verdicts.
    pub chain: Option<String>,
}

fn raw(element: Attributes<'_>) -> Option<RawElement> {
    let key = element.nested(1)?.get(1)?.to_vec();
    let last = element.nested(10).and_then(|end| end.get(1)).map(<[u8]>::to_vec);
    let data = element.nested(2);
    let value = data.and_then(|data| data.get(1)).map(<[u8]>::to_vec).unwrap_or_default();
    let chain = data.and_then(|data| data.nested(2)).and_then(|verdict| verdict.text(2));
    Some(RawElement { key, last, value, chain })
}
