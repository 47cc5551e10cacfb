//! Decides whether an APIService can be served.

use ferrite_api::quota::amounts::list;
use ferrite_json::{Value, json};
use jiff::Timestamp;

/// The outcome of the checks, in upstream's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub available: bool,
    pub reason: &'static str,
    pub message: String,
}

impl Verdict {
    pub fn local() -> Self {
        Self { available: true, reason: "Local", message: "Local APIServices are always available".into() }
    }

    pub fn passed() -> Self {
        Self { available: true, reason: "Passed", message: "all checks passed".into() }
    }

    pub fn failed_discovery(message: String) -> Self {
        Self { available: false, reason: "FailedDiscoveryCheck", message }
    }

    fn missing(reason: &'static str, message: String) -> Self {
        Self { available: false, reason, message }
    }
}

/// Checks the Service of an APIService and its EndpointSlices. An error is a reason not to ask the server itself.
pub(super) fn check_service(
    (namespace, name, port): (&str, &str, u16),
    service: Option<&Value>,
    slices: &[Value],
) -> Result<(), Verdict> {
    let at = format!("service/{name} in {namespace:?}");
    let Some(service) = service else {
        return Err(Verdict::missing("ServiceNotFound", format!("{at} is not present")));
    };
    if service.pointer("/spec/type").and_then(Value::as_str) != Some("ClusterIP") {
        return Ok(());
    }
    let ports = list(&service["spec"], "ports");
    let Some(found) = ports.iter().find(|p| p["port"].as_u64() == Some(port.into())) else {
        return Err(Verdict::missing("ServicePortError", format!("{at} is not listening on port {port}")));
    };
    if slices.is_empty() {
        return Err(Verdict::missing("EndpointsNotFound", format!("cannot find endpointslices for {at}")));
    }
    let port_name = found["name"].as_str().unwrap_or_default();
    let serves = |slice: &Value| {
        let ready = list(slice, "endpoints").iter().any(|e| e["conditions"]["ready"] != false);
        let named = |p: &Value| p["name"].as_str().unwrap_or_default() == port_name && p["port"].is_number();
        ready && list(slice, "ports").iter().any(named)
    };
    if slices.iter().any(serves) {
        return Ok(());
    }
    let why = format!("endpointslices for {at} have no addresses with port name {port_name:?}");
    Err(Verdict::missing("MissingEndpoints", why))
}

/// The status of an APIService with the verdict in it; none if it says so already.
pub(super) fn status(object: &Value, verdict: &Verdict, now: Timestamp) -> Option<Value> {
    let mut conditions = list(&object["status"], "conditions").to_vec();
    let status = if verdict.available { "True" } else { "False" };
    let mut new = json!({
        "type": "Available",
        "status": status,
        "lastTransitionTime": crate::registry::metadata::time(now),
        "reason": verdict.reason,
        "message": verdict.message,
    });
    match conditions.iter_mut().find(|condition| condition["type"] == "Available") {
        Some(old) => {
            if old["status"] == status {
                new["lastTransitionTime"] = old["lastTransitionTime"].clone();
            }
            if *old == new {
                return None;
            }
            *old = new;
        }
        None => conditions.push(new),
    }
    Some(json!({"conditions": conditions}))
}

/// Returns true if the stored status says that the APIService can be served.
pub(super) fn is_available(object: &Value) -> bool {
    let conditions = list(&object["status"], "conditions");
    conditions.iter().any(|condition| condition["type"] == "Available" && condition["status"] == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_needs_its_port_and_ready_endpoints() {
        let service = json!({"spec": {"type": "ClusterIP", "ports": [{"name": "https", "port": 443}]}});
        let external = json!({"spec": {"type": "ExternalName"}});
        let slice = |ready: bool, port: &str| {
            json!({
                "ports": [{"name": port, "port": 8443}],
                "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}],
            })
        };
        let good = [slice(false, "https"), slice(true, "https")];
        let rows = [
            (None, 443, &good[..], Some("ServiceNotFound")),
            (Some(&external), 443, &[], None),
            (Some(&service), 444, &good, Some("ServicePortError")),
            (Some(&service), 443, &[], Some("EndpointsNotFound")),
            (Some(&service), 443, &good[..1], Some("MissingEndpoints")),
            (Some(&service), 443, &[slice(true, "other")], Some("MissingEndpoints")),
            (Some(&service), 443, &good, None),
        ];
        for (index, (service, port, slices, reason)) in rows.into_iter().enumerate() {
            let verdict = check_service(("a", "b", port), service, slices);
            assert_eq!(verdict.err().map(|v| v.reason), reason, "row {index}");
        }
    }

    #[test]
    fn the_time_of_a_transition_stays_while_the_status_does() {
        let (first, later) = (Timestamp::UNIX_EPOCH, Timestamp::from_second(60).expect("a time"));
        let passed = Verdict::passed();
        let failed = |why: &str| Verdict::failed_discovery(why.into());
        let mut object = json!({});
        object["status"] = status(&object, &failed("a"), first).expect("a first status");
        assert!(!is_available(&object));
        assert_eq!(status(&object, &failed("a"), later), None, "nothing new");
        let other = status(&object, &failed("b"), later).expect("another message");
        assert_eq!(other["conditions"][0]["lastTransitionTime"], "1970-01-01T00:00:00Z");
        object["status"] = status(&object, &passed, later).expect("a transition");
        assert_eq!(object["status"]["conditions"][0]["lastTransitionTime"], "1970-01-01T00:01:00Z");
        assert!(is_available(&object));
    }
}
