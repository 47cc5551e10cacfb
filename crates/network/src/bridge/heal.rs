//! A network that is kept as it was made.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ferrite_netlink::ModuleEvents;
use ferrite_nft::{Change, Monitor, OwnGenerations};
use futures_util::future::BoxFuture;

use super::{Bridge, error_source, path_of};
use crate::port_filter::{self, Sender};
use crate::{Failures, NetworkError, host_ports};

/// Rules that somebody keeps changing are not made again more often than this.
const PERIOD: Duration = Duration::from_secs(1);
/// The module that passes bridged packets to the packet filter.
const BRIDGE_FILTER: &str = "/module/br_netfilter";

impl Bridge {
    /// Makes everything of the network again that somebody else changes or removes, and changes the way of packets
    /// between pods when the kernel begins or ceases to filter bridges. Never returns.
    pub fn heal(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            tokio::join!(
                self.heal_base(),
                self.heal_host_ports(),
                self.heal_senders(),
                self.follow_bridge_filter()
            );
        })
    }

    /// A change of this process looks like one of somebody else here, so the rules are compared with the pods.
    async fn heal_senders(&self) {
        let table = port_filter::table(&self.config.name);
        let opened = Monitor::open(&table, Some(&path_of(&self.host)), OwnGenerations::default());
        let mut monitor = match opened {
            Ok(monitor) => monitor,
            Err(error) => {
                tracing::warn!(%error, "changes of the rules for what pods send go unnoticed");
                return std::future::pending().await;
            }
        };
        loop {
            if self.removed.load(Ordering::SeqCst) {
                return std::future::pending().await;
            }
            // The first turn finds changes from before the watch.
            if let Err(error) = self.restore_senders() {
                tracing::error!(%error, cause = error_source(&error), "pods can forge the source of their packets");
            }
            monitor.changed().await;
            // Changes that come together are looked at together.
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Makes the rules again of pods that have none, or not all of them.
    fn restore_senders(&self) -> Result<(), NetworkError> {
        let known = || self.senders.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let expected = known();
        let found = port_filter::guarded(&self.host, &self.config.name)?;
        let now = known();
        // Pods that have gone in between took their rules along.
        let broken = |(link, sender): &(String, Sender)| {
            now.contains_key(link) && !port_filter::is_whole(&found, sender)
        };
        let broken: Vec<(String, Sender)> = expected.into_iter().filter(broken).collect();
        if broken.is_empty() {
            return Ok(());
        }
        tracing::warn!("somebody else changed the rules for what pods send; making them again");
        port_filter::prepare(&self.host, &self.config.name)?;
        let mut failures = Failures::new("restore the rules for what a pod sends");
        for (link, sender) in broken {
            failures.note(&link, self.guard_sender(&link, sender.addresses, sender.limit));
        }
        failures.result()
    }

    async fn heal_host_ports(&self) {
        let table = host_ports::table_name(&self.config.name);
        let mut monitor = match Monitor::open(&table, Some(&path_of(&self.host)), self.own_rules.clone()) {
            Ok(monitor) => monitor,
            Err(error) => {
                tracing::warn!(%error, "changes of the rules of host ports go unnoticed");
                return std::future::pending().await;
            }
        };
        loop {
            let change = monitor.changed().await;
            if self.removed.load(Ordering::SeqCst) {
                return std::future::pending().await;
            }
            if change == Change::Foreign {
                tracing::warn!("somebody else changed the rules of host ports; making them again");
            }
            let healed = self.with_host_ports(|ports| match ports.is_empty() {
                true => Ok(()),
                false => ports.rebuild(),
            });
            if let Err(error) = healed.await {
                tracing::error!(%error, cause = error_source(&error), "host ports do not work");
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// Without it, a module that is loaded later would break translated packets between pods until the next pod comes.
    async fn follow_bridge_filter(&self) {
        let mut events = match ModuleEvents::listen(Some(&self.host)) {
            Ok(events) => events,
            Err(error) => {
                tracing::debug!(%error, "modules that are loaded go unnoticed");
                return std::future::pending().await;
            }
        };
        loop {
            match events.next().await {
                Ok(Some(path)) if path != BRIDGE_FILTER => continue,
                // Events that were lost may have been about it.
                Ok(_) => {}
                Err(error) => {
                    tracing::warn!(%error, "modules that are loaded go unnoticed");
                    return std::future::pending().await;
                }
            }
            if self.removed.load(Ordering::SeqCst) {
                return std::future::pending().await;
            }
            if let Err(error) = self.isolate_ports().await {
                tracing::error!(%error, cause = error_source(&error), "packets between pods may take a way on which Services do not work");
            }
        }
    }
}
