//! Name resolution of pods.

use crate::pod::model;
use ferrite_cri::v1::DnsConfig;
use k8s_openapi::api::core::v1::Pod;
use std::net::IpAddr;
use std::path::Path;

const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
/// Of the search list in its line, spaces included.
const MAX_SEARCH_CHARACTERS: usize = 2048;

/// Cluster DNS as the node is configured.
#[derive(Debug, Clone, Default)]
pub(crate) struct ClusterDns {
    /// Without one, pods resolve names as the node does.
    pub addresses: Vec<IpAddr>,
    pub domain: String,
}

/// The node's configuration as it is now. Without the file there is none.
pub(crate) fn read_resolv_conf(file: &Path) -> DnsConfig {
    parse_resolv_conf(&std::fs::read_to_string(file).unwrap_or_default())
}

/// Parses a `resolv.conf`.
pub(crate) fn parse_resolv_conf(text: &str) -> DnsConfig {
    let mut config = DnsConfig::default();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(key) = words.next() else { continue };
        match key {
            "nameserver" => config.servers.extend(words.next().map(str::to_string)),
            "search" | "domain" => config.searches = words.map(without_dot).collect(),
            "options" => config.options = words.map(str::to_string).collect(),
            _ => {}
        }
    }
    config
}

/// A domain is the same with and without a dot at its end; the root is only the dot.
fn without_dot(domain: &str) -> String {
    domain.strip_suffix('.').filter(|rest| !rest.is_empty()).unwrap_or(domain).to_string()
}

/// The resolver configuration of a pod: its policy, then its own additions.
pub(crate) fn pod_dns(pod: &Pod, cluster: &ClusterDns, node: &DnsConfig) -> DnsConfig {
    let spec = model::spec(pod);
    let policy = match spec.dns_policy.as_deref() {
        // A pod on the node's network resolves as the node does unless it asks for the cluster's names.
        Some("ClusterFirst") | None if model::is_host_network(pod) => "Default",
        Some(policy) => policy,
        None => "ClusterFirst",
    };
    let mut dns = match policy {
        "None" => DnsConfig::default(),
        "ClusterFirst" | "ClusterFirstWithHostNet" if !cluster.addresses.is_empty() => {
            let servers = cluster.addresses.iter().map(ToString::to_string).collect();
            let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
            let domain = &cluster.domain;
            let mut searches =
                vec![format!("{namespace}.svc.{domain}"), format!("svc.{domain}"), domain.clone()];
            searches.extend(node.searches.iter().cloned());
            DnsConfig { servers, searches, options: vec!["ndots:5".into()] }
        }
        // Without cluster DNS, names are at least resolved as on the node.
        _ => node.clone(),
    };
    if let Some(own) = &spec.dns_config {
        dns.servers.extend(own.nameservers.clone().unwrap_or_default());
        dns.searches.extend(own.searches.clone().unwrap_or_default());
        for option in own.options.iter().flatten() {
            let Some(name) = &option.name else { continue };
            dns.options.retain(|o| o.split(':').next() != Some(name));
            dns.options.push(match &option.value {
                Some(value) => format!("{name}:{value}"),
                None => name.clone(),
            });
        }
    }
    dedup(&mut dns.servers);
    dedup(&mut dns.searches);
    dns.servers.truncate(MAX_NAMESERVERS);
    dns.searches.truncate(MAX_SEARCHES);
    let mut characters = 0;
    // Every domain but the first has a space before it.
    let fitting = dns.searches.iter().take_while(|domain| {
        characters += domain.len() + usize::from(characters > 0);
        characters <= MAX_SEARCH_CHARACTERS
    });
    let fitting = fitting.count();
    dns.searches.truncate(fitting);
    dns
}

fn dedup(list: &mut Vec<String>) {
    let mut seen = std::collections::BTreeSet::new();
    list.retain(|item| seen.insert(item.clone()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::{Value, json};

    fn run(spec: Value, cluster: Option<&str>) -> DnsConfig {
        let pod: Pod =
            ferrite_json::from_value(json!({"metadata": {"namespace": "n"}, "spec": spec})).unwrap();
        let node = parse_resolv_conf("# x\nnameserver 192.0.2.53\nsearch example.org\noptions edns0\n");
        let addresses = cluster.into_iter().flat_map(|all| all.split(',')).map(|a| a.parse().unwrap());
        let cluster = ClusterDns { addresses: addresses.collect(), domain: "cluster.local".into() };
        pod_dns(&pod, &cluster, &node)
    }

    #[test]
    fn policies() {
        let first = run(json!({"containers": []}), Some("10.96.0.10"));
        assert_eq!(first.servers, ["10.96.0.10"]);
        assert_eq!(
            first.searches,
            ["n.svc.cluster.local", "svc.cluster.local", "cluster.local", "example.org"]
        );
        assert_eq!(first.options, ["ndots:5"]);
        assert_eq!(run(json!({"containers": []}), None).servers, ["192.0.2.53"]);
        let several = run(json!({"containers": []}), Some("10.96.0.10,10.96.0.11,10.96.0.12,10.96.0.13"));
        assert_eq!(several.servers, ["10.96.0.10", "10.96.0.11", "10.96.0.12"], "resolvers read three");
        let host = json!({"containers": [], "hostNetwork": true, "dnsPolicy": "ClusterFirst"});
        assert_eq!(run(host, Some("10.96.0.10")).servers, ["192.0.2.53"]);
        let with_host =
            json!({"containers": [], "hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet"});
        assert_eq!(run(with_host, Some("10.96.0.10")).servers, ["10.96.0.10"]);
        let own = json!({"containers": [], "dnsPolicy": "None", "dnsConfig": {
            "nameservers": ["1.1.1.1", "1.1.1.1"], "searches": ["a"], "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}]}});
        let own = run(own, Some("10.96.0.10"));
        let long: Vec<String> = (0..9).map(|n| format!("{n}{}", "x".repeat(253))).collect();
        let long = run(json!({"containers": [], "dnsPolicy": "None", "dnsConfig": {"searches": long}}), None);
        assert_eq!(long.searches.len(), 8, "eight of 254 and the spaces between are 2039 characters");
        assert_eq!(parse_resolv_conf("search a. b .").searches, ["a", "b", "."]);
        assert_eq!((own.servers.len(), own.options), (1, vec!["ndots:2".to_string(), "edns0".to_string()]));
    }
}
