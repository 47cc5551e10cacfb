//! The parts of the network that belong to no pod, kept as they were made: the bridge with its addresses and ports, routes,
//! the rule for Services, and the tables for masquerading and isolation.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferrite_netlink::{NetworkEvent, NetworkEvents, PortFlags, Scope};
use ferrite_nft::{Monitor, OwnGenerations};

use super::{
    Bridge, allow_loopback, error_source, find_link, host_link, make_bridge, path_of, route_between_pods,
};
use crate::{IpFamily, NetworkError, addresses, rules};

/// Changes that come together are looked at together.
const PERIOD: Duration = Duration::from_secs(1);
/// A part that cannot be made again is tried again after this time.
const RETRY: Duration = Duration::from_secs(30);

impl Bridge {
    /// Makes parts again that somebody else removed. Never returns.
    pub(super) async fn heal_base(&self) {
        let opened = self.watch_base();
        let (mut tables, mut events) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                tracing::warn!(%error, cause = error_source(&error), "changes of the pod network go unnoticed");
                return std::future::pending().await;
            }
        };
        let mut problem: Option<String> = None;
        loop {
            if self.removed.load(Ordering::SeqCst) {
                return std::future::pending().await;
            }
            // The first turn finds changes from before the watch.
            match self.restore_base().await {
                Ok(()) => problem = None,
                Err(error) => {
                    let text = format!("{error}: {}", error_source(&error));
                    if problem.as_ref() != Some(&text) {
                        tracing::error!(error = text, "a part of the pod network is missing; trying again");
                        problem = Some(text);
                    }
                }
            }
            tokio::select! {
                _ = tables.changed() => {}
                () = self.base_event(&mut events) => {}
                () = tokio::time::sleep(RETRY), if problem.is_some() => continue,
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    fn watch_base(&self) -> Result<(Monitor, NetworkEvents), NetworkError> {
        let own = rules::base_tables(&self.config.name);
        let host = path_of(&self.host);
        let follows = move |name: &str| own.iter().any(|own| own == name);
        let tables = Monitor::open_all(follows, Some(&host), OwnGenerations::default());
        let tables = tables.map_err(|source| NetworkError::Rules {
            what: "watch the tables of the pod network",
            source: Box::new(source),
        })?;
        let events = NetworkEvents::listen(Some(&self.host), self.ipv6().is_some());
        Ok((tables, events.map_err(NetworkError::netlink("watch links, addresses, routes and rules"))?))
    }

    /// Returns when something that may be the network's was removed.
    async fn base_event(&self, events: &mut NetworkEvents) {
        loop {
            let Ok(event) = events.next().await else { return std::future::pending().await };
            let matters = match &event {
                NetworkEvent::DelLink(link) => link.name == self.config.name,
                // The kernel reports neither the routes nor the addresses that a link loses when it goes down.
                NetworkEvent::NewLink(link) => link.name == self.config.name && !link.is_up,
                NetworkEvent::DelAddress(address) => !address.is_scope(Scope::Link),
                NetworkEvent::DelRoute(route) => {
                    let closed = [Some(self.config.cluster_cidrs), self.config.service_cidrs];
                    let mut closed = closed.iter().flatten().flat_map(|ranges| ranges.iter());
                    closed.any(|range| range.network() == route.destination)
                }
                NetworkEvent::Rule | NetworkEvent::Lost => true,
                _ => false,
            };
            if matters {
                return;
            }
        }
    }

    /// Makes what is missing. What is there stays as it is.
    async fn restore_base(&self) -> Result<(), NetworkError> {
        // The network is not removed in the middle of this.
        let _turn = self.healing.lock().await;
        if self.removed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let Some(record) = self.state.load()? else { return Ok(()) };
        self.restore_link().await?;
        rules::add_routes(&self.conn, &record).await?;
        if self.routes_services.load(Ordering::SeqCst) {
            rules::add_service_route(&self.conn, &record).await?;
        }
        if rules::restore_masquerade(&self.host, &record)? {
            tracing::warn!(
                "somebody else changed the rules for what pods send beyond the cluster; made again"
            );
        }
        if let Some(isolation) = self.isolation.get() {
            let families = self.config.pod_cidrs.families();
            if rules::restore_isolation(&self.host, &self.config.name, &families, *isolation)? {
                tracing::warn!("somebody else changed the rules that set the network apart; made again");
            }
        }
        Ok(())
    }

    /// Makes the bridge again, and joins the pods to it that have lost it.
    async fn restore_link(&self) -> Result<(), NetworkError> {
        let name = self.config.name.as_str();
        let before = find_link(&self.conn, name).await?;
        if !before.as_ref().is_some_and(|link| link.is_up) {
            tracing::warn!(
                bridge = name,
                "somebody else removed the bridge of pods or set it down; making it again"
            );
        }
        make_bridge(&self.host, &self.conn, &self.config).await?;
        let addresses = self.node_addresses.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for address in addresses {
            let fail = NetworkError::netlink(format!("address {address} of bridge {name}"));
            addresses::add_host(&self.conn, name, address).await.map_err(fail)?;
        }
        let Some(bridge) = find_link(&self.conn, name).await? else { return Ok(()) };
        // An attempt that failed half way goes on at the next turn.
        if self.joined.load(Ordering::SeqCst) == bridge.index {
            return Ok(());
        }
        if self.config.pod_cidrs.of(IpFamily::V4).is_some() {
            if self.config.routed {
                route_between_pods(&self.host, name)?;
            }
            let publishes = self.with_host_ports(|ports| Ok(!ports.is_empty())).await?;
            if publishes {
                allow_loopback(&self.host, name)?;
            }
        }
        let isolated = self.isolate_ports().await?;
        for sandbox in self.with_ipam(|ipam| Ok(ipam.sandboxes())).await? {
            let port = host_link(&sandbox);
            let fail = |what: &str| NetworkError::netlink(format!("{what} of bridge port {port}"));
            match find_link(&self.conn, &port).await? {
                Some(link) if link.master != Some(bridge.index) => {}
                _ => continue,
            }
            self.conn.set_link_master(&port, name).await.map_err(fail("bridge"))?;
            let flags = PortFlags { hairpin: Some(true), isolated: Some(isolated) };
            self.conn.set_bridge_port(&port, flags).await.map_err(fail("flags"))?;
            self.conn.set_link_up(&port).await.map_err(fail("activation"))?;
        }
        self.joined.store(bridge.index, Ordering::SeqCst);
        Ok(())
    }
}
