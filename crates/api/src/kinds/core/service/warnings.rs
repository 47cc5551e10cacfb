//! Warnings about a valid service: fields that are deprecated or do nothing.

use crate::field::Path;
use crate::kinds::common::access::{list, present, strings, text};
use crate::kinds::common::check::ip_warning;
use ferrite_json::Value;

const HINTS: &str = "service.kubernetes.io/topology-aware-hints";
const MODE: &str = "service.kubernetes.io/topology-mode";

pub(super) fn warnings(service: &Value) -> Vec<String> {
    let (spec, path) = (&service["spec"], Path::new("spec"));
    let mut warnings = Vec::new();
    if present(&service["metadata"]["annotations"], HINTS) {
        warnings.push(format!("annotation {HINTS} is deprecated, please use {MODE} instead"));
    }
    let addresses = |key: &str| -> Vec<String> {
        let path = path.child(key);
        let addresses = strings(spec, key).into_iter().enumerate();
        addresses.filter_map(|(index, address)| ip_warning(address, &path.index(index))).collect()
    };
    warnings.extend(addresses("clusterIPs"));
    let external = !list(spec, "externalIPs").is_empty();
    let by_name = text(spec, "type") == "ExternalName";
    let headless = text(spec, "type") == "ClusterIP" && text(spec, "clusterIP") == "None";
    if headless {
        let ignored = [
            (!text(spec, "loadBalancerIP").is_empty(), "loadBalancerIP"),
            (external, "externalIPs"),
            (text(spec, "sessionAffinity") != "None", "SessionAffinity"),
        ];
        for (_, key) in ignored.iter().filter(|(is_set, _)| *is_set) {
            warnings.push(format!("spec.{key} is ignored for headless services"));
        }
    }
    warnings.extend(addresses("externalIPs"));
    if external && !headless && !by_name {
        warnings.push(
            "spec.externalIPs is deprecated and may no longer be implemented in some clusters".to_owned(),
        );
    }
    warnings.extend(ip_warning(text(spec, "loadBalancerIP"), &path.child("loadBalancerIP")));
    if by_name && external {
        warnings.push("spec.externalIPs is ignored when spec.type is \"ExternalName\"".to_owned());
    }
    if !by_name && !text(spec, "externalName").is_empty() {
        warnings.push("spec.externalName is ignored when spec.type is not \"ExternalName\"".to_owned());
    }
    if text(spec, "trafficDistribution") == "PreferClose" {
        warnings.push(
            "spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\"".to_owned(),
        );
    }
    warnings
}
