//! Host ports: ports of the node that lead to a pod.
//!
//! The kernel translates; no process listens. Every sandbox with host ports has a file, so that the table can be made
//! again after a restart and after somebody flushed it.

mod table;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use ferrite_netlink::{Conntrack, Error, Netns};
use ferrite_nft::{IpFamily, KernelError, OwnGenerations, Protocol, Table, Transaction, Value, octets};
use serde::{Deserialize, Serialize};

use crate::state::{sync_dir, write_atomic};
use crate::{Addresses, NetworkError};
use table::HostPortSet;
pub(crate) use table::table as whole_table;

/// The transport protocol of a host port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PortProtocol {
    Tcp,
    Udp,
    Sctp,
}

/// A port of the node that leads to a port of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostPort {
    /// The only address of the node that has it; all of them when absent, all of its family when unspecified. The loopback
    /// address of IPv6 is never one of them: the kernel takes no answer for it from a link.
    pub host_ip: Option<IpAddr>,
    pub host_port: u16,
    pub container_port: u16,
    pub protocol: PortProtocol,
}

impl HostPort {
    fn protocol(&self) -> Protocol {
        match self.protocol {
            PortProtocol::Tcp => Protocol::Tcp,
            PortProtocol::Udp => Protocol::Udp,
            PortProtocol::Sctp => Protocol::Sctp,
        }
    }
}

/// The host ports of one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Published {
    #[serde(rename = "address")]
    pub(crate) addresses: Addresses,
    pub(crate) ports: Vec<HostPort>,
}

const PURPOSE: &str = "host ports of pods";

/// The host ports of one node. The calls block on the disk and on the kernel for a moment.
pub(crate) struct HostPorts {
    dir: PathBuf,
    bridge: String,
    /// One for each family that pods have.
    tables: Vec<Table>,
    published: BTreeMap<String, Published>,
    programmed: bool,
}

impl HostPorts {
    /// Reads the published ports. The table is made with the first port and is not touched before.
    pub(crate) fn open(
        dir: PathBuf,
        bridge: &str,
        families: &[IpFamily],
        netns: &Path,
        own: &OwnGenerations,
    ) -> Result<Self, NetworkError> {
        let fail = |what| {
            let path = dir.clone();
            move |source| NetworkError::State { path, what, source }
        };
        let mut published = BTreeMap::new();
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => Some(entries),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(fail("list")(error)),
        };
        for entry in entries.into_iter().flatten() {
            let entry = entry.map_err(fail("list"))?;
            let bytes = fs::read(entry.path()).map_err(fail("read"))?;
            match (entry.file_name().into_string(), serde_json::from_slice(&bytes)) {
                (Ok(name), Ok(ports)) => drop(published.insert(name, ports)),
                // Left by an interrupted write.
                _ => fs::remove_file(entry.path()).map_err(fail("remove a stale file"))?,
            }
        }
        let open = |family: &IpFamily| {
            Table::open(*family, &table_name(bridge), Some(netns), own.clone())
                .map(|table| table.for_purpose(PURPOSE))
                .map_err(NetworkError::rules("open the table of host ports"))
        };
        let tables = families.iter().map(open).collect::<Result<_, _>>()?;
        Ok(Self { dir, bridge: bridge.to_owned(), tables, published, programmed: false })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.published.is_empty()
    }

    /// Makes the tables again as a whole.
    pub(crate) fn rebuild(&mut self) -> Result<(), NetworkError> {
        self.programmed = false;
        for table in &mut self.tables {
            let links = std::slice::from_ref(&self.bridge);
            table
                .apply(&table::table(table.family(), links, &self.published))
                .map_err(NetworkError::rules("make the table of host ports"))?;
        }
        self.programmed = true;
        Ok(())
    }

    /// Publishes the ports of a sandbox, and no others of it.
    pub(crate) fn publish(
        &mut self,
        sandbox: &str,
        addresses: Addresses,
        ports: &[HostPort],
    ) -> Result<(), NetworkError> {
        let wanted = Published { addresses, ports: ports.to_vec() };
        if self.programmed && self.published.get(sandbox) == Some(&wanted) {
            return Ok(());
        }
        let fail = |what| {
            let path = self.dir.clone();
            move |source| NetworkError::State { path, what, source }
        };
        fs::create_dir_all(&self.dir).map_err(fail("create"))?;
        let bytes = serde_json::to_vec(&wanted).map_err(|error| fail("encode")(error.into()))?;
        write_atomic(&self.dir.join(sandbox), &bytes)?;
        self.change(|published| drop(published.insert(sandbox.to_owned(), wanted)))
    }

    /// Takes the ports of a sandbox away. Answers its addresses if it had any.
    pub(crate) fn withdraw(&mut self, sandbox: &str) -> Result<Option<Addresses>, NetworkError> {
        let Some(addresses) = self.published.get(sandbox).map(|known| known.addresses) else {
            return Ok(None);
        };
        self.change(|published| drop(published.remove(sandbox)))?;
        let path = self.dir.join(sandbox);
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(NetworkError::State { path, what: "remove", source })
            }
            _ => sync_dir(&self.dir).map(|()| Some(addresses)),
        }
    }

    fn change(&mut self, with: impl FnOnce(&mut BTreeMap<String, Published>)) -> Result<(), NetworkError> {
        let families: Vec<IpFamily> = self.tables.iter().map(Table::family).collect();
        let before: Vec<_> =
            families.iter().map(|family| table::elements(*family, &self.published)).collect();
        with(&mut self.published);
        if !self.programmed {
            return self.rebuild();
        }
        let changed = |from: &BTreeMap<_, (Value, String)>, to: &BTreeMap<_, (Value, String)>| {
            let missing =
                |(key, value): &(&_, &(Value, String))| to.get(*key).map(|v| &v.0) != Some(&value.0);
            from.iter().filter(missing).map(table::element).collect::<Vec<_>>()
        };
        for (table, before) in self.tables.iter_mut().zip(before) {
            let after = table::elements(table.family(), &self.published);
            let transaction = Transaction {
                rebuild: false,
                delete: changed(&before, &after),
                chains: Vec::new(),
                add: changed(&after, &before),
            };
            if transaction.is_empty() {
                continue;
            }
            match table.apply(&transaction) {
                Ok(()) if !table.take_missed() => {}
                Ok(()) => return self.rebuild(),
                // A table that is not as expected was changed by somebody else.
                Err(error) => {
                    tracing::warn!(%error, "the table of host ports is not as expected; making it again");
                    return self.rebuild();
                }
            }
        }
        Ok(())
    }
}

pub(crate) fn table_name(bridge: &str) -> String {
    format!("ferrite-ports-{bridge}")
}

/// The host ports that lead to a pod, read back from the kernel of the node at `netns`, else of the calling thread's.
pub fn published_ports(
    bridge: &str,
    netns: Option<&Path>,
    pod: IpAddr,
) -> Result<Vec<HostPort>, KernelError> {
    let family = IpFamily::of(pod);
    let mut table = Table::open(family, &table_name(bridge), netns, OwnGenerations::default())?;
    let mut found = Vec::new();
    for set in [HostPortSet::Addressed, HostPortSet::Anywhere] {
        let ports =
            table.elements(set)?.into_iter().filter(|element| element.value.starts_with(&octets(pod)));
        found.extend(ports.filter_map(|element| table::host_port(family, set, &element.key, &element.value)));
    }
    Ok(found)
}

/// Removes tracked UDP flows to a pod that came by a host port. A client that keeps its socket would keep the entry, and
/// the entry would keep the client at an address that another pod gets.
pub(crate) fn forget_flows(host: Option<&Netns>, pod: Addresses) -> Result<(), Error> {
    let mut tracked = Conntrack::open(host)?;
    for flow in tracked.udp_flows()? {
        let from = pod.iter().find(|pod| flow.reply.source.0 == **pod);
        if from.is_some_and(|pod| flow.original.destination.0 != *pod) {
            // It may have expired by itself.
            tracked.delete(&flow)?;
        }
    }
    Ok(())
}

impl NetworkError {
    pub(crate) fn rules(what: &'static str) -> impl FnOnce(KernelError) -> Self {
        move |source| Self::Rules { what, source: Box::new(source) }
    }
}
