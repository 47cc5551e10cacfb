//! IPAddresses of Services: the record, open to everybody, of which address is whose.
//!
//! It is written and removed in the transaction that writes or removes the Service, so the two never disagree, and
//! two servers on one store cannot hand out the same address.

use super::{Registry, Table, View, metadata, store_status, stored};
use crate::managed;
use crate::options::WriteOptions;
use ferrite_api::resource::Resource;
use ferrite_api::{Status, meta};
use ferrite_store::{Compare, Key, Op, Txn};
use jiff::Timestamp;
use serde_json::{Value, json};
use std::net::IpAddr;

const FAMILY: &str = "ipaddress.kubernetes.io/ip-family";
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";

fn resource(table: &Table) -> Option<&Resource> {
    table.find("networking.k8s.io", "v1", "ipaddresses").map(|resource| &**resource)
}

fn is_service(resource: &Resource) -> bool {
    resource.group.is_empty() && resource.plural == "services"
}

fn key(table: &Table, address: IpAddr) -> Option<Key> {
    Some(stored::key(resource(table)?, "", &address.to_string()))
}

/// The addresses a Service holds.
pub(super) fn of(service: &Value) -> impl Iterator<Item = IpAddr> {
    let listed = service.pointer("/spec/clusterIPs").and_then(Value::as_array);
    listed.into_iter().flatten().filter_map(|address| address.as_str()?.parse().ok())
}

/// Whether somebody holds the address.
pub(super) fn is_held(view: &View, address: IpAddr) -> bool {
    key(&view.table, address).is_some_and(|key| view.snapshot.get(key.as_bytes()).is_some())
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
    /// Adds to a write of `new` over `old` what becomes of their addresses. `None` stands for no Service.
    pub(super) fn with_addresses(
        &self,
        resource: &Resource,
        txn: Txn,
        old: Option<&Value>,
        new: Option<&Value>,
    ) -> Txn {
        if !is_service(resource) {
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
        let Some(service) = new else { return txn };
        for address in of(service).filter(|a| !has(old, a)) {
            txn = self.claim(txn, address, service);
        }
        txn
    }

    fn claim(&self, txn: Txn, address: IpAddr, service: &Value) -> Txn {
        let Some(resource) = resource(&self.table) else { return txn };
        let key = stored::key(resource, "", &address.to_string());
        let value = stored::encode(resource, &object(resource, address, service, Timestamp::now()));
        txn.when(Compare::Absent(key.clone())).then(Op::put(key, value))
    }

    /// Whether a write failed because an address it wanted has been taken meanwhile.
    pub(super) fn lost_address(&self, resource: &Resource, service: &Value) -> bool {
        is_service(resource) && of(service).any(|address| is_held(&self.view(), address))
    }

    /// Records the addresses of Services that were written without.
    pub async fn repair_addresses(&self) -> Result<(), Status> {
        let view = self.view();
        let Some(services) = self.table.find("", "v1", "services") else { return Ok(()) };
        let prefix = stored::prefix(services);
        for (_, entry) in view.snapshot.range(prefix.as_bytes(), None) {
            let Some(service) = stored::decode(services, entry) else { continue };
            for address in of(&service).filter(|address| !is_held(&view, *address)) {
                // Who else records it does so for the same Service.
                self.store
                    .commit(self.claim(Txn::default(), address, &service))
                    .await
                    .map_err(store_status)?;
            }
        }
        Ok(())
    }
}
