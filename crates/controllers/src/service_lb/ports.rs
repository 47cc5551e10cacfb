//! Assigns ports of the nodes' addresses to Services. All load balancers share those addresses with each other and with the nodes
//! themselves: a port goes to the first Service that asks, and is never taken from its present user.

use std::collections::BTreeMap;
use std::fmt;

use ferrite_client::ObjectKey;

/// A port of an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Port {
    pub(super) protocol: String,
    pub(super) number: i32,
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.protocol, self.number)
    }
}

/// Why a Service cannot have a port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum PortTaken {
    #[error("port {port} is that of Service {holder}, which has the nodes' addresses already")]
    LoadBalancer { port: Port, holder: ObjectKey },
    #[error("port {port} is a node port of Service {holder}")]
    NodePort { port: Port, holder: ObjectKey },
    #[error("port {port} of the nodes' addresses is used by {user}")]
    Node { port: Port, user: &'static str },
}

/// Ports that nodes use themselves: a Service with one would receive the node's traffic.
const OF_NODES: &[(&str, std::ops::RangeInclusive<i32>, &str)] = &[
    ("TCP", 22..=22, "remote access to the node"),
    ("TCP", 53..=53, "cluster DNS"),
    ("UDP", 53..=53, "cluster DNS"),
    ("TCP", 2379..=2381, "etcd"),
    ("UDP", 4789..=4789, "the pod network"),
    ("TCP", 6443..=6443, "the API server"),
    ("UDP", 8472..=8472, "the pod network"),
    ("TCP", 10_248..=10_260, "components of the cluster"),
    ("TCP", 30_000..=32_767, "node ports"),
    ("UDP", 30_000..=32_767, "node ports"),
    ("SCTP", 30_000..=32_767, "node ports"),
];

/// The use that nodes themselves have for a port.
pub(super) fn reserved(port: &Port) -> Option<PortTaken> {
    let row = OF_NODES
        .iter()
        .find(|(protocol, range, _)| *protocol == port.protocol && range.contains(&port.number));
    row.map(|(_, _, user)| PortTaken::Node { port: port.clone(), user })
}

/// The ports that Services hold.
#[derive(Debug, Default)]
pub(super) struct Ports {
    holders: BTreeMap<Port, ObjectKey>,
}

impl Ports {
    /// Gives `ports` to `service` and takes back others that it had. If one is another's, it keeps none.
    pub(super) fn claim(&mut self, service: &ObjectKey, ports: &[Port]) -> Result<(), PortTaken> {
        self.holders.retain(|port, holder| holder != service || ports.contains(port));
        for port in ports {
            if let Some(holder) = self.holders.get(port).filter(|holder| *holder != service) {
                let taken = PortTaken::LoadBalancer { port: port.clone(), holder: holder.clone() };
                self.release(service);
                return Err(taken);
            }
        }
        for port in ports {
            self.holders.insert(port.clone(), service.clone());
        }
        Ok(())
    }

    /// Takes back the ports of a Service. True if it had some.
    pub(super) fn release(&mut self, service: &ObjectKey) -> bool {
        let before = self.holders.len();
        self.holders.retain(|_, holder| holder != service);
        self.holders.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(number: i32) -> Port {
        Port { protocol: "TCP".into(), number }
    }

    #[test]
    fn the_first_has_the_port_until_it_gives_it_back() {
        let mut ports = Ports::default();
        let (a, b) = (ObjectKey::new("x", "a"), ObjectKey::new("y", "b"));
        assert_eq!(ports.claim(&a, &[port(80), port(443)]), Ok(()));
        assert_eq!(ports.claim(&a, &[port(80), port(443)]), Ok(()), "again");
        assert_eq!(ports.claim(&b, &[port(8080)]), Ok(()));
        let taken = PortTaken::LoadBalancer { port: port(443), holder: a.clone() };
        assert_eq!(
            ports.claim(&b, &[port(8080), port(443)]),
            Err(taken),
            "nobody edits themselves into a port"
        );
        assert!(!ports.release(&b), "who is refused keeps nothing");
        assert_eq!(ports.claim(&a, &[port(80)]), Ok(()));
        assert_eq!(ports.claim(&b, &[port(443)]), Ok(()));
        assert_eq!(
            ports.claim(&b, &[Port { protocol: "UDP".into(), number: 80 }]),
            Ok(()),
            "another protocol"
        );
        assert!(ports.release(&a));
        assert_eq!(ports.claim(&b, &[port(80)]), Ok(()));
    }

    #[test]
    fn ports_of_nodes_are_nobodys() {
        for (protocol, number, expected) in [
            ("TCP", 80, false),
            ("TCP", 22, true),
            ("UDP", 22, false),
            ("UDP", 8472, true),
            ("TCP", 6443, true),
            ("TCP", 10_250, true),
            ("TCP", 30_080, true),
            ("SCTP", 32_767, true),
            ("TCP", 32_768, false),
        ] {
            let port = Port { protocol: protocol.into(), number };
            assert_eq!(reserved(&port).is_some(), expected, "{port}");
        }
    }
}
