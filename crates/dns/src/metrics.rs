//! Counters, named as CoreDNS's.

use std::fmt::Write;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use hickory_proto::op::ResponseCode;
use hickory_proto::rr::RecordType;

/// How a query came in.
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

/// What the server has done so far.
#[derive(Debug, Default)]
pub struct Metrics {
    requests: [[[AtomicU64; OTHER + 1]; 2]; 2],
    responses: [AtomicU64; CODES.len() + 1],
    pub cache_hits: AtomicU64,
    pub cache_misses: AtomicU64,
    pub refused_clients: AtomicU64,
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
        let mut text = String::with_capacity(2048);
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut line = |name: &str, labels: String, value: u64| {
            if value > 0 {
                let _ = writeln!(text, "{name}{{{labels}}} {value}");
            }
        };
        line(
            "# TYPE coredns_dns_requests_total counter\n# HELP coredns_dns_requests_total",
            String::new(),
            0,
        );
        for (p, protocol) in PROTOCOLS.iter().enumerate() {
            for (f, family) in FAMILIES.iter().enumerate() {
                for (k, counter) in self.requests[p][f].iter().enumerate() {
                    let kind = TYPES.get(k).map_or("other", |(_, name)| name);
                    let labels = format!(
                        "family=\"{family}\",proto=\"{protocol}\",server=\"dns://:53\",type=\"{kind}\",view=\"\",zone=\".\""
                    );
                    line("coredns_dns_requests_total", labels, value(counter));
                }
            }
        }
        for (n, counter) in self.responses.iter().enumerate() {
            let code = CODES.get(n).map_or("OTHER", |(_, name)| name);
            let labels = format!("plugin=\"\",rcode=\"{code}\",server=\"dns://:53\",view=\"\",zone=\".\"");
            line("coredns_dns_responses_total", labels, value(counter));
        }
        let cache = |kind: &str| format!("server=\"dns://:53\",type=\"{kind}\",view=\"\",zones=\".\"");
        line("coredns_cache_entries", cache("success"), cached.0 as u64);
        line("coredns_cache_entries", cache("denial"), cached.1 as u64);
        let server = || "server=\"dns://:53\",view=\"\",zones=\".\"".to_owned();
        line("coredns_cache_requests_total", server(), value(&self.cache_hits) + value(&self.cache_misses));
        line("coredns_cache_misses_total", server(), value(&self.cache_misses));
        line("coredns_forward_max_concurrent_rejects_total", String::new(), value(&self.too_many));
        text
    }
}
