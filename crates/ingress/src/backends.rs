//! The endpoints of a Service's port.

use crate::routes::PortRef;
use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// Connections are spread over no more endpoints of a Service than this.
const MAX_ENDPOINTS: usize = 5000;

/// Why no request can go to a Service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unreachable {
    #[error("the Service does not exist")]
    NoService,
    /// The name could be that of another namespace's Service, or of a server that only this node reaches.
    #[error("the Service is of type ExternalName, which is not routed")]
    ExternalName,
    #[error("the Service has no such port of TCP")]
    NoPort,
    #[error("the Service has no endpoint that is ready")]
    NoEndpoint,
}

/// The protocol to endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protocol {
    #[default]
    Http1,
    /// HTTP/2 without TLS: `appProtocol: kubernetes.io/h2c`, as gRPC wants it.
    Http2,
}

/// Where the requests for a port of a Service go.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Endpoints {
    pub addresses: Vec<SocketAddr>,
    pub protocol: Protocol,
    /// Requests of one client address stay with one endpoint (`sessionAffinity: ClientIP`).
    pub sticky: bool,
}

/// Finds the endpoints: those that are ready, or else those that still serve while they end, as the service proxy does.
pub fn endpoints(
    service: Option<&Service>,
    slices: &[Arc<EndpointSlice>],
    port: &PortRef,
) -> Result<Endpoints, Unreachable> {
    let spec = service.and_then(|service| service.spec.as_ref()).ok_or(Unreachable::NoService)?;
    if spec.type_.as_deref() == Some("ExternalName") {
        return Err(Unreachable::ExternalName);
    }
    let matches = |candidate: &&ServicePort| {
        let tcp = candidate.protocol.as_deref().unwrap_or("TCP") == "TCP";
        tcp && match port {
            PortRef::Number(number) => candidate.port == *number,
            PortRef::Name(name) => candidate.name.as_deref() == Some(name),
        }
    };
    let port = spec.ports.iter().flatten().find(matches).ok_or(Unreachable::NoPort)?;
    let name = port.name.as_deref().unwrap_or_default();
    let (mut ready, mut ending) = (BTreeSet::new(), BTreeSet::new());
    for slice in slices {
        let number = slice
            .ports
            .iter()
            .flatten()
            .filter(|port| port.protocol.as_deref().unwrap_or("TCP") == "TCP")
            .find(|port| port.name.as_deref().unwrap_or_default() == name)
            .and_then(|port| u16::try_from(port.port?).ok());
        let Some(number) = number else { continue };
        for endpoint in slice.endpoints.iter().flatten() {
            let conditions = endpoint.conditions.as_ref();
            let is_ready = conditions.and_then(|c| c.ready).unwrap_or(true);
            let serving = conditions.and_then(|c| c.serving).unwrap_or(is_ready);
            let terminating = conditions.and_then(|c| c.terminating).unwrap_or(false);
            let into = match (is_ready, serving && terminating) {
                (true, _) => &mut ready,
                (false, true) => &mut ending,
                (false, false) => continue,
            };
            // All addresses of an endpoint are the same server.
            let address = endpoint.addresses.first().and_then(|text| text.parse::<IpAddr>().ok());
            into.extend(address.filter(may_be_reached).map(|ip| SocketAddr::new(ip, number)));
        }
    }
    let chosen = if ready.is_empty() { ending } else { ready };
    if chosen.is_empty() {
        return Err(Unreachable::NoEndpoint);
    }
    let protocol = match port.app_protocol.as_deref() {
        Some("kubernetes.io/h2c") => Protocol::Http2,
        _ => Protocol::Http1,
    };
    Ok(Endpoints {
        addresses: chosen.into_iter().take(MAX_ENDPOINTS).collect(),
        protocol,
        sticky: spec.session_affinity.as_deref() == Some("ClientIP"),
    })
}

/// Not this machine's own services that listen on loopback, nor those of its link (cloud metadata): the proxy is no way
/// to them, whatever a slice says.
fn may_be_reached(address: &IpAddr) -> bool {
    let address = address.to_canonical();
    let link_local = match address {
        IpAddr::V4(v4) => v4.is_link_local() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    };
    !(address.is_loopback() || address.is_unspecified() || address.is_multicast() || link_local)
}

/// The order in which endpoints are tried: all, from the one whose turn it is, or from the client's own.
pub fn order(endpoints: &Endpoints, turn: usize, client: IpAddr) -> impl Iterator<Item = SocketAddr> + '_ {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let all = &endpoints.addresses;
    let start = match endpoints.sticky {
        false => turn % all.len().max(1),
        true => {
            // The endpoint with the largest hash: when another one goes, the client stays.
            let weight = |address: &SocketAddr| {
                let mut hasher = DefaultHasher::new();
                (client, address).hash(&mut hasher);
                hasher.finish()
            };
            (0..all.len()).max_by_key(|&place| weight(&all[place])).unwrap_or(0)
        }
    };
    all.iter().cycle().skip(start).take(all.len()).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(spec: Value) -> Service {
        serde_json::from_value(json!({"metadata": {"name": "web"}, "spec": spec})).unwrap()
    }

    fn slice(port: &str, endpoints: Value) -> Arc<EndpointSlice> {
        let object = json!({
            "metadata": {"name": "web-1"}, "addressType": "IPv4", "endpoints": endpoints,
            "ports": [{"name": port, "port": 8080, "protocol": "TCP"}],
        });
        Arc::new(serde_json::from_value(object).unwrap())
    }

    fn endpoint(address: &str, ready: bool, serving: bool, terminating: bool) -> Value {
        json!({
            "addresses": [address],
            "conditions": {"ready": ready, "serving": serving, "terminating": terminating},
        })
    }

    #[test]
    fn requests_go_to_endpoints_that_serve() {
        let ports = json!([{"name": "http", "port": 80, "targetPort": 8080}, {"name": "dns", "port": 53, "protocol": "UDP"}]);
        let spec = json!({"type": "ClusterIP", "ports": ports});
        let ready = endpoint("10.0.0.1", true, true, false);
        let starting = endpoint("10.0.0.2", false, false, false);
        let ending = endpoint("10.0.0.3", false, true, true);
        let http = PortRef::Name("http".into());
        let one = |address: &str| Ok(vec![address.to_owned()]);
        for (what, spec, endpoints_, port, want) in [
            ("by number", spec.clone(), json!([ready]), PortRef::Number(80), one("10.0.0.1:8080")),
            ("by name", spec.clone(), json!([ready]), http.clone(), one("10.0.0.1:8080")),
            (
                "only the ready",
                spec.clone(),
                json!([ready, starting, ending]),
                http.clone(),
                one("10.0.0.1:8080"),
            ),
            ("else the ending", spec.clone(), json!([starting, ending]), http.clone(), one("10.0.0.3:8080")),
            ("none", spec.clone(), json!([starting]), http.clone(), Err(Unreachable::NoEndpoint)),
            ("no port", spec.clone(), json!([ready]), PortRef::Number(81), Err(Unreachable::NoPort)),
            ("no port of TCP", spec.clone(), json!([ready]), PortRef::Number(53), Err(Unreachable::NoPort)),
            (
                "another name",
                json!({"type": "ExternalName", "externalName": "db.prod.svc.cluster.local", "ports": ports}),
                json!([ready]),
                http.clone(),
                Err(Unreachable::ExternalName),
            ),
            (
                "addresses of this machine",
                spec.clone(),
                json!([
                    endpoint("127.0.0.1", true, true, false),
                    endpoint("169.254.169.254", true, true, false),
                    endpoint("::1", true, true, false),
                    endpoint("fe80::1", true, true, false),
                    endpoint("0.0.0.0", true, true, false),
                    endpoint("::ffff:127.0.0.1", true, true, false),
                ]),
                http.clone(),
                Err(Unreachable::NoEndpoint),
            ),
        ] {
            let found = endpoints(Some(&service(spec)), &[slice("http", endpoints_)], &port);
            let found = found.map(|e| e.addresses.iter().map(ToString::to_string).collect::<Vec<_>>());
            assert_eq!(found, want, "{what}");
        }
        assert_eq!(endpoints(None, &[], &http), Err(Unreachable::NoService));
    }

    #[test]
    fn every_endpoint_is_tried_and_sticky_clients_start_at_their_own() {
        let addresses: Vec<SocketAddr> =
            ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"].iter().map(|a| a.parse().unwrap()).collect();
        let mut all = Endpoints { addresses: addresses.clone(), ..Endpoints::default() };
        let client: IpAddr = "192.0.2.7".parse().unwrap();
        let first = |turn| order(&all, turn, client).next().unwrap();
        assert_eq!(
            [first(0), first(1), first(2), first(3)],
            [addresses[0], addresses[1], addresses[2], addresses[0]]
        );
        assert_eq!(order(&all, 1, client).collect::<Vec<_>>(), [addresses[1], addresses[2], addresses[0]]);
        all.sticky = true;
        let own = order(&all, 0, client).next().unwrap();
        assert_eq!(order(&all, 1, client).next().unwrap(), own);
        // Another endpoint goes: the client stays.
        all.addresses.retain(|a| *a == own || *a == addresses[0]);
        assert_eq!(order(&all, 5, client).next().unwrap(), own);
        assert_eq!(order(&Endpoints::default(), 3, client).count(), 0);
    }
}
