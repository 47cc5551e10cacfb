//! Addresses and ports of Services.

use ferrite_api::field::{FieldError, Path};
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Hands out cluster addresses and node ports, each to one Service.
pub(crate) struct ServiceAllocator {
    network: Ipv4Addr,
    prefix: u8,
    ports: RangeInclusive<u16>,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    addresses: BTreeSet<u32>,
    ports: BTreeSet<u16>,
}

/// What was reserved for a write. Given back unless the write happened.
pub(crate) struct Allocation<'a> {
    allocator: Option<&'a ServiceAllocator>,
    addresses: Vec<u32>,
    ports: Vec<u16>,
}

impl Allocation<'_> {
    pub fn none() -> Self {
        Self { allocator: None, addresses: Vec::new(), ports: Vec::new() }
    }

    pub fn keep(mut self) {
        self.allocator = None;
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        if let Some(allocator) = self.allocator {
            let mut taken = allocator.taken();
            self.addresses.iter().for_each(|a| {
                taken.addresses.remove(a);
            });
            self.ports.iter().for_each(|p| {
                taken.ports.remove(p);
            });
        }
    }
}

impl ServiceAllocator {
    /// `existing` are the Services already stored: what they hold is taken.
    pub fn new<'a>(
        network: Ipv4Addr,
        prefix: u8,
        ports: RangeInclusive<u16>,
        existing: impl Iterator<Item = &'a Value>,
    ) -> Self {
        let mut taken = Taken::default();
        for service in existing {
            taken.addresses.extend(cluster_ips(service));
            taken.ports.extend(node_ports(service));
        }
        Self { network, prefix, ports, taken: Mutex::new(taken) }
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first address: the API server's own Service.
    pub fn first_address(&self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.network) + 1)
    }

    /// Usable offsets from the network address: neither the network itself nor the broadcast address.
    fn offsets(&self) -> RangeInclusive<u32> {
        let size = 1u64 << (32 - u32::from(self.prefix.min(30)));
        1..=u32::try_from(size - 2).unwrap_or(u32::MAX)
    }

    /// Fills in what a Service needs and reserves it. Other resources need nothing.
    pub fn allocate(
        &self,
        resource: &Resource,
        object: &mut Value,
        old: Option<&Value>,
    ) -> Result<Allocation<'_>, Status> {
        if !resource.group.is_empty() || resource.plural != "services" {
            return Ok(Allocation::none());
        }
        let mut allocation = Allocation { allocator: Some(self), addresses: Vec::new(), ports: Vec::new() };
        let invalid =
            |object: &Value, error: FieldError| Status::invalid("", "Service", meta::name(object), &[error]);
        let kind = object.pointer("/spec/type").and_then(Value::as_str).unwrap_or("ClusterIP").to_owned();
        if kind == "ExternalName" {
            return Ok(allocation);
        }
        self.allocate_address(object, old, &mut allocation).map_err(|e| invalid(object, e))?;
        if matches!(kind.as_str(), "NodePort" | "LoadBalancer") {
            self.allocate_ports(object, old, &mut allocation).map_err(|e| invalid(object, e))?;
        }
        Ok(allocation)
    }

    fn allocate_address(
        &self,
        object: &mut Value,
        old: Option<&Value>,
        allocation: &mut Allocation<'_>,
    ) -> Result<(), FieldError> {
        let path = Path::new("spec").child("clusterIPs");
        let given = object.pointer("/spec/clusterIP").and_then(Value::as_str).unwrap_or_default().to_owned();
        let before =
            old.and_then(|o| o.pointer("/spec/clusterIP")).and_then(Value::as_str).unwrap_or_default();
        let address = if given == "None" {
            given
        } else if given.is_empty() && !before.is_empty() && before != "None" {
            before.to_owned()
        } else if given.is_empty() {
            let mut taken = self.taken();
            let base = u32::from(self.network);
            // The lower part is left to addresses that are asked for by name, as upstream does.
            let offsets = self.offsets();
            let reserved = (offsets.end() / 16).clamp(16, 256);
            let free = (reserved + 1..=*offsets.end())
                .chain(1..=reserved.min(*offsets.end()))
                .map(|o| base + o)
                .find(|a| !taken.addresses.contains(a));
            let Some(free) = free else {
                return Err(FieldError::internal(
                    &path.index(0),
                    "failed to allocate a serviceIP: range is full",
                ));
            };
            taken.addresses.insert(free);
            allocation.addresses.push(free);
            Ipv4Addr::from(free).to_string()
        } else {
            let parsed: Ipv4Addr = given.parse().map_err(|_| {
                FieldError::invalid(
                    &path.index(0),
                    given.as_str(),
                    "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)",
                )
            })?;
            let number = u32::from(parsed);
            if before != given {
                let in_range =
                    number.checked_sub(u32::from(self.network)).is_some_and(|o| self.offsets().contains(&o));
                if !in_range {
                    let range = format!("{}/{}", self.network, self.prefix);
                    return Err(FieldError::invalid(
                        &path,
                        json!([given]),
                        format!(
                            "failed to allocate IP {given}: the provided IP ({given}) is not in the valid range. The range of valid IPs is {range}"
                        ),
                    ));
                }
                let mut taken = self.taken();
                if !taken.addresses.insert(number) {
                    return Err(FieldError::invalid(
                        &path,
                        json!([given]),
                        format!("failed to allocate IP {given}: provided IP is already allocated"),
                    ));
                }
                allocation.addresses.push(number);
            }
            given
        };
        if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
            spec.insert("clusterIP".into(), address.clone().into());
            spec.insert("clusterIPs".into(), json!([address]));
            spec.entry("ipFamilies").or_insert_with(|| json!(["IPv4"]));
            spec.entry("ipFamilyPolicy").or_insert_with(|| "SingleStack".into());
        }
        Ok(())
    }

    fn allocate_ports(
        &self,
        object: &mut Value,
        old: Option<&Value>,
        allocation: &mut Allocation<'_>,
    ) -> Result<(), FieldError> {
        let before: BTreeSet<u16> = old.map(|o| node_ports(o).collect()).unwrap_or_default();
        let Some(ports) = object.pointer_mut("/spec/ports").and_then(Value::as_array_mut) else {
            return Ok(());
        };
        let mut taken = self.taken();
        for (index, port) in ports.iter_mut().filter_map(Value::as_object_mut).enumerate() {
            let path = Path::new("spec").child("ports").index(index).child("nodePort");
            let given = port.get("nodePort").and_then(Value::as_u64).unwrap_or(0);
            if given == 0 {
                let free = self.ports.clone().find(|p| !taken.ports.contains(p)).ok_or_else(|| {
                    FieldError::internal(&path, "failed to allocate a nodePort: range is full")
                })?;
                taken.ports.insert(free);
                allocation.ports.push(free);
                port.insert("nodePort".into(), free.into());
                continue;
            }
            let Some(wanted) = u16::try_from(given).ok().filter(|p| self.ports.contains(p)) else {
                let range = format!("{}-{}", self.ports.start(), self.ports.end());
                return Err(FieldError::invalid(
                    &path,
                    given,
                    format!("provided port is not in the valid range. The range of valid ports is {range}"),
                ));
            };
            if before.contains(&wanted) {
                continue;
            }
            if !taken.ports.insert(wanted) {
                return Err(FieldError::invalid(&path, given, "provided port is already allocated"));
            }
            allocation.ports.push(wanted);
        }
        Ok(())
    }

    /// The Service is gone: what it held is free again.
    pub fn release(&self, resource: &Resource, object: &Value) {
        if resource.group.is_empty() && resource.plural == "services" {
            let mut taken = self.taken();
            for address in cluster_ips(object) {
                taken.addresses.remove(&address);
            }
            for port in node_ports(object) {
                taken.ports.remove(&port);
            }
        }
    }
}

fn cluster_ips(service: &Value) -> impl Iterator<Item = u32> {
    service
        .pointer("/spec/clusterIPs")
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .unwrap_or_default()
        .iter()
        .filter_map(|ip| ip.as_str()?.parse::<Ipv4Addr>().ok())
        .map(u32::from)
}

fn node_ports(service: &Value) -> impl Iterator<Item = u16> {
    service
        .pointer("/spec/ports")
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .unwrap_or_default()
        .iter()
        .filter_map(|p| u16::try_from(p.get("nodePort")?.as_u64()?).ok())
        .filter(|p| *p != 0)
}
