//! Allocation of addresses and ports to Services.

mod families;
mod metrics;
mod ports;
mod ranges;

use super::{View, addresses};
use families::{Family, listed, text};
use ferrite_api::field::{FieldError, Path};
use ferrite_api::meta_validation::path_segment;
use ferrite_api::resource::Resource;
use ferrite_api::{Cidr, Status, address_number, meta};
use ferrite_json::{Value, json};
use metrics::COUNTS;
pub(super) use ports::held as held_ports;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Stands for the Service in a record that is not made.
const UNRECORDED: &str = "-";

/// Allocates cluster addresses and node ports, each to one Service. The owners are recorded with the
/// Services.
pub(crate) struct ServiceAllocator {
    /// The configured ranges, the primary family's first.
    configured: Vec<Cidr>,
    ports: RangeInclusive<u16>,
    reserved: Mutex<Reserved>,
}

/// Addresses and ports of writes in progress, which the store does not know yet.
#[derive(Default)]
struct Reserved {
    addresses: BTreeSet<IpAddr>,
    ports: BTreeSet<u16>,
}

/// The reservation of a write. It ends with the write: then the store has a record of the owner, or the
/// address is free again.
pub(crate) struct Allocation<'a> {
    allocator: Option<&'a ServiceAllocator>,
    addresses: Vec<IpAddr>,
    ports: Vec<u16>,
}

impl Allocation<'_> {
    pub fn none() -> Self {
        Self { allocator: None, addresses: Vec::new(), ports: Vec::new() }
    }

    /// The write has happened.
    pub fn keep(self) {}
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        if let Some(allocator) = self.allocator {
            let mut reserved = allocator.reserved();
            self.addresses.iter().for_each(|a| {
                reserved.addresses.remove(a);
            });
            self.ports.iter().for_each(|p| {
                reserved.ports.remove(p);
            });
        }
    }
}

impl ServiceAllocator {
    pub fn new(configured: Vec<Cidr>, ports: RangeInclusive<u16>) -> Self {
        Self { configured, ports, reserved: Mutex::default() }
    }

    fn reserved(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The families the cluster has, the primary one first.
    fn families(&self) -> Vec<Family> {
        self.configured
            .iter()
            .map(|range| if range.address.is_ipv4() { Family::V4 } else { Family::V6 })
            .collect()
    }

    /// The first address of the primary range: the API server's own Service.
    pub fn first_address(&self) -> Option<IpAddr> {
        let range = self.configured.first()?;
        Some(range.address_of(address_number(range.ends().0).0.saturating_add(1)))
    }

    /// Allocates the addresses and ports of a Service. Other resources need nothing.
    pub fn allocate(
        &self,
        view: &View,
        resource: &Resource,
        object: &mut Value,
        old: Option<&Value>,
        dry_run: bool,
    ) -> Result<Allocation<'_>, Status> {
        if !addresses::holds_addresses(resource) {
            return Ok(Allocation::none());
        }
        let mut allocation = Allocation { allocator: Some(self), addresses: Vec::new(), ports: Vec::new() };
        let name = meta::name(object).to_owned();
        // A dry run makes no record of an address, so that nothing misses the name in it.
        let owner = if dry_run { UNRECORDED } else { name.as_str() };
        let old = old.map(|old| &old["spec"]);
        let spec = &mut object["spec"];
        if text(spec, "type") == "ExternalName" || !spec.is_object() {
            return Ok(allocation);
        }
        let invalid = |errors: &[FieldError]| Status::invalid("", "Service", &name, errors);
        if !old.is_some_and(|old| families::is_settled(spec, old)) {
            families::settle(spec, old, &self.families()).map_err(|errors| invalid(&errors))?;
            self.give_addresses(view, spec, old, owner, &mut allocation).map_err(|e| invalid(&[e]))?;
        }
        let mut reserved = self.reserved();
        let mut giving = ports::Giving {
            range: &self.ports,
            counts: !dry_run,
            held: &|port| addresses::is_port_held(view, port),
            reserved: &mut reserved.ports,
            given: &mut allocation.ports,
        };
        let given = ports::give(spec, old, &name, &mut giving);
        // Dropping an allocation returns its addresses, which needs the lock.
        drop(reserved);
        given.map(|()| allocation)
    }

    /// Gives a Service one address of each of its families: a new one all, one that gained a family the second.
    fn give_addresses(
        &self,
        view: &View,
        spec: &mut Value,
        old: Option<&Value>,
        name: &str,
        allocation: &mut Allocation<'_>,
    ) -> Result<(), FieldError> {
        let families = listed(spec, "ipFamilies");
        let mut addresses = listed(spec, "clusterIPs");
        let is_headless = |addresses: &[String]| addresses.first().is_some_and(|a| a == "None");
        let first = match old.filter(|old| text(old, "type") != "ExternalName") {
            _ if is_headless(&addresses) => return Ok(()),
            None => 0,
            Some(old) if is_headless(&listed(old, "clusterIPs")) => return Ok(()),
            Some(old) if listed(old, "ipFamilies").len() == 1 && families.len() == 2 => 1,
            Some(_) => return Ok(()),
        };
        addresses.resize(addresses.len().max(families.len()), String::new());
        for index in first..families.len() {
            let path = Path::new("spec").child("clusterIPs");
            let refused = |why: String| FieldError::invalid(&path, json!(addresses), why);
            let given = match addresses[index].as_str() {
                "" => {
                    let family = if families[index] == "IPv6" { Family::V6 } else { Family::V4 };
                    let next = self.next_address(view, family, name, allocation);
                    next.map_err(|why| refused(format!("failed to allocate IP: {why}")))?.to_string()
                }
                asked => {
                    self.take_address(view, asked, name != UNRECORDED, allocation)
                        .map_err(|why| refused(format!("failed to allocate IP {asked}: {why}")))?;
                    asked.to_owned()
                }
            };
            addresses[index] = given;
        }
        spec["clusterIP"] = addresses.first().cloned().into();
        spec["clusterIPs"] = addresses.into();
        Ok(())
    }

    fn next_address(
        &self,
        view: &View,
        family: Family,
        name: &str,
        allocation: &mut Allocation<'_>,
    ) -> Result<IpAddr, String> {
        let ranges = ranges::usable(view, &self.configured, family);
        let mut reserved = self.reserved();
        let counts = name != UNRECORDED;
        let found = ranges.iter().find_map(|range| {
            let free = ranges::candidates(*range)
                .filter(|a| !reserved.addresses.contains(a))
                .find(|a| !addresses::is_held(view, *a));
            if counts {
                COUNTS.address(range, "dynamic", free.is_some());
            }
            free
        });
        let free = found.ok_or("range is full")?;
        // As upstream: the record of the address is made first, and it must name its Service.
        let refused = match name {
            "" => Some("Required value".to_owned()),
            name => path_segment(name).first().map(|why| format!("Invalid value: {name:?}: {why}")),
        };
        if let Some(why) = refused {
            return Err(format!(
                "IPAddress.networking.k8s.io \"{free}\" is invalid: spec.parentRef.name: {why}"
            ));
        }
        reserved.addresses.insert(free);
        allocation.addresses.push(free);
        Ok(free)
    }

    /// Reserves an address that was asked for.
    fn take_address(
        &self,
        view: &View,
        asked: &str,
        counts: bool,
        allocation: &mut Allocation<'_>,
    ) -> Result<(), String> {
        const ELSEWHERE: &str = "the provided network does not match the current range";
        let address: IpAddr = asked.parse().map_err(|_| ELSEWHERE)?;
        let ranges = ranges::usable(view, &self.configured, Family::of(asked));
        let found = ranges.iter().find(|range| range.contains_host(address));
        if !counts {
            // As upstream: a dry run looks at the range, and not at who has the address.
            let range = ranges.first().ok_or(ELSEWHERE)?;
            return found.map(drop).ok_or_else(|| {
                format!(
                    "the provided IP ({asked}) is not in the valid range. The range of valid IPs is {range}"
                )
            });
        }
        let range = found.ok_or(ELSEWHERE)?;
        let free = !addresses::is_held(view, address) && self.reserved().addresses.insert(address);
        COUNTS.address(range, "static", free);
        if !free {
            return Err("provided IP is already allocated".into());
        }
        allocation.addresses.push(address);
        Ok(())
    }
}
