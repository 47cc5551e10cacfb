//! Name resolution of pods.

use crate::pod::model;
use ferrite_cri::v1::DnsConfig;
use k8s_openapi::api::core::v1::Pod;
use std::net::IpAddr;
use std::path::Path;

/// Resolvers of some C libraries end the process at a longer domain.
const MAX_DOMAIN: usize = 253;
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
    form(pod, cluster, node).0
}

/// Tells what the pod's configuration leaves out, because resolvers would not read it.
pub(crate) fn omissions(pod: &Pod, cluster: &ClusterDns, node: &DnsConfig) -> Vec<String> {
    form(pod, cluster, node).1
}

fn form(pod: &Pod, cluster: &ClusterDns, node: &DnsConfig) -> (DnsConfig, Vec<String>) {
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
    let mut omitted = Vec::new();
    if dns.servers.len() > MAX_NAMESERVERS {
        dns.servers.truncate(MAX_NAMESERVERS);
        omitted.push(format!(
            "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: {}",
            dns.servers.join(" ")
        ));
    }
    let wanted = dns.searches.len();
    dns.searches.truncate(MAX_SEARCHES);
    dns.searches.retain(|domain| domain.len() <= MAX_DOMAIN);
    let mut characters = 0;
    // Every domain but the first has a space before it.
    let fitting = dns.searches.iter().take_while(|domain| {
        characters += domain.len() + usize::from(characters > 0);
        characters <= MAX_SEARCH_CHARACTERS
    });
    let fitting = fitting.count();
    dns.searches.truncate(fitting);
    if dns.searches.len() < wanted {
        omitted.push(format!(
            "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: {}",
            dns.searches.join(" ")
        ));
    }
    (dns, omitted)
}

/// The reason why the node's own file gives pods less than it says. `file` names it.
pub(crate) fn limits_exceeded(file: &Path, cluster: &ClusterDns, node: &DnsConfig) -> Option<String> {
    let file = file.display();
    // Three domains of the cluster come first.
    let most = if cluster.domain.is_empty() { MAX_SEARCHES } else { MAX_SEARCHES - 3 };
    if node.searches.len() > most {
        return Some(format!(
            "Resolv.conf file '{file}' contains search line consisting of more than {most} domains!"
        ));
    }
    if node.searches.iter().any(|domain| domain.len() > MAX_DOMAIN) {
        return Some(format!(
            "Resolv.conf file \"{file}\" contains a search path which length is more than allowed {MAX_DOMAIN} chars!"
        ));
    }
    (node.searches.join(" ").len() > MAX_SEARCH_CHARACTERS).then(|| {
        format!(
            "Resolv.conf file '{file}' contains search line which length is more than allowed {MAX_SEARCH_CHARACTERS} chars!"
        )
    })
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
        let long: Vec<String> = (0..9).map(|n| format!("{n}{}", "x".repeat(252))).collect();
        let long = run(json!({"containers": [], "dnsPolicy": "None", "dnsConfig": {"searches": long}}), None);
        assert_eq!(long.searches.len(), 8, "eight of 253 and the spaces between are 2031 characters");
        assert_eq!(parse_resolv_conf("search a. b .").searches, ["a", "b", "."]);
        assert_eq!((own.servers.len(), own.options), (1, vec!["ndots:2".to_string(), "edns0".to_string()]));
    }

    #[test]
    fn omissions_are_told() {
        let cluster = ClusterDns { addresses: Vec::new(), domain: "cluster.local".into() };
        let node = DnsConfig::default();
        let long = "x".repeat(254);
        for (config, expected) in [
            (json!({"nameservers": ["1.1.1.1", "1.1.1.1", "1.1.1.2", "1.1.1.3"], "searches": ["a"]}), vec![]),
            (
                json!({"nameservers": ["1.1.1.1", "1.1.1.2", "1.1.1.3", "1.1.1.4"], "searches": ["a", &long]}),
                vec![
                    "Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: 1.1.1.1 1.1.1.2 1.1.1.3",
                    "Search Line limits were exceeded, some search paths have been omitted, the applied search line is: a",
                ],
            ),
        ] {
            let spec = json!({"containers": [], "dnsPolicy": "None", "dnsConfig": config});
            let pod: Pod = ferrite_json::from_value(json!({"spec": spec})).unwrap();
            assert_eq!(omissions(&pod, &cluster, &node), expected);
        }
    }

    #[test]
    fn the_nodes_file_is_checked() {
        let cluster = ClusterDns { addresses: Vec::new(), domain: "cluster.local".into() };
        let domains = |count: usize, length: usize| DnsConfig {
            searches: (0..count).map(|n| format!("{n:0length$}")).collect(),
            ..DnsConfig::default()
        };
        for (node, part) in [
            (domains(29, 5), None),
            (domains(30, 5), Some("more than 29 domains")),
            (domains(1, 254), Some("more than allowed 253 chars")),
            (domains(9, 253), Some("more than allowed 2048 chars")),
        ] {
            let found = limits_exceeded(Path::new("/etc/resolv.conf"), &cluster, &node);
            assert_eq!(found.is_some(), part.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(part.unwrap_or_default()));
        }
    }
}
