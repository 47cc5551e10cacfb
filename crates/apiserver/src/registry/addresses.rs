//! Records of the addresses and ports of Services: an IPAddress, open to everybody, for each address, and a
//! key for each port on the nodes.
//!
//! They are written and removed in the transaction that writes or removes the Service, so the two never disagree, and
//! two servers on one store cannot hand out the same address or port.

use super::allocator::held_ports;
use super::{Registry, ResourceMap, View, metadata, store_status, stored};
use crate::managed;
use crate::options::WriteOptions;
use ferrite_api::resource::{Reservation, Resource};
use ferrite_api::{Status, meta};
use ferrite_json::{Value, json};
use ferrite_store::{Change, Compare, Key, Op, Txn, WatchEnd};
use jiff::Timestamp;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::LazyLock;

const FAMILY: &str = "ipaddress.kubernetes.io/ip-family";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";

/// The resource of the records. They are kept even where it is not served.
fn resource(table: &ResourceMap) -> Option<&Resource> {
    static UNSERVED: LazyLock<Option<Resource>> =
        LazyLock::new(|| ferrite_api::kinds::built_in().into_iter().find(|row| row.plural == "ipaddresses"));
    let served = table.find("networking.k8s.io", "v1", "ipaddresses").map(|resource| &**resource);
    served.or_else(|| UNSERVED.as_ref())
}

fn port_key(port: u16) -> Key {
    Key::from(&format!("/registry/ranges/servicenodeports/{port}"))
}

pub(super) fn holds_addresses(resource: &Resource) -> bool {
    resource.hooks.begin_create == Some(Reservation::AddressesAndPorts)
}

fn key(table: &ResourceMap, address: IpAddr) -> Option<Key> {
    Some(stored::key(resource(table)?, "", &address.to_string()))
}

/// The addresses a Service holds.
pub(super) fn of(service: &Value) -> impl Iterator<Item = IpAddr> {
    let listed = service.pointer("/spec/clusterIPs").and_then(Value::as_array);
    listed.into_iter().flatten().filter_map(|address| address.as_str()?.parse().ok())
}

/// Returns true if a Service holds the address.
pub(super) fn is_held(view: &View, address: IpAddr) -> bool {
    key(&view.table, address).is_some_and(|key| view.snapshot.get(key.as_bytes()).is_some())
}

/// All addresses that somebody holds.
pub(super) fn held(view: &View) -> Vec<IpAddr> {
    let Some(resource) = resource(&view.table) else { return Vec::new() };
    let prefix = stored::prefix(resource);
    let names = view.snapshot.range(prefix.as_bytes(), None);
    names
        .filter_map(|(key, _)| std::str::from_utf8(key.as_bytes()).ok()?.rsplit('/').next()?.parse().ok())
        .collect()
}

/// Returns true if a Service holds the port.
pub(super) fn is_port_held(view: &View, port: u16) -> bool {
    view.snapshot.get(port_key(port).as_bytes()).is_some()
}

/// The address of a Service as an object.
fn object(resource: &Resource, address: IpAddr, service: &Value, now: Timestamp) -> Value {
    let family = if address.is_ipv6() { "IPv6" } else { "IPv4" };
    let mut object = json!({
        "kind": &*resource.kind,
        "apiVersion": resource.api_version(),
        "metadata": {
            "name": address.to_string(),
            "labels": {FAMILY: family, MANAGED_BY: "ipallocator.k8s.io"},
        },
        "spec": {"parentRef": {
            "resource": "services",
            "namespace": meta::namespace(service),
            "name": meta::name(service),
        }},
    });
    metadata::stamp_new(resource, &mut object, "", now);
    let options = WriteOptions { field_manager: "kube-apiserver".into(), ..WriteOptions::default() };
    managed::on_write(resource, None, &mut object, &options, None, now);
    super::normalise(resource, &mut object);
    object
}

impl Registry {
    /// Adds the changes of their addresses to a write of `new` over `old`. `None` stands for no Service.
    pub(super) fn with_addresses(
        &self,
        resource: &Resource,
        txn: Txn,
        old: Option<&Value>,
        new: Option<&Value>,
    ) -> Txn {
        if !holds_addresses(resource) {
            return txn;
        }
        let has = |service: Option<&Value>, address: &IpAddr| {
            service.is_some_and(|s| of(s).any(|found| found == *address))
        };
        let mut txn = txn;
        for address in old.into_iter().flat_map(of).filter(|a| !has(new, a)) {
            if let Some(key) = key(&self.table, address) {
                txn = txn.then(Op::Delete { key });
            }
        }
        let ports =
            |service: Option<&Value>| service.into_iter().flat_map(held_ports).collect::<BTreeSet<_>>();
        let (ports_before, ports) = (ports(old), ports(new));
        for port in ports_before.difference(&ports) {
            txn = txn.then(Op::Delete { key: port_key(*port) });
        }
        let Some(service) = new else { return txn };
        for address in of(service).filter(|a| !has(old, a)) {
            txn = self.claim(txn, address, service);
        }
        ports.difference(&ports_before).fold(txn, |txn, port| claim_port(txn, *port, service))
    }

    fn claim(&self, txn: Txn, address: IpAddr, service: &Value) -> Txn {
        let Some(resource) = resource(&self.table) else { return txn };
        let key = stored::key(resource, "", &address.to_string());
        let value = stored::encode(resource, &object(resource, address, service, Timestamp::now()));
        txn.when(Compare::Absent(key.clone())).then(Op::put(key, value))
    }

    /// Returns true if a write failed because another Service took its address or port meanwhile.
    pub(super) fn lost_address(&self, service: &Value) -> bool {
        let view = self.view();
        of(service).any(|a| is_held(&view, a)) || held_ports(service).any(|p| is_port_held(&view, p))
    }

    /// Makes the record of an address again that is deleted while its Service holds it. Ends when the store closes.
    pub async fn keep_addresses(&self) {
        let Some(records) = resource(&self.table) else { return };
        let prefix = stored::prefix(records);
        let mut position = self.store.snapshot().revision();
        loop {
            let lost = match self.store.watch(prefix.as_bytes(), position) {
                Ok(mut watch) => loop {
                    match watch.next().await {
                        Ok(changes) => self.restore(records, &changes).await,
                        Err(end) => break end,
                    }
                },
                Err(end) => end,
            };
            if lost == WatchEnd::Closed {
                return;
            }
            // The watch fell behind the history: continue from the present state.
            position = self.store.snapshot().revision();
            if let Err(status) = self.repair_addresses().await {
                tracing::warn!(error = status.message, "cannot record the addresses of Services");
            }
        }
    }

    async fn restore(&self, records: &Resource, changes: &[Change]) {
        let Some(services) = self.table.find("", "v1", "services") else { return };
        let removed = changes.iter().filter(|change| change.entry.is_none());
        for record in removed.filter_map(|change| stored::decode(records, change.previous.as_deref()?)) {
            let parent = |key: &str| record["spec"]["parentRef"][key].as_str().unwrap_or_default();
            let Ok(service) = self.read(services, parent("namespace"), parent("name")) else { continue };
            let name = meta::name(&record).parse::<IpAddr>().ok();
            for address in of(&service).filter(|address| Some(*address) == name) {
                if let Err(error) = self.store.commit(self.claim(Txn::default(), address, &service)).await {
                    tracing::warn!(%address, %error, "cannot record an address again");
                }
            }
        }
    }

    /// Adds missing records of addresses and ports of Services.
    pub async fn repair_addresses(&self) -> Result<(), Status> {
        let view = self.view();
        let Some(services) = self.table.find("", "v1", "services") else { return Ok(()) };
        let prefix = stored::prefix(services);
        for (_, entry) in view.snapshot.range(prefix.as_bytes(), None) {
            let Some(service) = stored::decode(services, entry) else { continue };
            for address in of(&service).filter(|address| !is_held(&view, *address)) {
                // Another writer records it for the same Service.
                self.store
                    .commit(self.claim(Txn::default(), address, &service))
                    .await
                    .map_err(store_status)?;
            }
            let ports: BTreeSet<u16> =
                held_ports(&service).filter(|port| !is_port_held(&view, *port)).collect();
            for port in ports {
                let claim = claim_port(Txn::default(), port, &service);
                self.store.commit(claim).await.map_err(store_status)?;
            }
        }
        Ok(())
    }
}

fn claim_port(txn: Txn, port: u16, service: &Value) -> Txn {
    let key = port_key(port);
    let owner = format!("{}/{}", meta::namespace(service), meta::name(service));
    txn.when(Compare::Absent(key.clone())).then(Op::put(key, owner.into()))
}
