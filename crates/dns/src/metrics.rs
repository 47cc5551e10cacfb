//! Counters, named as CoreDNS's.

use std::fmt::Write;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;

/// The transport of a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    Udp,
    Tcp,
}

/// Types that are counted by name; the others are one, as in CoreDNS.
const TYPES: [(RecordType, &str); 9] = [
    (RecordType::A, "A"),
    (RecordType::AAAA, "AAAA"),
    (RecordType::SRV, "SRV"),
    (RecordType::PTR, "PTR"),
    (RecordType::CNAME, "CNAME"),
    (RecordType::TXT, "TXT"),
    (RecordType::MX, "MX"),
    (RecordType::SOA, "SOA"),
    (RecordType::NS, "NS"),
];
const OTHER: usize = TYPES.len();
const PROTOCOLS: [&str; 2] = ["udp", "tcp"];
const FAMILIES: [&str; 2] = ["1", "2"];
const CODES: [(ResponseCode, &str); 6] = [
    (ResponseCode::NoError, "NOERROR"),
    (ResponseCode::FormErr, "FORMERR"),
    (ResponseCode::ServFail, "SERVFAIL"),
    (ResponseCode::NXDomain, "NXDOMAIN"),
    (ResponseCode::NotImp, "NOTIMP"),
    (ResponseCode::Refused, "REFUSED"),
];

/// The server's counters.
#[derive(Debug, Default)]
pub struct Metrics {
    requests: [[[AtomicU64; OTHER + 1]; 2]; 2],
    responses: [AtomicU64; CODES.len() + 1],
    pub cache_hits: AtomicU64,
    pub cache_misses: AtomicU64,
    /// Packets and connections of clients that are not in the ranges.
    pub refused_clients: AtomicU64,
    /// Queries that found no room to wait for a resolver.
    pub too_many: AtomicU64,
}

pub fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Metrics {
    pub fn request(&self, transport: Transport, client: IpAddr, kind: RecordType) {
        let kind = TYPES.iter().position(|(k, _)| *k == kind).unwrap_or(OTHER);
        let family = usize::from(client.is_ipv6());
        count(&self.requests[transport as usize][family][kind]);
    }

    pub fn response(&self, code: ResponseCode) {
        let code = CODES.iter().position(|(c, _)| *c == code).unwrap_or(CODES.len());
        count(&self.responses[code]);
    }

    /// The text format of Prometheus. Series that are still zero are left out.
    pub fn render(&self, cached: (usize, usize)) -> String {
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let server = "server=\"dns://:53\"";
        let mut requests = Vec::new();
        for (p, protocol) in PROTOCOLS.iter().enumerate() {
            for (f, family) in FAMILIES.iter().enumerate() {
                for (k, counter) in self.requests[p][f].iter().enumerate() {
                    let kind = TYPES.get(k).map_or("other", |(_, name)| name);
                    let labels = format!(
                        "family=\"{family}\",proto=\"{protocol}\",{server},type=\"{kind}\",view=\"\",zone=\".\""
                    );
                    requests.push((labels, value(counter)));
                }
            }
        }
        let response = |(n, counter): (usize, &AtomicU64)| {
            let code = CODES.get(n).map_or("OTHER", |(_, name)| name);
            (format!("plugin=\"\",rcode=\"{code}\",{server},view=\"\",zone=\".\""), value(counter))
        };
        let entries = |kind: &str, count: usize| {
            (
                format!("{server},type=\"{kind}\",view=\"\",zones=\".\""),
                u64::try_from(count).unwrap_or(u64::MAX),
            )
        };
        let all = format!("{server},view=\"\",zones=\".\"");
        let (hits, misses) = (value(&self.cache_hits), value(&self.cache_misses));
        let families = [
            ("coredns_dns_requests_total", "counter", requests),
            (
                "coredns_dns_responses_total",
                "counter",
                self.responses.iter().enumerate().map(response).collect(),
            ),
            (
                "coredns_cache_entries",
                "gauge",
                vec![entries("success", cached.0), entries("denial", cached.1)],
            ),
            ("coredns_cache_requests_total", "counter", vec![(all.clone(), hits + misses)]),
            ("coredns_cache_misses_total", "counter", vec![(all.clone(), misses)]),
            (
                "coredns_forward_max_concurrent_rejects_total",
                "counter",
                vec![(server.to_owned(), value(&self.too_many))],
            ),
            (
                "ferrite_dns_refused_clients_total",
                "counter",
                vec![(server.to_owned(), value(&self.refused_clients))],
            ),
        ];
        let mut text = String::with_capacity(2048);
        for (name, kind, series) in families {
            if series.iter().all(|(_, value)| *value == 0) {
                continue;
            }
            // Writing to a String cannot fail.
            let _ = writeln!(text, "# TYPE {name} {kind}");
            for (labels, value) in series.into_iter().filter(|(_, value)| *value > 0) {
                let _ = writeln!(text, "{name}{{{labels}}} {value}");
            }
        }
        text
    }
}
