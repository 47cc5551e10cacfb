//! Finds an endpoint of a Service, as upstream's resolver does.

use super::CallError;
use crate::registry::View;
use ferrite_json::Value;
use rand::Rng;
use rand::seq::SliceRandom;
use std::net::{IpAddr, SocketAddr};

/// The label that names the Service of an EndpointSlice.
const SERVICE: &str = "kubernetes.io/service-name";

/// An address of a ready endpoint of a Service.
pub(super) fn endpoint(view: &View, namespace: &str, name: &str, port: u16) -> Result<SocketAddr, CallError> {
    let service =
        view.get("", "services", namespace, name).ok_or_else(|| CallError::NoService(name.to_owned()))?;
    let slices: Vec<Value> = view
        .objects("discovery.k8s.io", "endpointslices", namespace)
        .filter(|slice| slice["metadata"]["labels"][SERVICE] == *name)
        .collect();
    choose(&service, slices, port, &mut rand::rng())
}

/// Chooses among the ready endpoints of the slices: those of the Service's first family before others, else any.
fn choose(
    service: &Value,
    mut slices: Vec<Value>,
    port: u16,
    random: &mut impl Rng,
) -> Result<SocketAddr, CallError> {
    let name = || service["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let kind = service["spec"]["type"].as_str().unwrap_or("ClusterIP");
    if !matches!(kind, "ClusterIP" | "LoadBalancer" | "NodePort") {
        return Err(CallError::ServiceType(kind.to_owned()));
    }
    let mut ports = service["spec"]["ports"].as_array().into_iter().flatten();
    let found = ports.find(|candidate| candidate["port"] == i64::from(port));
    let found = found.ok_or_else(|| CallError::NoPort { service: name(), port })?;
    let port_name = found["name"].as_str().unwrap_or_default();
    slices.shuffle(random);
    if let Some(family) = service.pointer("/spec/ipFamilies/0") {
        slices.sort_by_key(|slice| slice["addressType"] != *family);
    }
    for slice in &slices {
        let ports = slice["ports"].as_array().into_iter().flatten();
        let named = ports.filter(|candidate| candidate["name"].as_str().unwrap_or_default() == port_name);
        for target in named.filter_map(|candidate| u16::try_from(candidate["port"].as_u64()?).ok()) {
            let mut endpoints: Vec<&Value> = slice["endpoints"].as_array().into_iter().flatten().collect();
            endpoints.shuffle(random);
            // As upstream: an endpoint that says nothing is ready.
            let ready = |endpoint: &&&Value| endpoint["conditions"]["ready"] != false;
            let address = endpoints.iter().filter(ready).find_map(|endpoint| {
                endpoint.pointer("/addresses/0").and_then(Value::as_str)?.parse::<IpAddr>().ok()
            });
            if let Some(address) = address {
                return Ok(SocketAddr::new(address, target));
            }
        }
    }
    Err(CallError::NoEndpoints(name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    fn slice(family: &str, port: Value, endpoints: Value) -> Value {
        json!({"addressType": family, "ports": [port], "endpoints": endpoints})
    }

    #[test]
    fn a_ready_endpoint_of_the_named_port_is_chosen() {
        let service = |kind: &str| {
            json!({"metadata": {"name": "s"}, "spec": {
                "type": kind, "ipFamilies": ["IPv4", "IPv6"],
                "ports": [{"name": "metrics", "port": 80}, {"name": "hook", "port": 443, "targetPort": "tls"}],
            }})
        };
        let hook = json!({"name": "hook", "port": 8443});
        let up = |address: &str| json!({"addresses": [address]});
        let down = |address: &str| json!({"addresses": [address], "conditions": {"ready": false}});
        let six = slice("IPv6", hook.clone(), json!([up("fd00::1")]));
        let rows = [
            (
                "ClusterIP",
                vec![slice("IPv4", hook.clone(), json!([up("10.0.0.1")]))],
                443,
                Ok("10.0.0.1:8443"),
            ),
            (
                "ClusterIP",
                vec![six.clone(), slice("IPv4", hook.clone(), json!([up("10.0.0.1")]))],
                443,
                Ok("10.0.0.1:8443"),
            ),
            (
                "ClusterIP",
                vec![six, slice("IPv4", hook.clone(), json!([down("10.0.0.1")]))],
                443,
                Ok("[fd00::1]:8443"),
            ),
            (
                "NodePort",
                vec![slice("IPv4", hook.clone(), json!([down("10.0.0.1"), up("10.0.0.2")]))],
                443,
                Ok("10.0.0.2:8443"),
            ),
            (
                "ClusterIP",
                vec![slice("IPv4", json!({"name": "metrics", "port": 1}), json!([up("10.0.0.1")]))],
                443,
                Err("no endpoints available for service \"s\""),
            ),
            ("ClusterIP", vec![], 443, Err("no endpoints available for service \"s\"")),
            ("ClusterIP", vec![], 444, Err("no service port 444 found for service \"s\"")),
            ("ExternalName", vec![], 443, Err("unsupported service type \"ExternalName\"")),
        ];
        for (kind, slices, port, expected) in rows {
            let got = choose(&service(kind), slices.clone(), port, &mut rand::rng());
            let got = got.map(|address| address.to_string()).map_err(|error| error.to_string());
            assert_eq!(got, expected.map(str::to_owned).map_err(str::to_owned), "{kind} {slices:?} {port}");
        }
    }
}
