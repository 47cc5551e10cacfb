//! The values that an update of a Service keeps from the old one: allocated addresses and ports stay with
//! the service although a client that does not know them leaves them out.

use super::is_externally_accessible;
use crate::kinds::common::access::{int, keep, list, list_mut, present, text};
use ferrite_json::Value;

fn needs_cluster_ip(spec: &Value) -> bool {
    text(spec, "type") != "ExternalName"
}

fn needs_node_ports(spec: &Value) -> bool {
    matches!(text(spec, "type"), "NodePort" | "LoadBalancer")
}

fn needs_health_port(spec: &Value) -> bool {
    text(spec, "type") == "LoadBalancer" && text(spec, "externalTrafficPolicy") == "Local"
}

fn remove(spec: &mut Value, key: &str) {
    if let Some(spec) = spec.as_object_mut() {
        spec.remove(key);
    }
}

/// `clusterIP` and the first of `clusterIPs` say the same; the one that was changed counts.
pub(super) fn normalise_cluster_ips(spec: &mut Value, old: Option<&Value>) {
    let single = text(spec, "clusterIP").to_owned();
    let Some(old) = old else {
        if !single.is_empty() && list(spec, "clusterIPs").is_empty() {
            spec["clusterIPs"] = vec![single].into();
        }
        return;
    };
    if single != text(old, "clusterIP") && spec["clusterIPs"] == old["clusterIPs"] {
        if single.is_empty() {
            remove(spec, "clusterIPs");
        } else {
            spec["clusterIPs"] = vec![single].into();
        }
    }
}

pub(super) fn keep_allocations(spec: &mut Value, old: &Value) {
    drop_what_the_type_forbids(spec, old);
    if needs_cluster_ip(spec) && needs_cluster_ip(old) {
        if text(spec, "clusterIP").is_empty() {
            keep(spec, old, "clusterIP");
        }
        if list(spec, "clusterIPs").is_empty() {
            keep(spec, old, "clusterIPs");
        }
        if !present(spec, "ipFamilyPolicy") {
            keep(spec, old, "ipFamilyPolicy");
        }
    }
    if needs_node_ports(spec) && needs_node_ports(old) {
        keep_node_ports(spec, old);
    }
    if needs_health_port(spec) && needs_health_port(old) && int(spec, "healthCheckNodePort") == 0 {
        keep(spec, old, "healthCheckNodePort");
    }
}

/// Ports are known by their names: whatever else has changed about one, its number on the nodes stays, unless
/// another port of the service has it now.
fn keep_node_ports(spec: &mut Value, old: &Value) {
    let numbers = |spec: &Value| list(spec, "ports").iter().map(|p| int(p, "nodePort")).collect::<Vec<_>>();
    let used = numbers(spec);
    for port in list_mut(spec, "ports").filter(|p| p.is_object() && int(p, "nodePort") == 0) {
        let same = |o: &&Value| text(o, "name") == text(port, "name");
        let number = list(old, "ports").iter().rfind(same).map_or(0, |o| int(o, "nodePort"));
        if number != 0 && !used.contains(&number) {
            port["nodePort"] = number.into();
        }
    }
}

/// A change of type makes some fields meaningless. Those that merely come along from the old object go;
/// those the client has set itself are left for validation to refuse.
fn drop_what_the_type_forbids(spec: &mut Value, old: &Value) {
    let lost_balancer = text(old, "type") == "LoadBalancer" && text(spec, "type") != "LoadBalancer";
    let no_longer = [
        (
            needs_cluster_ip(old) && !needs_cluster_ip(spec),
            &["clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy", "internalTrafficPolicy"][..],
        ),
        (needs_health_port(old) && !needs_health_port(spec), &["healthCheckNodePort"]),
        (lost_balancer, &["allocateLoadBalancerNodePorts", "loadBalancerClass"]),
        (is_externally_accessible(old) && !is_externally_accessible(spec), &["externalTrafficPolicy"]),
    ];
    let lost_node_ports = needs_node_ports(old) && !needs_node_ports(spec);
    for (lost, keys) in no_longer {
        for key in keys.iter().filter(|_| lost) {
            if spec.get(*key) == old.get(*key) {
                remove(spec, key);
            }
        }
    }
    let numbers = |spec: &Value| list(spec, "ports").iter().map(|p| int(p, "nodePort")).collect::<Vec<_>>();
    if lost_node_ports && numbers(spec) == numbers(old) {
        for port in list_mut(spec, "ports") {
            remove(port, "nodePort");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn allocations_survive_an_update_that_leaves_them_out() {
        let old = json!({"type": "NodePort", "clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5"],
            "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack", "externalTrafficPolicy": "Cluster",
            "ports": [{"port": 80, "protocol": "TCP", "nodePort": 30001}]});
        let mut spec = json!({"type": "NodePort", "externalTrafficPolicy": "Cluster",
            "ports": [{"port": 80, "protocol": "TCP"}]});
        keep_allocations(&mut spec, &old);
        // The families follow from the addresses; the allocator decides.
        spec["ipFamilies"] = old["ipFamilies"].clone();
        assert_eq!(spec, old);
    }

    #[test]
    fn a_change_of_type_drops_what_came_along() {
        let old = json!({"type": "NodePort", "clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5"],
            "externalTrafficPolicy": "Cluster", "ports": [{"port": 80, "nodePort": 30001}]});
        let mut spec = old.clone();
        spec["type"] = "ClusterIP".into();
        keep_allocations(&mut spec, &old);
        assert_eq!(
            spec,
            json!({"type": "ClusterIP", "clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5"], "ports": [{"port": 80}]})
        );
        let mut spec = old.clone();
        spec["type"] = "ExternalName".into();
        keep_allocations(&mut spec, &old);
        assert_eq!(spec, json!({"type": "ExternalName", "ports": [{"port": 80}]}));
    }

    #[test]
    fn the_changed_form_of_the_address_counts() {
        let old = json!({"clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5"]});
        for (new, addresses) in [
            (json!({"clusterIP": "10.0.0.6", "clusterIPs": ["10.0.0.5"]}), json!(["10.0.0.6"])),
            (json!({"clusterIP": "", "clusterIPs": ["10.0.0.5"]}), Value::Null),
            (json!({"clusterIP": "10.0.0.5", "clusterIPs": ["10.0.0.5"]}), json!(["10.0.0.5"])),
        ] {
            let mut spec = new.clone();
            normalise_cluster_ips(&mut spec, Some(&old));
            assert_eq!(spec["clusterIPs"], addresses, "{new}");
        }
        let mut spec = json!({"clusterIP": "None"});
        normalise_cluster_ips(&mut spec, None);
        assert_eq!(spec["clusterIPs"], json!(["None"]));
    }
}
