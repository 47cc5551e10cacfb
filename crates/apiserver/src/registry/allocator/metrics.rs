//! Addresses and ports of Services, counted.

use super::super::View;
use super::{Family as AddressFamily, ServiceAllocator, ranges};
use crate::registry::addresses;
use ferrite_api::{Cidr, address_number};
use ferrite_component::metrics::{Counter, Family, Gauge, registry};
use std::sync::{Arc, LazyLock};

pub(super) struct Counts {
    addresses: Arc<Family<Counter>>,
    address_errors: Arc<Family<Counter>>,
    allocated: Arc<Family<Gauge>>,
    available: Arc<Family<Gauge>>,
    pub ports: Arc<Family<Counter>>,
    pub port_errors: Arc<Family<Counter>>,
    ports_allocated: Arc<Family<Gauge>>,
    ports_available: Arc<Family<Gauge>>,
}

pub(super) static COUNTS: LazyLock<Counts> = LazyLock::new(|| {
    let counter = |name, help, labels| registry().counter(name, help, labels);
    let gauge = |name, help, labels| registry().gauge(name, help, labels);
    Counts {
        addresses: counter(
            "kube_apiserver_clusterip_allocator_allocation_total",
            "Cluster addresses that were given to Services.",
            &["cidr", "scope"],
        ),
        address_errors: counter(
            "kube_apiserver_clusterip_allocator_allocation_errors_total",
            "Cluster addresses that could not be given.",
            &["cidr", "scope"],
        ),
        allocated: gauge(
            "kube_apiserver_clusterip_allocator_allocated_ips",
            "Cluster addresses that Services have.",
            &["cidr"],
        ),
        available: gauge(
            "kube_apiserver_clusterip_allocator_available_ips",
            "Cluster addresses that are free.",
            &["cidr"],
        ),
        ports: counter(
            "kube_apiserver_nodeport_allocator_allocation_total",
            "Node ports that were given to Services.",
            &["scope"],
        ),
        port_errors: counter(
            "kube_apiserver_nodeport_allocator_allocation_errors_total",
            "Node ports that could not be given.",
            &["scope"],
        ),
        ports_allocated: gauge(
            "kube_apiserver_nodeport_allocator_allocated_ports",
            "Node ports that Services have.",
            &[],
        ),
        ports_available: gauge(
            "kube_apiserver_nodeport_allocator_available_ports",
            "Node ports that are free.",
            &[],
        ),
    }
});

impl Counts {
    /// An address was given from a range, or could not be.
    pub fn address(&self, range: &Cidr, scope: &str, given: bool) {
        let family = if given { &self.addresses } else { &self.address_errors };
        family.with(&[&range.to_string(), scope]).increment();
    }
}

/// Addresses of a range that can be given out.
fn size(range: &Cidr) -> i64 {
    let (first, last) = range.ends();
    let span = address_number(last).0 - address_number(first).0;
    // The network has the first address, and IPv4 uses the last one for all.
    let usable = if range.address.is_ipv4() { span.saturating_sub(1) } else { span };
    i64::try_from(usable).unwrap_or(i64::MAX)
}

impl ServiceAllocator {
    /// Brings the gauges up to date.
    pub fn measure(&self, view: &View) {
        let held = addresses::held(view);
        for family in [AddressFamily::V4, AddressFamily::V6] {
            for range in ranges::usable(view, &self.configured, family) {
                let allocated = held.iter().filter(|address| range.contains_host(**address)).count();
                let allocated = i64::try_from(allocated).unwrap_or(i64::MAX);
                let cidr = range.to_string();
                COUNTS.allocated.with(&[&cidr]).set(allocated);
                COUNTS.available.with(&[&cidr]).set(size(&range).saturating_sub(allocated));
            }
        }
        let taken = self.ports.clone().filter(|port| addresses::is_port_held(view, *port)).count();
        let taken = i64::try_from(taken).unwrap_or(i64::MAX);
        let all = i64::try_from(self.ports.clone().count()).unwrap_or(i64::MAX);
        COUNTS.ports_allocated.with(&[]).set(taken);
        COUNTS.ports_available.with(&[]).set(all.saturating_sub(taken));
    }
}
