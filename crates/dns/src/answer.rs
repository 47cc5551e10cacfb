//! From a query to a response, as CoreDNS's `kubernetes` plugin does with kubeadm's Corefile.

use std::net::IpAddr;

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::rdata::{A, AAAA, CNAME, NS, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record, RecordType};

use crate::records::{Found, Index, Item, NameError, Owner, Request, Wanted};
use crate::wire::{Query, Response};

/// TTL of all records of the cluster.
pub const TTL: u32 = 30;
/// TTL of the record with the version of the specification.
const VERSION_TTL: u32 = 28_800;
/// The version of the Kubernetes DNS specification.
const SCHEMA_VERSION: &str = "1.1.0";
/// Aliases of aliases are followed this often.
const MAX_ALIASES: usize = 8;

/// The Service of the DNS server itself.
pub const DNS_NAMESPACE: &str = "kube-system";
pub const DNS_SERVICE: &str = "kube-dns";

/// The zone that the cluster owns.
#[derive(Debug, Clone)]
pub struct Zone {
    /// Lower case, ends with the root.
    name: Name,
    labels: usize,
    /// Where the server listens, for the zone's NS record while there is no Service of it.
    pub servers: Vec<IpAddr>,
}

/// A cluster domain that is no domain name.
#[derive(Debug, thiserror::Error)]
#[error("{domain:?} is no domain name")]
pub struct BadDomain {
    domain: String,
    #[source]
    source: hickory_proto::ProtoError,
}

/// Reads a name that needs no dot at its end.
pub fn domain_name(text: &str) -> Result<Name, BadDomain> {
    let mut name = Name::from_ascii(text)
        .map_err(|source| BadDomain { domain: text.to_owned(), source })?
        .to_lowercase();
    name.set_fqdn(true);
    Ok(name)
}

impl Zone {
    pub fn new(domain: &str, servers: Vec<IpAddr>) -> Result<Self, BadDomain> {
        let name = domain_name(domain)?;
        Ok(Self { labels: usize::from(name.num_labels()), name, servers })
    }

    pub fn owns(&self, name: &Name) -> bool {
        self.name.zone_of(name)
    }
}

/// The decision of the pure part.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    Local(Response),
    /// The name is an alias of one that others know: their answers follow these records.
    Alias {
        records: Vec<Record>,
        target: Name,
    },
    /// The name is not the cluster's.
    Forward,
}

/// The inputs of an answer besides the query.
#[derive(Debug, Clone, Copy)]
pub struct Context<'a> {
    pub zone: &'a Zone,
    pub index: &'a Index,
    /// True if the index is complete. Until then a name that is not found may exist.
    pub synced: bool,
    /// The zone's serial number.
    pub serial: u32,
    /// Rotates addresses, so that clients that take the first one spread.
    pub turn: usize,
}

impl Context<'_> {
    pub fn answer(&self, query: &Query) -> Answer {
        if self.zone.owns(&query.name) {
            return self.in_zone(query);
        }
        if query.kind == RecordType::PTR
            && let Some(ip) = reverse_address(&query.name)
        {
            let names = self.index.names_of(ip);
            if !names.is_empty() {
                let record = |owner| self.record(&query.name, RData::PTR(PTR(self.owner_name(owner))));
                return Answer::Local(found(names.iter().map(record).collect(), Vec::new()));
            }
        }
        Answer::Forward
    }

    fn in_zone(&self, query: &Query) -> Answer {
        let lower = query.name.to_lowercase();
        let at_apex = lower.num_labels() as usize == self.zone.labels;
        let mut labels = Vec::with_capacity(6);
        for label in lower.iter().take(lower.iter().count() - self.zone.labels) {
            let Ok(label) = std::str::from_utf8(label) else { return self.name_error(query) };
            labels.push(label);
        }
        match (query.kind, labels.as_slice()) {
            (RecordType::TXT, ["dns-version"]) => {
                let text = RData::TXT(TXT::new(vec![SCHEMA_VERSION.to_owned()]));
                let record = Record::from_rdata(query.name.clone(), VERSION_TTL, text);
                return Answer::Local(found(vec![record], Vec::new()));
            }
            (_, ["dns-version"]) => return self.no_data(query),
            (RecordType::SOA, _) if at_apex => {
                return Answer::Local(found(vec![self.soa(query)], Vec::new()));
            }
            (RecordType::NS, _) if at_apex => return self.name_servers(query),
            (kind, ["ns", "dns"]) => {
                let (_, addresses) = self.dns_service();
                let records = self.addresses(&query.name, kind, addresses);
                return self.records_or_no_data(query, records, Vec::new());
            }
            // The parent of a name that exists.
            (_, ["dns"]) => return self.no_data(query),
            _ => {}
        }
        let wanted = match query.kind {
            RecordType::SRV => Wanted::Ports,
            _ => Wanted::Addresses,
        };
        match self.index.find(Request::parse(&labels), wanted) {
            Err(NameError) => self.name_error(query),
            Ok(Found::Alias(target)) => self.alias(query, &target),
            Ok(Found::Items(items)) if query.kind == RecordType::SRV => {
                // The labels of the port and the protocol are no part of the target's name.
                let service = labels.get(labels.len().saturating_sub(3)..).unwrap_or_default();
                let (answers, additionals) = self.srv(query, service, &items);
                self.records_or_no_data(query, answers, additionals)
            }
            Ok(Found::Items(items)) => {
                let records = self.addresses(&query.name, query.kind, items.iter().map(|item| item.ip));
                self.records_or_no_data(query, records, Vec::new())
            }
        }
    }

    /// An ExternalName Service. Names of the cluster are followed here, others by the forwarder.
    fn alias(&self, query: &Query, target: &str) -> Answer {
        let mut records = Vec::new();
        let mut owner = query.name.clone();
        let mut target = target.to_owned();
        loop {
            let Ok(name) = domain_name(&target) else { return self.no_data(query) };
            let seen = records.iter().any(|record: &Record| record.name == name);
            if name == owner || seen || records.len() >= MAX_ALIASES {
                return self.no_data(query);
            }
            records.push(self.record(&owner, RData::CNAME(CNAME(name.clone()))));
            match query.kind {
                RecordType::CNAME => return Answer::Local(found(records, Vec::new())),
                RecordType::A | RecordType::AAAA => {}
                _ => return self.no_data(query),
            }
            if !self.zone.owns(&name) {
                return Answer::Alias { records, target: name };
            }
            let lower = name.to_lowercase();
            let labels: Option<Vec<&str>> = lower
                .iter()
                .take(lower.iter().count() - self.zone.labels)
                .map(|label| std::str::from_utf8(label).ok())
                .collect();
            match self.index.find(Request::parse(&labels.unwrap_or_default()), Wanted::Addresses) {
                Ok(Found::Items(items)) => {
                    let addresses = self.addresses(&name, query.kind, items.iter().map(|item| item.ip));
                    // As CoreDNS: an alias that leads nowhere is not shown.
                    if addresses.is_empty() {
                        return self.no_data(query);
                    }
                    records.extend(addresses);
                    return Answer::Local(found(records, Vec::new()));
                }
                Ok(Found::Alias(next)) => {
                    target = next.into_string();
                    owner = name;
                }
                Err(NameError) => return self.no_data(query),
            }
        }
    }

    fn srv(&self, query: &Query, service: &[&str], items: &[Item]) -> (Vec<Record>, Vec<Record>) {
        let (mut answers, mut additionals) = (Vec::new(), Vec::new());
        // All items have one priority and share a weight of 100.
        let weight = u16::try_from(100 / items.len().max(1)).unwrap_or(1).max(1);
        let (mut targets, mut addresses) =
            (std::collections::HashSet::new(), std::collections::HashSet::new());
        for item in items {
            let Some(port) = item.port else { continue };
            let labels = item.endpoint.as_deref().into_iter().chain(service.iter().copied());
            let Some(target) = self.name_in_zone(labels) else { continue };
            if targets.insert((item.endpoint.as_deref(), port)) {
                let srv = SRV::new(0, weight, port, target.clone());
                answers.push(self.record(&query.name, RData::SRV(srv)));
            }
            if addresses.insert((item.endpoint.as_deref(), item.ip)) {
                additionals.push(self.record(&target, address(item.ip)));
            }
        }
        (answers, additionals)
    }

    /// Each address of the type that was asked for once, beginning somewhere else every time.
    fn addresses(&self, name: &Name, kind: RecordType, ips: impl IntoIterator<Item = IpAddr>) -> Vec<Record> {
        let mut seen = std::collections::HashSet::new();
        let wanted = |ip: &IpAddr| match kind {
            RecordType::A => ip.is_ipv4(),
            RecordType::AAAA => ip.is_ipv6(),
            _ => false,
        };
        let mut ips: Vec<IpAddr> = ips.into_iter().filter(wanted).filter(|ip| seen.insert(*ip)).collect();
        if !ips.is_empty() {
            let turn = self.turn % ips.len();
            ips.rotate_left(turn);
        }
        ips.into_iter().map(|ip| self.record(name, address(ip))).collect()
    }

    fn name_servers(&self, query: &Query) -> Answer {
        let (name, addresses) = self.dns_service();
        let Some(name) = name else { return self.no_data(query) };
        let additionals = addresses.into_iter().map(|ip| self.record(&name, address(ip))).collect();
        let record = self.record(&query.name, RData::NS(NS(name)));
        Answer::Local(found(vec![record], additionals))
    }

    /// The server's own name and addresses: those of its Service, else where it listens.
    fn dns_service(&self) -> (Option<Name>, Vec<IpAddr>) {
        let ips = self.index.cluster_ips(DNS_NAMESPACE, DNS_SERVICE);
        if ips.is_empty() {
            return (self.name_in_zone(["ns", "dns"]), self.zone.servers.clone());
        }
        (self.name_in_zone([DNS_SERVICE, DNS_NAMESPACE, "svc"]), ips.to_vec())
    }

    fn records_or_no_data(&self, query: &Query, answers: Vec<Record>, additionals: Vec<Record>) -> Answer {
        if answers.is_empty() { self.no_data(query) } else { Answer::Local(found(answers, additionals)) }
    }

    fn no_data(&self, query: &Query) -> Answer {
        Answer::Local(self.negative(query, ResponseCode::NoError))
    }

    fn name_error(&self, query: &Query) -> Answer {
        let code = if self.synced { ResponseCode::NXDomain } else { ResponseCode::ServFail };
        Answer::Local(self.negative(query, code))
    }

    fn negative(&self, query: &Query, code: ResponseCode) -> Response {
        Response { authoritative: true, authorities: vec![self.soa(query)], ..Response::code(code) }
    }

    fn soa(&self, query: &Query) -> Record {
        let zone = query.name.trim_to(self.zone.labels);
        let below = |prefix: &Name| prefix.clone().append_domain(&zone).unwrap_or_else(|_| zone.clone());
        let mname = Name::from_labels(["ns", "dns"]).unwrap_or_default();
        let rname = Name::from_labels(["hostmaster"]).unwrap_or_default();
        let soa = SOA::new(below(&mname), below(&rname), self.serial, 7200, 1800, 86_400, TTL);
        self.record(&zone, RData::SOA(soa))
    }

    fn owner_name(&self, owner: &Owner) -> Name {
        let labels = owner.endpoint.as_deref().into_iter().chain([&*owner.service, &*owner.namespace, "svc"]);
        self.name_in_zone(labels).unwrap_or_else(|| self.zone.name.clone())
    }

    /// None for names that are too long to exist.
    fn name_in_zone<'a>(&self, labels: impl IntoIterator<Item = &'a str>) -> Option<Name> {
        let mut name = Name::new();
        for label in labels {
            name = name.append_label(label.as_bytes()).ok()?;
        }
        name.append_domain(&self.zone.name).ok()
    }

    fn record(&self, name: &Name, data: RData) -> Record {
        Record::from_rdata(name.clone(), TTL, data)
    }
}

fn found(answers: Vec<Record>, additionals: Vec<Record>) -> Response {
    Response { authoritative: true, answers, additionals, ..Response::code(ResponseCode::NoError) }
}

fn address(ip: IpAddr) -> RData {
    match ip {
        IpAddr::V4(ip) => RData::A(A(ip)),
        IpAddr::V6(ip) => RData::AAAA(AAAA(ip)),
    }
}

/// The whole address in a name below `in-addr.arpa` or `ip6.arpa`.
fn reverse_address(name: &Name) -> Option<IpAddr> {
    let network = name.parse_arpa_name().ok()?;
    (network.prefix_len() == network.max_prefix_len()).then(|| network.addr())
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
