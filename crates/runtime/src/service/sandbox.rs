//! Sandboxes: made, stopped, removed.

use std::io;
use std::path::Path;
use std::sync::Arc;

use ferrite_cri::v1::{NamespaceMode, NamespaceOption, PodSandboxConfig, Protocol};
use ferrite_cri::{Code, Error, Result, with_causes};
use ferrite_network::{Bandwidth, HostPort, PodRef, PortProtocol};
use ferrite_systemd::Slice;

use super::client::{self, blocking};
use super::records::{self, SandboxRecord};
use super::state::{Sandbox, new_id};
use super::{Inner, files, required};
use crate::cgroup;
use crate::spec::{IdMap, OwnNamespaces, check_sysctl, map_file};
use crate::supervisor::Setup;
use crate::supervisor::protocol::Request;
use crate::supervisor::sandbox::{Claim, IDENTITY, NETNS, SETUP, SHM, USERNS, UserSetup, alive};
use crate::sys;

/// The annotation by which a kubelet says where a pod comes from.
const SOURCE: &str = "kubernetes.io/config.source";

/// Which namespaces the pod shares with the node.
pub(super) fn namespace_options(config: &PodSandboxConfig) -> NamespaceOption {
    config
        .linux
        .as_ref()
        .and_then(|linux| linux.security_context.as_ref())
        .and_then(|security| security.namespace_options.clone())
        .unwrap_or_default()
}

pub(super) fn host_network(config: &PodSandboxConfig) -> bool {
    namespace_options(config).network() == NamespaceMode::Node
}

pub(super) fn host_ipc(config: &PodSandboxConfig) -> bool {
    namespace_options(config).ipc() == NamespaceMode::Node
}

/// The identities of the pod's user namespace; `None` when it uses the node's.
pub(super) fn user_map(config: &PodSandboxConfig) -> Result<Option<IdMap>> {
    let user = namespace_options(config).userns_options.unwrap_or_default();
    // POD is also the value of an empty message; a namespace without ranges is none.
    let own = user.mode() == NamespaceMode::Pod && !(user.uids.is_empty() && user.gids.is_empty());
    if own { Ok(Some(IdMap::new(&user)?)) } else { Ok(None) }
}

/// The ports of the node that the pod asks for.
fn host_ports(config: &PodSandboxConfig) -> Result<Vec<HostPort>> {
    let wanted = config.port_mappings.iter().filter(|mapping| mapping.host_port != 0);
    wanted
        .map(|mapping| {
            let bad = |what: &str| Error::invalid(format!("port mapping of {}: {what}", mapping.host_port));
            let host_ip = match mapping.host_ip.as_str() {
                "" => None,
                text => Some(text.parse().map_err(|_| bad("host_ip is no address"))?),
            };
            Ok(HostPort {
                host_ip,
                host_port: u16::try_from(mapping.host_port).map_err(|_| bad("not a port"))?,
                container_port: u16::try_from(mapping.container_port)
                    .map_err(|_| bad("container_port is not a port"))?,
                protocol: match mapping.protocol() {
                    Protocol::Tcp => PortProtocol::Tcp,
                    Protocol::Udp => PortProtocol::Udp,
                    Protocol::Sctp => PortProtocol::Sctp,
                },
            })
        })
        .collect()
}

fn failed(what: &str) -> impl Fn(io::Error) -> Error {
    let what = what.to_owned();
    move |error| Error::internal(format!("{what}: {error}"))
}

impl Inner {
    pub(super) async fn run_sandbox(
        self: Arc<Self>,
        config: PodSandboxConfig,
        handler: String,
    ) -> Result<String> {
        let metadata = required(config.metadata.clone(), "config.metadata")?;
        super::refusals::check_sandbox(&config)?;
        if !handler.is_empty() && !self.config.handlers.contains_key(&handler) {
            return Err(Error::invalid(format!("no runtime for {handler:?} is configured")));
        }
        if user_map(&config)?.is_some() && host_network(&config) {
            let message = "a pod with a user namespace cannot use the node's network";
            return Err(Error::new(Code::Unimplemented, message));
        }
        self.check_sysctls(&config)?;
        let parent = config.linux.as_ref().map(|linux| linux.cgroup_parent.as_str()).unwrap_or_default();
        if Slice::is_slice(parent) {
            Slice::parse(parent).map_err(|error| Error::invalid(format!("cgroup parent: {error}")))?;
        }
        let taken =
            self.index.read().sandboxes.values().any(|s| s.config.metadata.as_ref() == Some(&metadata));
        if taken {
            let name = format!("{}/{} attempt {}", metadata.namespace, metadata.name, metadata.attempt);
            return Err(Error::new(Code::AlreadyExists, format!("a sandbox for {name} exists")));
        }
        let id = new_id();
        let sandbox = Arc::new(Sandbox::new(
            id.clone(),
            config,
            self.config.root.join(records::SANDBOXES).join(&id),
            self.config.run.join(records::SANDBOXES).join(&id),
            SandboxRecord { created_at: sys::now(), ready: true, ips: Vec::new(), runtime_handler: handler },
        ));
        let made = self.clone().make_sandbox(&sandbox).await;
        if let Err(error) = made {
            if let Err(leftover) = self.clear_sandbox(&sandbox).await {
                tracing::warn!(sandbox = %id, error = %leftover, "a failed sandbox left something behind");
            }
            return Err(error);
        }
        self.index.write().sandboxes.insert(id.clone(), sandbox.clone());
        let _ = self.listen(&sandbox).await;
        Ok(id)
    }

    async fn make_sandbox(self: Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<()> {
        let (inner, made) = (self.clone(), sandbox.clone());
        blocking(move || inner.start_supervisor(&made)).await.map_err(failed("start sandbox"))?;
        if self.asks_network(sandbox) {
            let metadata = sandbox.config.metadata.clone().unwrap_or_default();
            let pod = PodRef {
                namespace: metadata.namespace,
                name: metadata.name,
                uid: metadata.uid,
                is_static: sandbox.config.annotations.get(SOURCE).is_some_and(|source| source != "api"),
                host_ports: host_ports(&sandbox.config)?,
                bandwidth: Bandwidth::of(|key| sandbox.config.annotations.get(key))
                    .map_err(|error| Error::invalid(error.to_string()))?,
            };
            let netns = sandbox.run_dir.join(NETNS);
            let attachment =
                self.config.network.attach(&sandbox.id, &netns, &pod).await.map_err(|error| {
                    Error::internal(format!(
                        "set up network for sandbox {}: {}",
                        sandbox.id,
                        with_causes(&error)
                    ))
                })?;
            sandbox.update(|record| record.ips = attachment.ips.iter().map(ToString::to_string).collect());
        }
        // Written last: a sandbox without this record is not one, and is cleared at the next start.
        let (written, hostname) = (sandbox.clone(), self.hostname(&sandbox.config));
        blocking(move || {
            let record = written.record();
            let on_node = host_network(&written.config);
            files::write_hosts(&written.state_dir, on_node, &record.ips, &hostname)?;
            records::write(&written.state_dir, &written.config, &record)
        })
        .await
        .map_err(failed("record sandbox"))
    }

    fn start_supervisor(&self, sandbox: &Sandbox) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        let mut private = std::fs::DirBuilder::new();
        private.recursive(true).mode(0o700);
        private.create(&sandbox.state_dir)?;
        private.create(&sandbox.run_dir)?;
        std::fs::create_dir(sandbox.state_dir.join(records::CONTAINERS))?;
        let config = &sandbox.config;
        files::write(&sandbox.state_dir, config.dns_config.as_ref(), &self.hostname(config))?;
        let options = namespace_options(config);
        let linux = config.linux.clone().unwrap_or_default();
        let setup = Setup {
            own_network: options.network() != NamespaceMode::Node,
            own_ipc: self.own_namespaces(config).ipc,
            own_uts: self.own_namespaces(config).uts,
            shared_pid: options.pid() == NamespaceMode::Pod,
            hostname: self.hostname(config),
            sysctls: linux.sysctls,
            user: user_map(config).map_err(io::Error::other)?.map(|map| UserSetup {
                uid_map: map_file(&map.uids),
                gid_map: map_file(&map.gids),
                root: (map.host_uid(0).unwrap_or(0), map.host_gid(0).unwrap_or(0)),
            }),
            cgroup: self.supervisors_cgroup(),
            join_network: self.config.extras.join_network.clone(),
            join_pid: self.config.extras.join_pid.clone(),
            join_ipc: self.config.extras.join_ipc.as_ref().map(|join| join.namespace.clone()),
            on_exit: self.config.extras.on_exit.clone(),
            shm_size: self.config.extras.shm_size,
        };
        sys::write_atomic(&sandbox.run_dir.join(SETUP), &serde_json::to_vec(&setup)?, false)?;
        self.cgroups.create(&self.supervisors_cgroup())?;
        self.spawner.spawn(&sandbox.run_dir)
    }

    /// The namespaces the sandbox shares with nobody.
    fn own_namespaces(&self, config: &PodSandboxConfig) -> OwnNamespaces {
        let (options, extras) = (namespace_options(config), &self.config.extras);
        let network = options.network() != NamespaceMode::Node;
        OwnNamespaces {
            network: network && extras.join_network.is_none(),
            ipc: options.ipc() != NamespaceMode::Node && extras.join_ipc.is_none(),
            uts: network && !extras.host_uts,
        }
    }

    /// A setting of a namespace that is not the pod's own would change somebody else's.
    fn check_sysctls(&self, config: &PodSandboxConfig) -> Result<()> {
        let own = self.own_namespaces(config);
        let names = config.linux.iter().flat_map(|linux| linux.sysctls.keys());
        for name in names {
            check_sysctl(name, own)?;
        }
        Ok(())
    }

    /// Returns true if our network plugin provides the sandbox's network.
    fn asks_network(&self, sandbox: &Sandbox) -> bool {
        !host_network(&sandbox.config) && self.config.extras.join_network.is_none()
    }

    /// The pod's own name; the node's when it shares the node's network.
    pub(super) fn hostname(&self, config: &PodSandboxConfig) -> String {
        if !config.hostname.is_empty() {
            return config.hostname.clone();
        }
        nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_default()
    }

    /// Kills the containers, removes the network, ends the supervisor. The records stay.
    pub(super) async fn stop_sandbox(self: Arc<Self>, id: &str) -> Result<()> {
        let sandbox = match self.index.sandbox(id) {
            Ok(sandbox) => sandbox,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let _gate = sandbox.gate.lock().await;
        self.stop_gated(&sandbox).await
    }

    async fn stop_gated(&self, sandbox: &Arc<Sandbox>) -> Result<()> {
        for container in self.index.containers_of(&sandbox.id) {
            self.kill(&container).await?;
        }
        let record = sandbox.update(|record| record.ready = false);
        if sandbox.state_dir.exists() {
            records::write_state(&sandbox.state_dir, &record).map_err(failed("record sandbox"))?;
        }
        sandbox.listening.cancel();
        self.release(sandbox).await
    }

    /// Takes back network, supervisor, mounts and run directory, whatever of them is there.
    async fn release(&self, sandbox: &Sandbox) -> Result<()> {
        if self.asks_network(sandbox) {
            let netns = sandbox.run_dir.join(NETNS);
            self.config.network.detach(&sandbox.id, &netns).await.map_err(|error| {
                Error::internal(format!("take network from sandbox {}: {}", sandbox.id, with_causes(&error)))
            })?;
        }
        let run_dir = sandbox.run_dir.clone();
        blocking(move || end_supervisor(&run_dir)).await.map_err(failed("end supervisor"))
    }

    pub(super) async fn remove_sandbox(self: Arc<Self>, id: &str) -> Result<()> {
        let sandbox = match self.index.sandbox(id) {
            Ok(sandbox) => sandbox,
            Err(error) if error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        };
        let _gate = sandbox.gate.lock().await;
        self.stop_gated(&sandbox).await?;
        for container in self.index.containers_of(&sandbox.id) {
            self.remove_container(&container.id).await?;
        }
        self.clear_sandbox(&sandbox).await?;
        self.index.write().sandboxes.remove(&sandbox.id);
        Ok(())
    }

    /// Removes every trace of a sandbox without containers. Also for sandboxes that were never finished.
    pub(super) async fn clear_sandbox(&self, sandbox: &Sandbox) -> Result<()> {
        self.release(sandbox).await?;
        let (state_dir, cgroups) = (sandbox.state_dir.clone(), self.cgroups.clone());
        let group = sandbox.cgroup_parent(&self.config.cgroup_parent);
        blocking(move || {
            // The kubelet may still want the pod's group; it stays as long as anything is in it.
            if !Slice::is_slice(&group) {
                cgroup::remove_if_empty(&cgroups, &group);
            }
            remove_tree(&state_dir)
        })
        .await
        .map_err(failed("remove sandbox files"))
    }
}

/// Ends a supervisor politely, or by force if it does not answer, and removes its run directory with the
/// mounts in it. Works on the remains of one, too.
pub(super) fn end_supervisor(run_dir: &Path) -> io::Result<()> {
    let Some(_claim) = Claim::take(run_dir)
        .map_err(|error| io::Error::new(error.kind(), format!("claim {}: {error}", run_dir.display())))?
    else {
        return Ok(());
    };
    let pid = std::fs::read_to_string(run_dir.join(IDENTITY)).ok().and_then(|identity| alive(&identity));
    if let Some(pid) = pid {
        let polite = client::call(run_dir, &Request::Shutdown, &[]);
        if polite.is_err() {
            // SAFETY: a signal; the identity says that the process is still our supervisor.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
        super::teardown::wait_for_process(pid);
    }
    for name in [NETNS, USERNS, SHM] {
        super::teardown::unmount(&run_dir.join(name))?;
    }
    remove_tree(run_dir)
}

/// Removes a directory of ours. Containers write below it: a mount there is an error and is left alone.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    ferrite_hostfs::remove_tree(path)
        .map_err(|error| io::Error::new(error.kind(), format!("remove {}: {error}", path.display())))
}
