//! Reads back from the kernel where its table sends packets to Services.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;

use ferrite_nft::{Cidr, IpFamily, KernelError, Key, OwnGenerations, Protocol, RawElement, Table};

use crate::layout::{Choice, Policy, SetName};
use crate::model::EndpointAddress;

/// Where packets to an address go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// To one of the endpoints, which this chain chooses.
    Endpoints { chain: String, endpoints: Vec<EndpointAddress> },
    /// External policy Local: packets of pods and of this node go to any endpoint, those from outside to one on this node.
    /// Packets without an endpoint are not answered.
    Split { chain: String, inside: Vec<EndpointAddress>, outside: Vec<EndpointAddress> },
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
    /// By id, those of policy Cluster and of policy Local.
    endpoints: HashMap<Vec<u8>, Endpoints>,
    /// Addresses that only certain sources may use, with those.
    restricted: HashMap<Vec<u8>, Vec<Cidr>>,
    refused: HashMap<SetName, HashSet<Vec<u8>>>,
}

/// The endpoints of a service port by policy.
#[derive(Debug, Default)]
struct Endpoints {
    cluster: Vec<EndpointAddress>,
    local: Vec<EndpointAddress>,
}

impl Endpoints {
    fn of(&self, policy: Policy) -> &[EndpointAddress] {
        match policy {
            Policy::Cluster => &self.cluster,
            Policy::Local => &self.local,
        }
    }
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

/// The range from one address to another, if it is one of a prefix.
fn range(first: IpAddr, last: IpAddr) -> Option<Cidr> {
    let bits = IpFamily::of(first).bits();
    (0..=bits)
        .filter_map(|prefix| Cidr::new(first, prefix))
        .find(|range| range.network() == first && range.last() == last)
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
        let mut endpoints: HashMap<Vec<u8>, Endpoints> = HashMap::new();
        for element in table.elements(SetName::Endpoints)? {
            let value = &element.value;
            let found = address(family, value).zip(value.get(length..).and_then(port));
            let index = element.key.get(8..).and_then(number);
            if let (Some(id), Some(index), Some((ip, port))) = (element.key.get(..8), index, found) {
                let of_port = endpoints.entry(id.to_vec()).or_default();
                let is_local = index >= Policy::Local.first_index();
                let list = if is_local { &mut of_port.local } else { &mut of_port.cluster };
                list.push(EndpointAddress { ip, port });
            }
        }
        for of_port in endpoints.values_mut() {
            of_port.cluster.sort();
            of_port.local.sort();
        }
        let mut restricted: HashMap<Vec<u8>, Vec<Cidr>> = HashMap::new();
        for element in table.elements(SetName::FirewallIps)? {
            restricted.insert(element.key, Vec::new());
        }
        for element in table.elements(SetName::FirewallSources)? {
            let at = length + 8;
            let end = |bytes: &[u8]| bytes.get(at..).and_then(|bytes| address(family, bytes));
            let last = element.last.as_deref().and_then(end);
            let range = end(&element.key).and_then(|first| range(first, last.unwrap_or(first)));
            let sources = element.key.get(..at).and_then(|key| restricted.get_mut(key));
            if let (Some(range), Some(sources)) = (range, sources) {
                sources.push(range);
            }
        }
        restricted.values_mut().for_each(|ranges| ranges.sort());
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
            restricted,
            refused,
        }))
    }

    /// Packets to an address and port of a Service.
    pub fn service(&self, ip: IpAddr, protocol: Protocol, port: u16) -> Way {
        let key = Key::service(ip, protocol, port);
        self.way(self.services.get(key.first()), key.first(), SetName::RejectServices, SetName::DropServices)
    }

    /// The sources that may use an address; `None` if all may.
    pub fn sources(&self, ip: IpAddr, protocol: Protocol, port: u16) -> Option<&[Cidr]> {
        self.restricted.get(Key::service(ip, protocol, port).first()).map(Vec::as_slice)
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
            Some((class, id)) => {
                let chain = self.chains.get(class).cloned().unwrap_or_default();
                let endpoints = self.endpoints.get(id);
                let list = |policy: Option<Policy>| {
                    let list = policy.zip(endpoints).map(|(policy, endpoints)| endpoints.of(policy));
                    list.unwrap_or_default().to_vec()
                };
                match Choice::of_chain(&chain) {
                    Some(Choice::Split { inside, outside }) => {
                        Way::Split { chain, inside: list(inside), outside: list(outside) }
                    }
                    Some(Choice::All(policy)) => Way::Endpoints { chain, endpoints: list(Some(policy)) },
                    None => Way::Unknown,
                }
            }
            None if is_in(reject) => Way::Rejected,
            None if is_in(drop) => Way::Dropped,
            None => Way::Unknown,
        }
    }

    /// The addresses of Services that lead to an endpoint's address.
    pub fn leading_to(&self, endpoint: IpAddr) -> Vec<(IpAddr, u16)> {
        let leads = |(_, id): &ClassAndId| {
            self.endpoints.get(id).is_some_and(|of_port| {
                of_port.cluster.iter().chain(&of_port.local).any(|known| known.ip == endpoint)
            })
        };
        let services = self.services.iter().filter(|(_, found)| leads(found));
        // A protocol is between address and port.
        let at = usize::from(self.family.bits() / 8) + 4;
        services.filter_map(|(key, _)| Some((address(self.family, key)?, port(key.get(at..)?)?))).collect()
    }
}
