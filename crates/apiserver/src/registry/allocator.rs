//! Addresses and ports of Services.

use super::{View, addresses};
use ferrite_api::field::{FieldError, Path};
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use rand::RngExt;
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
        view: &View,
        resource: &Resource,
        object: &mut Value,
        old: Option<&Value>,
    ) -> Result<Allocation<'_>, Status> {
        if !resource.group.is_empty() || resource.plural != "services" {
            return Ok(Allocation::none());
        }
        let mut allocation = Allocation { allocator: Some(self), addresses: Vec::new(), ports: Vec::new() };
        let kind = object.pointer("/spec/type").and_then(Value::as_str).unwrap_or("ClusterIP").to_owned();
        if kind == "ExternalName" {
            return Ok(allocation);
        }
        let name = meta::name(object).to_owned();
        let invalid = |errors: &[FieldError]| Status::invalid("", "Service", &name, errors);
        init_families(object).map_err(|errors| invalid(&errors))?;
        self.allocate_address(view, object, old, &mut allocation).map_err(|e| invalid(&[e]))?;
        let spec = |key: &str| object.pointer(&format!("/spec/{key}"));
        let wants_ports = match kind.as_str() {
            "NodePort" => true,
            "LoadBalancer" => spec("allocateLoadBalancerNodePorts").and_then(Value::as_bool).unwrap_or(true),
            _ => false,
        };
        let checked_by_balancer =
            kind == "LoadBalancer" && spec("externalTrafficPolicy").and_then(Value::as_str) == Some("Local");
        if matches!(kind.as_str(), "NodePort" | "LoadBalancer") {
            self.allocate_ports(object, old, &mut allocation, wants_ports).map_err(|e| invalid(&[e]))?;
        }
        if checked_by_balancer {
            self.allocate_health_port(object, old, &mut allocation).map_err(|e| invalid(&[e]))?;
        }
        Ok(allocation)
    }

    fn allocate_address(
        &self,
        view: &View,
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
            if meta::name(object).is_empty() {
                // As upstream: the record of the address is made first, and it must name its Service.
                let address = self.first_address();
                let why = format!(
                    "failed to allocate IP: IPAddress.networking.k8s.io \"{address}\" is invalid: spec.parentRef.name: Required value"
                );
                return Err(FieldError::invalid(&path, json!([""]), why));
            }
            let mut taken = self.taken();
            let base = u32::from(self.network);
            // The lower part is left to addresses that are asked for by name, as upstream does.
            let offsets = self.offsets();
            let reserved = (offsets.end() / 16).clamp(16, 256);
            let free = from_somewhere(reserved + 1, *offsets.end())
                .chain(1..=reserved.min(*offsets.end()))
                .map(|o| base + o)
                .filter(|a| !taken.addresses.contains(a))
                .find(|a| !addresses::is_held(view, &Ipv4Addr::from(*a).to_string()));
            let Some(free) = free else {
                let why = "failed to allocate a serviceIP: range is full";
                return Err(FieldError::internal(&path.index(0), why));
            };
            taken.addresses.insert(free);
            allocation.addresses.push(free);
            Ipv4Addr::from(free).to_string()
        } else {
            self.take_address(view, &path, &given, before, allocation)?;
            given
        };
        if let Some(spec) = object.get_mut("spec").and_then(Value::as_object_mut) {
            spec.insert("clusterIP".into(), address.clone().into());
            spec.insert("clusterIPs".into(), json!([address]));
        }
        Ok(())
    }

    /// Reserves an address that was asked for.
    fn take_address(
        &self,
        view: &View,
        path: &Path,
        given: &str,
        before: &str,
        allocation: &mut Allocation<'_>,
    ) -> Result<(), FieldError> {
        if before == given {
            return Ok(());
        }
        let refused = |why: &str| {
            FieldError::invalid(path, json!([given]), format!("failed to allocate IP {given}: {why}"))
        };
        let number = given.parse::<Ipv4Addr>().map(u32::from).unwrap_or_default();
        let in_range =
            number.checked_sub(u32::from(self.network)).is_some_and(|o| self.offsets().contains(&o));
        if !in_range {
            return Err(refused("the provided network does not match the current range"));
        }
        if addresses::is_held(view, given) || !self.taken().addresses.insert(number) {
            return Err(refused("provided IP is already allocated"));
        }
        allocation.addresses.push(number);
        Ok(())
    }

    /// The port at which balancers ask a node whether it has endpoints.
    fn allocate_health_port(
        &self,
        object: &mut Value,
        old: Option<&Value>,
        allocation: &mut Allocation<'_>,
    ) -> Result<(), FieldError> {
        let path = Path::new("spec").child("healthCheckNodePort");
        let read = |o: &Value| {
            o.pointer("/spec/healthCheckNodePort")
                .and_then(Value::as_u64)
                .and_then(|p| u16::try_from(p).ok())
                .filter(|p| *p != 0)
        };
        let (given, before) = (read(object), old.and_then(read));
        if given.is_some() && given == before {
            return Ok(());
        }
        let mut taken = self.taken();
        let port = match given {
            Some(port) if !taken.ports.contains(&port) => port,
            Some(port) => {
                let why = format!(
                    "failed to allocate requested HealthCheck NodePort {port}: provided port is already allocated"
                );
                return Err(FieldError::internal(&path, why));
            }
            None => self.free_port(&taken).ok_or_else(|| {
                FieldError::internal(&path, "failed to allocate a HealthCheck NodePort: range is full")
            })?,
        };
        taken.ports.insert(port);
        allocation.ports.push(port);
        object["spec"]["healthCheckNodePort"] = port.into();
        Ok(())
    }

    fn free_port(&self, taken: &Taken) -> Option<u16> {
        let (first, last) = (u32::from(*self.ports.start()), u32::from(*self.ports.end()));
        let reserved = ((last.saturating_sub(first) + 1) / 32).clamp(16, 128).min(last.saturating_sub(first));
        from_somewhere(first + reserved, last)
            .chain(first..first + reserved)
            .filter_map(|port| u16::try_from(port).ok())
            .find(|port| !taken.ports.contains(port))
    }

    fn allocate_ports(
        &self,
        object: &mut Value,
        old: Option<&Value>,
        allocation: &mut Allocation<'_>,
        fill: bool,
    ) -> Result<(), FieldError> {
        let before: BTreeSet<u16> = old.map(|o| node_ports(o).collect()).unwrap_or_default();
        let Some(ports) = object.pointer_mut("/spec/ports").and_then(Value::as_array_mut) else {
            return Ok(());
        };
        let mut taken = self.taken();
        for (index, port) in ports.iter_mut().filter_map(Value::as_object_mut).enumerate() {
            let path = Path::new("spec").child("ports").index(index).child("nodePort");
            let given = port.get("nodePort").and_then(Value::as_u64).unwrap_or(0);
            if given == 0 && !fill {
                continue;
            }
            if given == 0 {
                let free = self.free_port(&taken).ok_or_else(|| {
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

    /// The Service has changed: what it no longer holds is free again.
    pub fn release_unused(&self, resource: &Resource, old: &Value, new: &Value) {
        if resource.group.is_empty() && resource.plural == "services" {
            let (addresses, ports): (BTreeSet<u32>, BTreeSet<u16>) =
                (cluster_ips(new).collect(), node_ports(new).collect());
            let mut taken = self.taken();
            cluster_ips(old).filter(|a| !addresses.contains(a)).for_each(|a| {
                taken.addresses.remove(&a);
            });
            node_ports(old).filter(|p| !ports.contains(p)).for_each(|p| {
                taken.ports.remove(&p);
            });
        }
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

/// Every number from `first` to `last`, beginning anywhere: what was just given back is not given out at once, while
/// others may still believe that they know whose it is.
fn from_somewhere(first: u32, last: u32) -> impl Iterator<Item = u32> {
    let start = if first < last { rand::rng().random_range(first..=last) } else { first };
    (start..=last).chain(first..start)
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

/// Every port a Service holds on the nodes, the one for health checks included.
fn node_ports(service: &Value) -> impl Iterator<Item = u16> {
    service
        .pointer("/spec/ports")
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .unwrap_or_default()
        .iter()
        .filter_map(|p| p.get("nodePort")?.as_u64())
        .chain(service.pointer("/spec/healthCheckNodePort").and_then(Value::as_u64))
        .filter_map(|p| u16::try_from(p).ok())
        .filter(|p| *p != 0)
}

/// Decides on the families of a Service's addresses. This cluster has IPv4 alone.
fn init_families(service: &mut Value) -> Result<(), Vec<FieldError>> {
    let path = Path::new("spec");
    let text = |key: &str| service.pointer(&format!("/spec/{key}")).and_then(Value::as_str);
    let listed = |key: &str| -> Vec<String> {
        let list = service.pointer(&format!("/spec/{key}")).and_then(Value::as_array);
        list.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let addresses = match listed("clusterIPs") {
        addresses if addresses.is_empty() => text("clusterIP").map(str::to_owned).into_iter().collect(),
        addresses => addresses,
    };
    let mut families = listed("ipFamilies");
    let selects = service.pointer("/spec/selector").and_then(Value::as_object).is_some_and(|s| !s.is_empty());
    let free_of_both = addresses.first().is_some_and(|a| a == "None") && !selects;
    let policy = match text("ipFamilyPolicy") {
        Some(policy) => policy.to_owned(),
        None if free_of_both => "RequireDualStack".into(),
        None => "SingleStack".into(),
    };
    let mut errors = Vec::new();
    if policy == "SingleStack" && families.len() == 2 {
        let why = "must be 'RequireDualStack' or 'PreferDualStack' when multiple IP families are specified";
        return Err(vec![FieldError::invalid(&path.child("ipFamilyPolicy"), policy.as_str(), why)]);
    }
    for (index, address) in addresses.iter().enumerate().filter(|(_, a)| *a != "None" && !a.is_empty()) {
        if index < families.len() {
            continue;
        }
        if address.contains(':') {
            let why = "IPv6 is not configured on this cluster";
            errors.push(FieldError::invalid(&path.child("clusterIPs").index(index), json!(addresses), why));
        } else {
            families.push("IPv4".into());
        }
    }
    if errors.is_empty() && free_of_both {
        if families.is_empty() {
            families.push("IPv4".into());
        }
        if families.len() < 2 && policy != "SingleStack" {
            families.push(if families[0] == "IPv4" { "IPv6" } else { "IPv4" }.into());
        }
    } else if errors.is_empty() {
        if policy == "RequireDualStack" {
            let why = "this cluster is not configured for dual-stack services";
            errors.push(FieldError::invalid(&path.child("ipFamilyPolicy"), policy.as_str(), why));
        }
        for (index, family) in families.iter().enumerate().filter(|(_, f)| *f != "IPv4") {
            let path = path.child("ipFamilies").index(index);
            errors.push(FieldError::invalid(&path, family.as_str(), "not configured on this cluster"));
        }
        if families.is_empty() {
            families.push("IPv4".into());
        }
    }
    if !errors.is_empty() {
        return Err(errors);
    }
    if let Some(spec) = service.get_mut("spec").and_then(Value::as_object_mut) {
        spec.insert("ipFamilies".into(), families.into());
        spec.insert("ipFamilyPolicy".into(), policy.into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_comes_once() {
        for (first, last, count) in [(1, 10, 10), (5, 5, 1), (6, 5, 0)] {
            let mut numbers: Vec<u32> = from_somewhere(first, last).collect();
            assert_eq!(numbers.len(), count);
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), count);
        }
    }
}
