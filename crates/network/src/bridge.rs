//! One node's pod network: a bridge, and a veth pair per sandbox.

mod base;
mod config;
mod heal;
mod links;

use std::collections::HashMap;
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use async_trait::async_trait;
use ferrite_netlink::{Connection, Netns, PortFlags, VethLink};
use ferrite_nft::OwnGenerations;
use futures_util::future::BoxFuture;

pub use self::config::{BridgeConfig, Isolation, Port};
use self::links::{
    allow_loopback, bridges_are_filtered, dismantle, gateways, host_link, make_bridge, path_of, ports,
    route_between_pods, undo,
};
pub(crate) use self::links::{delete_link, find_link, hash_name, is_host_link, open_netns};
use crate::addresses::{self, hardware_address};
use crate::guard::GuardSlot;
use crate::host_ports::{self, HostPorts};
use crate::ipam::Ipam;
use crate::overlap::{self, Ranges};
use crate::port_filter::{self, Sender};
use crate::state::{Record, State, boot_id};
use crate::{
    Addresses, Attachment, Cidr, Cidrs, Failures, IpFamily, NetworkError, NotReady, PodGuard, PodNetwork,
    PodRef, bandwidth, forwarding, rules,
};

/// The built-in pod network of one node.
///
/// Everything it makes (bridge, veth pairs, routes, one nftables table, forwarding) is recorded in the
/// state directory before it is made, so that [`remove`](Self::remove) and [`purge`](Self::purge) find
/// it again after a crash.
///
/// Calls for different sandboxes may run at the same time; for one sandbox the caller makes one call at a time.
pub struct Bridge {
    config: BridgeConfig,
    host: Netns,
    conn: Connection,
    ipam: Arc<Mutex<Ipam>>,
    host_ports: Arc<Mutex<HostPorts>>,
    /// The generations of rulesets that changes of host ports made.
    own_rules: OwnGenerations,
    guard: GuardSlot,
    /// The pods behind links of this node, by link: what the table of senders must have.
    senders: Mutex<HashMap<String, Sender>>,
    /// True if ports were isolated when the last one was made.
    isolated: AtomicBool,
    /// The isolation that was asked for.
    isolation: OnceLock<Isolation>,
    /// True once packets to Services have a route.
    routes_services: AtomicBool,
    /// The index of the bridge to which all pods were joined last; zero before.
    joined: AtomicU32,
    /// Further addresses of the node on the bridge.
    node_addresses: Mutex<Vec<IpAddr>>,
    /// Held while parts are made again, so that the network is not removed in the middle of it.
    healing: tokio::sync::Mutex<()>,
    state: State,
    removed: AtomicBool,
}

impl Bridge {
    /// Makes or completes the network in the calling thread's network namespace.
    ///
    /// Forwarding of the families that pods have is turned on. If it was off, it goes off again when the network is
    /// removed in the same boot.
    pub async fn open(config: BridgeConfig) -> Result<Arc<Self>, NetworkError> {
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        Self::open_on(host, config).await
    }

    /// [`open`](Self::open), with the network namespace at `host` as the node's.
    pub async fn open_in(host: &Path, config: BridgeConfig) -> Result<Arc<Self>, NetworkError> {
        Self::open_on(open_netns(host)?, config).await
    }

    fn open_on(host: Netns, config: BridgeConfig) -> BoxFuture<'static, Result<Arc<Self>, NetworkError>> {
        Box::pin(Self::make(host, config))
    }

    async fn make(host: Netns, config: BridgeConfig) -> Result<Arc<Self>, NetworkError> {
        config.check()?;
        let state = State::open(&config.state)?;
        let conn = Connection::new_in(&host).map_err(NetworkError::netlink("open a netlink socket"))?;
        let earlier = state.load()?;
        let mut record = Record {
            bridge: config.name.clone(),
            pod_cidrs: config.pod_cidrs,
            cluster_cidrs: config.cluster_cidrs,
            service_cidrs: config.service_cidrs,
            ip_forward: earlier
                .as_ref()
                .and_then(|earlier| earlier.ip_forward.clone())
                .filter(|before| before.boot == boot_id()),
            ipv6_settings: earlier.iter().flat_map(|earlier| earlier.ipv6_settings.clone()).collect(),
        };
        record.ipv6_settings.retain(|_, before| before.boot == boot_id());
        if let Some(earlier) = &earlier
            && !earlier.same_network(&record)
        {
            tracing::warn!(
                bridge = earlier.bridge,
                "pod network configuration changed; pods lose their links"
            );
            let sandboxes = Ipam::open(state.reservations(), earlier.pod_cidrs)?.sandboxes();
            dismantle(&host, &conn, earlier, &sandboxes).await?;
        }
        let ranges =
            Ranges { pods: config.pod_cidrs, cluster: config.cluster_cidrs, services: config.service_cidrs };
        overlap::check(&conn, &config.name, ranges).await?;
        forwarding::note(&host, &mut record)?;
        state.save(&record)?;
        forwarding::enable(&host, &record)?;

        let ipam = Ipam::open(state.reservations(), config.pod_cidrs)?;
        make_bridge(&host, &conn, &config).await?;
        if config.routed && config.pod_cidrs.of(IpFamily::V4).is_some() {
            route_between_pods(&host, &config.name)?;
        }
        let (own_rules, families) = (OwnGenerations::default(), config.pod_cidrs.families());
        let mut ports =
            HostPorts::open(state.host_ports(), &config.name, &families, &path_of(&host), &own_rules)?;
        if !ports.is_empty() {
            ports.rebuild()?;
            if config.pod_cidrs.of(IpFamily::V4).is_some() {
                allow_loopback(&host, &config.name)?;
            }
        }
        rules::add_routes(&conn, &record).await?;
        if let Err(error) = rules::add_masquerade(&host, &record) {
            // Pods still reach each other and the node; only the world outside the cluster is out of
            // reach, as on a kernel built without nftables NAT.
            tracing::warn!(%error, cause = error_source(&error), "pods cannot reach beyond the cluster");
        }
        let removed = AtomicBool::new(false);
        let network = Arc::new(Self {
            config,
            host,
            conn,
            ipam: Arc::new(Mutex::new(ipam)),
            host_ports: Arc::new(Mutex::new(ports)),
            own_rules,
            guard: GuardSlot::default(),
            senders: Mutex::default(),
            isolated: AtomicBool::new(false),
            isolation: OnceLock::new(),
            routes_services: AtomicBool::new(false),
            joined: AtomicU32::new(0),
            node_addresses: Mutex::default(),
            healing: tokio::sync::Mutex::default(),
            state,
            removed,
        });
        if let Err(error) = network.guard_senders().await {
            // As on a kernel built without nftables for links.
            tracing::warn!(%error, cause = error_source(&error), "pods can forge the source of their packets");
        }
        Ok(network)
    }

    /// The name of the bridge's link.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The addresses pods use as their default gateways: the node, on the bridge.
    pub fn gateways(&self) -> Addresses {
        gateways(self.config.pod_cidrs)
    }

    /// Gives the node another address on the bridge, for a server of the node that pods reach by it. It goes with the
    /// bridge. The node never uses it as the source of what it sends elsewhere.
    pub async fn add_node_address(&self, address: IpAddr) -> Result<(), NetworkError> {
        self.check_open()?;
        let fail = NetworkError::netlink(format!("address {address} of bridge {}", self.config.name));
        addresses::add_host(&self.conn, &self.config.name, address).await.map_err(fail)?;
        let mut known = self.node_addresses.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(&address) {
            known.push(address);
        }
        Ok(())
    }

    /// The ranges of this node's pods.
    pub fn pod_cidrs(&self) -> Cidrs {
        self.config.pod_cidrs
    }

    /// Pods that are attached from now on are covered by the guard before they get their link. The first one stays.
    pub fn set_guard(&self, guard: Arc<dyn PodGuard>) {
        self.guard.set(guard);
    }

    /// Refuses pods until there is a guard, and pods whose packets the kernel cannot judge.
    pub fn require_guard(&self) {
        self.guard.require();
    }

    /// Lets packets to Services pass to a service proxy on this node, also those of the node's own processes. May be
    /// repeated.
    pub async fn route_services(&self) -> Result<(), NetworkError> {
        self.check_open()?;
        match self.state.load()? {
            Some(record) => rules::add_service_route(&self.conn, &record).await?,
            None => return Ok(()),
        }
        self.routes_services.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Sets the network apart from others of this node. The first word holds until the network is removed.
    pub async fn isolate(&self, isolation: Isolation) -> Result<(), NetworkError> {
        self.check_open()?;
        let families = self.config.pod_cidrs.families();
        let isolation = *self.isolation.get_or_init(|| isolation);
        rules::add_isolation(&self.host, &self.config.name, &families, isolation)
    }

    /// Joins a sandbox that may be on other networks too. `owner` names the reservation and must differ from
    /// network to network; [`detach`](PodNetwork::detach) takes the same. May be repeated, as
    /// [`attach`](PodNetwork::attach).
    pub async fn attach_port(
        &self,
        owner: &str,
        netns: &Path,
        pod: &PodRef,
        port: &Port,
    ) -> Result<Addresses, NetworkError> {
        self.check_open()?;
        self.guard.check(pod)?;
        let netns = open_netns(netns)?;
        let fail = |what: &str| {
            NetworkError::netlink(format!("{what} of pod {}/{} (sandbox {owner})", pod.namespace, pod.name))
        };
        let pod_conn = Connection::new_in(&netns).map_err(fail("netlink socket in the namespace"))?;
        let (name, wanted) = (owner.to_owned(), port.address);
        let addresses = self.with_ipam(move |ipam| ipam.reserve_wanted(&name, wanted)).await?;
        self.guard.cover(owner, pod, &addresses.iter().copied().collect::<Vec<_>>()).await?;
        let link = port.link.as_str();
        self.link_pod(owner, &netns, &pod_conn, link, *addresses.primary()).await?;

        let host_end = host_link(owner);
        let host_end = host_end.as_str();
        self.conn.set_link_alias(host_end, owner).await.map_err(fail("alias"))?;
        self.conn.set_link_master(host_end, &self.config.name).await.map_err(fail("bridge port"))?;
        // A pod may reach itself through a service address: the frame goes back out of its own port.
        let isolated = self.isolate_ports().await?;
        let flags = PortFlags { hairpin: Some(true), isolated: Some(isolated) };
        self.conn.set_bridge_port(host_end, flags).await.map_err(fail("bridge port flags"))?;
        self.guard_sender(host_end, addresses, pod.bandwidth.egress)?;
        if let Some(bits) = pod.bandwidth.ingress {
            bandwidth::limit(&self.conn, host_end, bits).await.map_err(fail("ingress bandwidth"))?;
        }
        if let Some(bits) = pod.bandwidth.egress {
            bandwidth::limit(&pod_conn, link, bits).await.map_err(fail("egress bandwidth"))?;
        }
        self.conn.set_link_up(host_end).await.map_err(fail("host link"))?;

        pod_conn.set_link_up("lo").await.map_err(fail("loopback"))?;
        for address in addresses.iter() {
            let range = self.range_in_pod(*address);
            addresses::add(&pod_conn, link, *address, range).await.map_err(fail("address"))?;
        }
        pod_conn.set_link_up(link).await.map_err(fail(link))?;
        // A pod's first packets pass: its sender would repeat them after a second.
        for name in [host_end, &self.config.name] {
            self.conn.settle_link(name).await.map_err(fail(name))?;
        }
        pod_conn.settle_link(link).await.map_err(fail(link))?;
        if port.default_route {
            self.route(&pod_conn, link).await.map_err(fail("default route"))?;
        } else if let Some((gateway, range)) = self.ipv6() {
            let routed = addresses::route_by(&pod_conn, link, gateway, Some(range)).await;
            routed.map_err(fail("route to neighbours"))?;
        }
        tracing::debug!(owner, %addresses, pod = pod.name, namespace = pod.namespace, "attached");
        Ok(addresses)
    }

    /// The neighbours that a pod of this address sees: those of its range in IPv4, none in IPv6.
    fn range_in_pod(&self, address: IpAddr) -> Cidr {
        let alone = || Cidr::containing(address, IpFamily::V6.bits());
        let range = self.config.pod_cidrs.of(IpFamily::of(address)).copied();
        let range = if address.is_ipv6() { alone().or(range) } else { range };
        range.unwrap_or(*self.config.pod_cidrs.primary())
    }

    /// The gateway and the range of IPv6, where pods have it.
    fn ipv6(&self) -> Option<(IpAddr, Cidr)> {
        let range = *self.config.pod_cidrs.of(IpFamily::V6)?;
        Some((range.nth(1)?, range))
    }

    /// Lets the pod behind a link send from its own address only. A network that requires a guard takes no pod that
    /// could speak as another one.
    fn guard_sender(&self, link: &str, addresses: Addresses, limit: Option<u64>) -> Result<(), NetworkError> {
        let sender = Sender::new(link, addresses, limit);
        if let Err(error) = port_filter::guard(&self.host, &self.config.name, &sender) {
            if self.guard.is_required() {
                return Err(error);
            }
            // As on a kernel built without nftables for links.
            tracing::warn!(%error, cause = error_source(&error), %addresses, "a pod can forge the source of its packets");
            return Ok(());
        }
        self.senders.lock().unwrap_or_else(PoisonError::into_inner).insert(link.to_owned(), sender);
        Ok(())
    }

    /// Adds missing filters for pods of an earlier process.
    async fn guard_senders(&self) -> Result<(), NetworkError> {
        port_filter::prepare(&self.host, &self.config.name)?;
        let guarded = port_filter::guarded(&self.host, &self.config.name)?;
        for (sandbox, addresses) in self.with_ipam(|ipam| Ok(ipam.reservations())).await? {
            let link = host_link(&sandbox);
            let sender = Sender::new(&link, addresses, None);
            if port_filter::is_whole(&guarded, &sender) {
                self.senders.lock().unwrap_or_else(PoisonError::into_inner).insert(link, sender);
            } else if find_link(&self.conn, &link).await?.is_some() {
                self.guard_sender(&link, addresses, None)?;
            }
        }
        Ok(())
    }

    /// The link of a pod is gone, and the rules for it with it.
    fn forget_sender(&self, link: &str) -> Result<(), NetworkError> {
        self.senders.lock().unwrap_or_else(PoisonError::into_inner).remove(link);
        port_filter::forget(&self.host, &self.config.name, link)
    }

    /// True if ports are to be isolated now. When that changes, the ports that are there follow.
    ///
    /// An isolated port reaches the bridge and no other port, so packets between pods take the way through the node's
    /// routing. Where the kernel passes bridged packets to the packet filter (br_netfilter), they stay on the bridge: it
    /// sends translated packets straight to another port.
    async fn isolate_ports(&self) -> Result<bool, NetworkError> {
        // Packets of IPv6 take the way through the node in both cases; the primary family decides.
        let family = self.config.pod_cidrs.primary().family();
        let isolated = self.config.routed && !bridges_are_filtered(&self.host, family);
        if self.isolated.swap(isolated, Ordering::SeqCst) != isolated {
            for name in ports(&self.conn, &self.config.name).await? {
                let flags = PortFlags { hairpin: None, isolated: Some(isolated) };
                let fail = NetworkError::netlink(format!("isolation of bridge port {name}"));
                self.conn.set_bridge_port(&name, flags).await.map_err(fail)?;
            }
        }
        Ok(isolated)
    }

    /// Makes this network the way out of a namespace that is joined to it by `link`.
    pub async fn route_out(&self, netns: &Path, link: &str) -> Result<(), NetworkError> {
        let fail = || NetworkError::netlink(format!("default route through {link}"));
        let conn = Connection::new_in(&open_netns(netns)?).map_err(fail())?;
        self.route(&conn, link).await.map_err(fail())
    }

    async fn route(&self, pod: &Connection, link: &str) -> Result<(), ferrite_netlink::Error> {
        for gateway in self.gateways().iter() {
            addresses::route_by(pod, link, *gateway, None).await?;
        }
        Ok(())
    }

    /// Frees the addresses and links of sandboxes that are not in `live`.
    pub async fn reconcile(&self, live: &[String]) -> Result<(), NetworkError> {
        self.check_open()?;
        let known = self.with_ipam(|ipam| Ok(ipam.sandboxes())).await?;
        let mut failures = Failures::new("free the addresses of pods that are gone");
        for sandbox in known.iter().filter(|sandbox| !live.contains(sandbox)) {
            failures.note(sandbox, self.release(sandbox).await);
        }
        let expected: Vec<String> = live.iter().map(|sandbox| host_link(sandbox)).collect();
        for name in ports(&self.conn, &self.config.name).await? {
            if !expected.contains(&name) {
                failures.note(&name, delete_link(&self.conn, &name).await);
                failures.note(&name, self.forget_sender(&name));
            }
        }
        failures.result()
    }

    /// Deletes everything the network made, its state included. Pods that are still attached lose their
    /// links. May be repeated.
    pub async fn remove(&self) -> Result<(), NetworkError> {
        self.removed.store(true, Ordering::SeqCst);
        let _turn = self.healing.lock().await;
        let sandboxes = self.with_ipam(|ipam| Ok(ipam.sandboxes())).await?;
        if let Some(record) = self.state.load()? {
            undo(&self.host, &self.conn, &record, &sandboxes).await?;
        }
        self.state.clear()
    }

    /// [`remove`](Self::remove) for a network that no process has open, from its state directory alone.
    /// Does nothing when there is none. The (then empty) directory itself stays with the caller.
    pub async fn purge(state: &Path) -> Result<(), NetworkError> {
        let host = Netns::current().map_err(NetworkError::netlink("open this thread's network namespace"))?;
        Self::purge_on(&host, state).await
    }

    /// [`purge`](Self::purge), with the network namespace at `host` as the node's.
    pub async fn purge_in(host: &Path, state: &Path) -> Result<(), NetworkError> {
        Self::purge_on(&open_netns(host)?, state).await
    }

    async fn purge_on(host: &Netns, state: &Path) -> Result<(), NetworkError> {
        if !state.exists() {
            return Ok(());
        }
        let state = State::open(state)?;
        if let Some(record) = state.load()? {
            let conn = Connection::new_in(host).map_err(NetworkError::netlink("open a netlink socket"))?;
            let sandboxes = Ipam::open(state.reservations(), record.pod_cidrs)?.sandboxes();
            undo(host, &conn, &record, &sandboxes).await?;
        }
        state.clear()
    }

    fn check_open(&self) -> Result<(), NetworkError> {
        match self.removed.load(Ordering::SeqCst) {
            true => Err(NetworkError::Removed(self.config.name.clone())),
            false => Ok(()),
        }
    }

    /// Runs `work` on the reservations, away from the async workers because it syncs files.
    async fn with_ipam<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Ipam) -> Result<T, NetworkError> + Send + 'static,
    ) -> Result<T, NetworkError> {
        let ipam = Arc::clone(&self.ipam);
        tokio::task::spawn_blocking(move || work(&mut ipam.lock().unwrap_or_else(PoisonError::into_inner)))
            .await
            .unwrap_or_else(|error| {
                Err(NetworkError::Conflict(format!("address bookkeeping failed: {error}")))
            })
    }

    /// [`with_ipam`](Self::with_ipam), for host ports.
    async fn with_host_ports<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut HostPorts) -> Result<T, NetworkError> + Send + 'static,
    ) -> Result<T, NetworkError> {
        let ports = Arc::clone(&self.host_ports);
        tokio::task::spawn_blocking(move || work(&mut ports.lock().unwrap_or_else(PoisonError::into_inner)))
            .await
            .unwrap_or_else(|error| Err(NetworkError::Conflict(format!("host ports failed: {error}"))))
    }

    /// Makes ports of the node lead to the sandbox.
    async fn publish(&self, sandbox: &str, addresses: Addresses, pod: &PodRef) -> Result<(), NetworkError> {
        if pod.host_ports.iter().any(|port| !port.applies_to(addresses)) {
            tracing::warn!(
                pod = pod.name,
                namespace = pod.namespace,
                "a host port leads nowhere: the pod has no address of the family of its hostIP"
            );
        }
        let (name, ports) = (sandbox.to_owned(), pod.host_ports.clone());
        self.with_host_ports(move |known| known.publish(&name, addresses, &ports)).await?;
        // After the rules that keep pods from using it.
        match addresses.of(IpFamily::V4) {
            Some(_) => allow_loopback(&self.host, &self.config.name),
            None => Ok(()),
        }
    }

    /// The link goes before the address, so that nobody gets an address that still answers.
    async fn release(&self, sandbox: &str) -> Result<(), NetworkError> {
        let name = sandbox.to_owned();
        let published = self.with_host_ports(move |ports| ports.withdraw(&name)).await?;
        if let Some(addresses) = published {
            let host = path_of(&self.host);
            // The kernel may track very many.
            let forget = move || host_ports::forget_flows(Some(&Netns::from_path(host)?), addresses);
            if let Ok(Err(error)) = tokio::task::spawn_blocking(forget).await {
                tracing::warn!(%error, %addresses, "UDP clients may stay with a pod that is gone");
            }
        }
        let link = host_link(sandbox);
        delete_link(&self.conn, &link).await?;
        self.forget_sender(&link)?;
        self.guard.uncover(sandbox).await;
        let sandbox = sandbox.to_owned();
        self.with_ipam(move |ipam| ipam.release(&sandbox)).await
    }

    /// Makes the pair unless a complete one is there from an earlier call.
    async fn link_pod(
        &self,
        sandbox: &str,
        netns: &Netns,
        pod: &Connection,
        link: &str,
        address: IpAddr,
    ) -> Result<(), NetworkError> {
        let name = host_link(sandbox);
        let host_end = find_link(&self.conn, &name).await?;
        let pod_end = find_link(pod, link).await?;
        match (&host_end, &pod_end) {
            (Some(host_end), Some(pod_end)) if pod_end.peer == Some(host_end.index) => return Ok(()),
            (_, Some(_)) => {
                return Err(NetworkError::Conflict(format!(
                    "sandbox {sandbox}: its namespace already has an {link} that is not this network's"
                )));
            }
            // The namespace was made anew (a reboot, a lost sandbox): the old pair leads nowhere.
            (Some(_), None) => delete_link(&self.conn, &name).await?,
            (None, None) => {}
        }
        let veth = VethLink::new(&name, link)
            .mtu(self.config.mtu)
            .peer_address(hardware_address(address))
            .peer_netns(netns);
        self.conn
            .add_link(veth)
            .await
            .map_err(NetworkError::netlink(format!("make the veth pair of sandbox {sandbox}")))
    }
}

#[async_trait]
impl PodNetwork for Bridge {
    async fn attach(&self, sandbox: &str, netns: &Path, pod: &PodRef) -> Result<Attachment, NetworkError> {
        let addresses = self.attach_port(sandbox, netns, pod, &Port::default()).await?;
        if !pod.host_ports.is_empty() {
            self.publish(sandbox, addresses, pod).await?;
        }
        Ok(Attachment { ips: addresses.iter().copied().collect() })
    }

    async fn detach(&self, sandbox: &str, _netns: &Path) -> Result<(), NetworkError> {
        // Deleting the host's end deletes the pair, wherever the other end is, and a namespace that is
        // gone has taken the pair with it.
        self.check_open()?;
        self.release(sandbox).await
    }

    fn ready(&self) -> Result<(), NotReady> {
        self.check_open().map_err(|error| NotReady(error.to_string()))?;
        self.guard.ready()
    }
}

fn error_source(error: &NetworkError) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}
