//! Approves the certificates of nodes of a Ferrite cluster beyond their own client certificate: their
//! serving certificate and the certificates of the proxy and the DNS server that run on them.
//!
//! Upstream approves none of these, so the controller runs only in a cluster whose nodes are ours.

use std::net::IpAddr;
use std::time::Duration;

use ferrite_api::Cidr;
use ferrite_client::{Api, Informer, ListSelector};
use ferrite_pki::Request;
use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::Client;
use kube::api::PostParams;

use super::{
    API_CLIENT, KUBELET_SERVING, NODE, NODES, condition, has, is_issued, kubelet_serving_problem, settled,
    usages_are, with_condition,
};
use crate::Context;
use crate::error::SyncError;

const NAME: &str = "node-certificate-approving-controller";

/// Limits for the certificates of nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeCertificates {
    /// Users that parts of a node act as. Each has the rights of its part and no more.
    pub users: Vec<String>,
    /// Ranges in which no node has its address: those of pods, of Services and of API servers.
    pub protected: Vec<Cidr>,
    /// A ConfigMap (namespace and name) whose values are the addresses of all servers of the cluster, those that are
    /// down among them.
    pub servers: (String, String),
}

pub(crate) fn start(context: &Context) {
    let Some(config) = context.config.node_certificates.clone() else { return };
    let requests: Informer<CertificateSigningRequest> = context.informers.get();
    let nodes: Informer<Node> = context.informers.get();
    let (namespace, name) = config.servers.clone();
    let selector = ListSelector::fields(format!("metadata.namespace={namespace},metadata.name={name}"));
    let servers: Informer<ConfigMap> = context.informers.get_selected(selector);
    let client = context.client.clone();
    context.controller(NAME).reconciles(&requests).reads(&nodes).reads(&servers).run(move |key| {
        let approved = requests.get(&key).and_then(|request| {
            let nodes = nodes.list();
            let servers = servers.list();
            let servers = servers.iter().filter_map(|map| map.data.as_ref()).flat_map(|data| data.values());
            let servers: Vec<IpAddr> = servers.filter_map(|address| address.parse().ok()).collect();
            let others = |name: &str| -> Vec<IpAddr> {
                let other = |node: &&std::sync::Arc<Node>| node.metadata.name.as_deref() != Some(name);
                let nodes = nodes.iter().filter(other).flat_map(|node| addresses(node));
                nodes.chain(servers.iter().copied()).collect()
            };
            let message = decide(&request, &config, others)?;
            Some(with_condition(&request, condition("Approved", "AutoApproved", message)))
        });
        let client = client.clone();
        async move {
            let Some(approved) = approved else { return Ok(None::<Duration>) };
            approve(&client, &key.name, &approved).await
        }
    });
}

async fn approve(
    client: &Client,
    name: &str,
    approved: &CertificateSigningRequest,
) -> Result<Option<Duration>, SyncError> {
    let api: Api<CertificateSigningRequest> = Api::all(client.clone());
    settled(api.replace_subresource("approval", name, &PostParams::default(), approved).await, name)
}

fn addresses(node: &Node) -> Vec<IpAddr> {
    let status = node.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    status.iter().filter_map(|address| address.address.parse().ok()).collect()
}

/// True for names by which clients reach the API server and Services. A node may have any name, also such a one, but no
/// certificate with which it could be taken for them.
fn is_of_servers(name: &str) -> bool {
    matches!(name, "localhost" | "kubernetes" | "kubernetes.default")
        || name.split('.').skip(1).any(|label| label == "svc")
}

/// The message of the approval. None leaves the request to somebody else.
fn decide(
    request: &CertificateSigningRequest,
    config: &NodeCertificates,
    addresses_of_others: impl Fn(&str) -> Vec<IpAddr>,
) -> Option<&'static str> {
    let spec = &request.spec;
    let name = spec.username.as_deref()?.strip_prefix(NODE).filter(|name| !name.is_empty())?;
    let is_node = spec.groups.as_deref().unwrap_or_default().iter().any(|group| group == NODES);
    if !is_node || is_issued(request) || has(request, "Approved") || has(request, "Denied") {
        return None;
    }
    let wanted = Request::parse(&spec.request.0)?;
    match spec.signer_name.as_str() {
        KUBELET_SERVING => {
            if kubelet_serving_problem(request, &wanted).is_some() {
                return None;
            }
            // A node that could have any name or address certified could stand in for another server.
            let others = addresses_of_others(name);
            let own = |address: &IpAddr| {
                let address = &address.to_canonical();
                let single = Cidr { address: *address, bits: if address.is_ipv4() { 32 } else { 128 } };
                !address.is_unspecified()
                    && !address.is_loopback()
                    && !address.is_multicast()
                    && !others.contains(address)
                    && !config.protected.iter().any(|range| range.contains(single))
            };
            let named = wanted.dns_names.iter().all(|dns| dns == name && !is_of_servers(dns))
                && wanted.addresses.iter().all(own);
            named.then_some("Auto approving kubelet serving certificate of a node.")
        }
        API_CLIENT => {
            let known = config.users.contains(&wanted.common_name);
            let plain = wanted.organizations.is_empty()
                && wanted.dns_names.is_empty()
                && wanted.addresses.is_empty()
                && !wanted.other_names;
            (known && plain && usages_are(request, "client auth"))
                .then_some("Auto approving client certificate of a part of a node.")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrite_pki::{NewRequest, Subject};
    use k8s_openapi::ByteString;

    fn config() -> NodeCertificates {
        NodeCertificates {
            users: vec!["system:kube-proxy".into()],
            protected: ["10.96.0.0/12", "10.244.0.0/16", "192.0.2.1/32"]
                .iter()
                .map(|text| Cidr::parse(text).unwrap())
                .collect(),
            servers: ("kube-system".into(), "servers".into()),
        }
    }

    fn request(
        user: &str,
        group: &str,
        signer: &str,
        usage: &str,
        subject: &Subject,
    ) -> CertificateSigningRequest {
        let mut request = CertificateSigningRequest::default();
        request.spec.username = Some(user.into());
        request.spec.groups = Some(vec![group.into()]);
        request.spec.signer_name = signer.into();
        request.spec.usages = Some(vec!["digital signature".into(), usage.into()]);
        request.spec.request = ByteString(NewRequest::new(subject).unwrap().request.into_bytes());
        request
    }

    fn passes(request: &CertificateSigningRequest) -> bool {
        let others = |name: &str| match name {
            "b" => vec![[192, 0, 2, 3].into()],
            _ => vec![[192, 0, 2, 2].into()],
        };
        decide(request, &config(), others).is_some()
    }

    #[test]
    fn a_node_serves_under_its_own_name_and_address() {
        for (node, names, good) in [
            ("b", &["b", "192.0.2.2"][..], true),
            ("b", &["192.0.2.2"], true),
            ("b", &["c"], false),
            ("b", &["b", "kubernetes.default.svc"], false),
            ("b", &["192.0.2.1"], false),
            ("b", &["192.0.2.3"], false),
            ("b", &["10.96.0.1"], false),
            ("b", &["10.244.1.1"], false),
            ("b", &["127.0.0.1"], false),
            ("b", &["0.0.0.0"], false),
            ("b", &["::ffff:10.96.0.1", "192.0.2.2"], false),
        ] {
            let subject = Subject {
                common_name: format!("system:node:{node}"),
                organization: Some(NODES.into()),
                names: names.iter().map(|name| (*name).to_owned()).collect(),
            };
            let asked = request("system:node:b", NODES, KUBELET_SERVING, "server auth", &subject);
            assert_eq!(passes(&asked), good, "{names:?}");
        }
        let other = Subject {
            common_name: "system:node:c".into(),
            organization: Some(NODES.into()),
            names: vec!["c".into()],
        };
        assert!(!passes(&request("system:node:b", NODES, KUBELET_SERVING, "server auth", &other)));
    }

    #[test]
    fn a_node_with_the_name_of_a_server_serves_under_no_name() {
        for (node, good) in [
            ("node-1.example.com", true),
            ("svc", true),
            ("kubernetes", false),
            ("kubernetes.default", false),
            ("kubernetes.default.svc", false),
            ("kubernetes.default.svc.cluster.local", false),
            ("webhook.kube-system.svc", false),
            ("localhost", false),
        ] {
            let subject = Subject {
                common_name: format!("system:node:{node}"),
                organization: Some(NODES.into()),
                names: vec![node.to_owned()],
            };
            let asked =
                request(&format!("system:node:{node}"), NODES, KUBELET_SERVING, "server auth", &subject);
            assert_eq!(passes(&asked), good, "{node}");
        }
    }

    #[test]
    fn parts_of_a_node_have_their_own_users() {
        let client = |user: &str, group| Subject::client(user, group);
        for (requester, group, subject, good) in [
            ("system:node:b", NODES, client("system:kube-proxy", None), true),
            ("system:node:b", NODES, client("system:kube-proxy", Some("system:masters")), false),
            ("system:node:b", NODES, client("kubernetes-admin", None), false),
            ("system:node:b", "system:authenticated", client("system:kube-proxy", None), false),
            ("alice", NODES, client("system:kube-proxy", None), false),
            ("system:node:", NODES, client("system:kube-proxy", None), false),
        ] {
            let asked = request(requester, group, API_CLIENT, "client auth", &subject);
            assert_eq!(passes(&asked), good, "{requester} {subject:?}");
        }
        let serving = client("system:kube-proxy", None);
        assert!(!passes(&request("system:node:b", NODES, API_CLIENT, "server auth", &serving)));
    }
}
