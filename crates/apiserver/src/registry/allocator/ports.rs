//! Ports that Services open on every node.

use super::families::text;
use super::metrics::COUNTS;
use super::ranges::{by_name, from_somewhere};
use ferrite_api::Status;
use ferrite_api::field::{FieldError, Path};
use ferrite_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// The allocation of ports in one write: those of others, and those of the write so far.
pub(super) struct Giving<'a> {
    pub range: &'a RangeInclusive<u16>,
    /// True if allocations are counted: dry runs keep nothing.
    pub counts: bool,
    /// Returns true if a stored Service has a port.
    pub held: &'a dyn Fn(u16) -> bool,
    /// Ports of this and other writes in progress.
    pub reserved: &'a mut BTreeSet<u16>,
    pub given: &'a mut Vec<u16>,
}

impl Giving<'_> {
    fn take(&mut self, port: u64) -> Result<(), String> {
        let in_range = |port: u64| u16::try_from(port).is_ok_and(|port| self.range.contains(&port));
        if !self.counts && !in_range(port) {
            // As upstream: a dry run does not look at the range.
            return Ok(());
        }
        let Some(port) = u16::try_from(port).ok().filter(|p| self.range.contains(p)) else {
            let (first, last) = (self.range.start(), self.range.end());
            return Err(format!(
                "provided port is not in the valid range. The range of valid ports is {first}-{last}"
            ));
        };
        let free = !(self.held)(port) && self.reserved.insert(port);
        self.count("static", free);
        if !free {
            return Err("provided port is already allocated".into());
        }
        self.given.push(port);
        Ok(())
    }

    /// Any free port; the lower part of the range is left for static allocation.
    fn next(&mut self) -> Result<u64, &'static str> {
        let (first, last) = (u128::from(*self.range.start()), u128::from(*self.range.end()));
        let upper = first + by_name(last.saturating_sub(first) + 1, 32, 128);
        let free = from_somewhere(upper, last)
            .chain(from_somewhere(first, upper - 1))
            .filter_map(|port| u16::try_from(port).ok())
            .find(|port| !self.reserved.contains(port) && !(self.held)(*port));
        self.count("dynamic", free.is_some());
        let free = free.ok_or("range is full")?;
        self.reserved.insert(free);
        self.given.push(free);
        Ok(free.into())
    }

    fn count(&self, scope: &str, given: bool) {
        if self.counts {
            let family = if given { &COUNTS.ports } else { &COUNTS.port_errors };
            family.with(&[scope]).increment();
        }
    }

    fn next_node_port(&mut self) -> Result<u64, Status> {
        self.next().map_err(|why| Status::internal(format!("failed to allocate a nodePort: {why}")))
    }
}

/// The number of a field; zero when it is not set.
fn number(value: &Value, key: &str) -> u64 {
    value.get(key).and_then(Value::as_u64).unwrap_or(0)
}

fn ports(spec: &Value) -> impl Iterator<Item = &Value> {
    spec.get("ports").and_then(Value::as_array).into_iter().flatten()
}

fn has_node_ports(spec: &Value) -> bool {
    matches!(text(spec, "type"), "NodePort" | "LoadBalancer")
}

fn has_health_port(spec: &Value) -> bool {
    text(spec, "type") == "LoadBalancer" && text(spec, "externalTrafficPolicy") == "Local"
}

fn refused(name: &str, index: usize, port: u64, why: String) -> Status {
    let path = Path::new("spec").child("ports").index(index).child("nodePort");
    Status::invalid("", "Service", name, &[FieldError::invalid(&path, port, why)])
}

/// Gives a Service the ports it needs. `name` is the Service's, for errors.
pub(super) fn give(
    spec: &mut Value,
    old: Option<&Value>,
    name: &str,
    giving: &mut Giving<'_>,
) -> Result<(), Status> {
    if has_node_ports(spec) {
        let fill = text(spec, "type") == "NodePort"
            || spec.get("allocateLoadBalancerNodePorts").and_then(Value::as_bool).unwrap_or(true);
        match old {
            None => give_to_new(spec, name, fill, giving)?,
            Some(old) => give_to_changed(spec, old, name, fill, giving)?,
        }
    }
    if has_health_port(spec) && !old.is_some_and(has_health_port) {
        give_health_port(spec, giving)?;
    }
    Ok(())
}

/// As upstream: the same port of several protocols has the same number on the nodes.
fn give_to_new(spec: &mut Value, name: &str, fill: bool, giving: &mut Giving<'_>) -> Result<(), Status> {
    let mut asked: BTreeMap<u64, u64> = BTreeMap::new();
    for port in ports(spec).filter(|p| number(p, "nodePort") != 0) {
        asked.entry(number(port, "port")).or_insert_with(|| number(port, "nodePort"));
    }
    let mut shared: BTreeMap<u64, u64> = BTreeMap::new();
    let all = spec.get_mut("ports").and_then(Value::as_array_mut);
    for (index, port) in all.into_iter().flatten().enumerate().filter(|(_, p)| p.is_object()) {
        let (wanted, service_port) = (number(port, "nodePort"), number(port, "port"));
        if wanted == 0 && !fill {
            continue;
        }
        let refuse = |port: u64| move |why: String| refused(name, index, port, why);
        let got = match (shared.get(&service_port), asked.get(&service_port)) {
            (Some(shared), _) if wanted == 0 || wanted == *shared => *shared,
            (Some(_), _) => {
                giving.take(wanted).map_err(refuse(wanted))?;
                wanted
            }
            (None, Some(asked)) => {
                giving.take(*asked).map_err(refuse(*asked))?;
                *asked
            }
            (None, None) => giving.next_node_port()?,
        };
        shared.entry(service_port).or_insert(got);
        if wanted == 0 {
            port["nodePort"] = got.into();
        }
    }
    Ok(())
}

fn give_to_changed(
    spec: &mut Value,
    old: &Value,
    name: &str,
    fill: bool,
    giving: &mut Giving<'_>,
) -> Result<(), Status> {
    let mut own: BTreeSet<u64> = ports(old).map(|p| number(p, "nodePort")).collect();
    let all = spec.get_mut("ports").and_then(Value::as_array_mut);
    for (index, port) in all.into_iter().flatten().enumerate().filter(|(_, p)| p.is_object()) {
        let wanted = number(port, "nodePort");
        if wanted == 0 && fill {
            port["nodePort"] = giving.next_node_port()?.into();
        } else if wanted != 0 && !own.contains(&wanted) {
            giving.take(wanted).map_err(|why| refused(name, index, wanted, why))?;
            own.insert(wanted);
        }
    }
    Ok(())
}

/// The port at which balancers ask a node whether it has endpoints.
fn give_health_port(spec: &mut Value, giving: &mut Giving<'_>) -> Result<(), Status> {
    // As upstream: a negative number asks for nothing, and is refused by validation.
    if spec["healthCheckNodePort"].as_i64().is_some_and(|wanted| wanted < 0) {
        return Ok(());
    }
    let wanted = number(spec, "healthCheckNodePort");
    if wanted != 0 {
        return giving.take(wanted).map_err(|why| {
            Status::internal(format!("failed to allocate requested HealthCheck NodePort {wanted}: {why}"))
        });
    }
    let got = giving
        .next()
        .map_err(|why| Status::internal(format!("failed to allocate a HealthCheck NodePort 0: {why}")))?;
    spec["healthCheckNodePort"] = got.into();
    Ok(())
}

/// Every port a Service holds on the nodes, the one for health checks included.
pub(in crate::registry) fn held(service: &Value) -> impl Iterator<Item = u16> {
    let spec = &service["spec"];
    ports(spec)
        .map(|p| number(p, "nodePort"))
        .chain([number(spec, "healthCheckNodePort")])
        .filter_map(|p| u16::try_from(p).ok())
        .filter(|p| *p != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    /// The ports given in a range of a hundred where 30001 is somebody else's, or the error.
    fn given(mut spec: Value, old: Option<Value>) -> Result<Value, String> {
        let own: Vec<u16> =
            old.iter().flat_map(|spec| held(&json!({"spec": spec})).collect::<Vec<_>>()).collect();
        let held = |port: u16| port == 30001 || own.contains(&port);
        let (mut reserved, mut got) = (BTreeSet::new(), Vec::new());
        let mut giving = Giving {
            counts: true,
            range: &(30000..=30099),
            held: &held,
            reserved: &mut reserved,
            given: &mut got,
        };
        give(&mut spec, old.as_ref(), "s", &mut giving)
            .map_err(|status| status.message.clone())
            .map(|()| spec)
    }

    #[test]
    fn one_port_of_several_protocols_has_one_number() {
        let both = json!([{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}, {"port": 80}]);
        let spec = given(json!({"type": "NodePort", "ports": both}), None).expect("ports");
        let number = |i: usize| spec["ports"][i]["nodePort"].as_u64().expect("a number");
        assert_eq!(number(0), number(1));
        assert_ne!(number(0), number(2));
        assert!(
            (30016..=30099).contains(&number(0)),
            "the lower part is left to those who ask: {}",
            number(0)
        );
        // A number that one of them asks for is the other's too.
        let asked =
            json!([{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP", "nodePort": 30005}]);
        let spec = given(json!({"type": "NodePort", "ports": asked}), None).expect("ports");
        assert_eq!(
            (&spec["ports"][0]["nodePort"], &spec["ports"][1]["nodePort"]),
            (&json!(30005), &json!(30005))
        );
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        let node = |ports: Value| json!({"type": "NodePort", "ports": ports});
        let balancer = |extra: Value| {
            let mut spec = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": []});
            extra.as_object().expect("fields").iter().for_each(|(k, v)| spec[k] = v.clone());
            spec
        };
        for (spec, why) in [
            (
                node(json!([{"port": 1, "nodePort": 30001}])),
                "Service \"s\" is invalid: spec.ports[0].nodePort: Invalid value: 30001: provided port is already allocated",
            ),
            (
                node(json!([{"port": 1, "nodePort": 80}])),
                "Service \"s\" is invalid: spec.ports[0].nodePort: Invalid value: 80: provided port is not in the valid range. The range of valid ports is 30000-30099",
            ),
            (
                balancer(json!({"healthCheckNodePort": 30001})),
                "Internal error occurred: failed to allocate requested HealthCheck NodePort 30001: provided port is already allocated",
            ),
        ] {
            assert_eq!(given(spec.clone(), None), Err(why.to_owned()), "{spec}");
        }
        let unfilled = given(
            json!({"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "ports": [{"port": 1}]}),
            None,
        );
        assert_eq!(unfilled.expect("no ports")["ports"], json!([{"port": 1}]));
    }

    #[test]
    fn a_changed_service_keeps_its_own() {
        let old = json!({"type": "NodePort", "ports": [{"port": 1, "protocol": "TCP", "nodePort": 30050}]});
        let both = json!({"type": "NodePort", "ports": [
            {"port": 1, "protocol": "TCP", "nodePort": 30050}, {"port": 1, "protocol": "UDP", "nodePort": 30050}]});
        assert_eq!(given(both.clone(), Some(old.clone())), Ok(both));
        let local = json!({"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{"port": 1, "nodePort": 30050}]});
        let health = given(local, Some(old)).expect("ports");
        assert!(health["healthCheckNodePort"].as_u64().is_some_and(|p| p >= 30016), "{health}");
    }
}
