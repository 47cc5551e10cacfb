//! Parts that a cluster has only if the user asks for them.

use crate::apiserver::{ApiServerHandle, BoxError};
use crate::dns::ensure;
use ferrite_client::{Api, Informers, Scope, message_of};
use ferrite_ingress::{CONTROLLER, Config, Entrance, Limits, Sources};
use ferrite_json::{Value, json};
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::networking::v1::IngressClass;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use std::net::{IpAddr, SocketAddr};
use tokio::net::TcpListener;

/// A part that a cluster does without unless the user asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Extra {
    /// The ingress controller and its IngressClass `ferrite`.
    Ingress,
}

/// Options of the parts that are off by default.
#[derive(Debug, Clone, clap::Args)]
pub struct ExtraOptions {
    /// Parts to have besides.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PARTS")]
    enable: Vec<Extra>,
    /// Port of the ingress controller for HTTP; 0 is none.
    #[arg(long, default_value_t = 80, value_name = "PORT")]
    ingress_http_port: u16,
    /// Port of the ingress controller for HTTPS; 0 is none.
    #[arg(long, default_value_t = 443, value_name = "PORT")]
    ingress_https_port: u16,
    /// Addresses on which the ingress controller listens; by default those of the API server.
    #[arg(long, value_delimiter = ',', value_name = "IP")]
    ingress_address: Vec<IpAddr>,
}

const NAMESPACE: &str = "kube-system";
const ACCOUNT: &str = "ferrite-ingress";
const ROLE: &str = "ferrite:ingress";
const CLASS: &str = "ferrite";

impl ExtraOptions {
    fn has(&self, extra: Extra) -> bool {
        self.enable.contains(&extra)
    }

    /// The resources on which something acts with these options.
    pub fn acted_on(&self) -> &'static [&'static str] {
        if self.has(Extra::Ingress) { &["ingresses", "ingressclasses"] } else { &[] }
    }

    /// Starts the requested extras. Returns the addresses of the ingress controller.
    pub async fn start(
        &self,
        doors: &[IpAddr],
        address: IpAddr,
        api: &ApiServerHandle,
        informers: &Informers,
        scope: &Scope,
    ) -> Result<Option<String>, BoxError> {
        if !self.has(Extra::Ingress) {
            return Ok(None);
        }
        let doors = if self.ingress_address.is_empty() { doors } else { &self.ingress_address };
        let mut entrances = Vec::new();
        for (port, tls) in [(self.ingress_http_port, false), (self.ingress_https_port, true)] {
            for ip in doors.iter().filter(|_| port != 0) {
                entrances.push(Entrance { listener: bind(*ip, port).await?, tls });
            }
        }
        if entrances.is_empty() {
            return Err("--enable ingress needs --ingress-http-port or --ingress-https-port".into());
        }
        // The address published to clients: the first one that was asked for, else the node's.
        let named = self.ingress_address.iter().find(|ip| !ip.is_unspecified()).copied();
        let shown = named.unwrap_or(address);
        Box::pin(ensure_objects(api)).await?;
        let config = Config {
            entrances,
            addresses: vec![shown],
            limits: Limits::with_descriptors(ferrite_runtime::descriptors::raise()),
        };
        let groups = ["system:serviceaccounts", "system:serviceaccounts:kube-system"];
        let client = api.client(&format!("system:serviceaccount:{NAMESPACE}:{ACCOUNT}"), &groups);
        ferrite_ingress::start(config, Sources::shared(informers), &client, scope)?;
        let ports = [self.ingress_http_port, self.ingress_https_port];
        let ports: Vec<String> = ports.iter().filter(|port| **port != 0).map(ToString::to_string).collect();
        Ok(Some(format!("class {CLASS}, {shown} port {}", ports.join(", "))))
    }
}

async fn bind(ip: IpAddr, port: u16) -> Result<TcpListener, BoxError> {
    let address = SocketAddr::new(ip, port);
    TcpListener::bind(address).await.map_err(|error| {
        format!(
            "the ingress controller cannot listen on {address}: {error}; choose other ports with --ingress-http-port and --ingress-https-port, or other addresses with --ingress-address"
        )
        .into()
    })
}

/// Makes the controller's account, its rights and its class. Later changes by the user stay.
async fn ensure_objects(api: &ApiServerHandle) -> Result<(), BoxError> {
    let client = api.client("system:apiserver", &["system:masters"]);
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), NAMESPACE);
    let roles = Api::<ClusterRole>::all(client.clone());
    let bindings = Api::<ClusterRoleBinding>::all(client.clone());
    let classes = Api::<IngressClass>::all(client.clone());
    let written = tokio::try_join!(
        ensure(&accounts, json!({"metadata": {"name": ACCOUNT, "namespace": NAMESPACE}})),
        ensure(&roles, role()),
        ensure(&bindings, binding()),
        ensure(&classes, class()),
    );
    Ok(written.map(drop).map_err(|e| format!("cannot set up the ingress controller: {}", message_of(&e)))?)
}

/// The Secrets that Ingresses name are read with this identity, and with no other; the other rules are for
/// its writes.
fn role() -> Value {
    json!({
        "metadata": {"name": ROLE},
        "rules": [
            {"apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"]},
            {"apiGroups": ["networking.k8s.io"], "resources": ["ingresses/status"], "verbs": ["patch"]},
            {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "patch"]},
        ],
    })
}

fn binding() -> Value {
    json!({
        "metadata": {"name": ROLE},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": ROLE},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}],
    })
}

fn class() -> Value {
    json!({
        "metadata": {
            "name": CLASS,
            "annotations": {"ingressclass.kubernetes.io/is-default-class": "true"},
        },
        "spec": {"controller": CONTROLLER},
    })
}
