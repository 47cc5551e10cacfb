//! Reads back from the kernel where its table sends packets to Services.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;

use ferrite_nft::{IpFamily, KernelError, Key, OwnGenerations, Protocol, RawElement, Table};

use crate::layout::SetName;
use crate::model::EndpointAddress;

/// Where packets to an address go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// To one of the endpoints, which this chain chooses.
    Endpoints { chain: String, endpoints: Vec<EndpointAddress> },
    /// The client gets a rejection.
    Rejected,
    /// Nothing is said to the client.
    Dropped,
    /// The table does not know the address.
    Unknown,
}

/// Class and id of a service port.
type ClassAndId = (u32, Vec<u8>);

/// The table of one family, at one moment.
#[derive(Debug)]
pub struct TableView {
    family: IpFamily,
    services: BTreeMap<Vec<u8>, ClassAndId>,
    node_ports: HashMap<Vec<u8>, ClassAndId>,
    chains: HashMap<u32, String>,
    endpoints: HashMap<Vec<u8>, Vec<EndpointAddress>>,
    refused: HashMap<SetName, HashSet<Vec<u8>>>,
}

fn number(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?))
}

fn address(family: IpFamily, bytes: &[u8]) -> Option<IpAddr> {
    match family {
        IpFamily::V4 => Some(IpAddr::from(<[u8; 4]>::try_from(bytes.get(..4)?).ok()?)),
        IpFamily::V6 => Some(IpAddr::from(<[u8; 16]>::try_from(bytes.get(..16)?).ok()?)),
    }
}

fn port(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(..2)?.try_into().ok()?))
}

fn class_and_id(element: &RawElement) -> Option<ClassAndId> {
    Some((number(&element.value)?, element.value.get(4..12)?.to_vec()))
}

impl TableView {
    /// Reads the table in the network namespace at `netns`, else in that of the calling thread; `None` if there is none.
    pub fn read(family: IpFamily, table: &str, netns: Option<&Path>) -> Result<Option<Self>, KernelError> {
        let length = usize::from(family.bits() / 8);
        let mut table = Table::open(family, table, netns, OwnGenerations::default())?;
        if !table.exists()? {
            return Ok(None);
        }
        let mut endpoints: HashMap<Vec<u8>, Vec<EndpointAddress>> = HashMap::new();
        for element in table.elements(SetName::Endpoints)? {
            let value = &element.value;
            let found = address(family, value).zip(value.get(length..).and_then(port));
            if let (Some(id), Some((ip, port))) = (element.key.get(..8), found) {
                endpoints.entry(id.to_vec()).or_default().push(EndpointAddress { ip, port });
            }
        }
        for list in endpoints.values_mut() {
            list.sort();
            // Endpoints of this node are in there for both policies.
            list.dedup();
        }
        let mut refused = HashMap::new();
        for set in
            [SetName::RejectServices, SetName::DropServices, SetName::RejectNodePorts, SetName::DropNodePorts]
        {
            refused.insert(set, table.elements(set)?.into_iter().map(|element| element.key).collect());
        }
        let by_key = |elements: Vec<RawElement>| {
            elements.into_iter().filter_map(|element| Some((element.key.clone(), class_and_id(&element)?)))
        };
        Ok(Some(Self {
            family,
            services: by_key(table.elements(SetName::ServiceIps)?).collect(),
            node_ports: by_key(table.elements(SetName::ServiceNodePorts)?).collect(),
            chains: table
                .elements(SetName::Classes)?
                .into_iter()
                .filter_map(|element| Some((number(&element.key)?, element.chain?)))
                .collect(),
            endpoints,
            refused,
        }))
    }

    /// Packets to an address and port of a Service.
    pub fn service(&self, ip: IpAddr, protocol: Protocol, port: u16) -> Way {
        let key = Key::service(ip, protocol, port);
        self.way(self.services.get(key.first()), key.first(), SetName::RejectServices, SetName::DropServices)
    }

    /// Packets to a node port.
    pub fn node_port(&self, protocol: Protocol, port: u16) -> Way {
        let key = Key::node_port(protocol, port);
        self.way(
            self.node_ports.get(key.first()),
            key.first(),
            SetName::RejectNodePorts,
            SetName::DropNodePorts,
        )
    }

    fn way(&self, found: Option<&ClassAndId>, key: &[u8], reject: SetName, drop: SetName) -> Way {
        let is_in = |set: SetName| self.refused.get(&set).is_some_and(|keys| keys.contains(key));
        match found {
            Some((class, id)) => Way::Endpoints {
                chain: self.chains.get(class).cloned().unwrap_or_default(),
                endpoints: self.endpoints.get(id).cloned().unwrap_or_default(),
            },
            None if is_in(reject) => Way::Rejected,
            None if is_in(drop) => Way::Dropped,
            None => Way::Unknown,
        }
    }

    /// The addresses of Services that lead to an endpoint's address.
    pub fn leading_to(&self, endpoint: IpAddr) -> Vec<(IpAddr, u16)> {
        let leads = |(_, id): &ClassAndId| {
            self.endpoints.get(id).is_some_and(|list| list.iter().any(|known| known.ip == endpoint))
        };
        let services = self.services.iter().filter(|(_, found)| leads(found));
        // A protocol is between address and port.
        let at = usize::from(self.family.bits() / 8) + 4;
        services.filter_map(|(key, _)| Some((address(self.family, key)?, port(key.get(at..)?)?))).collect()
    }
}
