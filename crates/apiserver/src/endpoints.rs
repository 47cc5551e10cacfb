//! The endpoints of the `kubernetes` Service: every server of the cluster that lives.
//!
//! As upstream's `lease` reconciler: on a store that several servers share, each server keeps a key below
//! `masterleases` that ends with a lease of a few seconds, and each writes the addresses of all such keys. A store of
//! this process has one server, which needs no lease.

use crate::bootstrap::{change, ensure};
use crate::registry::{store_status, stored};
use crate::server::ApiServer;
use ferrite_api::Status;
use ferrite_json::{Value, json};
use ferrite_store::{Key, Op, Revision, Txn, WatchEnd, now_seconds};
use futures_util::future;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::time::Instant;

/// The way to maintain the endpoints of the `kubernetes` Service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum EndpointReconciler {
    /// Every server that lives, by its lease.
    #[default]
    Lease,
    /// Somebody else keeps them.
    None,
}

/// Where the keys of servers are, with upstream's name.
const LEASES: &str = "/registry/masterleases/";
/// As upstream: seconds after which a silent server leaves the endpoints.
const TTL: u64 = 15;
/// As upstream: interval between renewals of a server's lease.
const REFRESH: Duration = Duration::from_secs(10);
/// Servers that disagree about the port would overwrite one another as fast as they can.
const PAUSE: Duration = Duration::from_secs(1);
/// Time that a server that ends tries to remove itself.
const REMOVAL: Duration = Duration::from_secs(3);

const NAME: &str = "kubernetes";
const NAMESPACE: &str = "default";

/// The addresses whose keys exist: the last part of each key, whatever its value.
fn addresses<'a>(keys: impl Iterator<Item = &'a [u8]>) -> BTreeSet<IpAddr> {
    let last = |key: &'a [u8]| std::str::from_utf8(key.strip_prefix(LEASES.as_bytes())?).ok()?.parse().ok();
    keys.filter_map(last).collect()
}

/// The Endpoints of these servers. Addresses are in the order of their text, as upstream's.
fn endpoints(addresses: &BTreeSet<IpAddr>, port: u16) -> Value {
    let subsets = match addresses.is_empty() {
        true => json!([]),
        false => {
            let listed: Vec<Value> =
                texts(addresses.iter()).into_iter().map(|ip| json!({"ip": ip})).collect();
            json!([{"addresses": listed, "ports": [{"name": "https", "port": port, "protocol": "TCP"}]}])
        }
    };
    json!({
        "metadata": {"name": NAME, "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}},
        "subsets": subsets,
    })
}

/// The EndpointSlice of the same servers, as far as they are of the family of `own`.
fn slice(addresses: &BTreeSet<IpAddr>, own: SocketAddr) -> Value {
    let family = addresses.iter().filter(|address| address.is_ipv4() == own.is_ipv4());
    let endpoints: Vec<Value> = texts(family)
        .into_iter()
        .map(|address| json!({"addresses": [address], "conditions": {"ready": true}}))
        .collect();
    json!({
        "metadata": {"name": NAME, "labels": {"kubernetes.io/service-name": NAME}},
        "addressType": if own.is_ipv6() { "IPv6" } else { "IPv4" },
        "endpoints": endpoints,
        "ports": [{"name": "https", "port": own.port(), "protocol": "TCP"}],
    })
}

fn texts<'a>(addresses: impl Iterator<Item = &'a IpAddr>) -> Vec<String> {
    let mut texts: Vec<String> = addresses.map(ToString::to_string).collect();
    texts.sort_unstable();
    texts
}

/// Returns true if an object has all wanted members, and the wanted labels among its own.
fn is_as_wanted(object: &Value, wanted: &Value) -> bool {
    let labels = wanted.pointer("/metadata/labels").and_then(Value::as_object);
    let has_label = |(key, value): (&String, &Value)| object["metadata"]["labels"].get(key) == Some(value);
    let members = wanted.as_object().into_iter().flatten().filter(|(key, _)| *key != "metadata");
    labels.into_iter().flatten().all(|(key, value)| has_label((&key.to_string(), value)))
        && members.into_iter().all(|(key, value)| {
            object.get(key) == Some(value)
                || (object.get(key).is_none() && value.as_array().is_some_and(|a| a.is_empty()))
        })
}

/// Keeps the endpoints until the store closes. The caller ends it when the server stops.
pub(crate) async fn keep(server: &ApiServer) {
    let mut renewed = Instant::now();
    loop {
        // A server that ends has taken itself out; nobody puts it back.
        if server.is_draining() {
            return;
        }
        let seen = server.registry.store.snapshot().revision();
        let result = async {
            if is_leased(server) && (renewed.elapsed() >= REFRESH || !has_lease(server)) {
                let begin = Instant::now();
                renew(server).await?;
                renewed = begin;
            }
            write(server).await
        };
        match result.await {
            Ok(false) => {}
            // This server's own write is among the changes; the next check finds nothing to do.
            Ok(true) => tokio::time::sleep(PAUSE).await,
            Err(error) => {
                tracing::warn!(error = error.message, "cannot keep the endpoints of the kubernetes Service");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        }
        let refresh = async {
            match is_leased(server) {
                true => tokio::time::sleep_until(renewed + REFRESH).await,
                false => future::pending().await,
            }
        };
        tokio::select! {
            open = changed(server, seen) => if !open { return },
            () = refresh => {}
        }
    }
}

/// Makes this server one of the endpoints, and removes those that have ended.
pub(crate) async fn reconcile(server: &ApiServer) -> Result<(), Status> {
    if is_leased(server) {
        renew(server).await?;
    }
    write(server).await.map(drop)
}

/// Takes this server out of the endpoints, before it takes no more requests.
pub(crate) async fn remove(server: &ApiServer) {
    if !is_leased(server) {
        return;
    }
    let removal = async {
        let txn = Txn::default().then(Op::Delete { key: lease_key(server) });
        server.registry.store.commit(txn).await.map_err(store_status)?;
        write(server).await
    };
    if let Ok(Err(error)) = tokio::time::timeout(REMOVAL, removal).await {
        tracing::warn!(error = error.message, "this server stays in the endpoints until its lease ends");
    }
}

fn is_kept(server: &ApiServer) -> bool {
    // Endpoints may not be loopback addresses: nobody but this machine could use them.
    server.config.endpoint_reconciler == EndpointReconciler::Lease
        && !server.config.advertise.ip().is_loopback()
}

/// Returns true if other servers may exist.
fn is_leased(server: &ApiServer) -> bool {
    is_kept(server) && server.registry.store.is_remote()
}

fn lease_key(server: &ApiServer) -> Key {
    Key::from(&format!("{LEASES}{}", server.config.advertise.ip()))
}

fn has_lease(server: &ApiServer) -> bool {
    server.registry.store.snapshot().get(lease_key(server).as_bytes()).is_some()
}

/// Puts the server's key under a new lease. The old one ends with nothing attached to it.
async fn renew(server: &ApiServer) -> Result<(), Status> {
    let store = &server.registry.store;
    let lease = store.grant(now_seconds() + TTL).await.map_err(store_status)?;
    let address = server.config.advertise.ip().to_string();
    let value = json!({
        "kind": "Endpoints", "apiVersion": "v1", "metadata": {"name": address},
        "subsets": [{"addresses": [{"ip": address}]}],
    });
    let put = Op::Put { key: lease_key(server), value: value.to_string().into(), lease };
    store.commit(Txn::default().then(put)).await.map(drop).map_err(store_status)
}

/// Writes the objects if they are not as they should be. Returns whether it wrote.
async fn write(server: &ApiServer) -> Result<bool, Status> {
    if !is_kept(server) {
        return Ok(false);
    }
    let own = server.config.advertise;
    let living = match server.registry.store.is_remote() {
        true => {
            let snapshot = server.registry.store.latest().await.map_err(store_status)?;
            addresses(snapshot.range(LEASES.as_bytes(), None).map(|(key, _)| key.as_bytes()))
        }
        false => BTreeSet::from([own.ip()]),
    };
    let wrote = write_one(server, "", "endpoints", endpoints(&living, own.port())).await?;
    Ok(write_one(server, "discovery.k8s.io", "endpointslices", slice(&living, own)).await? || wrote)
}

async fn write_one(server: &ApiServer, group: &str, plural: &str, wanted: Value) -> Result<bool, Status> {
    let resource = server.registry.table.find(group, "v1", plural).ok_or_else(Status::no_such_path)?;
    match server.registry.read(resource, NAMESPACE, NAME) {
        Ok(object) if is_as_wanted(&object, &wanted) => return Ok(false),
        Ok(_) => {}
        Err(status) if status.code == 404 => ensure(server, group, plural, NAMESPACE, wanted.clone()).await?,
        Err(status) => return Err(status),
    }
    let bring = |old: &Value| {
        let mut new = old.clone();
        for (key, value) in wanted.as_object().into_iter().flatten().filter(|(key, _)| *key != "metadata") {
            new[key] = value.clone();
        }
        for (key, value) in wanted["metadata"]["labels"].as_object().into_iter().flatten() {
            new["metadata"]["labels"][key] = value.clone();
        }
        Ok(new)
    };
    change(server, resource, (NAMESPACE, NAME), None, &bring).await?;
    Ok(true)
}

/// Waits until a lease or one of the objects changes after `seen`. Returns whether the store is still open.
async fn changed(server: &ApiServer, seen: Revision) -> bool {
    let objects = [("", "endpoints"), ("discovery.k8s.io", "endpointslices")];
    let keys = objects.iter().filter_map(|(group, plural)| {
        let resource = server.registry.table.find(group, "v1", plural)?;
        Some(stored::key(resource, NAMESPACE, NAME).as_bytes().to_vec())
    });
    let waits = keys.chain([LEASES.as_bytes().to_vec()]).map(|prefix| {
        Box::pin(async move {
            match server.registry.store.watch(&prefix, seen) {
                Ok(mut watch) => !matches!(watch.next().await, Err(WatchEnd::Closed)),
                Err(end) => !matches!(end, WatchEnd::Closed),
            }
        })
    });
    future::select_all(waits).await.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(texts: &[&str]) -> BTreeSet<IpAddr> {
        texts.iter().map(|text| text.parse().expect("an address")).collect()
    }

    #[test]
    fn servers_are_known_by_their_keys() {
        for (keys, want) in [
            (&[][..], &[][..]),
            (
                &["/registry/masterleases/10.0.0.2", "/registry/masterleases/10.0.0.1"],
                &["10.0.0.1", "10.0.0.2"],
            ),
            (&["/registry/masterleases/fd00::1"], &["fd00::1"]),
            (&["/registry/masterleases/", "/registry/masterleases/x", "/registry/pods/10.0.0.1"], &[]),
        ] {
            assert_eq!(addresses(keys.iter().map(|key| key.as_bytes())), set(want), "{keys:?}");
        }
    }

    #[test]
    fn objects_name_every_server_in_the_order_of_text() {
        let servers = set(&["10.0.0.9", "10.0.0.10", "fd00::1"]);
        let made = endpoints(&servers, 6443);
        assert_eq!(
            made["subsets"][0]["addresses"],
            json!([{"ip": "10.0.0.10"}, {"ip": "10.0.0.9"}, {"ip": "fd00::1"}])
        );
        assert_eq!(made["subsets"][0]["ports"], json!([{"name": "https", "port": 6443, "protocol": "TCP"}]));
        let made = slice(&servers, "10.0.0.9:6443".parse().expect("an address"));
        assert_eq!(made["addressType"], "IPv4");
        let listed: Vec<&Value> =
            made["endpoints"].as_array().expect("a list").iter().map(|e| &e["addresses"][0]).collect();
        assert_eq!(listed, [&json!("10.0.0.10"), &json!("10.0.0.9")], "one family");
        assert_eq!(endpoints(&set(&[]), 1)["subsets"], json!([]), "the last server left");
    }

    #[test]
    fn an_object_is_rewritten_only_where_it_differs() {
        let wanted = endpoints(&set(&["10.0.0.1"]), 6443);
        let with = |change: fn(&mut Value)| {
            let mut object = wanted.clone();
            object["metadata"]["uid"] = "u".into();
            change(&mut object);
            object
        };
        for (what, object, fine) in [
            ("as written", with(|_| {}), true),
            ("another label", with(|o| o["metadata"]["labels"]["a"] = "b".into()), true),
            ("its label lost", with(|o| o["metadata"]["labels"] = json!({})), false),
            ("another address", with(|o| o["subsets"][0]["addresses"] = json!([{"ip": "10.0.0.2"}])), false),
            ("another port", with(|o| o["subsets"][0]["ports"][0]["port"] = json!(1)), false),
            ("nothing left", with(|o| o["subsets"] = json!([])), false),
        ] {
            assert_eq!(is_as_wanted(&object, &wanted), fine, "{what}");
        }
        assert!(
            is_as_wanted(
                &json!({"metadata": {"labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}}}),
                &endpoints(&set(&[]), 1)
            ),
            "no subsets at all"
        );
    }
}
