//! `ferrite up --control-planes N`: a control plane of several machines, and nodes that are agents.
//!
//! This process has no server of its own. It makes the machines, gives them keys, and forwards clients to a server that
//! answers.

use crate::agent::bootstrap::{Credential, client};
use crate::agent::servers::{ServerAddress, Servers};
use crate::apiserver::{BoxError, with_admin};
use crate::cluster::{ClusterOptions, TOKEN_LIFETIME, open_segment};
use crate::joining::token::JoinToken;
use crate::kubeconfig::{self, Access};
use crate::machines::control_plane::{
    ControlPlaneConfig, EtcdAuthority, EtcdMember, find_etcd, working_directory,
};
use crate::machines::{Machine, MachineOptions, Machines, Role};
use crate::node::CgroupDriver;
use crate::paths::Paths;
use crate::progress::Progress;
use crate::readiness::wait_for_nodes;
use clap::parser::ValueSource;
use ferrite_client::Scope;
use ferrite_network::Segment;
use ferrite_pki::{ClusterPki, Identity};
use std::ffi::OsString;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::Instant;

/// The first start of three servers and three etcd members on a slow machine.
const FIRST_ANSWER: Duration = Duration::from_secs(120);
/// Interval between attempts to reach a server that is starting.
const ATTEMPT: Duration = Duration::from_millis(200);
/// Interval between probes of the server in use, and the time limit of each.
const PROBE: Duration = Duration::from_secs(2);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlPlanesError {
    #[error("--{option} does not work with --control-planes: {why}")]
    Option { option: String, why: &'static str },
    #[error(
        "this cluster has a control plane of {has} machines, and their number stays: leave --control-planes out, or start another cluster with --data-dir"
    )]
    Number { has: usize },
    #[error(
        "{dir} holds a cluster whose objects are in the embedded store: start one with --control-planes in another directory with --data-dir"
    )]
    Embedded { dir: String },
    #[error("an argument is no text: {0:?}")]
    Text(OsString),
    #[error("no server answered within {} seconds: see {logs}", FIRST_ANSWER.as_secs())]
    Silent { logs: String },
}

/// The use of an option of `up` with several control planes.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// `up` itself acts on it.
    Own,
    /// Every server gets it.
    Server,
    Refused(&'static str),
}

/// Options that `up` acts on.
const OWN: [&str; 12] = [
    "data_dir",
    "verbosity",
    "control_planes",
    "detach",
    "detached",
    "no_kubeconfig",
    "nodes",
    "node_name",
    "node_cidr",
    "resolv_conf",
    "insecure_registry",
    "cgroup_driver",
];
/// Options with which the machines would not be what they are.
const REFUSED: [(&str, &str); 8] = [
    ("etcd_servers", "its machines have etcd members of their own"),
    ("etcd_cafile", "its machines have etcd members of their own"),
    ("etcd_certfile", "its machines have etcd members of their own"),
    ("etcd_keyfile", "its machines have etcd members of their own"),
    ("etcd_listen", "its machines have etcd members of their own"),
    ("bind_address", "its servers are on a segment that only this machine reaches"),
    ("audit_log_path", "several servers would write one file"),
    ("enable_bootstrap_token_auth", "nodes join with such tokens, so it is always on"),
];

fn verdict(option: &str, server_has_it: bool) -> Verdict {
    if let Some((_, why)) = REFUSED.iter().find(|(name, _)| *name == option) {
        return Verdict::Refused(why);
    }
    match (OWN.contains(&option), server_has_it) {
        // The port is the forwarder's and that of all servers.
        _ if option == "secure_port" => Verdict::Own,
        (true, _) => Verdict::Own,
        (false, true) => Verdict::Server,
        (false, false) => Verdict::Refused("nodes are agents, which have their usual settings"),
    }
}

/// The arguments of `up` that its servers get.
pub fn server_arguments(
    program: &clap::Command,
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Vec<String>, BoxError> {
    let matches = program.clone().try_get_matches_from(arguments)?;
    let Some(("up", up)) = matches.subcommand() else { return Ok(Vec::new()) };
    let server = program.find_subcommand("server").ok_or("there is no command `server`")?;
    let mut passed = Vec::new();
    let options = program.find_subcommand("up").ok_or("there is no command `up`")?.get_arguments();
    for id in options.map(|option| option.get_id().as_str()) {
        if up.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let known = server.get_arguments().find(|argument| argument.get_id() == id);
        let option = || id.replace('_', "-");
        match (verdict(id, known.is_some()), known) {
            (Verdict::Own, _) => {}
            (Verdict::Refused(why), _) => {
                return Err(ControlPlanesError::Option { option: option(), why }.into());
            }
            (Verdict::Server, argument) => {
                let takes_values = argument.is_some_and(|argument| argument.get_action().takes_values());
                let name = argument.and_then(|a| a.get_long()).map_or_else(option, str::to_owned);
                if !takes_values {
                    passed.push(format!("--{name}"));
                    continue;
                }
                for value in up.get_raw(id).into_iter().flatten() {
                    let text = value.to_str().ok_or_else(|| ControlPlanesError::Text(value.to_owned()))?;
                    passed.push(format!("--{name}={text}"));
                }
            }
        }
    }
    Ok(passed)
}

/// The number of machines: those that are there, or those that are asked for. None if the cluster's own process is the
/// control plane.
pub fn count(paths: &Paths, asked: Option<u8>) -> Result<Option<usize>, ControlPlanesError> {
    let has = Machines::control_planes(paths).len();
    match (has, asked.map(usize::from)) {
        (0, None) => Ok(None),
        (0, Some(_)) if paths.store().exists() => {
            Err(ControlPlanesError::Embedded { dir: paths.data.display().to_string() })
        }
        (0, asked) => Ok(asked),
        (has, Some(asked)) if has != asked => Err(ControlPlanesError::Number { has }),
        (has, _) => Ok(Some(has)),
    }
}

/// A cluster with a control plane of several machines.
pub struct ControlPlanes {
    /// Where clients on this machine reach a server.
    pub url: String,
    pub nodes: Vec<String>,
    pki: ClusterPki,
    admin: kube::Client,
    scope: Scope,
}

impl ControlPlanes {
    pub async fn start(
        paths: &Paths,
        options: &ClusterOptions,
        count: usize,
        arguments: Vec<String>,
        progress: &Progress,
    ) -> Result<Self, BoxError> {
        let etcd = find_etcd(std::env::var_os("PATH").as_deref())?;
        let services = options.server.service_cluster_ip_range.for_pods(options.cluster_cidr);
        let segment = open_segment(paths, options, services).await?;
        progress.done("network", &format!("{}, nodes in {}", paths.segment(), segment.ranges()));
        let pki = ClusterPki::open(&paths.pki())?;
        let machines = Machines::open(paths).await?;
        let members = members(&machines, paths, count, &segment)?;
        let (keys, authority) = (pki.shared_keys()?, EtcdAuthority::open(paths)?);
        let names: Vec<&str> = members.iter().map(|machine| machine.name.as_str()).collect();
        let listed: Vec<EtcdMember> = members.iter().map(member_of).collect();
        for machine in members.iter().filter(|machine| !machine.off) {
            let config = ControlPlaneConfig {
                member: member_of(machine),
                members: listed.clone(),
                cluster: paths.cluster.clone(),
                etcd: etcd.clone(),
                port: options.server.secure_port,
                server_arguments: arguments.clone(),
                working_directory: working_directory(),
            };
            let own = Machines::paths_of(paths, &machine.name);
            if !machines.is_running(machine) {
                config.install(&own, &authority, &keys)?;
            }
            machines.start(machine.clone(), &segment, None).await?;
        }
        let scope = Scope::new();
        let listening = listen(options.server.secure_port, &segment).await?;
        let servers = listed.iter().map(|member| ServerAddress {
            host: member.address.to_string(),
            port: options.server.secure_port,
        });
        let servers = Servers::in_front_of(servers.collect(), listening, PROBE, &scope)?;
        let url = servers.url();
        let (admin, access) = with_admin(&pki, &url, |access| {
            let identity =
                Identity { certificate: access.certificate.to_owned(), key: access.key.to_owned() };
            kubeconfig::write(&paths.admin_kubeconfig(), &kubeconfig::standalone(&paths.cluster, access))?;
            Ok((identity, access.ca.to_owned()))
        })?;
        let admin = client(&url, &access, &Credential::Certificate(admin)).await?;
        wait_for_server(&admin, paths, &members).await?;
        scope.spawn(servers.probe(admin.clone()));
        progress.done("control plane", &format!("{url}, behind it {}", names.join(", ")));
        let nodes = start_nodes(&machines, options, &segment, &pki, &admin).await?;
        Ok(Self { url, nodes, pki, admin, scope })
    }

    /// Waits until all nodes say that they are ready and a pod could be created.
    pub async fn ready(&self, paths: &Paths, progress: &Progress) -> Result<(), BoxError> {
        wait_for_nodes(&self.admin, self.nodes.iter(), paths, progress, &self.scope).await
    }

    /// Gives `use_access` the administrator's way in.
    pub fn with_admin<T>(
        &self,
        use_access: impl FnOnce(&Access<'_>) -> Result<T, BoxError>,
    ) -> Result<T, BoxError> {
        with_admin(&self.pki, &self.url, use_access)
    }

    pub async fn stop(self) {
        self.scope.shutdown().await;
    }
}

fn member_of(machine: &Machine) -> EtcdMember {
    EtcdMember { name: machine.name.clone(), address: *machine.addresses.primary() }
}

/// The machines of the control plane, made at the first start.
fn members(
    machines: &Machines,
    paths: &Paths,
    count: usize,
    segment: &Segment,
) -> Result<Vec<Machine>, BoxError> {
    let known = Machines::control_planes(paths);
    if !known.is_empty() {
        return Ok(known);
    }
    let add = |number| machines.add(&format!("control-plane-{number}"), Role::ControlPlane, segment.ranges());
    (1..=count).map(add).collect()
}

/// Ports of this machine and of the segment: clients come from here, agents from there.
async fn listen(port: u16, segment: &Segment) -> Result<Vec<TcpListener>, BoxError> {
    let mut listeners = Vec::new();
    for address in
        std::iter::once(IpAddr::from(Ipv4Addr::LOCALHOST)).chain(segment.addresses().iter().copied())
    {
        let address = SocketAddr::new(address, port);
        let listener = TcpListener::bind(address).await.map_err(|error| {
            format!(
                "cannot listen on {address}: {error}; choose another port with --port, or stop what uses it"
            )
        })?;
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Asks until a server is ready.
async fn wait_for_server(client: &kube::Client, paths: &Paths, members: &[Machine]) -> Result<(), BoxError> {
    let deadline = Instant::now() + FIRST_ANSWER;
    while Instant::now() < deadline {
        let request = http::Request::get("/readyz").body(Vec::new())?;
        if let Ok(Ok(_)) = tokio::time::timeout(PROBE, client.request_text(request)).await {
            return Ok(());
        }
        tokio::time::sleep(ATTEMPT).await;
    }
    let log = |machine: &Machine| Machines::paths_of(paths, &machine.name).log().display().to_string();
    let logs: Vec<String> = members.iter().map(log).collect();
    Err(ControlPlanesError::Silent { logs: logs.join(", ") }.into())
}

/// Starts the agents. They reach the servers through the forwarder until they know them.
async fn start_nodes(
    machines: &Machines,
    options: &ClusterOptions,
    segment: &Segment,
    pki: &ClusterPki,
    admin: &kube::Client,
) -> Result<Vec<String>, BoxError> {
    let forwarder = SocketAddr::new(*segment.addresses().primary(), options.server.secure_port);
    machines.remember(&MachineOptions {
        server: format!("https://{forwarder}"),
        insecure_registries: options.insecure_registry.clone(),
        systemd_cgroups: options.cgroup_driver == CgroupDriver::Systemd,
        resolv_conf: options.dns.resolv_conf.clone(),
        feature_gates: options.server.feature_gates.as_ref().map(ToString::to_string).unwrap_or_default(),
    })?;
    let first = match &options.node_name {
        Some(name) => name.clone(),
        None => nix::unistd::gethostname()?.to_string_lossy().to_lowercase(),
    };
    let wanted = usize::from(options.nodes.unwrap_or(1));
    machines
        .start_all(&first, 1.., wanted, segment, || async {
            JoinToken::create(admin, pki.ca(), Some(TOKEN_LIFETIME), "node of this machine").await
        })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn arguments(text: &str) -> Result<Vec<String>, String> {
        let words = text.split_whitespace().map(OsString::from);
        server_arguments(&crate::cli::Cli::command(), words).map_err(|error| error.to_string())
    }

    #[test]
    fn servers_get_the_options_that_are_theirs() {
        for (text, passed) in [
            ("ferrite up --control-planes 3", &[][..]),
            ("ferrite up --control-planes 3 --nodes 2 --node-name a --data-dir /d -v 2 --port 7000", &[]),
            (
                "ferrite up --control-planes 3 --cluster-cidr 10.1.0.0/16 --no-dns --runtime-config a=true,b=false",
                &[
                    "--cluster-cidr=10.1.0.0/16",
                    "--no-dns",
                    "--runtime-config=a=true",
                    "--runtime-config=b=false",
                ],
            ),
            (
                "ferrite up --control-planes 3 --node-monitor-grace-period 9s",
                &["--node-monitor-grace-period=9s"],
            ),
        ] {
            let mut got = arguments(text).unwrap();
            got.sort();
            assert_eq!(got, passed, "{text}");
        }
        for (text, why) in [
            ("ferrite up --control-planes 3 --etcd-servers http://a:2379", "etcd members of their own"),
            ("ferrite up --control-planes 3 --bind-address 0.0.0.0", "--bind-address does not work"),
            ("ferrite up --control-planes 3 --container-runtime-endpoint unix:///x", "nodes are agents"),
            ("ferrite up --control-planes 3 --kubelet-port 1", "nodes are agents"),
            ("ferrite up --control-planes 2", "1, 3 or 5"),
            ("ferrite up --control-planes 0", "1, 3 or 5"),
        ] {
            let error = arguments(text).expect_err(text);
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn every_option_of_up_has_a_use_or_a_reason() {
        let program = crate::cli::Cli::command();
        let of = |name: &str| -> Vec<String> {
            let command = program.find_subcommand(name).unwrap();
            command.get_arguments().map(|argument| argument.get_id().to_string()).collect()
        };
        let (up, server) = (of("up"), of("server"));
        for option in OWN.iter().chain(REFUSED.iter().map(|(name, _)| name)) {
            assert!(
                up.iter().any(|known| known == option) || *option == "verbosity",
                "{option} is no option of up"
            );
        }
        // An option that servers get must mean the same there.
        for option in up.iter().filter(|option| verdict(option, server.contains(option)) == Verdict::Server) {
            let find = |name: &str| {
                let command = program.find_subcommand(name).unwrap();
                let argument = command.get_arguments().find(|a| a.get_id() == option.as_str()).unwrap();
                (argument.get_long().map(str::to_owned), argument.get_default_values().to_vec())
            };
            assert_eq!(find("up"), find("server"), "{option}");
        }
    }

    #[test]
    fn the_number_of_machines_stays() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::new(&dir.path().join("d"));
        assert_eq!(count(&paths, None), Ok(None));
        assert_eq!(count(&paths, Some(3)), Ok(Some(3)));
        std::fs::create_dir_all(paths.store()).unwrap();
        assert!(matches!(count(&paths, Some(3)), Err(ControlPlanesError::Embedded { .. })));
        std::fs::remove_dir(paths.store()).unwrap();
        std::fs::create_dir_all(paths.nodes()).unwrap();
        let record =
            r#"{"name": "c1", "index": 2, "address": "10.243.0.2", "holder": null, "role": "control-plane"}"#;
        std::fs::write(paths.nodes().join("c1.json"), record).unwrap();
        assert_eq!(count(&paths, None), Ok(Some(1)));
        assert_eq!(count(&paths, Some(1)), Ok(Some(1)));
        assert_eq!(count(&paths, Some(3)), Err(ControlPlanesError::Number { has: 1 }));
    }
}
