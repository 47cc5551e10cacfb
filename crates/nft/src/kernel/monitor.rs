//! Notices when somebody else changes our tables.

use std::path::{Path, PathBuf};

use ferrite_netlink::{EventSocket, Netns, Protocol, messages};

use super::wire::{NEW_GENERATION, SUBSYSTEM};
use super::{KernelError, OwnGenerations, generation_of};

/// The bit of the multicast group with all changes of rulesets.
const NFTABLES_GROUP: u32 = 1 << 6;
/// Room for the notices of a large transaction of our own.
const BUFFER_BYTES: usize = 8 * 1024 * 1024;

/// A change that the monitor saw.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Somebody else changed our table.
    Foreign,
    /// Notices were lost: anything may have changed.
    Unknown,
}

/// Reads the kernel's notices.
pub struct Monitor {
    socket: EventSocket,
    /// Decides by the name of a table.
    follows: Box<dyn Fn(&str) -> bool + Send + Sync>,
    own: OwnGenerations,
    /// The notices of one transaction come before its generation.
    touched: bool,
}

impl Monitor {
    /// Listens in the network namespace at `netns`, else in that of the calling thread.
    pub fn open(table: &str, netns: Option<&Path>, own: OwnGenerations) -> Result<Self, KernelError> {
        let table = table.to_owned();
        Self::open_all(move |name| name == table, netns, own)
    }

    /// [`open`](Self::open), for all tables whose names `follows` accepts.
    pub fn open_all(
        follows: impl Fn(&str) -> bool + Send + Sync + 'static,
        netns: Option<&Path>,
        own: OwnGenerations,
    ) -> Result<Self, KernelError> {
        let open = || {
            let netns = netns.map(Netns::from_path).transpose()?;
            EventSocket::open(Protocol::Netfilter, netns.as_ref(), NFTABLES_GROUP, BUFFER_BYTES)
        };
        let socket = open()
            .map_err(|error| KernelError::Open { netns: netns.map(PathBuf::from), source: error.into() })?;
        Ok(Self { socket, follows: Box::new(follows), own, touched: false })
    }

    /// Waits for a change that is not our own. May be dropped while it waits.
    pub async fn changed(&mut self) -> Change {
        loop {
            let Ok(Some(bytes)) = self.socket.receive().await else {
                self.touched = false;
                return Change::Unknown;
            };
            for message in messages(bytes).filter(|message| message.kind >> 8 == SUBSYSTEM) {
                let body = message.attributes(4);
                if message.kind & 0xff != u16::from(NEW_GENERATION) {
                    // The first attribute of tables, chains, rules, sets and elements is the name of the table.
                    self.touched |= body.get(1).and_then(name).is_some_and(|table| (self.follows)(table));
                    continue;
                }
                let touched = std::mem::take(&mut self.touched);
                let own = generation_of(body).is_some_and(|generation| self.own.take(generation));
                if touched && !own {
                    return Change::Foreign;
                }
            }
        }
    }
}

/// A name of the kernel ends with a zero byte.
fn name(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes.split(|byte| *byte == 0).next()?).ok()
}
