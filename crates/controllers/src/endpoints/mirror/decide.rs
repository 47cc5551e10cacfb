//! Which slices mirror an Endpoints object.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ferrite_client::controller_reference;
use k8s_openapi::api::core::v1::{EndpointAddress, EndpointPort as LegacyPort, Endpoints};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::endpoints::TRIGGER_TIME;

pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
pub(super) const MANAGED_BY: &str = "endpointslice.kubernetes.io/managed-by";
pub(super) const MANAGER: &str = "endpointslicemirroring-controller.k8s.io";
/// Annotations that belong to the Endpoints alone.
const NOT_COPIED: &[&str] = &[TRIGGER_TIME, "kubectl.kubernetes.io/last-applied-configuration"];
/// Addresses of one subset that are mirrored at most.
pub(crate) const CAPACITY: usize = 1000;

/// A port by all it says: name, number, protocol and protocol of the application.
type PortKey = (String, i32, String, Option<String>);
/// An address and the UID of its target.
type Target = (String, Option<String>);
/// The same with its readiness.
type AddressKey = (String, Option<String>, bool);
/// The ports of a slice, in order.
type PortsKey = Vec<PortKey>;
/// Addresses by the text of the address.
type Wanted = BTreeMap<(&'static str, PortsKey), BTreeMap<String, Endpoint>>;

/// The slices to write, and the problems to report in events.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) create: Vec<EndpointSlice>,
    pub(super) update: Vec<EndpointSlice>,
    pub(super) delete: Vec<String>,
    /// Addresses that are no IP addresses.
    pub(super) invalid: usize,
    /// Addresses left out, the invalid ones included.
    pub(super) skipped: usize,
}

fn port_key(port: &LegacyPort) -> PortKey {
    (
        port.name.clone().unwrap_or_default(),
        port.port,
        port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
        port.app_protocol.clone(),
    )
}

/// Subsets in canonical form: ports with the same addresses are together, whatever subsets they came in.
fn repacked(endpoints: &Endpoints) -> Vec<(PortsKey, Vec<(&EndpointAddress, bool)>)> {
    let mut addresses: BTreeMap<Target, &EndpointAddress> = BTreeMap::new();
    let mut by_port: BTreeMap<Option<PortKey>, BTreeMap<Target, bool>> = BTreeMap::new();
    for subset in endpoints.subsets.iter().flatten() {
        let mut ports: Vec<_> = subset.ports.iter().flatten().map(|port| Some(port_key(port))).collect();
        if ports.is_empty() {
            ports.push(None);
        }
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        let not_ready = subset.not_ready_addresses.iter().flatten().map(|address| (address, false));
        for (address, ready) in ready.chain(not_ready) {
            let target = address.target_ref.as_ref().and_then(|target| target.uid.clone());
            let key = (address.ip.clone(), target);
            addresses.entry(key.clone()).or_insert(address);
            for port in &ports {
                // An address that is both is not ready.
                let known = by_port.entry(port.clone()).or_default().entry(key.clone()).or_insert(ready);
                *known &= ready;
            }
        }
    }
    let mut groups: BTreeMap<Vec<AddressKey>, PortsKey> = BTreeMap::new();
    for (port, held) in by_port {
        let key = held.into_iter().map(|((ip, target), ready)| (ip, target, ready)).collect();
        groups.entry(key).or_default().extend(port);
    }
    let named = groups.into_iter().map(|(held, ports)| {
        let mut held: Vec<_> = held
            .into_iter()
            .filter_map(|(ip, target, ready)| Some((*addresses.get(&(ip, target))?, ready)))
            .collect();
        held.sort_by_key(|(_, ready)| !ready);
        (ports, held)
    });
    named.collect()
}

fn endpoint(address: &EndpointAddress, ready: bool) -> Option<(&'static str, Endpoint)> {
    let ip = address.ip.parse::<IpAddr>().ok()?.to_canonical();
    let endpoint = Endpoint {
        addresses: vec![ip.to_string()],
        conditions: Some(EndpointConditions { ready: Some(ready), ..EndpointConditions::default() }),
        target_ref: address.target_ref.clone(),
        node_name: address.node_name.clone(),
        hostname: address.hostname.clone().filter(|hostname| !hostname.is_empty()),
        ..Endpoint::default()
    };
    Some((if ip.is_ipv4() { "IPv4" } else { "IPv6" }, endpoint))
}

fn ports_of(slice: &EndpointSlice) -> PortsKey {
    let mut ports: Vec<_> = slice
        .ports
        .iter()
        .flatten()
        .map(|port| {
            (
                port.name.clone().unwrap_or_default(),
                port.port.unwrap_or(0),
                port.protocol.clone().unwrap_or_else(|| "TCP".to_owned()),
                port.app_protocol.clone(),
            )
        })
        .collect();
    ports.sort();
    ports
}

pub(super) fn plan(endpoints: &Endpoints, existing: &[Arc<EndpointSlice>], capacity: usize) -> Plan {
    let mut plan = Plan::default();
    let mut wanted: Wanted = BTreeMap::new();
    for (ports, addresses) in repacked(endpoints) {
        let mut added = 0;
        let total = addresses.len();
        for (address, ready) in addresses {
            if added >= capacity {
                break;
            }
            match endpoint(address, ready) {
                Some((family, endpoint)) => {
                    added += 1;
                    wanted
                        .entry((family, ports.clone()))
                        .or_default()
                        .insert(endpoint.addresses[0].clone(), endpoint);
                }
                None => plan.invalid += 1,
            }
        }
        plan.skipped += total - added;
    }

    let mut spare: Vec<&Arc<EndpointSlice>> = Vec::new();
    let mut unused: BTreeMap<(&str, PortsKey), Vec<&Arc<EndpointSlice>>> = BTreeMap::new();
    for slice in existing {
        unused.entry((slice.address_type.as_str(), ports_of(slice))).or_default().push(slice);
    }
    let mut missing = Vec::new();
    for ((family, ports), members) in wanted {
        let made = slice(endpoints, family, &ports, members.into_values().collect());
        let mut held = unused.remove(&(family, ports)).unwrap_or_default().into_iter();
        match held.next() {
            Some(present) if is_same(present, &made) => {}
            Some(present) => plan.update.push(renamed(made, present)),
            None => missing.push(made),
        }
        spare.extend(held);
    }
    spare.extend(unused.into_values().flatten());
    // A superfluous slice is reused for missing endpoints: one write instead of two.
    for made in missing {
        match spare.iter().position(|slice| slice.address_type == made.address_type) {
            Some(at) => plan.update.push(renamed(made, spare.swap_remove(at))),
            None => plan.create.push(made),
        }
    }
    plan.delete = spare.iter().filter_map(|slice| slice.metadata.name.clone()).collect();
    plan
}

fn renamed(mut made: EndpointSlice, present: &EndpointSlice) -> EndpointSlice {
    made.metadata.generate_name = None;
    made.metadata.name = present.metadata.name.clone();
    made.metadata.resource_version = present.metadata.resource_version.clone();
    made
}

fn slice(endpoints: &Endpoints, family: &str, ports: &[PortKey], members: Vec<Endpoint>) -> EndpointSlice {
    let name = endpoints.metadata.name.clone().unwrap_or_default();
    let mut labels = endpoints.metadata.labels.clone().unwrap_or_default();
    labels.insert(SERVICE_NAME.to_owned(), name.clone());
    labels.insert(MANAGED_BY.to_owned(), MANAGER.to_owned());
    let mut annotations = endpoints.metadata.annotations.clone().unwrap_or_default();
    annotations.retain(|key, _| !NOT_COPIED.contains(&key.as_str()));
    let ports = ports.iter().map(|(name, number, protocol, application)| EndpointPort {
        name: Some(name.clone()),
        port: Some(*number),
        protocol: Some(protocol.clone()),
        app_protocol: application.clone(),
    });
    EndpointSlice {
        metadata: ObjectMeta {
            generate_name: Some(format!("{name}-")),
            namespace: endpoints.metadata.namespace.clone(),
            labels: Some(labels),
            annotations: (!annotations.is_empty()).then_some(annotations),
            owner_references: Some(vec![controller_reference(endpoints)]),
            ..ObjectMeta::default()
        },
        address_type: family.to_owned(),
        endpoints: Some(members),
        ports: Some(ports.collect()),
    }
}

/// Returns true if the slice has the same content as `made`. The caller has compared the ports.
fn is_same(present: &EndpointSlice, made: &EndpointSlice) -> bool {
    let members = |slice: &EndpointSlice| {
        let mut members = slice.endpoints.clone().unwrap_or_default();
        members.sort_by(|a, b| a.addresses.cmp(&b.addresses));
        members
    };
    let annotations = |slice: &EndpointSlice| slice.metadata.annotations.clone().unwrap_or_default();
    let owner = |slice: &EndpointSlice| {
        slice.metadata.owner_references.iter().flatten().map(|owner| owner.uid.clone()).collect::<Vec<_>>()
    };
    present.metadata.labels == made.metadata.labels
        && annotations(present) == annotations(made)
        && owner(present) == owner(made)
        && members(present) == members(made)
}

#[cfg(test)]
mod tests {
    use ferrite_json::{Value, json};

    use super::*;

    fn plan(endpoints: &Endpoints, existing: &[Arc<EndpointSlice>]) -> Plan {
        super::plan(endpoints, existing, CAPACITY)
    }

    fn endpoints(subsets: Value) -> Endpoints {
        ferrite_json::from_value(json!({"metadata": {"name": "e", "namespace": "ns", "uid": "u",
            "labels": {"l": "v"}, "annotations": {"a": "b", TRIGGER_TIME: "x"}}, "subsets": subsets}))
        .unwrap()
    }

    /// The slices as `family ports: address…`, a `!` before those not ready.
    fn text(slices: &[EndpointSlice]) -> Vec<String> {
        let mut found: Vec<_> = slices
            .iter()
            .map(|slice| {
                let ports: Vec<_> =
                    slice.ports.iter().flatten().map(|port| port.port.unwrap().to_string()).collect();
                let members: Vec<_> = slice
                    .endpoints
                    .iter()
                    .flatten()
                    .map(|member| {
                        let ready = member.conditions.as_ref().unwrap().ready == Some(true);
                        format!("{}{}", if ready { "" } else { "!" }, member.addresses[0])
                    })
                    .collect();
                format!("{} {}: {}", slice.address_type, ports.join(","), members.join(" "))
            })
            .collect();
        found.sort();
        found
    }

    /// The slices after the plan was carried out.
    fn stored(plan: &Plan) -> Vec<Arc<EndpointSlice>> {
        let numbered = plan.create.iter().enumerate().map(|(at, slice)| {
            let mut slice = slice.clone();
            slice.metadata.name = Some(format!("e-{at}"));
            slice.metadata.generate_name = None;
            Arc::new(slice)
        });
        numbered.collect()
    }

    #[test]
    fn subsets_become_slices_by_family_and_ports() {
        let port = |number: i32| json!({"port": number, "protocol": "TCP"});
        for (what, subsets, expected) in [
            ("none", json!([]), &[][..]),
            (
                "ready and not",
                json!([{"addresses": [{"ip": "10.0.0.1"}], "notReadyAddresses": [{"ip": "10.0.0.2"}], "ports": [port(80)]}]),
                &["IPv4 80: 10.0.0.1 !10.0.0.2"],
            ),
            (
                "both families",
                json!([{"addresses": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}], "ports": [port(80)]}]),
                &["IPv4 80: 10.0.0.1", "IPv6 80: fd00::1"],
            ),
            (
                "one address with two ports",
                json!([{"addresses": [{"ip": "10.0.0.1"}], "ports": [port(80)]},
                       {"addresses": [{"ip": "10.0.0.1"}], "ports": [port(443)]}]),
                &["IPv4 80,443: 10.0.0.1"],
            ),
            (
                "other ports, other addresses",
                json!([{"addresses": [{"ip": "10.0.0.1"}], "ports": [port(80)]},
                       {"addresses": [{"ip": "10.0.0.2"}], "ports": [port(443)]}]),
                &["IPv4 443: 10.0.0.2", "IPv4 80: 10.0.0.1"],
            ),
            ("no ports", json!([{"addresses": [{"ip": "10.0.0.1"}]}]), &["IPv4 : 10.0.0.1"]),
        ] {
            let plan = plan(&endpoints(subsets), &[]);
            assert_eq!(text(&plan.create), expected, "{what}");
            assert!(plan.update.is_empty() && plan.delete.is_empty());
        }
    }

    #[test]
    fn slices_are_kept_changed_and_reused() {
        let one = |ip: &str, port: i32| json!([{"addresses": [{"ip": ip}], "ports": [{"port": port, "protocol": "TCP"}]}]);
        let first = endpoints(one("10.0.0.1", 80));
        let made = plan(&first, &[]);
        let slices = stored(&made);
        let meta = &slices[0].metadata;
        assert_eq!(meta.labels.as_ref().unwrap()[SERVICE_NAME], "e");
        assert_eq!(meta.labels.as_ref().unwrap()["l"], "v");
        assert_eq!(meta.annotations.as_ref().unwrap().len(), 1, "the trigger time is not copied");
        let same = plan(&first, &slices);
        assert!(same.create.is_empty() && same.update.is_empty() && same.delete.is_empty());
        for (what, changed) in [
            ("another address", endpoints(one("10.0.0.2", 80))),
            ("another port", endpoints(one("10.0.0.1", 81))),
            ("another owner", {
                let mut other = first.clone();
                other.metadata.uid = Some("other".to_owned());
                other
            }),
            ("another label", {
                let mut other = first.clone();
                other.metadata.labels = None;
                other
            }),
        ] {
            let plan = plan(&changed, &slices);
            assert!(plan.create.is_empty() && plan.delete.is_empty(), "{what}");
            assert_eq!(plan.update.len(), 1, "{what}");
            assert_eq!(plan.update[0].metadata.name.as_deref(), Some("e-0"), "{what}");
        }
        let gone = plan(&endpoints(json!([])), &slices);
        assert_eq!(gone.delete, ["e-0"]);
    }

    #[test]
    fn bad_and_surplus_addresses_are_left_out() {
        let bad = plan(&endpoints(json!([{"addresses": [{"ip": "nonsense"}, {"ip": "10.0.0.1"}]}])), &[]);
        assert_eq!((bad.invalid, bad.skipped), (1, 1));
        let many: Vec<_> =
            (0..1003).map(|at| json!({"ip": format!("10.0.{}.{}", at / 250, at % 250)})).collect();
        let many = plan(&endpoints(json!([{"addresses": many}])), &[]);
        assert_eq!((many.invalid, many.skipped), (0, 3));
        assert_eq!(many.create[0].endpoints.as_ref().unwrap().len(), CAPACITY);
    }
}
