//! One IP family: keeps a table as the Services want it. The calls block for as long as the kernel works on them.

use std::collections::BTreeSet;
use std::sync::Arc;

use ferrite_nft::{KernelError, MoreElements, Table};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;

use crate::diff::{Element, Programmed};
use crate::layout::{LayoutConfig, SetName, desired};
use crate::model::{
    ChosenEndpoints, EndpointAddress, IpFamily, NodeFacts, ServicePort, ServicePortName, choose,
    endpoints_of, service_ports,
};

/// A service port as others than the table see it: health checks and connection tracking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedPort {
    pub name: Arc<ServicePortName>,
    pub port: ServicePort,
    /// Endpoints that serve, ready or terminating, on any node, ordered by address.
    pub serving: Arc<[EndpointAddress]>,
    /// Ready endpoints on this node.
    pub local_ready: BTreeSet<EndpointAddress>,
    pub chosen: ChosenEndpoints,
}

/// The service ports of one Service in one family.
pub fn served_ports<'a>(
    service: &Service,
    slices: impl Iterator<Item = &'a EndpointSlice>,
    family: IpFamily,
    node: &NodeFacts,
) -> Vec<ServedPort> {
    let ports = service_ports(service, family);
    if ports.is_empty() {
        return Vec::new();
    }
    let mut endpoints = endpoints_of(slices, family, &node.name);
    let served = ports.into_iter().map(|(name, port)| {
        let endpoints = endpoints.remove(&(name.port.clone(), name.protocol)).unwrap_or_default();
        let chosen = choose(&port, &endpoints, node);
        let serving = || endpoints.iter().filter(|e| e.serving).map(|e| e.address);
        ServedPort {
            // Most often all of them are chosen; then the list is shared.
            serving: match serving().eq(chosen.cluster.iter().copied()) {
                true => Arc::clone(&chosen.cluster),
                false => serving().collect(),
            },
            local_ready: endpoints.iter().filter(|e| e.local && e.ready).map(|e| e.address).collect(),
            name: Arc::new(name),
            port,
            chosen,
        }
    });
    served.collect()
}

/// The size of a synchronisation's changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Synced {
    pub rebuilt: bool,
    pub deleted: usize,
    pub added: usize,
    pub chains: usize,
}

/// The table of one family and its contents.
pub struct FamilyProxy {
    programmed: Programmed,
    table: Table,
    /// The kernel's table is unknown or known to be wrong.
    must_rebuild: bool,
}

impl FamilyProxy {
    /// The first [`sync`](Self::sync) replaces a table that an earlier process left.
    pub fn new(config: LayoutConfig, table: Table) -> Self {
        Self { programmed: Programmed::new(config), table, must_rebuild: true }
    }

    pub fn config(&self) -> &LayoutConfig {
        self.programmed.config()
    }

    pub fn set_config(&mut self, config: LayoutConfig) {
        if *self.programmed.config() != config {
            self.programmed.set_config(config);
            self.invalidate();
        }
    }

    /// Returns true if packets to the address and port go to this service port.
    pub fn has_frontend(&self, name: &ServicePortName, address: std::net::IpAddr, port: u16) -> bool {
        self.programmed.has_frontend(name, address, port)
    }

    /// Notes the ports of one Service; empty if it is gone or not proxied. Ports of the other family do not count.
    pub fn update(&mut self, namespace: &str, service: &str, ports: &[ServedPort]) {
        let family = self.programmed.config().family;
        let own = || ports.iter().filter(|served| IpFamily::of(served.port.cluster_ip) == family);
        for gone in self.programmed.ports_of(namespace, service) {
            if !own().any(|port| port.name == gone) {
                self.programmed.update(&gone, None);
            }
        }
        for port in own() {
            let wanted = desired(&port.port, &port.chosen, self.programmed.config());
            self.programmed.update(&port.name, Some(wanted));
        }
    }

    /// The next [`sync`](Self::sync) makes the whole table again.
    pub fn invalidate(&mut self) {
        self.must_rebuild = true;
        self.programmed.expect_rebuild();
    }

    /// Returns true if the kernel still has the table that was made here.
    pub fn table_is_ours(&mut self) -> Result<bool, KernelError> {
        self.table.is_ours()
    }

    /// Brings the kernel's table up to date in one transaction.
    ///
    /// A change that the kernel refuses means that somebody else changed the table: it is then made again as a whole.
    pub fn sync(&mut self) -> Result<Synced, KernelError> {
        if !self.must_rebuild {
            let transaction = self.programmed.take_changes();
            if transaction.is_empty() {
                return Ok(Synced::default());
            }
            match self.table.apply(&transaction) {
                Ok(()) if self.table.take_missed() => self.must_rebuild = true,
                Ok(()) => {
                    self.delete_retired_chains();
                    return Ok(Synced {
                        rebuilt: false,
                        deleted: transaction.delete.len(),
                        added: transaction.add.len(),
                        chains: transaction.chains.len(),
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, cause = cause(&error), "the table is not as expected; making it again");
                    self.must_rebuild = true;
                }
            }
        }
        // Session affinity outlives restarts of the proxy: the ids of service ports are the same in every table.
        let clients = self.table.expiring_elements(SetName::Affinity).unwrap_or_else(|error| {
            tracing::warn!(%error, cause = cause(&error), "session affinity starts anew");
            Vec::new()
        });
        let transaction = self.programmed.rebuild();
        let (programmed, count) = (&self.programmed, self.programmed.element_count());
        let each = |each: &mut dyn FnMut(Element)| programmed.each_element(each);
        self.table.apply_with(&transaction, &MoreElements { count, each: &each, expiring: &clients })?;
        self.table.take_missed();
        self.must_rebuild = false;
        Ok(Synced {
            rebuilt: true,
            deleted: 0,
            added: transaction.add.len() + count,
            chains: transaction.chains.len(),
        })
    }

    /// Deletes the table.
    pub fn remove(&mut self) -> Result<(), KernelError> {
        self.invalidate();
        self.table.remove()
    }

    /// Kernels before 6.2 notice late that an element no longer refers to a chain; then the next time will do.
    fn delete_retired_chains(&mut self) {
        let names = self.programmed.retired_chains();
        if names.is_empty() {
            return;
        }
        match self.table.delete_chains(&names) {
            Ok(()) => self.programmed.chains_deleted(),
            Err(error) => tracing::debug!(%error, cause = cause(&error), "chains are still referred to"),
        }
    }
}

fn cause(error: &KernelError) -> String {
    std::error::Error::source(error).map(ToString::to_string).unwrap_or_default()
}
