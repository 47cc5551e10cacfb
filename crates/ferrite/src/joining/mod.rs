//! The objects that let nodes join a cluster: rights for those that ask, and settings that they read.

pub mod servers;
pub mod token;

use crate::alone::server_of;
use crate::apiserver::BoxError;
use crate::dns::{parse_stub_domains, stub_domains_text};
use crate::paths::Paths;
use ferrite_client::{Api, Object, is_already_exists, is_not_found};
use ferrite_dns::StubDomain;
use ferrite_json::{Value, json};
use ferrite_network::Cidrs;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use kube::api::{Patch, PatchParams, PostParams};
use std::net::IpAddr;
use std::time::Duration;

/// The users of the parts of a node, which nodes may have certified. The proxy's user reads nodes, too: the routes
/// between nodes are made with it, and so are the filters of NetworkPolicies.
pub const PROXY_USER: &str = "system:kube-proxy";
pub const DNS_USER: &str = "system:ferrite:dns";
/// The rights of nodes to read NetworkPolicies and the objects that they select.
const POLICIES_ROLE: &str = "ferrite:node-network-policies";

/// The right of nodes to open tunnels to servers.
const TUNNEL_ROLE: &str = "ferrite:agent-tunnel";

/// Time limit of a server's first response.
const DISCOVERY_TIME: Duration = Duration::from_secs(10);

const FIELD_MANAGER: &str = "ferrite-joining";
/// Where anybody finds the authority, as kubeadm has it.
pub const DISCOVERY_NAMESPACE: &str = "kube-public";
pub const DISCOVERY: &str = "cluster-info";
/// Namespace of the settings that nodes read.
const SETTINGS_NAMESPACE: &str = "kube-system";
const SETTINGS: &str = "ferrite-cluster";
const SERVERS: &str = "ferrite-servers";

/// The cluster's settings for its nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSettings {
    /// Addresses of all pods.
    pub pods: Cidrs,
    /// Addresses of Services, of the families of pods.
    pub services: Option<Cidrs>,
    /// The API server's Service.
    pub api_service: IpAddr,
    /// The name server of pods; none if pods resolve names as their node does.
    pub dns: Option<IpAddr>,
    pub domain: String,
    /// Domains with resolvers of their own.
    pub stub_domains: Vec<StubDomain>,
}

#[derive(Debug, thiserror::Error)]
#[error("the cluster's settings for nodes ({SETTINGS_NAMESPACE}/{SETTINGS}) have no usable {0:?}")]
pub struct BadSettings(&'static str);

impl ClusterSettings {
    fn to_data(&self) -> Value {
        json!({
            "clusterCIDR": self.pods.to_string(),
            "serviceCIDR": self.services.map(|range| range.to_string()).unwrap_or_default(),
            "kubernetesService": self.api_service.to_string(),
            "clusterDNS": self.dns.map(|address| address.to_string()).unwrap_or_default(),
            "clusterDomain": self.domain,
            "stubDomains": stub_domains_text(&self.stub_domains),
        })
    }

    fn from_data(read: impl Fn(&str) -> Option<String>) -> Result<Self, BadSettings> {
        fn parse<T: std::str::FromStr>(
            text: Option<String>,
            key: &'static str,
        ) -> Result<Option<T>, BadSettings> {
            let text = text.filter(|text| !text.is_empty());
            text.map(|text| text.parse().map_err(|_| BadSettings(key))).transpose()
        }
        let needed = |key: &'static str| move || BadSettings(key);
        Ok(Self {
            pods: parse(read("clusterCIDR"), "clusterCIDR")?.ok_or_else(needed("clusterCIDR"))?,
            services: parse(read("serviceCIDR"), "serviceCIDR")?,
            api_service: parse(read("kubernetesService"), "kubernetesService")?
                .ok_or_else(needed("kubernetesService"))?,
            dns: parse(read("clusterDNS"), "clusterDNS")?,
            domain: read("clusterDomain").filter(|d| !d.is_empty()).ok_or_else(needed("clusterDomain"))?,
            // Clusters of earlier versions have none.
            stub_domains: parse_stub_domains(&read("stubDomains").unwrap_or_default())
                .map_err(|_| BadSettings("stubDomains"))?,
        })
    }

    /// Reads them as a node.
    pub async fn read(client: &kube::Client) -> Result<Self, BoxError> {
        let maps = Api::<ConfigMap>::namespaced(client.clone(), SETTINGS_NAMESPACE);
        let data = maps.get(SETTINGS).await?.data.unwrap_or_default();
        Ok(Self::from_data(|key| data.get(key).cloned())?)
    }
}

/// The ConfigMap with the addresses of all servers that ever were: no node may have one of them certified.
pub fn server_list() -> (String, String) {
    (SETTINGS_NAMESPACE.to_owned(), SERVERS.to_owned())
}

/// Adds a server to the list. Each server applies its own entry, so that all entries stay.
async fn list_server(client: &kube::Client, address: IpAddr) -> Result<(), kube::Error> {
    let text = address.to_string();
    let entry = text.replace(':', "-");
    let apply = PatchParams::apply(&format!("ferrite-server-{entry}")).force();
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": SERVERS, "namespace": SETTINGS_NAMESPACE}, "data": {entry: text},
    });
    let maps = Api::<ConfigMap>::namespaced(client.clone(), SETTINGS_NAMESPACE);
    maps.patch(SERVERS, &apply, &Patch::Apply(map)).await.map(drop)
}

/// Publishes the objects for joining, and the address of this server. A user's changes of rights stay.
pub async fn publish(
    client: &kube::Client,
    ca: &str,
    settings: &ClusterSettings,
    server: IpAddr,
) -> Result<(), BoxError> {
    let bindings = Api::<ClusterRoleBinding>::all(client.clone());
    let certificates = "system:certificates.k8s.io:certificatesigningrequests";
    let (node_client, own_client) =
        (format!("{certificates}:nodeclient"), format!("{certificates}:selfnodeclient"));
    let bootstrappers = || json!({"kind": "Group", "name": token::GROUP});
    let nodes = || json!({"kind": "Group", "name": "system:nodes"});
    let roles = Api::<ClusterRole>::all(client.clone());
    tokio::try_join!(
        list_server(client, server),
        ensure(&roles, policies_role()),
        ensure(&bindings, binding(POLICIES_ROLE, POLICIES_ROLE, json!({"kind": "User", "name": PROXY_USER}))),
        ensure(&roles, tunnel_role()),
        ensure(&bindings, binding(TUNNEL_ROLE, TUNNEL_ROLE, nodes())),
        ensure(&bindings, binding("ferrite:node-bootstrapper", "system:node-bootstrapper", bootstrappers())),
        ensure(&bindings, binding("ferrite:node-autoapprove-bootstrap", &node_client, bootstrappers())),
        ensure(&bindings, binding("ferrite:node-autoapprove-certificate-rotation", &own_client, nodes())),
        ensure(
            &bindings,
            binding("ferrite:node-dns", crate::dns::ROLE, json!({"kind": "User", "name": DNS_USER}))
        ),
        publish_map(
            client,
            DISCOVERY_NAMESPACE,
            DISCOVERY,
            json!({"kubeconfig": discovery(ca)}),
            json!({"kind": "Group", "name": "system:unauthenticated"}),
        ),
        publish_map(client, SETTINGS_NAMESPACE, SETTINGS, settings.to_data(), nodes()),
    )?;
    Ok(())
}

/// The rights of a node that filters packets by NetworkPolicies.
fn policies_role() -> Value {
    let read = json!(["list", "watch"]);
    json!({
        "metadata": {"name": POLICIES_ROLE},
        "rules": [
            {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": read},
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": read},
        ],
    })
}

fn tunnel_role() -> Value {
    let path = ferrite_apiserver::tunnel::PATH;
    json!({"metadata": {"name": TUNNEL_ROLE}, "rules": [{"nonResourceURLs": [path], "verbs": ["get"]}]})
}

/// Fails where nodes cannot join.
async fn check(client: &kube::Client) -> Result<(), BoxError> {
    let maps = Api::<ConfigMap>::namespaced(client.clone(), SETTINGS_NAMESPACE);
    match maps.get(SETTINGS).await {
        Ok(_) => Ok(()),
        Err(error) if is_not_found(&error) => Err(
            "nodes cannot join this cluster: start it with `ferrite up --nodes 1`, or run `ferrite server`"
                .into(),
        ),
        Err(error) => Err(error.into()),
    }
}

/// The kubeconfig of a stranger, as kubeadm publishes it.
fn discovery(ca: &str) -> String {
    let cluster = json!({"certificate-authority-data": token::encode(ca), "server": ""});
    json!({"apiVersion": "v1", "kind": "Config", "clusters": [{"name": "", "cluster": cluster}]}).to_string()
}

pub fn binding(name: &str, role: &str, subject: Value) -> Value {
    let mut subject = subject;
    subject["apiGroup"] = "rbac.authorization.k8s.io".into();
    json!({
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [subject],
    })
}

/// A ConfigMap that one subject may read.
async fn publish_map(
    client: &kube::Client,
    namespace: &str,
    name: &str,
    data: Value,
    reader: Value,
) -> Result<(), kube::Error> {
    let group = "rbac.authorization.k8s.io";
    let role_name = format!("ferrite:{name}");
    let role = json!({
        "metadata": {"name": role_name, "namespace": namespace},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [name], "verbs": ["get"]}],
    });
    let mut binding = binding(&role_name, &role_name, reader);
    binding["metadata"]["namespace"] = namespace.into();
    binding["roleRef"] = json!({"apiGroup": group, "kind": "Role", "name": role_name});
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace}, "data": data,
    });
    let maps = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let roles = Api::<Role>::namespaced(client.clone(), namespace);
    let bindings = Api::<RoleBinding>::namespaced(client.clone(), namespace);
    let apply = PatchParams::apply(FIELD_MANAGER).force();
    let patch = Patch::Apply(map);
    tokio::try_join!(ensure(&roles, role), ensure(&bindings, binding), async {
        maps.patch(name, &apply, &patch).await.map(drop)
    },)?;
    Ok(())
}

/// Creates the object unless there is one of its name, which the user may have changed.
pub async fn ensure<K: Object>(api: &Api<K>, object: Value) -> Result<(), kube::Error> {
    let object = K::decode(object.to_string().as_bytes())?;
    match api.create(&PostParams::default(), &object).await {
        Err(error) if !is_already_exists(&error) => Err(error),
        _ => Ok(()),
    }
}

/// The administrator's client of the cluster in these directories.
pub async fn client_of(paths: &Paths) -> Result<kube::Client, BoxError> {
    let file = paths.admin_kubeconfig();
    if !file.exists() {
        return Err(format!(
            "there is no cluster in {}: name its directory with --data-dir",
            paths.data.display()
        )
        .into());
    }
    Ok(kube::Client::try_from(server_of(Some(&file)).await?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_they_are_written() {
        let settings = ClusterSettings {
            pods: "10.244.0.0/16".parse().unwrap(),
            services: Some("10.96.0.0/12".parse().unwrap()),
            api_service: "10.96.0.1".parse().unwrap(),
            dns: Some("10.96.0.10".parse().unwrap()),
            domain: "cluster.local".into(),
            stub_domains: parse_stub_domains("corp.example=192.0.2.53+[2001:db8::53]:5353,x=192.0.2.1")
                .unwrap(),
        };
        assert_eq!(settings.stub_domains.len(), 2);
        let both = ClusterSettings {
            pods: "fd00:1::/56,10.244.0.0/16".parse().unwrap(),
            services: Some("fd00:2::/108,10.96.0.0/12".parse().unwrap()),
            api_service: "fd00:2::1".parse().unwrap(),
            dns: Some("fd00:2::a".parse().unwrap()),
            ..settings.clone()
        };
        for settings in [settings.clone(), both, ClusterSettings { services: None, dns: None, ..settings }] {
            let data = settings.to_data();
            let read = |key: &str| data[key].as_str().map(str::to_owned);
            assert_eq!(ClusterSettings::from_data(read).unwrap(), settings);
            for key in ["clusterCIDR", "kubernetesService", "clusterDomain"] {
                let without = |asked: &str| (asked != key).then(|| read(asked)).flatten();
                assert!(ClusterSettings::from_data(without).is_err(), "{key}");
                let bad = |asked: &str| if asked == key { Some("?/".into()) } else { read(asked) };
                assert!(ClusterSettings::from_data(bad).is_err() || key == "clusterDomain", "{key}");
            }
        }
    }
}
