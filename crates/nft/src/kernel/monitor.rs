//! Notices when somebody else changes our tables.

use std::path::{Path, PathBuf};

use nlink::netlink::{NetlinkSocket, Protocol};

use super::socket::{attribute, messages};
use super::wire::{NEW_GENERATION, SUBSYSTEM};
use super::{KernelError, OwnGenerations, generation_of};

/// The multicast group with all changes of rulesets.
const NFTABLES_GROUP: u32 = 7;
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
    socket: NetlinkSocket,
    table: Vec<u8>,
    own: OwnGenerations,
    /// The notices of one transaction come before its generation.
    touched: bool,
}

impl Monitor {
    /// Listens in the network namespace at `netns`, else in that of the calling thread.
    pub fn open(table: &str, netns: Option<&Path>, own: OwnGenerations) -> Result<Self, KernelError> {
        let failed = |error: nlink::Error| KernelError::Open {
            netns: netns.map(PathBuf::from),
            source: std::io::Error::other(error),
        };
        let socket = match netns {
            None => NetlinkSocket::new(Protocol::Netfilter),
            Some(path) => NetlinkSocket::new_in_namespace_path(Protocol::Netfilter, path),
        };
        let socket = socket.map_err(failed)?;
        socket.set_rcvbuf(BUFFER_BYTES).map_err(failed)?;
        socket.add_membership(NFTABLES_GROUP).map_err(failed)?;
        let table = [table.as_bytes(), &[0]].concat();
        Ok(Self { socket, table, own, touched: false })
    }

    /// Waits for a change that is not our own. May be dropped while it waits.
    pub async fn changed(&mut self) -> Change {
        loop {
            let Ok(bytes) = self.socket.recv_msg().await else {
                self.touched = false;
                return Change::Unknown;
            };
            for message in messages(&bytes).filter(|message| message.kind >> 8 == SUBSYSTEM) {
                let body = message.body.get(4..).unwrap_or_default();
                if message.kind & 0xff != u16::from(NEW_GENERATION) {
                    // The first attribute of tables, chains, rules, sets and elements is the name of the table.
                    self.touched |= attribute(body, 1) == Some(&self.table);
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
