//! `/etc/hosts` and the host name of pods.

use crate::pod::model;
use k8s_openapi::api::core::v1::Pod;

/// Longest host name Linux takes, less one for its end.
const MAX_HOSTNAME: usize = 63;
/// Longest name with its domain, as upstream.
const MAX_FQDN: usize = 64;

/// The pod's host name, and its domain when it names a sub-domain.
pub(crate) fn hostname(pod: &Pod, cluster_domain: &str, node_hostname: &str) -> (String, Option<String>) {
    let spec = model::spec(pod);
    if let Some(name) = spec.hostname_override.as_deref().filter(|n| !n.is_empty()) {
        return (name.to_string(), None);
    }
    if model::is_host_network(pod) {
        return (node_hostname.to_string(), None);
    }
    let wanted = spec.hostname.as_deref().filter(|h| !h.is_empty());
    let mut name = wanted.or(pod.metadata.name.as_deref()).unwrap_or_default().to_string();
    if name.len() > MAX_HOSTNAME {
        let end = (0..=MAX_HOSTNAME).rev().find(|i| name.is_char_boundary(*i)).unwrap_or(0);
        name.truncate(end);
        name.truncate(name.trim_end_matches(['-', '.']).len());
    }
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let domain = spec
        .subdomain
        .as_deref()
        .filter(|s| !s.is_empty())
        .map(|sub| format!("{sub}.{namespace}.svc.{cluster_domain}"));
    (name, domain)
}

/// A name that Linux cannot take, worded as upstream.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "failed to construct FQDN from pod hostname and cluster domain, FQDN {name} is too long ({MAX_FQDN} characters is the max, {length} characters requested)",
    length = name.len()
)]
pub(crate) struct HostnameError {
    name: String,
}

/// The name the pod's kernel namespace gets: with its domain if the pod asks for that.
pub(crate) fn kernel_hostname(
    pod: &Pod,
    cluster_domain: &str,
    node_hostname: &str,
) -> Result<String, HostnameError> {
    let (name, domain) = hostname(pod, cluster_domain, node_hostname);
    match domain {
        Some(domain) if model::spec(pod).set_hostname_as_fqdn == Some(true) => {
            let name = format!("{name}.{domain}");
            if name.len() > MAX_FQDN { Err(HostnameError { name }) } else { Ok(name) }
        }
        _ => Ok(name),
    }
}

/// The hosts file of a pod with its own network.
pub(crate) fn hosts_file(pod: &Pod, ips: &[String], hostname: &str, domain: Option<&str>) -> String {
    let mut out = String::from(
        "# Kubernetes-managed hosts file.\n\
         127.0.0.1\tlocalhost\n\
         ::1\tlocalhost ip6-localhost ip6-loopback\n\
         fe00::0\tip6-localnet\n\
         fe00::0\tip6-mcastprefix\n\
         fe00::1\tip6-allnodes\n\
         fe00::2\tip6-allrouters\n",
    );
    for ip in ips {
        match domain {
            Some(domain) => out.push_str(&format!("{ip}\t{hostname}.{domain}\t{hostname}\n")),
            None => out.push_str(&format!("{ip}\t{hostname}\n")),
        }
    }
    out.push_str(&aliases(pod));
    out
}

/// The hosts file of a pod on the node's network: the node's own and the pod's aliases.
pub(crate) fn node_hosts_file(pod: &Pod, node: &str) -> String {
    format!("# Kubernetes-managed hosts file (host network).\n{node}{}", aliases(pod))
}

fn aliases(pod: &Pod) -> String {
    let aliases: Vec<String> = model::spec(pod)
        .host_aliases
        .iter()
        .flatten()
        .map(|a| format!("{}\t{}\n", a.ip, a.hostnames.clone().unwrap_or_default().join("\t")))
        .collect();
    if aliases.is_empty() {
        return String::new();
    }
    format!("\n# Entries added by HostAliases.\n{}", aliases.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_json::json;

    #[test]
    fn names_and_hosts() {
        let pod: Pod = ferrite_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "n"},
            "spec": {"containers": [], "hostname": "h", "subdomain": "s",
                     "hostAliases": [{"ip": "192.0.2.9", "hostnames": ["a", "b"]}]},
        }))
        .unwrap();
        let (name, domain) = hostname(&pod, "cluster.local", "node");
        assert_eq!((name.as_str(), domain.as_deref()), ("h", Some("s.n.svc.cluster.local")));
        let text = hosts_file(&pod, &["10.1.0.2".into()], &name, domain.as_deref());
        assert!(text.contains("10.1.0.2\th.s.n.svc.cluster.local\th\n"));
        assert!(text.ends_with("192.0.2.9\ta\tb\n"));
    }

    #[test]
    fn the_kernel_has_the_whole_name_if_the_pod_asks_for_it() {
        let kernel = |subdomain: &str, fqdn: bool| {
            let pod: Pod = ferrite_json::from_value(json!({
                "metadata": {"name": "p", "namespace": "n"},
                "spec": {"containers": [], "subdomain": subdomain, "setHostnameAsFQDN": fqdn},
            }))
            .unwrap();
            kernel_hostname(&pod, "cluster.local", "node")
        };
        assert_eq!(kernel("s", false).as_deref(), Ok("p"));
        assert_eq!(kernel("s", true).as_deref(), Ok("p.s.n.svc.cluster.local"));
        assert!(kernel(&"s".repeat(63), true).is_err());
    }

    #[test]
    fn long_names_are_cut_to_what_linux_takes() {
        let name = format!("{}-{}", "a".repeat(62), "b".repeat(10));
        let pod: Pod =
            ferrite_json::from_value(json!({"metadata": {"name": name}, "spec": {"containers": []}}))
                .unwrap();
        assert_eq!(hostname(&pod, "d", "node").0, "a".repeat(62));
    }
}
